"""Real resolvers that chose the tunnel's port as their source: pods answer them, on both nodes."""

import socket
from collections.abc import Iterator

import pytest

from podwire.model.cluster import Way
from tests.kernel.icmp_town import DEADLINE_S, Town, make_town
from tests.kernel.test_cluster_traffic import Way2
from tests.kernel.traffic import open_socket

pytestmark = pytest.mark.kernel

TUNNEL_PORT, SERVER_PORT = 8472, 53


@pytest.fixture(
    scope="module", params=[Way2(Way.TUNNEL), Way2(Way.NATIVE)], ids=["tunnel", "native"]
)
def town(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Town]:
    with make_town(tmp_path_factory.mktemp("port"), request.param) as made:
        made.configure(closed=False)
        yield made


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("client", ["near", "far"])
def test_a_pod_that_asks_from_the_tunnels_port_is_answered(
    town: Town, client: str, version: int
) -> None:
    own, asked = town.address(client, version), town.address("pod", version)
    with (
        open_socket(town.pod, asked, socket.SOCK_DGRAM) as server,
        open_socket(town.places[client], own, socket.SOCK_DGRAM) as resolver,
    ):
        server.bind((asked, SERVER_PORT))
        resolver.bind((own, TUNNEL_PORT))
        for end in (server, resolver):
            end.settimeout(DEADLINE_S)
        for _ in range(3):
            resolver.sendto(b"name?", (asked, SERVER_PORT))
            question, peer = server.recvfrom(100)
            assert (question, peer[:2]) == (b"name?", (own, TUNNEL_PORT))
            server.sendto(b"address", peer)
            assert resolver.recv(100) == b"address"
