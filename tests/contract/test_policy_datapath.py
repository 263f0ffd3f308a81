"""What every datapath of policy must do: the same cases for the kernel's and for the one in memory.

A case looks only through `model.interfaces.PolicyDatapath`, and at the entries there are in all.
"""

import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from podwire.model.errors import PolicyOverflow
from podwire.model.interfaces import PolicyDatapath
from podwire.model.policy import (
    ANY_IDENTITY,
    CIDR_IDENTITY_FIRST,
    Direction,
    PolicyEntry,
    PolicyKey,
    PolicyRows,
    Verdict,
)
from tests.fakes.policy import FakePolicyDatapath

CAPACITY = 12


@dataclass
class World:
    """A datapath with room for CAPACITY entries."""

    datapath: PolicyDatapath
    count: Callable[[], int]
    cidrs: Callable[[], dict[ipaddress.IPv4Network | ipaddress.IPv6Network, int]]


def _open_kernel(tmp_path: Path) -> Iterator[World]:
    from podwire.datapath.policy_maps import read_cidrs, read_entries  # noqa: PLC0415 (needs the built library)
    from tests.kernel.node_world import kernel_world  # noqa: PLC0415

    with kernel_world(tmp_path) as node:
        node.restart(policy_entries=CAPACITY)
        maps = node.datapath.maps
        yield World(
            node.datapath.policy,
            lambda: len(list(read_entries(maps))),
            lambda: dict(read_cidrs(maps)),
        )


@pytest.fixture(
    params=[
        pytest.param("fake", id="in-memory"),
        pytest.param("kernel", id="kernel", marks=pytest.mark.kernel),
    ]
)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "fake":
        fake = FakePolicyDatapath(capacity=CAPACITY)
        yield World(fake, fake.count, lambda: dict(fake.cidrs))
    else:
        yield from _open_kernel(tmp_path)


def rows_of(count: int, first: int = 1000, rule: int = 1) -> PolicyRows:
    return {
        PolicyKey(first + number, Direction(number % 2), 6, number, 16): PolicyEntry(
            Verdict(1 + number % 2), 100 + number, rule
        )
        for number in range(count)
    }


def test_a_slot_is_read_as_it_was_written(world: World) -> None:
    rows = {
        **rows_of(4),
        PolicyKey(ANY_IDENTITY, Direction.EGRESS): PolicyEntry(Verdict.DENY, 1, 2),
    }
    world.datapath.write_slot(3, rows)
    world.datapath.write_slot(4, rows_of(1))
    assert world.datapath.read_slot(3) == rows
    assert world.datapath.read_slot(5) == {}
    assert sorted(world.datapath.list_slots()) == [3, 4]
    assert world.count() == 6


def test_a_change_puts_replaces_and_removes_and_what_is_absent_is_no_fault(world: World) -> None:
    before = rows_of(4)
    keys = list(before)
    world.datapath.write_slot(3, before)
    put = {**rows_of(1, rule=9), **rows_of(2, first=5000)}
    world.datapath.change_slot(3, put, [keys[1], PolicyKey(77, Direction.EGRESS)])
    assert world.datapath.read_slot(3) == {
        keys[2]: before[keys[2]],
        keys[3]: before[keys[3]],
        **put,
    }


def test_a_slot_may_begin_with_a_change_and_end_with_one(world: World) -> None:
    rows = rows_of(2)
    world.datapath.change_slot(3, rows, [])
    assert list(world.datapath.list_slots()) == [3]
    world.datapath.change_slot(3, {}, rows)
    assert list(world.datapath.list_slots()) == []


@pytest.mark.parametrize(
    "overflow",
    [
        pytest.param(lambda one: one.write_slot(4, rows_of(5)), id="write"),
        pytest.param(
            lambda one: one.change_slot(3, rows_of(5, first=5000), rows_of(8)), id="change"
        ),
    ],
)
def test_what_does_not_fit_changes_nothing(
    world: World, overflow: Callable[[PolicyDatapath], None]
) -> None:
    world.datapath.write_slot(3, rows_of(8))
    with pytest.raises(PolicyOverflow):
        overflow(world.datapath)
    assert (world.datapath.read_slot(3), world.count()) == (rows_of(8), 8)
    assert list(world.datapath.list_slots()) == [3]


def test_replacing_needs_no_room(world: World) -> None:
    world.datapath.write_slot(3, rows_of(CAPACITY))
    world.datapath.change_slot(3, rows_of(CAPACITY, rule=9), [])
    assert world.datapath.read_slot(3) == rows_of(CAPACITY, rule=9)


def test_removed_slots_are_gone_and_may_be_removed_again(world: World) -> None:
    world.datapath.write_slot(3, rows_of(3))
    world.datapath.write_slot(4, rows_of(3))
    for _ in range(2):
        world.datapath.remove_slots([3, 99])
    world.datapath.remove_slots([])
    assert world.datapath.read_slot(3) == {}
    assert world.datapath.read_slot(4) == rows_of(3)
    assert world.count() == 3


def test_cidrs_are_exactly_what_was_written_last(world: World) -> None:
    first, second, third = (
        ipaddress.ip_network(text) for text in ("0.0.0.0/0", "10.0.0.0/8", "2001:db8::/32")
    )
    number = CIDR_IDENTITY_FIRST
    for wanted in ({first: number, third: number + 2}, {first: number, second: number + 1}, {}):
        world.datapath.write_cidrs(wanted)
        assert world.cidrs() == wanted
