"""The maps of policy: slots of entries, local identities of CIDRs, hits of rules.

Called by `datapath.node` under the node's turn; `read_entries`, `read_hits` and the counts also by readers on other
threads. Never decides what an entry says, never looks at a slot's owner. Invariant: `pw_policy` holds nothing that
`PolicyTable` does not know of. A key is noted before it is written and forgotten after it is deleted, so a failure in
between leaves the count too high, never too low, and repeating the operation corrects it.
"""

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from podwire.datapath import abi
from podwire.datapath.maps import (
    NodeMaps,
    change_endpoint,
    from_prefix_key,
    sum_counters,
    to_prefix_key,
)
from podwire.kernel import bpf
from podwire.model.endpoint import EndpointRecord, IPNetwork
from podwire.model.errors import Bug, PolicyOverflow
from podwire.model.interfaces import EndpointConfig
from podwire.model.policy import Direction, PolicyEntry, PolicyKey, PolicyRows, Verdict

DIRECTION_BITS: Final = 72
"""Bits of a key that covers every protocol: slot, identity, direction."""
PROTOCOL_BITS: Final = 80
PORT_BITS: Final = 16
NO_IDENTITY: Final = 0
_SLOT_BYTES: Final = slice(4, 8)
"""Where a key has its slot: the count at the start reads nothing else of many rows."""
_MAPPED_NETWORK: Final = ipaddress.IPv6Network("::ffff:0:0/96")
_ALL_MAPPED: Final = to_prefix_key(_MAPPED_NETWORK)


class EntryRow(msgspec.Struct, frozen=True):
    """One row of `pw_policy`, for people."""

    slot: int
    key: PolicyKey
    entry: PolicyEntry


def pack_key(slot: int, key: PolicyKey) -> bytes:
    """Give the bytes of a key; raises Bug for one that the trie would not keep apart from another."""
    if key.protocol:
        bits = PROTOCOL_BITS + key.port_bits
        # The trie ignores bits beyond the prefix, so two keys that differ only there are one row to it.
        well_formed = key.port_bits <= PORT_BITS and not key.port & 0xFFFF >> key.port_bits
    else:
        bits = DIRECTION_BITS
        well_formed = not key.port and not key.port_bits
    if not well_formed:
        raise Bug(f"write policy entry {key}: its port has bits beyond its prefix")
    return abi.PolicyKey(bits, slot, key.identity, key.direction, key.protocol, key.port).pack()


def unpack_key(raw: bytes) -> tuple[int, PolicyKey]:
    """Read a key: slot, and what it covers."""
    key = abi.PolicyKey.unpack(raw)
    port_bits = max(key.prefix_bits - PROTOCOL_BITS, 0)
    return key.slot, PolicyKey(
        key.identity, Direction(key.direction), key.protocol, key.port, port_bits
    )


def pack_entry(raw_key: bytes, entry: PolicyEntry) -> bytes:
    """Give the bytes of the entry for a key."""
    return abi.PolicyValue(entry.precedence, entry.rule, entry.verdict, 0, raw_key[0]).pack()


def unpack_entry(raw: bytes) -> PolicyEntry:
    """Read an entry."""
    value = abi.PolicyValue.unpack(raw)
    return PolicyEntry(Verdict(value.verdict), value.precedence, value.rule)


class PolicyTable:
    """What policy has in the maps, and the way to change it (`model.interfaces.PolicyDatapath`).

    Not thread-safe; the counts may be read.
    """

    def __init__(self, maps: NodeMaps, capacity: int) -> None:
        self._maps = maps
        self._entries = maps.pw_policy
        self._cidrs = maps.pw_cidrs
        self._capacity = capacity
        self._keys: dict[int, set[bytes]] = {}
        # What a killed agent left is counted as well: capacity is a promise about the map, not about this process.
        for key, _ in self._entries.items():
            self._keys.setdefault(int.from_bytes(key[_SLOT_BYTES], "little"), set()).add(key)
        self.used = sum(map(len, self._keys.values()))
        """Rows that `pw_policy` may hold at present."""
        self._cidr_rows = dict(self._cidrs.items())
        self._cidr_wish: Mapping[IPNetwork, int] | None = None

    @property
    def capacity(self) -> int:
        """Rows that may be used: the setting, as far as the map has room (a row is replaced beside its old one)."""
        return min(self._capacity, self._entries.info.max_entries - 1)

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        """Take effect at once: the map's memory grows with its rows."""
        self._capacity = capacity

    @property
    def fill(self) -> tuple[int, int]:
        """Give how many policy entries are in use, and how many may be."""
        return self.used, self.capacity

    def write_slot(self, slot: int, rows: PolicyRows) -> None:
        """Fill a slot that no row names; what it held before is gone afterwards."""
        fresh = _pack_rows(slot, rows)
        # What an earlier attempt left under this number would be enforced as well.
        superfluous = list(self._keys.get(slot, set()) - fresh.keys())
        self._put(slot, fresh)
        self._delete(slot, superfluous)

    def change_slot(self, slot: int, put: PolicyRows, remove: Iterable[PolicyKey]) -> None:
        """Write `put`, then delete `remove`, each in the order given; both have to fit side by side."""
        fresh = _pack_rows(slot, put)
        gone = dict.fromkeys(pack_key(slot, key) for key in remove)
        if both := gone.keys() & fresh.keys():
            raise Bug(f"change slot {slot}: {len(both)} entries are both put and removed")
        self._put(slot, fresh)
        self._delete(slot, gone)

    def remove_slots(self, slots: Iterable[int]) -> None:
        """Delete the entries of slots that no row names any more, when no program can still be reading them.

        Without slots it only waits for that.
        """
        # A program that copied an endpoint's row before the flip may still look the old slot up.
        wait_for_programs()
        for slot in slots:
            self._delete(slot, list(self._keys.get(slot, ())))

    def read_slot(self, slot: int) -> PolicyRows:
        """Read a slot's entries from the map."""
        rows = {}
        for key in sorted(self._keys.get(slot, ())):
            raw = self._entries.lookup(key)
            # A look-up matches the longest prefix: without the row itself it gives a shorter one's.
            if raw is not None and abi.PolicyValue.unpack(raw).prefix_bits == key[0]:
                rows[unpack_key(key)[1]] = unpack_entry(raw)
        return rows

    def list_slots(self) -> Sequence[int]:
        """Give the numbers of the slots that have entries, in order."""
        return sorted(self._keys)

    def _put(self, slot: int, fresh: Mapping[bytes, bytes]) -> None:
        present = self._keys.get(slot, set())
        added = len(fresh.keys() - present)
        if added and self.used + added > self.capacity:
            raise PolicyOverflow(
                f"write {added} new entries of policy slot {slot}: {self.used} of"
                f" {self.capacity} are in use",
                hint="write fewer or broader rules, or raise `policy_entries`",
            )
        if not fresh:
            return
        # Noted before it is done: a batch that fails half way leaves rows that have to be found again.
        self._keys.setdefault(slot, set()).update(fresh)
        self.used += added
        self._entries.update_batch(list(fresh.items()))

    def _delete(self, slot: int, keys: Iterable[bytes]) -> None:
        present = self._keys.get(slot, set())
        gone = [key for key in keys if key in present]
        self._entries.delete_batch(gone)
        present.difference_update(gone)
        self.used -= len(gone)
        if not present:
            self._keys.pop(slot, None)

    def write_cidrs(self, identities: Mapping[IPNetwork, int]) -> None:
        """Make `pw_cidrs` hold exactly these: what is missing is written before what is too much goes."""
        # Nearly every change of a policy leaves the prefixes as they are.
        if identities == self._cidr_wish:
            return
        wanted = _pack_cidrs(identities)
        present = self._cidr_rows
        room = self._cidrs.info.max_entries - 1
        if len(present.keys() | wanted.keys()) > room:
            raise PolicyOverflow(
                f"write {len(wanted)} CIDRs of policies: {len(present)} of {room} are in use",
                hint="name fewer prefixes in policies and CIDR groups",
            )
        # Until both batches are done, what is in force is no known state, and the next call must not take a short
        # cut.
        self._cidr_wish = None
        self._cidrs.update_batch([row for row in wanted.items() if row not in present.items()])
        self._cidr_rows = {**present, **wanted}
        self._cidrs.delete_batch(key for key in present if key not in wanted)
        self._cidr_rows = wanted
        self._cidr_wish = dict(identities)

    def update_endpoints(self, rows: Iterable[tuple[EndpointRecord, EndpointConfig]]) -> None:
        """Turn the rows of live endpoints over, each in place under its lock."""
        for record, config in rows:
            change_endpoint(self._maps, record, config)

    def forget_hits(self, keep: Iterable[int]) -> None:
        """Drop the counts of rules that are not in `keep`."""
        kept = {rule.to_bytes(4, "little") for rule in keep}
        hits = self._maps.pw_hits
        hits.delete_batch([key for key, _ in hits.items() if key not in kept])


def _pack_rows(slot: int, rows: PolicyRows) -> dict[bytes, bytes]:
    packed = ((pack_key(slot, key), entry) for key, entry in rows.items())
    return {raw_key: pack_entry(raw_key, entry) for raw_key, entry in packed}


def _pack_cidrs(identities: Mapping[IPNetwork, int]) -> dict[bytes, bytes]:
    """Give the rows of prefixes. The map holds IPv4 inside ::ffff:0:0/96: no IPv6 prefix may reach or name it."""
    rows = {}
    around = False
    for network, identity in identities.items():
        key = to_prefix_key(network)
        if isinstance(network, ipaddress.IPv6Network):
            if network.subnet_of(_MAPPED_NETWORK):
                continue
            around |= _MAPPED_NETWORK.subnet_of(network)
        rows[key] = identity.to_bytes(4, "little")
    if around:
        # An IPv6 prefix around ::ffff:0:0/96, such as ::/0, would match IPv4 addresses: a row of no identity stops it
        # there.
        rows.setdefault(_ALL_MAPPED, NO_IDENTITY.to_bytes(4, "little"))
    return rows


def wait_for_programs() -> None:
    """Return when every program that runs now has ended: none holds a row that was replaced before (rule 17)."""
    if not bpf.membarrier_global():
        wait_by_update()


def wait_by_update() -> None:
    """Wait likewise where the kernel has no such barrier: the update of a map of maps returns after the same wait."""
    with (
        _create_fence(bpf.MapType.ARRAY) as inner,
        _create_fence(bpf.MapType.ARRAY_OF_MAPS, inner) as outer,
    ):
        # kernel/bpf/syscall.c:maybe_wait_bpf_programs waits for RCU after the update of a map of maps.
        outer.update_fd(bytes(4), inner.fd)


def _create_fence(kind: bpf.MapType, inner: bpf.Map | None = None) -> bpf.Map:
    return bpf.create_map(kind, "pw_fence", key_size=4, value_size=4, max_entries=1, inner=inner)


def read_entries(maps: NodeMaps) -> Iterator[EntryRow]:
    """Walk the entries of all slots."""
    for key, raw in maps.pw_policy.items():
        slot, covered = unpack_key(key)
        yield EntryRow(slot, covered, unpack_entry(raw))


def read_cidrs(maps: NodeMaps) -> Iterator[tuple[IPNetwork, int]]:
    """Walk the prefixes that rules name, with their identities."""
    for key, raw in maps.pw_cidrs.items():
        identity = int.from_bytes(raw, "little")
        if identity != NO_IDENTITY:
            yield from_prefix_key(key), identity


def read_hits(maps: NodeMaps) -> dict[int, tuple[int, int]]:
    """Give, for each rule that has decided, (judgements, bytes of the packets they were about).

    A flow's first packet is judged, and each packet that is denied; what passes on an open flow is counted there.
    """
    return {
        int.from_bytes(key, "little"): sum_counters(maps.pw_hits, raw)
        for key, raw in maps.pw_hits.items()
    }
