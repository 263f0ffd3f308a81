"""Every header may end at any byte, be malformed, or have options and extensions in front of what is judged."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from podwire.datapath.abi import Action, DropReason
from tests.packet import frames
from tests.packet.frames import (
    DESTINATION,
    ETH_HLEN,
    FRAGMENT,
    HOP_BY_HOP,
    ROUTING,
    echo,
    ethernet,
    extension,
    fragment_header,
    icmp,
    icmpv6,
    ipv4,
    ipv6,
    raw,
    routing,
    sctp,
    tcp,
    udp,
    vlan,
)
from tests.packet.rig import WORLD_4, WORLD_6, A, Rig

pytestmark = pytest.mark.packet

SHORTEST_TEST_RUN = {b"\x08\x00": 34, b"\x86\xdd": 54}
"""Test runs refuse frames without a whole IP header; test_short_frames.py sends those through sockets."""
SYN = frames.SYN
NOOP_OPTIONS = b"\1" * 8
RECORD_ROUTE = b"\7\x27\4" + bytes(37)


def four(segment: frames.Segment, **fields: object) -> bytes:
    return A.frame(ipv4(A.ipv4, WORLD_4, segment, **fields))  # type: ignore[arg-type]


def six(segment: frames.Segment, **fields: object) -> bytes:
    return A.frame(ipv6(A.ipv6, WORLD_6, segment, **fields))  # type: ignore[arg-type]


ALL_EXTENSIONS = (
    (HOP_BY_HOP, extension(1)),
    (DESTINATION, extension()),
    (ROUTING, routing(0)),
    (FRAGMENT, fragment_header(0, more=False)),
    (frames.AH, bytes([0, 4]) + bytes(22)),
    (DESTINATION, extension()),
)


@dataclass(frozen=True)
class Whole:
    """A frame without payload: every byte of it is a header's."""

    id: str
    frame: bytes


WHOLE = [
    Whole("tcp-v4", four(tcp(4000, 80, SYN))),
    Whole("tcp-options-v4", four(tcp(4000, 80, SYN, options=b"\2\4\5\xb4"))),
    Whole("udp-v4", four(udp(4000, 53, b""))),
    Whole("icmp-v4", four(echo(4, 1, payload=b""))),
    Whole("udp-v4-ip-options", four(udp(4000, 53, b""), options=RECORD_ROUTE)),
    Whole("tcp-v6", six(tcp(4000, 80, SYN))),
    Whole("udp-v6", six(udp(4000, 53, b""))),
    Whole("icmp-v6", six(echo(6, 1, payload=b""))),
    Whole("tcp-v6-all-extensions", six(tcp(4000, 80, SYN), extensions=ALL_EXTENSIONS)),
    Whole("sctp-v4", A.frame(ipv4(A.ipv4, WORLD_4, raw(frames.SCTP, bytes(12))))),
]


def with_length(frame: bytes) -> bytes:
    """Make the IP header agree with the frame's real length, as far as its length field is there."""
    size = len(frame) - ETH_HLEN
    if frame[12:14] == b"\x08\x00":
        return frame[:16] + size.to_bytes(2, "big") + frame[18:]
    return frame[:18] + max(size - 40, 0).to_bytes(2, "big") + frame[20:]


def cuts(frame: bytes, change: Callable[[bytes], bytes]) -> Iterator[bytes]:
    for size in range(SHORTEST_TEST_RUN[frame[12:14]], len(frame)):
        yield change(frame[:size])


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.id)
def test_a_packet_that_ends_at_any_byte_is_refused(rig: Rig, case: Whole) -> None:
    assert rig.run("from_pod", A.ifindex, case.frame).reason == DropReason.NONE
    for cut in cuts(case.frame, lambda frame: frame):
        outcome = rig.run("from_pod", A.ifindex, cut)
        assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.TRUNCATED), len(cut)
        assert outcome.data == cut


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.id)
def test_a_packet_whose_length_field_hides_the_cut_is_refused(rig: Rig, case: Whole) -> None:
    for cut in cuts(case.frame, with_length):
        outcome = rig.run("from_pod", A.ifindex, cut)
        wanted = {DropReason.TRUNCATED, DropReason.HEADER}
        assert outcome.action == Action.DROP, len(cut)
        assert outcome.reason in wanted, len(cut)


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.id)
def test_a_packet_that_ends_at_any_byte_does_not_reach_a_pod(rig: Rig, case: Whole) -> None:
    for cut in cuts(case.frame, lambda frame: frame):
        outcome = rig.run("to_pod", A.ifindex, cut)
        assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.TRUNCATED), len(cut)


@dataclass(frozen=True)
class Odd:
    """A frame with something unusual, and what it comes to."""

    id: str
    frame: bytes
    reason: DropReason


NONE, HEADER = DropReason.NONE, DropReason.HEADER
DATAGRAM = udp(4000, 53)
ODD = [
    Odd("vlan", vlan(four(DATAGRAM), 5), DropReason.ETHERTYPE),
    Odd("priority-tag", vlan(four(DATAGRAM), 7 << 13), DropReason.ETHERTYPE),
    Odd("double-vlan", vlan(vlan(six(DATAGRAM), 5), 6), DropReason.ETHERTYPE),
    Odd("802.3-length", ethernet(A.host_mac, A.pod_mac, 64, bytes(64)), DropReason.ETHERTYPE),
    Odd("lldp", ethernet("01:80:c2:00:00:0e", A.pod_mac, 0x88CC, bytes(64)), DropReason.ETHERTYPE),
    Odd("mpls", ethernet(A.host_mac, A.pod_mac, 0x8847, bytes(64)), DropReason.ETHERTYPE),
    Odd("padding-behind-the-packet", four(udp(4000, 53, b"")) + bytes(18), NONE),
    Odd("options-noop", four(DATAGRAM, options=NOOP_OPTIONS), NONE),
    Odd("options-longest", four(DATAGRAM, options=RECORD_ROUTE), NONE),
    Odd("v4-header-of-four-words", four(DATAGRAM, header_words=4), HEADER),
    Odd("v4-header-longer-than-the-packet", four(udp(4000, 53, b""), header_words=15), HEADER),
    Odd("v4-version-5", four(DATAGRAM, version=5), HEADER),
    Odd(
        "v6-in-a-v4-frame",
        ethernet(A.host_mac, A.pod_mac, 0x0800, ipv6(A.ipv6, WORLD_6, DATAGRAM)),
        HEADER,
    ),
    Odd(
        "v4-in-a-v6-frame",
        ethernet(A.host_mac, A.pod_mac, 0x86DD, ipv4(A.ipv4, WORLD_4, udp(4000, 53, bytes(40)))),
        HEADER,
    ),
    Odd("v4-length-zero", four(DATAGRAM, total=0), HEADER),
    Odd("v4-length-below-the-header", four(DATAGRAM, total=19), HEADER),
    Odd("v4-length-cuts-the-ports", four(DATAGRAM, total=23), DropReason.TRUNCATED),
    Odd("v4-length-beyond-the-frame", four(DATAGRAM, total=1000), DropReason.TRUNCATED),
    Odd("v6-length-zero", six(DATAGRAM, payload_bytes=0), DropReason.TRUNCATED),
    Odd(
        "v6-length-cuts-the-extension",
        six(DATAGRAM, extensions=[(HOP_BY_HOP, extension(1))], payload_bytes=8),
        DropReason.TRUNCATED,
    ),
    Odd(
        "tcp-header-of-four-words",
        four(raw(6, b"\x0f\xa0\0\x50" + bytes(8) + b"\x40\2" + bytes(6))),
        HEADER,
    ),
    Odd(
        "tcp-header-beyond-the-packet",
        four(raw(6, b"\x0f\xa0\0\x50" + bytes(8) + b"\xf0\2" + bytes(6))),
        DropReason.TRUNCATED,
    ),
    Odd("icmpv6-over-v4", four(raw(58, echo(6, 1).data)), DropReason.PROTOCOL),
    Odd("icmp-over-v6", six(raw(1, echo(4, 1).data)), DropReason.PROTOCOL),
    Odd("no-next-header", six(raw(59)), DropReason.PROTOCOL),
    Odd(
        "no-next-header-behind-extensions",
        six(raw(59), extensions=[(DESTINATION, extension())]),
        DropReason.PROTOCOL,
    ),
    Odd("esp-v4", four(raw(50, bytes(24))), NONE),
    Odd("gre-v4", four(raw(47, bytes(24))), NONE),
    Odd("esp-v6", six(raw(50, bytes(24)), extensions=[(DESTINATION, extension())]), NONE),
    Odd("sctp-v4", four(sctp(4000, 80)), NONE),
    Odd("sctp-v6", six(sctp(4000, 80)), NONE),
    Odd("icmp-timestamp", four(icmp(13, 0, 0, bytes(12))), NONE),
    Odd("icmpv6-unknown", six(icmpv6(200, 0)), NONE),
    Odd("hop-by-hop-first", six(DATAGRAM, extensions=[(HOP_BY_HOP, extension())]), NONE),
    Odd(
        "hop-by-hop-second",
        six(DATAGRAM, extensions=[(DESTINATION, extension()), (HOP_BY_HOP, extension())]),
        HEADER,
    ),
    Odd("every-extension", six(DATAGRAM, extensions=ALL_EXTENSIONS), NONE),
    Odd("seven-extensions", six(DATAGRAM, extensions=[(DESTINATION, extension())] * 7), NONE),
    Odd("eight-extensions", six(DATAGRAM, extensions=[(DESTINATION, extension())] * 8), HEADER),
    Odd("longest-extension", six(DATAGRAM, extensions=[(DESTINATION, extension(100))]), NONE),
    Odd("routing-header-used-up", six(DATAGRAM, extensions=[(ROUTING, routing(0))]), NONE),
    Odd(
        "routing-header-with-segments-left",
        six(DATAGRAM, extensions=[(ROUTING, routing(1))]),
        HEADER,
    ),
    Odd("routing-header-type-0", six(DATAGRAM, extensions=[(ROUTING, routing(2, kind=0))]), HEADER),
    Odd("segment-routing", six(DATAGRAM, extensions=[(ROUTING, routing(1, kind=4))]), HEADER),
    Odd(
        "atomic-fragment",
        six(DATAGRAM, extensions=[(FRAGMENT, fragment_header(0, more=False))]),
        NONE,
    ),
    Odd(
        "two-fragment-headers",
        six(DATAGRAM, extensions=[(FRAGMENT, fragment_header(0, more=True))] * 2),
        HEADER,
    ),
]


@pytest.mark.parametrize("case", ODD, ids=lambda case: case.id)
def test_odd_headers_are_read_or_refused_never_guessed(rig: Rig, case: Odd) -> None:
    outcome = rig.run("from_pod", A.ifindex, case.frame)
    assert outcome.reason == case.reason
    assert outcome.action == (Action.DROP if case.reason else Action.STACK)


TUPLES = [
    ("options-v4", four(udp(4000, 53), options=RECORD_ROUTE)),
    ("every-extension-v6", six(udp(4000, 53), extensions=ALL_EXTENSIONS)),
    ("longest-extension-v6", six(udp(4000, 53), extensions=[(DESTINATION, extension(100))])),
]


@pytest.mark.parametrize("frame", [frame for _, frame in TUPLES], ids=[name for name, _ in TUPLES])
def test_ports_are_found_behind_options_and_extensions(rig: Rig, frame: bytes) -> None:
    assert rig.run("from_pod", A.ifindex, frame).reason == NONE
    key, _ = rig.entry(A)
    assert (key.protocol, key.sport, key.dport) == (17, 4000, 53)


def test_a_pod_may_not_speak_to_the_tunnel_port(rig: Rig) -> None:
    for frame in (four(udp(4000, 8472)), six(udp(4000, 8472))):
        assert rig.run("from_pod", A.ifindex, frame).reason == DropReason.TUNNEL_PORT
    assert not rig.entries()
    assert rig.run("from_pod", A.ifindex, four(tcp(4000, 8472, SYN))).reason == NONE
    rig.write_settings(tunnel_port=0)
    assert rig.run("from_pod", A.ifindex, four(udp(4000, 8472))).reason == NONE
