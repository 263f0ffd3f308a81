"""Flows to services take room of their pod alone: one that is never answered, or opens and closes, fills its own."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest

from podwire.datapath import abi
from podwire.datapath.abi import Charge, ConntrackFlags, ConntrackKind, DropReason
from podwire.model.errors import KernelFailure
from tests.packet.frames import ACK, FIN, RST, SYN
from tests.packet.overlay import packet
from tests.packet.rig import SMALL, A, B, Endpoint, Outcome, Rig
from tests.packet.services import POD_PORT, PORT, PROTOCOLS, ask, offer, speak, turn_on, vip
from tests.packet.test_collection import Collector, age_all, collecting, eventually
from tests.waiting import within

pytestmark = pytest.mark.packet

both_families = pytest.mark.parametrize("version", [4, 6])
both_protocols = pytest.mark.parametrize("name", ["tcp", "udp"])
ROOM = 100
QUOTA = ROOM * abi.BRIEF_PART
RATE = 50
"""Exchanges each second: as 8,192 with the room that a pod has by default. Kept whole they would fill it in 2 s."""
SECONDS = 5
STREAM_MS = 2000


@pytest.fixture
def roomy(rig: Rig) -> Rig:
    """Give the rig with room for ROOM brief flows of each pod, and pod B behind the service."""
    make_room(rig)
    return rig


def make_room(rig: Rig) -> None:
    rig.write_settings(quota=QUOTA)
    for name in ("tcp", "udp"):
        offer_b(rig, 4, name)


def offer_b(rig: Rig, version: int, name: str) -> None:
    """Let pod B answer for the service."""
    first = 100 if name == "tcp" else 200
    offer(
        rig,
        vip(version),
        [(B.address(version), POD_PORT)],
        protocol=PROTOCOLS[name],
        service=first,
        first=first,
    )


def counted(rig: Rig, endpoint: Endpoint = A) -> tuple[int, int]:
    """Give how many connections it opened, and how many brief flows it has."""
    usage = rig.usage_row(endpoint)
    return usage.connections[0], usage.brief_flows


def answer(rig: Rig, version: int, name: str, port: int, flags: int) -> Outcome:
    """Let pod B answer pod A."""
    segment = speak(name, POD_PORT, port, flags)
    return rig.sent(B, packet(B.address(version), A.address(version), segment))


def connect(rig: Rig, port: int, version: int = 4) -> None:
    """Open a connection of TCP."""
    ask(rig, A, version, "tcp", sport=port)
    answer(rig, version, "tcp", port, SYN | ACK)
    ask(rig, A, version, "tcp", sport=port, flags=ACK)


def exchange(rig: Rig, port: int) -> DropReason:
    """Ask and be answered by datagrams."""
    reason = ask(rig, A, 4, "udp", sport=port).reason
    answer(rig, 4, "udp", port, 0)
    return reason


# What counts as what.


@both_families
def test_tcp_is_brief_until_it_is_established_and_after_it_is_closed(
    rig: Rig, version: int
) -> None:
    offer_b(rig, version, "tcp")
    steps = []
    for flags, is_answer in ((SYN, False), (SYN | ACK, True), (ACK, False), (FIN | ACK, False)):
        if is_answer:
            answer(rig, version, "tcp", 7, flags)
        else:
            ask(rig, A, version, "tcp", sport=7, flags=flags)
        steps.append(counted(rig))
    answer(rig, version, "tcp", 7, FIN | ACK)
    assert steps == [(0, 1), (0, 1), (1, 0), (1, 0)]
    assert counted(rig) == (0, 1)
    ask(rig, A, version, "tcp", sport=7)
    assert counted(rig) == (0, 1)


@both_families
def test_datagrams_are_brief_until_they_last(rig: Rig, version: int) -> None:
    """A resolver asks twice by one port; that is no stream."""

    def ask_thrice() -> tuple[int, int]:
        rig.reset()
        offer_b(rig, version, "udp")
        for _ in range(3):
            ask(rig, A, version, "udp", sport=7)
            answer(rig, version, "udp", 7, 0)
        return counted(rig)

    assert within(STREAM_MS / 1000, ask_thrice) == (0, 1)
    [(key, value)] = [
        (key, value)
        for key, value in rig.entries(A).items()
        if value.kind == ConntrackKind.OF_BACK_END
    ]
    rig.change_entry(key, answer=(value.answer - STREAM_MS - 10) % (1 << 32))
    ask(rig, A, version, "udp", sport=7)
    assert counted(rig) == (1, 0)


@both_protocols
def test_who_fills_his_room_is_refused_and_nobody_else(roomy: Rig, name: str) -> None:
    connect(roomy, 7)
    offer(roomy, vip(4), [(SMALL.ipv4, POD_PORT)], protocol=PROTOCOLS[name], service=9, first=300)
    outcomes = [ask(roomy, A, 4, name, sport=1000 + port).reason for port in range(ROOM + 20)]
    assert Counter(outcomes) == {DropReason.NONE: ROOM + 1, DropReason.CONNTRACK_QUOTA: 19}
    assert ask(roomy, B, 4, name).reason == DropReason.NONE
    # What is open goes on, and what goes elsewhere has other room.
    assert ask(roomy, A, 4, "tcp", sport=7, flags=ACK).reason == DropReason.NONE
    direct = packet(A.ipv4, SMALL.ipv4, speak(name, 9, 9))
    assert roomy.sent(A, direct).reason == DropReason.NONE


def test_open_connections_leave_the_room_of_brief_ones(roomy: Rig) -> None:
    for port in range(3 * ROOM):
        connect(roomy, 1000 + port)
    assert counted(roomy) == (3 * ROOM, 0)


def test_whatever_happens_what_is_charged_is_what_has_a_row(rig: Rig) -> None:
    """The same ports again and again, opened, answered, closed and broken off, with other back ends each time."""
    rig.write_settings(quota=4000)
    turn_on(rig)
    chance = random.Random(5)
    for step in range(1500):
        if step % 100 == 0:
            back_end = chance.choice((B, SMALL))
            offer(rig, vip(4), [(back_end.ipv4, POD_PORT)], first=100 + step, service=8)
        port = chance.randint(1, 20)
        if chance.random() < 0.5:
            flags = chance.choice((SYN, SYN, ACK, FIN | ACK, RST))
            ask(rig, A, 4, "tcp", sport=port, flags=flags)
        else:
            flags = chance.choice((SYN | ACK, ACK, FIN | ACK, RST | ACK))
            segment = speak("tcp", POD_PORT, port, flags)
            sender = chance.choice((B, SMALL))
            rig.sent(sender, packet(sender.ipv4, A.ipv4, segment))
    charges = Counter(
        (value.charged, value.kind)
        for shard in rig.shards
        for raw_key, raw in shard.items()
        for key, value in [(abi.ConntrackKey.unpack(raw_key), abi.ConntrackValue.unpack(raw))]
        if key.instance == A.instance and value.kind != ConntrackKind.PLAIN
    )
    brief = charges[Charge.BRIEF, ConntrackKind.OF_BACK_END]
    open_ = charges[Charge.CONNECTION, ConntrackKind.OF_BACK_END]
    assert charges[Charge.NONE, ConntrackKind.OF_BACK_END] == 0
    assert brief
    assert counted(rig) == (open_, brief)


@both_protocols
def test_a_flow_without_room_for_both_rows_leaves_nothing_that_counts(rig: Rig, name: str) -> None:
    rig.write_settings(quota=4000)
    offer_b(rig, 4, name)
    with rig.smaller_shards(1) as small:
        outcomes = Counter(
            ask(small, A, 4, name, sport=1000 + index).reason for index in range(200)
        )
        whole = [
            key
            for key, value in small.entries(A).items()
            if value.kind == ConntrackKind.OF_BACK_END
        ]
        assert outcomes[DropReason.CONNTRACK_FULL]
        assert counted(small) == (0, outcomes[DropReason.NONE])
        assert len(whole) == outcomes[DropReason.NONE]


# Where the room of a pod gets short the collector is in a hurry.


@pytest.fixture
def collector(roomy: Rig) -> Iterator[Collector]:
    with collecting(roomy) as running:
        yield running


EVER_S = 3600
LIFETIME_S = 30
"""Of a datagram's row, where nothing presses it out."""


def flows(rig: Rig) -> set[int]:
    """Give the pod's ports of its flows that are left."""
    return {
        value.nat_sport
        for value in rig.entries(A).values()
        if value.kind == ConntrackKind.OF_BACK_END and not value.flags & ConntrackFlags.EXPIRED
    }


def outlast(rig: Rig) -> None:
    """Let no row go because of its age, however slow this machine is: only what is pressed out goes."""
    for key in rig.entries():
        with suppress(KeyError, KernelFailure):  # it has been collected
            rig.change_entry(key, lifetime_s=3 * EVER_S)


def is_left(rig: Rig, wanted: set[int]) -> bool:
    return flows(rig) == wanted and counted(rig)[1] == len(wanted)


def test_with_room_to_spare_a_question_has_all_its_time(roomy: Rig, collector: Collector) -> None:
    def exchange_and_age() -> int:
        roomy.reset()
        make_room(roomy)
        for port in range(ROOM // 4):
            exchange(roomy, port + 1)
        age_all(roomy, 20)
        collector.wait_rounds(3)
        return len(flows(roomy))

    assert within(LIFETIME_S - 20, exchange_and_age) == ROOM // 4
    age_all(roomy, LIFETIME_S - 20 + 1)
    assert eventually(partial(is_left, roomy, set()))


def test_what_was_answered_makes_room_first(roomy: Rig) -> None:
    waiting = set(range(1, ROOM // 3))
    for port in waiting:
        ask(roomy, A, 4, "udp", sport=port)
    for port in range(ROOM, ROOM + ROOM // 3):
        exchange(roomy, port)
    outlast(roomy)
    # On a slow machine the first ones are old enough to be pressed out by now.
    age_all(roomy, -EVER_S)
    with collecting(roomy) as collector:
        collector.wait_rounds(3)
        assert len(flows(roomy)) == len(waiting) + ROOM // 3
        age_all(roomy, EVER_S + 1.5)
        assert eventually(partial(is_left, roomy, waiting))
        collector.wait_rounds(3)
        assert flows(roomy) == waiting


def test_what_waits_makes_room_when_three_quarters_are_used(
    roomy: Rig, collector: Collector
) -> None:
    for port in range(ROOM):
        ask(roomy, A, 4, "udp", sport=port + 1)
    ask(roomy, SMALL, 4, "udp", sport=1)
    outlast(roomy)
    age_all(roomy, 1.5)
    assert eventually(lambda: len(flows(roomy)) <= ROOM * 3 // 4)
    collector.wait_rounds(3)
    assert len(flows(roomy)) >= ROOM // 2
    assert counted(roomy, SMALL) == (0, 1)


def test_closed_connections_make_room(roomy: Rig, collector: Collector) -> None:
    for port in range(ROOM * 2 // 3):
        connect(roomy, port + 1)
        ask(roomy, A, 4, "tcp", sport=port + 1, flags=RST)
    connect(roomy, 5000)
    age_all(roomy, 1.5)
    assert eventually(lambda: counted(roomy)[1] <= ROOM // 4)
    assert 5000 in flows(roomy)
    assert collector.state().removed


@pytest.mark.parametrize("is_collected", [True, False], ids=["collected", "control"])
def test_a_pod_that_is_answered_never_meets_its_limit(roomy: Rig, is_collected: bool) -> None:
    if is_collected:
        with collecting(roomy):
            assert exchange_for_a_while(roomy) == {DropReason.NONE}
    else:
        assert DropReason.CONNTRACK_QUOTA in exchange_for_a_while(roomy)


def exchange_for_a_while(rig: Rig) -> set[DropReason]:
    """Ask and be answered RATE times a second; gives what came of it. A machine that is late asks no faster later."""
    reasons = set()
    next_s = time.monotonic()
    for number in range(RATE * SECONDS):
        reasons.add(exchange(rig, 1 + number))
        next_s = max(next_s + 1 / RATE, time.monotonic())
        while time.monotonic() < next_s:
            time.sleep(0.001)
    return reasons


# The pod that floods a service.

FLOOD = 1200
OTHER_VIP = "10.96.0.20"


@pytest.mark.parametrize("is_bounded", [True, False], ids=["bounded", "control"])
def test_a_flood_hurts_neither_other_clients_of_the_service_nor_other_services(
    rig: Rig, is_bounded: bool
) -> None:
    """The table has room for 512 flows; without a bound one pod takes all of it."""
    rig.write_settings(quota=QUOTA if is_bounded else 1 << 20)
    offer_b(rig, 4, "udp")
    offer(rig, OTHER_VIP, [(B.ipv4, 9)], protocol=PROTOCOLS["udp"], service=20, first=300)
    with rig.smaller_shards(16) as small:
        exchange(small, 7)
        flooded = Counter(
            ask(small, A, 4, "udp", sport=1000 + index).reason for index in range(FLOOD)
        )
        others = Counter(
            small.sent(SMALL, packet(SMALL.ipv4, address, speak("udp", 2000 + index, PORT))).reason
            for index in range(20)
            for address in (vip(4), OTHER_VIP)
        )
        # Its own open flow goes on, too.
        assert ask(small, A, 4, "udp", sport=7).reason == DropReason.NONE
        assert answer(small, 4, "udp", 7, 0).reason == DropReason.NONE
    if is_bounded:
        assert flooded[DropReason.CONNTRACK_QUOTA] == FLOOD - ROOM
        assert set(others) == {DropReason.NONE}
    else:
        assert others[DropReason.CONNTRACK_FULL]


def test_where_the_table_of_the_node_is_full_new_flows_to_services_alone_are_refused(
    rig: Rig,
) -> None:
    """Budgets are each pod's own and do not shrink with the number of pods: many that flood at once fill it."""
    rig.write_settings(quota=100_000)
    for name in ("tcp", "udp"):
        offer_b(rig, 4, name)
    with rig.smaller_shards(1) as full:
        for flags in (SYN, SYN | ACK, ACK):
            if flags == SYN | ACK:
                answer(full, 4, "tcp", 5, flags)
            else:
                ask(full, A, 4, "tcp", sport=5, flags=flags)
        for port in range(1024, 3024):
            ask(full, SMALL, 4, "udp", sport=port)
        refused = {ask(full, A, 4, "udp", sport=port).reason for port in range(1024, 1044)}
        assert refused == {DropReason.CONNTRACK_FULL}
        direct = packet(A.ipv4, B.ipv4, speak("udp", 7, POD_PORT))
        assert full.sent(A, direct).reason == DropReason.NONE
        back = packet(B.ipv4, A.ipv4, speak("udp", POD_PORT, 7))
        assert full.sent(B, back).reason == DropReason.NONE
        assert ask(full, A, 4, "tcp", sport=5, flags=ACK).reason == DropReason.NONE
