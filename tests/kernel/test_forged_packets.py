"""Packets that somebody forges on the way between nodes, from each place where an attacker may sit; and honest ones."""

import contextlib
import ipaddress
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from podwire.datapath.conntrack_maps import list_conntrack
from podwire.kernel import netns
from podwire.model.cluster import TunnelMode, Way
from podwire.model.endpoint import EndpointRecord
from podwire.model.ids import IdentityId
from podwire.model.interfaces import EndpointConfig
from tests.kernel.conftest import Namespace, new_namespace, pings
from tests.kernel.test_cluster_traffic import (  # noqa: F401 - a fixture
    WAYS,
    Node,
    Way2,
    connect,
    facts,
    mac,
    nodes,
    plan_for,
)
from tests.kernel.traffic import open_socket
from tests.packet.frames import (
    ETH_P_IP,
    ETH_P_IPV6,
    MORE_FRAGMENTS,
    Segment,
    ethernet,
    fragment_header,
    ipv4,
    ipv6,
    udp,
)

pytestmark = pytest.mark.kernel

PORT = 5353
TUNNEL_PORT = 8472
NODE_PORT = 30053
PLAIN_VXLAN = 0x08
DEADLINE_S = 60
NOBODY = 65534
WORLD = {1: ("198.51.100.1", "fd98::1"), 2: ("198.51.100.2", "fd98::2")}
SERVICE = {4: "203.0.113.53", 6: "fd99::53"}
TUNNELS = [
    Way2(Way.TUNNEL),
    Way2(Way.TUNNEL, outer=6),
    Way2(Way.TUNNEL, TunnelMode.CLASSIC),
    Way2(Way.TUNNEL, TunnelMode.CLASSIC, 6),
]


def pod_address(number: int, version: int) -> str:
    """Give the address of the pod of a node."""
    return f"10.77.{number}.9" if version == 4 else f"fd77::{number}:9"


def outer_address(number: int, version: int) -> str:
    """Give the address of a node on the underlay."""
    return str(facts(number)[0][0 if version == 4 else 1])


def inner_packet(version: int, text: bytes) -> bytes:
    """Make the datagram that pod 9 of node 1 would send to pod 9 of node 2."""
    make = ipv4 if version == 4 else ipv6
    return make(pod_address(1, version), pod_address(2, version), udp(4000, PORT, text))


def tunnel_packet(chosen: Way2, version: int, text: bytes) -> bytes:
    """Make what a tunnel device of node 1 would send to node 2, behind its UDP header."""
    vni = 1 if chosen.mode is TunnelMode.CLASSIC else 70_001
    kind = ETH_P_IP if version == 4 else ETH_P_IPV6
    frame = ethernet(mac(2), mac(1), kind, inner_packet(version, text))
    return struct.pack("!BxxxI", 0x08, vni << 8) + frame


@dataclass
class Pair:
    """Two nodes, each with pod 9, and who listens in the second one's."""

    nodes: list[Node]
    chosen: Way2
    listeners: dict[int, socket.socket]
    world: Namespace

    def ask(self, version: int, text: bytes) -> None:
        """Send an honest datagram from the pod of node 1."""
        with open_socket(self.nodes[0].pods[9], pod_address(2, version), socket.SOCK_DGRAM) as one:
            one.sendto(text, (pod_address(2, version), PORT))

    def heard(self, version: int, last: bytes) -> list[bytes]:
        """Give all that arrived until `last` did."""
        found: list[bytes] = []
        while not found or found[-1] != last:
            found.append(self.listeners[version].recv(100))
        return found

    def arrives(self, send: Callable[[bytes], None], inner: int) -> bool:
        """Tell whether a forged packet gets to the pod; an honest one that is sent after it has to."""
        send(b"forged")
        self.ask(inner, b"honest")
        return b"forged" in self.heard(inner, b"honest")


@pytest.fixture
def pair(request: pytest.FixtureRequest, nodes: list[Node]) -> Iterator[Pair]:  # noqa: F811
    chosen: Way2 = request.param
    with contextlib.ExitStack() as stack:
        connect(nodes, chosen)
        listeners = {}
        for node in nodes:
            node.attach(9)
        for version in (4, 6):
            listener = stack.enter_context(
                open_socket(nodes[1].pods[9], pod_address(2, version), socket.SOCK_DGRAM)
            )
            listener.bind((pod_address(2, version), PORT))
            listener.settimeout(DEADLINE_S)
            listeners[version] = listener
            wait_for_neighbours = pings(nodes[0].namespace, outer_address(2, version))
            assert wait_for_neighbours
            assert pings(nodes[0].pods[9], pod_address(2, version))
        world = stack.enter_context(new_namespace())
        _connect_world(nodes[0].namespace, world)
        yield Pair(nodes, chosen, listeners, world)


def _connect_world(node: Namespace, world: Namespace) -> None:
    node.run("ip", "link", "add", "out", "type", "veth", "peer", "eth0", "netns", world.name)
    for namespace, device, at in ((node, "out", 1), (world, "eth0", 2)):
        for address, bits in zip(WORLD[at], (24, 64), strict=True):
            nodad = ["nodad"] if bits == 64 else []
            namespace.run("ip", "addr", "add", f"{address}/{bits}", "dev", device, *nodad)
        namespace.run("ip", "link", "set", device, "up")
    for address in WORLD[1]:
        family = "-6" if ":" in address else "-4"
        world.run("ip", family, "route", "add", "default", "via", address)


def translate(
    node: Namespace,
    version: int,
    to: str,
    *,
    back_end_port: int = TUNNEL_PORT,
    masquerades: bool = True,
) -> None:
    """Do what kube-proxy does for a service, and for a port of the node, whose back end is `to`."""
    keyword = "ip" if version == 4 else "ip6"
    end = f"{to}:{back_end_port}" if version == 4 else f"[{to}]:{back_end_port}"
    who = "" if masquerades else f"{keyword} saddr {to} "
    service = f"{keyword} daddr {SERVICE[version]} udp dport 53 dnat {keyword} to {end}"
    port = f"fib daddr type local meta nfproto ipv{version} udp dport {NODE_PORT} dnat {keyword} to {end}"
    rules = f"""
    table inet proxy{version} {{
        chain pre {{ type nat hook prerouting priority dstnat; {service}; {port}; }}
        chain out {{ type nat hook output priority -100; {service}; {port}; }}
        chain post {{ type nat hook postrouting priority srcnat; {who}ct status dnat masquerade; }}
    }}"""
    subprocess.run(
        ["ip", "netns", "exec", node.name, "nft", "-f", "-"], input=rules, text=True, check=True
    )
    node.run("ip", f"-{version}", "route", "add", SERVICE[version], "dev", "under")


SEND = """
import socket, struct, sys
six = ":" in sys.argv[1]
family = socket.AF_INET6 if six else socket.AF_INET
target, source, how = (sys.argv[1], int(sys.argv[2])), sys.argv[3], sys.argv[4]
kind = socket.SOCK_STREAM if how == "tcp" else socket.SOCK_DGRAM
sender = socket.socket(family, kind)
told = []
if source:
    sender.setsockopt(socket.SOL_IP, 15, 1)  # IP_FREEBIND
    if six:
        sender.setsockopt(socket.IPPROTO_IPV6, 78, 1)  # IPV6_FREEBIND
if source and how == "message":
    packed = socket.inet_pton(family, source)
    if six:
        told = [(socket.IPPROTO_IPV6, 50, packed + bytes(4))]  # IPV6_PKTINFO
    else:
        told = [(socket.SOL_IP, 8, bytes(4) + packed + bytes(4))]  # IP_PKTINFO
elif source:
    sender.bind((source, 4000))
data = sys.stdin.buffer.read()
if how == "tcp":
    sender.settimeout(0.2)
    sender.connect(target)
else:
    sender.sendmsg([data], told, 0, target)
"""


def send_from(
    namespace: Namespace,
    address: str,
    port: int,
    data: bytes,
    source: str = "",
    how: str = "bound",
) -> None:
    """Send as an ordinary process without any rights."""
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    inside = ["ip", "netns", "exec", namespace.name]
    program = [os.path.realpath(sys.executable), "-I", "-c", SEND]
    no_rights = ["--inh-caps=-all", "--bounding-set=-all"]
    subprocess.run(
        [*inside, *user, *no_rights, *program, address, str(port), source, how],
        input=data,
        stderr=subprocess.DEVNULL,
        check=False,  # a datagram that is refused at once is an error of the call
    )


PLACES = ["pod", "world", "process"]


@pytest.mark.parametrize("inner", [4, 6])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pair", TUNNELS, ids=str, indirect=True)
def test_nothing_is_translated_to_the_tunnel_of_another_node(
    pair: Pair, place: str, inner: int
) -> None:
    node = pair.nodes[0].namespace
    outer = pair.chosen.outer
    translate(node, outer, outer_address(2, outer))
    sender, address, port = {
        "pod": (pair.nodes[0].pods[9], SERVICE[outer], 53),
        "world": (pair.world, WORLD[1][0 if outer == 4 else 1], NODE_PORT),
        "process": (node, SERVICE[outer], 53),
    }[place]

    def send(text: bytes) -> None:
        send_from(sender, address, port, tunnel_packet(pair.chosen, inner, text))

    assert not pair.arrives(send, inner)


@pytest.mark.parametrize("inner", [4, 6])
@pytest.mark.parametrize("pair", TUNNELS, ids=str, indirect=True)
def test_no_process_without_rights_sends_as_a_tunnel(pair: Pair, inner: int) -> None:
    outer = pair.chosen.outer

    def send(text: bytes) -> None:
        data = tunnel_packet(pair.chosen, inner, text)
        send_from(pair.nodes[0].namespace, outer_address(2, outer), TUNNEL_PORT, data)

    assert not pair.arrives(send, inner)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("how", ["bound", "message", "tcp"])
@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("pair", WAYS, ids=str, indirect=True)
def test_no_process_without_rights_sends_from_the_address_of_a_pod(
    pair: Pair, place: int, how: str, version: int
) -> None:
    """Of a pod of its own node, and of another one's; by a bound socket, by what goes with a message, by a SYN."""
    ends = pod_address(1, version), pod_address(2, version)

    def send(text: bytes) -> None:
        send_from(pair.nodes[place - 1].namespace, ends[1], PORT, text, ends[0], how)

    assert not pair.arrives(send, version)
    assert [
        flow
        for flow in list_conntrack(pair.nodes[1].datapath.maps)
        if flow.source_port == 4000 and flow.protocol == socket.IPPROTO_TCP
    ] == []


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("how", ["bound", "message"])
@pytest.mark.parametrize("pair", WAYS[:1], ids=str, indirect=True)
def test_a_process_sends_from_the_addresses_of_its_node(pair: Pair, how: str, version: int) -> None:
    """The same calls, with an address that it may use."""
    host = pair.nodes[0].namespace
    own = outer_address(1, version)

    def send(text: bytes) -> None:
        send_from(host, pod_address(2, version), PORT, text, own, how)

    # On another CPU the honest one, which comes another way, may overtake it.
    assert any(pair.arrives(send, version) for _ in range(3))


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("pair", [WAYS[0], WAYS[1], WAYS[3]], ids=str, indirect=True)
def test_no_process_without_rights_sends_to_a_pod_from_an_address_that_is_not_its_nodes(
    pair: Pair, place: int
) -> None:
    """Of the world, which a rule may name, or of a service, whose answer a pod may await. IPv4 refuses it by itself."""
    host, target = pair.nodes[place - 1].namespace, pod_address(2, 6)

    def send(text: bytes) -> None:
        for source in (WORLD[2][1], SERVICE[6]):
            for how in ("bound", "message"):
                send_from(host, target, PORT, text, source, how)

    assert not pair.arrives(send, 6)
    send_from(host, target, PORT, b"own", outer_address(place, 6), "message")
    assert pair.listeners[6].recv(100) == b"own"


# A local pod's address that comes from elsewhere

ASKED, ASKING = 9, 10
ETH_P_ALL = 3
OTHER_TABLE = """table inet other {
    chain forwarded {
        type filter hook forward priority 0
        ct state established accept
    }
}"""
"""Has nf_conntrack look at what is forwarded, and so IPv6 put pieces together."""


def attach_asker(node: Node) -> tuple[Namespace, EndpointRecord]:
    """Connect a pod to which nobody may open anything."""
    pod = node.attach(ASKING)
    config = EndpointConfig(identity=70_010, policy_revision=2, deny_ingress=True)
    node.datapath.policy.update_endpoints([(node.records[ASKING], config)])
    return pod, node.records[ASKING]


def frame_to(
    receiver: Namespace, sender: Namespace, device: tuple[str, str], packet: bytes
) -> bytes:
    """Frame a packet from one namespace's device to the other's."""
    [to] = receiver.ip("link", "show", device[0])
    [of] = sender.ip("link", "show", device[1])
    kind = ETH_P_IPV6 if packet[0] >> 4 == 6 else ETH_P_IP
    return ethernet(to["address"], of["address"], kind, packet)


def send_frame(namespace: Namespace, device: str, frame: bytes) -> None:
    """Put a frame on a wire."""
    with netns.namespace(namespace.fd.fileno()):
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    with wire:
        wire.bind((device, 0))
        wire.send(frame)


def set_loose(node: Namespace) -> None:
    """Let the kernel's own check of sources accept everything, as many distributions do."""
    for device in ("all", "under", "out"):
        node.run("sysctl", "-qw", f"net.ipv4.conf.{device}.rp_filter=0")


def cut(source: str, destination: str, segment: Segment, pieces: int) -> list[bytes]:
    """Make a packet, in one piece or in two."""
    make = ipv6 if ":" in source else ipv4
    whole = make(source, destination, segment)
    if pieces == 1:
        return [whole]
    body, half = whole[40 if ":" in source else 20 :], 512
    first, rest = Segment(segment.protocol, body[:half]), Segment(segment.protocol, body[half:])
    if ":" in source:
        headers = (fragment_header(0, more=True), fragment_header(half, more=False))
        return [
            ipv6(source, destination, piece, extensions=[(socket.IPPROTO_FRAGMENT, header)])
            for piece, header in zip((first, rest), headers, strict=True)
        ]
    return [
        ipv4(source, destination, piece, fragment=field)
        for piece, field in ((first, MORE_FRAGMENTS), (rest, half // 8))
    ]


@contextlib.contextmanager
def watching(namespace: Namespace) -> Iterator[None]:
    """Look at every frame, as tcpdump does: what somebody else holds the kernel cuts into copies."""
    with netns.namespace(namespace.fd.fileno()):
        watcher = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    with watcher:
        yield


@pytest.mark.parametrize("has_table", [True, False], ids=["table", "flushed"])
@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("place", ["node", "world"])
@pytest.mark.parametrize("pair", WAYS, ids=str, indirect=True)
def test_nobody_answers_in_the_place_of_a_local_pod(
    pair: Pair, place: str, version: int, has_table: bool
) -> None:
    """Where the sender is another machine of the underlay, and where it is behind another device of the node.

    Pieces that the stack puts together for another table, and cuts again, may not say by which device they came.
    """
    node = pair.nodes[0]
    set_loose(node.namespace)
    asker, record = attach_asker(node)
    server, client = pod_address(1, version), record.ipv4 if version == 4 else record.ipv6
    if not has_table:
        node.namespace.run("nft", f"flush ruleset\n{OTHER_TABLE}")
    segment = udp(PORT, 4000, b"forged".ljust(1000))
    forged = [packet for pieces in (1, 2) for packet in cut(server, client, segment, pieces)]
    attacker, devices = {
        "node": (pair.nodes[1].namespace, ("under", "under")),
        "world": (pair.world, ("out", "eth0")),
    }[place]
    with (
        open_socket(node.pods[ASKED], server, socket.SOCK_DGRAM) as asked,
        open_socket(asker, client, socket.SOCK_DGRAM) as asking,
        watching(node.namespace),
    ):
        asked.bind((server, PORT))
        asking.bind((client, 4000))
        for pod in (asked, asking):
            pod.settimeout(DEADLINE_S)
        asking.sendto(b"question", (server, PORT))
        assert asked.recv(100) == b"question"
        for piece in forged:
            send_frame(attacker, devices[1], frame_to(node.namespace, attacker, devices, piece))
        ask_past(attacker, node, version)
        asked.sendto(b"honest", (client, 4000))
        assert asking.recv(100) == b"honest"


def ask_past(attacker: Namespace, node: Node, version: int) -> None:
    """Wait until the node has dealt with what the attacker sent before: one wire, one order."""
    at_world = "eth0" in attacker.run("ip", "-br", "link")
    address = WORLD[1][version == 6] if at_world else outer_address(1, version)
    assert pings(attacker, address)


def tunnel_frame(pair: Pair, inner: bytes, vni: int, flags: int) -> bytes:
    """Make a frame of the first node's to the second one, as only root of the first one can send it."""
    outer = pair.chosen.outer
    one, other = (node.namespace for node in pair.nodes)
    kind = ETH_P_IPV6 if inner[0] >> 4 == 6 else ETH_P_IP
    inside = ethernet(mac(2), mac(1), kind, inner)
    payload = struct.pack("!BBHI", flags, 0, 7 * (flags != PLAIN_VXLAN), vni << 8) + inside
    make = ipv4 if outer == 4 else ipv6
    whole = make(outer_address(1, outer), outer_address(2, outer), udp(4000, TUNNEL_PORT, payload))
    return frame_to(other, one, ("under", "under"), whole)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize(
    "pair", [Way2(Way.TUNNEL), Way2(Way.TUNNEL, outer=6)], ids=str, indirect=True
)
def test_root_of_a_node_speaks_through_the_tunnel_for_its_own_pods_alone(
    pair: Pair, version: int
) -> None:
    """Flags of VXLAN that would set a mark here, or move a checksum, make the packet unreadable."""
    make = ipv4 if version == 4 else ipv6
    target = pod_address(2, version)
    sender = pair.nodes[0].namespace

    def send(source: str, text: bytes, vni: int = 70_001, flags: int = PLAIN_VXLAN) -> None:
        inner = make(source, target, udp(4000, PORT, text))
        send_frame(sender, "under", tunnel_frame(pair, inner, vni, flags))

    own = pod_address(1, version)
    for source in (pod_address(3, version), target, outer_address(2, version), SERVICE[version]):
        send(source, b"forged")
    for vni in (0, 1, 3, 255):
        send(own, b"forged", vni)
    for flags in (0x88, 0x28, 0x0C, 0x09):
        send(own, b"forged", flags=flags)
    send(own, b"honest")
    assert pair.heard(version, b"honest") == [b"honest"]


# Honest packets that look a little like forged ones


@pytest.mark.parametrize("pair", WAYS, ids=str, indirect=True)
def test_pods_and_hosts_reach_each_other_and_themselves(pair: Pair) -> None:
    for one, other in ((0, 1), (1, 0)):
        node, number = pair.nodes[one], pair.nodes[other].number
        for target in (pod_address(number, 4), pod_address(number, 6)):
            assert pings(node.pods[9], target, "-s", "20000")
            assert pings(node.namespace, target)
        for own in facts(node.number)[2] if pair.chosen.way is Way.TUNNEL else ():
            assert pings(node.namespace, own), "the host and its own tunnel address"
            assert pings(node.pods[9], own)


@pytest.mark.parametrize("pair", WAYS, ids=str, indirect=True)
def test_a_pod_whose_address_is_of_another_nodes_range_is_reached_and_reaches(pair: Pair) -> None:
    guest = pair.nodes[0].attach(77, block=2)
    plan = plan_for(2, 1, pair.chosen)
    addresses = [pair.nodes[0].records[77].ipv4, pair.nodes[0].records[77].ipv6]
    singles = [ipaddress.ip_network(text) for text in addresses]
    routes = [
        replace(route, destination=single)
        for route, single in zip(plan.routes, singles, strict=True)
    ]
    prefix = plan.prefixes[plan.routes[0].destination]
    more = {single: replace(prefix, identity=IdentityId(70_077)) for single in singles}
    pair.nodes[1].apply(
        replace(plan, routes=(*plan.routes, *routes), prefixes={**plan.prefixes, **more})
    )
    for address, own in zip(addresses, (pod_address(2, 4), pod_address(2, 6)), strict=True):
        assert pings(guest, own)
        assert pings(pair.nodes[1].pods[9], address)
        assert pings(pair.nodes[1].namespace, address)
        assert pings(guest, outer_address(2, 6 if ":" in own else 4))


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("pair", [Way2(Way.TUNNEL)], ids=str, indirect=True)
def test_a_service_leads_to_local_pods_and_back_to_the_pod_itself(pair: Pair, version: int) -> None:
    """Through the stack, which translates the destination, and for the pod itself the source, too."""
    node = pair.nodes[0]
    node.attach(ASKING)
    translate(
        node.namespace, version, pod_address(1, version), back_end_port=PORT, masquerades=False
    )
    for number in (ASKED, ASKING):
        with (
            open_socket(
                node.pods[ASKED], "::" if version == 6 else "0", socket.SOCK_DGRAM
            ) as server,
            open_socket(node.pods[number], SERVICE[version], socket.SOCK_DGRAM) as client,
        ):
            server.bind((pod_address(1, version), PORT))
            for pod in (server, client):
                pod.settimeout(DEADLINE_S)
            client.connect((SERVICE[version], 53))
            client.send(b"question")
            text, peer = server.recvfrom(100)
            server.sendto(b"answer to " + text, peer)
            assert client.recv(100) == b"answer to question"


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("pair", TUNNELS, ids=str, indirect=True)
def test_a_pod_may_serve_at_the_port_that_nodes_have_for_tunnels(pair: Pair, version: int) -> None:
    for sender in (pair.nodes[0].namespace, pair.nodes[1].namespace):
        with (
            open_socket(
                pair.nodes[1].pods[9], pod_address(2, version), socket.SOCK_DGRAM
            ) as server,
            open_socket(sender, pod_address(2, version), socket.SOCK_DGRAM) as client,
        ):
            server.bind((pod_address(2, version), TUNNEL_PORT))
            server.settimeout(DEADLINE_S)
            client.sendto(b"question", (pod_address(2, version), TUNNEL_PORT))
            assert server.recv(100) == b"question"
