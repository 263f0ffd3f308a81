"""The launchers' door: frames and descriptors in, replies out, with limits, so that no request hangs.

Opened by `agent.main`; `agent.cni.requests` answers the requests. Where a thread may answer at once
(`agent.cni.at_once`), it has the listener, and only what it hands over comes here. Never blocks the loop, never
interprets a request. Invariants: every descriptor that arrives is closed exactly once. A connection gets one reply,
from the loop or from the thread that did the work. When it ends before its reply, the request is told. A peer that is
not root is refused. Protocol: docs/protocol.md.
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from podwire.agent.cni.at_once import OUT_OF_DESCRIPTORS, AtOnce, PromptRequests
from podwire.agent.cni.incoming import FrameReader
from podwire.agent.cni.received import Caller, Received
from podwire.agent.ticks import next_tick
from podwire.cni.errors import encode_error
from podwire.model import wire
from podwire.model.errors import InvalidEnvironment, PodwireError, Unavailable
from podwire.model.right_of_way import RightOfWay
from podwire.model.wire import Reply, ReplyStatus

RELIEF_LOOK_S: Final = 0.25
"""Between two looks whether the thread is late, at the moments of the loop's other looks."""

_log = logging.getLogger(__name__)


class SocketLimits(msgspec.Struct, frozen=True):
    """What one door takes on."""

    connections_max: int = 1024
    frame_time_s: float = 5.0
    """From being accepted to the last byte of the frame."""
    reply_time_s: float = 5.0
    """For the launcher to take the reply."""
    accept_pause_s: float = 0.1
    """When the process has no descriptor left."""


Answer = Callable[[Received], Awaitable[Reply | None]]
"""Answers a request; raises nothing, and sees to it that `Received.close` is called. None: it was answered at once."""


class CniServer:
    """Serves one socket. Belongs to one event loop."""

    def __init__(
        self,
        answer: Answer,
        count_refusal: Callable[[str], None] = lambda _limit: None,
        limits: SocketLimits | None = None,
        at_once: PromptRequests | None = None,
        way: RightOfWay | None = None,
    ) -> None:
        """`count_refusal` is told which limit a connection met. `at_once` answers what need not wait, on a thread
        that has the listener, and takes `way` for it; None: all requests take their way over the loop.
        """
        self._answer = answer
        self._at_once = at_once
        self._way = way or RightOfWay()
        self._count_refusal = count_refusal
        self._limits = limits or SocketLimits()
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        """Of the loop, which accepts no launcher for a while, for want of descriptors."""

    @contextlib.asynccontextmanager
    async def serving(
        self, listener: socket.socket, path: Path, deadline_s: float = 10.0
    ) -> AsyncIterator[None]:
        """Serve `listener`, which is bound to `path`, until the block ends.

        Then take nothing new and let what was taken end, for `deadline_s` at most.
        """
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        # A successor may have bound the path by the time this server ends: only its own socket is unlinked.
        inode = os.stat(path).st_ino
        try:
            async with self._listening(listener, deadline_s):
                try:
                    yield
                finally:
                    # First the name: a launcher that comes now finds no socket and tries again. Then those that came
                    # before.
                    with contextlib.suppress(FileNotFoundError):
                        if os.stat(path).st_ino == inode:
                            os.unlink(path)
        finally:
            loop.remove_reader(listener.fileno())
            self._accept(listener)
            listener.close()
            await self._finish(deadline_s)

    @contextlib.asynccontextmanager
    async def _listening(self, listener: socket.socket, deadline_s: float) -> AsyncIterator[None]:
        """Have launchers accepted, by the loop or by a thread."""
        if self._at_once is None:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)
            yield
            return
        thread = AtOnce(listener, self._at_once, self._take, self._way)
        thread.start()
        relief = asyncio.create_task(self._relieve(thread, self._at_once, listener), name="relief")
        try:
            yield
        finally:
            await thread.stop(deadline_s)
            relief.cancel()
            await asyncio.gather(relief, return_exceptions=True)

    async def _relieve(
        self, thread: AtOnce, requests: PromptRequests, listener: socket.socket
    ) -> None:
        """Take launchers from a thread that is at one request for long, as long as it is."""
        loop = asyncio.get_running_loop()
        is_relieved = False
        while True:
            await next_tick(RELIEF_LOOK_S)
            is_late = thread.is_late()
            if is_late:
                requests.end_late()
                for reader in thread.take_line():
                    self._take(reader)
                if not is_relieved:
                    loop.add_reader(listener.fileno(), self._accept, listener)
            elif is_relieved:
                loop.remove_reader(listener.fileno())
                if self._pause is not None:
                    self._pause.cancel()
            is_relieved = is_late

    async def _finish(self, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + deadline_s
        while self._connections and loop.time() < until_s:
            done = [connection.closed.wait() for connection in self._connections]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until_s):
                    await asyncio.gather(*done)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in list(self._connections):
            connection.close()

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = listener.accept()
            except BlockingIOError:
                return
            # accept(2): the launcher went away while it waited in the backlog.
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in OUT_OF_DESCRIPTORS:
                    raise
                # The backlog stays readable: looking again at once would only burn the processor.
                _log.error("accept a launcher", extra={"error": error.strerror})
                loop.remove_reader(listener.fileno())
                self._pause = loop.call_later(
                    self._limits.accept_pause_s, self._accept_again, listener
                )
                return
            self._take(FrameReader(accepted))

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _take(self, reader: FrameReader) -> None:
        reader.connection.setblocking(False)
        connection = _Connection(reader, self._limits, self._serve, self._connections.discard)
        self._connections.add(connection)
        if len(self._connections) > self._limits.connections_max:
            self._count_refusal("connections")
            message = f"serve the request: {self._limits.connections_max} are being served"
            self._refuse(connection, Unavailable(message, hint="call again in a moment"))
            return
        pid, uid = reader.read_caller()
        if uid != 0:
            self._count_refusal("credentials")
            _log.warning("refused a caller that is not root", extra={"pid": pid})
            message = f"serve the request: its user id is {uid}, not root's"
            self._refuse(connection, InvalidEnvironment(message, hint="run the runtime as root"))
            return
        connection.start()

    def _serve(self, connection: "_Connection", outcome: Received | PodwireError) -> None:
        if isinstance(outcome, PodwireError):
            self._count_refusal("frame")
            self._refuse(connection, outcome)
            return
        task = asyncio.get_running_loop().create_task(
            self._answer_one(connection, outcome), name=f"cni {outcome.frame.command}"
        )
        # The loop has only a weak reference to a task: one that nobody keeps may vanish while it runs
        # (asyncio.create_task).
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_one(self, connection: "_Connection", received: Received) -> None:
        try:
            reply = await self._answer(received)
            await connection.send(b"" if reply is None else wire.encode_reply(reply))
        finally:
            connection.close()

    def _refuse(self, connection: "_Connection", error: PodwireError) -> None:
        # A DEL is recorded by its launcher: whatever it was, it must not be lost here.
        reply = Reply(ReplyStatus.NOT_NOW, encode_error("", error))
        connection.send_at_once(wire.encode_reply(reply))
        connection.close()


class _Connection:
    """One launcher: bytes until the frame is whole, then only whether it is still there."""

    def __init__(
        self,
        reader: FrameReader,
        limits: SocketLimits,
        deliver: Callable[["_Connection", Received | PodwireError], None],
        on_close: Callable[["_Connection"], None],
    ) -> None:
        self._reader = reader
        self._socket = reader.connection
        self._limits = limits
        self._deliver = deliver
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._delivered = False
        self._sending = threading.Lock()
        """Lets one thread answer, and keeps the socket open while a thread sends."""
        self._is_answered = False
        self._unsent = b""
        self.caller = Caller()
        self.closed = asyncio.Event()

    def start(self) -> None:
        """Read the frame, in time, or go on where another reader stopped."""
        self._timer = self._loop.call_later(self._limits.frame_time_s, self._give_up)
        self._loop.add_reader(self._socket.fileno(), self._read)
        if self._reader.fault is not None:
            self._fail(self._reader.fault)
            return
        self._read()

    async def send(self, data: bytes) -> None:
        """Send the reply, unless there was one; a launcher that has gone, or takes nothing, does not matter."""
        self.send_at_once(data)
        if not self._unsent:
            return
        try:
            async with asyncio.timeout(self._limits.reply_time_s):
                await self._loop.sock_sendall(self._socket, self._unsent)
        except (OSError, TimeoutError) as error:
            _log.info("the launcher did not take its answer", extra={"error": str(error)})

    def send_at_once(self, data: bytes) -> bool:
        """Send what fits the socket's buffer, which replies do, from any thread; False when there was a reply."""
        with self._sending:
            if self._is_answered or self.closed.is_set():
                return False
            # The worker thread and the loop may both come here: the first to do so has the connection.
            self._is_answered = True
            try:
                self._unsent = data[self._socket.send(data, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._unsent = data
            except OSError as error:
                _log.info("the launcher did not take its answer", extra={"error": str(error)})
            return True

    def close(self) -> None:
        """End the connection and close what still belongs to it."""
        if self.closed.is_set():
            return
        # Before the descriptor is closed: its number may be another connection's at once, and the loop would watch
        # that.
        self._stop_reading()
        with self._sending:
            self.closed.set()
            self._reader.close()
        self.caller.leave()
        self._on_close(self)

    def _stop_reading(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())

    def _give_up(self) -> None:
        limit_s = self._limits.frame_time_s
        message = f"read the request: it was not complete after {limit_s:g} s"
        self._fail(Unavailable(message, hint="call again"))

    def _fail(self, error: PodwireError) -> None:
        self._stop_reading()
        self._delivered = True
        self._deliver(self, error)

    def _read(self) -> None:
        """Read until there is nothing more."""
        # Not only the frame: an end of file right behind it says that its launcher is gone.
        is_whole = self._reader.frame is not None
        while True:
            try:
                data = self._reader.receive()
                if data is None:
                    break
                if not data:
                    self._end()
                    break
                if is_whole or self._delivered:
                    self._leave_rudely()
                    break
                is_whole = self._reader.add(data)
            except PodwireError as error:
                self._fail(error)
                return
        if is_whole and not self._delivered:
            self._delivered = True
            assert self._timer is not None
            assert self._reader.frame is not None
            self._timer.cancel()
            # The descriptors go to the request, because a worker may use them for longer than the connection lasts.
            descriptors = self._reader.take_descriptors()
            self._deliver(
                self,
                Received(self._reader.frame, self.caller, descriptors, self._answer_at_once),
            )

    def _answer_at_once(self, reply: Reply) -> bool:
        return self.send_at_once(wire.encode_reply(reply))

    def _end(self) -> None:
        """The launcher has closed. Without a whole frame nothing was asked."""
        self._loop.remove_reader(self._socket.fileno())
        if self._reader.frame is None:
            self._delivered = True
            self.close()
        else:
            self.caller.leave()

    def _leave_rudely(self) -> None:
        """Nothing may follow a frame: a client that sends more is not waited for."""
        self._loop.remove_reader(self._socket.fileno())
        self.caller.leave()
