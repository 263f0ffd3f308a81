"""What every datapath must do: the same cases for the kernel's and for the one in memory.

A case asks a `World` for records in fresh pod namespaces and looks only through `model.interfaces.Datapath`.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import msgspec
import pytest

from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import ForeignObject, InvalidConfiguration, KernelFailure
from podwire.model.interfaces import Datapath, EndpointConfig, PodNamespace
from tests import plain_pods
from tests.fakes.datapath import FakeDatapath
from tests.plain_pods import OPEN


class World(Protocol):
    """The surroundings of a datapath under test."""

    @property
    def datapath(self) -> Datapath: ...
    def new_namespace(self) -> PodNamespace: ...
    def add_foreign_host_device(self, name: str) -> None: ...
    def add_foreign_pod_device(self, namespace: PodNamespace, name: str) -> None: ...


class FakeWorld:
    def __init__(self) -> None:
        self.fake = FakeDatapath()
        self.datapath: Datapath = self.fake
        self._cookie = 0

    def new_namespace(self) -> PodNamespace:
        self._cookie += 1
        return PodNamespace(fd=-1, path=f"/run/netns/{self._cookie}", cookie=self._cookie)

    def add_foreign_host_device(self, name: str) -> None:
        self.fake.foreign_host.add(name)

    def add_foreign_pod_device(self, namespace: PodNamespace, name: str) -> None:
        self.fake.foreign_pod.add((namespace.cookie, name))


@pytest.fixture(
    params=[
        pytest.param("fake", id="in-memory"),
        pytest.param("kernel", id="kernel", marks=pytest.mark.kernel),
    ]
)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        if request.param == "fake":
            yield FakeWorld()
        else:
            from tests.kernel.node_world import kernel_world  # noqa: PLC0415 (root only)

            yield stack.enter_context(kernel_world(tmp_path))


def make_record(world: World, number: int, namespace: PodNamespace) -> EndpointRecord:
    return plain_pods.make_record(world.datapath, number, namespace)


def attach(world: World, number: int) -> tuple[EndpointRecord, PodNamespace]:
    namespace = world.new_namespace()
    record = make_record(world, number, namespace)
    plain_pods.attach(world.datapath, record, namespace)
    return record, namespace


def detach(world: World, record: EndpointRecord) -> None:
    plain_pods.detach(world.datapath, record)


def assert_nothing_left(world: World) -> None:
    inventory = world.datapath.read_inventory()
    assert not inventory.devices
    assert not inventory.config_ifindexes
    assert not inventory.endpoint_addresses
    assert not inventory.usage_ids
    assert not inventory.host_routes


def test_a_finished_attachment_compares_equal(world: World) -> None:
    record, namespace = attach(world, 1)
    assert world.datapath.compare_endpoint(record, OPEN, namespace) == []


def test_the_inventory_has_exactly_what_was_made(world: World) -> None:
    record, _ = attach(world, 2)
    inventory = world.datapath.read_inventory()
    assert [device.endpoint_id for device in inventory.devices] == [record.id]
    assert inventory.devices[0].host_ifindex == record.device.host_ifindex
    assert list(inventory.config_ifindexes) == [record.device.host_ifindex]
    assert sorted(inventory.endpoint_addresses) == sorted([record.ipv4, record.ipv6])
    assert len(inventory.host_routes) == 2


def test_detaching_leaves_nothing_and_the_reaper_says_so(world: World) -> None:
    record, _ = attach(world, 3)
    detach(world, record)
    assert list(world.datapath.reap_devices()) == [record.id]
    assert_nothing_left(world)


def test_every_undo_may_be_repeated_and_come_without_its_step(world: World) -> None:
    record = make_record(world, 4, world.new_namespace())
    detach(world, record)
    detach(world, record)
    assert set(world.datapath.reap_devices()) == {record.id}
    assert_nothing_left(world)


def test_a_closed_endpoint_keeps_a_successor_with_its_address(world: World) -> None:
    old, _ = attach(world, 5)
    world.datapath.close_endpoint(old)
    world.datapath.remove_routes(old)
    namespace = world.new_namespace()
    successor = msgspec.structs.replace(
        make_record(world, 6, namespace), ipv4=old.ipv4, ipv6=old.ipv6
    )
    world.datapath.create_guard(successor)
    world.datapath.create_device(successor, namespace)
    world.datapath.configure_pod(successor, namespace)
    world.datapath.open_endpoint(successor, OPEN)
    detach(world, old)
    assert world.datapath.compare_endpoint(successor, OPEN, namespace) == []
    detach(world, successor)
    world.datapath.reap_devices()
    assert_nothing_left(world)


def test_a_foreign_device_with_our_name_is_refused_and_left_alone(world: World) -> None:
    namespace = world.new_namespace()
    record = make_record(world, 7, namespace)
    world.add_foreign_host_device(record.device.host_name)
    world.datapath.create_guard(record)
    with pytest.raises(ForeignObject):
        world.datapath.create_device(record, namespace)
    detach(world, record)
    assert list(world.datapath.reap_devices()) == [record.id]
    assert list(world.datapath.read_inventory().foreign_names) == [record.device.host_name]


def test_an_existing_interface_in_the_pod_is_refused_and_nothing_stays(world: World) -> None:
    namespace = world.new_namespace()
    record = make_record(world, 8, namespace)
    world.add_foreign_pod_device(namespace, record.device.pod_name)
    world.datapath.create_guard(record)
    with pytest.raises(InvalidConfiguration, match="exists"):
        world.datapath.create_device(record, namespace)
    detach(world, record)
    world.datapath.reap_devices()
    assert_nothing_left(world)


def test_repair_of_a_missing_device_fails(world: World) -> None:
    record = make_record(world, 9, world.new_namespace())
    with pytest.raises(KernelFailure):
        world.datapath.repair_device(record)


def test_repair_puts_routes_back(world: World) -> None:
    record, namespace = attach(world, 10)
    world.datapath.remove_routes(record)
    assert world.datapath.compare_endpoint(record, OPEN, namespace) != []
    world.datapath.repair_device(record)
    assert world.datapath.compare_endpoint(record, OPEN, namespace) == []


def test_a_changed_configuration_is_seen_and_rewritten(world: World) -> None:
    record, namespace = attach(world, 11)
    changed = EndpointConfig(policy_revision=2, deny_ingress=True)
    assert world.datapath.compare_endpoint(record, changed, namespace) != []
    world.datapath.open_endpoint(record, changed)
    assert world.datapath.compare_endpoint(record, changed, namespace) == []


def test_leftovers_without_a_record_are_removed_and_others_kept(world: World) -> None:
    kept, namespace = attach(world, 12)
    lost, _ = attach(world, 13)
    removed = world.datapath.remove_leftovers(world.datapath.read_inventory(), [kept])
    assert removed
    assert world.datapath.compare_endpoint(kept, OPEN, namespace) == []
    inventory = world.datapath.read_inventory()
    assert [device.endpoint_id for device in inventory.devices] == [kept.id]
    assert list(inventory.config_ifindexes) == [kept.device.host_ifindex]
    assert lost.ipv4 not in inventory.endpoint_addresses
