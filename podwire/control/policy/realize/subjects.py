"""The subjects of this node: which endpoint has which identity, and which identities have work to do.

Owned by the engine. Pure. Invariant: an identity is a subject for as long as an endpoint's row names it or is going
to, and the index of subjects' labels contains exactly the subjects whose labels are known.
"""

from collections.abc import Collection, Iterable, Iterator

from podwire.control.policy.realize.outcome import Failure
from podwire.control.policy.resolve.cidrs import Delta
from podwire.control.policy.resolve.compile import Blocks
from podwire.control.policy.resolve.repository import Part, PartChange
from podwire.control.policy.resolve.selectors import LabelIndex
from podwire.control.policy.resolve.subject import Subject
from podwire.control.policy.rule import PolicyId
from podwire.model.errors import NotFound, PodwireError
from podwire.model.identity import IdentityFacts, NamedPort
from podwire.model.ids import EndpointId


class Subjects:
    """Subjects by identity, and endpoints by subject. `peers` knows every identity, `index` the subjects."""

    def __init__(self, peers: LabelIndex, index: LabelIndex) -> None:
        self._peers = peers
        self._index = index
        self._blocks = Blocks()
        self._by_identity: dict[int, Subject] = {}
        self._wanted: dict[EndpointId, int] = {}
        self._live: dict[EndpointId, int] = {}
        self.touched: set[Subject] = set()
        """Those whose wishes have changed."""
        self.behind: set[Subject] = set()
        """Those that failed."""

    def __iter__(self) -> Iterator[Subject]:
        return iter(self._by_identity.values())

    def __len__(self) -> int:
        return len(self._by_identity)

    def find(self, identity: int) -> Subject | None:
        """Give a subject, or None."""
        return self._by_identity.get(identity)

    def get(self, identity: int) -> Subject:
        """Give a subject. NotFound."""
        subject = self._by_identity.get(identity)
        if subject is None:
            raise NotFound(f"find identity {identity}: no endpoint here has it")
        return subject

    def of_endpoint(self, endpoint_id: EndpointId) -> Subject | None:
        """Give the subject that an endpoint's row names; None while it names none."""
        identity = self._live.get(endpoint_id)
        return None if identity is None else self._by_identity.get(identity)

    def is_known(self, subject: Subject) -> bool:
        """Tell whether the labels of a subject are known; those of an adopted one may be not yet."""
        return subject.number in self._index

    def make(self, facts: IdentityFacts) -> Subject:
        """Begin a subject; `build` gives it its rules."""
        subject = Subject(facts, self._blocks, self._named_ports_of)
        self._by_identity[facts.number] = subject
        self.touched.add(subject)
        return subject

    def build(self, subject: Subject, *, is_enforced: bool) -> None:
        """Let a subject hold all rules that select it, or none."""
        number = subject.number
        if number in self._index:
            selecting = [selection for selection in self._index if number in selection.members]
        else:
            selecting = self._index.add_identity(subject.facts)
        parts = sorted(
            (part for selection in selecting for part in selection.users), key=_by_number
        )
        subject.build(parts if is_enforced else ())
        self.touched.add(subject)

    def rename(self, subject: Subject, facts: IdentityFacts) -> None:
        """Take other labels for a subject; the caller builds it next."""
        self._index.remove_identity(subject.number)
        subject.facts = facts

    def end(self, subject: Subject) -> None:
        """Forget a subject."""
        del self._by_identity[subject.number]
        self._index.remove_identity(subject.number)
        self.touched.discard(subject)
        self.behind.discard(subject)

    def without_endpoints(self) -> list[Subject]:
        """Give the subjects that no endpoint has any more."""
        return [subject for subject in self if not subject.live and not subject.pending_endpoints]

    def expect(self, endpoint_id: EndpointId, subject: Subject) -> None:
        """Note that an endpoint's row is going to name a subject."""
        self._forget_coming(endpoint_id)
        self._wanted[endpoint_id] = subject.number
        if self._live.get(endpoint_id) != subject.number:
            subject.pending_endpoints.add(endpoint_id)

    def settle(self, endpoint_id: EndpointId) -> None:
        """Note that an endpoint's row names what was expected."""
        subject = self._by_identity[self._wanted[endpoint_id]]
        former = self.of_endpoint(endpoint_id)
        if former is not None:
            former.live.discard(endpoint_id)
        subject.pending_endpoints.discard(endpoint_id)
        subject.live.add(endpoint_id)
        self._live[endpoint_id] = subject.number

    def leave(self, endpoint_id: EndpointId) -> None:
        """Forget an endpoint."""
        self._forget_coming(endpoint_id)
        subject = self.of_endpoint(endpoint_id)
        if subject is not None:
            subject.live.discard(endpoint_id)
        self._wanted.pop(endpoint_id, None)
        self._live.pop(endpoint_id, None)

    def spread(self, deltas: Iterable[Delta]) -> None:
        """Bring changes of selections to the subjects whose rules use them."""
        for selection, came, went in deltas:
            for rule in selection.users:
                for number in rule.part.selection.members:
                    subject = self._by_identity[number]
                    if rule.part in subject.parts:
                        subject.select(rule, came, went)
                        self.touched.add(subject)

    def change(self, change: PartChange) -> None:
        """Bring the change of a rule set to the subjects that it selects."""
        for number in change.part.selection.members:
            subject = self._by_identity[number]
            subject.change(change)
            self.touched.add(subject)

    def take_work(self) -> list[Subject]:
        """Give the subjects that have work to do, by number, once."""
        # Those that are behind are tried at every change: what did not fit may fit when something else became
        # smaller. By number, so that a change has the same order in each run.
        todo = sorted(self.touched | self.behind, key=_by_number)
        self.touched.clear()
        return todo

    def fall_behind(self, subject: Subject, error: PodwireError) -> None:
        """Note a failure: what was in force stays."""
        subject.failure = error
        self.behind.add(subject)

    def catch_up(self, subject: Subject) -> None:
        """Note that a subject has what it wants."""
        subject.failure = None
        self.behind.discard(subject)

    def failures(self, changed: Collection[PolicyId] = ()) -> tuple[Failure, ...]:
        """Give all that failed, by identity; `changed`: the policies to be named first."""
        return tuple(
            Failure(
                subject.number,
                subject.failure,
                tuple(sorted(subject.live)),
                tuple(sorted(subject.policies, key=lambda policy: policy not in changed)),
            )
            for subject in sorted(self.behind, key=_by_number)
            if subject.failure is not None
        )

    def _forget_coming(self, endpoint_id: EndpointId) -> None:
        identity = self._wanted.get(endpoint_id)
        if identity in self._by_identity:
            self._by_identity[identity].pending_endpoints.discard(endpoint_id)

    def _named_ports_of(self, number: int) -> tuple[NamedPort, ...]:
        facts = self._peers.facts(number)
        return facts.named_ports if facts else ()


def _by_number(numbered: Subject | Part) -> int:
    return numbered.number
