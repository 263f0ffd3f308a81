"""The store's contract: objects with revisions, and a watch that misses nothing.

Back ends live in `podwire.store`; one contract suite (tests/contract/test_store_contract.py) holds for all of them.
Synchronous: callers that must not wait use a thread. Errors: Conflict (exists, or another revision), NotFound,
Unavailable (the store is away; when it went away during a write, that may have been done: read before you repeat it),
StorageFailure (disk full or damaged; nothing was written), NewerData, InvalidRequest, InvalidConfiguration (refused
credentials). Invariant: revisions grow with each change; two may share one only when they were written together.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from podwire.model.errors import StorageFailure, Unavailable
from podwire.model.store.leases import Leases


class ObjectKey(msgspec.Struct, frozen=True, order=True):
    """Names one object. `kind` is the resource's plural name (`networkpolicies`); `namespace` "" = cluster-wide."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.namespace}/{self.name}"
            if self.namespace
            else f"{self.kind} {self.name}"
        )


class StoredObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object as the store has it."""

    key: ObjectKey
    uid: str = ""
    """Random, given at creation: a successor of the same name has another."""
    revision: int = 0
    """Of the store at the object's last change; 0 before it was written."""
    created: str = ""
    """RFC 3339, UTC."""
    document: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """The whole document, as Kubernetes writes it: apiVersion, kind, metadata (with labels), spec."""
    fault: str = ""
    """Why what the store has there cannot be read: something else wrote it. The document is empty then. Lists and
    watches give such objects, so that one does not stop all others; nothing but the name may be used of them."""


@dataclass(frozen=True)
class StoreEvent:
    """One change. `deleted`: `object` is what was there last."""

    object: StoredObject
    revision: int
    deleted: bool = False


class UnreadableObject(StorageFailure):
    """What the store has under this name is no object; `stored` is what is known of it, `stored.fault` says why."""

    def __init__(self, stored: StoredObject) -> None:
        super().__init__(
            f"read {stored.key}: {stored.fault}",
            hint="something else wrote it: correct it (podwire apply), or delete it (podwire delete)",
        )
        self.stored = stored


class Compacted(Unavailable):
    """The watch's revision is older than what the store remembers: list again, then watch from there."""


class Watch(Protocol):
    """Changes after a revision, in order, each once. One thread reads it; any may close it."""

    @property
    def revision(self) -> int:
        """Up to which revision of the store everything was given: from here another watch goes on."""
        ...

    def next(self, timeout_s: float) -> Sequence[StoreEvent]:
        """Give what has happened, waiting up to `timeout_s` for the first; () when nothing came. Raises Compacted,
        Unavailable (call again later: nothing is lost)."""
        ...

    def close(self) -> None:
        """Stop watching; a waiting `next` on another thread returns ()."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_exception: object) -> None: ...


class Waker(Protocol):
    """Tells a watch of a file that another process has changed it. Only a hint: a watch also looks by itself."""

    def wait(self, timeout_s: float) -> None:
        """Return at a change since the last call, at `wake`, or after `timeout_s`."""
        ...

    def wake(self) -> None:
        """End `wait` on another thread, or the next one; after `close` do nothing."""
        ...

    def close(self) -> None:
        """Give descriptors back. Nobody may be waiting."""
        ...


OpenWaker = Callable[[Path], Waker]
"""Opens what wakes when the file of this path is touched."""


class Store(Protocol):
    """Objects of one cluster. Safe to call from several threads."""

    def get(self, key: ObjectKey) -> StoredObject | None:
        """Give one object; None when there is none. UnreadableObject when what is there is none."""
        ...

    def list(self, kind: str, namespace: str | None = None) -> tuple[Sequence[StoredObject], int]:
        """Give all objects of a kind (of one namespace), by namespace and name, and the revision they are of."""
        ...

    def create(self, new: StoredObject) -> StoredObject:
        """Write an object that must not exist (else Conflict); gives it with uid, revision and time."""
        ...

    def update(self, new: StoredObject) -> StoredObject:
        """Replace an object whose revision must still be `new.revision` (else Conflict; NotFound). Uid and time of
        creation stay what they are, whatever `new` says. One that cannot be read may be replaced too."""
        ...

    def patch(
        self,
        key: ObjectKey,
        changes: Mapping[str, Any],
        *,
        revision: int | None = None,
        uid: str = "",
    ) -> StoredObject:
        """Change single fields, under the preconditions that are given, and leave all others as they are, whoever
        writes them meanwhile: a merge patch (RFC 7386), in which None takes a field away and a list is replaced whole.
        Nothing is written when it would change nothing. NotFound, Conflict; UnreadableObject of what is none."""
        ...

    def delete(self, key: ObjectKey, *, revision: int | None = None, uid: str = "") -> StoredObject:
        """Remove an object, under the preconditions that are given; gives what was there. NotFound, Conflict."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Let the writes of this thread in the block take effect together at its end, where the back end can (etcd: 128
        at a time), and none when the block raises. Reads in the block see what was there before, each object is written
        once, and what the writes give may have its revision only after the block. Conflict may come at its end. Others
        may have to wait: be quick."""
        ...

    def watch(self, after_revision: int, kinds: Sequence[str] = ()) -> Watch:
        """Watch changes of some kinds (none named: all) after a revision; `next` raises Compacted when the store does
        not remember it, or never had it."""
        ...

    def leases(self) -> Leases:
        """Give the store's leases, the same each time."""
        ...

    def close(self) -> None:
        """Close what is open, watches and leases too; names that are held run out."""
        ...


def look_at(store: Store, key: ObjectKey) -> StoredObject | None:
    """Give one object for whoever is going to replace or delete it: one that cannot be read has a `fault`."""
    try:
        return store.get(key)
    except UnreadableObject as error:
        return error.stored
