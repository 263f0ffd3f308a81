"""What a store said last is there after a restart, whole, and a store that is away is opened when it can be."""

import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from podwire.agent.duties.follower import StoreFollower
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.duties.unreadable import AS_STORED, Reading
from podwire.model.errors import NewerData, StorageFailure, Unavailable
from podwire.model.store import ObjectKey, StoredObject, StoreEvent
from podwire.store import late
from podwire.store.open import open_store
from podwire.store.remembered import LAYOUT, RememberedObjects
from podwire.store.sqlite import SqliteStore
from tests.fakes.store import MemoryStore, since
from tests.unit.test_store_follower import KINDS, Mirror, put
from tests.waiting import DEADLINE_S

URL = "sqlite:///x/store.db"


def make(name: str, revision: int = 1, kind: str = "namespaces", **spec: object) -> StoredObject:
    return StoredObject(
        key=ObjectKey(kind, "", name),
        uid=f"uid-{name}",
        revision=revision,
        created="2026-01-01T00:00:00Z",
        document={"metadata": {"name": name}, "spec": spec},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "remembered.db"


@pytest.fixture
def memory(path: Path) -> Iterator[RememberedObjects]:
    with RememberedObjects(path, URL) as made:
        yield made


# The file


def test_nothing_is_not_an_empty_list(memory: RememberedObjects) -> None:
    assert memory.load("namespaces") is None
    memory.save({"namespaces": ([], 7)}, ())
    assert memory.load("namespaces") == ([], 7)
    assert memory.load("workloads") is None


def test_lists_and_changes_are_there_after_a_restart(path: Path) -> None:
    with RememberedObjects(path, URL) as memory:
        memory.save({"namespaces": ([make("a", labels={"x": [1, "ü"]}), make("b")], 5)}, ())
        memory.save({}, [StoreEvent(make("c", 6), 6), StoreEvent(make("b"), 7, deleted=True)])
    with RememberedObjects(path, URL) as again:
        found = again.load("namespaces")
    assert found == ([make("a", labels={"x": [1, "ü"]}), make("c", 6)], 7)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_list_replaces_what_was_known_of_its_kind_alone(memory: RememberedObjects) -> None:
    memory.save({"namespaces": ([make("a")], 1), "workloads": ([], 1)}, ())
    memory.save({"workloads": ([make("w", kind="workloads")], 2)}, ())
    memory.save({"namespaces": ([make("b")], 3)}, ())
    assert memory.load("namespaces") == ([make("b")], 3)
    assert memory.load("workloads") == ([make("w", kind="workloads")], 2)


@pytest.mark.parametrize("found", [b"{", b"[1]", b"\xff", b"[" * 100_000], ids=len)
def test_one_object_that_cannot_be_read_costs_no_other(path: Path, found: bytes) -> None:
    with RememberedObjects(path, URL) as memory:
        memory.save({"namespaces": ([make("a"), make("b"), make("c")], 5)}, ())
        with closing(sqlite3.connect(path)) as other, other:
            other.execute("UPDATE object SET document = ? WHERE name = 'b'", (found,))
        objects, revision = memory.load("namespaces") or ([], 0)
        assert ([one.key.name for one in objects if one.fault], revision) == (["b"], 5)
        assert [one for one in objects if not one.fault] == [make("a"), make("c")]
        for whole, names in ((False, {"a", "c"}), (True, None)):
            store = MemoryStore()
            store.away = True
            mirror = Mirror()
            shared = SharedWatch(store, memory)
            made = StoreFollower(
                "test", store, KINDS[:1], mirror, shared=shared, tell_unreadable=whole
            )
            assert made.load() is not whole, "of policies all or nothing: one less allows more"
            assert mirror.names.get("namespaces") == names
            made.stop()


def test_a_write_that_fails_leaves_what_was_there(memory: RememberedObjects) -> None:
    memory.save({"namespaces": ([make("a")], 1)}, ())
    with pytest.raises(TypeError):
        memory.save({"namespaces": ([make("b", bad=object())], 2)}, ())
    assert memory.load("namespaces") == ([make("a")], 1)


def test_a_file_that_is_locked_is_a_failure_and_not_begun_anew(path: Path) -> None:
    with (
        RememberedObjects(path, URL) as memory,
        closing(sqlite3.connect(path, isolation_level=None)) as shell,
    ):
        memory.save({"namespaces": ([make("a")], 1)}, ())
        memory._connection.execute("PRAGMA busy_timeout = 10")
        shell.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StorageFailure, match="locked"):
            memory.save({}, [StoreEvent(make("b", 2), 2)])
        shell.execute("ROLLBACK")
        assert memory.load("namespaces") == ([make("a")], 1)


@pytest.mark.parametrize("damage", ["no database", "half", "another layout", "another store"])
def test_a_file_that_cannot_be_used_is_begun_anew(path: Path, damage: str) -> None:
    with RememberedObjects(path, URL) as memory:
        memory.save({"namespaces": ([make(f"n{index}") for index in range(200)], 1)}, ())
    if damage == "no database":
        path.write_bytes(b"x" * 5000)
    elif damage == "half":
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2 // 4096 * 4096])
    elif damage == "another layout":
        with closing(sqlite3.connect(path)) as shell:
            shell.execute(f"PRAGMA user_version = {LAYOUT + 1}")
    url = "sqlite:///another" if damage == "another store" else URL
    with RememberedObjects(path, url) as again:
        assert again.load("namespaces") is None
        again.save({"namespaces": ([make("a")], 1)}, ())
    with RememberedObjects(path, url) as again:
        assert again.load("namespaces") == ([make("a")], 1)


# With a follower


def follow(
    store: MemoryStore, memory: RememberedObjects, reading: Reading = AS_STORED
) -> tuple[StoreFollower, Mirror]:
    mirror = Mirror()
    shared = SharedWatch(store, memory, reading=reading)
    return StoreFollower("test", store, KINDS, mirror, shared=shared), mirror


def test_a_start_without_the_store_has_all_that_was_heard(memory: RememberedObjects) -> None:
    store = MemoryStore()
    put(store, "a")
    first, _ = follow(store, memory)
    first.load()
    put(store, "b")
    first.start()
    put(store, "w", "workloads")
    first.stop()

    store.away = True
    again, mirror = follow(store, memory)
    assert again.load()
    assert again.is_whole
    assert not again._is_there
    assert mirror.heard == ["away", "lists"]
    assert {"a"} <= mirror.names["namespaces"] <= {"a", "b"}
    assert mirror.revisions == []  # nothing is claimed to be new
    store.away = False
    again.step(0)
    assert mirror.names == {"namespaces": {"a", "b"}, "workloads": {"w"}}
    assert mirror.heard == ["away", "lists", "lists", "back"]
    again.stop()


def test_changes_are_kept_without_a_proper_stop(memory: RememberedObjects) -> None:
    store = MemoryStore()
    follower, mirror = follow(store, memory)
    follower.load()
    follower.start()
    put(store, "a")
    mirror.wait(lambda: mirror.names["namespaces"] == {"a"})

    def is_kept() -> bool:
        found = memory.load("namespaces")
        return found is not None and [stored.key.name for stored in found[0]] == ["a"]

    with mirror.changed:
        # The follower tells of each quiet second.
        assert mirror.changed.wait_for(is_kept, DEADLINE_S)
    follower.stop()


def test_what_stands_for_an_unreadable_object_is_kept_before_anything_else_happens(
    memory: RememberedObjects,
) -> None:
    def read_object(stored: StoredObject) -> tuple[StoredObject, str]:
        return stored, "bad" if stored.document else ""

    store = MemoryStore()
    follower, mirror = follow(store, memory, Reading(read_object))
    follower.load()
    put(store, "a")
    follower.step(1)  # an agent that is killed from here on has written nothing but by itself
    assert memory.load("namespaces") is None
    [stored], _ = store.list("namespaces")
    store.update(replace(stored, document={"bad": True}))
    follower.step(1)
    kept = memory.load("namespaces")
    assert kept is not None
    assert [one.document for one in kept[0]] == [{}]
    again, mirror = follow(store, memory, Reading(read_object))
    again.load()
    assert mirror.names["namespaces"] == {"a"}
    follower.stop()
    again.stop()


def test_what_stands_in_is_found_without_reading_its_whole_kind(
    memory: RememberedObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    put(store, "a")
    reading = Reading(lambda stored: (stored, "bad" if stored.document else ""))
    follower, _ = follow(store, memory, reading)
    follower.load()
    follower.start()
    follower.stop()  # it is on disk now
    monkeypatch.setattr(memory, "load", lambda _kind: pytest.fail("a whole kind was read"))
    again, mirror = follow(store, memory, reading)
    [stored], _ = store.list("namespaces")
    store.update(replace(stored, document={"bad": True}))
    again.load()
    assert mirror.names["namespaces"] == {"a"}
    assert "stays in force" in next(iter(again.unreadable.faults.values()))
    again.stop()


def test_a_kind_that_was_never_heard_is_not_handed_over(memory: RememberedObjects) -> None:
    store = MemoryStore()
    memory.save({"namespaces": ([make("a")], 1)}, ())
    store.away = True
    follower, mirror = follow(store, memory)
    assert not follower.load()
    assert mirror.names == {"namespaces": {"a"}}
    store.away = False
    follower.step(0)
    assert follower.is_whole
    follower.stop()


def test_what_cannot_be_kept_is_kept_later(
    memory: RememberedObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, failures = MemoryStore(), [StorageFailure("the disk is full")]
    real = memory.save

    def save(lists: dict[str, tuple[list[StoredObject], int]], changes: list[StoreEvent]) -> None:
        for failure in failures:
            raise failure
        real(lists, changes)

    monkeypatch.setattr(memory, "save", save)
    put(store, "a")
    follower, mirror = follow(store, memory)
    follower.load()
    follower.start()
    put(store, "b")
    mirror.wait(lambda: mirror.names["namespaces"] == {"a", "b"})
    failures.clear()
    follower.stop()
    found = memory.load("namespaces")
    assert found is not None
    assert [stored.key.name for stored in found[0]] == ["a", "b"]


def test_a_memory_that_cannot_be_read_is_none(
    memory: RememberedObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(_kind: str) -> None:
        raise StorageFailure("read: disk error")

    monkeypatch.setattr(memory, "load", load)
    store = MemoryStore()
    store.away = True
    follower, mirror = follow(store, memory)
    assert not follower.load()
    assert mirror.names == {}


# A store that is away at the start


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    monkeypatch.setattr(SqliteStore.__init__, "__kwdefaults__", _hasty())
    monkeypatch.setattr(late, "TRY_AGAIN_S", 0.0)
    monkeypatch.setattr("podwire.store.open.PATIENT_S", 0.05)
    with closing(SqliteStore(tmp_path / "store.db")) as store:
        store.create(make("a"))
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as shell:
        shell.execute("PRAGMA locking_mode = EXCLUSIVE")
        shell.execute("BEGIN EXCLUSIVE")
        yield shell


def _hasty() -> dict[str, object]:
    defaults = SqliteStore.__init__.__kwdefaults__
    assert defaults is not None
    return {**defaults, "busy_timeout_s": 0.05}


def test_a_store_that_is_locked_is_opened_when_it_is_free(
    tmp_path: Path, locked: sqlite3.Connection
) -> None:
    url = f"sqlite://{tmp_path}/store.db"
    with pytest.raises(Unavailable):
        open_store(url)
    with closing(open_store(url, patient=True)) as store:
        for _ in range(2):
            with pytest.raises(Unavailable, match="locked"):
                store.list("namespaces")
        locked.close()
        assert [stored.key.name for stored in store.list("namespaces")[0]] == ["a"]
        with store.together():
            store.create(make("b"))
        watch = store.watch(since(0, "namespaces"))
        assert [event.object.key.name for event in watch.next(0)] == ["a", "b"]
        assert store.get(make("b").key) is not None
        store.delete(make("b").key)


def test_patience_is_for_a_store_that_is_away_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(b"x" * 5000)
    with pytest.raises(StorageFailure):
        open_store(f"sqlite://{path}", patient=True)
    path.unlink()
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as shell:
        shell.execute("PRAGMA user_version = 99")
    with pytest.raises(NewerData):
        open_store(f"sqlite://{path}", patient=True)


def test_a_store_that_was_closed_while_it_was_away_stays_closed(
    tmp_path: Path, locked: sqlite3.Connection
) -> None:
    store = open_store(f"sqlite://{tmp_path}/store.db", patient=True)
    store.close()
    locked.close()
    with pytest.raises(Unavailable):
        store.list("namespaces")
