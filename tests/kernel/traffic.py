"""Traffic that notices every loss: numbered datagrams and a numbered byte stream between two namespaces."""

import contextlib
import heapq
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from podwire.kernel import netns
from tests.kernel.conftest import Namespace

_NUMBER = struct.Struct("!Q")
NUMBERS_AT_ONCE = 512
INTERVAL_S = 0.001
DRAIN_S = 20.0
SO_RCVBUFFORCE = 33
"""asm-generic/socket.h: a buffer beyond the limit for everybody."""
RECEIVE_BUFFER_BYTES = 8 << 20
PORT = 7000
WAITING_MAX = 250
"""Questions at once: each has a descriptor, and who answers may stand still while another thread asks on."""
ANSWERS_TAKE_S = (0.005, 0.3)


def open_socket(namespace: Namespace, address: str, kind: socket.SocketKind) -> socket.socket:
    """Open a socket inside a namespace; it may be used from outside."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with netns.namespace(namespace.fd.fileno()):
        return socket.socket(family, kind)


class Datagrams:
    """A client that sends a number each millisecond, and a server that sends each one back."""

    def __init__(
        self, client: Namespace, server: Namespace, address: str, port: int, asked: str = ""
    ) -> None:
        self._server = open_socket(server, address, socket.SOCK_DGRAM)
        self._server.bind((address, port))
        self._client = open_socket(client, address, socket.SOCK_DGRAM)
        self._client.connect((asked or address, port))
        for end in (self._server, self._client):
            # A thread that waits for its turn loses nothing.
            end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
        self._stop = threading.Event()
        self.sent = 0
        self.returned: set[int] = set()
        self.error = ""
        """What a socket refused to send, before the end."""
        self._threads = [
            threading.Thread(target=target) for target in (self._send, self._echo, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        try:
            while not self._stop.wait(INTERVAL_S):
                self._client.send(_NUMBER.pack(self.sent))
                self.sent += 1
        except OSError as error:
            self.error = f"send {self.sent}: {error}"

    def _echo(self) -> None:
        try:
            while True:
                data, peer = self._server.recvfrom(64)
                if not data:
                    return
                self._server.sendto(data, peer)
        except OSError as error:
            if not self._stop.is_set():
                self.error = f"send {len(self.returned)} back: {error}"

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._client.recv(64):
                self.returned.add(_NUMBER.unpack(data)[0])

    def finish(self) -> list[int | str]:
        """Stop sending, wait for what is under way, and give what was refused and the numbers that were lost."""
        if self._stop.is_set():
            return self._lost()
        self._stop.set()
        self._threads[0].join()
        came, until_s = -1, 0.0
        while len(self.returned) < self.sent and not self.error:
            if len(self.returned) > came:  # what is late on a busy machine is not lost
                came, until_s = len(self.returned), time.monotonic() + DRAIN_S
            elif time.monotonic() > until_s:
                break
            select.select([], [], [], 0.01)
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads[1:]:
            thread.join()
        return self._lost()

    def _lost(self) -> list[int | str]:
        refusals: list[int | str] = [self.error] if self.error else []
        return refusals + sorted(set(range(self.sent)) - self.returned)


def _numbers(first: int, count: int) -> bytes:
    """Pack numbers in one call: one by one they kept an emulated processor busy with nothing else."""
    return struct.pack(f"!{count}Q", *range(first, first + count))


class Stream:
    """A TCP connection over which numbers flow one way without a pause."""

    def __init__(
        self, client: Namespace, server: Namespace, address: str, port: int, asked: str = ""
    ) -> None:
        listener = open_socket(server, address, socket.SOCK_STREAM)
        with listener:
            listener.bind((address, port))
            listener.listen(1)
            self._client = open_socket(client, address, socket.SOCK_STREAM)
            self._client.connect((asked or address, port))
            self._server, _ = listener.accept()
        self._stop = threading.Event()
        self.sent = 0
        self.received = 0
        self.error = ""
        self._threads = [threading.Thread(target=run) for run in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        try:
            while not self._stop.is_set():
                self._client.sendall(_numbers(self.sent, NUMBERS_AT_ONCE))
                self.sent += NUMBERS_AT_ONCE
                select.select([], [], [], INTERVAL_S)
            self._client.shutdown(socket.SHUT_WR)
        except OSError as error:
            self.error = f"send: {error}"

    def _receive(self) -> None:
        rest = b""
        try:
            while data := self._server.recv(1 << 16):
                rest += data
                count = len(rest) // _NUMBER.size
                came, rest = rest[: count * _NUMBER.size], rest[count * _NUMBER.size :]
                if came != _numbers(self.received, count):
                    numbers = [number for (number,) in _NUMBER.iter_unpack(came)]
                    self.error = f"got {numbers}, wanted {count} from {self.received} on"
                    return
                self.received += count
        except OSError as error:
            self.error = f"receive: {error}"

    def finish(self) -> str:
        """Stop and give what went wrong; "" when every number arrived in order."""
        if self._stop.is_set():
            return self.error
        self._stop.set()
        self._await_threads()
        for end in (self._client, self._server):
            # Ends what a thread waits for, where nothing passes any more: TCP itself would try for minutes.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._client.close()
        self._server.close()
        if not self.error and self.received != self.sent:
            self.error = f"{self.sent - self.received} numbers were lost"
        return self.error

    def _await_threads(self) -> None:
        """Wait until both have ended, as long as numbers arrive."""
        came, until_s = -1, 0.0
        while any(thread.is_alive() for thread in self._threads):
            if self.received > came:
                came, until_s = self.received, time.monotonic() + DRAIN_S
            elif time.monotonic() > until_s:
                return
            select.select([], [], [], 0.01)


class Questions:
    """Datagrams from ever new ports, answered at once or after a while: some always wait for their answers."""

    def __init__(self, client: Namespace, server: Namespace, address: str, port: int) -> None:
        self._client, self._target = client, (address, port)
        self._server = open_socket(server, address, socket.SOCK_DGRAM)
        self._server.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
        self._server.bind(self._target)
        self._stop = threading.Event()
        self._asking: dict[int, socket.socket] = {}
        self._answered = select.epoll()
        self.sent = 0
        self.error = ""
        self._threads = [threading.Thread(target=run) for run in (self._ask, self._answer)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        try:
            with netns.namespace(self._client.fd.fileno()):
                while not self._stop.wait(2 * INTERVAL_S):
                    if len(self._asking) >= WAITING_MAX:
                        self._take_answers(0.1)
                        continue
                    family = socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET
                    one = socket.socket(family, socket.SOCK_DGRAM)
                    self._asking[one.fileno()] = one
                    self._answered.register(one, select.EPOLLIN)
                    one.connect(self._target)
                    one.send(b"?")
                    self.sent += 1
                    self._take_answers(0)
        except OSError as error:
            self.error = f"ask {self.sent}: {error}"

    def _answer(self) -> None:
        held: list[tuple[float, tuple[str, int]]] = []
        try:
            while True:
                self._server.settimeout(max(held[0][0] - time.monotonic(), 0.001) if held else None)
                with contextlib.suppress(TimeoutError):
                    data, peer = self._server.recvfrom(64)
                    if not data:
                        return
                    heapq.heappush(held, (time.monotonic() + ANSWERS_TAKE_S[peer[1] % 2], peer))
                while held and held[0][0] <= time.monotonic():
                    self._server.sendto(b"!", heapq.heappop(held)[1])
        except OSError as error:
            if not self._stop.is_set():
                self.error = f"answer: {error}"

    def _take_answers(self, timeout_s: float) -> None:
        for fd, _ in self._answered.poll(timeout_s):
            with self._asking.pop(fd) as one:
                one.recv(64)

    def finish(self) -> int | str:
        """Stop asking, wait for what is under way, and give how many questions were not answered, or what failed."""
        if self._stop.is_set():
            return self.error or len(self._asking)
        self._stop.set()
        self._threads[0].join()
        until_s = time.monotonic() + DRAIN_S
        while self._asking and time.monotonic() < until_s and not self.error:
            before = len(self._asking)
            self._take_answers(0.1)
            if len(self._asking) < before:
                until_s = time.monotonic() + DRAIN_S
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._threads[1].join()
        for asking in self._asking.values():
            asking.close()
        self._answered.close()
        return self.error or len(self._asking)


@contextlib.contextmanager
def continuous_traffic(
    ways: list[tuple[Namespace, Namespace, str]],
    services: Mapping[str, str] = MappingProxyType({}),
    *,
    port: int = PORT,
) -> Iterator[list[Datagrams | Stream]]:
    """Run datagrams and a stream on each way (client, server, server's address); the caller asks how it went.

    `services`: what a client asks instead of a server's address.
    """
    flows: list[Datagrams | Stream] = []
    try:
        for number, (client, server, address) in enumerate(ways):
            asked = services.get(address, address)
            flows.append(Datagrams(client, server, address, port + number, asked))
            flows.append(Stream(client, server, address, port + number, asked))
        yield flows
    finally:
        for flow in flows:
            flow.finish()
