"""One watch for all duties of an agent: each listener hears all of its kinds once, and none waits for another."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from podwire.agent.duties import shared_watch
from podwire.agent.duties.follower import KindList, StoreFollower
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.duties.unreadable import Reading
from podwire.control.documents import damage
from podwire.control.documents.damage import read_object
from podwire.control.documents.kinds import decode
from podwire.control.endpoint.policies import POLICY_KINDS, PolicyObjects
from podwire.control.policy import reading
from podwire.model.errors import Bug, PodwireError
from podwire.model.store import (
    Compacted,
    KindUnavailable,
    Known,
    ObjectKey,
    Revisions,
    StoredObject,
    StoreEvent,
)
from tests.fakes.store import MemoryStore, MemoryWatch
from tests.waiting import wait_for

SHARED = "namespaces"


class Counting(MemoryStore):
    """Counts lists and watches of each kind, and refuses some."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: Counter[str] = Counter()
        self.watched: Counter[str] = Counter()
        self.refused: set[str] = set()
        self.failing: dict[str, str] = {}
        self.made: list[MemoryWatch] = []
        self.others_open: list[int] = []
        """How many others were open when a watch was made."""

    def list(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        at_least: int | None = None,
        known: Known | None = None,
    ) -> tuple[Sequence[StoredObject], int]:
        self.lists[kind] += 1
        if kind in self.refused:
            raise KindUnavailable(f"list {kind}: forbidden")
        return super().list(kind, namespace, at_least=at_least, known=known)

    def watch(self, after: Revisions) -> MemoryWatch:
        self.watched.update(after.keys())
        watch = super().watch(after)
        watch.failing = self.failing
        self.others_open.append(self.count_open())
        self.made.append(watch)
        return watch

    def count_open(self) -> int:
        return sum(not watch.is_closed for watch in self.made)


class Heard:
    """A listener that notes what it hears."""

    def __init__(self) -> None:
        self.names: dict[str, set[str]] = {}
        self.events: list[StoreEvent] = []
        self.told: list[str] = []
        self.poison: Exception | None = None

    def on_lists(self, lists: Sequence[KindList]) -> None:
        self.told += [f"list {one.kind}" for one in lists]
        for one in lists:
            self.names[one.kind] = {stored.key.name for stored in one.objects}

    def on_events(self, events: Sequence[StoreEvent], revisions: Revisions) -> None:
        if events and self.poison is not None:
            poison, self.poison = self.poison, None
            raise poison
        self.events += events
        for event in events:
            names = self.names[event.object.key.kind]
            (names.discard if event.deleted else names.add)(event.object.key.name)

    def on_away(self, error: PodwireError) -> None:
        self.told.append(f"away: {error.message}")

    def on_back(self) -> None:
        self.told.append("back")


def put(store: MemoryStore, name: str, kind: str) -> StoredObject:
    return store.create(StoredObject(key=ObjectKey(kind, "", name), document={}))


class World:
    """Two duties that share one kind."""

    def __init__(self) -> None:
        self.store = Counting()
        self.shared = SharedWatch(self.store)
        self.one, self.other = Heard(), Heard()
        self.followers = [
            StoreFollower("one", self.store, ("pools", SHARED), self.one, shared=self.shared),
            StoreFollower("other", self.store, (SHARED, "nodes"), self.other, shared=self.shared),
        ]

    def load(self) -> None:
        for follower in self.followers:
            follower.load()

    def step(self) -> bool:
        while self.shared.step(0):
            pass
        return False


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(shared_watch, "AWAY_BASE_S", 0.01)
    made = World()
    yield made
    for follower in made.followers:
        follower.stop()


def test_each_kind_is_listed_and_watched_once_for_all(world: World) -> None:
    put(world.store, "before", SHARED)
    world.load()
    for kind in ("pools", SHARED, "nodes"):
        put(world.store, "new", kind)
    world.step()
    assert world.store.lists == {"pools": 1, SHARED: 1, "nodes": 1}
    assert world.store.watched == {"pools": 1, SHARED: 1, "nodes": 1}
    assert world.store.watches == 1
    assert world.one.names == {"pools": {"new"}, SHARED: {"before", "new"}}
    assert world.other.names == {"nodes": {"new"}, SHARED: {"before", "new"}}
    assert len(world.one.events) == len(world.other.events) == 2


def test_who_joins_late_misses_nothing(world: World) -> None:
    first, second = world.followers
    first.load()
    put(world.store, "between", SHARED)
    world.step()
    put(world.store, "not heard yet", SHARED)
    second.load()
    world.step()
    assert world.one.names[SHARED] == world.other.names[SHARED] == {"between", "not heard yet"}


def test_a_listener_that_fails_disturbs_no_other(world: World) -> None:
    world.load()
    world.one.poison = Bug("a bug")
    put(world.store, "a", SHARED)
    with pytest.raises(Bug):
        world.shared.step(0)
    assert world.other.names[SHARED] == {"a"}
    assert "away: a bug" in world.one.told
    assert not [one for one in world.other.told if "away" in one]
    put(world.store, "b", "nodes")
    wait_for(lambda: world.step() or world.one.told[-1] == "back")
    assert world.one.names[SHARED] == {"a"}
    assert world.other.names["nodes"] == {"b"}
    assert world.store.lists["nodes"] == 1, "nobody has doubts about it"


def test_who_has_left_hears_nothing(world: World) -> None:
    world.load()
    world.followers[0].stop()
    put(world.store, "a", SHARED)
    world.step()
    assert world.one.names[SHARED] == set()
    assert world.other.names[SHARED] == {"a"}


def test_after_a_gap_only_the_kinds_concerned_are_listed_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.load()
    world.step()
    put(world.store, "a", "nodes")
    put(world.store, "b", "pools")
    gap = Compacted("the changes are gone", kinds={"nodes"})

    def fail_once(_watch: MemoryWatch, _timeout_s: float) -> Sequence[StoreEvent]:
        monkeypatch.undo()
        raise gap

    monkeypatch.setattr(MemoryWatch, "next", fail_once)
    world.step()
    assert world.store.lists["pools"] == 1
    assert world.store.lists["nodes"] == 2
    assert world.other.names["nodes"] == {"a"}
    assert world.one.names["pools"] == {"b"}


def test_the_next_watch_is_open_before_the_last_one_ends(world: World) -> None:
    """A store over the network goes on with what both follow, and asks for nothing twice."""
    world.load()
    world.step()
    for number in (1, 2):
        put(world.store, f"missed-{number}", "nodes")
        world.store.compact()
        world.step()
        assert world.other.names["nodes"] >= {f"missed-{number}"}
        assert world.store.others_open[1:] == [1] * number
        assert world.store.count_open() == 1
    for follower in world.followers:
        follower.stop()
    assert world.store.count_open() == 0


def test_a_kind_that_the_store_refuses_keeps_only_its_followers_waiting(world: World) -> None:
    world.store.refused.add("nodes")
    world.load()
    put(world.store, "a", "pools")
    world.step()
    assert world.one.names["pools"] == {"a"}
    assert not world.followers[1].is_whole
    assert world.other.told[0] == "away: list nodes: forbidden"
    world.store.refused.clear()
    wait_for(lambda: world.step() or world.followers[1].is_whole)
    assert world.other.told[-1] == "back"


def test_a_kind_that_cannot_be_watched_for_a_while_is_told_to_its_followers(world: World) -> None:
    world.load()
    world.step()
    world.store.failing["nodes"] = "watch nodes: forbidden"
    put(world.store, "a", "pools")
    world.step()
    assert world.other.told[-1] == "away: watch nodes: forbidden"
    assert world.one.names["pools"] == {"a"}
    assert not [one for one in world.one.told if "away" in one]
    world.store.failing.clear()
    world.step()
    assert world.other.told[-1] == "back"


def test_the_thread_serves_all_and_ends_with_the_last(world: World) -> None:
    world.load()
    for follower in world.followers:
        follower.start()
    put(world.store, "a", SHARED)
    wait_for(lambda: world.one.names[SHARED] == world.other.names[SHARED] == {"a"})
    assert world.store.watches == 1
    world.followers[0].stop()
    put(world.store, "b", SHARED)
    wait_for(lambda: world.other.names[SHARED] == {"a", "b"})
    world.followers[1].stop()
    put(world.store, "c", SHARED)
    assert world.one.names[SHARED] == {"a"}
    assert world.other.names[SHARED] == {"a", "b"}


class Engine:
    """Takes rules."""

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_arguments: None


class Policies(Heard):
    """What the policy duty does with what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = PolicyObjects(Engine())  # type: ignore[arg-type]

    def on_lists(self, lists: Sequence[KindList]) -> None:
        for one in lists:
            self.objects.replace(one.kind, one.objects)

    def on_events(self, events: Sequence[StoreEvent], revisions: Revisions) -> None:
        for event in events:
            self.objects.apply(event)


def count_decoders(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what is decoded, by kind, wherever that is done."""
    decoded: Counter[str] = Counter()

    def count(kind: str, decoder: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda what: decoded.update([kind]) or decoder(what)

    for kind, decoder in tuple(damage._DECODERS.items()):
        if kind not in reading.POLICY_KINDS:
            monkeypatch.setitem(damage._DECODERS, kind, count(kind, decoder))
    for kind, readers in tuple(reading._READERS.items()):
        counted = readers._replace(rules=count(kind, readers.rules))
        monkeypatch.setitem(reading._READERS, kind, counted)
    return decoded


def test_a_change_is_decoded_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = count_decoders(monkeypatch)
    store, first, second = Counting(), Policies(), Policies()
    shared = SharedWatch(store, reading=Reading(read_object))
    store.create(decode(_policy("listed")))
    followers = [
        StoreFollower("first", store, POLICY_KINDS, first, shared=shared),
        StoreFollower("second", store, POLICY_KINDS, second, shared=shared),
    ]
    for follower in followers:
        follower.load()
    store.create(decode(_policy("changed")))
    while shared.step(0):
        pass
    assert len(first.objects.rules) == len(second.objects.rules) == 2
    assert decoded == {"networkpolicies": 2}
    for follower in followers:
        follower.stop()


def _policy(name: str) -> Mapping[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {"podSelector": {}},
    }
