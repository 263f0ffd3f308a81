"""The agent's entry: builds the object graph, opens every long-lived resource in one stack, runs one task group.

`podwire-agent` calls `main`. Order matters and is this file's only subject: settings, locks, journal, kernel,
restore, spool, sockets. The sockets open last, so that nobody is answered from half a node; they close first.
Stopping leaves pods running: programs, maps, devices and records stay. Nothing here decides about endpoints.
"""

import asyncio
import gc
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from functools import partial

import msgspec

from podwire import __version__
from podwire.agent import loops, measured
from podwire.agent.cni_requests import CniRequests
from podwire.agent.cni_socket import CniServer
from podwire.agent.config_reload import read_settings
from podwire.agent.dispatch import Dispatcher
from podwire.agent.health import AliveFile
from podwire.agent.identity_duty import tend_identities
from podwire.agent.loops import Duties, EventPump
from podwire.agent.node import Node, open_node
from podwire.agent.rest import Api, MapReaders, NodeFacts
from podwire.agent.rest_policy import PolicyReaders
from podwire.agent.spool import Spool
from podwire.agent.unix_socket import open_unix_socket
from podwire.cni.netconf import decode_request
from podwire.control.endpoint.queue import Level
from podwire.control.endpoint.table import Endpoint
from podwire.control.flows.enrich import FlowMaker
from podwire.control.flows.flow import FlowPolicy
from podwire.datapath import abi, rows
from podwire.datapath.events import hook_name, path_name, reason_name
from podwire.datapath.node import KernelDatapath
from podwire.kernel.clock import KernelClock
from podwire.model import log
from podwire.model.config.help import help_text
from podwire.model.config.sources import Settled, parse_arguments
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import (
    Bug,
    Conflict,
    InvalidConfiguration,
    PodwireError,
    StorageFailure,
)
from podwire.model.identity import RESERVED_LABELS
from podwire.model.ids import EndpointId
from podwire.model.request import AttachRequest
from podwire.model.wire import SPOOL_DIRECTORY, Frame

EXIT_OF: Mapping[type[PodwireError], int] = {
    InvalidConfiguration: 2,
    Conflict: 5,
    Bug: 70,
    PodwireError: 1,
}
"""Exit code of a start that failed, by the nearest class of its error."""
STOP_DEADLINE_S = 10.0
"""How long requests may still run after SIGTERM; then ADDs are cancelled and undone."""
THREADS = 2

_log = logging.getLogger(__name__)

GC_THRESHOLD = 20_000
"""Allocations between two collections; a request makes some hundreds."""
SWITCH_INTERVAL_S = 0.0005


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent until SIGTERM or SIGINT; gives the exit code. Failing to start is one line on stderr and a hint."""
    parsed = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    if parsed.wants_help or parsed.wants_version:
        print(help_text() if parsed.wants_help else f"podwire-agent {__version__}")
        return 0
    try:
        if os.geteuid() != 0:
            raise InvalidConfiguration(
                f"start: the user id is {os.geteuid()}, not root's", hint="run the agent as root"
            )
        settled = read_settings(parsed)
        log.configure(settled.config.report.log_level, settled.config.report.log_format)
        for warning in settled.warnings:
            _log.warning("an environment variable is no setting", extra={"cause": warning})
        with ExitStack() as stack:
            node = open_node(settled, stack)
            asyncio.run(serve(node, partial(read_settings, parsed)))
    except PodwireError as error:
        return _fail(error)
    except OSError as error:
        return _fail(
            StorageFailure(
                f"start: {error.strerror or error}: {error.filename!r}",
                hint="the agent must be able to write run_dir and state_dir",
            )
        )
    return 0


def _fail(error: PodwireError) -> int:
    print(f"podwire-agent: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"podwire-agent: hint: {error.hint}", file=sys.stderr)
    return next(EXIT_OF[kind] for kind in type(error).__mro__ if kind in EXIT_OF)


def _settle_interpreter() -> None:
    """Keep the collector and the interpreter lock out of a request's way.

    What start-up made stays for ever: looking at it again in each collection only costs time. A worker that wants the
    lock gets it after the switch interval; the default of 5 ms is several ADDs long.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


async def serve(node: Node, read_again: Callable[[], Settled]) -> None:
    """Open the sockets, run the loops until a signal comes, then close in reverse."""
    stop = asyncio.Event()
    _handle_signals(node, stop, read_again)
    async with AsyncExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(THREADS, thread_name_prefix="duty"))
        files = node.config.files
        spool = Spool(files.run_dir / SPOOL_DIRECTORY, node.clock, _decode_spooled)
        dispatcher = Dispatcher(node.attachments, spool, node.clock)
        stack.push_async_callback(dispatcher.close, STOP_DEADLINE_S)
        await dispatcher.replay()
        pump = _start_events(node, stack)
        duties = _make_duties(node, dispatcher, threads)
        await _open_doors(node, dispatcher, pump, stack)
        node.health.report("agent", ok=True)
        _settle_interpreter()
        ms = (node.clock.boottime_ns() - node.clock.process_start_ns()) / 1e6
        _log.info(
            "ready",
            extra={
                "node": node.config.node.node_name,
                "version": __version__,
                "pid": os.getpid(),
                "ms": ms,
            },
        )
        node.policies.start()
        stack.callback(node.policies.stop)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(loops.supervise(name, run, duties), name=name)
                for name, run in (*loops.LOOPS.items(), *_identity_loops(node, stack))
            ]
            await stop.wait()
            for task in running:
                task.cancel()
    _log.info("stopped; pods keep running", extra={"count": len(node.table)})


def _identity_loops(node: Node, stack: AsyncExitStack) -> list[tuple[str, loops.Loop]]:
    """A thread of its own: it may wait for the store."""
    threads = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="identity"))
    node.identities.follower.start()
    stack.callback(node.identities.follower.stop)

    def report(message: str) -> None:
        node.health.report("identities", ok=not message, message=message, critical=False)

    return [("identities", lambda _duties: tend_identities(node.identities, threads, report))]


async def _open_doors(
    node: Node, dispatcher: Dispatcher, pump: EventPump, stack: AsyncExitStack
) -> None:
    """Launchers first: the HTTP library takes a third of a second to import, and they need not wait for it."""
    files, metrics = node.config.files, node.metrics
    cni = CniServer(
        CniRequests(dispatcher, metrics).answer,
        lambda limit: metrics.count("refused_requests", ("cni", limit)),
    )
    listener = open_unix_socket(files.cni_socket)
    await stack.enter_async_context(cni.serving(listener, files.cni_socket, STOP_DEADLINE_S))
    await asyncio.to_thread(importlib.import_module, "podwire.agent.api_socket")
    from podwire.agent.api_socket import ApiServer, serving_metrics  # noqa: PLC0415

    api = ApiServer(_make_api(node, pump))
    listener = open_unix_socket(files.api_socket)
    await stack.enter_async_context(api.serving(listener, files.api_socket))
    if node.config.report.metrics_listen:
        listen = node.config.report.metrics_listen
        await stack.enter_async_context(serving_metrics(listen, metrics))


def _handle_signals(node: Node, stop: asyncio.Event, read_again: Callable[[], Settled]) -> None:
    loop = asyncio.get_running_loop()

    def end(name: str) -> None:
        _log.info("stopping", extra={"signal": name})
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number.name)
    # On a thread: a changed setting may wait for the node's turn.
    loop.add_signal_handler(
        signal.SIGHUP, lambda: loop.run_in_executor(None, node.live.reload, read_again)
    )


def _start_events(node: Node, stack: AsyncExitStack) -> EventPump:
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
    )
    source = stack.enter_context(node.datapath.open_events())
    pump = EventPump(source, maker, node.flows)
    pump.start()
    stack.callback(pump.stop)
    return pump


def _name_rule(node: Node, number: int) -> FlowPolicy | None:
    name = node.regenerator.enforcer.engine.rule_name(number)
    if name is None:
        return None
    return FlowPolicy(name.policy.kind, name.policy.namespace, name.policy.name, name.path)


def _labels_of(node: Node, identity: int) -> tuple[str, ...]:
    if identity in RESERVED_LABELS:
        return RESERVED_LABELS[identity]
    known = node.identities.feed.resolver.allocator.known.get(identity)
    return known.key.labels if known else ()


def _make_duties(node: Node, dispatcher: Dispatcher, threads: ThreadPoolExecutor) -> Duties:
    def list_warnings() -> Sequence[str]:
        with node.turn:
            found = node.datapath.find_host_warnings()
        return [f"{one.message}; {one.hint}" for one in found]

    return Duties(
        attachments=node.attachments,
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
        replay=dispatcher.replay,
        threads=threads,
    )


def _make_api(node: Node, pump: EventPump) -> Api:
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
                packets=lambda: _count_packets(datapath),
                policies=lambda: len(node.policies.objects.rules),
                policy_problems=lambda: len(node.policies.objects.problems),
                policy_revision=lambda: node.regenerator.enforcer.revision,
                identities=node.identities.feed.resolver.allocator,
                maps=datapath.describe_maps,
                started_unix_s=time.time(),
            )
        )
    )
    return Api(
        config=node.live,
        table=node.table,
        ipam=node.ipam,
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
        facts=NodeFacts(
            addresses=datapath.node_addresses,
            mtu=datapath.mtu,
            template=datapath.template_id,
            abi_version=abi.ABI_VERSION,
        ),
        detach=lambda record: node.attachments.delete(_deletion(record, node.clock)),
        started_boottime_ns=node.started_boottime_ns,
    )


def _policy_readers(node: Node) -> PolicyReaders:
    return PolicyReaders(
        enforcer=node.regenerator.enforcer,
        objects=node.policies.objects,
        resolver=node.identities.feed.resolver,
        table=node.table,
        own_addresses=node.datapath.own_addresses(),
        hits=node.datapath.read_hits,
        change_labels=partial(_change_labels, node),
        set_audit=partial(_set_audit, node),
    )


def _change_labels(node: Node, endpoint_id: EndpointId, changes: list[str]) -> EndpointRecord:
    """Change labels; whoever asked may count on the new policy when he is answered."""
    record = node.identities.change_labels(endpoint_id, changes)
    _build_due(node)
    return record


def _set_audit(node: Node, endpoint: Endpoint, audit: bool | None) -> None:
    with node.turn:
        record = msgspec.structs.replace(endpoint.record, policy_audit=audit)
        node.journal.write(record)
        node.table.replace_record(record)
        node.regenerator.request(record.id, Level.POLICY, "policy audit changed")
    _build_due(node)


def _build_due(node: Node) -> None:
    done = True
    while done:
        with node.turn:
            done = node.regenerator.run_due()


def _deletion(record: EndpointRecord, clock: KernelClock) -> AttachRequest:
    """The DEL that a runtime would send for an attachment now."""
    return AttachRequest(
        command="DEL",
        network=record.key.network,
        cni_version=record.cni_version,
        key=record.key,
        started_boottime_ns=clock.boottime_ns(),
    )


def _count_packets(datapath: KernelDatapath) -> Iterator[measured.PacketCount]:
    for row in datapath.read_metrics():
        reason = reason_name(row.reason) if row.reason else ""
        yield measured.PacketCount(hook_name(row.hook), reason, path_name(row.path), row.packets)


def _decode_spooled(frame: Frame) -> AttachRequest:
    return decode_request(frame.environment, frame.stdin, frame.started_boottime_ns)
