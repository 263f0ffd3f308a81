"""Labels that a pod does not bring itself: its namespace's, and those of the Workload objects that match it.

Filled by list and watch of the store, read by the resolver at any time without a lock (values are replaced, never
changed). Calls no store. Invariant: an endpoint's labels are its own, overridden by those of Workloads, and exactly
those of its namespace. Only podwire gives labels of podwire.io.
"""

import fnmatch
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from podwire.control.kubernetes.own_pods import PodName
from podwire.model.documents.lenient import members_of
from podwire.model.endpoint import EndpointRecord
from podwire.model.labels import (
    NAME_KEY,
    NETWORK_KEY,
    OWN_PREFIX,
    SOURCE_CNI,
    is_label_key,
    is_label_value,
    is_namespace_label,
    namespace_labels,
    sort_labels,
    split_label,
)
from podwire.model.store import ObjectKey, StoredObject, StoreEvent

NAMESPACES: Final = "namespaces"
WORKLOADS: Final = "workloads"
_NAME: Final = f"{SOURCE_CNI}:{NAME_KEY}="
_NETWORK: Final = f"{SOURCE_CNI}:{NETWORK_KEY}="


class Workload(msgspec.Struct, frozen=True):
    """Labels for every container whose name and network fit, before it starts."""

    name: str
    namespace: str = ""
    """Of the object; "" = containers of every namespace."""
    pattern: str = "*"
    """Glob over the container's name, case-sensitive."""
    network: str = ""
    """"" = every network."""
    labels: tuple[tuple[str, str], ...] = ()

    def fits(self, *, namespace: str, network: str, pod: str) -> bool:
        """Tell whether this labels a container."""
        return (
            self.namespace in ("", namespace)
            and self.network in ("", network)
            and fnmatch.fnmatchcase(pod, self.pattern)
        )


class SourceChange(msgspec.Struct, frozen=True):
    """What changed: endpoints of these namespaces and pods, and of every namespace when Workloads did."""

    namespaces: frozenset[str] = frozenset()
    workloads: bool = False
    pods: frozenset[PodName] = frozenset()

    def __or__(self, other: "SourceChange") -> "SourceChange":
        return SourceChange(
            self.namespaces | other.namespaces,
            self.workloads or other.workloads,
            self.pods | other.pods,
        )

    def __bool__(self) -> bool:
        return bool(self.namespaces) or self.workloads or bool(self.pods)

    def may_touch(self, record: EndpointRecord) -> bool:
        """Tell whether the labels of this endpoint may be others now."""
        return (
            self.workloads
            or record.namespace in self.namespaces
            or (record.namespace, record.pod) in self.pods
        )


class _Snapshot(msgspec.Struct, frozen=True):
    """What is kept for a start without the store."""

    namespaces: dict[str, dict[str, str]] = {}
    workloads: list[Workload] = []


class LabelSources:
    """The namespaces and Workloads that the agent knows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._namespaces: dict[str, dict[str, str]] = {}
        self._spelled: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {}
        """Labels of namespaces as their pods have them, and of which dictionary they were made."""
        self._workloads: dict[ObjectKey, Workload] = {}
        self._in_order: tuple[Workload, ...] = ()
        self._listed: set[str] = set()
        self._unlisted: frozenset[str] = frozenset()
        self.version = 0
        """Grows with every change: `dump` gives the same as before while this stays."""
        self.is_complete = False
        """Whether every kind was listed, in this life or an earlier one: before, nobody's labels are known."""

    def knows_namespace(self, namespace: str) -> bool:
        """Tell whether a namespace has an object, or had one when it was seen last."""
        return namespace in self._namespaces

    def find_lost(self, namespaces: Iterable[str]) -> dict[str, dict[str, str]]:
        """Give which of the namespaces the last whole list lacked, though they were known, with their labels."""
        with self._lock:
            wanted = self._unlisted.intersection(namespaces)
            return {name: self._namespaces[name] for name in sorted(wanted)}

    def effective(self, own: Iterable[str], namespace: str) -> tuple[str, ...]:
        """Give all labels of an endpoint that brings `own` (its network and name among them)."""
        # Labels of a namespace come from its object alone. An attachment that could bring them would choose its own
        # policies.
        kept = [label for label in own if not is_namespace_label(label)]
        fitting = self._fitting(kept, namespace)
        extra = dict(pair for workload in fitting for pair in workload.labels)
        if extra:
            names = {(SOURCE_CNI, key) for key in extra}
            kept = [label for label in kept if split_label(label)[:2] not in names]
        return sort_labels(
            (
                *kept,
                *(f"{SOURCE_CNI}:{key}={value}" for key, value in extra.items()),
                *self._labels_of_namespace(namespace),
            )
        )

    def _labels_of_namespace(self, namespace: str) -> tuple[str, ...]:
        labels = self._namespaces.get(namespace)
        if labels is None:
            return namespace_labels(namespace, {})
        found = self._spelled.get(namespace)
        # By identity, because a namespace that changes gets another dictionary.
        if found is None or found[0] is not labels:
            found = self._spelled[namespace] = labels, namespace_labels(namespace, labels)
        return found[1]

    def workload_of(self, own: Iterable[str], namespace: str, key: str) -> str:
        """Name the Workload object that gives a container the label `key`; "" when none does."""
        fitting = self._fitting(tuple(own), namespace)
        names = [
            workload.name
            for workload in fitting
            if any(key == given for given, _ in workload.labels)
        ]
        return names[-1] if names else ""

    def replace(self, kind: str, objects: Sequence[StoredObject]) -> SourceChange:
        """Take in a whole list of a kind."""
        with self._lock:
            self._listed.add(kind)
            if not self.is_complete and self._listed >= {NAMESPACES, WORKLOADS}:
                self.is_complete = True
                self.version += 1
            if kind == WORKLOADS:
                workloads = {stored.key: _read_workload(stored) for stored in objects}
                return self._set_workloads(workloads)
            changed = SourceChange()
            self._unlisted = frozenset(self._namespaces) - {stored.key.name for stored in objects}
            for stored in objects:
                changed |= self._set_namespace(stored)
            return changed

    def apply(self, event: StoreEvent) -> SourceChange:
        """Take in one change. A namespace that is deleted keeps its labels: so do its pods, until they end."""
        key = event.object.key
        with self._lock:
            if key.kind == NAMESPACES:
                return SourceChange() if event.deleted else self._set_namespace(event.object)
            workloads = dict(self._workloads)
            if event.deleted:
                workloads.pop(key, None)
            else:
                workloads[key] = _read_workload(event.object)
            return self._set_workloads(workloads)

    def learn_namespace(self, stored: StoredObject) -> SourceChange:
        """Take in a namespace's object as the store has it."""
        with self._lock:
            return self._set_namespace(stored)

    def dump(self) -> str:
        """Give all that is known as text, for a start without the store."""
        with self._lock:
            snapshot = _Snapshot(self._namespaces, list(self._in_order))
        return msgspec.json.encode(snapshot).decode()

    def load(self, text: str) -> None:
        """Take over what `dump` gave in an earlier life; "" or what cannot be read changes nothing."""
        try:
            snapshot = msgspec.json.decode(text.encode(), type=_Snapshot)
        except msgspec.MsgspecError:
            return
        with self._lock:
            self._namespaces = snapshot.namespaces
            self._set_workloads(
                {
                    ObjectKey(WORKLOADS, workload.namespace, workload.name): workload
                    for workload in snapshot.workloads
                }
            )
            self.is_complete = True

    def _fitting(self, own: Sequence[str], namespace: str) -> list[Workload]:
        """Find the Workloads of a container, in the order in which the later one wins."""
        if not self._in_order:
            return []
        pod = next((label[len(_NAME) :] for label in own if label.startswith(_NAME)), "")
        network = next((label[len(_NETWORK) :] for label in own if label.startswith(_NETWORK)), "")
        return [
            workload
            for workload in self._in_order
            if workload.fits(namespace=namespace, network=network, pod=pod)
        ]

    def _set_namespace(self, stored: StoredObject) -> SourceChange:
        name, labels = stored.key.name, _read_labels(members_of(stored.document, "metadata"))
        self._unlisted -= {name}
        before = self._namespaces.get(name)
        if before == labels:
            return SourceChange()
        # A new dict: ADDs read it without the lock.
        self._namespaces = {**self._namespaces, name: labels}
        self.version += 1
        return SourceChange(namespaces=frozenset({name}))

    def _set_workloads(self, workloads: dict[ObjectKey, Workload]) -> SourceChange:
        if workloads == self._workloads:
            return SourceChange()
        self._workloads = workloads
        self.version += 1
        # By key, so that every node lets the same one of two Workloads win.
        self._in_order = tuple(made for _, made in sorted(workloads.items()))
        return SourceChange(workloads=True)


def _read_labels(holder: Mapping[str, Any]) -> dict[str, str]:
    """Read `labels` of metadata or a spec; what is no label is left out."""
    return {
        key: value
        for key, value in members_of(holder, "labels").items()
        if isinstance(key, str)
        and isinstance(value, str)
        and is_label_key(key)
        and is_label_value(value)
    }


def _read_workload(stored: StoredObject) -> Workload:
    spec = members_of(stored.document, "spec")
    labels = _read_labels(spec)
    return Workload(
        name=stored.key.name,
        namespace=stored.key.namespace,
        pattern=str(spec.get("namePattern") or "*"),
        network=str(spec.get("network") or ""),
        labels=tuple(
            # A Workload must not change a container's name or network, which Workloads are matched by.
            sorted(pair for pair in labels.items() if not pair[0].startswith(f"{OWN_PREFIX}/"))
        ),
    )
