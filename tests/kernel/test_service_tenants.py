"""A tenant with far more ports than there is room for: it alone is refused, and the changes of all others go on."""

import ipaddress
import threading
from collections.abc import Iterator, Sequence
from typing import Final, cast

import pytest

from podwire.agent.duties.cluster.services import ServiceDuty
from podwire.agent.duties.follower import KindList
from podwire.control.services.catalogue import KINDS, Catalogue
from podwire.control.services.choose import Place
from podwire.control.services.room import FRONTENDS
from podwire.datapath import abi
from podwire.datapath.maps import to_mapped
from podwire.model.store import Store, StoredObject, StoreEvent
from tests.kernel.node_world import KernelWorld, kernel_world
from tests.unit.service_objects import endpoint, service, slice_of, stored

pytestmark = pytest.mark.kernel

SERVICES, PORTS = 66, 1000
FITTING: Final = FRONTENDS // (PORTS + 1)
"""Services of the tenant that have room: each has a row beside its ports."""
OLD, LATE, LATER = "2025-01-01T00:00:00Z", "2026-03-01T00:00:00Z", "2026-04-01T00:00:00Z"
TCP = 6


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelWorld]:
    with kernel_world(tmp_path_factory.mktemp("tenants")) as made:
        yield made


def greedy(number: int) -> StoredObject:
    """Give one of the tenant's services, the higher the younger."""
    ports = [{"name": f"p{port}", "port": port} for port in range(1, PORTS + 1)]
    one = service(f"greedy-{number:02}", [f"10.97.0.{number}"], ports)
    return stored(one, f"2026-02-{1 + number // 60:02}T00:00:{number % 60:02}Z")


def other(name: str, address: str, created: str, *back_ends: str) -> list[StoredObject]:
    """Give a service of somebody else with its back ends."""
    ends = [endpoint(back_end) for back_end in back_ends]
    return [stored(service(name, [address]), created), stored(slice_of(name, ends), created)]


def start(world: KernelWorld, objects: Sequence[StoredObject], told: list[str]) -> ServiceDuty:
    """Let a new agent find these objects in the store, and bring them into force."""
    duty = ServiceDuty(
        store=cast(Store, None),
        catalogue=Catalogue(Place("n1")),
        datapath=world.datapath.services,
        turn=threading.RLock(),
        report=told.append,
        observe=lambda *_: None,
    )
    duty.on_lists(
        [
            KindList(kind, [given for given in objects if given.key.kind == kind], 1)
            for kind in KINDS
        ]
    )
    duty._round()
    return duty


def hear(duty: ServiceDuty, *objects: StoredObject, is_gone: bool = False) -> None:
    """Let the agent hear of changes, and bring them into force."""
    duty.on_events([StoreEvent(given, 2, deleted=is_gone) for given in objects], {})
    duty._round()


def back_ends(world: KernelWorld, address: str, port: int = 80) -> int:
    """Count the back ends that the programs know at a port; -1: it is left to the stack."""
    key = abi.ServiceKey(to_mapped(ipaddress.ip_address(address)), port, TCP)
    raw = world.datapath.maps.pw_services.lookup(key.pack())
    return -1 if raw is None else abi.ServiceValue.unpack(raw).back_ends


def assert_the_tenant_alone_is_refused(world: KernelWorld, told: Sequence[str]) -> None:
    present = [back_ends(world, f"10.97.0.{number}", PORTS) for number in range(1, SERVICES + 1)]
    assert present == [0] * FITTING + [-1] * (SERVICES - FITTING)
    assert told[-1].startswith(
        f"there is no room for services default/greedy-{FITTING + 1}, default/greedy-{FITTING + 2}"
    )


def test_a_tenant_with_too_many_ports_loses_his_youngest_services_alone(world: KernelWorld) -> None:
    told: list[str] = []
    tenant = [greedy(number) for number in range(1, SERVICES + 1)]
    old = other("old", "10.96.0.1", OLD, "10.7.0.1")
    late = other("late", "10.96.0.2", LATE, "10.7.0.2")
    duty = start(world, [*tenant, *old, *late], told)
    assert_the_tenant_alone_is_refused(world, told)
    assert (back_ends(world, "10.96.0.1"), back_ends(world, "10.96.0.2")) == (1, 1)
    late = other("late", "10.96.0.2", LATE, "10.7.0.2", "10.7.0.3")
    new = other("new", "10.96.0.3", LATER, "10.7.0.4")
    hear(duty, *late, *new)
    assert (back_ends(world, "10.96.0.2"), back_ends(world, "10.96.0.3")) == (2, 1)
    assert_the_tenant_alone_is_refused(world, told)

    world.restart()
    duty = start(world, [*tenant, *old, *late, *new], told := [])
    assert_the_tenant_alone_is_refused(world, told)
    hear(
        duty,
        *other("late", "10.96.0.2", LATE),
        *other("old", "10.96.0.1", OLD, "10.7.0.9", "10.7.0.8"),
    )
    found = [back_ends(world, f"10.96.0.{number}") for number in (1, 2, 3)]
    assert found == [2, 0, 1]
    hear(duty, tenant[0], is_gone=True)
    assert back_ends(world, f"10.97.0.{FITTING + 1}") == 0
    assert back_ends(world, "10.97.0.1") == -1
