"""The pods that the API server has bound to this node, and what an ADD takes from them.

The agent's follower fills it from a watch of this node's pods, which hears of a pod when it is bound, before kubelet
calls the runtime. The attach service asks it before an ADD. Source of the cases: the life cycle of a pod in
Kubernetes, and CNI_ARGS as containerd and CRI-O fill them. Invariant: an endpoint gets the labels of the pod whose UID
its runtime named, never those of an earlier or later pod of the same name.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from podwire.control.kubernetes.freshness import Freshness
from podwire.control.kubernetes.pod import PodFacts, decode_pod
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import Cancelled, Unavailable
from podwire.model.labels import SOURCE_K8S, is_namespace_label, sort_labels
from podwire.model.request import AttachRequest
from podwire.model.store import ObjectKey, Store, StoredObject, StoreEvent
from podwire.model.store.kinds import POD

WAIT_S: Final = 2.0
"""How long an ADD waits for the watch to bring its pod, before it asks for that one pod, and policies older than it."""
LOOK_S: Final = 0.1
"""How often a waiting ADD looks whether its caller is gone."""

_log = logging.getLogger(__name__)
_HASH: Final = re.compile(r"[0-9a-f]{32}")

PodName = tuple[str, str]
"""Namespace and name."""


class NoPods:
    """Without Kubernetes there are no Pod objects: a request brings all that is known."""

    def has(self, _record: EndpointRecord) -> bool:
        """Tell that the endpoint belongs to no Pod object."""
        return False

    def own_labels(self, record: EndpointRecord) -> tuple[str, ...]:
        """Give what the attachment brought, or was given by name."""
        return _brought(record)

    def complete_at_once(self, request: AttachRequest) -> AttachRequest | None:
        """Give the request as it is."""
        return request

    def complete(
        self, request: AttachRequest, _cancelled: Callable[[], bool] = lambda: False
    ) -> AttachRequest:
        """Give the request as it is."""
        return request


@dataclass
class OwnPods:
    """What is known of this node's pods. Safe to call from several threads."""

    store: Store
    node_name: str
    wait_s: float = WAIT_S
    clock: Callable[[], float] = time.monotonic
    version: int = 0
    """Grows with every change: `dump` gives the same as before while this stays."""
    _pods: dict[PodName, PodFacts] = field(default_factory=dict)
    _changed: set[PodName] = field(default_factory=set)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.freshness = Freshness(self._news)

    def replace(self, objects: Sequence[StoredObject]) -> None:
        """Take in a whole list of this node's pods."""
        pods = {_name_of(stored): decode_pod(stored) for stored in objects if not stored.fault}
        with self._news:
            names = self._pods.keys() | pods.keys()
            self._set(pods, {name for name in names if self._pods.get(name) != pods.get(name)})

    def apply(self, event: StoreEvent) -> None:
        """Take in one change. A pod that is deleted is forgotten; its endpoint keeps its labels until its DEL."""
        name = _name_of(event.object)
        with self._news:
            # A copy, because readers look without the lock.
            pods = dict(self._pods)
            if event.deleted:
                pods.pop(name, None)
            elif not event.object.fault:
                pods[name] = decode_pod(event.object)
            if pods != self._pods:
                self._set(pods, {name})

    def take_changed(self) -> frozenset[PodName]:
        """Give the names of pods that have changed since the last call, once."""
        with self._news:
            changed, self._changed = frozenset(self._changed), set()
            return changed

    def find(self, namespace: str, name: str, uid: str = "") -> PodFacts | None:
        """Give what is known of a pod; `uid`: as its runtime says it, "" where none does."""
        pod = self._pods.get((namespace, name))
        return pod if pod is not None and pod.has_uid(uid) else None

    def has(self, record: EndpointRecord) -> bool:
        """Tell whether an endpoint belongs to a Pod object: its labels come from there."""
        return self._find_of(record) is not None

    def own_labels(self, record: EndpointRecord) -> tuple[str, ...]:
        """Give an endpoint's own labels: those that its attachment brought, and those that its Pod has now.

        If the Pod is not known (it is gone, or was not heard of since a restart), the endpoint keeps the labels that
        it has.
        """
        kept = _brought(record)
        pod = self._find_of(record)
        return kept if pod is None else _with_pod(kept, pod)

    def complete_at_once(self, request: AttachRequest) -> AttachRequest | None:
        """Give a request with the labels and ports of its Pod; None when the pod has not been heard of yet."""
        if request.is_plain:
            return request
        pod = self.find(request.namespace, request.pod, request.pod_uid)
        if pod is None or not self.freshness.is_fresh(pod.uid):
            return None
        return _complete(request, pod)

    def complete(
        self, request: AttachRequest, cancelled: Callable[[], bool] = lambda: False
    ) -> AttachRequest:
        """Give a request with the labels and ports of its Pod, waiting if it must: for the pod, and for policies that
        were written before it was seen.

        A pod that the watch does not bring in time is asked for once. Raises Unavailable (CNI code 11: the runtime
        tries again) when there is no such pod, or another one of this name; Cancelled when the caller is gone.
        """
        if request.is_plain:
            return request
        pod = self._wait(request, cancelled) or self._ask(request)
        return request if pod is None else _complete(request, pod)

    def dump(self) -> str:
        """Give all that is known as text, for a start without the store."""
        with self._news:
            return msgspec.json.encode(list(self._pods.values())).decode()

    def load(self, text: str) -> None:
        """Take over what `dump` gave in an earlier life; "" or what cannot be read changes nothing."""
        try:
            pods = msgspec.json.decode(text.encode(), type=list[PodFacts])
        except msgspec.MsgspecError:
            return
        with self._news:
            self._pods = {(pod.namespace, pod.name): pod for pod in pods}

    def _set(self, pods: dict[PodName, PodFacts], changed: set[PodName]) -> None:
        known = {pod.uid for pod in self._pods.values()}
        self._pods = pods
        uids = {pod.uid for pod in pods.values() if not pod.host_network}
        self.freshness.keep(uids)
        self.freshness.see(uids - known)
        self._changed |= changed
        self.version += bool(changed)
        self._news.notify_all()

    def _find_of(self, record: EndpointRecord) -> PodFacts | None:
        if record.is_plain:
            return None
        return self.find(record.namespace, record.pod, record.pod_uid)

    def _wait(self, request: AttachRequest, cancelled: Callable[[], bool]) -> PodFacts | None:
        until_s = self.clock() + self.wait_s
        with self._news:
            while True:
                pod = self.find(request.namespace, request.pod, request.pod_uid)
                left_s = until_s - self.clock()
                is_fresh = pod is not None and self.freshness.is_fresh(pod.uid)
                if is_fresh or left_s <= 0:
                    if pod is not None and not is_fresh:
                        _log.warning(
                            "a pod starts before its policies were heard of",
                            extra={"pod": f"{pod.namespace}/{pod.name}"},
                        )
                    return pod
                if cancelled():
                    raise Cancelled("find pod: the caller went away or a DEL overtook it")
                self._news.wait(min(LOOK_S, left_s))

    def _ask(self, request: AttachRequest) -> PodFacts | None:
        """Ask for the one pod. None for a static pod that the API server does not know yet."""
        name = f"{request.namespace}/{request.pod}"
        is_static = self._is_static(request)
        try:
            stored = self.store.get(ObjectKey(POD.plural, request.namespace, request.pod))
        except Unavailable:
            # Static pods start without an API server: the control plane may be among them.
            if is_static:
                return None
            raise
        if stored is None and is_static:
            return None
        pod = None if stored is None else decode_pod(stored)
        # A StatefulSet makes a pod anew under the same name. Only the UID tells them apart.
        if pod is None or not pod.has_uid(request.pod_uid):
            raise Unavailable(
                f"find pod {name}: the API server has "
                + ("none" if pod is None else f"another one, {pod.uid}, not {request.pod_uid}"),
                hint="the runtime is late or early; kubelet tries again by itself",
            )
        return pod

    def _is_static(self, request: AttachRequest) -> bool:
        """Tell whether kubelet has the pod from a file. Such a pod may start without labels of its own, so no other pod
        may pass for one.
        """
        # kubelet names a static pod after its manifest and its node. A tenant can choose such a name, but not a UID:
        # the API server gives it one with dashes (RFC 9562), while kubelet gives a static pod a plain hash.
        is_named_so = request.pod.endswith(f"-{self.node_name}")
        return is_named_so and _HASH.fullmatch(request.pod_uid) is not None


PodLabels = OwnPods | NoPods
"""Gives requests and endpoints what Pod objects say."""


def _name_of(stored: StoredObject) -> PodName:
    return stored.key.namespace, stored.key.name


def _brought(record: EndpointRecord) -> tuple[str, ...]:
    """Give what an endpoint brought itself; records of builds before identities have it among all labels."""
    return record.own_labels or record.labels


def _complete(request: AttachRequest, pod: PodFacts) -> AttachRequest:
    return msgspec.structs.replace(
        request, labels=_with_pod(request.labels, pod), ports=pod.ports or request.ports
    )


def _with_pod(labels: Sequence[str], pod: PodFacts) -> tuple[str, ...]:
    """Give labels with those of a pod in place of what an earlier look at the pod gave."""
    kept = (
        label
        for label in labels
        if not label.startswith(f"{SOURCE_K8S}:") or is_namespace_label(label)
    )
    return sort_labels((*kept, *pod.labels))
