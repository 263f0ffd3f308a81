"""Echo requests from inside a namespace, often: when was the first answer, and were any lost. IPv4.

The kernel of the other pod answers, so that no server has to be there. One thread asks from any number of places.
"""

import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from podwire.kernel import netns

EVERY_S: Final = 0.002
"""Between two requests to one address: the resolution of what is measured."""
_REQUEST, _REPLY = 8, 0
_HEADER_BYTES: Final = 20
_SEQUENCES: Final = 1 << 16


class Prober:
    """A place that asks."""

    def __init__(self, namespace: str) -> None:
        make = partial(socket.socket, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
        self.socket = netns.run_at(netns.named_path(namespace), make)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self.identifier = int.from_bytes(os.urandom(2))

    def ask(self, address: str, sequence: int) -> None:
        """Send one request; where there is no way to send it, it is lost as any other."""
        head = struct.pack("!BBHHH", _REQUEST, 0, 0, self.identifier, sequence % _SEQUENCES)
        head = head[:2] + struct.pack("!H", _checksum(head)) + head[4:]
        try:
            self.socket.sendto(head, (address, 0))
        except OSError:
            return

    def read(self) -> list[tuple[str, int]]:
        """Give the (address, sequence) of all answers that are there."""
        found: list[tuple[str, int]] = []
        while True:
            try:
                data, sender = self.socket.recvfrom(2048)
            except BlockingIOError:
                return found
            kind, _, _, identifier, sequence = struct.unpack_from("!BBHHH", data, _HEADER_BYTES)
            if kind == _REPLY and identifier == self.identifier:
                found.append((sender[0], sequence))

    def close(self) -> None:
        """Give the socket back."""
        self.socket.close()


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


@dataclass
class Race:
    """Who answers whom for the first time, and when. Addresses may be added from other threads while it runs."""

    probers: Sequence[Prober]
    deadline_s: float
    _since: dict[tuple[int, str], float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, address: str, since: float | None = None) -> None:
        """Have every prober ask an address; `since` is a time of perf_counter, now if absent."""
        begin = time.perf_counter() if since is None else since
        with self._lock:
            for index in range(len(self.probers)):
                self._since[index, address] = begin

    def run(self, expected: int) -> list[float]:
        """Ask until `expected` pairs have answered; gives milliseconds. RuntimeError names who did not in time."""
        found: list[float] = []
        sequence, end = 0, time.perf_counter() + self.deadline_s
        with selectors.DefaultSelector() as selector:
            for index, prober in enumerate(self.probers):
                selector.register(prober.socket, selectors.EVENT_READ, index)
            while len(found) < expected:
                if time.perf_counter() > end:
                    raise RuntimeError(f"no answer in {self.deadline_s} s: {self._list_waiting()}")
                sequence += 1
                with self._lock:
                    waiting = list(self._since)
                for index, address in waiting:
                    self.probers[index].ask(address, sequence)
                found += self._read_for(EVERY_S, selector)
        return found

    def _read_for(self, seconds: float, selector: selectors.BaseSelector) -> list[float]:
        found: list[float] = []
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            for key, _ in selector.select(left):
                now = time.perf_counter()
                for address, _sequence in self.probers[key.data].read():
                    with self._lock:
                        since = self._since.pop((key.data, address), None)
                    if since is not None:
                        found.append((now - since) * 1e3)
        return found

    def _list_waiting(self) -> str:
        with self._lock:
            return ", ".join(sorted({address for _, address in self._since}))


def reached(prober: Prober, address: str, seconds: float) -> bool:
    """Tell whether an address answers within a time; for what must not."""
    try:
        race = Race([prober], seconds)
        race.add(address)
        race.run(1)
    except RuntimeError:
        return False
    return True


class Steady:
    """A thread that asks some addresses the whole time and counts what is lost."""

    EVERY_S: Final = 0.01
    LATE_S: Final = 1.0

    def __init__(self, ways: Mapping[str, str]) -> None:
        """Take the namespace to ask from, for every address."""
        self._ways = [(Prober(namespace), address) for address, namespace in ways.items()]
        self._sent = 0
        self._got = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> tuple[int, int]:
        """End; gives how many were sent and how many of them were lost."""
        self._stopping.set()
        self._thread.join()
        time.sleep(self.LATE_S)
        self._read()
        for prober, _ in self._ways:
            prober.close()
        return self._sent, self._sent - self._got

    def _run(self) -> None:
        sequence = 0
        while not self._stopping.wait(self.EVERY_S):
            sequence += 1
            for prober, address in self._ways:
                prober.ask(address, sequence)
                self._sent += 1
            self._read()

    def _read(self) -> None:
        self._got += sum(len(prober.read()) for prober, _ in self._ways)
