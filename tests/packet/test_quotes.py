"""ICMP errors that quote packets of every shape: none opens a closed pod to another one, and each passes from who may
send it.
"""

from collections.abc import Callable
from typing import Final

import pytest

from podwire.datapath.abi import Action, DropReason
from tests.packet import frames
from tests.packet.frames import (
    ACK,
    AH,
    DESTINATION,
    FRAGMENT,
    HOP_BY_HOP,
    MORE_FRAGMENTS,
    ROUTING,
    SYN,
    Segment,
    echo,
    extension,
    fragment_header,
    icmp,
    icmpv6,
    ipv4,
    ipv6,
    routing,
    tcp,
    udp,
)
from tests.packet.rig import ALLOW, OUTSIDE, A, Rig
from tests.packet.test_forged_errors import (  # noqa: F401 - a fixture
    CLOSED,
    PASSED,
    PODS,
    ROUTER,
    SERVER,
    Place,
    assert_denied,
    by_name,
    packet,
    unreachable_with,
    world,
)

pytestmark = [pytest.mark.packet, pytest.mark.parametrize("version", [4, 6])]

UDPLITE: Final = 136
QUOTED_BYTES: Final = 400
Shape = Callable[[int, str, str], bytes]
"""A packet of a family between two addresses."""


def carrying(make: Callable[[int], Segment]) -> Shape:
    return lambda version, source, destination: packet(source, destination, make(version))


def behind(*extensions: tuple[int, bytes]) -> Shape:
    """Make an IPv6 packet with extension headers; for IPv4 the like of them, options."""

    def build(version: int, source: str, destination: str) -> bytes:
        if version == 4:
            return ipv4(source, destination, udp(4000, 53), options=bytes([1] * 4))
        return ipv6(source, destination, udp(4000, 53), extensions=list(extensions))

    return build


def first_fragment(version: int, source: str, destination: str) -> bytes:
    segment = udp(4000, 53, bytes(64))
    if version == 4:
        return ipv4(source, destination, segment, fragment=MORE_FRAGMENTS)
    header = (FRAGMENT, fragment_header(0, more=True))
    return ipv6(source, destination, segment, extensions=[header])


SHAPES: Final[dict[str, Shape]] = {
    "tcp": carrying(lambda _: tcp(4000, 80, SYN)),
    "udp": carrying(lambda _: udp(4000, 53)),
    "udplite": carrying(lambda _: Segment(UDPLITE, udp(4000, 53).data)),
    "sctp": carrying(lambda _: frames.sctp(4000, 80)),
    "echo": carrying(lambda version: echo(version, 9)),
    "esp": carrying(lambda _: frames.raw(frames.ESP, bytes(20))),
    "another-protocol": carrying(lambda _: frames.raw(253, bytes(20))),
    "hop-by-hop": behind((HOP_BY_HOP, extension())),
    "destination": behind((DESTINATION, extension())),
    "routing": behind((ROUTING, routing(0))),
    "authentication": behind((AH, bytes([0, 1]) + bytes(10))),
    "atomic-fragment": behind((FRAGMENT, fragment_header(0, more=False))),
    "many-headers": behind(
        (HOP_BY_HOP, extension()), (DESTINATION, extension()), (ROUTING, routing(0))
    ),
    "first-fragment": first_fragment,
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def send_and_close(rig: Rig, shape: Shape, version: int) -> bytes:
    """Let A send somebody outside a packet while it may; gives the packet."""
    sent = shape(version, A.address(version), SERVER[version])
    assert rig.sent(A, sent).action == Action.STACK
    close(rig)
    return sent


def receive_and_close(rig: Rig, shape: Shape, version: int) -> bytes:
    """Let a sender outside send A a packet while it may; gives the packet."""
    came = shape(version, SERVER[version], A.address(version))
    assert rig.received(A, came, ingress_ifindex=OUTSIDE).action == Action.STACK
    close(rig)
    return came


def close(rig: Rig) -> None:
    rig.change(A, flags=CLOSED)
    rig.take_events()


def quoting(version: int, quoted: bytes) -> Segment:
    return unreachable_with(version, quoted[:QUOTED_BYTES])


@shapes
@pytest.mark.parametrize("place", PODS, ids=by_name)
def test_no_pod_reaches_a_closed_one_by_quoting_what_it_sent(
    world: Rig,  # noqa: F811
    version: int,
    place: Place,
    shape: Shape,
) -> None:
    sent = send_and_close(world, shape, version)
    ends = place.address(version), A.address(version)
    outcome = place.send(world, packet(*ends, quoting(version, sent)))
    assert_denied(world, outcome, source=ends[0], destination=ends[1])


@shapes
@pytest.mark.parametrize("place", PODS, ids=by_name)
def test_a_closed_pod_reaches_nobody_by_quoting_what_it_received(
    world: Rig,  # noqa: F811
    version: int,
    place: Place,
    shape: Shape,
) -> None:
    came = receive_and_close(world, shape, version)
    ends = A.address(version), place.address(version)
    outcome = world.sent(A, packet(*ends, quoting(version, came)))
    assert_denied(world, outcome, source=ends[0], destination=ends[1])


@shapes
@pytest.mark.parametrize("sender", [SERVER, ROUTER], ids=["server", "router"])
def test_who_may_tell_of_it_reaches_the_closed_pod(
    world: Rig,  # noqa: F811
    version: int,
    sender: dict[int, str],
    shape: Shape,
) -> None:
    sent = send_and_close(world, shape, version)
    error = packet(sender[version], A.address(version), quoting(version, sent))
    assert world.received(A, error, ingress_ifindex=OUTSIDE).action in PASSED


@shapes
def test_a_pod_tells_its_peer_of_what_it_received(
    world: Rig,  # noqa: F811
    version: int,
    shape: Shape,
) -> None:
    came = receive_and_close(world, shape, version)
    error = packet(A.address(version), SERVER[version], quoting(version, came))
    assert world.sent(A, error).action in PASSED


def later_fragment(version: int, source: str, destination: str) -> bytes:
    segment = frames.raw(frames.UDP, bytes([0x0F, 0xA0, 0, 53]) * 4)
    if version == 4:
        return ipv4(source, destination, segment, fragment=8)
    header = (FRAGMENT, fragment_header(64, more=False))
    return ipv6(source, destination, segment, extensions=[header])


def redirected(version: int, source: str, destination: str) -> bytes:
    """Make a packet whose routing header has a segment left: its destination is not the last one."""
    if version == 4:
        return later_fragment(version, source, destination)
    return ipv6(source, destination, udp(4000, 53), extensions=[(ROUTING, routing(1))])


def too_many_headers(version: int, source: str, destination: str) -> bytes:
    """Make an IPv6 packet with more headers than are walked."""
    if version == 4:
        return later_fragment(version, source, destination)
    headers = [(DESTINATION, extension())] * 9
    return ipv6(source, destination, udp(4000, 53), extensions=headers)


OTHER_ICMP: Final = carrying(
    lambda version: icmp(13, 0, 9 << 16) if version == 4 else icmpv6(139, 0, 9)
)
NO_FLOWS: Final[dict[str, Shape]] = {
    "a-later-fragment": later_fragment,
    "a-segment-left": redirected,
    "icmp-that-is-no-echo": OTHER_ICMP,
    "an-unanswered-echo-reply": carrying(lambda version: echo(version, 9, reply=True)),
    "too-many-headers": too_many_headers,
    "another-opener": carrying(lambda _: tcp(53, 4000, SYN | ACK)),
}


@pytest.mark.parametrize("shape", NO_FLOWS.values(), ids=NO_FLOWS)
@pytest.mark.parametrize("sender", [SERVER, ROUTER], ids=["server", "router"])
def test_a_quote_that_names_no_flow_opens_nothing(
    world: Rig,  # noqa: F811
    version: int,
    sender: dict[int, str],
    shape: Shape,
) -> None:
    world.change(A, flags=ALLOW)
    assert world.sent(A, packet(A.address(version), SERVER[version], udp(4000, 53))).action
    close(world)
    quoted = shape(version, A.address(version), SERVER[version])
    error = packet(sender[version], A.address(version), quoting(version, quoted))
    outcome = world.received(A, error, ingress_ifindex=OUTSIDE)
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.POLICY)
