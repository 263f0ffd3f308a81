"""Session affinity: a pod keeps its back end for a time, and remembers no more than its own places have room for."""

import time

import pytest

from podwire.datapath import abi
from podwire.datapath.abi import DropReason
from tests.packet.overlay import packet
from tests.packet.rig import SMALL, A, B, Endpoint, Rig
from tests.packet.services import (
    POD_PORT,
    PORT,
    PROTOCOLS,
    ask,
    offer,
    remove_back_end,
    speak,
    tuple_of,
    vip,
)
from tests.packet.test_collection import collecting, earlier, eventually

pytestmark = pytest.mark.packet

both_families = pytest.mark.parametrize("version", [4, 6])
both_protocols = pytest.mark.parametrize("name", ["tcp", "udp"])
AFFINITY_S = 3600
TRIES = 24
NS = 1_000_000_000
DAY_S = 86_400


@pytest.fixture(autouse=True)
def many_flows(rig: Rig) -> None:
    """Give pods room for all flows of a test."""
    rig.write_settings(quota=1 << 16)


def offer_both(rig: Rig, version: int, name: str, **changes: int) -> None:
    """Let two pods answer, the first as number 100."""
    ends = [(pod.address(version), POD_PORT) for pod in (B, SMALL)]
    changes = {"affinity_s": AFFINITY_S, **changes}
    offer(rig, vip(version), ends, protocol=PROTOCOLS[name], **changes)


def chosen(
    rig: Rig, version: int, name: str, client: Endpoint = A, first: int = 2000, count: int = TRIES
) -> set[str]:
    """Give who answers the pod's next new flows."""
    return {
        tuple_of(ask(rig, client, version, name, sport=port).data).destination
        for port in range(first, first + count)
    }


def rows(rig: Rig) -> dict[abi.AffinityKey, abi.AffinityValue]:
    """Give what pods remember."""
    return {
        abi.AffinityKey.unpack(key): abi.AffinityValue.unpack(value)
        for key, value in rig.maps["pw_affinity"].items()
    }


def age(rig: Rig, seconds: float) -> None:
    """Make all of it so much older."""
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    for key, value in rows(rig).items():
        old = value._replace(last_ns=earlier(now, seconds))
        rig.maps["pw_affinity"].update(key.pack(), old.pack())


@both_families
@both_protocols
@pytest.mark.parametrize("affinity_s", [AFFINITY_S, 0], ids=["affinity", "control"])
def test_a_pod_keeps_its_back_end(rig: Rig, version: int, name: str, affinity_s: int) -> None:
    offer_both(rig, version, name, affinity_s=affinity_s)
    found = chosen(rig, version, name)
    assert len(found) == (1 if affinity_s else 2)
    assert len(rows(rig)) == bool(affinity_s)


def test_each_pod_has_its_own(rig: Rig) -> None:
    offer_both(rig, 4, "udp")
    both = {next(iter(chosen(rig, 4, "udp", client, count=1))) for client in (A, A, A)}
    assert len(both) == 1
    assert len({key.instance for key in rows(rig)}) == 1
    ask(rig, SMALL, 4, "udp")
    assert {key.instance for key in rows(rig)} == {A.instance, SMALL.instance}


@both_families
def test_it_ends_some_time_after_the_last_flow(rig: Rig, version: int) -> None:
    offer_both(rig, version, "udp")
    [kept] = chosen(rig, version, "udp", count=4)
    for step in range(4):
        # Two of these would be more: each flow begins the time anew.
        age(rig, AFFINITY_S * 0.75)
        assert chosen(rig, version, "udp", first=3000 + step, count=1) == {kept}
    seen = set()
    for step in range(TRIES):
        age(rig, AFFINITY_S + 1)
        seen |= chosen(rig, version, "udp", first=4000 + step, count=1)
    assert len(seen) == 2


@both_protocols
def test_a_back_end_that_goes_is_forgotten_and_does_not_come_back(rig: Rig, name: str) -> None:
    offer_both(rig, 4, name)
    [kept] = chosen(rig, 4, name, count=3)
    [gone] = [pod for pod in (B, SMALL) if pod.ipv4 == kept]
    [left] = [pod for pod in (B, SMALL) if pod.ipv4 != kept]
    # It is in no list any more, though somewhere else it still is a back end.
    number = 100 if gone is B else 101
    rig.maps["pw_service_list"].clear()
    offer(
        rig,
        vip(4),
        [(left.ipv4, POD_PORT)],
        protocol=PROTOCOLS[name],
        first=201 - number,
        affinity_s=AFFINITY_S,
    )
    assert chosen(rig, 4, name, first=3000) == {left.ipv4}
    remove_back_end(rig, number)
    offer_both(rig, 4, name, first=300)
    # The one that is left got another number.
    assert len(chosen(rig, 4, name, first=4000, count=3)) == 1


def test_switched_off_and_on_it_begins_anew(rig: Rig) -> None:
    offer_both(rig, 4, "udp")
    chosen(rig, 4, "udp", count=3)
    [before] = rows(rig).values()
    offer_both(rig, 4, "udp", affinity_s=0, service=8)
    assert len(chosen(rig, 4, "udp", first=3000)) == 2
    offer_both(rig, 4, "udp", service=9)
    # What was remembered of the list before is not asked.
    seen = set()
    for step in range(TRIES):
        [key] = rows(rig)
        rig.maps["pw_affinity"].update(key.pack(), before.pack())
        seen |= chosen(rig, 4, "udp", first=4000 + step, count=1)
    assert len(seen) == 2


def test_a_port_that_is_taken_changes_the_port_and_not_the_back_end(rig: Rig) -> None:
    offer_both(rig, 4, "udp")
    [kept] = chosen(rig, 4, "udp", count=2)
    second = "10.96.0.20"
    ends = [(kept, POD_PORT)]
    offer(rig, second, ends, protocol=PROTOCOLS["udp"], service=20, first=500)
    # The tuple from port 5000 to the back end that is kept belongs to the other service.
    rig.sent(A, packet(A.ipv4, second, speak("udp", 5000, PORT)))
    went = tuple_of(ask(rig, A, 4, "udp", sport=5000).data)
    assert went.destination == kept
    assert went.sport != 5000


def test_who_asks_every_service_fills_his_own_places(rig: Rig) -> None:
    for number in range(3 * abi.AFFINITY_PLACES):
        if number % 8 == 0:
            offer_both(rig, 4, "udp", affinity_place=number, service=1000 + number)
            assert ask(rig, A, 4, "udp", sport=1000 + number).reason == DropReason.NONE
    offer_both(rig, 4, "udp", affinity_place=8, service=5)
    ask(rig, SMALL, 4, "udp", sport=1)
    mine = [key for key in rows(rig) if key.instance == A.instance]
    assert len(mine) == abi.AFFINITY_PLACES // 8
    assert {key.instance for key in rows(rig)} == {A.instance, SMALL.instance}


def test_what_nobody_has_any_more_is_collected(rig: Rig) -> None:
    offer_both(rig, 4, "udp")
    for client in (A, B, SMALL):
        ask(rig, client, 4, "udp")
    with collecting(rig) as collector:
        collector.wait_rounds(2)
        assert len(rows(rig)) == 3
        rig.maps["pw_usage"].delete(A.instance.to_bytes(4, "little"))
        assert eventually(lambda: A.instance not in {key.instance for key in rows(rig)})
        assert len(rows(rig)) == 2
        age(rig, DAY_S + 1)
        assert eventually(lambda: not rows(rig))


@pytest.mark.parametrize("is_kept", [True, False], ids=["affinity", "control"])
def test_who_floods_a_service_by_every_port_takes_nothing_of_other_clients(
    rig: Rig, is_kept: bool
) -> None:
    """A remembers one back end for each service, however many flows it opens; the others keep theirs."""
    ends = [("198.18.0.1", POD_PORT), ("198.18.0.2", POD_PORT)]
    affinity = {"affinity_s": AFFINITY_S} if is_kept else {}
    offer(rig, vip(4), ends, protocol=PROTOCOLS["udp"], **affinity)
    before = {client.name: chosen(rig, 4, "udp", client) for client in (B, SMALL)}
    flooded = chosen(rig, 4, "udp", A, first=10_000, count=1200)
    after = {client.name: chosen(rig, 4, "udp", client, first=4000) for client in (B, SMALL)}
    sizes = {len(flooded), *map(len, before.values()), *map(len, after.values())}
    assert sizes == ({1} if is_kept else {2})
    assert after == before
    assert len(rows(rig)) == (3 if is_kept else 0)
