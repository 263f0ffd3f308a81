"""Rows of one map as rows of another one, whose layout or size may differ.

`datapath.upgrade` moves a node's rows by it. Never interprets a row, but for the age of a flow: fields are carried by
name, according to the kernel's BTF of both maps. A field that the target lacks is left behind; one that the source
lacks is zero.
"""

import sys
from collections.abc import Callable, Iterable, Sequence

import msgspec

from podwire.kernel import bpf
from podwire.kernel.bpf import Member
from podwire.model.errors import Unsupported


class Piece(msgspec.Struct, frozen=True):
    """Bytes that go from one place of the old row to one of the new."""

    source: int
    target: int
    size: int


class Conversion(msgspec.Struct, frozen=True):
    """How rows of one layout become rows of another."""

    size: int
    pieces: tuple[Piece, ...]
    identical: bool

    def apply(self, row: bytes) -> bytes:
        """Convert one row."""
        if self.identical:
            return row
        fresh = bytearray(self.size)
        for piece in self.pieces:
            fresh[piece.target : piece.target + piece.size] = row[
                piece.source : piece.source + piece.size
            ]
        return bytes(fresh)


def plan_conversion(
    old: Sequence[Member], old_size: int, new: Sequence[Member], new_size: int
) -> Conversion:
    """Compute how rows are converted, by the names of their members; sizes in bytes.

    A number may grow or shrink (host order is little-endian on every supported machine, and what does not fit is
    cut); members without a partner are dropped or zero. Padding is never carried.
    """
    if not old and not new:
        size = min(old_size, new_size)
        return Conversion(new_size, (Piece(0, 0, size),), old_size == new_size)
    known = {member.name: member for member in old}
    pieces = tuple(
        Piece(known[member.name].offset, member.offset, min(known[member.name].size, member.size))
        for member in new
        if member.name in known and not member.name.startswith("pad")
    )
    identical = tuple(old) == tuple(new) and old_size == new_size
    return Conversion(new_size, _join(pieces), identical)


def _join(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Merge pieces that stand side by side in both rows: most layouts differ in one place only."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.target):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.source + last.size == piece.source
            and last.target + last.size == piece.target
        ):
            joined[-1] = Piece(last.source, last.target, last.size + piece.size)
        else:
            joined.append(piece)
    return tuple(joined)


def _conversion(old: bpf.Map, new: bpf.Map, *, of_value: bool) -> Conversion:
    old_layout = bpf.read_layout(old, of_value=of_value)
    new_layout = bpf.read_layout(new, of_value=of_value)
    old_size = old.info.value_size if of_value else old.info.key_size
    new_size = new.info.value_size if of_value else new.info.key_size
    if old_layout is None or new_layout is None:
        if old_size != new_size:
            raise Unsupported(
                f"carry rows of {old.name!r} over: the kernel does not know their layout",
                hint="the map was made without BTF; restart the node's pods to start anew",
            )
        return Conversion(new_size, (), True)
    return plan_conversion(old_layout, old_size, new_layout, new_size)


def carry_rows(old: bpf.Map, new: bpf.Map, *, replace: bool) -> int:
    """Write the rows of `old` into `new`, converted; give their number.

    Without `replace` a row that `new` already has under the key stays: it is younger.
    """
    key_of, value_of = (_conversion(old, new, of_value=of_value) for of_value in (False, True))
    rows = [(key_of.apply(key), value_of.apply(value)) for key, value in old.items()]
    if not replace and new.info.type != bpf.MapType.ARRAY:
        # Not by NOEXIST: a batch stops at the first row that exists.
        present = {key for key, _ in new.items()}
        rows = [row for row in rows if row[0] not in present]
    if new.info.type == bpf.MapType.LRU_HASH:
        # What was written first is pushed out first, and a hash gives its rows in no order: a question that waits for
        # its answer would go before others that were answered long ago.
        rows.sort(key=_age_order(new))
    new.update_batch(rows)
    return len(rows)


def _age_order(map_: bpf.Map) -> Callable[[tuple[bytes, bytes]], int]:
    """Give what sorts rows of flows so that the one that was silent for longest comes first."""
    for member in bpf.read_layout(map_, of_value=True) or ():
        if member.name == "last_seen_ns":
            place = slice(member.offset, member.offset + member.size)
            return lambda row: int.from_bytes(row[1][place], sys.byteorder)
    return lambda _row: 0
