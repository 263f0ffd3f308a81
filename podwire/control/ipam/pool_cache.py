"""What the store says of pools, blocks and claimed addresses, as new as the watch.

Filled by `agent.duties.addresses` in the order in which the store changed; read by `control.ipam.pool` and the claims,
on any thread. Calls no store. Invariant: an older change never replaces a newer one, so a writer may enter its own
write at once, before the watch delivers it.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from podwire.control.ipam.documents import (
    Block,
    ClaimedAddress,
    decode_block,
    decode_claimed,
)
from podwire.control.ipam.pools import Labels, NamespaceFacts, Pool, find_pool
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.networks import overlap
from podwire.model.store import StoredObject, StoreEvent
from podwire.model.store.kinds import IP_ADDRESS, IP_BLOCK


class PoolCache:
    """Pools, blocks and claimed addresses of the cluster, as seen by one node."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.lock = threading.RLock()
        self.pools: Mapping[str, Pool] = {}
        self.problems: Mapping[str, str] = {}
        """By pool: why nothing is taken of it."""
        self.node_labels: Labels = {}
        self.node_addresses: dict[str, tuple[IPAddress, ...]] = {}
        """By node: its own addresses inside the pools, as it published them; no pod has them."""
        self.namespaces: dict[str, NamespaceFacts] = {}
        self.blocks: dict[IPNetwork, Block] = {}
        self.own: dict[IPNetwork, Block] = {}
        self.claimed: dict[IPAddress, ClaimedAddress] = {}
        self.is_listed = False
        """Whether blocks and addresses were listed in this life."""
        self._counts: Counter[str] = Counter()
        self._lengths: Counter[tuple[int, int]] = Counter()
        self._at: dict[IPAddress, int] = {}

    def set_pools(self, pools: Mapping[str, Pool], problems: Mapping[str, str]) -> None:
        """Replace all pools. `problems` says which of them cannot be used, and why."""
        with self.lock:
            self.pools, self.problems = dict(pools), dict(problems)

    def usable(self) -> Mapping[str, Pool]:
        """Give the pools that addresses may be taken from."""
        return {name: pool for name, pool in self.pools.items() if name not in self.problems}

    def find_pool(self, address: IPAddress) -> Pool | None:
        """Give the pool that an address is in."""
        return find_pool(self.pools, address)

    def find_node_at(self, address: IPAddress) -> str:
        """Name the other node whose own address this is; "" when it is nobody's."""
        others = (name for name, has in list(self.node_addresses.items()) if address in has)
        return next((name for name in others if name != self.node), "")

    def replace(self, kind: str, objects: Sequence[StoredObject]) -> set[IPAddress]:
        """Take a whole list of blocks or claimed addresses; gives the addresses whose claim changed."""
        with self.lock:
            if kind == IP_BLOCK.plural:
                self._replace_blocks(objects)
                return set()
            before = set(self.claimed)
            self.claimed.clear()
            self._at.clear()
            for stored in objects:
                claimed = decode_claimed(stored)
                if claimed is not None:
                    self.put_claimed(claimed)
            self.is_listed = True
            return before ^ set(self.claimed)

    def apply(self, event: StoreEvent) -> set[IPAddress]:
        """Take one change of a block or a claimed address; gives the addresses whose claim changed."""
        with self.lock:
            if event.object.key.kind == IP_BLOCK.plural:
                block = decode_block(event.object)
                if block is not None:
                    self._put_block(block, gone=event.deleted, revision=event.revision)
                return set()
            claimed = decode_claimed(event.object)
            if claimed is None or event.object.key.kind != IP_ADDRESS.plural:
                return set()
            if not event.deleted:
                self.put_claimed(claimed)
            # The revision of the deletion is kept, so that a late answer of a write before it cannot bring the claim
            # back.
            elif self._at.get(claimed.address, 0) < event.revision:
                self.claimed.pop(claimed.address, None)
                self._at[claimed.address] = event.revision
            return {claimed.address}

    def put_claimed(self, claimed: ClaimedAddress) -> None:
        """Note a claimed address, unless something newer is known of it."""
        revision = claimed.stored.revision if claimed.stored is not None else 0
        with self.lock:
            # A writer enters its own write before the watch delivers it. The watch may still be delivering older
            # changes.
            if self._at.get(claimed.address, -1) <= revision:
                self.claimed[claimed.address] = claimed
                self._at[claimed.address] = revision

    def remember(self, blocks: Iterable[Block]) -> None:
        """Take own blocks that an earlier life had: the store has not been read yet."""
        with self.lock:
            for block in blocks:
                self._put_block(block, gone=False, revision=0)

    def count_claimed(self, pool: str) -> int:
        """Tell how many blocks of a pool some node has."""
        return self._counts[pool]

    def find_overlapping(self, block: IPNetwork) -> Block | None:
        """Give a claimed block of another size that shares addresses with a network: a pool that was made anew."""
        with self.lock:
            others = {
                length
                for (version, length), count in self._lengths.items()
                if count and version == block.version and length != block.prefixlen
            }
            for length in others:
                if length < block.prefixlen:
                    wider = self.blocks.get(block.supernet(new_prefix=length))
                    if wider is not None and wider.node:
                        return wider
            if any(length > block.prefixlen for length in others):
                return next(
                    (
                        other
                        for cidr, other in self.blocks.items()
                        if other.node and cidr.prefixlen > block.prefixlen and overlap(cidr, block)
                    ),
                    None,
                )
            return None

    def _replace_blocks(self, objects: Sequence[StoredObject]) -> None:
        self.blocks.clear()
        self.own.clear()
        self._counts.clear()
        self._lengths.clear()
        for stored in objects:
            block = decode_block(stored)
            if block is not None:
                self._put_block(block, gone=False, revision=stored.revision)

    def _put_block(self, block: Block, *, gone: bool, revision: int) -> None:
        before = self.blocks.get(block.cidr)
        if before is not None and before.revision > revision:
            return
        if before is not None and before.node:
            self._count(before, -1)
        self.own.pop(block.cidr, None)
        if gone:
            self.blocks.pop(block.cidr, None)
            return
        self.blocks[block.cidr] = block
        if block.node:
            self._count(block, 1)
        if block.node == self.node:
            self.own[block.cidr] = block

    def _count(self, block: Block, by: int) -> None:
        self._counts[block.pool] += by
        self._lengths[block.cidr.version, block.cidr.prefixlen] += by
