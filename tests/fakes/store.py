"""A store in memory that keeps the contract of `model.store`, and can go away."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from uuid import uuid4

import msgspec

from podwire.model.closing import Closing
from podwire.model.errors import Conflict, NotFound, Unavailable
from podwire.model.store import (
    Compacted,
    Fields,
    Known,
    ObjectKey,
    Revisions,
    StoredObject,
    StoreEvent,
)
from podwire.model.store.kinds import KINDS
from podwire.model.store.promises import FULL, Promises
from podwire.store.documents import merge
from tests.fakes.leases import MemoryLeases


def since(revision: int, *kinds: str) -> Revisions:
    """Say from where to watch some kinds of a store that has one count for all; all that there are by default."""
    return dict.fromkeys(kinds or [kind.plural for kind in KINDS], revision)


class MemoryStore:
    """Objects and all changes of them since the last compaction.

    `away` makes every call raise Unavailable. `before_create` and `before_update` run inside the call, before it
    writes: a place to let somebody else be faster, or to die.
    """

    def __init__(self) -> None:
        self.away = False
        self.calls: list[str] = []
        self.before_create: Callable[[StoredObject], None] = lambda _new: None
        self.before_update: Callable[[StoredObject], None] = lambda _new: None
        self.changed = threading.Condition(threading.RLock())
        self.events: list[StoreEvent] = []
        self.compacted: dict[str, int] = {}
        self.watches = 0
        """How many were opened so far."""
        self._objects: dict[ObjectKey, StoredObject] = {}
        self._revision = 0
        self._leases = MemoryLeases()

    @property
    def promises(self) -> Promises:
        return FULL

    def get(self, key: ObjectKey) -> StoredObject | None:
        with self.changed:
            self._call("get")
            return self._objects.get(key)

    def list(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        at_least: int | None = None,
        known: Known | None = None,
    ) -> tuple[Sequence[StoredObject], int]:
        with self.changed:
            self._call("list")
            found = [
                one
                for key, one in sorted(self._objects.items())
                if key.kind == kind and namespace in (None, key.namespace)
            ]
            return found, self.revision_of(kind)

    def create(self, new: StoredObject) -> StoredObject:
        self._call("create")
        self.before_create(new)
        with self.changed:
            if new.key in self._objects:
                raise Conflict(f"create {new.key}: it exists")
            return self._write(
                msgspec.structs.replace(new, uid=str(uuid4()), created="2026-01-01T00:00:00Z")
            )

    def update(self, new: StoredObject) -> StoredObject:
        self._call("update")
        self.before_update(new)
        with self.changed:
            old = self._find(new.key)
            self._check_same("update", old, new.revision, new.uid)
            return self._write(msgspec.structs.replace(new, uid=old.uid, created=old.created))

    def patch(
        self, key: ObjectKey, changes: Fields, *, revision: int | None = None, uid: str = ""
    ) -> StoredObject:
        self._call("patch")
        self.before_update(StoredObject(key=key, document=changes))
        with self.changed:
            old = self._find(key)
            self._check_same("patch", old, revision, uid)
            document = merge(old.document, changes)
            if document == old.document:
                return old
            return self._write(msgspec.structs.replace(old, document=document))

    def delete(self, key: ObjectKey, *, revision: int | None = None, uid: str = "") -> StoredObject:
        with self.changed:
            self._call("delete")
            old = self._find(key)
            self._check_same("delete", old, revision, uid)
            del self._objects[key]
            self._publish(StoreEvent(old, self._next_revision(key.kind), deleted=True))
            return old

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def watch(self, after: Revisions) -> "MemoryWatch":
        self._call("watch")
        self.watches += 1
        return MemoryWatch(self, after)

    def leases(self) -> MemoryLeases:
        return self._leases

    def close(self) -> None:
        pass

    def compact(self) -> None:
        """Forget all changes so far."""
        with self.changed:
            kinds = {event.object.key.kind for event in self.events}
            self.compacted.update((kind, self.revision_of(kind)) for kind in kinds)
            self.events.clear()
            self.changed.notify_all()

    def revision_of(self, kind: str) -> int:
        """At which revision a kind is: one count for all of them here."""
        del kind
        return self._revision

    def _next_revision(self, kind: str) -> int:
        del kind
        self._revision += 1
        return self._revision

    def _call(self, name: str) -> None:
        if self.away:
            raise Unavailable(f"{name}: the store is away")
        self.calls.append(name)

    def _find(self, key: ObjectKey) -> StoredObject:
        if key not in self._objects:
            raise NotFound(f"{key}: there is none")
        return self._objects[key]

    @staticmethod
    def _check_same(verb: str, old: StoredObject, revision: int | None, uid: str) -> None:
        if uid not in ("", old.uid):
            raise Conflict(f"{verb} {old.key}: it was deleted and made anew")
        if revision not in (None, old.revision):
            raise Conflict(f"{verb} {old.key}: it is at revision {old.revision}")

    def _write(self, new: StoredObject) -> StoredObject:
        written = msgspec.structs.replace(new, revision=self._next_revision(new.key.kind))
        self._objects[new.key] = written
        self._publish(StoreEvent(written, written.revision))
        return written

    def _publish(self, event: StoreEvent) -> None:
        self.events.append(event)
        self.changed.notify_all()


class MemoryWatch(Closing):
    """Changes of a MemoryStore."""

    def __init__(self, store: MemoryStore, after: Revisions) -> None:
        self._store = store
        self.revisions = dict(after)
        self.failing: dict[str, str] = {}
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def next(self, timeout_s: float) -> Sequence[StoreEvent]:
        deadline = time.monotonic() + timeout_s
        with self._store.changed:
            while not self._closed:
                if self._store.away:
                    raise Unavailable("watch: the store is away")
                self._check()
                wanted = [event for event in self._store.events if self._is_news(event)]
                for kind, at in self.revisions.items():
                    self.revisions[kind] = max(at, self._store.revision_of(kind))
                left_s = deadline - time.monotonic()
                if wanted or left_s <= 0:
                    return wanted
                self._store.changed.wait(left_s)
        return ()

    def _is_news(self, event: StoreEvent) -> bool:
        at = self.revisions.get(event.object.key.kind)
        return at is not None and event.revision > at

    def _check(self) -> None:
        gone = [
            kind for kind, at in self.revisions.items() if at < self._store.compacted.get(kind, 0)
        ]
        if gone:
            raise Compacted("watch: the changes since then are gone", kinds=gone)
        ahead = [kind for kind, at in self.revisions.items() if at > self._store.revision_of(kind)]
        if ahead and self._store.promises.notices_other_store:
            revision = max(self.revisions.values())
            raise Compacted(f"watch after revision {revision}: it never was", kinds=ahead)

    def close(self) -> None:
        with self._store.changed:
            self._closed = True
            self._store.changed.notify_all()
