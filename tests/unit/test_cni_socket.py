"""The launchers' door: it answers or closes, never hangs, and leaks no descriptor."""

import array
import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from podwire.agent.cni.at_once import PromptRequests
from podwire.agent.cni.incoming import FrameReader
from podwire.agent.cni.received import Received
from podwire.agent.cni.socket import CniServer, SocketLimits
from podwire.cni import launcher
from podwire.model import wire
from podwire.model.errors import Unavailable
from podwire.model.wire import Frame, Reply, ReplyStatus

DEADLINE_S = 30.0
DONE = Reply(ReplyStatus.DONE, b'{"done": true}')


def frame(command: str = "ADD", *, has_netns: bool = False, has_mntns: bool = False) -> Frame:
    return Frame(
        environment={"CNI_COMMAND": command, "CNI_CONTAINERID": "c1"},
        stdin=b"{}",
        started_boottime_ns=1,
        boot_id="b",
        has_netns=has_netns,
        has_mntns=has_mntns,
    )


class Door:
    """A served socket, and what came through it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.received: list[Received] = []
        self.inodes: list[tuple[int | None, int | None]] = []
        self.hold = asyncio.Event()
        """Answers wait for it."""
        self.hold.set()
        self.refused: list[str] = []
        self.server: CniServer

    async def answer(self, received: Received) -> Reply:
        self.received.append(received)
        mounts = received.descriptors[-1] if received.frame.has_mntns else None
        self.inodes.append((_inode(received.netns_fd), _inode(mounts)))
        try:
            await self.hold.wait()
        finally:
            received.close()
        return DONE

    @contextlib.asynccontextmanager
    async def serving(
        self,
        limits: SocketLimits | None = None,
        deadline_s: float = DEADLINE_S,
        at_once: PromptRequests | None = None,
    ) -> AsyncIterator["Door"]:
        self.server = CniServer(self.answer, self.refused.append, limits, at_once)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self.path))
        listener.listen(16)
        async with self.server.serving(listener, self.path, deadline_s):
            yield self

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(str(self.path))
        except OSError:
            connection.close()
            raise
        return connection


class HandsOver:
    """Has everything that a thread accepts go to the loop."""

    def do_at_once(self, _received: Received, /) -> bool:
        return False

    def end_late(self) -> None:
        pass


def _inode(fd: int | None) -> int | None:
    return None if fd is None else os.fstat(fd).st_ino


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (what is waited for happens in callbacks)
            await asyncio.sleep(0.0005)


async def read_all(connection: socket.socket) -> bytes:
    """Everything until the end of file."""
    loop = asyncio.get_running_loop()
    data = b""
    async with asyncio.timeout(DEADLINE_S):
        while part := await _receive(loop, connection):
            data += part
    return data


async def _receive(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> bytes:
    try:
        return await loop.sock_recv(connection, 65536)
    except ConnectionResetError:
        return b""


async def read_reply(connection: socket.socket) -> Reply:
    return wire.decode_reply(await read_all(connection))


def code_of(reply: Reply) -> int:
    return int(json.loads(reply.body)["code"])


def open_descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return {text for text in found if "/proc/" not in text}


@pytest.fixture(params=["loop", "thread"])
async def door(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    """By whom launchers are accepted makes no difference to what the loop is to answer."""
    before = open_descriptors()
    at_once = HandsOver() if request.param == "thread" else None
    async with Door(tmp_path / "cni.sock").serving(at_once=at_once) as made:
        yield made
    assert open_descriptors() <= before
    assert made.server._connections == set()


async def test_a_request_is_answered_with_its_descriptors_seen(door: Door) -> None:
    with door.connect() as connection, opened("/proc/self/ns/net") as net, opened("/proc") as own:
        data = wire.encode_frame(frame(has_netns=True, has_mntns=True))
        socket.send_fds(connection, [data], [net, own])
        assert await read_reply(connection) == DONE
        assert door.inodes == [(_inode(net), _inode(own))]


async def test_a_request_in_pieces_of_one_byte_is_read(door: Door) -> None:
    with door.connect() as connection:
        for byte in wire.encode_frame(frame()):
            connection.send(bytes([byte]))
            await asyncio.sleep(0)
        assert await read_reply(connection) == DONE


async def test_the_largest_frame_is_read_while_others_are_served(door: Door) -> None:
    loop = asyncio.get_running_loop()
    large = Frame(
        environment={"CNI_COMMAND": "GC"},
        stdin=b"x" * wire.STDIN_MAX_BYTES,
        started_boottime_ns=1,
        boot_id="b",
    )
    with door.connect() as slow, door.connect() as quick:
        data = wire.encode_frame(large)
        await loop.sock_sendall(slow, data[:500_000])
        quick.send(wire.encode_frame(frame()))
        assert await read_reply(quick) == DONE
        await loop.sock_sendall(slow, data[500_000:])
        assert await read_reply(slow) == DONE
    assert door.received[-1].frame == large


def _with(data: bytes, offset: int, value: int) -> bytes:
    changed = bytearray(data)
    changed[offset] = value
    return bytes(changed)


GOOD = wire.encode_frame(frame())
BAD = {
    "another protocol": (b"GET / HTTP/1.1\r\n\r\n", 6),
    "another major version": (_with(GOOD, 4, 2), 11),
    "a length beyond the limit": (_with(GOOD, 11, 255), 6),
    "a length below the header": (_with(_with(GOOD, 8, 1), 9, 0), 6),
    "an item that leaves the frame": (_with(GOOD, wire.REQUEST_HEADER_BYTES + 4, 255), 6),
    "descriptors that did not come": (wire.encode_frame(frame(has_netns=True)), 6),
    "a variable that is not UTF-8": (GOOD.replace(b"=c1", b"=\xff1"), 4),
}


@pytest.mark.parametrize("case", BAD)
async def test_what_is_no_request_is_refused_with_its_code(door: Door, case: str) -> None:
    data, code = BAD[case]
    with door.connect() as connection:
        connection.send(data)
        reply = await read_reply(connection)
    assert reply.status is ReplyStatus.NOT_NOW
    assert code_of(reply) == code
    assert door.received == []
    assert door.refused == ["frame"]


@pytest.mark.parametrize("count", [3, 4, 5, 50])
async def test_too_many_descriptors_are_refused_and_closed(door: Door, count: int) -> None:
    with door.connect() as connection, opened("/dev/null") as null:
        data = wire.encode_frame(frame(has_netns=True, has_mntns=True))
        socket.send_fds(connection, [data], [null] * count)
        assert code_of(await read_reply(connection)) == 6
    assert door.received == []


async def test_descriptors_without_a_frame_are_closed(door: Door) -> None:
    with opened("/dev/null") as null:
        with door.connect() as connection:
            socket.send_fds(connection, [GOOD[:5]], [null])
            await until(lambda: len(door.server._connections) == 1)
        await until(lambda: door.server._connections == set())
    assert door.received == []


async def test_descriptors_behind_the_first_bytes_count_too(door: Door) -> None:
    with door.connect() as connection, opened("/dev/null") as null:
        data = wire.encode_frame(frame(has_netns=True))
        connection.send(data[:30])
        socket.send_fds(connection, [data[30:]], [null])
        assert await read_reply(connection) == DONE


@pytest.mark.parametrize("sent", [0, 5, 20, len(GOOD) - 1])
async def test_a_frame_that_does_not_come_in_time_is_code_11(tmp_path: Path, sent: int) -> None:
    limits = SocketLimits(frame_time_s=0.05)
    async with Door(tmp_path / "cni.sock").serving(limits) as door:
        with door.connect() as connection:
            connection.send(GOOD[:sent])
            assert code_of(await read_reply(connection)) == 11
    assert door.received == []


@pytest.mark.parametrize("sent", [0, 5, 20, len(GOOD) - 1])
async def test_a_launcher_that_goes_before_its_frame_is_whole_asks_nothing(
    door: Door, sent: int
) -> None:
    with door.connect() as connection:
        connection.send(GOOD[:sent])
    await until(lambda: door.server._connections == set())
    assert door.received == []


async def test_a_launcher_that_went_with_its_frame_is_known_to_be_gone(door: Door) -> None:
    with door.connect() as connection:
        connection.send(GOOD)
    await until(lambda: len(door.received) == 1)
    assert door.received[0].caller.gone


async def test_a_launcher_that_goes_while_it_waits_is_noticed(door: Door) -> None:
    door.hold.clear()
    with door.connect() as connection:
        connection.send(GOOD)
        await until(lambda: len(door.received) == 1)
        assert not door.received[0].caller.gone
    await until(lambda: door.received[0].caller.gone)
    door.hold.set()
    await until(lambda: door.server._connections == set())


async def test_bytes_behind_the_frame_end_the_wait(door: Door) -> None:
    door.hold.clear()
    with door.connect() as connection:
        connection.send(GOOD)
        await until(lambda: len(door.received) == 1)
        connection.send(b"more")
        await until(lambda: door.received[0].caller.gone)
        door.hold.set()
        await until(lambda: door.server._connections == set())


async def test_a_frame_with_bytes_behind_it_is_refused(door: Door) -> None:
    with door.connect() as connection:
        connection.send(GOOD + b"x")
        assert code_of(await read_reply(connection)) == 6
    assert door.received == []


async def test_a_thread_answers_without_the_loop_and_the_loop_not_again(door: Door) -> None:
    door.hold.clear()
    with door.connect() as connection:
        connection.send(GOOD)
        await until(lambda: len(door.received) == 1)
        connection.setblocking(True)
        connection.settimeout(DEADLINE_S)
        first, again = Reply(ReplyStatus.DONE, b"first"), Reply(ReplyStatus.DONE, b"again")
        with ThreadPoolExecutor(1) as threads:  # the loop does not turn in this block
            sent = threads.submit(door.received[0].answer_at_once, first)
            assert wire.decode_reply(connection.recv(65536)) == first
            assert sent.result()
            assert not threads.submit(door.received[0].answer_at_once, again).result()
        connection.setblocking(False)
        door.hold.set()
        assert await read_all(connection) == b""


async def test_a_thread_that_answers_too_late_answers_nobody(door: Door) -> None:
    with door.connect() as connection:
        connection.send(GOOD)
        assert await read_reply(connection) == DONE
        await until(lambda: door.server._connections == set())
        assert not await asyncio.to_thread(door.received[0].answer_at_once, DONE)


async def test_a_launcher_that_takes_no_answer_does_not_hold_the_door(tmp_path: Path) -> None:
    class Talkative(Door):
        async def answer(self, received: Received) -> Reply:
            received.close()
            return Reply(ReplyStatus.DONE, b"x" * 900_000)

    async with Talkative(tmp_path / "cni.sock").serving(SocketLimits(reply_time_s=0.05)) as door:
        with door.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.send(GOOD)
            await until(lambda: len(door.server._connections) == 1)
            await until(lambda: door.server._connections == set())


async def test_too_many_connections_are_answered_at_once(tmp_path: Path) -> None:
    async with Door(tmp_path / "cni.sock").serving(SocketLimits(connections_max=2)) as door:
        door.hold.clear()
        with door.connect() as one, door.connect() as two:
            for connection in (one, two):
                connection.send(GOOD)
            await until(lambda: len(door.received) == 2)
            with door.connect() as three:
                reply = await read_reply(three)
            assert (reply.status, code_of(reply)) == (ReplyStatus.NOT_NOW, 11)
            assert door.refused == ["connections"]
            stdin = json.dumps({"socket": str(door.path), "cniVersion": "1.0.0"}).encode()
            outcome = await asyncio.to_thread(launcher.call, {"CNI_COMMAND": "DEL"}, stdin)
            assert outcome == launcher.Outcome(0)
            assert len(os.listdir(tmp_path / wire.SPOOL_DIRECTORY)) == 1
            door.hold.set()
            assert [await read_reply(one), await read_reply(two)] == [DONE, DONE]


@pytest.mark.kernel
async def test_a_caller_that_is_not_root_is_refused(door: Door) -> None:
    os.chmod(door.path, 0o666)
    os.chmod(door.path.parent, 0o711)
    script = (
        "import os, socket\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "with socket.socket(socket.AF_UNIX) as connection:\n"
        "    connection.connect('cni.sock')\n"
        "    print(connection.recv(65536)[12:].decode())\n"
    )
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-I", "-c", script],
        cwd=door.path.parent,
        capture_output=True,
        check=True,
        timeout=DEADLINE_S,
    )
    assert json.loads(done.stdout)["code"] == 4
    assert "65534" in json.loads(done.stdout)["msg"]
    assert door.refused == ["credentials"]


async def test_without_descriptors_the_door_waits_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = SocketLimits(accept_pause_s=0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with Door(tmp_path / "cni.sock").serving(limits) as door:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            gc.collect()  # what others dropped would be closed at some moment, and give its number away
            next_fd = os.dup(0)
            os.close(next_fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd, hard))
            try:
                connection.connect(str(door.path))
                await until(lambda: "accept a launcher" in caplog.messages)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            connection.send(GOOD)
            assert await read_reply(connection) == DONE
    assert len([line for line in caplog.records if line.levelno == logging.ERROR]) < 1000


def test_descriptors_that_this_process_may_not_have_are_no_fault_of_the_request() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    theirs, ours = socket.socketpair()
    with theirs, opened("/dev/null") as null:
        socket.send_fds(theirs, [GOOD], [null, null])
        reader = FrameReader(ours)
        gc.collect()
        next_fd = os.dup(0)
        os.close(next_fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd + 1, hard))
        try:
            with pytest.raises(Unavailable, match="no descriptor left"):
                reader.receive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            reader.close()


# --- the end ------------------------------------------------------------------------------------


async def test_what_was_taken_is_answered_when_the_agent_stops(tmp_path: Path) -> None:
    door = Door(tmp_path / "cni.sock")
    door.hold.clear()
    connections = []
    async with door.serving():
        connections = [door.connect() for _ in range(3)]
        connections[0].send(GOOD)
        await until(lambda: len(door.received) == 1)
        connections[1].send(GOOD)  # in the backlog, or accepted and not read
        connections[2].send(GOOD[:9])
        asyncio.get_running_loop().call_later(0.05, door.hold.set)
        asyncio.get_running_loop().call_later(0.02, connections[2].send, GOOD[9:])
    assert not door.path.exists()
    replies = []
    for connection in connections:
        with connection:
            replies.append(await read_reply(connection))
    assert replies == [DONE, DONE, DONE]


async def test_a_new_caller_finds_nobody_while_the_agent_stops(tmp_path: Path) -> None:
    door = Door(tmp_path / "cni.sock")
    door.hold.clear()
    refused: list[type[Exception]] = []

    def knock() -> None:
        try:
            door.connect()
        except OSError as error:
            refused.append(type(error))
        door.hold.set()

    async with door.serving():
        connection = door.connect()
        connection.send(GOOD)
        await until(lambda: len(door.received) == 1)
        asyncio.get_running_loop().call_later(0.02, knock)
    with connection:
        assert await read_reply(connection) == DONE
    assert refused == [FileNotFoundError]


async def test_what_does_not_end_is_cut_off_at_the_deadline(tmp_path: Path) -> None:
    door = Door(tmp_path / "cni.sock")
    door.hold.clear()
    async with door.serving(deadline_s=0.05):
        connection = door.connect()
        connection.send(GOOD)
        await until(lambda: len(door.received) == 1)
    with connection:
        assert await read_all(connection) == b""
    assert door.received[0].descriptors == []


async def test_the_socket_of_a_successor_is_left_in_place(tmp_path: Path) -> None:
    door = Door(tmp_path / "cni.sock")
    async with door.serving():
        door.path.unlink()
        door.path.write_text("the successor's")
    assert door.path.read_text() == "the successor's"


def test_the_control_buffer_counts_whole_descriptors() -> None:
    assert array.array("i").itemsize == 4
