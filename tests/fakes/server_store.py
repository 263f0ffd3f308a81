"""A store that behaves as an API server of Kubernetes does, as far as the store's contract can tell.

Each kind has revisions of its own, a server adds to what is written, refuses what is no valid object, gives names
their form, has no leases, writes nothing together and makes namespaces itself. Others write to it all the time.
"""

import copy
import re
import threading
from collections.abc import Mapping
from typing import Any

from podwire.control.documents.kinds import decode
from podwire.control.documents.same import SERVERS_METADATA
from podwire.model.errors import InvalidRequest
from podwire.model.store import Fields, ObjectKey, Revisions, StoredObject
from podwire.model.store.kinds import kind_of_plural
from podwire.model.store.promises import Promises
from podwire.store.documents import encode_document, merge
from tests.fakes.store import MemoryStore, MemoryWatch

NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
PROMISES = Promises(
    one_order=False,
    together_max=1,
    notices_other_store=False,
    owns_namespaces=False,
    any_name=False,
)


class ServerStore(MemoryStore):
    """Objects of an API server; `beside` another client of the same server."""

    def __init__(self, beside: "ServerStore | None" = None) -> None:
        super().__init__()
        self._open: list[MemoryWatch] = []
        self._revisions: dict[str, int] = {}
        if beside is not None:
            self.changed, self.events = beside.changed, beside.events
            self._objects, self._revisions = beside._objects, beside._revisions
            return
        for name in NAMESPACES:
            self.make_namespace(name)

    def watch(self, after: Revisions) -> MemoryWatch:
        watch = super().watch(after)
        self._open.append(watch)
        return watch

    def close(self) -> None:
        for watch in self._open:
            watch.close()

    @property
    def promises(self) -> Promises:
        return PROMISES

    def leases(self) -> None:  # type: ignore[override]
        return None

    def make_namespace(self, name: str) -> None:
        """What only others may do."""
        key = ObjectKey("namespaces", "", name)
        document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        super().create(StoredObject(key=key, document=complete(document)))

    def get(self, key: ObjectKey) -> StoredObject | None:
        found = super().get(key)
        return None if found is None else self._copy(found)

    def create(self, new: StoredObject) -> StoredObject:
        self._check(new)
        return super().create(self._completed(new))

    def update(self, new: StoredObject) -> StoredObject:
        self._check(new)
        with self.changed:
            old = self._objects.get(new.key)
            made = self._completed(new)
            is_same = old is not None and old.revision == new.revision
            if is_same and old is not None and old.document == made.document:
                return old
            return super().update(made)

    def patch(
        self, key: ObjectKey, changes: Fields, *, revision: int | None = None, uid: str = ""
    ) -> StoredObject:
        with self.changed:
            old = self._objects.get(key)
            if old is not None:
                self._check(StoredObject(key=key, document=merge(old.document, changes)))
            return super().patch(key, changes, revision=revision, uid=uid)

    def revision_of(self, kind: str) -> int:
        return self._revisions.get(kind, first_revision(kind))

    def _next_revision(self, kind: str) -> int:
        self._revisions[kind] = self.revision_of(kind) + 1
        return self._revisions[kind]

    def _check(self, new: StoredObject) -> None:
        encode_document(new)
        kind = kind_of_plural(new.key.kind)
        if kind is None:
            raise InvalidRequest(f"write {new.key}: there is no such kind")
        if not NAME.fullmatch(new.key.name):
            raise InvalidRequest(f"write {new.key}: its name is none that Kubernetes allows")
        if not kind.for_people:
            return
        if decode(new.document).key != new.key:
            raise InvalidRequest(f"write {new.key}: its document is of another object")
        if kind.namespaced and ObjectKey("namespaces", "", new.key.namespace) not in self._objects:
            raise InvalidRequest(f"write {new.key}: there is no such namespace")

    @staticmethod
    def _completed(new: StoredObject) -> StoredObject:
        return StoredObject(
            key=new.key, uid=new.uid, revision=new.revision, document=complete(new.document)
        )

    @staticmethod
    def _copy(found: StoredObject) -> StoredObject:
        return StoredObject(
            key=found.key,
            uid=found.uid,
            revision=found.revision,
            created=found.created,
            document=copy.deepcopy(dict(found.document)),
        )


class OthersAtWork:
    """Writes to a server all the time, as its controllers and other people do."""

    def __init__(self, store: ServerStore) -> None:
        self._store = store
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="others", daemon=True)

    def start(self) -> "OthersAtWork":
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stopping.wait(0.01):
            number += 1
            metadata = {"name": f"of-others-{number}", "namespace": "kube-system"}
            document = {
                "apiVersion": "networking.k8s.io/v1",
                "kind": "NetworkPolicy",
                "metadata": metadata,
                "spec": {"podSelector": {}},
            }
            key = ObjectKey("networkpolicies", "kube-system", metadata["name"])
            self._store.create(StoredObject(key=key, document=document))
            if number % 2:
                self._store.delete(key)
            if number % 10 == 0:
                self._store.make_namespace(f"of-others-{number}")


def first_revision(kind: str) -> int:
    """Far from that of any other kind."""
    return 1000 * sum(kind.encode())


def complete(document: Mapping[str, Any]) -> dict[str, Any]:
    """Give a document as an API server writes it back."""
    made: dict[str, Any] = copy.deepcopy(dict(document))
    metadata = made.setdefault("metadata", {})
    metadata |= {
        "uid": "u",
        "resourceVersion": "7",
        "generation": 3,
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [{"manager": "podwire", "operation": "Apply"}],
    }
    metadata.setdefault(SERVERS_METADATA[0], ["foregroundDeletion"])
    made["status"] = {}
    if made["kind"] == "Namespace":
        made["spec"] = {"finalizers": ["kubernetes"]}
        labels = metadata.setdefault("labels", {})
        labels.setdefault("kubernetes.io/metadata.name", metadata["name"])
    if made["kind"] == "NetworkPolicy":
        _add_defaults(made["spec"])
    return made


def _add_defaults(spec: dict[str, Any]) -> None:
    # pkg/apis/networking/v1/defaults.go of Kubernetes, and what its encoder leaves out.
    spec.setdefault("policyTypes", ["Ingress", "Egress"] if spec.get("egress") else ["Ingress"])
    for direction in ("ingress", "egress"):
        for rule in spec.get(direction, []):
            for port in rule.get("ports", []):
                port.setdefault("protocol", "TCP")
            for name in [name for name, value in rule.items() if value == []]:
                del rule[name]
        if spec.get(direction) == []:
            del spec[direction]
