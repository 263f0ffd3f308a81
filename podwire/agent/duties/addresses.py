"""Look after pools: follow blocks, claim ahead, give back what is not needed, collect what no node has any more.

Only with IPAM mode `pool`. `agent.node` prepares it before anything is restored, `agent.main` starts it. The
follower's thread opens claimed blocks; the thread here writes to the store what `control.ipam.claiming.demand` decides.
Neither holds the node's turn while it waits for the store.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from typing import Any, Final

from podwire.agent.duties.follower import FollowingDuty, KindList, StoreFollower
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.duties.unreadable import Reading
from podwire.agent.duties.worker import Worker
from podwire.control.documents.damage import read_object
from podwire.control.documents.pools import decode_pools, find_problems, fixed_ranges, own_addresses
from podwire.control.ipam.claiming.demand import BlockDemand
from podwire.control.ipam.claiming.orphans import OrphanCollector, give_back
from podwire.control.ipam.documents import Block, decode_block, decode_claimed, encode_block
from podwire.control.ipam.pool import PoolIpam
from podwire.control.ipam.pools import POOLS_ANNOTATION, NamespaceFacts, read_pool_names
from podwire.model.documents.lenient import members_of
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import Conflict, PodwireError
from podwire.model.interfaces import FactStore
from podwire.model.store import ObjectKey, Revisions, Store, StoredObject, StoreEvent
from podwire.model.store.kinds import IP_ADDRESS, IP_BLOCK, IP_POOL, NAMESPACE, NODE
from podwire.model.store.leases import ADDRESS_DUTY, Lease, list_living_nodes
from podwire.model.store.packed import unpack

FACT: Final = "ipam-blocks"
TICK_S: Final = 1.0
RETRY_S: Final = 5.0
ORPHANS_S: Final = 60.0
DUTY_TTL_S: Final = 30.0
HOST_NAME_LABEL: Final = "kubernetes.io/hostname"

_log = logging.getLogger(__name__)


class _Troubles:
    """What is wrong now, by the part that reported it: the success of one part withdraws no report of another."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._found: dict[str, str] = {}

    def of(self, who: str) -> Callable[[str], None]:
        """Give the function by which `who` reports what is wrong; "" withdraws its report."""
        return partial(self._note, who)

    def _note(self, who: str, message: str) -> None:
        with self._lock:
            self._found[who] = message
            self._report("; ".join(dict.fromkeys(filter(None, self._found.values()))))


class IpamNews:
    """Hands what the store says to the allocator, on the follower's thread."""

    KINDS: Final = (
        IP_POOL.plural,
        NAMESPACE.plural,
        NODE.plural,
        IP_BLOCK.plural,
        IP_ADDRESS.plural,
    )
    """Addresses after blocks: the list of addresses must not be older than that of blocks."""

    def __init__(
        self,
        ipam: PoolIpam,
        changed: Callable[[bool], None] = lambda _blocks: None,
        report: Callable[[str], None] = lambda _message: None,
    ) -> None:
        self._ipam = ipam
        self._known = ipam.known
        self._changed = changed
        self._report = report
        self._pools: dict[ObjectKey, StoredObject] = {}
        self._ranges: dict[str, tuple[IPNetwork, ...]] = {}
        self._set_labels({})

    @property
    def pool_documents(self) -> list[Mapping[str, Any]]:
        """Give the documents of all pools."""
        return [stored.document for _, stored in sorted(self._pools.items())]

    def on_lists(self, lists: Sequence[KindList]) -> None:
        touched = set()
        for kind_list in lists:
            if kind_list.kind == IP_POOL.plural:
                self._pools = {stored.key: stored for stored in kind_list.objects}
            elif kind_list.kind == NAMESPACE.plural:
                self._known.namespaces = {
                    stored.key.name: _read_namespace(stored.document)
                    for stored in kind_list.objects
                }
            elif kind_list.kind == NODE.plural:
                self._ranges.clear()
                self._known.node_addresses.clear()
                for stored in kind_list.objects:
                    self._take_node(stored, gone=False)
            else:
                touched |= self._known.replace(kind_list.kind, kind_list.objects)
        self._review()
        self._changed(self._ipam.sync(touched))

    def on_events(self, events: Sequence[StoreEvent], _revisions: Revisions) -> None:
        if not events:
            return
        touched, is_about_pools = self._learn_claimed(events), False
        for event in events:
            stored = event.object
            if stored.key.kind == IP_POOL.plural:
                self._pools.pop(stored.key, None)
                if not event.deleted:
                    self._pools[stored.key] = stored
                is_about_pools = True
            elif stored.key.kind == NAMESPACE.plural:
                self._known.namespaces.pop(stored.key.name, None)
                if not event.deleted:
                    self._known.namespaces[stored.key.name] = _read_namespace(stored.document)
            elif stored.key.kind == NODE.plural:
                is_about_pools |= self._take_node(stored, gone=event.deleted)
            else:
                touched |= self._known.apply(event)
        if is_about_pools:
            self._review()
        self._changed(self._ipam.sync(touched))

    def on_away(self, error: PodwireError) -> None:
        self._report(error.message)

    def on_back(self) -> None:
        self._report("")

    def _take_node(self, stored: StoredObject, *, gone: bool) -> bool:
        """Note a node's own ranges, and the labels of this one; tells whether a pool may be concerned."""
        name = stored.key.name
        before = self._ranges.pop(name, ())
        self._known.node_addresses.pop(name, None)
        if not gone:
            self._ranges[name] = fixed_ranges(stored)
            self._known.node_addresses[name] = own_addresses(stored)
        if name == self._known.node:
            self._set_labels({} if gone else read_labels(stored.document))
        return before != self._ranges.get(name, ())

    def _learn_claimed(self, events: Sequence[StoreEvent]) -> set[IPAddress]:
        """Read which addresses others have, before a block that this node has claimed is used.

        An address may have been taken out of the block before the claim. A store without one order of all kinds may
        tell of the block first. Raises Unavailable: then everything is listed again, addresses after blocks.
        """
        has_claim = any(
            event.object.key.kind == IP_BLOCK.plural and not event.deleted for event in events
        )
        if not has_claim or self._ipam.claims.store.promises.one_order:
            return set()
        claims = map(decode_claimed, self._ipam.claims.store.list(IP_ADDRESS.plural)[0])
        claimed = [claimed for claimed in claims if claimed is not None]
        for claim in claimed:
            self._known.put_claimed(claim)
        return {claim.address for claim in claimed}

    def _set_labels(self, labels: Mapping[str, str]) -> None:
        self._known.node_labels = {HOST_NAME_LABEL: self._known.node, **labels}

    def _review(self) -> None:
        pools = decode_pools(self._pools.values())
        unreadable = {key.name for key in self._pools} - pools.keys()
        problems = find_problems(pools, self._ranges)
        problems.update((name, "its document cannot be read") for name in unreadable)
        self._known.set_pools(pools, problems)


class IpamDuty(FollowingDuty):
    """Pools and blocks of one node over time; `blocks_changed` is told after blocks were opened or lost."""

    def __init__(
        self,
        *,
        ipam: PoolIpam,
        store: Store,
        facts: FactStore,
        report: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
        shared: SharedWatch | None = None,
        blocks_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.ipam = ipam
        self.known = ipam.known
        self.store = store
        self.monotonic = monotonic
        self.orphans = OrphanCollector()
        self._demand = BlockDemand(ipam, monotonic=monotonic)
        self._facts = facts
        troubles = _Troubles(report)
        self._report = troubles.of("duty")
        self._report_recalled = troubles.of("memory")
        self._blocks_changed = blocks_changed
        self.news = IpamNews(ipam, self._hear, troubles.of("watch"))
        self.follower = StoreFollower(
            "ipam-watch",
            store,
            IpamNews.KINDS,
            self.news,
            shared=shared or SharedWatch(store, name="ipam-watch", reading=Reading(read_object)),
            # The journal tells which blocks may be used without the store.
            recalls=False,
        )
        self._written = ""
        # News does not end the pause after a failure: with a store that refuses, each change would be one more try.
        self._worker = Worker("ipam", self._work, self._fail)
        self._lease: Lease | None = None
        self._looked_s = 0.0

    def prepare(self) -> None:
        """Take over what is known without the store, then what it says; before endpoints are restored."""
        self._written = self._facts.read_fact(FACT)
        self._recall(self._written)
        self.follower.load()

    def stop(self) -> None:
        """End the threads; blocks stay this node's."""
        super().stop()
        if self._lease is not None:
            self._lease.close()

    def tick(self) -> None:
        """Do what is due. Raises Unavailable and what else the store says; the rest is done first where it can be."""
        # First, because it needs no store.
        self._remember()
        if not self.known.is_listed:
            return
        self._report_recalled("")
        self._demand.settle_claims()
        self._demand.give_back(forget=self._remember)
        if self.monotonic() - self._looked_s >= ORPHANS_S:
            self._looked_s = self.monotonic()
            self.collect()

    def collect(self) -> int:
        """Give back what nodes had that are gone, if this agent holds the lease for it; tells how much that was."""
        if not self._has_duty():
            return 0
        nodes = {stored.key.name for stored in self.store.list(NODE.plural)[0]}
        # A node that renews its lease lives, even if somebody has deleted its object.
        nodes.update(list_living_nodes(self.store.leases()) or ())
        objects = [*self.store.list(IP_BLOCK.plural)[0], *self.store.list(IP_ADDRESS.plural)[0]]
        count = 0
        for orphan in self.orphans.look(objects, nodes | {self.known.node}, self.monotonic()):
            if give_back(self.store, orphan):
                count += 1
                _log.warning(
                    "gave back what a node had that is gone", extra={"cause": str(orphan.key)}
                )
        return count

    def _hear(self, blocks_changed: bool) -> None:
        if blocks_changed:
            self._blocks_changed()
        self._worker.wake()

    def _work(self) -> float:
        self.tick()
        self._report("")
        return TICK_S

    def _fail(self, error: PodwireError) -> float:
        self._report(error.told)
        return RETRY_S

    # What a start without the store needs

    def _remember(self) -> None:
        # Before the first list this life knows nothing: writing that down would lose what the last one knew.
        if not self.known.is_listed:
            return
        # In this order everywhere: addresses, then the cache of blocks (decisions/0002).
        with self.ipam.lock, self.known.lock:
            own = [own for own in self.ipam.own.values() if own.is_open]
            claimed = [
                str(address)
                for address in self.known.claimed
                if any(
                    address.version == own_block.block.cidr.version
                    and address in own_block.block.cidr
                    for own_block in own
                )
            ]
            text = json.dumps(
                {
                    "pools": list(map(unpack, self.news.pool_documents)),
                    "problems": dict(self.known.problems),
                    "labels": dict(self.known.node_labels),
                    "namespaces": {
                        name: [dict(namespace.labels), list(namespace.pools)]
                        for name, namespace in self.known.namespaces.items()
                    },
                    "blocks": [encode_block(own_block.block) for own_block in own],
                    "claimed": sorted(claimed),
                    "own": sorted(map(str, self.ipam.mine.node_addresses.values())),
                },
                sort_keys=True,
            )
        # This runs each second, and a write costs the disk.
        if text != self._written:
            self._facts.write_fact(FACT, text)
            self._written = text

    def _recall(self, text: str) -> None:
        if not text:
            return
        memory = json.loads(text)
        pool_objects = [_as_stored(IP_POOL.plural, document) for document in memory["pools"]]
        block_objects = [_as_stored(IP_BLOCK.plural, document) for document in memory["blocks"]]
        self.follower.recall([*pool_objects, *block_objects])
        pools = decode_pools(pool_objects)
        self.known.set_pools(pools, memory["problems"])
        self.known.node_labels = memory["labels"]
        self.known.namespaces = {
            name: NamespaceFacts(labels, tuple(names))
            for name, (labels, names) in memory["namespaces"].items()
        }
        blocks = [decode_block(stored) for stored in block_objects]
        left_out = self.ipam.remember(
            [
                Block(block.cidr, block.pool, block.node, block.epoch, block.kept)
                for block in blocks
                if block is not None
            ],
            [ip_address(text) for text in memory["claimed"]],
            [ip_address(text) for text in memory.get("own", ())],
        )
        for message in left_out:
            _log.warning("take over earlier blocks", extra={"cause": message})
        self._report_recalled("; ".join(left_out))

    def _has_duty(self) -> bool:
        if self._lease is not None:
            if not self._lease.lost:
                return True
            self._lease.close()
            self._lease = None
        leases = self.store.leases()
        if leases is None:
            return False  # no agent can know that it is the only one
        try:
            self._lease = leases.acquire(ADDRESS_DUTY, self.known.node, DUTY_TTL_S)
        except Conflict:
            return False
        return True


def _as_stored(kind: str, document: Mapping[str, Any]) -> StoredObject:
    return StoredObject(key=ObjectKey(kind, "", document["metadata"]["name"]), document=document)


def read_labels(document: Mapping[str, Any]) -> dict[str, str]:
    """Give the labels of a Node or a Namespace."""
    return _texts(document, "labels")


def _texts(document: Mapping[str, Any], field: str) -> dict[str, str]:
    texts = members_of(members_of(document, "metadata"), field)
    return {key: value for key, value in texts.items() if isinstance(value, str)}


def _read_namespace(document: Mapping[str, Any]) -> NamespaceFacts:
    names = read_pool_names(_texts(document, "annotations").get(POOLS_ANNOTATION, ""))
    return NamespaceFacts(read_labels(document), names)
