"""Frames as somebody forges them who may send any: from a pod, from another node by the tunnel or natively.

Each table is of attacks alone; beside it a packet of the same kind passes that differs in what is forged.
"""

import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pytest

from podwire.datapath.abi import (
    MARK_JUDGED,
    MARK_POD_PIECE,
    Action,
    ConfigFlags,
    DropReason,
    Hook,
    Identity,
    IpcacheFlags,
)
from podwire.model import policy
from podwire.model.policy import PolicyEntry, PolicyKey, Verdict
from tests.packet import frames, netdev, overlay
from tests.packet.frames import (
    ACK,
    AH,
    BROADCAST,
    DESTINATION,
    ETH_P_ARP,
    ETH_P_IP,
    ETH_P_IPV6,
    FIN,
    FRAGMENT,
    MORE_FRAGMENTS,
    ROUTING,
    RST,
    SYN,
    Segment,
    arp,
    echo,
    ethernet,
    extension,
    fragment_header,
    icmp,
    icmpv6,
    ipv4,
    ipv6,
    neighbour,
    raw,
    sctp,
    tcp,
    udp,
    vlan,
)
from tests.packet.live import live_pods
from tests.packet.overlay import FAR, FAR_6, Remote, packet, write_node, write_prefix
from tests.packet.rig import (
    ALLOW,
    GATEWAY_4,
    GATEWAY_6,
    GSO_BY_FRAGMENTS,
    NODE_4,
    NODE_6,
    OUTSIDE,
    TUNNEL,
    TUNNEL_MARK,
    TUNNEL_PORT,
    WORLD_4,
    WORLD_6,
    A,
    B,
    Outcome,
    Rig,
)
from tests.packet.services import VIP_4, VIP_6, offer, turn_on, vip
from tests.packet.test_live import eventually, passed

pytestmark = pytest.mark.packet

BOTH: Final = ConfigFlags.DENY_EGRESS | ConfigFlags.DENY_INGRESS
PASSES: Final = {Action.STACK, Action.PEER, Action.EGRESS, Action.TUNNEL, Action.NATIVE}
NEAR: Final = Remote(24, "192.0.2.24", 70024)
"""A node that is reached natively."""
SERVICE_PORT: Final = 80
NO_DEVICE_OF_OURS: Final = TUNNEL + 1


@pytest.fixture(autouse=True)
def _connected(rig: Rig) -> None:
    """Give the node a tunnel, a native neighbour and a service. A may open TCP to port 80; nobody may open anything to
    A, not even the host.
    """
    overlay.connect(rig)
    write_node(rig, NEAR)
    for version in (4, 6):
        write_prefix(rig, NEAR.pod(version), NEAR.identity, NEAR.number, netdev.DIRECT, 1500)
        own = NEAR.number, IpcacheFlags.NATIVE | IpcacheFlags.NODE_ADDRESS, 1500
        write_prefix(rig, NEAR.address(version), Identity.REMOTE_NODE, *own)
        for protocol, service in ((frames.TCP, 7), (frames.UDP, 8)):
            ends = [(FAR.pod(version), 8080)]
            offer(rig, vip(version), ends, protocol=protocol, service=service, first=100 * service)
    rig.write_settings(tunnel_ifindex=TUNNEL, native_ifindex=OUTSIDE)
    turn_on(rig)
    rig.change(A, slot=1, flags=ConfigFlags.OPEN | BOTH)
    for port in (SERVICE_PORT, 8080):
        key = PolicyKey(0, policy.Direction.EGRESS, frames.TCP, port, 16)
        rig.rule(1, key, PolicyEntry(Verdict.ALLOW, 1, 41))


DESTINATIONS: Final[dict[str, Callable[[int], str]]] = {
    "local": B.address,
    "tunnel": FAR.pod,
    "native": NEAR.pod,
    "host": lambda version: NODE_4 if version == 4 else NODE_6,
    "world": lambda version: WORLD_4 if version == 4 else WORLD_6,
    "service": vip,
}
FLAGS: Final = {
    "syn-fin": SYN | FIN,
    "syn": SYN,
    "syn-ack": SYN | ACK,
    "syn-rst": SYN | RST,
    "null": 0,
    "xmas": 0x29,
    "ack": ACK,
    "rst": RST,
}
OPENING: Final = ("syn-fin", "syn", "syn-rst")
PORTLESS: Final = (2, 4, 41, 47, 50, 112, 135, 137, 255)
PORTS: Final = struct.pack("!HH", 4000, SERVICE_PORT)


def forged_segments(version: int, from_80: Iterable[str] = FLAGS) -> dict[str, Segment]:
    """Give what a pod may not send whose policy allows TCP to port 80; `from_80`: what it sends from there."""
    found = {f"protocol {protocol}": raw(protocol, PORTS + bytes(36)) for protocol in PORTLESS}
    found |= {f"{name} from 80": tcp(SERVICE_PORT, 22, FLAGS[name]) for name in from_80}
    found |= {f"{name} from 4000": tcp(4000, 22, flags) for name, flags in FLAGS.items()}
    found["udp"] = udp(4000, SERVICE_PORT)
    found["udp-lite"] = raw(136, udp(4000, SERVICE_PORT).data)
    found["sctp"] = sctp(4000, SERVICE_PORT)
    found["to the tunnel"] = udp(4000, TUNNEL_PORT)
    found["echo"] = echo(version, 80)
    found["echo reply"] = echo(version, 80, reply=True)
    found["error without a flow"] = (
        icmp(3, 3, 0, ipv4(B.ipv4, A.ipv4, tcp(80, 4000, ACK)))
        if version == 4
        else icmpv6(1, 4, 0, ipv6(B.ipv6, A.ipv6, tcp(80, 4000, ACK)))
    )
    return found


@pytest.mark.parametrize("version", [4, 6])
def test_a_pod_sends_no_more_than_its_policy_allows(rig: Rig, version: int) -> None:
    segments = forged_segments(version)
    for where, address in DESTINATIONS.items():
        ends = A.address(version), address(version)
        passed_by = [
            name
            for name, segment in segments.items()
            if rig.sent(A, packet(*ends, segment)).action in PASSES
        ]
        assert not passed_by, where
        assert not rig.entries(A)
        assert rig.sent(A, packet(*ends, tcp(4000, SERVICE_PORT, SYN))).action in PASSES
        rig.forget(A)


def headers_in_front(inside: str) -> dict[str, bytes]:
    """Give TCP to port 80 behind headers that would lead it elsewhere, or hide another port."""
    segment = tcp(4000, SERVICE_PORT, SYN)
    hop = socket.inet_pton(socket.AF_INET6, inside)
    routes = {
        f"routing {kind}": (ROUTING, bytes([0, 2, kind, 1]) + bytes(4) + hop)
        for kind in (0, 2, 3, 4)
    }
    later = (FRAGMENT, fragment_header(8, more=False, identification=99))
    found = {**{name: [one] for name, one in routes.items()}}
    found["routing behind options"] = [(DESTINATION, extension()), routes["routing 4"]]
    found["routing behind a fragment header"] = [
        (FRAGMENT, fragment_header(0, more=False)),
        routes["routing 0"],
    ]
    found["a later fragment alone"] = [later]
    found["two fragment headers"] = [(FRAGMENT, fragment_header(0, more=True)), later]
    found["options twice"] = [(0, extension()), (0, extension())]
    found["authentication beyond the end"] = [(AH, bytes([0, 255]) + bytes(10))]
    return {name: ipv6(A.ipv6, B.ipv6, segment, extensions=ones) for name, ones in found.items()}


def test_no_header_in_front_leads_a_packet_elsewhere(rig: Rig) -> None:
    control = ipv6(
        A.ipv6, B.ipv6, tcp(4000, SERVICE_PORT, SYN), extensions=[(DESTINATION, extension())]
    )
    assert rig.sent(A, control).action == Action.PEER
    passed_by = [
        name
        for name, one in headers_in_front(FAR.pod(6)).items()
        if rig.sent(A, one).action in PASSES
    ]
    assert not passed_by


SOURCES: Final = {
    4: (
        *("0.0.0.0", "127.0.0.1", "255.255.255.255", "224.0.0.1", "10.7.0.1", "10.7.0.0"),
        *(GATEWAY_4, B.ipv4, NODE_4, FAR.pod(4), NEAR.pod(4), FAR.outer, VIP_4, WORLD_4),
    ),
    6: (
        *("::", "::1", "fe80::2", "ff02::1", "fd07::", "64:ff9b::10.7.0.10", "2002:a07:a::1"),
        *(f"::ffff:{A.ipv4}", GATEWAY_6, B.ipv6, NODE_6, FAR.pod(6), NEAR.pod(6), VIP_6, WORLD_6),
    ),
}


@pytest.mark.parametrize("version", [4, 6])
def test_a_pod_has_no_other_source(rig: Rig, version: int) -> None:
    segment = tcp(4000, SERVICE_PORT, SYN)
    for where, address in DESTINATIONS.items():
        target = address(version)
        passed_by = [
            source
            for source in SOURCES[version]
            if rig.sent(A, packet(source, target, segment)).action in PASSES
        ]
        assert not passed_by, where
        assert rig.sent(A, packet(A.address(version), target, segment)).action in PASSES


INSIDE: Final = ipv4(A.ipv4, B.ipv4, tcp(4000, SERVICE_PORT, SYN))
ETHERTYPES: Final = (0x0001, 0x0805, 0x6558, 0x8035, 0x8847, 0x8848, 0x8863, 0x8864, 0x88A8)
MORE_ETHERTYPES: Final = (0x88CC, 0x888E, 0x88E5, 0x88F7, 0x9100)


def forged_links() -> Iterator[tuple[str, bytes]]:
    """Give what is no packet of A to its gateway, whatever is inside."""
    for ethertype in (*ETHERTYPES, *MORE_ETHERTYPES):
        for target in (A.host_mac, BROADCAST):
            shim = struct.pack("!I", 0x00010140)
            yield f"{ethertype:#x}", ethernet(target, A.pod_mac, ethertype, shim + INSIDE)
    whole = A.frame(INSIDE)
    yield "tag", vlan(whole, 5)
    yield "two tags", vlan(vlan(whole, 5), 5)
    for link in (b"\xaa\xaa\x03\0\0\0\x08\0", b"\x42\x42\x03"):
        head = frames.mac(A.host_mac) + frames.mac(A.pod_mac)
        yield "a length", head + struct.pack("!H", len(link + INSIDE)) + link + INSIDE
    yield "the other version", ethernet(A.host_mac, A.pod_mac, ETH_P_IPV6, INSIDE + bytes(20))
    six = ipv6(A.ipv6, B.ipv6, tcp(4000, SERVICE_PORT, SYN))
    yield "the other version, 6", ethernet(A.host_mac, A.pod_mac, ETH_P_IP, six)
    yield "to a pod's MAC", A.frame(INSIDE, destination=B.pod_mac)
    yield "from a pod's MAC", A.frame(INSIDE, source=B.pod_mac)


def forged_neighbours() -> Iterator[tuple[str, bytes]]:
    """Give what tells others of a new neighbour, router or group."""
    for who in (B.ipv6, GATEWAY_6, FAR.pod(6), NODE_6):
        told = neighbour(136, who, option_mac=A.pod_mac, option=2, flags=0x60)
        for target in ("ff02::1", B.ipv6, FAR.pod(6), NODE_6):
            yield f"{who} to {target}", A.frame(ipv6(A.ipv6, target, told, hop_limit=255))
    for kind in (134, 137, 143, 139):
        for target in ("ff02::1", B.ipv6, NODE_6):
            segment = icmpv6(kind, 0, 0, bytes(32))
            yield f"{kind} to {target}", A.frame(ipv6(A.ipv6, target, segment, hop_limit=255))
    for operation in (1, 2, 3, 4, 8, 9):
        for who in (GATEWAY_4, B.ipv4):
            body = arp(operation, A.pod_mac, who, B.ipv4)
            yield f"arp {operation}", ethernet(BROADCAST, A.pod_mac, ETH_P_ARP, body)


@pytest.mark.parametrize("table", [forged_links, forged_neighbours], ids=["links", "neighbours"])
def test_nothing_but_packets_leaves_a_pod(
    rig: Rig, table: Callable[[], Iterator[tuple[str, bytes]]]
) -> None:
    passed_by = [
        name for name, one in table() if rig.run("from_pod", A.ifindex, one).action in PASSES
    ]
    assert not passed_by
    assert rig.run("from_pod", A.ifindex, A.frame(INSIDE)).action == Action.PEER


# What a later piece may do to a judged first one.

ALLOWED: Final = tcp(4000, SERVICE_PORT, SYN, bytes(44)).data
EVIL: Final = tcp(4000, 22, SYN, bytes(44)).data


def piece(version: int, data: bytes, at: int, *, more: bool, number: int, to: str) -> bytes:
    """Make a fragment of TCP of A's."""
    segment = raw(frames.TCP, data)
    if version == 4:
        field = at // 8 | (MORE_FRAGMENTS if more else 0)
        return ipv4(A.ipv4, to, segment, fragment=field, identification=number)
    header = (FRAGMENT, fragment_header(at, more=more, identification=number))
    return ipv6(A.ipv6, to, segment, extensions=[header])


def forged_pieces(version: int, to: str) -> dict[str, tuple[int, Sequence[bytes]]]:
    """Give pieces of packets, and how many of them, the first ones, pass."""

    def one(number: int, data: bytes, at: int, *, more: bool = False) -> bytes:
        return piece(version, data, at, more=more, number=number, to=to)

    def first(number: int) -> bytes:
        return one(number, ALLOWED, 0, more=True)

    return {
        "as they should be": (2, [first(1), one(1, bytes(64), 64)]),
        "over the ports": (1, [first(2), one(2, EVIL[8:], 8)]),
        "over the flags": (1, [first(3), one(3, EVIL[16:], 16)]),
        "a denied first one": (0, [one(4, EVIL, 0, more=True), one(4, bytes(64), 64)]),
        "two first ones": (1, [first(5), one(5, EVIL, 0, more=True), one(5, bytes(8), 64)]),
        "half a header": (0, [one(6, ALLOWED[:16], 0, more=True), one(6, EVIL[16:], 16)]),
        "of another packet": (1, [first(7), one(8, bytes(64), 64)]),
        "the later one first": (0, [one(9, bytes(64), 64), one(9, EVIL, 0, more=True)]),
    }


@pytest.mark.parametrize("version", [4, 6])
def test_no_piece_changes_what_was_judged(rig: Rig, version: int) -> None:
    for where in ("local", "tunnel", "native", "world", "service"):
        for name, (passing, pieces) in forged_pieces(version, DESTINATIONS[where](version)).items():
            outcomes = [rig.sent(A, piece).action in PASSES for piece in pieces]
            assert outcomes == [at < passing for at in range(len(pieces))], (where, name)


# A pod that leaves cutting to a device says into which sizes.


@pytest.mark.parametrize("version", [4, 6])
def test_no_size_of_segments_hides_a_port(rig: Rig, version: int) -> None:
    ends = A.address(version), B.address(version)
    for size in (1, 8, 100, 1400, 9000, GSO_BY_FRAGMENTS):
        for dport, allowed in ((22, False), (SERVICE_PORT, size != 9000)):
            segment = tcp(4000, dport, SYN, bytes(1200))
            outcome = rig.sent(A, packet(*ends, segment), gso_size=size, gso_segs=2)
            assert (outcome.action in PASSES) == allowed, (size, dport)


# From another node.


@dataclass(frozen=True)
class Way:
    """How a packet of another node comes to A."""

    name: str
    peer: Remote
    send: Callable[[Rig, bytes], Outcome]


def natively(rig: Rig, inner: bytes) -> Outcome:
    """Let a packet come in past the stack, or else by it."""
    outcome = netdev.arrive(rig, inner)
    if outcome.retval != netdev.TC_ACT_UNSPEC:
        return outcome
    return rig.received(A, inner, ingress_ifindex=OUTSIDE)


COMING: Final = (
    Way("tunnel", FAR, overlay.arrive),
    Way("native", NEAR, natively),
)


def arriving(version: int, peer: Remote) -> dict[str, Segment]:
    """Give what a node may not bring into a pod that nobody may speak to, whatever that pod has open."""
    errors = (3, 4, 11, 12) if version == 4 else (1, 2, 3, 4)
    make = icmp if version == 4 else icmpv6
    quotes = {
        name: packet(source, target, tcp(4000, SERVICE_PORT, ACK))
        for name, source, target in (
            ("the pod's service", A.address(version), vip(version)),
            ("another pod's flow", B.address(version), peer.pod(version)),
            ("what stayed here", A.address(version), B.address(version)),
        )
    }
    # What opens nothing, and comes from a port that the pod may reach, is judged as an answer (docs/limits.md).
    found = forged_segments(version, OPENING)
    for name, quote in quotes.items():
        for kind in errors:
            found[f"error {kind} about {name}"] = make(kind, 0, 0, quote[:80])
    if version == 4:
        found["redirect"] = icmp(5, 1, 0, quotes["what stayed here"][:28])
    else:
        found["redirect"] = icmpv6(137, 0, 0, bytes(32))
        found["advertisement"] = neighbour(136, GATEWAY_6, option_mac=peer.mac, option=2)
    return found


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("way", COMING, ids=lambda way: way.name)
def test_a_node_brings_into_a_closed_pod_what_was_asked_for_alone(
    rig: Rig, way: Way, version: int
) -> None:
    ends = A.address(version), way.peer.pod(version)
    for target in (ends[1], vip(version), B.address(version)):
        sent = packet(ends[0], target, tcp(4000, SERVICE_PORT, SYN))
        assert rig.sent(A, sent).action in PASSES
    passed_by = [
        name
        for name, segment in arriving(version, way.peer).items()
        if way.send(rig, packet(*ends[::-1], segment)).action in PASSES
    ]
    assert not passed_by
    answer = packet(*ends[::-1], tcp(SERVICE_PORT, 4000, SYN | ACK))
    assert way.send(rig, answer).action in PASSES


# Marks


MARKS: Final = (MARK_JUDGED, MARK_POD_PIECE, TUNNEL_MARK)


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("version", [4, 6])
def test_no_mark_that_a_device_of_others_brings_opens_a_pod(
    rig: Rig, version: int, mark: int
) -> None:
    six = ipv6(FAR_6.pod(6), A.ipv6, raw(17, bytes(64)), extensions=[(FRAGMENT, bytes(8))])
    inner = packet(NEAR.pod(version), A.address(version), udp(4000, 53))
    for one in (inner, six) if version == 6 else (inner,):
        for device in (0, NO_DEVICE_OF_OURS):
            assert rig.received(A, one, ingress_ifindex=device, mark=mark).action == Action.DROP
    frame = netdev.frame_of(packet(NEAR.pod(version), A.address(version), tcp(4000, 22, SYN)))
    assert netdev.arrive_frame(rig, frame, mark=mark).reason == DropReason.POLICY
    rig.change(A, revision=2)
    assert (
        rig.received(A, inner, ingress_ifindex=NO_DEVICE_OF_OURS, mark=mark).action == Action.STACK
    )


@pytest.mark.parametrize("version", [4, 6])
def test_a_mark_that_a_pod_sets_stays_with_it(rig: Rig, version: int) -> None:
    """A segment in mid-stream goes by the stack, so that the program at the receiver's device judges it."""
    middle = A.frame(packet(A.address(version), B.address(version), tcp(4000, 22, ACK)))
    rig.change(A, revision=2)
    closed = rig.change(B, flags=ALLOW | BOTH)
    with live_pods(rig, A, B) as host, host.pods["a"].raw_socket() as packets:
        for count, mark in enumerate(MARKS, 1):
            packets.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
            packets.send(middle)
            wanted = count
            assert eventually(
                lambda: passed(rig, Hook.TO_POD, DropReason.POLICY) == wanted  # noqa: B023
            )
        assert not passed(rig, Hook.TO_POD, DropReason.NONE)
        rig.change(closed, flags=ALLOW, revision=2)
        packets.send(middle)
        assert eventually(lambda: passed(rig, Hook.TO_POD, DropReason.NONE) > 0)
