"""Look after identities: follow changes, relabel endpoints, publish what is in use, collect what is not.

`agent.node` prepares it before anything is restored. `agent.main` starts its follower and runs `tend_identities` as a
task. `agent.api.routes` asks it to change labels. Everything that waits for the store runs on a thread and never under
the node's turn. Invariant: an endpoint keeps its identity until the new one exists, and both are published as in use
until the datapath has changed over.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Protocol

from podwire.agent.duties.follower import KindList, Memory, StoreFollower
from podwire.control.endpoint.queue import Level
from podwire.control.endpoint.states import State
from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.control.identity.collect import Collector, collect, publish_holds
from podwire.control.identity.feed import KINDS, IdentityFeed
from podwire.control.identity.own_labels import change_own_labels
from podwire.control.identity.resolver import Resolution, own_labels
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import Conflict, NotFound, PodwireError, Unavailable
from podwire.model.ids import EndpointId
from podwire.model.store import Revisions, StoreEvent
from podwire.model.store.leases import IDENTITY_DUTY, Lease

SOURCES_FACT: Final = "label-sources"
TICK_S: Final = 1.0
"""Also the shortest time between two publications of what is in use."""
COLLECT_S: Final = 60.0
PUBLISH_AGAIN_S: Final = 60.0
"""How often a publication that should stand is looked at: somebody may have deleted it."""
DUTY_TTL_S: Final = 30.0
"""How long the cluster's duties wait for an agent that went without a word."""
_ENDING: Final = frozenset({State.DISCONNECTING, State.DISCONNECTED})

_log = logging.getLogger(__name__)


class IdentityJournal(Protocol):
    """What this duty keeps across restarts."""

    def write(self, record: EndpointRecord) -> None: ...

    def write_fact(self, name: str, value: str) -> None: ...

    def read_fact(self, name: str) -> str: ...


class Builds(Protocol):
    """What this duty asks of the regenerator."""

    def request(self, endpoint_id: EndpointId, level: Level, cause: str) -> None:
        """Have an endpoint's datapath brought to what its record says; called under the turn."""
        ...


@dataclass(frozen=True)
class IdentityNews:
    """Hands what the store says to the feed. That the store is away is told by who follows its policies."""

    feed: IdentityFeed

    def on_lists(self, lists: Sequence[KindList]) -> None:
        """Take whole lists."""
        for one in lists:
            self.feed.replace(one.kind, one.objects, one.revision)

    def on_events(self, events: Sequence[StoreEvent], _revisions: Revisions) -> None:
        """Take changes."""
        self.feed.heard()
        for event in events:
            self.feed.apply(event)

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
    journal: IdentityJournal
    regenerator: Builds
    turn: threading.RLock
    memory: Memory | None = None
    """Where what the store says is kept for a start without it."""
    named: Callable[[], frozenset[int]] = frozenset
    """Identities that this node's NodeEndpoints names: its Node need not hold them."""
    collector: Collector = field(default_factory=Collector)
    monotonic: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _remembered: int = 0
    _published: frozenset[int] | None = None
    _published_s: float = 0.0
    _collected_s: float = 0.0
    _checked: set[EndpointId] = field(default_factory=set)
    _pending: set[EndpointId] = field(default_factory=set)
    _lease: Lease | None = None

    def __post_init__(self) -> None:
        self._resolver = self.feed.resolver
        self._allocator = self._resolver.allocator
        self._store = self._allocator.store
        self.follower = StoreFollower(
            "identity-watch", self._store, KINDS, IdentityNews(self.feed), self.memory
        )

    def prepare(self, records: Iterable[EndpointRecord]) -> None:
        """Take over what is known without the store; before endpoints are restored and doors open."""
        self._resolver.sources.load(self.journal.read_fact(SOURCES_FACT))
        self._remembered = self._resolver.sources.version
        for record in records:
            self._resolver.adopt(record)
        self.follower.load()

    def tick(self) -> None:
        """Do what is due; raises what the store says when it is away, after all that needs no store."""
        held = {
            # A row has its old number until its build is done, and for as long as that fails.
            int(number)
            for one in self.table
            for number in (one.record.identity, one.config.identity)
        } - {0}
        in_use = self._allocator.set_held(held)
        waiting_for = self._repair()
        self._remember()
        self._publish(in_use - self.named())
        self._allocator.reassert()
        self._resolver.reassert_namespaces(
            one.record.namespace for one in self.table if one.state not in _ENDING
        )
        if self.monotonic() - self._collected_s >= COLLECT_S:
            self._collected_s = self.monotonic()
            if self._has_cluster_duty():
                collect(self._store, self.collector, now=self.now(), monotonic_s=self._collected_s)
        if waiting_for is not None:
            raise waiting_for

    def close(self) -> None:
        """Let another node do the cluster's duties."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

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

    def change_labels(self, endpoint_id: EndpointId, changes: Sequence[str]) -> EndpointRecord:
        """Set and take away labels of one endpoint; gives its new record when the new identity is written.

        Waits for the store like an ADD. Raises NotFound, InvalidRequest, Unavailable, Conflict.
        """
        record = self._living(endpoint_id).record
        before = own_labels(record)
        own = change_own_labels(
            before,
            changes,
            lambda key: self._resolver.sources.workload_of(before, record.namespace, key),
        )
        resolution = self._resolver.resolve(own, record.named_ports, record.namespace)
        if not self._change_over(record, resolution, "labels changed by hand"):
            raise Conflict(
                f"change labels of endpoint {endpoint_id}: somebody else changed it at the same time",
                hint="do it again",
            )
        return self._living(endpoint_id).record

    def _living(self, endpoint_id: EndpointId) -> Endpoint:
        endpoint = self.table.get(endpoint_id)
        if endpoint is None or endpoint.state in _ENDING:
            raise NotFound(f"find endpoint {endpoint_id}: there is none")
        return endpoint

    def _repair(self) -> Unavailable | None:
        """Give endpoints whose labels or number are not what they should be the right ones.

        A new endpoint is looked at once: what changed between its ADD's look and its entry in the table is found here.
        Those that wait for the store keep what they have; gives what they wait for.
        """
        if not self._resolver.sources.is_complete:
            return None
        doubt = self.feed.take_doubt()
        records = [one.record for one in self.table if one.state not in _ENDING]
        suspects = [one for one in records if one.id not in self._checked or doubt.may_touch(one)]
        self._checked = {one.id for one in records}
        self._pending &= self._checked
        self._pending |= {one.id for one in self._resolver.affected(suspects)}
        waiting_for: Unavailable | None = None
        for record in [one for one in records if one.id in self._pending]:
            try:
                if self._relabel(record):
                    self._pending.discard(record.id)
            except Unavailable as error:
                waiting_for = error
        return waiting_for

    def _relabel(self, record: EndpointRecord) -> bool:
        """Change one endpoint over; False or Unavailable: it keeps what it has, and is tried again."""
        try:
            resolution = self._resolver.resolve_again(record)
            return self._change_over(record, resolution, "labels changed")
        except Unavailable:
            raise
        except PodwireError as error:
            _log.warning(
                "relabel endpoint failed; it keeps its identity, it is retried",
                extra={"endpoint": record.id, "error": error.message},
            )
            return False

    def _change_over(self, record: EndpointRecord, resolution: Resolution, cause: str) -> bool:
        """Write a new identity and have the datapath built for it; False when the record is another by now."""
        with self.turn:
            endpoint = self.table.get(record.id)
            if endpoint is None or endpoint.state in _ENDING or endpoint.record != record:
                return False
            changed = resolution.write_into(record)
            if changed == record:
                return True
            self.journal.write(changed)
            self.table.replace_record(changed)
            if changed.identity != record.identity:
                cause = f"{cause}: identity {record.identity} -> {changed.identity}"
                self.regenerator.request(record.id, Level.POLICY, cause)
        _log.info(
            "the labels of an endpoint changed",
            extra={"endpoint": record.id, "identity": changed.identity, "cause": cause},
        )
        return True

    def _remember(self) -> None:
        """Keep namespaces and Workloads for a start without the store."""
        sources = self._resolver.sources
        version = sources.version
        if sources.is_complete and version != self._remembered:
            self.journal.write_fact(SOURCES_FACT, sources.dump())
            self._remembered = version

    def _publish(self, in_use: frozenset[int]) -> None:
        age_s = self.monotonic() - self._published_s
        if in_use != self._published or age_s >= PUBLISH_AGAIN_S:
            publish_holds(self._store, self.node_name, in_use)
            self._published, self._published_s = in_use, self.monotonic()


async def tend_identities(
    duty: IdentityDuty, threads: Executor, report: Callable[[str], None]
) -> None:
    """Tick for ever; `report` hears what is wrong with the store, "" when nothing is."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            await loop.run_in_executor(threads, duty.tick)
            report("")
        except Unavailable as error:
            report(error.message)
        await asyncio.sleep(TICK_S)
