"""Floods several times as large as a memory of flows that is so small that an emulated machine can make them.

test_floods.py has the same at the sizes that nodes have.
"""

from collections.abc import Iterator
from typing import Final

import pytest

from podwire.datapath import abi
from podwire.datapath.abi import Action, ConfigFlags, ConntrackFlags, DropReason
from tests.packet.frames import ACK, SYN, Segment, ipv4, tcp, udp
from tests.packet.rig import ALLOW, OUTSIDE, WORLD_4, A, B, Endpoint, Rig, open_rig

pytestmark = pytest.mark.packet

CLOSED: Final = ALLOW | ConfigFlags.DENY_INGRESS
IDLE: Final = 64
FLOOD: Final = 2048
"""Four times the room for new flows."""
AFTER: Final = 16


@pytest.fixture(scope="module")
def small() -> Iterator[Rig]:
    with open_rig(shard_rows=16, new_flow_rows=512) as rig:
        yield rig


@pytest.fixture
def rig(small: Rig) -> Rig:
    """Give A idle connections."""
    small.reset()
    small.write_settings(quota=256, new_flow_rate=0)
    for port in range(20_000, 20_000 + IDLE):
        from_world(small, tcp(port, 80, SYN))
        small.sent(A, ipv4(A.ipv4, WORLD_4, tcp(80, port, SYN | ACK)))
        from_world(small, tcp(port, 80, ACK))
    assert count_idle(small) == IDLE
    return small


def from_world(rig: Rig, segment: Segment, source: str = WORLD_4, target: Endpoint = A) -> Action:
    packet = ipv4(source, target.ipv4, segment)
    return rig.received(target, packet, ingress_ifindex=OUTSIDE).action


def count_idle(rig: Rig) -> int:
    return sum(
        value.tcp_state == abi.TcpState.ESTABLISHED and not value.flags & ConntrackFlags.NEW
        for value in rig.entries(A).values()
    )


def assert_unharmed(rig: Rig) -> None:
    """Idle connections live, and questions of everybody are answered where nothing else may come in."""
    assert count_idle(rig) == IDLE
    for endpoint in (A, B):
        rig.change(endpoint, flags=CLOSED)
        for port in range(1000, 1000 + AFTER):
            question = ipv4(endpoint.ipv4, WORLD_4, udp(port, 53))
            assert rig.sent(endpoint, question).reason == DropReason.NONE
            assert from_world(rig, udp(53, port), target=endpoint) == Action.STACK


def forged(number: int) -> tuple[str, int]:
    return f"198.18.{number >> 8 & 0xFF}.{number & 0xFF}", 1024 + number * 7919 % 60_000


def test_forged_syns_at_an_open_port(rig: Rig) -> None:
    for number in range(FLOOD):
        source, port = forged(number)
        assert from_world(rig, tcp(port, 80, SYN), source) == Action.STACK
    assert_unharmed(rig)


def test_denied_acknowledgements_at_a_closed_pod(rig: Rig) -> None:
    rig.change(A, flags=CLOSED)
    before = set(rig.entries(A))
    for number in range(FLOOD):
        source, port = forged(number)
        from_world(rig, tcp(port, 80, ACK), source)
    assert set(rig.entries(A)) == before
    assert_unharmed(rig)


def test_a_neighbours_flood_of_datagrams(rig: Rig) -> None:
    for number in range(FLOOD):
        assert rig.sent(B, ipv4(B.ipv4, A.ipv4, udp(1024 + number, 9))).action == Action.PEER
    assert_unharmed(rig)
