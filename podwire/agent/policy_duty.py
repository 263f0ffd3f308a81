"""Follow the store's policies, and bring every change of policies and identities into force at once.

`agent.main` loads it before endpoints are restored, then starts its two threads: one waits for the store, one takes the
node's turn and works. So neither a slow store nor a long wait for the turn delays the other, and a burst of changes
becomes one. Invariant: nothing is missed: after a gap everything is listed again, and before the first list has
succeeded no endpoint is built.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from podwire.control.endpoint.enforce import Enforcer
from podwire.control.endpoint.policies import POLICY_KINDS, PolicyObjects
from podwire.control.identity.known import IdentityChange
from podwire.model.errors import PodwireError, Unavailable
from podwire.model.store import Compacted, Store, StoredObject, StoreEvent, Watch

WATCH_S: Final = 2.0
AWAY_S: Final = 1.0
QUIET_S: Final = 0.05
"""Without changes for so long, slots that nobody names any more are deleted: that waits for the kernel."""
COLLECT_AT_LATEST_S: Final = 1.0
RETRY_S: Final = 2.0
"""How often what could not be brought into force is tried again."""

_log = logging.getLogger(__name__)

Lists = Sequence[tuple[str, Sequence[StoredObject]]]


@dataclass(frozen=True)
class _News:
    """What the listening thread hands over: whole lists, or changes; and the store's revision after them."""

    lists: Lists = ()
    events: Sequence[StoreEvent] = ()
    revision: int = 0


@dataclass
class PolicyDuty:
    """Policies of one node over time."""

    store: Store
    objects: PolicyObjects
    enforcer: Enforcer
    turn: threading.RLock
    observe: Callable[[str, str, float], None]
    """Told how long what took: operation, phase, milliseconds."""
    report: Callable[[str], None]
    """Told what is wrong with the store; "" when nothing is."""
    _watch: Watch | None = None
    _told_revision: int = 0
    _news: list[_News] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stopping: bool = False
    _threads: list[threading.Thread] = field(default_factory=list)
    _is_held: bool = False
    """The engine could not begin with what it was given: a full disk, say."""
    _uncollected_since_s: float = 0.0

    def load(self) -> None:
        """List all policies and take them in; raises what the store says. Before endpoints are restored."""
        self._take_in(self._list())

    def hear(self, change: IdentityChange) -> None:
        """Hear of identities, on any thread."""
        self.enforcer.hear(change)
        with self._changed:
            self._changed.notify()

    def start(self) -> None:
        """Start the threads."""
        for name, run in (("policy-watch", self._listen), ("policy", self._work)):
            thread = threading.Thread(target=run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End the threads; what is in force stays."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        watch = self._watch
        if watch is not None:
            watch.close()
        for thread in self._threads:
            thread.join()

    def _list(self) -> _News:
        lists = [(kind, *self.store.list(kind)) for kind in POLICY_KINDS]
        revision = min(revision for _, _, revision in lists)
        if self._watch is not None:
            self._watch.close()
        self._watch = self.store.watch(revision, POLICY_KINDS)
        return _News(lists=[(kind, objects) for kind, objects, _ in lists], revision=revision)

    def _listen(self) -> None:
        while not self._stopping:
            try:
                news = self._next()
            except Unavailable as error:
                self.report(error.message)
                time.sleep(AWAY_S)
                continue
            except PodwireError as error:
                _log.error("policies cannot be read", extra={"error": error.message})
                self.report(error.message)
                self._watch = None
                time.sleep(AWAY_S)
                continue
            self.report("")
            if news is not None:
                with self._changed:
                    self._news.append(news)
                    self._changed.notify()

    def _next(self) -> _News | None:
        if self._watch is None:
            return self._list()
        try:
            events = self._watch.next(WATCH_S)
        except Compacted:
            return self._list()
        # Other kinds move the store's revision too: whoever waits for one of theirs must not wait for ever.
        revision = self._watch.revision
        if not events and revision <= self._told_revision:
            return None
        self._told_revision = revision
        return _News(events=events, revision=revision)

    def _work(self) -> None:
        while True:
            news = self._wait()
            if self._stopping:
                return
            try:
                self._do(news)
            except PodwireError as error:
                # What was taken in waits in the engine.
                self._is_held = True
                _log.error("bring policies into force", extra={"error": error.message})
            except Exception:  # the thread's door: a bug in one policy must not end the duty
                _log.exception("bring policies into force")

    def _wait(self) -> list[_News]:
        with self._changed:
            timeout_s = QUIET_S if self._uncollected_since_s else RETRY_S
            if not (self._news or self._stopping or self.enforcer.has_heard):
                self._changed.wait(timeout_s)
            news, self._news = self._news, []
            return news

    def _do(self, news: Sequence[_News]) -> None:
        """Bring news into force. An endpoint that cannot follow is tried again by the queue of builds, not here."""
        if news or self._is_held or self.enforcer.has_heard:
            self._apply(news)
        waited_s = time.monotonic() - self._uncollected_since_s
        if self._uncollected_since_s and (not news or waited_s > COLLECT_AT_LATEST_S):
            self._uncollected_since_s = 0.0
            with self.turn:
                self.enforcer.collect()

    def _apply(self, news: Sequence[_News]) -> None:
        begin_s = time.monotonic()
        with self.turn:
            for one in news:
                self._take_in(one)
            taken_s = time.monotonic()
            self.enforcer.apply("policy changed")
        self._is_held = False
        self.observe("policy", "take-in", (taken_s - begin_s) * 1e3)
        self.observe("policy", "apply", (time.monotonic() - taken_s) * 1e3)
        if not self._uncollected_since_s:
            self._uncollected_since_s = time.monotonic()

    def _take_in(self, news: _News) -> None:
        for kind, objects in news.lists:
            self.objects.replace(kind, objects)
        for event in news.events:
            self.objects.apply(event)
        self.enforcer.revision = max(self.enforcer.revision, news.revision)
