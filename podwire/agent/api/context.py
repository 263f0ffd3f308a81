"""What the API's handlers look at and act on: the node's parts, each behind one name.

Made by `agent.assemble`, handed to every handler as `Api`. Nothing is decided here.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podwire.agent.config_reload import LiveConfig
from podwire.agent.health import Health
from podwire.agent.metrics import Metrics
from podwire.control.cluster.state import ClusterTotals, KnownNode
from podwire.control.endpoint.enforce import Enforcer
from podwire.control.endpoint.policies import PolicyObjects
from podwire.control.endpoint.table import EndpointTable
from podwire.control.flows.enrich import format_time_ns
from podwire.control.flows.flow_filter import FILTER_WORDS, FlowFilter, parse_filter
from podwire.control.flows.ring import FlowRing
from podwire.control.identity.resolver import IdentityResolver
from podwire.control.ipam.interface import Ipam
from podwire.control.ipam.pool import PoolIpam
from podwire.control.policy.engine import PolicyEngine
from podwire.control.services.catalogue import ServiceView
from podwire.control.services.facts import ServiceName
from podwire.model.endpoint import EndpointRecord, IPAddress
from podwire.model.ids import EndpointId
from podwire.model.interfaces import Clock, Datapath, Journal
from podwire.model.store import Store


@dataclass(frozen=True)
class PolicyReaders:
    """What the handlers look at."""

    enforcer: Enforcer
    objects: PolicyObjects
    resolver: IdentityResolver
    table: EndpointTable
    identity_at: Callable[[IPAddress], int | None]
    """What the programs know of an address that no pod of this node has; None or 0 = in no prefix that they know."""
    hits: Callable[[], Mapping[int, tuple[int, int]]]
    """Rule -> packets and bytes of what it decided."""
    change_labels: Callable[[EndpointId, list[str]], EndpointRecord]
    """Change labels and have the endpoint built; waits for the store."""
    set_audit: Callable[[EndpointId, bool | None], EndpointRecord]
    """Let policies of one endpoint only report (True), or be enforced (False), or as the node says (None)."""
    find_service: Callable[[ServiceName], ServiceView | None] | None = None
    """None where services are left to the stack."""

    @property
    def engine(self) -> PolicyEngine:
        return self.enforcer.engine


@dataclass(frozen=True)
class NodeReaders:
    """What is known of other nodes."""

    list_nodes: Callable[[], Sequence[KnownNode]]
    totals: Callable[[], ClusterTotals]
    addresses: tuple[str, ...]
    """That this host uses towards its pods."""
    pod_mtu: Callable[[], int]
    """Of new pods, in bytes: it follows the other nodes."""
    list_encrypted: Callable[[], frozenset[str]] = frozenset
    """Addresses of the nodes whose rows in the kernel say that what goes there has to be encrypted."""


@dataclass(frozen=True)
class MapReaders:
    """How the maps of the datapath are shown; handed in because only `agent.node` opens the datapath."""

    describe: Callable[[], list[dict[str, Any]]]
    rows: Callable[[str, int], tuple[list[dict[str, Any]], bool]]


@dataclass(frozen=True)
class BuildFacts:
    """What does not change while the agent runs."""

    template: str
    abi_version: int


@dataclass(frozen=True)
class Api:
    """Everything the handlers look at."""

    config: LiveConfig
    table: EndpointTable
    ipam: Ipam
    journal: Journal
    datapath: Datapath
    flows: FlowRing
    health: Health
    metrics: Metrics
    clock: Clock
    turn: threading.RLock
    maps: MapReaders
    store: Store
    policy: PolicyReaders
    facts: BuildFacts
    nodes: NodeReaders
    detach: Callable[[EndpointRecord], None]
    """End an attachment as a DEL of its own would; blocks."""
    started_boottime_ns: int
    pools: PoolIpam | None = None
    """With IPAM mode `pool`."""
    services: Callable[[], Sequence[ServiceView]] | None = None
    """None where services are left to the stack."""

    def wall_offset_ns(self) -> int:
        """Give what to add to CLOCK_BOOTTIME for Unix time, now."""
        # Computed anew each time: the wall clock may be set while the agent runs.
        return time.time_ns() - self.clock.boottime_ns()

    def format_boottime(self, boottime_ns: int) -> str:
        """Write a CLOCK_BOOTTIME as RFC 3339."""
        return format_time_ns(boottime_ns + self.wall_offset_ns())

    def read_flow_query(self, query: Mapping[str, Any]) -> tuple[int, FlowFilter]:
        """Give how many past flows are wanted, and which. With neither `last` nor `since` nor `follow`: all."""
        words = {name: str(query[name]) for name in FILTER_WORDS if name in query}
        wanted = parse_filter(
            words, format_ago=lambda seconds: format_time_ns(time.time_ns() - seconds * 10**9)
        )
        everything = not query.get("follow") or "since" in words
        last = query.get("last", len(self.flows) if everything else 0)
        return int(last), wanted
