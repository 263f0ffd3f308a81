"""Collection of unused numbers: when a number is marked, given up and deleted, and that a user always wins."""

from datetime import UTC, datetime, timedelta

import pytest

from podwire.control.cluster.published import endpoints_key
from podwire.control.identity import collect as collecting
from podwire.control.identity.allocator import SILENCE_S, IdentityAllocator
from podwire.control.identity.collect import (
    MARKED_S,
    NODES,
    REST_S,
    UNUSED_S,
    Collector,
    Move,
    carry_out,
    collect,
    publish_holds,
    read_holds,
)
from podwire.control.identity.key import IdentityKey
from podwire.control.identity.known import (
    IDENTITIES,
    RESTING_SINCE,
    UNUSED_SINCE,
    KnownIdentities,
    annotations,
    object_key,
)
from podwire.model.store import ObjectKey, StoredObject
from tests.fakes.store import MemoryStore

WEB = IdentityKey(("cni:app=web",))
DB = IdentityKey(("cni:app=db",))
MINUTE_S = 60.0


class Cluster:
    """One store, one agent that publishes by hand, one collector, and a clock that moves by hand."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.collector = Collector()
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.monotonic_s = 0.0
        self.allocator = IdentityAllocator(self.store, KnownIdentities())

    def run(self, for_s: float) -> None:
        """Let time pass, with a collection each minute and one at its end."""
        while for_s > 0:
            step_s = min(MINUTE_S, for_s)
            for_s -= step_s
            self.now += timedelta(seconds=step_s)
            self.monotonic_s += step_s
            self.collect()

    def collect(self) -> dict[Move, int]:
        return collect(self.store, self.collector, now=self.now, monotonic_s=self.monotonic_s)

    def hold(self, *numbers: int) -> None:
        publish_holds(self.store, "n1", numbers)

    def state(self, number: int) -> str:
        stored = self.store.get(object_key(number))
        if stored is None:
            return "gone"
        names = annotations(stored)
        return (
            "resting" if RESTING_SINCE in names else "marked" if UNUSED_SINCE in names else "clean"
        )

    def make(self, key: IdentityKey = WEB) -> int:
        return self.allocator.allocate(key)


def test_a_number_in_use_stays() -> None:
    cluster = Cluster()
    number = cluster.make()
    cluster.hold(number)
    cluster.run(3 * REST_S / 24)
    assert cluster.state(number) == "clean"


def test_an_unused_number_is_marked_given_up_and_deleted_in_its_time() -> None:
    cluster = Cluster()
    number = cluster.make()
    cluster.collect()
    for wait_s, before, after in (
        (UNUSED_S, "clean", "marked"),
        (MARKED_S, "marked", "resting"),
        (REST_S, "resting", "gone"),
    ):
        cluster.run(wait_s - MINUTE_S)
        assert cluster.state(number) == before
        cluster.run(MINUTE_S)
        assert cluster.state(number) == after


@pytest.mark.parametrize("stage", ["marked", "resting"])
def test_a_number_that_is_used_again_is_clean_again(stage: str) -> None:
    cluster = Cluster()
    number = cluster.make()
    cluster.collect()
    cluster.run(UNUSED_S + (MARKED_S if stage == "resting" else 0))
    assert cluster.state(number) == stage
    cluster.hold(number)
    cluster.collect()
    assert cluster.state(number) == "clean"


def test_use_for_a_moment_begins_the_waiting_anew() -> None:
    cluster = Cluster()
    number = cluster.make()
    cluster.collect()
    cluster.run(UNUSED_S - MINUTE_S)
    cluster.hold(number)
    cluster.run(MINUTE_S)
    cluster.hold()
    cluster.run(UNUSED_S)
    assert cluster.state(number) == "clean"
    cluster.run(MINUTE_S)
    assert cluster.state(number) == "marked"


def test_a_new_collector_watches_before_it_acts() -> None:
    cluster = Cluster()
    number = cluster.make()
    cluster.collect()
    cluster.run(UNUSED_S)
    cluster.collector = Collector()
    cluster.now += timedelta(seconds=10 * MARKED_S)
    cluster.collect()
    cluster.run(UNUSED_S - MINUTE_S)
    assert cluster.state(number) == "marked"
    cluster.run(MINUTE_S)
    assert cluster.state(number) == "resting"


def test_a_jump_of_the_wall_clock_takes_nothing_away_at_once() -> None:
    cluster = Cluster()
    number = cluster.make()
    cluster.collect()
    cluster.run(UNUSED_S)
    cluster.now += timedelta(days=400)
    cluster.run(MINUTE_S)
    assert cluster.state(number) == "marked"


@pytest.mark.parametrize(
    "text", ["2030-01-01T00:00:00Z", "soon", "2026-01-01T00:00:00", ""], ids=repr
)
def test_a_mark_of_a_wrong_clock_is_taken_away(text: str) -> None:
    cluster = Cluster()
    number = cluster.make()
    stored = cluster.store.get(object_key(number))
    assert stored is not None
    cluster.store.patch(stored.key, {"metadata": {"annotations": {UNUSED_SINCE: text}}})
    cluster.collect()
    assert cluster.state(number) == "clean"


def test_fixed_numbers_are_never_collected() -> None:
    cluster = Cluster()
    assert cluster.allocator._claim(300, WEB)
    cluster.collect()
    cluster.run(UNUSED_S + MARKED_S + MINUTE_S)
    assert cluster.state(300) == "clean"


def test_what_every_node_holds_counts() -> None:
    cluster = Cluster()
    web, db = cluster.make(WEB), cluster.make(DB)
    publish_holds(cluster.store, "n1", [web])
    publish_holds(cluster.store, "n2", [db, web])
    assert read_holds(cluster.store.list(NODES)[0]) == {web, db}


def publish_pod(store: MemoryStore, node: str, endpoints: str) -> None:
    spec = {"epoch": 1, "sequence": 1, "bases": ["10.1.0.0/24"], "endpoints": endpoints}
    store.create(StoredObject(key=endpoints_key(node), document={"spec": spec}))


def test_what_a_node_publishes_of_its_pods_is_in_use() -> None:
    cluster = Cluster()
    number = cluster.make()
    publish_pod(cluster.store, "n2", f"2:{number}")
    cluster.run(UNUSED_S + MARKED_S + MINUTE_S)
    assert cluster.state(number) == "clean"
    cluster.store.delete(endpoints_key("n2"))
    cluster.run(UNUSED_S + MARKED_S + 2 * UNUSED_S)
    assert cluster.state(number) == "resting"


def test_nothing_is_collected_while_a_nodes_pods_cannot_be_read() -> None:
    cluster = Cluster()
    number = cluster.make()
    publish_pod(cluster.store, "n2", "what a newer node says")
    cluster.run(UNUSED_S + MARKED_S + MINUTE_S)
    assert cluster.state(number) == "clean"


def test_publishing_keeps_the_rest_of_the_node_and_writes_only_changes() -> None:
    store = MemoryStore()
    key = ObjectKey(NODES, "", "n1")
    store.create(StoredObject(key=key, document={"spec": {"mtu": 1500}, "x": 1}))
    publish_holds(store, "n1", {70_002, 70_001})
    stored = store.get(key)
    assert stored is not None
    assert stored.document == {"spec": {"mtu": 1500, "holds": [70_001, 70_002]}, "x": 1}
    publish_holds(store, "n1", [70_001, 70_002])
    again = store.get(key)
    assert again is not None
    assert again.revision == stored.revision


def test_publishing_survives_another_writer() -> None:
    store = MemoryStore()
    publish_holds(store, "n1", [1])

    def interfere(new: StoredObject) -> None:
        store.before_update = lambda _new: None
        old = store.get(new.key)
        assert old is not None
        store.update(
            StoredObject(key=new.key, revision=old.revision, document={"spec": {"mtu": 9}})
        )

    store.before_update = interfere
    publish_holds(store, "n1", [2])
    stored = store.get(ObjectKey(NODES, "", "n1"))
    assert stored is not None
    assert stored.document["spec"] == {"mtu": 9, "holds": [2]}


@pytest.mark.parametrize("spec", [None, 7, {}, {"holds": 7}, {"holds": ["x"]}], ids=repr)
def test_a_node_that_nobody_understands_holds_nothing(spec: object) -> None:
    node = StoredObject(key=ObjectKey(NODES, "", "n"), document={"spec": spec})
    assert read_holds([node]) == frozenset()


@pytest.mark.parametrize("move", [Move.REST, Move.DELETE])
def test_who_takes_a_number_at_the_last_moment_wins(move: Move) -> None:
    cluster = Cluster()
    number = cluster.make()
    cluster.collect()
    cluster.run(UNUSED_S + (MARKED_S if move is Move.DELETE else 0))
    stored = cluster.store.get(object_key(number))
    assert stored is not None
    late = IdentityAllocator(cluster.store, KnownIdentities())
    assert late.allocate(WEB) == number
    assert carry_out(cluster.store, [collecting.Decision(move, stored)], cluster.now) == {}
    assert cluster.state(number) == "clean"


def test_two_collectors_do_no_harm() -> None:
    cluster = Cluster()
    number, other = cluster.make(), Collector()
    for _ in range(int(UNUSED_S / MINUTE_S) + 1):
        for collector in (cluster.collector, other):
            collect(cluster.store, collector, now=cluster.now, monotonic_s=cluster.monotonic_s)
        cluster.monotonic_s += MINUTE_S
        cluster.now += timedelta(seconds=MINUTE_S)
    assert cluster.state(number) == "marked"


def test_a_number_is_not_given_up_before_a_silent_agent_stops_using_it() -> None:
    assert MARKED_S > SILENCE_S
    assert REST_S > SILENCE_S


def test_the_memory_of_a_collector_is_bounded_by_what_there_is() -> None:
    cluster = Cluster()
    number = cluster.make()
    cluster.collect()
    assert len(cluster.collector._unused) == 1
    cluster.store.delete(object_key(number))
    cluster.collect()
    assert not cluster.collector._unused
    assert cluster.store.list(IDENTITIES)[0] == []
