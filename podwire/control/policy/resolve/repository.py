"""The rules in force: which policies there are, which subjects each has, and what changes when one of them does.

Called by the engine. Pure. A changed policy keeps those of its rules that are the same; only the others touch entries.
Invariant: every selector of every rule is in use in the selector cache for as long as the rule is here.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from podwire.control.policy.resolve.cidrs import CidrTable
from podwire.control.policy.resolve.compile import Term, resolve_port
from podwire.control.policy.resolve.rule_numbers import RuleNumbers
from podwire.control.policy.resolve.selectors import LabelIndex, Selection
from podwire.control.policy.rule import LabelSelector, PolicyId, PolicyRules, Rule
from podwire.model.identity import NamedPort
from podwire.model.policy import ANY_IDENTITY, Direction, PolicyEntry

EVERYBODY: Final = LabelSelector()


class RuleInUse:
    """A rule with its number and the selections of its peers."""

    __slots__ = ("_terms", "entry", "fixed", "named", "order", "part", "rule", "selections")

    def __init__(self, order: int, rule: Rule, number: int, part: "Part") -> None:
        self.order = order
        self.rule = rule
        self.part = part
        self.entry = PolicyEntry(rule.verdict, rule.precedence, number)
        self.named = tuple(port for port in rule.ports if port.name)
        self.fixed = tuple(
            prefix for port in rule.ports if not port.name for prefix in resolve_port(port, ())
        )
        self.selections: tuple[Selection, ...] = ()
        self._terms: dict[tuple[int, ...], Term] = {}

    @property
    def is_resolved_on_peers(self) -> bool:
        """Tell whether the peer decides which ports are meant."""
        return bool(self.named) and self.rule.direction is Direction.EGRESS

    def members(self) -> Iterable[int]:
        """Give the identities that the rule selects now."""
        if len(self.selections) == 1:
            return self.selections[0].members
        return set[int]().union(*(selection.members for selection in self.selections))

    def selects(self, number: int) -> bool:
        """Tell whether any of the rule's peers is this one."""
        return any(number in selection.members for selection in self.selections)

    def term(self, named_ports: tuple[NamedPort, ...]) -> Term | None:
        """Give what the rule says where names of ports mean these; None where no port is left."""
        prefixes = self.fixed
        for port in self.named:
            prefixes += tuple(resolve_port(port, named_ports))
        if not prefixes:
            return None
        term = self._terms.get(prefixes)
        if term is None:
            term = self._terms[prefixes] = Term(self.order, self.entry, prefixes)
        return term


class Part:
    """One rule set with one subject, and the local identities that it selects."""

    __slots__ = (
        "default_deny",
        "default_path",
        "number",
        "policy",
        "rules",
        "selection",
        "subject",
    )

    def __init__(self, policy: PolicyId, written: PolicyRules, number: int) -> None:
        self.policy = policy
        self.subject = written.subject
        self.default_path = written.default_path
        self.number = number
        """Of its default denial."""
        self.default_deny: frozenset[Direction] = frozenset()
        self.rules: tuple[RuleInUse, ...] = ()
        self.selection: Selection

    def is_same(self, written: PolicyRules) -> bool:
        """Tell whether this may go on as what a policy of the same name says now."""
        return (self.subject, self.default_path) == (written.subject, written.default_path)


@dataclass(frozen=True, slots=True)
class PartChange:
    """What happened to one part. `part` has what is so now; `is_gone`: it is not in force any more."""

    part: Part
    is_gone: bool
    went: tuple[RuleInUse, ...] = ()
    came: tuple[RuleInUse, ...] = ()


@dataclass
class Repository:
    """All policies. `peers` knows every identity, `subjects` those of this node's endpoints."""

    numbers: RuleNumbers
    peers: LabelIndex
    subjects: LabelIndex
    cidrs: CidrTable
    _policies: dict[PolicyId, tuple[Part, ...]] = field(default_factory=dict)
    _written: dict[PolicyId, tuple[PolicyRules, ...]] = field(default_factory=dict)
    _order: int = 0

    def __post_init__(self) -> None:
        self._everybody = Selection(EVERYBODY, {ANY_IDENTITY})

    def __iter__(self) -> Iterator[PolicyRules]:
        for policy in sorted(self._written, key=str):
            yield from self._written[policy]

    def __contains__(self, policy: PolicyId) -> bool:
        return policy in self._policies

    def change(self, policy: PolicyId, written: Sequence[PolicyRules]) -> list[PartChange]:
        """Take a policy as it is written now, () = it is gone. What went is still in use: see `release`."""
        old = list(self._policies.pop(policy, ()))
        self._written.pop(policy, None)
        changes: list[PartChange] = []
        parts: list[Part] = []
        for rules in written:
            part = next((part for part in old if part.is_same(rules)), None)
            # A part that has the same subject goes on: its rules are compared one by one, and the entries of those
            # that are the same stay.
            if part is None:
                part = Part(policy, rules, self.numbers.number(policy, rules.default_path))
                part.selection = self.subjects.use(part.subject, part)
            else:
                old.remove(part)
            parts.append(part)
            changes.append(self._change_part(part, rules))
        changes += [PartChange(part, is_gone=True, went=part.rules) for part in old]
        if parts:
            self._policies[policy] = tuple(parts)
            self._written[policy] = tuple(written)
        return changes

    def release(self, change: PartChange) -> None:
        """Give back what a change left over, when no subject has it any more."""
        for rule in change.went:
            for selection in rule.selections:
                self._release(selection, rule)
        part = change.part
        if change.is_gone:
            self.subjects.release(part.selection, part)
        if part.policy not in self._policies:
            self.numbers.release(part.policy)

    def _change_part(self, part: Part, rules: PolicyRules) -> PartChange:
        part.default_deny = rules.default_deny
        # By rule, because whoever may write policies may write one of tens of thousands of rules, and change all.
        old: dict[Rule, list[RuleInUse]] = {}
        for used in part.rules:
            old.setdefault(used.rule, []).append(used)
        now: list[RuleInUse] = []
        came: list[RuleInUse] = []
        for rule in rules.rules:
            alike = old.get(rule)
            if not alike:
                now.append(self._use(rule, part))
                came.append(now[-1])
            else:
                now.append(alike.pop(0))
        part.rules = tuple(now)
        went = tuple(used for alike in old.values() for used in alike)
        return PartChange(part, False, went=went, came=tuple(came))

    def _use(self, rule: Rule, part: Part) -> RuleInUse:
        self._order += 1
        used = RuleInUse(self._order, rule, self.numbers.number(part.policy, rule.path), part)
        selections: list[Selection] = []
        for peer in rule.peers:
            if not isinstance(peer, LabelSelector):
                selections.append(self.cidrs.use(peer, used))
            elif peer.requirements:
                selections.append(self.peers.use(peer, used))
            else:
                selections.append(self._everybody)
                # "Everybody" is one entry for all identities. A named port means another number on each peer, so the
                # peers that have the name get entries of their own.
                names = {port.name for port in used.named} if used.is_resolved_on_peers else ()
                selections += [self.peers.use(name, used) for name in names]
        used.selections = tuple(dict.fromkeys(selections))
        return used

    def _release(self, selection: Selection, rule: RuleInUse) -> None:
        if isinstance(selection.selector, LabelSelector | str):
            self.peers.release(selection, rule)
        else:
            self.cidrs.release(selection, rule)
