"""Follow which nodes are alive, on a thread of its own, and report those that are not.

Made by `agent.duties.cluster.duty`. A node is alive while its agent renews its lease. A node that is not alive keeps
its routes and rows in every kernel, because its pods run without their agent, which may only be restarting or cut off
from the store. Must never change a kernel. Invariant: while the store is away, no node is reported as dead.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final

from podwire.model.errors import PodwireError
from podwire.model.store import Store
from podwire.model.store.leases import NODE, LeaseWatch

WAIT_S: Final = 30.0
AWAY_S: Final = 2.0
"""Between two tries to hear from a store that is away."""
NAMED_MAX: Final = 5

_log = logging.getLogger(__name__)


class Lives:
    """Who lives. `changed` is called on the thread, with no lock held."""

    def __init__(self, store: Store, changed: Callable[[], None]) -> None:
        self._store = store
        self._changed = changed
        self._living: frozenset[str] | None = None
        self._lock = threading.Lock()
        self._watch: LeaseWatch | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="cluster-lives", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        with self._lock:
            if self._watch is not None:
                self._watch.close()
        if self._thread is not None:
            self._thread.join()

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

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except PodwireError as error:
                _log.info("it is not known which nodes are alive", extra={"error": error.message})
                # Not known is not dead: while the store is away nobody is reported.
                self._take(None)
                self._stopping.wait(AWAY_S)
            except Exception:  # the thread's door
                _log.exception("follow who lives")
                self._take(None)
                self._stopping.wait(AWAY_S)

    def _follow(self) -> None:
        leases = self._store.leases()
        if leases is None:  # nobody knows who lives, and that does not change
            self._stopping.wait()
            return
        with leases.watch(NODE) as watch:
            with self._lock:
                # Under the lock, with the flag read after it: `stop` either closes this watch or is seen here.
                self._watch = watch
                if self._stopping.is_set():
                    return
            try:
                while not self._stopping.is_set():
                    watch.next(WAIT_S)
                    # Before the first whole answer everybody would seem dead.
                    if watch.is_listed:
                        names = (holder.removeprefix(NODE) for holder in watch.holders)
                        self._take(frozenset(names))
            finally:
                with self._lock:
                    self._watch = None

    def _take(self, living: frozenset[str] | None) -> None:
        before, self._living = self._living, living
        if before == living or self._stopping.is_set():
            return
        if before is not None and living is not None:
            for name in sorted(before - living):
                _log.warning("the agent of a node is no longer alive", extra={"node": name})
        self._changed()
