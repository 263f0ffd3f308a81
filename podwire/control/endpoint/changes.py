"""Change a living endpoint: its labels and identity, or whether its policies are enforced.

Used by `agent.duties.identity` for what the store says, and by `agent.api.policies` for what a person asks. Invariant:
an endpoint that is ending or has ended is not changed. Each change looks its endpoint up again under the node's turn,
because a DEL may have come since the caller saw it.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from podwire.control.endpoint.queue import Level
from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.control.identity.own_labels import change_own_labels
from podwire.control.identity.resolver import IdentityResolver, Resolution
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import Conflict, InvalidRequest, NotFound
from podwire.model.ids import EndpointId
from podwire.model.interfaces import Journal

_log = logging.getLogger(__name__)


class Regenerations(Protocol):
    """What a change asks of the regenerator; both are called under the turn."""

    def request(self, endpoint_id: EndpointId, level: Level, cause: str) -> None:
        """Have an endpoint's datapath brought to what its record says."""
        ...

    def run_due(self) -> bool:
        """Do one regeneration that is due; False when there was none."""
        ...


@dataclass(frozen=True)
class EndpointChanges:
    """Changes of the endpoints of one node."""

    table: EndpointTable
    journal: Journal
    regenerations: Regenerations
    resolver: IdentityResolver
    turn: threading.RLock

    def change_labels(self, endpoint_id: EndpointId, changes: Sequence[str]) -> EndpointRecord:
        """Set and take away labels of one endpoint; its new policy is in force when this returns.

        Waits for the store like an ADD, so it is never called under the turn. Raises NotFound, InvalidRequest,
        Unavailable, Conflict.
        """
        record = self._find_living(endpoint_id).record
        if self.resolver.pods.has(record):
            raise InvalidRequest(
                f"change labels of endpoint {endpoint_id}: they are those of Pod {record.namespace}/{record.pod}",
                hint=f"kubectl label pod -n {record.namespace} {record.pod} KEY=VALUE",
            )
        before = self.resolver.pods.own_labels(record)
        own = change_own_labels(
            before,
            changes,
            lambda key: self.resolver.sources.workload_of(before, record.namespace, key),
        )
        # Without the turn: the store may take seconds, and every ADD and DEL of the node would wait as long.
        resolution = self.resolver.resolve(own, record.named_ports, record.namespace)
        if not self.change_over(record, resolution, "labels changed by hand"):
            raise Conflict(
                f"change labels of endpoint {endpoint_id}: somebody else changed it at the same time",
                hint="do it again",
            )
        changed = self._find_living(endpoint_id).record
        self._regenerate_due()
        return changed

    def set_audit(self, endpoint_id: EndpointId, audit: bool | None) -> EndpointRecord:
        """Let policies of an endpoint only report (True), be enforced (False), or do what the node says (None).

        Raises NotFound when it has ended, or is about to; StorageFailure.
        """
        with self.turn:
            endpoint = self._find_living(endpoint_id, "change")
            record = msgspec.structs.replace(endpoint.record, policy_audit=audit)
            self.journal.write(record)
            self.table.replace_record(record)
            self.regenerations.request(endpoint_id, Level.POLICY, "policy audit changed")
        self._regenerate_due()
        return record

    def change_over(self, record: EndpointRecord, resolution: Resolution, cause: str) -> bool:
        """Write a new identity and have the datapath regenerated for it; False when the record is another by now."""
        with self.turn:
            endpoint = self.table.get(record.id)
            # The identity was computed from `record` before the turn was taken. If the record changed meanwhile, the
            # identity may be wrong for it.
            if endpoint is None or endpoint.is_ending or endpoint.record != record:
                return False
            changed = resolution.write_into(record)
            if changed == record:
                return True
            # The journal goes first. A restart after this line regenerates the endpoint with the new identity instead
            # of going back.
            self.journal.write(changed)
            self.table.replace_record(changed)
            if changed.identity != record.identity:
                cause = f"{cause}: identity {record.identity} -> {changed.identity}"
                self.regenerations.request(record.id, Level.POLICY, cause)
        _log.info(
            "the labels of an endpoint changed",
            extra={"endpoint": record.id, "identity": changed.identity, "cause": cause},
        )
        return True

    def _find_living(self, endpoint_id: EndpointId, intent: str = "find") -> Endpoint:
        endpoint = self.table.get(endpoint_id)
        if endpoint is None or endpoint.is_ending:
            raise NotFound(f"{intent} endpoint {endpoint_id}: there is none")
        return endpoint

    def _regenerate_due(self) -> None:
        done = True
        while done:
            # A turn for each: no ADD waits for more than one of them.
            with self.turn:
                done = self.regenerations.run_due()
