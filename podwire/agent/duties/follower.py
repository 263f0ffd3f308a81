"""Follow some kinds of the store: list them, watch from there, and list again after every gap.

Each duty that works by objects has one follower, with one thread and one watch for all of its kinds. The follower
decides nothing about objects: it passes lists and changes to a `Listener`, in order, on one thread. Invariant: nothing
is missed. After a gap, and after a listener that failed, everything is listed again, and no change that a list already
contains comes after it. An object that cannot be read counts as its last readable version (`agent.duties.unreadable`).
What the store said last can be kept in a `Memory`, for a start without the store.
"""

import logging
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from podwire.agent.duties.unreadable import Unreadable
from podwire.model.errors import PodwireError, StorageFailure, Unavailable
from podwire.model.store import (
    Compacted,
    ObjectKey,
    Revisions,
    Store,
    StoredObject,
    StoreEvent,
    Watch,
)

WATCH_S: Final = 2.0
"""How long one call of a quiet watch lasts."""
SAVE_S: Final = 1.0
"""How soon changes are on disk for a start without the store; also the shortest time between two writes."""
AWAY_BASE_S: Final = 0.5
AWAY_CAP_S: Final = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KindList:
    """All objects of one kind, as of a revision of the kind."""

    kind: str
    objects: Sequence[StoredObject]
    revision: int


class Listener(Protocol):
    """Who is told. All calls come from one thread at a time: `load`'s caller first, then the follower's own."""

    def on_lists(self, lists: Sequence[KindList], /) -> None:
        """Take whole lists in the place of all that was known of their kinds: of every kind that is followed, but at a
        start without the store, of those that were heard in an earlier life."""
        ...

    def on_events(self, events: Sequence[StoreEvent], revisions: Revisions, /) -> None:
        """Take changes; everything of each kind up to its revision was handed over with them. Called at each answer of
        the store, also when there are none: the store is there, and has nothing newer."""
        ...

    def on_away(self, error: PodwireError, /) -> None:
        """Hear that the store cannot be followed now, at each failed try; what is known stays."""
        ...

    def on_back(self) -> None:
        """Hear that the store is there (again), after everything was listed or the watch has answered."""
        ...


class Memory(Protocol):
    """Where what the store said last is kept across restarts. Raises StorageFailure."""

    def load(self, kind: str) -> tuple[Sequence[StoredObject], int] | None:
        """Give the last list of a kind with all changes after it, and its revision; None when there never was one."""
        ...

    def find(self, key: ObjectKey) -> StoredObject | None:
        """Give one object as it was last; None when it is not there, or cannot be read. Costs the same however many
        there are."""
        ...

    def save(
        self,
        lists: Mapping[str, tuple[Sequence[StoredObject], int]],
        changes: Iterable[StoreEvent],
    ) -> None:
        """Keep whole lists, then changes, all or nothing."""
        ...


class StoreFollower:
    """Follows `kinds` of one store for one listener.

    `tell_unreadable`: the listener is handed unreadable objects too, as changes after what was last read of them.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        kinds: Sequence[str],
        listener: Listener,
        memory: Memory | None = None,
        *,
        tell_unreadable: bool = False,
    ) -> None:
        self.name = name
        self.store = store
        self.kinds = tuple(kinds)
        self._listener = listener
        self._keeper = _Keeper(memory or _InProcess())
        self.unreadable = Unreadable(name, self._keeper.find)
        self._tells_unreadable = tell_unreadable
        self._watch: Watch | None = None
        self._revisions: Revisions = {}
        self._is_there: bool | None = None
        self._again = False
        self._is_whole = False
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def revisions(self) -> Revisions:
        """Up to which revision of each kind everything was handed over; none before the first list."""
        return self._revisions

    @property
    def is_whole(self) -> bool:
        """Whether all kinds were handed over, as the store has them or as it said last in an earlier life."""
        return self._is_whole

    def load(self) -> bool:
        """List everything once, before `start`; what the store said last when it is away. Raises all but Unavailable.

        False: the store is away, and some kind was never listed before. The thread goes on trying.
        """
        try:
            self.step(0)
        except Unavailable as error:
            self._note_away(error)
            return self._load_remembered()
        return True

    def recall(self, objects: Iterable[StoredObject]) -> None:
        """Say what was last read of objects in an earlier life, where no memory tells; before `load`."""
        self._keeper.seed(objects)

    def step(self, timeout_s: float) -> bool:
        """List if need be, else wait for changes; tells whether anything came. Raises what store and listener raise."""
        if self._again:
            self._again = False
            self.drop_watch()
        watch = self._watch
        if watch is None:
            self._list()
            return True
        try:
            events = watch.next(timeout_s)
        except Compacted:
            self.drop_watch()
            return True
        try:
            self._hand_over(events, watch.revisions)
        except BaseException:
            self.drop_watch()  # it does not give them again
            raise
        return bool(events)

    def start(self) -> None:
        """Start the thread."""
        self._keeper.save(at_once=True)
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, at once but for a call of the store that runs; what was heard is kept."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self.drop_watch()
        if self._thread is not None:
            self._thread.join()
        self.drop_watch()  # the thread may have been listing
        self._keeper.save(at_once=True)

    def list_again(self) -> None:
        """Have everything listed again, soon; from any thread."""
        self._again = True

    def drop_watch(self) -> None:
        """Stop watching; the next step lists again."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _run(self) -> None:
        delay_s = AWAY_BASE_S
        while not self._stopping:
            try:
                self.step(SAVE_S if self._keeper.has_news else WATCH_S)
                delay_s = AWAY_BASE_S
            except Unavailable as error:
                self._note_away(error)
            except PodwireError as error:
                _log.error("follow store", extra={"task": self.name, "error": error.message})
                self._give_up(error)
            except Exception as error:  # the thread's door: a bug about one object must not end it
                _log.exception("follow store", extra={"task": self.name})
                self._give_up(PodwireError(f"follow store for {self.name}: {error!r}"))
            self._keeper.save()  # also what was heard just before the store went away
            if self._is_there:
                continue
            with self._changed:
                # Apart from each other: after an outage all nodes of a cluster come back at once.
                self._changed.wait_for(lambda: self._stopping, delay_s * random.uniform(0.5, 1.0))
            delay_s = min(AWAY_CAP_S, delay_s * 2)

    def _hand_over(self, events: Sequence[StoreEvent], revisions: Revisions) -> None:
        self._revisions = revisions
        told, good = self._sift(events)
        self._listener.on_events(told, revisions)
        self._keeper.note_events(good)
        if len(good) < len(events):
            self._keep_what_stands_in()
        self._note_back()

    def _sift(self, events: Sequence[StoreEvent]) -> tuple[list[StoreEvent], list[StoreEvent]]:
        """Give what the listener is told of changes, and what is kept of them."""
        told: list[StoreEvent] = []
        good: list[StoreEvent] = []
        for event in events:
            readable = self.unreadable.sift_event(event)
            if readable is not None:
                good.append(readable)
                told.append(readable)
            elif self._tells_unreadable:
                told.append(event)
        if events:
            self.unreadable.show()
        return told, good

    def _keep_what_stands_in(self) -> None:
        """What was last read of an object is nowhere else now: an agent that is killed has to find it again."""
        self._keeper.save(at_once=True)

    def _give_up(self, error: PodwireError) -> None:
        """What was handed over is in doubt: list again."""
        self.drop_watch()
        self._note_away(error)

    def _list(self) -> None:
        lists = [self._list_kind(kind) for kind in self.kinds]
        self.unreadable.show()
        revisions = {one.kind: one.revision for one in lists}
        watch = self.store.watch(revisions)
        try:
            self._listener.on_lists(lists)
            self._revisions = revisions
            self._listener.on_events(self._list_unreadable(), revisions)
        except BaseException:
            watch.close()
            raise
        self._watch = watch
        self._is_whole = True
        if self._stopping:
            self.drop_watch()
        self._keeper.note_lists(lists)
        if self.unreadable.objects:
            self._keep_what_stands_in()
        self._note_back()

    def _list_kind(self, kind: str) -> KindList:
        objects, revision = self.store.list(kind)
        return KindList(kind, self.unreadable.sift_list(kind, objects), revision)

    def _list_unreadable(self) -> list[StoreEvent]:
        if not self._tells_unreadable:
            return []
        return [StoreEvent(one, one.revision) for one in self.unreadable.objects]

    def _load_remembered(self) -> bool:
        """Hand over what was kept of each kind. A kind of which nothing was is not handed over at all."""
        found = self._keeper.load(self.kinds, whole=self._tells_unreadable)
        if found:
            self._listener.on_lists(found)
        self._is_whole = len(found) == len(self.kinds)
        count = sum(len(one.objects) for one in found)
        if self._is_whole:
            _log.warning(
                "the store is away; what it said last is in force",
                extra={"task": self.name, "count": count},
            )
        else:
            _log.warning(
                "the store is away, and some of it was never read",
                extra={"task": self.name, "count": count},
            )
        return self._is_whole

    def _note_away(self, error: PodwireError) -> None:
        self._is_there = False
        self._listener.on_away(error)

    def _note_back(self) -> None:
        if not self._is_there:
            self._is_there = True
            self._listener.on_back()


class _InProcess:
    """The memory of who needs none across restarts: what was last read of an object that cannot be read any more."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[ObjectKey, StoredObject]] = {}
        self._revisions: dict[str, int] = {}

    def load(self, kind: str) -> tuple[Sequence[StoredObject], int] | None:
        if kind not in self._objects:
            return None
        return list(self._objects[kind].values()), self._revisions[kind]

    def find(self, key: ObjectKey) -> StoredObject | None:
        return self._objects.get(key.kind, {}).get(key)

    def save(
        self,
        lists: Mapping[str, tuple[Sequence[StoredObject], int]],
        changes: Iterable[StoreEvent],
    ) -> None:
        for kind, (objects, revision) in lists.items():
            self._objects[kind] = {one.key: one for one in objects}
            self._revisions[kind] = revision
        for event in changes:
            key = event.object.key
            objects_of_kind = self._objects.setdefault(key.kind, {})
            objects_of_kind.pop(key, None)
            if not event.deleted:
                objects_of_kind[key] = event.object
            self._revisions[key.kind] = max(self._revisions.get(key.kind, 0), event.revision)


class _Keeper:
    """Writes what was heard into a memory: not more often than it must. A full disk costs only the memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._lists: dict[str, tuple[Sequence[StoredObject], int]] = {}
        self._unwritten: dict[str, dict[ObjectKey, StoredObject]] = {}
        """By key, of `_lists` that somebody has asked about."""
        self._seed: dict[ObjectKey, StoredObject] = {}
        self._changes: dict[ObjectKey, StoreEvent] = {}
        self._due_s = 0.0
        self._has_failed = False

    @property
    def has_news(self) -> bool:
        return bool(self._lists or self._changes)

    def load(self, kinds: Sequence[str], *, whole: bool = False) -> list[KindList]:
        """Give what was kept. Of `whole` kinds all or nothing: without one of its policies more would be allowed."""
        try:
            found = [(kind, self._memory.load(kind)) for kind in kinds]
        except StorageFailure as error:
            _log.warning("read what the store said last", extra={"error": error.message})
            return []
        lists = []
        for kind, kept in found:
            good = [one for one in kept[0] if not one.fault] if kept is not None else []
            if kept is not None and not (whole and len(good) < len(kept[0])):
                lists.append(KindList(kind, good, kept[1]))
        return lists

    def find(self, key: ObjectKey) -> StoredObject | None:
        """Give what was last heard of an object, written or not yet; None when it was never there, or is gone."""
        change = self._changes.get(key)
        if change is not None:
            return None if change.deleted else change.object
        if key.kind in self._lists:
            if key.kind not in self._unwritten:
                self._unwritten[key.kind] = {one.key: one for one in self._lists[key.kind][0]}
            return self._unwritten[key.kind].get(key)
        try:
            return self._memory.find(key) or self._seed.get(key)
        except StorageFailure as error:
            _log.warning("read what the store said last", extra={"error": error.message})
            return None

    def seed(self, objects: Iterable[StoredObject]) -> None:
        """Take what `find` gives of kinds that were never listed."""
        self._seed = {one.key: one for one in objects}

    def note_lists(self, lists: Sequence[KindList]) -> None:
        for one in lists:
            self._lists[one.kind] = (one.objects, one.revision)
            self._unwritten.pop(one.kind, None)
        self._changes.clear()
        listed = {one.kind for one in lists}
        self._seed = {key: one for key, one in self._seed.items() if key.kind not in listed}

    def note_events(self, events: Sequence[StoreEvent]) -> None:
        self._changes.update((one.object.key, one) for one in events)

    def save(self, *, at_once: bool = False) -> None:
        """Write what is new, if it is time."""
        if not self.has_news or (time.monotonic() < self._due_s and not at_once):
            return
        self._due_s = time.monotonic() + SAVE_S
        try:
            self._memory.save(self._lists, self._changes.values())
        except StorageFailure as error:
            if not self._has_failed:
                _log.warning("keep what the store said last", extra={"error": error.message})
            self._has_failed = True
            return
        self._has_failed = False
        self._lists, self._changes, self._unwritten = {}, {}, {}
