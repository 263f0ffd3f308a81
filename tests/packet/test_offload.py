"""A pod leaves a checksum to a device, which writes it behind all programs: never over what they have judged. It may
leave cutting to a device, too: no segment has another port than what was judged.

Who may open AF_PACKET names place and sizes (PACKET_VNET_HDR). Real packets, because a test run's are always summed up.
"""

import collections
import contextlib
import itertools
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from podwire.datapath.abi import ConfigFlags, DropReason, Hook
from podwire.model import policy
from podwire.model.policy import PolicyEntry, PolicyKey, Verdict
from tests.packet.frames import (
    DESTINATION,
    ETH_HLEN,
    FRAGMENT,
    MORE_FRAGMENTS,
    TCP,
    UDP,
    extension,
    fragment_header,
    icmp,
    icmpv6,
    ipv4,
    ipv6,
    mac,
    raw,
    sctp,
    tcp,
    udp,
)
from tests.packet.live import LiveHost, live_pods
from tests.packet.rig import ALLOW, A, B, Rig
from tests.packet.test_live import eventually, passed

pytestmark = pytest.mark.packet

SOL_PACKET, PACKET_VNET_HDR, NEEDS_CSUM = 263, 15, 1
GRE, UDP_LITE = 47, 136
TCP_CHECKSUM_OFFSET, UDP_CHECKSUM_OFFSET = 16, 6
BEHIND_4, BEHIND_6 = ETH_HLEN + 20, ETH_HLEN + 40
"""Where the transport header begins."""
LONG: Final = bytes(32)


@dataclass(frozen=True)
class Left:
    """A packet, and where in its frame a device is to write."""

    id: str
    packet: bytes
    place: int
    passes: bool = False
    begin: int | None = None
    """Where what is summed begins."""


def four(segment: object, **fields: object) -> bytes:
    return ipv4(A.ipv4, B.ipv4, segment, **fields)  # type: ignore[arg-type]


def six(segment: object, **fields: object) -> bytes:
    return ipv6(A.ipv6, B.ipv6, segment, **fields)  # type: ignore[arg-type]


DATAGRAM, SEGMENT = udp(4000, 53, LONG), tcp(4000, 80, 2, LONG)
EXTENDED = six(DATAGRAM, extensions=[(DESTINATION, extension())])
CASES = [
    Left("udp", four(DATAGRAM), BEHIND_4 + 6, True),
    Left("udp-6", six(DATAGRAM), BEHIND_6 + 6, True),
    Left("udp-lite", four(raw(UDP_LITE, DATAGRAM.data)), BEHIND_4 + 6, True),
    Left("tcp", four(SEGMENT), BEHIND_4 + 16, True),
    Left("tcp-6", six(SEGMENT), BEHIND_6 + 16, True),
    Left("tcp-behind-options", four(SEGMENT, options=bytes(8)), BEHIND_4 + 8 + 16, True),
    Left("udp-behind-an-extension", EXTENDED, BEHIND_6 + 8 + 6, True),
    Left("sctp", four(sctp(4000, 3868)), BEHIND_4 + 8, True),
    Left("a-tunnel-of-the-pod", four(DATAGRAM), BEHIND_4 + 8 + 20, True),
    Left("a-tunnel-without-ports", four(raw(GRE, LONG)), BEHIND_4 + 8, True),
    Left("source", four(DATAGRAM), ETH_HLEN + 14),
    Left("destination", four(DATAGRAM), ETH_HLEN + 18),
    Left("destination-6", six(DATAGRAM), ETH_HLEN + 38),
    Left("an-extension", EXTENDED, BEHIND_6),
    Left("udp-port", four(DATAGRAM), BEHIND_4 + 2),
    Left("udp-port-6", six(DATAGRAM), BEHIND_6 + 2),
    Left("half-a-udp-length", four(DATAGRAM), BEHIND_4 + 5),
    Left("tcp-from-the-network-header", four(SEGMENT), BEHIND_4 + 16, begin=BEHIND_4 - 4),
    Left("tcp-source-port", four(SEGMENT), BEHIND_4),
    Left("tcp-port", four(SEGMENT), BEHIND_4 + 2),
    Left("tcp-flags-6", six(SEGMENT), BEHIND_6 + 12),
    Left("port-behind-options", four(SEGMENT, options=bytes(8)), BEHIND_4 + 8 + 2),
    Left("sctp-port", four(sctp(4000, 3868)), BEHIND_4 + 2),
    Left("sctp-chunk", four(sctp(4000, 3868)), BEHIND_4 + 12),
    Left("echo-type", four(icmp(8, 0, 7 << 16, LONG)), BEHIND_4),
    Left("echo-number", four(icmp(8, 0, 7 << 16, LONG)), BEHIND_4 + 4),
    Left("quote", six(icmpv6(1, 4, 0, six(DATAGRAM))), BEHIND_6 + 8 + 24),
]


@pytest.fixture
def live(rig: Rig) -> Iterator[LiveHost]:
    with live_pods(rig, A, B) as host:
        yield host


def leave_checksum(packets: socket.socket, frame: bytes, case: Left) -> None:
    """Send a frame that says where its sum is still to be written."""
    packets.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    begin = case.begin
    if begin is None and case.passes:
        begin = case.place - UDP_CHECKSUM_OFFSET  # in the transport header, or behind it
    elif begin is None:  # a kernel asks that the sum begins behind the shortest network header
        begin = min(case.place, ETH_HLEN + (6 if frame[ETH_HLEN] >> 4 == 4 else 26))
    packets.send(struct.pack("=BBHHHH", NEEDS_CSUM, 0, 0, 0, begin, case.place - begin) + frame)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_sum_is_written_where_nothing_was_judged(rig: Rig, live: LiveHost, case: Left) -> None:
    def count(reason: DropReason) -> int:
        return passed(rig, Hook.FROM_POD, reason)

    through, refused = count(DropReason.NONE), count(DropReason.HEADER)
    with live.pods["a"].raw_socket() as packets:
        leave_checksum(packets, A.frame(case.packet), case)
    if case.passes:  # the other pod may answer
        assert eventually(lambda: count(DropReason.NONE) > through)
    else:
        assert eventually(lambda: count(DropReason.HEADER) > refused)
        assert count(DropReason.NONE) == through
    assert count(DropReason.HEADER) == refused + (not case.passes)


# Segments

TCP_4, FRAGMENTS, TCP_6, DATAGRAMS = 1, 3, 4, 5
"""Kinds of struct virtio_net_hdr."""
JUDGED_PORT, OTHER_PORT = 80, 22


def headed(kind: int, sums: int, size: int, header_bytes: int, frame: bytes, begin: int) -> bytes:
    """Put in front of a frame how it is to be cut."""
    at = TCP_CHECKSUM_OFFSET if kind in (TCP_4, TCP_6) else UDP_CHECKSUM_OFFSET
    return struct.pack("=BBHHHH", sums, kind, header_bytes, size, begin, at) + frame


def pieces_of(version: int, protocol: int) -> Iterator[bytes]:
    """Give packets to the other port; some say that they are the later piece of one to the judged port."""
    evil, begun = (
        udp(4000, port, bytes(1000)) if protocol == UDP else tcp(4000, port, 2, bytes(1000))
        for port in (OTHER_PORT, JUDGED_PORT)
    )
    if version == 4:
        yield four(evil)
        yield four(evil, fragment=MORE_FRAGMENTS)
        yield four(raw(protocol, begun.data), fragment=MORE_FRAGMENTS, identification=9)
        yield four(raw(protocol, evil.data), fragment=3, identification=9)
        yield four(evil, total=40)
        return
    yield six(evil)
    yield six(evil, extensions=[(DESTINATION, extension())])
    for data, at in ((begun.data[:24], 0), (evil.data, 24)):
        header = (FRAGMENT, fragment_header(at, more=not at, identification=9))
        yield six(raw(protocol, data), extensions=[header])


def forged_segments(version: int) -> Iterator[bytes]:
    """Give frames with a header in front, honest in nothing."""
    begin = BEHIND_4 if version == 4 else BEHIND_6
    kinds = (TCP_4, FRAGMENTS, TCP_6, DATAGRAMS)
    shapes = itertools.product(kinds, (0, NEEDS_CSUM), (104, 504), (8, 20))
    packets = [piece for protocol in (TCP, UDP) for piece in pieces_of(version, protocol)]
    for kind, sums, size, header_bytes in shapes:
        for packet in packets:
            yield headed(kind, sums, size, begin + header_bytes, A.frame(packet), begin)


def take_all(packets: socket.socket) -> list[bytes]:
    """Take what has come in by now."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(packets.recv(70_000))
    return found


def port_of(frame: bytes) -> int:
    """Give the destination port of a whole packet or a first piece without options, 0 for another one."""
    if frame[12:14] == b"\x08\x00":
        return 0 if frame[20] & 0x1F or frame[21] else int.from_bytes(frame[36:38], "big")
    at, following = BEHIND_6, frame[20]
    if following in (FRAGMENT, DESTINATION):
        if following == FRAGMENT and int.from_bytes(frame[56:58], "big") & 0xFFF8:
            return 0
        at += 8
    return int.from_bytes(frame[at + 2 : at + 4], "big")


@pytest.mark.parametrize("version", [4, 6])
def test_no_segment_has_a_port_that_was_not_judged(rig: Rig, live: LiveHost, version: int) -> None:
    rig.change(A, slot=1, flags=ALLOW | ConfigFlags.DENY_EGRESS)
    for protocol in (TCP, UDP):
        key = PolicyKey(0, policy.Direction.EGRESS, protocol, JUDGED_PORT, 16)
        rig.rule(1, key, PolicyEntry(Verdict.ALLOW, 1, 41))
    begin, kind = (BEHIND_4, TCP_4) if version == 4 else (BEHIND_6, TCP_6)
    last = (four if version == 4 else six)(tcp(4000, JUDGED_PORT, 16, b"last" * 300))
    honest = headed(kind, NEEDS_CSUM, 500, begin + 20, A.frame(last), begin)
    ports: collections.Counter[int] = collections.Counter()
    with live.pods["a"].raw_socket() as packets, live.pods["b"].raw_socket() as taken:
        packets.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        taken.setblocking(False)

        def take() -> list[bytes]:
            frames = take_all(taken)
            ports.update(port_of(frame) for frame in frames if frame[:6] == mac(B.pod_mac))
            return frames

        for forged in forged_segments(version):
            with contextlib.suppress(OSError):  # that the kernel itself refuses
                packets.send(forged)
            take()
        packets.send(honest)
        assert eventually(lambda: any(b"lastlast" in frame for frame in take()))
    assert ports[JUDGED_PORT], "some of them pass"
    assert not ports[OTHER_PORT]
