"""Following a store: nothing is missed, nothing comes twice, and no failure ends it."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from podwire.agent.duties import shared_watch
from podwire.agent.duties.follower import KindList, StoreFollower
from podwire.model.errors import Bug, PodwireError, Unavailable
from podwire.model.store import Known, ObjectKey, Revisions, StoredObject, StoreEvent
from tests.fakes.store import MemoryStore

KINDS = ("namespaces", "workloads")


class Mirror:
    """Keeps what it is told, as the store should have it."""

    def __init__(self) -> None:
        self.names: dict[str, set[str]] = {}
        self.revisions: list[Revisions] = []
        self.events: list[StoreEvent] = []
        self.heard: list[str] = []
        self.poison: BaseException | None = None
        self.changed = threading.Condition()

    def on_lists(self, lists: Sequence[KindList]) -> None:
        with self.changed:
            self.heard.append("lists")
            for one in lists:
                self.names[one.kind] = {stored.key.name for stored in one.objects}
            self.changed.notify_all()

    def on_events(self, events: Sequence[StoreEvent], revisions: Revisions) -> None:
        with self.changed:
            poison, self.poison = (self.poison, None) if events else (None, self.poison)
            if poison is not None:
                raise poison
            self.events += events
            for event in events:
                names = self.names[event.object.key.kind]
                (names.discard if event.deleted else names.add)(event.object.key.name)
            self.revisions.append(dict(revisions))
            self.changed.notify_all()

    def on_away(self, error: PodwireError) -> None:
        with self.changed:
            self.heard.append("away")
            self.changed.notify_all()

    def on_back(self) -> None:
        with self.changed:
            self.heard.append("back")
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 30)


def both(revision: int) -> Revisions:
    return dict.fromkeys(KINDS, revision)


def put(store: MemoryStore, name: str, kind: str = "namespaces") -> StoredObject:
    key = ObjectKey(kind, "", name)
    return store.create(StoredObject(key=key, document={}))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def mirror() -> Mirror:
    return Mirror()


@pytest.fixture
def follower(store: MemoryStore, mirror: Mirror) -> StoreFollower:
    return StoreFollower("test", store, KINDS, mirror)


@pytest.fixture
def running(follower: StoreFollower, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreFollower]:
    monkeypatch.setattr(shared_watch, "AWAY_BASE_S", 0.01)
    follower.load()
    follower.start()
    yield follower
    follower.stop()


def test_all_kinds_come_at_once_then_the_revision(
    store: MemoryStore, mirror: Mirror, follower: StoreFollower
) -> None:
    put(store, "a")
    put(store, "w", "workloads")
    assert follower.load()
    assert mirror.names == {"namespaces": {"a"}, "workloads": {"w"}}
    assert mirror.revisions == [both(2)]
    assert follower.revisions == both(2)
    assert mirror.heard == ["lists", "back"]
    follower.stop()


def test_changes_follow_the_lists(
    store: MemoryStore, mirror: Mirror, follower: StoreFollower
) -> None:
    follower.load()
    put(store, "a")
    put(store, "p", "pods")
    follower.step(0)
    assert mirror.names["namespaces"] == {"a"}
    assert mirror.revisions[-1] == follower.revisions == both(2)  # also where other kinds moved it
    store.delete(ObjectKey("namespaces", "", "a"))
    follower.step(0)
    assert mirror.names["namespaces"] == set()
    follower.stop()


def test_a_quiet_watch_is_told_too(mirror: Mirror, follower: StoreFollower) -> None:
    follower.load()
    assert not follower.step(0)
    assert mirror.revisions == [both(0), both(0)]
    follower.stop()


def test_no_change_comes_that_a_list_holds_already(mirror: Mirror) -> None:
    class Racing(MemoryStore):
        """Somebody deletes a namespace between the lists of the two kinds."""

        def list(
            self,
            kind: str,
            namespace: str | None = None,
            *,
            at_least: int | None = None,
            known: Known | None = None,
        ) -> tuple[Sequence[StoredObject], int]:
            found = super().list(kind, namespace)
            if kind == "namespaces":
                put(self, "late", "workloads")
            return found

    racing = Racing()
    follower = StoreFollower("test", racing, KINDS, mirror)
    follower.load()
    assert mirror.names["workloads"] == {"late"}
    mirror.poison = Bug("came twice")
    follower.step(0)
    assert mirror.poison is not None
    follower.stop()


def test_after_a_compaction_what_differs_comes_as_changes(
    store: MemoryStore, mirror: Mirror, follower: StoreFollower
) -> None:
    old = [put(store, name) for name in ("gone", "changed", "same")]
    follower.load()
    store.delete(old[0].key)
    store.update(msgspec.structs.replace(old[1], document={"spec": {"new": True}}))
    put(store, "added")
    store.compact()
    put(store, "later")
    while follower.step(0):
        pass
    assert mirror.names["namespaces"] == {"changed", "same", "added", "later"}
    assert mirror.heard == ["lists", "back"]
    told = [(event.object.key.name, event.deleted) for event in mirror.events]
    assert sorted(told) == [("added", False), ("changed", False), ("gone", True), ("later", False)]
    assert mirror.revisions[-1] == {**mirror.revisions[-1], "namespaces": store.revision_of("")}
    follower.stop()


def test_a_store_that_was_put_back_is_listed_as_a_whole(
    store: MemoryStore, mirror: Mirror, follower: StoreFollower
) -> None:
    for name in ("a", "c"):
        put(store, name)
    follower.load()
    follower.step(0)
    # Another file of the same name: its revisions are counted anew, so the same one says nothing.
    store._objects.clear()
    store.events.clear()
    store._revision = 0
    put(store, "b")
    while follower.step(0):
        pass
    assert mirror.names["namespaces"] == {"b"}
    assert mirror.heard == ["lists", "back", "lists"]
    follower.stop()


def test_a_store_that_is_away_at_the_start_is_found_later(
    store: MemoryStore, mirror: Mirror, follower: StoreFollower
) -> None:
    put(store, "a")
    store.away = True
    assert not follower.load()
    assert mirror.names == {}
    assert not follower._is_there
    store.away = False
    follower.step(0)
    assert mirror.names["namespaces"] == {"a"}
    assert mirror.heard == ["away", "lists", "back"]
    follower.stop()


@pytest.mark.parametrize(
    "poison",
    [Bug("a bug"), ValueError("a bug that nobody thought of"), Unavailable("half way")],
    ids=lambda one: type(one).__name__,
)
def test_a_listener_that_fails_hears_everything_again(
    store: MemoryStore, mirror: Mirror, running: StoreFollower, poison: BaseException
) -> None:
    mirror.poison = poison
    put(store, "a")
    mirror.wait(lambda: "away" in mirror.heard)
    put(store, "b")
    mirror.wait(lambda: mirror.names["namespaces"] == {"a", "b"} and mirror.heard[-1] == "back")
    assert mirror.poison is None


def test_a_store_that_goes_away_and_comes_back_loses_nothing(
    store: MemoryStore, mirror: Mirror, running: StoreFollower
) -> None:
    store.away = True
    with store.changed:
        store.changed.notify_all()
    mirror.wait(lambda: "away" in mirror.heard)
    store.away = False
    put(store, "a")
    mirror.wait(lambda: mirror.names["namespaces"] == {"a"})
    mirror.wait(lambda: mirror.heard[-1] == "back")


def test_stop_does_not_wait_for_the_next_try(
    store: MemoryStore, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_watch, "AWAY_BASE_S", 60.0)
    monkeypatch.setattr(shared_watch, "AWAY_CAP_S", 60.0)
    store.away = True
    follower = StoreFollower("test", store, KINDS, mirror)
    follower.start()
    mirror.wait(lambda: "away" in mirror.heard)
    begin_s = time.monotonic()
    follower.stop()
    assert time.monotonic() - begin_s < 20
