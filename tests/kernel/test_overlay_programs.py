"""Two nodes, each a namespace with the shipped programs, a flow-based tunnel device and a pod: real traffic.

What single packets come to is the packet tests' matter; here is what only the kernel around them shows: keys that are
really written and read, offloads, fragments, path MTU, and who the other end takes the sender for.
"""

import hashlib
import ipaddress
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import pytest

from podwire.datapath import abi
from podwire.datapath.abi import DropReason, Hook, IpcacheFlags, Path
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
from tests.empty_maps import zero_rows
from tests.packet import frames
from tests.packet.live import LiveHost, LivePod, live_pods
from tests.packet.rig import TUNNEL_PORT, Endpoint, Rig, open_rig
from tests.waiting import wait_for

pytestmark = pytest.mark.kernel

UNDERLAY_MTU: Final = 1500
TUNNEL: Final = "pw-tunnel"
TUNNEL_INDEX: Final = 2000
PORT: Final = 7007
DATA: Final = random.Random(5).randbytes(3 << 20)
VIP: Final = {4: "10.96.0.1", 6: "fd96::1"}
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
    node = abi.NodeValue(outer, mtu, 0, mac_bytes(other.mac), bytes(16), bytes(4))
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
def running(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    with two_nodes(request.param) as both:
        yield both


@pytest.fixture
def nodes(running: tuple[Node, Node]) -> tuple[Node, Node]:
    """Give both nodes with the rows they began with, and without memory."""
    sides = [node.side for node in running]
    for node, other in zip(running, sides[::-1], strict=True):
        for table in (node.rig.new_flows, *node.rig.shards):
            table.clear()
        zero_rows(node.rig.maps["pw_metrics"])
        _write_rows(node.rig, node.side, other, node.side.pod.mtu)
    return running


def _family(version: int) -> socket.AddressFamily:
    return socket.AF_INET if version == 4 else socket.AF_INET6


def _exchange(
    client: LivePod | LiveHost, server: LivePod | LiveHost, bound: str, target: str = ""
) -> tuple[str, str]:
    """Send some MiB there and back; give whom server and client take each other for. `target`: if not `bound`."""
    family = _family(ipaddress.ip_address(bound).version)
    with (
        server.open_socket(family, socket.SOCK_STREAM) as listening,
        client.open_socket(family, socket.SOCK_STREAM) as opened,
    ):
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((bound, PORT))
        listening.listen()
        opened.connect((target or bound, PORT))
        accepted, peer = listening.accept()
        with accepted:
            accepted.settimeout(60)
            _pour(opened, accepted)
            _pour(accepted, opened)
            told = peer[0], opened.getpeername()[0]
            # A reset is the last packet and is never repeated: nothing of this exchange comes in the test after it.
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 0))
        with pytest.raises(ConnectionResetError):
            opened.recv(1)
        return told


def _pour(sender: socket.socket, receiver: socket.socket) -> None:
    thread = threading.Thread(target=sender.sendall, args=(DATA,))
    thread.start()
    received = bytearray()
    try:
        while len(received) < len(DATA):
            chunk = receiver.recv(1 << 20)
            assert chunk, f"the stream ends after {len(received)} bytes"
            received += chunk
    finally:
        thread.join(30)
    assert hashlib.sha256(received).digest() == hashlib.sha256(DATA).digest()


def _paths(node: Node, hook: Hook) -> dict[Path, int]:
    """Count what passed, by path."""
    return {
        path: packets
        for (where, reason, path), (packets, _) in node.rig.metrics().items()
        if where == hook and reason == DropReason.NONE and path != Path.NONE
    }


@pytest.mark.parametrize("version", [4, 6])
def test_pods_of_two_nodes_ping_each_other(nodes: tuple[Node, Node], version: int) -> None:
    one, two = nodes
    result = one.pod.run("ping", "-c", "2", "-i", "0.1", "-w", "60", two.side.pod.address(version))
    assert result.returncode == 0, result.stdout + result.stderr
    for node in nodes:
        assert _paths(node, Hook.FROM_POD).keys() == {Path.TUNNEL}
        assert _paths(node, Hook.FROM_OVERLAY).keys() == {Path.TUNNEL}


@pytest.mark.parametrize("version", [4, 6])
def test_large_segments_pass_unharmed_without_the_stack(
    nodes: tuple[Node, Node], version: int
) -> None:
    one, two = nodes
    ends = [node.side.pod.address(version) for node in nodes]
    assert _exchange(one.pod, two.pod, ends[1]) == tuple(ends)
    for node in nodes:
        assert _paths(node, Hook.FROM_POD).keys() == {Path.TUNNEL}
        assert _paths(node, Hook.FROM_OVERLAY).keys() == {Path.TUNNEL}
        entries = node.rig.entries(node.side.pod)
        [entry] = [value for key, value in entries.items() if PORT in (key.sport, key.dport)]
        assert (entry.path, entry.node) == (Path.TUNNEL, 3 - node.side.number)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("way", ["to-the-pod", "from-the-pod"])
def test_hosts_and_remote_pods_reach_each_other(
    nodes: tuple[Node, Node], way: str, version: int
) -> None:
    one, two = nodes
    host, pod = one.side.own[version == 6], two.side.pod.address(version)
    client, server = (one.host, two.pod) if way == "to-the-pod" else (two.pod, one.host)
    ends = (host, pod) if way == "to-the-pod" else (pod, host)
    assert _exchange(client, server, ends[1]) == ends
    # A last packet of an exchange before this one may still come, and make a row of its own.
    peers = [
        value.peer_identity
        for key, value in two.rig.entries(two.side.pod).items()
        if to_mapped(ipaddress.ip_address(host)) in (key.saddr, key.daddr)
    ]
    assert set(peers) == {abi.Identity.REMOTE_NODE}
    assert _paths(one, Hook.TO_OVERLAY).keys() == {Path.TUNNEL}
    assert _paths(one, Hook.FROM_OVERLAY).keys() == {Path.STACK}


@pytest.mark.parametrize("version", [4, 6])
def test_datagrams_that_the_pod_cuts_arrive_whole(nodes: tuple[Node, Node], version: int) -> None:
    one, two = nodes
    address = two.side.pod.address(version)
    with (
        two.pod.open_socket(_family(version), socket.SOCK_DGRAM) as server,
        one.pod.open_socket(_family(version), socket.SOCK_DGRAM) as client,
    ):
        server.bind((address, PORT))
        client.sendto(DATA[:20000], (address, PORT))
        data, sender = server.recvfrom(65536)
        server.sendto(data, sender)
        assert client.recv(65536) == DATA[:20000]
    assert _paths(one, Hook.FROM_POD).keys() == {Path.TUNNEL}


@pytest.mark.parametrize("version", [4, 6])
def test_a_pod_learns_what_fits_through_the_tunnel(nodes: tuple[Node, Node], version: int) -> None:
    one, two = nodes
    narrow = 1380
    for network in two.side.blocks:
        fields = (abi.Identity.UNMANAGED, two.side.number, IpcacheFlags.TUNNEL, narrow)
        _prefix(one.rig, network, *fields)
    address = two.side.pod.address(version)
    _exchange(one.pod, two.pod, address)
    shown = one.pod.run("ip", f"-{version}", "route", "get", address).stdout
    assert f"mtu {narrow}" in shown


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_what_the_stack_translates_is_answered_through_it(
    nodes: tuple[Node, Node], kind: str, version: int
) -> None:
    """A service of the host's own making, whose back end is on the other node."""
    one, two = nodes
    pod, vip = two.side.pod.address(version), VIP[version]
    family = "ip" if version == 4 else "ip6"
    chain = f"type nat hook prerouting priority dstnat; {family} daddr {vip} dnat to {pod};"
    rules = f"table {family} pwt {{\nchain c {{ {chain} }}\n}}"
    result = one.host.run("nft", rules)
    assert result.returncode == 0, result.stderr
    try:
        if kind == "tcp":
            own = one.side.pod.address(version)
            assert _exchange(one.pod, two.pod, pod, vip) == (own, vip)
        else:
            _ask(one.pod, two.pod, pod, vip, version)
    finally:
        one.host.run("nft", "delete", "table", family, "pwt")
    assert _paths(one, Hook.FROM_OVERLAY).keys() == {Path.STACK}
    assert _paths(two, Hook.FROM_OVERLAY).keys() == {Path.TUNNEL}


def _ask(client: LivePod, server: LivePod, pod: str, vip: str, version: int) -> None:
    with (
        server.open_socket(_family(version), socket.SOCK_DGRAM) as answering,
        client.open_socket(_family(version), socket.SOCK_DGRAM) as asking,
    ):
        answering.bind((pod, PORT))
        asking.connect((vip, PORT))  # an answer from elsewhere is not heard
        for number in range(5):
            asking.send(bytes([number]))
            data, sender = answering.recvfrom(100)
            answering.sendto(data, sender)
            assert asking.recv(100) == bytes([number])


def _vxlan(vni: int, frame: bytes) -> bytes:
    return struct.pack("!BxxxI", 8, vni << 8) + frame


def test_a_forged_tunnel_packet_reaches_nobody(nodes: tuple[Node, Node]) -> None:
    """What the other node's own socket sends to the tunnel's port, cut off at every byte or in another's name."""
    one, two = nodes
    inner = frames.ipv4(two.side.pod.ipv4, one.side.pod.ipv4, frames.udp(4000, PORT))
    frame = frames.ethernet(one.side.mac, two.side.mac, frames.ETH_P_IP, inner)
    version = ipaddress.ip_address(two.side.outer).version
    mine, stolen = two.side.pod.identity, one.side.pod.ipv4
    own = frames.ipv4(stolen, one.side.pod.ipv4, frames.udp(4000, PORT))
    forged = frames.ethernet(one.side.mac, two.side.mac, frames.ETH_P_IP, own)
    with (
        one.pod.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as server,
        two.host.open_socket(_family(version), socket.SOCK_DGRAM) as sender,
    ):
        server.bind((one.side.pod.ipv4, PORT))
        target = (one.side.outer, TUNNEL_PORT)
        for length in range(14, len(frame)):
            sender.sendto(_vxlan(mine, frame[:length]), target)
        sender.sendto(_vxlan(abi.Identity.HOST, frame), target)
        sender.sendto(_vxlan(mine, forged), target)
        sender.sendto(_vxlan(mine, frame), target)
        assert server.recvfrom(100)[1] == (two.side.pod.ipv4, 4000)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.recv(100)
    dropped = {
        reason: packets
        for (hook, reason, _), (packets, _) in one.rig.metrics().items()
        if hook == Hook.FROM_OVERLAY and reason
    }
    assert dropped[DropReason.TUNNEL_IDENTITY] == dropped[DropReason.TUNNEL_INNER] == 1
    assert (
        dropped[DropReason.TRUNCATED] >= len(frame) - 34
    )  # the kernel itself refuses shorter ones


def test_a_host_that_is_no_node_is_not_heard(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    one.rig.maps["pw_node_numbers"].clear()
    result = two.pod.run("ping", "-c", "1", "-W", "1", one.side.pod.ipv4)
    assert result.returncode == 1
    dropped = Hook.FROM_OVERLAY, DropReason.TUNNEL_SOURCE, Path.NONE
    wait_for(lambda: dropped in one.rig.metrics(), "the drop")
    assert one.rig.metrics()[dropped][0] == 1
