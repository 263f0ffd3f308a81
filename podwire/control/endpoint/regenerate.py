"""Bring one endpoint's datapath to its desired state, including its policy, and report to the state machine.

Called inside ADD for the first regeneration and by the agent's task `regenerations` for every later one, always under
the node's turn. One that fails changes nothing in the kernel: what was in force stays, the endpoint becomes
`not-ready` and the queue tries again.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from podwire.control.endpoint import states
from podwire.control.endpoint.enforce import MAY_FOLLOW, Enforcer
from podwire.control.endpoint.queue import Level, Regeneration, RegenerationQueue
from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.model.errors import PodwireError
from podwire.model.ids import EndpointId
from podwire.model.interfaces import Clock, Datapath, EndpointConfig, EndpointDirectories

_log = logging.getLogger(__name__)

BaseConfig = Callable[[Endpoint], EndpointConfig]
"""What the datapath should be told of an endpoint now, but for its policy."""


@dataclass(kw_only=True)
class Regenerator:
    """Regenerates endpoints one at a time; owns the queue of those that are due."""

    table: EndpointTable
    datapath: Datapath
    directories: EndpointDirectories
    clock: Clock
    base: BaseConfig
    enforcer: Enforcer

    @property
    def queue(self) -> RegenerationQueue:
        """Those that are due."""
        return self.enforcer.queue

    def request(self, endpoint_id: EndpointId, level: Level, cause: str) -> None:
        """Ask for a regeneration; the state shows it at once."""
        endpoint = self.table.get(endpoint_id)
        if endpoint is None or endpoint.state is states.State.DISCONNECTING:
            return
        endpoint.report(states.RegenerationRequested(cause))
        self.queue.request(endpoint_id, level, cause, self.clock.boottime_ns())

    def request_traces(self, cause: str) -> None:
        """Ask for a regeneration of every endpoint whose programs are to tell what passes and do not, or the reverse.

        In the node's turn. What is being regenerated, or has to be, asks what is wanted when its turn comes.
        """
        for endpoint in self.table:
            differs = endpoint.config.trace != self.base(endpoint).trace
            if differs and endpoint.state is states.State.READY:
                self.request(endpoint.record.id, Level.POLICY, cause)

    def run_due(self) -> bool:
        """Do one regeneration that is due; False = there is none. A failure is logged, kept for people, and retried."""
        regeneration = self.queue.take(self.clock.boottime_ns())
        if regeneration is None:
            return False
        endpoint = self.table.get(regeneration.endpoint_id)
        # An endpoint that ended while its regeneration waited needs no retry.
        ok = endpoint is None or self._try_regenerate(endpoint, regeneration)
        self.queue.finish(regeneration, ok=ok, now_ns=self.clock.boottime_ns())
        return True

    def regenerate_new(self, endpoint: Endpoint) -> None:
        """Do the first regeneration of an endpoint, like `regenerate_now`.

        It needs no more than POLICY, because its device was made with the current programs a moment ago. Its row is
        not asked for, because a moment ago it was given the guard.
        """
        self._regenerate(endpoint)

    def regenerate_now(self, endpoint: Endpoint, level: Level) -> None:
        """Do one regeneration in the caller's turn; raises what made it fail."""

        def look() -> EndpointConfig | None:
            if level >= Level.REWRITE:
                # First: a device that cannot be repaired must not move the policies of others.
                self.datapath.repair_device(endpoint.record)
            return self.datapath.read_config(endpoint.record)

        self._regenerate(endpoint, look)

    def _regenerate(
        self, endpoint: Endpoint, look: Callable[[], EndpointConfig | None] | None = None
    ) -> None:
        """Do one; `look` gives what the row holds, None = only the guard. Without it the endpoint is new."""
        endpoint.report(states.RegenerationStarted())
        config = endpoint.config
        try:
            row = look() if look else None
            # The policy is written before the row that names it. The row's one write switches from the old policy to
            # the new one.
            config = self.enforcer.attach(endpoint, self.base(endpoint), row)
            self.datapath.open_endpoint(endpoint.record, config, is_new=look is None)
        except PodwireError as error:
            endpoint.config = self._read_row(endpoint)
            endpoint.report(states.RegenerationFailed(error.message))
            self.directories.keep_failure(endpoint.record, config, error.message)
            raise
        # After the row, never before: what the directory shows is in force.
        self.directories.publish(endpoint.record, config)
        endpoint.config = config
        self.enforcer.realized(endpoint)
        endpoint.report(states.RegenerationSucceeded())

    def _read_row(self, endpoint: Endpoint) -> EndpointConfig:
        """Give what is really in force: a regeneration can fail when half of it is done."""
        try:
            return self.datapath.read_config(endpoint.record) or EndpointConfig()
        except PodwireError:
            return endpoint.config

    def _try_regenerate(self, endpoint: Endpoint, regeneration: Regeneration) -> bool:
        if endpoint.state in MAY_FOLLOW:
            # A retry may come when a change of policy has already put right what failed.
            endpoint.report(states.RegenerationRequested(", ".join(regeneration.causes)))
        try:
            self.regenerate_now(endpoint, regeneration.level)
        except PodwireError as error:
            _log.warning(
                "regenerate endpoint failed; the datapath before it stays in force",
                extra={"endpoint": endpoint.record.id, "error": error.message},
            )
            return False
        return True
