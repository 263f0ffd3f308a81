"""A pod asks a service by SCTP: addresses change and ports never, because the checksum covers the ports.

What SCTP has in common with TCP and UDP is asked in `test_services` and `test_own_back_end`.
"""

import pytest

from podwire.datapath.abi import Action, ConfigFlags, ConntrackKind, DropReason, Path
from tests.packet import frames
from tests.packet.frames import ACK, INIT, SYN, check_frame, packet_of
from tests.packet.overlay import packet
from tests.packet.rig import ALLOW, NODE_4, NODE_6, OUTSIDE, SMALL, A, B, Outcome, Rig
from tests.packet.services import (
    PORT,
    SOURCE,
    Tuple,
    ask,
    is_whole,
    offer,
    remove_back_end,
    speak,
    tuple_of,
    vip,
)

pytestmark = pytest.mark.packet

both_families = pytest.mark.parametrize("version", [4, 6])
DATA = 0
"""The chunk of an association that carries what people say."""


def offer_b(rig: Rig, version: int) -> None:
    """Let pod B answer for the service."""
    offer(rig, vip(version), [(B.address(version), PORT)], protocol=frames.SCTP)


def say(rig: Rig, version: int, chunk: int, to: str = "", sport: int = SOURCE) -> Outcome:
    """Let pod A send a chunk to the service, or elsewhere."""
    segment = frames.sctp(sport, PORT, chunk)
    return rig.sent(A, packet(A.address(version), to or vip(version), segment))


def answer(rig: Rig, version: int, flags: int = SYN | ACK, dport: int = SOURCE) -> Outcome:
    """Let pod B answer pod A."""
    segment = speak("sctp", PORT, dport, flags)
    return rig.sent(B, packet(B.address(version), A.address(version), segment))


def associate(rig: Rig, version: int) -> None:
    """Let pod A begin an association with the service."""
    ask(rig, A, version, "sctp")
    answer(rig, version)
    ask(rig, A, version, "sctp", flags=ACK)


@both_families
def test_a_back_end_behind_the_stack_answers_through_it(rig: Rig, version: int) -> None:
    node = NODE_4 if version == 4 else NODE_6
    offer(rig, vip(version), [(node, PORT)], protocol=frames.SCTP)
    went = ask(rig, A, version, "sctp")
    assert (went.action, went.path) == (Action.STACK, Path.STACK)
    assert tuple_of(went.data) == (A.address(version), SOURCE, node, PORT)
    back = packet(node, A.address(version), speak("sctp", PORT, SOURCE, SYN | ACK))
    came = rig.received(A, back, ingress_ifindex=OUTSIDE)
    assert came.action == Action.STACK
    assert tuple_of(came.data) == (vip(version), PORT, A.address(version), SOURCE)
    assert is_whole(went.data)
    assert is_whole(came.data)


@both_families
def test_without_a_back_end_it_is_answered_by_port_unreachable(rig: Rig, version: int) -> None:
    offer(rig, vip(version), [], protocol=frames.SCTP)
    refused = ask(rig, A, version, "sctp")
    assert (refused.action, refused.reason) == (Action.ANSWER, DropReason.NO_BACK_END)
    assert check_frame(refused.data) == []
    said = packet_of(refused.data)[20 if version == 4 else 40 :]
    assert tuple(said[:2]) == ((3, 3) if version == 4 else (1, 4))
    assert said[8:][20 if version == 4 else 40 :][:4] == frames.sctp(SOURCE, PORT).data[:4]
    assert rig.entries() == {}


@both_families
def test_an_association_goes_on_with_the_back_end_that_it_has(rig: Rig, version: int) -> None:
    """A back end that is gone ends it when it wants to; whoever begins anew gets another one."""
    offer_b(rig, version)
    associate(rig, version)
    others = [(SMALL.address(version), PORT)]
    offer(rig, vip(version), others, first=200, protocol=frames.SCTP)
    remove_back_end(rig, 100)
    assert tuple_of(say(rig, version, DATA).data).destination == B.address(version)
    assert tuple_of(answer(rig, version, ACK).data).source == vip(version)
    assert tuple_of(say(rig, version, INIT).data).destination == SMALL.address(version)
    assert tuple_of(say(rig, version, DATA).data).destination == SMALL.address(version)
    # And the first one again, by the tuple that it had before.
    offer(rig, vip(version), [(B.address(version), PORT)], first=300, protocol=frames.SCTP)
    remove_back_end(rig, 200)
    associate(rig, version)
    usage = rig.usage_row(A)
    # What was left has rows until it is collected, and counts until then.
    assert (usage.connections, usage.brief_flows) == ((1, 0), 1)


@both_families
def test_what_is_in_the_middle_of_an_association_that_nobody_remembers_is_the_stacks(
    rig: Rig, version: int
) -> None:
    """Another back end than its own would end it."""
    offer_b(rig, version)
    went = say(rig, version, DATA)
    assert (went.action, tuple_of(went.data).destination) == (Action.STACK, vip(version))
    assert tuple_of(say(rig, version, INIT).data).destination == B.address(version)


def test_an_association_is_a_connection_as_soon_as_both_have_spoken(rig: Rig) -> None:
    """It says nothing for 30 s where it has nothing to say."""
    offer_b(rig, 4)
    ask(rig, A, 4, "sctp")
    answer(rig, 4)
    usage = rig.usage_row(A)
    assert (usage.connections, usage.brief_flows) == ((0, 0), 1)
    ask(rig, A, 4, "sctp", flags=ACK)
    usage = rig.usage_row(A)
    assert (usage.connections, usage.brief_flows) == ((1, 0), 0)
    [flow] = [entry for entry in rig.entries(A).values() if entry.kind == ConntrackKind.OF_BACK_END]
    assert flow.lifetime_s == 600


@both_families
def test_a_port_that_is_left_to_the_stack_goes_there_as_it_is(rig: Rig, version: int) -> None:
    """Where a back end has another port; the other ports of the address are refused all the same."""
    nowhere = "0.0.0.0" if version == 4 else "::"
    offer(rig, vip(version), [(nowhere, 0)], port=81, protocol=frames.SCTP, affinity_s=60)
    for port, reason in ((81, DropReason.NONE), (82, DropReason.NO_SERVICE_PORT)):
        sent = packet(A.address(version), vip(version), frames.sctp(SOURCE, port))
        outcome = rig.sent(A, sent)
        assert outcome.reason == reason
        if port == 81:
            assert (outcome.action, packet_of(outcome.data)) == (Action.STACK, sent)


@both_families
def test_an_ingress_policy_of_the_back_end_judges_the_pod(rig: Rig, version: int) -> None:
    offer_b(rig, version)
    rig.change(B, flags=ALLOW | ConfigFlags.DENY_INGRESS)
    assert ask(rig, A, version, "sctp").reason == DropReason.POLICY


# No two flows have one tuple (rule 14), and no port can be given to keep them apart: another back end, or none.


@both_families
def test_a_back_end_that_is_spoken_to_directly_is_not_taken(rig: Rig, version: int) -> None:
    offer_b(rig, version)
    say(rig, version, INIT, to=B.address(version))
    refused = ask(rig, A, version, "sctp")
    assert (refused.action, refused.reason) == (Action.DROP, DropReason.CONNTRACK_FULL)
    assert tuple_of(answer(rig, version).data).source == B.address(version)
    both = [(pod.address(version), PORT) for pod in (B, SMALL)]
    offer(rig, vip(version), both, first=200, protocol=frames.SCTP)
    assert tuple_of(ask(rig, A, version, "sctp").data) == (
        A.address(version),
        SOURCE,
        SMALL.address(version),
        PORT,
    )


@both_families
def test_nobody_begins_directly_what_a_service_has_begun(rig: Rig, version: int) -> None:
    offer_b(rig, version)
    associate(rig, version)
    refused = say(rig, version, INIT, to=B.address(version))
    assert (refused.action, refused.reason) == (Action.DROP, DropReason.CONNTRACK_FULL)
    assert tuple_of(answer(rig, version, ACK).data).source == vip(version)
    other = say(rig, version, INIT, to=B.address(version), sport=SOURCE + 1)
    assert tuple_of(other.data) == (A.address(version), SOURCE + 1, B.address(version), PORT)


@both_families
def test_a_pod_with_the_servers_own_port_does_not_answer_itself(rig: Rig, version: int) -> None:
    """Both ways would have one tuple."""
    both = [(pod.address(version), PORT) for pod in (A, B)]
    offer(rig, vip(version), both[:1], protocol=frames.SCTP)
    assert say(rig, version, INIT, sport=PORT).reason == DropReason.CONNTRACK_FULL
    assert say(rig, version, INIT).action == Action.ANSWER
    offer(rig, vip(version), both, protocol=frames.SCTP)
    went = say(rig, version, INIT, sport=PORT)
    assert tuple_of(went.data) == Tuple(A.address(version), PORT, B.address(version), PORT)


# Pieces.


def test_all_pieces_of_a_packet_go_to_one_back_end(rig: Rig) -> None:
    both = [(pod.ipv4, PORT) for pod in (B, SMALL)]
    offer(rig, vip(4), both, protocol=frames.SCTP)
    first = ask(rig, A, 4, "sctp")
    target = tuple_of(first.data).destination
    whole = frames.sctp(SOURCE, PORT, DATA, bytes(2000))
    pieces = [
        frames.ipv4(A.ipv4, vip(4), frames.Segment(frames.SCTP, part), fragment=fragment)
        for part, fragment in (
            (whole.data[:1008], frames.MORE_FRAGMENTS),
            (whole.data[1008:], 1008 // 8),
        )
    ]
    went = [rig.sent(A, piece) for piece in pieces]
    assert [result.reason for result in went] == [DropReason.NONE] * 2
    assert {tuple_of(result.data).destination for result in went} == {target}
    assert all(check_frame(result.data) == [] for result in went)
    assert b"".join(packet_of(result.data)[20:] for result in went) == whole.data
