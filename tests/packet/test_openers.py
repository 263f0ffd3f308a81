"""Nobody who opens flows to a pod uses up what the pod remembers of others: its answers to them still leave it.

The victim may answer and nothing else, so a question that it does not remember gets no answer. The flood goes on
between the questions. The same questions without a flood are the control.
"""

from collections.abc import Callable

import pytest

from podwire.datapath.abi import ConfigFlags, Direction, DropReason
from tests.packet.frames import udp
from tests.packet.overlay import FAR, arrive, connect, packet
from tests.packet.rig import ALLOW, OUTSIDE, TUNNEL, WORLD_4, WORLD_6, A, B, Endpoint, Rig
from tests.packet.rig import SMALL as NEIGHBOUR

pytestmark = pytest.mark.packet

RATE = 2
"""So low that even an emulated machine floods faster. An opener keeps three flows at once of it for itself."""
QUESTIONS = 2
FLOOD = 60
FLOOD_BETWEEN = 10

Address = Callable[[int], str]
Sender = tuple[Callable[[Rig, bytes], DropReason], Callable[[int, int], str]]
"""How a packet reaches the pod A, and the address of its sender: of a family, for the number of a packet."""


def pod(sender: Endpoint) -> Sender:
    """Give a pod of the same node."""
    return lambda rig, inner: rig.sent(sender, inner).reason, lambda version, _: sender.address(
        version
    )


def far_pod(address: Address) -> Sender:
    """Give a pod of another node."""
    return lambda rig, inner: arrive(rig, inner).reason, lambda version, _: address(version)


def outside(address: Callable[[int, int], str]) -> Sender:
    """Give somebody in the world."""
    return (
        lambda rig, inner: rig.received(A, inner, ingress_ifindex=OUTSIDE).reason,
        address,
    )


def forged(version: int, number: int) -> str:
    """Give another source each time."""
    return (
        f"198.18.{number >> 8 & 0xFF}.{number & 0xFF}"
        if version == 4
        else f"2001:db8:9::{number:x}"
    )


FLOODING_POD = pod(B)
FLOODING_FAR_POD = far_pod(FAR.pod)
FORGING_WORLD = outside(forged)
OTHER_POD = pod(NEIGHBOUR)
OTHER_FAR_POD = far_pod(FAR.stranger)
WORLD = outside(lambda version, _: WORLD_4 if version == 4 else WORLD_6)

CASES = [
    pytest.param(flooding, asking, id=name)
    for name, flooding, asking in (
        ("a-pod-against-a-pod", FLOODING_POD, OTHER_POD),
        ("a-pod-against-a-far-pod", FLOODING_POD, OTHER_FAR_POD),
        ("a-pod-against-the-world", FLOODING_POD, WORLD),
        ("a-far-pod-against-a-pod", FLOODING_FAR_POD, OTHER_POD),
        ("a-far-pod-against-a-far-pod", FLOODING_FAR_POD, OTHER_FAR_POD),
        ("a-far-pod-against-the-world", FLOODING_FAR_POD, WORLD),
        ("the-world-against-a-pod", FORGING_WORLD, OTHER_POD),
        ("the-world-against-a-far-pod", FORGING_WORLD, OTHER_FAR_POD),
        ("nobody-against-a-pod", None, OTHER_POD),
        ("nobody-against-a-far-pod", None, OTHER_FAR_POD),
        ("nobody-against-the-world", None, WORLD),
    )
]


@pytest.fixture
def crowded(rig: Rig) -> Rig:
    """Let A answer and nothing else."""
    connect(rig)
    rig.write_settings(tunnel_ifindex=TUNNEL, new_flow_rate=RATE)
    rig.change(A, flags=ALLOW | ConfigFlags.DENY_EGRESS)
    return rig


def ask(rig: Rig, sender: Sender, version: int, number: int) -> str:
    """Open a flow to A, by a port that only this number has; gives the address that A sees."""
    arriving, address = sender
    source = address(version, number)
    question = packet(
        source, A.address(version), udp(1024 + number % 60_000, 53 + number // 60_000)
    )
    assert arriving(rig, question) == DropReason.NONE
    return source


def is_answered(rig: Rig, sender: Sender, version: int, number: int) -> bool:
    source = ask(rig, sender, version, number)
    answer = packet(A.address(version), source, udp(53, 1024 + number))
    return rig.sent(A, answer).reason == DropReason.NONE


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize(("flooding", "asking"), CASES)
def test_others_are_remembered_while_one_floods(
    crowded: Rig, flooding: Sender | None, asking: Sender, version: int
) -> None:
    flooded = iter(range(10_000, 60_000))
    answered = 0
    for number in range(QUESTIONS):
        for _ in range(0 if flooding is None else FLOOD_BETWEEN if number else FLOOD):
            ask(crowded, flooding, version, next(flooded))  # type: ignore[arg-type]
        answered += is_answered(crowded, asking, version, number)
    assert answered == QUESTIONS
    lost = crowded.usage_row(A).unremembered[Direction.INGRESS]
    assert flooding in (None, FLOODING_POD) or lost > 0
