"""The regeneration queue: serial per endpoint, coalesced, nothing lost, back-off after failures."""

from hypothesis import given
from hypothesis import strategies as st

from podwire.control.endpoint.queue import (
    RETRY_BASE_NS,
    RETRY_CAP_NS,
    Level,
    Regeneration,
    RegenerationQueue,
)
from podwire.model.ids import EndpointId

A, B = EndpointId(1), EndpointId(2)


def test_triggers_before_a_regeneration_are_folded_at_the_highest_level() -> None:
    queue = RegenerationQueue()
    queue.request(A, Level.POLICY, "policy changed", 0)
    queue.request(A, Level.REWRITE, "mtu changed", 1)
    queue.request(A, Level.POLICY, "policy changed", 2)
    assert queue.take(2) == Regeneration(A, Level.REWRITE, ("policy changed", "mtu changed"))
    assert queue.take(2) is None


def test_a_trigger_during_a_regeneration_starts_another_one_afterwards() -> None:
    queue = RegenerationQueue(parallel=2)
    queue.request(A, Level.POLICY, "first", 0)
    regeneration = queue.take(0)
    assert regeneration is not None
    queue.request(A, Level.POLICY, "second", 1)
    assert queue.take(1) is None, "one endpoint is never regenerated twice at once"
    queue.finish(regeneration, ok=True, now_ns=2)
    assert queue.take(2) == Regeneration(A, Level.POLICY, ("second",))


def test_at_most_the_limit_is_regenerated_at_once() -> None:
    queue = RegenerationQueue(parallel=1)
    queue.request(A, Level.POLICY, "x", 0)
    queue.request(B, Level.POLICY, "x", 0)
    first = queue.take(0)
    assert first is not None
    assert queue.take(0) is None
    queue.finish(first, ok=True, now_ns=0)
    second = queue.take(0)
    assert second is not None
    assert second.endpoint_id == B


def test_a_failure_backs_off_doubling_to_the_cap() -> None:
    queue = RegenerationQueue()
    now_ns = 0
    queue.request(A, Level.REWRITE, "x", now_ns)
    for attempt in range(12):
        regeneration = queue.take(now_ns)
        assert regeneration is not None
        assert regeneration.level is Level.REWRITE
        queue.finish(regeneration, ok=False, now_ns=now_ns)
        assert queue.owes(A)
        delay_ns = min(RETRY_CAP_NS, RETRY_BASE_NS << attempt)
        assert queue.take(now_ns + delay_ns - 1) is None
        now_ns += delay_ns
    assert delay_ns == RETRY_CAP_NS


def test_a_new_trigger_does_not_wait_for_the_retry() -> None:
    queue = RegenerationQueue()
    queue.request(A, Level.REWRITE, "x", 0)
    regeneration = queue.take(0)
    assert regeneration is not None
    queue.finish(regeneration, ok=False, now_ns=0)
    queue.request(A, Level.POLICY, "policy changed", 5)
    again = queue.take(5)
    assert again is not None
    assert again.level is Level.REWRITE, "the level of the failed regeneration is kept"


@given(
    st.lists(
        st.tuples(st.sampled_from(["request", "take", "ok", "fail"]), st.integers(1, 3)),
        max_size=80,
    )
)
def test_no_trigger_is_ever_lost(script: list[tuple[str, int]]) -> None:
    queue, running, owed, now_ns = RegenerationQueue(parallel=2), {}, set(), 0
    for word, number in script:
        now_ns += RETRY_CAP_NS
        endpoint_id = EndpointId(number)
        if word == "request":
            queue.request(endpoint_id, Level.POLICY, "x", now_ns)
            owed.add(endpoint_id)
        elif word == "take" and (regeneration := queue.take(now_ns)) is not None:
            assert regeneration.endpoint_id not in running
            running[regeneration.endpoint_id] = regeneration
            owed.discard(regeneration.endpoint_id)
        elif word in ("ok", "fail") and endpoint_id in running:
            queue.finish(running.pop(endpoint_id), ok=word == "ok", now_ns=now_ns)
            if word == "fail":
                owed.add(endpoint_id)
    for regeneration in running.values():
        queue.finish(regeneration, ok=True, now_ns=now_ns)
    now_ns += RETRY_CAP_NS
    while (regeneration := queue.take(now_ns)) is not None:
        owed.discard(regeneration.endpoint_id)
        queue.finish(regeneration, ok=True, now_ns=now_ns)
    assert not owed
    assert len(queue) == 0
