"""What is measured: the journal at work, and the figures that are looked up at each scrape.

`agent.node` opens the journal through it. Adds figures and facts; never changes what is done or raised.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import ParamSpec

import msgspec

from podwire import __version__
from podwire.agent.health import Health
from podwire.agent.metrics import Gauge, Metrics
from podwire.control.endpoint.enforce import Enforcer
from podwire.control.endpoint.policies import PolicyObjects
from podwire.control.endpoint.states import State
from podwire.control.endpoint.table import EndpointTable
from podwire.control.flows.ring import FlowRing
from podwire.control.identity.allocator import IdentityAllocator
from podwire.control.ipam.interface import Ipam
from podwire.datapath.abi import Direction, UsageValue
from podwire.datapath.flow_events import hook_name, path_name, reason_name
from podwire.datapath.maps import list_usage, read_metrics
from podwire.datapath.node import KernelDatapath
from podwire.journal.records import SqliteJournal
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import StorageFailure
from podwire.model.ids import EndpointId

_P = ParamSpec("_P")


class MeasuredJournal(SqliteJournal):
    """The journal, whose writes are timed and whose last write tells whether the agent is healthy."""

    def __init__(self, path: Path, *, metrics: Metrics, health: Health) -> None:
        self._metrics = metrics
        self._health = health
        super().__init__(path)
        health.report("journal", ok=True)

    def write(self, record: EndpointRecord) -> None:
        self._watched(super().write, record)

    def require_writable(self) -> bool:
        was_asked = super().require_writable()
        if was_asked:
            self._health.report("journal", ok=True)
        return was_asked

    def remove(self, endpoint_ids: Iterable[EndpointId]) -> None:
        self._watched(super().remove, endpoint_ids)

    def fold(self) -> None:
        self._watched(super().fold)

    def write_fact(self, name: str, value: str) -> None:
        self._watched(super().write_fact, name, value)

    def _watched(self, write: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        begin_s = monotonic()
        try:
            write(*args, **kwargs)
        except StorageFailure as failure:
            self._health.report("journal", ok=False, message=failure.message)
            raise
        self._metrics.observe_journal(monotonic() - begin_s)
        self._health.report("journal", ok=True)


class Measured(msgspec.Struct, frozen=True):
    """What the looked-up figures look at."""

    table: EndpointTable
    ipam: Ipam
    backlog: Callable[[], int]
    flows: FlowRing
    events_lost: Callable[[], int]
    health: Health
    datapath: KernelDatapath
    objects: PolicyObjects
    enforcer: Enforcer
    identities: IdentityAllocator
    started_unix_s: float


def list_gauges(measured: Measured) -> list[Gauge]:
    """Give the figures that are looked up when somebody scrapes."""
    return [
        *_list_node_gauges(measured),
        *_list_flow_gauges(measured),
        *_list_policy_gauges(measured),
    ]


def _list_flow_gauges(measured: Measured) -> list[Gauge]:
    """Give what nears or passes a limit of the memory of flows. An endpoint's number is never given to another one."""

    def read(figure: Callable[[UsageValue], Sequence[int]]) -> dict[tuple[str, ...], float]:
        return {
            (str(number), side.name.lower()): float(figure(row)[side])
            for number, row in list_usage(measured.datapath.maps)
            for side in Direction
        }

    labels = ("endpoint", "direction")
    return [
        Gauge(
            "connections",
            "Connections that the endpoint opened (egress), and others to it (ingress), of"
            " conntrack_quota each",
            labels,
            lambda: read(lambda row: row.connections),
        ),
        Gauge(
            "flows_unremembered",
            "New flows that passed unremembered, beyond what an endpoint's side may open in a second",
            labels,
            lambda: read(lambda row: row.unremembered),
            counter=True,
        ),
        Gauge(
            "connections_unprotected",
            "Connections that found no room and stayed among the new flows, which push out each"
            " other",
            labels,
            lambda: read(lambda row: row.unprotected),
            counter=True,
        ),
    ]


def _list_policy_gauges(measured: Measured) -> list[Gauge]:
    return [
        Gauge.single("policies", "Policies in force", lambda: len(measured.objects.rules)),
        Gauge.single(
            "policies_not_in_force",
            "Policies whose newest version could not be read or cannot be enforced whole, and"
            " identities whose policies could not be written",
            lambda: len(measured.objects.problems) + _count_unwritten(measured),
        ),
        Gauge.single(
            "policies_closed",
            "Policies that cannot be enforced whole and close whom they select",
            lambda: len(measured.objects.closed),
        ),
        Gauge.single(
            "policy_revision",
            "Revision of the store up to which policies were taken in",
            lambda: measured.enforcer.revision,
        ),
        Gauge.single(
            "endpoints_behind",
            "Endpoints that enforce an older revision, because the newer one failed",
            lambda: sum(endpoint.state is State.NOT_READY for endpoint in measured.table),
        ),
        Gauge.single(
            "identities",
            "Identities that the agent knows, without the reserved ones",
            lambda: len(measured.identities.known),
        ),
        Gauge(
            "identity_events",
            "What happened to identities: allocated, adopted, collisions, waits, ...",
            ("event",),
            lambda: {
                (name,): float(count) for name, count in asdict(measured.identities.counts).items()
            },
            counter=True,
        ),
    ]


def _count_unwritten(measured: Measured) -> int:
    return len({endpoint.config.identity for endpoint in measured.table if endpoint.policy_error})


def _list_node_gauges(measured: Measured) -> list[Gauge]:  # size: one table
    return [
        Gauge("build_info", "Version of the agent", ("version",), lambda: {(__version__,): 1.0}),
        Gauge.single(
            "start_time_seconds",
            "Unix time of the agent's start",
            lambda: measured.started_unix_s,
        ),
        Gauge.single("ready", "1 while the agent is ready", lambda: measured.health.ready),
        Gauge("endpoints", "Endpoints by state", ("state",), lambda: _by_state(measured.table)),
        Gauge.single(
            "reaper_backlog",
            "Endpoints that ended and whose device is not gone yet",
            measured.backlog,
        ),
        Gauge(
            "ipam_addresses",
            "Addresses of the node's ranges by what they are: used, resting, free",
            ("cidr", "state"),
            lambda: _addresses(measured.ipam),
        ),
        Gauge.single(
            "events_lost",
            "Events of the programs that the ring had no room for",
            measured.events_lost,
            counter=True,
        ),
        Gauge.single(
            "flows_dropped",
            "Flows that a follower did not fetch in time",
            lambda: measured.flows.dropped_for_followers,
            counter=True,
        ),
        Gauge(
            "drops",
            "Packets dropped, by reason and hook",
            ("reason", "hook"),
            lambda: _packets(measured, dropped=True),
            counter=True,
        ),
        Gauge(
            "forwarded_packets",
            "Packets passed on, by path and hook",
            ("path", "hook"),
            lambda: _packets(measured, dropped=False),
            counter=True,
        ),
        Gauge(
            "map_entries",
            "Entries of a BPF map",
            ("map",),
            lambda: _maps(measured.datapath, "entries"),
        ),
        Gauge(
            "map_capacity",
            "Entries that a BPF map has room for",
            ("map",),
            lambda: _maps(measured.datapath, "max_entries"),
        ),
    ]


def _by_state(table: EndpointTable) -> dict[tuple[str, ...], float]:
    counts = Counter(endpoint.state for endpoint in table)
    return {(state.value,): float(counts[state]) for state in State}


def _addresses(ipam: Ipam) -> dict[tuple[str, ...], float]:
    samples: dict[tuple[str, ...], float] = {}
    for usage in ipam.usage():
        cidr = str(usage.cidr)
        samples[cidr, "used"] = usage.held - usage.quarantined
        samples[cidr, "resting"] = usage.quarantined
        samples[cidr, "free"] = usage.free
    return samples


def _maps(datapath: KernelDatapath, figure: str) -> dict[tuple[str, ...], float]:
    return {(str(row["name"]),): float(row[figure]) for row in datapath.describe_maps()}


def _packets(measured: Measured, *, dropped: bool) -> dict[tuple[str, ...], float]:
    samples: dict[tuple[str, ...], float] = {}
    for row in read_metrics(measured.datapath.maps):
        if bool(row.reason) is dropped:
            key = (reason_name(row.reason) if dropped else path_name(row.path), hook_name(row.hook))
            samples[key] = samples.get(key, 0) + row.packets
    return samples
