"""The store in etcd: objects as keys, compare-and-swap by their revisions.

Opened by `store.open`. Implements `model.store.Store`. Callers wait on their own threads for the one loop that has the
connections. Must never write without a condition. Invariant: the revision of an object is that of its key in etcd.
"""

import asyncio
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final

import msgspec

from podwire.model.errors import Conflict, PodwireError, Unavailable
from podwire.model.store import Fields, Known, ObjectKey, Revisions, StoredObject, UnreadableObject
from podwire.model.store.promises import FULL, Promises
from podwire.store.documents import encode_document, exists, merge
from podwire.store.etcd.access import StoreAccess, check_access
from podwire.store.etcd.changes import PART_MAX, Change, Changes, check_found, commit
from podwire.store.etcd.cluster import Cluster
from podwire.store.etcd.gateway import DEADLINE_S
from podwire.store.etcd.keys import (
    Value,
    decode_object,
    encode_value,
    kind_prefix,
    namespace_prefix,
    object_key,
)
from podwire.store.etcd.leases import EtcdLeases
from podwire.store.etcd.watch import IDLE_S, EtcdWatch
from podwire.store.etcd.wire import KeyValue, prefix_end

OPEN_S: Final = 2.0
"""How long opening waits for a sign of etcd: an agent's pods wait for it."""
CHANGE_ATTEMPTS: Final = 20
"""How often an object is patched or deleted whatever its revision, because others change it meanwhile."""


class EtcdStore:
    """Objects in the etcd that answers at `endpoints` (HOST:PORT each).

    One that is away now is no error: each call asks anew. `create` false: one without anything of ours is a
    StorageFailure. Raises InvalidConfiguration, NewerData and StorageFailure.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        access: StoreAccess | None = None,
        *,
        create: bool = True,
        deadline_s: float = DEADLINE_S,
        idle_s: float = IDLE_S,
    ) -> None:
        access = access or StoreAccess()
        check_access(access)
        self._deadline_s = deadline_s
        self._idle_s = idle_s
        self._local = threading.local()
        self._watches: set[EtcdWatch] = set()
        self._watches_lock = threading.Lock()
        self._cluster = Cluster(tuple(endpoints), access, deadline_s=deadline_s, create=create)
        self._leases = EtcdLeases(self._cluster, idle_s=idle_s)
        try:
            self._cluster.run(self._check(min(deadline_s, OPEN_S)))
        except Unavailable:
            pass
        except PodwireError:
            self._cluster.close()
            raise

    @property
    def promises(self) -> Promises:
        """Give what this back end promises: everything, if not for any number of writes together."""
        return replace(FULL, together_max=PART_MAX)

    def get(self, key: ObjectKey) -> StoredObject | None:
        """Give one object; None when there is none."""
        raw = self._read(key)
        if raw is None:
            return None
        stored = decode_object(raw)
        if stored.fault:
            raise UnreadableObject(stored)
        return stored

    def list(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        at_least: int | None = None,
        known: Known | None = None,
    ) -> tuple[Sequence[StoredObject], int]:
        """Give all objects of a kind (of one namespace), by namespace and name, and etcd's revision."""
        # A member that lags would answer sooner, and nobody has needed that. What is known is decoded in no time.
        del at_least, known
        first = kind_prefix(kind) if namespace is None else namespace_prefix(kind, namespace)
        pairs, revision = self._cluster.run(self._cluster.read_range(first, prefix_end(first)))
        # etcd orders by bytes of quoted names.
        return sorted(map(decode_object, pairs), key=lambda stored: stored.key), revision

    def create(self, new: StoredObject) -> StoredObject:
        """Write an object that must not exist (else Conflict); gives it with uid, revision and time."""
        document = encode_document(new)
        created = self._stamp()
        batch = self._batch()
        # In a block all writes are done at its end. A conflict that is there already is told now, at the call that
        # meets it.
        if batch is not None and (pair := self._read(new.key)) is not None:
            raise exists(new.key, pair.mod_revision)
        return self._write("create", new.key, 0, document, str(uuid.uuid4()), created)

    def update(self, new: StoredObject) -> StoredObject:
        """Replace an object whose revision must still be `new.revision` (else Conflict; NotFound)."""
        document = encode_document(new)
        old = check_found("update", new.key, self._read(new.key), new.revision, new.uid)
        uid, created = old.uid or str(uuid.uuid4()), old.created or self._stamp()
        return self._write("update", new.key, old.revision, document, uid, created)

    def patch(
        self, key: ObjectKey, changes: Fields, *, revision: int | None = None, uid: str = ""
    ) -> StoredObject:
        """Change single fields of an object and leave all others; None takes one away."""
        for attempt in range(CHANGE_ATTEMPTS):
            old = check_found("patch", key, self._read(key), revision, uid)
            if old.fault:
                raise UnreadableObject(old)
            document = merge(old.document, changes)
            if document == old.document:
                return old
            encoded = encode_document(StoredObject(key=key, document=document))
            try:
                return self._write("patch", key, old.revision, encoded, old.uid, old.created)
            except Conflict:
                if revision is not None or attempt == CHANGE_ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def delete(self, key: ObjectKey, *, revision: int | None = None, uid: str = "") -> StoredObject:
        """Remove an object, under the preconditions that are given; gives what was there. NotFound, Conflict."""
        for attempt in range(CHANGE_ATTEMPTS):
            old = check_found("delete", key, self._read(key), revision, uid)
            try:
                self._submit(Change("delete", old, old.revision))
                break
            except Conflict:
                # The next attempt reads again: with a precondition it raises there, with the revision that is in the
                # way.
                if attempt == CHANGE_ATTEMPTS - 1:
                    raise
        return old

    @contextmanager
    def together(self) -> Iterator[None]:
        """Collect this thread's writes in the block and do them at its end, in transactions of up to 128.

        Conflict, also of what an earlier call of the block found in order, comes at the end then. What the calls of the
        block gave has its revision from then on.
        """
        if self._batch() is not None:
            yield
            return
        changes: Changes = []
        self._local.batch = changes
        try:
            yield
        finally:
            self._local.batch = None
        if changes:
            self._cluster.run(commit(self._cluster, changes))

    def watch(self, after: Revisions) -> EtcdWatch:
        """Watch changes of some kinds, of each after a revision."""
        made = EtcdWatch(
            self._cluster,
            after=after,
            forget=self._forget,
            idle_s=self._idle_s,
        )
        with self._watches_lock:
            self._watches.add(made)
        made.wait_until_open(self._deadline_s)
        return made

    def leases(self) -> EtcdLeases:
        """Give the store's leases."""
        return self._leases

    def end_calls(self) -> None:
        """Have nobody wait for etcd any longer; see `store.open.end_calls`."""
        self._cluster.thread.end_calls()
        with self._watches_lock:
            watches = tuple(self._watches)
        for watch in watches:
            watch.stop_waiting()

    def close(self) -> None:
        """Close the connections and all watches; names that are held run out."""
        self._leases.close()
        with self._watches_lock:
            watches = tuple(self._watches)
        for watch in watches:
            watch.close()
        self._cluster.close()

    def _stamp(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    async def _check(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._cluster.check()

    def _batch(self) -> Changes | None:
        batch: Changes | None = getattr(self._local, "batch", None)
        return batch

    def _forget(self, watch: EtcdWatch) -> None:
        with self._watches_lock:
            self._watches.discard(watch)

    def _read(self, key: ObjectKey) -> KeyValue | None:
        return self._cluster.run(self._cluster.read(object_key(key)))[0]

    def _write(
        self, verb: str, key: ObjectKey, expected: int, document: bytes, uid: str, created: str
    ) -> StoredObject:
        mark = uuid.uuid4().hex
        value = encode_value(
            Value(uid=uid, created=created, mark=mark, document=msgspec.Raw(document))
        )
        made = decode_object(KeyValue(object_key(key), value))
        self._submit(Change(verb, made, expected, value, mark))
        return made

    def _submit(self, change: Change) -> None:
        """Do a change now, or keep it for the end of the block that this thread is in."""
        batch = self._batch()
        if batch is None:
            self._cluster.run(commit(self._cluster, [change]))
            return
        # etcd refuses a transaction that writes one key twice ("duplicate key given in txn request").
        if any(write.made.key == change.made.key for write in batch):
            raise Conflict(
                f"{change.verb} {change.made.key}: it is written twice together",
                hint="write it once, or not together",
            )
        batch.append(change)
