"""A timer that the kernel has no memory for at once is started a moment later, and named where that does not help."""

import errno
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from podwire.datapath import upgrade
from podwire.datapath.upgrade import start_timer
from podwire.model.errors import KernelFailure


def make_loaded(outcomes: Iterator[int]) -> Any:
    """Give programs of which one ends as the outcomes say."""
    program = SimpleNamespace(run=lambda _packet: SimpleNamespace(retval=next(outcomes)))
    return SimpleNamespace(programs={"conntrack_gc_start": program})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrade, "_TIMER_PAUSE_S", 0)


def test_it_is_tried_again_until_it_starts() -> None:
    outcomes = iter([-errno.ENOMEM, -errno.ENOMEM, 0, 1])
    start_timer(make_loaded(outcomes), "conntrack_gc_start")
    assert next(outcomes) == 1


def test_one_that_never_starts_is_named() -> None:
    with pytest.raises(KernelFailure, match="conntrack_gc_start") as failure:
        start_timer(make_loaded(iter([-errno.ENOMEM] * 1000)), "conntrack_gc_start")
    assert failure.value.errno == errno.ENOMEM
