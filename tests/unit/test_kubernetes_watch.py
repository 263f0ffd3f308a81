"""What a reader of shared watches gets, without an API server."""

import threading
from collections.abc import Sequence

import pytest

from podwire.model.errors import Unavailable
from podwire.model.store import Compacted, ObjectKey, StoredObject, StoreEvent
from podwire.store.kubernetes import watch as module
from podwire.store.kubernetes.watch import KubernetesWatch

DEADLINE_S = 60.0


def event(revision: int, kind: str = "a") -> StoreEvent:
    return StoreEvent(StoredObject(key=ObjectKey(kind, "", "x"), revision=revision), revision)


def reader(**after: int) -> KubernetesWatch:
    return KubernetesWatch(after, lambda _watch: None)


def revisions(events: Sequence[StoreEvent]) -> list[int]:
    return [event.revision for event in events]


def test_what_is_known_already_is_left_out() -> None:
    watch = reader(a=5, b=9)
    watch.hand("a", [event(4), event(5), event(7)], 7)
    watch.hand("b", [event(8, "b"), event(9, "b")], 9)
    watch.hand("a", [event(6), event(7)], 7)
    assert revisions(watch.next(0)) == [7]
    assert watch.revisions == {"a": 7, "b": 9}
    assert watch.next(0) == ()


def test_a_bookmark_moves_the_revision_alone() -> None:
    watch = reader(a=5)
    watch.hand("a", (), 12)
    assert watch.revisions == {"a": 5}, "nothing was read yet"
    assert watch.next(0) == ()
    assert watch.revisions == {"a": 12}


def test_one_kind_may_fail_while_others_go_on() -> None:
    watch = reader(a=1, b=1)
    watch.fail("b", None)
    watch.fail("a", Unavailable("no permission"))
    assert watch.next(DEADLINE_S) == (), "the news does not wait"
    assert watch.failing == {"a": "no permission"}
    watch.hand("b", [event(2, "b")], 2)
    assert revisions(watch.next(0)) == [2]
    watch.fail("b", Unavailable("away"))
    with pytest.raises(Unavailable):
        watch.next(DEADLINE_S)
    with pytest.raises(Unavailable):
        watch.next(0)
    watch.fail("a", None)
    watch.fail("b", None)
    assert watch.next(0) == ()
    assert watch.failing == {}


def test_a_break_that_was_mended_meanwhile_is_none() -> None:
    watch = reader(a=1)
    watch.fail("a", Unavailable("away"))
    watch.fail("a", None)
    assert watch.next(0) == ()


def test_compacted_names_the_kinds_after_what_is_left_was_given() -> None:
    watch = reader(a=1, b=1)
    watch.hand("b", [event(2, "b")], 2)
    watch.compact("a", "after revision 1: too old")
    assert revisions(watch.next(0)) == [2]
    with pytest.raises(Compacted, match="watch a after revision 1: too old") as caught:
        watch.next(DEADLINE_S)
    assert caught.value.kinds == {"a"}
    assert watch.revisions["b"] == 2


def test_a_reader_that_is_too_slow_lists_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    watch = reader(a=1)
    for revision in range(2, 6):
        watch.hand("a", [event(revision)], revision)
    given = revisions(watch.next(0))
    assert given == [2, 3], "and nothing after the gap"
    with pytest.raises(Compacted):
        watch.next(0)


def test_closing_lets_a_waiting_reader_go() -> None:
    gone: list[KubernetesWatch] = []
    watch = KubernetesWatch({"a": 1}, gone.append)
    threading.Timer(0.05, watch.close).start()
    assert watch.next(DEADLINE_S) == ()
    assert gone == [watch]
    watch.hand("a", [event(2)], 2)
    assert watch.next(0) == ()
