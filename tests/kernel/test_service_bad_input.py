"""Objects that contradict each other or name what they should not: specified, and nothing of them stays in the maps.

Each case is a history of documents. After each step the maps have exactly what a fresh look at all that is left says,
and after the last one nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pytest

from podwire.control.services.catalogue import Catalogue
from podwire.control.services.choose import Place
from podwire.datapath.service_maps import ServiceMaps, read_services
from podwire.model.store import StoredObject, StoreEvent
from tests.kernel.node_world import KernelWorld, kernel_world
from tests.unit.service_objects import endpoint, service, slice_of, stored

pytestmark = pytest.mark.kernel

VIP, OTHER = "10.96.0.10", "10.96.0.11"
A, B = "10.7.0.1", "10.7.0.2"
NODE, WORLD = "192.0.2.1", "198.51.100.7"
GONE: Final = True
Shown = Mapping[str, Sequence[str]]
Step = tuple[StoredObject, bool, Shown]
"""An object, whether it is deleted, and who answers where from then on."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelWorld]:
    with kernel_world(tmp_path_factory.mktemp("bad-input")) as made:
        yield made


@pytest.fixture
def services(world: KernelWorld) -> Iterator[ServiceMaps]:
    yield world.datapath.services
    world.datapath.services.write({})


def put(document: Mapping[str, Any], created: str = "2026-01-01T00:00:00Z", **shown: Any) -> Step:
    """Put an object; `shown`: who answers at 80/tcp of the addresses, by short names."""
    return stored(document, created), False, _spell(shown)


def take(document: Mapping[str, Any], **shown: Any) -> Step:
    """Delete an object."""
    return stored(document), GONE, _spell(shown)


def _spell(shown: Mapping[str, Sequence[str]]) -> Shown:
    names = {"vip": VIP, "other": OTHER}
    return {f"{names[name]} 80": sorted(ends) for name, ends in shown.items()}


def named(count: int, first: int = 1) -> list[Mapping[str, Any]]:
    """Give so many ports, each with a name of its own."""
    return [{"name": f"p{number}", "port": number} for number in range(first, first + count)]


OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"
WEB = slice_of(endpoints=[endpoint(A)])
LATE = slice_of("late", [endpoint(B)])

CASES: dict[str, Sequence[Step]] = {
    "overlapping-cluster-ips": [
        put(WEB),
        put(LATE),
        put(service("late"), NEW, vip=[f"{B} 8080"]),
        put(service(), OLD, vip=[f"{A} 8080"]),
        take(service(), vip=[f"{B} 8080"]),
        take(service("late")),
    ],
    "addresses-of-nodes-of-the-world-and-of-nobody": [
        put(service(), vip=[]),
        put(
            slice_of(endpoints=[
                endpoint(address)
                for address in (NODE, WORLD, "127.0.0.1", "0.0.0.0", "169.254.1.1", "224.0.0.1", "fd07::1", "x", "")
            ]),
            vip=[f"{NODE} 8080", f"{WORLD} 8080"],
        ),
        put(slice_of(endpoints=[endpoint("127.0.0.1")]), vip=[]),
    ],
    "no-ports-and-then-one": [
        put(WEB),
        put(service(ports=[])),
        put(service(), vip=[f"{A} 8080"]),
        put(service(ports=[])),
    ],
    "ports-out-of-range": [
        put(WEB),
        put(service(ports=[{"port": 0}, {"port": 70000}, {"port": True}, {"port": "80"}, {}])),
    ],
    "no-selector-and-slices-by-hand": [
        put(WEB),
        put(slice_of(endpoints=[endpoint(B)], number=2)),
        put(service(), vip=[f"{A} 8080", f"{B} 8080"]),
        take(WEB, vip=[f"{B} 8080"]),
    ],
    "two-slices-with-the-same-address": [
        put(service(), vip=[]),
        put(WEB, vip=[f"{A} 8080"]),
        put(slice_of(endpoints=[endpoint(A), endpoint(B)], number=2), vip=[f"{A} 8080", f"{B} 8080"]),
        take(WEB, vip=[f"{A} 8080", f"{B} 8080"]),
        put(slice_of(endpoints=[endpoint(B)], number=2), vip=[f"{B} 8080"]),
    ],
    "the-same-address-ready-in-one-slice-only": [
        put(service(), vip=[]),
        put(slice_of(endpoints=[endpoint(A, ready=False)]), vip=[]),
        put(slice_of(endpoints=[endpoint(A)], number=2), vip=[f"{A} 8080"]),
        take(slice_of(number=2), vip=[]),
    ],
    "names-of-ports-that-differ-between-slices": [
        put(service(ports=[{"name": "http", "port": 80}]), vip=[]),
        put(slice_of(endpoints=[endpoint(A)], ports=[{"name": "web", "port": 8080}]), vip=[]),
        put(
            slice_of(endpoints=[endpoint(B)], ports=[{"name": "http", "port": 9090}], number=2),
            vip=[f"{B} 9090"],
        ),
        put(
            slice_of(endpoints=[endpoint(A)], ports=[{"name": "http", "port": 8080}]),
            vip=[f"{A} 8080", f"{B} 9090"],
        ),
    ],
    "made-anew-with-another-address-in-one-second": [
        put(WEB),
        put(service(), vip=[f"{A} 8080"]),
        take(service()),
        put(service(addresses=[OTHER]), other=[f"{A} 8080"]),
        put(service(), vip=[f"{A} 8080"]),
    ],
    "a-slice-that-goes-over-to-another-service": [
        put(WEB),
        put(service(), vip=[f"{A} 8080"]),
        put(service("late", [OTHER]), vip=[f"{A} 8080"], other=[]),
        put({**LATE, "metadata": {**LATE["metadata"], "name": "web-1"}}, vip=[], other=[f"{B} 8080"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_contradicts_itself_leaves_nothing(
    world: KernelWorld, services: ServiceMaps, name: str
) -> None:
    catalogue, last = Catalogue(Place("n1")), dict[Any, StoredObject]()
    for stored_object, is_gone, shown in CASES[name]:
        _carry_out(catalogue, services, stored_object, is_gone)
        last.pop(stored_object.key, None)
        if not is_gone:
            last[stored_object.key] = stored_object
        assert in_force(world) == shown
        assert sizes(world) == _sizes_anew(last)
    for stored_object in list(last.values()):
        _carry_out(catalogue, services, stored_object, True)
    assert sizes(world) == (0, 0, 0)


def test_a_thousand_ports_come_and_go(world: KernelWorld, services: ServiceMaps) -> None:
    ports = [{"name": f"p{number}", "port": number + 1} for number in range(1, 1001)]
    catalogue = Catalogue(Place("n1"))
    for document in (
        service(ports=named(1000)),
        slice_of(endpoints=[endpoint(A), endpoint(B)], ports=ports),
    ):
        _carry_out(catalogue, services, stored(document), False)
    assert sizes(world) == (1001, 2000, 2000)
    assert in_force(world)[f"{VIP} 1000"] == [f"{A} 1001", f"{B} 1001"]
    _carry_out(catalogue, services, stored(service(ports=named(1, 80))), False)
    assert sizes(world) == (2, 2, 2)
    _carry_out(catalogue, services, stored(service()), True)
    assert sizes(world) == (0, 0, 0)


def _carry_out(
    catalogue: Catalogue, services: ServiceMaps, stored_object: StoredObject, is_gone: bool
) -> None:
    catalogue.apply(StoreEvent(stored_object, 1, deleted=is_gone))
    change = catalogue.take_change()
    services.change(change.put, change.gone)


def in_force(world: KernelWorld) -> dict[str, list[str]]:
    """Give who answers at each address and port of the maps; the rows that only refuse are left out."""
    return {
        f"{row.frontend.address} {row.frontend.port}": sorted(
            f"{back_end.address} {back_end.port}" for back_end in row.back_ends
        )
        for row in read_services(world.datapath.maps)
        if row.frontend.port
    }


def sizes(world: KernelWorld) -> tuple[int, int, int]:
    """Count the rows of frontends, slots and back ends."""
    maps = world.datapath.maps
    tables = maps.pw_services, maps.pw_service_list, maps.pw_back_ends
    counted = [len(list(table.keys())) for table in tables]
    return counted[0], counted[1], counted[2]


def _sizes_anew(objects: Mapping[Any, StoredObject]) -> tuple[int, int, int]:
    """Give how many rows there would be if these objects had been there from the beginning."""
    fresh = Catalogue(Place("n1"))
    for added in objects.values():
        fresh.apply(StoreEvent(added, 1))
    fresh.take_change()
    table = fresh.table()
    back_ends = {end for ends in table.values() for end in ends}
    return len(table), sum(map(len, table.values())), len(back_ends)
