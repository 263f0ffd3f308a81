"""Flows through a service: many that stay open, and requests one after the other at a rate."""

import contextlib
import errno
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from podwire.kernel import netns
from podwire.model.closing import Closing

ANSWER_S: Final = 30.0
"""How late an answer may be on a busy machine; one that is lost never comes."""
_BACKLOG: Final = 4096
_BLOCK: Final = 8


class Echoes(Closing):
    """Servers inside pods' networks that send back what comes, all in one thread."""

    def __init__(self, networks: Sequence[str], port: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._sockets: set[socket.socket] = set()
        self._stop = threading.Event()
        self._listeners = [_listen(network, port) for network in networks]
        for listener in self._listeners:
            self._add(listener)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _add(self, one: socket.socket) -> None:
        one.setblocking(False)
        self._sockets.add(one)
        self._selector.register(one, selectors.EVENT_READ)

    def _run(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(0.2):
                one = key.fileobj
                assert isinstance(one, socket.socket)
                with contextlib.suppress(BlockingIOError):
                    self._serve(one)

    def _serve(self, one: socket.socket) -> None:
        if one in self._listeners:
            self._add(one.accept()[0])
            return
        try:
            data = one.recv(4096)
            one.sendall(data)
        except BlockingIOError:
            raise
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(one)
            self._sockets.discard(one)
            one.close()

    def close(self) -> None:
        """End all."""
        self._stop.set()
        self._thread.join()
        for asking in self._sockets:
            asking.close()
        self._selector.close()


def _listen(network: str, port: int) -> socket.socket:
    with netns.open_namespace(network) as fd, netns.namespace(fd.fileno()):
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
        )


class OpenFlows(Closing):
    """Connections from one network that stay open; `check` asks each for an echo."""

    def __init__(self, network: str, addresses: Sequence[str], port: int, count: int) -> None:
        self._flows: list[socket.socket] = []
        self._round = 0
        try:
            with netns.open_namespace(network) as fd:
                for number in range(count):
                    address = addresses[number % len(addresses)]
                    self._flows.append(_connect(fd.fileno(), address, port))
        except BaseException:
            self.close()
            raise

    def check(self) -> list[str]:
        """Send something over each flow and read it back; names the flows of which that could not be said."""
        self._round += 1
        block = self._round.to_bytes(_BLOCK, "big")
        lost = []
        for number, flow in enumerate(self._flows):
            try:
                flow.sendall(block)
            except OSError as error:
                lost.append(f"flow {number}: {error}")
        for number, flow in enumerate(self._flows):
            try:
                data = flow.recv(_BLOCK, socket.MSG_WAITALL)
            except OSError as error:
                data = str(error).encode()
            if data != block:
                lost.append(f"flow {number} in round {self._round}: {data!r}")
        return lost

    def close(self) -> None:
        """End all of them."""
        for flow in self._flows:
            flow.close()


def can_connect(network: str, address: str, port: int) -> bool:
    """Tell whether a connection can be opened from a network."""
    with netns.open_namespace(network) as fd:
        try:
            _connect(fd.fileno(), address, port).close()
        except OSError:
            return False
    return True


def _connect(network_fd: int, address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with netns.namespace(network_fd):
        made = socket.socket(family, socket.SOCK_STREAM)
    made.settimeout(ANSWER_S)
    try:
        made.connect((address, port))
    except BaseException:
        made.close()
        raise
    return made


OTHER_FILES: Final = 1024
"""Descriptors that this process has for other things."""


@contextmanager
def room_for(count: int) -> Iterator[int]:
    """Let this process have the descriptors of so many flows, both ends; gives how many there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = max(hard, 2 * count + OTHER_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, room))
    except ValueError:  # a container's root without CAP_SYS_RESOURCE
        room = hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, room))
    try:
        yield min(count, (room - OTHER_FILES) // 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@dataclass
class Requests:
    """Asks an address again and again, each time by a connection of its own, at a rate; counts what became of it."""

    network: str
    address: str
    port: int
    per_s: float
    sent: int = 0
    lost: list[str] = field(default_factory=list)

    def run(self, stop: threading.Event) -> None:
        """Ask until `stop`, then wait for the last answers."""
        selector = selectors.DefaultSelector()
        waiting: dict[socket.socket, float] = {}
        # Once for all sockets: to enter a namespace may take many milliseconds on a busy machine.
        with netns.open_namespace(self.network) as fd, netns.namespace(fd.fileno()), selector:
            due_s = time.monotonic()
            while waiting or not stop.is_set():
                now_s = time.monotonic()
                if not stop.is_set() and now_s >= due_s:
                    due_s = max(due_s + 1 / self.per_s, now_s - 1)
                    made = self._ask()
                    waiting[made] = now_s + ANSWER_S
                    selector.register(made, selectors.EVENT_WRITE)
                for key, _ in selector.select(max(0.0, min(due_s - time.monotonic(), 0.05))):
                    one = key.fileobj
                    assert isinstance(one, socket.socket)
                    if self._go_on(one, selector, key.events):
                        self._end(one, selector, waiting)
                for one in [one for one, until_s in waiting.items() if until_s < now_s]:
                    self.lost.append(f"request {self.sent}: not answered in {ANSWER_S:g} s")
                    self._end(one, selector, waiting)

    def _ask(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setblocking(False)
        made.connect_ex((self.address, self.port))
        self.sent += 1
        return made

    def _go_on(self, one: socket.socket, selector: selectors.BaseSelector, events: int) -> bool:
        """Take the next step of a request; tells whether it was the last."""
        try:
            if events == selectors.EVENT_WRITE:
                if failure := one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(failure, errno.errorcode[failure])
                one.send(b"GET / HTTP/1.0\r\n\r\n")
                selector.modify(one, selectors.EVENT_READ)
                return False
            if not one.recv(4096):
                raise OSError("it ended without an answer")
        except BlockingIOError:
            return False
        except OSError as error:
            self.lost.append(f"request {self.sent}: {error}")
        return True

    @staticmethod
    def _end(
        one: socket.socket,
        selector: selectors.BaseSelector,
        waiting: Mapping[socket.socket, float],
    ) -> None:
        assert isinstance(waiting, dict)
        del waiting[one]
        selector.unregister(one)
        one.close()
