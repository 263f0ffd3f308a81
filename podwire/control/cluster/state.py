"""All that is known of other nodes, and the plan that follows from it.

Used by `agent.duties.cluster.duty` under its lock: objects go in as the store gives them, and `advance` says what the
kernel needs now. Never looks at the outside world. Invariant: nothing is planned before nodes and their pods were
listed once. What cannot be read is left out and reported.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from podwire.control.cluster.facts import decode_node, is_published, same_for_peers
from podwire.control.cluster.grants import PoolGrants
from podwire.control.cluster.ownership import Problem, claimed_ranges
from podwire.control.cluster.planner import NodeNumbers, Planned, plan_cluster
from podwire.control.cluster.published import Publication, decode_endpoints
from podwire.control.cluster.reach import ClusterSettings
from podwire.control.cluster.remote import Changes, RemotePods, View
from podwire.model.cluster import Claimed, ClusterPlan, Granted, NodeFacts, Underlay
from podwire.model.documents.lenient import members_of
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import InvalidRequest
from podwire.model.store import StoredObject, StoreEvent
from podwire.model.store.kinds import IP_POOL, NODE, NODE_ENDPOINTS

KINDS = (NODE.plural, NODE_ENDPOINTS.plural, IP_POOL.plural)
"""Pools after the others: what they are asked for is known then."""


class OwnNode(msgspec.Struct, frozen=True):
    """What this node knows of itself."""

    facts: NodeFacts
    underlay: Underlay


class KnownNode(msgspec.Struct, frozen=True):
    """A node as people see it."""

    facts: NodeFacts
    outer: str
    """Where tunnel packets go, "" when it is not reached."""
    ways: tuple[str, ...]
    mtu_bytes: int


class ClusterTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Other nodes, counted, as status shows them."""

    routing: str
    nodes: int
    """Known ones."""
    reached: int
    """Those that packets are sent to."""
    pods: int
    """Addresses of their pods."""
    heard: bool
    """Whether the store was heard, now or in an earlier life."""
    encrypted: int = 0
    """Those whose rows in the kernel say that what goes there has to be encrypted."""


class ClusterState:
    """Other nodes as the store and this node's kernel have them. Not thread-safe."""

    def __init__(
        self,
        own_name: str,
        instance: str,
        settings: ClusterSettings,
        numbers: NodeNumbers,
        grants: PoolGrants | None = None,
    ) -> None:
        self.numbers = numbers
        self.pods = RemotePods()
        self.grants = grants or PoolGrants()
        self.own_claims: Mapping[Claimed, int] = {}
        """Numbers that this machine has published in an earlier life, as the store has them."""
        self._granted: dict[str, tuple[NodeFacts, Granted]] = {}
        """What was read of core Nodes for contests, by name, and for which facts it was."""
        self.own_overwritten = False
        """Whether somebody else has changed or deleted what this node publishes."""
        self._own_name = own_name
        self._instance = instance
        self._settings = settings
        self.facts: dict[str, NodeFacts] = {}
        """What other nodes say of themselves, by name."""
        self._unreadable: dict[tuple[str, str], Problem] = {}
        self._listed: set[str] = set()
        self._dirty: set[IPAddress] = set()
        self._own: OwnNode | None = None
        self.planned: Planned | None = None
        """What was planned last."""
        self._plan: ClusterPlan | None = None
        self._is_stale = True

    @property
    def is_listed(self) -> bool:
        """Whether the store was heard, now or in an earlier life."""
        return self._listed.issuperset(KINDS)

    @property
    def problems(self) -> list[Problem]:
        """All that people should look at."""
        planned = self.planned.problems if self.planned else ()
        return [*self._unreadable.values(), *planned, *self.pods.problems]

    @property
    def plan(self) -> ClusterPlan:
        """The whole plan, with every pod's row; the same object until something changes."""
        if self._plan is None:
            planned = self.planned
            if planned is None:
                return ClusterPlan()
            rows, single_routes = self.pods.rows, self.pods.routes
            self._plan = replace(
                planned.plan,
                prefixes={**planned.plan.prefixes, **rows},
                routes=(*planned.plan.routes, *single_routes.values()),
            )
        return self._plan

    def replace(self, kind: str, objects: Iterable[StoredObject]) -> None:
        """Take a whole list."""
        self._listed.add(kind)
        self._unreadable = {
            key: problem for key, problem in self._unreadable.items() if key[0] != kind
        }
        if kind == IP_POOL.plural:
            self._is_stale = self.grants.replace(objects, self._list_published()) or self._is_stale
            return
        everything = list(objects)
        given = [stored for stored in everything if stored.key.name != self._own_name]
        own = [stored for stored in everything if stored.key.name == self._own_name]
        # Somebody deleted or overwrote what this node publishes. The publisher has to write it again, else the other
        # nodes lose its pods.
        if not own or any(map(_is_damaged, own)):
            self.own_overwritten = True
        if kind == NODE.plural:
            self._recall_claims(own)
            before, self.facts = self.facts, {}
            for stored in given:
                self._read_node(stored)
            self._is_stale = self._is_stale or _differ(before, self.facts)
        else:
            read = ((self._read_endpoints(stored), stored.uid) for stored in given)
            known = ((publication, uid) for publication, uid in read if publication is not None)
            self._dirty |= self.pods.replace(known)

    def apply(self, event: StoreEvent) -> None:
        """Take one change."""
        key = event.object.key
        if key.kind == IP_POOL.plural:
            published = self._list_published()
            changed = (
                self.grants.remove(key.name, published)
                if event.deleted
                else self.grants.put(event.object, published)
            )
            self._is_stale = self._is_stale or changed
            return
        if key.name == self._own_name:
            self.own_overwritten = self.own_overwritten or self._is_not_ours(event)
            return
        self._unreadable.pop((key.kind, key.name), None)
        if key.kind == NODE.plural:
            before = self.facts.pop(key.name, None)
            if not event.deleted:
                self._read_node(event.object)
            after = self.facts.get(key.name)
            same = before is after or (
                before is not None and after is not None and same_for_peers(before, after)
            )
            self._is_stale = self._is_stale or not same
        else:
            publication = None if event.deleted else self._read_endpoints(event.object)
            self._dirty |= (
                self.pods.remove(key.name)
                if publication is None
                else self.pods.put(publication, event.object.uid)
            )

    def advance(self, own: OwnNode) -> tuple[bool, Changes]:
        """Give whether a whole plan must be applied and, if not, the rows that changed. Before everything was listed:
        nothing."""
        # A plan from a part of the list would remove the rows of nodes that were only not heard yet, and cut their
        # pods off.
        if not self.is_listed:
            return False, Changes()
        if self._is_stale or own != self._own:
            self._own = own
            self._replan(own)
            return True, Changes()
        dirty, self._dirty = self._dirty, set()
        return self.note(self.pods.update(dirty))

    def list_undecided(self) -> list[NodeFacts]:
        """Give the facts of nodes, this one among them, that claim a range that others claim, too, and whose core
        Nodes were not read since they said so."""
        contested = self.planned.contested if self.planned else frozenset[str]()
        own = {self._own_name: self._own.facts} if self._own else {}
        facts = {**self.facts, **own}
        return [
            facts[name]
            for name in sorted(contested & facts.keys())
            if self._find_granted(facts[name]) is None
        ]

    def decide(self, facts: NodeFacts, granted: Granted) -> None:
        """Take what was read of a node's core Node, for what the node says now."""
        self._granted[facts.name] = facts, granted
        self._is_stale = True

    def note(self, changes: Changes) -> tuple[bool, Changes]:
        """Take in that rows have changed; gives what `advance` gives."""
        if changes:
            self._plan = None
        return changes.routes_changed, changes

    def _replan(self, own: OwnNode) -> None:
        self.grants.forget(self._is_published)
        planned = plan_cluster(
            self._with_granted(own.facts),
            own.underlay,
            map(self._with_granted, self.facts.values()),
            self._settings,
            self.numbers,
            self.grants.current(),
        )
        dirty, self._dirty = self._dirty, set()
        # What was decided lasts as long as the contest does.
        self._granted = {
            name: decided for name, decided in self._granted.items() if name in planned.contested
        }
        self.pods.view(View(own.facts, planned))
        self.pods.update(dirty)
        self.numbers, self.planned, self._plan = planned.numbers, planned, None
        self._is_stale = False

    def _with_granted(self, facts: NodeFacts) -> NodeFacts:
        granted = self._find_granted(facts)
        return facts if granted is None else replace(facts, granted=granted)

    def _find_granted(self, facts: NodeFacts) -> Granted | None:
        """Give what was read for these facts; None when the node has said something else since."""
        decided = self._granted.get(facts.name)
        if decided is None:
            return None
        before, granted = decided
        # Of itself a node does not know the UID at once, and older versions do not publish it.
        is_same_node = before.core_uid == facts.core_uid or not (before.core_uid and facts.core_uid)
        return granted if is_same_node and before.pod_cidrs == facts.pod_cidrs else None

    def _recall_claims(self, own: Iterable[StoredObject]) -> None:
        """Keep the place that this machine's claims have among those of others, for a life that has published nothing
        yet."""
        for stored in own:
            with suppress(InvalidRequest):
                facts = decode_node(stored)
                self.own_claims = facts.claims if facts.instance == self._instance else {}

    def _list_published(self) -> Iterator[tuple[str, IPNetwork]]:
        """Give all that other nodes publish as theirs or their pods'."""
        for facts in self.facts.values():
            for network, _ in claimed_ranges(facts):
                yield facts.name, network
        yield from self.pods.list_strangers(self.facts)

    def _is_published(self, node: str, network: IPNetwork) -> bool:
        facts = self.facts.get(node)
        is_range = facts is not None and (network in facts.pod_cidrs or network in facts.blocks)
        return is_range or self.pods.is_published(node, network)

    def _is_not_ours(self, event: StoreEvent) -> bool:
        if event.deleted or _is_damaged(event.object):
            return True
        if event.object.key.kind != NODE.plural:
            return False
        return members_of(event.object.document, "spec").get("instance") != self._instance

    def _read_node(self, stored: StoredObject) -> None:
        if not is_published(stored.document):
            return
        try:
            self.facts[stored.key.name] = decode_node(stored)
        except InvalidRequest as error:
            self._note_unreadable(stored, error)

    def _read_endpoints(self, stored: StoredObject) -> Publication | None:
        try:
            return decode_endpoints(stored)
        except InvalidRequest as error:
            self._note_unreadable(stored, error)
            return None

    def _note_unreadable(self, stored: StoredObject, error: InvalidRequest) -> None:
        key = stored.key
        problem = Problem((key.name,), f"{error.message}: it is left out")
        self._unreadable[key.kind, key.name] = problem


def _is_damaged(stored: StoredObject) -> bool:
    """Tell whether what a node published was written over by something that cannot be read."""
    if stored.fault or stored.key.kind == NODE.plural:
        return bool(stored.fault)
    try:
        decode_endpoints(stored)
    except InvalidRequest:
        return True
    return False


def _differ(before: Mapping[str, NodeFacts], after: Mapping[str, NodeFacts]) -> bool:
    return before.keys() != after.keys() or any(
        not same_for_peers(facts, after[name]) for name, facts in before.items()
    )
