"""Traffic that goes on while policies change: conversations by the clock, with a record of all that arrived.

Used by test_policy_swap. One thread drives all sockets of a test; they are opened inside the namespaces and used from
outside. A `Talk` is one flow whose sides send numbered messages; a `Load` is many datagrams, each of which must be
answered or must not arrive at all.
"""

import contextlib
import itertools
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from podwire.model.closing import Closing
from tests.lab.policy_rig import Place

TICK_S: Final = 0.005
OPEN_DEADLINE_S: Final = 60.0
ANSWER_DEADLINE_S: Final = 60.0
RESUME_DEADLINE_S: Final = 90.0
SHORTLY_S: Final = 0.05
_MESSAGE: Final = struct.Struct("!IQ")
_KINDS: Final = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}


class Talk(Closing):
    """One open flow from `client` to `server`; each side sends a message in each tick, if it `may_send`."""

    def __init__(
        self, client: Place, server: Place, protocol: str, port: int, *, family: int = 4
    ) -> None:
        self.may_send = {"client": True, "server": True}
        self.arrivals: dict[str, list[float]] = {"client": [], "server": []}
        """Side -> when something arrived there, by time.monotonic()."""
        listener = server.open_socket(family, _KINDS[protocol])
        self.name = f"{protocol} {client.name}>{server.name}:{port} IPv{family}"
        self._sides: dict[str, socket.socket] = {}
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((server.address(family), port))
            self._sides["client"] = client.open_socket(family, _KINDS[protocol])
            opened = self._sides["client"]
            opened.bind((client.address(family), 0))
            if protocol == "tcp":
                listener.listen(1)
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.connect_ex((server.address(family), port))
            self._sides["server"] = self._meet(listener, opened, protocol)
        except BaseException:
            listener.close()
            self.close()
            raise

    @staticmethod
    def _meet(listener: socket.socket, opened: socket.socket, protocol: str) -> socket.socket:
        listener.settimeout(OPEN_DEADLINE_S)
        if protocol == "tcp":
            with listener:
                accepted, _ = listener.accept()
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.setblocking(False)
            return accepted
        opened.send(b"hello")
        _, sender = listener.recvfrom(16)
        listener.connect(sender)
        listener.setblocking(False)
        return listener

    def last_arrival_s(self) -> float:
        """Tell when something arrived last, at either side, by time.monotonic()."""
        return max(at for found in self.arrivals.values() for at in (*found, 0.0))

    def expected_sides(self) -> list[str]:
        """Name the sides that are sent to."""
        return [side for side, other in _OTHERS.items() if self.may_send[other]]

    def send(self) -> None:
        """Send a message from each side that may."""
        for side, one in self._sides.items():
            if self.may_send[side]:
                # A full buffer, or an error that the other side's kernel sent: the next tick tries again.
                with contextlib.suppress(OSError):
                    one.send(b"message!")

    def receive(self, side: str) -> None:
        """Take what has come to a side."""
        with contextlib.suppress(OSError):
            if self._sides[side].recv(65536):
                self.arrivals[side].append(time.monotonic())

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have `receive` called as the data of what can be read."""
        for side, one in self._sides.items():
            selector.register(one, selectors.EVENT_READ, partial(self.receive, side))

    def close(self) -> None:
        """Close both sides."""
        for side in self._sides.values():
            side.close()


_OTHERS: Final = {"client": "server", "server": "client"}


def run_talks(talks: Sequence[Talk], duration_s: float) -> None:
    """Let flows talk for a while, all at once."""
    until_s = due_s = time.monotonic()
    until_s += duration_s
    with selectors.DefaultSelector() as selector:
        for talk in talks:
            talk.register(selector)
        while (now_s := time.monotonic()) < until_s:
            if now_s >= due_s:
                for talk in talks:
                    talk.send()
                due_s = max(due_s + TICK_S, now_s)
            for key, _ in selector.select(max(0.0, due_s - now_s)):
                key.data()


def find_silent(talks: Sequence[Talk]) -> list[str]:
    """Talk shortly; name the flows in which nothing arrived at a side that is sent to."""
    before = [{side: len(found) for side, found in talk.arrivals.items()} for talk in talks]
    run_talks(talks, SHORTLY_S)
    return [
        talk.name
        for talk, counts in zip(talks, before, strict=True)
        if any(len(talk.arrivals[side]) == counts[side] for side in talk.expected_sides())
    ]


def run_until_all_flow(talks: Sequence[Talk]) -> None:
    """Talk until something arrives at every side that is sent to; TCP tries again later and later."""
    until_s = time.monotonic() + RESUME_DEADLINE_S
    while silent := find_silent(talks):
        assert time.monotonic() < until_s, f"nothing arrives in {silent}"


@dataclass(frozen=True)
class Datagrams:
    """Datagrams from one place to a port of another, so many a second; `fresh`: each from a port of its own."""

    name: str
    source: str
    target: str
    port: int
    family: int
    per_second: int
    is_allowed: bool
    fresh: bool = False


@dataclass
class Tally:
    """What became of the datagrams of one kind."""

    sent: int = 0
    arrived: int = 0
    answered: int = 0
    unanswered: set[int] = field(default_factory=set)


class Load:
    """Datagrams of many kinds, and one stream of TCP, driven by a thread of its own."""

    def __init__(self, places: dict[str, Place], kinds: list[Datagrams]) -> None:
        self._places = places
        self._kinds = kinds
        self.tallies = {kind.name: Tally() for kind in kinds}
        self.echoed_bytes = 0
        self.failure: BaseException | None = None
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self._senders: dict[str, socket.socket] = {}
        self._numbers = itertools.count(1)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        for kind in kinds:
            self._open(kind)

    def _open(self, kind: Datagrams) -> None:
        self._serve(kind.target, kind.port, kind.family)
        if not kind.fresh:
            self._senders[kind.name] = self._open_sender(kind)

    def _serve(self, target: str, port: int, family: int) -> None:
        place = self._places[target]
        address = (place.address(family), port)
        if any(opened.getsockname()[:2] == address for opened in self._sockets):
            return
        server = place.open_socket(family, socket.SOCK_DGRAM)
        self._sockets.append(server)
        server.bind(address)

        def answer() -> None:
            for data, sender in _drain(server):
                index, _ = _MESSAGE.unpack(data)
                self.tallies[self._kinds[index].name].arrived += 1
                with contextlib.suppress(OSError):
                    server.sendto(data, sender)

        self._selector.register(server, selectors.EVENT_READ, answer)

    def _open_sender(self, kind: Datagrams) -> socket.socket:
        place = self._places[kind.source]
        sender = place.open_socket(kind.family, socket.SOCK_DGRAM)
        self._sockets.append(sender)
        sender.bind((place.address(kind.family), 0))
        sender.connect((self._places[kind.target].address(kind.family), kind.port))
        tally = self.tallies[kind.name]

        def take() -> None:
            for data, _ in _drain(sender):
                number = _MESSAGE.unpack(data)[1]
                tally.unanswered.discard(number)
                tally.answered += 1
            if kind.fresh:
                self._forget(sender)

        self._selector.register(sender, selectors.EVENT_READ, take)
        return sender

    def _forget(self, one: socket.socket) -> None:
        self._selector.unregister(one)
        self._sockets.remove(one)
        one.close()

    def stream(self, client: str, server: str, port: int, family: int) -> None:
        """Add a stream of TCP that is echoed without a pause."""
        place = self._places[server]
        with place.open_socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((place.address(family), port))
            listener.listen(1)
            opened = self._places[client].open_socket(family, socket.SOCK_STREAM)
            self._sockets.append(opened)
            opened.connect_ex((place.address(family), port))
            listener.settimeout(OPEN_DEADLINE_S)
            accepted, _ = listener.accept()
        accepted.setblocking(False)
        self._sockets.append(accepted)
        block = bytes(range(256)) * 64

        def echo() -> None:
            with contextlib.suppress(BlockingIOError):
                accepted.sendall(accepted.recv(len(block)))

        def read() -> None:
            data = opened.recv(len(block))
            start = self.echoed_bytes % 256
            if data != (block + block)[start : start + len(data)]:
                raise AssertionError(f"the stream came back changed at byte {self.echoed_bytes}")
            self.echoed_bytes += len(data)
            with contextlib.suppress(BlockingIOError):
                # As much as came back: what is on its way stays the same.
                opened.sendall(data)

        self._selector.register(accepted, selectors.EVENT_READ, echo)
        self._selector.register(opened, selectors.EVENT_READ, read)
        opened.sendall(block)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Send as long as the block lasts; then wait for the last answers."""
        self._thread.start()
        try:
            yield
        finally:
            self._is_ending.set()
            self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            self._send_until_the_end()
            until_s = time.monotonic() + ANSWER_DEADLINE_S
            while self._is_waiting() and time.monotonic() < until_s:
                self._look(0.1)
        except BaseException as error:  # told by `running`
            self.failure = error

    def _is_waiting(self) -> bool:
        return any(self.tallies[kind.name].unanswered for kind in self._kinds if kind.is_allowed)

    def _send_until_the_end(self) -> None:
        begin_s = time.monotonic()
        due = {kind.name: begin_s for kind in self._kinds}
        while not self._is_ending.is_set():
            now_s = time.monotonic()
            for index, kind in enumerate(self._kinds):
                if due[kind.name] <= now_s:
                    self._send(index, kind)
                    due[kind.name] += 1 / kind.per_second
            self._look(max(0.0, min(due.values()) - time.monotonic()))

    def _send(self, index: int, kind: Datagrams) -> None:
        sender = self._senders.get(kind.name) or self._open_sender(kind)
        number, tally = next(self._numbers), self.tallies[kind.name]
        sender.send(_MESSAGE.pack(index, number))
        tally.sent += 1
        if kind.is_allowed:
            tally.unanswered.add(number)
        elif kind.fresh:
            self._forget(sender)

    def _look(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def describe(self) -> str:
        """Show what became of everything, a line for each kind."""
        lines = []
        for name, tally in self.tallies.items():
            counts = f"sent {tally.sent}, arrived {tally.arrived}, answered {tally.answered}"
            lines.append(f"{name}: {counts}, not answered {len(tally.unanswered)}")
        return "\n".join(lines)

    def close(self) -> None:
        """Close every socket."""
        for opened in self._sockets:
            opened.close()
        self._selector.close()


def _drain(one: socket.socket) -> Iterator[tuple[bytes, tuple[str, int]]]:
    """Take what waits."""
    with contextlib.suppress(BlockingIOError):
        while True:
            yield one.recvfrom(64)
