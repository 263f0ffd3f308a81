"""From what an endpoint brings to its labels and its identity.

Called for each ADD before the node's turn is taken, and by the identity duty when labels changed. Never called under
the turn: an unknown key asks the store and may wait for it. A known key needs no call. Invariant: an endpoint gets its
labels and its number together, or stays as it is.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from podwire.control.identity.allocator import IdentitiesExhausted, IdentityAllocator
from podwire.control.identity.filter import LabelFilter
from podwire.control.identity.key import IdentityKey, make_key
from podwire.control.identity.sources import NAMESPACES, LabelSources
from podwire.control.kubernetes.own_pods import NoPods, PodLabels
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import Cancelled, Conflict, StorageFailure, Unavailable
from podwire.model.identity import IdentityFacts, NamedPort
from podwire.model.ids import IdentityId
from podwire.model.labels import NAMESPACE_NAME_KEY
from podwire.model.store import ObjectKey, StoredObject

LOOK_S: Final = 0.1
"""How often a waiting ADD looks for the store and for its caller."""


class Resolution(msgspec.Struct, frozen=True):
    """What an endpoint is: all its labels, and the number of those that make its identity."""

    number: IdentityId
    labels: tuple[str, ...]
    own_labels: tuple[str, ...]
    key: IdentityKey

    @property
    def facts(self) -> IdentityFacts:
        """What policy needs to know of the identity."""
        return self.key.facts(self.number)

    def write_into(self, record: EndpointRecord) -> EndpointRecord:
        """Give the record with these labels and this identity."""
        return msgspec.structs.replace(
            record,
            labels=self.labels,
            own_labels=self.own_labels,
            identity=self.number,
            identity_labels=self.key.labels,
            named_ports=self.key.named_ports,
        )


@dataclass
class IdentityResolver:
    """Resolves the endpoints of one node."""

    allocator: IdentityAllocator
    sources: LabelSources
    chosen_by: LabelFilter
    wait_s: float = 10.0
    pods: PodLabels = field(default_factory=NoPods)
    """Gives what Pod objects say of endpoints."""
    clock: Callable[[], float] = time.monotonic
    _came_back: threading.Event = field(default_factory=threading.Event)

    def resolve(
        self,
        own_labels: tuple[str, ...],
        named_ports: Iterable[NamedPort],
        namespace: str,
        cancelled: Callable[[], bool] = lambda: False,
        wait_s: float | None = None,
    ) -> Resolution:
        """Give labels and identity of an endpoint, waiting for the store at most `wait_s` (None: as an ADD does).

        Raises Unavailable (CNI code 11) when the store stays away or cannot be used, IdentitiesExhausted, Cancelled
        when the caller is gone. Never call it under the node's turn.
        """
        ports = tuple(named_ports)
        resolution = self.find(own_labels, ports, namespace)
        if resolution is not None:
            return resolution
        self.allocator.counts.waits += 1
        deadline_s = self.clock() + (self.wait_s if wait_s is None else wait_s)
        while True:
            try:
                return self._ask(own_labels, ports, namespace)
            # Waiting does not make numbers free, and it is a kind of Unavailable: it must not reach the clause below.
            except IdentitiesExhausted:
                raise
            except StorageFailure as failure:
                # Of the store, not of this node: another try, perhaps on another node, is what helps the pod.
                self.allocator.counts.unavailable += 1
                raise Unavailable(
                    f"resolve identity of new labels in namespace {namespace!r}: {failure.message}",
                    hint=failure.hint,
                ) from failure
            except Unavailable as failure:
                self._pause(deadline_s, cancelled, namespace, failure)

    def find(
        self, own_labels: tuple[str, ...], named_ports: Iterable[NamedPort], namespace: str
    ) -> Resolution | None:
        """Give what `resolve` would, without the store; None when the store must be asked."""
        if not (self.sources.is_complete and self.sources.knows_namespace(namespace)):
            return None
        labels, key = self.describe(own_labels, named_ports, namespace)
        number = self.allocator.find(key)
        return None if number is None else Resolution(IdentityId(number), labels, own_labels, key)

    def describe(
        self, own_labels: tuple[str, ...], named_ports: Iterable[NamedPort], namespace: str
    ) -> tuple[tuple[str, ...], IdentityKey]:
        """Compute all labels and the key of an endpoint from what is known now."""
        labels = self.sources.effective(own_labels, namespace)
        return labels, make_key(labels, named_ports, self.chosen_by)

    def adopt(self, record: EndpointRecord) -> None:
        """Keep the number of an endpoint that outlived a restart. 0, from older builds, means none."""
        if record.identity:
            key = IdentityKey(record.identity_labels, record.named_ports)
            self.allocator.adopt(record.identity, key)

    def affected(self, records: Iterable[EndpointRecord]) -> list[EndpointRecord]:
        """Give the endpoints that are not what they should be."""
        if not self.sources.is_complete:
            return []
        return [record for record in records if self._is_stale(record)]

    def resolve_again(self, record: EndpointRecord) -> Resolution:
        """Resolve an endpoint that has an identity already, without waiting; raises Unavailable.

        It keeps the identity it has until the caller writes this one into its record.
        """
        return self.resolve(
            self.pods.own_labels(record), record.named_ports, record.namespace, wait_s=0
        )

    @property
    def _makes_namespaces(self) -> bool:
        """Whether the first pod of a namespace makes its object; of a cluster's own namespaces only its users do."""
        return self.allocator.store.promises.owns_namespaces

    def reassert_namespaces(self, namespaces: Iterable[str]) -> None:
        """Make the objects of these namespaces again that the store has lost, with their labels. Raises Unavailable."""
        if not self._makes_namespaces:
            return
        for name, labels in self.sources.find_lost(namespaces).items():
            self._make_namespace(name, labels)

    def store_came_back(self) -> None:
        """Let waiting ADDs look at once."""
        self._came_back.set()
        self._came_back.clear()

    def _ask(
        self, own_labels: tuple[str, ...], ports: tuple[NamedPort, ...], namespace: str
    ) -> Resolution:
        if not self.sources.is_complete:
            raise Unavailable("namespaces and workloads have not been read from the store yet")
        if not self.sources.knows_namespace(namespace):
            if not self._makes_namespaces:
                raise Unavailable(f"namespace {namespace!r} has not been read from the store yet")
            self._make_namespace(namespace, {NAMESPACE_NAME_KEY: namespace})
        labels, key = self.describe(own_labels, ports, namespace)
        number = self.allocator.allocate(key)
        return Resolution(IdentityId(number), labels, own_labels, key)

    def _make_namespace(self, name: str, labels: Mapping[str, str]) -> None:
        """Make the Namespace object, on first use as Kubernetes would have it; learn it if there is one."""
        key = ObjectKey(NAMESPACES, "", name)
        metadata = {"name": name, "labels": dict(labels)}
        document = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        store = self.allocator.store
        try:
            stored = store.create(StoredObject(key=key, document=document))
        except Conflict as error:
            # Another agent's first pod of the namespace made it a moment ago; its labels count, not ours.
            there = store.get(key)
            if there is None:
                raise Unavailable(f"make namespace {name!r}: others are changing it") from error
            stored = there
        self.sources.learn_namespace(stored)

    def _is_stale(self, record: EndpointRecord) -> bool:
        labels, key = self.describe(
            self.pods.own_labels(record), record.named_ports, record.namespace
        )
        known = self.allocator.known.get(record.identity)
        return (
            labels != record.labels
            or key.labels != record.identity_labels
            or known is None
            or known.key != key
        )

    def _pause(
        self,
        deadline_s: float,
        cancelled: Callable[[], bool],
        namespace: str,
        failure: Unavailable,
    ) -> None:
        """Wait a moment before the next try, or raise what ends the waiting."""
        if cancelled():
            raise Cancelled("resolve identity: the caller went away or a DEL overtook it")
        left_s = deadline_s - self.clock()
        if left_s <= 0:
            self.allocator.counts.unavailable += 1
            raise Unavailable(
                f"resolve identity of new labels in namespace {namespace!r}: {failure.message}",
                hint="the store must be reachable for labels that no pod had before; see `podwire status`",
            ) from failure
        self._came_back.wait(min(LOOK_S, left_s))
