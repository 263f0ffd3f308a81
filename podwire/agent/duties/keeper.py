"""What was last heard of objects: for those that cannot be read any more, and for a start without the store.

Used by `agent.duties.shared_watch`, on one thread. Decides when what is new is written, and not where: that is the
`Memory`. Invariant: what `find` gives is what was heard last, whether it was written already or not.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from podwire.model.errors import StorageFailure
from podwire.model.store import ObjectKey, StoredObject, StoreEvent

SAVE_S: Final = 1.0
"""How soon changes are on disk for a start without the store; also the shortest time between two writes."""

_log = logging.getLogger(__name__)


class KindList(msgspec.Struct, frozen=True):
    """All objects of one kind, as of a revision of the kind."""

    kind: str
    objects: Sequence[StoredObject]
    revision: int


class Memory(Protocol):
    """Where what the store said last is kept across restarts. Raises StorageFailure."""

    def load(self, kind: str) -> tuple[Sequence[StoredObject], int] | None:
        """Give the last list of a kind with all changes after it, and its revision; None when there never was one."""

    def index(self, kind: str) -> dict[ObjectKey, tuple[str, int]]:
        """Give uid and revision of every object of a kind."""

    def find(self, key: ObjectKey) -> StoredObject | None:
        """Give one object as it was last; None when it is not there, or cannot be read. Costs the same however many
        there are."""

    def save(
        self,
        lists: Mapping[str, tuple[Sequence[StoredObject], int]],
        changes: Iterable[StoreEvent],
    ) -> None:
        """Keep whole lists, then changes, all or nothing."""


class InProcess:
    """A memory for this life alone: what was last read of an object that cannot be read any more."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[ObjectKey, StoredObject]] = {}
        self._revisions: dict[str, int] = {}

    def load(self, kind: str) -> tuple[Sequence[StoredObject], int] | None:
        if kind not in self._objects:
            return None
        return list(self._objects[kind].values()), self._revisions[kind]

    def index(self, kind: str) -> dict[ObjectKey, tuple[str, int]]:
        return {
            key: (stored.uid, stored.revision)
            for key, stored in self._objects.get(kind, {}).items()
        }

    def find(self, key: ObjectKey) -> StoredObject | None:
        return self._objects.get(key.kind, {}).get(key)

    def save(
        self,
        lists: Mapping[str, tuple[Sequence[StoredObject], int]],
        changes: Iterable[StoreEvent],
    ) -> None:
        for kind, (objects, revision) in lists.items():
            self._objects[kind] = {stored.key: stored for stored in objects}
            self._revisions[kind] = revision
        for event in changes:
            key = event.object.key
            objects_of_kind = self._objects.setdefault(key.kind, {})
            objects_of_kind.pop(key, None)
            if not event.deleted:
                objects_of_kind[key] = event.object
            self._revisions[key.kind] = max(self._revisions.get(key.kind, 0), event.revision)


class Keeper:
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
        """Tell whether something is to be written."""
        return bool(self._lists or self._changes)

    def load(self, kinds: Sequence[str], *, whole: bool = False) -> list[KindList]:
        """Give what was kept. Of `whole` kinds all or nothing: without one of its policies more would be allowed."""
        try:
            loaded = [(kind, self._memory.load(kind)) for kind in kinds]
        except StorageFailure as error:
            _log.warning("read what the store said last", extra={"error": error.message})
            return []
        lists = []
        for kind, kept in loaded:
            good = [stored for stored in kept[0] if not stored.fault] if kept is not None else []
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
                # Made only when somebody asks: a list may have tens of thousands of objects, and few are unreadable.
                self._unwritten[key.kind] = {
                    stored.key: stored for stored in self._lists[key.kind][0]
                }
            return self._unwritten[key.kind].get(key)
        try:
            return self._memory.find(key) or self._seed.get(key)
        except StorageFailure as error:
            _log.warning("read what the store said last", extra={"error": error.message})
            return None

    def index(self, kind: str) -> dict[ObjectKey, tuple[str, int]] | None:
        """Give uid and revision of every object of a kind as it was last heard; None when that cannot be told."""
        self.save(at_once=True)
        if self.has_news:
            return None
        try:
            return self._memory.index(kind)
        except StorageFailure as error:
            _log.warning("read what the store said last", extra={"error": error.message})
            return None

    def seed(self, objects: Iterable[StoredObject]) -> None:
        """Take what `find` gives of kinds that were never listed."""
        self._seed = {stored.key: stored for stored in objects}

    def note_lists(self, lists: Sequence[KindList]) -> None:
        """Take lists in the place of what was heard of their kinds."""
        for kind_list in lists:
            self._lists[kind_list.kind] = (kind_list.objects, kind_list.revision)
            self._unwritten.pop(kind_list.kind, None)
        listed = {kind_list.kind for kind_list in lists}
        # A list is newer than every change that was heard before it.
        self._changes = {
            key: event for key, event in self._changes.items() if key.kind not in listed
        }
        self._seed = {key: stored for key, stored in self._seed.items() if key.kind not in listed}

    def note_events(self, events: Sequence[StoreEvent]) -> None:
        """Take changes."""
        self._changes.update((event.object.key, event) for event in events)

    def save(self, *, at_once: bool = False) -> None:
        """Write what is new, if it is time."""
        if not self.has_news or (time.monotonic() < self._due_s and not at_once):
            return
        # Also before a write that fails: a full disk is not tried at each step of the watch.
        self._due_s = time.monotonic() + SAVE_S
        try:
            self._memory.save(self._lists, self._changes.values())
        except StorageFailure as error:
            if not self._has_failed:
                _log.warning("keep what the store said last", extra={"error": error.message})
            self._has_failed = True
            return
        self._has_failed = False
        # Only after the write: `find` has to give what is nowhere else yet.
        self._lists, self._changes, self._unwritten = {}, {}, {}
