"""The store's contract: objects with revisions, and a watch that misses nothing.

Back ends live in `podwire.store`; one contract suite (tests/contract/test_store_contract.py) holds for all of them.
Synchronous: callers that must not wait use a thread. Errors: Conflict (exists, or another revision), NotFound,
Unavailable (the store is away; when it went away during a write, that may have been done: read before you repeat it),
StorageFailure (disk full or damaged; nothing was written), NewerData, InvalidRequest, InvalidConfiguration (refused
credentials). Other programs may write to the same store, and a server may add to what is written. What only some back
ends can promise is in `Store.promises`. Invariant: the revisions of a kind grow with each change of an object of that
kind; two changes may share one only when they were written together. Revisions of different kinds are not compared.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import msgspec

from podwire.model.errors import StorageFailure, Unavailable
from podwire.model.store.leases import Leases
from podwire.model.store.promises import Promises

_T = TypeVar("_T")

Fields = Mapping[str, Any]
"""Of a document, or a part of one: what is to be changed."""
Revisions = Mapping[str, int]
"""By kind: a revision of that kind."""
Known = Mapping["ObjectKey", tuple[str, int]]
"""What somebody has of a kind: uid and revision, by key. An object that still has both is as it was."""
RunHelper = Callable[[Sequence[str], Mapping[str, str], float], bytes]
"""Runs a program that gives credentials: arguments (the first is the program), environment, seconds it may take. Gives
what it wrote to stdout. Raises Unavailable, with the end of its stderr, when it fails or takes too long."""


def spell_name(kind: str, namespace: str, name: str) -> str:
    """Name an object for people; `namespace` "" = cluster-wide."""
    return f"{kind} {namespace}/{name}" if namespace else f"{kind} {name}"


class ObjectKey(msgspec.Struct, frozen=True, order=True):
    """Names one object. `kind` is the resource's plural name (`networkpolicies`); `namespace` "" = cluster-wide."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return spell_name(self.kind, self.namespace, self.name)


class StoredObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object as the store has it."""

    key: ObjectKey
    uid: str = ""
    """Random, given at creation: a successor of the same name has another."""
    revision: int = 0
    """Of its kind, at the object's last change; 0 before it was written."""
    created: str = ""
    """RFC 3339, UTC."""
    document: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """The document, as Kubernetes writes it: apiVersion, kind, metadata (with labels), spec. A server adds to what was
    written: its own metadata, a status, defaults. A back end may leave out what no podwire reads, except of policies:
    an unknown field of a policy must be seen."""
    fault: str = ""
    """Why what the store has there cannot be read: something else wrote it. The document is empty then. Lists and
    watches give such objects, so that one does not stop all others; nothing but the name may be used of them."""


class ReadableObject(StoredObject, frozen=True, kw_only=True):
    """An object that was decoded when it came from the store: `value` is what its document says, as its kind's decoder
    gives it. Nobody needs to decode it again."""

    value: Any = None


class StoreEvent(msgspec.Struct, frozen=True):
    """One change, and the revision of its kind after it. `deleted`: `object` is what was there last."""

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
    """What came after a revision is not known any more, of some kinds: list these again, and watch anew.

    The watch that raises it has ended. Its other kinds can be watched on from `Watch.revisions`.
    """

    def __init__(self, message: str, *, hint: str = "", kinds: Iterable[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.kinds: frozenset[str] = frozenset(kinds)
        """Which kinds are to be listed again."""


class KindUnavailable(Unavailable):
    """One kind cannot be read now, because the store does not know it or refuses it to this client; others can be."""


class Watch(Protocol):
    """Changes of some kinds, each once, those of one kind in order. One thread reads it; any may close it."""

    @property
    def revisions(self) -> Revisions:
        """Up to which revision of each kind everything was given: from here another watch goes on. Grows without a
        change, too, when the store says that there was none."""

    @property
    def failing(self) -> Mapping[str, str]:
        """Kinds that cannot be followed now while others can, and why; nothing of them is lost. As of the last `next`;
        when no kind can be followed, `next` raises Unavailable instead."""

    def next(self, timeout_s: float) -> Sequence[StoreEvent]:
        """Give what has happened, waiting up to `timeout_s` for the first; () when nothing came. Raises Compacted,
        Unavailable (call again later: nothing is lost)."""

    def close(self) -> None:
        """Stop watching; a waiting `next` on another thread returns ()."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_exception: object) -> None: ...


class Waker(Protocol):
    """Tells a watch of a file that another process has changed it. Only a hint: a watch also looks by itself."""

    def wait(self, timeout_s: float) -> None:
        """Return at a change since the last call, at `wake`, or after `timeout_s`."""

    def wake(self) -> None:
        """End `wait` on another thread, or the next one; after `close` do nothing."""

    def close(self) -> None:
        """Give descriptors back. Nobody may be waiting."""


OpenWaker = Callable[[Path], Waker]
"""Opens what wakes when the file of this path is touched."""


class Store(Protocol):
    """Objects of one cluster. Safe to call from several threads."""

    @property
    def promises(self) -> Promises:
        """What this back end does beyond what every one does."""

    def get(self, key: ObjectKey) -> StoredObject | None:
        """Give one object; None when there is none. UnreadableObject when what is there is none."""

    def list(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        at_least: int | None = None,
        known: Known | None = None,
    ) -> tuple[Sequence[StoredObject], int]:
        """Give all objects of a kind (of one namespace), by namespace and name, and the revision of the kind they are
        of: all of one moment. `at_least` None: as they are now. Else a state of that revision or any newer one will do
        (0: any), which may cost the store less. A store that was put back to an older state gives what it has.
        Objects that are as `known` may come without their document: whoever asks has it. KindUnavailable."""

    def create(self, new: StoredObject) -> StoredObject:
        """Write an object that must not exist (else Conflict); gives it with uid, revision and time."""

    def update(self, new: StoredObject) -> StoredObject:
        """Replace an object whose revision must still be `new.revision` (else Conflict; NotFound). Uid and time of
        creation stay what they are, whatever `new` says. One that cannot be read may be replaced too. One that would
        not change may keep its revision."""

    def patch(
        self, key: ObjectKey, changes: Fields, *, revision: int | None = None, uid: str = ""
    ) -> StoredObject:
        """Change single fields, under the preconditions that are given, and leave all others as they are, whoever
        writes them meanwhile: a merge patch (RFC 7386), in which None takes a field away and a list is replaced whole.
        Nothing is written when it would change nothing. NotFound, Conflict; UnreadableObject of what is none."""

    def delete(self, key: ObjectKey, *, revision: int | None = None, uid: str = "") -> StoredObject:
        """Remove an object, under the preconditions that are given; gives what was there. NotFound, Conflict."""

    def together(self) -> AbstractContextManager[None]:
        """Let the writes of this thread in the block take effect together at its end, and none when the block raises: a
        hint, which a back end follows for `Promises.together_max` writes at a time. Reads in the block may see what was
        there before, each object is written once, and what the writes give may have its revision only after the block.
        Conflict may come at its end. Others may have to wait: be quick."""

    def watch(self, after: Revisions) -> Watch:
        """Watch changes of the kinds named, of each after a revision that `list` or another watch gave of it. Costs the
        store one watch for each kind at most."""

    def leases(self) -> Leases | None:
        """Give the store's leases, the same each time; None of one that has none, where nobody knows who lives."""

    def close(self) -> None:
        """Close what is open, watches and leases too; names that are held run out."""


def value_of(stored: StoredObject, wanted: type[_T]) -> _T | None:
    """Give what an object says if it was decoded already, and as this."""
    value = stored.value if isinstance(stored, ReadableObject) else None
    return value if isinstance(value, wanted) else None


def look_at(store: Store, key: ObjectKey) -> StoredObject | None:
    """Give one object for whoever is going to replace or delete it: one that cannot be read has a `fault`."""
    try:
        return store.get(key)
    except UnreadableObject as error:
        return error.stored
