"""A thread with an event loop, for the connections of a back end that is on the network.

Each such back end makes one (`store.etcd.cluster`), under a name of its own. Callers of the store are synchronous and
wait here. Must never run anything that waits for the caller's thread. Invariant: after `close` nothing runs on it any
more, and every waiting caller has been told that the store is closed.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from podwire.model.errors import Unavailable

_T = TypeVar("_T")


class LoopThread:
    """Runs coroutines for other threads."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._closed = False
        self._ends_calls = False
        self._waited_for: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, _T]) -> "Future[_T]":
        """Begin a coroutine; Unavailable when the loop is closed."""
        with self._lock:
            return self._start(work, self._closed)

    def run(self, work: Coroutine[Any, Any, _T], *, is_last: bool = False) -> _T:
        """Wait for a coroutine; Unavailable when the loop is closed, also while it waits. `is_last`: even after
        `end_calls`."""
        with self._lock:
            future = self._start(work, self._closed or (self._ends_calls and not is_last))
            self._waited_for.add(future)
        try:
            return future.result()
        except CancelledError:
            raise Unavailable("use store: it was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise
        finally:
            with self._lock:
                self._waited_for.discard(future)

    def end_calls(self) -> None:
        """Have callers wait no longer, as when the store is closed, and let no more wait; what was started goes on."""
        with self._lock:
            self._ends_calls = True
            waited_for = tuple(self._waited_for)
        for future in waited_for:
            future.cancel()

    def close(self) -> None:
        """End what runs and the thread; the second time do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        # `stop` is not thread-safe by itself: a loop that sleeps in its selector would not notice it.
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _start(self, work: Coroutine[Any, Any, _T], is_refused: bool) -> "Future[_T]":
        if is_refused:
            # A coroutine that is never started warns when it is collected, and tests turn warnings into errors.
            work.close()
            raise Unavailable("use store: it is closed")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            # Callers wait for futures of these tasks. A task that is dropped instead of cancelled would leave them
            # waiting for ever.
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()
