"""One identity of this node's endpoints: the rules that apply to it, and the entries that result.

Owned by the engine, brought to the datapath by `realize.slots`. Pure. It has two states in one: what is wanted
(`families`), and, where the datapath has something else, what it has (`stale`). Invariant: the slot holds `families`,
except for `stale`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Final, Self

import msgspec

from podwire.control.policy.oracle import Enforcement
from podwire.control.policy.resolve.compile import Block, Blocks, Term, pack_key, unpack
from podwire.control.policy.resolve.repository import Part, PartChange, RuleInUse
from podwire.control.policy.rule import PolicyId
from podwire.model.errors import PodwireError
from podwire.model.identity import IdentityFacts, NamedPort, Reserved
from podwire.model.ids import EndpointId
from podwire.model.interfaces import EndpointConfig
from podwire.model.policy import (
    CIDR_IDENTITY_FIRST,
    Direction,
    PolicyEntry,
    PolicyRows,
)

ONE_BY_ONE_MAX: Final = 256
"""So many rules of one rule set are taken out or put in one after the other. Each costs as much as a family has terms,
so tens of thousands of them would take minutes; beyond it all families are made anew at once."""

NamedPortsOf = Callable[[int], tuple[NamedPort, ...]]
Families = dict[int, Block]


@dataclass(frozen=True, slots=True)
class PolicyValues:
    """What policy decides about the row of every endpoint of one identity."""

    identity: int
    slot: int = 0
    generation: int = 0
    deny_egress: bool = False
    deny_ingress: bool = False
    default_rule_egress: int = 0
    default_rule_ingress: int = 0
    cidr_egress: bool = False
    cidr_ingress: bool = False

    def fill(self, config: EndpointConfig) -> EndpointConfig:
        """Give `config` with these values; what policy does not decide (audit, host_allowed, trace) stays."""
        same = {name: getattr(self, name) for name in _NAMED_AS_IN_ROWS}
        return msgspec.structs.replace(config, policy_revision=self.generation, **same)

    @classmethod
    def read(cls, config: EndpointConfig) -> Self:
        """Give what policy decided about a row."""
        same = {name: getattr(config, name) for name in _NAMED_AS_IN_ROWS}
        return cls(generation=config.policy_revision, **same)

    def is_closed(self, direction: Direction) -> bool:
        """Tell whether what no entry covers is denied."""
        return self.deny_ingress if direction is Direction.INGRESS else self.deny_egress


_NAMED_AS_IN_ROWS: Final = tuple(
    field.name for field in fields(PolicyValues) if field.name != "generation"
)


class Subject:
    """One identity with endpoints here."""

    def __init__(self, facts: IdentityFacts, blocks: Blocks, named_ports_of: NamedPortsOf) -> None:
        self.facts = facts
        self.parts: dict[Part, None] = {}
        self.families: tuple[Families, Families] = ({}, {})
        self.stale: tuple[dict[int, Block | None], dict[int, Block | None]] = ({}, {})
        """By direction and identity: what the slot has in place of what `families` has."""
        self.live: set[EndpointId] = set()
        """Endpoints whose rows name this identity."""
        self.pending_endpoints: set[EndpointId] = set()
        """Endpoints that are going to."""
        self.values = PolicyValues(facts.number)
        """What the rows of all live endpoints hold."""
        self.target = self.values
        """What they should; another between a change of entries and the flip of all rows."""
        self.slot = 0
        """What holds the entries."""
        self.lingering: list[int] = []
        """While rows are not flipped: the former slots that one may still name, 0 when it is this one."""
        self.is_unsure = False
        """A change in place failed half-way: only a new slot is known to be right."""
        self.failure: PodwireError | None = None
        """Why what is wanted is not in force."""
        self._cidr_families = [0, 0]
        self._closing: tuple[dict[Part, None], dict[Part, None]] = ({}, {})
        self._blocks = blocks
        self._named_ports_of = named_ports_of

    @property
    def number(self) -> int:
        """Give the identity."""
        return self.facts.number

    @property
    def policies(self) -> tuple[PolicyId, ...]:
        """Give the policies that hold here, oldest first."""
        return tuple(dict.fromkeys(part.policy for part in self.parts))

    def wanted(self, enforcement: Enforcement, setting_rule: int) -> PolicyValues:
        """Give what rows must hold; slot and generation are those in force. `setting_rule`: the number of a denial by
        the setting alone."""
        always = enforcement is Enforcement.ALWAYS
        # As in Cilium: an endpoint whose labels are not known yet is closed by default.
        always |= enforcement is Enforcement.DEFAULT and self.number == Reserved.INIT
        closing = [next(iter(parts), None) for parts in self._closing]
        rules = [part.number if part else setting_rule if always else 0 for part in closing]
        closed = [always or part is not None for part in closing]
        return replace(
            self.values,
            deny_egress=closed[Direction.EGRESS],
            deny_ingress=closed[Direction.INGRESS],
            default_rule_egress=rules[Direction.EGRESS],
            default_rule_ingress=rules[Direction.INGRESS],
            cidr_egress=self._cidr_families[Direction.EGRESS] > 0,
            cidr_ingress=self._cidr_families[Direction.INGRESS] > 0,
        )

    def realized(self, direction: Direction, number: int) -> Block | None:
        """Give the family of entries that the slot has now."""
        stale = self.stale[direction]
        return stale[number] if number in stale else self.families[direction].get(number)

    def set_realized(self, direction: Direction, number: int, block: Block | None) -> None:
        """Note what the slot has now."""
        if self.families[direction].get(number) is block:
            self.stale[direction].pop(number, None)
        else:
            self.stale[direction][number] = block

    def rows(self) -> PolicyRows:
        """Give the entries that the slot has now."""
        rows: PolicyRows = {}
        for direction in Direction:
            numbers = self.families[direction].keys() | self.stale[direction].keys()
            for number in sorted(numbers):
                block = self.realized(direction, number)
                if block is not None:
                    entries = {
                        unpack(number, direction, at): entry for at, entry in block.rows.items()
                    }
                    rows.update(entries)
        return rows

    def count_wanted(self) -> int:
        """Give how many entries all that is wanted comes to."""
        return sum(len(block.rows) for blocks in self.families for block in blocks.values())

    def says_the_same(self, numbers: Collection[int], others: Collection[int]) -> bool:
        """Tell whether the slot has the same entries for each of some identities as for its counterpart; for all, if
        they have none."""
        return all(
            self._rows_of(direction, number) == self._rows_of(direction, other)
            for direction in Direction
            for number, other in zip_longest(numbers, others)
        )

    def _rows_of(self, direction: Direction, number: int | None) -> dict[int, PolicyEntry]:
        block = None if number is None else self.realized(direction, number)
        return block.rows if block is not None else {}

    def adopt(self, values: PolicyValues, rows: PolicyRows) -> None:
        """Note what rows and slot of an earlier process hold; nothing may be wanted yet."""
        self.values = self.target = values
        self.slot = values.slot
        adopted: tuple[dict[int, dict[int, PolicyEntry]], ...] = ({}, {})
        for key, entry in rows.items():
            adopted[key.direction].setdefault(key.identity, {})[pack_key(key)] = entry
        for direction in Direction:
            for number, entries in adopted[direction].items():
                self.stale[direction][number] = Block((), entries)

    def build(self, parts: Iterable[Part]) -> None:
        """Hold these rule sets and no others; for many of them at once."""
        self.parts = dict.fromkeys(parts)
        self._closing = tuple(  # type: ignore[assignment]
            {part: None for part in self.parts if direction in part.default_deny}
            for direction in Direction
        )
        rules = sorted(
            (rule for part in self.parts for rule in part.rules), key=lambda rule: rule.order
        )
        for direction in Direction:
            terms: dict[int, list[Term]] = {}
            for rule in rules:
                if rule.rule.direction is direction:
                    for numbers, term in self._terms(rule, rule.members()):
                        for number in numbers:
                            terms.setdefault(number, []).append(term)
            blocks = {number: self._blocks.of(tuple(found)) for number, found in terms.items()}
            for number in [family for family in self.families[direction] if family not in blocks]:
                self._set(direction, number, None)
            for number, block in blocks.items():
                self._set(direction, number, block)

    def change(self, change: PartChange) -> None:
        """Take in what happened to one rule set that holds here."""
        part = change.part
        if change.is_gone:
            self.parts.pop(part, None)
        else:
            self.parts[part] = None
        if len(change.went) + len(change.came) > ONE_BY_ONE_MAX:
            self.build(tuple(self.parts))
            return
        for direction in Direction:
            if not change.is_gone and direction in part.default_deny:
                self._closing[direction].setdefault(part)
            else:
                self._closing[direction].pop(part, None)
        for rule in change.went:
            self._drop(rule, rule.members())
        for rule in change.came:
            self._put(rule, rule.members())

    def select(self, rule: RuleInUse, came: Iterable[int], went: Iterable[int]) -> None:
        """Take in that a selection of a rule that holds here has changed."""
        if came:
            self._put(rule, came)
        if went:
            # Another peer selector of the same rule may still select it.
            self._drop(rule, [number for number in went if not rule.selects(number)])

    def _terms(
        self, rule: RuleInUse, numbers: Iterable[int]
    ) -> Iterator[tuple[Iterable[int], Term]]:
        """Give what a rule says of peers: all alike, unless names of ports mean something else on each."""
        if not rule.is_resolved_on_peers:
            term = rule.term(self.facts.named_ports)
            if term is not None:
                yield numbers, term
            return
        # Thousands of identities share a few sets of named ports, so terms are made once for each set.
        alike: dict[tuple[NamedPort, ...], list[int]] = {}
        for number in numbers:
            alike.setdefault(self._named_ports_of(number), []).append(number)
        for named_ports, some in alike.items():
            term = rule.term(named_ports)
            if term is not None:
                yield some, term

    def _put(self, rule: RuleInUse, numbers: Iterable[int]) -> None:
        direction = rule.rule.direction
        families = self.families[direction]
        for some, term in self._terms(rule, numbers):
            made: dict[Block | None, Block] = {}
            for number in some:
                old = families.get(number)
                new = made.get(old)
                if new is None:
                    new = made[old] = self._blocks.with_term(old, term)
                self._set(direction, number, new)

    def _drop(self, rule: RuleInUse, numbers: Iterable[int]) -> None:
        direction = rule.rule.direction
        families = self.families[direction]
        made: dict[Block, Block | None] = {}
        for number in numbers:
            old = families.get(number)
            if old is None:
                continue
            if old not in made:
                made[old] = self._blocks.without_term(old, rule.order)
            self._set(direction, number, made[old])

    def _set(self, direction: Direction, number: int, new: Block | None) -> None:
        families = self.families[direction]
        old = families.get(number)
        if new is old:
            return
        # Only the first change since the slot was written counts: `stale` is what the kernel has, however often the
        # wish changes.
        self.stale[direction].setdefault(number, old)
        if new is None:
            del families[number]
        else:
            families[number] = new
        if number >= CIDR_IDENTITY_FIRST:
            # Counted, so that the row can say whether any CIDR has entries: without one the program skips the look-up
            # of the address.
            self._cidr_families[direction] += (new is not None) - (old is not None)
