"""The parts of a node that take several steps to make: policy, identities, services, other nodes.

Called by `agent.node`, which puts them together. Every function makes what it returns from what is opened already, and
starts nothing; only services that are left to the stack are taken out of the maps.
"""

import ipaddress
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from podwire.agent import measured
from podwire.agent.config_reload import LiveConfig
from podwire.agent.duties.address_source import Addresses
from podwire.agent.duties.cluster.duty import ClusterDuty, ClusterOptions
from podwire.agent.duties.cluster.services import ServiceDuty
from podwire.agent.duties.policy import PolicyDuty
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.health import Health
from podwire.agent.metrics import Metrics
from podwire.control.cluster.publish import NodePublisher
from podwire.control.cluster.reach import ClusterSettings
from podwire.control.endpoint.enforce import Enforcer, rows_of
from podwire.control.endpoint.host_ports import EACH_ADDRESS, ReservedPort
from podwire.control.endpoint.policies import PolicyObjects
from podwire.control.endpoint.queue import RegenerationQueue
from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.control.flows.ring import FlowRing
from podwire.control.identity.allocator import IdentityAllocator
from podwire.control.identity.filter import LabelFilter
from podwire.control.identity.known import KnownIdentities
from podwire.control.identity.resolver import IdentityResolver
from podwire.control.identity.sources import LabelSources
from podwire.control.kubernetes.own_pods import NoPods, OwnPods
from podwire.control.policy.engine import PolicyEngine
from podwire.control.policy.oracle import Enforcement
from podwire.control.policy.resolve.rule_numbers import Numbers
from podwire.control.services.catalogue import Catalogue
from podwire.control.services.choose import Place
from podwire.control.services.selected import SelectedPods
from podwire.datapath.changes import watch_links
from podwire.datapath.node import KernelDatapath
from podwire.datapath.policy_maps import read_cidrs
from podwire.journal.background_writer import BackgroundWriter
from podwire.model.cluster import TunnelMode
from podwire.model.config import AgentConfig
from podwire.model.endpoint import PROTOCOLS
from podwire.model.identity import IdentityFacts
from podwire.model.ids import IdentityId
from podwire.model.interfaces import Clock, EndpointConfig, HostSocket
from podwire.model.right_of_way import RightOfWay
from podwire.model.store import Store
from podwire.model.store.events import Events

NUMBERS_FACT: Final = "policy-numbers"
"""From which numbers of slots, rules and revisions on nothing was ever used on this node."""


def report_to(health: Health, name: str) -> Callable[[str], None]:
    """Give what records under `name` what is wrong; "" = nothing is."""

    def report(message: str) -> None:
        health.report(name, ok=not message, message=message, critical=False)

    return report


@dataclass(frozen=True)
class Opened:
    """What is opened before the parts are put together."""

    live: LiveConfig
    journal: measured.MeasuredJournal
    store: Store
    store_hosts: tuple[str, ...]
    """Where the store is, as the settings have it."""
    name: NodePublisher
    shared: SharedWatch
    way: RightOfWay
    """Taken by requests; what nobody waits for gives it."""
    addresses: Addresses
    datapath: KernelDatapath
    clock: Clock
    health: Health
    metrics: Metrics
    events: Events


def base_config(live: LiveConfig, flows: FlowRing, endpoint: Endpoint) -> EndpointConfig:
    """Say what the programs are told of an endpoint but for its policy."""
    own_audit = endpoint.record.policy_audit
    return EndpointConfig(
        host_allowed=live.current.datapath.host_access,
        audit=live.current.policy.policy_audit if own_audit is None else own_audit,
        trace=flows.watch.includes(endpoint.record.id),
    )


def make_enforcer(
    opened: Opened,
    table: EndpointTable,
    directories: BackgroundWriter,
    is_complete: Callable[[], bool],
    pods: OwnPods | None,
) -> Enforcer:
    """Make what puts policy into the rows of endpoints. `is_complete`: whether all that policy needs was listed.

    `pods`, where there are Pod objects, hears how new the policies are that were taken in.
    """
    live, journal, datapath = opened.live, opened.journal, opened.datapath
    engine = PolicyEngine(
        datapath=datapath.policy,
        rows=partial(rows_of, table),
        numbers=msgspec.json.decode(journal.read_fact(NUMBERS_FACT) or "{}", type=Numbers),
        remember=lambda numbers: journal.write_fact(
            NUMBERS_FACT, msgspec.json.encode(numbers).decode()
        ),
        cidrs=dict(read_cidrs(datapath.maps)),
        enforcement=Enforcement(live.current.policy.policy_enforcement),
    )
    return Enforcer(
        engine,
        table,
        datapath.policy,
        directories,
        RegenerationQueue(),
        opened.clock,
        is_complete=is_complete,
        reached=pods.freshness.reach if pods else lambda _revisions: None,
    )


def make_policy_duty(opened: Opened, enforcer: Enforcer, turn: threading.RLock) -> PolicyDuty:
    """Make what brings the store's policies into force."""
    return PolicyDuty(
        store=opened.store,
        objects=PolicyObjects(enforcer.engine),
        enforcer=enforcer,
        turn=turn,
        observe=opened.metrics.observe_step,
        report=report_to(opened.health, "store"),
        shared=opened.shared,
        warn=opened.health.warn,
        events=opened.events,
    )


def make_services(
    opened: Opened, turn: threading.RLock, cluster: ClusterDuty, known: KnownIdentities
) -> ServiceDuty | None:
    """Make what has services translated; None where they are left to the stack."""
    config = opened.live.current
    if not config.translates_services:
        with turn:
            opened.datapath.services.write({})  # what an agent with another setting left
        return None

    def find_facts(number: int) -> IdentityFacts | None:
        identity = known.get(number)
        return identity.key.facts(number) if identity is not None else None

    node, is_kubernetes = config.node.node_name, config.store.is_kubernetes
    duty = ServiceDuty(
        store=opened.store,
        catalogue=Catalogue(
            Place(node),
            config.node.cluster_cidrs,
            None if is_kubernetes else SelectedPods(node, find_facts),
        ),
        datapath=opened.datapath.services,
        turn=turn,
        report=report_to(opened.health, "services"),
        observe=opened.metrics.observe_step,
        shared=opened.shared,
        has_core_nodes=is_kubernetes,
        pods=None if is_kubernetes else cluster,
        events=opened.events,
    )
    opened.metrics.look_up(duty.gauges())
    return duty


def make_resolver(config: AgentConfig, store: Store, pods: OwnPods | None) -> IdentityResolver:
    """Make what finds the identity of labels; `pods` where there are Pod objects."""
    return IdentityResolver(
        allocator=IdentityAllocator(store, KnownIdentities()),
        sources=LabelSources(),
        chosen_by=LabelFilter.parse(config.policy.identity_label_filter),
        wait_s=config.policy.identity_wait_s,
        pods=pods or NoPods(),
    )


def make_cluster(
    opened: Opened,
    table: EndpointTable,
    turn: threading.RLock,
    pods_moved: Callable[[], None],
    is_awaited: Callable[[IdentityId], bool],
) -> ClusterDuty:
    """Make what looks after other nodes; for the hooks see there."""
    config = opened.live.current
    return ClusterDuty(
        options=ClusterOptions(
            node_name=config.node.node_name,
            settings=ClusterSettings(config.datapath.routing, config.node.cluster_cidrs),
            tunnel_mode=TunnelMode(config.datapath.tunnel_mode),
            tunnel_port=config.datapath.tunnel_port,
            node_address=config.node.node_address,
            store_hosts=opened.store_hosts,
            has_core_nodes=config.store.is_kubernetes,
        ),
        store=opened.store,
        datapath=opened.datapath,
        table=table,
        turn=turn,
        journal=opened.journal,
        health=opened.health,
        metrics=opened.metrics,
        own_ranges=opened.addresses.own_ranges,
        open_news=watch_links,
        name=opened.name,
        shared=opened.shared,
        pods_moved=pods_moved,
        is_awaited=is_awaited,
    )


def list_reserved_ports(config: AgentConfig) -> list[ReservedPort]:
    """List the ports of this host that podwire needs itself."""
    reserved = [
        ReservedPort(
            HostSocket(address, PROTOCOLS["UDP"], config.datapath.tunnel_port),
            "where tunnels between nodes end (tunnel_port)",
        )
        for address in EACH_ADDRESS.values()
    ]
    if config.report.metrics_listen:
        host, _, port = config.report.metrics_listen.rpartition(":")
        address = ipaddress.ip_address(host.strip("[]"))
        # A socket at :: takes IPv4, too.
        addresses = EACH_ADDRESS.values() if address == EACH_ADDRESS[6] else (address,)
        reserved += [
            ReservedPort(
                HostSocket(served, PROTOCOLS["TCP"], int(port)),
                "where this agent serves its metrics (metrics_listen)",
            )
            for served in addresses
        ]
    return reserved
