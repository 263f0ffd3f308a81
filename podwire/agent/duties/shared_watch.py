"""The agent's one watch of the store: every kind is listed and watched once, whatever number of duties follow it.

Made by `agent.node`; each duty joins it with a `StoreFollower`. One thread lists, watches, sifts what cannot be read
and keeps what was heard, then tells every follower. Invariants: a follower hears every change of its kinds once and in
order. When a listener fails, its kinds are listed again and nobody else waits for that. Nothing is told to a follower
that has left.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from podwire.agent.duties.keeper import SAVE_S, InProcess, Keeper, KindList, Memory
from podwire.agent.duties.unreadable import AS_STORED, Reading, Unreadable
from podwire.agent.duties.worker import Worker
from podwire.model.errors import PodwireError, Unavailable
from podwire.model.right_of_way import RightOfWay
from podwire.model.store import (
    Compacted,
    KindUnavailable,
    Known,
    Revisions,
    Store,
    StoredObject,
    StoreEvent,
    Watch,
)

if TYPE_CHECKING:
    from podwire.agent.duties.follower import StoreFollower

WATCH_S: Final = 2.0
"""How long one call of a quiet watch lasts."""
AWAY_BASE_S: Final = 0.5
AWAY_CAP_S: Final = 2.0

Change = tuple[StoreEvent, StoreEvent | None]
"""A change as the store told it, and the same decoded; None where it cannot be read."""

_log = logging.getLogger(__name__)


class SharedWatch:
    """Lists and watches what its followers follow."""

    def __init__(
        self,
        store: Store,
        memory: Memory | None = None,
        *,
        name: str = "store-watch",
        reading: Reading = AS_STORED,
        way: RightOfWay | None = None,
    ) -> None:
        self._name = name
        self._store = store
        self._way = way or RightOfWay()
        self._keeper = Keeper(memory or InProcess())
        self.unreadable = Unreadable(name, self._keeper.find, reading)
        self._followers: tuple[StoreFollower, ...] = ()
        self._telling = threading.RLock()
        """Held while followers are told, so that one that leaves hears nothing afterwards."""
        self._lists: dict[str, KindList] = {}
        """Of kinds that did not change since they were listed: a follower that joins at the start needs no other."""
        self._revisions: dict[str, int] = {}
        self._gaps: set[str] = set()
        """Kinds of which changes were missed: followers have all that came before."""
        self._watch: Watch | None = None
        self._former: Watch | None = None
        """Ends when the next one is open: what both follow, a store over the network need not ask for anew."""
        self._failures = 0
        self._worker = Worker(name, self._work, self._fail, interrupt=self._drop_watch)

    @property
    def revisions(self) -> Revisions:
        """Up to which revision of each kind everything was handed over."""
        return self._revisions

    def join(self, follower: "StoreFollower") -> None:
        """Add a follower; it gets lists at the next `load` or `step`."""
        with self._telling:
            if follower not in self._followers:
                self._followers = (*self._followers, follower)

    def leave(self, follower: "StoreFollower") -> None:
        """Tell somebody nothing any more. With the last one the thread ends, at once but for a call of the store that
        runs, and what was heard is kept."""
        with self._telling:
            self._followers = tuple(other for other in self._followers if other is not follower)
        if self._followers:
            return
        self._worker.stop()
        self._drop_watch()  # the thread may have opened it meanwhile
        self._keeper.save(at_once=True)

    def start(self) -> None:
        """Start the thread, unless it runs already."""
        if self._worker.is_started:
            return
        self._keeper.save(at_once=True)
        self._lists.clear()  # whoever joins from here on lists anew: most lists are large and of one follower
        self._worker.start()

    def recall(self, objects: Iterable[StoredObject]) -> None:
        """Say what was last read of objects in an earlier life, where no memory tells."""
        self._keeper.seed(objects)

    def load_remembered(self, kinds: Sequence[str], *, whole: bool) -> list[KindList]:
        """Give what was kept of some kinds. Of `whole` kinds all or nothing."""
        kept = self._keeper.load(kinds, whole=whole)
        read = [
            KindList(
                kind_list.kind,
                self.unreadable.sift_remembered(kind_list.objects),
                kind_list.revision,
            )
            for kind_list in kept
        ]
        self.unreadable.show()
        return read

    def load(self) -> None:
        """List for the followers that lack lists, else take changes. Raises what store and listeners raise."""
        self.step(0)

    def step(self, timeout_s: float) -> bool:
        """List if need be, else wait for changes; tells whether anything came. Raises what store or listeners raise."""
        with _as_raised():
            return self._step(timeout_s)

    def _step(self, timeout_s: float) -> bool:
        due = [follower for follower in self._followers if follower.is_due(time.monotonic())]
        if due:
            self._list(due)
            return True
        if self._gaps:
            self._close_gaps()
            return True
        if not self._revisions:
            self._worker.pause(timeout_s)
            return False
        watch = self._watch
        if watch is None:
            # From the revisions of the lists on, so that nothing between list and watch is missed.
            watch = self._watch = self._store.watch(self._revisions)
            self._drop_former()
        # `leave` may have dropped the watch just before this one was opened: nothing would end its `next`.
        if self._worker.is_stopping:
            self._drop_watch()
            return False
        try:
            events = watch.next(timeout_s)
        except Compacted as gap:
            self._forget(watch, gap.kinds or self._revisions.keys())
            return True
        self._hand_over(events, watch)
        return bool(events)

    def _work(self) -> float:
        try:
            self._step(self._choose_timeout_s())
        except _ListenerFailed:
            return 0.0  # it was told, and is told anew when its time has come
        finally:
            self._keeper.save()  # also what was heard just before the store went away
        self._failures = 0
        return 0.0

    def _fail(self, error: PodwireError) -> float:
        if not isinstance(error, Unavailable):
            self._give_up()
        self._note_away(error)
        self._failures += 1
        return choose_delay_s(self._failures - 1)

    def _choose_timeout_s(self) -> float:
        now_s = time.monotonic()
        due_s = [
            follower.again_s - now_s for follower in self._followers if follower.again_s is not None
        ]
        # A quiet watch would otherwise keep news from the disk for as long as one call lasts.
        longest_s = SAVE_S if self._keeper.has_news else WATCH_S
        return max(0.0, min([longest_s, *due_s]))

    # Lists

    def _list(self, due: "Sequence[StoreFollower]") -> None:
        """List the kinds that some followers lack, and hand the lists to every follower of those kinds."""
        wanted = dict.fromkeys(kind for follower in due for kind in follower.kinds)
        fresh: dict[str, KindList] = {}
        refused: dict[str, KindUnavailable] = {}
        for kind in wanted:
            if self._can_reuse(kind, due):
                continue
            try:
                fresh[kind] = self._list_kind(kind)
            except KindUnavailable as error:
                refused[kind] = error
        self._gaps -= wanted.keys()
        self.unreadable.show()
        if fresh:
            self._continue_from({kind: kind_list.revision for kind, kind_list in fresh.items()})
            self._lists.update(fresh)
            self._keeper.note_lists(list(fresh.values()))
            if self.unreadable.objects:
                self._keep_what_stands_in()
        lists = {kind: self._lists[kind] for kind in wanted if kind in self._lists}
        failures = _Failures()
        for follower in self._followers:
            reasons = [refused[kind] for kind in follower.kinds if kind in refused]
            if reasons and follower in due:
                follower.lack(reasons[0])
            else:
                told = lists if follower in due else fresh
                failures.guard(follower, partial(self._tell_lists, follower, told))
        if self._worker.is_started:
            self._lists.clear()
        failures.raise_first()

    def _can_reuse(self, kind: str, due: "Sequence[StoreFollower]") -> bool:
        """Tell whether what was listed for others still is the newest that was heard, without doubts about it."""
        has_others = any(
            kind in follower.kinds for follower in self._followers if follower not in due
        )
        return has_others and kind in self._lists

    def _tell_lists(self, follower: "StoreFollower", lists: Mapping[str, KindList]) -> None:
        with self._telling:
            if follower in self._followers:
                follower.take_lists(lists, self.unreadable.objects)

    def _list_kind(self, kind: str) -> KindList:
        objects, revision = self._store.list(kind)
        sifted = self.unreadable.sift_list(kind, self._way.pace(objects))
        return KindList(kind, sifted, revision)

    def _continue_from(self, listed: Revisions) -> None:
        """Watch from these lists on, and all other kinds from where they were."""
        self._retire_watch()
        self._revisions = {**self._revisions, **listed}

    # Gaps

    def _close_gaps(self) -> None:
        """List the kinds of which changes were missed, and tell what has become different meanwhile as changes.

        Nearly all of a large cluster is as it was: what did not change costs nobody anything.
        """
        for kind in tuple(self._gaps):
            known = self._keeper.index(kind)
            listed = None if known is None else self._list_what_differs(kind, known)
            self._gaps.discard(kind)
            if listed is None:
                for follower in self._followers:
                    if kind in follower.kinds:
                        follower.lack()
                continue
            events, revision = listed
            self._continue_from({kind: revision})
            self._tell(events, {})

    def _list_what_differs(self, kind: str, known: Known) -> tuple[list[StoreEvent], int] | None:
        """Give what is not as `known` any more, and the revision of the kind; None where that says nothing."""
        try:
            objects, revision = self._store.list(kind, known=known)
        except KindUnavailable:
            return None  # the followers ask again, and tell whom it concerns
        # A store that was put back to an older state counts its revisions again from there: the same one may be of
        # something else now.
        if revision < self._revisions.get(kind, 0):
            return None
        gone = {*known, *(key for key in self.unreadable.faults if key.kind == kind)}
        changed: list[StoreEvent] = []
        for stored in self._way.pace(objects):
            gone.discard(stored.key)
            if known.get(stored.key) != (stored.uid, stored.revision):
                changed.append(StoreEvent(stored, stored.revision))
        for key in sorted(gone):
            last = self._keeper.find(key) or StoredObject(key=key)
            changed.append(StoreEvent(last, revision, deleted=True))
        return changed, revision

    # Changes

    def _hand_over(self, events: Sequence[StoreEvent], watch: Watch) -> None:
        self._revisions = {**self._revisions, **watch.revisions}
        self._tell(events, watch.failing)

    def _tell(self, events: Sequence[StoreEvent], failing: Mapping[str, str]) -> None:
        # A list that was kept for followers to come is not the newest any more.
        for kind in {event.object.key.kind for event in events}:
            self._lists.pop(kind, None)
        # Read once for all followers, whatever number of them has the kind.
        changes = [(event, self._read(event)) for event in events]
        if events:
            self.unreadable.show()
        failures = _Failures()
        for follower in self._followers:
            failures.guard(follower, partial(self._tell_changes, follower, changes, failing))
        if any(event.object.key in self.unreadable for event in events):
            self._keep_what_stands_in()
        failures.raise_first()

    def _read(self, event: StoreEvent) -> StoreEvent | None:
        """Decode a change, and keep what it says. What cannot be read must not take the place of what was last read."""
        readable = self.unreadable.sift_event(event)
        if readable is not None:
            # At once: the next change of the same answer may be of the same object, and not be readable.
            self._keeper.note_events([readable])
        return readable

    def _tell_changes(
        self, follower: "StoreFollower", changes: Sequence[Change], failing: Mapping[str, str]
    ) -> None:
        with self._telling:
            if follower in self._followers:
                follower.take_changes(changes, failing)

    def _keep_what_stands_in(self) -> None:
        """What was last read of an object is nowhere else now: an agent that is killed has to find it again."""
        self._keeper.save(at_once=True)

    # Failures

    def _forget(self, watch: Watch, kinds: Iterable[str]) -> None:
        """Have kinds listed again whose changes are not known any more."""
        self._revisions = {**self._revisions, **watch.revisions}
        self._retire_watch()
        self._gaps.update(kinds)
        for kind in self._gaps:
            self._lists.pop(kind, None)

    def _give_up(self) -> None:
        """What was handed over is in doubt: list everything again."""
        self._drop_watch()
        self._lists.clear()
        for follower in self._followers:
            follower.lack()

    def _note_away(self, error: PodwireError) -> None:
        with self._telling:
            for follower in self._followers:
                follower.note_away(error)

    def _retire_watch(self) -> None:
        """Have the next step open a watch in the place of this one."""
        watch, self._watch = self._watch, None
        if watch is not None:
            self._drop_former()
            self._former = watch

    def _drop_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        self._drop_former()

    def _drop_former(self) -> None:
        former, self._former = self._former, None
        if former is not None:
            former.close()


def choose_delay_s(failures: int) -> float:
    """Say how long to wait after one more failure: apart from other nodes, as an outage ends for all at once."""
    return min(AWAY_CAP_S, AWAY_BASE_S * 2.0 ** min(failures, 16)) * random.uniform(0.5, 1.0)


class _ListenerFailed(Exception):
    """A listener has failed; it is told everything again."""


@contextmanager
def _as_raised() -> Iterator[None]:
    """Raise what the listener did."""
    try:
        yield
    except _ListenerFailed as failed:
        raise failed.__cause__ or failed from None


class _Failures:
    """What listeners have raised in one round: the others are told all the same."""

    def __init__(self) -> None:
        self._first: Exception | None = None

    def guard(self, follower: "StoreFollower", tell: Callable[[], None]) -> None:
        """Tell one follower; if it fails, lists come again."""
        try:
            tell()
        except PodwireError as error:
            _log.error("follow store", extra={"task": follower.name, "error": error.message})
            self._first = self._first or error
            follower.lack(error)
        except (
            Exception
        ) as error:  # a listener's door: a bug about one object must not end the watch
            _log.exception("follow store", extra={"task": follower.name})
            self._first = self._first or error
            follower.lack(PodwireError(f"follow store for {follower.name}: {error!r}"))

    def raise_first(self) -> None:
        """Let the caller know, after everybody was told."""
        if self._first is not None:
            raise _ListenerFailed from self._first
