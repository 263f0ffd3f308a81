"""Follow the store's services, and have the programs translate what pods send to them.

Made and started by `agent.node` and `agent.main`. The follower's thread takes objects in; the thread here takes the
node's turn and writes rows, so that neither a slow store nor a long wait for the turn delays the other, and a burst
becomes one change. Until both kinds were listed, what an earlier agent wrote stays in force. Invariant: nothing is
missed; a change that could not be written is written with the next try.
"""

import ipaddress
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from podwire.agent.duties.cluster.duty import ClusterDuty
from podwire.agent.duties.follower import FollowingDuty, KindList, StoreFollower
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.duties.worker import FOREVER_S, Worker
from podwire.agent.metrics import Gauge
from podwire.control.identity.known import IdentityChange
from podwire.control.kubernetes.core_node import read_zone
from podwire.control.services.catalogue import KINDS, Catalogue, ServiceView
from podwire.control.services.choose import Place
from podwire.control.services.external import PROXY_MODE
from podwire.control.services.facts import ServiceName
from podwire.control.services.reading import Left
from podwire.model.endpoint import PROTOCOLS
from podwire.model.errors import PodwireError
from podwire.model.ids import IdentityId
from podwire.model.interfaces import Frontend, ServiceDatapath
from podwire.model.store import ObjectKey, Revisions, Store, StoredObject, StoreEvent
from podwire.model.store.events import Events, NoEvents, Subject
from podwire.model.store.kinds import CORE_NODE, SERVICE

RETRY_S: Final = 5.0
NOT_TRANSLATED: Final = "ServiceNotTranslated"
"""Reason of Events."""
REFUSED_NAMED: Final = 5
"""Of services without room, in a message."""


@dataclass
class ServiceDuty(FollowingDuty):
    """Services of one node over time."""

    store: Store
    catalogue: Catalogue
    datapath: ServiceDatapath
    turn: threading.RLock
    report: Callable[[str], None]
    """Told what is wrong; "" when nothing is."""
    observe: Callable[[str, str, float], None]
    """Told how long what took: operation, phase, milliseconds."""
    shared: SharedWatch | None = None
    has_core_nodes: bool = False
    """Whether the store is Kubernetes, where this node's core Node says in which zone it is."""
    events: Events = field(default_factory=NoEvents)
    pods: ClusterDuty | None = None
    """For services that choose pods by labels; None where a controller writes EndpointSlices of them."""
    _reading: threading.Lock = field(default_factory=threading.Lock)
    """Held while the catalogue is read or changed."""
    _listed: set[str] = field(default_factory=set)
    _is_owed: bool = True
    """The whole table has to be written: nothing was so far, or the last change failed."""
    _told: dict[ServiceName, tuple[Left, ...]] = field(default_factory=dict)
    """What Events have said of services."""
    _complaints: dict[str, str] = field(default_factory=dict)
    """What is wrong with the store, the last change and the room; each ends by itself."""
    _learnt: deque[int] = field(default_factory=deque)
    """Identities that mean something else now."""

    def __post_init__(self) -> None:
        self._kinds = (*KINDS, CORE_NODE.plural) if self.has_core_nodes else KINDS
        self.follower = StoreFollower("services", self.store, self._kinds, self, shared=self.shared)
        self._worker = Worker("services", self._round, self._failed)

    def views(self) -> list[ServiceView]:
        """Show what is known, from any thread."""
        with self._reading:
            return list(self.catalogue.views())

    def find(self, name: ServiceName) -> ServiceView | None:
        """Show one service, from any thread; None: there is none."""
        with self._reading:
            return self.catalogue.view(name)

    def find_holder(self, address: str, port: int, protocol: str) -> ServiceName | None:
        """Say whose an address and port are, or only the address; from any thread, at once."""
        number, at = PROTOCOLS.get(protocol.upper()), ipaddress.ip_address(address)
        if number is None:
            return None
        return self.catalogue.holder(Frontend(at, port, number)) or self.catalogue.holder(
            Frontend(at)
        )

    def gauges(self) -> list[Gauge]:
        count = self.catalogue.count
        return [
            Gauge(
                "services",
                "Services, by who translates what pods send to them",
                ("by",),
                lambda: {
                    ("podwire",): (now := count()).translated,
                    ("stack",): now.known - now.translated,
                },
            ),
            Gauge(
                "services_left",
                "Services of which something is left to the stack, by reason",
                ("reason",),
                lambda: {(reason,): float(number) for reason, number in count().left.items()},
            ),
            Gauge.single(
                "service_frontends",
                "Addresses and ports of services that the programs know",
                lambda: count().frontends,
            ),
            Gauge.single(
                "service_back_ends",
                "Back ends in all lists of services",
                lambda: count().back_ends,
            ),
        ]

    def pods_changed(self) -> None:
        """Hear that pods have come, changed or gone, here or on other nodes; from any thread, cheap."""
        selected = self.catalogue.selected
        if selected is not None and selected.is_asked:
            self._worker.wake()

    def is_awaited(self, identity: IdentityId) -> bool:
        """Tell whether a pod of this identity is a back end by its labels, so that its end concerns others."""
        selected = self.catalogue.selected
        return selected is not None and selected.selects(identity)

    def hear(self, change: IdentityChange) -> None:
        """Hear what identities mean; from any thread."""
        selected = self.catalogue.selected
        if selected is None or not selected.is_asked:
            return  # a service that chooses by labels later finds what identities mean then
        self._learnt.extend(facts.number for facts in change.added)
        self._learnt.extend(change.removed)
        self.pods_changed()

    def on_lists(self, lists: Sequence[KindList]) -> None:
        """Take whole lists, on the follower's thread."""
        with self._reading:
            for kind_list in lists:
                if kind_list.kind == CORE_NODE.plural:
                    self._move(kind_list.objects)
                else:
                    self.catalogue.replace(kind_list.kind, kind_list.objects)
                self._listed.add(kind_list.kind)
        self._worker.wake()

    def on_events(self, events: Sequence[StoreEvent], _revisions: Revisions) -> None:
        """Take changes, on the follower's thread."""
        if not events:
            return
        with self._reading:
            for event in events:
                if event.object.key.kind != CORE_NODE.plural:
                    self.catalogue.apply(event)
                elif not event.deleted:
                    self._move([event.object])
        self._worker.wake()

    def _move(self, nodes: Sequence[StoredObject]) -> None:
        for node in nodes:
            self.catalogue.move(Place(self.catalogue.place.node, read_zone(node)))

    def on_away(self, error: PodwireError) -> None:
        self._complain("store", error.told)

    def on_back(self) -> None:
        self._complain("store", "")

    def _complain(self, about: str, what: str) -> None:
        """Report what is wrong with one thing, beside what is wrong with others; from both threads."""
        with self._reading:
            if self._complaints.get(about, "") != what:
                self._complaints[about] = what
                self.report("; ".join(filter(None, self._complaints.values())))

    def _round(self) -> float:
        if not self._listed.issuperset(self._kinds):
            return FOREVER_S
        begin_s = time.monotonic()
        if not self._gather_pods():
            return FOREVER_S
        with self.turn:
            with self._reading:
                change = self.catalogue.take_change()
                table = self.catalogue.table() if self._is_owed else None
                affinity = self.catalogue.affinity(table) if table is not None else change.affinity
                refused = sorted(self.catalogue.room.refused)
            # Until it is done, what is in force is no known state.
            self._is_owed = True
            if table is not None:
                self.datapath.write(table, affinity)
            elif change.put or change.gone:
                self.datapath.change(change.put, change.gone, affinity)
            self._is_owed = False
        self._tell(change.touched)
        self._complain("change", "")
        self._complain("room", _describe_refused(refused))
        self.observe("services", "apply", (time.monotonic() - begin_s) * 1e3)
        return FOREVER_S

    def _tell(self, touched: Collection[ServiceName]) -> None:
        """Tell at services what of them is left to the stack: the nodes of their back ends do, once for each thing."""
        with self._reading:
            lacking = {
                service.name: (service.uid, self.catalogue.left(service.name))
                for service in self.catalogue.list_lacking(touched)
            }
        for name in touched:
            uid, left = lacking.get(name, ("", ()))
            if not left:
                self._told.pop(name, None)
            elif self._told.get(name) != left:
                self._told[name] = left
                if all(port.reason == PROXY_MODE for port in left):
                    continue  # as somebody has wanted it
                key = ObjectKey(SERVICE.plural, name.namespace, name.name)
                said = "; ".join(port.message for port in left)
                hint = "kube-proxy serves it, behind the egress policies of pods"
                self.events.tell(Subject(key, uid), NOT_TRANSLATED, f"{said}; {hint}")

    def _gather_pods(self) -> bool:
        """Have services know the pods that they choose; False: nobody knows yet which there are. Nobody collects any
        while no service chooses by labels."""
        pods, selected = self.pods, self.catalogue.selected
        learnt = [self._learnt.popleft() for _ in range(len(self._learnt))]
        if pods is None or selected is None:
            return True
        if not selected.is_asked:
            pods.drop_other_pods()
            selected.forget_pods()
            return True
        if not pods.knows_pods:
            return False
        own, (is_whole, others) = pods.list_pods(), pods.take_other_pods()
        with self._reading:
            take = self.catalogue.change_pods
            take(lambda chosen: chosen.replace_own(own))
            if is_whole:
                all_others = {at: number for at, number in others.items() if number is not None}
                take(lambda chosen: chosen.replace_others(all_others))
            else:
                take(lambda chosen: chosen.change_others(others))
            take(lambda chosen: chosen.learn(learnt))
        return True

    def _failed(self, error: PodwireError) -> float:
        self._complain("change", error.told)
        return RETRY_S


def _describe_refused(refused: Sequence[ServiceName]) -> str:
    if not refused:
        return ""
    named = ", ".join(map(str, refused[:REFUSED_NAMED]))
    more = f" and {len(refused) - REFUSED_NAMED} more" if len(refused) > REFUSED_NAMED else ""
    return (
        f"there is no room for services {named}{more} beside the others, so they are left to the stack:"
        " delete services or ports that nobody needs"
    )
