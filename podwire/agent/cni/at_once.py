"""The thread that accepts launchers, and carries an ADD or a DEL out itself: no thread waits for another one then.

Made by `agent.cni.socket`, which gets everything else from it: other commands, callers that are not root, frames that
do not come at once, and requests that would have to wait for the store or for another one of their attachment. All
kernel work happens in one turn, so one thread is enough (four were measured to be slower). Invariants: a connection
belongs to this thread or to the loop. While this thread is held up, in the kernel or by the turn, the loop has
the listener and the line: nobody waits for long behind a request of somebody else that takes longer than `LATE_S`.
"""

import asyncio
import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from podwire.agent.cni.incoming import FrameReader
from podwire.agent.cni.received import Caller, Received
from podwire.model import wire
from podwire.model.errors import PodwireError
from podwire.model.right_of_way import RightOfWay
from podwire.model.wire import Reply

COMMANDS: Final = ("ADD", "DEL")
LATE_S: Final = 0.1
"""A request that takes longer holds nobody up: the loop looks every `socket.RELIEF_LOOK_S`."""
LINE_MAX: Final = 256
"""Connections that wait for this thread; the loop counts and refuses the others."""
FRAME_WAIT_MS = 20
"""For a launcher that has connected and not sent its frame yet."""
REPLY_WAIT_S: Final = 5.0
_SEND_FLAGS: Final = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
ACCEPT_PAUSE_S: Final = 0.1
"""When the process has no descriptor left."""
OUT_OF_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

_log = logging.getLogger(__name__)


class PromptRequests(Protocol):
    """What carries requests out (`agent.cni.requests`); raises nothing."""

    def do_at_once(self, received: Received, /) -> bool:
        """Carry a request out, answer it and close its descriptors; or False, and nothing is done: it has to wait."""

    def end_late(self) -> None:
        """Tell a request that is being carried out, and its caller, that its time is over, when it is. On the loop."""


class Visitor(Caller):
    """A launcher whose connection nobody listens to: whether it is there is found out when somebody asks."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection
        self._coming = select.poll()
        self._coming.register(connection.fileno(), select.POLLIN)
        self._answering = threading.Lock()
        """Lets either this thread or the loop answer."""

    def has_left(self) -> bool:
        """Tell whether the launcher has closed; one that sends something behind its frame counts as gone, too."""
        return bool(self._coming.poll(0))

    def answer(self, reply: Reply) -> bool:
        """Send the reply; False when there was one."""
        if not self._answering.acquire(blocking=False):
            return False
        data = wire.encode_reply(reply)
        try:
            sent = self._connection.send(data, _SEND_FLAGS)
            if sent < len(data):
                self._connection.settimeout(REPLY_WAIT_S)
                self._connection.sendall(data[sent:], socket.MSG_NOSIGNAL)
        except OSError as error:
            _log.info("the launcher did not take its answer", extra={"error": str(error)})
        return True


class AtOnce:
    """The thread, from `start` to `stop`; `hand_over` takes a connection on the loop."""

    def __init__(
        self,
        listener: socket.socket,
        requests: PromptRequests,
        hand_over: Callable[[FrameReader], None],
        way: RightOfWay,
    ) -> None:
        self._listener = listener
        self._way = way
        self._requests = requests
        self._take = hand_over
        self._loop = asyncio.get_running_loop()
        self._line: deque[FrameReader] = deque()
        self._busy_since_s: float | None = None
        self._is_stopping = False
        self._ended = asyncio.Event()
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(listener.fileno(), select.POLLIN)
        self._poll.register(self._stop_fd, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="cni", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    async def stop(self, deadline_s: float) -> None:
        """Accept no more; what waits goes to the loop. Waits for the request that is being carried out, in time."""
        self._is_stopping = True
        os.eventfd_write(self._stop_fd, 1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._ended.wait()
        if self._ended.is_set():
            self._thread.join()
            os.close(self._stop_fd)

    def is_late(self) -> bool:
        """Tell whether the thread has been at one request for long."""
        since_s = self._busy_since_s
        return since_s is not None and time.monotonic() - since_s >= LATE_S

    def take_line(self) -> Iterator[FrameReader]:
        """Give what waits for the thread, and forget it; from any thread."""
        with contextlib.suppress(IndexError):
            while True:
                yield self._line.popleft()

    # --- on the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self._gather()
                for reader in self._take_first():
                    self._serve(reader)
            except Exception:  # the thread's door: without it no launcher would be heard any more
                _log.exception("a request met a bug")
        for reader in self.take_line():
            self._hand_over(reader)
        self._on_loop(self._ended.set)

    def _take_first(self) -> Iterator[FrameReader]:
        with contextlib.suppress(IndexError):  # the loop may have taken it meanwhile
            yield self._line.popleft()

    def _gather(self) -> None:
        """Accept all that are there; wait when there is nothing."""
        # All, before the first is carried out: one whose request is for the loop would wait for those in front of it.
        wait_ms = 0 if self._line else None
        while self._poll.poll(wait_ms) and not self._is_stopping and len(self._line) < LINE_MAX:
            wait_ms = 0
            reader = self._accept()
            if reader is not None:
                self._sort(reader)

    def _accept(self) -> FrameReader | None:
        try:
            accepted, _ = self._listener.accept()
        # accept(2): the launcher went away while it waited in the backlog. Or the loop was quicker.
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:
            if error.errno not in OUT_OF_DESCRIPTORS:
                raise
            # The backlog stays readable: looking again at once would only burn the processor.
            _log.error("accept a launcher", extra={"error": error.strerror})
            time.sleep(ACCEPT_PAUSE_S)
            return None
        return FrameReader(accepted)

    def _sort(self, reader: FrameReader) -> None:
        """Put into the line what may be for this thread, also a frame that is on its way; the rest is for the loop."""
        if self._read(reader) is None or self._is_for_us(reader):
            self._line.append(reader)
        else:
            self._hand_over(reader)

    def _serve(self, reader: FrameReader) -> None:
        if reader.frame is None and self._read(reader) is None:
            coming = select.poll()
            coming.register(reader.connection.fileno(), select.POLLIN)
            coming.poll(FRAME_WAIT_MS)
            self._read(reader)
        if reader.frame is None or not self._is_for_us(reader):
            self._hand_over(reader)
            return
        visitor = Visitor(reader.connection)
        received = Received(reader.frame, visitor, reader.descriptors, visitor.answer)
        self._busy_since_s = time.monotonic()
        try:
            with self._way:
                is_done = self._requests.do_at_once(received)
        finally:
            self._busy_since_s = None
        if is_done:
            reader.close()
        else:
            self._hand_over(reader)

    @staticmethod
    def _read(reader: FrameReader) -> bool | None:
        """Read what is there; whether the frame is whole, None when nothing was there."""
        try:
            data = reader.receive()
            return None if data is None else bool(data) and reader.add(data)
        except PodwireError as error:
            reader.fault = error  # the loop tells the launcher
            return False

    @staticmethod
    def _is_for_us(reader: FrameReader) -> bool:
        frame = reader.frame
        return (
            frame is not None
            and frame.command in COMMANDS
            and frame.program == wire.CNI_PROGRAM
            and reader.read_caller()[1] == 0
        )

    def _hand_over(self, reader: FrameReader) -> None:
        self._on_loop(self._take, reader)

    def _on_loop(self, call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before this thread
            self._loop.call_soon_threadsafe(call, *arguments)
