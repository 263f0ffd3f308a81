"""How a packet is handed to a local pod: its MACs, its hop, its mark, and the way that keeps a rate limit."""

from dataclasses import replace

import pytest

from podwire.datapath.abi import MARK_JUDGED, Action, ConfigFlags, DropReason, Hook, Path
from tests.packet import frames
from tests.packet.frames import check_frame, ethernet, ipv4, ipv6, tcp, udp
from tests.packet.rig import ALLOW, GUARD, OUTSIDE, SHAPED, WORLD_4, A, B, Endpoint, Rig

pytestmark = pytest.mark.packet

TC_ACT_OK, TC_ACT_SHOT, TC_ACT_REDIRECT = 0, 2, 7


def packet_to(endpoint: Endpoint, version: int, ttl: int = 64) -> bytes:
    if version == 4:
        return ipv4(A.ipv4, endpoint.ipv4, udp(4000, 53), ttl=ttl)
    return ipv6(A.ipv6, endpoint.ipv6, udp(4000, 53), hop_limit=ttl)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("ttl", [2, 64, 255])
def test_a_local_pod_gets_the_frame_its_gateway_would_send(
    rig: Rig, version: int, ttl: int
) -> None:
    outcome = rig.sent(A, packet_to(B, version, ttl))
    assert (outcome.action, outcome.path) == (Action.PEER, Path.LOCAL)
    assert outcome.retval == TC_ACT_REDIRECT
    assert outcome.decision.target_ifindex == B.ifindex
    assert outcome.data == B.frame_in(packet_to(B, version, ttl - 1))
    assert not check_frame(outcome.data)


def test_the_header_checksum_is_right_for_every_value_of_the_field(rig: Rig) -> None:
    for number in range(0, 65536, 257):
        packet = ipv4(A.ipv4, B.ipv4, udp(4000, 53), identification=number)
        assert not check_frame(rig.sent(A, packet).data), number


def test_options_do_not_disturb_the_header_checksum(rig: Rig) -> None:
    packet = ipv4(A.ipv4, B.ipv4, udp(4000, 53), options=b"\1" * 40)
    assert not check_frame(rig.sent(A, packet).data)


@pytest.mark.parametrize("mark", [1, 0xFFFFFFFF, MARK_JUDGED])
def test_the_pod_sees_no_mark(rig: Rig, mark: int) -> None:
    outcome = rig.sent(A, packet_to(B, 4), mark=mark)
    assert (outcome.action, outcome.mark) == (Action.PEER, 0)


@pytest.mark.parametrize("mark", [0, 7])
def test_a_pod_with_a_rate_is_reached_through_its_queue(rig: Rig, mark: int) -> None:
    outcome = rig.sent(A, packet_to(SHAPED, 4), mark=mark)
    assert (outcome.action, outcome.retval) == (Action.EGRESS, TC_ACT_REDIRECT)
    assert outcome.decision.target_ifindex == SHAPED.ifindex
    assert outcome.mark == MARK_JUDGED
    assert outcome.data == SHAPED.frame_in(packet_to(SHAPED, 4, 63))


def test_what_was_judged_passes_the_queue_without_another_verdict(rig: Rig) -> None:
    rig.sent(A, packet_to(SHAPED, 4))
    denying = rig.change(SHAPED, flags=SHAPED.flags | ConfigFlags.DENY_INGRESS, revision=2)
    packet = packet_to(SHAPED, 4, 63)
    outcome = rig.received(denying, packet, mark=MARK_JUDGED, ingress_ifindex=A.ifindex)
    assert (outcome.action, outcome.retval, outcome.mark) == (Action.STACK, TC_ACT_OK, 0)
    _, entry = rig.entry(SHAPED)
    assert entry.packets == (1, 0)


@pytest.mark.parametrize(
    ("ingress_ifindex", "mark", "reason"),
    [
        (0, MARK_JUDGED, DropReason.POLICY),
        (OUTSIDE, MARK_JUDGED, DropReason.SOURCE_ADDRESS),
        (A.ifindex, MARK_JUDGED ^ 1, DropReason.POLICY),
        (A.ifindex, 0, DropReason.POLICY),
    ],
    ids=["of-this-host", "from-a-foreign-device", "another-mark", "no-mark"],
)
def test_a_forged_mark_opens_nothing(
    rig: Rig, ingress_ifindex: int, mark: int, reason: DropReason
) -> None:
    flags = (SHAPED.flags | ConfigFlags.DENY_INGRESS) & ~ConfigFlags.HOST_ALLOWED
    denying = rig.change(SHAPED, flags=flags)
    outcome = rig.received(
        denying, packet_to(SHAPED, 4), mark=mark, ingress_ifindex=ingress_ifindex
    )
    assert (outcome.action, outcome.reason) == (Action.DROP, reason)


def test_a_mark_does_not_pass_a_guard(rig: Rig) -> None:
    outcome = rig.received(GUARD, packet_to(GUARD, 4), mark=MARK_JUDGED, ingress_ifindex=A.ifindex)
    assert outcome.reason == DropReason.NO_ENDPOINT


def test_a_target_behind_its_guard_gets_nothing(rig: Rig) -> None:
    outcome = rig.sent(A, packet_to(GUARD, 4))
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.NO_ENDPOINT)


def test_a_row_of_an_address_that_its_endpoint_does_not_have_leads_nowhere(rig: Rig) -> None:
    rig.publish(replace(B, ipv4="10.7.0.77", ipv6="fd07::77"))
    for packet in (ipv4(A.ipv4, "10.7.0.77", udp(1, 2)), ipv6(A.ipv6, "fd07::77", udp(1, 2))):
        assert rig.sent(A, packet).reason == DropReason.NO_ENDPOINT


def test_a_pod_reaches_itself(rig: Rig) -> None:
    outcome = rig.sent(A, packet_to(A, 4))
    assert (outcome.action, outcome.decision.target_ifindex) == (Action.PEER, A.ifindex)
    assert len(rig.entries(A)) == 2


def test_a_frame_for_no_one_is_not_changed(rig: Rig) -> None:
    frame = ethernet(
        A.host_mac, A.pod_mac, frames.ETH_P_IP, ipv4(A.ipv4, WORLD_4, tcp(1, 2, frames.SYN))
    )
    assert rig.run("from_pod", A.ifindex, frame).data == frame


def test_drops_and_passes_are_counted_with_their_bytes(rig: Rig) -> None:
    rig.forget_metrics()
    packet = packet_to(B, 4)
    for _ in range(3):
        rig.sent(A, packet)
    rig.change(A, flags=ALLOW | ConfigFlags.DENY_EGRESS, revision=2)
    rig.sent(A, packet)
    size = len(A.frame(packet))
    metrics = rig.metrics()
    assert metrics[Hook.FROM_POD, DropReason.NONE, Path.LOCAL] == (3, 3 * size)
    assert metrics[Hook.FROM_POD, DropReason.POLICY, Path.NONE] == (1, size)
