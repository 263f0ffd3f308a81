"""One opener takes all the room that a pod has for connections: nobody else is refused, and what others opened goes on.

The victim may answer and nothing else. The same without the one who takes the room is the control. What others open
then stays among the new flows, where it lives on under a flood of whoever took the room, because what is remembered of
that is bounded (rate.h), and after it was displaced TCP goes on all the same.
"""

import itertools
from collections.abc import Iterator

import pytest

from podwire.datapath.abi import (
    Action,
    ConfigFlags,
    ConntrackFlags,
    Direction,
    DropReason,
)
from tests.packet.frames import ACK, SYN, Segment, tcp, udp
from tests.packet.overlay import connect, packet
from tests.packet.rig import ALLOW, FEW_ROWS, FLOOD_TIMES, TUNNEL, A, Rig, open_rig
from tests.packet.test_openers import (
    FLOODING_FAR_POD,
    FLOODING_POD,
    FORGING_WORLD,
    OTHER_FAR_POD,
    OTHER_POD,
    WORLD,
    Sender,
)

pytestmark = pytest.mark.packet

QUOTA = 8
NEW_FLOWS = 512
RATE = 1
FLOOD = FLOOD_TIMES * NEW_FLOWS
SYN_ACK = SYN | ACK
PORTS = itertools.cycle(range(1024, 65_000))

TAKING = {"a pod": FLOODING_POD, "a far pod": FLOODING_FAR_POD, "the world": FORGING_WORLD}
OTHERS = {"a pod": OTHER_POD, "a far pod": OTHER_FAR_POD, "the world": WORLD}


@pytest.fixture(scope="module")
def small() -> Iterator[Rig]:
    with open_rig(shard_rows=64, new_flow_rows=NEW_FLOWS, rows=FEW_ROWS) as rig:
        yield rig


@pytest.fixture
def rig(small: Rig) -> Iterator[Rig]:
    """Let A answer and nothing else, with room for few connections."""
    small.reset()
    connect(small)
    settle(small, rate=0)
    small.change(A, flags=ALLOW | ConfigFlags.DENY_EGRESS)
    with small.visited():
        yield small


def settle(rig: Rig, *, rate: int) -> None:
    rig.write_settings(quota=QUOTA, tunnel_ifindex=TUNNEL, new_flow_rate=rate)


class Conversation:
    """What one opener has with A, by a port that nobody else uses."""

    def __init__(self, rig: Rig, sender: Sender, version: int) -> None:
        self.rig, self.version, self.port = rig, version, next(PORTS)
        self._arriving, address = sender
        self.peer = address(version, self.port)

    def to_pod(self, segment: Segment) -> DropReason:
        """Let the opener send something."""
        return self._arriving(self.rig, packet(self.peer, A.address(self.version), segment))

    def from_pod(self, segment: Segment) -> Action:
        """Let A send something."""
        sent = packet(A.address(self.version), self.peer, segment)
        return self.rig.sent(A, sent).action

    def open(self) -> None:
        """Make it a connection that both sides want."""
        port = self.port
        assert self.to_pod(tcp(port, 80, SYN, sequence=1000)) == DropReason.NONE
        answer = tcp(80, port, SYN_ACK, sequence=5000, acknowledged=1001)
        assert self.from_pod(answer) != Action.DROP
        confirmed = tcp(port, 80, ACK, sequence=1001, acknowledged=5001)
        assert self.to_pod(confirmed) == DropReason.NONE

    def goes_on(self) -> bool:
        """Tell whether either side can still speak, A first."""
        port = self.port
        answer = tcp(80, port, ACK, b"line", sequence=5001, acknowledged=1001)
        question = tcp(port, 80, ACK, b"line", sequence=1001, acknowledged=5005)
        return (
            self.from_pod(answer) != Action.DROP
            and self.to_pod(question) == DropReason.NONE
            and self.from_pod(answer) != Action.DROP
        )

    def asks(self) -> bool:
        """Tell whether a datagram is answered, and then a stream of them."""
        return all(
            self.to_pod(udp(self.port, 53)) == DropReason.NONE
            and self.from_pod(udp(53, self.port)) != Action.DROP
            for _ in range(4)
        )


def take_all_room(rig: Rig, sender: Sender, version: int) -> None:
    for _ in range(QUOTA + 4):
        Conversation(rig, sender, version).open()
    assert rig.usage_row(A).connections[Direction.INGRESS] == QUOTA


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("taking", ["nobody", *TAKING])
def test_others_open_flows_and_keep_them(rig: Rig, taking: str, other: str, version: int) -> None:
    is_taken = taking in TAKING
    if is_taken:
        take_all_room(rig, TAKING[taking], version)
    opened = Conversation(rig, OTHERS[other], version)
    opened.open()
    assert opened.goes_on()
    assert Conversation(rig, OTHERS[other], version).asks()
    waiting = [
        value.flags & ConntrackFlags.UNPROTECTED
        for key, value in rig.entries(A).items()
        if key.sport == opened.port
    ]
    assert [bool(flag) for flag in waiting] == [is_taken]
    if is_taken:
        # He who took the room floods, too, at a rate that the memory of new flows is made for.
        settle(rig, rate=RATE)
        for _ in range(FLOOD):
            flooding = Conversation(rig, TAKING[taking], version)
            assert flooding.to_pod(udp(flooding.port, 9)) == DropReason.NONE
        settle(rig, rate=0)
    assert opened.goes_on()
    assert Conversation(rig, OTHERS[other], version).asks()


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("other", OTHERS)
def test_a_connection_without_room_goes_on_after_it_was_displaced(
    rig: Rig, other: str, version: int
) -> None:
    take_all_room(rig, FLOODING_POD, version)
    opened = Conversation(rig, OTHERS[other], version)
    opened.open()
    rig.new_flows.clear()  # as floods of many senders together do
    assert opened.goes_on()
