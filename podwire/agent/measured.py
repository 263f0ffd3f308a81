"""What is measured: the journal at work, and the figures that are looked up at each scrape.

`agent.node` opens the journal through it. Adds figures and facts; never changes what is done or raised.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any, ParamSpec

from podwire import __version__
from podwire.agent.health import Health
from podwire.agent.metrics import Gauge, Metrics
from podwire.control.endpoint.states import State
from podwire.control.endpoint.table import EndpointTable
from podwire.control.flows.ring import FlowRing
from podwire.control.identity.allocator import IdentityAllocator
from podwire.control.ipam.interface import Ipam
from podwire.journal.records import SqliteJournal
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import StorageFailure
from podwire.model.ids import EndpointId

_P = ParamSpec("_P")


@dataclass(frozen=True)
class PacketCount:
    """Packets of one outcome at one hook; `reason` is empty for those that passed."""

    hook: str
    reason: str
    path: str
    packets: int


@dataclass(frozen=True)
class FlowUsage:
    """What the memory of flows holds of one endpoint's side: `egress` is what it opened, `ingress` what others did."""

    endpoint: EndpointId
    direction: str
    connections: int
    unremembered: int
    unprotected: int


class MeasuredJournal(SqliteJournal):
    """The journal, whose writes are timed and whose last write tells whether the agent is healthy."""

    def __init__(self, path: Path, *, metrics: Metrics, health: Health) -> None:
        self._metrics = metrics
        self._health = health
        super().__init__(path)
        health.report("journal", ok=True)

    def write(self, record: EndpointRecord) -> None:
        """Insert or replace the record with this id."""
        self._watched(super().write, record)

    def remove(self, endpoint_ids: Iterable[EndpointId]) -> None:
        """Forget records."""
        self._watched(super().remove, endpoint_ids)

    def fold(self) -> None:
        """Bring what was written last into the database."""
        self._watched(super().fold)

    def write_fact(self, name: str, value: str) -> None:
        """Remember a fact about the node."""
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


@dataclass(frozen=True)
class Measured:
    """What the looked-up figures look at."""

    table: EndpointTable
    ipam: Ipam
    backlog: Callable[[], int]
    flows: FlowRing
    events_lost: Callable[[], int]
    health: Health
    packets: Callable[[], Iterable[PacketCount]]
    flow_usage: Callable[[], Iterable[FlowUsage]]
    policies: Callable[[], int]
    policy_problems: Callable[[], int]
    policies_closed: Callable[[], int]
    policy_revision: Callable[[], int]
    identities: IdentityAllocator
    maps: Callable[[], Iterable[Mapping[str, Any]]]
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

    def read(figure: Callable[[FlowUsage], int]) -> dict[tuple[str, ...], float]:
        return {
            (str(row.endpoint), row.direction): float(figure(row)) for row in measured.flow_usage()
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
        Gauge("policies", "Policies in force", (), lambda: {(): float(measured.policies())}),
        Gauge(
            "policies_not_in_force",
            "Policies whose newest version could not be read or cannot be enforced whole, and"
            " identities whose policies could not be written",
            (),
            lambda: {(): float(measured.policy_problems() + _count_unwritten(measured))},
        ),
        Gauge(
            "policies_closed",
            "Policies that cannot be enforced whole and close whom they select",
            (),
            lambda: {(): float(measured.policies_closed())},
        ),
        Gauge(
            "policy_revision",
            "Revision of the store up to which policies were taken in",
            (),
            lambda: {(): float(measured.policy_revision())},
        ),
        Gauge(
            "endpoints_behind",
            "Endpoints that enforce an older revision, because the newer one failed",
            (),
            lambda: {(): float(_count_behind(measured))},
        ),
        Gauge(
            "identities",
            "Identities that the agent knows, without the reserved ones",
            (),
            lambda: {(): float(len(measured.identities.known))},
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


def _count_behind(measured: Measured) -> int:
    return sum(endpoint.state is State.NOT_READY for endpoint in measured.table)


def _count_unwritten(measured: Measured) -> int:
    return len({endpoint.config.identity for endpoint in measured.table if endpoint.policy_error})


def _list_node_gauges(measured: Measured) -> list[Gauge]:  # size: one table
    return [
        Gauge("build_info", "Version of the agent", ("version",), lambda: {(__version__,): 1.0}),
        Gauge(
            "start_time_seconds",
            "Unix time of the agent's start",
            (),
            lambda: {(): measured.started_unix_s},
        ),
        Gauge(
            "ready", "1 while the agent is ready", (), lambda: {(): float(measured.health.ready)}
        ),
        Gauge("endpoints", "Endpoints by state", ("state",), lambda: _by_state(measured.table)),
        Gauge(
            "reaper_backlog",
            "Endpoints that ended and whose device is not gone yet",
            (),
            lambda: {(): float(measured.backlog())},
        ),
        Gauge(
            "ipam_addresses",
            "Addresses of the node's ranges by what they are: used, resting, free",
            ("cidr", "state"),
            lambda: _addresses(measured.ipam),
        ),
        Gauge(
            "events_lost",
            "Events of the programs that the ring had no room for",
            (),
            lambda: {(): float(measured.events_lost())},
            counter=True,
        ),
        Gauge(
            "flows_dropped",
            "Flows that a follower did not fetch in time",
            (),
            lambda: {(): float(measured.flows.dropped_for_followers)},
            counter=True,
        ),
        Gauge(
            "drops",
            "Packets dropped, by reason and hook",
            ("reason", "hook"),
            lambda: _packets(measured.packets(), dropped=True),
            counter=True,
        ),
        Gauge(
            "forwarded_packets",
            "Packets passed on, by path and hook",
            ("path", "hook"),
            lambda: _packets(measured.packets(), dropped=False),
            counter=True,
        ),
        Gauge(
            "map_entries",
            "Entries of a BPF map",
            ("map",),
            lambda: {(str(row["name"]),): float(row["entries"]) for row in measured.maps()},
        ),
        Gauge(
            "map_capacity",
            "Entries that a BPF map has room for",
            ("map",),
            lambda: {(str(row["name"]),): float(row["max_entries"]) for row in measured.maps()},
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


def _packets(counts: Iterable[PacketCount], *, dropped: bool) -> dict[tuple[str, ...], float]:
    samples: dict[tuple[str, ...], float] = {}
    for count in counts:
        if bool(count.reason) is dropped:
            key = (count.reason if dropped else count.path, count.hook)
            samples[key] = samples.get(key, 0) + count.packets
    return samples
