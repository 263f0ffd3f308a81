"""Assemble what the loops and the API work on from a node's parts.

`agent.main` calls each function once, between the restore and the opening of the doors. Nothing here decides or waits.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial

from podwire.agent import measured
from podwire.agent.api.context import Api, BuildFacts, MapReaders, NodeReaders, PolicyReaders
from podwire.agent.cni.chained_portmap import ChainedPortmap
from podwire.agent.cni.dispatch import Dispatcher
from podwire.agent.duties.installer import Installer
from podwire.agent.duties.kubernetes.network_condition import NetworkCondition
from podwire.agent.duties.kubernetes.ranges import RangeKeeper, ServedRanges
from podwire.agent.duties.loops import Duties, EventPump
from podwire.agent.health import AliveFile
from podwire.agent.node import Node, settle_memory
from podwire.agent.node_plan import plan_node
from podwire.cni.directories import RuntimeDirectories, read_launcher
from podwire.control.flows.enrich import FlowMaker
from podwire.control.flows.flow import FlowPolicy, FlowService
from podwire.control.installation.steps import Installation
from podwire.control.ipam.node import NodeIpam
from podwire.datapath import abi, changes, rows, runtime
from podwire.datapath.flow_events import EventReader
from podwire.datapath.maps import find_identity
from podwire.datapath.node_maps import list_encrypted
from podwire.datapath.policy_maps import read_hits
from podwire.journal.lock import find_waiting_agent
from podwire.model.endpoint import EndpointRecord, IPNetwork
from podwire.model.identity import RESERVED_LABELS
from podwire.model.ids import EndpointId
from podwire.model.interfaces import Clock
from podwire.model.request import AttachRequest
from podwire.store.open import describe_clock, find_condition_writer


def start_events(node: Node, stack: AsyncExitStack) -> EventPump:
    """Have what the programs tell read and understood, until the stack is closed."""

    def by_id(number: int) -> EndpointRecord | None:
        endpoint = node.table.get(EndpointId(number))
        return None if endpoint is None else endpoint.record

    def by_address(address: str) -> EndpointRecord | None:
        endpoint = node.table.get_by_address(address)
        return None if endpoint is None else endpoint.record

    maker = FlowMaker(
        node.config.node.node_name,
        by_address=by_address,
        by_id=by_id,
        name_rule=partial(_name_rule, node),
        labels_of=partial(_labels_of, node),
        wall_offset_ns=lambda: time.time_ns() - node.clock.boottime_ns(),
        name_service=partial(_name_service, node),
    )
    source = stack.enter_context(EventReader(node.datapath.maps))
    pump = EventPump(source, maker, node.flows)
    pump.start()
    stack.callback(pump.stop)
    return pump


def _name_rule(node: Node, number: int) -> FlowPolicy | None:
    name = node.regenerator.enforcer.engine.rule_name(number)
    if name is None:
        return None
    return FlowPolicy(name.policy.kind, name.policy.namespace, name.policy.name, name.path)


def _name_service(node: Node, address: str, port: int, protocol: str) -> FlowService | None:
    if node.services is None:
        return None
    name = node.services.find_holder(address, port, protocol)
    return FlowService(name.namespace, name.name, port) if name is not None else None


def _labels_of(node: Node, identity: int) -> tuple[str, ...]:
    if identity in RESERVED_LABELS:
        return RESERVED_LABELS[identity]
    known = node.known.get(identity)
    return known.key.labels if known else ()


def make_duties(node: Node, dispatcher: Dispatcher, threads: ThreadPoolExecutor) -> Duties:
    """Give what the loops work on; `threads` is where they wait for the kernel."""

    def list_warnings() -> Sequence[str]:
        with node.turn:
            host_warnings = node.datapath.find_host_warnings()
        told = [f"{warning.message}; {warning.hint}" for warning in host_warnings]
        return [*told, clocks] if (clocks := describe_clock(node.store)) else told

    return Duties(
        attachments=node.attachments,
        journal=node.journal,
        table=node.table,
        regenerator=node.regenerator,
        flows=node.flows,
        datapath=node.datapath,
        turn=node.turn,
        health=node.health,
        metrics=node.metrics,
        alive=AliveFile(node.config.files.run_dir, node.clock, node.config.cni.status_grace_s),
        backlog=lambda: len(node.endings),
        requests_taken=lambda: node.metrics.requests_observed,
        list_warnings=list_warnings,
        find_second_agent=partial(find_waiting_agent, node.config.files.state_dir),
        watch_devices=changes.watch_devices,
        watch_tables=changes.watch_tables,
        repair_tables=node.datapath.masquerade.repair,
        repair_pins=node.datapath.repair_pins,
        settle_memory=settle_memory,
        replay=dispatcher.replay,
        threads=threads,
    )


def make_condition(node: Node) -> NetworkCondition | None:
    """Give what tells Kubernetes that pods have a network here; None with another store."""
    write = find_condition_writer(node.store)
    if write is None:
        return None
    return NetworkCondition(node.store, node.config.node.node_name, write, node.cluster.shared)


def make_range_keeper(node: Node) -> RangeKeeper | None:
    """Give what follows the ranges of the core Node; None with another store."""
    config, addresses = node.config, node.addresses
    if not config.store.is_kubernetes:
        return None

    def serve(ranges: tuple[IPNetwork, ...]) -> None:
        with node.turn:
            # The datapath knows a range before anybody gets an address of it.
            node.datapath.change_plan(plan_node(config, addresses, ranges))
            if isinstance(addresses.ipam, NodeIpam):
                addresses.ipam.change_ranges(ranges)
            node.datapath.change_plan(plan_node(config, addresses))
        node.cluster.ranges_changed()

    def withhold(cause: str, why: str) -> None:
        if isinstance(addresses.ipam, NodeIpam):
            addresses.ipam.withhold(cause, why)

    # Before the doors open: nobody gets an address of a range that another node has.
    node.cluster.range_lost = partial(withhold, "contest")
    node.cluster.show_problems()
    if addresses.strays:
        serve(addresses.ranges)  # pods that were restored have addresses of earlier ranges
    return RangeKeeper(
        store=node.store,
        node_name=config.node.node_name,
        facts=node.journal,
        served=ServedRanges(
            is_given=config.node.ipam == "node" and not config.node.node_cidrs,
            ranges=lambda: addresses.ranges,
            strays=lambda: addresses.strays,
            serve=serve,
            withhold=partial(withhold, "core Node"),
            tell=node.cluster.ranges_changed,
        ),
        core=addresses.core,
        warn=node.health.warn,
        shared=node.cluster.shared,
    )


def make_installer(node: Node, installed: Callable[[], None]) -> Installer | None:
    """Give what installs for the container runtime, which `installed` hears once; None if somebody else does that."""
    cni = node.config.cni
    if not cni.cni_install:
        return None
    directories = RuntimeDirectories(cni.cni_conf_dir, cni.cni_bin_dir)
    return Installer(
        Installation(directories, read_launcher(), node.config.files.cni_socket),
        (cni.cni_conf_dir, cni.cni_bin_dir),
        status=node.attachments.status,
        watch=runtime.watch_directories,
        health=node.health,
        installed=installed,
    )


def make_chained_portmap(node: Node) -> ChainedPortmap:
    """Give what ends ports of pods that an earlier network's portmap serves."""
    return ChainedPortmap(node.attachments.leaves_host_ports, runtime.run_chained)


def make_api(node: Node, pump: EventPump) -> Api:
    """Give what the routes look at and act on."""
    datapath = node.datapath
    node.metrics.look_up(
        measured.list_gauges(
            measured.Measured(
                table=node.table,
                ipam=node.ipam,
                backlog=lambda: len(node.endings),
                flows=node.flows,
                events_lost=lambda: pump.lost,
                health=node.health,
                datapath=datapath,
                objects=node.policies.objects,
                enforcer=node.regenerator.enforcer,
                identities=node.resolver.allocator,
                started_unix_s=time.time(),
            )
        )
    )
    return Api(
        config=node.live,
        table=node.table,
        ipam=node.ipam,
        pools=node.addresses.duty.ipam if node.addresses.duty else None,
        journal=node.journal,
        datapath=datapath,
        flows=node.flows,
        health=node.health,
        metrics=node.metrics,
        clock=node.clock,
        turn=node.turn,
        maps=MapReaders(
            describe=datapath.describe_maps,
            rows=lambda name, limit: rows.read_rows(datapath.maps, name, limit),
        ),
        store=node.store,
        policy=_policy_readers(node),
        facts=BuildFacts(template=datapath.template_id, abi_version=abi.ABI_VERSION),
        nodes=_node_readers(node),
        detach=lambda record: node.attachments.delete(_deletion(record, node.clock)),
        started_boottime_ns=node.started_boottime_ns,
        services=node.services.views if node.services else None,
    )


def _node_readers(node: Node) -> NodeReaders:
    datapath = node.datapath
    return NodeReaders(
        list_nodes=lambda: node.cluster.views.list_nodes(node.cluster.own),
        totals=node.cluster.views.totals,
        addresses=datapath.node_addresses,
        pod_mtu=lambda: datapath.mtu,
        list_encrypted=lambda: list_encrypted(datapath.maps),
    )


def _policy_readers(node: Node) -> PolicyReaders:
    return PolicyReaders(
        enforcer=node.regenerator.enforcer,
        objects=node.policies.objects,
        resolver=node.resolver,
        table=node.table,
        identity_at=partial(find_identity, node.datapath.maps),
        hits=partial(read_hits, node.datapath.maps),
        change_labels=node.identities.changes.change_labels,
        set_audit=node.identities.changes.set_audit,
        find_service=node.services.find if node.services else None,
    )


def _deletion(record: EndpointRecord, clock: Clock) -> AttachRequest:
    """The DEL that a runtime would send for an attachment now."""
    return AttachRequest(
        command="DEL",
        network=record.key.network,
        cni_version=record.cni_version,
        key=record.key,
        started_boottime_ns=clock.boottime_ns(),
    )
