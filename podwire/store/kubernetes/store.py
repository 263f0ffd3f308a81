"""The store in the Kubernetes API: own kinds as custom resources, Kubernetes' own kinds as they are.

Opened by `store.open`. Implements `model.store.Store`. Callers wait on their own threads for the one loop that has the
connections. Must never write without the precondition that the caller gave, nor make or delete what is Kubernetes' own.
Invariant: the revision of an object is its resourceVersion.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from typing import Any, Final
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from podwire.model.errors import Conflict, InvalidRequest, PodwireError, Unavailable
from podwire.model.store import (
    Fields,
    Known,
    ObjectKey,
    Revisions,
    RunHelper,
    StoredObject,
    UnreadableObject,
)
from podwire.model.store.events import EventWrite
from podwire.model.store.packed import LazyList
from podwire.model.store.promises import FULL, Promises
from podwire.store.documents import exists, find_conflict, none_there
from podwire.store.kubernetes.api.access import Access
from podwire.store.kubernetes.api.client import (
    DEADLINE_S,
    JSON,
    MERGE_PATCH,
    STRATEGIC_PATCH,
    Client,
    Request,
)
from podwire.store.kubernetes.api.refusals import CONFLICT, INVALID, Intent, Refused
from podwire.store.kubernetes.api.resources import (
    CORE_NODES,
    Resource,
    Selectors,
    find_resource,
    with_query,
)
from podwire.store.kubernetes.event_documents import EVENTS, encode_event, encode_event_again
from podwire.store.kubernetes.listing import list_pages, read_newest
from podwire.store.kubernetes.objects import (
    decode_key,
    decode_object,
    encode_object,
    encode_patch,
    split_status,
)
from podwire.store.kubernetes.streams import IDLE_S, Hub
from podwire.store.kubernetes.watch import KubernetesWatch
from podwire.store.loop import LoopThread

PROMISES: Final = replace(
    FULL, one_order=False, together_max=1, owns_namespaces=False, any_name=False
)
OPEN_PATIENCE: Final = 0.4
"""Of the usual deadline: how long opening waits for a sign of the API server, as an agent's pods wait for it."""
CHANGE_ATTEMPTS: Final = 20
"""How often an object is patched or deleted whatever its revision, because others change it meanwhile."""
STRICT: Final = {"fieldValidation": "Strict"}
"""A field that the server's schema lacks is refused, not dropped in silence."""


class KubernetesStore:
    """Objects of the API server that `access` names.

    One that is away now is no error: each call asks anew. `selectors` narrow what is listed and watched. The server's
    audit log and Events show `name`, the node's, as the client. Raises InvalidConfiguration for files that cannot be
    used.
    """

    def __init__(
        self,
        access: Access,
        *,
        selectors: Selectors | None = None,
        run_helper: RunHelper | None = None,
        name: str = "",
        deadline_s: float = DEADLINE_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._name = name
        self._client = Client(access, run_helper=run_helper, name=name, deadline_s=deadline_s)
        self._client.check()
        self._thread = LoopThread("kubernetes")
        self._hub = Hub(self._thread, self._client, selectors or {}, idle_s=idle_s)
        self._watches: set[KubernetesWatch] = set()
        with suppress(Unavailable, Refused):
            self._thread.run(self._client.call(_GREETING))

    @property
    def promises(self) -> Promises:
        """Give what this back end promises: the API server commits each object by itself."""
        return PROMISES

    @property
    def clock_ahead_s(self) -> float:
        """By how much this host's clock is ahead of the API server's."""
        return self._client.clock_ahead_s

    def get(self, key: ObjectKey) -> StoredObject | None:
        """Give one object; None when there is none."""
        found = self._read("get", key)
        if found is not None and found.fault:
            raise UnreadableObject(found)
        return found

    def list(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        at_least: int | None = None,
        known: Known | None = None,
    ) -> tuple[Sequence[StoredObject], int]:
        """Give all objects of a kind (of one namespace), by namespace and name, and the kind's revision."""
        resource = find_resource(kind)
        inside = namespace if namespace and resource.namespaced else None
        try:
            found, revision = self._thread.run(
                list_pages(self._client, resource, self._hub.select(kind), inside, at_least)
            )
        except Refused as refused:
            if refused.is_without_resource and resource.is_optional:
                return [], 0
            raise self._client.explain(refused) from None
        self._hub.note(kind, revision)
        keyed = ((decode_key(resource, item), item) for item in found)
        chosen = (pair for pair in keyed if namespace is None or pair[0].namespace == namespace)
        items = [item for _, item in sorted(chosen, key=itemgetter(0))]
        return LazyList(items, partial(decode_object, resource, known=known)), revision

    def read_newest(self, kinds: Sequence[str]) -> dict[str, int]:
        """Give, for each kind, the highest revision that any of its objects has now; 0 when there are none."""
        found = {}
        for kind in kinds:
            resource = find_resource(kind)
            try:
                found[kind] = self._thread.run(read_newest(self._client, resource))
            except Refused as refused:
                if not (refused.is_without_resource and resource.is_optional):
                    raise self._client.explain(refused) from None
        return found

    def create(self, new: StoredObject) -> StoredObject:
        """Write an object that must not exist (else Conflict); gives it with uid, revision and time."""
        resource = _find_writable("create", new.key)
        body, status = encode_object(resource, new)
        intent = _intend("create", resource, new.key)
        path = with_query(resource.path(new.key.namespace), STRICT)
        try:
            made = self._write(Request(intent, "POST", path, body))
        except Refused as refused:
            if refused.is_taken:
                raise exists(new.key, 0) from None
            raise self._client.explain(refused) from None
        return self._patch_status(made, status) if status else made

    def update(self, new: StoredObject) -> StoredObject:
        """Replace an object whose revision must still be `new.revision` (else Conflict; NotFound)."""
        resource = _find_writable("update", new.key)
        body, status = encode_object(resource, new, revision=new.revision, uid=new.uid)
        # For kinds that allow it, a PUT without resourceVersion overwrites whatever is there (API conventions,
        # "Concurrency Control and Consistency"). The contract never does that.
        if not new.revision:
            raise self._explain_conflict("update", new.key, 0, new.uid)
        request = Request(
            _intend("update", resource, new.key),
            "PUT",
            with_query(resource.object_path(new.key), STRICT),
            body,
        )
        try:
            made = self._write(request)
        except Refused as refused:
            raise self._explain_write(refused, new.key, new.revision, new.uid) from None
        # With the status subresource, a PUT of the object ignores its status (API conventions, "Spec and status"). It
        # needs a write of its own.
        wanted = {field: status.get(field) for field in resource.status_of_annotations.values()}
        return self._patch_status(made, wanted) if wanted else made

    def patch(
        self, key: ObjectKey, changes: Fields, *, revision: int | None = None, uid: str = ""
    ) -> StoredObject:
        """Change single fields of an object and leave all others; None takes one away."""
        resource = _find_writable("patch", key)
        main, status = split_status(resource, changes)
        if status and not main:
            return self._patch(resource, key, {"status": status}, revision, uid, "status")
        made = self._patch(resource, key, main, revision, uid)
        return self._patch_status(made, status) if status else made

    def put_condition(self, node: StoredObject, condition: Mapping[str, str]) -> None:
        """Replace one condition of a core Node that has not changed since it was read (else Conflict, NotFound).

        Nothing else of Kubernetes' own kinds is ever written.
        """
        resource = find_resource(CORE_NODES)
        key = ObjectKey(CORE_NODES, "", node.key.name)
        required = {"uid": node.uid, "resourceVersion": str(node.revision)}
        request = Request(
            replace(_intend("patch", resource, key), subresource="status"),
            "PATCH",
            resource.object_path(key, "status"),
            _encode({"metadata": required, "status": {"conditions": [condition]}}),
            STRATEGIC_PATCH,
        )
        try:
            self._thread.run(self._client.call(request))
        except Refused as refused:
            raise self._explain_write(refused, key, node.revision, node.uid) from None

    def write_event(self, told: EventWrite) -> None:
        """Make an Event, or raise the count of one that is there (else NotFound). Raises Conflict, Unavailable,
        InvalidRequest."""
        intent = Intent("create" if told.is_new else "patch", EVENTS, told.name, told.namespace)
        base = EVENTS.path(told.namespace)
        if told.is_new:
            request = Request(intent, "POST", base, encode_event(told, self._name))
        else:
            path = f"{base}/{quote(told.name)}"
            request = Request(intent, "PATCH", path, encode_event_again(told), MERGE_PATCH)
        try:
            self._thread.run(self._client.call(request))
        except Refused as refused:
            raise self._client.explain(refused) from None

    def delete(self, key: ObjectKey, *, revision: int | None = None, uid: str = "") -> StoredObject:
        """Remove an object, under the preconditions that are given; gives what was there. NotFound, Conflict."""
        resource = _find_writable("delete", key)
        for attempt in range(CHANGE_ATTEMPTS):
            present = self._read("delete", key)
            if present is None:
                raise none_there("delete", key)
            seen = present.uid, present.revision
            if conflict := find_conflict("delete", key, seen, uid, revision):
                raise conflict
            # Preconditions on both: somebody may delete the object and make another of its name between read and
            # delete.
            required = {"uid": present.uid, "resourceVersion": str(present.revision)}
            request = Request(
                _intend("delete", resource, key),
                "DELETE",
                resource.object_path(key),
                _encode({"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": required}),
            )
            try:
                self._thread.run(self._client.call(request))
            except Refused as refused:
                if refused.code == CONFLICT and attempt < CHANGE_ATTEMPTS - 1:
                    continue
                raise self._explain_write(refused, key, revision, uid) from None
            return present
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do nothing more: each write takes effect by itself."""
        yield

    def watch(self, after: Revisions) -> KubernetesWatch:
        """Watch changes of some kinds, of each after a revision."""
        for kind in after:
            find_resource(kind)
        made = KubernetesWatch(after, self._forget)
        self._watches.add(made)
        self._hub.attach(made, after)
        made.wait_until_open(self._client.deadline_s)
        return made

    def leases(self) -> None:
        """Give none: with Kubernetes nobody needs to know who lives for packets to pass (docs/store.md)."""
        return

    def end_calls(self) -> None:
        """Have nobody wait for the API server any longer; see `store.open.end_calls`."""
        self._thread.end_calls()
        for watch in tuple(self._watches):
            watch.stop_waiting()

    def close(self) -> None:
        """Close the connections and all watches."""
        for watch in tuple(self._watches):
            watch.close()
        with suppress(PodwireError):
            self._thread.run(self._client.close(), is_last=True)
        self._thread.close()

    def _forget(self, watch: KubernetesWatch) -> None:
        self._watches.discard(watch)
        with suppress(Unavailable):  # closed meanwhile
            self._hub.detach(watch)

    def _read(self, verb: str, key: ObjectKey) -> StoredObject | None:
        """Read one object; `verb` says what for."""
        resource = find_resource(key.kind)
        if not resource.can_exist(key):
            return None
        request = Request(_intend("get", resource, key), "GET", resource.object_path(key))
        try:
            raw = self._thread.run(self._client.call(request))
        except Refused as refused:
            is_absent = refused.is_without_resource and resource.is_optional
            if refused.is_without_object or is_absent:
                return None
            error = self._client.explain(refused)
            error.hint = error.hint if verb == "get" else f"{error.hint} (to {verb} it)"
            raise error from None
        return decode_object(resource, raw)

    def _write(self, request: Request) -> StoredObject:
        """Send a write; gives the object as it is then. Raises Refused."""
        made = decode_object(request.intent.resource, self._thread.run(self._client.call(request)))
        self._hub.note(made.key.kind, made.revision)
        return made

    def _patch(
        self,
        resource: Resource,
        key: ObjectKey,
        changes: Mapping[str, Any],
        revision: int | None,
        uid: str,
        subresource: str = "",
    ) -> StoredObject:
        request = Request(
            replace(_intend("patch", resource, key), subresource=subresource),
            "PATCH",
            with_query(resource.object_path(key, subresource), STRICT),
            encode_patch(key, changes, revision=revision, uid=uid),
            MERGE_PATCH,
        )
        for attempt in range(CHANGE_ATTEMPTS):
            try:
                return self._write(request)
            except Refused as refused:
                error = self._explain_write(refused, key, revision, uid)
                is_final = revision is not None or attempt == CHANGE_ATTEMPTS - 1
                if refused.code != CONFLICT or is_final or error.message.endswith("made anew"):
                    raise error from None
        raise AssertionError("the last attempt returns or raises")

    def _patch_status(self, made: StoredObject, status: Mapping[str, Any]) -> StoredObject:
        resource = find_resource(made.key.kind)
        changes = {"status": status}
        return self._patch(resource, made.key, changes, made.revision, made.uid, "status")

    def _explain_write(
        self, refused: Refused, key: ObjectKey, revision: int | None, uid: str
    ) -> PodwireError:
        if refused.is_without_object:
            return none_there(refused.intent.verb, key)
        # Of another uid built-in kinds say that it is immutable.
        is_other = (
            refused.code == INVALID and bool(uid) and "metadata.uid" in refused.status.message
        )
        if refused.code == CONFLICT or is_other:
            return self._explain_conflict(refused.intent.verb, key, revision, uid)
        return self._client.explain(refused)

    def _explain_conflict(
        self, verb: str, key: ObjectKey, revision: int | None, uid: str
    ) -> PodwireError:
        """Say what is there in the place of what was expected."""
        present = self._read(verb, key)
        if present is None:
            return none_there(verb, key)
        conflict = find_conflict(verb, key, (present.uid, present.revision), uid, revision)
        return conflict or Conflict(
            f"{verb} {key}: others change it all the time", hint="read it again and repeat"
        )


_encode: Final = msgspec.json.Encoder().encode
_VERSION: Final = Resource("version", "Version", "", "v1", "version", namespaced=False)
_GREETING: Final = Request(
    Intent("get", _VERSION), "GET", "/version", accept=JSON, patience=OPEN_PATIENCE
)


def _intend(verb: str, resource: Resource, key: ObjectKey) -> Intent:
    return Intent(verb, resource, key.name, key.namespace)


def _find_writable(verb: str, key: ObjectKey) -> Resource:
    """Give the resource of an object that podwire may write; InvalidRequest of any other."""
    if not key.kind or not key.name:
        raise InvalidRequest(f"{verb} {key}: an object has a kind and a name")
    resource = find_resource(key.kind)
    if resource.is_read_only:
        raise InvalidRequest(
            f"{verb} {key}: with the store `kubernetes` {resource.name} objects are Kubernetes' own",
            hint=f"use kubectl {verb}",
        )
    if not resource.can_exist(key):
        where = "a namespace" if resource.namespaced else "no namespace"
        raise InvalidRequest(
            f"{verb} {key}: no such object can be in the Kubernetes API",
            hint=f"a {resource.name} has {where}; names are of a-z, 0-9, - and .",
        )
    return resource
