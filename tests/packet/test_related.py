"""An ICMP error passes with the flow it is about, also where nothing may be sent or received unasked."""

from dataclasses import dataclass

import pytest

from podwire.datapath.abi import Action, ConfigFlags, DropReason, Path
from tests.packet import frames
from tests.packet.frames import SYN, Segment, echo, icmp, icmpv6, ipv4, ipv6, packet_of, tcp, udp
from tests.packet.rig import ALLOW, OUTSIDE, WORLD_4, WORLD_6, A, B, Endpoint, Rig

pytestmark = pytest.mark.packet

OUT, IN = ConfigFlags.DENY_EGRESS, ConfigFlags.DENY_INGRESS
ROUTER_4, ROUTER_6 = "203.0.113.1", "2001:db8:2::1"


def error(version: int, quoted: bytes, *, kind: int | None = None) -> Segment:
    """Make a "port unreachable", or another error, about a packet."""
    if version == 4:
        return icmp(3 if kind is None else kind, 3, 0, quoted[:28])
    return icmpv6(1 if kind is None else kind, 4, 0, quoted[:80])


def packet(version: int, source: str, destination: str, segment: Segment) -> bytes:
    return (
        ipv4(source, destination, segment) if version == 4 else ipv6(source, destination, segment)
    )


def world(version: int) -> str:
    return WORLD_4 if version == 4 else WORLD_6


def router(version: int) -> str:
    return ROUTER_4 if version == 4 else ROUTER_6


PROTOCOLS = ("tcp", "udp", "sctp", "echo", "esp")


def segment_of(name: str, version: int) -> Segment:
    if name == "echo":
        return echo(version, 5)
    return {
        "tcp": tcp(4000, 80, SYN),
        "udp": udp(4000, 53),
        "sctp": frames.sctp(4000, 80),
        "esp": frames.raw(50, bytes(20)),
    }[name]


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_an_error_about_what_a_pod_sent_reaches_it(rig: Rig, version: int, name: str) -> None:
    rig.change(A, flags=ALLOW)
    sent = packet(version, A.address(version), world(version), segment_of(name, version))
    assert rig.sent(A, sent).action == Action.STACK
    key, before = rig.entry(A)
    rig.change(A, flags=ALLOW | IN)
    about = packet(version, router(version), A.address(version), error(version, sent))
    assert rig.received(A, about, ingress_ifindex=OUTSIDE).action == Action.STACK
    assert rig.entries(A)[key].packets == before.packets


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_an_error_about_what_a_pod_received_leaves_it(rig: Rig, version: int, name: str) -> None:
    came = packet(version, world(version), A.address(version), segment_of(name, version))
    assert rig.received(A, came, ingress_ifindex=OUTSIDE).action == Action.STACK
    rig.change(A, flags=ALLOW | OUT)
    about = packet(version, A.address(version), world(version), error(version, came))
    outcome = rig.sent(A, about)
    assert (outcome.action, outcome.path) == (Action.STACK, Path.STACK)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("answered", [False, True], ids=["about-the-question", "about-the-answer"])
def test_errors_between_local_pods_go_straight(rig: Rig, version: int, answered: bool) -> None:
    ends = A.address(version), B.address(version)
    ask, answer = packet(version, *ends, udp(4000, 53)), packet(version, *ends[::-1], udp(53, 4000))
    assert rig.sent(A, ask).action == Action.PEER
    assert rig.sent(B, answer).action == Action.PEER
    rig.change(A, flags=ALLOW | IN)
    rig.change(B, flags=ALLOW | IN)
    sender, receiver, quoted = (A, B, answer) if answered else (B, A, ask)
    about = packet(
        version, sender.address(version), receiver.address(version), error(version, quoted)
    )
    outcome = rig.sent(sender, about)
    assert (outcome.action, outcome.decision.target_ifindex) == (Action.PEER, receiver.ifindex)


@dataclass(frozen=True)
class Unrelated:
    """An ICMP error that belongs to no flow of A, from the world."""

    id: str
    version: int
    segment: Segment


SENT_4 = ipv4(A.ipv4, WORLD_4, udp(4000, 53))
SENT_6 = ipv6(A.ipv6, WORLD_6, udp(4000, 53))
UNRELATED = [
    Unrelated("another-port", 4, error(4, ipv4(A.ipv4, WORLD_4, udp(4001, 53)))),
    Unrelated("another-destination", 4, error(4, ipv4(A.ipv4, ROUTER_4, udp(4000, 53)))),
    Unrelated("another-pods-flow", 4, error(4, ipv4(B.ipv4, WORLD_4, udp(4000, 53)))),
    Unrelated("the-wrong-way-round", 4, error(4, ipv4(WORLD_4, A.ipv4, udp(53, 4000)))),
    Unrelated("another-protocol", 4, error(4, ipv4(A.ipv4, WORLD_4, tcp(4000, 53, SYN)))),
    Unrelated("quote-cut-in-the-header", 4, icmp(3, 3, 0, SENT_4[:12])),
    Unrelated("quote-cut-in-the-ports", 4, icmp(3, 3, 0, SENT_4[:23])),
    Unrelated(
        "quote-with-a-short-header",
        4,
        error(4, ipv4(A.ipv4, WORLD_4, udp(4000, 53), header_words=4)),
    ),
    Unrelated("quote-of-another-version", 4, error(4, SENT_6)),
    Unrelated(
        "quote-of-a-later-fragment", 4, error(4, ipv4(A.ipv4, WORLD_4, udp(4000, 53), fragment=100))
    ),
    Unrelated("no-quote", 4, icmp(3, 3)),
    Unrelated("echo-reply-is-no-error", 4, echo(4, 4000, reply=True)),
    Unrelated("another-port-v6", 6, error(6, ipv6(A.ipv6, WORLD_6, udp(4001, 53)))),
    Unrelated("quote-cut-v6", 6, icmpv6(1, 4, 0, SENT_6[:43])),
    Unrelated(
        "endless-extensions-v6",
        6,
        icmpv6(
            1, 4, 0, ipv6(A.ipv6, WORLD_6, udp(4000, 53), extensions=[(60, frames.extension())] * 9)
        ),
    ),
]


@pytest.mark.parametrize("case", UNRELATED, ids=lambda case: case.id)
def test_an_error_about_nothing_is_judged_for_itself(rig: Rig, case: Unrelated) -> None:
    rig.sent(A, SENT_4)
    rig.sent(A, SENT_6)
    about = packet(case.version, router(case.version), A.address(case.version), case.segment)
    assert rig.received(A, about, ingress_ifindex=OUTSIDE).action == Action.STACK
    rig.change(A, flags=ALLOW | IN)
    assert rig.received(A, about, ingress_ifindex=OUTSIDE).reason == DropReason.POLICY


def test_extensions_in_the_quote_are_stepped_over(rig: Rig) -> None:
    sent = ipv6(A.ipv6, WORLD_6, udp(4000, 53), extensions=[(60, frames.extension(2))])
    rig.sent(A, sent)
    rig.change(A, flags=ALLOW | IN)
    about = ipv6(ROUTER_6, A.ipv6, icmpv6(2, 0, 0, sent))
    assert rig.received(A, about, ingress_ifindex=OUTSIDE).action == Action.STACK


@pytest.mark.parametrize("who", [A, B], ids=["opener", "server"])
def test_an_error_about_a_flow_that_is_denied_by_now_is_denied(rig: Rig, who: Endpoint) -> None:
    ask = ipv4(A.ipv4, B.ipv4, udp(4000, 53))
    rig.sent(A, ask)
    rig.change(who, flags=ALLOW | IN | OUT, revision=2)
    assert rig.sent(B, ipv4(B.ipv4, A.ipv4, error(4, ask))).reason == DropReason.POLICY


def test_the_programs_own_error_is_related_to_what_it_quotes(rig: Rig) -> None:
    """What from_pod answers with would pass to_pod too, if the host's stack had sent it."""
    sent = ipv4(A.ipv4, WORLD_4, udp(4000, 53, bytes(600)))
    rig.sent(A, sent)
    rig.change(A, flags=(ALLOW | IN) & ~ConfigFlags.HOST_ALLOWED)
    about = ipv4("172.16.0.1", A.ipv4, icmp(3, 4, 1400, sent[:28]))
    assert rig.received(A, about).action == Action.STACK
    assert packet_of(A.frame_in(about)) == about
