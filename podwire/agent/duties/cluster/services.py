"""Follow the store's services, and have the programs translate what pods send to them.

Made and started by `agent.node` and `agent.main`. The follower's thread takes objects in; the thread here takes the
node's turn and writes rows, so that neither a slow store nor a long wait for the turn delays the other, and a burst
becomes one change. Until both kinds were listed, what an earlier agent wrote stays in force. Invariant: nothing is
missed; a change that could not be written is written with the next try.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from podwire.agent.duties.follower import KindList, StoreFollower
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.duties.worker import FOREVER_S, Worker
from podwire.control.services.catalogue import KINDS, Catalogue, ServiceView
from podwire.model.errors import PodwireError
from podwire.model.interfaces import ServiceDatapath
from podwire.model.store import Revisions, Store, StoreEvent

RETRY_S: Final = 5.0


@dataclass
class ServiceDuty:
    """Services of one node over time."""

    store: Store
    catalogue: Catalogue
    datapath: ServiceDatapath
    turn: threading.RLock
    report: Callable[[str], None]
    """Told what is wrong; "" when nothing is."""
    observe: Callable[[str, str, float], None]
    """Told how long what took: operation, phase, milliseconds."""
    shared: SharedWatch | None = None
    _reading: threading.Lock = field(default_factory=threading.Lock)
    """Held while the catalogue is read or changed."""
    _listed: set[str] = field(default_factory=set)
    _is_owed: bool = True
    """The whole table has to be written: nothing was so far, or the last change failed."""

    def __post_init__(self) -> None:
        self.follower = StoreFollower("services", self.store, KINDS, self, shared=self.shared)
        self._worker = Worker("services", self._round, self._failed)

    def start(self) -> None:
        """Start the threads."""
        self._worker.start()
        self.follower.start()

    def stop(self) -> None:
        """End the threads; what is in force stays."""
        self.follower.stop()
        self._worker.stop()

    def views(self) -> list[ServiceView]:
        """Show what is known, from any thread."""
        with self._reading:
            return list(self.catalogue.views())

    def on_lists(self, lists: Sequence[KindList]) -> None:
        """Take whole lists, on the follower's thread."""
        with self._reading:
            for one in lists:
                self.catalogue.replace(one.kind, one.objects)
                self._listed.add(one.kind)
        self._worker.wake()

    def on_events(self, events: Sequence[StoreEvent], _revisions: Revisions) -> None:
        """Take changes, on the follower's thread."""
        if not events:
            return
        with self._reading:
            for event in events:
                self.catalogue.apply(event)
        self._worker.wake()

    def on_away(self, error: PodwireError) -> None:
        """Let `podwire status` tell."""
        self.report(error.told)

    def on_back(self) -> None:
        """Let `podwire status` tell."""
        self.report("")

    def _round(self) -> float:
        if not self._listed.issuperset(KINDS):
            return FOREVER_S
        begin_s = time.monotonic()
        with self.turn:
            with self._reading:
                change = self.catalogue.take_change()
                table = self.catalogue.table() if self._is_owed else None
            # Until it is done, what is in force is no known state.
            was_owed, self._is_owed = self._is_owed, True
            if table is not None:
                self.datapath.write(table)
            elif change.put or change.gone:
                self.datapath.change(change.put, change.gone)
            self._is_owed = False
        if was_owed:
            self.report("")
        self.observe("services", "apply", (time.monotonic() - begin_s) * 1e3)
        return FOREVER_S

    def _failed(self, error: PodwireError) -> float:
        self.report(error.told)
        return RETRY_S
