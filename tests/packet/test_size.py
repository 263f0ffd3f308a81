"""What does not fit is told to the sender by ICMP, quoting what it sent; what may be cut is left to the stack."""

import struct
from dataclasses import dataclass

import pytest

from podwire.datapath.abi import Action, ConfigFlags, DropReason, Path
from tests.packet import frames
from tests.packet.frames import (
    ETH_HLEN,
    FRAGMENT,
    Segment,
    check_frame,
    echo,
    fragment_header,
    icmp,
    icmpv6,
    ipv4,
    ipv6,
    packet_of,
    raw,
    tcp,
    udp,
)
from tests.packet.rig import (
    ALLOW,
    GATEWAY_4,
    GATEWAY_6,
    GSO_BY_FRAGMENTS,
    NARROW_4,
    NARROW_6,
    NARROW_MTU,
    NOBODY_4,
    NOBODY_6,
    SMALL,
    A,
    B,
    Rig,
)

pytestmark = pytest.mark.packet

TIMESTAMPS = b"\1\1\x08\x0a" + bytes(8)
DONT = frames.DONT_FRAGMENT
ERROR_LIMIT = {4: 576, 6: 1280}


def build(version: int, destination: str, segment: Segment, **fields: object) -> bytes:
    if version == 4:
        return ipv4(A.ipv4, destination, segment, **fields)  # type: ignore[arg-type]
    return ipv6(A.ipv6, destination, segment, **fields)  # type: ignore[arg-type]


def small(version: int) -> str:
    return SMALL.address(version)


def assert_error(
    outcome_data: bytes, sent: bytes, version: int, kind: int, code: int, mtu: int
) -> None:
    """Compare with an ICMP error from the gateway about `sent`."""
    packet = packet_of(outcome_data)
    header = 20 if version == 4 else 40
    quote = sent[: ERROR_LIMIT[version] - header - 8]
    assert outcome_data[:ETH_HLEN] == A.frame_in(sent)[:ETH_HLEN]
    assert not check_frame(outcome_data)
    assert packet[header : header + 2] == bytes([kind, code])
    assert packet[header + 4 : header + 8] == struct.pack("!I", mtu)
    assert packet[header + 8 :] == quote
    if version == 4:
        assert packet[8:10] == bytes([64, frames.ICMP])
        assert packet[12:20] == ipv4(GATEWAY_4, A.ipv4, raw(1))[12:20]
    else:
        assert packet[6:8] == bytes([frames.ICMPV6, 64])
        assert packet[8:40] == ipv6(GATEWAY_6, A.ipv6, raw(58))[8:40]


@dataclass(frozen=True)
class TooBig:
    """A packet of A that is larger than its destination's path, and the MTU that A is told."""

    id: str
    version: int
    packet: bytes
    mtu: int = 1400
    gso_bytes: int = 0


def both(case: str, segment: Segment, **fields: int) -> list[TooBig]:
    return [
        TooBig(f"{case}-v{version}", version, build(version, small(version), segment), **fields)
        for version in (4, 6)
    ]


TOO_BIG = [
    *both("udp", udp(4000, 53, bytes(1390))),
    *both("udp-odd-length", udp(4000, 53, bytes(1391))),
    *both("tcp", tcp(4000, 80, frames.SYN, bytes(1400))),
    *both("one-byte-too-many", raw(50, bytes(1381))),
    *both("gso", tcp(4000, 80, frames.SYN, bytes(3000)), gso_bytes=1448),
    *both(
        "gso-with-timestamps", tcp(4000, 80, frames.SYN, bytes(3000), TIMESTAMPS), gso_bytes=1350
    ),
    *both("gso-udp", udp(4000, 53, bytes(3000)), gso_bytes=1400),
    TooBig("options-v4", 4, build(4, small(4), udp(4000, 53, bytes(1390)), options=b"\1" * 40)),
    TooBig(
        "extension-v6",
        6,
        build(
            6,
            small(6),
            udp(4000, 53, bytes(1390)),
            extensions=[(frames.DESTINATION, frames.extension(3))],
        ),
    ),
    TooBig("echo-v4", 4, build(4, small(4), echo(4, 1, payload=bytes(1400)))),
    TooBig("echo-v6", 6, build(6, small(6), echo(6, 1, payload=bytes(1400)))),
    TooBig(
        "first-fragment-v4",
        4,
        build(
            4,
            small(4),
            Segment(17, udp(4000, 53, bytes(3000)).data[:1480]),
            fragment=DONT | frames.MORE_FRAGMENTS,
        ),
    ),
    TooBig(
        "first-fragment-v6",
        6,
        build(
            6,
            small(6),
            Segment(17, udp(4000, 53, bytes(3000)).data[:1448]),
            extensions=[(FRAGMENT, fragment_header(0, more=True))],
        ),
    ),
    TooBig("by-the-ipcache-v4", 4, build(4, NARROW_4, udp(4000, 53, bytes(1300))), NARROW_MTU),
    TooBig("by-the-ipcache-v6", 6, build(6, NARROW_6, udp(4000, 53, bytes(1300))), NARROW_MTU),
    TooBig(
        "by-the-ipcache-gso-v4",
        4,
        build(4, NARROW_4, tcp(4000, 80, frames.SYN, bytes(3000))),
        NARROW_MTU,
        1448,
    ),
]


@pytest.mark.parametrize("case", TOO_BIG, ids=lambda case: case.id)
def test_the_sender_is_told_the_mtu(rig: Rig, case: TooBig) -> None:
    segments = {"gso_size": case.gso_bytes, "gso_segs": 6} if case.gso_bytes else {}
    outcome = rig.sent(A, case.packet, **segments)
    assert (outcome.action, outcome.reason) == (Action.ANSWER, DropReason.MTU)
    kind, code = (3, 4) if case.version == 4 else (2, 0)
    assert_error(outcome.data, case.packet, case.version, kind, code, case.mtu)
    assert not rig.entries(SMALL)


@dataclass(frozen=True)
class Fits:
    """A packet that needs no error, and how it goes on."""

    id: str
    packet: bytes
    path: Path
    gso_bytes: int = 0


LATER_V4 = build(4, SMALL.ipv4, raw(17, bytes(1440)), fragment=DONT | 185)
JUMBO = build(
    6,
    B.ipv6,
    tcp(4000, 80, frames.SYN, bytes(3000)),
    extensions=[(0, bytes([0, 0, 0xC2, 4]) + struct.pack("!I", 3028))],
    payload_bytes=0,
)
"""A BIG TCP packet as older kernels keep it: its length only in a header that goes when it is cut into segments."""
FITS = [
    Fits("big-tcp-v6", JUMBO, Path.LOCAL, 1440),
    Fits("exactly-v4", build(4, SMALL.ipv4, udp(4000, 53, bytes(1372))), Path.LOCAL),
    Fits("exactly-v6", build(6, SMALL.ipv6, udp(4000, 53, bytes(1352))), Path.LOCAL),
    Fits(
        "gso-exactly-v4",
        build(4, SMALL.ipv4, tcp(4000, 80, frames.SYN, bytes(3000))),
        Path.LOCAL,
        1360,
    ),
    Fits(
        "gso-exactly-v6",
        build(6, SMALL.ipv6, tcp(4000, 80, frames.SYN, bytes(3000))),
        Path.LOCAL,
        1340,
    ),
    Fits(
        "gso-by-fragments",
        build(4, SMALL.ipv4, frames.sctp(4000, 80)),
        Path.LOCAL,
        GSO_BY_FRAGMENTS,
    ),
    Fits("may-be-cut", build(4, SMALL.ipv4, udp(4000, 53, bytes(1400)), fragment=0), Path.STACK),
    Fits(
        "may-be-cut-by-the-ipcache",
        build(4, NARROW_4, udp(4000, 53, bytes(1400)), fragment=0),
        Path.STACK,
    ),
    Fits("another-path", build(4, B.ipv4, udp(4000, 53, bytes(1400))), Path.LOCAL),
]


@pytest.mark.parametrize("case", FITS, ids=lambda case: case.id)
def test_what_fits_or_may_be_cut_goes_on(rig: Rig, case: Fits) -> None:
    segments = {"gso_size": case.gso_bytes, "gso_segs": 6} if case.gso_bytes else {}
    outcome = rig.sent(A, case.packet, **segments)
    assert outcome.reason == DropReason.NONE
    assert outcome.path == case.path
    assert packet_of(outcome.data)[20:] == case.packet[20:]


SILENT = [
    ("icmp-error-v4", build(4, SMALL.ipv4, icmp(3, 1, 0, bytes(1400)))),
    ("icmp-error-v6", build(6, SMALL.ipv6, icmpv6(1, 3, 0, bytes(1400)))),
    ("parameter-problem", build(4, SMALL.ipv4, icmp(12, 0, 0, bytes(1400)))),
]


@pytest.mark.parametrize(
    "packet", [packet for _, packet in SILENT], ids=[name for name, _ in SILENT]
)
def test_no_error_is_sent_about_an_error(rig: Rig, packet: bytes) -> None:
    outcome = rig.sent(A, packet)
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.MTU)
    assert packet_of(outcome.data) == packet


def test_no_error_is_sent_about_a_later_fragment_of_ipv4(rig: Rig) -> None:
    whole = udp(4000, 53, bytes(3000)).data
    rig.sent(
        A, build(4, SMALL.ipv4, Segment(17, whole[:1376]), fragment=DONT | frames.MORE_FRAGMENTS)
    )
    rest = build(4, SMALL.ipv4, raw(17, whole[1376:]), fragment=DONT | 1376 // 8)
    outcome = rig.sent(A, rest)
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.MTU)


def test_the_size_of_an_answer_is_checked_too(rig: Rig) -> None:
    rig.sent(SMALL, ipv4(SMALL.ipv4, A.ipv4, udp(53, 4000)))
    packet = ipv4(A.ipv4, SMALL.ipv4, udp(4000, 53, bytes(1400)))
    outcome = rig.sent(A, packet)
    assert (outcome.action, outcome.reason) == (Action.ANSWER, DropReason.MTU)
    assert_error(outcome.data, packet, 4, 3, 4, 1400)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("payload_bytes", [0, 1, 5, 31, 600, 1400])
def test_an_address_that_no_pod_has_is_unreachable(
    rig: Rig, version: int, payload_bytes: int
) -> None:
    nobody = NOBODY_4 if version == 4 else NOBODY_6
    packet = build(version, nobody, udp(4000, 53, b"\xa5" * payload_bytes))
    outcome = rig.sent(A, packet)
    assert (outcome.action, outcome.reason) == (Action.ANSWER, DropReason.NO_POD)
    kind, code = (3, 1) if version == 4 else (1, 3)
    assert_error(outcome.data, packet, version, kind, code, 0)
    assert not rig.entries()


def test_a_policy_is_asked_before_an_address_is_called_unreachable(rig: Rig) -> None:
    rig.change(A, flags=ALLOW | ConfigFlags.DENY_EGRESS)
    outcome = rig.sent(A, build(4, NOBODY_4, udp(4000, 53)))
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.POLICY)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("ttl", [0, 1])
def test_a_packet_without_a_hop_left_is_told_to_its_sender(
    rig: Rig, version: int, ttl: int
) -> None:
    hops = {"ttl": ttl} if version == 4 else {"hop_limit": ttl}
    packet = build(version, B.address(version), udp(4000, 33434), **hops)
    outcome = rig.sent(A, packet)
    assert (outcome.action, outcome.reason) == (Action.ANSWER, DropReason.TTL)
    assert_error(outcome.data, packet, version, 11 if version == 4 else 3, 0, 0)
    assert not rig.entries(B)


def test_a_hop_is_the_stacks_business_on_the_way_through_it(rig: Rig) -> None:
    packet = build(4, "198.51.100.7", udp(4000, 53), ttl=1)
    assert rig.sent(A, packet).data == A.frame(packet)
