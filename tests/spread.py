"""Spread tests over workers: `scripts/test` runs several pytest processes, each in a room of its own.

What such a room is, scripts/own-room says. Groups of tests are handed out whole, the longest first, so that no long one
begins when the others are done. A group is a file, because what tests share is made for a file; tests of the files in
SEPARATE share nothing that takes long to make and go one by one, and those of PARTED in a few parts. How long groups
take stands in seconds.json, which pytest's option --learn writes; it decides about order and forecasts, never about
what runs.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

SECONDS_FILE: Final = Path(__file__).with_name("seconds.json")
SECONDS_OF_A_TEST: Final = {"kernel": 0.5, "lab": 2.0, "runtime": 8.0, "cluster": 10.0, "vm": 20.0}
"""What a test of a folder is taken for that nobody has measured; of others it is next to nothing."""
SEPARATE: Final = frozenset(
    {
        "tests/contract/test_lease_contract.py",
        "tests/contract/test_store_outages.py",
        "tests/contract/test_store_processes.py",
        "tests/lab/test_crash_points.py",
        "tests/runtime/test_containerd.py",
        "tests/runtime/test_policy.py",
        "tests/unit/test_add_without_store.py",
    }
)
PARTED: Final = {
    "tests/contract/test_store_contract.py": re.compile(r"\[(etcd|kubernetes)\b"),
    "tests/vm/test_kernels.py": re.compile(r"\[([\d.]+)-"),
}
"""Files whose groups are told by what stands in a test's name: each server is started once, each kernel booted once."""

SHARED: Final = "tests/cluster/"
"""Tests of this folder share a cluster; two of them would share one machine's processors."""


def group_of(nodeid: str) -> str:
    """Name the group of a test."""
    file = nodeid.partition("::")[0]
    if file.startswith(SHARED):
        return SHARED
    if file in SEPARATE:
        return nodeid
    part = PARTED[file].search(nodeid) if file in PARTED else None
    return f"{file} {part[1]}" if part else file


def read_seconds() -> Mapping[str, float]:
    """Read how long groups took when somebody looked."""
    return dict(json.loads(SECONDS_FILE.read_text())) if SECONDS_FILE.exists() else {}


def write_seconds(measured: Mapping[str, float]) -> None:
    """Keep what groups took; those that did not run keep their number, as long as their file is there."""
    known = {**read_seconds(), **{name: round(seconds, 1) for name, seconds in measured.items()}}
    root = SECONDS_FILE.parents[1]
    known = {
        name: one
        for name, one in known.items()
        if (root / name.split()[0].partition("::")[0]).exists()
    }
    SECONDS_FILE.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")


def expect_seconds(nodeids: Iterable[str]) -> dict[str, float]:
    """Say how long each group of these tests may take."""
    counts = Counter(map(group_of, nodeids))
    guessed = {
        name: count * SECONDS_OF_A_TEST.get(name.split("/")[1], 0.05)
        for name, count in counts.items()
    }
    return guessed | {name: one for name, one in read_seconds().items() if name in counts}


def put_longest_first(items: list[pytest.Item]) -> None:
    """Order tests by what their groups take; groups stay together and as they are in themselves."""
    seconds = expect_seconds(item.nodeid for item in items)
    items.sort(key=lambda item: (-seconds[group_of(item.nodeid)], group_of(item.nodeid)))


class Spreading(LoadScopeScheduling):  # type: ignore[misc]
    """Hand out groups in the order of the collection, each as late as can be."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _reschedule(self, node: WorkerController) -> None:
        # When two workers are replaced at once, the first to finish collecting has work given to both, and the other
        # one cannot take any yet.
        if node not in self.registered_collections:
            return
        # A worker needs to know its next test before it runs one. Whoever has two is busy; a group more in its queue
        # would wait there while others idle.
        if self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a worker out; gives the test in which it died. That one is not tried again, what was behind it is."""
        groups = self.assigned_work.pop(node)
        left = {name: [test for test in tests if not tests[test]] for name, tests in groups.items()}
        names = [name for name, tests in left.items() if tests]
        if not names:
            return None
        died: str = left[names[0]].pop(0)
        for name in reversed(names):
            if left[name]:
                self.workqueue[name] = dict.fromkeys(left[name], False)
                self.workqueue.move_to_end(name, last=False)
        return died
