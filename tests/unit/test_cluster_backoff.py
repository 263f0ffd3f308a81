"""How long what failed waits."""

import pytest

from podwire.control.cluster.backoff import Backoff


@pytest.mark.parametrize(
    ("failures", "wait_s"),
    [(0, 0), (1, 1), (2, 2), (3, 4), (4, 8), (5, 16), (6, 30), (7, 30), (5000, 30)],
    ids=str,
)
def test_each_failure_waits_twice_as_long_up_to_half_a_minute(failures: int, wait_s: int) -> None:
    backoff = Backoff()
    for _ in range(failures):
        backoff.failed(100)
    assert backoff.failures == failures
    assert backoff.is_waiting(100 + wait_s - 0.01) == (failures > 0)
    assert not backoff.is_waiting(100 + wait_s)
    backoff.forget()
    assert (backoff.failures, backoff.is_waiting(100)) == (0, False)
