"""Look after other nodes: publish this one, follow the others, keep the kernel in line with the plan.

Made by `agent.node`, started and stopped by `agent.main`. Follows the store by the agent's watch, and combines
threads that each have a module of their own: one plans and applies, one publishes, one follows which nodes are alive,
one looks up where the store is, and with Kubernetes one reads what decides contests. Nothing waits for the store under
the node's turn. Invariants: nothing is removed from the kernel before the store was read, now or in an earlier life of
the agent. While the store is away, the last plan stays in force and is repaired.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import msgspec

from podwire.agent.duties.cluster.applier import Applier, KernelNews
from podwire.agent.duties.cluster.contests import Contests
from podwire.agent.duties.cluster.liveness import Lives
from podwire.agent.duties.cluster.publisher import Publisher
from podwire.agent.duties.cluster.store_addresses import StoreAddresses
from podwire.agent.duties.cluster.views import ClusterViews
from podwire.agent.duties.follower import KindList, StoreFollower
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.health import Health
from podwire.agent.metrics import Metrics
from podwire.control.cluster.facts import tunnel_mac
from podwire.control.cluster.grants import PoolGrants
from podwire.control.cluster.ownership import everything_claimed
from podwire.control.cluster.planner import NodeNumbers
from podwire.control.cluster.publish import NodePublisher
from podwire.control.cluster.reach import ClusterSettings
from podwire.control.cluster.state import KINDS, ClusterState, OwnNode
from podwire.control.endpoint.table import EndpointTable
from podwire.model.cluster import Granted, NodeFacts, TunnelMode, Underlay
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import PodwireError, StorageFailure, Unavailable
from podwire.model.ids import IdentityId
from podwire.model.interfaces import ClusterDatapath, FactStore
from podwire.model.store import Revisions, Store, StoredObject, StoreEvent
from podwire.model.store.kinds import NODE, NODE_ENDPOINTS

_PUBLISHED: Final = (NODE.plural, NODE_ENDPOINTS.plural)
NUMBERS_FACT: Final = "node-numbers"
GRANTS_FACT: Final = "pool-grants"
_NOWHERE: Final = Underlay((), (), 0, 1500)


@dataclass(frozen=True)
class OwnRanges:
    """Which addresses this node's pods have, and which of them stand for the node itself."""

    pod_cidrs: tuple[IPNetwork, ...] = ()
    blocks: Mapping[IPNetwork, int] = field(default_factory=dict)
    """Claimed ones of pools, with the epochs of the claims."""
    tunnel_addresses: tuple[IPAddress, ...] = ()
    """At most one per family."""
    core_uid: str = ""
    """With Kubernetes: of the core Node that owns what this node publishes."""
    why_silent: str | None = None
    """Why this node publishes nothing now: it has no core Node, or "" = was not heard of one yet. None: it does."""


@dataclass(frozen=True)
class ClusterOptions:
    """What the configuration says of this node among the others."""

    node_name: str
    settings: ClusterSettings
    tunnel_mode: TunnelMode = TunnelMode.FLOW
    tunnel_port: int = 8472
    node_address: IPAddress | None = None
    store_hosts: tuple[str, ...] = ()
    """Names and addresses by which the store is reached."""
    has_core_nodes: bool = False
    """Whether the store is Kubernetes, which gives nodes their ranges and is asked when two claim one."""


def is_published_by(node_name: str, stored: StoredObject) -> bool:
    """Tell whether a node itself writes an object: it does so again when somebody else has damaged it."""
    return stored.key.kind in _PUBLISHED and stored.key.name == node_name


@dataclass(eq=False)
class ClusterDuty:
    """This node among the others, over time."""

    options: ClusterOptions
    store: Store
    datapath: ClusterDatapath
    table: EndpointTable
    turn: threading.RLock
    journal: FactStore
    health: Health
    metrics: Metrics
    own_ranges: Callable[[], OwnRanges]
    open_news: Callable[[], KernelNews]
    name: NodePublisher
    shared: SharedWatch | None = None
    """The agent's watch of the store, where there is one for all duties."""
    own: OwnNode | None = None
    """None before this node was looked at."""
    range_lost: Callable[[str], None] = lambda _why: None
    """Hears why this node must not give out addresses of its ranges, "" when it may: another node has them."""
    pods_moved: Callable[[], None] = lambda: None
    """Hears that pods of other nodes have come, changed or gone, after the kernel has; quick."""
    is_awaited: Callable[[IdentityId], bool] = lambda _identity: False
    """Says whether others wait to hear that a pod of this identity is gone."""

    def __post_init__(self) -> None:
        options = self.options
        numbers = msgspec.json.decode(
            self.journal.read_fact(NUMBERS_FACT) or "{}", type=NodeNumbers
        )
        self._saved_grants = self.journal.read_fact(GRANTS_FACT)
        self._has_unsaved = False
        """Whether what pools have given could not be kept; tried again at each answer of the store."""
        self.state = ClusterState(
            options.node_name,
            self.name.instance,
            options.settings,
            numbers,
            PoolGrants.load(self._saved_grants),
        )
        self._store_addresses = StoreAddresses(options.store_hosts, self.ranges_changed)
        self.lock = threading.Lock()
        """Held around `state`."""
        self.follower = StoreFollower(
            "cluster-watch",
            self.store,
            KINDS,
            self,
            shared=self.shared,
            tell_unreadable=partial(is_published_by, options.node_name),
        )
        self._applier = Applier(self, self.datapath, self.turn, self.metrics)
        self._publisher = Publisher(
            self, self.store, self.name, options.node_address, self.is_awaited
        )
        self._contests = Contests(self.store, self) if options.has_core_nodes else None
        self._lives = Lives(self.store, self.show_problems)
        self.views = ClusterViews(self.state, self.lock, self._lives, options.settings.routing)
        self.metrics.look_up(self.views.gauges())

    # Life

    def prepare(self) -> None:
        """Read what the store has, or said last, before endpoints are restored."""
        self.follower.load()

    def apply(self) -> None:
        """Plan and apply once, after the restore; what fails is reported and tried again later."""
        self._applier.step(is_reconciliation=False)
        # Before the first pod: nothing is given out of a range that another node has.
        if self._contests is not None:
            # While the store is away the older claim stands, and the contest is read later.
            with suppress(PodwireError):
                self._contests.read_all()
            self._applier.step(is_reconciliation=False)

    def start(self) -> None:
        self._applier.start(self.open_news())
        self._publisher.start()
        self.follower.start()
        self._lives.start()
        self._store_addresses.start()
        if self._contests is not None:
            self._contests.start()

    def stop(self) -> None:
        """End all threads; the plan stays in force, the name is given up."""
        if self._contests is not None:
            self._contests.stop()
        self._lives.stop()
        self.follower.stop()
        self._publisher.stop()
        self._store_addresses.stop()
        self._applier.stop()

    def pods_changed(self) -> None:
        """Hear that an endpoint of this node has come, changed or gone; from any thread, cheap."""
        self._publisher.pods_changed()

    def claims_changed(self) -> None:
        """Hear that something this node claims has its number now; from any thread, cheap."""
        self._applier.wake(look=True)

    def list_others(self) -> Sequence[NodeFacts]:
        """Give what other nodes say of themselves."""
        with self.lock:
            return tuple(self.state.facts.values())

    def ranges_changed(self) -> None:
        """Hear that this node has other ranges or blocks; from any thread, cheap."""
        self._applier.wake(look=True)

    # Listener of the store

    def on_lists(self, lists: Sequence[KindList]) -> None:
        with self.lock:
            for kind_list in lists:
                self.state.replace(kind_list.kind, kind_list.objects)
            is_overwritten = self.state.own_overwritten
        self._look(is_overwritten)

    def on_events(self, events: Sequence[StoreEvent], _revisions: Revisions) -> None:
        if not events:
            if self._has_unsaved:
                self._save_grants()
            return
        with self.lock:
            for event in events:
                self.state.apply(event)
            is_overwritten = self.state.own_overwritten
        self._look(is_overwritten)

    def _look(self, is_overwritten: bool) -> None:
        self._save_grants()
        self._applier.wake()
        if is_overwritten:
            self._publisher.wake()

    def on_away(self, error: PodwireError) -> None:
        """Go on with the last plan. The policy duty reports a store that is away."""

    def on_back(self) -> None:
        """Publish what had to wait."""
        self._publisher.store_is_back()

    # What others ask

    def why_silent(self) -> str | None:
        """Say why nothing of this node is to be published now: "" = its core Node, or this one, was not looked at yet.
        None: nothing is in the way."""
        ranges, own = self.own_ranges(), self.own
        if ranges.why_silent is None and own is not None:
            return "" if own.facts.core_uid != ranges.core_uid else None
        return ranges.why_silent

    def named_identities(self) -> frozenset[int]:
        """Give the identities that this node's NodeEndpoints names, or is about to: its Node need not hold them."""
        return frozenset(map(int, self._publisher.named(self.list_pods()).values()))

    def list_pods(self) -> dict[IPAddress, IdentityId]:
        """Give the identity of every address of this node's pods."""
        return {
            address: endpoint.record.identity
            for endpoint in self.table
            if not endpoint.is_ending and endpoint.record.identity
            for address in endpoint.record.addresses
        }

    def take_other_pods(self) -> tuple[bool, Mapping[IPAddress, IdentityId | None]]:
        """Give the identities of other nodes' pods that have changed; see `RemotePods.take_news`."""
        with self.lock:
            return self.state.pods.take_news()

    @property
    def knows_pods(self) -> bool:
        """Whether other nodes' pods were heard of, now or in an earlier life."""
        return self.state.is_listed

    def drop_other_pods(self) -> None:
        """Collect no news of other nodes' pods: nobody takes them."""
        with self.lock:
            self.state.pods.drop_news()

    # What the threads share

    def look_at_self(self) -> OwnNode:
        """Read this node's own facts from kernel and addresses. Raises KernelFailure."""
        options, ranges = self.options, self.own_ranges()
        with self.turn:
            try:
                underlay = self.datapath.read_underlay()
            # There is neither a default route nor `node_address`, as on a host whose network is not up yet.
            except Unavailable:
                underlay = _NOWHERE
        addresses = underlay.addresses
        if options.node_address in addresses:
            addresses = tuple(
                sorted(addresses, key=lambda address: address != options.node_address)
            )
        facts = NodeFacts(
            name=options.node_name,
            instance="",
            epoch=0,
            addresses=addresses,
            pod_cidrs=ranges.pod_cidrs,
            tunnel_addresses=ranges.tunnel_addresses,
            tunnel_mac=tunnel_mac(options.node_name),
            tunnel_mode=options.tunnel_mode,
            tunnel_port=options.tunnel_port,
            underlay_mtu_bytes=underlay.mtu_bytes,
            blocks=dict(ranges.blocks),
            core_uid=ranges.core_uid,
        )
        numbers = self.name.claims or self.state.own_claims
        numbered = {
            claimed: numbers[claimed] for claimed in everything_claimed(facts) if claimed in numbers
        }
        around = replace(underlay.around, store=self._store_addresses.known)
        return OwnNode(replace(facts, claims=numbered), replace(underlay, around=around))

    def set_own_pods(self, addresses: Mapping[IPAddress, IdentityId]) -> None:
        """Let no other node have an address that a pod of this one has."""
        with self.lock:
            changes = self.state.pods.set_own_pods(addresses)
            if changes:
                self.state.note(changes)
        if changes:
            self._applier.wake(whole=True)

    def own_changed(self, own: OwnNode) -> None:
        """Take in what this node is now."""
        if own != self.own:
            self.own = own
            self._publisher.wake()

    def take_overwritten(self) -> bool:
        """Tell, once, whether somebody else has changed or deleted what this node publishes."""
        with self.lock:
            overwritten, self.state.own_overwritten = self.state.own_overwritten, False
        return overwritten

    def _save_grants(self) -> None:
        """Keep what pools have given: one may be gone when the agent starts again. A full disk costs only that."""
        with self.lock:
            text = self.state.grants.dump()
        failure = ""
        if text != self._saved_grants:
            try:
                self.journal.write_fact(GRANTS_FACT, text)
                self._saved_grants = text
            except StorageFailure as error:
                failure = f"keep what IPPools give to pods of other nodes: {error.message}"
        self.health.warn(GRANTS_FACT, failure)
        self._has_unsaved = bool(failure)

    def save_numbers(self) -> None:
        """Keep the numbers of nodes: rows of connections name them across restarts."""
        self.journal.write_fact(NUMBERS_FACT, msgspec.json.encode(self.state.numbers).decode())

    def observe(self, step: str, begin_s: float) -> None:
        """Measure one step since `begin_s`."""
        self.metrics.observe_step("cluster", step, (time.monotonic() - begin_s) * 1e3)

    def report(self, name: str, message: str, *, critical: bool = False) -> None:
        """Say whether something works; "" = it does."""
        self.health.report(name, ok=not message, message=message, critical=critical)

    def show_problems(self) -> None:
        """Have what is wrong between nodes in `podwire status`."""
        self.range_lost(self.views.show_problems(self.health))
        if self._contests is not None:
            self._contests.look()

    # Contests

    def list_undecided(self) -> Sequence[NodeFacts]:
        """Give the nodes whose core Nodes have to be read, because one claims a range of another."""
        with self.lock:
            return self.state.list_undecided()

    def decide(self, facts: NodeFacts, granted: Granted) -> None:
        """Take what a core Node says."""
        with self.lock:
            self.state.decide(facts, granted)
        self._applier.wake()
