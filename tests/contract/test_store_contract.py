"""What every store keeps, whatever is behind it; each case runs with all back ends of `stores`.

The documents are valid ones of real kinds, each test has names of its own, and others may write meanwhile: so the same
cases run against a real API server. What a store need not promise is asked only of one that does.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwire.model.errors import Conflict, InvalidRequest, NotFound, PodwireError
from podwire.model.store import Compacted, ObjectKey, Store, StoredObject, Watch
from podwire.store.documents import DOCUMENT_MAX_BYTES
from tests.contract.stores import (
    BACK_ENDS,
    DEADLINE_S,
    KUBERNETES,
    POLICIES,
    POOLS,
    WORKLOADS,
    Place,
    carries,
    make,
    now_at,
    others_at_work,
    seen,
    until,
    value_of,
)

# ------------------------------------------------------------------ objects


def test_what_is_created_can_be_read(store: Store, place: Place) -> None:
    new = place.policy("a")
    made = store.create(new)
    assert made.uid
    assert 0 < made.revision <= now_at(store)
    assert made.created.endswith("Z")
    assert store.get(place.key("a")) == made
    assert made.key == new.key
    assert carries(made.document, new.document)


def test_what_is_not_there_is_none(store: Store, place: Place) -> None:
    store.create(place.policy("a"))
    assert store.get(ObjectKey(POLICIES, place.another_namespace("other"), "a")) is None
    assert store.get(ObjectKey(WORKLOADS, "", place.name("a"))) is None
    assert store.get(place.key("aa")) is None


def test_a_name_is_given_once(store: Store, place: Place) -> None:
    first = store.create(place.policy("a", 1))
    with pytest.raises(Conflict, match=f"create networkpolicies {place.namespace}/a: it exists"):
        store.create(place.policy("a", 2))
    assert store.get(place.key("a")) == first
    assert place.policies() == [first]


def test_each_change_makes_the_revision_of_its_kind_grow(store: Store, place: Place) -> None:
    seen_at = [now_at(store)]
    first = store.create(place.policy("a"))
    second = store.create(place.policy("b"))
    third = store.update(place.policy("a", 1, revision=first.revision))
    seen_at += [first.revision, second.revision, third.revision]
    store.delete(second.key)
    seen_at.append(now_at(store))
    assert seen_at == sorted(set(seen_at))


def test_revisions_of_all_kinds_are_one_count_where_that_is_promised(
    store: Store, place: Place
) -> None:
    if not store.promises.one_order:
        return
    first = store.create(place.policy("a"))
    second = store.create(place.workload("w"))
    assert first.revision < second.revision <= now_at(store)


def test_an_update_keeps_uid_and_time(store: Store, place: Place) -> None:
    made = store.create(place.policy("a", 1))
    changed = store.update(place.policy("a", 2, revision=made.revision))
    assert (changed.uid, changed.created) == (made.uid, made.created)
    assert value_of(changed) == "2"
    assert store.get(place.key("a")) == changed


def test_an_update_of_an_older_revision_changes_nothing(store: Store, place: Place) -> None:
    made = store.create(place.policy("a", 1))
    changed = store.update(place.policy("a", 2, revision=made.revision))
    with pytest.raises(Conflict, match=f"update networkpolicies {place.namespace}/a: "):
        store.update(place.policy("a", 3, revision=made.revision))
    assert store.get(place.key("a")) == changed


def test_an_update_of_nothing_is_not_found(store: Store, place: Place) -> None:
    made = store.create(place.policy("b"))
    store.delete(made.key)
    with pytest.raises(NotFound):
        store.update(place.policy("a", revision=made.revision))
    assert place.policies() == []


def test_a_successor_of_the_same_name_is_another_object(store: Store, place: Place) -> None:
    first = store.create(place.policy("a"))
    store.delete(first.key)
    second = store.create(place.policy("a"))
    assert second.uid != first.uid
    with pytest.raises(Conflict, match="made anew"):
        store.delete(first.key, uid=first.uid)
    changed = place.policy("a", 1, revision=second.revision)
    with pytest.raises(Conflict, match="made anew"):
        store.update(
            StoredObject(
                key=first.key, uid=first.uid, revision=second.revision, document=changed.document
            )
        )
    assert store.get(place.key("a")) == second


LABELS = {"value": "1", "a": "x", "b": "y"}
PORTS = [{"port": 80, "protocol": "TCP"}]
PATCHES = {
    "a field": ({"metadata": {"labels": {"a": "z"}}}, {"labels": {**LABELS, "a": "z"}}),
    "a field of the spec": (
        {"spec": {"podSelector": {"matchLabels": {"app": "db"}}}}, {"app": "db"},
    ),
    "a new field": ({"metadata": {"annotations": {"n": "1"}}}, {"annotations": {"n": "1"}}),
    "one away": (
        {"metadata": {"labels": {"a": None}}}, {"labels": {"value": "1", "b": "y"}},
    ),
    "one away that is not there": ({"metadata": {"labels": {"z": None}}}, None),
    "what is there": ({"metadata": {"labels": {"a": "x"}}, "spec": {"ingress": [{"ports": PORTS}]}}, None),
    "nothing": ({}, None),
    "a list, whole": (
        {"spec": {"ingress": [{"ports": [{"port": 81, "protocol": "TCP"}]}]}}, {"ports": [81]},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "wanted"), PATCHES.values(), ids=PATCHES)
def test_a_patch_changes_what_it_names(
    store: Store, place: Place, changes: Any, wanted: Any
) -> None:
    new = place.policy("a", 1)
    new.document["metadata"]["labels"].update(LABELS)
    new.document["spec"]["ingress"] = [{"ports": PORTS}]
    made = store.create(new)
    with store.watch({POLICIES: made.revision}) as watch:
        changed = store.patch(place.key("a"), changes)
        assert changed == store.get(place.key("a"))
        assert (changed.uid, changed.created) == (made.uid, made.created)
        if wanted is None:
            assert changed == made, "nothing is written"
            assert place.more(watch) == []
        else:
            assert _describe(changed) == {**_describe(made), **wanted}
            assert changed.revision > made.revision
            assert [event.object for event in place.take(watch, 1)] == [changed]


def _describe(stored: StoredObject) -> dict[str, Any]:
    """Give what the patches are about, without what a server adds."""
    metadata, spec = stored.document["metadata"], stored.document["spec"]
    return {
        "labels": metadata["labels"],
        "annotations": metadata.get("annotations", {}),
        "app": spec["podSelector"]["matchLabels"]["app"],
        "ports": [port["port"] for rule in spec["ingress"] for port in rule["ports"]],
    }


def test_a_patch_has_preconditions(store: Store, place: Place) -> None:
    def labelled(value: object) -> dict[str, Any]:
        return {"metadata": {"labels": {"value": value}}}

    made = store.create(place.policy("a", 1))
    changed = store.patch(made.key, labelled("2"), revision=made.revision, uid=made.uid)
    with pytest.raises(Conflict):
        store.patch(made.key, labelled("3"), revision=made.revision)
    with pytest.raises(Conflict, match="made anew"):
        store.patch(made.key, labelled("3"), uid="00000000-0000-0000-0000-000000000000")
    with pytest.raises(NotFound):
        store.patch(place.key("b"), labelled("3"))
    with pytest.raises(InvalidRequest):
        store.patch(made.key, labelled("x" * DOCUMENT_MAX_BYTES))
    assert store.get(made.key) == changed


def test_patches_of_several_writers_lose_nothing(
    store: Store, open_again: Callable[[], Store], place: Place
) -> None:
    other = open_again()
    made = store.create(place.policy("a"))
    wanted = {f"f{number}": str(number) for number in range(40)}
    try:
        with ThreadPoolExecutor(4) as threads:
            patches = [
                threads.submit(
                    (store, other)[number % 2].patch,
                    made.key,
                    {"metadata": {"labels": {name: value}}},
                )
                for number, (name, value) in enumerate(wanted.items())
            ]
        for patch in patches:
            patch.result()
    finally:
        other.close()
    found = store.get(made.key)
    assert found is not None
    assert found.document["metadata"]["labels"] == {"value": "0", **wanted}


def test_patches_are_written_together(store: Store, place: Place) -> None:
    for name in ("a", "b"):
        store.create(place.policy(name, 1))
    two, three = ({"metadata": {"labels": {"value": value}}} for value in ("2", "3"))
    with store.together():
        store.patch(place.key("a"), two)
        store.patch(place.key("b"), two)
    found = place.policies()
    assert [value_of(stored) for stored in found] == ["2", "2"]

    def patch_one_that_is_not_there() -> None:
        with store.together():
            store.patch(place.key("a"), three)
            store.patch(place.key("c"), three)

    with pytest.raises(NotFound):
        patch_one_that_is_not_there()
    if store.promises.together_max > 1:
        assert place.policies() == found
    else:
        assert [value_of(policy) for policy in place.policies()] == ["3", "2"]


def test_a_delete_gives_what_was_there(store: Store, place: Place) -> None:
    made = store.create(place.policy("a", 7))
    gone = store.delete(made.key, revision=made.revision, uid=made.uid)
    assert (gone.key, gone.uid, value_of(gone)) == (made.key, made.uid, "7")
    assert store.get(made.key) is None
    with pytest.raises(NotFound):
        store.delete(made.key)


def test_a_delete_under_an_older_revision_deletes_nothing(store: Store, place: Place) -> None:
    made = store.create(place.policy("a"))
    changed = store.update(place.policy("a", 1, revision=made.revision))
    with pytest.raises(Conflict):
        store.delete(made.key, revision=made.revision)
    assert store.get(made.key) == changed


def test_lists_are_of_a_kind_or_a_namespace_in_order(store: Store, place: Place) -> None:
    spaces = {name: place.another_namespace(name) for name in ("b", "a", "a-b")}
    for namespace, name in [("b", "z"), ("a", "y"), ("b", "x"), ("a-b", "x"), ("a", "yy")]:
        last = store.create(place.policy(name, namespace=spaces[namespace]))
    workload = store.create(place.workload("w"))
    found, revision = store.list(POLICIES)
    names = [(stored.key.namespace, stored.key.name) for stored in found]
    assert names == sorted(names)
    assert sum(stored.key.namespace in spaces.values() for stored in found) == 5
    assert {stored.key.kind for stored in found} == {POLICIES}
    assert revision >= last.revision
    assert [policy.key.name for policy in place.policies(spaces["b"])] == ["x", "z"]
    assert workload in store.list(WORKLOADS, "")[0]
    assert not [stored for stored in store.list(POOLS)[0] if place.is_here(stored)]


def test_a_list_may_be_asked_for_that_is_not_older_than_a_revision(
    store: Store, place: Place
) -> None:
    made = store.create(place.policy("a"))
    found, revision = store.list(POLICIES, at_least=made.revision)
    assert made in found
    assert revision >= made.revision
    assert store.list(POLICIES, at_least=0)[1] > 0, "any state"


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (make("", 1), "a kind and a name"),
        (make("a", kind=""), "a kind and a name"),
        (make("a", object()), "not JSON"),
        (make("a", "x" * DOCUMENT_MAX_BYTES), "at most"),
    ],
    ids=["no name", "no kind", "no JSON", "too large"],
)
def test_what_cannot_be_kept_is_refused(
    store: Store, place: Place, new: StoredObject, message: str
) -> None:
    key = ObjectKey(new.key.kind, place.namespace, new.key.name)
    with pytest.raises(InvalidRequest, match=message):
        store.create(StoredObject(key=key, document=new.document))
    assert place.policies() == []


def test_texts_of_any_kind_are_only_texts(store: Store, place: Place) -> None:
    name = "'; DROP TABLE object; --%_\u2028"
    if not store.promises.any_name:
        with pytest.raises(InvalidRequest):
            store.create(place.policy(name))
        return
    made = store.create(place.policy(name, name))
    assert store.get(place.key(name)) == made
    assert place.policies() == [made]


def test_what_is_read_can_be_changed_by_its_reader_alone(store: Store, place: Place) -> None:
    store.create(place.policy("a"))
    first, second = store.get(place.key("a")), store.get(place.key("a"))
    assert first is not None
    assert second is not None
    first.document["spec"]["ingress"].append({})
    assert carries(second.document, place.policy("a").document)
    assert store.get(place.key("a")) == second


def test_a_store_without_leases_says_so(store: Store) -> None:
    leases = store.leases()
    assert leases is None or store.leases() is leases


# ------------------------------------------------------------------ watches


def test_a_watch_gives_each_change_once_and_in_order(store: Store, place: Place) -> None:
    before = now_at(store)
    first = store.create(place.policy("a", 1))
    with place.watch(before) as watch:
        second = store.update(place.policy("a", 2, revision=first.revision))
        store.delete(place.key("a"))
        deleted_at = now_at(store)
        third = store.create(place.policy("a", 3))
        events = place.take(watch, 4)
        at = [event.revision for event in events]
        assert [at[0], at[1], at[3]] == [first.revision, second.revision, third.revision]
        assert second.revision < at[2] <= deleted_at
        found = [events[number].object for number in (0, 1, 3)]
        assert found == [first, second, third]
        assert (events[2].object.uid, value_of(events[2].object)) == (second.uid, "2")
        assert [event.deleted for event in events] == [False, False, True, False]
        assert place.more(watch, 0) == []
        assert watch.revisions[POLICIES] >= third.revision
        assert watch.failing == {}


def test_a_watch_begins_after_the_revision_of_a_list(store: Store, place: Place) -> None:
    store.create(place.policy("a"))
    _, revision = store.list(POLICIES)
    with place.watch(revision) as watch:
        assert place.more(watch, 0) == []
        store.create(place.policy("b"))
        assert seen(place.take(watch, 1)) == [("b", False)]


def test_a_watch_goes_on_where_another_ended(store: Store, place: Place) -> None:
    before = now_at(store)
    store.create(place.policy("a"))
    with place.watch(before) as watch:
        place.take(watch, 1)
        revisions = watch.revisions
    store.create(place.policy("b"))
    with store.watch(revisions) as watch:
        assert seen(place.take(watch, 1)) == [("b", False)]


def test_a_watch_of_kinds_sees_no_other_kind(store: Store, place: Place) -> None:
    kinds = (WORKLOADS, POOLS)
    with store.watch({kind: now_at(store, kind) for kind in kinds}) as watch:
        store.create(place.policy("a"))
        store.create(place.workload("w"))
        last = store.create(place.pool("p"))
        assert {event.object.key.kind for event in place.take(watch, 2)} == set(kinds)
        assert place.more(watch) == []
        assert watch.revisions.keys() == set(kinds)
        if store.promises.one_order:
            store.create(place.policy("b"))
            until(
                lambda: not watch.next(0.1) and min(watch.revisions.values()) > last.revision
            )  # it does not fall behind


def test_a_watch_begins_at_a_revision_of_each_kind(store: Store, place: Place) -> None:
    earlier = {kind: now_at(store, kind) for kind in (WORKLOADS, POOLS)}
    store.create(place.workload("w"))
    store.create(place.pool("p"))
    with store.watch({WORKLOADS: earlier[WORKLOADS], POOLS: now_at(store, POOLS)}) as watch:
        assert [event.object.key.kind for event in place.take(watch, 1)] == [WORKLOADS]
        assert place.more(watch) == []
        second = store.create(place.pool("q"))
        assert [event.object for event in place.take(watch, 1)] == [second]
        assert watch.revisions[POOLS] >= second.revision


def test_a_watch_of_kinds_keeps_the_order_of_changes_where_that_is_promised(
    store: Store, place: Place
) -> None:
    if not store.promises.one_order:
        return
    with store.watch({kind: now_at(store, kind) for kind in (WORKLOADS, POOLS)}) as watch:
        for number in range(5):
            store.create(place.workload(f"w{number}"))
            store.create(place.pool(f"p{number}"))
        kinds = [event.object.key.kind for event in place.take(watch, 10)]
    assert kinds == [WORKLOADS, POOLS] * 5


LONG_LOG = {KUBERNETES: 200}
"""An API server sends each change alone; sqlite and etcd give up to 1,000 at once."""


def test_a_long_log_comes_in_parts(store: Store, place: Place, back_end: str) -> None:
    count = LONG_LOG.get(back_end, 2099)
    with store.together():
        store.create(place.policy("before"))
    before = now_at(store)
    with store.together():
        made = [store.create(place.policy(f"a{number}")) for number in range(count)]
    with place.watch(before) as watch:
        events = place.take(watch, count)
    assert [event.object for event in events] == made
    revisions = [event.revision for event in events]
    assert revisions == sorted(revisions)


def test_a_waiting_watch_wakes_at_once_for_a_write_of_its_own_process(
    store: Store, place: Place
) -> None:
    with place.watch() as watch, ThreadPoolExecutor(1) as threads:
        late_s = []
        for number in range(5):
            waiting = threads.submit(_time_event, place, watch)
            written_s = time.monotonic()
            store.create(place.policy(f"a{number}"))
            late_s.append(waiting.result(DEADLINE_S) - written_s)
        assert min(late_s) < 0.5, late_s


def _time_event(place: Place, watch: Watch) -> float:
    assert place.take(watch, 1)
    return time.monotonic()


def test_a_watch_sees_what_another_opener_writes(
    open_again: Callable[[], Store], place: Place
) -> None:
    other = open_again()
    try:
        with place.watch() as watch:
            assert place.more(watch, 0) == []
            other.create(place.policy("a"))
            assert seen(place.take(watch, 1)) == [("a", False)]
    finally:
        other.close()


def test_a_closed_watch_gives_nothing_and_lets_its_reader_go(store: Store, place: Place) -> None:
    watch = store.watch({WORKLOADS: now_at(store, WORKLOADS)})
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(watch.next, 600.0)
        watch.close()
        assert waiting.result(DEADLINE_S) == ()
    store.create(place.workload("a"))
    assert watch.next(0) == ()
    watch.close()


def test_closing_the_store_closes_its_watches(open_again: Callable[[], Store]) -> None:
    store = open_again()
    watch = store.watch({WORKLOADS: now_at(store, WORKLOADS)})
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(watch.next, 600.0)
        store.close()
        assert waiting.result(DEADLINE_S) == ()


def test_a_revision_that_the_store_never_had_is_compacted_where_that_is_promised(
    store: Store, place: Place
) -> None:
    if not store.promises.notices_other_store:
        return
    # Far ahead: an API server writes objects of its own meanwhile, which share its revisions.
    revision = store.create(place.policy("a")).revision + 1000
    with (
        place.watch(revision) as watch,
        pytest.raises(Compacted, match=f"after revision {revision}") as caught,
    ):
        watch.next(DEADLINE_S)
    assert caught.value.kinds == {POLICIES}


# ------------------------------------------------------------------ several at once


def test_of_many_writers_that_create_one_name_one_wins(store: Store, place: Place) -> None:
    def create(number: int) -> bool:
        try:
            store.create(place.policy("a", number))
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(20) as threads:
        won = list(threads.map(create, range(20)))
    assert won.count(True) == 1
    assert value_of(store.get(place.key("a"))) == str(won.index(True))


def test_twenty_threads_lose_no_count(store: Store, place: Place) -> None:
    store.create(place.policy("counter"))

    def count() -> None:
        for _ in range(5):
            while True:
                found = store.get(place.key("counter"))
                assert found is not None
                value = int(value_of(found)) + 1
                try:
                    store.update(place.policy("counter", value, revision=found.revision))
                    break
                except Conflict:
                    continue

    with ThreadPoolExecutor(20) as threads:
        for attempt in [threads.submit(count) for _ in range(20)]:
            attempt.result()
    assert value_of(store.get(place.key("counter"))) == "100"


def test_a_watch_misses_nothing_of_twenty_threads(store: Store, place: Place) -> None:
    def write(number: int) -> None:
        for step in range(10):
            made = store.create(place.policy(f"a{number}-{step}"))
            if step % 2:
                store.delete(made.key)

    with place.watch() as watch, ThreadPoolExecutor(20) as threads:
        writers = [threads.submit(write, number) for number in range(20)]
        events = place.take(watch, 300)
        for writer in writers:
            writer.result()
    revisions = [event.revision for event in events]
    assert revisions == sorted(set(revisions))
    left = {event.object.key for event in events if not event.deleted} - {
        event.object.key for event in events if event.deleted
    }
    assert left == {policy.key for policy in place.policies()}


def test_a_reader_never_sees_half_of_a_list(store: Store, place: Place) -> None:
    """A writer makes and removes two objects in turn: a list shows one of the states that there were."""
    store.create(place.policy("a"))
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for name in ("b", "c"):
                store.create(place.policy(name))
            for name in ("b", "c"):
                store.delete(place.key(name))

    at_revision: dict[int, list[StoredObject]] = {}
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        try:
            for _ in range(200):
                found, revision = store.list(POLICIES, place.namespace)
                names = [stored.key.name for stored in found]
                assert names in (["a"], ["a", "b"], ["a", "b", "c"], ["a", "c"])
                assert all(stored.revision <= revision for stored in found)
                assert at_revision.setdefault(revision, list(found)) == list(found)
        finally:
            stop.set()
            writing.result(DEADLINE_S)
    ordered = [at_revision[revision] for revision in sorted(at_revision)]
    newest = [max(stored.revision for stored in found) for found in ordered if len(found) > 1]
    assert newest == sorted(newest), "a later list is not of an earlier state"


# ------------------------------------------------------------------ against a model

NAMES = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(
    st.tuples(st.sampled_from(["create", "update", "delete"]), NAMES, st.booleans()), max_size=40
)


SEQUENCES_PERCENT = {KUBERNETES: 10}
"""How many of the usual number of sequences a back end is asked for; to an API server each write takes long."""


def test_any_sequence_of_writes_agrees_with_a_dictionary(
    back_end: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    @settings(max_examples=settings().max_examples * SEQUENCES_PERCENT.get(back_end, 40) // 100)
    @given(steps=STEPS)
    def agrees(steps: list[tuple[str, str, bool]]) -> None:
        directory = tmp_path_factory.mktemp("model")
        store = BACK_ENDS[back_end].open(directory)
        try:
            with others_at_work(back_end, directory):
                _compare_with_a_dictionary(store, Place(store, BACK_ENDS[back_end]), steps)
        finally:
            store.close()

    agrees()


def _compare_with_a_dictionary(
    store: Store, place: Place, steps: list[tuple[str, str, bool]]
) -> None:
    before = now_at(store)
    known: dict[str, StoredObject] = {}
    changes = 0
    for number, (verb, name, stale) in enumerate(steps):
        result = _try(store, place, verb, name, number, known.get(name), stale=stale)
        if isinstance(result, PodwireError):
            allowed = verb == "create" or name not in known or stale
            assert allowed, (verb, name, result)
            continue
        changes += 1
        known.pop(name, None)
        if verb != "delete":
            known[name] = result
    assert [known[name] for name in sorted(known)] == place.policies()
    with place.watch(before) as watch:
        replayed: dict[str, StoredObject] = {}
        for event in place.take(watch, changes):
            replayed.pop(event.object.key.name, None)
            if not event.deleted:
                replayed[event.object.key.name] = event.object
    assert replayed == known


def _try(
    store: Store,
    place: Place,
    verb: str,
    name: str,
    value: int,
    found: StoredObject | None,
    *,
    stale: bool,
) -> StoredObject | PodwireError:
    revision = found.revision if found else now_at(store)
    revision -= 1 if stale else 0
    try:
        if verb == "create":
            return store.create(place.policy(name, value))
        if verb == "update":
            return store.update(place.policy(name, value, revision=revision))
        return store.delete(place.key(name), revision=revision)
    except (Conflict, NotFound) as error:
        return error
