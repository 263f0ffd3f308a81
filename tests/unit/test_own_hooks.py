"""What is remembered of hooks that podwire made, where it cannot be written down."""

from typing import Any

import pytest

from podwire.datapath.native import OwnHooks
from podwire.model.errors import StorageFailure

NOTED = '{"boot_id": "b", "devices": {"7": true}}'


class NoDevices:
    """A kernel in which nothing has hooks."""

    def dump(self, _request: Any, absent: Any = ()) -> Any:
        return ()


def refuse(_note: str) -> None:
    raise StorageFailure("write fact: the disk is full")


def test_a_full_disk_keeps_no_agent_from_starting_whose_device_has_gone() -> None:
    hooks = OwnHooks(NOTED, boot_id="b", write=refuse)
    assert hooks.devices == {7}
    netlink: Any = NoDevices()
    hooks.compare(netlink)
    assert hooks.devices == frozenset()


def test_on_a_full_disk_no_hooks_are_made_that_nobody_could_take_away() -> None:
    hooks = OwnHooks(boot_id="b", write=refuse)
    with pytest.raises(StorageFailure):
        hooks.note(7, made=False)
    assert hooks.devices == frozenset()
