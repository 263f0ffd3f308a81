"""Whatever leads to a socket of the host is the host, not the world: addresses of every kind, later ones included."""

import contextlib
import ipaddress
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from podwire.datapath import maps as tables
from podwire.datapath.abi import DropReason, Identity
from podwire.datapath.changes import watch_links
from podwire.datapath.maps import read_metrics
from podwire.model.cluster import ClusterPlan
from podwire.model.endpoint import EndpointRecord
from podwire.model.interfaces import EndpointConfig
from podwire.model.policy import Direction, PolicyEntry, PolicyKey, Verdict
from tests.kernel.conftest import NODE_IPV4, NODE_IPV6, Namespace, new_namespace
from tests.kernel.node_world import KernelWorld, kernel_world
from tests.kernel.traffic import open_socket

pytestmark = pytest.mark.kernel

DEADLINE_S = 30.0
SLOT, PORT, UDP = 5, 5300, 17
OUTSIDE = {4: ("203.0.113.1", "203.0.113.2"), 6: ("2001:db8:9::1", "2001:db8:9::2")}
DEVICE = (
    "ip link add d0 type bridge",
    "ip addr add 192.0.2.1/24 brd + dev d0",
    "ip addr add 2001:db8:5::1/64 dev d0 nodad",
    "ip link set d0 up",
)
ADDRESSES = {
    "the node's": ((), str(NODE_IPV4)),
    "the node's-6": ((), str(NODE_IPV6)),
    "of another device": ((), "192.0.2.1"),
    "of another device-6": ((), "2001:db8:5::1"),
    "broadcast": ((), "192.0.2.255"),
    "routers' anycast": ((), "2001:db8:5::"),
    "secondary": (("addr add 192.0.2.5/24 dev d0",), "192.0.2.5"),
    "secondary-6": (("addr add 2001:db8:5::5/64 dev d0 nodad",), "2001:db8:5::5"),
    "link-local, as of a name server": (("addr add 169.254.20.10/32 dev d0",), "169.254.20.10"),
    "with a peer": (("addr add 192.0.2.9 peer 192.0.2.10 dev d0",), "192.0.2.9"),
    "a network": (("route add local 198.18.0.0/15 dev lo",), "198.19.7.7"),
    "a network-6": (("-6 route add local 2001:db8:77::/48 dev lo",), "2001:db8:77::7"),
    "one broadcast more": (("route add broadcast 192.0.2.127 dev d0 table local",), "192.0.2.127"),
}


@dataclass
class Confined:
    """A pod that may send to the world only, and the host's sockets."""

    world: KernelWorld
    record: EndpointRecord
    pod: Namespace
    outside: Namespace
    revision: int = 2

    def confine(self, *identities: int) -> None:
        """Let the pod send to these only; to none named = to everybody."""
        self.revision += 1
        config = EndpointConfig(
            identity=70_001,
            slot=SLOT if identities else 0,
            policy_revision=self.revision,
            deny_egress=bool(identities),
        )
        wanted = {
            PolicyKey(identity, Direction.EGRESS, UDP, PORT, 16): PolicyEntry(
                Verdict.ALLOW, 1, identity
            )
            for identity in identities
        }
        held = self.world.datapath.policy.read_slot(SLOT)
        gone = [key for key in held if key not in wanted]
        self.world.datapath.policy.change_slot(SLOT, wanted, gone)
        self.world.datapath.policy.update_endpoints([(self.record, config)])

    def denials(self) -> int:
        """Count what policy has dropped on this node."""
        rows = read_metrics(self.world.datapath.maps)
        return sum(row.packets for row in rows if row.reason == DropReason.POLICY)

    def reaches(self, receiver: Namespace, address: str) -> bool:
        """Tell whether a datagram of the pod arrives, or is denied; one of the two happens."""
        everywhere = "::" if ":" in address else "0.0.0.0"
        with (
            open_socket(receiver, address, socket.SOCK_DGRAM) as listener,
            open_socket(self.pod, address, socket.SOCK_DGRAM) as sender,
        ):
            listener.bind((everywhere, PORT))
            listener.setblocking(False)
            before, deadline_s = self.denials(), time.monotonic() + DEADLINE_S
            sender.sendto(b"here?", (address, PORT))
            while time.monotonic() < deadline_s:
                with contextlib.suppress(BlockingIOError):
                    return bool(listener.recv(10))
                if self.denials() > before:
                    return False
        raise AssertionError(f"neither arrived at {address} nor denied")


@pytest.fixture(scope="module")
def confined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Confined]:
    with kernel_world(_path(tmp_path_factory)) as world, new_namespace() as outside:
        for command in DEVICE:
            world.host.run(*command.split())
        _connect_outside(world.host, outside)
        record, pod = world.attach(20)
        yield Confined(world, record, pod, outside)


def _path(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("host-addresses")


def _connect_outside(host: Namespace, outside: Namespace) -> None:
    host.run("ip", "link", "add", "out", "type", "veth", "peer", "eth0", "netns", outside.name)
    for namespace, device, at in ((host, "out", 0), (outside, "eth0", 1)):
        for version, ends in OUTSIDE.items():
            bits, nodad = ("24", []) if version == 4 else ("64", ["nodad"])
            namespace.run("ip", "addr", "add", f"{ends[at]}/{bits}", "dev", device, *nodad)
        namespace.run("ip", "link", "set", device, "up")


@pytest.mark.parametrize("name", ADDRESSES)
def test_who_may_send_to_the_world_does_not_reach_the_host(confined: Confined, name: str) -> None:
    """What comes while the agent runs counts as soon as the kernel has told of it."""
    commands, address = ADDRESSES[name]
    host, datapath = confined.world.host, confined.world.datapath
    datapath.apply_cluster(ClusterPlan())
    with watch_links() as news:
        for command in commands:
            host.run("ip", *command.split())
        assert not commands or news.wait(DEADLINE_S)
        datapath.apply_cluster(ClusterPlan())
    confined.confine()
    assert confined.reaches(host, address), "it does lead to the host"
    confined.confine(Identity.WORLD)
    assert not confined.reaches(host, address)
    outside = OUTSIDE[6 if ":" in address else 4][1]
    assert confined.reaches(confined.outside, outside), "the world itself stays open"
    confined.confine(Identity.HOST)
    assert confined.reaches(host, address)
    with watch_links() as news:
        for command in commands:
            host.run("ip", *command.replace(" add ", " del ").replace(" nodad", "").split())
        assert not commands or news.wait(DEADLINE_S)
        datapath.apply_cluster(ClusterPlan())
    networks = {str(entry.network) for entry in tables.list_ipcache(datapath.maps)}
    assert (str(ipaddress.ip_network(address)) in networks) == (not commands)
