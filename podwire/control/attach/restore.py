"""After a restart: adopt what agrees, end what is half done, forget what is gone, remove what has no owner.

`agent.node` calls it once, before any socket opens, so that no address can be given out before every living pod has
its own address back. It is safe to run twice and to be killed at any point: it reads journal and kernel, and removes
only what neither a record nor another podwire owns. Running pods keep their programs and rows throughout; rows are
written again in place.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from podwire.control.attach.ending import Endings
from podwire.control.endpoint.queue import Level
from podwire.control.endpoint.regenerate import Regenerator
from podwire.control.endpoint.states import State
from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.control.ipam.interface import Ipam
from podwire.model.endpoint import EndpointRecord, Phase
from podwire.model.errors import PodwireError
from podwire.model.ids import EndpointId
from podwire.model.interfaces import (
    Clock,
    Datapath,
    EndpointDirectories,
    Inventory,
    Journal,
    PresentDevice,
)

_log = logging.getLogger(__name__)


@dataclass
class RestoreReport:
    """What restore did, for the log and `podwire status`."""

    adopted: int = 0
    ended: int = 0
    gone: int = 0
    rebooted: int = 0
    removed: Sequence[str] = field(default=())


@dataclass(frozen=True)
class Restorer:
    """Everything restore works on."""

    journal: Journal
    datapath: Datapath
    ipam: Ipam
    table: EndpointTable
    endings: Endings
    regenerator: Regenerator
    directories: EndpointDirectories
    clock: Clock

    def restore(self) -> RestoreReport:
        """Bring memory, journal and kernel together."""
        report = RestoreReport()
        records = self._drop_earlier_boots(self.journal.list_records(), report)
        inventory = self.datapath.read_inventory()
        known = [device.endpoint_id for device in inventory.devices]
        # The kernel may know an id that the journal lost. An id is never used twice: rows, pins and counters are
        # found by it.
        self.journal.skip_ids(max([*known, *inventory.usage_ids], default=EndpointId(0)))
        present = {device.endpoint_id: device for device in inventory.devices}
        living = [record for record in records if _is_alive(record, present)]
        # Every address is held before anything is removed or adopted, those of dead endpoints included: they stay in
        # quarantine until their devices are gone.
        for record in records:
            self._hold(record, alive=record in living)
        report.removed = self.datapath.remove_leftovers(inventory, records)
        for record in records:
            if record not in living:
                self._end(record, report)
        self._adopt(living, report)
        self.directories.prune(record.id for record in living)
        self._warn_of_foreign(inventory)
        return report

    def _drop_earlier_boots(
        self, records: Sequence[EndpointRecord], report: RestoreReport
    ) -> list[EndpointRecord]:
        """After a reboot nothing of these records exists: no device, no row, no pod."""
        boot_id = self.clock.boot_id()
        earlier = [record.id for record in records if record.boot_id != boot_id]
        if earlier:
            self.journal.remove(earlier)
        report.rebooted = len(earlier)
        return [record for record in records if record.boot_id == boot_id]

    def _hold(self, record: EndpointRecord, *, alive: bool) -> None:
        self.ipam.adopt(
            record.id, record.addresses, identity=record.identity, quarantined=not alive
        )
        self.table.insert(Endpoint(record, State.RESTORING, self.clock, cause="agent started"))

    def _end(self, record: EndpointRecord, report: RestoreReport) -> None:
        """Finish a DEL, undo an ADD that never answered, or let go of a pod whose device is gone."""
        cause = {
            Phase.ADDING: "ADD was cut off by a restart",
            Phase.DELETING: "DEL was cut off by a restart",
            Phase.LIVE: "the device is gone",
        }[record.phase]
        endpoint = self.table.get(record.id)
        assert endpoint is not None
        self.endings.end(endpoint, cause)
        if record.phase is Phase.LIVE:
            report.gone += 1
        else:
            report.ended += 1

    def _adopt(self, records: Sequence[EndpointRecord], report: RestoreReport) -> None:
        # All of them before the first is regenerated: a slot that any row names is in use.
        for record in records:
            config = self.datapath.read_config(record)
            endpoint = self.table.get(record.id)
            if config is not None and endpoint is not None:
                self.regenerator.enforcer.adopt(endpoint, config)
        for record in records:
            endpoint = self.table.get(record.id)
            assert endpoint is not None
            try:
                self.regenerator.regenerate_now(endpoint, Level.REWRITE)
            except PodwireError as error:
                _log.warning(
                    "restore endpoint failed; what was in force stays, it is retried",
                    extra={"endpoint": record.id, "error": error.message},
                )
                self.regenerator.enforcer.retry(endpoint)
            report.adopted += 1

    def _warn_of_foreign(self, inventory: Inventory) -> None:
        for name in inventory.foreign_names:
            _log.warning(
                "found a device with a name of ours and no mark; left alone", extra={"iface": name}
            )


def _is_alive(record: EndpointRecord, present: Mapping[EndpointId, PresentDevice]) -> bool:
    device = present.get(record.id)
    return (
        record.phase is Phase.LIVE
        and device is not None
        and device.host_ifindex == record.device.host_ifindex
    )
