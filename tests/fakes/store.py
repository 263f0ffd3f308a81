"""A store in memory that keeps the contract of `model.store`, and can go away."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self
from uuid import uuid4

import msgspec

from podwire.model.errors import Conflict, NotFound, Unavailable
from podwire.model.store import Compacted, ObjectKey, StoredObject, StoreEvent
from podwire.store.documents import merge
from tests.fakes.leases import MemoryLeases


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
        self.compacted = 0
        self._objects: dict[ObjectKey, StoredObject] = {}
        self._revision = 0
        self._leases = MemoryLeases()

    def get(self, key: ObjectKey) -> StoredObject | None:
        with self.changed:
            self._call("get")
            return self._objects.get(key)

    def list(self, kind: str, namespace: str | None = None) -> tuple[Sequence[StoredObject], int]:
        with self.changed:
            self._call("list")
            found = [
                one
                for key, one in sorted(self._objects.items())
                if key.kind == kind and namespace in (None, key.namespace)
            ]
            return found, self._revision

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
            if old.revision != new.revision:
                raise Conflict(f"update {new.key}: it is at revision {old.revision}")
            return self._write(msgspec.structs.replace(new, uid=old.uid, created=old.created))

    def patch(
        self,
        key: ObjectKey,
        changes: Mapping[str, Any],
        *,
        revision: int | None = None,
        uid: str = "",
    ) -> StoredObject:
        self._call("patch")
        self.before_update(StoredObject(key=key, document=changes))
        with self.changed:
            old = self._find(key)
            if revision not in (None, old.revision) or uid not in ("", old.uid):
                raise Conflict(f"patch {key}: it is another one")
            document = merge(old.document, changes)
            if document == old.document:
                return old
            return self._write(msgspec.structs.replace(old, document=document))

    def delete(self, key: ObjectKey, *, revision: int | None = None, uid: str = "") -> StoredObject:
        with self.changed:
            self._call("delete")
            old = self._find(key)
            if revision not in (None, old.revision) or uid not in ("", old.uid):
                raise Conflict(f"delete {key}: it is another one")
            del self._objects[key]
            self._revision += 1
            self._publish(StoreEvent(old, self._revision, deleted=True))
            return old

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def watch(self, after_revision: int, kinds: Sequence[str] = ()) -> "MemoryWatch":
        self._call("watch")
        return MemoryWatch(self, after_revision, frozenset(kinds))

    def leases(self) -> MemoryLeases:
        return self._leases

    def close(self) -> None:
        pass

    def compact(self) -> None:
        """Forget all changes so far."""
        with self.changed:
            self.compacted = self._revision
            self.events.clear()
            self.changed.notify_all()

    def _call(self, name: str) -> None:
        if self.away:
            raise Unavailable(f"{name}: the store is away")
        self.calls.append(name)

    def _find(self, key: ObjectKey) -> StoredObject:
        if key not in self._objects:
            raise NotFound(f"{key}: there is none")
        return self._objects[key]

    def _write(self, new: StoredObject) -> StoredObject:
        self._revision += 1
        written = msgspec.structs.replace(new, revision=self._revision)
        self._objects[new.key] = written
        self._publish(StoreEvent(written, self._revision))
        return written

    def _publish(self, event: StoreEvent) -> None:
        self.events.append(event)
        self.changed.notify_all()


class MemoryWatch:
    """Changes of a MemoryStore."""

    def __init__(self, store: MemoryStore, after: int, kinds: frozenset[str]) -> None:
        self._store = store
        self.revision = after
        self._kinds = kinds
        self._closed = False

    def next(self, timeout_s: float) -> Sequence[StoreEvent]:
        deadline = time.monotonic() + timeout_s
        with self._store.changed:
            while not self._closed:
                if self._store.away:
                    raise Unavailable("watch: the store is away")
                if self.revision < self._store.compacted:
                    raise Compacted("watch: the changes since then are gone")
                found = [one for one in self._store.events if one.revision > self.revision]
                if found:
                    self.revision = found[-1].revision
                wanted = [
                    one for one in found if not self._kinds or one.object.key.kind in self._kinds
                ]
                left_s = deadline - time.monotonic()
                if wanted or left_s <= 0:
                    return wanted
                self._store.changed.wait(left_s)
        return ()

    def close(self) -> None:
        with self._store.changed:
            self._closed = True
            self._store.changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
