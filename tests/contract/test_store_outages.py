"""A store that goes away and comes back: calls say so, nothing is lost, nothing comes twice.

The etcd is killed; of the file another program keeps the lock. Then what only etcd can do to us: it forgets, answers at
another address, stalls, carries out what it does not answer, or is another one by now.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest

from podwire.model.errors import (
    Conflict,
    NotFound,
    Unavailable,
)
from podwire.model.store import Compacted, Store, StoredObject, StoreEvent, Watch
from podwire.model.store.leases import LeaseChange
from podwire.store.etcd.store import EtcdStore
from podwire.store.open import open_store
from podwire.store.sqlite import SqliteStore
from tests.contract.etcd_rig import Etcd, require
from tests.contract.proxy import CLOSED, DEAF, OPEN, STALLED, Proxy
from tests.contract.stores import DEADLINE_S, key, make, now_at, seen, take, until
from tests.fakes.leases import leases_of
from tests.fakes.store import since

FORMAT_KEY = "/podwire/v1/format"


class World:
    """A store, and the power over what is behind it."""

    def __init__(
        self, store: Store, away: Callable[[], object], back: Callable[[], object]
    ) -> None:
        self.store = store
        self.away = away
        self.back = back


@pytest.fixture(params=["sqlite", "etcd"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        if request.param == "etcd":
            etcd: Etcd = request.getfixturevalue("own_etcd")
            store: Store = EtcdStore([etcd.endpoint], deadline_s=DEADLINE_S)
            stack.callback(store.close)
            yield World(store, etcd.kill, etcd.start)
            return
        path = tmp_path / "store.db"
        store = stack.enter_context(closing(SqliteStore(path, busy_timeout_s=0.1)))
        other = stack.enter_context(closing(sqlite3.connect(path, isolation_level=None)))
        yield World(store, partial(other.execute, "BEGIN IMMEDIATE"), other.rollback)


def collect(watch: Watch, done: threading.Event) -> list[StoreEvent]:
    """Read until the end, whatever happens to the store."""
    found: list[StoreEvent] = []
    while True:
        is_last = done.is_set()
        try:
            found += watch.next(0.5)
        except Compacted:
            raise
        except Unavailable:
            continue
        if is_last:
            return found


# ------------------------------------------------------------------ any store


def test_a_store_that_is_away_says_so_and_works_when_it_is_back(world: World) -> None:
    made = world.store.create(make("a"))
    world.away()
    for write in (
        lambda: world.store.create(make("b")),
        lambda: world.store.update(make("a", 1, revision=made.revision)),
        lambda: world.store.delete(made.key),
        lambda: leases_of(world.store).acquire("duty", "a", 5),
    ):
        with pytest.raises(Unavailable) as caught:
            write()
        assert caught.value.hint
    world.back()
    assert world.store.get(made.key) == made
    assert world.store.list("networkpolicies")[0] == [made]
    assert world.store.update(make("a", 2, revision=made.revision)).revision > made.revision
    leases_of(world.store).acquire("duty", "a", 5).close()


def test_a_watch_over_outages_loses_nothing_and_repeats_nothing(world: World) -> None:
    written: list[int] = []
    done = threading.Event()
    with world.store.watch(since(now_at(world.store))) as watch, ThreadPoolExecutor(1) as threads:
        reading = threads.submit(collect, watch, done)
        try:
            for life in range(3):
                written += [world.store.create(make(f"a{life}-{n}")).revision for n in range(20)]
                world.away()
                world.back()
            written += [world.store.create(make(f"b{n}")).revision for n in range(20)]
        finally:
            done.set()
        events = reading.result(DEADLINE_S * 2)
    assert [event.revision for event in events] == written


def test_a_lease_lives_on_over_an_outage(world: World) -> None:
    lease = leases_of(world.store).acquire("node/n1", "a", 2)
    world.away()
    until(lambda: lease.lost)
    assert not lease.taken_by
    world.back()
    until(lambda: not lease.lost)
    until(lambda: leases_of(world.store).holders() == {"node/n1": "a"})
    lease.close()


# ------------------------------------------------------------------ etcd alone


def test_what_is_away_names_all_endpoints(own_etcd: Etcd, proxy: Proxy) -> None:
    proxy.become(CLOSED)
    own_etcd.kill()
    with closing(EtcdStore([own_etcd.endpoint, proxy.endpoint])) as store:
        began_s = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            store.get(key("a"))
        assert time.monotonic() - began_s < 20
        assert own_etcd.endpoint in caught.value.message
        assert proxy.endpoint in caught.value.message
        with pytest.raises(Unavailable), store.watch(since(1)) as watch:
            watch.next(0)
        own_etcd.start()
        assert store.get(key("a")) is None


def test_a_watch_that_is_away_says_so_until_it_is_back(
    own_etcd: Etcd, etcd_store: EtcdStore
) -> None:
    with etcd_store.watch(since(now_at(etcd_store))) as watch:
        own_etcd.kill()
        with pytest.raises(Unavailable):
            watch.next(DEADLINE_S)
        began_s = time.monotonic()
        with pytest.raises(Unavailable):
            watch.next(0.3)
        assert time.monotonic() - began_s >= 0.3, "it waits for the return, within its time"
        own_etcd.start()
        made = etcd_store.create(make("a"))
        found: list[StoreEvent] = []
        until(lambda: bool(_next_or_nothing(watch, found)))
        assert [event.object for event in found] == [made]
        assert watch.next(0) == ()


def _next_or_nothing(watch: Watch, found: list[StoreEvent]) -> Sequence[StoreEvent]:
    try:
        found += watch.next(0.2)
    except Unavailable:
        return ()
    return found


def test_a_compacted_revision_is_told_and_a_list_goes_on(
    own_etcd: Etcd, etcd_store: EtcdStore
) -> None:
    first = etcd_store.create(make("a"))
    for number in range(5):
        first = etcd_store.update(make("a", number, revision=first.revision))
    own_etcd.compact(first.revision)
    with etcd_store.watch(since(first.revision - 3)) as watch:
        for _ in range(2):  # it stays so
            with pytest.raises(Compacted, match=f"remembers changes from {first.revision} on"):
                watch.next(DEADLINE_S)
    found, revision = etcd_store.list("networkpolicies")
    assert found == [first]
    with etcd_store.watch(since(revision)) as watch:
        last = etcd_store.create(make("b"))
        assert [event.object for event in take(watch, 1)] == [last]


def test_a_watch_that_slept_through_a_compaction_is_told(own_etcd: Etcd, proxy: Proxy) -> None:
    with (
        closing(EtcdStore([proxy.endpoint])) as store,
        closing(EtcdStore([own_etcd.endpoint], deadline_s=DEADLINE_S)) as other,
        store.watch(since(now_at(store))) as watch,
    ):
        proxy.become(CLOSED)
        made = other.create(make("a"))
        made = other.update(make("a", 1, revision=made.revision))
        own_etcd.compact(made.revision)
        proxy.become(OPEN)
        with pytest.raises(Compacted):
            until(lambda: bool(_next_or_nothing_but_compacted(watch)))


def test_a_deletion_that_was_compacted_away_is_not_lost(own_etcd: Etcd, proxy: Proxy) -> None:
    """Told to compact up to a deletion, etcd before 3.5.16 forgets it without a word (its issue 18089)."""
    with (
        closing(EtcdStore([proxy.endpoint])) as store,
        closing(EtcdStore([own_etcd.endpoint], deadline_s=DEADLINE_S)) as other,
    ):
        other.create(make("a"))
        with store.watch(since(now_at(store))) as watch:
            proxy.become(CLOSED)
            own_etcd.compact(_revision_of_delete(other, "a"))
            proxy.become(OPEN)
            with pytest.raises(Compacted):
                until(lambda: bool(_next_or_nothing_but_compacted(watch)))
        assert not store.list("networkpolicies")[0]


def _next_or_nothing_but_compacted(watch: Watch) -> Sequence[StoreEvent]:
    try:
        return watch.next(0.2)
    except Compacted:
        raise
    except Unavailable:
        return ()


def test_a_long_list_is_of_one_revision_over_a_compaction(
    own_etcd: Etcd, etcd_store: EtcdStore
) -> None:
    with etcd_store.together():
        for number in range(1200):
            etcd_store.create(make(f"a{number:04}"))
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            own_etcd.compact(etcd_store.create(make("b")).revision)
            own_etcd.compact(_revision_of_delete(etcd_store, "b"))

    with ThreadPoolExecutor(1) as threads:
        disturbing = threads.submit(disturb)
        try:
            for _ in range(10):
                found, _ = etcd_store.list("networkpolicies")
                assert len(found) in (1200, 1201)
        finally:
            stop.set()
            disturbing.result(DEADLINE_S)


def _revision_of_delete(store: Store, name: str) -> int:
    store.delete(key(name))
    return now_at(store)


def test_one_dead_endpoint_costs_nothing(own_etcd: Etcd, proxy: Proxy) -> None:
    proxy.become(CLOSED)
    with closing(open_store(f"etcd://{proxy.endpoint},{own_etcd.endpoint}")) as store:
        with store.watch(since(now_at(store))) as watch:
            made = store.create(make("a"))
            assert seen(take(watch, 1)) == [("a", False)]
        assert store.list("networkpolicies")[0] == [made]


def test_another_endpoint_is_asked_when_one_dies_or_stalls(own_etcd: Etcd, proxy: Proxy) -> None:
    endpoints = [proxy.endpoint, own_etcd.endpoint]
    with (
        closing(EtcdStore(endpoints, deadline_s=20, idle_s=1)) as store,
        store.watch(since(now_at(store))) as watch,
    ):
        store.create(make("a"))
        assert seen(take(watch, 1)) == [("a", False)]
        proxy.become(STALLED)
        began_s = time.monotonic()
        store.create(make("b"))
        assert time.monotonic() - began_s < 30
        found: list[StoreEvent] = []
        until(lambda: bool(_next_or_nothing(watch, found)))
        assert seen(found) == [("b", False)]


def test_a_silent_stream_is_opened_anew_and_loses_nothing(own_etcd: Etcd, proxy: Proxy) -> None:
    """The stream's own connection stalls, while others would work."""
    with (
        closing(EtcdStore([own_etcd.endpoint], deadline_s=DEADLINE_S)) as other,
        closing(EtcdStore([proxy.endpoint], idle_s=0.5)) as store,
        store.watch(since(now_at(store))) as watch,
    ):
        proxy.become(STALLED)
        proxy.become(OPEN)
        made = [other.create(make(f"a{number}")) for number in range(3)]
        found: list[StoreEvent] = []
        until(lambda: len(_next_or_nothing(watch, found)) >= 3)
        assert [event.object for event in found] == made
        assert watch.next(1.2) == (), "nor does a quiet one repeat anything"


def test_a_write_whose_answer_was_lost_is_done_once(own_etcd: Etcd, proxy: Proxy) -> None:
    """The first endpoint carries it out and does not answer; the second finds it done."""
    with closing(EtcdStore([proxy.endpoint, own_etcd.endpoint])) as store:
        proxy.become(DEAF)
        made = store.create(make("a", 1))
        assert store.get(made.key) == made
    with closing(EtcdStore([proxy.endpoint, own_etcd.endpoint])) as store:
        proxy.become(OPEN)
        store.get(made.key)
        with _deaf_for_writes(proxy, store):
            changed = store.update(make("a", 2, revision=made.revision))
        assert store.get(made.key) == changed
        assert changed.revision == now_at(store)
    with closing(EtcdStore([proxy.endpoint, own_etcd.endpoint])) as store:
        with _deaf_for_writes(proxy, store):
            assert store.delete(made.key) == changed
        assert store.get(made.key) is None
        with pytest.raises(NotFound):
            store.delete(made.key)


class _deaf_for_writes:
    """Lets the proxy lose the answer to the next transaction."""

    def __init__(self, proxy: Proxy, etcd_store: EtcdStore) -> None:
        self._proxy = proxy
        self._gateway = etcd_store._cluster.gateway
        self._call = self._gateway.call

    def __enter__(self) -> None:
        async def call(path: str, *rest: object) -> object:
            if path == "kv/txn":
                self._proxy.become(DEAF)
            return await self._call(path, *rest)  # type: ignore[arg-type]

        self._gateway.call = call  # type: ignore[method-assign, assignment]

    def __exit__(self, *_exception: object) -> None:
        self._gateway.call = self._call  # type: ignore[method-assign]
        self._proxy.become(OPEN)


def test_a_conflict_behind_a_lost_answer_is_still_a_conflict(own_etcd: Etcd, proxy: Proxy) -> None:
    with closing(EtcdStore([proxy.endpoint, own_etcd.endpoint])) as store:
        made = store.create(make("a"))
        store.update(make("a", 1, revision=made.revision))
        with _deaf_for_writes(proxy, store), pytest.raises(Conflict):
            store.create(make("a", 2))


def test_another_etcd_in_its_place_is_noticed(own_etcd: Etcd, proxy: Proxy, tmp_path: Path) -> None:
    other = Etcd(tmp_path / "other")
    other.directory.mkdir()
    other.start()
    try:
        for number in range(10):
            other.put("/x", str(number).encode())
        with (
            closing(EtcdStore([proxy.endpoint])) as store,
            store.watch(since(now_at(store))) as watch,
        ):
            store.create(make("a"))
            take(watch, 1)
            proxy.become(CLOSED)
            host, port = other.endpoint.split(":")
            proxy._target = (host, int(port))
            proxy.become(OPEN)
            with pytest.raises(Compacted, match="another etcd answers"):
                until(lambda: bool(_next_or_nothing_but_compacted(watch)))
            assert store.list("networkpolicies")[0] == []
            assert other.read(FORMAT_KEY) == b"1"
    finally:
        other.stop()


def test_who_lost_a_lease_in_an_outage_hears_who_has_it(own_etcd: Etcd, proxy: Proxy) -> None:
    with (
        closing(EtcdStore([own_etcd.endpoint], deadline_s=DEADLINE_S)) as other,
        closing(EtcdStore([proxy.endpoint])) as store,
    ):
        lease = store.leases().acquire("duty", "a", 5)
        with other.leases().watch() as watch:
            assert watch.next(DEADLINE_S) == (LeaseChange("duty", "a"),)
            proxy.become(CLOSED)
            assert watch.next(DEADLINE_S) == (LeaseChange("duty", ""),)
            other.leases().acquire("duty", "b", 60)
        assert lease.lost
        proxy.become(OPEN)
        until(lambda: lease.taken_by == "b")
        assert lease.lost


def test_a_watch_of_leases_tells_the_differences_after_a_restart(
    own_etcd: Etcd, etcd_store: EtcdStore
) -> None:
    kept, left = (etcd_store.leases().acquire(f"node/{name}", name, 60) for name in "ab")
    with etcd_store.leases().watch("node/") as watch:
        assert len(watch.next(DEADLINE_S)) == 2
        own_etcd.kill()
        own_etcd.start()
        left.close()
        own_etcd.compact(now_at(etcd_store))
        changes: list[LeaseChange] = []

        def hear() -> bool:
            try:
                changes.extend(watch.next(0.2))
            except Unavailable:
                return False
            return bool(changes)

        until(hear)
        assert changes == [LeaseChange("node/b", "")]
        assert watch.holders == {"node/a": "a"}
    assert not kept.lost


# ------------------------------------------------------------------ three members


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[Etcd]]:
    """Three etcds that are one cluster."""
    require()
    made = [Etcd(tmp_path / f"m{number}") for number in range(3)]
    peers = ",".join(f"m{n}=http://127.0.0.1:{one.peer_port}" for n, one in enumerate(made))
    for number, one in enumerate(made):
        one.directory.mkdir()
        one.flags += ["--name", f"m{number}", "--initial-cluster", peers]
    with ExitStack() as stack, ThreadPoolExecutor(3) as threads:
        for member in made:
            stack.callback(member.stop)
        for starting in [threads.submit(member.start) for member in made]:
            starting.result()
        yield made


def test_a_member_that_dies_is_survived_and_a_lost_majority_is_told(members: list[Etcd]) -> None:
    with (
        closing(EtcdStore([member.endpoint for member in members])) as store,
        store.watch(since(now_at(store))) as watch,
    ):
        lease = store.leases().acquire("duty", "a", 5)
        written = [store.create(make("a"))]
        for victim in members:  # the leader is among them
            victim.kill()
            until(lambda: bool(_try_create(store, written)))
            victim.start()
        members[1].kill()
        members[2].kill()
        with pytest.raises(Unavailable) as caught:
            store.create(make("lost"))
        assert members[1].endpoint in caught.value.message
        with ThreadPoolExecutor(2) as threads:
            for starting in [threads.submit(member.start) for member in members[1:]]:
                starting.result()
        until(lambda: bool(_try_create(store, written)))
        found: list[StoreEvent] = []
        names = {stored.key.name for stored in written}
        until(lambda: names <= {heard.object.key.name for heard in _all_of(watch, found)})
        revisions = [event.revision for event in found]
        assert revisions == sorted(set(revisions))
        until(lambda: not lease.lost)
        lease.close()


def _try_create(store: Store, written: list[StoredObject]) -> bool:
    name = f"b{len(written)}"
    try:
        written.append(store.create(make(name)))
    except Unavailable:
        return False
    except Conflict:  # what could not say so was done
        found = store.get(key(name))
        assert found is not None
        written.append(found)
    return True


def _all_of(watch: Watch, found: list[StoreEvent]) -> list[StoreEvent]:
    _next_or_nothing(watch, found)
    return found
