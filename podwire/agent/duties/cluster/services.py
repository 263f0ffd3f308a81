"""Follow the store's services, and have the programs translate what pods send to them.

Made and started by `agent.node` and `agent.main`. The follower's thread takes objects in; the thread here takes the
node's turn and writes rows, so that neither a slow store nor a long wait for the turn delays the other, and a burst
becomes one change. Until both kinds were listed, what an earlier agent wrote stays in force. Invariant: nothing is
missed; a change that could not be written is written with the next try.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from podwire.agent.duties.follower import KindList, StoreFollower
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.duties.worker import FOREVER_S, Worker
from podwire.control.identity.known import IdentityChange
from podwire.control.kubernetes.core_node import read_zone
from podwire.control.services.catalogue import KINDS, Catalogue, ServiceView
from podwire.control.services.choose import Place
from podwire.control.services.facts import ServiceName
from podwire.model.endpoint import IPAddress
from podwire.model.errors import PodwireError
from podwire.model.ids import IdentityId
from podwire.model.interfaces import ServiceDatapath
from podwire.model.store import Revisions, Store, StoredObject, StoreEvent
from podwire.model.store.kinds import CORE_NODE

RETRY_S: Final = 5.0
REFUSED_NAMED: Final = 5
"""Of services without room, in a message."""


class PodSource(Protocol):
    """Who knows which pods there are (`agent.duties.cluster.duty`)."""

    @property
    def knows_pods(self) -> bool:
        """Whether other nodes' pods were heard of."""
        ...

    def list_pods(self) -> Mapping[IPAddress, IdentityId]:
        """Give the identity of every address of this node's pods."""
        ...

    def take_other_pods(self) -> tuple[bool, Mapping[IPAddress, IdentityId | None]]:
        """Give what is new of other nodes' pods, or (True, all of them)."""
        ...

    def drop_other_pods(self) -> None:
        """Collect no news until they are asked for again."""
        ...


@dataclass
class ServiceDuty:
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
    pods: PodSource | None = None
    """For services that choose pods by labels; None where a controller writes EndpointSlices of them."""
    _reading: threading.Lock = field(default_factory=threading.Lock)
    """Held while the catalogue is read or changed."""
    _listed: set[str] = field(default_factory=set)
    _is_owed: bool = True
    """The whole table has to be written: nothing was so far, or the last change failed."""
    _complaints: dict[str, str] = field(default_factory=dict)
    """What is wrong with the store, the last change and the room; each ends by itself."""
    _learnt: deque[int] = field(default_factory=deque)
    """Identities that mean something else now."""

    def __post_init__(self) -> None:
        self._kinds = (*KINDS, CORE_NODE.plural) if self.has_core_nodes else KINDS
        self.follower = StoreFollower("services", self.store, self._kinds, self, shared=self.shared)
        self._worker = Worker("services", self._round, self._failed)

    def start(self) -> None:
        """Start the threads."""
        self._worker.start()
        self.follower.start()

    def stop(self) -> None:
        """End the threads; what is in force stays."""
        self.follower.stop()
        self._worker.stop()

    def views(self) -> list[ServiceView]:
        """Show what is known, from any thread."""
        with self._reading:
            return list(self.catalogue.views())

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
        self._learnt.extend(facts.number for facts in change.added)
        self._learnt.extend(change.removed)
        self.pods_changed()

    def on_lists(self, lists: Sequence[KindList]) -> None:
        """Take whole lists, on the follower's thread."""
        with self._reading:
            for one in lists:
                if one.kind == CORE_NODE.plural:
                    self._move(one.objects)
                else:
                    self.catalogue.replace(one.kind, one.objects)
                self._listed.add(one.kind)
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
        """Let `podwire status` tell."""
        self._complain("store", error.told)

    def on_back(self) -> None:
        """Let `podwire status` tell."""
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
                refused = sorted(self.catalogue.room.refused)
            # Until it is done, what is in force is no known state.
            self._is_owed = True
            if table is not None:
                self.datapath.write(table)
            elif change.put or change.gone:
                self.datapath.change(change.put, change.gone)
            self._is_owed = False
        self._complain("change", "")
        self._complain("room", _describe_refused(refused))
        self.observe("services", "apply", (time.monotonic() - begin_s) * 1e3)
        return FOREVER_S

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
        f"there is no room for services {named}{more} beside the older ones, so they are left to the stack:"
        " delete services or ports that nobody needs"
    )
