"""The thread that accepts launchers and carries their requests out: it waits for nobody, and nobody for it."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from podwire.agent.cni import at_once
from podwire.agent.cni.chained_portmap import ChainedPortmap
from podwire.agent.cni.dispatch import Dispatcher, Limits
from podwire.agent.cni.requests import CniRequests
from podwire.agent.cni.socket import CniServer
from podwire.agent.cni.spool import Spool
from podwire.agent.metrics import Metrics
from podwire.agent.unix_socket import open_unix_socket
from podwire.cni.netconf import decode_request
from podwire.kernel.clock import KernelClock
from podwire.model import wire
from podwire.model.errors import CannotServe, StorageFailure
from podwire.model.request import AttachRequest
from podwire.model.wire import Frame, Reply, ReplyStatus
from tests.fakes.attachments import GatedAttachments, Operation

pytestmark = pytest.mark.kernel
DEADLINE_S = 60.0
NETCONF = json.dumps({"cniVersion": "1.1.0", "name": "n", "type": "podwire-cni"}).encode()
THREAD = "cni"
NO_PORTMAP = ChainedPortmap(lambda _key: False, lambda *_: "")


class Town:
    """A door, and attachments that wait at gates behind it."""

    def __init__(self, directory: Path, limits: Limits | None = None) -> None:
        self.clock = KernelClock()
        self.path = directory / "cni.sock"
        spool = Spool(directory / wire.SPOOL_DIRECTORY, self.clock, _decode, ran_at=lambda *_: None)
        self.attachments = GatedAttachments()
        self.dispatcher = Dispatcher(self.attachments, spool, self.clock, limits)
        self.requests = CniRequests(self.dispatcher, Metrics(), NO_PORTMAP)
        self.netns = ""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["Town"]:
        server = CniServer(self.requests.answer, at_once=self.requests)
        async with server.serving(open_unix_socket(self.path), self.path, DEADLINE_S):
            yield self
        await self.dispatcher.close(DEADLINE_S)
        assert self.dispatcher._lines.count == 0
        assert self.attachments.violations == []

    def call(self, command: str, container: str = "c1", started_ns: int = 0) -> socket.socket:
        """Ask as a launcher does; the answer is read by `read_reply`."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        connection.connect(str(self.path))
        frame = Frame(
            environment={
                "CNI_COMMAND": command,
                "CNI_CONTAINERID": container,
                "CNI_IFNAME": "eth0",
                "CNI_PATH": "/opt/cni/bin",
                "CNI_NETNS": self.netns,
            },
            stdin=NETCONF,
            started_boottime_ns=started_ns or self.clock.boottime_ns(),
            boot_id=self.clock.boot_id(),
            has_netns=True,
        )
        fd = os.open(self.netns, os.O_RDONLY)
        try:
            socket.send_fds(connection, [wire.encode_frame(frame)], [fd])
        finally:
            os.close(fd)
        return connection

    async def ask(self, command: str, container: str = "c1", started_ns: int = 0) -> Reply:
        return await read_reply(self.call(command, container, started_ns))

    async def until_running(self, count: int = 1) -> Operation:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.attachments.running) < count:  # noqa: ASYNC110 (it comes on a thread)
                await asyncio.sleep(0.001)
        return self.attachments.running[-1]


def _decode(frame: Frame) -> AttachRequest:
    return decode_request(frame.environment, frame.stdin, frame.started_boottime_ns)


async def read_reply(connection: socket.socket) -> Reply:
    loop, data = asyncio.get_running_loop(), b""
    with connection:
        async with asyncio.timeout(DEADLINE_S):
            # As launchers do: one that answers late closes later.
            while len(data) < wire.COMMON_HEADER_BYTES or len(data) < wire.reply_bytes(data):
                part = await loop.sock_recv(connection, 65536)
                assert part, "no answer"
                data += part
    return wire.decode_reply(data)


def code_of(reply: Reply) -> int:
    return int(json.loads(reply.body)["code"])


@pytest.fixture
def netns() -> Iterator[str]:
    name = f"pwt-once-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield f"/run/netns/{name}"
    subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
async def town(tmp_path: Path, netns: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Town]:
    # On a busy machine a test may be held up between its connection and its frame.
    monkeypatch.setattr(at_once, "FRAME_WAIT_MS", 10_000)
    made = Town(tmp_path)
    made.netns = netns
    async with made.serving():
        yield made
        made.attachments.open_gates()


async def test_adds_and_dels_are_carried_out_by_the_thread_that_accepts(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The loop would accept for a thread that the machine has held up.
    monkeypatch.setattr(at_once, "LATE_S", DEADLINE_S)
    town.attachments.open_gates()
    for command in ("ADD", "DEL", "DEL", "ADD"):
        assert (await town.ask(command)).status is ReplyStatus.DONE
    assert town.attachments.threads == [THREAD] * 4
    assert len(town.attachments.attached) == 1
    assert town.attachments.announced in (
        1,
        2,
    )  # of the last ADD perhaps in a moment, behind its answer


async def test_a_burst_is_carried_out_by_one_thread(town: Town) -> None:
    town.attachments.open_gates()
    calls = [town.call("ADD", f"c{number}") for number in range(32)]
    for connection in calls:
        assert (await read_reply(connection)).status is ReplyStatus.DONE
    assert len(town.attachments.attached) == 32


async def test_other_commands_go_to_the_loop(town: Town) -> None:
    town.attachments.failures.append(CannotServe("no address"))
    assert code_of(await town.ask("STATUS")) == 50


async def test_an_add_that_must_ask_the_store_goes_to_a_patient_thread(town: Town) -> None:
    town.attachments.open_gates()
    town.attachments.unknown_all = True
    assert (await town.ask("ADD")).status is ReplyStatus.DONE
    assert town.attachments.threads[-1].startswith("attach-new")


async def test_nobody_waits_behind_a_request_that_is_held_up(town: Town) -> None:
    held = town.call("ADD", "held")
    operation = await town.until_running()
    others = [town.call("STATUS"), town.call("DEL", "other"), town.call("STATUS")]
    await town.until_running(2)  # the DEL, on a thread of the loop's
    town.attachments.running[-1].gate.release(9)
    for connection in others:
        assert (await read_reply(connection)).status is ReplyStatus.DONE
    operation.gate.release(9)
    assert (await read_reply(held)).status is ReplyStatus.DONE
    town.attachments.open_gates()
    async with asyncio.timeout(DEADLINE_S):
        while town.attachments.threads[-1] != THREAD:  # the loop may accept for one more moment
            assert (await town.ask("DEL", "later")).status is ReplyStatus.DONE


async def test_a_del_overtakes_an_add_that_is_carried_out_at_once(town: Town) -> None:
    town.attachments.steps = 3
    add = town.call("ADD")
    operation = await town.until_running()
    delete = town.call("DEL")
    async with asyncio.timeout(DEADLINE_S):
        while not operation.is_cancelled():  # noqa: ASYNC110 (the loop cancels it)
            await asyncio.sleep(0.001)
    town.attachments.open_gates()
    assert code_of(await read_reply(add)) == 11
    assert (await read_reply(delete)).status is ReplyStatus.DONE
    assert town.attachments.attached == {}


async def test_an_add_older_than_a_del_is_refused(town: Town) -> None:
    town.attachments.open_gates()
    early_ns = town.clock.boottime_ns()
    assert (await town.ask("DEL")).status is ReplyStatus.DONE
    assert code_of(await town.ask("ADD", started_ns=early_ns)) == 11
    assert town.attachments.attached == {}


async def test_a_caller_that_leaves_takes_its_add_with_it(town: Town) -> None:
    town.attachments.steps = 2
    connection = town.call("ADD")
    operation = await town.until_running()
    connection.close()
    operation.gate.release(9)
    town.attachments.open_gates()
    assert (await town.ask("DEL")).status is ReplyStatus.DONE
    assert town.attachments.attached == {}


async def test_a_failure_is_told_and_the_next_request_is_carried_out(town: Town) -> None:
    town.attachments.open_gates()
    town.attachments.failures += [StorageFailure("disk full"), ZeroDivisionError("x")]  # type: ignore[list-item]
    assert code_of(await town.ask("DEL")) == 5
    assert code_of(await town.ask("DEL")) == 110
    assert (await town.ask("ADD")).status is ReplyStatus.DONE


@pytest.mark.parametrize(
    ("command", "status"), [("ADD", ReplyStatus.FAILED), ("DEL", ReplyStatus.NOT_NOW)]
)
async def test_who_waits_too_long_is_told(
    tmp_path: Path, netns: str, command: str, status: ReplyStatus
) -> None:
    town = Town(tmp_path, Limits(deadline_s=0.1, del_deadline_s=0.1, undo_s=0.1))
    town.netns = netns
    async with town.serving():
        reply = await town.ask(command)
        assert (reply.status, code_of(reply)) == (status, 11)
        town.attachments.open_gates()
        async with asyncio.timeout(DEADLINE_S):
            while town.dispatcher._lines.count:  # noqa: ASYNC110 (it ends on its thread)
                await asyncio.sleep(0.001)
    assert town.attachments.attached == {}


async def test_a_stop_lets_what_was_taken_end(tmp_path: Path, netns: str) -> None:
    town = Town(tmp_path)
    town.netns = netns
    async with town.serving():
        calls = [town.call("ADD", "a"), town.call("ADD", "b")]
        await town.until_running()
        asyncio.get_running_loop().call_later(0.05, town.attachments.open_gates)
    for connection in calls:
        assert (await read_reply(connection)).status is ReplyStatus.DONE
    assert len(town.attachments.attached) == 2
