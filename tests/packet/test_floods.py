"""Floods against one pod cost neither it nor its neighbours a connection, nor a new flow afterwards.

With the node's default sizes, and with a memory so small that each flood is several times its size.
"""

import time
from collections.abc import Iterator

import pytest

from podwire.datapath import abi
from podwire.datapath.abi import Action, ConfigFlags, ConntrackFlags, DropReason
from podwire.datapath.programs import Capacities
from tests.packet.frames import ACK, RST, SYN, ipv4, tcp, udp
from tests.packet.rig import ALLOW, OUTSIDE, SMALL, WORLD_4, A, B, Endpoint, Rig, open_rig

pytestmark = [pytest.mark.packet, pytest.mark.timeout(600)]

CLOSED = ALLOW | ConfigFlags.DENY_INGRESS
IDLE = 2000
AFTER = 200
"""New flows of each endpoint once a flood is over."""


@pytest.fixture(scope="module", params=[1_048_576, 16_384])
def sized(request: pytest.FixtureRequest) -> Iterator[tuple[Rig, Capacities]]:
    capacities = Capacities(request.param)
    with open_rig(
        shard_rows=capacities.shard_entries, new_flow_rows=capacities.new_flow_entries
    ) as rig:
        yield rig, capacities


@pytest.fixture
def rig(sized: tuple[Rig, Capacities]) -> Rig:
    """Give A idle connections, and let nobody but answers in."""
    made, capacities = sized
    made.reset()
    quota = capacities.conntrack_entries // 4
    made.write_settings(quota=quota, new_flow_rate=0)
    connect(made, A, IDLE)
    made.write_settings(quota=quota, new_flow_rate=capacities.new_flow_rate)
    return made


def connect(rig: Rig, endpoint: Endpoint, count: int) -> None:
    """Let the world open connections to an endpoint, whatever its rate."""
    for port in range(20_000, 20_000 + count):
        for flags in (SYN, SYN | ACK, ACK):
            if flags == SYN | ACK:
                rig.sent(endpoint, ipv4(endpoint.ipv4, WORLD_4, tcp(80, port, flags)))
            else:
                from_world(rig, endpoint, tcp(port, 80, flags))


def from_world(rig: Rig, endpoint: Endpoint, segment: object, source: str = WORLD_4) -> Action:
    packet = ipv4(source, endpoint.ipv4, segment)  # type: ignore[arg-type]
    return rig.received(endpoint, packet, ingress_ifindex=OUTSIDE).action


def count_idle(rig: Rig) -> int:
    established = abi.TcpState.ESTABLISHED
    return sum(
        value.tcp_state == established and not value.flags & ConntrackFlags.NEW
        for value in rig.entries(A).values()
    )


def assert_unharmed(rig: Rig) -> None:
    """Idle connections live, and questions of everybody are answered, where nothing else may come in."""
    assert count_idle(rig) >= IDLE
    for endpoint in (A, B, SMALL):
        rig.change(endpoint, flags=CLOSED)
    time.sleep(0.1)  # what a second gives is there by and by
    for number in range(AFTER):
        for endpoint in (A, B, SMALL):
            ask(rig, endpoint, 1000 + number)
            assert answer(rig, endpoint, 1000 + number) == Action.STACK, (number, endpoint.name)


def ask(rig: Rig, endpoint: Endpoint, port: int) -> None:
    packet = ipv4(endpoint.ipv4, WORLD_4, udp(port, 53))
    assert rig.sent(endpoint, packet).reason == DropReason.NONE


def answer(rig: Rig, endpoint: Endpoint, port: int) -> Action:
    return from_world(rig, endpoint, udp(53, port))


def forged(number: int) -> tuple[str, int]:
    return f"198.18.{number >> 8 & 0xFF}.{number & 0xFF}", 1024 + (number * 7919) % 60_000


def test_forged_syns_at_an_open_port(rig: Rig) -> None:
    for number in range(17_000):
        source, port = forged(number)
        assert from_world(rig, A, tcp(port, 80, SYN), source) == Action.STACK
    assert_unharmed(rig)


def test_forged_syns_with_forged_acknowledgements_make_no_connection(rig: Rig) -> None:
    before = rig.usage_row(A).connections
    for number in range(6_000):
        source, port = forged(number)
        from_world(rig, A, tcp(port, 80, SYN), source)
        rig.sent(A, ipv4(A.ipv4, source, tcp(80, port, SYN | ACK)))
        from_world(rig, A, tcp(port, 80, ACK, acknowledged=number * 65_537 + 5), source)
    assert rig.usage_row(A).connections == before
    assert_unharmed(rig)


def test_denied_acknowledgements_at_a_closed_pod(rig: Rig) -> None:
    rig.change(A, flags=CLOSED)
    before = set(rig.entries(A))
    for number in range(20_000):
        source, port = forged(number)
        from_world(rig, A, tcp(port, 80, ACK), source)
    assert set(rig.entries(A)) == before
    assert_unharmed(rig)


def test_a_port_scan_by_a_neighbour(rig: Rig, full: bool) -> None:
    for number in range(100_000 if full else 40_000):
        port, source = number % 60_000, 1024 + number // 60_000
        assert rig.sent(B, ipv4(B.ipv4, A.ipv4, tcp(source, port, SYN))).reason == 0
        if number % 4 == 0:
            rig.sent(A, ipv4(A.ipv4, B.ipv4, tcp(port, source, RST | ACK)))
    assert_unharmed(rig)


@pytest.mark.parametrize("far", [A.ipv4, WORLD_4], ids=["to-a-neighbour", "to-the-world"])
def test_a_flood_of_datagrams_while_a_neighbours_answer_takes_a_second(
    sized: tuple[Rig, Capacities], rig: Rig, far: str
) -> None:
    """However fast B sends: what it is remembered for in one second is bounded, and all of that is inserted here."""
    capacities = sized[1]
    quota = capacities.conntrack_entries // 4
    rig.change(SMALL, flags=CLOSED)
    asked = range(4000, 4100)
    for port in asked:
        ask(rig, SMALL, port)
    rig.write_settings(quota=quota, new_flow_rate=0)
    remembered = capacities.new_flow_rate + capacities.new_flow_rate // 2
    for number in range(remembered):
        rig.sent(B, ipv4(B.ipv4, far, udp(1024 + number % 60_000, 1 + number // 60_000)))
    rig.write_settings(quota=quota, new_flow_rate=capacities.new_flow_rate)
    assert [answer(rig, SMALL, port) for port in asked] == [Action.STACK] * len(asked)
    assert_unharmed(rig)


def test_a_flood_is_remembered_no_further_than_its_rate(rig: Rig) -> None:
    rig.write_settings(new_flow_rate=500)
    begin = time.monotonic()
    for number in range(5000):
        rig.sent(B, ipv4(B.ipv4, WORLD_4, udp(1024 + number, 53)))
    seconds = time.monotonic() - begin
    # The programs read a clock that moves once a tick, of 10 ms at most: their time may be longer by one.
    assert len(rig.entries(B)) <= 500 * (seconds + 0.5 + 0.01) + 2
