"""The agent's entry: start, doors and stop.

`podwire-agent` calls `main`. When `serve` begins, `agent.node` has opened and restored everything. Then the spool is
replayed, the sockets are opened last, so that no request is answered by half a node, and one task group runs until a
signal comes. Stopping leaves pods running: programs, maps, devices and records stay. Nothing here decides anything.
"""

import asyncio
import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

from podwire import __version__
from podwire.agent.assemble import (
    make_api,
    make_chained_portmap,
    make_condition,
    make_duties,
    make_installer,
    make_range_keeper,
    start_events,
)
from podwire.agent.cni.dispatch import Dispatcher
from podwire.agent.cni.requests import CniRequests
from podwire.agent.cni.socket import CniServer
from podwire.agent.cni.spool import Spool
from podwire.agent.config_reload import read_settings
from podwire.agent.duties import loops
from podwire.agent.duties.loops import EventPump
from podwire.agent.node import Node, open_node, prepare_memory
from podwire.agent.unix_socket import open_unix_socket
from podwire.cni.netconf import decode_request
from podwire.model import log
from podwire.model.config import AgentConfig
from podwire.model.config.help import help_text
from podwire.model.config.sources import Settled, parse_arguments
from podwire.model.errors import Bug, Conflict, InvalidConfiguration, PodwireError, StorageFailure
from podwire.model.request import AttachRequest
from podwire.model.store import Store
from podwire.model.wire import SPOOL_DIRECTORY, Frame
from podwire.store.open import end_calls

if TYPE_CHECKING:
    from podwire.agent.api.waiting import WaitingApi

EXIT_OF: Mapping[type[PodwireError], int] = {
    InvalidConfiguration: 2,
    Conflict: 5,
    Bug: 70,
    PodwireError: 1,
}
"""Exit code of a start that failed, by the nearest class of its error."""
STOP_DEADLINE_S = 10.0
"""How long requests may still run after SIGTERM; then ADDs are cancelled and undone."""
STORE_DEADLINE_S = 1.5
"""How long after SIGTERM the store may still be waited for: what the agent gives up in it takes milliseconds."""
THREADS = 2

_log = logging.getLogger(__name__)

GC_THRESHOLD = 20_000
"""Allocations between two collections; a request makes some hundreds."""
SWITCH_INTERVAL_S = 0.0005
API_MODULE = "podwire.agent.api.server"
"""Its HTTP library takes a third of a second to import; that is done while the node is opened, which mostly waits."""


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
            _log.warning("an environment variable is not a setting", extra={"cause": warning})
        prepare_memory()
        importing = partial(importlib.import_module, API_MODULE)
        threading.Thread(target=importing, name="import", daemon=True).start()
        # As the first process of a container the agent has no default action of signals.
        signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
        with ExitStack() as stack:
            with closing(_StartNotice(settled.config)) as notice:
                node = open_node(settled, stack, notice)
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


class _StartNotice:
    """Shows people what the start waits for. Nearly no start waits, so the server is made when one does."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._api: WaitingApi | None = None

    def __call__(self, reason: str, hint: str = "") -> None:
        if self._api is None:
            from podwire.agent.api.waiting import WaitingApi  # noqa: PLC0415 - a restart must be quick

            self._api = WaitingApi(self._config)
        self._api.wait_for(reason, hint)

    def close(self) -> None:
        if self._api is not None:
            self._api.close()


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
        spool = Spool(
            files.run_dir / SPOOL_DIRECTORY,
            node.clock,
            _decode_spooled,
            ran_at=node.clock.process_ran_at,
        )
        dispatcher = Dispatcher(node.attachments, spool, node.clock)
        stack.push_async_callback(dispatcher.close, STOP_DEADLINE_S)
        # Before the doors open: a spooled DEL is older than every ADD that comes now.
        await dispatcher.replay()
        pump = start_events(node, stack)
        duties = make_duties(node, dispatcher, threads)
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
        _start_duties(node, stack)
        _tell_runtime(node, stack)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(loops.supervise(name, run, duties), name=name)
                for name, run in loops.LOOPS.items()
            ]
            await stop.wait()
            _limit_waiting(node.store)
            for task in running:
                task.cancel()
    _log.info("stopped; pods keep running", extra={"count": len(node.table)})


def _limit_waiting(store: Store) -> None:
    """Let no duty that is stopped from here on wait for long for a store that does not answer."""
    # Not on the loop: the stops of the duties block it. A store that is closed by then has nobody waiting.
    timer = threading.Timer(STORE_DEADLINE_S, end_calls, (store,))
    timer.daemon = True
    timer.start()


def _start_duties(node: Node, stack: AsyncExitStack) -> None:
    """Start what the agent does unasked; `stack` stops it."""
    for duty in (
        node.policies,
        node.addresses.duty,
        node.cluster,
        make_range_keeper(node),
        node.identities,
        node.services,
    ):
        if duty is not None:
            duty.start()
            stack.callback(duty.stop)


def _tell_runtime(node: Node, stack: AsyncExitStack) -> None:
    """Let container runtime and Kubernetes know that pods can be attached here."""
    condition = make_condition(node)
    if condition is not None:
        condition.start()
        stack.callback(condition.stop)

    def installed() -> None:
        if condition is not None:
            condition.network_is_there()

    installer = make_installer(node, installed)
    if installer is None:
        installed()  # by whom, and when, is not ours to know
        return
    installer.start()
    stack.callback(installer.stop)


async def _open_doors(
    node: Node, dispatcher: Dispatcher, pump: EventPump, stack: AsyncExitStack
) -> None:
    """Open both sockets in one moment, that of the API first: a client that has reached one finds the other, too."""
    files, metrics = node.config.files, node.metrics
    requests = CniRequests(dispatcher, metrics, make_chained_portmap(node))
    cni = CniServer(
        requests.answer,
        lambda limit: metrics.count("refused_requests", ("cni", limit)),
        at_once=requests,
        way=node.way,
    )
    await asyncio.to_thread(importlib.import_module, API_MODULE)
    from podwire.agent.api.server import ApiServer, serving_metrics  # noqa: PLC0415

    api = ApiServer(make_api(node, pump))
    listener = open_unix_socket(files.api_socket)
    await stack.enter_async_context(api.serving(listener, files.api_socket))
    listener = open_unix_socket(files.cni_socket)
    await stack.enter_async_context(cni.serving(listener, files.cni_socket, STOP_DEADLINE_S))
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


def _decode_spooled(frame: Frame) -> AttachRequest:
    return decode_request(frame.environment, frame.stdin, frame.started_boottime_ns)
