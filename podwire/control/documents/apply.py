"""Apply documents to a store: all are checked before the first is written, and each is written only if it differs.

Called by the API and, with `--store`, by the command line. The store is a `model.store.Store`; nothing else is
touched. What a server has added to an object does not count as a difference (`control.documents.same`). Invariant: a
set with one fault in it changes nothing, and what was there before stays in force.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

import msgspec

from podwire.control.documents.kinds import (
    decode,
    identify,
)
from podwire.control.documents.pools import check_pools
from podwire.control.documents.same import is_so, keep_additions, leave_out_additions
from podwire.model.documents.reader import list_faults
from podwire.model.errors import Conflict, Fault, InvalidRequest, NotFound
from podwire.model.ids import DEFAULT_NAMESPACE
from podwire.model.store import ObjectKey, Store, StoredObject, look_at
from podwire.model.store.kinds import KINDS, NAMESPACE, kind_of_plural

ATTEMPTS: Final = 50
"""How often one object is tried because somebody else changed it meanwhile: only where writes are not done together."""
FAULTS_KEPT: Final = 64

CREATED: Final = "created"
CONFIGURED: Final = "configured"
UNCHANGED: Final = "unchanged"
DELETED: Final = "deleted"

_T = TypeVar("_T")

_ORDER: Final[Mapping[str, int]] = {kind.plural: index for index, kind in enumerate(KINDS)}


class Applied(msgspec.Struct, frozen=True):
    """What became of one object, or would with `dry_run`."""

    key: ObjectKey
    action: str
    before: StoredObject | None
    """What was there; None when nothing was."""
    after: StoredObject | None
    """What is there now; None when it was deleted."""

    @property
    def revision(self) -> int | None:
        """The store's revision that holds it, for `policy wait`; None when it was deleted or only tried."""
        return (self.after.revision or None) if self.after is not None else None


def apply_documents(
    store: Store, documents: Sequence[object], *, namespace: str = "", dry_run: bool = False
) -> list[Applied]:
    """Make the objects of these documents so; gives what became of each, in the order of the documents.

    `namespace`: of objects that name none. Raises InvalidRequest with all faults, each path beginning `documents[3]`:
    then nothing is written. Nor when the store fails, if it is one that writes them together.
    """
    drafts = decode_all(documents, namespace=namespace)
    refuse_namespaces(store, drafts)

    def attempt() -> dict[ObjectKey, Applied]:
        done: dict[ObjectKey, Applied] = {}
        with _writing(store, dry_run=dry_run):
            check_namespaces(store, drafts)
            refuse_pools(store, drafts)
            # Namespaces before what is in them, whatever the order in the files.
            for draft in sorted(drafts, key=lambda draft: _ORDER[draft.key.kind]):
                done[draft.key] = _apply(store, draft, dry_run=dry_run)
        return done

    # What is written together may be refused at its end, because somebody else was faster.
    done = _retried(attempt)
    return [done[draft.key] for draft in drafts]


def decode_all(documents: Sequence[object], *, namespace: str = "") -> list[StoredObject]:
    """Check documents; InvalidRequest with the faults of all of them, each path beginning `documents[3]`."""
    drafts: list[StoredObject] = []
    faults: list[Fault] = []
    first: dict[ObjectKey, int] = {}
    for index, document in enumerate(documents):
        place = f"documents[{index}]"
        try:
            draft = decode(document, namespace=namespace)
        except InvalidRequest as error:
            faults += (Fault(_join(place, fault.path), fault.message) for fault in error.faults)
            continue
        drafts.append(draft)
        if first.setdefault(draft.key, index) != index:
            faults.append(Fault(place, f"is {draft.key} again: documents[{first[draft.key]}]"))
    _raise_if_any(faults)
    return drafts


def check_namespaces(store: Store, drafts: Sequence[StoredObject]) -> None:
    """Raise InvalidRequest when an object is of a namespace that neither exists nor is among `drafts`."""
    known = {DEFAULT_NAMESPACE}
    known.update(stored.key.name for stored in drafts if stored.key.kind == NAMESPACE.plural)
    wanted = {stored.key.namespace for stored in drafts if stored.key.namespace}
    if not wanted - known:
        return
    known.update(stored.key.name for stored in store.list(NAMESPACE.plural)[0])
    faults = [
        Fault(
            f"documents[{index}].metadata.namespace",
            f"is {stored.key.namespace!r}, which does not exist: add a Namespace object",
        )
        for index, stored in enumerate(drafts)
        if stored.key.namespace and stored.key.namespace not in known
    ]
    _raise_if_any(faults)


def refuse_namespaces(store: Store, drafts: Sequence[StoredObject]) -> None:
    """Raise InvalidRequest for Namespaces in a store whose namespaces are not podwire's."""
    faults = [
        Fault(
            f"documents[{index}].kind",
            "is Namespace, which belongs to Kubernetes: kubectl apply it",
        )
        for index, draft in enumerate(drafts)
        if draft.key.kind == NAMESPACE.plural and not store.promises.owns_namespaces
    ]
    _raise_if_any(faults)


def refuse_pools(store: Store, drafts: Sequence[StoredObject]) -> None:
    """Raise InvalidRequest when pools would overlap, or be cut anew while nodes have blocks of them."""
    faults = [
        Fault(_join(f"documents[{index}]", fault.path), fault.message)
        for index, fault in check_pools(store, drafts)
    ]
    _raise_if_any(faults)


def put_object(
    store: Store, key: ObjectKey, document: Mapping[str, Any], *, dry_run: bool = False
) -> Applied:
    """Make one object so. A `metadata.resourceVersion` is a precondition: Conflict when the object has another."""
    draft = decode(document, namespace=key.namespace)
    refuse_namespaces(store, [draft])
    if draft.key != key:
        raise InvalidRequest(
            f"put {key}: the document is {draft.key}",
            hint="the path and the document must name the same object",
            faults=(_differ(draft.key, key),),
        )
    wanted = document["metadata"].get("resourceVersion")
    with _writing(store, dry_run=dry_run):
        check_namespaces(store, [draft])
        refuse_pools(store, [draft])
        if wanted in (None, ""):
            return _apply(store, draft, dry_run=dry_run)
        stored = look_at(store, key)
        # Compared as text: a resourceVersion is opaque to clients (Kubernetes, "Resource versions"), ours are numbers.
        revision = stored.revision if stored is not None else 0
        if str(wanted) != str(revision):
            is_at = f"at revision {revision}" if stored is not None else "no longer there"
            raise Conflict(
                f"put {key}: it is {is_at}, not at {str(wanted)[:20]!r}",
                hint="somebody else has changed it: read it again and repeat",
            )
        return _apply(store, draft, dry_run=dry_run, revision=revision)


def delete_object(store: Store, key: ObjectKey, *, dry_run: bool = False) -> Applied:
    """Delete one object. NotFound; Conflict for a namespace that has policies, for `default`, and for what is not
    podwire's to delete.
    """
    kind = kind_of_plural(key.kind)
    is_foreign = key.kind == NAMESPACE.plural and not store.promises.owns_namespaces
    if is_foreign or (kind is not None and kind.is_of_kubernetes):
        raise Conflict(f"delete {key}: it belongs to Kubernetes", hint="kubectl delete it")
    with _writing(store, dry_run=dry_run):
        stored = look_at(store, key)
        if stored is None:
            raise NotFound(f"delete {key}: there is none", hint=f"see podwire get {key.kind}")
        if key.kind == NAMESPACE.plural:
            _check_namespace_unused(store, key.name)
        if not dry_run:
            stored = store.delete(key)
    return Applied(key, DELETED, stored, None)


def identify_all(documents: Sequence[object], *, namespace: str = "") -> list[ObjectKey]:
    """Tell which objects documents are about, each once, whatever else these say; what others are in comes last.

    InvalidRequest with the faults of all.
    """
    keys: dict[ObjectKey, None] = {}
    faults: list[Fault] = []
    for index, document in enumerate(documents):
        try:
            keys[identify(document, namespace=namespace)] = None
        except InvalidRequest as error:
            place = f"documents[{index}]"
            faults += (Fault(_join(place, fault.path), fault.message) for fault in error.faults)
    _raise_if_any(faults)
    # The reverse of the order of `apply`: a Namespace that still has policies is not deleted.
    return sorted(keys, key=lambda key: -_ORDER[key.kind])


def _apply(
    store: Store, draft: StoredObject, *, dry_run: bool, revision: int | None = None
) -> Applied:
    """Create or replace one object unless it is so already; `revision`: only if it is still at this one."""

    def attempt() -> Applied:
        stored = look_at(store, draft.key)
        if stored is not None and is_so(stored, draft):
            return Applied(draft.key, UNCHANGED, stored, stored)
        action = CREATED if stored is None else CONFIGURED
        if dry_run:
            before = None if stored is None else leave_out_additions(stored, draft)
            return Applied(draft.key, action, before, draft)
        if stored is None:
            return Applied(draft.key, action, None, store.create(draft))
        # With the uid and revision of what was compared: whatever others write meanwhile makes this write a Conflict.
        replaced = StoredObject(
            key=draft.key,
            uid=stored.uid,
            revision=stored.revision if revision is None else revision,
            document=keep_additions(stored, draft),
        )
        return Applied(draft.key, action, stored, store.update(replaced))

    return attempt() if revision is not None else _retried(attempt)


def _writing(store: Store, *, dry_run: bool) -> AbstractContextManager[None]:
    """Keep others from writing between what is checked and what is written, where the store can."""
    return nullcontext() if dry_run else store.together()


def _retried(attempt: Callable[[], _T]) -> _T:
    """Try again while somebody else is faster; raise the last Conflict when that does not end."""
    for _ in range(ATTEMPTS - 1):
        try:
            return attempt()
        except (Conflict, NotFound):
            continue
    return attempt()


def _check_namespace_unused(store: Store, name: str) -> None:
    if name == DEFAULT_NAMESPACE:
        raise Conflict(f"delete namespace {name!r}: it always exists", hint="leave it")
    used = {kind.plural: len(store.list(kind.plural, name)[0]) for kind in KINDS if kind.namespaced}
    listed = ", ".join(f"{count} {plural}" for plural, count in used.items() if count)
    if listed:
        raise Conflict(
            f"delete namespace {name!r}: it has {listed}",
            hint="delete these first, or all of them with one podwire delete -f FILE",
        )


def _differ(there: ObjectKey, wanted: ObjectKey) -> Fault:
    if there.kind != wanted.kind:
        return Fault("kind", f"is that of {there.kind}, not of {wanted.kind}")
    return Fault("metadata.name", f"is {there.name!r}, not {wanted.name!r}")


def _join(place: str, path: str) -> str:
    return place + (path if not path or path.startswith("[") else f".{path}")


def _raise_if_any(faults: Sequence[Fault]) -> None:
    if not faults:
        return
    what = list_faults(faults) if len(faults) == 1 else f"{len(faults)} faults"
    raise InvalidRequest(
        f"read the documents: {what}",
        hint="nothing was changed; correct the documents and apply them again",
        faults=tuple(faults[:FAULTS_KEPT]),
    )
