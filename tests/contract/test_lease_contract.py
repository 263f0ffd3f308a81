"""What leases keep, whatever is behind them: one holder a name, and everybody hears who came and who vanished."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from podwire.model.errors import Conflict, Unavailable
from podwire.model.store import Store
from podwire.model.store.leases import Lease, LeaseChange, LeaseWatch
from tests.contract.stores import DEADLINE_S, OWN, make, now_at, until
from tests.fakes.leases import leases_of
from tests.fakes.store import since

pytestmark = pytest.mark.parametrize("back_end", OWN, indirect=True)
TTL_S = 2.0
KEPT_TTL_S = 5.0
"""Of what must be kept alive: a machine may stand still for longer than a short one."""
NODE = "node/n1"


@pytest.fixture
def other(open_again: Callable[[], Store]) -> Iterator[Store]:
    """The same store, as another agent has it open."""
    opened = open_again()
    yield opened
    opened.close()


def hear(watch: LeaseWatch, count: int) -> list[LeaseChange]:
    """Read `count` changes, or fail."""
    found: list[LeaseChange] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while len(found) < count and time.monotonic() < deadline_s:
        found += watch.next(0.2)
    assert len(found) == count
    return found


def test_a_name_that_is_held_is_refused_to_others(store: Store, other: Store) -> None:
    lease = leases_of(store).acquire(NODE, "a", 600)
    with pytest.raises(Conflict, match=r"take lease 'node/n1' for b: a has it"):
        leases_of(other).acquire(NODE, "b", 600)
    assert not lease.lost
    assert leases_of(other).holders() == {NODE: "a"}


def test_what_is_given_up_is_free_at_once(store: Store, other: Store) -> None:
    lease = leases_of(store).acquire(NODE, "a", 600)
    lease.close()
    assert lease.lost
    assert leases_of(other).holders() == {}
    assert not leases_of(other).acquire(NODE, "b", 600).lost


def test_a_restarted_holder_takes_over_at_once_and_the_first_closes_nothing(
    open_again: Callable[[], Store], other: Store
) -> None:
    holder = json.dumps({"instance": "i1", "address": "192.0.2.1"})
    first = open_again()
    left = leases_of(first).acquire(NODE, holder, 600)
    second = leases_of(other).acquire(NODE, holder, 600)
    left.close()
    assert leases_of(other).holders() == {NODE: holder}
    assert not second.lost
    first.close()
    assert leases_of(other).holders() == {NODE: holder}


def test_a_lease_is_kept_alive_beyond_its_time(store: Store, other: Store) -> None:
    lease = leases_of(store).acquire(NODE, "a", KEPT_TTL_S)
    with leases_of(other).watch() as watch:
        assert hear(watch, 1) == [LeaseChange(NODE, "a")]
        assert watch.next(KEPT_TTL_S * 1.6) == ()
    assert not lease.lost
    assert leases_of(other).holders() == {NODE: "a"}


def test_one_that_keeps_nothing_alive_vanishes_and_can_be_followed(
    open_again: Callable[[], Store], other: Store
) -> None:
    first = open_again()
    leases_of(first).acquire(NODE, "a", KEPT_TTL_S)
    with leases_of(other).watch("node/") as watch:
        assert hear(watch, 1) == [LeaseChange(NODE, "a")]
        first.close()  # names run out
        closed_s = time.monotonic()
        assert hear(watch, 1) == [LeaseChange(NODE, "")]
        assert time.monotonic() - closed_s < KEPT_TTL_S + 20
        leases_of(other).acquire(NODE, "b", 600)
        assert hear(watch, 1) == [LeaseChange(NODE, "b")]
        assert watch.holders == {NODE: "b"}


def test_a_watch_lists_who_lives_and_says_when_nobody_does(store: Store) -> None:
    leases = leases_of(store)
    with leases.watch("node/") as empty:
        assert [empty.is_listed, empty.next(0), empty.is_listed] == [False, (), True]
    for name in ("node/b", "node/a", "duty", "nodes"):
        leases.acquire(name, f"of {name}", 60)
    with leases.watch("node/") as watch:
        assert hear(watch, 2) == [
            LeaseChange("node/a", "of node/a"),
            LeaseChange("node/b", "of node/b"),
        ]
        assert watch.next(0) == ()
    assert leases.holders("duty") == {"duty": "of duty"}


def test_a_watch_hears_others_within_a_second(store: Store, other: Store) -> None:
    with leases_of(store).watch() as watch, ThreadPoolExecutor(1) as threads:
        watch.next(0)
        late_s = []
        for number in range(5):
            waiting = threads.submit(hear, watch, 1)
            began_s = time.monotonic()
            leases_of(other).acquire(f"duty{number}", "b", 60)
            assert waiting.result(DEADLINE_S) == [LeaseChange(f"duty{number}", "b")]
            late_s.append(time.monotonic() - began_s)
        assert min(late_s) < 2, late_s


def test_a_closed_watch_lets_its_reader_go(store: Store) -> None:
    watch = leases_of(store).watch()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(watch.next, 600.0)
        watch.close()
        assert waiting.result(DEADLINE_S) == ()
    assert watch.next(0) == ()


def test_of_many_one_gets_the_duty(store: Store, other: Store) -> None:
    def try_it(number: int) -> Lease | None:
        try:
            return leases_of((store, other)[number % 2]).acquire("duty", f"n{number}", 60)
        except Conflict:
            return None

    with ThreadPoolExecutor(20) as threads:
        got = [table for table in threads.map(try_it, range(20)) if table is not None]
    assert len(got) == 1
    assert leases_of(store).holders() == {"duty": got[0].holder}


def test_keeping_alive_changes_nothing_that_is_watched(store: Store) -> None:
    leases_of(store).acquire(NODE, "a", KEPT_TTL_S)
    before = now_at(store)
    with store.watch(since(before)) as watch:
        until(lambda: watch.next(KEPT_TTL_S * 1.5) == ())
    assert now_at(store) == before
    assert store.create(make("a")).revision > before


HOLDER = """
import sys
from pathlib import Path
from typing import Any
from tests.contract.stores import BACK_ENDS
store = BACK_ENDS[sys.argv[1]].open(Path(sys.argv[2]))
lease = store.leases().acquire("node/n1", "child", 5.0)
print("held", flush=True)
sys.stdin.read()
"""


def test_the_lease_of_a_stopped_process_goes_to_another_and_it_learns_of_it(
    back_end: str, store: Store, tmp_path: Path
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, back_end, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "held\n"
        with leases_of(store).watch() as watch:
            assert hear(watch, 1) == [LeaseChange(NODE, "child")]
            os.kill(child.pid, signal.SIGKILL)
            assert hear(watch, 1) == [LeaseChange(NODE, "")]
        assert not leases_of(store).acquire(NODE, "b", 600).lost
    finally:
        child.kill()
        child.communicate()


def test_who_was_taken_over_hears_by_whom(open_again: Callable[[], Store], other: Store) -> None:
    """The holder's keeper is held up, as by a stopped machine, until another has the name."""
    first = open_again()
    try:
        lease = leases_of(first).acquire(NODE, "a", TTL_S)
        with _held_up(first):
            until(lambda: lease.lost)
            assert not lease.taken_by
            until(lambda: _try(other, "b"))
        until(lambda: lease.taken_by == "b")
        assert lease.lost
    finally:
        first.close()


def _try(store: Store, holder: str) -> bool:
    try:
        leases_of(store).acquire(NODE, holder, 60)
    except Conflict:
        time.sleep(0.05)
        return False
    return True


class _held_up:
    """Keeps the threads of one store from running that renew its leases."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._go = threading.Event()

    def __enter__(self) -> None:
        cluster = getattr(self._store, "_cluster", None)
        if cluster is not None:
            cluster.thread.loop.call_soon_threadsafe(self._go.wait, 60.0)
        else:
            leases: Any = self._store.leases()
            leases._lock.acquire()

    def __exit__(self, *_exception: object) -> None:
        self._go.set()
        if not hasattr(self._store, "_cluster"):
            leases: Any = self._store.leases()
            leases._lock.release()


def test_a_closed_store_refuses_leases(open_again: Callable[[], Store]) -> None:
    store = open_again()
    leases = leases_of(store)
    store.close()
    with pytest.raises(Unavailable):
        leases.acquire("duty", "a", 60)
