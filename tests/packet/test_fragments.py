"""A later fragment has no ports: it passes only behind its first one, and is judged as that."""

import pytest

from podwire.datapath.abi import Action, ConfigFlags, DropReason, Path
from tests.packet import frames
from tests.packet.frames import (
    DESTINATION,
    FRAGMENT,
    MORE_FRAGMENTS,
    Segment,
    echo,
    extension,
    fragment_header,
    ipv4,
    ipv6,
    raw,
    tcp,
    udp,
)
from tests.packet.rig import ALLOW, WORLD_4, A, B, Endpoint, Rig

pytestmark = [pytest.mark.packet, pytest.mark.parametrize("version", [4, 6])]

WHOLE = udp(4000, 53, bytes(range(200)) * 4)
CUT = 400
REST = raw(WHOLE.protocol, WHOLE.data[CUT:])


def piece(
    version: int, segment: Segment, offset: int, more: bool, *, number: int = 7, to: Endpoint = B
) -> bytes:
    """Make a fragment of a packet from A."""
    if version == 4:
        field = offset // 8 | (MORE_FRAGMENTS if more else 0)
        return ipv4(A.ipv4, to.ipv4, segment, fragment=field, identification=number)
    header = (FRAGMENT, fragment_header(offset, more=more, identification=number))
    return ipv6(A.ipv6, to.ipv6, segment, extensions=[header])


def first(version: int, *, number: int = 7, to: Endpoint = B) -> bytes:
    return piece(version, Segment(WHOLE.protocol, WHOLE.data[:CUT]), 0, True, number=number, to=to)


def later(version: int, *, number: int = 7, to: Endpoint = B) -> bytes:
    return piece(version, REST, CUT, False, number=number, to=to)


def test_fragments_in_order_pass_as_one_flow(rig: Rig, version: int) -> None:
    for packet in (first(version), later(version)):
        outcome = rig.sent(A, packet)
        assert (outcome.action, outcome.path) == (Action.PEER, Path.LOCAL)
    key, value = rig.entry(A)
    assert (key.sport, key.dport) == (4000, 53)
    assert value.packets == (2, 0)


def test_the_rig_forgets_pieces_and_looks_for_none_behind_whole_packets(
    rig: Rig, version: int
) -> None:
    rig.sent(A, first(version))
    rig.reset()
    assert rig.sent(A, later(version)).reason == DropReason.FRAGMENT
    rig.reset()
    rig.sent(A, ipv4(A.ipv4, B.ipv4, WHOLE) if version == 4 else ipv6(A.ipv6, B.ipv6, WHOLE))
    assert not rig.has_pieces


def test_a_later_fragment_that_comes_first_is_refused(rig: Rig, version: int) -> None:
    outcome = rig.sent(A, later(version))
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.FRAGMENT)
    assert rig.sent(A, first(version)).action == Action.PEER
    assert rig.sent(A, later(version)).action == Action.PEER


def test_fragments_of_another_packet_do_not_count(rig: Rig, version: int) -> None:
    rig.sent(A, first(version, number=1))
    assert rig.sent(A, later(version, number=2)).reason == DropReason.FRAGMENT


def test_fragments_to_another_pod_do_not_count(rig: Rig, version: int) -> None:
    rig.sent(A, first(version))
    assert rig.sent(A, piece(version, REST, CUT, False, to=A)).reason == DropReason.FRAGMENT


def test_a_later_fragment_is_judged_by_its_first_ones_ports(rig: Rig, version: int) -> None:
    rig.sent(A, first(version))
    rig.change(A, flags=ALLOW | ConfigFlags.DENY_EGRESS, revision=2)
    assert rig.sent(A, later(version)).reason == DropReason.POLICY


def test_a_fragment_may_not_cut_the_tcp_header(rig: Rig, version: int) -> None:
    header = tcp(4000, 80, frames.SYN)
    short = piece(version, Segment(frames.TCP, header.data[:16]), 0, True)
    assert rig.sent(A, short).reason == DropReason.TRUNCATED


@pytest.mark.parametrize("offset", [8, 16])
def test_a_fragment_may_not_overwrite_the_tcp_header(rig: Rig, version: int, offset: int) -> None:
    rig.sent(
        A, piece(version, Segment(frames.TCP, tcp(4000, 80, frames.SYN).data + bytes(44)), 0, True)
    )
    overwriting = piece(version, raw(frames.TCP, bytes(64)), offset, False)
    assert rig.sent(A, overwriting).reason == DropReason.HEADER
    behind = piece(version, raw(frames.TCP, bytes(64)), 64, False)
    assert rig.sent(A, behind).reason == DropReason.NONE


def test_fragments_of_an_echo_are_its_flow_both_ways(rig: Rig, version: int) -> None:
    rig.change(A, flags=ALLOW | ConfigFlags.DENY_INGRESS)
    protocol = frames.ICMP if version == 4 else frames.ICMPV6
    ask, answer = (
        echo(version, 9, payload=bytes(800)),
        echo(version, 9, reply=True, payload=bytes(800)),
    )
    for segment, sender, build in ((ask, A, piece), (answer, B, _from_b)):
        for data, offset, more in ((segment.data[:CUT], 0, True), (segment.data[CUT:], CUT, False)):
            outcome = rig.sent(sender, build(version, raw(protocol, data), offset, more))
            assert (outcome.action, outcome.reason) == (Action.PEER, DropReason.NONE)


def _from_b(version: int, segment: Segment, offset: int, more: bool) -> bytes:
    if version == 4:
        field = offset // 8 | (MORE_FRAGMENTS if more else 0)
        return ipv4(B.ipv4, A.ipv4, segment, fragment=field)
    return ipv6(
        B.ipv6, A.ipv6, segment, extensions=[(FRAGMENT, fragment_header(offset, more=more))]
    )


def test_fragments_to_a_pod_are_put_together_there_too(rig: Rig, version: int) -> None:
    packets = [first(version, to=B), later(version, to=B)]
    assert rig.received(B, packets[1], ingress_ifindex=A.ifindex).reason == DropReason.FRAGMENT
    for packet in packets:
        assert rig.received(B, packet, ingress_ifindex=A.ifindex).action == Action.STACK


def test_headers_behind_the_fragment_header_do_not_hide_the_protocol(
    rig: Rig, version: int
) -> None:
    if version == 4:
        assert rig.sent(A, ipv4(A.ipv4, WORLD_4, WHOLE)).reason == DropReason.NONE
        return
    options = extension()
    begin = bytes([WHOLE.protocol]) + options[1:] + WHOLE.data[:CUT]
    assert rig.sent(A, piece(6, raw(DESTINATION, begin), 0, True)).reason == DropReason.NONE
    assert (
        rig.sent(A, piece(6, raw(DESTINATION, WHOLE.data[CUT:]), 8 + CUT, False)).action
        == Action.PEER
    )
    key, value = rig.entry(A)
    assert (key.protocol, key.dport, value.packets) == (frames.UDP, 53, (2, 0))
