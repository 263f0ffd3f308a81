"""Two nodes, each a namespace with the shipped programs, a flow-based tunnel device and a pod: real traffic.

What single packets come to is the packet tests' matter; here is what only the kernel around them shows: keys that are
really written and read, offloads, fragments, path MTU, and who the other end takes the sender for.
"""

import ipaddress
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import pytest

from podwire.datapath import abi
from podwire.datapath.abi import IpcacheFlags
from podwire.datapath.maps import mac_bytes, to_mapped, to_prefix_key
from podwire.kernel import netns
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl.link import LinkEnd, create_veth, set_link
from podwire.kernel.rtnl.route import (
    InterfaceAddress,
    Neighbour,
    Route,
    add_address,
    add_route,
    set_neighbour,
)
from podwire.kernel.rtnl.tc import FROM_POD_HOOK, TO_POD_HOOK, add_clsact, set_bpf_filter
from podwire.kernel.rtnl.vxlan import Vxlan, create_vxlan
from tests.packet.live import LiveHost, LivePod, live_pods
from tests.packet.rig import TUNNEL_PORT, Endpoint, Rig, open_rig

pytestmark = pytest.mark.kernel

UNDERLAY_MTU: Final = 1500
TUNNEL: Final = "pw-tunnel"
TUNNEL_INDEX: Final = 2000
GATEWAY_MAC: Final = "0e:70:ff:ff:ff:ff"


@dataclass(frozen=True)
class Side:
    """A node of the test: number on the other one, addresses outside, range, pod."""

    number: int
    outer: str
    blocks: tuple[str, str]
    own: tuple[str, str]
    mac: str
    pod: Endpoint


def _side(number: int, version: int, mtu: int) -> Side:
    outer = f"192.0.2.{number}" if version == 4 else f"2001:db8:2::{number}"
    pod = Endpoint(
        f"pod{number}",
        1001,
        10 + number,
        70000 + number,
        f"10.7.{number}.10",
        f"fd07:{number}::10",
        mtu=mtu,
    )
    return Side(
        number,
        outer,
        (f"10.7.{number}.0/24", f"fd07:{number}::/64"),
        (f"10.7.{number}.1", f"fd07:{number}::1"),
        f"0e:71:00:00:00:{number:02x}",
        pod,
    )


@dataclass
class Node:
    """A running node."""

    side: Side
    rig: Rig
    host: LiveHost

    @property
    def pod(self) -> LivePod:
        """Its only pod."""
        return self.host.pods[self.side.pod.name]


def _prefix(rig: Rig, network: str, *fields: int) -> None:
    key = to_prefix_key(ipaddress.ip_network(network))
    rig.maps["pw_ipcache"].update(key, abi.IpcacheValue(*fields).pack())


def _write_rows(rig: Rig, side: Side, other: Side, mtu: int) -> None:
    for name in ("pw_config", "pw_endpoints", "pw_usage", "pw_ipcache"):
        rig.maps[name].clear()
    rig.write_settings(tunnel_ifindex=TUNNEL_INDEX)
    rig.write(side.pod)
    rig.publish(side.pod)
    number = other.number.to_bytes(4, "little")
    outer = to_mapped(ipaddress.ip_address(other.outer))
    node = abi.NodeValue(outer, mtu, 0, mac_bytes(other.mac))
    rig.maps["pw_nodes"].update(number, node.pack())
    rig.maps["pw_node_numbers"].update(outer, number)
    for network in side.blocks:
        _prefix(rig, network, abi.Identity.UNMANAGED, 0, IpcacheFlags.LOCAL, 0)
    for address in (side.outer, *side.own):
        _prefix(rig, address, abi.Identity.HOST, 0, IpcacheFlags.NODE_ADDRESS, 0)
    for network in other.blocks:
        _prefix(rig, network, abi.Identity.UNMANAGED, other.number, IpcacheFlags.TUNNEL, mtu)
    for address in other.own:
        flags = IpcacheFlags.TUNNEL | IpcacheFlags.NODE_ADDRESS
        _prefix(rig, address, abi.Identity.REMOTE_NODE, other.number, flags, mtu)


def _make_tunnel(netlink: NetlinkSocket, node: Node, other: Side, mtu: int) -> None:
    programs = node.rig.programs
    end = LinkEnd(TUNNEL, TUNNEL_INDEX, node.side.mac, mtu)
    netlink.execute([create_vxlan(end, Vxlan(TUNNEL_PORT, flow_based=True))])
    netlink.execute([set_link(TUNNEL_INDEX, no_link_local=True), add_clsact(TUNNEL_INDEX)])
    for hook, name in ((FROM_POD_HOOK, "from_overlay"), (TO_POD_HOOK, "to_overlay")):
        netlink.execute([set_bpf_filter(TUNNEL_INDEX, hook, programs[name].fd, name)])
    netlink.execute([set_link(TUNNEL_INDEX, up=True)])
    for text in node.side.own:
        address = ipaddress.ip_address(text)
        own = InterfaceAddress(TUNNEL_INDEX, address, address.max_prefixlen)
        netlink.execute([add_address(own)])
    for network in map(ipaddress.ip_network, other.blocks):
        gateway = ipaddress.ip_address("169.254.1.1" if network.version == 4 else "fe80::1")
        source = ipaddress.ip_address(node.side.own[network.version == 6])
        netlink.execute([set_neighbour(Neighbour(TUNNEL_INDEX, gateway, GATEWAY_MAC))])
        route = Route(
            network, index=TUNNEL_INDEX, gateway=gateway, source=source, onlink=True, mtu=mtu
        )
        netlink.execute([add_route(route)])


def _write_sysctls() -> None:
    for path, value in (
        ("ipv4/conf/all/rp_filter", "2"),
        ("ipv6/conf/all/accept_dad", "0"),
        ("ipv6/conf/default/accept_dad", "0"),
    ):
        with open(f"/proc/sys/net/{path}", "w", encoding="ascii") as file:
            file.write(value)


def _connect(nodes: tuple[Node, Node]) -> None:
    """Join the nodes by a wire of their own."""
    fds = [node.host.fd.fileno() for node in nodes]
    with NetlinkSocket.open_in(fds[0]) as netlink:
        netlink.execute(
            [
                create_veth(
                    LinkEnd("underlay", 3000, mtu=UNDERLAY_MTU),
                    LinkEnd("underlay", 3000, mtu=UNDERLAY_MTU),
                    fds[1],
                )
            ]
        )
    for node, fd in zip(nodes, fds, strict=True):
        address = ipaddress.ip_address(node.side.outer)
        with NetlinkSocket.open_in(fd) as netlink:
            bits = 24 if address.version == 4 else 64
            netlink.execute([add_address(InterfaceAddress(3000, address, bits))])
            netlink.execute([set_link(3000, up=True)])
            network = ipaddress.ip_network(f"{address}/{bits}", strict=False)
            netlink.execute([add_route(Route(network, index=3000))])


@contextmanager
def two_nodes(version: int) -> Iterator[tuple[Node, Node]]:
    """Make both nodes; `version` is that of the packets between them."""
    mtu = UNDERLAY_MTU - (50 if version == 4 else 70)
    sides = _side(1, version, mtu), _side(2, version, mtu)
    with ExitStack() as stack:
        nodes = []
        for side, other in (sides, sides[::-1]):
            rig = stack.enter_context(open_rig(build=""))
            _write_rows(rig, side, other, mtu)
            host = stack.enter_context(live_pods(rig, side.pod, host_name=f"node{side.number}"))
            netns.run_in(host.fd.fileno(), _write_sysctls)
            nodes.append(Node(side, rig, host))
        _connect((nodes[0], nodes[1]))
        for node, other in zip(nodes, sides[::-1], strict=True):
            with NetlinkSocket.open_in(node.host.fd.fileno()) as netlink:
                _make_tunnel(netlink, node, other, mtu)
        yield nodes[0], nodes[1]


@pytest.fixture(scope="module", params=[4, 6], ids=["outer-ipv4", "outer-ipv6"])
def nodes(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    with two_nodes(request.param) as both:
        yield both


@pytest.mark.parametrize("version", [4, 6])
def test_pods_of_two_nodes_ping_each_other(nodes: tuple[Node, Node], version: int) -> None:
    one, two = nodes
    result = one.pod.run("ping", "-c", "2", "-i", "0.1", "-W", "3", two.side.pod.address(version))
    print(one.rig.metrics(), two.rig.metrics())
    assert result.returncode == 0, result.stdout + result.stderr
