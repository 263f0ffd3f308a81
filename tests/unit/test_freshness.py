"""Whose ADD waits for what, until policies that were written before its pod was seen have been heard of."""

import threading
from collections.abc import Sequence

import pytest

from podwire.agent.duties.kubernetes import freshness as duty
from podwire.agent.duties.kubernetes.freshness import FreshnessDuty
from podwire.control.kubernetes.freshness import Freshness
from podwire.control.kubernetes.own_pods import OwnPods
from podwire.model.errors import Unavailable
from podwire.model.store import Revisions, StoreEvent
from tests.fakes.store import MemoryStore
from tests.unit.test_own_pods import add, pod
from tests.waiting import wait_for

KIND = "networkpolicies"


@pytest.fixture
def made() -> Freshness:
    found = Freshness(threading.Condition(), is_asking=True)
    found.reach({KIND: 7, "namespaces": 3, "ciliumnetworkpolicies": 0})
    return found


def test_a_pod_waits_for_the_answer_and_for_what_it_says(made: Freshness) -> None:
    made.see(["a"])
    assert not made.is_fresh("a")
    begun = made.begin()
    assert begun is not None
    number, kinds = begun
    assert set(kinds) == {KIND, "namespaces"}, "the server does not know the third"
    made.answer(number, {KIND: 9, "namespaces": 3})
    assert not made.is_fresh("a")
    made.reach({KIND: 8})
    assert not made.is_fresh("a")
    made.reach({KIND: 9})
    assert made.is_fresh("a")
    assert made.begin() is None


def test_what_was_heard_already_holds_up_nobody(made: Freshness) -> None:
    made.see(["a", "b"])
    number, _ = made.begin() or (0, [])
    made.answer(number, {KIND: 7, "namespaces": 2})
    assert made.is_fresh("a")
    assert made.is_fresh("b")


def test_an_answer_counts_only_for_pods_that_were_seen_before_its_question(made: Freshness) -> None:
    made.see(["a"])
    first, _ = made.begin() or (0, [])
    made.see(["b"])
    made.answer(first, {KIND: 7})
    assert made.is_fresh("a")
    assert not made.is_fresh("b")
    second, _ = made.begin() or (0, [])
    made.answer(second, {KIND: 8})
    assert not made.is_fresh("b")
    made.reach({KIND: 8})
    assert made.is_fresh("b")


def test_without_an_answer_and_without_a_question_nobody_waits(made: Freshness) -> None:
    made.see(["a"])
    number, _ = made.begin() or (0, [])
    made.answer(number, {})
    assert made.is_fresh("a")
    idle = Freshness(threading.Condition())
    idle.see(["a"])
    assert idle.is_fresh("a")


def test_pods_that_are_gone_are_forgotten(made: Freshness) -> None:
    made.see(["a", "b"])
    number, _ = made.begin() or (0, [])
    made.answer(number, {KIND: 9})
    made.see(["c"])
    made.keep(["b"])
    assert made.is_fresh("a")
    assert not made.is_fresh("b")
    assert made.begin() is None


# With pods, and the thread that asks


class Server:
    """Says how new its objects are; `hold` keeps the answer back."""

    def __init__(self) -> None:
        self.newest: dict[str, int] = {KIND: 7}
        self.asked: list[Sequence[str]] = []
        self.error: Unavailable | None = None
        self.open = threading.Event()
        self.open.set()

    def read_newest(self, kinds: Sequence[str]) -> Revisions:
        self.asked.append(tuple(kinds))
        assert self.open.wait(60)
        if self.error is not None:
            raise self.error
        return self.newest


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(duty, "MOMENT_S", 0.01)
    return Server()


@pytest.fixture
def pods(server: Server) -> OwnPods:
    found = OwnPods(MemoryStore(), "n1", wait_s=60.0)
    found.freshness.reach({KIND: 7})
    return found


def test_an_add_waits_until_the_watch_has_brought_what_is_newer(
    server: Server, pods: OwnPods
) -> None:
    asking = FreshnessDuty(pods.freshness, server.read_newest)
    asking.start()
    try:
        server.newest = {KIND: 8}
        pods.apply(StoreEvent(pod(), 1))
        assert pods.complete_at_once(add()) is None
        done = threading.Event()

        def complete() -> None:
            pods.complete(add())
            done.set()

        waiting = threading.Thread(target=complete)
        waiting.start()
        wait_for(lambda: server.asked, "the question")
        assert not done.wait(0.2)
        pods.freshness.reach({KIND: 8})
        assert done.wait(60)
        waiting.join()
        assert pods.complete_at_once(add()) is not None
        pods.apply(StoreEvent(pod(labels={"a": "b"}), 2))
        assert pods.complete_at_once(add()) is not None, "it was seen before"
        assert server.asked == [(KIND,)]
    finally:
        asking.stop()


def test_pods_of_one_moment_share_a_question(server: Server, pods: OwnPods) -> None:
    server.open.clear()
    asking = FreshnessDuty(pods.freshness, server.read_newest)
    asking.start()
    try:
        for number in range(50):
            pods.apply(StoreEvent(pod(f"p{number}", uid=f"u{number}"), number))
        server.open.set()
        wait_for(lambda: pods.complete_at_once(add("p49", "u49")), "the last answer")
        assert len(server.asked) <= 2
    finally:
        asking.stop()


def test_a_wait_is_bounded_and_a_failure_holds_up_nobody(
    server: Server, pods: OwnPods, caplog: pytest.LogCaptureFixture
) -> None:
    pods.wait_s = 0.05
    server.open.clear()
    asking = FreshnessDuty(pods.freshness, server.read_newest)
    asking.start()
    try:
        pods.apply(StoreEvent(pod(), 1))
        assert pods.complete(add()).labels
        assert "before its policies were heard of" in caplog.text
        server.error = Unavailable("away")
        server.open.set()
        wait_for(lambda: pods.complete_at_once(add()), "the end of the waiting")
    finally:
        asking.stop()


def test_pods_of_the_host_ask_for_nothing(server: Server, pods: OwnPods) -> None:
    pods.freshness.is_asking = True
    pods.apply(StoreEvent(pod(hostNetwork=True), 1))
    assert pods.freshness.begin() is None
