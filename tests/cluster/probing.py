"""Packets that are sent all the time: when a verdict changes, and whether anything gets through that must not."""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlsplit

from podwire.kernel import netns
from podwire.lab import traffic

ECHO_S: Final = 0.1
"""How long an echo is waited for; nodes and pods are on one machine."""
SURE: Final = 3
"""So many equal answers in a row are a verdict: on a busy machine one echo may be late."""
DEADLINE_S: Final = 120.0
FOLLOWED_S: Final = 10.0
"""The API server notices the end of a watch sooner, also on a busy machine."""


def reaches(network: str, address: str) -> bool:
    """Ask for one echo."""
    return traffic.ping(network, address, timeout_s=ECHO_S, tries=1).ok


def measure_changes(
    network: str, addresses: Sequence[str], change: Callable[[], object], *, wanted: bool
) -> Mapping[str, float]:
    """Change something, and give for each address after how many seconds its verdict was the wanted one for good."""
    begin_s = time.monotonic()
    change()
    since: dict[str, float] = {}
    streak = dict.fromkeys(addresses, 0)
    while min(streak.values()) < SURE:
        for address in addresses:
            asked_s = time.monotonic()
            if asked_s - begin_s > DEADLINE_S:
                raise AssertionError(f"waited {DEADLINE_S:g} s in vain for {wanted} at {streak}")
            if reaches(network, address) is not wanted:
                streak[address] = 0
                continue
            since[address] = since[address] if streak[address] else asked_s - begin_s
            streak[address] += 1
    return since


def find_double_watches(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name what one agent has watched twice at a time, from the audit log. One watch that follows another may begin
    before the server has noticed the end of the first."""
    begun: dict[tuple[str, str], list[tuple[float, str]]] = {}
    ended: dict[str, float] = {}
    for event in events:
        if event["verb"] != "watch":
            continue
        at_s = datetime.fromisoformat(event["stageTimestamp"]).timestamp()
        if event["stage"] == "ResponseStarted":
            of = event["userAgent"], urlsplit(event["requestURI"]).path
            begun.setdefault(of, []).append((at_s, event["auditID"]))
        else:
            ended[event["auditID"]] = at_s
    newest_s = max((at_s for watches in begun.values() for at_s, _ in watches), default=0.0)
    newest_s = max([newest_s, *ended.values()])
    return [
        f"{agent} watches {path}"
        for (agent, path), watches in begun.items()
        for (_, first), (next_s, _) in itertools.pairwise(sorted(watches))
        if ended.get(first, newest_s) - next_s >= FOLLOWED_S
    ]


class Sink:
    """Counts who connects to a port inside a pod's network."""

    def __init__(self, listener: socket.socket) -> None:
        self.callers: set[str] = set()
        self._listener = listener

    def serve(self) -> None:
        """Take connections until the port is closed."""
        while True:
            try:
                connection, (address, _) = self._listener.accept()
            except OSError:
                return
            self.callers.add(str(address))
            connection.close()


@contextmanager
def listening(network: str, port: int) -> Iterator[Sink]:
    """Listen inside a pod's network."""
    with netns.open_namespace(network) as fd, netns.namespace(fd.fileno()):
        listener = socket.create_server(("0.0.0.0", port))
    sink = Sink(listener)
    thread = threading.Thread(target=sink.serve, daemon=True)
    thread.start()
    try:
        yield sink
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


PATIENCE_S: Final = 20.0
"""How late an echo may be on a busy machine; one that was dropped never comes."""


class Stream:
    """Sends all the time from one pod to another, and keeps what went wrong."""

    def __init__(self, network: str, address: str) -> None:
        self.network, self.address = network, address
        self.sent = 0
        self.lost: list[str] = []

    def ping(self, stop: threading.Event) -> None:
        """Send one echo request after the other."""
        while not stop.wait(0.02):
            self.sent += 1
            said = traffic.ping(self.network, self.address, timeout_s=PATIENCE_S, tries=1)
            if not said.ok:
                self.lost.append(f"echo {self.sent}: {said.answer}")

    def talk(self, stop: threading.Event, port: int) -> None:
        """Keep one TCP connection, and read every line back."""
        with traffic.socket_in(self.network, self.address, "tcp") as connection:
            connection.settimeout(PATIENCE_S)
            try:
                connection.connect((self.address, port))
                lines = connection.makefile("rb")
                while not stop.wait(0.02):
                    self.sent += 1
                    connection.sendall(b"%d\n" % self.sent)
                    if (line := lines.readline()) != b"%d\n" % self.sent:
                        self.lost.append(f"line {self.sent}: {line!r}")
                        return
            except OSError as error:
                self.lost.append(f"line {self.sent}: {error}")


@contextmanager
def running(*works: Callable[[threading.Event], object]) -> Iterator[None]:
    """Let something happen in threads until the block ends."""
    stop = threading.Event()
    threads = [threading.Thread(target=work, args=(stop,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextmanager
def echoing(network: str, port: int) -> Iterator[None]:
    """Send back, inside a pod's network, what its one caller sends."""
    with netns.open_namespace(network) as fd, netns.namespace(fd.fileno()):
        listener = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)

    def serve() -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                while data := connection.recv(4096):
                    connection.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
