"""Somebody removes the pins of a node: programs stay attached, and a map without pin loses its timer."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwire.datapath import abi, conntrack_maps
from podwire.datapath.programs import Pins
from podwire.model.endpoint import EndpointRecord
from tests.kernel.conftest import NODE_IPV4
from tests.kernel.node_world import KernelWorld, kernel_world
from tests.kernel.traffic import Datagrams, continuous_traffic
from tests.waiting import wait_for

pytestmark = pytest.mark.kernel


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KernelWorld]:
    with kernel_world(tmp_path, fresh=True) as made:
        yield made


def pins_of(world: KernelWorld) -> Pins:
    return Pins(world.plan.bpf_dir, abi.ABI_VERSION)


def map_ids(world: KernelWorld) -> dict[str, int]:
    maps = world.datapath.maps
    return {name: getattr(maps, name).info.id for name in maps.names()}


Flow = tuple[int, str, int]


def flows_of(world: KernelWorld, record: EndpointRecord) -> set[Flow]:
    return {
        (flow.protocol, flow.direction.name, flow.source_port)
        for flow in conntrack_maps.list_conntrack(world.datapath.maps, record.id)
    }


def connect(world: KernelWorld, first: EndpointRecord) -> set[Flow]:
    """Give an endpoint flows; gives those that are remembered for minutes. A connection is closed here, and is
    forgotten ten seconds later, which a slow machine may take for what comes next."""
    pod = world.pods[first.netns_cookie]
    with continuous_traffic([(pod, world.host, str(NODE_IPV4))]) as flows:
        wait_for(lambda: all(flow.sent > 50 for flow in flows), "traffic")
        known = {flow for flow in flows_of(world, first) if flow[0] == socket.IPPROTO_UDP}
    assert known
    return known


def assert_collected(world: KernelWorld, record: EndpointRecord) -> None:
    """Let the endpoint go; what it had is collected, connections included."""
    world.detach(record)
    wait_for(lambda: not flows_of(world, record), "the collector")


def test_rows_are_collected_and_pins_put_back_while_the_agent_runs(world: KernelWorld) -> None:
    first, _ = world.attach(2)
    second, _ = world.attach(3)
    assert world.datapath.repair_pins() == []
    known = connect(world, second)
    connect(world, first)
    ids, pins = map_ids(world), pins_of(world)
    shutil.rmtree(pins.root)
    assert_collected(world, first)
    lost = world.datapath.repair_pins()
    assert any(str(pins.maps / "pw_conntrack") in text for text in lost)
    assert world.datapath.repair_pins() == []
    world.restart()
    assert map_ids(world) == ids
    assert flows_of(world, second) >= known
    assert_collected(world, second)


def test_the_next_agent_takes_over_what_has_lost_its_pins(world: KernelWorld) -> None:
    first, first_pod = world.attach(2)
    second, _ = world.attach(3)
    ids = map_ids(world)
    with continuous_traffic([(first_pod, world.pods[second.netns_cookie], second.ipv4)]) as flows:
        wait_for(lambda: all(flow.sent > 50 for flow in flows), "traffic")
        known = flows_of(world, first)
        world.datapath.close()
        shutil.rmtree(pins_of(world).root)
        world.restart()
        before = [flow.sent for flow in flows]
        wait_for(
            lambda: all(flow.sent > old + 50 for flow, old in zip(flows, before, strict=True)),
            "traffic",
        )
        results = [flow.finish() for flow in flows]
    assert results == [[] if isinstance(flow, Datagrams) else "" for flow in flows]
    after = map_ids(world)
    unused = {name for name, one in ids.items() if after[name] != one}
    assert unused == {"pw_ct_timer", "pw_node_numbers"}  # no tunnel, and nobody collected
    assert flows_of(world, first) >= known
    assert_collected(world, first)


@pytest.mark.parametrize("name", ["pw_ct_timer", "pw_conntrack", "pw_usage"])
def test_a_single_lost_pin_is_put_back_by_the_next_agent(world: KernelWorld, name: str) -> None:
    record, _ = world.attach(2)
    known, ids = connect(world, record), map_ids(world)
    world.datapath.close()
    (pins_of(world).maps / name).unlink()
    world.restart()
    assert map_ids(world) == ids
    assert flows_of(world, record) >= known
    assert_collected(world, record)
