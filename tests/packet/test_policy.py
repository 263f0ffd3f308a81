"""Verdicts: defaults of both directions, answers, revisions and identities that change while flows are open."""

import pytest

from podwire.datapath.abi import Action, ConfigFlags, Direction, DropReason, Path
from tests.packet import frames
from tests.packet.frames import ACK, SYN, echo, ipv4, ipv6, tcp, udp
from tests.packet.rig import ALLOW, NODE_4, OUTSIDE, WORLD_4, A, B, Endpoint, Rig

pytestmark = pytest.mark.packet

OUT, IN = ConfigFlags.DENY_EGRESS, ConfigFlags.DENY_INGRESS


def between(
    source: Endpoint, destination: Endpoint, segment: frames.Segment, version: int = 4
) -> bytes:
    if version == 4:
        return ipv4(source.ipv4, destination.ipv4, segment)
    return ipv6(source.ipv6, destination.ipv6, segment)


PROTOCOLS = {
    "tcp": (tcp(4000, 80, SYN), tcp(80, 4000, SYN | ACK)),
    "udp": (udp(4000, 53), udp(53, 4000)),
    "sctp": (frames.sctp(4000, 80), frames.sctp(80, 4000)),
    "esp": (frames.raw(50, bytes(20)), frames.raw(50, bytes(20))),
}


def conversation(name: str, version: int) -> tuple[frames.Segment, frames.Segment]:
    if name == "echo":
        return echo(version, 5), echo(version, 5, reply=True)
    return PROTOCOLS[name]


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("name", [*PROTOCOLS, "echo"])
@pytest.mark.parametrize(
    ("a", "b"),
    [(ALLOW, ALLOW), (ALLOW | IN, ALLOW), (ALLOW, ALLOW | OUT), (ALLOW | IN, ALLOW | OUT)],
    ids=["open", "opener-takes-nothing-in", "server-sends-nothing", "both"],
)
def test_the_answer_of_an_allowed_flow_passes(
    rig: Rig, a: ConfigFlags, b: ConfigFlags, name: str, version: int
) -> None:
    rig.change(A, flags=a)
    rig.change(B, flags=b)
    ask, answer = conversation(name, version)
    for _ in range(2):
        assert rig.sent(A, between(A, B, ask, version)).action == Action.PEER
        assert rig.sent(B, between(B, A, answer, version)).action == Action.PEER
    _, entry = rig.entry(A)
    assert entry.packets == (2, 2)
    _, entry = rig.entry(B)
    assert entry.packets == (2, 2)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("name", [*PROTOCOLS, "echo"])
@pytest.mark.parametrize(
    ("a", "b", "direction", "judge"),
    [(ALLOW | OUT, ALLOW, Direction.EGRESS, A), (ALLOW, ALLOW | IN, Direction.INGRESS, B)],
    ids=["sender-may-not", "receiver-may-not"],
)
def test_a_denied_flow_passes_neither_way(
    rig: Rig,
    a: ConfigFlags,
    b: ConfigFlags,
    direction: Direction,
    judge: Endpoint,
    name: str,
    version: int,
) -> None:
    rig.change(A, flags=a)
    rig.change(B, flags=b | OUT)
    ask, answer = conversation(name, version)
    outcome = rig.sent(A, between(A, B, ask, version))
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.POLICY)
    assert (outcome.decision.direction, outcome.decision.instance) == (direction, judge.instance)
    assert outcome.decision.rule == (900 if direction == Direction.EGRESS else 901)
    assert not rig.entries(B)
    outcome = rig.sent(B, between(B, A, answer, version))
    if (
        name == "tcp" and b == ALLOW
    ):  # it may be the answer of an allowed flow that is not remembered (rule 3)
        assert (outcome.action, outcome.path) == (Action.PEER, Path.LOCAL)
        assert not rig.entries()
    else:
        assert outcome.reason == DropReason.POLICY


def test_a_denied_peer_may_not_answer_what_was_not_asked(rig: Rig) -> None:
    rig.change(A, flags=ALLOW | IN)
    rig.change(B, flags=ALLOW | IN)
    rig.change(A, flags=ALLOW | IN | OUT)
    for segment in (tcp(80, 4000, SYN | ACK), udp(53, 4000), echo(4, 5, reply=True)):
        packet = between(B, A, segment)
        assert rig.sent(B, packet).reason == DropReason.POLICY
        assert rig.received(A, packet, ingress_ifindex=B.ifindex).reason == DropReason.POLICY


def test_a_server_may_not_open_a_connection_to_its_clients_port(rig: Rig) -> None:
    rig.change(A, flags=ALLOW | IN)
    rig.sent(A, between(A, B, tcp(4000, 80, SYN)))
    rig.sent(B, between(B, A, tcp(80, 4000, SYN | ACK)))
    assert rig.sent(B, between(B, A, tcp(80, 4000, SYN))).reason == DropReason.POLICY


def test_an_echo_request_is_no_answer_to_one(rig: Rig) -> None:
    rig.change(A, flags=ALLOW | IN)
    for number in (0, 5, 0x0800):
        rig.sent(A, between(A, B, echo(4, number)))
        assert rig.sent(B, between(B, A, echo(4, number))).reason == DropReason.POLICY


@pytest.mark.parametrize("segments", [PROTOCOLS["tcp"], PROTOCOLS["udp"]], ids=["tcp", "udp"])
@pytest.mark.parametrize("who", [A, B], ids=["opener", "server"])
def test_a_new_revision_cuts_open_flows_both_ways(
    rig: Rig, who: Endpoint, segments: tuple[frames.Segment, frames.Segment]
) -> None:
    ask, answer = segments
    rig.sent(A, between(A, B, ask))
    rig.sent(B, between(B, A, answer))
    rig.change(who, flags=who.flags | OUT | IN, revision=2)
    ongoing = tcp(4000, 80, ACK) if ask.protocol == frames.TCP else ask
    back = tcp(80, 4000, ACK) if ask.protocol == frames.TCP else answer
    for _ in range(2):
        assert rig.sent(B, between(B, A, back)).reason == DropReason.POLICY
        assert rig.sent(A, between(A, B, ongoing)).reason == DropReason.POLICY


def test_a_denied_stream_of_the_server_alone_is_cut(rig: Rig) -> None:
    rig.sent(A, between(A, B, udp(4000, 53)))
    rig.change(B, flags=ALLOW | IN, revision=2)
    for _ in range(3):
        assert rig.sent(B, between(B, A, udp(53, 4000))).reason == DropReason.POLICY


def test_a_denied_stream_of_the_server_is_cut_on_the_way_through_the_stack(rig: Rig) -> None:
    rig.received(B, ipv4(WORLD_4, B.ipv4, udp(4000, 53)), ingress_ifindex=OUTSIDE)
    answer = ipv4(B.ipv4, WORLD_4, udp(53, 4000))
    assert rig.sent(B, answer).action == Action.STACK
    rig.change(B, flags=ALLOW | IN, revision=2)
    assert rig.sent(B, answer).reason == DropReason.POLICY


def test_a_new_revision_that_still_allows_is_noted_in_the_entry(rig: Rig) -> None:
    rig.sent(A, between(A, B, udp(4000, 53)))
    rig.change(A, revision=7)
    assert rig.sent(A, between(A, B, udp(4000, 53))).action == Action.PEER
    _, entry = rig.entry(A)
    assert (entry.policy_revision, entry.peer_identity) == (7, B.identity)


def test_the_policy_is_not_asked_while_revision_and_identity_hold(rig: Rig) -> None:
    rig.sent(A, between(A, B, udp(4000, 53)))
    rig.change(A, flags=ALLOW | OUT)  # without a new revision: nobody looks
    assert rig.sent(A, between(A, B, udp(4000, 53))).action == Action.PEER


def test_a_changed_identity_of_the_peer_is_judged_anew(rig: Rig) -> None:
    rig.sent(A, between(A, B, udp(4000, 53)))
    rig.change(B, identity=4444)
    rig.change(A, flags=ALLOW | OUT)
    assert rig.sent(A, between(A, B, udp(4000, 53))).reason == DropReason.POLICY
    rig.change(A, flags=ALLOW)
    assert rig.sent(A, between(A, B, udp(4000, 53))).action == Action.PEER
    _, entry = rig.entry(A)
    assert entry.peer_identity == 4444


def test_what_a_changed_peer_is_denied_cuts_the_answers_too(rig: Rig) -> None:
    rig.sent(A, between(A, B, udp(4000, 53)))
    rig.change(B, flags=ALLOW | IN)
    rig.change(A, identity=4444)
    assert rig.sent(A, between(A, B, udp(4000, 53))).reason == DropReason.POLICY
    assert rig.sent(B, between(B, A, udp(53, 4000))).reason == DropReason.POLICY


def test_a_denied_packet_keeps_no_flow_alive(rig: Rig) -> None:
    rig.sent(A, between(A, B, udp(4000, 53)))
    key, before = rig.entry(A)
    rig.change(A, flags=ALLOW | OUT, revision=2)
    rig.sent(A, between(A, B, udp(4000, 53)))
    after = rig.entries(A)[key]
    assert (after.packets, after.last_seen_ns) == (before.packets, before.last_seen_ns)


def test_an_allowed_flow_comes_back_with_the_policy(rig: Rig) -> None:
    rig.sent(A, between(A, B, udp(4000, 53)))
    rig.change(A, flags=ALLOW | OUT, revision=2)
    assert rig.sent(A, between(A, B, udp(4000, 53))).reason == DropReason.POLICY
    rig.change(A, flags=ALLOW, revision=3)
    assert rig.sent(A, between(A, B, udp(4000, 53))).action == Action.PEER


def test_audit_lets_pass_what_would_be_denied_and_says_so(rig: Rig) -> None:
    rig.change(A, flags=ALLOW | OUT | ConfigFlags.AUDIT)
    outcome = rig.sent(A, between(A, B, udp(4000, 53)))
    assert (outcome.action, outcome.decision.audited) == (Action.PEER, 1)
    rig.change(A)
    assert not rig.sent(A, between(A, B, udp(4002, 53))).decision.audited
    rig.change(B, flags=ALLOW | IN | ConfigFlags.AUDIT, revision=2)
    outcome = rig.sent(A, between(A, B, udp(4001, 53)))
    assert (outcome.action, outcome.decision.audited) == (Action.PEER, 1)


def test_the_host_is_judged_as_the_host_also_in_what_it_answers(rig: Rig) -> None:
    rig.change(A, flags=ALLOW | IN | OUT)
    packet = ipv4(NODE_4, A.ipv4, tcp(4000, 80, SYN))
    assert rig.received(A, packet).action == Action.STACK
    answer = rig.sent(A, ipv4(A.ipv4, NODE_4, tcp(80, 4000, SYN | ACK)))
    assert (answer.action, answer.path) == (Action.STACK, Path.STACK)
    assert answer.decision.destination_identity == 1
