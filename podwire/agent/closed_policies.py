"""Let people know of policies that close: in `podwire status`, and by Events at the policies.

Used by `agent.duties.policy`, on its thread and under the node's turn. Decides nothing about policies. Invariant: an
Event is told by the nodes whose pods a policy closes: thousands of agents see it, and the others have nothing to say.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from podwire.agent.duties.unreadable import advise
from podwire.agent.health import WarningList
from podwire.control.endpoint.enforce import Enforcer
from podwire.control.endpoint.policies import ClosedPolicy, PolicyObjects
from podwire.control.policy.reading import name_policy
from podwire.control.policy.rule import PolicyId
from podwire.model.errors import NotFound
from podwire.model.store import ObjectKey
from podwire.model.store.events import Events, NoEvents, Subject

WARNING: Final = "closed-policy"
REASON: Final = "PolicyNotEnforceable"


@dataclass
class ClosedPolicies:
    """What people are told of the closed policies among `objects`."""

    objects: PolicyObjects
    enforcer: Enforcer
    warn: Callable[[str, str], None] = lambda _key, _message: None
    """Shows a message under a key until an empty one takes it back."""
    events: Events = field(default_factory=NoEvents)
    _shown: Mapping[ObjectKey, ClosedPolicy] = field(default_factory=dict)
    _told: dict[ObjectKey, ClosedPolicy] = field(default_factory=dict)
    _list: WarningList = field(
        default_factory=lambda: WarningList(WARNING, "more policies cannot be enforced whole")
    )

    def show(self, named: Collection[ObjectKey]) -> None:
        """Let `podwire status` name them, but for those that the watch has `named`: they cannot even be read."""
        closed = self.objects.closed
        if closed == self._shown:
            return
        self._shown = dict(closed)
        self._list.show(
            self.warn, [describe(key, closed[key]) for key in sorted(closed) if key not in named]
        )

    def tell(self) -> None:
        """Tell an Event at each that closes pods of this node, once for each thing that is wrong with it."""
        closed = self.objects.closed
        self._told = {
            key: policy for key, policy in self._told.items() if closed.get(key) == policy
        }
        if len(self._told) == len(closed):
            return
        selecting = self._list_selecting()
        for key, policy in closed.items():
            if key not in self._told and name_policy(key) in selecting:
                self._told[key] = policy
                self.events.tell(Subject(key, policy.uid), REASON, describe(key, policy))

    def _list_selecting(self) -> set[PolicyId]:
        """Name the policies that select any endpoint of this node."""
        selecting: set[PolicyId] = set()
        for identity in {endpoint.config.identity for endpoint in self.enforcer.table}:
            try:
                selecting.update(self.enforcer.engine.policies_of(identity))
            except NotFound:
                continue  # it is being attached
        return selecting


def describe(key: ObjectKey, closed: ClosedPolicy) -> str:
    """Say what is wrong with a policy, what it does meanwhile, and what to do."""
    how = closed.how
    return f"{key} cannot be enforced whole: {how.reason}; it closes {how.closes}. {advise(key)}"
