"""Look after other nodes: publish this one, follow the others, keep the kernel as the plan says.

Made by `agent.node`, started and stopped by `agent.main`. Four threads: one follows the store, one who lives, one plans
and applies, one publishes (it may wait for the store). Nothing waits for the store under the node's turn. Invariants:
nothing is taken out of the kernel before the store was heard, now or in an earlier life; while the store is away the
last plan stays in force and is repaired; what could not be applied is tried again as a whole.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import msgspec

from podwire.agent.cluster_lives import Lives
from podwire.agent.cluster_publisher import DEBOUNCE_S, Publisher
from podwire.agent.health import Health
from podwire.agent.metrics import Gauge, Metrics
from podwire.agent.store_follower import KindList, Memory, StoreFollower
from podwire.agent.views import ClusterTotals
from podwire.control.cluster.claims import everything_claimed
from podwire.control.cluster.facts import tunnel_mac
from podwire.control.cluster.planner import NodeNumbers
from podwire.control.cluster.publish import NodePublisher
from podwire.control.cluster.reach import ClusterSettings
from podwire.control.cluster.remote import Changes
from podwire.control.cluster.state import KINDS, ClusterState, OwnNode
from podwire.control.endpoint.states import State
from podwire.control.endpoint.table import EndpointTable
from podwire.model.cluster import IPAddress, IPNetwork, NodeFacts, TunnelMode, Underlay
from podwire.model.errors import PodwireError, Unavailable
from podwire.model.ids import IdentityId
from podwire.model.interfaces import ClusterDatapath
from podwire.model.store import Store, StoreEvent

NUMBERS_FACT: Final = "node-numbers"
RECONCILE_S: Final = 30.0
LOOK_AGAIN_S: Final = 1.0
"""Longest time between what the kernel tells and a look at it."""
LOOK_LEAST_S: Final = 0.1
LOOK_REST: Final = 4.0
"""After a look comes no other for so many times as long as it took: a kernel that tells all the time costs a fifth of
one core."""
RETRY_BASE_S: Final = 1.0
RETRY_CAP_S: Final = 30.0
WARNINGS_MAX: Final = 10
_ENDING: Final = frozenset({State.DISCONNECTING, State.DISCONNECTED})
_NOWHERE: Final = Underlay((), (), 0, 1500)

_log = logging.getLogger(__name__)


class ClusterJournal(Protocol):
    """What this duty keeps across restarts."""

    def write_fact(self, name: str, value: str) -> None: ...

    def read_fact(self, name: str) -> str: ...


class KernelNews(Protocol):
    """Tells that links, addresses, routes or filters have changed (`kernel.netlink_events.NetlinkEvents`)."""

    def wait(self, timeout_s: float) -> bool: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class OwnRanges:
    """Which addresses this node's pods have, and which of them stand for the node itself."""

    pod_cidrs: tuple[IPNetwork, ...] = ()
    blocks: Mapping[IPNetwork, int] = field(default_factory=dict)
    """Claimed ones of pools, with the epochs of the claims."""
    tunnel_addresses: tuple[IPAddress, ...] = ()
    """At most one per family."""


@dataclass(frozen=True)
class ClusterOptions:
    """What the configuration says of this node among the others."""

    node_name: str
    settings: ClusterSettings
    tunnel_mode: TunnelMode = TunnelMode.FLOW
    tunnel_port: int = 8472
    node_address: IPAddress | None = None


@dataclass(frozen=True)
class KnownNode:
    """A node as people see it."""

    facts: NodeFacts
    outer: str
    """Where tunnel packets go, "" when it is not reached."""
    ways: tuple[str, ...]
    mtu_bytes: int


@dataclass(eq=False)
class ClusterDuty:
    """This node among the others, over time."""

    options: ClusterOptions
    store: Store
    datapath: ClusterDatapath
    table: EndpointTable
    turn: threading.RLock
    journal: ClusterJournal
    health: Health
    metrics: Metrics
    own_ranges: Callable[[], OwnRanges]
    open_news: Callable[[], KernelNews]
    name: NodePublisher
    memory: Memory | None = None
    """Where what the store says is kept for a start without it."""
    own: OwnNode | None = None

    def __post_init__(self) -> None:
        options = self.options
        numbers = msgspec.json.decode(
            self.journal.read_fact(NUMBERS_FACT) or "{}", type=NodeNumbers
        )
        self.state = ClusterState(options.node_name, self.name.instance, options.settings, numbers)
        self.lock = threading.Lock()
        self.follower = StoreFollower("cluster-watch", self.store, KINDS, self, self.memory)
        self._applier = _Applier(self)
        self._publisher = Publisher(self, self.store, self.name, options.node_address)
        self._lives = Lives(self.store, self.show_problems)
        self.metrics.look_up(self._gauges())

    # Life

    def prepare(self) -> None:
        """Read what the store has, or said last, before endpoints are restored."""
        self.follower.load()

    def apply(self) -> None:
        """Plan and apply once, after the restore; what fails is reported and tried again later."""
        self._applier.step(is_reconciliation=False)

    def start(self) -> None:
        """Start all threads."""
        self._applier.start(self.open_news())
        self._publisher.start()
        self.follower.start()
        self._lives.start()

    def stop(self) -> None:
        """End all threads; the plan stays in force, the name is given up."""
        self._lives.stop()
        self.follower.stop()
        self._publisher.stop()
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

    def list_names(self) -> Sequence[str]:
        """Give the names of all other nodes."""
        with self.lock:
            return tuple(self.state.facts)

    def ranges_changed(self) -> None:
        """Hear that this node has other ranges or blocks; from any thread, cheap."""
        self._applier.wake(look=True)

    # Listener of the store

    def on_lists(self, lists: Sequence[KindList]) -> None:
        """Take whole lists."""
        with self.lock:
            for one in lists:
                self.state.replace(one.kind, one.objects)
            is_overwritten = self.state.own_overwritten
        self._look(is_overwritten)

    def on_events(self, events: Sequence[StoreEvent], _revision: int) -> None:
        """Take changes."""
        if not events:
            return
        with self.lock:
            for event in events:
                self.state.apply(event)
            is_overwritten = self.state.own_overwritten
        self._look(is_overwritten)

    def _look(self, is_overwritten: bool) -> None:
        self._applier.wake()
        if is_overwritten:
            self._publisher.wake()

    def on_away(self, error: PodwireError) -> None:
        """Go on with the last plan. That the store is away is told by who follows its policies."""

    def on_back(self) -> None:
        """Publish what had to wait."""
        self._publisher.store_is_back()

    # What others ask

    def named_identities(self) -> frozenset[int]:
        """Give the identities that this node's NodeEndpoints names, or is about to: its Node need not hold them."""
        return frozenset(map(int, self._publisher.named(self.list_pods()).values()))

    def list_pods(self) -> dict[IPAddress, IdentityId]:
        """Give the identity of every address of this node's pods."""
        return {
            address: one.record.identity
            for one in self.table
            if one.state not in _ENDING and one.record.identity
            for address in one.record.addresses
        }

    def list_nodes(self) -> list[KnownNode]:
        """Give every node that has published itself, this one first."""
        with self.lock:
            facts = dict(self.state.facts)
            reaches = self.state.planned.reaches if self.state.planned else {}
        own = [] if self.own is None else [KnownNode(self.own.facts, "", ("local",), 0)]
        for name in sorted(facts):
            reach = reaches.get(name)
            ways = (
                () if reach is None else tuple(sorted({way for way in reach.ways.values() if way}))
            )
            outer = str(reach.peer.outer) if reach is not None and ways else ""
            mtu = reach.peer.mtu_bytes if reach is not None and ways else 0
            own.append(KnownNode(facts[name], outer, tuple(map(str, ways)), mtu))
        return own

    def totals(self) -> ClusterTotals:
        """Count what is known."""
        state = self.state
        return ClusterTotals(
            routing=self.options.settings.routing,
            nodes=len(state.facts),
            reached=self._count_peers(),
            pods=state.pods.count,
            heard=state.is_listed,
        )

    # What the threads share

    def look_at_self(self) -> OwnNode:
        """Read this node's own facts from kernel and addresses. Raises KernelFailure."""
        options, ranges = self.options, self.own_ranges()
        with self.turn:
            try:
                underlay = self.datapath.read_underlay()
            except Unavailable:
                underlay = _NOWHERE
        addresses = underlay.addresses
        if options.node_address in addresses:
            addresses = tuple(sorted(addresses, key=lambda one: one != options.node_address))
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
        )
        numbers = self.name.claims
        numbered = {one: numbers[one] for one in everything_claimed(facts) if one in numbers}
        return OwnNode(replace(facts, claims=numbered), underlay)

    def put_into_force(self, whole: bool, changes: Changes) -> Sequence[str]:
        """Hand a plan, or rows between two plans, to the kernel; gives what differed from a plan."""
        if whole:
            with self.lock:
                plan = self.state.plan
            with self.turn:
                return self.datapath.apply_cluster(plan)
        if changes:
            with self.turn:
                self.datapath.change_prefixes(changes.put, changes.remove)
        return ()

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
            found, self.state.own_overwritten = self.state.own_overwritten, False
        return found

    def save_numbers(self) -> None:
        """Keep the numbers of nodes: rows of connections name them across restarts."""
        self.journal.write_fact(NUMBERS_FACT, msgspec.json.encode(self.state.numbers).decode())

    def note_repairs(self, differences: Sequence[str]) -> None:
        """Say and count what was found changed in the kernel."""
        for difference in differences:
            _log.warning("repaired the way to other nodes", extra={"cause": difference})
        self.metrics.count("cluster_repairs", by=len(differences))

    def observe(self, step: str, begin_s: float) -> None:
        """Measure one step since `begin_s`."""
        self.metrics.observe_step("cluster", step, (time.monotonic() - begin_s) * 1e3)

    def report(self, name: str, message: str, *, critical: bool = False) -> None:
        """Say whether something works; "" = it does."""
        self.health.report(name, ok=not message, message=message, critical=critical)

    def show_problems(self) -> None:
        """Have what is wrong between nodes in `podwire status`."""
        with self.lock:
            found = [one.message for one in self.state.problems]
            lost = self.state.planned.lost if self.state.planned else ""
        self.health.warn("cluster-lives", self._lives.describe_dead(self.list_names()))
        self.report("node-claims", lost, critical=True)
        shown = found[:WARNINGS_MAX]
        if len(found) > WARNINGS_MAX:
            shown.append(f"{len(found) - WARNINGS_MAX} more problems between nodes")
        for index in range(WARNINGS_MAX + 1):
            self.health.warn(f"cluster-{index}", shown[index] if index < len(shown) else "")

    def _gauges(self) -> list[Gauge]:
        def count(what: Callable[[], int]) -> Callable[[], Mapping[tuple[str, ...], float]]:
            return lambda: {(): float(what())}

        return [
            Gauge("cluster_nodes", "Other nodes known", (), count(lambda: len(self.state.facts))),
            Gauge("cluster_nodes_dead", "Other nodes whose agents do not live", (),
                  count(lambda: len(self._lives.find_dead(self.list_names())))),
            Gauge("cluster_peers", "Other nodes reached", (), count(self._count_peers)),
            Gauge("cluster_pods", "Addresses of other nodes' pods", (),
                  count(lambda: self.state.pods.count)),
            Gauge("cluster_problems", "Contradictions between nodes", (),
                  count(lambda: len(self.state.problems))),
        ]  # fmt: skip

    def _count_peers(self) -> int:
        return len(self.state.planned.plan.peers) if self.state.planned else 0


class _Applier:
    """The thread that plans and applies."""

    def __init__(self, duty: ClusterDuty) -> None:
        self._duty = duty
        self._news: KernelNews | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._must_apply = True
        """The kernel may not have what the plan says."""
        self._must_look = True
        """This node itself may be another."""
        self._failures = 0
        self._saved: NodeNumbers | None = None

    def start(self, news: KernelNews) -> None:
        self._news = news
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._news is not None:
            self._news.wake()
        if self._thread is not None:
            self._thread.join()
        if self._news is not None:
            self._news.close()

    def wake(self, *, whole: bool = False, look: bool = False) -> None:
        self._must_apply = self._must_apply or whole
        self._must_look = self._must_look or look
        if self._news is not None:
            self._news.wake()

    def step(self, *, is_reconciliation: bool) -> bool:
        """Bring the kernel to what is known now; False when that failed."""
        duty, begin_s = self._duty, time.monotonic()
        look, self._must_look = self._must_look or is_reconciliation, False
        must_apply, self._must_apply = self._must_apply, False
        try:
            own = duty.own if duty.own is not None and not look else duty.look_at_self()
            duty.own_changed(own)
            with duty.lock:
                whole, changes = duty.state.advance(own)
                is_listed = duty.state.is_listed
            if not is_listed:
                self._must_apply = True
                return True
            repairs_only = is_reconciliation and not (whole or changes or must_apply)
            whole = whole or is_reconciliation or must_apply
            self._save_numbers()
            differences = duty.put_into_force(whole, changes)
        except PodwireError as error:
            self._fail(error.message)
            return False
        except Exception as error:  # the thread's door
            _log.exception("apply what other nodes say")
            self._fail(repr(error))
            return False
        self._failures = 0
        duty.report("cluster", "")
        if repairs_only and differences:
            duty.note_repairs(differences)
        duty.show_problems()
        if whole or changes:
            duty.observe("apply" if whole else "rows", begin_s)
        return True

    def _save_numbers(self) -> None:
        """Before the kernel has them: a number must never come to mean another name."""
        numbers = self._duty.state.numbers
        if numbers is not self._saved:
            self._duty.save_numbers()
            self._saved = numbers

    def _fail(self, message: str) -> None:
        if not self._failures:
            _log.warning("apply what other nodes say", extra={"error": message})
        self._failures += 1
        self._must_apply = self._must_look = True
        self._duty.report("cluster", message)
        self._duty.show_problems()

    def _run(self) -> None:
        news = self._news
        if news is None:
            return
        reconcile_s = time.monotonic() + LOOK_AGAIN_S  # nobody listened since the first plan
        look_s, quiet_until_s = math.inf, 0.0
        while not self._stopping.is_set():
            due_s = min(reconcile_s, look_s)
            kernel_changed = news.wait(max(0.0, due_s - time.monotonic()))
            now_s = time.monotonic()
            if kernel_changed:  # what other nodes say does not wait for the look
                look_s = min(look_s, max(now_s + DEBOUNCE_S, quiet_until_s))
                if now_s < min(reconcile_s, look_s):
                    continue
            is_due = now_s >= min(reconcile_s, look_s)
            if is_due:
                look_s = math.inf
            else:
                self._stopping.wait(DEBOUNCE_S)
            if self._stopping.is_set():
                return
            done = self.step(is_reconciliation=is_due)
            end_s = time.monotonic()
            if not done:
                reconcile_s = end_s + self._retry_in()
            elif is_due:
                reconcile_s = end_s + RECONCILE_S
                took_s = end_s - now_s
                quiet_until_s = end_s + min(LOOK_AGAIN_S, max(LOOK_LEAST_S, LOOK_REST * took_s))

    def _retry_in(self) -> float:
        return min(RETRY_CAP_S, RETRY_BASE_S * 2.0 ** min(self._failures - 1, 8))
