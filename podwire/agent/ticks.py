"""Moments that all tasks which look for work share, so that the looks of several of them wake the process once.

Used by the tasks of the loop (`agent.duties.loops`, `agent.cni.socket`). In an idle process a wake-up costs more than
the look that it is for.
"""

import asyncio


async def next_tick(period_s: float) -> None:
    """Sleep until the loop's clock shows a multiple of `period_s`, for about as long as that."""
    await asyncio.sleep(seconds_to_tick(asyncio.get_running_loop().time(), period_s))


def seconds_to_tick(now_s: float, period_s: float) -> float:
    """Give the time to a multiple of `period_s`: at least half a period, at most one and a half."""
    # Rounded to the nearest tick, not cut off: a timer that fires a moment before its time must not find the same tick
    # again.
    return (round(now_s / period_s) + 1) * period_s - now_s
