"""The policy engine: from policies and identities to changes of slots and of endpoints' rows.

Called by the agent under the node's turn, by one thread at a time. `set_*`, `remove_*` and `identity_*` only note what
is wanted. `apply` and `attach` do the work, in proportion to what changed, and reach the kernel through PolicyDatapath
alone. Otherwise pure: no clock, no threads, no store. Invariant: at each instant every flow of every endpoint meets
either the verdict before a change or the one after it, never a third.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from podwire.control.policy.oracle import Enforcement, RuleName
from podwire.control.policy.realize.adopted import Adopted
from podwire.control.policy.realize.cidrs_mapped import MappedCidrs
from podwire.control.policy.realize.outcome import Outcome
from podwire.control.policy.realize.overflow import explain_overflow
from podwire.control.policy.realize.slots import EndpointRows, Slots
from podwire.control.policy.realize.subjects import Subjects
from podwire.control.policy.resolve.cidrs import CidrTable
from podwire.control.policy.resolve.pending import Pending
from podwire.control.policy.resolve.repository import Repository
from podwire.control.policy.resolve.rule_numbers import Counters, Numbers, RuleNumbers
from podwire.control.policy.resolve.selectors import LabelIndex
from podwire.control.policy.resolve.subject import PolicyValues, Subject
from podwire.control.policy.rule import CidrGroup, PolicyId, PolicyRules
from podwire.model.endpoint import IPNetwork
from podwire.model.errors import NotFound, PodwireError, PolicyOverflow
from podwire.model.identity import RESERVED_LABELS, IdentityFacts
from podwire.model.ids import EndpointId
from podwire.model.interfaces import EndpointConfig, PolicyDatapath
from podwire.model.policy import PolicyKey, PolicyRows

SETTING: Final = PolicyId("Setting", "", "policy_enforcement")
"""What closes an endpoint that no policy closes."""


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
        self._enforcement = enforcement
        self._former = set(datapath.list_slots())
        """Slots of an earlier process, until the first `apply` has said which are named."""
        free_slot = max(numbers.slot, *(number + 1 for number in self._former), 1)
        self._counters = Counters(replace(numbers, slot=free_slot), remember)
        self._rules = RuleNumbers(self._counters.rule)
        self._setting_rule = self._rules.number(SETTING)
        self._generation = self._counters.generation.take()
        self._peers = LabelIndex()
        self._locals = LabelIndex()
        self._cidrs = CidrTable(cidrs)
        self._repository = Repository(self._rules, self._peers, self._locals, self._cidrs)
        self._subjects = Subjects(self._peers, self._locals)
        self._slots = Slots(datapath, rows, self._counters.slot)
        self._explain = partial(explain_overflow, subjects=self._subjects, rules=self._rules)
        self._mapped = MappedCidrs(
            datapath, self._cidrs, self._subjects, self._slots, self._explain
        )
        self._adopted = Adopted()
        self._pending = Pending()
        self._leaving: set[int] = set()
        self._held: PodwireError | None = None
        self._may_have_waste = True
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
        if facts == self._peers.facts(facts.number):
            self._leaving.discard(facts.number)
            self._pending.identities.pop(facts.number, None)
        else:
            self._pending.identities[facts.number] = facts

    def identity_borne(self, facts: IdentityFacts) -> None:
        """Learn of an identity from the record of an endpoint that bears it. What was said of its number otherwise
        counts more: the number may have been given to other labels since."""
        known = self._pending.identities.get(facts.number, self._peers.facts(facts.number))
        if known is None or known == facts:
            self.identity_added(facts)

    def identity_removed(self, number: int) -> None:
        """Forget an identity that no endpoint has any more. One that an endpoint here has is kept until then."""
        if number not in RESERVED_LABELS:
            self._pending.identities[number] = None

    # Endpoints

    def adopt(self, endpoint_id: EndpointId, config: EndpointConfig) -> None:
        """At start, before the first `apply`: an endpoint lives whose row holds `config`, of an earlier process.

        The first `apply` compares its slot with what should be in it, and changes or replaces it if that differs.
        """
        self._adopted.rows[endpoint_id] = config

    def attach(self, endpoint_id: EndpointId, identity: int, *, renew: bool = False) -> Outcome:
        """Give an endpoint an identity that was taken in by an `apply` (a new endpoint, or one whose labels changed),
        and fill the identity's slot when it is the first here. Then `config_for` tells what its row must hold; the
        caller writes it and calls `realized`. `renew`: something else that verdicts rest on changed in the row (audit,
        whether the host is let in), so that no flow judged before may rest on it. Raises NotFound for an unknown
        identity, PolicyOverflow, KernelFailure; then nothing changed for this endpoint."""
        subject = self._subjects.find(identity) or self._begin(identity)
        if subject.failure is not None:
            raise subject.failure
        outcome = Outcome(self._generation, failed=self._subjects.failures())
        former = self._subjects.of_endpoint(endpoint_id)
        if former is not None and (renew or former is not subject):
            # Its flows were judged under other things: the row needs a generation that none of them has seen.
            outcome = self._renew(subject)
        self._subjects.expect(endpoint_id, subject)
        return outcome

    def realized(self, endpoint_id: EndpointId) -> None:
        """Note that the endpoint's row holds `config_for` of its identity: from now on `apply` keeps it so."""
        self._subjects.settle(endpoint_id)

    def detach(self, endpoint_id: EndpointId) -> None:
        """Forget an endpoint whose row is gone (or an attach that was undone). Unknown ones are ignored."""
        self._adopted.rows.pop(endpoint_id, None)
        self._subjects.leave(endpoint_id)
        self._may_have_waste = True
        behind = self._subjects.behind
        for subject in [
            subject for subject in behind if not subject.live and not subject.pending_endpoints
        ]:
            # Nobody waits any more for what cannot be brought into force.
            self._end(subject)

    def mend(self, identity: int) -> Outcome:
        """Write again what an attached identity's slot lost by somebody else's hand. NotFound, KernelFailure."""
        subject = self._subjects.get(identity)
        missing, superfluous = self._slots.compare(subject)
        if subject.is_unsure or not (missing or superfluous):
            return Outcome(self._generation, failed=self._subjects.failures())
        self._slots.change(subject, missing, superfluous)
        return self._renew(subject)

    # Work

    @property
    def is_pending(self) -> bool:
        """Tell whether `apply` would do something."""
        return bool(
            self._pending or self._adopted.rows or self._subjects.touched or self._subjects.behind
        )

    def apply(self) -> Outcome:
        """Bring all that is pending into force as one generation; nothing pending, nothing behind: nothing is done.
        Raises StorageFailure when `remember` does, before anything is done."""
        if not self.is_pending:
            return Outcome(self._generation)
        self._prepare_numbers()
        self._generation = self._counters.generation.take()
        behind = set(self._subjects.behind)
        self._may_have_waste = True
        churned = self._change_identities()
        self._change_enforcement()
        self._take_adopted()
        self._retire_strangers()
        self._slots.finish_flips(self._subjects.behind, self._generation)
        fresh = self._admit_cidrs(churned)
        self._change_groups()
        changed_policies = self._change_policies()
        changed = self._realize(churned, fresh)
        self._report_held()
        return Outcome(
            self._generation,
            changed,
            self._subjects.failures(changed_policies),
            tuple(
                endpoint_id
                for each in behind - self._subjects.behind
                for endpoint_id in sorted(each.live)
            ),
        )

    @property
    def has_waste(self) -> bool:
        """Tell, at no cost, whether `collect` may find something."""
        return self._may_have_waste

    def collect(self) -> Outcome:
        """Delete slots that no row names any more, CIDRs that no rule names, and counters of rules that are gone: some
        milliseconds when there are any. For quiet moments, while `has_waste`."""
        self._reclaim()
        prefixes = self._mapped.find_unused()
        changed: dict[EndpointId, PolicyValues] = {}
        if prefixes:
            self._prepare_numbers()
            gone = self._mapped.remove(prefixes)
            self._generation = self._counters.generation.take()
            changed = self._realize(gone, frozenset())
        if self._rules.have_gone and not self._subjects.behind:
            self._datapath.forget_hits(self._rules.numbers())
            self._rules.have_gone = False
        self._may_have_waste = False
        return Outcome(self._generation, changed, self._subjects.failures())

    # Views

    @property
    def generation(self) -> int:
        """The last generation that was given to rows."""
        return self._generation

    def config_for(self, identity: int) -> PolicyValues:
        """Give what rows of an attached identity hold, or must hold when they are written now. NotFound."""
        return self._subjects.get(identity).target

    def rows_for(self, identity: int) -> PolicyRows:
        """Give the entries that an attached identity's slot holds (`policy entries`, CHECK). NotFound."""
        return self._subjects.get(identity).rows()

    def compare_slot(self, identity: int) -> tuple[PolicyRows, Sequence[PolicyKey]]:
        """Give what an attached identity's slot in the kernel lacks or has otherwise, and what it has too much.
        NotFound, KernelFailure."""
        return self._slots.compare(self._subjects.get(identity))

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
        selectors = [peer.describe() for peer in (*self._peers, *self._cidrs)]
        return sorted(selectors, key=lambda described: str(described["selector"]))

    def policies_of(self, identity: int) -> Sequence[PolicyId]:
        """Give the policies that select an attached identity. NotFound."""
        return self._subjects.get(identity).policies

    # Steps of one change

    def _prepare_numbers(self) -> None:
        """Reserve all numbers that a change can take, so that a full disk is met before it begins."""
        self._counters.rule.prepare(self._pending.count_rules())
        self._counters.slot.prepare(len(self._subjects) + len(self._adopted.rows) + 1)
        self._counters.generation.prepare(2)

    def _change_identities(self) -> set[int]:
        """Learn and forget identities; gives those that came or went."""
        noted, self._pending.identities = self._pending.identities, {}
        churned: set[int] = set()
        for number, facts in noted.items():
            known = self._peers.facts(number)
            if facts is None and self._subjects.find(number):
                self._leaving.add(number)
                continue
            self._leaving.discard(number)
            if facts == known:
                continue
            churned.add(number)
            self._subjects.spread(
                (selection, (), (number,)) for selection in self._peers.remove_identity(number)
            )
            if facts is not None:
                selections = self._peers.add_identity(facts)
                self._subjects.spread((selection, (facts.number,), ()) for selection in selections)
                subject = self._subjects.find(number)
                if subject is not None:
                    self._subjects.rename(subject, facts)
                    self._build(subject)
        return churned

    def _change_enforcement(self) -> None:
        enforcement, self._pending.enforcement = self._pending.enforcement, None
        if enforcement is None or enforcement is self._enforcement:
            return
        self._enforcement = enforcement
        for subject in self._subjects:
            self._build(subject)

    def _take_adopted(self) -> None:
        for subject in self._adopted.take(self._subjects, self._peers, self._datapath):
            self._build(subject)

    def _admit_cidrs(self, churned: set[int]) -> frozenset[int]:
        """Give numbers to the CIDRs of what is pending and bring them into the map, so that no verdict changes; gives
        the identities of those that are new. When it cannot be done, what speaks of CIDRs stays pending. `churned`
        takes those that had to make room."""
        self._held = None
        groups = self._pending.merge_groups(self._cidrs.groups)
        needed = set(self._pending.find_networks(self._cidrs, groups))
        self._subjects.spread(self._cidrs.ensure(needed))
        if not self._cidrs.unmapped(needed):
            return frozenset()
        try:
            try:
                return self._mapped.add(needed)
            except PolicyOverflow:
                unused = self._mapped.find_unused(needed)
                if not (self._reclaim() or unused):
                    raise
                churned |= self._mapped.remove(unused)
                return self._mapped.add(needed)
        except PodwireError as error:
            self._held = error
            return frozenset()

    def _change_groups(self) -> None:
        if self._pending.groups and self._held is None:
            groups = self._pending.merge_groups(self._cidrs.groups)
            self._pending.groups = {}
            self._subjects.spread(self._cidrs.set_groups(groups))

    def _change_policies(self) -> tuple[PolicyId, ...]:
        """Take in the pending policies; gives their names."""
        is_held = self._held is not None
        pending = self._pending
        taken = [
            policy
            for policy in pending.policies
            if not (is_held and pending.speaks_of_cidrs(policy))
        ]
        for policy in taken:
            for change in self._repository.change(policy, pending.policies.pop(policy)):
                if self._enforcement is not Enforcement.NEVER:
                    self._subjects.change(change)
                self._repository.release(change)
        return tuple(taken)

    def _realize(
        self, churned: Collection[int], fresh: Collection[int]
    ) -> dict[EndpointId, PolicyValues]:
        """Bring all touched subjects, and those that are behind, to what they want; one's failure stops no other."""
        changed: dict[EndpointId, PolicyValues] = {}
        for subject in self._subjects.take_work():
            if self._subjects.find(subject.number) is not subject:
                continue  # it ended to make room for another
            try:
                if self._realize_one(subject, churned, fresh):
                    changed.update(dict.fromkeys(sorted(subject.live), subject.values))
            except PodwireError as error:
                self._subjects.fall_behind(subject, error)
            else:
                self._subjects.catch_up(subject)
        return changed

    def _realize_one(
        self, subject: Subject, churned: Collection[int], fresh: Collection[int]
    ) -> bool:
        if not self._subjects.is_known(subject):
            raise NotFound(f"compile policies of identity {subject.number}: it is not known")
        wanted = subject.wanted(self._enforcement, self._setting_rule)
        realize = partial(
            self._slots.realize, subject, wanted, self._generation, churned=churned, fresh=fresh
        )
        try:
            return realize()
        except PolicyOverflow as error:
            if not self._reclaim(subject):
                raise self._explain(error, subject) from error
        try:
            return realize()
        except PolicyOverflow as error:
            raise self._explain(error, subject) from error

    def _reclaim(self, keep: Subject | None = None) -> bool:
        """Delete the slots that no row names any more; False when there are none. `keep`: is about to be named."""
        for subject in self._subjects.without_endpoints():
            if subject is not keep:
                self._end(subject)
        return self._slots.collect()

    def _renew(self, subject: Subject) -> Outcome:
        """Give the rows of a subject's endpoints a generation under which no flow was judged yet."""
        self._generation = self._counters.generation.take()
        try:
            self._slots.flip(subject, self._generation)
        except PodwireError as error:
            self._subjects.fall_behind(subject, error)
            raise
        changed = dict.fromkeys(sorted(subject.live), subject.values)
        return Outcome(self._generation, changed, self._subjects.failures())

    def _report_held(self) -> None:
        """Let the subjects of policies that had to wait be behind."""
        if self._held is None:
            return
        for subject in self._subjects:
            if self._pending.concerns(subject.facts):
                self._subjects.fall_behind(subject, self._held)

    def _retire_strangers(self) -> None:
        """With the first change: slots of an earlier process that no adopted row names."""
        if self._former:
            named = {
                slot for subject in self._subjects for slot in (subject.slot, *subject.lingering)
            }
            self._slots.retired |= self._former - named
            self._former = set()

    # Subjects

    def _build(self, subject: Subject) -> None:
        is_enforced = self._enforcement is not Enforcement.NEVER
        self._subjects.build(subject, is_enforced=is_enforced)

    def _begin(self, identity: int) -> Subject:
        """Compile a first endpoint's identity and fill its slot; or raise, and leave nothing."""
        facts = self._peers.facts(identity)
        if facts is None:
            raise NotFound(f"attach to identity {identity}: it is not known")
        if self._held is not None and self._pending.concerns(facts):
            raise self._held
        subject = self._subjects.make(facts)
        subject.values = subject.target = PolicyValues(identity, generation=self._generation)
        self._build(subject)
        self._subjects.touched.discard(subject)
        try:
            self._realize_one(subject, frozenset(), frozenset())
        except PodwireError:
            self._end(subject)
            raise
        return subject

    def _end(self, subject: Subject) -> None:
        """Forget an identity that no endpoint here bears."""
        self._slots.retire(subject)
        self._subjects.end(subject)
        if subject.number in self._leaving:
            self._leaving.discard(subject.number)
            self._pending.identities.setdefault(subject.number, None)
