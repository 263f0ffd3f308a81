"""Follow which nodes are alive, on a thread of its own, and report those that are not.

Made by `agent.duties.cluster.duty`. A node is alive while its agent renews its lease. A node that is not alive keeps
its routes and rows in every kernel, because its pods run without their agent, which may only be restarting or cut off
from the store. Must never change a kernel. Invariant: while the store is away, no node is reported as dead.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final

from podwire.agent.duties.worker import FOREVER_S, Worker, WorkingDuty
from podwire.model.errors import PodwireError
from podwire.model.store import Store
from podwire.model.store.leases import NODE, LeaseWatch

WAIT_S: Final = 30.0
AWAY_S: Final = 2.0
"""Between two tries to hear from a store that is away."""
NAMED_MAX: Final = 5

_log = logging.getLogger(__name__)


class Lives(WorkingDuty):
    """The nodes that live. `changed` is called on the thread, with no lock held."""

    def __init__(self, store: Store, changed: Callable[[], None]) -> None:
        self._store = store
        self._changed = changed
        self._living: frozenset[str] | None = None
        self._lock = threading.Lock()
        self._watch: LeaseWatch | None = None
        self._worker = Worker(
            "cluster-lives", self._follow, self._fail, interrupt=self._close_watch
        )

    def find_dead(self, names: Iterable[str]) -> list[str]:
        """Give those of the names that do not live, sorted; none while that is not known."""
        living = self._living
        return [] if living is None else sorted(name for name in names if name not in living)

    def describe_dead(self, names: Iterable[str]) -> str:
        """Say which of the names do not live, "" when all do or nobody knows."""
        dead = self.find_dead(names)
        if not dead:
            return ""
        rest = f" and {len(dead) - NAMED_MAX} more" if len(dead) > NAMED_MAX else ""
        return (
            f"no agent is alive on node {', '.join(dead[:NAMED_MAX])}{rest}: its pods may be, so the ways there stay;"
            f" if it is gone for good: podwire delete node {dead[0]}"
        )

    def _close_watch(self) -> None:
        with self._lock:
            if self._watch is not None:
                self._watch.close()

    def _fail(self, _error: PodwireError) -> float:
        # Not known is not dead: while the store is away nobody is reported.
        self._take(None)
        return AWAY_S

    def _follow(self) -> float:
        leases = self._store.leases()
        if leases is None:  # which nodes live is unknown, and stays so
            return FOREVER_S
        with leases.watch(NODE) as watch:
            with self._lock:
                # The flag is read only after this: a stop either closes the watch or is seen below.
                self._watch = watch
            try:
                while not self._worker.is_stopping:
                    watch.next(WAIT_S)
                    # Before the first whole answer everybody would seem dead.
                    if watch.is_listed:
                        names = (holder.removeprefix(NODE) for holder in watch.holders)
                        self._take(frozenset(names))
            finally:
                with self._lock:
                    self._watch = None
        return 0.0

    def _take(self, living: frozenset[str] | None) -> None:
        before, self._living = self._living, living
        if before == living or self._worker.is_stopping:
            return
        if before is not None and living is not None:
            for name in sorted(before - living):
                _log.warning("the agent of a node is no longer alive", extra={"node": name})
        self._changed()
