"""Floods several times as large as a memory of flows that is so small that an emulated machine can make them.

test_floods.py has the same at the sizes that nodes have.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from podwire.datapath import abi
from podwire.datapath.abi import Action, ConfigFlags, ConntrackFlags, DropReason
from tests.packet import netdev, overlay
from tests.packet.frames import ACK, SYN, Segment, tcp, udp
from tests.packet.overlay import FAR, packet
from tests.packet.rig import (
    ALLOW,
    FEW_ROWS,
    FLOOD_TIMES,
    NODE_4,
    NODE_6,
    OUTSIDE,
    TUNNEL,
    WORLD_4,
    WORLD_6,
    A,
    B,
    Endpoint,
    Rig,
    open_rig,
)

pytestmark = pytest.mark.packet

CLOSED: Final = ALLOW | ConfigFlags.DENY_INGRESS
IDLE: Final = 64
NEW_FLOWS: Final = 512
FLOOD: Final = FLOOD_TIMES * NEW_FLOWS
AFTER: Final = 16


@pytest.fixture(scope="module")
def small() -> Iterator[Rig]:
    with open_rig(shard_rows=16, new_flow_rows=NEW_FLOWS, rows=FEW_ROWS) as rig:
        yield rig


@pytest.fixture(params=[4, 6])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def rig(small: Rig, version: int) -> Iterator[Rig]:
    """Give A idle connections, on a node that has others behind the tunnel and past the stack."""
    small.reset()
    with small.visited():
        write_settings(small)
        for port in range(20_000, 20_000 + IDLE):
            from_world(small, version, tcp(port, 80, SYN))
            small.sent(A, packet(A.address(version), world(version), tcp(80, port, SYN | ACK)))
            from_world(small, version, tcp(port, 80, ACK))
        assert count_idle(small) == IDLE
        yield small


def write_settings(rig: Rig) -> None:
    ends = {"tunnel_ifindex": TUNNEL, "native_ifindex": netdev.UNDERLAY}
    rig.write_settings(quota=256, new_flow_rate=0, **ends)


def world(version: int) -> str:
    return WORLD_4 if version == 4 else WORLD_6


def from_world(
    rig: Rig, version: int, segment: Segment, source: str = "", target: Endpoint = A
) -> Action:
    sent = packet(source or world(version), target.address(version), segment)
    return rig.received(target, sent, ingress_ifindex=OUTSIDE).action


def from_host(rig: Rig, version: int, segment: Segment, _number: int) -> Action:
    sent = packet(NODE_4 if version == 4 else NODE_6, A.address(version), segment)
    return rig.received(A, sent, ingress_ifindex=0).action


def from_forged(rig: Rig, version: int, segment: Segment, number: int) -> Action:
    network = "198.18.{}.{}" if version == 4 else "2001:db8:18::{:x}:{:x}"
    return from_world(rig, version, segment, network.format(number >> 8, number & 0xFF))


def from_afar(version: int, segment: Segment, number: int) -> bytes:
    """Give a packet of one of the other node's pods."""
    host = 2 + number % 250
    source = f"10.7.{FAR.number}.{host}" if version == 4 else f"fd07:{FAR.number}::{host:x}"
    return packet(source, A.address(version), segment)


def by_tunnel(rig: Rig, version: int, segment: Segment, number: int) -> Action:
    return overlay.arrive(rig, from_afar(version, segment, number)).action


def natively(rig: Rig, version: int, segment: Segment, number: int) -> Action:
    return netdev.arrive(rig, from_afar(version, segment, number)).action


@dataclass(frozen=True)
class Way:
    """How a flood comes."""

    send: Callable[[Rig, int, Segment, int], Action]
    passed: Action
    connect: Callable[[Rig], None] = lambda _rig: None


WAYS: Final = {
    "world": Way(from_forged, Action.STACK),
    "host": Way(from_host, Action.STACK),
    "overlay": Way(by_tunnel, Action.PEER, overlay.connect),
    "native": Way(natively, Action.PEER, netdev.connect),
}


def count_idle(rig: Rig) -> int:
    return sum(
        value.tcp_state == abi.TcpState.ESTABLISHED and not value.flags & ConntrackFlags.NEW
        for value in rig.entries(A).values()
    )


def assert_unharmed(rig: Rig, version: int) -> None:
    """Idle connections live, and questions of everybody are answered where nothing else may come in."""
    assert count_idle(rig) == IDLE
    for endpoint in (A, B):
        rig.change(endpoint, flags=CLOSED)
        for port in range(1000, 1000 + AFTER):
            question = packet(endpoint.address(version), world(version), udp(port, 53))
            assert rig.sent(endpoint, question).reason == DropReason.NONE
            answered = from_world(rig, version, udp(53, port), target=endpoint)
            assert answered == Action.STACK


def choose_port(number: int) -> int:
    return 1024 + number * 7919 % 60_000


@pytest.mark.parametrize("name", WAYS)
def test_forged_syns_at_an_open_port(rig: Rig, version: int, name: str) -> None:
    way = WAYS[name]
    way.connect(rig)
    write_settings(rig)
    for number in range(FLOOD):
        opening = tcp(choose_port(number), 80, SYN)
        assert way.send(rig, version, opening, number) == way.passed
    assert_unharmed(rig, version)


def test_denied_acknowledgements_at_a_closed_pod(rig: Rig, version: int) -> None:
    rig.change(A, flags=CLOSED)
    before = set(rig.entries(A))
    for number in range(FLOOD):
        from_forged(rig, version, tcp(choose_port(number), 80, ACK), number)
    assert set(rig.entries(A)) == before
    assert_unharmed(rig, version)


def test_a_neighbours_flood_of_datagrams(rig: Rig, version: int) -> None:
    for number in range(FLOOD):
        sent = packet(B.address(version), A.address(version), udp(1024 + number, 9))
        assert rig.sent(B, sent).action == Action.PEER
    assert_unharmed(rig, version)
