"""Events at objects of Kubernetes: series, limits, what is given up, and that nobody waits for them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from podwire.agent.duties.kubernetes import event_writer
from podwire.agent.duties.kubernetes.event_writer import EventTeller, NodeEvents, node_subject
from podwire.agent.health import Health
from podwire.control.kubernetes.core_node import core_node_key
from podwire.control.kubernetes.event_queue import (
    BURST,
    KNOWN_MAX,
    MESSAGE_MAX_BYTES,
    OVER,
    REFILL_S,
    REFUSED_MAX,
    REPEAT_S,
    WAITING_MAX,
    EventQueue,
)
from podwire.model.errors import Conflict, InvalidRequest, NotFound, PodwireError, Unavailable
from podwire.model.store import KindUnavailable
from podwire.model.store.events import EventWrite, Subject
from tests.fakes.node import FakeClock
from tests.waiting import wait_for

NODE = node_subject("n1")
FORBIDDEN = KindUnavailable("create events: forbidden", hint='RBAC: allow verb "create"')
NOW = "2026-01-01T00:00:00Z"
LATER = "2026-01-01T00:01:00Z"


def subject(number: int) -> Subject:
    return Subject(core_node_key(f"node-{number}"), f"uid-{number}")


def make_queue(*told: tuple[Subject, str, str]) -> EventQueue:
    queue = EventQueue("n1", "nonce")
    for about, reason, message in told:
        queue.tell(about, reason, message, NOW)
    return queue


def write_all(queue: EventQueue, now_s: float) -> list[EventWrite]:
    found = []
    while (write := queue.take(now_s)) is not None:
        queue.written(write, now_s)
        found.append(write)
    return found


def test_the_same_again_raises_the_count_of_one_event_after_a_minute() -> None:
    queue = make_queue((NODE, "A", "first"))
    (made,) = write_all(queue, 0.0)
    assert (made.is_new, made.count, made.first, made.last) == (True, 1, NOW, NOW)
    queue.tell(NODE, "A", "second", LATER)
    queue.tell(NODE, "A", "third", LATER)
    assert queue.due_in(1.0) == REPEAT_S - 1.0
    assert write_all(queue, REPEAT_S - 0.1) == []
    (again,) = write_all(queue, REPEAT_S)
    assert (again.name, again.is_new, again.count) == (made.name, False, 3)
    assert (again.message, again.first, again.last) == ("third", NOW, LATER)
    assert queue.due_in(REPEAT_S) is None


def test_reasons_and_objects_are_series_of_their_own() -> None:
    queue = make_queue((NODE, "A", "m"), (NODE, "B", "m"), (subject(1), "A", "m"))
    written = write_all(queue, 0.0)
    assert len({write.name for write in written}) == 3


def test_names_differ_between_lives_of_an_agent() -> None:
    names = set()
    for nonce in ("one", "two"):
        queue = EventQueue("n1", nonce)
        queue.tell(NODE, "A", "m", NOW)
        names |= {write.name for write in write_all(queue, 0.0)}
    assert len(names) == 2


def test_all_series_together_are_limited() -> None:
    queue = make_queue(*((subject(number), "A", "m") for number in range(BURST + 2)))
    assert len(write_all(queue, 0.0)) == BURST
    assert queue.due_in(0.0) == pytest.approx(REFILL_S)
    assert len(write_all(queue, REFILL_S)) == 1
    assert len(write_all(queue, 2 * REFILL_S)) == 1


def test_what_does_not_fit_is_counted_and_a_known_series_always_fits() -> None:
    queue = make_queue(*((subject(number), "A", "m") for number in range(WAITING_MAX)))
    queue.tell(subject(WAITING_MAX), "A", "m", NOW)
    assert queue.dropped == 1
    queue.tell(subject(0), "A", "again", NOW)
    assert queue.dropped == 1


def test_only_so_many_series_are_remembered() -> None:
    queue, now_s = EventQueue("n1", "nonce"), 0.0
    for number in range(KNOWN_MAX + 1):
        queue.tell(subject(number), "A", "m", NOW)
        now_s += REFILL_S
        write_all(queue, now_s)
    queue.tell(subject(1), "A", "m", NOW)
    queue.tell(subject(0), "A", "m", NOW)
    again = {write.about: write.is_new for write in write_all(queue, now_s + REPEAT_S)}
    assert again == {subject(0): True, subject(1): False}


@pytest.mark.parametrize("message", ["x" * 5000, "ü" * 3000, "short"])
def test_messages_fit_what_the_server_takes(message: str) -> None:
    (write,) = write_all(make_queue((NODE, "A", message)), 0.0)
    assert len(write.message.encode()) <= MESSAGE_MAX_BYTES
    assert message.startswith(write.message.removesuffix(" ..."))


def test_what_is_over_before_it_was_written_is_not_written() -> None:
    queue = make_queue((NODE, "A", "m"))
    queue.withdraw(NODE, "A")
    assert queue.take(0.0) is None
    queue.tell(NODE, "A", "m", NOW)
    (write,) = write_all(queue, 0.0)
    queue.withdraw(NODE, "A")
    queue.tell(NODE, "A", "m", LATER)
    assert [again.name for again in write_all(queue, REPEAT_S)] == [write.name]


def test_what_may_be_over_soon_is_written_when_it_has_lasted() -> None:
    queue = make_queue()
    queue.tell(NODE, "A", "m", NOW, ready_s=2.0)
    assert queue.due_in(0.5) == 1.5
    assert write_all(queue, 1.9) == []
    queue.tell(NODE, "A", "changed", LATER, ready_s=4.0)
    assert [write.message for write in write_all(queue, 2.0)] == ["changed"]


def test_what_failed_is_written_later_and_what_is_gone_is_made_anew() -> None:
    queue = make_queue((NODE, "A", "m"))
    write = queue.take(0.0)
    assert write is not None
    queue.failed(write)
    (done,) = write_all(queue, 0.0)
    assert done.is_new
    queue.tell(NODE, "A", "m", LATER)
    again = queue.take(REPEAT_S)
    assert again is not None
    queue.failed(again, is_gone=True)
    assert [write.is_new for write in write_all(queue, 2 * REPEAT_S)] == [True]


@pytest.mark.parametrize("is_on_its_way", [False, True])
def test_what_ended_while_nothing_could_be_written_is_told_as_over(*, is_on_its_way: bool) -> None:
    queue = make_queue((NODE, "A", "m"))
    write = queue.take(0.0)
    assert write is not None
    if is_on_its_way:
        queue.withdraw(NODE, "A")
        queue.failed(write)
    else:
        queue.failed(write)
        queue.withdraw(NODE, "A")
        queue.withdraw(NODE, "A")
    (told,) = write_all(queue, 0.0)
    assert (told.message, told.count, told.is_new) == (f"{OVER}m", 1, True)
    queue.tell(NODE, "A", "m", LATER)
    assert [again.message for again in write_all(queue, REPEAT_S)] == ["m"]


def test_a_new_event_whose_answer_was_lost_is_there_and_no_warning_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_writer, "AGAIN_S", (0.0, 0.0))
    there: dict[str, int] = {}
    said: list[str] = []

    def write(told: EventWrite) -> None:
        if not told.is_new:
            there[told.name] += 1
        elif told.name in there:
            raise Conflict("create events: exists")
        else:
            there[told.name] = 1
            raise Unavailable("create events: no answer within 3 s")

    with telling(write, said) as teller:
        teller.tell(NODE, "A", "m")
        wait_for(lambda: said and not said[-1], "the end of the warning")
        assert (list(there.values()), teller.written, teller.dropped) == ([2], 1, 0)
    assert "no answer" in said[0]


def test_an_event_without_a_place_leaves_no_warning_of_a_server_that_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_writer, "AGAIN_S", (0.0, 0.0))
    failures = [NotFound("create events: no namespace"), Unavailable("create events: no answer")]
    said: list[str] = []

    def write(_told: EventWrite) -> None:
        raise failures.pop()

    with telling(write, said) as teller:
        teller.tell(NODE, "A", "m")
        wait_for(lambda: said and not said[-1], "the end of the warning")
        assert teller.dropped == 1
    assert "no answer" in said[0]


@contextmanager
def telling(
    write: Callable[[EventWrite], None], said: list[str] | None = None
) -> Iterator[EventTeller]:
    def warn(_key: str, message: str) -> None:
        if said is not None:
            said.append(message)

    teller = EventTeller(write, "n1", "nonce", warn)
    yield teller
    teller.stop()


def test_whoever_tells_does_not_wait_for_the_server() -> None:
    hangs, written = threading.Event(), []

    def write(told: EventWrite) -> None:
        hangs.wait()
        written.append(told.reason)

    with telling(write) as teller:
        for number in range(WAITING_MAX + 10):
            teller.tell(subject(number), "A", "m")
        assert written == []
        hangs.set()
        wait_for(lambda: len(written) >= BURST, "the first Events")
        assert teller.dropped >= 9


@pytest.mark.parametrize(
    ("failure", "times", "dropped"),
    [
        (FORBIDDEN, REFUSED_MAX - 1, 0),
        (FORBIDDEN, REFUSED_MAX, 1),
        (InvalidRequest("create events: too long"), 1, 1),
        (Conflict("create events: exists"), 1, 0),
        (NotFound("create events: no namespace"), 1, 1),
        (Unavailable("create events: no answer"), 10, 0),
        (ValueError("a bug"), 1, 1),
    ],
)
def test_an_event_that_cannot_be_written_is_given_up_or_tried_again(
    failure: Exception, times: int, dropped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_writer, "AGAIN_S", (0.0, 0.0))
    failures, written, said = [failure] * times, [], list[str]()

    def write(told: EventWrite) -> None:
        if failures:
            raise failures.pop()
        written.append(told.reason)

    with telling(write, said) as teller:
        teller.tell(NODE, "A", "m")
        wait_for(lambda: not failures, "the tries in vain")
        teller.tell(NODE, "B", "m")
        expected = ["B"] if dropped else ["A", "B"]
        wait_for(lambda: sorted(written) == expected, "the other Events")
        assert teller.dropped == dropped
    if isinstance(failure, PodwireError) and failure.hint:
        assert failure.hint in said[0]
        assert said[-1] == ""


class Heard(EventTeller):
    """Notes what is told."""

    def __init__(self) -> None:
        super().__init__(lambda _write: None, "n1", "nonce")
        self.told: list[tuple[str, str]] = []

    def tell(self, about: Subject, reason: str, message: str, *, settle_s: float = 0.0) -> None:
        assert about == NODE
        assert settle_s
        self.told.append((reason, message))

    def withdraw(self, about: Subject, reason: str) -> None:
        self.told.append((reason, ""))


def test_what_status_says_is_told_at_the_node_once() -> None:
    health, heard = Health(FakeClock()), Heard()
    health.report("store", ok=False, message="early", critical=False)
    health.listen(NodeEvents(heard, "n1").hear)
    for _ in range(3):
        health.report("node-claims", ok=False, message="range lost")
    health.report("node-claims", ok=True)
    health.report("node-claims", ok=True)
    assert heard.told == [
        ("APIServerUnavailable", "early"),
        ("PodCIDRContested", "range lost"),
        ("PodCIDRContested", ""),
    ]


def test_warnings_without_a_reason_of_their_own_share_one_and_others_nodes_say_theirs() -> None:
    health, heard = Health(FakeClock()), Heard()
    health.listen(NodeEvents(heard, "n1").hear)
    health.warn("one", "one")
    health.warn("two", "two")
    health.warn("one", "")
    health.warn("cluster-0", "nodes n2 and n3 have the same address")
    health.warn(event_writer.WARNING, "no Events can be written")
    assert [message for _, message in heard.told] == ["one", "one; two", "two"]
