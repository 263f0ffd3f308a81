"""ICMP errors as a way round policy: a pod that nothing lets out or in quotes a flow that is none of theirs.

Each attack is tried over every way between a pod and its target, in both families, beside what has to pass: the
errors of the peer itself, and of routers and nodes between them.
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from podwire.datapath.abi import Action, ConfigFlags, DropReason, EventKind, Identity, IpcacheFlags
from tests.packet import frames, netdev, overlay
from tests.packet.frames import SYN, Segment, echo, icmp, icmpv6, ipv4, ipv6, tcp, udp
from tests.packet.netdev import DIRECT, TC_ACT_UNSPEC
from tests.packet.overlay import FAR, Remote, write_node, write_prefix
from tests.packet.rig import ALLOW, NODE_4, NODE_6, OUTSIDE, TUNNEL, A, B, Outcome, Rig

pytestmark = [pytest.mark.packet, pytest.mark.parametrize("version", [4, 6])]

CLOSED = ALLOW | ConfigFlags.DENY_EGRESS | ConfigFlags.DENY_INGRESS
NEAR = Remote(24, "192.0.2.24", 70024)
"""A node that is reached natively, past the stack."""
SERVICE = {4: "10.96.0.1", 6: "fd96::1"}
ROUTER = {4: "203.0.113.1", 6: "2001:db8:2::1"}
SERVER = {4: "198.51.100.53", 6: "2001:db8:53::1"}
NODE = {4: NODE_4, 6: NODE_6}
PASSED = (Action.STACK, Action.PEER, Action.TUNNEL, Action.NATIVE)


def packet(source: str, destination: str, segment: Segment) -> bytes:
    build = ipv6 if ":" in source else ipv4
    return build(source, destination, segment)


def unreachable(quoted: bytes) -> Segment:
    """Make a "port unreachable" about a packet."""
    return about(quoted, 3, 3) if quoted[0] >> 4 == 4 else about(quoted, 1, 4)


def unreachable_with(version: int, data: bytes) -> Segment:
    """Make a "port unreachable" with whatever stands in the quote's place."""
    return icmp(3, 3, 0, data) if version == 4 else icmpv6(1, 4, 0, data)


def about(quoted: bytes, kind: int, code: int, rest: int = 0) -> Segment:
    """Make an error about a packet."""
    if quoted[0] >> 4 == 4:
        return icmp(kind, code, rest, quoted[:28])
    return icmpv6(kind, code, rest, quoted[:200])


@pytest.fixture
def world(rig: Rig) -> Rig:
    """The rig with a node behind the tunnel and one that is reached natively; both pods are open."""
    overlay.connect(rig)
    write_node(rig, NEAR)
    for version in (4, 6):
        fields = NEAR.number, DIRECT, netdev.MTU
        write_prefix(rig, NEAR.block(version), Identity.UNMANAGED, *fields)
        write_prefix(rig, NEAR.pod(version), NEAR.identity, *fields)
        own = NEAR.number, IpcacheFlags.NATIVE | IpcacheFlags.NODE_ADDRESS, netdev.MTU
        write_prefix(rig, NEAR.address(version), Identity.REMOTE_NODE, *own)
    rig.write_settings(tunnel_ifindex=TUNNEL, native_ifindex=OUTSIDE)
    return rig


# Who stands where


def natively(rig: Rig, inner: bytes) -> Outcome:
    """Let a packet come in by the underlay: past the stack, or by it where the program leaves it alone."""
    outcome = netdev.arrive(rig, inner)
    if outcome.retval != TC_ACT_UNSPEC:
        return outcome
    return rig.received(A, inner, ingress_ifindex=OUTSIDE)


def by_tunnel(identity: int) -> Callable[[Rig, bytes], Outcome]:
    return lambda rig, inner: overlay.arrive(rig, inner, vni=identity)


@dataclass(frozen=True)
class Place:
    """A sender beside A: its address, and the way by which its packets come to A."""

    name: str
    address: Callable[[int], str]
    send: Callable[[Rig, bytes], Outcome]
    is_pod: bool = False


PLACES = [
    Place("local-pod", B.address, lambda rig, inner: rig.sent(B, inner), True),
    Place(
        "local-pod-by-the-stack",
        B.address,
        lambda rig, inner: rig.received(A, inner, ingress_ifindex=B.ifindex),
        True,
    ),
    Place("tunnelled-pod", FAR.pod, by_tunnel(FAR.identity), True),
    Place("unpublished-pod", FAR.stranger, by_tunnel(70099), True),
    Place("native-pod", NEAR.pod, natively, True),
    Place("unpublished-native-pod", NEAR.stranger, natively, True),
    Place("tunnelled-pod-behind-its-node", FAR.address, by_tunnel(FAR.identity), True),
    Place("tunnelled-node", FAR.address, by_tunnel(Identity.REMOTE_NODE)),
    Place("native-node", NEAR.address, natively),
    Place("world", ROUTER.__getitem__, natively),
]
PODS = [place for place in PLACES if place.is_pod]


def by_name(place: Place) -> str:
    return place.name


# What A has


@dataclass(frozen=True)
class Quoted:
    """A flow of A with somebody: two packets of it, as they crossed A's edge."""

    outwards: bytes
    inwards: bytes


def flow_with_itself(rig: Rig, version: int) -> Quoted:
    own = A.address(version)
    ask, answer = packet(own, own, udp(4000, 53)), packet(own, own, udp(53, 4000))
    assert rig.sent(A, ask).action == Action.PEER
    assert rig.sent(A, answer).action == Action.PEER
    return Quoted(ask, ask)


def probe(rig: Rig, version: int) -> Quoted:
    """Let the host ask A, as a kubelet does."""
    ask = packet(NODE[version], A.address(version), tcp(40000, 8080, SYN))
    answer = packet(A.address(version), NODE[version], tcp(8080, 40000, SYN | frames.ACK))
    assert rig.received(A, ask).action == Action.STACK
    assert rig.sent(A, answer).action == Action.STACK
    return Quoted(answer, ask)


def flow_with_b(rig: Rig, version: int) -> Quoted:
    """Let B ask A, before A was closed."""
    ends = B.address(version), A.address(version)
    ask, answer = packet(*ends, udp(4000, 53)), packet(*ends[::-1], udp(53, 4000))
    rig.change(A, flags=ALLOW)
    assert rig.sent(B, ask).action == Action.PEER
    assert rig.sent(A, answer).action == Action.PEER
    return Quoted(answer, ask)


def flow_with_a_server(rig: Rig, version: int) -> Quoted:
    """Let A ask somebody outside, before it was closed."""
    ends = A.address(version), SERVER[version]
    ask, answer = packet(*ends, udp(4000, 53)), packet(*ends[::-1], udp(53, 4000))
    rig.change(A, flags=ALLOW)
    assert rig.sent(A, ask).action == Action.STACK
    assert rig.received(A, answer, ingress_ifindex=OUTSIDE).action == Action.STACK
    return Quoted(ask, answer)


MakeFlow = Callable[[Rig, int], Quoted]


def flow_by_the_tunnel(rig: Rig, version: int) -> Quoted:
    """Let a pod of another node ask A, before A was closed."""
    ends = FAR.pod(version), A.address(version)
    ask, answer = packet(*ends, udp(4000, 53)), packet(*ends[::-1], udp(53, 4000))
    rig.change(A, flags=ALLOW)
    assert overlay.arrive(rig, ask).action == Action.PEER
    assert rig.sent(A, answer).action == Action.TUNNEL
    return Quoted(answer, ask)


FLOWS: list[MakeFlow] = [flow_with_itself, probe, flow_with_b, flow_with_a_server]


def close_after(rig: Rig, make: MakeFlow, version: int) -> Quoted:
    """Make a flow of A, and close A to everything else."""
    rig.change(A, flags=CLOSED)
    quoted = make(rig, version)
    rig.change(A, flags=CLOSED)
    rig.take_events()
    return quoted


def assert_denied(rig: Rig, outcome: Outcome, *, source: str, destination: str) -> None:
    """Nothing passed, and everybody can see that."""
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.POLICY)
    [told] = [event for event in rig.take_events() if event.kind == EventKind.DROP]
    ends = [ipaddress.ip_address(raw) for raw in (told.saddr, told.daddr)]
    shown = [str(getattr(end, "ipv4_mapped", None) or end) for end in ends]
    assert shown == [source, destination]


# The attacks


@pytest.mark.parametrize("place", PLACES, ids=by_name)
@pytest.mark.parametrize("make", FLOWS, ids=lambda make: make.__name__)
def test_a_closed_pod_says_nothing_by_quoting_what_it_received_from_another(
    world: Rig, version: int, make: MakeFlow, place: Place
) -> None:
    if place.name.startswith("local-pod") and make is flow_with_b:
        return  # that is the peer
    quoted = close_after(world, make, version)
    ends = A.address(version), place.address(version)
    for packet_quoted in {quoted.inwards, quoted.outwards}:
        outcome = world.sent(A, packet(*ends, unreachable(packet_quoted)))
        assert_denied(world, outcome, source=ends[0], destination=ends[1])


@pytest.mark.parametrize("place", PLACES, ids=by_name)
@pytest.mark.parametrize(
    "make", [flow_with_itself, probe, flow_with_b], ids=lambda make: make.__name__
)
def test_nobody_reaches_a_closed_pod_by_quoting_what_stays_on_its_node(
    world: Rig, version: int, make: MakeFlow, place: Place
) -> None:
    """No router is ever concerned with it, and no other pod."""
    if place.name.startswith("local-pod") and make is flow_with_b:
        return
    quoted = close_after(world, make, version)
    ends = place.address(version), A.address(version)
    outcome = place.send(world, packet(*ends, unreachable(quoted.outwards)))
    assert_denied(world, outcome, source=ends[0], destination=ends[1])


@pytest.mark.parametrize("place", PLACES, ids=by_name)
def test_what_goes_through_the_tunnel_is_quoted_by_who_sends_through_it(
    world: Rig, version: int, place: Place
) -> None:
    quoted = close_after(world, flow_by_the_tunnel, version)
    ends = place.address(version), A.address(version)
    outcome = place.send(world, packet(*ends, unreachable(quoted.outwards)))
    if place.name in ("tunnelled-pod", "tunnelled-node"):
        assert outcome.action == Action.PEER
    else:
        assert_denied(world, outcome, source=ends[0], destination=ends[1])


@pytest.mark.parametrize("place", PODS, ids=by_name)
def test_no_pod_reaches_a_closed_one_by_quoting_a_flow_with_another(
    world: Rig, version: int, place: Place
) -> None:
    quoted = close_after(world, flow_with_a_server, version)
    ends = place.address(version), A.address(version)
    outcome = place.send(world, packet(*ends, unreachable(quoted.outwards)))
    assert_denied(world, outcome, source=ends[0], destination=ends[1])


@pytest.mark.parametrize("place", PLACES, ids=by_name)
def test_nobody_reaches_a_closed_pod_by_quoting_what_another_sent(
    world: Rig, version: int, place: Place
) -> None:
    """B's flow is none of A's, whoever the error is sent to."""
    sent = packet(B.address(version), SERVER[version], udp(4000, 53))
    assert world.sent(B, sent).action == Action.STACK
    world.change(A, flags=CLOSED)
    world.take_events()
    ends = place.address(version), A.address(version)
    outcome = place.send(world, packet(*ends, unreachable(sent)))
    assert_denied(world, outcome, source=ends[0], destination=ends[1])


def inside_an_error(quoted: bytes, peer: str, own: str) -> Segment:
    """Quote an error about what was sent."""
    return unreachable(packet(peer, own, unreachable(quoted)))


@pytest.mark.parametrize("place", PLACES, ids=by_name)
def test_an_error_about_an_error_belongs_to_nothing(world: Rig, version: int, place: Place) -> None:
    quoted = close_after(world, flow_with_a_server, version)
    ends = place.address(version), A.address(version)
    segment = inside_an_error(quoted.outwards, A.address(version), SERVER[version])
    outcome = place.send(world, packet(*ends, segment))
    assert_denied(world, outcome, source=ends[0], destination=ends[1])
    outwards = inside_an_error(quoted.inwards, SERVER[version], A.address(version))
    ends = A.address(version), SERVER[version]
    assert_denied(
        world, world.sent(A, packet(*ends, outwards)), source=ends[0], destination=ends[1]
    )


@pytest.mark.parametrize("transport_bytes", [None, 0, 7])
def test_a_quote_behind_the_end_of_the_packet_counts_for_nothing(
    world: Rig, version: int, transport_bytes: int | None
) -> None:
    """A frame may be longer than its packet; the pod's stack cuts off what is too much."""
    quoted = close_after(world, flow_with_a_server, version).outwards
    ends = SERVER[version], A.address(version)
    header_bytes = 20 if version == 4 else 40
    cut = 0 if transport_bytes is None else header_bytes + transport_bytes
    short = packet(*ends, unreachable_with(version, quoted[:cut]))
    forged = short + quoted[cut:]
    outcome = world.received(A, forged, ingress_ifindex=OUTSIDE)
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.POLICY)
    whole = packet(*ends, unreachable_with(version, quoted))
    assert world.received(A, whole, ingress_ifindex=OUTSIDE).action == Action.STACK


def redirect(quoted: bytes) -> Segment:
    """Make a redirect of IPv4 for a packet, or one of IPv6 (RFC 4861 4.5) with its options."""
    if quoted[0] >> 4 == 4:
        return about(quoted, 5, 1, int(ipaddress.IPv4Address(ROUTER[4])))
    option = bytes([4, 1 + len(quoted) // 8]) + bytes(6) + quoted
    addresses = ipaddress.IPv6Address(ROUTER[6]).packed + ipaddress.IPv6Address(SERVER[6]).packed
    return icmpv6(137, 0, 0, addresses + option)


@pytest.mark.parametrize("place", PLACES, ids=by_name)
@pytest.mark.parametrize("flags", [ALLOW, CLOSED], ids=["open", "closed"])
def test_redirects_are_refused(world: Rig, version: int, place: Place, flags: ConfigFlags) -> None:
    quoted = close_after(world, flow_with_a_server, version)
    world.change(A, flags=flags)
    inwards = packet(place.address(version), A.address(version), redirect(quoted.outwards))
    outwards = packet(A.address(version), place.address(version), redirect(quoted.inwards))
    reason = DropReason.REDIRECT if version == 4 else DropReason.NEIGHBOUR
    for outcome in (place.send(world, inwards), world.sent(A, outwards)):
        assert (outcome.action, outcome.reason) == (Action.DROP, reason)


@pytest.mark.parametrize("end", ["source", "destination", "both"])
def test_a_quote_with_ipv4_in_the_place_of_ipv6_is_refused(
    world: Rig, version: int, end: str
) -> None:
    """It would be found among the flows of the other family."""
    quoted = close_after(world, flow_with_a_server, 4)
    mapped = [
        f"::ffff:{one}" if end in (name, "both") else other
        for name, one, other in (
            ("source", A.ipv4, A.ipv6),
            ("destination", SERVER[4], SERVER[6]),
        )
    ]
    assert len(quoted.outwards) > 0
    sent = ipv6(mapped[0], mapped[1], udp(4000, 53))
    came = ipv6(mapped[1], mapped[0], udp(53, 4000))
    for flags in (CLOSED, ALLOW):
        world.change(A, flags=flags)
        inwards = ipv6(ROUTER[6], A.ipv6, unreachable(sent))
        outwards = ipv6(A.ipv6, SERVER[6], unreachable(came))
        for outcome in (
            world.received(A, inwards, ingress_ifindex=OUTSIDE),
            world.sent(A, outwards),
        ):
            assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.HEADER)
    assert version in (4, 6)


# What has to pass


KINDS = {
    "refused": ((3, 3, 0), (1, 4, 0)),
    "too-big": ((3, 4, 1280), (2, 0, 1280)),
    "expired": ((11, 0, 0), (3, 0, 0)),
}
SEGMENTS: dict[str, Callable[[int], Segment]] = {
    "udp": lambda _: udp(4000, 53),
    "tcp": lambda _: tcp(4000, 53, SYN),
    "echo": lambda version: echo(version, 9),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
segments = pytest.mark.parametrize("segment", SEGMENTS.values(), ids=SEGMENTS)


@kinds
@segments
@pytest.mark.parametrize("place", PLACES, ids=by_name)
def test_the_peers_own_error_about_what_a_pod_sent_reaches_it(
    world: Rig,
    version: int,
    place: Place,
    segment: Callable[[int], Segment],
    kind: tuple[tuple[int, int, int], ...],
) -> None:
    ends = A.address(version), place.address(version)
    sent = packet(*ends, segment(version))
    assert world.sent(A, sent).action in PASSED
    world.change(A, flags=CLOSED)
    error = packet(*ends[::-1], about(sent, *kind[version == 6]))
    assert place.send(world, error).action in PASSED


@kinds
@segments
@pytest.mark.parametrize("place", PLACES, ids=by_name)
def test_a_pods_own_error_about_what_it_received_goes_to_who_sent_it(
    world: Rig,
    version: int,
    place: Place,
    segment: Callable[[int], Segment],
    kind: tuple[tuple[int, int, int], ...],
) -> None:
    ends = place.address(version), A.address(version)
    came = packet(*ends, segment(version))
    assert place.send(world, came).action in PASSED
    world.change(A, flags=CLOSED)
    error = packet(*ends[::-1], about(came, *kind[version == 6]))
    assert world.sent(A, error).action in PASSED


@dataclass(frozen=True)
class Between:
    """Somebody between A and its peer, who may speak of what they exchange."""

    name: str
    peer: Callable[[int], str]
    address: Callable[[int], str]
    send: Callable[[Rig, bytes], Outcome]


def as_the_host(rig: Rig, inner: bytes) -> Outcome:
    return rig.received(A, inner)


BETWEEN = [
    Between("router-to-the-world", SERVER.__getitem__, ROUTER.__getitem__, natively),
    Between("own-node-to-the-world", SERVER.__getitem__, NODE.__getitem__, as_the_host),
    Between("own-node-to-a-local-pod", B.address, NODE.__getitem__, as_the_host),
    Between("own-node-to-the-tunnel", FAR.pod, NODE.__getitem__, as_the_host),
    Between("node-behind-the-tunnel", FAR.pod, FAR.address, by_tunnel(Identity.REMOTE_NODE)),
    Between("node-reached-natively", NEAR.pod, NEAR.address, natively),
    Between("router-to-a-native-pod", NEAR.pod, ROUTER.__getitem__, natively),
    Between("own-node-to-a-native-pod", NEAR.pod, NODE.__getitem__, as_the_host),
]


@kinds
@segments
@pytest.mark.parametrize("between", BETWEEN, ids=lambda one: one.name)
@pytest.mark.parametrize("asked", [True, False], ids=["asked", "answered"])
def test_who_stands_between_a_pod_and_its_peer_may_speak_of_what_the_pod_sent(
    world: Rig,
    version: int,
    between: Between,
    segment: Callable[[int], Segment],
    kind: tuple[tuple[int, int, int], ...],
    asked: bool,
) -> None:
    """Traceroute, and the discovery of a path's MTU, of the opener and of the server."""
    ends = A.address(version), between.peer(version)
    sent = packet(*ends, segment(version))
    if not asked:
        came = {"udp": udp(53, 4000), "tcp": tcp(53, 4000, SYN), "echo": echo(version, 9)}
        answers = {"udp": udp(4000, 53), "tcp": tcp(4000, 53, SYN | frames.ACK)}
        name = next(name for name, make in SEGMENTS.items() if make is segment)
        first = packet(*ends[::-1], came[name])
        place = next((one for one in PLACES if one.address(version) == ends[1]), None)
        send = natively if place is None else place.send
        assert send(world, first).action in PASSED
        sent = packet(*ends, answers.get(name) or echo(version, 9, reply=True))
    assert world.sent(A, sent).action in PASSED
    world.change(A, flags=CLOSED)
    error = packet(between.address(version), ends[0], about(sent, *kind[version == 6]))
    assert between.send(world, error).action in PASSED


@pytest.mark.parametrize("by", ["local-pod", "router", "node"])
def test_an_error_that_the_stack_has_translated_back_reaches_the_pod(
    world: Rig, version: int, by: str
) -> None:
    """A asked a service; B, behind it, refused, and nf_nat wrote the service's address into both packets."""
    ends = A.address(version), SERVICE[version]
    sent = packet(*ends, udp(4000, 53))
    assert world.sent(A, sent).action == Action.STACK
    world.change(A, flags=CLOSED)
    source = {"local-pod": SERVICE, "router": ROUTER, "node": NODE}[by][version]
    fields = {"local-pod": {"ingress_ifindex": B.ifindex}, "router": {"ingress_ifindex": OUTSIDE}}
    error = packet(source, ends[0], unreachable(sent))
    assert world.received(A, error, **fields.get(by, {})).action == Action.STACK


def test_a_pod_behind_a_service_refuses(world: Rig, version: int) -> None:
    """B asked a service, and the stack brought it to A: A's error goes back by the stack, which translates it."""
    ends = B.address(version), A.address(version)
    came = packet(*ends, udp(4000, 53))
    assert world.received(A, came, ingress_ifindex=B.ifindex).action == Action.STACK
    world.change(A, flags=CLOSED)
    assert world.sent(A, packet(*ends[::-1], unreachable(came))).action == Action.STACK


def test_an_error_that_belongs_to_nothing_is_judged_as_the_message_that_it_is(
    world: Rig, version: int
) -> None:
    quoted = close_after(world, flow_with_itself, version)
    ends = A.address(version), SERVER[version]
    error = packet(*ends, unreachable(quoted.inwards))
    assert world.sent(A, error).reason == DropReason.POLICY
    world.change(A, flags=ALLOW)
    assert world.sent(A, error).action == Action.STACK
