"""How an endpoint ends: undone at once, forgotten only when the kernel has really released its device.

Used by DEL, GC, a failed ADD and restore, under the node's turn. Between `end` and the `settle` that sees the device
gone, the endpoint is `disconnecting`: it passes no packet and its addresses stay in quarantine. Anything that could
not be undone or written (because of a full disk, for example) stays here, and the next `settle` tries it again.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from podwire.control.attach.steps import DEVICE, RECIPES, Context, Step, undo_steps
from podwire.control.endpoint.states import DeviceGone, DisconnectAccepted
from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.control.ipam.interface import Ipam
from podwire.model.endpoint import EndpointRecord, Phase
from podwire.model.errors import StorageFailure
from podwire.model.ids import EndpointId
from podwire.model.interfaces import EndpointDirectories, Journal

_log = logging.getLogger(__name__)


class _Ending(msgspec.Struct, frozen=True):
    record: EndpointRecord
    undone: bool
    device_gone: bool = False
    written: bool = True
    """Whether the journal says that this endpoint ends."""


@dataclass(kw_only=True)
class Endings:
    """Endpoints between DEL and the moment when nothing of them is left."""

    table: EndpointTable
    journal: Journal
    ipam: Ipam
    context: Context
    directories: EndpointDirectories
    _endings: dict[EndpointId, _Ending] = field(default_factory=dict)
    _reaping: threading.Lock = field(default_factory=threading.Lock)
    _reaped: deque[EndpointId] = field(default_factory=deque)
    """Endpoints whose devices are gone, noted by `reap` and taken by `settle`."""

    def __len__(self) -> int:
        return len(self._endings)

    def end(
        self, endpoint: Endpoint, cause: str, steps: Sequence[Step] | None = None
    ) -> EndpointRecord:
        """Undo `steps` (default: the whole recipe); the addresses are held until `settle` sees the device gone.

        Raises StorageFailure only when the end could be neither written down nor completed on the spot.
        """
        endpoint.report(DisconnectAccepted(cause))
        record = msgspec.structs.replace(endpoint.record, phase=Phase.DELETING)
        # The record says `DELETING` before anything is undone. After a kill from here on, the next start ends the
        # endpoint instead of adopting half of it.
        self.table.replace_record(record)
        unwritten = self._write(record)
        self.context.regenerator.queue.forget(record.id)
        # The address stays held until the device is gone. Given out now, it could get packets that are meant for its
        # last owner.
        self.ipam.quarantine(record.id)
        done = RECIPES[record.device.kind] if steps is None else steps
        undone = undo_steps(done, self.context, record)
        self.directories.remove(record.id)
        # A failed ADD that never reached the step DEVICE has no device that a reaper could report as gone.
        self._endings[record.id] = _Ending(
            record, undone, device_gone=DEVICE not in done, written=unwritten is None
        )
        if unwritten is not None:
            self._complete_unwritten(record.id, unwritten)
        return record

    def confirm(self, endpoint_id: EndpointId) -> None:
        """Before somebody is told once more that an endpoint ends: StorageFailure while that is neither written down
        nor complete.
        """
        ending = self._endings.get(endpoint_id)
        if ending is None or ending.written:
            return
        failure = self._write(ending.record)
        if failure is not None:
            self._complete_unwritten(endpoint_id, failure)
        else:
            self._endings[endpoint_id] = replace(ending, written=True)

    def reap(self) -> None:
        """Delete condemned devices in one batch and note whose are gone. Needs no turn: it waits for the kernel."""
        # Two threads must not delete the same devices at once, and the second one needs what the first one found.
        with self._reaping:
            self._reaped.extend(self.context.datapath.reap_devices())

    def settle(self, *, reap: bool = True) -> int:
        """Retry what failed, reap unless the caller just did, forget what is gone; tells how many that were."""
        for endpoint_id, ending in self._endings.items():
            if not ending.undone:
                undone = undo_steps(RECIPES[ending.record.device.kind], self.context, ending.record)
                self._endings[endpoint_id] = replace(ending, undone=undone)
        if reap:
            # When another thread is at it, this waits for it, and then has its findings too.
            self.reap()
        # `reap` runs without the turn, so it only notes what it saw. Endings change here, under the turn.
        while self._reaped:
            endpoint_id = self._reaped.popleft()
            if endpoint_id in self._endings:
                self._endings[endpoint_id] = replace(self._endings[endpoint_id], device_gone=True)
        finished = [
            endpoint_id
            for endpoint_id, ending in self._endings.items()
            if ending.undone and ending.device_gone
        ]
        return self._forget(finished)

    def _write(self, record: EndpointRecord) -> StorageFailure | None:
        try:
            self.journal.write(record)
        except StorageFailure as failure:
            return failure
        return None

    def _complete_unwritten(self, endpoint_id: EndpointId, failure: StorageFailure) -> None:
        """Nothing on disk says that this endpoint ends, so it must be over before anybody is told that it is."""
        self.settle()
        ending = self._endings.get(endpoint_id)
        if ending is not None and not (ending.undone and ending.device_gone):
            raise failure

    def _forget(self, endpoint_ids: Sequence[EndpointId]) -> int:
        if not endpoint_ids:
            return 0
        try:
            self.journal.remove(endpoint_ids)
        except StorageFailure as failure:
            # A record on disk still names the addresses. They stay held here, because a restart would hold them
            # again.
            _log.warning("forget ended endpoints; it is retried", extra={"error": failure.message})
            return 0
        for endpoint_id in endpoint_ids:
            del self._endings[endpoint_id]
            self.ipam.release(endpoint_id)
            endpoint = self.table.get(endpoint_id)
            if endpoint is not None:
                endpoint.report(DeviceGone())
            self.table.discard(endpoint_id)
        return len(endpoint_ids)
