"""What this node publishes of itself: its Node object, its NodeEndpoints, and when.

`agent.duties.cluster.publisher` calls it on a thread that may wait for the store. `PublishSchedule` is pure.
Invariants: an object is written only when its contents would change, and never over what another living instance of
this name published. The first change of pods is written at once, and no two writes are closer than a second, or a
quarter of one where a running pod's identity has changed, as long as EARLY_MAX allows it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from podwire.control.cluster.backoff import Backoff
from podwire.control.cluster.belief import Belief, believe_nodes
from podwire.control.cluster.facts import decode_node, encode_node, is_published, node_key
from podwire.control.cluster.grants import PoolGrants
from podwire.control.cluster.ownership import (
    RANGES,
    UNNUMBERED,
    Claim,
    everything_claimed,
    number_claims,
    settle,
)
from podwire.control.cluster.published import Publication, encode_endpoints, endpoints_key
from podwire.model.cluster import Claimed, NodeFacts, Surroundings
from podwire.model.documents.lenient import members_of
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import Conflict, InvalidRequest, NotFound, Unavailable
from podwire.model.ids import IdentityId
from podwire.model.store import Store, StoredObject, look_at
from podwire.model.store.kinds import IP_POOL
from podwire.model.store.kinds import NODE as NODE_KIND
from podwire.model.store.leases import NODE as NODE_LEASE
from podwire.model.store.leases import Lease, list_living_nodes

LEASE_TTL_S: Final = 15.0
"""How long a node that says nothing counts as alive; another machine under its name waits as long."""
WRITE_EVERY_S: Final = 1.0
CHANGE_EVERY_S: Final = 0.25
"""Sooner, where an address that others know has another identity: somebody has changed labels, and expects that both
ends judge by them within a second. Pods that come and go are many, changes of labels are few.
"""
EARLY_MAX: Final = 40.0
"""So many seconds may be saved in a row, and then there is one write each second: every node of the cluster reads each
of them."""
RELEASE_AFTER_S: Final = 300.0
"""A pod that is gone is withdrawn with the next write, or after this time; within the second if another node may get
its address.
"""
ATTEMPTS: Final = 8

Identities = Mapping[IPAddress, IdentityId]


class NodeInUse(Conflict):
    """Another living instance has this node's name."""


class ClaimRefused(Conflict):
    """Another node has a range or an address of this one by an older claim."""


class Holder(msgspec.Struct, frozen=True):
    """The holder of a node's lease, as its text says."""

    instance: str = ""
    address: str = ""

    @classmethod
    def parse(cls, text: str) -> "Holder":
        """Read a lease's holder; what is no JSON of ours is somebody unknown."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError:
            return cls()

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


@dataclass
class PublishSchedule:
    """When to write which pods. Times are seconds of any clock that only goes forward."""

    published: Identities | None = None
    """What was written last; None before the first write of this life."""
    _written_s: float = field(default=0.0, repr=False)
    _early: float = field(default=EARLY_MAX, repr=False)
    """How many seconds may still be saved by early writes; filled by the seconds without a write."""
    _released_since_s: float | None = field(default=None, repr=False)
    _backoff: Backoff = field(default_factory=Backoff, repr=False)
    is_awaited: Callable[[IdentityId], bool] = field(default=lambda _identity: False, repr=False)
    """Whether somebody waits to hear that a pod of this identity is gone: it is a service's back end."""

    def due_in(self, wanted: Identities, now_s: float, own: Collection[IPNetwork]) -> float | None:
        """Give in how many seconds `wanted` is to be written (0 = now); None when nothing is to be.

        `own`: ranges of this node. No other node can give an address of them to a pod.
        """
        due_s = self._find_due(wanted, now_s, own)
        return None if due_s is None else max(0.0, max(due_s, self._backoff.until_s) - now_s)

    def written(self, wanted: Identities, now_s: float) -> None:
        """Note that `wanted` was written."""
        passed = (now_s - self._written_s) / WRITE_EVERY_S
        self._early = min(EARLY_MAX, max(0.0, self._early + passed - 1))
        self.published = dict(wanted)
        self._written_s = now_s
        self._released_since_s = None
        self._backoff.forget()

    def failed(self, now_s: float) -> None:
        """Note that a write failed: the next try waits, each time twice as long."""
        self._backoff.failed(now_s)

    def forget_failures(self) -> None:
        """Try at once: the store is back."""
        self._backoff.forget()

    def _find_due(
        self, wanted: Identities, now_s: float, own: Collection[IPNetwork]
    ) -> float | None:
        published = self.published
        if published is None:
            return now_s
        changed = [
            address for address, identity in wanted.items() if published.get(address) != identity
        ]
        if self._early >= 1 and any(address in published for address in changed):
            return self._written_s + CHANGE_EVERY_S
        if changed:
            return self._written_s + WRITE_EVERY_S
        if len(wanted) == len(published):
            self._released_since_s = None
            return None
        gone = published.keys() - wanted.keys()
        if not all(_is_in(address, own) for address in gone) or any(
            self.is_awaited(published[address]) for address in gone
        ):
            return self._written_s + WRITE_EVERY_S
        if self._released_since_s is None:
            self._released_since_s = now_s
        return max(self._released_since_s + RELEASE_AFTER_S, self._written_s + WRITE_EVERY_S)


def _is_in(address: IPAddress, networks: Collection[IPNetwork]) -> bool:
    return any(address in network for network in networks if network.version == address.version)


class NodePublisher:
    """Has a node's name, and writes its Node object. One thread at a time; `claims` may be read by any."""

    def __init__(self, store: Store, name: str, instance: str) -> None:
        self.name = name
        self.instance = instance
        self._store = store
        self._lease: Lease | None = None
        self._has_leases = True
        """Whether the store has leases, as far as it was asked."""
        self.claims: Mapping[Claimed, int] = {}
        """Numbers of what this life has published last; replaced, never changed.

        A range that is taken again after it was given up ranks behind a node that has it by then. It counts as given
        up only when others can read that."""

    def claim(self, address: str) -> None:
        """Take the name, if it is not held yet. Raises NodeInUse, which names both addresses; Unavailable.

        In a store without leases nothing is taken: which node has a name is decided outside of podwire.
        """
        lease = self._lease
        if lease is not None and not lease.taken_by:
            return
        leases = self._store.leases()
        if leases is None:
            self._has_leases = False
            return
        holder = Holder(self.instance, address)
        name = f"{NODE_LEASE}{self.name}"
        try:
            self._lease = leases.acquire(name, str(holder), LEASE_TTL_S)
        except Conflict as error:
            other = Holder.parse(leases.holders(name).get(name, ""))
            # The same machine: an earlier process of this agent was killed, and its lease has not ended. That is
            # worth waiting for, while another machine is not.
            if other.instance == self.instance:
                raise Unavailable(
                    f"take node name {self.name!r}: an earlier run of this agent has it for up to {LEASE_TTL_S:g} s"
                ) from error
            raise NodeInUse(
                f"use node name {self.name!r} at {address or 'an unknown address'}: the node of that name at"
                f" {other.address or 'an unknown address'} is alive",
                hint=f"give one of the two another node_name; if the other is gone, wait {LEASE_TTL_S:g} seconds",
            ) from error

    def refuse_contested(self, facts: NodeFacts, cluster_cidrs: tuple[IPNetwork, ...] = ()) -> None:
        """Look whether all that `facts` claim can be this node's, before it is used.

        Raises ClaimRefused, which names the other node and both ranges, when an older claim of another stands against
        it: a range also when that node is not alive now, as its pods come back with it; an address only when it does.
        What nobody believes of another keeps this node from nothing.
        """
        pools = PoolGrants()
        pools.replace(self._store.list(IP_POOL.plural)[0], ())
        around = Surroundings(own=frozenset(facts.addresses))
        belief = Belief(
            self.name, cluster_cidrs, facts.addresses, facts.pod_cidrs, around, pools.current()
        )
        _, others, _ = believe_nodes(belief, self._list_others())
        numbers = self._number(
            facts, self._read_before(look_at(self._store, node_key(self.name))), others
        )
        lost = settle(replace(facts, claims=numbers), others).lost
        if not lost:
            return
        mine, other = min(lost, key=lambda pair: str(pair[0].what))
        of = {facts.name: facts for facts in others}[other.node]
        raise _refusal(mine, other, of, is_alive=other.node in self._list_living(others))

    def publish(
        self, facts: NodeFacts, known: Callable[[], Iterable[NodeFacts]] | None = None
    ) -> NodeFacts:
        """Write the Node object if it would say something else; gives the facts with epoch and numbers in force.

        What is claimed for the first time is numbered after what all others have: those `known`, but for the first time
        in a life, when the store is asked. What the node holds is written by the identity duty and left alone here.
        Raises NodeInUse when the object is another instance's and the name is not held; Unavailable, Conflict (others
        write it all the time).
        """
        for _ in range(ATTEMPTS):
            stored = look_at(self._store, node_key(self.name))
            try:
                return self._write(facts, stored, known)
            except (NotFound, Conflict) as error:
                if isinstance(error, NodeInUse):
                    raise
        raise Conflict(f"publish node {self.name!r}: others keep changing its object")

    def close(self) -> None:
        """Give the name up."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _write(
        self,
        facts: NodeFacts,
        stored: StoredObject | None,
        known: Callable[[], Iterable[NodeFacts]] | None,
    ) -> NodeFacts:
        spec = members_of(stored.document, "spec") if stored else {}
        epoch = self._choose_epoch(spec)
        numbers = self.claims
        if any(claimed not in numbers for claimed in everything_claimed(facts)):
            others = list(known()) if known and numbers else self._list_others()
            numbers = self._number(facts, self._read_before(stored), others)
        facts = replace(
            facts,
            instance=self.instance,
            epoch=epoch,
            # The identity duty writes this field. Left out here, an update would take away what the collector spares
            # identities by.
            holds=_holds_of(spec),
            claims={claimed: numbers[claimed] for claimed in everything_claimed(facts)},
        )
        self._store_node(facts, stored)
        if facts.claims != self.claims:
            self.claims = facts.claims
        return facts

    def _store_node(self, facts: NodeFacts, stored: StoredObject | None) -> None:
        if stored is None:
            document = encode_node(facts)
            self._store.create(StoredObject(key=node_key(self.name), document=document))
            return
        document = encode_node(facts, stored.document)
        # A write that changes nothing would still be an event for every other node.
        if document != stored.document:
            self._store.update(_changed(stored, document))

    def _number(
        self, facts: NodeFacts, before: Mapping[Claimed, int], others: Collection[NodeFacts]
    ) -> dict[Claimed, int]:
        """Give all that is claimed its numbers; what this life has numbered keeps them."""
        new = [claimed for claimed in everything_claimed(facts) if claimed not in self.claims]
        # Asked only when it matters whether a node lives: it is one more request to the store.
        is_contested = any(address in new for facts in others for address in facts.addresses)
        living = self._list_living(others) if is_contested else frozenset[str]()
        return {**number_claims(new, {**before, **self.claims}, others, living), **self.claims}

    def _read_before(self, stored: StoredObject | None) -> dict[Claimed, int]:
        """Give the numbers that this node's claims have had so far, as others read them."""
        facts = None if stored is None else _try_to_read(stored)
        if facts is None:
            return {}
        return {
            claimed: facts.claims.get(claimed, UNNUMBERED) for claimed in everything_claimed(facts)
        }

    def _list_others(self) -> list[NodeFacts]:
        read = map(_try_to_read, self._store.list(NODE_KIND.plural)[0])
        return [facts for facts in read if facts is not None and facts.name != self.name]

    def _list_living(self, others: Iterable[NodeFacts]) -> frozenset[str]:
        """Name the nodes that live; without leases all that have published themselves."""
        living = list_living_nodes(self._store.leases())
        return frozenset(facts.name for facts in others) if living is None else living

    def _choose_epoch(self, spec: Mapping[str, Any]) -> int:
        epoch, other = spec.get("epoch"), spec.get("instance")
        known = epoch if isinstance(epoch, int) and not isinstance(epoch, bool) else 0
        if not other:
            return max(1, known)
        if other == self.instance:
            return known
        if self._has_leases and (self._lease is None or self._lease.taken_by):
            raise NodeInUse(
                f"publish node {self.name!r}: another instance of that name has published itself at"
                f" {', '.join(map(str, spec.get('addresses') or ())) or 'an unknown address'}",
                hint="give one of the two another node_name",
            )
        # The next epoch tells the other nodes that another machine has the name by now.
        return known + 1


class EndpointsPublisher:
    """Writes a node's NodeEndpoints. One thread at a time."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._epoch = 0
        self._sequence = 0

    def write(self, identities: Identities, bases: Sequence[IPNetwork], core_uid: str = "") -> None:
        """Publish pods; the first time in a new epoch. Raises Unavailable, Conflict."""
        for _ in range(ATTEMPTS):
            stored = look_at(self._store, endpoints_key(self._name))
            try:
                self._write(stored, identities, bases, core_uid)
            except (Conflict, NotFound):
                continue
            return
        raise Conflict(f"publish the pods of node {self._name!r}: others keep changing them")

    def _write(
        self,
        stored: StoredObject | None,
        identities: Identities,
        bases: Sequence[IPNetwork],
        core_uid: str,
    ) -> None:
        spec = members_of(stored.document, "spec") if stored else {}
        theirs, sequence = spec.get("epoch"), spec.get("sequence")
        if not isinstance(theirs, int) or isinstance(theirs, bool):
            # Nobody knows the epoch of before; it was never above the revision, as each took a write.
            theirs = 0 if stored is None else stored.revision
        if not self._epoch or theirs > self._epoch:
            self._epoch, self._sequence = theirs + 1, 0
        elif theirs == self._epoch and isinstance(sequence, int):
            self._sequence = max(self._sequence, sequence)
        publication = Publication(self._name, self._epoch, self._sequence + 1, identities)
        document = encode_endpoints(publication, bases, core_uid)
        if stored is None:
            self._store.create(StoredObject(key=endpoints_key(self._name), document=document))
        else:
            self._store.update(_changed(stored, document))
        self._sequence += 1


def _try_to_read(stored: StoredObject) -> NodeFacts | None:
    """Give what a node says; None when it cannot be read, which the planner reports."""
    try:
        return decode_node(stored) if is_published(stored.document) else None
    except InvalidRequest:
        return None


def _refusal(mine: Claim, other: Claim, of: NodeFacts, *, is_alive: bool) -> ClaimRefused:
    life = "lives" if is_alive else "is not alive now"
    address = ", ".join(map(str, of.addresses)) or "an unknown address"
    what, setting = "address", "node_address"
    if isinstance(mine.what, RANGES):
        what, setting = "pod range", "node_cidrs"
    return ClaimRefused(
        f"use {what} {mine.what} on node {mine.node!r}: node {other.node!r} at {address}, which {life}, has"
        f" {other.what} by an older claim",
        hint=f"give one of the two another {setting}; if node {other.node!r} is gone for good:"
        f" podwire delete node {other.node}",
    )


def _holds_of(spec: Mapping[str, Any]) -> tuple[IdentityId, ...]:
    holds = spec.get("holds")
    numbers = holds if isinstance(holds, list | tuple) else ()
    return tuple(IdentityId(number) for number in numbers if isinstance(number, int))


def _changed(stored: StoredObject, document: Mapping[str, Any]) -> StoredObject:
    return msgspec.structs.replace(stored, document=document, fault="")
