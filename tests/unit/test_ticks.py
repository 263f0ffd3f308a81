"""Moments that tasks share: every look falls on a multiple of its period, and none comes twice."""

import asyncio

import pytest

from podwire.agent.ticks import next_tick, seconds_to_tick


@pytest.mark.parametrize(
    ("now_s", "period_s", "until_s"),
    [
        pytest.param(100.0, 0.25, 100.25, id="on-a-tick"),
        pytest.param(100.01, 0.25, 100.25, id="late"),
        pytest.param(99.999999999, 0.25, 100.25, id="a-moment-early"),
        pytest.param(100.2, 0.25, 100.5, id="nearer-to-the-next"),
        pytest.param(100.26, 0.5, 100.5 + 0.5, id="more-than-half-a-period-late"),
        pytest.param(100.24, 0.5, 100.5, id="less-than-half-a-period-late"),
    ],
)
def test_a_look_falls_on_a_tick(now_s: float, period_s: float, until_s: float) -> None:
    assert now_s + seconds_to_tick(now_s, period_s) == pytest.approx(until_s)


def test_a_tick_of_a_longer_period_is_one_of_a_shorter() -> None:
    now_s = 1234.567
    short_s, long_s = (now_s + seconds_to_tick(now_s, period) for period in (0.125, 1.0))
    assert (long_s - short_s) / 0.125 == pytest.approx(round((long_s - short_s) / 0.125))


def test_the_loop_sleeps_half_a_period_at_least() -> None:
    async def sleep() -> float:
        begin_s = asyncio.get_running_loop().time()
        await next_tick(0.01)
        return asyncio.get_running_loop().time() - begin_s

    assert asyncio.run(sleep()) >= 0.005 - 1e-6
