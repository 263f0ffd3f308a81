"""IPBlock and IPAddress documents: which node has a block, and which attachment has a singly claimed address.

Written by `control.ipam.claiming.claims`, read by every module that follows blocks. Pure. An object is named after
what it claims, so creating the object is the claim: an object exists only once. Invariant: what was written is read
back the same. Nothing of a document that cannot be read is used.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from podwire.control.ipam.pools import AddressRange
from podwire.model.documents.lenient import members_of, text_of
from podwire.model.endpoint import AttachmentKey, IPAddress, IPNetwork
from podwire.model.ids import ContainerId, InterfaceName, NetworkName
from podwire.model.networks import read_address, read_network
from podwire.model.store import ObjectKey, StoredObject, value_of
from podwire.model.store.kinds import IP_ADDRESS, IP_BLOCK, Kind

KEPT_SHARE: Final = 16
"""One address in this many of a block is kept for claims of single addresses, which other nodes make too."""


class Block(msgspec.Struct, frozen=True):
    """One block. `node` "": nobody's; the object stays, so that the next claim has a higher epoch."""

    cidr: IPNetwork
    pool: str
    node: str
    epoch: int
    kept: tuple[AddressRange, ...] = ()
    """What not even the owner gives without claiming the address by an object."""
    stored: StoredObject | None = None
    """As the store has it; None when it is only remembered."""

    @property
    def revision(self) -> int:
        """Of the store, 0 when it is only remembered."""
        return self.stored.revision if self.stored is not None else 0

    def keeps(self, address: IPAddress) -> bool:
        """Tell whether an address needs an object of its own."""
        return any(range_.contains(address) for range_ in self.kept)

    def kept_addresses(self) -> list[IPAddress]:
        """List what is kept."""
        return [address for range_ in self.kept for address in addresses_of(range_)]


class ClaimedAddress(msgspec.Struct, frozen=True):
    """One address that an object claims: borrowed, or asked for."""

    address: IPAddress
    pool: str
    node: str
    key: AttachmentKey
    """Whose it is."""
    stored: StoredObject | None = None


def addresses_of(part: AddressRange) -> list[IPAddress]:
    """List the addresses of a range inside one block."""
    kind = type(part.first)
    return [kind(number) for number in range(int(part.first), int(part.last) + 1)]


def choose_kept(
    cidr: IPNetwork,
    reserved: Sequence[AddressRange],
    *,
    lends: bool,
    busy: Collection[IPAddress] = (),
) -> tuple[AddressRange, ...]:
    """Choose what a block keeps: what the pool reserves of it and, if it lends, one of KEPT_SHARE at its end.

    What is `busy` it does not keep: its owner has given it already.
    """
    kind = type(cidr.network_address)
    last = int(cidr.broadcast_address)
    kept = [
        AddressRange(
            kind(max(int(range_.first), int(cidr.network_address))),
            kind(min(int(range_.last), int(cidr.broadcast_address))),
        )
        for range_ in reserved
        if range_.overlaps(cidr)
    ]
    count = cidr.num_addresses // KEPT_SHARE
    if lends and count:
        # At the end, because fresh addresses are given from the beginning: pods rarely have what is to be kept.
        kept.append(AddressRange(kind(last - count + 1), kind(last)))
    return tuple(part for range_ in kept for part in _leave_out(range_, busy))


def _leave_out(part: AddressRange, busy: Collection[IPAddress]) -> Iterator[AddressRange]:
    """Give the parts of a range between addresses."""
    kind, first = type(part.first), int(part.first)
    for gap in sorted(int(address) for address in busy if part.contains(address)):
        if first < gap:
            yield AddressRange(kind(first), kind(gap - 1))
        first = gap + 1
    if first <= int(part.last):
        yield AddressRange(kind(first), part.last)


def block_key(cidr: IPNetwork) -> ObjectKey:
    """Give the key of a block's object."""
    return ObjectKey(IP_BLOCK.plural, "", _name(str(cidr)))


def address_key(address: IPAddress) -> ObjectKey:
    """Give the key of an address's object."""
    return ObjectKey(IP_ADDRESS.plural, "", _name(str(address)))


def _name(text: str) -> str:
    return "".join("-" if letter in ".:/" else letter for letter in text).strip("-")


def encode_block(block: Block) -> dict[str, Any]:
    """Write a block's document."""
    spec = {
        "cidr": str(block.cidr),
        "pool": block.pool,
        "node": block.node,
        "epoch": block.epoch,
        "kept": [str(range_) for range_ in block.kept],
    }
    return _document(IP_BLOCK, block_key(block.cidr).name, spec)


def encode_claimed(claimed: ClaimedAddress) -> dict[str, Any]:
    """Write an address's document."""
    key = claimed.key
    spec = {
        "address": str(claimed.address),
        "pool": claimed.pool,
        "node": claimed.node,
        "handle": {
            "network": key.network,
            "containerID": key.container_id,
            "interface": key.if_name,
        },
    }
    return _document(IP_ADDRESS, address_key(claimed.address).name, spec)


def decode_block(stored: StoredObject) -> Block | None:
    """Read a block; None when this is none."""
    if (known := value_of(stored, Block)) is not None:
        return known
    spec = members_of(stored.document, "spec")
    try:
        cidr = read_network(str(spec.get("cidr")))
        epoch = spec.get("epoch", 0)
        kept = tuple(_read_range(str(text)) for text in spec.get("kept") or ())
    except (ValueError, TypeError):
        return None
    # The name is the claim. An object whose content says another range claims nothing that can be relied on.
    if block_key(cidr) != stored.key or not isinstance(epoch, int) or epoch < 0:
        return None
    if not all(_is_inside(range_, cidr) for range_ in kept):
        return None
    if not isinstance(spec.get("node"), str):
        return None  # nobody's block has the name "": one without is damaged, and may be somebody's
    return Block(cidr, text_of(spec, "pool"), text_of(spec, "node"), epoch, kept, stored)


def decode_claimed(stored: StoredObject) -> ClaimedAddress | None:
    """Read a claimed address; None when this is none."""
    if (known := value_of(stored, ClaimedAddress)) is not None:
        return known
    spec = members_of(stored.document, "spec")
    handle = members_of(spec, "handle")
    try:
        address = read_address(str(spec.get("address")))
    except ValueError:
        return None
    if address_key(address) != stored.key:
        return None
    key = AttachmentKey(
        NetworkName(text_of(handle, "network")),
        ContainerId(text_of(handle, "containerID")),
        InterfaceName(text_of(handle, "interface")),
    )
    return ClaimedAddress(address, text_of(spec, "pool"), text_of(spec, "node"), key, stored)


def released(block: Block) -> Block:
    """Give a block as nobody's."""
    return replace(block, node="", kept=())


def rewrite(before: StoredObject, document: Mapping[str, Any]) -> StoredObject:
    """Give the object with another document, to be written only if nobody has written it since."""
    return StoredObject(key=before.key, uid=before.uid, revision=before.revision, document=document)


def _document(kind: Kind, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    header = {"apiVersion": kind.api_versions[0], "kind": kind.name}
    return {**header, "metadata": {"name": name}, "spec": spec}


def _is_inside(part: AddressRange, cidr: IPNetwork) -> bool:
    """Tell whether a range is one, and part of a block: what a block keeps is listed address by address."""
    return part.first in cidr and part.last in cidr and int(part.first) <= int(part.last)


def _read_range(text: str) -> AddressRange:
    first, _, last = text.partition("-")
    return AddressRange(read_address(first), read_address(last or first))
