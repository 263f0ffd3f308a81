"""What natively reached nodes' pods send goes past the stack, or is left alone; and never half a flow of it."""

from collections.abc import Callable

import pytest

from podwire.datapath.abi import (
    MARK_JUDGED,
    Action,
    ConfigFlags,
    Direction,
    DropReason,
    Hook,
    Identity,
    IpcacheFlags,
    Path,
    TcpState,
)
from tests.packet import frames
from tests.packet.frames import (
    ACK,
    DESTINATION,
    FIN,
    FRAGMENT,
    HOP_BY_HOP,
    MORE_FRAGMENTS,
    RST,
    SYN,
    check_frame,
    echo,
    extension,
    fragment_header,
    icmp,
    icmpv6,
    ipv4,
    ipv6,
    tcp,
    udp,
    vlan,
)
from tests.packet.netdev import (
    DIRECT,
    FAR_MAC,
    TC_ACT_OK,
    TC_ACT_REDIRECT,
    TC_ACT_UNSPEC,
    UNDERLAY,
    arrive,
    arrive_frame,
    connect,
    frame_of,
    is_left_alone,
    out,
    to,
)
from tests.packet.overlay import FAR, packet, remove_node, write_node, write_prefix
from tests.packet.rig import (
    ALLOW,
    GUARD,
    NOBODY_4,
    NODE_4,
    NODE_6,
    SHAPED,
    SMALL,
    TUNNEL,
    WORLD_4,
    WORLD_6,
    A,
    B,
    Rig,
)

pytestmark = pytest.mark.packet

SYN_ACK = SYN | ACK
IN = ConfigFlags.DENY_INGRESS
RECORD_ROUTE = bytes([7, 7, 4, 0, 0, 0, 0, 0])


@pytest.fixture(autouse=True)
def _connected(rig: Rig) -> None:
    rig.forget_metrics()
    connect(rig)


def open_from_afar(rig: Rig, version: int = 4) -> None:
    """Let a connection to A begin past the stack, up to its third segment."""
    assert arrive(rig, to(A, tcp(4000, 80, SYN), version)).action == Action.PEER
    answered = rig.sent(A, out(A, tcp(80, 4000, SYN_ACK), version))
    assert (answered.action, answered.path) == (Action.NATIVE, Path.NATIVE)
    assert arrive(rig, to(A, tcp(4000, 80, ACK), version)).action == Action.PEER


# In.


@pytest.mark.parametrize("version", [4, 6])
def test_a_connection_of_a_remote_pod_goes_straight_into_the_local_one(
    rig: Rig, version: int
) -> None:
    outcome = arrive(rig, to(A, tcp(4000, 80, SYN), version), mark=7)
    assert (outcome.action, outcome.path) == (Action.PEER, Path.NATIVE)
    assert (outcome.retval, outcome.mark) == (TC_ACT_REDIRECT, 0)
    decision = outcome.decision
    assert (decision.target_ifindex, decision.instance) == (A.ifindex, A.instance)
    assert (decision.source_identity, decision.destination_identity) == (FAR.identity, A.identity)
    assert outcome.data == A.frame_in(to(A, tcp(4000, 80, SYN), version, ttl=63))
    assert not check_frame(outcome.data)
    key, entry = rig.entry(A)
    assert key.direction == Direction.INGRESS
    assert (entry.path, entry.node) == (Path.NATIVE, FAR.number)
    assert entry.peer_identity == FAR.identity
    assert rig.metrics()[Hook.FROM_NETDEV, DropReason.NONE, Path.NATIVE][0] == 1


def test_a_pod_of_which_only_the_range_is_known_is_unmanaged(rig: Rig) -> None:
    outcome = arrive(rig, packet(FAR.stranger(4), A.ipv4, tcp(4000, 80, SYN)))
    assert outcome.action == Action.PEER
    assert outcome.decision.source_identity == Identity.UNMANAGED


def test_a_pod_with_a_rate_is_reached_through_its_queue(rig: Rig) -> None:
    outcome = arrive(rig, to(SHAPED, tcp(4000, 80, SYN)))
    assert (outcome.action, outcome.mark) == (Action.EGRESS, MARK_JUDGED)
    frame = outcome.data
    seen = rig.run("to_pod", SHAPED.ifindex, frame, ingress_ifindex=UNDERLAY, mark=MARK_JUDGED)
    assert (seen.path, seen.mark, seen.retval) == (Path.LOCAL, 0, TC_ACT_OK)


def test_the_mark_of_our_programs_counts_for_nothing_where_none_of_them_looks(rig: Rig) -> None:
    connect(rig, native_ifindex=0)
    packet_in = frames.packet_of(SHAPED.frame_in(to(SHAPED, tcp(4000, 80, SYN))))
    seen = rig.received(SHAPED, packet_in, ingress_ifindex=UNDERLAY, mark=MARK_JUDGED)
    assert seen.path == Path.STACK


def test_a_policy_that_denies_is_carried_out_at_the_device(rig: Rig) -> None:
    rig.change(A, flags=ALLOW | IN)
    outcome = arrive(rig, to(A, tcp(4000, 80, SYN)))
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.POLICY)
    assert not rig.entries(A)
    assert rig.metrics()[Hook.FROM_NETDEV, DropReason.POLICY, Path.NATIVE][0] == 1
    [told] = rig.take_events()
    assert (told.hook, told.instance, told.source_identity) == (
        Hook.FROM_NETDEV,
        A.instance,
        FAR.identity,
    )


@pytest.mark.parametrize("change", ["policy", "identity"])
def test_a_connection_that_is_denied_by_now_ends(rig: Rig, change: str) -> None:
    open_from_afar(rig)
    rig.change(A, flags=ALLOW | IN, revision=2 if change == "policy" else 1)
    if change == "identity":
        write_prefix(rig, FAR.pod(4), FAR.identity + 1, FAR.number, DIRECT, 1500)
    outcome = arrive(rig, to(A, tcp(4000, 80, ACK)))
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.POLICY)


# What is left alone.


def _options(segment: frames.Segment) -> bytes:
    return ipv4(FAR.pod(4), A.ipv4, segment, options=RECORD_ROUTE)


def _extended(protocol: int, header: bytes) -> bytes:
    return ipv6(FAR.pod(6), A.ipv6, tcp(4000, 80, SYN), extensions=[(protocol, header)])


def _first_fragment(version: int) -> bytes:
    segment = tcp(4000, 80, SYN, bytes(16))
    if version == 4:
        return ipv4(FAR.pod(4), A.ipv4, segment, fragment=MORE_FRAGMENTS)
    extensions = [(FRAGMENT, fragment_header(0, more=True))]
    return ipv6(FAR.pod(6), A.ipv6, segment, extensions=extensions)


LEFT_ALONE = {
    "a datagram that answers nothing we know": to(A, udp(53, 4000)),
    "an echo request": to(A, echo(4, 1)),
    "an echo reply that nobody asked for": to(A, echo(4, 1, reply=True)),
    "TCP in mid-stream": to(A, tcp(4000, 80, ACK)),
    "an answer to a connection that was translated": to(A, tcp(80, 4000, SYN_ACK)),
    "a reset": to(A, tcp(4000, 80, RST)),
    "SCTP": to(A, frames.sctp(1, 2)),
    "the world": packet(WORLD_4, A.ipv4, tcp(4000, 80, SYN)),
    "the world, IPv6": packet(WORLD_6, A.ipv6, tcp(4000, 80, SYN)),
    "another node": packet("192.0.2.2", A.ipv4, tcp(4000, 80, SYN)),
    "another node by its address among its pods": packet(FAR.address(4), A.ipv4, tcp(1, 80, SYN)),
    "this node": packet(NODE_4, A.ipv4, tcp(4000, 80, SYN)),
    "a pod of this node": packet(B.ipv4, A.ipv4, tcp(4000, 80, SYN)),
    "a pod of this node, IPv6": packet(B.ipv6, A.ipv6, tcp(4000, 80, SYN)),
    "the pod itself": packet(A.ipv4, A.ipv4, tcp(4000, 80, SYN)),
    "an address of ours that nobody has": packet(NOBODY_4, A.ipv4, tcp(4000, 80, SYN)),
    "loopback": packet("127.0.0.1", A.ipv4, tcp(4000, 80, SYN)),
    "to an address of ours that nobody has": packet(FAR.pod(4), NOBODY_4, tcp(4000, 80, SYN)),
    "to this node": packet(FAR.pod(4), NODE_4, tcp(4000, 80, SYN)),
    "to this node, IPv6": packet(FAR.pod(6), NODE_6, tcp(4000, 80, SYN)),
    "to a pod that is only beginning": packet(FAR.pod(4), GUARD.ipv4, tcp(4000, 80, SYN)),
    "to the world": packet(FAR.pod(4), WORLD_4, tcp(4000, 80, SYN)),
    "to all": packet(FAR.pod(4), "224.0.0.251", udp(5353, 5353)),
    "at the end of its way": to(A, tcp(4000, 80, SYN), ttl=1),
    "at the end of its way, IPv6": to(A, tcp(4000, 80, SYN), 6, ttl=1),
    "too big for the pod": to(SMALL, tcp(4000, 80, SYN, bytes(1361))),
    "IPv4 options": _options(tcp(4000, 80, SYN)),
    "hop-by-hop header": _extended(HOP_BY_HOP, extension()),
    "destination header": _extended(DESTINATION, extension()),
    "a first fragment": _first_fragment(4),
    "a first fragment, IPv6": _first_fragment(6),
    "a later fragment": ipv4(FAR.pod(4), A.ipv4, frames.raw(frames.UDP, bytes(16)), fragment=9),
    "a wrong length": ipv4(FAR.pod(4), A.ipv4, tcp(4000, 80, SYN), total=10),
    "a wrong version": ipv4(FAR.pod(4), A.ipv4, tcp(4000, 80, SYN), version=5),
    "IPv4 in the clothes of IPv6": packet("::ffff:10.7.21.5", A.ipv6, tcp(4000, 80, SYN)),
    "neighbour discovery": packet(FAR.pod(6), A.ipv6, frames.neighbour(135, A.ipv6)),
    "an error about nothing": to(A, icmp(3, 3, 0, out(A, udp(1, 2))[:28])),
}


@pytest.mark.parametrize("inner", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_everything_else_is_left_to_the_stack_as_it_is(rig: Rig, inner: bytes) -> None:
    outcome = arrive(rig, inner)
    assert is_left_alone(rig, outcome, frame_of(inner))
    assert not rig.entries()
    assert not rig.take_events()


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(frame_of(to(A, tcp(1, 2, SYN)), destination="0e:70:00:00:00:99"), id="mac"),
        pytest.param(frame_of(to(A, tcp(1, 2, SYN)), destination=frames.BROADCAST), id="all"),
        pytest.param(vlan(frame_of(to(A, tcp(1, 2, SYN))), 5), id="vlan"),
        pytest.param(frames.arp(1, FAR_MAC, FAR.pod(4), A.ipv4), id="arp"),
    ],
)
def test_frames_that_are_not_for_this_host_are_left_alone(rig: Rig, frame: bytes) -> None:
    assert is_left_alone(rig, arrive_frame(rig, frame), frame)


def test_nothing_is_touched_at_another_device_or_while_the_way_is_off(rig: Rig) -> None:
    inner = to(A, tcp(4000, 80, SYN))
    frame = frame_of(inner, destination="0e:71:00:00:00:01")
    assert is_left_alone(rig, arrive_frame(rig, frame, ifindex=TUNNEL), frame)
    connect(rig, native_ifindex=0)
    assert is_left_alone(rig, arrive(rig, inner), frame_of(inner))
    connect(rig, flags=IpcacheFlags.NATIVE)
    assert is_left_alone(rig, arrive(rig, inner), frame_of(inner))
    assert not rig.entries()


def test_a_local_pods_address_is_not_believed_though_a_node_claims_it(rig: Rig) -> None:
    write_prefix(rig, f"{B.ipv4}/32", FAR.identity, FAR.number, DIRECT, 1500)
    inner = packet(B.ipv4, A.ipv4, tcp(4000, 80, SYN))
    assert is_left_alone(rig, arrive(rig, inner), frame_of(inner))


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_a_packet_that_ends_at_any_byte_is_not_delivered(
    rig: Rig, version: int, known: bool
) -> None:
    if known:
        open_from_afar(rig, version)
    whole = frame_of(to(A, tcp(4000, 80, ACK if known else SYN, options=b"\2\4\5\xb4"), version))
    for size in range(34 if version == 4 else 54, len(whole)):
        outcome = arrive_frame(rig, whole[:size])
        assert (outcome.retval, outcome.data) == (TC_ACT_UNSPEC, whole[:size]), size
    assert arrive_frame(rig, whole).action == Action.PEER


def test_segments_of_one_large_packet_are_measured_singly(rig: Rig) -> None:
    large = to(SMALL, tcp(4000, 80, SYN, bytes(3000)))
    fits, too_big = (arrive(rig, large, gso_size=size, gso_segs=3).action for size in (1360, 1361))
    assert (fits, too_big) == (Action.PEER, Action.STACK)


# Out.


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize(
    "segment",
    [tcp(4000, 80, SYN), udp(4000, 53), frames.sctp(1, 2), None],
    ids=["tcp", "udp", "sctp", "echo"],
)
def test_what_a_pod_begins_goes_past_the_stack_and_so_do_the_answers(
    rig: Rig, version: int, segment: frames.Segment | None
) -> None:
    segment = segment or echo(version, 5)
    outcome = rig.sent(A, out(A, segment, version), mark=7)
    assert (outcome.action, outcome.path, outcome.retval, outcome.mark) == (
        Action.NATIVE,
        Path.NATIVE,
        TC_ACT_REDIRECT,
        0,
    )
    assert frames.packet_of(outcome.data) == out(A, segment, version, ttl=63)
    assert (outcome.decision.node, outcome.decision.destination_identity) == (
        FAR.number,
        FAR.identity,
    )
    _, entry = rig.entry(A)
    assert (entry.path, entry.node) == (Path.NATIVE, FAR.number)
    answers = {
        frames.TCP: tcp(80, 4000, SYN_ACK),
        frames.UDP: udp(53, 4000),
        frames.SCTP: frames.sctp(2, 1),
    }
    answer = answers.get(segment.protocol) or echo(version, 5, reply=True)
    rig.change(A, flags=ALLOW | IN)
    assert arrive(rig, to(A, answer, version)).action == Action.PEER
    assert rig.entry(A)[1].packets == (1, 1)


TO_THE_STACK = {
    "at the end of its way": out(A, udp(4000, 53), ttl=1),
    "at the end of its way, IPv6": out(A, udp(4000, 53), 6, ttl=1),
    "IPv4 options": ipv4(A.ipv4, FAR.pod(4), udp(4000, 53), options=RECORD_ROUTE),
    "destination header": ipv6(
        A.ipv6, FAR.pod(6), udp(4000, 53), extensions=[(DESTINATION, extension())]
    ),
    "a fragment": ipv4(A.ipv4, FAR.pod(4), udp(4000, 53), fragment=MORE_FRAGMENTS),
    "too big, and may be cut": ipv4(A.ipv4, FAR.pod(4), udp(4000, 53, bytes(1473)), fragment=0),
    "TCP in mid-stream": out(A, tcp(4000, 80, ACK)),
    "an error about nothing": out(A, icmp(3, 3, 0, to(A, udp(1, 2))[:28])),
    "to the node by its address among its pods": packet(A.ipv4, FAR.address(4), tcp(1, 80, SYN)),
}


@pytest.mark.parametrize("inner", TO_THE_STACK.values(), ids=TO_THE_STACK)
def test_what_the_stack_does_better_is_sent_by_the_stack(rig: Rig, inner: bytes) -> None:
    outcome = rig.sent(A, inner)
    assert (outcome.action, outcome.path) == (Action.STACK, Path.STACK)
    assert frames.packet_of(outcome.data) == inner


def test_a_pod_is_told_of_a_packet_that_fits_no_link(rig: Rig) -> None:
    outcome = rig.sent(A, out(A, udp(4000, 53, bytes(1473))))
    assert (outcome.action, outcome.reason) == (Action.ANSWER, DropReason.MTU)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rig: connect(rig, native_ifindex=0),
        lambda rig: connect(rig, flags=IpcacheFlags.NATIVE),
    ],
    ids=["no-device", "not-direct"],
)
def test_while_the_way_is_off_packets_go_by_the_stack(
    rig: Rig, spoil: Callable[[Rig], None]
) -> None:
    spoil(rig)
    outcome = rig.sent(A, out(A, tcp(4000, 80, SYN)))
    assert (outcome.action, outcome.path) == (Action.STACK, Path.STACK)


def test_what_leads_to_a_node_that_is_just_leaving_goes_where_the_routes_lead(rig: Rig) -> None:
    remove_node(rig, FAR)
    outcome = rig.sent(A, out(A, tcp(4000, 80, SYN)))
    assert (outcome.action, outcome.retval) == (Action.STACK, TC_ACT_OK)
    assert frames.packet_of(outcome.data) == out(A, tcp(4000, 80, SYN))


# One way for both directions.


@pytest.mark.parametrize("version", [4, 6])
def test_a_connection_that_began_through_the_stack_stays_there_both_ways(
    rig: Rig, version: int
) -> None:
    begun = to(A, tcp(4000, 80, SYN), version)
    assert rig.received(A, begun, ingress_ifindex=UNDERLAY).action == Action.STACK
    assert rig.sent(A, out(A, tcp(80, 4000, SYN_ACK), version)).path == Path.STACK
    for segment in (tcp(4000, 80, ACK), tcp(4000, 80, SYN), tcp(4000, 80, FIN | ACK)):
        inner = to(A, segment, version)
        assert is_left_alone(rig, arrive(rig, inner), frame_of(inner))
    assert rig.entry(A)[1].path == Path.STACK


@pytest.mark.parametrize("segment", [tcp(4000, 80, SYN), udp(4000, 53)], ids=["tcp", "udp"])
def test_what_a_pod_began_through_the_stack_stays_there_when_the_way_is_found(
    rig: Rig, segment: frames.Segment
) -> None:
    connect(rig, native_ifindex=0)
    assert rig.sent(A, out(A, segment)).path == Path.STACK
    connect(rig)
    later = tcp(4000, 80, ACK) if segment.protocol == frames.TCP else segment
    assert rig.sent(A, out(A, later)).path == Path.STACK
    answer = tcp(80, 4000, ACK) if segment.protocol == frames.TCP else udp(53, 4000)
    inner = to(A, answer)
    assert arrive(rig, inner).retval == TC_ACT_UNSPEC


def test_a_connection_goes_on_through_the_stack_when_the_way_is_lost(rig: Rig) -> None:
    open_from_afar(rig)
    connect(rig, native_ifindex=0)
    assert arrive(rig, to(A, tcp(4000, 80, ACK))).retval == TC_ACT_UNSPEC
    assert rig.received(A, to(A, tcp(4000, 80, ACK)), ingress_ifindex=UNDERLAY).retval == TC_ACT_OK
    assert rig.sent(A, out(A, tcp(80, 4000, ACK))).path == Path.STACK
    connect(rig)
    assert arrive(rig, to(A, tcp(4000, 80, ACK))).retval == TC_ACT_UNSPEC


def test_a_connection_that_began_through_a_tunnel_stays_there(rig: Rig) -> None:
    write_prefix(rig, FAR.pod(4), FAR.identity, FAR.number, IpcacheFlags.TUNNEL, 1450)
    rig.write_settings(tunnel_ifindex=TUNNEL, native_ifindex=UNDERLAY)
    assert rig.sent(A, out(A, tcp(4000, 80, SYN))).action == Action.TUNNEL
    write_prefix(rig, FAR.pod(4), FAR.identity, FAR.number, DIRECT, 1500)
    assert rig.sent(A, out(A, tcp(4000, 80, ACK))).action == Action.TUNNEL
    assert rig.sent(A, out(A, tcp(4001, 80, SYN))).action == Action.NATIVE


def test_new_connections_of_old_ports_take_the_new_way(rig: Rig) -> None:
    rig.received(A, to(A, tcp(4000, 80, SYN)), ingress_ifindex=UNDERLAY)
    rig.change_entry(rig.entry(A)[0], tcp_state=TcpState.CLOSED)
    assert arrive(rig, to(A, tcp(4000, 80, SYN))).action == Action.PEER
    assert rig.entry(A)[1].path == Path.NATIVE


ROUTER = {4: "203.0.113.1", 6: "2001:db8:2::1"}


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("sender", ["pod", "router"])
def test_an_error_takes_the_way_of_the_flow_that_it_is_about(
    rig: Rig, version: int, sender: str
) -> None:
    sent = out(A, udp(4000, 53), version)
    source = FAR.pod(version) if sender == "pod" else ROUTER[version]
    error = icmp(3, 3, 0, sent[:28]) if version == 4 else icmpv6(1, 4, 0, sent[:80])
    about = packet(source, A.address(version), error)
    rig.change(A, flags=ALLOW | IN)
    assert arrive(rig, about).retval == TC_ACT_UNSPEC
    rig.sent(A, sent)
    assert arrive(rig, about).action == Action.PEER
    rig.change_entry(rig.entry(A)[0], path=Path.STACK)
    assert arrive(rig, about).retval == TC_ACT_UNSPEC


def test_an_error_that_a_pod_sends_takes_the_way_of_its_flow(rig: Rig) -> None:
    request = to(A, udp(4000, 53))
    rig.received(A, request, ingress_ifindex=UNDERLAY)
    error = out(A, icmp(3, 3, 0, request[:28]))
    assert rig.sent(A, error).path == Path.STACK
    rig.change_entry(rig.entry(A)[0], path=Path.NATIVE)
    assert rig.sent(A, error).path == Path.NATIVE


def test_a_flow_to_a_pod_of_this_node_is_no_business_of_the_device(rig: Rig) -> None:
    assert rig.sent(A, packet(A.ipv4, B.ipv4, tcp(4000, 80, SYN))).path == Path.LOCAL
    inner = packet(A.ipv4, B.ipv4, tcp(4000, 80, ACK))
    assert arrive(rig, inner).retval == TC_ACT_UNSPEC


def test_a_node_without_a_next_hop_of_the_family_is_reached_by_the_stack(rig: Rig) -> None:
    write_node(rig, FAR, hops=(bytes(16), bytes((192, 0, 2, 21))))
    assert rig.sent(A, out(A, tcp(4000, 80, SYN))).action == Action.NATIVE
    assert rig.sent(A, out(A, tcp(4000, 80, SYN), 6)).action == Action.STACK
