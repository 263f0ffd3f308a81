"""Endpoints whose rows an earlier process of the agent wrote, taken over with the first change.

Owned by the engine. Pure except for reading slots. Invariant: what such a row names is in force until it is changed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from podwire.control.policy.realize.subjects import Subjects
from podwire.control.policy.resolve.selectors import LabelIndex
from podwire.control.policy.resolve.subject import PolicyValues, Subject
from podwire.model.errors import PodwireError
from podwire.model.identity import IdentityFacts
from podwire.model.ids import EndpointId
from podwire.model.interfaces import EndpointConfig, PolicyDatapath


@dataclass
class Adopted:
    """Rows by endpoint, until they are taken."""

    rows: dict[EndpointId, EndpointConfig] = field(default_factory=dict)

    def take(
        self, subjects: Subjects, peers: LabelIndex, datapath: PolicyDatapath
    ) -> Iterable[Subject]:
        """Make subjects of what the rows name: of one identity the newest row, the others are flipped to it. Gives
        those whose labels are known, to be built."""
        rows, self.rows = self.rows, {}
        known: list[Subject] = []
        # The newest row first. The earlier process may have been killed between two rows of one flip, so rows of one
        # identity can differ.
        for endpoint_id, config in sorted(rows.items(), key=lambda item: -item[1].policy_revision):
            values = PolicyValues.read(config)
            subject = subjects.find(config.identity)
            if subject is None:
                facts = peers.facts(config.identity)
                subject = subjects.make(facts or IdentityFacts(config.identity, ()))
                _read(subject, values, datapath)
                if facts is not None:
                    known.append(subject)
            elif values != subject.values:
                subject.lingering.append(values.slot if values.slot != subject.slot else 0)
                subjects.behind.add(subject)
            subjects.expect(endpoint_id, subject)
            subjects.settle(endpoint_id)
        return known


def _read(subject: Subject, values: PolicyValues, datapath: PolicyDatapath) -> None:
    try:
        subject.adopt(values, datapath.read_slot(values.slot) if values.slot else {})
    except PodwireError:
        subject.adopt(values, {})
        # An unreadable slot is written anew under another number; until then the rows go on naming this one.
        subject.is_unsure = True
