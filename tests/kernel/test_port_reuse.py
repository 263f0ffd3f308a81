"""A pod connects to another node's pod directly, and from the same port through a service of the host's (rule 14)."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from podwire.model.cluster import Way
from tests.kernel.conftest import Namespace, pings
from tests.kernel.test_cluster_traffic import Node, Way2, connect, two_nodes
from tests.kernel.traffic import open_socket

pytestmark = pytest.mark.kernel

DEADLINE_S: Final = 60.0
PORT: Final = 8080
SERVICE_PORT: Final = 80
SERVICES: Final = {4: "172.30.0.10", 6: "fd30::10"}
BACK_ENDS: Final = {4: "10.77.2.9", 6: "fd77::2:9"}
WAYS: Final = [Way2(Way.NATIVE), Way2(Way.TUNNEL), Way2(Way.TUNNEL, outer=6)]


@dataclass
class Scene:
    """A client on the first node, whose host translates; the back end on the second."""

    way: Way2
    nodes: list[Node]
    client: Namespace

    def ask(self, version: int, source_port: int, *, service: bool, end: str = "close") -> str:
        """Ask for a line from a chosen port; the server closes first. Gives the line."""
        target = (SERVICES[version], SERVICE_PORT) if service else (BACK_ENDS[version], PORT)
        with open_socket(self.client, target[0], socket.SOCK_STREAM) as asking:
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            asking.settimeout(DEADLINE_S)
            asking.bind(("", source_port))
            asking.connect(target)
            asking.sendall(b"line?\n")
            line = b""
            while not line.endswith(b"\n") and (more := asking.recv(100)):
                line += more
            if end == "reset":
                asking.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            elif end == "close":
                assert asking.recv(1) == b""
        return line.decode()


def _serve(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            one, _ = listener.accept()
            with one, contextlib.suppress(OSError):
                one.settimeout(DEADLINE_S)
                one.recv(100)
                one.sendall(b"line\n")
                one.shutdown(socket.SHUT_WR)
                one.recv(100)


def _translate(host: Namespace) -> None:
    rules = "\n".join(
        f"{family} daddr {SERVICES[version]} meta l4proto {{ tcp, udp }} th dport {SERVICE_PORT}"
        f" dnat {family} to {shown}:{PORT};"
        for version, family, shown in (
            (4, "ip", BACK_ENDS[4]),
            (6, "ip6", f"[{BACK_ENDS[6]}]"),
        )
    )
    chain = f"chain pre {{\ntype nat hook prerouting priority -100;\n{rules}\n}}"
    host.run("nft", f"table inet pwtservice {{\n{chain}\n}}")


@pytest.fixture(scope="module", params=WAYS, ids=str)
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    with two_nodes(tmp_path_factory.mktemp("ports")) as nodes, contextlib.ExitStack() as stack:
        connect(nodes, request.param)
        client, server = (node.attach(9) for node in nodes)
        _translate(nodes[0].namespace)
        for address in BACK_ENDS.values():
            assert pings(client, address)
            listener = stack.enter_context(open_socket(server, address, socket.SOCK_STREAM))
            listener.bind((address, PORT))
            listener.listen()
            thread = threading.Thread(target=_serve, args=(listener,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
        yield Scene(request.param, nodes, client)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("end", ["close", "reset"])
def test_a_port_that_was_just_used_directly_reaches_the_service(
    scene: Scene, version: int, end: str
) -> None:
    first = 41_000 if end == "close" else 42_000
    for port in range(first, first + 3):
        for service in (False, True, False, True):
            assert scene.ask(version, port, service=service, end=end) == "line\n"


def _ask_by_datagram(asking: socket.socket, target: tuple[str, int]) -> tuple[str, int]:
    asking.sendto(b"?", target)
    _, peer = asking.recvfrom(100)
    return peer[0], peer[1]


@pytest.mark.parametrize("version", [4, 6])
def test_datagrams_of_one_port_are_answered_by_whom_the_last_one_asked(
    scene: Scene, version: int
) -> None:
    server = scene.nodes[1].pods[9]
    direct, service = (BACK_ENDS[version], PORT), (SERVICES[version], SERVICE_PORT)
    with (
        open_socket(server, direct[0], socket.SOCK_DGRAM) as serving,
        open_socket(scene.client, direct[0], socket.SOCK_DGRAM) as asking,
    ):
        serving.bind(direct)
        serving.settimeout(DEADLINE_S)
        asking.bind(("", 43_000))
        asking.settimeout(DEADLINE_S)

        def serve() -> None:
            with contextlib.suppress(OSError):
                for _ in range(6):
                    _, peer = serving.recvfrom(100)
                    serving.sendto(b"!", peer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            for _ in range(3):
                assert _ask_by_datagram(asking, direct) == direct
                assert _ask_by_datagram(asking, service) == service
        finally:
            thread.join()
