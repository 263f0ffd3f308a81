"""People hear that the node's table gets full before anything is lost, and whose flows fill it."""

from types import SimpleNamespace
from typing import Any

import pytest

from podwire.datapath import abi
from podwire.datapath.conntrack_maps import find_pressure

ROOM = 1000
TABLE = ROOM * abi.CONNTRACK_SHARDS


class Rows:
    """A map of which somebody reads the rows."""

    def __init__(self, *rows: bytes) -> None:
        self._rows = {number.to_bytes(4, "little"): row for number, row in enumerate(rows)}

    def items(self) -> Any:
        return iter(self._rows.items())

    def lookup(self, key: bytes) -> bytes | None:
        return self._rows.get(key)


def make_maps(held: int, flows: tuple[int, ...], quota: int = 1 << 20) -> Any:
    """Give the maps of a node with so many rows, whose pods 0, 1, ... have opened so many flows."""
    each, rest = divmod(held, abi.CONNTRACK_SHARDS)
    fill = [each + (number < rest) for number in range(abi.CONNTRACK_SHARDS)]
    nothing = abi.UsageValue.unpack(bytes(abi.USAGE_VALUE_BYTES))
    settings = abi.Settings.unpack(bytes(abi.SETTINGS_BYTES))._replace(conntrack_quota=quota)
    return SimpleNamespace(
        pw_shard_fill=Rows(*(rows.to_bytes(4, "little") for rows in (*fill, ROOM))),
        pw_usage=Rows(*(nothing._replace(connections=(flow, 0)).pack() for flow in flows)),
        pw_settings=Rows(settings.pack()),
    )


@pytest.mark.parametrize(
    ("held", "is_told"), [(0, False), (TABLE * 3 // 4 - 1, False), (TABLE * 3 // 4, True)]
)
def test_it_is_told_when_quotas_begin_to_shrink(held: int, is_told: bool) -> None:
    told = [warning.message for warning in find_pressure(make_maps(held, (1, 2)))]
    assert [f"{held} of {TABLE} rows" in text for text in told] == [True] * is_told


def test_who_has_most_is_named() -> None:
    [warning] = find_pressure(make_maps(TABLE, (5, 70, 900, 1, 30, 2, 900)))
    named = warning.message.partition("may have: ")[2]
    assert named == ", ".join(
        f"endpoint {number} has {flows}"
        for number, flows in ((2, 900), (6, 900), (1, 70), (4, 30), (0, 5))
    )
