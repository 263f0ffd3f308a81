"""What every store keeps, whatever is behind it; each case runs with all back ends of `stores`."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podwire.model.errors import Conflict, InvalidRequest, NotFound, PodwireError
from podwire.model.store import Compacted, Store, StoredObject, Watch
from podwire.store.documents import DOCUMENT_MAX_BYTES
from tests.contract.stores import (
    BACK_ENDS,
    DEADLINE_S,
    increment,
    key,
    make,
    now_at,
    seen,
    take,
    until,
)

# ------------------------------------------------------------------ objects


def test_what_is_created_can_be_read(store: Store) -> None:
    made = store.create(make("a", {"nested": [1, 2.5, "ü", None, True]}))
    assert made.uid
    assert made.revision == now_at(store)
    assert made.created.endswith("Z")
    assert store.get(key("a")) == made
    assert made.document == {"spec": {"v": {"nested": [1, 2.5, "ü", None, True]}}}


def test_what_is_not_there_is_none(store: Store) -> None:
    store.create(make("a"))
    assert store.get(key("a", "other")) is None
    assert store.get(key("a", kind="workloads")) is None
    assert store.get(key("A")) is None


def test_a_name_is_given_once(store: Store) -> None:
    first = store.create(make("a", 1))
    with pytest.raises(Conflict, match="create networkpolicies default/a: it exists"):
        store.create(make("a", 2))
    assert store.get(key("a")) == first
    assert store.list("networkpolicies") == ([first], first.revision)


def test_each_change_makes_the_revision_of_the_whole_store_grow(store: Store) -> None:
    seen_at = [now_at(store)]
    first = store.create(make("a"))
    second = store.create(make("b", kind="workloads", namespace=""))
    third = store.update(make("a", 1, revision=first.revision))
    seen_at += [first.revision, second.revision, third.revision]
    store.delete(second.key)
    seen_at.append(now_at(store))
    assert seen_at == sorted(set(seen_at))


def test_an_update_keeps_uid_and_time(store: Store) -> None:
    made = store.create(make("a", 1))
    changed = store.update(make("a", 2, revision=made.revision))
    assert (changed.uid, changed.created) == (made.uid, made.created)
    assert changed.document == {"spec": {"v": 2}}
    assert store.get(key("a")) == changed


def test_an_update_of_an_older_revision_changes_nothing(store: Store) -> None:
    made = store.create(make("a", 1))
    changed = store.update(make("a", 2, revision=made.revision))
    message = f"its revision is {changed.revision}, no longer {made.revision}"
    with pytest.raises(Conflict, match=message):
        store.update(make("a", 3, revision=made.revision))
    assert store.get(key("a")) == changed


def test_an_update_of_nothing_is_not_found(store: Store) -> None:
    before = now_at(store)
    with pytest.raises(NotFound):
        store.update(make("a", revision=1))
    assert store.list("networkpolicies") == ([], before)


def test_a_successor_of_the_same_name_is_another_object(store: Store) -> None:
    first = store.create(make("a"))
    store.delete(first.key)
    second = store.create(make("a"))
    assert second.uid != first.uid
    with pytest.raises(Conflict, match="made anew"):
        store.delete(first.key, uid=first.uid)
    with pytest.raises(Conflict, match="made anew"):
        store.update(
            StoredObject(key=first.key, uid=first.uid, revision=second.revision, document={})
        )
    assert store.get(key("a")) == second


PATCHES = {
    "a field": ({"spec": {"v": 2}}, {"spec": {"v": 2, "w": {"x": 1, "y": [1, 2]}}}),
    "a field of a field": ({"spec": {"w": {"x": 9}}}, {"spec": {"v": 1, "w": {"x": 9, "y": [1, 2]}}}),
    "a new field": ({"more": {"a": 1}}, {"spec": {"v": 1, "w": {"x": 1, "y": [1, 2]}}, "more": {"a": 1}}),
    "one away": ({"spec": {"w": {"x": None}}}, {"spec": {"v": 1, "w": {"y": [1, 2]}}}),
    "one away that is not there": ({"spec": {"z": None}}, None),
    "what is there": ({"spec": {"v": 1, "w": {"y": [1, 2]}}}, None),
    "nothing": ({}, None),
    "a list, whole": ({"spec": {"w": {"y": [3]}}}, {"spec": {"v": 1, "w": {"x": 1, "y": [3]}}}),
    "an object for a value": (
        {"spec": {"v": {"a": 1, "b": None}}}, {"spec": {"v": {"a": 1}, "w": {"x": 1, "y": [1, 2]}}}
    ),
    "a value for an object": ({"spec": {"w": 7}}, {"spec": {"v": 1, "w": 7}}),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "wanted"), PATCHES.values(), ids=PATCHES)
def test_a_patch_changes_what_it_names(store: Store, changes: Any, wanted: Any) -> None:
    document = {"spec": {"v": 1, "w": {"x": 1, "y": [1, 2]}}}
    made = store.create(StoredObject(key=key("a"), document=document))
    with store.watch(made.revision) as watch:
        changed = store.patch(key("a"), changes)
        assert changed == store.get(key("a"))
        assert (changed.uid, changed.created) == (made.uid, made.created)
        if wanted is None:
            assert changed == made, "nothing is written"
            assert watch.next(0.1) == ()
        else:
            assert changed.document == wanted
            assert changed.revision > made.revision
            assert [one.object for one in take(watch, 1)] == [changed]


def test_a_patch_has_preconditions(store: Store) -> None:
    made = store.create(make("a", 1))
    changed = store.patch(key("a"), {"spec": {"v": 2}}, revision=made.revision, uid=made.uid)
    with pytest.raises(Conflict):
        store.patch(key("a"), {"spec": {"v": 3}}, revision=made.revision)
    with pytest.raises(Conflict, match="made anew"):
        store.patch(key("a"), {"spec": {"v": 3}}, uid="another")
    with pytest.raises(NotFound):
        store.patch(key("b"), {"spec": {"v": 3}})
    with pytest.raises(InvalidRequest):
        store.patch(key("a"), {"spec": {"v": "x" * DOCUMENT_MAX_BYTES}})
    assert store.get(key("a")) == changed


def test_patches_of_several_writers_lose_nothing(
    store: Store, open_again: Callable[[], Store]
) -> None:
    other = open_again()
    store.create(make("a"))
    try:
        with ThreadPoolExecutor(4) as threads:
            for number in range(40):
                one = (store, other)[number % 2]
                threads.submit(one.patch, key("a"), {"spec": {f"f{number}": number}})
    finally:
        other.close()
    found = store.get(key("a"))
    assert found is not None
    assert found.document["spec"] == {"v": 0, **{f"f{number}": number for number in range(40)}}


def test_patches_are_written_together(store: Store) -> None:
    store.create(make("a", 1))
    store.create(make("b", 1))
    with store.together():
        store.patch(key("a"), {"spec": {"v": 2}})
        store.patch(key("b"), {"spec": {"v": 2}})
    found = store.list("networkpolicies")[0]
    assert [one.document for one in found] == [{"spec": {"v": 2}}] * 2

    def patch_one_that_is_not_there() -> None:
        with store.together():
            store.patch(key("a"), {"spec": {"v": 3}})
            store.patch(key("c"), {"spec": {"v": 3}})

    with pytest.raises(NotFound):
        patch_one_that_is_not_there()
    assert store.list("networkpolicies")[0] == found


def test_a_delete_gives_what_was_there(store: Store) -> None:
    made = store.create(make("a", 7))
    assert store.delete(key("a"), revision=made.revision, uid=made.uid) == made
    assert store.get(key("a")) is None
    with pytest.raises(NotFound):
        store.delete(key("a"))


def test_a_delete_under_an_older_revision_deletes_nothing(store: Store) -> None:
    made = store.create(make("a"))
    changed = store.update(make("a", 1, revision=made.revision))
    with pytest.raises(Conflict):
        store.delete(key("a"), revision=made.revision)
    assert store.get(key("a")) == changed


def test_lists_are_of_a_kind_or_a_namespace_in_order(store: Store) -> None:
    for namespace, name in [("b", "z"), ("a", "y"), ("b", "x"), ("a-b", "x"), ("a", "Y")]:
        store.create(make(name, namespace=namespace))
    last = store.create(make("w", namespace="", kind="workloads"))
    found, revision = store.list("networkpolicies")
    names = [(one.key.namespace, one.key.name) for one in found]
    assert names == sorted(names)
    assert len(names) == 5
    assert revision == last.revision
    assert [one.key.name for one in store.list("networkpolicies", "b")[0]] == ["x", "z"]
    assert [one.key.name for one in store.list("workloads", "")[0]] == ["w"]
    assert store.list("identities") == ([], revision)


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
def test_what_cannot_be_kept_is_refused(store: Store, new: StoredObject, message: str) -> None:
    before = now_at(store)
    with pytest.raises(InvalidRequest, match=message):
        store.create(new)
    assert now_at(store) == before


def test_texts_of_any_kind_are_only_texts(store: Store) -> None:
    name = "'; DROP TABLE object; --%_\u2028"
    made = store.create(make(name, name))
    assert store.get(key(name)) == made
    assert store.list("networkpolicies")[0] == [made]


def test_what_is_read_can_be_changed_by_its_reader_alone(store: Store) -> None:
    made = store.create(make("a", [1]))
    made.document["spec"]["v"].append(2)
    found = store.get(key("a"))
    assert found is not None
    assert found.document == {"spec": {"v": [1]}}


# ------------------------------------------------------------------ watches


def test_a_watch_gives_each_change_once_and_in_order(store: Store) -> None:
    before = now_at(store)
    first = store.create(make("a", 1))
    with store.watch(before) as watch:
        second = store.update(make("a", 2, revision=first.revision))
        store.delete(key("a"))
        deleted_at = now_at(store)
        third = store.create(make("a", 3))
        events = take(watch, 4)
        revisions = [first.revision, second.revision, deleted_at, third.revision]
        assert [event.revision for event in events] == revisions
        assert [event.object for event in events] == [first, second, second, third]
        assert [event.deleted for event in events] == [False, False, True, False]
        assert watch.next(0) == ()
        assert watch.revision == third.revision


def test_a_watch_begins_after_the_revision_of_a_list(store: Store) -> None:
    store.create(make("a"))
    _, revision = store.list("networkpolicies")
    with store.watch(revision) as watch:
        assert not watch.next(0)
        store.create(make("b"))
        assert seen(take(watch, 1)) == [("b", False)]


def test_a_watch_goes_on_where_another_ended(store: Store) -> None:
    before = now_at(store)
    store.create(make("a"))
    with store.watch(before) as watch:
        take(watch, 1)
        revision = watch.revision
    store.create(make("b"))
    with store.watch(revision) as watch:
        assert seen(take(watch, 1)) == [("b", False)]


def test_a_watch_of_kinds_sees_no_other_kind_and_does_not_fall_behind(store: Store) -> None:
    with store.watch(now_at(store), ["workloads", "namespaces"]) as watch:
        store.create(make("a"))
        store.create(make("w", kind="workloads"))
        store.create(make("n", kind="namespaces"))
        last = store.create(make("o", kind="nodes"))
        assert seen(take(watch, 2)) == [("w", False), ("n", False)]
        until(lambda: not watch.next(0.1) and watch.revision == last.revision)


def test_a_long_log_comes_in_parts(store: Store) -> None:
    with store.together():
        first = store.create(make("a1"))
    with store.together():
        made = [store.create(make(f"a{number}")) for number in range(2, 2101)]
    with store.watch(first.revision) as watch:
        events = take(watch, 2099)
    assert [event.object for event in events] == made
    revisions = [event.revision for event in events]
    assert revisions == sorted(revisions)


def test_a_waiting_watch_wakes_at_once_for_a_write_of_its_own_process(store: Store) -> None:
    with store.watch(now_at(store)) as watch, ThreadPoolExecutor(1) as threads:
        late_s = []
        for number in range(5):
            waiting = threads.submit(_time_event, watch)
            written_s = time.monotonic()
            store.create(make(f"a{number}"))
            late_s.append(waiting.result(DEADLINE_S) - written_s)
        assert min(late_s) < 0.5, late_s


def _time_event(watch: Watch) -> float:
    assert take(watch, 1)
    return time.monotonic()


def test_a_watch_sees_what_another_opener_writes(
    store: Store, open_again: Callable[[], Store]
) -> None:
    other = open_again()
    try:
        with store.watch(now_at(store)) as watch:
            assert not watch.next(0)
            other.create(make("a"))
            assert seen(take(watch, 1)) == [("a", False)]
    finally:
        other.close()


def test_a_closed_watch_gives_nothing_and_lets_its_reader_go(store: Store) -> None:
    watch = store.watch(now_at(store))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(watch.next, 600.0)
        watch.close()
        assert waiting.result(DEADLINE_S) == ()
    store.create(make("a"))
    assert watch.next(0) == ()
    watch.close()


def test_closing_the_store_closes_its_watches(open_again: Callable[[], Store]) -> None:
    store = open_again()
    watch = store.watch(now_at(store))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(watch.next, 600.0)
        store.close()
        assert waiting.result(DEADLINE_S) == ()


def test_a_revision_that_the_store_never_had_is_compacted(store: Store) -> None:
    revision = store.create(make("a")).revision + 1
    with (
        store.watch(revision) as watch,
        pytest.raises(Compacted, match=f"after revision {revision}") as caught,
    ):
        watch.next(DEADLINE_S)
    assert caught.value.retryable


# ------------------------------------------------------------------ several at once


def test_of_many_writers_that_create_one_name_one_wins(store: Store) -> None:
    def create(number: int) -> bool:
        try:
            store.create(make("a", number))
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(20) as threads:
        won = list(threads.map(create, range(20)))
    assert won.count(True) == 1
    found = store.get(key("a"))
    assert found is not None
    assert found.document == {"spec": {"v": won.index(True)}}


def test_twenty_threads_lose_no_count(store: Store) -> None:
    store.create(make("counter"))
    with ThreadPoolExecutor(20) as threads:
        for one in [threads.submit(increment, store, 10) for _ in range(20)]:
            one.result()
    found = store.get(key("counter"))
    assert found is not None
    assert found.document == {"spec": {"v": 200}}


def test_a_watch_misses_nothing_of_twenty_threads(store: Store) -> None:
    def write(number: int) -> None:
        for step in range(10):
            made = store.create(make(f"a{number}-{step}"))
            if step % 2:
                store.delete(made.key)

    with store.watch(now_at(store)) as watch, ThreadPoolExecutor(20) as threads:
        writers = [threads.submit(write, number) for number in range(20)]
        events = take(watch, 300)
        for one in writers:
            one.result()
    revisions = [event.revision for event in events]
    assert revisions == sorted(set(revisions))
    left = {event.object.key for event in events if not event.deleted} - {
        event.object.key for event in events if event.deleted
    }
    assert left == {one.key for one in store.list("networkpolicies")[0]}


def test_a_reader_never_sees_half_of_a_list(store: Store) -> None:
    """Writers keep two objects equal in number; a list at one revision shows their sum of changes."""
    before = store.create(make("a")).revision
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for name in ("b", "c"):
                store.create(make(name))
            for name in ("b", "c"):
                store.delete(key(name))

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        try:
            for _ in range(200):
                found, revision = store.list("networkpolicies")
                expected = [["a"], ["a", "b"], ["a", "b", "c"], ["a", "c"]][(revision - before) % 4]
                assert [one.key.name for one in found] == expected
        finally:
            stop.set()
            writing.result(DEADLINE_S)


# ------------------------------------------------------------------ against a model

NAMES = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(
    st.tuples(st.sampled_from(["create", "update", "delete"]), NAMES, st.booleans()), max_size=40
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    print_blob=True,
)
@given(steps=STEPS)
def test_any_sequence_of_writes_agrees_with_a_dictionary(
    back_end: str, steps: list[tuple[str, str, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = BACK_ENDS[back_end](tmp_path_factory.mktemp("model"))
    try:
        for one in store.list("networkpolicies")[0]:
            store.delete(one.key)
        before = now_at(store)
        known: dict[str, StoredObject] = {}
        changes = 0
        for number, (verb, name, stale) in enumerate(steps):
            result = _try(store, verb, name, number, known.get(name), stale=stale)
            if isinstance(result, PodwireError):
                allowed = verb == "create" or name not in known or stale
                assert allowed, (verb, name, result)
                continue
            changes += 1
            known.pop(name, None)
            if verb != "delete":
                known[name] = result
        found, revision = store.list("networkpolicies")
        assert [known[name] for name in sorted(known)] == list(found)
        assert revision == before + changes, "nobody else writes"
        with store.watch(before) as watch:
            replayed: dict[str, StoredObject] = {}
            for event in take(watch, changes):
                replayed.pop(event.object.key.name, None)
                if not event.deleted:
                    replayed[event.object.key.name] = event.object
        assert replayed == known
    finally:
        store.close()


def _try(
    store: Store, verb: str, name: str, value: int, found: StoredObject | None, *, stale: bool
) -> StoredObject | PodwireError:
    revision = (found.revision if found else 1) - (1 if stale else 0)
    try:
        if verb == "create":
            return store.create(make(name, value))
        if verb == "update":
            return store.update(make(name, value, revision=revision))
        return store.delete(key(name), revision=revision)
    except (Conflict, NotFound) as error:
        return error
