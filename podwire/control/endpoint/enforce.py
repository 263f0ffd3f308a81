"""The policy engine as endpoints see it: from known policies and identities to rows and states of endpoints.

Called by the regenerator (one endpoint) and by the agent's policy duty (a change of policies or identities),
always under the node's turn, except for `queue_identity_change`. Invariant: what an endpoint is said to enforce is
what its row holds. An endpoint that could not follow is `not-ready`, keeps what was in force, and is tried again.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from podwire.control.endpoint import states
from podwire.control.endpoint.policies import oldest_revision
from podwire.control.endpoint.queue import Level, RegenerationQueue
from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.control.identity.known import IdentityChange
from podwire.control.policy.engine import PolicyEngine
from podwire.control.policy.realize.outcome import Failure, Outcome
from podwire.control.policy.resolve.subject import PolicyValues
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import NotFound, PolicyOverflow, Unavailable
from podwire.model.identity import IdentityFacts
from podwire.model.ids import EndpointId
from podwire.model.interfaces import Clock, EndpointConfig, EndpointDirectories, PolicyDatapath
from podwire.model.store import Revisions

_log = logging.getLogger(__name__)

MAY_FOLLOW = frozenset({states.State.READY, states.State.NOT_READY})
"""States in which a change of policy is a regeneration of its own; in others one comes anyway."""


POLICIES_NAMED = 3
"""How many policies the error of an endpoint that is behind names: enough to find the one that does not fit."""


def describe_failure(failure: Failure) -> str:
    """Say why endpoints keep what was in force before, and by which policies."""
    if isinstance(failure.error, PolicyOverflow):
        return failure.error.message  # it names those that take the room
    named = ", ".join(map(str, failure.policies[:POLICIES_NAMED]))
    return f"{failure.error.message} ({named})" if named else failure.error.message


def _bases_of_verdicts(config: EndpointConfig) -> tuple[bool, bool]:
    """Give what verdicts rest on beside policy: flows judged under one must not live on under another."""
    return config.audit, config.host_allowed


def _without(failure: Failure, endpoint_id: EndpointId) -> Failure:
    return replace(
        failure, endpoints=tuple(number for number in failure.endpoints if number != endpoint_id)
    )


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
    queue: RegenerationQueue
    clock: Clock
    revisions: Revisions = field(default_factory=dict)
    """Of each kind of policy, up to which it was taken in; replaced, never changed."""
    failures: tuple[Failure, ...] = ()
    """Identities whose endpoints keep what was in force before, and why."""
    is_complete: Callable[[], bool] = lambda: True
    """Whether all that policy is made of was heard, in this life or an earlier one. Before, nothing is regenerated,
    applied or collected: rows stay as they are."""
    reached: Callable[[Revisions], None] = lambda _revisions: None
    """Told up to which revisions policies were taken in."""
    _heard: deque[IdentityChange] = field(default_factory=deque)
    _damaged: set[int] = field(default_factory=set)
    """Identities whose slots were changed by somebody else."""

    def queue_identity_change(self, change: IdentityChange) -> None:
        """Note a change of identities, on any thread; it is taken in before the next thing that is done."""
        self._heard.append(change)

    @property
    def has_heard(self) -> bool:
        """Tell whether identities changed since the last time they were taken in."""
        return bool(self._heard)

    def drain(self) -> None:
        """Hand what was heard of identities to the engine."""
        while self._heard:
            change = self._heard.popleft()
            for facts in change.added:
                self.engine.identity_added(facts)
            for number in change.removed:
                self.engine.identity_removed(number)

    def apply(self, cause: str) -> Outcome:
        """Bring what changed into force for every endpoint."""
        self.drain()
        if not self.is_complete():
            return Outcome(self.engine.generation)
        outcome = self.engine.apply()
        self._report(outcome, cause)
        return outcome

    @property
    def revision(self) -> int:
        """A revision up to which every kind of policy was taken in."""
        return oldest_revision(self.revisions)

    def mark_revisions(self, revisions: Revisions) -> None:
        """Note that the store reached these revisions without a change of policy, so endpoints are at them, too."""
        self.take_in_up_to(revisions)
        for endpoint in self.table:
            if endpoint.state is states.State.READY and not endpoint.policy_error:
                endpoint.realized_revisions = self.revisions

    def take_in_up_to(self, revisions: Revisions) -> None:
        """Note that policies were taken in up to these revisions, and are about to be applied."""
        later = {kind: max(self.revisions.get(kind, 0), at) for kind, at in revisions.items()}
        self.revisions = {**self.revisions, **later}
        self.reached(self.revisions)

    def collect_waste(self) -> None:
        """Delete what no row and no rule names any more, counters of rules included. For quiet moments: deleting waits
        for the kernel. With nothing to delete the call costs nothing."""
        if self.engine.has_waste and self.is_complete():
            self._report(self.engine.collect(), "addresses left the rules")

    def attach(
        self, endpoint: Endpoint, base: EndpointConfig, row: EndpointConfig | None
    ) -> EndpointConfig:
        """Give what an endpoint's row must hold now; its slot is filled. `row`: what it holds, None = nothing yet.

        `endpoint.config` has what `base` says from here on, so that no revision comes into force without it; after a
        failure the caller puts right what it says. Raises Unavailable while not all that policy is made of was heard,
        PolicyOverflow, KernelFailure.
        """
        if not self.is_complete():
            raise Unavailable(
                "find the policy of an endpoint: policies and identities were never read from the store",
                hint="the store must be reachable when a node starts for the first time; see `podwire status`",
            )
        self.drain()
        record = endpoint.record
        if record.identity_labels:
            facts = IdentityFacts(record.identity, record.identity_labels, record.named_ports)
            self.engine.identity_borne(facts)
        endpoint.config = msgspec.structs.replace(
            endpoint.config, audit=base.audit, host_allowed=base.host_allowed, trace=base.trace
        )
        if self.engine.is_pending:
            # What this changes for others is to be reported also when this endpoint cannot follow.
            self.apply("policy changed")
        renew = row is not None and _bases_of_verdicts(row) != _bases_of_verdicts(base)
        outcome = self.engine.attach(record.id, record.identity, renew=renew)
        # Mostly nothing is to be told: a report looks at every endpoint of the node.
        if outcome.changed or outcome.recovered or outcome.failed or self.failures:
            self._report(outcome, "policy changed")
        self._mend()
        return self.engine.config_for(record.identity).fill(base)

    def adopt(self, endpoint: Endpoint, config: EndpointConfig) -> None:
        """At start: an endpoint lives whose row holds `config`, which an earlier agent wrote."""
        endpoint.config = config
        self.engine.adopt(endpoint.record.id, config)

    def realized(self, endpoint: Endpoint) -> None:
        """Note that an endpoint's row holds what `attach` gave."""
        self.engine.realized(endpoint.record.id)
        endpoint.realized_revisions = self.revisions

    def detach(self, endpoint_id: EndpointId) -> None:
        """Forget an endpoint whose row is gone."""
        self.engine.detach(endpoint_id)
        endpoint = self.table.get(endpoint_id)
        if endpoint is not None:
            endpoint.policy_error = ""
        left = (_without(failure, endpoint_id) for failure in self.failures)
        self.failures = tuple(failure for failure in left if failure.endpoints)

    def retry(self, endpoint: Endpoint, cause: str = "retry after failure") -> None:
        """Have an endpoint regenerated as soon as possible that could not be regenerated before."""
        self.queue.request(endpoint.record.id, Level.REWRITE, cause, self.clock.boottime_ns())

    def compare(self, endpoint: Endpoint) -> list[str]:
        """Name how the slot that an endpoint's row names differs from its policies; empty = it does not. What differs
        is written again by the endpoint's next regeneration, which is asked for. Raises KernelFailure."""
        identity, slot = endpoint.config.identity, endpoint.config.slot
        if not slot:
            return []
        try:
            missing, extra = self.engine.compare_slot(identity)
        except NotFound:
            return []  # it was not taken over yet
        if not missing and not extra:
            return []
        cause = (
            f"policy slot {slot}: {len(missing)} of {len(self.engine.rows_for(identity))} entries"
            f" are missing or differ, {len(extra)} are too many"
        )
        self._damaged.add(identity)
        self.retry(endpoint, cause)
        return [cause]

    def _mend(self) -> None:
        """Write again what somebody else changed of slots."""
        for identity in sorted(self._damaged):
            try:
                self._report(self.engine.mend(identity), "entries were changed by somebody else")
            except NotFound:
                _log.debug("the slot has no owner any more", extra={"identity": identity})
            self._damaged.discard(identity)

    def _report(self, outcome: Outcome, cause: str) -> None:
        for endpoint_id, values in outcome.changed.items():
            self._note_change(endpoint_id, values, cause)
        for endpoint_id in outcome.recovered:
            if endpoint_id not in outcome.changed:
                self._note_success(endpoint_id, cause)
        known = {failure.identity for failure in self.failures}
        for failure in outcome.failed:
            if failure.identity not in known:
                self._log_failure(failure)
            self._note_failure(failure, cause)
        self.failures = outcome.failed
        errors = {
            endpoint_id: describe_failure(failure)
            for failure in outcome.failed
            for endpoint_id in failure.endpoints
        }
        for endpoint in self.table:
            endpoint.policy_error = errors.get(endpoint.record.id, "")
        self.mark_revisions(self.revisions)

    def _note_change(self, endpoint_id: EndpointId, values: PolicyValues, cause: str) -> None:
        endpoint = self.table.get(endpoint_id)
        if endpoint is None:
            return
        endpoint.config = values.fill(endpoint.config)
        self.directories.publish(endpoint.record, endpoint.config)
        self._note_success(endpoint_id, cause)

    def _note_success(self, endpoint_id: EndpointId, cause: str) -> None:
        """Make an endpoint ready whose policy is in force; if its regeneration is due again, ask for that instead."""
        endpoint = self.table.get(endpoint_id)
        if endpoint is None or endpoint.state not in MAY_FOLLOW:
            return
        is_behind = endpoint.state is states.State.NOT_READY
        is_another = endpoint.config.identity != endpoint.record.identity
        if is_behind and (is_another or self.queue.owes(endpoint_id)):
            self.queue.request(endpoint_id, Level.POLICY, cause, self.clock.boottime_ns())
        else:
            self._move(endpoint, cause, states.RegenerationSucceeded())

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
            self._move(endpoint, cause, states.RegenerationFailed(describe_failure(failure)))
            self.queue.request(
                endpoint_id, Level.POLICY, "retry after failure", self.clock.boottime_ns()
            )

    @staticmethod
    def _move(endpoint: Endpoint, cause: str, end: states.Event) -> None:
        """Log the regeneration that has just been done, as the states it went through."""
        for event in (states.RegenerationRequested(cause), states.RegenerationStarted(), end):
            endpoint.report(event)
