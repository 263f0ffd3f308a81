"""Traffic between pods, node and world: connections that say who they came from, and rates as a receiver sees them."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from tests.runtime.machine import Machine, Place

_CHUNK: Final = bytes(64 * 1024)
MEASURE_S: Final = 1.5
"""How long a rate is measured, after what a burst lets through has passed."""
WARM_UP_S: Final = 0.5


@contextlib.contextmanager
def listener(machine: Machine, place: Place, address: str) -> Iterator[tuple[socket.socket, int]]:
    """Listen on a free port of `address` at a place."""
    with machine.open_socket(place, address) as server:
        server.bind((address, 0))
        server.listen(4)
        yield server, server.getsockname()[1]


def connect_from(machine: Machine, place: Place, address: str, server_place: Place) -> str:
    """Connect from a place to an address that is at home at another, echo a word; gives whom the server saw."""
    with (
        listener(machine, server_place, address) as (server, port),
        machine.open_socket(place, address) as client,
    ):
        client.connect((address, port))
        accepted, peer = server.accept()
        with accepted:
            accepted.settimeout(30)
            client.sendall(b"word")
            assert accepted.recv(16) == b"word"
            accepted.sendall(b"back")
            assert client.recv(16) == b"back"
        return str(peer[0])


def ask_http(machine: Machine, place: Place, address: str, port: int) -> bytes:
    """Get `/` from a web server."""
    with machine.open_socket(place, address) as client:
        client.connect((address, port))
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        answer = b""
        while chunk := client.recv(4096):
            answer += chunk
    return answer


def serves(machine: Machine, address: str, port: int = 80, place: str = "") -> bool:
    """Tell whether a web server answers the node (or another place)."""
    try:
        return b"served" in ask_http(machine, place or machine.node.name, address, port)
    except (ConnectionRefusedError, ConnectionResetError):
        return False


def measure_bits_per_s(machine: Machine, place: Place, address: str, server_place: Place) -> float:
    """Send as fast as it goes from a place to an address at another; gives the rate that arrives."""
    with (
        listener(machine, server_place, address) as (server, port),
        machine.open_socket(place, address) as client,
    ):
        client.connect((address, port))
        accepted, _ = server.accept()
        stop = threading.Event()

        def send() -> None:
            with contextlib.suppress(OSError):
                while not stop.is_set():
                    client.sendall(_CHUNK)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            with accepted:
                accepted.settimeout(30)
                _receive_for(accepted, WARM_UP_S)
                begin_s = time.monotonic()
                received = _receive_for(accepted, MEASURE_S)
                return received * 8 / (time.monotonic() - begin_s)
        finally:
            stop.set()
            sender.join(20)


def measure_until(is_good: Callable[[float], bool], measure: Callable[[], float]) -> float:
    """Measure until it is good, eight times at the most: others keep the machine busy."""
    for _ in range(7):
        if is_good(found := measure()):
            return found
    return measure()


def _receive_for(connection: socket.socket, seconds: float) -> int:
    until_s = time.monotonic() + seconds
    received = 0
    while time.monotonic() < until_s:
        received += len(connection.recv(1 << 20))
    return received
