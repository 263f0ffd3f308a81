"""Ask for the newest policies and namespaces when own pods are seen, on a thread of its own: no ADD asks.

Made by `agent.duties.identity` where there are Pod objects; `control.kubernetes.freshness` decides what pods wait for.
Invariants: one question for all pods of a moment, and none while no new pod is seen. One that fails holds up nobody.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from podwire.agent.duties.worker import FOREVER_S, Worker, WorkingDuty
from podwire.control.kubernetes.freshness import Freshness
from podwire.model.errors import PodwireError
from podwire.model.store import Revisions, Store

MOMENT_S: Final = 0.2
"""Shortest time between two questions: pods that are bound together are seen one after the other."""

ReadNewest = Callable[[Sequence[str]], Revisions]
"""Gives, for each kind, the highest revision that any object has now. Raises what the store does."""

_log = logging.getLogger(__name__)


class FreshnessDuty(WorkingDuty):
    """Asks for one node's pods."""

    def __init__(self, freshness: Freshness, read_newest: ReadNewest) -> None:
        self._freshness = freshness
        self._read_newest = read_newest
        self._worker = Worker("freshness", self._work)
        freshness.is_asking, freshness.seen = True, self._worker.wake

    def stop(self) -> None:
        """End it; pods wait for nothing more."""
        self._freshness.is_asking = False
        super().stop()

    def _work(self) -> float:
        asked = self._freshness.begin()
        if asked is None:
            return FOREVER_S
        self._ask(*asked)
        return 0.0

    def _ask(self, number: int, kinds: Sequence[str]) -> None:
        begin_s = time.monotonic()
        newest: Revisions = {}
        try:
            newest = self._read_newest(kinds)
        except PodwireError as error:
            # Without the API what was heard last is in force, and waiting would bring nothing.
            _log.warning("ask how new policies are", extra={"error": error.message})
        finally:
            self._freshness.answer(number, newest)
        self._worker.pause(max(0.0, MOMENT_S - (time.monotonic() - begin_s)))


def open_freshness(store: Store, freshness: Freshness | None) -> FreshnessDuty | None:
    """Make the duty where there are Pod objects and a store that tells how new its objects are."""
    read_newest: ReadNewest | None = getattr(store, "read_newest", None)
    if freshness is None or read_newest is None:
        return None
    return FreshnessDuty(freshness, read_newest)
