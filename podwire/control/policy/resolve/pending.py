"""Changes that were noted and are not in force yet.

Owned by the engine. Pure. Invariant: only the last change of each name is kept, so a batch of changes is one change.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from podwire.control.policy.labels_match import LabelSet, matches
from podwire.control.policy.oracle import Enforcement
from podwire.control.policy.resolve.cidrs import CidrTable
from podwire.control.policy.rule import (
    CidrGroup,
    LabelSelector,
    PeerSelector,
    PolicyId,
    PolicyRules,
)
from podwire.model.endpoint import IPNetwork
from podwire.model.identity import IdentityFacts


@dataclass
class Pending:
    """Wishes by name; None, or no rules, = it is to go."""

    identities: dict[int, IdentityFacts | None] = field(default_factory=dict)
    policies: dict[PolicyId, tuple[PolicyRules, ...]] = field(default_factory=dict)
    groups: dict[str, CidrGroup | None] = field(default_factory=dict)
    enforcement: Enforcement | None = None

    def __bool__(self) -> bool:
        return bool(self.identities or self.policies or self.groups or self.enforcement is not None)

    def count_rules(self) -> int:
        """Give how many numbers of rules may be needed."""
        # One more for each part: its default denial has a number too.
        return sum(len(part.rules) + 1 for parts in self.policies.values() for part in parts)

    def merge_groups(self, known: Mapping[str, CidrGroup]) -> dict[str, CidrGroup]:
        """Give the groups as they will be after the pending changes."""
        groups = {**known, **self.groups}
        return {name: group for name, group in groups.items() if group is not None}

    def find_networks(
        self, cidrs: CidrTable, groups: Mapping[str, CidrGroup]
    ) -> Iterator[IPNetwork]:
        """Give the prefixes that must have numbers before the wishes can be fulfilled."""
        if self.groups:
            yield from cidrs.needs_of_groups(groups)
        for policy in self.policies:
            for peer in self._peers(policy):
                if not isinstance(peer, LabelSelector):
                    yield from cidrs.needs(peer, groups)

    def speaks_of_cidrs(self, policy: PolicyId) -> bool:
        """Tell whether a wished policy has peers that are addresses."""
        return any(not isinstance(peer, LabelSelector) for peer in self._peers(policy))

    def concerns(self, facts: IdentityFacts) -> bool:
        """Tell whether a wish that is still here may be for this identity's endpoints."""
        labels = LabelSet(facts.labels)
        parts = (part for parts in self.policies.values() for part in parts)
        return bool(self.groups) or any(matches(part.subject, labels) for part in parts)

    def _peers(self, policy: PolicyId) -> Iterable[PeerSelector]:
        return (
            peer for part in self.policies[policy] for rule in part.rules for peer in rule.peers
        )
