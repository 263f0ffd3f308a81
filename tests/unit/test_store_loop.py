"""The loop of a back end on the network: it works for any thread, alone, and ends with what it was asked."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from podwire.model.errors import Conflict, Unavailable
from podwire.store.loop import LoopThread
from tests.waiting import wait_for

DEADLINE_S = 30.0


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("one")
    yield made
    made.close()


async def name_of_thread() -> str:
    return threading.current_thread().name


async def fail() -> None:
    raise Conflict("as it is")


def test_work_is_done_on_the_loops_own_thread(loop: LoopThread) -> None:
    other = LoopThread("other")
    try:
        assert (loop.run(name_of_thread()), other.run(name_of_thread())) == ("one", "other")
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(loop.run, name_of_thread()) for _ in range(20)]
            assert {future.result(DEADLINE_S) for future in asked} == {"one"}
    finally:
        other.close()
    assert loop.run(name_of_thread()) == "one", "each ends alone"


def test_what_fails_fails_where_it_was_asked(loop: LoopThread) -> None:
    with pytest.raises(Conflict, match="as it is"):
        loop.run(fail())
    assert loop.run(name_of_thread()) == "one"


def test_whoever_waits_hears_that_it_is_closed(loop: LoopThread) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def wait_for_ever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(loop.run, wait_for_ever())
        wait_for(begun.is_set, deadline_s=DEADLINE_S)
        loop.close()
        with pytest.raises(Unavailable, match="closed meanwhile"):
            waiting.result(DEADLINE_S)
    assert ended.is_set()
    loop.close()
    with pytest.raises(Unavailable, match="it is closed"):
        loop.run(name_of_thread())
    assert "one" not in [thread.name for thread in threading.enumerate()]
