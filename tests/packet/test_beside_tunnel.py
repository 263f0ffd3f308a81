"""What comes past the tunnel with the address of a pod behind it: the underlay and the world can write any source.

Strict reverse path filters of the host would drop it; nothing depends on them. Whoever has begun a flow goes on with it
on whichever way its node sends, because both nodes do not change their ways in one moment.
"""

import pytest

from podwire.datapath.abi import Action, ConfigFlags, DropReason, Identity, IpcacheFlags
from tests.packet.frames import ACK, SYN, tcp, udp
from tests.packet.overlay import FAR, TUNNELLED, allow, arrive, connect, packet, write_ways
from tests.packet.rig import ALLOW, OUTSIDE, TUNNEL, A, Outcome, Rig

pytestmark = [pytest.mark.packet, pytest.mark.parametrize("version", [4, 6])]


@pytest.fixture(autouse=True)
def _connected(rig: Rig) -> None:
    connect(rig)


def from_stack(rig: Rig, inner: bytes, ingress_ifindex: int = OUTSIDE) -> Outcome:
    return rig.received(A, inner, ingress_ifindex=ingress_ifindex)


@pytest.mark.parametrize("known", [True, False], ids=["published", "of-its-range"])
def test_a_pod_behind_the_tunnel_is_nobody_past_it(rig: Rig, version: int, known: bool) -> None:
    source = FAR.pod(version) if known else FAR.stranger(version)
    for segment in (udp(4000, 53), tcp(4000, 53, SYN), tcp(4001, 53, ACK)):
        outcome = from_stack(rig, packet(source, A.address(version), segment))
        assert outcome.decision.source_identity == Identity.WORLD


def test_policy_keeps_its_forger_out_and_lets_the_pod_in(rig: Rig, version: int) -> None:
    allow(rig, FAR.identity)
    ends = FAR.pod(version), A.address(version)
    for port in (4000, 4001):
        forged = packet(*ends, udp(port, 53))
        for _ in range(2):
            assert from_stack(rig, forged).reason == DropReason.POLICY
    assert arrive(rig, packet(*ends, udp(4002, 53))).action == Action.PEER
    assert from_stack(rig, packet(*ends, udp(4003, 53)), TUNNEL).action == Action.STACK


def test_a_forger_who_may_come_as_the_world_stays_the_world(rig: Rig, version: int) -> None:
    forged = packet(FAR.pod(version), A.address(version), udp(4000, 53))
    for _ in range(3):
        outcome = from_stack(rig, forged)
        assert (outcome.action, outcome.decision.source_identity) == (Action.STACK, Identity.WORLD)


@pytest.mark.parametrize("way", [TUNNELLED, IpcacheFlags.NATIVE], ids=["tunnel", "native"])
def test_what_a_pod_has_begun_goes_on_past_the_tunnel(
    rig: Rig, version: int, way: IpcacheFlags
) -> None:
    allow(rig, FAR.identity)
    write_ways(rig, FAR, way)
    question = packet(FAR.pod(version), A.address(version), udp(4000, 53))
    begun = arrive(rig, question) if way == TUNNELLED else from_stack(rig, question)
    assert begun.action in (Action.PEER, Action.STACK)
    write_ways(rig, FAR)
    for _ in range(2):
        outcome = from_stack(rig, question)
        assert (outcome.action, outcome.decision.source_identity) == (Action.STACK, FAR.identity)


def test_an_answer_of_a_pod_goes_on_past_the_tunnel(rig: Rig, version: int) -> None:
    rig.change(A, flags=ALLOW | ConfigFlags.DENY_INGRESS)
    ends = A.address(version), FAR.pod(version)
    assert rig.sent(A, packet(*ends, udp(4000, 53))).action == Action.TUNNEL
    assert from_stack(rig, packet(*ends[::-1], udp(53, 4000))).action == Action.STACK
    assert from_stack(rig, packet(*ends[::-1], udp(53, 4001))).reason == DropReason.POLICY


def test_a_pod_that_is_reached_natively_is_known_by_its_address(rig: Rig, version: int) -> None:
    write_ways(rig, FAR, IpcacheFlags.NATIVE)
    outcome = from_stack(rig, packet(FAR.pod(version), A.address(version), udp(4000, 53)))
    assert outcome.decision.source_identity == FAR.identity
