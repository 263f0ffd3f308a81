"""A node of the agent: its parts, opened in order and connected before any request can arrive.

Called by `agent.main`. The order matters: locks, journal, store, kernel, what the store says, restore. The caller's
stack closes what is opened; pods keep running. Nothing here decides about endpoints.
"""

import logging
import os
import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import Final

import msgspec

from podwire.agent import measured
from podwire.agent.config_reload import LiveConfig
from podwire.agent.duties.address_source import open_addresses
from podwire.agent.duties.cluster.duty import ClusterDuty
from podwire.agent.duties.cluster.publisher import refuse_contested, take_name
from podwire.agent.duties.cluster.services import ServiceDuty
from podwire.agent.duties.identity import IdentityDuty
from podwire.agent.duties.kubernetes.event_writer import open_events
from podwire.agent.duties.kubernetes.start import Start
from podwire.agent.duties.policy import PolicyDuty
from podwire.agent.health import Health
from podwire.agent.metrics import Metrics
from podwire.agent.node_plan import plan_node
from podwire.agent.parts import (
    Opened,
    base_config,
    list_reserved_ports,
    make_cluster,
    make_enforcer,
    make_policy_duty,
    make_resolver,
    make_services,
    report_to,
)
from podwire.agent.store_watch import open_watch
from podwire.control.attach.ending import Endings
from podwire.control.attach.restore import Restorer, RestoreReport
from podwire.control.attach.service import AttachService
from podwire.control.attach.steps import Context
from podwire.control.endpoint.changes import EndpointChanges
from podwire.control.endpoint.host_ports import HostPorts, in_force
from podwire.control.endpoint.regenerate import Regenerator
from podwire.control.endpoint.table import EndpointTable
from podwire.control.flows.ring import FlowRing
from podwire.control.identity.feed import IdentityFeed
from podwire.control.identity.known import KnownIdentities
from podwire.control.identity.resolver import IdentityResolver
from podwire.control.ipam.interface import Ipam
from podwire.control.kubernetes.own_pods import OwnPods
from podwire.control.policy.oracle import Enforcement
from podwire.datapath.host import list_device_addresses, merge_changes
from podwire.datapath.native import OwnHooks
from podwire.datapath.node import KernelDatapath
from podwire.datapath.plan import NodePlan
from podwire.journal.background_writer import BackgroundWriter
from podwire.journal.directories import RunDirectories
from podwire.journal.lock import locked_node_name, locked_state_directory
from podwire.journal.records import HOST_SETTINGS_FACT, UNDERLAY_HOOKS_FACT, SqliteJournal
from podwire.kernel import spawn
from podwire.kernel.clock import KernelClock
from podwire.kernel.inotify import FileWaker
from podwire.kernel.memory import collapse_heap, read_resident_bytes, share_heap, trim_heap
from podwire.model import log
from podwire.model.config import AgentConfig
from podwire.model.config.sources import Settled
from podwire.model.endpoint import IPNetwork, Phase
from podwire.model.ids import IdentityId
from podwire.model.interfaces import HostPortTable
from podwire.model.right_of_way import RightOfWay
from podwire.model.store import Store
from podwire.store.open import ClusterAccess, StoreAccess, find_event_writer, list_hosts, open_store

WaitFor = Callable[[str, str], None]
"""Hears what the start waits for, and what to do."""

GROWTH_BYTES: Final = 4 << 20
"""Memory that is not worth the milliseconds for which the heap is locked."""

_log = logging.getLogger(__name__)


class Node(Opened, frozen=True):
    """One agent's parts, opened and restored, before anybody can ask for anything."""

    clock: KernelClock
    table: EndpointTable
    ipam: Ipam
    endings: Endings
    regenerator: Regenerator
    policies: PolicyDuty
    identities: IdentityDuty
    resolver: IdentityResolver
    known: KnownIdentities
    cluster: ClusterDuty
    services: ServiceDuty | None
    """None where services are left to the stack."""
    attachments: AttachService
    directories: BackgroundWriter
    turn: threading.RLock
    flows: FlowRing
    started_boottime_ns: int

    @property
    def config(self) -> AgentConfig:
        """The settings in force."""
        return self.live.current


def prepare_memory() -> None:
    """Let all threads have one heap, so that what they free can be given back. Before there are threads."""
    share_heap()


def settle_memory(settled_bytes: int = 0) -> int:
    """Give back what was freed, and put what is left into huge pages: a request after a pause then finds more of it
    mapped. Gives how many bytes are left. `settled_bytes`: what it gave last; where little was added it does nothing.
    """
    if read_resident_bytes() <= settled_bytes + GROWTH_BYTES:
        return settled_bytes
    trim_heap()
    collapse_heap()
    return read_resident_bytes()


def open_node(settled: Settled, stack: ExitStack, wait_for: WaitFor) -> Node:
    """Open state and kernel and bring them together; what is opened is closed by `stack`.

    `wait_for` hears what the start waits for.
    """
    clock = KernelClock()
    blocks = _BlockListener()
    node = _compose(_open_parts(settled, clock, blocks, stack, wait_for), clock)
    _prepare_reload(node)
    stack.callback(node.directories.close)
    blocks.serve(node)
    _load_objects(node)
    _report_restore(_restore(node), node)
    node.cluster.apply()
    return node


class _BlockListener:
    """Has the datapath and the other nodes know which blocks this node has.

    The first blocks are heard of before the datapath is opened, because its first plan holds them: until there is a
    node to serve, nobody has to be told.
    """

    def __init__(self) -> None:
        self._node: Node | None = None

    def serve(self, node: Node) -> None:
        """Tell the parts of `node` from now on."""
        self._node = node

    def before_open(self, blocks: Collection[IPNetwork]) -> None:
        node = self._node
        if node is not None:
            with node.turn:
                node.datapath.change_plan(plan_node(node.config, node.addresses, tuple(blocks)))
                _note_host_changes(node.journal, node.datapath, node.clock)

    def changed(self) -> None:
        if self._node is not None:
            self.before_open(self._node.addresses.ranges)
            self._node.cluster.ranges_changed()


def _open_parts(
    settled: Settled,
    clock: KernelClock,
    blocks: _BlockListener,
    stack: ExitStack,
    wait_for: WaitFor,
) -> Opened:
    config, health, metrics = settled.config, Health(clock), Metrics()
    _lock(config, stack)
    journal = measured.MeasuredJournal(
        config.files.state_dir / "journal.db", metrics=metrics, health=health
    )
    stack.callback(journal.close)
    way = RightOfWay()
    store = _open_store(config, stack)
    events, wait_for = open_events(
        find_event_writer(store), config.node.node_name, health, metrics, stack, wait_for
    )
    live = LiveConfig(settled, found=_ask_around(config, Start(store, journal, wait_for)))
    config = live.current
    name = take_name(store, journal, config.node.node_name, config.node.node_address)
    stack.callback(name.close)
    shared = open_watch(config, store, health, stack, way)
    report = report_to(health, "pools")
    addresses = open_addresses(config, store, journal, report, wait_for, blocks, shared)
    if not config.store.is_kubernetes:
        # With Kubernetes a range is given to another node in normal life, so no agent exits over one.
        refuse_contested(
            name,
            addresses.own_ranges().pod_cidrs,
            config.node.node_address,
            config.node.cluster_cidrs,
        )
    datapath = _open_datapath(plan_node(config, addresses), journal, clock, stack)
    return Opened(
        live=live,
        journal=journal,
        store=store,
        store_hosts=list_hosts(config.store.store, _reach_cluster(config)),
        name=name,
        shared=shared,
        way=way,
        addresses=addresses,
        datapath=datapath,
        clock=clock,
        health=health,
        metrics=metrics,
        events=events,
    )


def _lock(config: AgentConfig, stack: ExitStack) -> None:
    """Keep other agents from this node's directories and its name."""
    # Two agents of one node meet in Kubernetes when a pod is deleted by force; elsewhere somebody has made a mistake.
    patient = config.store.is_kubernetes
    for directory in (config.files.state_dir, config.files.run_dir):
        stack.enter_context(locked_state_directory(directory, patient=patient))
    stack.enter_context(locked_node_name(config.node.node_name, patient=patient))


def _open_store(config: AgentConfig, stack: ExitStack) -> Store:
    store = open_store(
        config.store.store,
        open_waker=FileWaker,
        patient=True,
        access=StoreAccess.of(config.store),
        cluster=_reach_cluster(config),
    )
    stack.callback(store.close)
    return store


def _ask_around(config: AgentConfig, start: Start) -> dict[str, object]:
    """Ask this host and its cluster for what the settings leave open, before anything is made by it."""
    node, found = config.node, dict[str, object]()
    if node.node_address is None and node.node_interface:
        found["node_address"] = start.wait_for_device(node.node_interface, list_device_addresses)
    elif node.node_address is None and config.store.is_kubernetes:
        address = start.wait_for_address(node.node_name, list_device_addresses)
        if address is not None:
            found["node_address"] = address
    if config.store.is_kubernetes and not node.cluster_cidrs:
        found["cluster_cidrs"] = start.wait_for_cluster_cidrs(config)
    return found


def _open_datapath(
    plan: NodePlan, journal: SqliteJournal, clock: KernelClock, stack: ExitStack
) -> KernelDatapath:
    datapath = KernelDatapath(
        plan, _recall_hooks(journal, clock), _recall_host_ports(journal, clock)
    )
    try:
        stack.enter_context(datapath)
    finally:
        _note_host_changes(journal, datapath, clock)
    return datapath


def _recall_hooks(journal: SqliteJournal, clock: KernelClock) -> OwnHooks:
    return OwnHooks(
        journal.read_fact(UNDERLAY_HOOKS_FACT),
        boot_id=clock.boot_id(),
        write=partial(journal.write_fact, UNDERLAY_HOOKS_FACT),
    )


def _recall_host_ports(journal: SqliteJournal, clock: KernelClock) -> HostPortTable:
    """Give what pods that run have: it is served without a gap, also while the restore has not come to them."""
    boot_id = clock.boot_id()
    return in_force(
        record
        for record in journal.list_records()
        if record.phase is Phase.LIVE and record.boot_id == boot_id
    )


def _note_host_changes(
    journal: SqliteJournal, datapath: KernelDatapath, clock: KernelClock
) -> None:
    """Write down what `podwire cleanup` is to put back, also when the datapath could not be prepared."""
    changes = datapath.host_changes
    if changes:
        noted = journal.read_fact(HOST_SETTINGS_FACT)
        noted = merge_changes(noted, changes, clock.boot_id())
        journal.write_fact(HOST_SETTINGS_FACT, noted)


def _load_objects(node: Node) -> None:
    """Read what the store has, or what it said last, before the first endpoint is built by it."""
    records = node.journal.list_records()
    node.identities.prepare(records)
    node.known.listen(node.policies.hear)
    if node.services is not None:
        node.known.listen(node.services.hear)
    node.cluster.prepare()
    with node.turn:
        node.policies.load()


def _compose(opened: Opened, clock: KernelClock) -> Node:  # size: the object graph in one look
    live, journal, store, datapath = opened.live, opened.journal, opened.store, opened.datapath
    health, metrics = opened.health, opened.metrics
    config = live.current

    # These hooks look at parts that are made below. Nothing calls them before all parts are there.
    cluster: ClusterDuty
    policies: PolicyDuty
    identities: IdentityDuty
    services: ServiceDuty | None

    def pods_changed() -> None:
        cluster.pods_changed()
        pods_moved()

    def pods_moved() -> None:
        if services is not None:
            services.pods_changed()

    def is_awaited(identity: IdentityId) -> bool:
        return services is not None and services.is_awaited(identity)

    def is_complete() -> bool:
        return policies.is_loaded and identities.follower.is_whole

    table = EndpointTable(pods_changed)
    ipam = opened.addresses.ipam
    directories = BackgroundWriter(RunDirectories(config.files.run_dir / "endpoints"))
    turn = threading.RLock()
    pods = OwnPods(store, config.node.node_name) if config.store.is_kubernetes else None
    enforcer = make_enforcer(opened, table, directories, is_complete, pods)
    flows = FlowRing(config.report.flow_ring)
    regenerator = Regenerator(
        table=table,
        datapath=datapath,
        directories=directories,
        clock=clock,
        base=partial(base_config, live, flows),
        enforcer=enforcer,
    )
    resolver = make_resolver(config, store, pods)
    cluster = make_cluster(opened, table, turn, pods_moved, is_awaited)
    services = make_services(opened, turn, cluster, resolver.allocator.known)
    host_ports = HostPorts(table, datapath, list_reserved_ports(config))
    context = Context(datapath, regenerator, host_ports)
    endings = Endings(
        table=table, journal=journal, ipam=ipam, context=context, directories=directories
    )
    attachments = AttachService(
        journal=journal,
        datapath=datapath,
        ipam=ipam,
        table=table,
        endings=endings,
        context=context,
        identities=resolver,
        clock=clock,
        turn=turn,
        mode=config.datapath.datapath,
        status_on_exhaustion=config.cni.status_on_exhaustion,
        observe=metrics.observe_step,
    )
    policies = make_policy_duty(opened, enforcer, turn)
    identities = IdentityDuty(
        node_name=config.node.node_name,
        feed=IdentityFeed(resolver, pods),
        table=table,
        facts=journal,
        changes=EndpointChanges(table, journal, regenerator, resolver, turn),
        report=report_to(health, "identities"),
        shared=opened.shared,
        named=cluster.named_identities,
    )
    return Node(
        **msgspec.structs.asdict(opened),
        table=table,
        ipam=ipam,
        endings=endings,
        regenerator=regenerator,
        policies=policies,
        identities=identities,
        resolver=resolver,
        known=resolver.allocator.known,
        cluster=cluster,
        services=services,
        attachments=attachments,
        directories=directories,
        turn=turn,
        flows=flows,
        started_boottime_ns=clock.process_start_ns(),
    )


def _reach_cluster(config: AgentConfig) -> ClusterAccess:
    name = config.node.node_name
    return ClusterAccess(config.store.kubeconfig, os.environ, name, spawn.run_helper)


def _restore(node: Node) -> RestoreReport:
    restorer = Restorer(
        journal=node.journal,
        datapath=node.datapath,
        ipam=node.ipam,
        table=node.table,
        endings=node.endings,
        regenerator=node.regenerator,
        directories=node.directories,
        clock=node.clock,
    )
    with node.turn:
        return restorer.restore()


def _report_restore(report: RestoreReport, node: Node) -> None:
    for name in report.removed:
        _log.info("removed what no record owns", extra={"cause": name})
    _log.info(
        "restored endpoints",
        extra={
            "count": report.adopted,
            "cause": f"ended {report.ended}, gone {report.gone}, of another boot {report.rebooted}",
        },
    )
    node.health.report("restore", ok=True)


def _prepare_reload(node: Node) -> None:
    def apply_masquerade(config: AgentConfig) -> None:
        with node.turn:
            node.datapath.change_plan(plan_node(config, node.addresses))

    node.live.apply_with("log_level", lambda config: log.set_level(config.report.log_level))

    def apply_enforcement(config: AgentConfig) -> None:
        enforcer = node.regenerator.enforcer
        with node.turn:
            enforcer.engine.set_enforcement(Enforcement(config.policy.policy_enforcement))
            enforcer.apply("policy_enforcement changed")

    def apply_capacity(config: AgentConfig) -> None:
        with node.turn:
            node.datapath.change_plan(plan_node(config, node.addresses))
            node.regenerator.enforcer.apply("policy_entries changed")

    node.live.apply_with("masquerade", apply_masquerade)
    node.live.apply_with("policy_entries", apply_capacity)
    node.live.apply_with("policy_enforcement", apply_enforcement)
