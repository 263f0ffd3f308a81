"""The policy engine: what is known of policies and identities goes in, changes of slots and endpoints' rows come out.

Called by the agent under the node's turn, by one thread at a time. `set_*`, `remove_*` and `identity_*` only note what
is wanted; `apply` and `attach` do the work, in proportion to what changed, and reach the kernel through PolicyDatapath
alone. Pure otherwise: no clock, no threads, no store. Invariant: at each instant every flow of every endpoint meets
either the verdict before a change or the one after it, never a third.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from podwire.control.policy.labels_match import LabelSet, matches
from podwire.control.policy.oracle import Enforcement, RuleName
from podwire.control.policy.resolve.cidrs import CidrTable, Delta
from podwire.control.policy.resolve.compile import Blocks, unpack
from podwire.control.policy.resolve.repository import PartChange, Repository
from podwire.control.policy.resolve.rule_numbers import Counter, RuleNumbers
from podwire.control.policy.resolve.selectors import LabelIndex
from podwire.control.policy.resolve.slots import EndpointRows, SlotManager
from podwire.control.policy.resolve.subject import PolicyValues, Subject
from podwire.control.policy.rule import (
    RESERVED_LABELS,
    CidrGroup,
    IdentityFacts,
    LabelSelector,
    NamedPort,
    PolicyId,
    PolicyRules,
)
from podwire.model.errors import NotFound, PodwireError
from podwire.model.ids import EndpointId
from podwire.model.interfaces import EndpointConfig, PolicyDatapath
from podwire.model.policy import Direction, IPNetwork, PolicyRows

__all__ = [
    "EndpointRows",
    "Enforcement",
    "Failure",
    "Numbers",
    "Outcome",
    "PolicyEngine",
    "PolicyValues",
]

SETTING: Final = PolicyId("Setting", "", "policy_enforcement")
"""What closes an endpoint that no policy closes."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers from which on nothing was ever used on this node: kept by the agent across restarts."""

    slot: int = 1
    rule: int = 1
    revision: int = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """One identity that could not be brought to its policies; what was in force for it stays in force."""

    identity: int
    error: PodwireError
    endpoints: tuple[EndpointId, ...]
    policies: tuple[PolicyId, ...]
    """The policies that select it, those that changed in this `apply` first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one `apply` did."""

    revision: int
    changed: Mapping[EndpointId, PolicyValues] = field(default_factory=dict)
    """Endpoints whose rows were rewritten, with what they hold now."""
    failed: tuple[Failure, ...] = ()
    """All identities that are behind now, also those that failed before and did again."""
    recovered: tuple[EndpointId, ...] = ()
    """Endpoints that were behind before and are not any more."""


@dataclass
class _Pending:
    """What was noted since the last `apply`."""

    identities: dict[int, IdentityFacts | None] = field(default_factory=dict)
    policies: dict[PolicyId, tuple[PolicyRules, ...]] = field(default_factory=dict)
    groups: dict[str, CidrGroup | None] = field(default_factory=dict)
    enforcement: Enforcement | None = None

    def __bool__(self) -> bool:
        return bool(self.identities or self.policies or self.groups or self.enforcement is not None)


class PolicyEngine:
    """Every policy and identity this node knows, and the slots of its endpoints.

    `rows` gives endpoints' rows (see EndpointRows); `numbers` is what `remember` was last told, `Numbers()` on a new
    node; `cidrs` what the datapath's map of CIDRs holds from before (empty on a new node).
    """

    def __init__(
        self,
        *,
        datapath: PolicyDatapath,
        rows: EndpointRows,
        numbers: Numbers,
        remember: Callable[[Numbers], None],
        cidrs: Mapping[IPNetwork, int],
        enforcement: Enforcement = Enforcement.DEFAULT,
    ) -> None:
        self._datapath = datapath
        self._remember = remember
        self._enforcement = enforcement
        self._former = sorted(datapath.list_slots())
        first_slot = max(numbers.slot, *(number + 1 for number in self._former), 1)
        self._slot_counter = Counter(first_slot, lambda limit: self._reserve(slot=limit))
        self._rule_counter = Counter(numbers.rule, lambda limit: self._reserve(rule=limit))
        self._revisions = Counter(numbers.revision, lambda limit: self._reserve(revision=limit))
        self._rules = RuleNumbers(self._rule_counter)
        self._setting_rule = self._rules.number(SETTING)
        self._revision = self._revisions.take()
        self._peers = LabelIndex()
        self._locals = LabelIndex()
        self._cidrs = CidrTable(cidrs)
        self._repository = Repository(self._rules, self._peers, self._locals, self._cidrs)
        self._blocks = Blocks()
        self._slots = SlotManager(datapath, rows, self._slot_counter)
        self._subjects: dict[int, Subject] = {}
        self._wanted: dict[EndpointId, int] = {}
        self._live: dict[EndpointId, int] = {}
        self._adopted: dict[EndpointId, EndpointConfig] = {}
        self._pending = _Pending()
        self._touched: set[Subject] = set()
        self._behind: set[Subject] = set()
        self._leaving: set[int] = set()
        self._held: PodwireError | None = None
        for number, labels in RESERVED_LABELS.items():
            self._peers.add_identity(IdentityFacts(number, labels))

    # What is wanted

    def set_enforcement(self, enforcement: Enforcement) -> None:
        """Take another setting `policy_enforcement`; in force after `apply`."""
        self._pending.enforcement = enforcement

    def set_policy(self, policy: PolicyId, rules: tuple[PolicyRules, ...]) -> None:
        """Take a new or changed object; in force after `apply`."""
        self._pending.policies[policy] = rules

    def remove_policy(self, policy: PolicyId) -> None:
        """Forget an object; out of force after `apply`."""
        self._pending.policies[policy] = ()

    def set_group(self, group: CidrGroup) -> None:
        """Take a new or changed CIDR group."""
        self._pending.groups[group.name] = group

    def remove_group(self, name: str) -> None:
        """Forget a CIDR group."""
        self._pending.groups[name] = None

    def identity_added(self, facts: IdentityFacts) -> None:
        """Learn of an identity, of this node or another; known ones are ignored. Reserved ones are always known."""
        self._pending.identities[facts.number] = facts

    def identity_removed(self, number: int) -> None:
        """Forget an identity that nobody bears any more; one that an endpoint here bears is kept until it does not."""
        if number not in RESERVED_LABELS:
            self._pending.identities[number] = None

    # Endpoints

    def adopt(self, endpoint_id: EndpointId, config: EndpointConfig) -> None:
        """At start, before the first `apply`: an endpoint lives whose row holds `config`, of an earlier process.

        The first `apply` compares its slot with what should be in it, and changes or replaces it if that differs.
        """
        self._adopted[endpoint_id] = config

    def attach(self, endpoint_id: EndpointId, identity: int) -> Outcome:
        """Give an endpoint an identity (a new endpoint, or one whose labels changed): applies what is pending, and
        fills the identity's slot when it is the first here. Then `config_for` tells what its row must hold; the caller
        writes it and calls `realized`. Raises NotFound for an unknown identity, PolicyOverflow, KernelFailure; then
        nothing changed for this endpoint."""
        outcome = self.apply()
        subject = self._subjects.get(identity) or self._begin(identity)
        if subject.failure is not None:
            raise subject.failure
        if self._live.get(endpoint_id, identity) != identity:
            # Its flows were judged under the other identity: the row needs a revision that none of them has seen.
            self._revision = self._revisions.take()
            self._slots.flip(subject, self._revision)
        self._forget_coming(endpoint_id)
        self._wanted[endpoint_id] = identity
        if self._live.get(endpoint_id) != identity:
            subject.coming.add(endpoint_id)
        return outcome

    def realized(self, endpoint_id: EndpointId) -> None:
        """Note that the endpoint's row holds `config_for` of its identity: from now on `apply` keeps it so."""
        identity = self._wanted[endpoint_id]
        former = self._live.get(endpoint_id)
        if former is not None and former != identity:
            self._subjects[former].live.discard(endpoint_id)
        subject = self._subjects[identity]
        subject.coming.discard(endpoint_id)
        subject.live.add(endpoint_id)
        self._live[endpoint_id] = identity

    def detach(self, endpoint_id: EndpointId) -> None:
        """Forget an endpoint whose row is gone (or an attach that was undone). Unknown ones are ignored."""
        self._adopted.pop(endpoint_id, None)
        self._forget_coming(endpoint_id)
        self._wanted.pop(endpoint_id, None)
        live = self._live.pop(endpoint_id, None)
        if live is not None:
            self._subjects[live].live.discard(endpoint_id)

    # Work

    @property
    def is_pending(self) -> bool:
        """Tell whether `apply` would do something."""
        return bool(self._pending or self._adopted or self._touched or self._behind)

    def apply(self) -> Outcome:
        """Bring all that is pending into force as one revision; nothing pending, nothing behind: nothing is done.
        Raises StorageFailure when `remember` does, before anything is done."""
        if not self.is_pending:
            return Outcome(self._revision)
        self._prepare_numbers()
        before, self._revision = self._revision, self._revisions.take()
        behind = set(self._behind)
        churned = self._change_identities()
        self._change_enforcement()
        self._take_adopted()
        self._finish_flips()
        fresh = self._admit_cidrs()
        self._change_groups()
        changed_policies = self._change_policies()
        changed = self._realize(before, churned, fresh)
        self._retire_strangers()
        self._report_held(before)
        return Outcome(
            self._revision,
            changed,
            tuple(self._failures(changed_policies)),
            tuple(one for subject in behind - self._behind for one in sorted(subject.live)),
        )

    def collect(self) -> Outcome:
        """Delete slots that no row names any more, and CIDRs that no rule names: some milliseconds when there are any.
        To be called now and then, and soon after an `apply`."""
        for subject in [one for one in self._subjects.values() if not one.live | one.coming]:
            self._end(subject)
        self._slots.collect()
        prefixes = [] if self._behind else self._cidrs.unused()
        if not prefixes:
            return Outcome(self._revision)
        self._prepare_numbers()
        # Out of the map first; when no program can hold the number any more, its entries go: nobody meets a gap.
        for prefix in prefixes:
            prefix.is_mapped = False
        self._datapath.write_cidrs(self._cidrs.mapping())
        self._datapath.remove_slots(())
        self._spread(self._cidrs.forget(prefixes))
        before, self._revision = self._revision, self._revisions.take()
        gone = {number for prefix in prefixes for number in prefix.families}
        changed = self._realize(before, gone, frozenset())
        return Outcome(self._revision, changed, tuple(self._failures(())))

    # Views

    def knows(self, identity: int) -> bool:
        """Tell whether an identity has been taken in by an `apply`."""
        return identity in self._peers

    @property
    def revision(self) -> int:
        """Revision of the policies in force."""
        return self._revision

    def realized_revision(self, endpoint_id: EndpointId) -> int:
        """Give the revision that an endpoint is at: the node's, or an earlier one while it is behind; 0 = none yet."""
        subject = self._subjects.get(self._live.get(endpoint_id, 0))
        if subject is None:
            return 0
        return self._revision if subject.failure is None else subject.behind_at

    def config_for(self, identity: int) -> PolicyValues:
        """Give what rows of an attached identity hold, or must hold when they are written now. NotFound."""
        return self._subject(identity).target

    def rows_for(self, identity: int) -> PolicyRows:
        """Give the entries that an attached identity's slot holds (`policy entries`, CHECK). NotFound."""
        subject = self._subject(identity)
        rows: PolicyRows = {}
        for direction in Direction:
            numbers = subject.families[direction].keys() | subject.stale[direction].keys()
            for number in sorted(numbers):
                block = subject.realized(direction, number)
                if block is not None:
                    found = {unpack(number, direction, at): one for at, one in block.rows.items()}
                    rows.update(found)
        return rows

    def rule_name(self, number: int) -> RuleName | None:
        """Name the rule of an entry, event or counter; also of rules removed a while ago."""
        return self._rules.name(number)

    def list_policies(self) -> Sequence[PolicyRules]:
        """Give all rules taken in by the last `apply`, for the oracle and people."""
        return tuple(self._repository)

    def list_groups(self) -> Sequence[CidrGroup]:
        """Give all CIDR groups, by name."""
        return tuple(group for _name, group in sorted(self._cidrs.groups.items()))

    def list_cidrs(self) -> dict[IPNetwork, int]:
        """Give what the datapath's map of CIDRs holds."""
        return self._cidrs.mapping()

    def list_selectors(self) -> list[dict[str, Any]]:
        """Give the selectors of peers in use: `selector`, `identities`, `users`; by their text."""
        found = [one.describe() for one in (*self._peers, *self._cidrs)]
        return sorted(found, key=lambda one: str(one["selector"]))

    def policies_of(self, identity: int) -> Sequence[PolicyId]:
        """Give the policies that select an attached identity. NotFound."""
        return self._subject(identity).policies

    # Steps of one change

    def _prepare_numbers(self) -> None:
        """Reserve all numbers that a change can take, so that a full disk is met before it begins."""
        rules = sum(
            len(part.rules) + 1 for parts in self._pending.policies.values() for part in parts
        )
        self._rule_counter.prepare(rules)
        self._slot_counter.prepare(len(self._subjects) + len(self._adopted) + 1)
        self._revisions.prepare(2)

    def _change_identities(self) -> set[int]:
        """Learn and forget identities; gives those that came or went."""
        noted, self._pending.identities = self._pending.identities, {}
        churned: set[int] = set()
        for number, facts in noted.items():
            known = self._peers.facts(number)
            if facts is None and number in self._subjects:
                self._leaving.add(number)
                continue
            self._leaving.discard(number)
            if facts == known:
                continue
            churned.add(number)
            self._spread((one, (), (number,)) for one in self._peers.remove_identity(number))
            if facts is not None:
                found = self._peers.add_identity(facts)
                self._spread((one, (facts.number,), ()) for one in found)
                stranger = self._subjects.get(number)
                if stranger is not None and number not in self._locals:
                    stranger.facts = facts
                    self._build(stranger)
        return churned

    def _spread(self, deltas: Iterable[Delta]) -> None:
        """Bring changes of selections to the subjects whose rules use them."""
        for selection, came, went in deltas:
            for rule in selection.users:
                for number in rule.part.selection.members:
                    subject = self._subjects[number]
                    if rule.part in subject.parts:
                        subject.select(rule, came, went)
                        self._touched.add(subject)

    def _change_enforcement(self) -> None:
        enforcement, self._pending.enforcement = self._pending.enforcement, None
        if enforcement is None or enforcement is self._enforcement:
            return
        self._enforcement = enforcement
        for subject in self._subjects.values():
            self._build(subject)

    def _take_adopted(self) -> None:
        """Take over what an earlier process left: of one identity the newest row, the others are flipped to it."""
        adopted, self._adopted = self._adopted, {}
        newest_first = sorted(adopted.items(), key=lambda one: -one[1].policy_revision)
        for endpoint_id, config in newest_first:
            identity = config.identity
            subject = self._subjects.get(identity)
            values = PolicyValues.read(config)
            if subject is None:
                subject = self._adopt_subject(identity, values)
            elif values != subject.values:
                subject.lingering.append(values.slot if values.slot != subject.slot else 0)
                self._behind.add(subject)
            subject.live.add(endpoint_id)
            self._live[endpoint_id] = self._wanted[endpoint_id] = identity

    def _adopt_subject(self, identity: int, values: PolicyValues) -> Subject:
        facts = self._peers.facts(identity)
        subject = self._make_subject(facts or IdentityFacts(identity, ()))
        try:
            subject.adopt(values, self._datapath.read_slot(values.slot) if values.slot else {})
        except PodwireError:
            subject.adopt(values, {})
            subject.is_unsure = True
        if facts is not None:
            self._build(subject)
        return subject

    def _finish_flips(self) -> None:
        """Try again to rewrite rows that a former change could not: CIDRs can only be added to slots that are known."""
        for subject in [one for one in self._behind if one.lingering and not one.is_unsure]:
            try:
                self._slots.flip(subject, self._revision)
            except PodwireError as error:
                subject.failure = error

    def _admit_cidrs(self) -> frozenset[int]:
        """Give numbers to the CIDRs of what is pending and bring them into the map, so that no verdict changes; gives
        the identities of those that are new. When it cannot be done, what speaks of CIDRs stays pending."""
        self._held = None
        groups = self._pending_groups()
        needed = set(self._cidrs.needs_of_groups(groups)) if self._pending.groups else set()
        for policy in self._pending.policies:
            needed.update(self._cidrs_of(policy, groups))
        self._spread(self._cidrs.ensure(needed))
        fresh = self._cidrs.unmapped(needed)
        if not fresh:
            return frozenset()
        pairs = [(prefix, self._cidrs.parent(prefix)) for prefix in fresh]
        try:
            for subject in self._subjects.values():
                self._slots.extend(subject, pairs)
            self._datapath.write_cidrs(self._cidrs.mapping(fresh))
        except PodwireError as error:
            self._held = error
            return frozenset()
        for prefix in fresh:
            prefix.is_mapped = True
        return frozenset(number for prefix in fresh for number in prefix.families)

    def _pending_groups(self) -> dict[str, CidrGroup]:
        noted = self._pending.groups
        groups = {**self._cidrs.groups, **{name: one for name, one in noted.items() if one}}
        return {name: one for name, one in groups.items() if noted.get(name, one) is not None}

    def _cidrs_of(self, policy: PolicyId, groups: Mapping[str, CidrGroup]) -> Iterable[IPNetwork]:
        for part in self._pending.policies[policy]:
            for rule in part.rules:
                for peer in rule.peers:
                    if not isinstance(peer, LabelSelector):
                        yield from self._cidrs.needs(peer, groups)

    def _change_groups(self) -> None:
        if self._pending.groups and self._held is None:
            groups = self._pending_groups()
            self._pending.groups = {}
            self._spread(self._cidrs.set_groups(groups))

    def _change_policies(self) -> tuple[PolicyId, ...]:
        """Take in the pending policies; gives their names."""
        taken = [one for one in self._pending.policies if not self._is_held(one)]
        for policy in taken:
            for change in self._repository.change(policy, self._pending.policies.pop(policy)):
                if self._enforcement is not Enforcement.NEVER:
                    self._change_subjects(change)
                self._repository.release(change)
        return tuple(taken)

    def _is_held(self, policy: PolicyId) -> bool:
        if self._held is None:
            return False
        peers = (
            peer
            for part in self._pending.policies[policy]
            for rule in part.rules
            for peer in rule.peers
        )
        return any(not isinstance(peer, LabelSelector) for peer in peers)

    def _change_subjects(self, change: PartChange) -> None:
        for number in change.part.selection.members:
            subject = self._subjects[number]
            subject.change(change)
            self._touched.add(subject)

    def _realize(
        self, before: int, churned: Collection[int], fresh: Collection[int]
    ) -> dict[EndpointId, PolicyValues]:
        """Bring all touched subjects, and those that are behind, to what they want; one's failure stops no other."""
        todo = sorted(self._touched | self._behind, key=lambda one: one.number)
        self._touched.clear()
        changed: dict[EndpointId, PolicyValues] = {}
        for subject in todo:
            try:
                if self._realize_one(subject, churned, fresh):
                    changed.update(dict.fromkeys(sorted(subject.live), subject.values))
            except PodwireError as error:
                self._fall_behind(subject, error, before)
            else:
                subject.failure = None
                self._behind.discard(subject)
        return changed

    def _realize_one(
        self, subject: Subject, churned: Collection[int], fresh: Collection[int]
    ) -> bool:
        if subject.number not in self._locals:
            raise NotFound(f"compile policies of identity {subject.number}: nothing tells of it")
        wanted = subject.wanted(self._enforcement, self._setting_rule)
        return self._slots.realize(subject, wanted, self._revision, churned=churned, fresh=fresh)

    def _fall_behind(self, subject: Subject, error: PodwireError, before: int) -> None:
        if subject.failure is None:
            subject.behind_at = before
        subject.failure = error
        self._behind.add(subject)

    def _report_held(self, before: int) -> None:
        """Let the subjects of policies that had to wait be behind."""
        if self._held is None:
            return
        for subject in self._subjects.values():
            if self._is_waiting(subject.facts):
                self._fall_behind(subject, self._held, before)

    def _is_waiting(self, facts: IdentityFacts) -> bool:
        labels = LabelSet(facts.labels)
        waiting = (part for parts in self._pending.policies.values() for part in parts)
        return bool(self._pending.groups) or any(matches(one.subject, labels) for one in waiting)

    def _failures(self, changed: Collection[PolicyId]) -> Iterable[Failure]:
        for subject in sorted(self._behind, key=lambda one: one.number):
            if subject.failure is not None:
                policies = sorted(subject.policies, key=lambda one: one not in changed)
                endpoints = tuple(sorted(subject.live))
                yield Failure(subject.number, subject.failure, endpoints, tuple(policies))

    def _retire_strangers(self) -> None:
        """After the first change: slots of an earlier process that no adopted row names."""
        if self._former:
            named = {slot for one in self._subjects.values() for slot in (one.slot, *one.lingering)}
            self._slots.retired.update(set(self._former) - named)
            self._former = []

    # Subjects

    def _subject(self, identity: int) -> Subject:
        subject = self._subjects.get(identity)
        if subject is None:
            raise NotFound(f"find identity {identity}: no endpoint here bears it")
        return subject

    def _make_subject(self, facts: IdentityFacts) -> Subject:
        subject = Subject(facts, self._blocks, self._named_ports_of)
        self._subjects[facts.number] = subject
        self._touched.add(subject)
        return subject

    def _named_ports_of(self, number: int) -> tuple[NamedPort, ...]:
        facts = self._peers.facts(number)
        return facts.named_ports if facts else ()

    def _build(self, subject: Subject) -> None:
        """Let a subject hold all that selects it."""
        number = subject.number
        if number in self._locals:
            selecting = [one for one in self._locals if number in one.members]
        else:
            selecting = self._locals.add_identity(subject.facts)
        parts = sorted(
            (part for one in selecting for part in one.users), key=lambda one: one.number
        )
        subject.build(() if self._enforcement is Enforcement.NEVER else parts)
        self._touched.add(subject)

    def _begin(self, identity: int) -> Subject:
        """Compile a first endpoint's identity and fill its slot; or raise, and leave nothing."""
        facts = self._peers.facts(identity)
        if facts is None:
            raise NotFound(f"attach to identity {identity}: nothing tells of it")
        if self._held is not None and self._is_waiting(facts):
            raise self._held
        subject = self._make_subject(facts)
        self._build(subject)
        self._touched.discard(subject)
        try:
            self._realize_one(subject, frozenset(), frozenset())
        except PodwireError:
            self._end(subject)
            raise
        return subject

    def _end(self, subject: Subject) -> None:
        """Forget an identity that no endpoint here bears."""
        self._slots.retire(subject)
        del self._subjects[subject.number]
        self._locals.remove_identity(subject.number)
        self._touched.discard(subject)
        self._behind.discard(subject)
        if subject.number in self._leaving:
            self._leaving.discard(subject.number)
            self._pending.identities.setdefault(subject.number, None)

    def _forget_coming(self, endpoint_id: EndpointId) -> None:
        subject = self._subjects.get(self._wanted.get(endpoint_id, 0))
        if subject is not None:
            subject.coming.discard(endpoint_id)

    def _reserve(self, *, slot: int = 0, rule: int = 0, revision: int = 0) -> None:
        known = Numbers(
            slot or self._slot_counter.limit,
            rule or self._rule_counter.limit,
            revision or self._revisions.limit,
        )
        self._remember(known)
