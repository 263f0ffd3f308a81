"""What the agent does on its own: reap devices, regenerate endpoints, read events, look after the node.

`agent.main` runs each loop as a named task of its one task group. A loop only decides when; `control` and `datapath`
do the work on a thread, because it waits for the kernel. A loop that fails is reported, waits and continues: one
broken duty must not stop the others, and running pods need none of them. On an idle node the loops look a few times a
second whether there is work, all at the same moments (`agent.ticks`).
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from podwire.agent.health import ALIVE_REFRESH_S, AliveFile, Health
from podwire.agent.metrics import Metrics
from podwire.agent.ticks import next_tick
from podwire.control.endpoint.queue import Level
from podwire.control.endpoint.regenerate import Regenerator
from podwire.control.endpoint.states import State
from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.control.flows.enrich import FlowMaker
from podwire.control.flows.ring import FlowRing, Watch
from podwire.model.errors import PodwireError
from podwire.model.flow import FlowEvent
from podwire.model.ids import NFT_TABLE
from podwire.model.interfaces import Datapath

REAP_LOOK_S = 0.25
REAP_BACKLOG = 64
"""Ended endpoints that are not waited with any longer, whatever else goes on."""
REAP_AGE_S = 3.0
REAP_RETRY_S = 2.0
REGENERATION_LOOK_S = 0.25
MEMORY_LOOK_S = 10.0
MEMORY_SAME_BYTES = 1 << 20
MEMORY_LOOKS_MAX = 6
FOLD_LOOK_S = 0.5
SPOOL_LOOK_S = 1.0
RECONCILE_S = 300.0
WARNINGS_S = 60.0
LOSSES_PAUSE_S = 0.5
"""Between two looks at what the kernel has told of losses: a burst is one."""
TABLES_PAUSE_S = 0.1
"""Between what the kernel tells of nftables and a look; twice as long after each repair in a row."""
TABLES_PAUSE_CAP_S = 1.0
"""A table that is changed all the time is repaired after this time at the latest."""
TABLES_CALM_S = 10.0
"""Without a repair for so long, the next one is the first again."""
EVENT_PAUSE_S = 0.02
"""Pause after each read of the ring: under a flood this many bytes at a time, the rest is lost and counted."""
RESTART_BASE_S = 1.0
RESTART_CAP_S = 60.0

_TABLES = "tables"
_SECOND_AGENT = "second-agent"
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class EventSource(Protocol):
    """The ring of events."""

    fd: int

    def read(self) -> list[FlowEvent]:
        """Give the events that are there, up to one buffer full."""


class KernelChanges(Protocol):
    """Tells that something has changed in the kernel (`kernel.netlink_events.NetlinkEvents`)."""

    def fileno(self) -> int: ...

    def wait(self, timeout_s: float) -> bool:
        """Take what was told; False when that was nothing."""

    def take_lost(self) -> bool:
        """Tell, once, whether something was not told for want of room."""

    def close(self) -> None: ...


class Attachments(Protocol):
    """What the loops ask of `control.attach.service`."""

    def settle(self) -> int:
        """Let go of what has ended; tells how many were forgotten."""

    def status(self) -> None:
        """Raise what CNI STATUS would answer."""


class FoldableJournal(Protocol):
    """What the loops ask of the journal."""

    @property
    def behind_at(self) -> int:
        """The number of the last record that its database does not have; 0 = it has all."""

    def fold(self) -> None:
        """Bring what was written last into the database."""


@dataclass(frozen=True)
class Duties:
    """What the loops work on."""

    attachments: Attachments
    journal: FoldableJournal
    table: EndpointTable
    regenerator: Regenerator
    flows: FlowRing
    datapath: Datapath
    turn: threading.RLock
    health: Health
    metrics: Metrics
    alive: AliveFile
    backlog: Callable[[], int]
    """How many endpoints have ended and are not yet gone."""
    requests_taken: Callable[[], int]
    """How many CNI requests were ever taken."""
    list_warnings: Callable[[], Sequence[str]]
    find_second_agent: Callable[[], str]
    """Give the process of an agent that waits until this one ends; "" = none."""
    watch_devices: Callable[[Callable[[int], None]], KernelChanges]
    """Listen for what pods' devices lose: the index of each is told while `wait` takes it."""
    watch_tables: Callable[[Callable[[str], None]], KernelChanges]
    """Listen for changes of nftables: the name of the process that made each is told while `wait` takes it."""
    repair_tables: Callable[[], Sequence[str]]
    """Put the node's own table right; tells what differed."""
    repair_pins: Callable[[], Sequence[str]]
    """Pin again what somebody has unpinned; tells what."""
    settle_memory: Callable[[int], int]
    """Give back what was freed, if memory has grown much since the last call; told and tells how much was left."""
    replay: Callable[[], Awaitable[tuple[int, int]]]
    """Carry out spooled DELs: how many were done, how many failed."""
    threads: ThreadPoolExecutor
    told_of_host: set[str] = field(default_factory=set)
    """Warnings of the host that stand: a loop that begins anew takes back what is over."""

    async def on_thread(self, work: Callable[[], _T]) -> _T:
        """Run what waits for kernel or disk off the loop."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)


Loop = Callable[[Duties], Awaitable[None]]


async def supervise(name: str, loop: Loop, duties: Duties) -> None:
    """Run a loop for ever; when it fails, say so, wait (1 s, 2 s, ... at most a minute) and start it again."""
    delay_s = RESTART_BASE_S
    clock = asyncio.get_running_loop().time
    while True:
        begin_s = clock()
        try:
            await loop(duties)
        except PodwireError as error:
            message = error.message
            _log.warning("a task failed; it goes on", extra={"task": name, "error": message})
        except Exception as error:  # the door: a bug in one duty must not end the agent
            message = repr(error)
            _log.exception("a task failed; it goes on", extra={"task": name})
        duties.health.report(name, ok=False, message=message, critical=False)
        if clock() - begin_s > RESTART_CAP_S:
            delay_s = RESTART_BASE_S
        await asyncio.sleep(delay_s)
        delay_s = min(RESTART_CAP_S, delay_s * 2)


async def reap(duties: Duties) -> None:
    """Let go of what has ended, in batches, in a quiet moment, or when it waits too long or is too much. What cannot be
    let go is tried again."""
    clock = asyncio.get_running_loop().time
    since_s, seen = clock(), -1
    while True:
        await next_tick(REAP_LOOK_S)
        taken = duties.requests_taken()
        quiet, seen = taken == seen, taken
        if not duties.backlog():
            since_s = clock()
            continue
        # Deleting a batch holds the kernel's RTNL lock for milliseconds, and an ADD that meets it waits as long.
        if not quiet and duties.backlog() < REAP_BACKLOG and clock() - since_s < REAP_AGE_S:
            continue
        forgotten = await duties.on_thread(duties.attachments.settle)
        since_s = clock()
        duties.health.report("reaper", ok=True, critical=False)
        if not forgotten:
            await asyncio.sleep(REAP_RETRY_S)


async def fold(duties: Duties) -> None:
    """Bring what was written last into the journal's database, when nothing was for a moment: an ADD would wait for
    its lock.
    """
    seen = 0
    while True:
        await next_tick(FOLD_LOOK_S)
        quiet, seen = duties.journal.behind_at == seen, duties.journal.behind_at
        if quiet and seen:
            await duties.on_thread(duties.journal.fold)
            duties.health.report("fold", ok=True, critical=False)


async def regenerate(duties: Duties) -> None:
    """Regenerate what is due: retries, repairs, and what the programs are to tell since followers came or went."""
    seen: Watch | None = None
    while True:
        await next_tick(REGENERATION_LOOK_S)
        if seen != (watch := duties.flows.watch):
            await duties.on_thread(partial(_request_traces, duties))
            seen = watch
        if len(duties.regenerator.queue):
            await duties.on_thread(partial(_run_regenerations, duties))
            duties.health.report("regenerations", ok=True, critical=False)


def _request_traces(duties: Duties) -> None:
    with duties.turn:
        duties.regenerator.request_traces("followers of flows changed")


def _run_regenerations(duties: Duties) -> None:
    """Do all regenerations that are due."""
    done = True
    while done:
        # One regeneration per turn, so that no ADD waits for a queue of them.
        with duties.turn:
            done = duties.regenerator.run_due()


async def reconcile(duties: Duties) -> None:
    """Compare every endpoint with the kernel now and then, and have repaired what differs."""
    while True:
        await asyncio.sleep(RECONCILE_S)
        for endpoint in duties.table:
            await duties.on_thread(partial(compare, duties, endpoint))
        duties.health.report("reconciliation", ok=True, critical=False)


async def watch_devices(duties: Duties) -> None:
    """Look at endpoints whose devices lost a filter, a queue or a route: without its programs a pod has no policy."""
    touched: set[int] = set()
    news = duties.watch_devices(touched.add)
    # The first round looks at all endpoints: the kernel tells only of losses after the socket was opened.
    everything = True
    try:
        while True:
            # Not woken by the kernel's news: each DEL causes some, and the loop would take the interpreter from it.
            # What one command removes is told piece by piece, too: one look serves all of it.
            await next_tick(LOSSES_PAUSE_S)
            if not news.wait(0) and not everything:
                continue
            # Messages that the kernel dropped may have been about any device.
            indexes, everything = set(touched), news.take_lost() or everything
            touched.clear()
            for endpoint in duties.table:
                if everything or endpoint.record.device.host_ifindex in indexes:
                    await duties.on_thread(partial(compare, duties, endpoint))
            everything = False
            duties.health.report("devices", ok=True, critical=False)
    finally:
        news.close()


async def watch_tables(duties: Duties) -> None:
    """Put the node's own table of nftables back as soon as somebody has taken it away or changed it.

    A process that does so again and again is named, and each repair waits longer: two programs that write against each
    other must not cost a core.
    """
    loop = asyncio.get_running_loop()
    strangers: set[str] = set()
    news = duties.watch_tables(strangers.add)
    pause_s, calm_at_s = TABLES_PAUSE_S, 0.0
    try:
        while True:
            # Once before the first wait: the kernel tells only of what happens after the socket was opened.
            differences = await duties.on_thread(duties.repair_tables)
            # What was changed during the look may be repaired before its news is read, which names who did it.
            looks_again = bool(differences) and news.wait(0)
            if differences:
                _tell_of_repairs(duties, differences, strangers)
                in_a_row = loop.time() < calm_at_s
                pause_s = min(TABLES_PAUSE_CAP_S, pause_s * 2) if in_a_row else TABLES_PAUSE_S
                calm_at_s = loop.time() + TABLES_CALM_S
                if pause_s == TABLES_PAUSE_CAP_S:
                    duties.health.warn(_TABLES, _contested(strangers))
            strangers.clear()
            duties.health.report(_TABLES, ok=True, critical=False)
            while not looks_again and not await _is_readable(loop, news.fileno(), calm_at_s):
                duties.health.warn(_TABLES, "")
                pause_s, calm_at_s = TABLES_PAUSE_S, 0.0
            await asyncio.sleep(pause_s)
            news.wait(0)
    finally:
        duties.health.warn(_TABLES, "")
        news.close()


def _tell_of_repairs(duties: Duties, differences: Sequence[str], strangers: Iterable[str]) -> None:
    """Log and count what was repaired in the node's table. `strangers`: processes that wrote since the last look."""
    for difference in differences:
        facts = {"cause": difference, "keys": sorted(filter(None, strangers))}
        _log.warning("repaired the rules of nftables", extra=facts)
    duties.metrics.count("cluster_repairs", by=len(differences))


def _repair_pins(duties: Duties) -> None:
    if lost := duties.repair_pins():
        facts = {"cause": lost[0], "count": len(lost)}
        _log.warning("put pins back that somebody had removed", extra=facts)


def _contested(strangers: Iterable[str]) -> str:
    names = ", ".join(sorted(name for name in strangers if name)) or "somebody"
    return (
        f"the table {NFT_TABLE!r} of nftables is taken away or changed again and again, by {names}: meanwhile pods'"
        f" packets leave without masquerade and guards; let it leave that table alone"
    )


async def _is_readable(loop: asyncio.AbstractEventLoop, fd: int, until_s: float) -> bool:
    """Wait until a descriptor is readable; False at `until_s`, 0 = never."""
    try:
        async with asyncio.timeout_at(until_s or None):
            await _readable(loop, fd)
    except TimeoutError:
        return False
    return True


async def _readable(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    """Wait until a descriptor is readable; without a reader afterwards, which would be called all the time."""
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


def compare(duties: Duties, endpoint: Endpoint) -> None:
    """Compare one endpoint with the kernel; a difference asks for a regeneration."""
    with duties.turn:
        if endpoint.state in (State.NOT_READY, State.WAITING_TO_REGENERATE):
            # A regeneration is due anyway, which may be about its policy alone: let it look at the device, too.
            duties.regenerator.enforcer.retry(endpoint)
        if endpoint.state is not State.READY:
            return
        record = endpoint.record
        differences = [
            *duties.datapath.compare_endpoint(record, endpoint.config, None),
            *duties.regenerator.enforcer.compare(endpoint),
        ]
        duties.metrics.count("reconciliations", ("differs" if differences else "agrees",))
        if not differences:
            return
        cause = f"reconciliation: {differences[0]}"
        duties.regenerator.request(record.id, Level.REWRITE, cause)
    _log.warning(
        "endpoint differs from the journal; it is repaired",
        extra={"endpoint": record.id, "cause": "; ".join(differences)},
    )


async def stay_alive(duties: Duties) -> None:
    """Keep the file `alive` current while an ADD would succeed, and record whether it would; tell of who waits to be
    alive in this one's place."""
    second = ""
    while True:
        # Launchers answer STATUS from this file while no agent runs, so an upgrade does not make the node NotReady.
        cause = await duties.on_thread(partial(duties.alive.refresh, duties.attachments.status))
        duties.health.report("alive", ok=True, critical=False)
        duties.health.report(
            "status", not cause, f"CNI STATUS fails or soon would: {cause}", critical=False
        )
        second = _tell_of_second_agent(duties, second)
        await asyncio.sleep(ALIVE_REFRESH_S)


def _tell_of_second_agent(duties: Duties, known: str) -> str:
    """Warn of an agent that waits until this one ends; gives its process, "" = there is none."""
    second = duties.find_second_agent()
    if second not in ("", known):
        _log.warning(
            "another agent of this node waits until this one ends; remove one of them",
            extra={"pid": second},
        )
    message = (
        f"another agent of this node, process {second}, waits until this one ends: two DaemonSets or services start one"
        " each, or a pod was deleted by force while it ran; remove one of them"
    )
    duties.health.warn(_SECOND_AGENT, message if second else "")
    return second


async def watch_host(duties: Duties) -> None:
    """Look now and then for what somebody else changed on this host that breaks pods' traffic."""
    while True:
        warnings = await duties.on_thread(duties.list_warnings)
        assert isinstance(warnings, Sequence)
        for message in warnings:
            if message not in duties.told_of_host:
                _log.warning("the host obstructs pods", extra={"cause": message})
            duties.health.warn(message, message)
        for message in duties.told_of_host.difference(warnings):
            duties.health.warn(message, "")
        duties.told_of_host.clear()
        duties.told_of_host.update(warnings)
        await duties.on_thread(partial(_repair_pins, duties))
        duties.health.report("host", ok=True, critical=False)
        await asyncio.sleep(WARNINGS_S)


async def keep_memory_small(duties: Duties) -> None:
    """Give back what thousands of objects left when they were taken in; single changes leave nothing to speak of."""
    settled_bytes, last_bytes, looks = 0, 0, 0
    while True:
        left_bytes = await duties.on_thread(partial(duties.settle_memory, settled_bytes))
        assert isinstance(left_bytes, int)
        # What was being taken in at this look is free at a later one, and shows as no growth then: from nothing on
        # until two looks leave the same. A process whose memory swings for good is looked at no more often.
        is_same = abs(left_bytes - last_bytes) < MEMORY_SAME_BYTES
        looks = 0 if is_same else looks + 1
        settled = is_same or looks >= MEMORY_LOOKS_MAX
        settled_bytes, last_bytes = left_bytes if settled else 0, left_bytes
        await asyncio.sleep(MEMORY_LOOK_S)
        duties.health.report("memory", ok=True, critical=False)


async def replay_spool(duties: Duties) -> None:
    """Carry out DELs that launchers wrote down because they found nobody."""
    while True:
        await next_tick(SPOOL_LOOK_S)
        # Also while the agent runs: a launcher may have found nobody and write its DEL a moment after the replay at
        # the start.
        done, failed = await duties.replay()
        duties.health.report("spool", ok=True, critical=False)
        for outcome, count in (("done", done), ("failed", failed)):
            if count:
                duties.metrics.count("spool_replayed", (outcome,), count)


LOOPS: dict[str, Loop] = {
    "reaper": reap,
    "fold": fold,
    "regenerations": regenerate,
    "reconciliation": reconcile,
    "devices": watch_devices,
    _TABLES: watch_tables,
    "alive": stay_alive,
    "host": watch_host,
    "spool": replay_spool,
    "memory": keep_memory_small,
}
"""Name of the task -> its loop."""


class EventPump:
    """Moves events from the ring to the flows whenever the ring's descriptor says that there are some."""

    def __init__(self, source: EventSource, maker: FlowMaker, ring: FlowRing) -> None:
        self._source = source
        self._maker = maker
        self._ring = ring
        self.lost = 0
        """Events that the ring had no room for."""
        self._resume: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to listen; on the loop."""
        self._resume = None
        asyncio.get_running_loop().add_reader(self._source.fd, self._drain)

    def stop(self) -> None:
        """Stop listening."""
        if self._resume is not None:
            self._resume.cancel()
        asyncio.get_running_loop().remove_reader(self._source.fd)

    def _drain(self) -> None:
        for event in self._source.read():
            self.lost += event.lost
            self._ring.append(self._maker.make(event))
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._source.fd)
        # The ring stays readable under a flood: with the reader in place the loop would do nothing else.
        self._resume = loop.call_later(EVENT_PAUSE_S, self.start)
