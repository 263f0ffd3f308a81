"""A small agent for the launcher's contract: a real socket, a scripted answer for each connection."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from podwire.model import wire
from podwire.model.wire import Frame, Reply, ReplyStatus

Behaviour = Callable[["ScriptedAgent", socket.socket], None]
DEADLINE_S = 30.0


@dataclass(frozen=True)
class Received:
    """One request as it came: its frame, and the inode numbers behind its descriptors."""

    frame: Frame
    inodes: tuple[int, ...]


@dataclass
class ScriptedAgent:
    """Listens at `path`; the n-th connection gets the n-th behaviour, the last one serves the rest."""

    path: Path
    behaviours: Sequence[Behaviour]
    received: list[Received] = field(default_factory=list)
    connections: int = 0
    closing: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when a client has closed its connection on a behaviour that waits for that."""

    def serve(self, listener: socket.socket) -> None:
        while not self.closing.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            behave = self.behaviours[min(self.connections, len(self.behaviours) - 1)]
            self.connections += 1
            # A launcher that waits for a part of a second is gone when the machine stood still for longer.
            with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.settimeout(DEADLINE_S)
                behave(self, connection)

    def read(self, connection: socket.socket) -> Received:
        """Read one whole frame with its descriptors."""
        data, fds, _, _ = socket.recv_fds(connection, 65536, 8)
        inodes = tuple(os.fstat(fd).st_ino for fd in fds)
        for fd in fds:
            os.close(fd)
        buffer = bytearray(data)
        while not data or len(buffer) < wire.request_bytes(buffer):
            if not data:
                raise ConnectionResetError("the launcher is gone")
            data = connection.recv(65536)
            buffer += data
        received = Received(wire.decode_frame(bytes(buffer)), inodes)
        self.received.append(received)
        return received


@contextlib.contextmanager
def scripted_agent(
    path: Path, *behaviours: Behaviour, backlog: int = 64
) -> Iterator[ScriptedAgent]:
    """An agent that runs in a thread until the block ends."""
    agent = ScriptedAgent(path, behaviours)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(backlog)
        listener.settimeout(0.02)
        thread = threading.Thread(target=agent.serve, args=(listener,), name="scripted-agent")
        thread.start()
        try:
            yield agent
        finally:
            agent.closing.set()
            thread.join(DEADLINE_S)
            path.unlink(missing_ok=True)


def answer(status: ReplyStatus, body: bytes) -> Behaviour:
    """Read the request, answer it."""

    def behave(agent: ScriptedAgent, connection: socket.socket) -> None:
        agent.read(connection)
        connection.sendall(wire.encode_reply(Reply(status, body)))

    return behave


def answer_slowly(body: bytes) -> Behaviour:
    """Answer in pieces of one byte, as a stream socket may."""

    def behave(agent: ScriptedAgent, connection: socket.socket) -> None:
        agent.read(connection)
        for byte in wire.encode_reply(Reply(ReplyStatus.DONE, body)):
            connection.sendall(bytes([byte]))

    return behave


def refuse_unread(body: bytes) -> Behaviour:
    """Answer and close when only the header has been read, as for a frame that is too large."""

    def behave(_agent: ScriptedAgent, connection: socket.socket) -> None:
        connection.recv(wire.COMMON_HEADER_BYTES)
        connection.sendall(wire.encode_reply(Reply(ReplyStatus.FAILED, body)))

    return behave


def send_garbage(agent: ScriptedAgent, connection: socket.socket) -> None:
    """Read the request, send what is no reply, keep the connection until the client has gone."""
    agent.read(connection)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    connection.recv(1)


def die_unread(_agent: ScriptedAgent, connection: socket.socket) -> None:
    """Close with the request unread: the client sees a reset."""
    connection.recv(1)


def die_with_request(agent: ScriptedAgent, connection: socket.socket) -> None:
    """Read the whole request, then close: the client sees the end of file."""
    agent.read(connection)


def stay_silent(agent: ScriptedAgent, connection: socket.socket) -> None:
    """Read the request and never answer; note when the client has closed."""
    agent.read(connection)
    if connection.recv(1) == b"":
        agent.gone.set()
