"""The dispatcher: one operation per attachment at a time, in order; DEL and GC overtake ADD."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from podwire.agent.cni.dispatch import Dispatcher, Limits
from podwire.agent.cni.received import Caller
from podwire.agent.cni.spool import Spool
from podwire.agent.cni.stale_adds import KEPT_NS, TakenDeletes, TakenLists
from podwire.cni.netconf import decode_request
from podwire.model import wire
from podwire.model.endpoint import AttachmentKey
from podwire.model.errors import (
    Bug,
    Cancelled,
    CannotServe,
    Conflict,
    PodwireError,
    StorageFailure,
    Unavailable,
)
from podwire.model.ids import ContainerId, InterfaceName, NetworkName
from podwire.model.request import AttachRequest, AttachResult
from tests.fakes.attachments import GatedAttachments, Operation

BOOT_ID = "0c6f9a7e-6a55-4b6c-9a9c-3e0a1c7f0001"
DEADLINE_S = 30.0
SHORT = Limits(undo_s=0.5, deadline_s=0.5, del_deadline_s=0.5)


class TickingClock:
    """One nanosecond later at every look."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def boottime_ns(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def boot_id(self) -> str:
        return BOOT_ID


def key(container: str = "c1", network: str = "n") -> AttachmentKey:
    return AttachmentKey(NetworkName(network), ContainerId(container), InterfaceName("eth0"))


class Bench:
    """A dispatcher with its clock, its spool and attachments behind gates."""

    def __init__(self, directory: Path, limits: Limits | None = None, steps: int = 1) -> None:
        self.clock = TickingClock()
        self.directory = directory / wire.SPOOL_DIRECTORY
        self.attachments = GatedAttachments(steps)
        spool = Spool(self.directory, self.clock, _decode, ran_at=lambda *_: None)
        self.dispatcher = Dispatcher(self.attachments, spool, self.clock, limits)
        self.released = 0

    def request(
        self, command: str, container: str = "c1", started_ns: int = 0, network: str = "n"
    ) -> AttachRequest:
        return AttachRequest(
            command=command,
            network=NetworkName(network),
            cni_version="1.1.0",
            key=None if command in ("GC", "STATUS") else key(container, network),
            started_boottime_ns=started_ns or self.clock.boottime_ns(),
        )

    def start(
        self, request: AttachRequest, caller: Caller | None = None
    ) -> "asyncio.Task[AttachResult | None]":
        return asyncio.create_task(
            self.dispatcher.submit(request, None, caller, self._release), name=str(request.command)
        )

    async def start_running(
        self, request: AttachRequest, caller: Caller | None = None
    ) -> "tuple[asyncio.Task[AttachResult | None], Operation]":
        task = self.start(request, caller)
        await until(
            lambda: any(
                operation.request.command == request.command
                and operation.request.key == request.key
                for operation in self.attachments.running
            )
        )
        return task, self.attachments.running[-1]

    def spool_delete(self, container: str = "c1", started_ns: int = 0) -> Path:
        started_ns = started_ns or self.clock.boottime_ns()
        frame = wire.Frame(
            environment={
                "CNI_COMMAND": "DEL",
                "CNI_CONTAINERID": container,
                "CNI_IFNAME": "eth0",
                "CNI_PATH": "/bin",
            },
            stdin=b'{"cniVersion": "1.1.0", "name": "n", "type": "podwire-cni"}',
            started_boottime_ns=started_ns,
            boot_id=BOOT_ID,
        )
        self.directory.mkdir(exist_ok=True)
        path = self.directory / wire.record_name(started_ns, 1)
        path.write_bytes(wire.encode_record(frame))
        return path

    def _release(self) -> None:
        self.released += 1


def _decode(frame: wire.Frame) -> AttachRequest:
    return decode_request(frame.environment, frame.stdin, frame.started_boottime_ns)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (what is waited for happens in a thread)
            await asyncio.sleep(0.0005)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.attachments.open_gates()
    await made.dispatcher.close(DEADLINE_S)
    assert made.dispatcher._lines.count == 0
    assert made.attachments.violations == []


@pytest.fixture
async def hasty(tmp_path: Path) -> AsyncIterator[Bench]:
    """With deadlines that are over at once."""
    made = Bench(tmp_path, SHORT)
    yield made
    made.attachments.open_gates()
    await until(lambda: made.dispatcher._lines.count == 0)
    await made.dispatcher.close(DEADLINE_S)
    assert made.attachments.violations == []


async def test_an_add_is_carried_out_and_answered(bench: Bench) -> None:
    bench.attachments.open_gates()
    assert await bench.start(bench.request("ADD")) == AttachResult()
    assert list(bench.attachments.attached) == [key()]
    assert bench.released == 1


async def test_an_error_reaches_the_caller_and_the_next_request_runs(bench: Bench) -> None:
    bench.attachments.open_gates()
    bench.attachments.failures.append(StorageFailure("disk full"))
    with pytest.raises(StorageFailure, match="disk full"):
        await bench.start(bench.request("ADD"))
    assert await bench.start(bench.request("ADD")) == AttachResult()
    assert bench.released == 2


async def test_a_mistake_of_ours_becomes_a_bug(bench: Bench) -> None:
    bench.attachments.failures.append(ZeroDivisionError("x"))  # type: ignore[arg-type]
    with pytest.raises(Bug, match="ZeroDivisionError"):
        await bench.start(bench.request("ADD"))


async def test_requests_of_one_attachment_run_in_the_order_they_came(bench: Bench) -> None:
    first, operation = await bench.start_running(bench.request("CHECK"))
    rest = []
    for command in ("ADD", "CHECK", "DEL", "ADD"):
        rest.append(bench.start(bench.request(command)))
        await asyncio.sleep(0)
    assert len(bench.attachments.running) == 1
    bench.attachments.open_gates()
    operation.gate.release()
    results = await asyncio.gather(first, *rest, return_exceptions=True)
    # The first ADD is older than the DEL that came behind it; the second one is a new life.
    assert isinstance(results[1], Cancelled)
    assert [command for command, _ in bench.attachments.history] == ["CHECK", "CHECK", "DEL", "ADD"]


async def test_other_attachments_do_not_wait(bench: Bench) -> None:
    slow, _ = await bench.start_running(bench.request("ADD", "slow"))
    fast, operation = await bench.start_running(bench.request("ADD", "fast"))
    operation.gate.release()
    await fast
    assert not slow.done()
    assert sum(line[0].started for line in bench.dispatcher._lines._lines.values()) == 1


async def test_status_does_not_wait_for_anything(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Limits(threads=1))
    busy, _ = await bench.start_running(bench.request("ADD", "a"))
    queued = bench.start(bench.request("ADD", "b"))
    assert await bench.start(bench.request("STATUS")) is None
    bench.attachments.failures.append(CannotServe("no address"))
    with pytest.raises(CannotServe, match="no address"):
        await bench.start(bench.request("STATUS"))
    bench.attachments.open_gates()
    await asyncio.gather(busy, queued)
    await bench.dispatcher.close(DEADLINE_S)


@pytest.mark.parametrize("state", ["running", "queued"])
async def test_a_del_cancels_an_add_of_its_attachment(bench: Bench, state: str) -> None:
    bench.attachments.steps = 3
    if state == "running":
        add, _ = await bench.start_running(bench.request("ADD"))
    else:
        await bench.start_running(bench.request("CHECK"))
        add = bench.start(bench.request("ADD"))
        await asyncio.sleep(0)
    delete = bench.start(bench.request("DEL"))
    await asyncio.sleep(0)
    assert not delete.done()
    bench.attachments.open_gates()
    with pytest.raises(Cancelled):
        await add
    await delete
    assert bench.attachments.attached == {}
    assert [command for command, _ in bench.attachments.history][-1] == "DEL"


async def test_a_queued_add_is_refused_at_once_when_a_del_overtakes_it(bench: Bench) -> None:
    await bench.start_running(bench.request("CHECK"))
    add = bench.start(bench.request("ADD"))
    await asyncio.sleep(0)
    bench.start(bench.request("DEL"))
    with pytest.raises(Cancelled, match="DEL overtook"):
        await add


async def test_an_add_that_a_del_overtook_in_its_last_step_is_taken_back(bench: Bench) -> None:
    add, operation = await bench.start_running(bench.request("ADD"))
    await until(operation.waiting.is_set)  # its only look at `cancelled` is behind it
    delete = bench.start(bench.request("DEL"))
    await asyncio.sleep(0)
    bench.attachments.open_gates()
    with pytest.raises(Cancelled):
        await add
    await delete
    assert bench.attachments.attached == {}


async def test_an_add_that_started_before_a_del_was_taken_is_refused(bench: Bench) -> None:
    bench.attachments.open_gates()
    early = bench.request("ADD")
    await bench.start(bench.request("DEL"))
    with pytest.raises(Unavailable, match="a DEL of it came"):
        await bench.start(early)
    assert await bench.start(bench.request("ADD")) == AttachResult()


async def test_only_the_dels_own_attachment_is_refused(bench: Bench) -> None:
    bench.attachments.open_gates()
    early = bench.request("ADD", "c2")
    await bench.start(bench.request("DEL", "c1"))
    assert await bench.start(early) == AttachResult()


async def test_a_late_del_whose_caller_is_gone_spares_the_new_life(bench: Bench) -> None:
    bench.attachments.open_gates()
    late = bench.request("DEL")
    await bench.start(bench.request("ADD"))
    await bench.start(late, Caller(gone=True))
    assert list(bench.attachments.attached) == [key()]


async def test_a_late_del_whose_caller_is_gone_spares_a_running_add(bench: Bench) -> None:
    late = bench.request("DEL")
    add, _ = await bench.start_running(bench.request("ADD"))
    delete = bench.start(late, Caller(gone=True))
    await asyncio.sleep(0)
    bench.attachments.open_gates()
    assert await add == AttachResult()
    await delete
    assert list(bench.attachments.attached) == [key()]


async def test_a_caller_that_leaves_cancels_its_add(bench: Bench) -> None:
    caller = Caller()
    bench.attachments.steps = 3
    add, _ = await bench.start_running(bench.request("ADD"), caller)
    caller.leave()
    bench.attachments.open_gates()
    with pytest.raises(Cancelled):
        await add
    assert bench.attachments.attached == {}


async def test_a_caller_that_left_before_its_turn_is_not_served(bench: Bench) -> None:
    with pytest.raises(Cancelled, match="caller went away"):
        await bench.start(bench.request("ADD"), Caller(gone=True))
    assert bench.attachments.history == []


async def test_a_caller_that_leaves_does_not_stop_its_del(bench: Bench) -> None:
    caller = Caller()
    delete, operation = await bench.start_running(bench.request("DEL"), caller)
    caller.leave()
    operation.gate.release()
    await delete


@pytest.mark.parametrize(
    ("valid", "cancelled"),
    [
        pytest.param((), True, id="empty list"),
        pytest.param((("c1", "eth0"),), False, id="named"),
        pytest.param((("c1", "eth1"),), True, id="other interface named"),
        pytest.param(None, False, id="no list"),
    ],
)
async def test_gc_cancels_the_adds_that_its_list_does_not_name(
    bench: Bench, valid: tuple[tuple[ContainerId, InterfaceName], ...] | None, cancelled: bool
) -> None:
    bench.attachments.steps = 2
    add, _ = await bench.start_running(bench.request("ADD"))
    request = AttachRequest(
        command="GC",
        network=NetworkName("n"),
        cni_version="1.1.0",
        started_boottime_ns=bench.clock.boottime_ns(),
        valid_attachments=valid,
    )
    collect = bench.start(request)
    await asyncio.sleep(0)
    bench.attachments.open_gates()
    (result,) = await asyncio.gather(add, return_exceptions=True)
    assert isinstance(result, Cancelled) is cancelled
    await collect
    assert ("GC", None) in bench.attachments.history


async def test_gc_spares_an_add_that_started_after_it(bench: Bench) -> None:
    request = AttachRequest(
        command="GC", network=NetworkName("n"), cni_version="1.1.0", valid_attachments=()
    )
    add, _ = await bench.start_running(bench.request("ADD"))
    collect = bench.start(request)
    await asyncio.sleep(0)
    bench.attachments.open_gates()
    assert await add == AttachResult()
    await collect


@pytest.mark.parametrize(
    ("valid", "refused"),
    [
        pytest.param((), True, id="empty list"),
        pytest.param((("c1", "eth0"),), False, id="named"),
        pytest.param((("c1", "eth1"),), True, id="other interface named"),
        pytest.param(None, False, id="no list"),
    ],
)
async def test_an_add_that_started_before_a_gc_and_arrives_after_it_is_refused_unless_named(
    bench: Bench, valid: tuple[tuple[ContainerId, InterfaceName], ...] | None, refused: bool
) -> None:
    bench.attachments.open_gates()
    early, other = bench.request("ADD"), bench.request("ADD", network="other")
    await bench.start(collection(valid, bench.clock.boottime_ns()))
    late = bench.request("ADD")
    if refused:
        with pytest.raises(Unavailable, match="a GC that does not name it"):
            await bench.start(early)
        await bench.start(late)
    else:
        await bench.start(early)
    await bench.start(other)


def collection(
    valid: tuple[tuple[ContainerId, InterfaceName], ...] | None,
    started_ns: int,
    network: str = "n",
) -> AttachRequest:
    return AttachRequest(
        command="GC",
        network=NetworkName(network),
        cni_version="1.1.0",
        started_boottime_ns=started_ns,
        valid_attachments=valid,
    )


async def test_a_del_waits_only_so_long_for_an_undo(hasty: Bench) -> None:
    add, _ = await hasty.start_running(hasty.request("ADD"))
    with pytest.raises(Unavailable, match="has not ended"):
        await hasty.start(hasty.request("DEL"))
    hasty.attachments.open_gates()
    with pytest.raises((Cancelled, Unavailable)):
        await add


async def test_an_add_that_does_not_end_in_time_is_answered_and_taken_back(hasty: Bench) -> None:
    add, _ = await hasty.start_running(hasty.request("ADD"))
    with pytest.raises(Unavailable, match="not done in time"):
        await add
    assert hasty.released == 0, "the thread still has the namespace"
    hasty.attachments.open_gates()
    await until(lambda: hasty.released == 1)
    assert hasty.attachments.attached == {}


async def test_too_many_requests_of_one_attachment_are_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Limits(queue_max=2))
    tasks = [bench.start(bench.request("CHECK")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="too many"):
        await bench.start(bench.request("CHECK"))
    other = bench.start(bench.request("CHECK", "c2"))
    bench.attachments.open_gates()
    await asyncio.gather(*tasks, other)
    await bench.dispatcher.close(DEADLINE_S)


async def test_too_many_requests_are_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Limits(threads=2, requests_max=3))
    tasks = [bench.start(bench.request("CHECK", f"c{number}")) for number in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="too many"):
        await bench.start(bench.request("CHECK", "c9"))
    bench.attachments.open_gates()
    await asyncio.gather(*tasks)
    assert await bench.start(bench.request("ADD", "c9")) == AttachResult()
    await bench.dispatcher.close(DEADLINE_S)


# --- the spool ----------------------------------------------------------------------------------


async def test_a_spooled_del_is_carried_out_and_its_record_removed(bench: Bench) -> None:
    bench.attachments.open_gates()
    await bench.start(bench.request("ADD"))
    path = bench.spool_delete()
    assert await bench.dispatcher.replay() == (1, 0)
    assert bench.attachments.attached == {}
    assert not path.exists()
    assert await bench.dispatcher.replay() == (0, 0)


async def test_a_spooled_del_never_touches_a_younger_attachment(bench: Bench) -> None:
    bench.attachments.open_gates()
    path = bench.spool_delete()
    bench.attachments.attached[key()] = bench.clock.boottime_ns()
    assert await bench.dispatcher.replay() == (1, 0)
    assert list(bench.attachments.attached) == [key()]
    assert not path.exists()


async def test_a_spooled_del_that_fails_stays(bench: Bench) -> None:
    bench.attachments.failures.append(StorageFailure("disk full"))
    path = bench.spool_delete()
    assert await bench.dispatcher.replay() == (0, 1)
    assert path.exists()
    assert await bench.dispatcher.replay() == (0, 0), "it waits before it is tried again"


async def test_a_spooled_del_refuses_the_adds_that_are_older(bench: Bench) -> None:
    bench.attachments.open_gates()
    early = bench.request("ADD")
    bench.spool_delete()
    assert await bench.dispatcher.replay() == (1, 0)
    with pytest.raises(Unavailable, match="a DEL of it came"):
        await bench.start(early)
    assert await bench.start(bench.request("ADD")) == AttachResult()


async def test_an_add_first_carries_out_what_is_spooled_for_its_attachment(bench: Bench) -> None:
    bench.attachments.open_gates()
    await bench.start(bench.request("ADD"))
    paths = [bench.spool_delete(), bench.spool_delete("c2")]
    assert await bench.start(bench.request("ADD")) == AttachResult()
    assert [command for command, _ in bench.attachments.history] == ["ADD", "DEL", "ADD"]
    assert [path.exists() for path in paths] == [False, True]


async def test_an_add_that_is_older_than_its_spooled_del_is_refused(bench: Bench) -> None:
    bench.attachments.open_gates()
    early = bench.request("ADD")
    path = bench.spool_delete()
    with pytest.raises(Unavailable, match="a DEL of it came"):
        await bench.start(early)
    assert not path.exists()
    assert bench.attachments.attached == {}


# --- the end ------------------------------------------------------------------------------------


async def test_closing_lets_work_end_and_takes_nothing_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    add, operation = await bench.start_running(bench.request("ADD"))
    closing = asyncio.create_task(bench.dispatcher.close(DEADLINE_S))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="stopping"):
        await bench.start(bench.request("ADD", "c2"))
    operation.gate.release()
    await closing
    assert await add == AttachResult()
    assert bench.released == 2


async def test_closing_cancels_the_adds_that_do_not_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path, steps=3)
    add, operation = await bench.start_running(bench.request("ADD"))
    await until(operation.waiting.is_set)  # from here on `is_cancelled` is that of the operation
    closing = asyncio.create_task(bench.dispatcher.close(0))
    await until(operation.is_cancelled)
    operation.gate.release(2)
    await closing
    with pytest.raises(Cancelled):
        await add
    assert bench.attachments.attached == {}


# --- the memory of DELs -------------------------------------------------------------------------


def test_what_is_forgotten_is_refused_rather_than_believed() -> None:
    deletes = TakenDeletes(kept=2, kept_ns=10**6)
    for number in range(4):
        deletes.note(key(f"c{number}"), 100 + number, 100 + number)
    assert len(deletes) == 2
    assert deletes.overtook(key("c0"), 99)
    assert deletes.overtook(key("unknown"), 100), "below the floor nothing is known"
    assert not deletes.overtook(key("c0"), 101)
    assert deletes.overtook(key("c3"), 102)


def test_a_del_is_forgotten_when_no_older_launcher_can_live() -> None:
    deletes = TakenDeletes(kept=10, kept_ns=100)
    deletes.note(key("c1"), 50, 50)
    deletes.note(key("c2"), 151, 151)
    assert len(deletes) == 1
    assert deletes.overtook(key("c1"), 49)
    assert not deletes.overtook(key("c1"), 50)


def test_a_younger_del_is_not_shadowed_by_an_older_one() -> None:
    deletes = TakenDeletes()
    deletes.note(key(), 100, 100)
    deletes.note(key(), 50, 101)
    assert deletes.overtook(key(), 99)


# --- the memory of GCs --------------------------------------------------------------------------


def test_a_newer_list_names_what_an_older_one_did_not() -> None:
    lists = TakenLists()
    lists.note(collection((), 100), 100)
    lists.note(collection((name("c1"),), 200), 200)
    lists.note(collection((name("c2"),), 150), 201)
    assert not lists.overtook(key("c1"), 50)
    assert lists.overtook(key("c2"), 199)
    assert not lists.overtook(key("c2"), 200)


def test_a_list_is_forgotten_when_no_older_launcher_can_live() -> None:
    lists = TakenLists()
    lists.note(collection((), 100, "old"), 100)
    lists.note(collection((), 101 + KEPT_NS), 101 + KEPT_NS)
    assert len(lists) == 1


@pytest.mark.parametrize(
    "lists", [TakenLists(lists=2), TakenLists(names=2)], ids=["lists", "names"]
)
def test_of_lists_that_are_forgotten_for_want_of_room_every_older_add_is_refused(
    lists: TakenLists,
) -> None:
    for number in range(4):
        lists.note(collection((name("c1"),), 100 + number, f"n{number}"), 100 + number)
    assert len(lists) == 2
    assert lists.overtook(key("c1"), 100)
    assert not lists.overtook(key("c1"), 101)


def name(container: str) -> tuple[ContainerId, InterfaceName]:
    return ContainerId(container), InterfaceName("eth0")


# --- random interleavings -----------------------------------------------------------------------


class Chaos:
    """Requests launched in one order and submitted in another, callers that leave, gates that open."""

    def __init__(self, bench: Bench, dice: random.Random) -> None:
        self.bench = bench
        self.dice = dice
        self.launched: list[AttachRequest] = []
        self.callers: list[Caller] = []
        self.added: dict[AttachmentKey, set[int]] = {}
        self.submitted = 0

    def launch(self) -> None:
        command = self.dice.choice(["ADD", "ADD", "ADD", "DEL", "DEL", "CHECK", "GC"])
        request = self.bench.request(command, f"c{self.dice.randrange(3)}")
        self.launched.append(request)

    def submit(self, tasks: asyncio.TaskGroup) -> None:
        if self.launched:
            request = self.launched.pop(self.dice.randrange(len(self.launched)))
            caller = Caller(gone=self.dice.random() < 0.1)
            self.callers.append(caller)
            self.submitted += 1
            tasks.create_task(self.follow(request, caller), name=request.command)

    def leave(self) -> None:
        if self.callers:
            self.dice.choice(self.callers).leave()

    def open_gate(self) -> None:
        if self.bench.attachments.running:
            self.dice.choice(self.bench.attachments.running).gate.release()

    def spool(self) -> None:
        self.bench.spool_delete(f"c{self.dice.randrange(3)}")

    async def follow(self, request: AttachRequest, caller: Caller) -> None:
        """Submit; note what must hold from the answer on."""
        taken_ns = request.started_boottime_ns if caller.gone else self.bench.clock.now_ns
        try:
            await self.bench.dispatcher.submit(request, None, caller, self.bench._release)
        except (Unavailable, Conflict):
            return
        assert request.key or request.command == "GC"
        if request.command == "ADD" and request.key:
            self.added.setdefault(request.key, set()).add(request.started_boottime_ns)
        elif request.command == "DEL" and request.key:
            dead = self.bench.attachments.dead_until
            dead[request.key] = max(dead.get(request.key, 0), taken_ns)
            still = self.bench.attachments.attached.get(request.key, taken_ns)
            assert still >= taken_ns, "an attachment outlived its DEL"

    async def run(self, steps: int) -> None:
        async with asyncio.TaskGroup() as tasks:

            def submit() -> None:
                self.submit(tasks)

            def replay() -> None:
                tasks.create_task(self.bench.dispatcher.replay(), name="replay")

            actions = [self.launch, submit, self.open_gate, self.leave, self.spool, replay]
            for _ in range(steps):
                self.dice.choices(actions, [10, 10, 14, 1, 1, 1])[0]()
                # The loop and the threads get on as they like: their interleaving is the point.
                await asyncio.sleep(0 if self.dice.random() < 0.9 else 0.0002)
            while self.launched:
                self.submit(tasks)
            self.bench.attachments.open_gates()


async def test_random_interleavings_keep_every_promise(
    tmp_path: Path, seed: int, full: bool
) -> None:
    for round_number in range(60 if full else 8):
        dice = random.Random(f"{seed}/{round_number}")
        directory = tmp_path / str(round_number)
        directory.mkdir()
        bench = Bench(directory, Limits(threads=4), steps=dice.randrange(1, 4))
        chaos = Chaos(bench, dice)
        async with asyncio.timeout(100):
            await chaos.run(400)
            while await bench.dispatcher.replay() != (0, 0):
                pass
        assert bench.attachments.violations == []
        assert bench.dispatcher._lines.count == 0
        assert bench.released == chaos.submitted, "every namespace is released exactly once"
        for one, started_ns in bench.attachments.attached.items():
            assert started_ns in chaos.added[one], "an ADD that failed left something"
        await bench.dispatcher.close(DEADLINE_S)


async def test_errors_are_podwire_errors_only(bench: Bench) -> None:
    bench.attachments.open_gates()
    for failure in (StorageFailure("a"), Conflict("b"), Unavailable("c")):
        bench.attachments.failures.append(failure)
        with pytest.raises(PodwireError):
            await bench.start(bench.request("CHECK"))
