"""A large datagram to a service, which the stack puts together, translates and cuts again, is still its pod's."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from podwire.model.cluster import Way
from podwire.model.interfaces import EndpointConfig
from podwire.model.policy import Direction, PolicyEntry, PolicyKey, Verdict
from tests.kernel.icmp_town import DEADLINE_S, IDENTITY, SLOT, Town, make_town
from tests.kernel.test_cluster_traffic import Way2
from tests.kernel.traffic import open_socket
from tests.packet import frames

pytestmark = pytest.mark.kernel

SERVICE = {4: "10.96.0.1", 6: "fd96::1"}
PORT = 5353
SERVERS = {"near": (0, 10), "far": (1, 9)}
"""On which node each one is, under which number."""


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with make_town(tmp_path_factory.mktemp("pieces"), Way2(Way.TUNNEL)) as made:
        made.configure(closed=False)
        yield made


@contextlib.contextmanager
def service(town: Town, target: str) -> Iterator[str]:
    """Have the first node translate an address to a server's, as kube-proxy has it."""
    version = 6 if ":" in target else 4
    family, shown = ("ip6", f"[{target}]") if version == 6 else ("ip", target)
    rule = f"{family} daddr {SERVICE[version]} udp dport {PORT} dnat {family} to {shown};"
    chain = ["chain pre {", "type nat hook prerouting priority -100;", rule, "}"]
    host = town.places["host"]
    host.run("nft", "\n".join(["table inet pwtpieces {", *chain, "}"]))
    try:
        yield SERVICE[version]
    finally:
        host.run("nft", "delete table inet pwtpieces")


def admit(town: Town, server: str, revision: int, *identities: int) -> None:
    """Close a server to everybody else."""
    at, number = SERVERS[server]
    datapath = town.nodes[at].datapath
    keys = [PolicyKey(one, Direction.INGRESS, frames.UDP, PORT, 16) for one in identities]
    rows = {key: PolicyEntry(Verdict.ALLOW, 1, 7) for key in keys}
    slot = SLOT + number
    datapath.policy.change_slot(
        slot, rows, [key for key in datapath.policy.read_slot(slot) if key not in rows]
    )
    config = EndpointConfig(
        identity=IDENTITY + number, slot=slot, policy_revision=revision, deny_ingress=True
    )
    datapath.policy.update_endpoints([(town.nodes[at].records[number], config)])


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("server", SERVERS)
def test_a_large_datagram_to_a_service_comes_from_its_pod(
    town: Town, server: str, version: int
) -> None:
    target = town.address(server, version)
    admit(town, server, version, IDENTITY)
    with (
        service(town, target) as address,
        open_socket(town.places[server], target, socket.SOCK_DGRAM) as listener,
        open_socket(town.pod, target, socket.SOCK_DGRAM) as client,
    ):
        listener.bind((target, PORT))
        listener.settimeout(DEADLINE_S)
        client.sendto(bytes(6000), (address, PORT))
        assert len(listener.recv(9000)) == 6000
