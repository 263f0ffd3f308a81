"""Change a living endpoint as a person asks for, and have it built before the person gets an answer.

Made by `agent.main` for `agent.api.policies`, on its worker threads. Invariant: an endpoint that is ending or has
ended is not changed. Each change looks its endpoint up again under the node's turn, because a DEL may have come since
the caller saw it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from podwire.control.endpoint.queue import Level
from podwire.control.endpoint.regenerate import Regenerator
from podwire.control.endpoint.states import State
from podwire.control.endpoint.table import EndpointTable
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import NotFound
from podwire.model.ids import EndpointId

_ENDING = frozenset({State.DISCONNECTING, State.DISCONNECTED})


class Records(Protocol):
    """Where records are kept."""

    def write(self, record: EndpointRecord) -> None:
        """Have a record on disk."""
        ...


@dataclass(frozen=True)
class EndpointChanges:
    """What people change of endpoints."""

    table: EndpointTable
    journal: Records
    regenerator: Regenerator
    turn: threading.RLock
    relabel: Callable[[EndpointId, Sequence[str]], EndpointRecord]
    """Change labels and ask for a build (`IdentityDuty.change_labels`)."""

    def change_labels(self, endpoint_id: EndpointId, changes: Sequence[str]) -> EndpointRecord:
        """Change labels, waiting for the store like an ADD; whoever asked may count on the new policy.

        Raises NotFound, InvalidRequest, Unavailable, Conflict.
        """
        record = self.relabel(endpoint_id, changes)
        self._build_due()
        return record

    def set_audit(self, endpoint_id: EndpointId, audit: bool | None) -> EndpointRecord:
        """Let policies of an endpoint only report (True), be enforced (False), or do what the node says (None).

        Raises NotFound when it has ended, or is about to; StorageFailure.
        """
        with self.turn:
            endpoint = self.table.get(endpoint_id)
            if endpoint is None or endpoint.state in _ENDING:
                raise NotFound(f"change endpoint {endpoint_id}: there is none")
            record = msgspec.structs.replace(endpoint.record, policy_audit=audit)
            self.journal.write(record)
            self.table.replace_record(record)
            self.regenerator.request(endpoint_id, Level.POLICY, "policy audit changed")
        self._build_due()
        return record

    def _build_due(self) -> None:
        done = True
        while done:
            # A turn for each: no ADD waits for more than one of them.
            with self.turn:
                done = self.regenerator.run_due()
