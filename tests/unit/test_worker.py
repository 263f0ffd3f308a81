"""The thread of a duty: what wakes it, what it survives, what ends it."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from podwire.agent.duties.worker import FOREVER_S, Worker
from podwire.model.errors import Bug, PodwireError, Unavailable
from tests.waiting import wait_for


class Rounds:
    """Work that counts its rounds, and fails or waits as it is told."""

    def __init__(self) -> None:
        self.count = 0
        self.wait_s: float | None = FOREVER_S
        self.error: Exception | None = None
        self.failures: list[PodwireError] = []
        self.pause_s = FOREVER_S
        self.thread_name = ""

    def work(self) -> float | None:
        self.count += 1
        self.thread_name = threading.current_thread().name
        if self.error is not None:
            raise self.error
        return self.wait_s

    def failed(self, error: PodwireError) -> float:
        self.failures.append(error)
        return self.pause_s

    def reached(self, count: int) -> None:
        wait_for(lambda: self.count >= count, f"round {count}")


@contextmanager
def started(rounds: Rounds, *, wake_ends_pause: bool = False) -> Iterator[Worker]:
    worker = Worker("tested", rounds.work, rounds.failed, wake_ends_pause=wake_ends_pause)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()
    assert not worker.is_running


def test_the_thread_has_the_name_of_the_worker() -> None:
    rounds = Rounds()
    with started(rounds):
        rounds.reached(1)
    assert rounds.thread_name == "tested"


def test_the_next_round_comes_with_the_time_or_with_a_wake() -> None:
    rounds = Rounds()
    rounds.wait_s = 0.0
    with started(rounds) as worker:
        rounds.reached(3)
        rounds.wait_s = FOREVER_S
        wait_for(lambda: _is_asleep(rounds), "the end of the rounds")
        before = rounds.count
        worker.wake()
        rounds.reached(before + 1)


def _is_asleep(rounds: Rounds) -> bool:
    before = rounds.count
    threading.Event().wait(0.02)
    return rounds.count == before


def test_a_wake_during_a_round_leads_to_another() -> None:
    entered, may_end, seen = threading.Event(), threading.Event(), list[bool]()

    def work() -> float:
        seen.append(worker.was_woken)
        entered.set()
        may_end.wait()
        return FOREVER_S

    worker = Worker("tested", work)
    worker.start()
    entered.wait()
    worker.wake()
    may_end.set()
    wait_for(lambda: len(seen) == 2, "the second round")
    worker.stop()
    assert seen == [False, True]


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        pytest.param(Unavailable("no answer"), Unavailable, "no answer", id="expected"),
        pytest.param(KeyError("a bug"), Bug, "tested: KeyError('a bug')", id="bug"),
    ],
)
def test_a_failure_is_told_and_survived(
    raised: Exception, kind: type[PodwireError], text: str
) -> None:
    rounds = Rounds()
    rounds.error, rounds.pause_s = raised, 0.0
    with started(rounds):
        rounds.reached(3)
        rounds.error = None
        before = len(rounds.failures)
        rounds.reached(before + 1)
    assert type(rounds.failures[0]) is kind
    assert rounds.failures[0].message == text


def test_what_fails_at_a_failure_is_survived_too(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_error: PodwireError) -> float:
        raise KeyError("another bug")

    rounds = Rounds()
    rounds.error = Unavailable("no answer")
    assert Worker("tested", rounds.work, fail).do_round()
    assert "another bug" in caplog.text


def test_the_same_failure_is_logged_once_until_a_round_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    rounds = Rounds()
    worker = Worker("tested", rounds.work, rounds.failed)
    errors = [Unavailable("a"), Unavailable("a"), Unavailable("b"), None, None, Unavailable("b")]
    for error in errors:
        rounds.error = error
        worker.do_round()
    lines = [(record.message, getattr(record, "error", "")) for record in caplog.records]
    failed, works = "a duty failed; it goes on", "a duty works again"
    assert lines == [(failed, "a"), (failed, "b"), (works, ""), (failed, "b")]


@pytest.mark.parametrize(("wake_ends_pause", "rounds_after"), [(True, 2), (False, 1)])
def test_a_wake_ends_the_pause_after_a_failure_only_where_that_is_asked_for(
    wake_ends_pause: bool, rounds_after: int
) -> None:
    rounds = Rounds()
    rounds.error = Unavailable("no answer")
    with started(rounds, wake_ends_pause=wake_ends_pause) as worker:
        wait_for(lambda: rounds.failures, "the failure")
        worker.wake()
        rounds.reached(rounds_after)
        wait_for(lambda: _is_asleep(rounds), "the end of the rounds")
    assert rounds.count == rounds_after


def test_a_stop_ends_every_kind_of_wait() -> None:
    opened = threading.Event()

    def wait_in_a_round() -> float:
        opened.wait()
        return 0.0

    def pause_in_a_round() -> float:
        assert pausing.pause(FOREVER_S)
        return 0.0

    failing = Rounds()
    failing.error = Unavailable("no answer")
    pausing = Worker("pausing", pause_in_a_round)
    waits: dict[str, Worker] = {
        "for a wake": Worker("waiting", lambda: FOREVER_S),
        "after a failure": Worker("failing", failing.work, failing.failed),
        "in a round": pausing,
        "for something else": Worker("interrupted", wait_in_a_round, interrupt=opened.set),
    }
    for worker in waits.values():
        worker.start()
    for worker in waits.values():
        worker.stop()


def test_a_round_without_a_next_one_ends_the_thread() -> None:
    rounds = Rounds()
    rounds.wait_s = None
    with started(rounds) as worker:
        wait_for(lambda: not worker.is_running, "the end of the thread")
    assert rounds.count == 1


def test_a_stop_leaves_behind_what_nothing_can_end() -> None:
    may_end = threading.Event()
    worker = Worker("tested", lambda: float(may_end.wait()))
    worker.start()
    worker.stop(wait=False)
    may_end.set()


def test_a_worker_can_be_started_again_and_twice() -> None:
    rounds = Rounds()
    worker = Worker("tested", rounds.work)
    for count in (1, 2):
        worker.start()
        worker.start()
        rounds.reached(count)
        worker.stop()
    assert rounds.count == 2
