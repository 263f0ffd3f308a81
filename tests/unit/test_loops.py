"""The agent's loops: what they do when, and that a broken one neither stops the others nor itself."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from podwire.agent.duties import loops
from podwire.agent.duties.loops import Duties, EventPump
from podwire.agent.health import AliveFile, Health
from podwire.agent.metrics import Metrics
from podwire.control.endpoint.queue import Level
from podwire.control.endpoint.states import State
from podwire.control.flows.enrich import FlowMaker
from podwire.control.flows.flow_filter import FlowFilter, parse_filter
from podwire.control.flows.ring import FlowRing
from podwire.model.errors import CannotServe, KernelFailure
from podwire.model.flow import FlowEvent
from podwire.model.interfaces import PodNamespace
from tests.fakes.node import FakeNode
from tests.unit.test_attach_service import request
from tests.unit.test_flows import make_event

NETNS = PodNamespace(fd=-1, path="/run/netns/a", cookie=7)


class Losses:
    """What the kernel would tell of devices, by hand."""

    def __init__(self) -> None:
        self._lost: list[int] = []
        self.has_lost = False
        self._fd = -1
        self.closed = 0

    def open(self, told: Callable[[int], None]) -> "Losses":
        self._told = told
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self

    def lose(self, *indexes: int) -> None:
        self._lost += indexes

    def fileno(self) -> int:
        return self._fd

    def wait(self, timeout_s: float) -> bool:
        assert timeout_s == 0
        lost, self._lost = self._lost, []
        for task in lost:
            self._told(task)
        return bool(lost)

    def take_lost(self) -> bool:
        found, self.has_lost = self.has_lost, False
        return found

    def close(self) -> None:
        os.close(self._fd)
        self.closed += 1


class Tables:
    """Our table of nftables, and who has changed it."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._fd = -1
        self.differences: list[str] = []
        self.looks = 0
        self.meanwhile: Callable[[], None] = lambda: None

    def open(self, told: Callable[[str], None]) -> "Tables":
        self._told = told
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self

    def change(self, name: str, *differences: str) -> None:
        self.differences += differences
        self._names.append(name)
        os.eventfd_write(self._fd, 1)

    def repair(self) -> list[str]:
        self.looks += 1
        self.meanwhile()
        found, self.differences = self.differences, []
        return found

    def fileno(self) -> int:
        return self._fd

    def wait(self, timeout_s: float) -> bool:
        assert timeout_s == 0
        if not self._names:
            return False
        os.eventfd_read(self._fd)
        while self._names:
            self._told(self._names.pop())
        return True

    def take_lost(self) -> bool:
        return False

    def close(self) -> None:
        os.close(self._fd)


@dataclass
class Scene:
    """A node without a kernel, and what the loops are given."""

    node: FakeNode
    duties: Duties
    warnings: list[str] = field(default_factory=list)
    replayed: list[tuple[int, int]] = field(default_factory=list)
    losses: Losses = field(default_factory=Losses)
    tables: Tables = field(default_factory=Tables)
    settled: list[int] = field(default_factory=list)


@pytest.fixture
def scene(node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    for name in vars(loops):
        if name.endswith("_S") and name != "RESTART_CAP_S":
            monkeypatch.setattr(loops, name, 0.001)
    warnings: list[str] = []
    replayed: list[tuple[int, int]] = []

    async def replay() -> tuple[int, int]:
        return replayed.pop() if replayed else (0, 0)

    def list_warnings() -> Sequence[str]:
        return list(warnings)

    settled: list[int] = []

    def settle_memory(before_bytes: int) -> int:
        settled.append(before_bytes)
        return before_bytes + 1

    losses, tables = Losses(), Tables()
    with ThreadPoolExecutor(1) as threads:
        duties = Duties(
            attachments=node.service,
            journal=node.journal,
            table=node.table,
            regenerator=node.service.context.regenerator,
            flows=node.flows,
            datapath=node.datapath,
            turn=node.service.turn,
            health=Health(node.clock),
            metrics=Metrics(),
            alive=AliveFile(tmp_path, node.clock, 1),
            backlog=lambda: len(node.endings),
            requests_taken=lambda: 0,
            list_warnings=list_warnings,
            find_second_agent=str,
            watch_devices=losses.open,
            watch_tables=tables.open,
            repair_tables=tables.repair,
            repair_pins=list,
            settle_memory=settle_memory,
            replay=replay,
            threads=threads,
        )
        yield Scene(node, duties, warnings, replayed, losses, tables, settled)


@contextlib.asynccontextmanager
async def running(loop: Callable[[Duties], Awaitable[None]], duties: Duties) -> AsyncIterator[None]:
    task = asyncio.create_task(loops.supervise("duty", loop, duties))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


async def test_what_has_ended_is_let_go(scene: Scene) -> None:
    scene.node.service.add(request(), NETNS)
    scene.node.service.delete(request("DEL", at_ns=200))
    async with running(loops.reap, scene.duties):
        await until(lambda: not len(scene.node.table))
    scene.node.assert_empty()


async def test_memory_is_settled_again_and_again_from_what_was_left(scene: Scene) -> None:
    async with running(loops.keep_memory_small, scene.duties):
        await until(lambda: len(scene.settled) > 2)
    assert scene.settled[:3] == [0, 1, 2]


async def test_what_a_large_list_frees_late_is_given_back_too(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each settlement from the last one leaves a byte more, each from nothing leaves one.
    monkeypatch.setattr(loops, "MEMORY_SAME_BYTES", 1)
    async with running(loops.keep_memory_small, scene.duties):
        await until(lambda: len(scene.settled) > 4)
    assert scene.settled[:5] == [0, 0, 1, 0, 0]


async def end_one(scene: Scene, container: str) -> None:
    scene.node.service.add(request(container=container), NETNS)
    scene.node.service.delete(request("DEL", container, at_ns=10**6))


async def test_a_busy_node_reaps_what_is_old_or_too_much(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "REAP_AGE_S", 3600.0)
    monkeypatch.setattr(loops, "REAP_BACKLOG", 3)
    requests = itertools.count()
    busy = replace(scene.duties, requests_taken=requests.__next__)
    async with running(loops.reap, busy):
        await end_one(scene, "c1")
        await end_one(scene, "c2")
        before = next(requests)
        await until(lambda: next(requests) > before + 20)
        assert len(scene.node.table) == 2
        await end_one(scene, "c3")
        await until(lambda: not len(scene.node.table))
        await end_one(scene, "c4")
        monkeypatch.setattr(loops, "REAP_AGE_S", 0.0)
        await until(lambda: not len(scene.node.table))


async def test_a_device_that_does_not_go_is_tried_again(scene: Scene) -> None:
    scene.node.service.add(request(), NETNS)
    scene.node.service.delete(request("DEL", at_ns=200))
    scene.node.datapath.reap_blocked = True
    async with running(loops.reap, scene.duties):
        await until(scene.duties.health.checks)
        assert len(scene.node.table) == 1
        scene.node.datapath.reap_blocked = False
        await until(lambda: not len(scene.node.table))


async def test_an_endpoint_that_differs_is_repaired(scene: Scene) -> None:
    scene.node.service.add(request(), NETNS)
    [endpoint] = scene.node.table
    scene.node.datapath.routes.clear()
    async with running(loops.reconcile, scene.duties), running(loops.regenerate, scene.duties):
        await until(lambda: scene.node.datapath.routes)
        await until(lambda: endpoint.state is State.READY)
    assert any("reconciliation: route to" in entry.cause for entry in endpoint.log)


@pytest.mark.parametrize(
    "has_lost", [False, True], ids=["all was told", "some was lost on the way"]
)
async def test_an_endpoint_whose_device_lost_something_is_repaired(
    scene: Scene, has_lost: bool
) -> None:
    for container in ("c1", "c2"):
        scene.node.service.add(request(container=container), NETNS)
    first, second = scene.node.table
    async with running(loops.watch_devices, scene.duties), running(loops.regenerate, scene.duties):
        await until(scene.duties.health.checks)  # the round that looks at all endpoints
        scene.node.datapath.routes.clear()
        scene.losses.has_lost = has_lost
        scene.losses.lose(first.record.device.host_ifindex)
        await until(lambda: any("reconciliation" in entry.cause for entry in first.log))
        await until(lambda: first.state is State.READY)
        if has_lost:
            await until(lambda: any("reconciliation" in entry.cause for entry in second.log))
        else:
            assert not any("reconciliation" in entry.cause for entry in second.log)
    assert scene.losses.closed == 1


async def test_what_a_device_lost_before_anybody_listened_is_repaired(scene: Scene) -> None:
    scene.node.service.add(request(), NETNS)
    [endpoint] = scene.node.table
    scene.node.datapath.routes.clear()
    async with running(loops.watch_devices, scene.duties), running(loops.regenerate, scene.duties):
        await until(lambda: scene.node.datapath.routes)
        await until(lambda: endpoint.state is State.READY)


async def test_a_changed_table_is_put_right_and_who_may_have_done_it_is_told(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(loops.watch_tables, scene.duties):
        await until(lambda: scene.tables.looks == 1)
        scene.tables.change("kube-proxy")
        await until(lambda: scene.tables.looks == 2)
        scene.tables.change("nft", "it is missing")
        await until(lambda: scene.tables.looks == 3)
        await until(lambda: caplog.records)
    [line] = caplog.records
    assert line.__dict__["cause"] == "it is missing"
    assert line.__dict__["keys"] == ["nft"]


async def test_a_change_that_is_found_before_its_news_has_a_name_and_is_followed_by_a_look(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    def change_once() -> None:
        scene.tables.meanwhile = lambda: None
        scene.tables.change("nft", "it is missing")

    scene.tables.meanwhile = change_once
    async with running(loops.watch_tables, scene.duties):
        await until(lambda: scene.tables.looks == 2)
    [line] = caplog.records
    assert line.__dict__["keys"] == ["nft"]


async def test_who_changes_the_table_again_and_again_is_warned_of_until_it_stops(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "TABLES_PAUSE_CAP_S", 0.008)
    monkeypatch.setattr(loops, "TABLES_CALM_S", 0.2)
    health = scene.duties.health

    def contest() -> bool:
        scene.tables.change("firewall", "it is missing")
        return any("firewall" in warning for warning in health.warnings())

    async with running(loops.watch_tables, scene.duties):
        await until(lambda: scene.tables.looks == 1)
        await until(contest)
        await until(lambda: not health.warnings())


async def test_endpoints_that_agree_are_left_alone(scene: Scene) -> None:
    scene.node.service.add(request(), NETNS)
    [endpoint] = scene.node.table
    before = len(endpoint.log)
    loops.compare(scene.duties, endpoint)
    assert len(endpoint.log) == before


async def test_what_passes_is_told_while_somebody_follows_who_may_want_it(scene: Scene) -> None:
    for container in ("c1", "c2"):
        scene.node.service.add(request(container=container), NETNS)
    flows, rows = scene.node.flows, scene.node.datapath.rows
    first, _ = (endpoint.record for endpoint in scene.node.table)

    def traced() -> list[bool]:
        return [row is not None and row.trace for _, row in sorted(rows.items())]

    def as_wanted(wanted: list[bool]) -> bool:
        return traced() == wanted

    async with running(loops.regenerate, scene.duties):
        for words, wanted in (
            ({}, [True, True]),
            ({"type": "drop"}, [False, False]),
            ({"endpoint": str(first.id)}, [True, False]),
        ):
            follower = flows.follow(parse_filter(words), lambda: None)
            await until(partial(as_wanted, wanted))
            flows.leave(follower)
            await until(lambda: not any(traced()))


async def test_a_build_that_failed_is_retried(scene: Scene) -> None:
    scene.node.service.add(request(), NETNS)
    [endpoint] = scene.node.table

    def retried() -> bool:
        scene.node.clock.now_ns += 10**9
        return endpoint.state is State.READY

    scene.node.datapath.fail["repair_device"] = KernelFailure(16, "repair", "x")
    scene.duties.regenerator.request(endpoint.record.id, Level.REWRITE, "test")
    async with running(loops.regenerate, scene.duties):
        await until(lambda: endpoint.state is State.NOT_READY)
        await until(retried)


class Answering:
    """What STATUS would say, changed at will."""

    exhausted = False

    def settle(self) -> int:
        return 0

    def status(self) -> None:
        if self.exhausted:
            raise CannotServe("no address left")


async def test_the_file_alive_follows_what_status_would_say(scene: Scene, tmp_path: Path) -> None:
    answering = Answering()
    alive = tmp_path / "alive"
    health = scene.duties.health
    async with running(loops.stay_alive, replace(scene.duties, attachments=answering)):
        await until(alive.exists)
        answering.exhausted = True
        await until(lambda: not alive.exists())
        await until(lambda: any("no address left" in warning for warning in health.warnings()))
        answering.exhausted = False
        await until(alive.exists)


async def test_an_agent_that_waits_for_this_ones_end_is_named(scene: Scene) -> None:
    waiting = ["4711"]
    duties = replace(scene.duties, find_second_agent=lambda: "".join(waiting))
    async with running(loops.stay_alive, duties):
        await until(
            lambda: any("process 4711, waits" in warning for warning in duties.health.warnings())
        )
        waiting.clear()
        await until(lambda: not duties.health.warnings())


async def test_a_warning_of_the_host_comes_and_goes(scene: Scene) -> None:
    health = scene.duties.health
    async with running(loops.watch_host, scene.duties):
        scene.warnings.append("rp_filter is strict")
        await until(lambda: health.warnings() == ["rp_filter is strict"])
        scene.warnings.clear()
        await until(lambda: health.warnings() == [])


async def test_a_warning_of_the_host_does_not_outlive_a_look_that_fails(scene: Scene) -> None:
    """What it told of may be over when the loop that told of it begins anew."""
    health, failures = scene.duties.health, [KernelFailure(5, "pin", "x")]
    told: list[str] = []

    def repair_pins() -> Sequence[str]:
        if not scene.warnings or not failures:
            return ()
        told.extend(health.warnings())
        scene.warnings.clear()
        raise failures.pop()

    async with running(loops.watch_host, replace(scene.duties, repair_pins=repair_pins)):
        scene.warnings.append("rp_filter is strict")
        await until(lambda: not failures)
        await until(lambda: "rp_filter is strict" not in health.warnings())
    assert told == ["rp_filter is strict"]


async def test_spooled_deletes_are_counted_by_outcome(scene: Scene) -> None:
    scene.replayed.append((2, 1))
    async with running(loops.replay_spool, scene.duties):
        await until(lambda: not scene.replayed)
        await until(lambda: b'outcome="failed"' in scene.duties.metrics.render())
    assert b'podwire_spool_replayed_total{outcome="done"} 2.0' in scene.duties.metrics.render()


@pytest.mark.parametrize("error", [KernelFailure(5, "reap", "x"), RuntimeError("a bug")])
async def test_a_loop_that_fails_is_reported_and_started_again(
    scene: Scene, error: Exception
) -> None:
    runs: list[int] = []

    async def fragile(duties: Duties) -> None:
        runs.append(1)
        if len(runs) < 3:
            raise error
        duties.health.report("duty", ok=True, critical=False)
        await asyncio.Event().wait()

    def states() -> list[bool]:
        return [check.ok for check in scene.duties.health.checks()]

    async with running(fragile, scene.duties):
        await until(lambda: runs)
        await until(lambda: states() == [True])
    assert len(runs) == 3
    assert not scene.duties.health.ready or states() == [True]


def test_every_loop_has_a_name_of_its_own() -> None:
    assert len(set(loops.LOOPS.values())) == len(loops.LOOPS)


class Ring:
    """Events behind a descriptor that can be waited for."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        self._events: list[FlowEvent] = []
        self.reads = 0

    def put(self, *events: FlowEvent) -> None:
        self._events += events
        os.write(self._write_fd, b"x")

    def read(self) -> list[FlowEvent]:
        self.reads += 1
        os.read(self.fd, 1)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write_fd)


async def test_events_become_flows_and_losses_are_counted() -> None:
    ring, flows = Ring(), FlowRing(8)
    maker = FlowMaker(
        "n1",
        by_address=lambda _address: None,
        by_id=lambda _number: None,
        name_rule=lambda _number: None,
        labels_of=lambda _number: (),
        wall_offset_ns=lambda: 0,
        name_service=lambda _address, _port, _protocol: None,
    )
    pump = EventPump(ring, maker, flows)
    pump.start()
    try:
        ring.put(make_event(length_bytes=1), replace_lost(make_event(length_bytes=2), 3))
        await until(lambda: len(flows) == 2)
        ring.put(make_event(length_bytes=4))
        await until(lambda: len(flows) == 3)
    finally:
        pump.stop()
        ring.close()
    assert [flow.bytes for flow in flows.last(8, FlowFilter())] == [1, 2, 4]
    assert pump.lost == 3


def replace_lost(event: FlowEvent, lost: int) -> FlowEvent:
    return make_event(length_bytes=event.length_bytes, lost=lost)


async def test_a_device_that_lost_something_while_its_endpoint_is_not_ready_is_repaired_with_it(
    scene: Scene,
) -> None:
    scene.node.service.add(request(), NETNS)
    [endpoint] = scene.node.table
    scene.node.datapath.routes.clear()
    endpoint.state = State.NOT_READY
    loops.compare(scene.duties, endpoint)
    async with running(loops.regenerate, scene.duties):
        await until(lambda: scene.node.datapath.routes)
        await until(lambda: endpoint.state is State.READY)
