"""A slot's verdict and what is remembered of it: revisions, answers, lost entries, related errors, hits, events."""

import time
from collections.abc import Sequence

import pytest

from podwire.datapath.abi import Action, ConfigFlags, DropReason, Event, EventKind, Path
from podwire.model.policy import CIDR_WORLD_BIT, Direction, PolicyEntry, PolicyKey, Verdict
from tests.packet import frames
from tests.packet.frames import ACK, SYN, icmp, icmpv6, ipv4, ipv6, tcp, udp
from tests.packet.rig import (
    ALLOW,
    OUTSIDE,
    REMOTE_POD_4,
    WORLD_4,
    WORLD_6,
    A,
    B,
    Endpoint,
    Outcome,
    Rig,
)

pytestmark = pytest.mark.packet

SLOT = 7
EGRESS, INGRESS = Direction.EGRESS, Direction.INGRESS
BY_CIDR = ConfigFlags.CIDR_EGRESS | ConfigFlags.CIDR_INGRESS
CLOSED = ALLOW | ConfigFlags.DENY_EGRESS | ConfigFlags.DENY_INGRESS | BY_CIDR
NET = (1 << 24) + 5
TOLERATED_VERDICTS_PER_SECOND = 100
TOLERATED_DROPS_PER_SECOND = 200


def write(
    rig: Rig,
    key: PolicyKey,
    rule: int,
    verdict: Verdict = Verdict.ALLOW,
    slot: int = SLOT,
) -> None:
    rig.rule(slot, key, PolicyEntry(verdict, 100, rule))


def close(rig: Rig, endpoint: Endpoint, revision: int = 1, slot: int = SLOT) -> Endpoint:
    return rig.change(endpoint, slot=slot, flags=CLOSED, revision=revision)


PAIRS = {
    "tcp": (tcp(4000, 80, SYN), tcp(80, 4000, SYN | ACK), tcp(4000, 80, ACK), tcp(80, 4000, ACK)),
    "udp": (udp(4000, 80), udp(80, 4000), udp(4000, 80), udp(80, 4000)),
}
"""What opens a flow, the answer, and what follows from either side."""


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("judge", ["opener", "server"])
def test_a_flow_that_the_new_revision_denies_is_cut_both_ways_and_comes_back(
    rig: Rig, name: str, judge: str
) -> None:
    ask, answer, more, back = PAIRS[name]
    number = frames.TCP if name == "tcp" else frames.UDP
    who, peer = (A, B) if judge == "opener" else (B, A)
    key = PolicyKey(peer.identity, EGRESS if who is A else INGRESS, number, 80, 16)
    close(rig, who)
    write(rig, key, 1)
    assert rig.sent(A, ipv4(A.ipv4, B.ipv4, ask)).action == Action.PEER
    assert rig.sent(B, ipv4(B.ipv4, A.ipv4, answer)).action == Action.PEER
    write(rig, key, 2, Verdict.DENY)
    assert rig.sent(A, ipv4(A.ipv4, B.ipv4, more)).action == Action.PEER  # nobody was told
    close(rig, who, revision=2)
    for _ in range(2):
        for sender, packet in (
            (B, ipv4(B.ipv4, A.ipv4, back)),
            (A, ipv4(A.ipv4, B.ipv4, more)),
        ):
            outcome = rig.sent(sender, packet)
            assert outcome.reason == DropReason.POLICY
            assert (outcome.decision.instance, outcome.decision.rule) == (who.instance, 2)
    write(rig, key, 3)
    close(rig, who, revision=3)
    assert rig.sent(B, ipv4(B.ipv4, A.ipv4, back)).action == Action.PEER
    assert rig.sent(A, ipv4(A.ipv4, B.ipv4, more)).action == Action.PEER


@pytest.mark.parametrize("world", [WORLD_4, WORLD_6])
@pytest.mark.parametrize("direction", Direction)
def test_an_answer_is_judged_by_the_question_also_by_its_address(
    rig: Rig, world: str, direction: Direction
) -> None:
    """The row covers the question's port and the other end's address; the answer shows both the other way round."""
    six = ":" in world
    make, own = (ipv6, A.ipv6) if six else (ipv4, A.ipv4)
    rig.cidr(f"{world}/{128 if six else 32}", NET)
    close(rig, A)
    write(rig, PolicyKey(NET | CIDR_WORLD_BIT, direction, frames.UDP, 80, 16), 1)
    out, into = (4000, 80), (80, 4000)
    if direction == INGRESS:
        out, into = into, out

    def send() -> Outcome:
        return rig.sent(A, make(own, world, udp(*out)))

    def receive() -> Outcome:
        return rig.received(A, make(world, own, udp(*into)), ingress_ifindex=OUTSIDE)

    question, answer = (send, receive) if direction == EGRESS else (receive, send)
    assert question().action == Action.STACK
    close(rig, A, revision=2)
    assert answer().action == Action.STACK
    _, entry = rig.entry(A)
    assert (entry.policy_revision, entry.rule) == (2, 1)
    close(rig, A, revision=3, slot=SLOT + 1)
    assert answer().reason == DropReason.POLICY
    assert question().reason == DropReason.POLICY


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("direction", Direction)
def test_a_related_error_is_judged_by_the_address_of_the_flow(
    rig: Rig, version: int, direction: Direction
) -> None:
    """The router that sends the error is in no CIDR; and it must not decide what the entry is worth from then on. What
    the pod itself has to say of a packet goes to its sender.
    """
    make, world, router = (
        (ipv4, WORLD_4, "203.0.113.1") if version == 4 else (ipv6, WORLD_6, "2001:db8:2::1")
    )
    own = A.address(version)
    rig.cidr(f"{world}/{32 if version == 4 else 128}", NET)
    close(rig, A)
    write(rig, PolicyKey(NET | CIDR_WORLD_BIT, direction), 1)
    if direction == EGRESS:
        packet = make(own, world, udp(4000, 80))
        assert rig.sent(A, packet).action == Action.STACK
    else:
        packet = make(world, own, udp(4000, 80))
        assert rig.received(A, packet, ingress_ifindex=OUTSIDE).action == Action.STACK
    quoted = icmp(3, 3, 0, packet[:28]) if version == 4 else icmpv6(1, 4, 0, packet[:80])

    def tell() -> Outcome:
        if direction == EGRESS:
            return rig.received(A, make(router, own, quoted), ingress_ifindex=OUTSIDE)
        return rig.sent(A, make(own, world, quoted))

    close(rig, A, revision=2)
    assert tell().action == Action.STACK
    _, entry = rig.entry(A)
    assert (entry.policy_revision, entry.rule) == (2, 1)
    rig.cidr(f"{router}/{32 if version == 4 else 128}", NET)
    rig.cidr(f"{world}/{32 if version == 4 else 128}", 0)
    close(rig, A, revision=3)
    assert tell().reason == DropReason.POLICY


def test_an_answer_whose_entry_is_lost_is_judged_as_what_it_answers(rig: Rig) -> None:
    rig.cidr("198.51.100.0/24", NET)
    close(rig, A)
    write(rig, PolicyKey(NET | CIDR_WORLD_BIT, INGRESS, frames.TCP, 80, 16), 1)
    outcome = rig.sent(A, ipv4(A.ipv4, WORLD_4, tcp(80, 4000, ACK)))
    assert (outcome.action, outcome.path, outcome.decision.rule) == (Action.STACK, Path.STACK, 1)
    assert not rig.entries(A)
    assert rig.hits() == {1: (1, 40)}
    refused = rig.sent(A, ipv4(A.ipv4, WORLD_4, tcp(81, 4000, ACK)))
    assert (refused.reason, refused.decision.rule) == (DropReason.POLICY, 900)
    refused = rig.sent(A, ipv4(A.ipv4, REMOTE_POD_4, tcp(80, 4000, ACK)))
    assert refused.reason == DropReason.POLICY


def test_audit_prefers_what_really_allows_an_answer(rig: Rig) -> None:
    rig.change(A, slot=SLOT, flags=CLOSED | ConfigFlags.AUDIT)
    write(rig, PolicyKey(0, INGRESS, frames.TCP, 80, 16), 1)
    outcome = rig.sent(A, ipv4(A.ipv4, WORLD_4, tcp(80, 4000, ACK)))
    assert (outcome.decision.rule, outcome.decision.audited) == (1, 0)
    outcome = rig.sent(A, ipv4(A.ipv4, WORLD_4, tcp(81, 4000, ACK)))
    assert (outcome.decision.rule, outcome.decision.audited) == (900, 1)


def test_a_changed_identity_is_judged_by_its_own_rows(rig: Rig) -> None:
    close(rig, A)
    write(rig, PolicyKey(B.identity, EGRESS), 1)
    write(rig, PolicyKey(4444, EGRESS), 2, Verdict.DENY)
    packet = ipv4(A.ipv4, B.ipv4, udp(4000, 53))
    assert rig.sent(A, packet).action == Action.PEER
    rig.change(B, identity=4444)
    outcome = rig.sent(A, packet)
    assert (outcome.reason, outcome.decision.rule) == (DropReason.POLICY, 2)


# Hits


def test_a_hit_is_a_judgement_not_a_packet(rig: Rig) -> None:
    close(rig, A)
    write(rig, PolicyKey(2, EGRESS), 1)
    packet = ipv4(A.ipv4, WORLD_4, udp(4000, 53))
    for _ in range(5):
        rig.sent(A, packet)
    assert rig.hits() == {1: (1, len(packet))}
    close(rig, A, revision=2)
    rig.sent(A, packet)
    assert rig.hits() == {1: (2, 2 * len(packet))}


def test_every_denied_packet_is_a_hit_of_what_denied_it(rig: Rig) -> None:
    close(rig, A)
    packet = ipv4(A.ipv4, WORLD_4, udp(4000, 53))
    for _ in range(3):
        rig.sent(A, packet)
    assert rig.hits() == {900: (3, 3 * len(packet))}


def test_both_ends_of_a_local_flow_count(rig: Rig) -> None:
    close(rig, A)
    close(rig, B, slot=SLOT + 1)
    write(rig, PolicyKey(B.identity, EGRESS), 1)
    write(rig, PolicyKey(A.identity, INGRESS), 2, slot=SLOT + 1)
    rig.sent(A, ipv4(A.ipv4, B.ipv4, udp(4000, 53)))
    assert set(rig.hits()) == {1, 2}


def test_what_no_rule_decided_counts_for_none(rig: Rig) -> None:
    close(rig, A)
    rig.received(A, ipv4("192.0.2.1", A.ipv4, tcp(4000, 80, SYN)))
    assert rig.hits() == {}


# Events


def told(events: Sequence[Event]) -> list[tuple[EventKind, int, int, int, int]]:
    return [
        (EventKind(event.kind), event.instance, event.direction, event.rule, event.reason)
        for event in events
    ]


def test_what_a_slot_allows_is_told_once(rig: Rig) -> None:
    close(rig, A, revision=6)
    write(rig, PolicyKey(2, EGRESS), 1)
    packet = ipv4(A.ipv4, WORLD_4, udp(4000, 53))
    for _ in range(3):
        rig.sent(A, packet)
    events = rig.take_events()
    assert told(events) == [(EventKind.POLICY, A.instance, EGRESS, 1, DropReason.NONE)]
    assert events[0].policy_revision == 6
    close(rig, A, revision=7)
    rig.sent(A, packet)
    assert not rig.take_events()  # judged again, and nothing new


def test_both_slots_of_a_local_flow_tell_each_its_own(rig: Rig) -> None:
    close(rig, A, revision=6)
    close(rig, B, revision=9, slot=SLOT + 1)
    write(rig, PolicyKey(B.identity, EGRESS), 1)
    write(rig, PolicyKey(A.identity, INGRESS), 2, slot=SLOT + 1)
    rig.sent(A, ipv4(A.ipv4, B.ipv4, udp(4000, 53)))
    events = rig.take_events()
    assert told(events) == [
        (EventKind.POLICY, A.instance, EGRESS, 1, DropReason.NONE),
        (EventKind.POLICY, B.instance, INGRESS, 2, DropReason.NONE),
    ]
    assert [event.policy_revision for event in events] == [6, 9]


def test_a_slot_tells_also_where_the_other_end_has_none(rig: Rig) -> None:
    close(rig, A)
    write(rig, PolicyKey(B.identity, EGRESS), 1)
    rig.sent(A, ipv4(A.ipv4, B.ipv4, udp(4000, 53)))
    assert told(rig.take_events()) == [(EventKind.POLICY, A.instance, EGRESS, 1, DropReason.NONE)]


def test_a_denial_is_told_as_a_drop_with_its_rule(rig: Rig) -> None:
    close(rig, A)
    close(rig, B, revision=5, slot=SLOT + 1)
    write(rig, PolicyKey(B.identity, EGRESS), 1)
    write(rig, PolicyKey(A.identity, INGRESS), 2, Verdict.DENY, slot=SLOT + 1)
    rig.sent(A, ipv4(A.ipv4, B.ipv4, udp(4000, 53)))
    events = rig.take_events()
    assert told(events) == [(EventKind.DROP, B.instance, INGRESS, 2, DropReason.POLICY)]
    assert events[0].policy_revision == 5


@pytest.mark.parametrize("end", ["sender", "target"])
def test_what_audit_lets_pass_is_told_with_the_rule_of_either_end(rig: Rig, end: str) -> None:
    who, direction = (A, EGRESS) if end == "sender" else (B, INGRESS)
    rig.change(who, slot=SLOT, flags=CLOSED | ConfigFlags.AUDIT)
    write(rig, PolicyKey(0, direction), 4, Verdict.DENY)
    rig.sent(A, ipv4(A.ipv4, B.ipv4, udp(4000, 53)))
    assert told(rig.take_events()) == [
        (EventKind.POLICY, who.instance, direction, 4, DropReason.POLICY)
    ]


def test_a_flood_of_verdicts_does_not_hide_the_drops(rig: Rig) -> None:
    close(rig, A)
    write(rig, PolicyKey(2, EGRESS), 1)
    rig.write_settings(quota=10_000)
    begin = time.monotonic()
    for port in range(2 * TOLERATED_VERDICTS_PER_SECOND):
        rig.sent(A, ipv4(A.ipv4, WORLD_4, udp(4000 + port, 53)))
    for _ in range(TOLERATED_DROPS_PER_SECOND):
        rig.sent(A, ipv4(A.ipv4, REMOTE_POD_4, udp(4000, 53)))
    events = rig.take_events()
    seconds = time.monotonic() - begin
    kinds = [event.kind for event in events]
    assert kinds.count(EventKind.DROP) == TOLERATED_DROPS_PER_SECOND
    assert kinds.count(EventKind.POLICY) <= TOLERATED_VERDICTS_PER_SECOND * (seconds + 2)
    assert events[-1].rule == 900
