"""The policy engine as endpoints see it: what is known goes in, rows and states of endpoints come out.

Called by the regenerator (one endpoint's build) and by the agent's policy duty (a change of policies or identities),
always under the node's turn but for `hear`. Invariant: what an endpoint is said to enforce is what its row holds; one
that could not follow is `not-ready`, keeps what was in force, and is tried again.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from podwire.control.endpoint import states
from podwire.control.endpoint.queue import BuildQueue, Level
from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.control.identity.known import IdentityChange
from podwire.control.policy.engine import Failure, Outcome, PolicyEngine, PolicyValues
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import Unavailable
from podwire.model.identity import IdentityFacts
from podwire.model.ids import EndpointId
from podwire.model.interfaces import Clock, EndpointConfig, EndpointDirectories, PolicyDatapath

_log = logging.getLogger(__name__)

MAY_FOLLOW = frozenset({states.State.READY, states.State.NOT_READY})
"""States in which a change of policy is a regeneration of its own; in others a build comes anyway."""


POLICIES_NAMED = 3
"""Of those that select an endpoint which is behind: enough to find the one that is too much."""


def describe_failure(failure: Failure) -> str:
    """Say why endpoints keep what was in force before, and by which policies."""
    named = ", ".join(map(str, failure.policies[:POLICIES_NAMED]))
    return f"{failure.error.message} ({named})" if named else failure.error.message


def rows_of(
    table: EndpointTable, endpoint_ids: Sequence[EndpointId], values: PolicyValues
) -> Iterator[tuple[EndpointRecord, EndpointConfig]]:
    """Give the rows of endpoints with other values of policy; what ended meanwhile has none."""
    for endpoint_id in endpoint_ids:
        endpoint = table.get(endpoint_id)
        if endpoint is not None and endpoint.state is not states.State.DISCONNECTING:
            yield endpoint.record, values.fill(endpoint.config)


@dataclass
class Enforcer:
    """Keeps endpoints at the policies of one node."""

    engine: PolicyEngine
    table: EndpointTable
    datapath: PolicyDatapath
    directories: EndpointDirectories
    queue: BuildQueue
    clock: Clock
    revision: int = 0
    """Of the store, up to which policies were taken in."""
    failures: tuple[Failure, ...] = ()
    """Identities whose endpoints keep what was in force before, and why."""
    is_complete: Callable[[], bool] = lambda: True
    """Whether all that policy is made of was heard, in this life or an earlier one. Before, nothing is built, applied
    or collected: rows stay as they are."""
    _heard: deque[IdentityChange] = field(default_factory=deque)

    def hear(self, change: IdentityChange) -> None:
        """Note a change of identities, on any thread; it is taken in before the next thing that is done."""
        self._heard.append(change)

    @property
    def has_heard(self) -> bool:
        """Tell whether identities changed since the last time they were taken in."""
        return bool(self._heard)

    def take_in(self) -> None:
        """Hand what was heard of identities to the engine."""
        while self._heard:
            change = self._heard.popleft()
            for facts in change.added:
                self.engine.identity_added(facts)
            for number in change.removed:
                self.engine.identity_removed(number)

    def apply(self, cause: str) -> Outcome:
        """Bring what changed into force for every endpoint."""
        self.take_in()
        if not self.is_complete():
            return Outcome(self.engine.revision)
        outcome = self.engine.apply()
        self._report(outcome, cause)
        self.failures = outcome.failed
        return outcome

    def collect(self) -> None:
        """Delete what no row and no rule names any more; waits for the kernel when there is any."""
        if not self.is_complete():
            return
        self._report(self.engine.collect(), "addresses left the rules")

    def attach(self, endpoint: Endpoint, base: EndpointConfig) -> EndpointConfig:
        """Give what an endpoint's row must hold now; its slot is filled.

        Raises Unavailable while not all that policy is made of was heard, PolicyOverflow, KernelFailure.
        """
        if not self.is_complete():
            raise Unavailable(
                "find the policy of an endpoint: policies and identities were never read from the store",
                hint="the store must be there for the first start of a node; see `podwire status`",
            )
        self.take_in()
        record = endpoint.record
        if record.identity_labels:
            facts = IdentityFacts(record.identity, record.identity_labels, record.named_ports)
            self.engine.identity_added(facts)
        before = endpoint.config
        endpoint.config = replace(
            before, audit=base.audit, host_allowed=base.host_allowed, trace=base.trace
        )
        renew = (before.audit, before.host_allowed) != (base.audit, base.host_allowed)
        if self.engine.is_pending:
            # What this changes for others is to be reported also when this endpoint cannot follow.
            self.apply("policy changed")
        outcome = self.engine.attach(record.id, record.identity, renew=renew)
        self._report(outcome, "policy changed")
        return self.engine.config_for(record.identity).fill(base)

    def adopt(self, endpoint: Endpoint, config: EndpointConfig) -> None:
        """At start: an endpoint lives whose row holds `config`, which an earlier agent wrote."""
        endpoint.config = config
        self.engine.adopt(endpoint.record.id, config)

    def realized(self, endpoint: Endpoint) -> None:
        """Note that an endpoint's row holds what `attach` gave."""
        self.engine.realized(endpoint.record.id)
        endpoint.realized_revision = self.revision

    def detach(self, endpoint_id: EndpointId) -> None:
        """Forget an endpoint whose row is gone."""
        self.engine.detach(endpoint_id)

    def retry(self, endpoint: Endpoint, cause: str) -> None:
        """Have an endpoint built as soon as possible that could not be built before."""
        self.queue.request(endpoint.record.id, Level.REWRITE, cause, self.clock.boottime_ns())

    def compare(self, endpoint: Endpoint) -> list[str]:
        """Name how the slot of an endpoint differs from its policies; empty = it does not."""
        slot = endpoint.config.slot
        if not slot:
            return []
        wanted = self.engine.rows_for(endpoint.record.identity)
        found = self.datapath.read_slot(slot)
        missing = sum(found.get(key) != entry for key, entry in wanted.items())
        extra = sum(key not in wanted for key in found)
        if not missing and not extra:
            return []
        return [
            f"policy slot {slot}: {missing} of {len(wanted)} entries are missing or differ,"
            f" {extra} are too many"
        ]

    def _report(self, outcome: Outcome, cause: str) -> None:
        failed = {one for failure in outcome.failed for one in failure.endpoints}
        for endpoint_id, values in outcome.changed.items():
            self._note_change(endpoint_id, values, cause)
        for endpoint_id in outcome.recovered:
            if endpoint_id not in outcome.changed:
                self._move(endpoint_id, cause, states.BuildSucceeded())
        known = {failure.identity for failure in self.failures}
        for failure in outcome.failed:
            if failure.identity not in known:
                self._log_failure(failure)
            self._note_failure(failure, cause)
        for endpoint in self.table:
            if endpoint.record.id not in failed and endpoint.state is states.State.READY:
                endpoint.realized_revision = self.revision

    def _note_change(self, endpoint_id: EndpointId, values: PolicyValues, cause: str) -> None:
        endpoint = self.table.get(endpoint_id)
        if endpoint is None:
            return
        endpoint.config = values.fill(endpoint.config)
        self._tell(partial(self.directories.publish, endpoint.record, endpoint.config))
        self._move(endpoint_id, cause, states.BuildSucceeded())

    @staticmethod
    def _log_failure(failure: Failure) -> None:
        _log.warning(
            "policy is not in force; what was in force stays, it is retried",
            extra={
                "identity": failure.identity,
                "cause": ", ".join(map(str, failure.policies[:POLICIES_NAMED])),
                "error": failure.error.message,
            },
        )

    def _note_failure(self, failure: Failure, cause: str) -> None:
        """Let endpoints be behind; those that are already keep their place among the retries."""
        for endpoint_id in failure.endpoints:
            endpoint = self.table.get(endpoint_id)
            if endpoint is None or endpoint.state is not states.State.READY:
                continue
            self._move(endpoint_id, cause, states.BuildFailed(describe_failure(failure)))
            self.queue.request(
                endpoint_id, Level.POLICY, "retry after failure", self.clock.boottime_ns()
            )

    def _move(self, endpoint_id: EndpointId, cause: str, end: states.Event) -> None:
        """Log the regeneration that has just been done, as the states it went through."""
        endpoint = self.table.get(endpoint_id)
        if endpoint is None or endpoint.state not in MAY_FOLLOW:
            return
        for event in (states.RegenerationRequested(cause), states.BuildStarted(), end):
            endpoint.report(event)

    @staticmethod
    def _tell(write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as failure:
            _log.warning("write the endpoint's directory", extra={"error": str(failure)})
