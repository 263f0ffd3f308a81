"""Follow the store's policies, and bring every change of policies and identities into force at once.

`agent.node` loads it before endpoints are restored; `agent.main` starts it. The follower's thread waits for the store;
the thread here takes the node's turn and works. So neither a slow store nor a long wait for the turn delays the other,
and a burst of changes becomes one change. Invariant: nothing is missed, and an object that cannot be used does not
keep out any other.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from podwire.agent.closed_policies import ClosedPolicies
from podwire.agent.duties.follower import FollowingDuty, KindList, StoreFollower
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.duties.worker import Worker
from podwire.control.endpoint.enforce import Enforcer
from podwire.control.endpoint.policies import POLICY_KINDS, PolicyObjects
from podwire.control.endpoint.states import State
from podwire.control.identity.known import IdentityChange
from podwire.model.errors import PodwireError
from podwire.model.store import Revisions, Store, StoreEvent
from podwire.model.store.events import Events, NoEvents

QUIET_S: Final = 0.05
"""Without changes for so long, slots that nobody names any more are deleted: that waits for the kernel."""
COLLECT_AT_LATEST_S: Final = 1.0
RETRY_S: Final = 2.0
"""How often what could not be brought into force is tried again."""

LIST_AGAIN_S: Final = 30.0
"""After a bug about an object: so long it waits for a fresh list, which may find that all is well."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _News:
    """What the follower's thread hands over: whole lists, or changes; and the revisions of the kinds after them."""

    lists: Sequence[KindList] = ()
    events: Sequence[StoreEvent] = ()
    revisions: Revisions = field(default_factory=dict)


@dataclass
class PolicyDuty(FollowingDuty):
    """Policies of one node over time."""

    store: Store
    objects: PolicyObjects
    enforcer: Enforcer
    turn: threading.RLock
    observe: Callable[[str, str, float], None]
    """Told how long what took: operation, phase, milliseconds."""
    report: Callable[[str], None]
    """Told what is wrong with the store; "" when nothing is."""
    shared: SharedWatch | None = None
    """The agent's watch of the store, where there is one for all duties."""
    warn: Callable[[str, str], None] = lambda _key, _message: None
    """Shows a message under a key until an empty one takes it back."""
    events: Events = field(default_factory=NoEvents)
    _listed: set[str] = field(default_factory=set)
    _was_complete: bool = False
    _told_revisions: Revisions = field(default_factory=dict)
    _news: list[_News] = field(default_factory=list)
    _news_lock: threading.Lock = field(default_factory=threading.Lock)
    _is_held: bool = False
    """The engine could not begin with what it was given: a full disk, say."""
    _uncollected_since_s: float = 0.0
    _bugs_seen: int = 0
    _list_again_s: float = 0.0

    def __post_init__(self) -> None:
        self._closed = ClosedPolicies(self.objects, self.enforcer, self.warn, self.events)
        self._worker = Worker("policy", self._work, self._hold, wake_ends_pause=True)
        self.follower = StoreFollower(
            "policy-watch",
            self.store,
            POLICY_KINDS,
            self,
            shared=self.shared,
            tell_unreadable=True,
        )

    def load(self) -> None:
        """Take in all policies; raises what the store says unless it is away. Before endpoints are restored."""
        self.follower.load()
        for news in self._take_news():
            self._take_in(news)
        self._was_complete = self.enforcer.is_complete()

    @property
    def is_loaded(self) -> bool:
        """Whether all kinds of policy were taken in, as the store has them or as it said last in an earlier life."""
        return self._listed.issuperset(POLICY_KINDS)

    def hear(self, change: IdentityChange) -> None:
        """Hear of identities, on any thread."""
        # Queued: the thread that tells it follows the store, and must not wait for the turn (docs/threads.md).
        self.enforcer.queue_identity_change(change)
        self._worker.wake()

    def on_lists(self, lists: Sequence[KindList]) -> None:
        """Take whole lists, on the follower's thread."""
        # Lists carry no revision: the call of `on_events` that follows has them, and remembered objects have none.
        self._hand_over(_News(lists=lists))

    def on_events(self, events: Sequence[StoreEvent], revisions: Revisions) -> None:
        """Take changes, on the follower's thread."""
        # Revisions also grow without a change of policy: a client that waits for one of them must not wait for ever.
        if events or revisions != self._told_revisions:
            self._told_revisions = revisions
            self._hand_over(_News(events=events, revisions=revisions))

    def on_away(self, error: PodwireError) -> None:
        self.report(error.told)

    def on_back(self) -> None:
        self.report("")

    def _hand_over(self, news: _News) -> None:
        with self._news_lock:
            self._news.append(news)
        self._worker.wake()

    def _work(self) -> float:
        self._do(self._take_news())
        self._list_again_after_bugs()
        # Collecting waits for the kernel (a membarrier, about 8 ms), so it comes when the burst is over.
        return QUIET_S if self._uncollected_since_s else RETRY_S

    def _hold(self, _error: PodwireError) -> float:
        """Try again what was taken in, which waits in the engine: soon, or with news, which may be what helps."""
        self._is_held = True
        return RETRY_S

    def _take_news(self) -> list[_News]:
        with self._news_lock:
            news, self._news = self._news, []
            return news

    def _do(self, news: Sequence[_News]) -> None:
        """Bring news into force. An endpoint that cannot follow is tried again by the regenerator, not here."""
        is_released = not self._was_complete and self.enforcer.is_complete()
        is_change = any(piece.lists or piece.events for piece in news)
        if is_change or self._is_held or self.enforcer.has_heard or is_released:
            self._apply(news)
        # No policy has changed, but somebody may wait for these revisions (`podwire policy wait`).
        elif news:
            with self.turn:
                for piece in news:
                    self.enforcer.mark_revisions(piece.revisions)
        if self.objects.closed:
            with self.turn:
                self._closed.tell()
        waited_s = time.monotonic() - self._uncollected_since_s
        # Slots and rules end with endpoints too, of which nobody tells this duty: each quiet wake looks.
        if not is_change or waited_s > COLLECT_AT_LATEST_S:
            self._uncollected_since_s = 0.0
            with self.turn:
                self.enforcer.collect_waste()

    def _apply(self, news: Sequence[_News]) -> None:
        begin_s = time.monotonic()
        with self.turn:
            for piece in news:
                self._take_in(piece)
            taken_s = time.monotonic()
            self._release()
            self.enforcer.apply("policy changed")
        self._is_held = False
        self.observe("policy", "take-in", (taken_s - begin_s) * 1e3)
        self.observe("policy", "apply", (time.monotonic() - taken_s) * 1e3)
        if not self._uncollected_since_s:
            self._uncollected_since_s = time.monotonic()

    def _release(self) -> None:
        """Regenerate what had to wait for the first word of the store."""
        if self._was_complete or not self.enforcer.is_complete():
            return
        self._was_complete = True
        for endpoint in self.enforcer.table:
            # It could not be regenerated while not all policies were known, because one of them may deny.
            if endpoint.state is State.NOT_READY:
                self.enforcer.retry(endpoint, "the store was heard")

    def _take_in(self, news: _News) -> None:
        for kind_list in news.lists:
            self.objects.replace(kind_list.kind, kind_list.objects)
            self._listed.add(kind_list.kind)
        for event in news.events:
            self.objects.apply(event)
        self.enforcer.take_in_up_to(news.revisions)
        self._closed.show(self.follower.unreadable.faults)

    def _list_again_after_bugs(self) -> None:
        now_s = time.monotonic()
        if self.objects.bugs > self._bugs_seen:
            self._bugs_seen, self._list_again_s = self.objects.bugs, now_s + LIST_AGAIN_S
        elif self._list_again_s and now_s >= self._list_again_s:
            self._list_again_s = 0.0
            self.follower.list_again()
