"""What a node is lent by an earlier one of the same process tells nothing of it (tests/kept_programs.py)."""

from pathlib import Path

import pytest

from podwire.datapath import abi
from podwire.datapath.programs import Pins
from podwire.kernel import bpf
from tests.empty_maps import changed_rows
from tests.kernel.conftest import NODE_IPV4, pings
from tests.kernel.node_world import KernelWorld, kernel_world
from tests.waiting import wait_for

pytestmark = pytest.mark.kernel

CHOSEN = ("pw_settings", "pw_ct_timer")
"""Has a seed and a mark that nobody else has, and what the collector tells of itself."""


def number_rows(world: KernelWorld) -> dict[str, int]:
    """Count what is in each map of a node, zeros left out; what is in a map of maps counts as its own."""
    counted = {}
    for path in Pins(world.plan.bpf_dir, abi.ABI_VERSION).maps.iterdir():
        with _open(path) as map_:
            counted[path.name] = _count(map_)
    return {name: count for name, count in counted.items() if name not in CHOSEN}


def _open(path: Path) -> bpf.Map:
    map_ = bpf.open_any_pinned_map(str(path))
    assert map_ is not None
    return map_


def _count(map_: bpf.Map) -> int:
    if map_.info.type == bpf.MapType.RINGBUF:
        return 0
    if map_.info.type in (bpf.MapType.ARRAY, bpf.MapType.PERCPU_ARRAY):
        return len(list(changed_rows(map_)))
    if map_.info.type != bpf.MapType.ARRAY_OF_MAPS:
        return len(list(map_.items()))
    total = 0
    for _, inner_id in map_.items():
        inner = bpf.open_map_by_id(int.from_bytes(inner_id, "little"))
        assert inner is not None
        with inner:
            total += _count(inner)
    return total


def test_a_node_that_is_lent_programs_finds_its_maps_as_a_fresh_one_does(tmp_path: Path) -> None:
    with kernel_world(tmp_path / "fresh", fresh=True) as world:
        wanted = number_rows(world)
    for name in ("first", "second"):
        with kernel_world(tmp_path / name) as world:
            assert number_rows(world) == wanted
            record, pod = world.attach(2)
            assert pings(pod, NODE_IPV4)
            wait_for(lambda: number_rows(world)["pw_new_flows"], "the flow to be remembered")
            with _open(Pins(world.plan.bpf_dir, abi.ABI_VERSION).maps / "pw_stack_cells") as cells:
                for row in (0, cells.info.max_entries - 1):  # which these pings do not touch
                    cells.update(row.to_bytes(4, "little"), bytes(range(8)))
            used = {name for name, count in number_rows(world).items() if count != wanted[name]}
            assert used > {"pw_config", "pw_endpoints", "pw_metrics", "pw_stack_cells"}
            ids = world.program_ids()
            world.detach(record)
    with kernel_world(tmp_path / "third") as world:
        assert world.program_ids() == ids
