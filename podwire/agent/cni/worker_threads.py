"""The threads that carry requests out, and the way of a result back to the loop.

Used by `agent.cni.dispatch`, on the loop. Knows nothing of requests. Invariants: `ended` is called exactly once, on
the loop, when no thread uses the work any more, whatever the outcome. Work raises only PodwireError to the caller.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Generic, TypeVar

from podwire.model.errors import Bug, PodwireError, Unavailable

_log = logging.getLogger(__name__)

T = TypeVar("T")


def guarded(work: Callable[[], T]) -> T:
    """Do `work`, and let nothing but PodwireError out: anything else is a mistake of ours."""
    try:
        return work()
    except PodwireError:
        raise
    except Exception as error:
        _log.exception("a request met a bug")
        raise Bug(
            f"carry out the request: {type(error).__name__}: {error}",
            hint="please report it, with the agent's log",
        ) from error


class WorkerThreads(Generic[T]):
    """Two kinds of threads: those whose work is short, and patient ones, whose work may wait for the store."""

    def __init__(self, threads: int, patient_threads: int) -> None:
        self._threads: Final = ThreadPoolExecutor(threads, thread_name_prefix="attach")
        # ADDs that ask the store hold their threads while it is away. All others must not wait behind them.
        self._patient_threads: Final = ThreadPoolExecutor(
            patient_threads, thread_name_prefix="attach-new"
        )

    def start(
        self,
        work: Callable[[], T | None],
        otherwise: Callable[[], T | None] | None,
        ended: Callable[[], None],
    ) -> "asyncio.Future[T | None]":
        """Have a thread do `work`, and a patient one `otherwise` when that gave None. The future may be given up."""
        # By hand: what asyncio offers for it goes round the loop five times more, a tenth of an ADD.
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T | None] = loop.create_future()

        def end(result: T | None, error: PodwireError | None) -> None:
            # First, also where the future was given up: the next request of the line may begin, and the descriptor is
            # closed.
            ended()
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def run(what: Callable[[], T | None], then: Callable[[], T | None] | None = None) -> None:
            result, failure = None, None
            try:
                result = guarded(what)
                if result is None and then is not None:
                    # Handed from thread to thread, without a way over the loop.
                    self._patient_threads.submit(run, then)
                    return
            except PodwireError as error:
                failure = error
            except RuntimeError:  # no thread takes anything any more
                failure = _stopping()
            with contextlib.suppress(RuntimeError):  # the loop has ended before this thread
                loop.call_soon_threadsafe(end, result, failure)

        try:
            self._threads.submit(run, work, otherwise)
        except RuntimeError:
            loop.call_soon(end, None, _stopping())
        return future

    def shut_down(self) -> None:
        """Take nothing more, at the end of the process: what runs goes on, what waits is forgotten."""
        for threads in (self._threads, self._patient_threads):
            threads.shutdown(wait=False, cancel_futures=True)


def _stopping() -> Unavailable:
    return Unavailable(
        "carry out the request: the agent is stopping", hint="call again in a moment"
    )
