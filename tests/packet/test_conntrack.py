"""The memory of flows: whose they are, how many there may be, which way answers go, how long they last."""

import time
from dataclasses import replace

import pytest

from podwire.datapath.abi import (
    Action,
    ConfigFlags,
    ConntrackFlags,
    ConntrackValue,
    Direction,
    DropReason,
    Path,
    TcpState,
)
from tests.packet import frames
from tests.packet.frames import ACK, FIN, RST, SYN, echo, ipv4, ipv6, tcp, udp
from tests.packet.rig import (
    ALLOW,
    NODE_4,
    OUTSIDE,
    QUOTA,
    SMALL,
    WORLD_4,
    A,
    B,
    Endpoint,
    Rig,
)

pytestmark = pytest.mark.packet

OUT, IN = ConfigFlags.DENY_EGRESS, ConfigFlags.DENY_INGRESS


def to_b(segment: frames.Segment) -> bytes:
    return ipv4(A.ipv4, B.ipv4, segment)


def to_a(segment: frames.Segment) -> bytes:
    return ipv4(B.ipv4, A.ipv4, segment)


def to_world(segment: frames.Segment) -> bytes:
    return ipv4(A.ipv4, WORLD_4, segment)


def from_world(segment: frames.Segment, to: Endpoint = A) -> bytes:
    return ipv4(WORLD_4, to.ipv4, segment)


def open_connection(rig: Rig) -> None:
    """Let A connect to B by the direct way, three steps."""
    for sender, packet in (
        (A, to_b(tcp(4000, 80, SYN))),
        (B, to_a(tcp(80, 4000, SYN | ACK))),
        (A, to_b(tcp(4000, 80, ACK))),
    ):
        assert rig.sent(sender, packet).action == Action.PEER


# whose


def test_a_flow_between_two_pods_is_remembered_at_both(rig: Rig) -> None:
    rig.sent(A, to_b(udp(4000, 53)))
    key, entry = rig.entry(A)
    assert (key.instance, key.direction) == (A.instance, Direction.EGRESS)
    assert (entry.peer_identity, entry.policy_revision, entry.path) == (B.identity, 1, Path.LOCAL)
    key, entry = rig.entry(B)
    assert (key.instance, key.direction) == (B.instance, Direction.INGRESS)
    assert (entry.peer_identity, entry.policy_revision, entry.path) == (A.identity, 1, Path.LOCAL)


def test_a_successor_with_the_same_address_inherits_nothing(rig: Rig) -> None:
    rig.sent(A, to_world(udp(4000, 53)))
    answer = from_world(udp(53, 4000))
    rig.change(A, flags=ALLOW | IN)
    assert rig.received(A, answer, ingress_ifindex=OUTSIDE).action == Action.STACK
    successor = rig.change(A, instance=21, flags=ALLOW | IN)
    assert rig.received(successor, answer, ingress_ifindex=OUTSIDE).reason == DropReason.POLICY
    assert not rig.entries(successor)


def test_a_successor_of_a_server_is_judged_for_itself(rig: Rig) -> None:
    open_connection(rig)
    successor = rig.write(replace(B, instance=22, flags=ALLOW | IN | OUT))
    outcome = rig.sent(A, to_b(tcp(4000, 80, ACK)))
    assert (outcome.action, outcome.path) == (Action.STACK, Path.STACK)
    outcome = rig.received(successor, to_b(tcp(4000, 80, ACK)), ingress_ifindex=A.ifindex)
    assert outcome.reason == DropReason.POLICY


def test_what_is_denied_leaves_no_entry(rig: Rig) -> None:
    rig.change(A, flags=ALLOW | OUT)
    rig.sent(A, to_b(udp(4000, 53)))
    assert not rig.entries()
    rig.change(A, flags=ALLOW)
    rig.change(B, flags=ALLOW | IN)
    rig.sent(A, to_b(udp(4000, 53)))
    assert rig.entries(A)
    assert not rig.entries(B)


# how many


def converse(rig: Rig, count: int, source: int = 10000) -> None:
    """Let A ask, be answered, and ask again, from many ports: connections."""
    for port in range(source, source + count):
        ask, answer = to_world(udp(port, 53)), from_world(udp(53, port))
        assert rig.sent(A, ask).action == Action.STACK
        assert rig.received(A, answer, ingress_ifindex=OUTSIDE).action == Action.STACK
        assert rig.sent(A, ask).action == Action.STACK


def be_asked(rig: Rig, count: int) -> None:
    """Let the world speak with B in the same way."""
    for port in range(10000, 10000 + count):
        ask, answer = from_world(udp(port, 53), B), ipv4(B.ipv4, WORLD_4, udp(53, port))
        for _ in range(2):
            assert rig.received(B, ask, ingress_ifindex=OUTSIDE).action == Action.STACK
            assert rig.sent(B, answer).action == Action.STACK


def is_connection(value: ConntrackValue) -> bool:
    return not value.flags & ConntrackFlags.NEW


def count_connections(rig: Rig, endpoint: Endpoint) -> int:
    return sum(map(is_connection, rig.entries(endpoint).values()))


def test_beyond_its_quota_an_endpoint_has_new_flows_and_nothing_is_refused(rig: Rig) -> None:
    converse(rig, QUOTA + 20)
    assert rig.usage_row(A).connections == (QUOTA, 0)
    assert rig.usage_row(A).unprotected == (20, 0)
    assert count_connections(rig, A) == QUOTA
    assert len(rig.entries(A)) == QUOTA + 20
    rig.change(A, flags=ALLOW | IN)
    for port in (10000, 10000 + QUOTA + 19):
        answer = from_world(udp(53, port))
        assert rig.received(A, answer, ingress_ifindex=OUTSIDE).action == Action.STACK


def test_what_others_open_has_a_quota_of_its_own(rig: Rig) -> None:
    be_asked(rig, QUOTA + 5)
    assert rig.usage_row(B).connections == (0, QUOTA)
    ask, answer = ipv4(B.ipv4, WORLD_4, udp(4000, 53)), from_world(udp(53, 4000), B)
    rig.sent(B, ask)
    rig.received(B, answer, ingress_ifindex=OUTSIDE)
    rig.sent(B, ask)
    assert rig.usage_row(B).connections == (1, QUOTA)


def test_a_connection_that_finds_room_later_is_protected_then(rig: Rig) -> None:
    converse(rig, QUOTA + 1)
    rig.write_settings(quota=QUOTA + 1)
    rig.sent(A, to_world(udp(10000 + QUOTA, 53)))
    assert rig.usage(A) == count_connections(rig, A) == QUOTA + 1


def test_a_full_table_refuses_nothing_and_keeps_what_it_has(rig: Rig) -> None:
    """The first connection is TCP: one of datagrams may be over before a slow machine has filled the table."""
    with rig.smaller_shards(4) as small:
        rows = 4 * len(small.shards)
        small.write_settings(quota=1 << 30)
        small.sent(A, to_world(tcp(999, 80, SYN)))
        small.received(A, from_world(tcp(80, 999, SYN | ACK)), ingress_ifindex=OUTSIDE)
        small.sent(A, to_world(tcp(999, 80, ACK)))
        converse(small, rows * 3)
        assert count_connections(small, A) == rows == small.usage(A)
        small.change(A, flags=ALLOW | IN)
        for answer in (tcp(80, 999, ACK), udp(53, 9999 + rows * 3)):
            outcome = small.received(A, from_world(answer), ingress_ifindex=OUTSIDE)
            assert outcome.action == Action.STACK


def test_connections_spread_over_all_shards(rig: Rig) -> None:
    rig.write_settings(quota=1 << 30)
    converse(rig, 1280)
    rows = [len(list(shard.keys())) for shard in rig.shards]
    assert min(rows) >= 5
    assert max(rows) <= 45


@pytest.mark.parametrize("rate", [1, 10])
def test_new_flows_beyond_the_rate_pass_and_are_not_remembered(rig: Rig, rate: int) -> None:
    rig.write_settings(new_flow_rate=rate)
    began_s = time.monotonic()
    for port in range(300):
        assert rig.sent(A, to_world(udp(10000 + port, 53))).action == Action.STACK
    remembered = len(rig.entries(A))
    assert remembered <= 2 + rate * (time.monotonic() - began_s + 0.5)
    assert remembered + rig.usage_row(A).unremembered[Direction.EGRESS] == 300
    # each side of opening has a rate of its own
    assert rig.received(A, from_world(udp(9, 9)), ingress_ifindex=OUTSIDE).action == Action.STACK
    assert any(key.direction == Direction.INGRESS for key in rig.entries(A))


def test_the_receiver_forgets_what_its_sender_is_not_remembered_for(rig: Rig) -> None:
    rig.write_settings(new_flow_rate=1)
    began_s = time.monotonic()
    for port in range(100):
        assert rig.sent(A, to_b(udp(10000 + port, 53))).action == Action.PEER
    assert len(rig.entries(B)) == len(rig.entries(A)) <= 2.5 + time.monotonic() - began_s


def test_an_endpoint_without_a_usage_row_opens_no_flow(rig: Rig) -> None:
    rig.maps["pw_usage"].delete(A.instance.to_bytes(4, "little"))
    assert rig.sent(A, to_world(udp(4000, 53))).reason == DropReason.INTERNAL


@pytest.mark.parametrize(
    "segment",
    [
        frames.icmp(13, 0, 0, bytes(12)),
        echo(4, 1, reply=True),
        tcp(4000, 80, RST),
        frames.icmp(3, 3, 0, ipv4(WORLD_4, A.ipv4, udp(53, 4000))),
    ],
    ids=["timestamp", "echo-reply", "reset", "icmp-error"],
)
def test_what_cannot_be_answered_is_not_remembered(rig: Rig, segment: frames.Segment) -> None:
    assert rig.sent(A, to_world(segment)).action == Action.STACK
    assert not rig.entries()


# which way


def test_answers_go_back_by_the_way_the_flow_came(rig: Rig) -> None:
    rig.received(B, to_b(udp(4000, 53)), ingress_ifindex=A.ifindex)
    outcome = rig.sent(B, to_a(udp(53, 4000)))
    assert (outcome.action, outcome.path) == (Action.STACK, Path.STACK)
    rig.sent(A, to_b(udp(4000, 53)))
    outcome = rig.sent(B, to_a(udp(53, 4000)))
    assert (outcome.action, outcome.path) == (Action.PEER, Path.LOCAL)


def test_the_latest_packet_of_the_opener_decides_the_way_back(rig: Rig) -> None:
    open_connection(rig)
    rig.received(B, to_b(tcp(4000, 80, ACK)), ingress_ifindex=A.ifindex)
    assert rig.sent(B, to_a(tcp(80, 4000, ACK))).path == Path.STACK
    rig.sent(A, to_b(tcp(4000, 80, ACK)))
    assert rig.sent(B, to_a(tcp(80, 4000, ACK))).path == Path.LOCAL


def test_a_translated_flow_stays_on_the_stack_both_ways(rig: Rig) -> None:
    """A speaks to a service address; the stack makes it B and hides A behind nothing."""
    service = "10.96.0.1"
    assert rig.sent(A, ipv4(A.ipv4, service, tcp(4000, 80, SYN))).action == Action.STACK
    rig.received(B, to_b(tcp(4000, 8080, SYN)), ingress_ifindex=A.ifindex)
    assert rig.sent(B, to_a(tcp(8080, 4000, SYN | ACK))).path == Path.STACK
    rig.change(A, flags=ALLOW | IN)
    answer = ipv4(service, A.ipv4, tcp(80, 4000, SYN | ACK))
    assert rig.received(A, answer, ingress_ifindex=B.ifindex).action == Action.STACK


def test_a_node_port_flow_masqueraded_to_the_node_goes_back_through_the_stack(rig: Rig) -> None:
    packet = ipv4(NODE_4, A.ipv4, tcp(4000, 80, SYN))
    rig.received(A, packet, ingress_ifindex=OUTSIDE)
    _, entry = rig.entry(A)
    assert (entry.peer_identity, entry.path) == (2, Path.STACK)
    outcome = rig.sent(A, ipv4(A.ipv4, NODE_4, tcp(80, 4000, SYN | ACK)))
    assert (outcome.path, outcome.decision.destination_identity) == (Path.STACK, 2)


def test_an_answer_to_a_pod_that_is_gone_does_not_reach_its_successors_device(rig: Rig) -> None:
    rig.sent(A, to_b(udp(4000, 53)))
    rig.maps["pw_endpoints"].delete(bytes(10) + b"\xff\xff" + bytes([10, 7, 0, 10]))
    outcome = rig.sent(B, to_a(udp(53, 4000)))
    assert outcome.reason == DropReason.NO_POD


def test_a_cut_packet_takes_its_flow_to_the_stack_and_back(rig: Rig) -> None:
    big = ipv4(A.ipv4, SMALL.ipv4, udp(4000, 53, bytes(1400)), fragment=0)
    assert rig.sent(A, big).path == Path.STACK
    rig.received(SMALL, ipv4(A.ipv4, SMALL.ipv4, udp(4000, 53)), ingress_ifindex=A.ifindex)
    assert rig.sent(SMALL, ipv4(SMALL.ipv4, A.ipv4, udp(53, 4000))).path == Path.STACK


# in mid-stream


def test_tcp_in_mid_stream_without_an_entry_takes_the_stack(rig: Rig) -> None:
    for flags in (ACK, FIN | ACK, RST):
        outcome = rig.sent(A, to_b(tcp(4000, 80, flags)))
        assert (outcome.action, outcome.path) == (Action.STACK, Path.STACK), flags
        rig.forget(A)


def test_a_syn_ack_without_an_entry_takes_the_shortest_way_and_leaves_nothing(rig: Rig) -> None:
    outcome = rig.sent(A, to_b(tcp(4000, 80, SYN | ACK)))
    assert (outcome.action, outcome.path) == (Action.PEER, Path.LOCAL)
    assert not rig.entries()


def test_what_was_picked_up_stays_on_the_stack(rig: Rig) -> None:
    rig.sent(A, to_b(tcp(4000, 80, ACK)))
    _, entry = rig.entry(A)
    assert entry.flags & ConntrackFlags.PICKED_UP
    assert rig.sent(A, to_b(tcp(4000, 80, ACK))).path == Path.STACK
    assert rig.sent(A, to_b(tcp(4000, 80, SYN))).path == Path.LOCAL


def test_a_direct_connection_survives_the_loss_of_the_receivers_entry(rig: Rig) -> None:
    open_connection(rig)
    rig.change(B, flags=ALLOW | OUT)
    rig.forget(B)
    packet = to_b(tcp(4000, 80, ACK))
    assert rig.sent(A, packet).path == Path.STACK
    assert rig.received(B, packet, ingress_ifindex=A.ifindex).action == Action.STACK
    assert rig.sent(B, to_a(tcp(80, 4000, ACK))).path == Path.STACK
    assert rig.sent(A, packet).path == Path.LOCAL
    assert rig.sent(B, to_a(tcp(80, 4000, ACK))).path == Path.LOCAL


def test_a_direct_connection_survives_the_loss_of_the_openers_entry(rig: Rig) -> None:
    open_connection(rig)
    rig.change(A, flags=ALLOW | IN)
    rig.forget(A)
    answer = to_a(tcp(80, 4000, ACK))
    assert rig.sent(B, answer).path == Path.STACK
    assert rig.received(A, answer, ingress_ifindex=B.ifindex).action == Action.STACK
    assert not rig.entries(A)
    assert rig.sent(A, to_b(tcp(4000, 80, ACK))).path == Path.STACK
    key, _ = rig.entry(A)
    assert (key.direction, key.sport, key.dport) == (Direction.EGRESS, 4000, 80)


def test_a_translated_connection_survives_the_loss_of_the_servers_entry(rig: Rig) -> None:
    rig.received(B, to_b(tcp(4000, 8080, SYN)), ingress_ifindex=A.ifindex)
    rig.forget(B)
    for _ in range(3):
        assert rig.sent(B, to_a(tcp(8080, 4000, ACK))).path == Path.STACK
    assert (
        rig.received(B, to_b(tcp(4000, 8080, ACK)), ingress_ifindex=A.ifindex).action
        == Action.STACK
    )


def test_a_server_that_may_not_send_goes_on_answering_after_the_loss(rig: Rig) -> None:
    rig.change(B, flags=ALLOW | OUT)
    assert rig.sent(B, to_a(tcp(80, 4000, ACK))).path == Path.STACK
    assert not rig.entries(B)
    rig.change(B, flags=ALLOW | OUT | IN, revision=2)
    assert rig.sent(B, to_a(tcp(80, 4000, ACK))).reason == DropReason.POLICY


def test_nothing_is_picked_up_where_neither_direction_is_allowed(rig: Rig) -> None:
    rig.change(A, flags=ALLOW | IN | OUT)
    assert rig.sent(A, to_b(tcp(4000, 80, ACK))).reason == DropReason.POLICY
    assert (
        rig.received(A, to_a(tcp(80, 4000, ACK)), ingress_ifindex=B.ifindex).reason
        == DropReason.POLICY
    )
    assert not rig.entries()


# how long


def assert_tcp(rig: Rig, state: TcpState, lifetime_s: int) -> None:
    for endpoint in (A, B):
        _, entry = rig.entry(endpoint)
        assert (entry.tcp_state, entry.lifetime_s) == (state, lifetime_s)


def test_a_connection_is_established_in_three_steps_and_closed_in_two(rig: Rig) -> None:
    rig.sent(A, to_b(tcp(4000, 80, SYN)))
    assert_tcp(rig, TcpState.OPENING, 60)
    rig.sent(A, to_b(tcp(4000, 80, ACK)))
    assert_tcp(rig, TcpState.OPENING, 60)
    rig.sent(B, to_a(tcp(80, 4000, SYN | ACK)))
    assert_tcp(rig, TcpState.ANSWERED, 60)
    rig.sent(B, to_a(tcp(80, 4000, ACK)))
    assert_tcp(rig, TcpState.ANSWERED, 60)
    for wrong in (0, 1, 3, 1 << 31):
        rig.sent(A, to_b(tcp(4000, 80, ACK, acknowledged=wrong)))
        assert_tcp(rig, TcpState.ANSWERED, 60)
    assert rig.usage(A) == rig.usage(B) == 0
    rig.sent(A, to_b(tcp(4000, 80, ACK)))
    assert_tcp(rig, TcpState.ESTABLISHED, 8000)
    assert rig.usage(A) == rig.usage(B) == 1
    rig.sent(B, to_a(tcp(80, 4000, FIN | ACK)))
    assert_tcp(rig, TcpState.HALF_CLOSED, 300)
    rig.sent(B, to_a(tcp(80, 4000, FIN | ACK)))
    assert_tcp(rig, TcpState.HALF_CLOSED, 300)
    rig.sent(A, to_b(tcp(4000, 80, FIN | ACK)))
    assert_tcp(rig, TcpState.CLOSED, 10)
    assert rig.usage(A) == rig.usage(B) == 0


@pytest.mark.parametrize("who", [A, B], ids=["opener", "server"])
def test_a_reset_closes_at_once(rig: Rig, who: Endpoint) -> None:
    open_connection(rig)
    rig.sent(who, to_b(tcp(4000, 80, RST)) if who is A else to_a(tcp(80, 4000, RST)))
    assert_tcp(rig, TcpState.CLOSED, 10)


def test_nothing_prolongs_a_closed_connection_that_no_budget_counts(rig: Rig) -> None:
    open_connection(rig)
    rig.sent(A, to_b(tcp(4000, 80, RST)))
    key, entry = rig.entry(A)
    # Its lifetime is none that a machine which stands still could miss.
    aged_ns = entry.last_seen_ns - 9_000_000_000
    rig.change_entry(key, last_seen_ns=aged_ns, lifetime_s=3600)
    assert rig.sent(A, to_b(tcp(4000, 80, ACK))).action == Action.PEER
    assert rig.entry(A)[1].last_seen_ns == aged_ns


def test_ports_used_again_begin_anew(rig: Rig) -> None:
    open_connection(rig)
    rig.sent(A, to_b(tcp(4000, 80, RST)))
    assert rig.sent(A, to_b(tcp(4000, 80, SYN))).action == Action.PEER
    assert_tcp(rig, TcpState.OPENING, 60)


def test_ports_used_again_the_other_way_round_replace_what_lingers(rig: Rig) -> None:
    open_connection(rig)
    rig.sent(A, to_b(tcp(4000, 80, RST)))
    assert rig.sent(B, to_a(tcp(80, 4000, SYN))).action == Action.PEER
    for endpoint, direction in ((A, Direction.INGRESS), (B, Direction.EGRESS)):
        key, _ = rig.entry(endpoint)
        assert (key.direction, key.sport, key.dport) == (direction, 80, 4000)
        assert rig.usage(endpoint) == 0
    # Only the collector deletes rows: a program on another CPU may still hold these.
    kept = [ConntrackValue.unpack(row) for shard in rig.shards for _, row in shard.items()]
    assert [bool(value.flags & ConntrackFlags.LEFT) for value in kept] == [True, True]


@pytest.mark.parametrize("closing", [(), (FIN | ACK,)], ids=["established", "half-closed"])
def test_a_forged_opening_the_other_way_round_takes_no_connections_place(
    rig: Rig, closing: tuple[int, ...]
) -> None:
    """Judged by the forged opening, the connection would end when nobody may open anything to A any more."""
    rig.sent(A, to_world(tcp(4000, 80, SYN)))
    rig.received(A, from_world(tcp(80, 4000, SYN | ACK)), ingress_ifindex=OUTSIDE)
    for flags in (ACK, *closing):
        rig.sent(A, to_world(tcp(4000, 80, flags)))
    forged = from_world(tcp(80, 4000, SYN))
    assert rig.received(A, forged, ingress_ifindex=OUTSIDE).action == Action.STACK
    assert rig.entry(A)[0].direction == Direction.EGRESS
    assert rig.usage(A) == 1
    rig.change(A, flags=ALLOW | IN, revision=2)
    assert rig.received(A, forged, ingress_ifindex=OUTSIDE).reason == DropReason.POLICY
    answer = from_world(tcp(80, 4000, ACK))
    assert rig.received(A, answer, ingress_ifindex=OUTSIDE).action == Action.STACK
    assert rig.sent(A, to_world(tcp(4000, 80, ACK))).action == Action.STACK


def test_ports_used_again_through_the_stack_go_back_through_it(rig: Rig) -> None:
    open_connection(rig)
    rig.sent(A, to_b(tcp(4000, 80, RST)))
    rig.received(B, to_b(tcp(4000, 80, SYN)), ingress_ifindex=A.ifindex)
    assert rig.sent(B, to_a(tcp(80, 4000, SYN | ACK))).path == Path.STACK


@pytest.mark.parametrize(
    ("segments", "stream_s"),
    [
        ((udp(4000, 53), udp(53, 4000)), 120),
        ((frames.sctp(4000, 80), frames.sctp(80, 4000)), 600),
        ((frames.raw(50, bytes(20)), frames.raw(50, bytes(20))), 600),
        ((echo(4, 1), echo(4, 1, reply=True)), 30),
    ],
    ids=["udp", "sctp", "esp", "echo"],
)
def test_datagrams_live_longer_when_the_opener_comes_back(
    rig: Rig, segments: tuple[frames.Segment, frames.Segment], stream_s: int
) -> None:
    ask, answer = segments
    for _ in range(5):
        rig.sent(A, to_b(ask))
    assert rig.entry(A)[1].lifetime_s == 30
    rig.sent(B, to_a(answer))
    assert rig.entry(A)[1].lifetime_s == 30
    rig.sent(A, to_b(ask))
    assert rig.entry(A)[1].lifetime_s == rig.entry(B)[1].lifetime_s == stream_s


def test_an_entry_that_is_over_counts_for_nothing_and_makes_room(rig: Rig) -> None:
    rig.sent(A, to_world(udp(4000, 53)))
    key, entry = rig.entry(A)
    rig.change_entry(key, flags=ConntrackFlags.EXPIRED)
    rig.change(A, flags=ALLOW | IN)
    answer = from_world(udp(53, 4000))
    assert rig.received(A, answer, ingress_ifindex=OUTSIDE).reason == DropReason.POLICY
    rig.sent(A, to_world(udp(4000, 53)))
    assert rig.entry(A)[1].flags == entry.flags == ConntrackFlags.NEW


def test_both_families_are_kept_apart_and_counted_together(rig: Rig) -> None:
    rig.sent(A, to_b(udp(4000, 53)))
    rig.sent(A, ipv6(A.ipv6, B.ipv6, udp(4000, 53)))
    assert len(rig.entries(A)) == 2


def test_bytes_and_packets_are_counted_for_each_direction(rig: Rig) -> None:
    ask, answer = to_b(udp(4000, 53)), to_a(udp(53, 4000, bytes(100)))
    for _ in range(3):
        rig.sent(A, ask)
    rig.sent(B, answer)
    for endpoint in (A, B):
        _, entry = rig.entry(endpoint)
        assert entry.packets == (3, 1)
        assert entry.bytes_ == (3 * len(ask), len(answer))
