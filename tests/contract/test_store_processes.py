"""What every store keeps beyond one process: other lives, writers at once, writers that are killed."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from podwire.model.store import Store
from tests.contract.stores import OWN, key, make, now_at, seen, take
from tests.fakes.store import since

pytestmark = pytest.mark.parametrize("back_end", OWN, indirect=True)


def test_what_was_written_is_there_after_opening_again(open_again: Callable[[], Store]) -> None:
    first = open_again()
    made = first.create(make("a", 1))
    first.delete(first.create(make("b")).key)
    last = now_at(first)
    first.close()
    second = open_again()
    try:
        assert second.get(key("a")) == made
        assert now_at(second) == last
        with second.watch(since(made.revision)) as watch:
            assert seen(take(watch, 2)) == [("b", False), ("b", True)]
        assert second.create(make("c")).revision > last
    finally:
        second.close()


DEADLINE_S = 240.0
PROCESS = """
import sys
from pathlib import Path
from tests.contract.stores import BACK_ENDS, increment, make
store = BACK_ENDS[sys.argv[1]].open(Path(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
increment(store, int(sys.argv[3]))
store.create(make("done" + sys.argv[4]))
store.close()
"""


def test_processes_that_write_at_once_lose_no_count(
    back_end: str, store: Store, tmp_path: Path, full: bool
) -> None:
    before = now_at(store)
    store.create(make("counter"))
    count = 20 if full else 4
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, back_end, str(tmp_path), "10", str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        errors = [child.communicate(timeout=DEADLINE_S)[1] for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert [child.returncode for child in children] == [0] * count, errors
    found = store.get(key("counter"))
    assert found is not None
    assert found.document == {"spec": {"v": 10 * count}}
    with store.watch(since(before)) as watch:
        revisions = [event.revision for event in take(watch, 11 * count + 1)]
    assert revisions == sorted(set(revisions))


WRITER = """
import sys
from pathlib import Path
from tests.contract.stores import BACK_ENDS, key, make
store = BACK_ENDS[sys.argv[1]].open(Path(sys.argv[2]))
number = int(sys.argv[3])
while True:
    number += 1
    made = store.create(make(f"a{number}", "x" * 3000))
    print(number, made.revision, flush=True)
    if number % 3 == 0:
        store.delete(key(f"a{number}"))
        print(-number, 0, flush=True)
"""


def test_a_killed_writer_loses_nothing_that_was_acknowledged(
    back_end: str, store: Store, tmp_path: Path, full: bool
) -> None:
    before = now_at(store)
    kept: set[int] = set()
    number = 0
    for round_number in range(20 if full else 4):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, back_end, str(tmp_path), str(number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        with child.stdout:
            lines = [child.stdout.readline() for _ in range(7 + 5 * round_number)]
            child.send_signal(signal.SIGKILL)
            lines += child.stdout.readlines()
        child.wait()
        for line in filter(lambda one: one.endswith("\n"), lines):
            written = int(line.split()[0])
            (kept.add if written > 0 else kept.discard)(abs(written))
            number = max(number, abs(written))
        number += 2  # the one that was not acknowledged may be there
        names = {int(stored.key.name[1:]) for stored in store.list("networkpolicies")[0]}
        assert len(kept - names) <= 1, "only a delete may have been done and not yet said"
        assert all(missing % 3 == 0 for missing in kept - names)
        kept &= names
    found, revision = store.list("networkpolicies")
    with store.watch(since(before)) as watch:
        events = take(watch, revision - before)
    revisions = [event.revision for event in events]
    assert revisions == list(range(before + 1, revision + 1)), "nobody else writes"
    assert store.create(make("after")).revision > revision
    assert len(found) >= len(kept)
