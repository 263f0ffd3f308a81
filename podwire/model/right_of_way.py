"""Requests before work that nobody waits for: long decoding stops while an ADD is carried out.

Made by `agent.node`. Python lets one thread run at a time. A thread that computes gives the interpreter up only after
the switch interval, and an ADD needs it back after each of its hundred calls of the kernel. Invariants: while no
request runs, giving way costs next to nothing. Work that gives way goes on however many requests there are.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Final, Self, TypeVar

WAIT_S: Final = 0.02
"""How long work waits for requests that follow each other without a pause."""
SHARE_S: Final = 0.002
"""How long it then goes on beside them."""

_T = TypeVar("_T")


class RightOfWay:
    """Lets one request at a time stop the work of other threads: it is carried out inside the block."""

    def __init__(self) -> None:
        self._is_free = threading.Event()
        self._is_free.set()
        self._share_ends_s = 0.0

    def __enter__(self) -> Self:
        self._is_free.clear()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._is_free.set()

    def give_way(self) -> None:
        """Wait for the request that is being carried out, not for long. The caller holds no lock that one may need."""
        if self._is_free.is_set() or time.monotonic() < self._share_ends_s:
            return
        if not self._is_free.wait(WAIT_S):
            self._share_ends_s = time.monotonic() + SHARE_S

    def pace(self, items: Iterable[_T]) -> Iterator[_T]:
        """Give the items one by one, giving way before each."""
        for item in items:
            self.give_way()
            yield item
