"""A datapath of policy in memory: it keeps entries, and answers a packet's question exactly as the programs do.

Every element of a call is a step of its own; `watch` is called after each, so that a test can ask between any two.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from podwire.control.policy.engine import PolicyEngine
from podwire.control.policy.resolve.rule_numbers import Numbers
from podwire.model.endpoint import EndpointRecord, IPAddress, IPNetwork
from podwire.model.errors import KernelFailure, PodwireError, PolicyOverflow
from podwire.model.ids import EndpointId
from podwire.model.interfaces import EndpointConfig
from podwire.model.policy import (
    ANY_IDENTITY,
    CIDR_WORLD_BIT,
    Direction,
    PolicyEntry,
    PolicyKey,
    PolicyRows,
    Verdict,
)

WORLD = 2


@dataclass(frozen=True)
class Packet:
    """A question to the datapath."""

    direction: Direction
    peer: int
    protocol: int
    port: int
    address: IPAddress | None = None


@dataclass
class FakePolicyDatapath:
    """Dictionaries in place of maps. `capacity`: entries of all slots together; `fail`: method -> error of its next
    call, before anything is done; `fail_after`: elements of any call until a KernelFailure in its midst."""

    slots: dict[int, PolicyRows] = field(default_factory=dict)
    cidrs: dict[IPNetwork, int] = field(default_factory=dict)
    rows: dict[EndpointId, EndpointConfig] = field(default_factory=dict)
    hits: set[int] = field(default_factory=set)
    """Rules that have counts."""
    capacity: int = 1 << 30
    cidr_capacity: int = 1 << 30
    fail: dict[str, PodwireError] = field(default_factory=dict)
    fail_after: int | None = None
    watch: Callable[[], None] = lambda: None
    fence: Callable[[], None] = lambda: None
    """Called when every program that was at work has ended."""
    calls: list[tuple[str, int]] = field(default_factory=list)
    """Method and slot (0 = none), in order."""
    _index: dict[tuple[int, ...], PolicyEntry] = field(default_factory=dict)
    """The entries again, under what is quickly compared."""
    _found: dict[int, dict[tuple[int, ...], PolicyEntry | None]] = field(default_factory=dict)
    """By slot: what was found since it changed last."""

    def write_slot(self, slot: int, rows: PolicyRows) -> None:
        self._begin("write_slot", slot)
        assert slot not in self.slots, "a slot number is used once"
        assert slot > 0
        self._check_room(len(rows))
        self.slots[slot] = {}
        for key, entry in rows.items():
            self._put(slot, key, entry)

    def change_slot(self, slot: int, put: PolicyRows, remove: Iterable[PolicyKey]) -> None:
        self._begin("change_slot", slot)
        held = self.slots.setdefault(slot, {})
        self._check_room(sum(key not in held for key in put))
        for key, entry in put.items():
            self._put(slot, key, entry)
        for key in remove:
            self._remove(slot, key)

    def remove_slots(self, slots: Iterable[int]) -> None:
        self._begin("remove_slots", 0)
        self.fence()
        for slot in slots:
            assert all(row.slot != slot for row in self.rows.values()), "a row names the slot"
            for key in list(self.slots.get(slot, ())):
                self._remove(slot, key)
            self.slots.pop(slot, None)

    def read_slot(self, slot: int) -> PolicyRows:
        self._begin("read_slot", slot)
        return dict(self.slots.get(slot, {}))

    def list_slots(self) -> Sequence[int]:
        return [slot for slot, rows in self.slots.items() if rows]

    def write_cidrs(self, identities: Mapping[IPNetwork, int]) -> None:
        self._begin("write_cidrs", 0)
        if len(self.cidrs.keys() | identities.keys()) > self.cidr_capacity:
            raise PolicyOverflow(f"write CIDRs: the map has room for {self.cidr_capacity}")
        for network, number in identities.items():
            assert self.cidrs.get(network, number) == number, "a number changes while it is in use"
            self._step()
            self.cidrs[network] = number
        for network in self.cidrs.keys() - identities.keys():
            self._step()
            del self.cidrs[network]

    def forget_hits(self, keep: Iterable[int]) -> None:
        self._begin("forget_hits", 0)
        self.hits &= set(keep)

    def update_endpoints(self, rows: Iterable[tuple[EndpointRecord, EndpointConfig]]) -> None:
        self._begin("update_endpoints", 0)
        for record, config in rows:
            self._step()
            self.rows[record.id] = config

    def decide(self, row: EndpointConfig, packet: Packet) -> Verdict:
        """Give what the programs decide on a packet of the endpoint with this row."""
        return self.finish(row, packet, self.families(row, packet))

    def finish(self, row: EndpointConfig, packet: Packet, families: tuple[int, ...]) -> Verdict:
        """Give what a program decides that has read the row and the map of CIDRs a while ago."""
        found = self.find(row, packet, families)
        if found is not None:
            return found.verdict
        inwards = packet.direction is Direction.INGRESS
        return Verdict.DENY if (row.deny_ingress if inwards else row.deny_egress) else Verdict.ALLOW

    def find(
        self, row: EndpointConfig, packet: Packet, families: tuple[int, ...]
    ) -> PolicyEntry | None:
        """Give the entry that decides: highest precedence, then deny, then the earlier family."""
        best: PolicyEntry | None = None
        for identity in families:
            entry = self._longest(row.slot, identity, packet)
            if entry is not None and (best is None or _strength(entry) > _strength(best)):
                best = entry
        return best

    def count(self) -> int:
        """Give how many entries there are."""
        return sum(map(len, self.slots.values()))

    def families(self, row: EndpointConfig, packet: Packet) -> tuple[int, ...]:
        """Give the identities that are looked up: the peer's, its address's, anybody's."""
        inwards = packet.direction is Direction.INGRESS
        families = [packet.peer]
        if (row.cidr_ingress if inwards else row.cidr_egress) and packet.address is not None:
            local = self._find_cidr(packet.address)
            if local is not None:
                families.append(local | CIDR_WORLD_BIT if packet.peer == WORLD else local)
        return (*families, ANY_IDENTITY)

    def _find_cidr(self, address: IPAddress) -> int | None:
        around = [cidr for cidr in self.cidrs if _contains(cidr, address)]
        return self.cidrs[max(around, key=lambda one: one.prefixlen)] if around else None

    def _longest(self, slot: int, identity: int, packet: Packet) -> PolicyEntry | None:
        found = self._found.setdefault(slot, {})
        question = identity, packet.direction.value, packet.protocol, packet.port
        if question not in found:
            found[question] = self._search((slot, *question[:2]), packet)
        return found[question]

    def _search(self, family: tuple[int, int, int], packet: Packet) -> PolicyEntry | None:
        for bits in range(16, -1, -1):
            port = packet.port >> (16 - bits) << (16 - bits)
            entry = self._index.get((*family, packet.protocol, port, bits))
            if entry is not None:
                return entry
        return self._index.get((*family, 0, 0, 0))

    def _put(self, slot: int, key: PolicyKey, entry: PolicyEntry) -> None:
        self._step()
        self._found.pop(slot, None)
        self.slots[slot][key] = entry
        self._index[slot, *_numbers(key)] = entry

    def _remove(self, slot: int, key: PolicyKey) -> None:
        self._step()
        self._found.pop(slot, None)
        self.slots[slot].pop(key, None)
        self._index.pop((slot, *_numbers(key)), None)

    def _begin(self, method: str, slot: int) -> None:
        self.calls.append((method, slot))
        if (error := self.fail.pop(method, None)) is not None:
            raise error

    def _check_room(self, more: int) -> None:
        if self.count() + more > self.capacity:
            raise PolicyOverflow(f"write {more} entries: the map has room for {self.capacity}")

    def _step(self) -> None:
        if self.fail_after is not None:
            if not self.fail_after:
                self.fail_after = None
                raise KernelFailure(5, "update map", "pw_policy")
            self.fail_after -= 1
        self.watch()


@lru_cache
def _contains(network: IPNetwork, address: IPAddress) -> bool:
    return address in network


def _strength(entry: PolicyEntry) -> tuple[int, int]:
    return entry.precedence, entry.verdict


def _numbers(key: PolicyKey) -> tuple[int, ...]:
    return key.identity, key.direction.value, key.protocol, key.port, key.port_bits


def make_engine() -> PolicyEngine:
    """Make an engine of a new node that has no endpoints."""
    return PolicyEngine(
        datapath=FakePolicyDatapath(),
        rows=lambda _ids, _values: [],
        numbers=Numbers(),
        remember=lambda _numbers: None,
        cidrs={},
    )
