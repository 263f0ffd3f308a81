"""A pod uses the ports of a direct connection again, for one that the stack translates to the same peer (rule 14)."""

import ipaddress
import time
from typing import Final

import pytest

from podwire.datapath.abi import Action, ConntrackFlags, ConntrackValue, Path, TcpState
from podwire.datapath.maps import to_mapped
from tests.packet import netdev, overlay
from tests.packet.frames import ACK, FIN, RST, SYN, Segment, tcp, udp
from tests.packet.netdev import TC_ACT_UNSPEC
from tests.packet.overlay import FAR, enter, packet
from tests.packet.rig import OUTSIDE, TUNNEL, WORLD_4, A, B, Rig

pytestmark = pytest.mark.packet

NS: Final = 1_000_000_000
STACK_CELLS: Final = 512
"""As maps.h says: ports that a pod is remembered for."""
SYN_ACK = SYN | ACK
VIP: Final = {4: "10.96.0.1", 6: "fd96::1"}
DIRECT_SYN: Final = tcp(4000, 80, SYN, sequence=1000)
DIRECT_ANSWER: Final = tcp(80, 4000, SYN_ACK, sequence=5000, acknowledged=1001)
OTHER_SYN: Final = tcp(4000, 80, SYN, sequence=700_000)
OTHER_ANSWER: Final = tcp(80, 4000, SYN_ACK, sequence=900_000, acknowledged=700_001)
PIECES: Final[dict[str, list[tuple[bool, Segment]]]] = {
    # whether the pod sends it -> segment
    "unanswered": [(True, DIRECT_SYN)],
    "its end was lost": [
        (True, DIRECT_SYN),
        (False, DIRECT_ANSWER),
        (True, tcp(4000, 80, ACK, sequence=1001, acknowledged=5001)),
    ],
    "half closed": [
        (True, DIRECT_SYN),
        (False, DIRECT_ANSWER),
        (True, tcp(4000, 80, ACK, sequence=1001, acknowledged=5001)),
        (True, tcp(4000, 80, FIN | ACK, sequence=1001, acknowledged=5001)),
    ],
    "closed": [
        (True, DIRECT_SYN),
        (False, DIRECT_ANSWER),
        (True, tcp(4000, 80, ACK, sequence=1001, acknowledged=5001)),
        (True, tcp(4000, 80, FIN | ACK, sequence=1001, acknowledged=5001)),
        (False, tcp(80, 4000, FIN | ACK, sequence=5001, acknowledged=1002)),
    ],
    "reset": [(True, DIRECT_SYN), (False, tcp(80, 4000, RST | ACK, sequence=0))],
}
AFTERWARDS: Final = [
    tcp(80, 4000, ACK, b"line", sequence=900_001, acknowledged=700_001),
    tcp(80, 4000, FIN | ACK, sequence=900_005, acknowledged=700_001),
]


def out(segment: Segment, version: int, *, to: str = "") -> bytes:
    """Make a packet of A, to the known pod of the other node unless said otherwise."""
    return packet(A.address(version), to or FAR.pod(version), segment)


def back(segment: Segment, version: int) -> bytes:
    """Make a packet of that pod to A."""
    return packet(FAR.pod(version), A.address(version), segment)


def direct_entry(rig: Rig, version: int) -> ConntrackValue:
    """Give what is remembered of A's ports with that pod."""
    peer = to_mapped(ipaddress.ip_address(FAR.pod(version)))
    [entry] = [
        value
        for key, value in rig.entries(A).items()
        if key.daddr == peer and not value.flags & ConntrackFlags.LEFT
    ]
    return entry


def exchange(rig: Rig, segments: list[tuple[bool, Segment]], version: int, *, native: bool) -> None:
    """Let a direct connection pass, and see that it does."""
    for is_sent, segment in segments:
        if is_sent:
            action = rig.sent(A, out(segment, version)).action
            assert action == (Action.NATIVE if native else Action.TUNNEL)
            continue
        arrive = netdev.arrive if native else overlay.arrive
        assert arrive(rig, back(segment, version)).action == Action.PEER


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("before", PIECES)
def test_natively_the_answer_and_all_that_follows_is_left_to_the_stack(
    rig: Rig, before: str, version: int
) -> None:
    netdev.connect(rig)
    exchange(rig, PIECES[before], version, native=True)
    assert rig.sent(A, out(OTHER_SYN, version, to=VIP[version])).action == Action.STACK
    for segment in (OTHER_ANSWER, *AFTERWARDS):
        assert netdev.arrive(rig, back(segment, version)).retval == TC_ACT_UNSPEC


@pytest.mark.parametrize("version", [4, 6])
def test_natively_ports_that_are_used_directly_again_take_the_direct_way(
    rig: Rig, version: int
) -> None:
    netdev.connect(rig)
    exchange(rig, PIECES["closed"], version, native=True)
    netdev.arrive(rig, back(OTHER_ANSWER, version))
    assert rig.sent(A, out(OTHER_SYN, version)).action == Action.NATIVE
    assert netdev.arrive(rig, back(OTHER_ANSWER, version)).action == Action.PEER
    assert direct_entry(rig, version).path == Path.NATIVE


REPEATED: Final = {
    "the first answer": [],
    "its repetition": [(False, DIRECT_ANSWER)],
    "another number while it is not confirmed": [
        (False, tcp(80, 4000, SYN_ACK, sequence=4999, acknowledged=1001))
    ],
    "its repetition to a confirmed connection": PIECES["its end was lost"][1:],
    "its repetition to a half closed one": PIECES["half closed"][1:],
}


@pytest.mark.parametrize("before", REPEATED)
@pytest.mark.parametrize("repeated", [1, 2])
def test_natively_an_answer_to_the_connection_itself_goes_past_the_stack(
    rig: Rig, before: str, repeated: int
) -> None:
    netdev.connect(rig)
    for _ in range(repeated):
        rig.sent(A, out(DIRECT_SYN, 4))
    exchange(rig, REPEATED[before], 4, native=True)
    assert netdev.arrive(rig, back(DIRECT_ANSWER, 4)).action == Action.PEER
    assert netdev.arrive(rig, back(tcp(80, 4000, ACK), 4)).action == Action.PEER


@pytest.mark.parametrize(("acknowledged", "is_its_own"), [(1001, True), (2401, True), (999, False)])
def test_natively_an_answer_may_acknowledge_what_the_first_segment_carried(
    rig: Rig, acknowledged: int, is_its_own: bool
) -> None:
    netdev.connect(rig)
    rig.sent(A, out(tcp(4000, 80, SYN, bytes(1400), sequence=1000), 4))
    answer = tcp(80, 4000, SYN_ACK, sequence=1, acknowledged=acknowledged)
    outcome = netdev.arrive(rig, back(answer, 4))
    assert (outcome.action == Action.PEER) == is_its_own


def test_natively_the_entry_of_an_earlier_build_knows_its_answer(rig: Rig) -> None:
    """It has no number while nobody has answered."""
    netdev.connect(rig)
    rig.sent(A, out(DIRECT_SYN, 4))
    rig.change_entry(rig.entry(A)[0], answer=0)
    assert netdev.arrive(rig, back(DIRECT_ANSWER, 4)).action == Action.PEER


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("protocol", [17, 136, 132], ids=["udp", "udp-lite", "sctp"])
def test_natively_a_datagram_port_that_asked_through_the_stack_is_left_to_it(
    rig: Rig, protocol: int, version: int
) -> None:
    """Nothing in an answer tells whom it is for; the stack keeps both flows apart where it sees both."""
    netdev.connect(rig)
    ask, answer = (Segment(protocol, udp(*ports).data) for ports in ((4000, 53), (53, 4000)))
    assert rig.sent(A, out(ask, version)).action == Action.NATIVE
    assert netdev.arrive(rig, back(answer, version)).action == Action.PEER
    assert rig.sent(A, out(ask, version, to=VIP[version])).action == Action.STACK
    assert netdev.arrive(rig, back(answer, version)).retval == TC_ACT_UNSPEC
    assert rig.sent(A, out(ask, version)).action == Action.STACK
    assert netdev.arrive(rig, back(answer, version)).retval == TC_ACT_UNSPEC


def stop_clock(rig: Rig) -> None:
    """Let what A has asked be asked just now, however slow this machine is."""
    soon_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + 60 * NS
    for key in rig.entries(A):
        rig.change_entry(key, last_seen_ns=soon_ns)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("questions", [1, 2])
def test_natively_an_answer_under_way_is_the_pods_though_it_asks_through_the_stack_meanwhile(
    rig: Rig, questions: int, version: int
) -> None:
    netdev.connect(rig)
    ask, answer = udp(4000, 53), udp(53, 4000)
    for _ in range(questions):
        assert rig.sent(A, out(ask, version)).action == Action.NATIVE
    assert rig.sent(A, out(ask, version, to=VIP[version])).action == Action.STACK
    for _ in range(questions):
        stop_clock(rig)
        assert netdev.arrive(rig, back(answer, version)).action == Action.PEER
    assert netdev.arrive(rig, back(answer, version)).retval == TC_ACT_UNSPEC


@pytest.mark.parametrize("version", [4, 6])
def test_natively_an_answer_to_the_port_that_the_stack_chose_is_left_to_it(
    rig: Rig, version: int
) -> None:
    """It gives one of two flows of one tuple another port, which the pod may have used directly before."""
    netdev.connect(rig)
    for port in (5000, 5001, 5002):
        rig.sent(A, out(udp(port, 53), version))
        assert netdev.arrive(rig, back(udp(53, port), version)).action == Action.PEER
    rig.sent(A, out(udp(4000, 53), version, to=VIP[version]))
    # As long as the stack has nothing else for this peer it chooses none.
    assert netdev.arrive(rig, back(udp(53, 5000), version)).action == Action.PEER
    assert rig.sent(A, out(udp(4000, 53), version)).action == Action.STACK
    assert netdev.arrive(rig, back(udp(53, 5001), version)).retval == TC_ACT_UNSPEC
    assert rig.sent(A, out(udp(5001, 53), version)).action == Action.STACK
    # The controls: what the pod waits for, another peer, another pod.
    assert rig.sent(A, out(udp(5002, 53), version)).action == Action.NATIVE
    stop_clock(rig)
    assert netdev.arrive(rig, back(udp(53, 5002), version)).action == Action.PEER
    for pod, peer in ((A, FAR.stranger(version)), (B, FAR.pod(version))):
        there = packet(pod.address(version), peer, udp(5001, 53))
        assert rig.sent(pod, there).action == Action.NATIVE
        for _ in range(2):
            home = packet(peer, pod.address(version), udp(53, 5001))
            assert netdev.arrive(rig, home).action == Action.PEER


def test_natively_no_pod_forgets_its_ports_for_anothers(rig: Rig) -> None:
    netdev.connect(rig)
    rig.sent(A, out(udp(4000, 53), 4, to=VIP[4]))
    for port in range(1024, 1024 + 4 * STACK_CELLS):
        rig.sent(B, packet(B.ipv4, VIP[4], udp(port, 53)))
    assert rig.sent(A, out(udp(4000, 53), 4)).action == Action.STACK
    # The control: a pod that asks by so many ports forgets the first of its own.
    fresh = [
        rig.sent(B, packet(B.ipv4, FAR.pod(4), udp(port, 53))).action
        for port in range(1024, 1024 + STACK_CELLS)
    ]
    assert Action.NATIVE in fresh


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("first", ["the service", "the peer"])
def test_natively_other_datagram_ports_and_pods_go_past_the_stack(
    rig: Rig, first: str, version: int
) -> None:
    netdev.connect(rig)
    ask = udp(4000, 53)
    rig.sent(A, out(ask, version, to=VIP[version] if first == "the service" else ""))
    for port in (3999, 4001):
        assert rig.sent(A, out(udp(port, 53), version)).action == Action.NATIVE
    of_b = packet(B.address(version), FAR.pod(version), ask)
    assert rig.sent(B, of_b).action == Action.NATIVE
    assert (rig.sent(A, out(ask, version)).action == Action.NATIVE) == (first == "the peer")


def test_natively_what_a_pod_answers_through_the_stack_marks_no_port(rig: Rig) -> None:
    """A server whose clients come through the stack asks nobody there."""
    netdev.connect(rig)
    question = packet(WORLD_4, A.ipv4, udp(53, 4000))
    assert rig.received(A, question, ingress_ifindex=OUTSIDE).action == Action.STACK
    assert rig.sent(A, packet(A.ipv4, WORLD_4, udp(4000, 53))).action == Action.STACK
    assert rig.sent(A, out(udp(4000, 53), 4)).action == Action.NATIVE


def test_natively_a_connection_takes_the_short_way_from_a_port_of_datagrams(rig: Rig) -> None:
    netdev.connect(rig)
    rig.sent(A, out(udp(4000, 53), 4, to=VIP[4]))
    exchange(rig, PIECES["half closed"], 4, native=True)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("before", PIECES)
def test_by_the_tunnel_the_answer_and_all_that_follows_is_handed_to_the_stack(
    rig: Rig, before: str, version: int
) -> None:
    overlay.connect(rig)
    exchange(rig, PIECES[before], version, native=False)
    assert rig.sent(A, out(OTHER_SYN, version, to=VIP[version])).action == Action.STACK
    enter(rig, out(OTHER_SYN, version), ingress_ifindex=A.ifindex)
    for segment in (OTHER_ANSWER, *AFTERWARDS):
        handed = overlay.arrive(rig, back(segment, version))
        assert (handed.action, handed.path) == (Action.STACK, Path.STACK)


def test_by_the_tunnel_a_translated_connection_outlives_the_closed_direct_one(rig: Rig) -> None:
    overlay.connect(rig)
    exchange(rig, PIECES["closed"], 4, native=False)
    enter(rig, out(OTHER_SYN, 4), ingress_ifindex=A.ifindex)
    entry = direct_entry(rig, 4)
    assert entry.flags & ConntrackFlags.TRANSLATED
    assert entry.tcp_state == TcpState.OPENING


@pytest.mark.parametrize("version", [4, 6])
def test_by_the_tunnel_the_latest_datagram_decides_who_gets_the_answer(
    rig: Rig, version: int
) -> None:
    overlay.connect(rig)
    ask, answer = udp(4000, 53), udp(53, 4000)
    for _ in range(2):
        assert rig.sent(A, out(ask, version)).action == Action.TUNNEL
        assert overlay.arrive(rig, back(answer, version)).action == Action.PEER
        rig.sent(A, out(ask, version, to=VIP[version]))
        enter(rig, out(ask, version), ingress_ifindex=A.ifindex)
        assert overlay.arrive(rig, back(answer, version)).action == Action.STACK


def test_by_the_tunnel_what_a_pod_sends_through_the_stack_itself_is_counted_once(rig: Rig) -> None:
    overlay.connect(rig)
    for segment in (DIRECT_SYN, tcp(4000, 80, ACK, sequence=1001)):
        rig.write_settings()
        assert rig.sent(A, out(segment, 4)).action == Action.STACK
        rig.write_settings(tunnel_ifindex=TUNNEL)
        enter(rig, out(segment, 4), ingress_ifindex=A.ifindex)
    assert direct_entry(rig, 4).packets == (2, 0)
