"""What can be seen from outside: drops always, passes where someone watches, never more than a reader can take."""

import ipaddress
import time

import pytest

from podwire.datapath.abi import ConfigFlags, Direction, DropReason, Event, EventKind, Hook, Path
from podwire.datapath.flow_events import decode_event
from podwire.datapath.maps import to_mapped
from tests.packet import frames
from tests.packet.frames import ipv4, ipv6, tcp, udp
from tests.packet.rig import ALLOW, GUARD, OUTSIDE, WORLD_4, A, B, Rig

pytestmark = pytest.mark.packet

TRACE = ConfigFlags.TRACE
TOLERATED_DROPS_PER_SECOND = 200
TOLERATED_TRACES_PER_SECOND = 400
FLOOD = 3000


def test_a_drop_is_told_with_all_that_is_known(rig: Rig) -> None:
    rig.change(B, flags=ALLOW | ConfigFlags.DENY_INGRESS)
    packet = ipv4(A.ipv4, B.ipv4, tcp(4000, 80, frames.SYN))
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    rig.sent(A, packet)
    [event] = rig.take_events()
    assert before <= event.time_ns <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert (event.kind, event.reason, event.hook) == (
        EventKind.DROP,
        DropReason.POLICY,
        Hook.FROM_POD,
    )
    assert (event.instance, event.direction) == (B.instance, Direction.INGRESS)
    assert (event.source_identity, event.destination_identity) == (A.identity, B.identity)
    assert (event.ifindex, event.path, event.rule) == (A.ifindex, Path.LOCAL, 901)
    assert (event.protocol, event.tcp_flags, event.ethertype) == (
        frames.TCP,
        frames.SYN,
        frames.ETH_P_IP,
    )
    assert (event.sport, event.dport) == (4000, 80)
    assert event.saddr.endswith(bytes([10, 7, 0, 10]))
    assert event.daddr.endswith(bytes([10, 7, 0, 11]))
    assert event.source_mac.hex(":") == A.pod_mac
    assert (event.length_bytes, event.lost) == (len(A.frame(packet)), 0)


def test_a_frame_that_cannot_be_read_is_told_with_its_mac(rig: Rig) -> None:
    rig.run(
        "from_pod", A.ifindex, A.frame(ipv4(A.ipv4, B.ipv4, udp(1, 2)), source="02:00:00:00:00:99")
    )
    [event] = rig.take_events()
    assert (event.reason, event.instance) == (DropReason.SOURCE_MAC, A.instance)
    assert event.source_mac.hex(":") == "02:00:00:00:00:99"


def test_a_drop_that_was_answered_is_told_as_the_pod_sent_it(rig: Rig) -> None:
    packet = ipv6(A.ipv6, B.ipv6, udp(4000, 53), hop_limit=1)
    rig.sent(A, packet)
    [event] = rig.take_events()
    assert (event.kind, event.reason) == (EventKind.DROP, DropReason.TTL)
    assert event.saddr == to_mapped_text(A.ipv6)
    assert event.source_mac.hex(":") == A.pod_mac


def to_mapped_text(address: str) -> bytes:
    return to_mapped(ipaddress.ip_address(address))


def test_a_guard_tells_what_it_drops(rig: Rig) -> None:
    rig.sent(GUARD, ipv4(GUARD.ipv4, WORLD_4, udp(1, 2)))
    [event] = rig.take_events()
    assert (event.instance, event.reason) == (GUARD.instance, DropReason.NO_ENDPOINT)


def test_a_device_that_is_nobodys_is_only_counted(rig: Rig) -> None:
    rig.forget_metrics()
    rig.run("from_pod", OUTSIDE, A.frame(ipv4(A.ipv4, WORLD_4, udp(1, 2))))
    assert not rig.take_events()
    assert (Hook.FROM_POD, DropReason.NO_ENDPOINT, Path.NONE) in rig.metrics()


def test_passes_are_told_where_someone_watches(rig: Rig) -> None:
    packet = ipv4(A.ipv4, B.ipv4, udp(4000, 53))
    rig.sent(A, packet)
    rig.take_events()
    rig.sent(A, packet)
    assert not rig.take_events()
    rig.change(A, flags=ALLOW | TRACE)
    rig.sent(A, packet)
    [event] = rig.take_events()
    assert (event.kind, event.reason, event.path) == (EventKind.TRACE, DropReason.NONE, Path.LOCAL)


def test_a_verdict_is_told_when_one_was_made(rig: Rig) -> None:
    rig.change(A, flags=ALLOW | TRACE)
    packet = ipv4(A.ipv4, WORLD_4, udp(4000, 53))
    rig.sent(A, packet)
    rig.sent(A, packet)
    assert [event.kind for event in rig.take_events()] == [EventKind.POLICY, EventKind.TRACE]


@pytest.mark.parametrize("target", [B.ipv4, WORLD_4], ids=["pod", "world"])
def test_a_new_flow_is_told_once_though_no_rule_spoke_and_nobody_watches(
    rig: Rig, target: str
) -> None:
    packet = ipv4(A.ipv4, target, udp(4000, 53))
    for _ in range(3):
        rig.sent(A, packet)
    [event] = rig.take_events()
    assert (event.kind, event.reason) == (EventKind.POLICY, DropReason.NONE)


def test_what_audit_lets_pass_is_told_without_watching(rig: Rig) -> None:
    rig.change(A, flags=ALLOW | ConfigFlags.DENY_EGRESS | ConfigFlags.AUDIT)
    rig.sent(A, ipv4(A.ipv4, WORLD_4, udp(4000, 53)))
    [event] = rig.take_events()
    assert (event.kind, event.reason, event.rule) == (EventKind.POLICY, DropReason.POLICY, 900)


def test_a_flood_of_drops_is_told_in_part_and_the_rest_counted(rig: Rig) -> None:
    rig.forget_metrics()
    packet = ipv4(B.ipv4, WORLD_4, udp(1, 2))
    sent = FLOOD
    begin = time.monotonic()
    rig.flood(A, packet, sent)
    events = rig.take_events()
    seconds = time.monotonic() - begin
    assert TOLERATED_DROPS_PER_SECOND <= len(events) <= TOLERATED_DROPS_PER_SECOND * (seconds + 2)
    assert rig.metrics()[Hook.FROM_POD, DropReason.SOURCE_ADDRESS, Path.NONE][0] == sent
    rig.run("from_pod", B.ifindex, B.frame(packet, source=A.pod_mac))
    assert len(rig.take_events()) == 1  # another endpoint has its own share


def test_a_flood_that_passes_does_not_hide_the_drops(rig: Rig) -> None:
    rig.change(A, flags=ALLOW | TRACE)
    passing = ipv4(A.ipv4, WORLD_4, udp(4000, 53))
    begin = time.monotonic()
    rig.flood(A, passing, 4 * TOLERATED_TRACES_PER_SECOND)
    rig.sent(A, ipv4(B.ipv4, WORLD_4, udp(1, 2)))
    events = rig.take_events()
    seconds = time.monotonic() - begin
    assert len(events) > TOLERATED_TRACES_PER_SECOND
    assert len(events) <= TOLERATED_TRACES_PER_SECOND * (seconds + 2) + 1
    assert events[-1].reason == DropReason.SOURCE_ADDRESS


def test_the_next_event_tells_how_many_were_lost(rig: Rig) -> None:
    packet = ipv4(B.ipv4, WORLD_4, udp(1, 2))
    told: list[Event] = []
    sent = 0
    while not any(event.lost for event in told):
        rig.flood(A, packet, FLOOD)
        sent += FLOOD
        told += rig.take_events()
        while not (last := rig.take_events()):
            rig.sent(A, packet)
            sent += 1
        told += last
    assert sum(event.lost for event in told) + len(told) == sent


@pytest.mark.parametrize("address", ["10.96.0.1", "fd96::1", ""])
def test_the_destination_that_a_sender_meant_is_shown_where_one_was_translated(
    rig: Rig, address: str
) -> None:
    rig.change(A, flags=ALLOW | TRACE)
    rig.sent(A, ipv4(A.ipv4, B.ipv4, udp(4000, 53)))
    event = rig.take_events()[0]
    assert not any(event.original_daddr)
    meant = to_mapped(ipaddress.ip_address(address)) if address else bytes(16)
    shown = decode_event(event._replace(original_daddr=meant, original_dport=443))
    assert shown.original_destination == address
    assert shown.destination == B.ipv4
