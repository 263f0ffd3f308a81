"""Services in real maps: little is written, no number is used twice, and a new agent goes on where the last one was."""

import ipaddress
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from podwire.control.services.room import FRONTENDS, SLOTS
from podwire.datapath import abi
from podwire.datapath.maps import read_settings
from podwire.datapath.rows import read_rows
from podwire.datapath.service_maps import NUMBERS, ServiceMaps, read_services
from podwire.model.errors import Exhausted
from podwire.model.interfaces import Affinity, BackEnd, Frontend
from tests.kernel.node_world import KernelWorld, kernel_world

pytestmark = pytest.mark.kernel

TCP = 6
Table = Mapping[Frontend, Sequence[BackEnd]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelWorld]:
    with kernel_world(tmp_path_factory.mktemp("services")) as made:
        yield made


@pytest.fixture
def services(world: KernelWorld) -> Iterator[ServiceMaps]:
    yield world.datapath.services
    world.datapath.services.write({})


def frontend(number: int = 1, port: int = 80) -> Frontend:
    return Frontend(ipaddress.ip_address(f"10.96.0.{number}"), port, TCP)


def back_end(number: int) -> BackEnd:
    return BackEnd(ipaddress.ip_address(f"10.7.0.{number}"), 8080, TCP)


def in_force(world: KernelWorld) -> dict[Frontend, set[BackEnd]]:
    """Read what a program would find: every slot up to the count, and the back end of each."""
    maps = world.datapath.maps
    found = {}
    for row in read_services(maps):
        assert len(row.back_ends) == len(row.slots) == len(set(row.slots))
        found[row.frontend] = set(row.back_ends)
    return found


def numbers(world: KernelWorld) -> dict[BackEnd, int]:
    return {
        one: number
        for row in read_services(world.datapath.maps)
        for one, number in zip(row.back_ends, row.slots, strict=True)
    }


def sizes(world: KernelWorld) -> tuple[int, int, int]:
    """Count services, slots and back ends."""
    maps = world.datapath.maps
    tables = maps.pw_services, maps.pw_service_list, maps.pw_back_ends
    counted = [len(list(table.keys())) for table in tables]
    return counted[0], counted[1], counted[2]


def is_on(world: KernelWorld) -> bool:
    return bool(read_settings(world.datapath.maps).flags & abi.SettingsFlags.SERVICES)


def test_what_is_written_is_in_force_and_goes_again(
    world: KernelWorld, services: ServiceMaps
) -> None:
    table = {frontend(1): [back_end(1), back_end(2)], frontend(2): []}
    assert not is_on(world)
    services.write(table)
    assert in_force(world) == {one: set(ends) for one, ends in table.items()}
    assert is_on(world)
    services.write({})
    assert sizes(world) == (0, 0, 0)
    assert not is_on(world)


def test_the_same_again_writes_nothing(services: ServiceMaps) -> None:
    table = {frontend(1): [back_end(1), back_end(2)]}
    assert services.write(table)
    assert services.write(table) == 0


def test_of_many_back_ends_one_change_writes_little(services: ServiceMaps) -> None:
    services.write({frontend(1): [back_end(number) for number in range(1, 101)]})
    assert services.write({frontend(1): [back_end(number) for number in range(2, 101)]}) <= 4
    assert services.write({frontend(1): [back_end(number) for number in range(1, 101)]}) <= 4


def test_a_back_end_keeps_its_number_while_it_serves_and_never_gets_it_back(
    world: KernelWorld, services: ServiceMaps
) -> None:
    services.write({frontend(1): [back_end(1)], frontend(2): [back_end(1)]})
    first = numbers(world)[back_end(1)]
    services.change({frontend(1): [back_end(2)]}, [])
    assert numbers(world)[back_end(1)] == first
    services.change({}, [frontend(2)])
    assert back_end(1) not in numbers(world)
    services.change({frontend(2): [back_end(1)]}, [])
    assert numbers(world)[back_end(1)] > first


def test_a_new_agent_goes_on_where_the_last_one_was(
    world: KernelWorld, services: ServiceMaps
) -> None:
    table = {frontend(1): [back_end(1), back_end(2)], frontend(2): [back_end(2)]}
    services.write(table)
    before, counted = numbers(world), sizes(world)
    world.restart()
    fresh = world.datapath.services
    assert fresh.write(table) == 0
    assert (numbers(world), sizes(world)) == (before, counted)
    fresh.write({frontend(1): [back_end(3)]})
    assert numbers(world)[back_end(3)] > max(before.values())
    fresh.write({})
    assert sizes(world) == (0, 0, 0)


def test_what_a_killed_agent_left_half_done_is_put_right(
    world: KernelWorld, services: ServiceMaps
) -> None:
    services.write({frontend(1): [back_end(1), back_end(2)]})
    maps = world.datapath.maps
    [row] = read_services(maps)
    # Slots beyond the length, a back end that nobody names, a slot that is lost.
    maps.pw_service_list.update(
        abi.ServiceSlotKey(row.service, 7).pack(), abi.ServiceSlotValue(row.service, 9).pack()
    )
    maps.pw_back_ends.update(
        (5).to_bytes(4, "little"), abi.BackEndValue(5, 0, bytes(16), 1, TCP).pack()
    )
    maps.pw_service_list.delete(abi.ServiceSlotKey(row.service, 0).pack())
    world.restart()
    world.datapath.services.write({frontend(1): [back_end(1), back_end(2)]})
    assert in_force(world) == {frontend(1): {back_end(1), back_end(2)}}
    assert sizes(world) == (1, 2, 2)


def test_what_has_no_room_changes_nothing(world: KernelWorld, services: ServiceMaps) -> None:
    services.write({frontend(1): [back_end(1)]})
    room = world.datapath.maps.pw_services.info.max_entries
    base = int(ipaddress.ip_address("11.0.0.0"))
    lots: Table = {
        Frontend(ipaddress.ip_address(base + number), 80, TCP): () for number in range(room + 1)
    }
    with pytest.raises(Exhausted, match="has room for"):
        services.write(lots)
    assert in_force(world) == {frontend(1): {back_end(1)}}


def test_a_table_that_fills_most_of_the_room_is_taken_over_by_a_new_agent(
    world: KernelWorld, services: ServiceMaps
) -> None:
    ends = [back_end(number) for number in range(1, 251)]
    room = world.datapath.maps.pw_service_list.info.max_entries
    full = {frontend(1, port): ends for port in range(1, room // len(ends) + 1)}
    services.write(full)
    world.restart()
    assert world.datapath.services.write(full) == 0
    with pytest.raises(Exhausted, match="has room for"):
        world.datapath.services.change({frontend(2): ends}, [])
    world.datapath.services.write({})
    assert sizes(world) == (0, 0, 0)


def test_a_full_table_is_exchanged_whole_and_without_leaving_what_is_full(
    world: KernelWorld, services: ServiceMaps
) -> None:
    """Both tables together have no room: what goes makes room for what comes."""
    room = world.datapath.maps.pw_service_list.info.max_entries
    frontends = [frontend(1, port) for port in range(1, room * 3 // 4 // 250 + 1)]
    for first in (1, 0x10001):
        ends = [
            BackEnd(ipaddress.ip_address(int(ipaddress.ip_address("11.0.0.0")) + number), 80, TCP)
            for number in range(first, first + 250)
        ]
        services.write({served: ends for served in frontends})
        assert len(numbers(world)) == 250
    others = {frontend(2, served.port): ends for served in frontends}
    services.write(others)
    assert in_force(world) == {served: set(ends) for served in others}


def test_what_the_catalogue_admits_has_room_here(world: KernelWorld) -> None:
    maps = world.datapath.maps
    for admitted, present in (
        (FRONTENDS, maps.pw_services),
        (SLOTS, maps.pw_service_list),
        (SLOTS, maps.pw_back_ends),
    ):
        assert admitted <= present.info.max_entries * 15 // 16


def test_numbers_come_round_and_pass_over_those_in_use(
    world: KernelWorld, services: ServiceMaps
) -> None:
    services.write({frontend(1): [back_end(1)]})
    services._next = NUMBERS - 2
    table = {frontend(position): [back_end(position)] for position in range(1, 8)}
    services.write(table)
    services._next = NUMBERS - 2
    table |= {frontend(position): [back_end(position)] for position in range(8, 12)}
    services.write(table)
    assert in_force(world) == {one: set(ends) for one, ends in table.items()}
    used = list(numbers(world).values())
    assert len(set(used)) == len(used) == 11
    assert all(0 < number < NUMBERS for number in used)


def affinities(world: KernelWorld) -> dict[Frontend, tuple[int, int, int]]:
    """Give for each frontend its list's number, how long its back ends are kept, and where."""
    return {
        row.frontend: (row.service, row.affinity_s, row.place)
        for row in read_services(world.datapath.maps)
    }


def test_lists_with_affinity_say_who_is_in_them(world: KernelWorld, services: ServiceMaps) -> None:
    ends = [back_end(number) for number in range(1, 6)]
    kept = {frontend(1): 60, frontend(2): 60}
    table = {frontend(1): ends, frontend(2): ends[:2], frontend(3): ends}
    services.write(table, kept)
    assert sizes(world) == (3, 10 + 4 + 5, 5)
    first = affinities(world)
    assert [first[frontend(number)][1] for number in (1, 2, 3)] == [60, 60, 0]
    assert first[frontend(1)][2] != first[frontend(2)][2]
    services.change({frontend(1): ends[2:]}, [], kept)
    assert sizes(world) == (3, 6 + 4 + 5, 5)
    members = {
        abi.ServiceSlotValue.unpack(value).back_end
        for key, value in world.datapath.maps.pw_service_list.items()
        if abi.ServiceSlotKey.unpack(key).service == first[frontend(1)][0]
        and abi.ServiceSlotKey.unpack(key).slot & abi.SLOT_OF_MEMBER
    }
    assert members == {numbers(world)[end] for end in ends[2:]}
    world.restart()
    again = world.datapath.services
    table[frontend(1)] = ends[2:]
    assert again.write(table, kept) == 0
    again.write({})
    assert sizes(world) == (0, 0, 0)


def test_a_list_is_another_one_where_affinity_begins_or_ends(
    world: KernelWorld, services: ServiceMaps
) -> None:
    table, one = {frontend(1): [back_end(1), back_end(2)]}, frontend(1)
    seen = []
    for affinity_s in (0, 60, 90, 0, 60):
        services.change(table, [], {one: affinity_s})
        seen.append(affinities(world)[one][0])
        assert in_force(world) == {one: set(table[one])}
        assert affinities(world)[one][1] == affinity_s
        assert sizes(world) == (1, 4 if affinity_s else 2, 2)
    assert seen[1] == seen[2]
    assert len(set(seen)) == 4


FAILING = {
    "back-ends": ("pw_back_ends", "update_batch"),
    "slots": ("pw_service_list", "update_batch"),
    "frontend": ("pw_services", "update"),
    "old-slots": ("pw_service_list", "delete_batch"),
    "old-frontend": ("pw_services", "delete_batch"),
    "old-back-ends": ("pw_back_ends", "delete_batch"),
}
HISTORIES: dict[str, tuple[tuple[Table, Affinity], tuple[Table, Affinity]]] = {
    "affinity-begins": (
        ({frontend(1): [back_end(1), back_end(2)], frontend(2): [back_end(2)]}, {}),
        ({frontend(1): [back_end(1), back_end(3)]}, {frontend(1): 60}),
    ),
    "affinity-ends": (
        ({frontend(1): [back_end(1), back_end(2)], frontend(2): [back_end(2)]}, {frontend(1): 60}),
        ({frontend(1): [back_end(1), back_end(3)]}, {}),
    ),
    "back-ends-go-and-come": (
        ({frontend(1): [back_end(n) for n in range(1, 5)], frontend(2): []}, {}),
        ({frontend(1): [back_end(5), back_end(1)]}, {}),
    ),
}


@pytest.mark.parametrize("is_known", [True, False], ids=["again", "by-a-new-agent"])
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("fails", FAILING)
def test_a_change_that_fails_leaves_nothing_once_it_is_carried_out(
    world: KernelWorld,
    services: ServiceMaps,
    monkeypatch: pytest.MonkeyPatch,
    fails: str,
    history: str,
    is_known: bool,
) -> None:
    (before, old_affinity), (after, affinity) = HISTORIES[history]
    services.write(before, old_affinity)
    name, call = FAILING[fails]
    with monkeypatch.context() as patched:
        patched.setattr(getattr(world.datapath.maps, name), call, _break)
        with pytest.raises(BrokenError):
            services.write(after, affinity)
    if not is_known:
        world.restart()
    services = world.datapath.services
    services.write(after, affinity)
    assert in_force(world) == {one: set(ends) for one, ends in after.items()}
    kept = {one: affinity_s for one, (_, affinity_s, _) in affinities(world).items() if affinity_s}
    assert kept == affinity
    slots = sum(len(ends) * (2 if one in affinity else 1) for one, ends in after.items())
    assert sizes(world) == (len(after), slots, 2)
    services.write({})
    assert sizes(world) == (0, 0, 0)


class BrokenError(Exception):
    """The kernel has refused something."""


def _break(*_arguments: object, **_named: object) -> None:
    raise BrokenError


def test_any_change_comes_to_what_is_wanted(world: KernelWorld, services: ServiceMaps) -> None:
    chance = random.Random(3)
    wanted: dict[Frontend, list[BackEnd]] = {}
    for _ in range(150):
        one = frontend(chance.randint(1, 4), chance.choice((80, 81)))
        if chance.random() < 0.3:
            wanted.pop(one, None)
            services.change({}, [one])
        else:
            wanted[one] = [back_end(n) for n in chance.sample(range(1, 12), chance.randint(0, 8))]
            services.change({one: wanted[one]}, [])
        assert in_force(world) == {key: set(ends) for key, ends in wanted.items()}
    used = {end for ends in wanted.values() for end in ends}
    assert sizes(world) == (len(wanted), sum(map(len, wanted.values())), len(used))


def test_people_can_read_it(world: KernelWorld, services: ServiceMaps) -> None:
    services.write({frontend(1): [back_end(1)]})
    [row], more = read_rows(world.datapath.maps, "service", 10)
    assert (row["address"], row["port"], row["protocol"], row["back_ends"], more) == (
        "10.96.0.1", 80, "tcp", ["10.7.0.1 8080"], False
    )  # fmt: skip


def test_other_ports_of_an_address_are_refused_while_all_its_ports_are_known_alone(
    services: ServiceMaps, world: KernelWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = world.datapath.maps.pw_services
    ports: list[int] = []
    write, remove = rows.update, rows.delete_batch

    def port_of(key: bytes) -> int:
        return abi.ServiceKey.unpack(key).port

    def note_written(key: bytes, *rest: Any) -> None:
        ports.append(port_of(key))
        write(key, *rest)

    def note_removed(keys: Iterable[bytes]) -> int:
        listed = list(keys)
        ports.extend(port_of(key) for key in listed)
        return remove(listed)

    monkeypatch.setattr(rows, "update", note_written)
    monkeypatch.setattr(rows, "delete_batch", note_removed)
    whole = replace(frontend(), port=0, protocol=0)
    wanted = {whole: (), frontend(): (back_end(1),), frontend(port=443): (back_end(2),)}
    services.write(wanted)
    assert ports == [80, 443, 0]
    ports.clear()
    services.write({})
    assert ports[0] == 0
    assert len(ports) == len(wanted)
