"""Tell at a pod that the host port it asks for is not served, because the node has no plugin for it.

Made by `agent.assemble` where podwire installs the network. Follows the Pods of the own node by the agent's watch;
nothing is asked of anybody. Without such an Event the pod starts, and nothing says why its port stays closed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from podwire.agent.duties.follower import KindList, StoreFollower
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.model.errors import PodwireError
from podwire.model.store import Revisions, Store, StoredObject, StoreEvent
from podwire.model.store.events import Events, Subject
from podwire.model.store.kinds import POD

REASON: Final = "HostPortNotServed"
_ENDED: Final = frozenset({"Succeeded", "Failed"})


class HostPorts:
    """What is told of host ports. `is_served` says whether the network serves them; None: not known yet."""

    def __init__(
        self,
        store: Store,
        events: Events,
        is_served: Callable[[], bool | None],
        shared: SharedWatch | None = None,
    ) -> None:
        self._events = events
        self._is_served = is_served
        self._pods: dict[Subject, list[int]] = {}
        """Pods with host ports that nothing was told of yet."""
        self._told: set[Subject] = set()
        self._follower = StoreFollower("host-ports", store, (POD.plural,), self, shared=shared)

    def start(self) -> None:
        """Begin to follow."""
        self._follower.start()

    def stop(self) -> None:
        """End."""
        self._follower.stop()

    def on_lists(self, lists: Sequence[KindList]) -> None:
        """Take all pods of the node."""
        self._pods.clear()
        pods = [stored for kind_list in lists for stored in kind_list.objects]
        self._told &= {_subject(stored) for stored in pods}
        self._take(pods)

    def on_events(self, events: Sequence[StoreEvent], _revisions: Revisions) -> None:
        """Take changes of them."""
        for event in events:
            if event.object.key.kind == POD.plural and event.deleted:
                self._pods.pop(_subject(event.object), None)
                self._told.discard(_subject(event.object))
        self._take(
            event.object
            for event in events
            if event.object.key.kind == POD.plural and not event.deleted
        )

    def on_away(self, _error: PodwireError) -> None:
        """Wait."""

    def on_back(self) -> None:
        """Go on."""

    def _take(self, pods: Iterable[StoredObject]) -> None:
        for stored in pods:
            subject = _subject(stored)
            ports = list_host_ports(stored.document)
            if ports and subject not in self._told:
                self._pods[subject] = ports
        # The network may be looked at after the pods: until then nobody knows.
        if self._pods and self._is_served() is False:
            for subject, ports in self._pods.items():
                self._tell(subject, ports)
            self._pods.clear()

    def _tell(self, subject: Subject, ports: Sequence[int]) -> None:
        self._told.add(subject)
        named = ", ".join(map(str, ports))
        self._events.tell(
            subject,
            REASON,
            f"host port {named} of this pod is not served: this node has no plugin portmap; install the reference CNI"
            " plugins on it (podwire chains portmap by itself), then start the pod again",
        )


def list_host_ports(document: Mapping[str, Any]) -> list[int]:
    """Give the host ports that a Pod asks its network for; none of one that ended or is on the host's network."""
    spec, status = document.get("spec"), document.get("status")
    if not isinstance(spec, Mapping) or spec.get("hostNetwork") is True:
        return []
    if isinstance(status, Mapping) and status.get("phase") in _ENDED:
        return []
    return [
        port["hostPort"]
        for member in ("initContainers", "containers")
        for container in _objects(spec.get(member))
        for port in _objects(container.get("ports"))
        if isinstance(port.get("hostPort"), int) and port["hostPort"]
    ]


def _objects(items: object) -> list[Mapping[str, Any]]:
    return [one for one in items if isinstance(one, Mapping)] if isinstance(items, list) else []


def _subject(stored: StoredObject) -> Subject:
    return Subject(stored.key, stored.uid)
