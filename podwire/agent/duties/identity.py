"""Look after identities: follow changes, relabel endpoints, publish what is in use, collect what is not.

`agent.node` prepares it before anything is restored, `agent.main` starts it. Everything that waits for the store runs
on the thread here and never under the node's turn. Invariant: an endpoint's old and new identity are both published as
in use until the datapath has changed over.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Final

import msgspec

from podwire.agent.duties.follower import KindList, StoreFollower
from podwire.agent.duties.kubernetes.freshness import open_freshness
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.duties.worker import FOREVER_S, Worker
from podwire.cni.labels import complete_labels
from podwire.control.endpoint.changes import EndpointChanges
from podwire.control.endpoint.table import EndpointTable
from podwire.control.identity.bound_pods import BoundPods
from podwire.control.identity.collect import Collector, collect, publish_holds
from podwire.control.identity.feed import IdentityFeed
from podwire.control.identity.repair import IdentityRepair
from podwire.control.installation.steps import NETWORK
from podwire.control.kubernetes.pod import PodFacts
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import Conflict, PodwireError
from podwire.model.interfaces import FactStore
from podwire.model.store import Revisions, StoreEvent
from podwire.model.store.kinds import NAMESPACE
from podwire.model.store.leases import IDENTITY_DUTY, Lease

SOURCES_FACT: Final = "label-sources"
PODS_FACT: Final = "own-pods"
TICK_S: Final = 1.0
"""Also the shortest time between two publications of what is in use."""
COLLECT_S: Final = 60.0
PUBLISH_AGAIN_S: Final = 60.0
"""How often a publication that should stand is looked at: somebody may have deleted it."""
DUTY_TTL_S: Final = 30.0
"""How long the cluster's duties wait for an agent that went without a word."""

_log = logging.getLogger(__name__)


class IdentityNews(msgspec.Struct, frozen=True):
    """Hands what the store says to the feed. The policy duty reports a store that is away."""

    feed: IdentityFeed

    def on_lists(self, lists: Sequence[KindList]) -> None:
        for kind_list in lists:
            self.feed.replace(kind_list.kind, kind_list.objects, kind_list.revision)
            self._reach({kind_list.kind: kind_list.revision})

    def on_events(self, events: Sequence[StoreEvent], revisions: Revisions) -> None:
        self.feed.heard()
        for event in events:
            self.feed.apply(event)
        self._reach(revisions)

    def _reach(self, revisions: Revisions) -> None:
        """Note up to where namespaces were heard of: pods get their labels."""
        at = revisions.get(NAMESPACE.plural)
        if self.feed.pods is not None and at is not None:
            self.feed.pods.freshness.reach({NAMESPACE.plural: at})

    def on_away(self, error: PodwireError) -> None:
        """Go on with what is known."""

    def on_back(self) -> None:
        """Let ADDs that wait look at once."""
        self.feed.came_back()


@dataclass
class IdentityDuty:
    """Identities of one node over time."""

    node_name: str
    feed: IdentityFeed
    table: EndpointTable
    facts: FactStore
    changes: EndpointChanges
    report: Callable[[str], None] = lambda _message: None
    """Told what is wrong with the store; "" when nothing is."""
    shared: SharedWatch | None = None
    """The agent's watch of the store, where there is one for all duties."""
    named: Callable[[], frozenset[int]] = frozenset
    """Identities that this node's NodeEndpoints names: its Node need not hold them."""
    collector: Collector = field(default_factory=Collector)
    monotonic: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _remembered: int = 0
    _remembered_pods: int = 0
    _published: frozenset[int] | None = None
    _published_s: float = 0.0
    _collected_s: float = 0.0
    _lease: Lease | None = None

    def __post_init__(self) -> None:
        self._worker = Worker("identity", self._work, self._fail, interrupt=self.feed.wake)
        self._ahead: Worker | None = None
        if self.feed.pods is not None:
            bound = BoundPods(self.feed.resolver, self.feed.pods, self._guess_labels)
            self._ahead = Worker("identity-ahead", partial(_number, bound))
            bound.noted, self.feed.bound = self._ahead.wake, bound
        self._due_s = self.monotonic()
        self._resolver = self.feed.resolver
        self._allocator = self._resolver.allocator
        self._store = self._allocator.store
        pods = self.feed.pods
        self._freshness = open_freshness(self._store, pods.freshness if pods else None)
        self._repair = IdentityRepair(self.feed, self.changes.change_over)
        self.follower = StoreFollower(
            "identity-watch",
            self._store,
            self.feed.kinds,
            IdentityNews(self.feed),
            shared=self.shared,
        )

    def prepare(self, records: Iterable[EndpointRecord]) -> None:
        """Take over what is known without the store; before endpoints are restored and doors open."""
        self._resolver.sources.load(self.facts.read_fact(SOURCES_FACT))
        self._remembered = self._resolver.sources.version
        for record in records:
            # Before the store is listed: living pods keep the numbers that their rows have (a restart changes no
            # identity).
            self._resolver.adopt(record)
        if self.feed.pods is not None:
            self.feed.pods.load(self.facts.read_fact(PODS_FACT))
            self._remembered_pods = self.feed.pods.version
        self.follower.load()

    def tick(self) -> None:
        """Do what is due; raises what the store says when it is away, after all that needs no store."""
        held = {
            # A row has its old number until its regeneration is done, and for as long as that fails.
            int(number)
            for endpoint in self.table
            for number in (endpoint.record.identity, endpoint.config.identity)
        } - {0}
        in_use = self._allocator.set_held(held)
        living = [endpoint.record for endpoint in self.table if not endpoint.is_ending]
        # What the store does not give now is raised at the end: the rest of the tick must not wait for it.
        waiting_for = self._repair.repair(living)
        self._remember()
        self._publish(in_use - self.named())
        self._allocator.reassert()
        self._resolver.reassert_namespaces(record.namespace for record in living)
        if self.monotonic() - self._collected_s >= COLLECT_S:
            self._collected_s = self.monotonic()
            if self._has_cluster_duty():
                # Both clocks: the wall clock is written into objects, and the monotonic one keeps a wrong wall clock
                # from shortening anything (decisions/0006).
                collect(self._store, self.collector, now=self.now(), monotonic_s=self._collected_s)
        if waiting_for is not None:
            raise waiting_for

    def pause(self) -> None:
        """Wait for the next tick. Endpoints whose labels change meanwhile are changed over at once: somebody who labels
        a pod expects its policy to follow within a second.
        """
        while not self._worker.is_stopping and (left_s := self._due_s - self.monotonic()) > 0:
            if self.feed.wait_for_doubt(left_s) and not self._worker.is_stopping:
                # What the store does not give now is asked for again by the tick, which also reports it.
                self._repair.repair(
                    [endpoint.record for endpoint in self.table if not endpoint.is_ending]
                )

    def start(self) -> None:
        if self._freshness is not None:
            self._freshness.start()
        self._worker.start()
        if self._ahead is not None:
            self._ahead.start()
        self.follower.start()

    def stop(self) -> None:
        """End the threads, and let another node do the cluster's duties."""
        self.follower.stop()
        if self._ahead is not None:
            self._ahead.stop()
        self._worker.stop()
        if self._freshness is not None:
            self._freshness.stop()
        # Given up at once, or the cluster would be without a collector until the lease has run out.
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

    def _work(self) -> float:
        self.pause()
        if not self._worker.is_stopping:
            self._due_s = self.monotonic() + TICK_S
            self.tick()
            self.report("")
        return 0.0

    def _fail(self, error: PodwireError) -> float:
        self.report(error.told)
        return 0.0

    def _has_cluster_duty(self) -> bool:
        """Take the cluster's duties, if nobody has them; one agent at a time collects. Raises Unavailable."""
        if self._lease is not None and self._lease.taken_by:
            self._lease = None
        leases = self._store.leases()
        if leases is None:
            return False  # no agent can know that it is the only one
        if self._lease is None:
            try:
                self._lease = leases.acquire(IDENTITY_DUTY, self.node_name, DUTY_TTL_S)
            except Conflict:
                return False
        return not self._lease.lost

    def _remember(self) -> None:
        """Keep namespaces, Workloads and this node's pods for a start without the store."""
        sources = self._resolver.sources
        version = sources.version
        # Half of the namespaces would give pods other labels, and so other identities, at a start without the store.
        if sources.is_complete and version != self._remembered:
            self.facts.write_fact(SOURCES_FACT, sources.dump())
            self._remembered = version
        pods = self.feed.pods
        if pods is not None and (version := pods.version) != self._remembered_pods:
            self.facts.write_fact(PODS_FACT, pods.dump())
            self._remembered_pods = version

    def _guess_labels(self, pod: PodFacts) -> tuple[str, ...]:
        """Give the labels that the ADD of a pod will bring, if its network is that of the pods before it."""
        network = next((str(endpoint.record.key.network) for endpoint in self.table), NETWORK)
        return complete_labels(pod.labels, network=network, namespace=pod.namespace, pod=pod.name)

    def _publish(self, in_use: frozenset[int]) -> None:
        age_s = self.monotonic() - self._published_s
        if in_use != self._published or age_s >= PUBLISH_AGAIN_S:
            publish_holds(self._store, self.node_name, in_use)
            self._published, self._published_s = in_use, self.monotonic()


def _number(bound: BoundPods) -> float:
    bound.number()
    return FOREVER_S
