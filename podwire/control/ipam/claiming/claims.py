"""Claims: take a block or one address for this node, or give it back, each by one conditional write.

Used by `control.ipam.pool`, never under the node's turn, because everything here waits for the store. Knows other
nodes' blocks from the watch and lists nothing, so a claim costs the same among ten blocks and ten thousand. Invariant:
a block has one node, an address one object. Only the owner of a block gives what the block does not keep.

Races between the claim of a block and that of an address in it are decided by order. A node that claims a block gives
no address of it until its watch has delivered everything up to that claim. A node that claims an address looks at its
block afterwards.
"""

import contextlib
import hashlib
import threading
from collections.abc import Collection, Container, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from podwire.control.ipam.documents import (
    Block,
    ClaimedAddress,
    address_key,
    block_key,
    choose_kept,
    decode_block,
    decode_claimed,
    encode_block,
    encode_claimed,
    released,
    rewrite,
)
from podwire.control.ipam.pool_cache import PoolCache
from podwire.control.ipam.pools import AddressRange, Pool
from podwire.model.endpoint import AttachmentKey, IPAddress, IPNetwork
from podwire.model.errors import AddressUnavailable, Conflict, Exhausted, NotFound
from podwire.model.store import Store, StoredObject, UnreadableObject

CONFLICTS_MAX: Final = 64
"""So often somebody else may be faster before a claim gives up: the watch is far behind then."""


class Claims:
    """What one node writes of blocks and addresses."""

    def __init__(self, store: Store, known: PoolCache) -> None:
        self.store = store
        self.known = known
        self._lock = threading.Lock()
        self._cursors: dict[tuple[str, IPNetwork], int] = {}
        self._unheard: dict[IPNetwork, Block] = {}

    @property
    def node(self) -> str:
        """The node for which claims are made."""
        return self.known.node

    def count_own(self, pool: str) -> int:
        """Tell how many blocks of a pool this node has, those included that the watch has not given yet."""
        with self.known.lock:
            for cidr in [
                network for network in self._unheard if self._is_heard(self._unheard[network])
            ]:
                del self._unheard[cidr]
            mine = {cidr for cidr, block in self.known.own.items() if block.pool == pool}
            mine.update(cidr for cidr, block in self._unheard.items() if block.pool == pool)
            return len(mine)

    def list_unopened(
        self, pools: Collection[str], opened: Container[IPNetwork]
    ) -> Sequence[Block]:
        """Give this node's blocks of some pools that are not among those opened, heard of or not."""
        with self.known.lock:
            unheard = {
                cidr: block for cidr, block in self._unheard.items() if not self._is_heard(block)
            }
            mine = unheard | self.known.own
            return [
                block for cidr, block in mine.items() if block.pool in pools and cidr not in opened
            ]

    def find_limit(self, pool: Pool) -> str:
        """Say why this node can have no further block of a pool; "" when it can."""
        if pool.max_blocks_per_node and self.count_own(pool.name) >= pool.max_blocks_per_node:
            return (
                f"this node has all {pool.max_blocks_per_node} blocks that maxBlocksPerNode allows"
            )
        claimed = self.known.count_claimed(pool.name)
        if claimed >= pool.block_count:
            return f"all {pool.block_count} blocks are claimed"
        return ""

    def claim_block(self, pool: Pool) -> Block:
        """Take one more block of a pool. Raises Exhausted; Conflict when others were faster everywhere: hear first;
        Unavailable."""
        with self._lock:
            limit = self.find_limit(pool)
            if limit:
                raise Exhausted(f"claim a block of pool {pool.name} ({pool.cidr}): {limit}")
            conflicts = 0
            for cidr in self._candidates(pool):
                try:
                    claimed = self._try_block(pool, cidr)
                except (Conflict, NotFound):
                    conflicts += 1
                    if conflicts >= CONFLICTS_MAX:
                        break
                    continue
                if claimed is not None:
                    with self.known.lock:
                        self._unheard[cidr] = claimed
                    return claimed
        if conflicts:
            raise Conflict(
                f"claim a block of pool {pool.name}: other nodes were faster {conflicts} times",
                hint="call again later",
            )
        raise Exhausted(
            f"claim a block of pool {pool.name} ({pool.cidr}):"
            f" all {pool.block_count} blocks are claimed"
        )

    def release_block(self, block: Block) -> bool:
        """Give an empty block back; False when it is not this node's any more. Raises Unavailable."""
        if block.stored is None:
            return False
        try:
            self.store.update(rewrite(block.stored, encode_block(released(block))))
        except (Conflict, NotFound):
            return False
        return True

    def change_kept(self, block: Block, kept: tuple[AddressRange, ...]) -> None:
        """Let an own block keep something else from now on; nothing where somebody changed it: hear first.

        Raises Unavailable. What is kept no longer may be given when this was heard, and what is kept must have been
        given by nobody before this is called.
        """
        if block.stored is not None:
            with contextlib.suppress(Conflict, NotFound):
                document = encode_block(replace(block, kept=kept))
                self.store.update(rewrite(block.stored, document))

    def claim_address(self, address: IPAddress, pool: Pool, key: AttachmentKey) -> ClaimedAddress:
        """Take one address that is in no own block, or that the block keeps. Raises AddressUnavailable, Unavailable."""
        cidr = pool.block_of(address)
        node = self.known.find_node_at(address)
        if node:
            raise _refuse(address, f"it stands for node {node} itself")
        known = self.known.claimed.get(address)
        if known is not None and known.node != self.node:
            raise _refuse(address, f"node {known.node} has it for {known.key}")
        self._check_block(address, pool, cidr)
        claimed = ClaimedAddress(address, pool.name, self.node, key)
        new = StoredObject(key=address_key(address), document=encode_claimed(claimed))
        try:
            stored = self.store.create(new)
        except Conflict:
            return self._take_over(claimed)
        claimed = replace(claimed, stored=stored)
        try:
            self._check_block(address, pool, cidr)
        except AddressUnavailable:
            self.return_address(claimed)
            raise
        self.known.put_claimed(claimed)
        return claimed

    def borrow(self, pool: Pool, key: AttachmentKey) -> ClaimedAddress | None:
        """Take one of the addresses that a pool's blocks keep for borrowing, own blocks first. None if none is left.

        With strict affinity only own blocks are looked at: they may have been claimed before it was set.
        """
        conflicts = 0
        for address in self._lendable(pool):
            try:
                return self.claim_address(address, pool, key)
            except AddressUnavailable:
                conflicts += 1
                if conflicts >= CONFLICTS_MAX:
                    return None
        return None

    def return_address(self, claimed: ClaimedAddress) -> None:
        """Give one address back, unless it was taken over meanwhile. Raises Unavailable."""
        if claimed.stored is None:
            return
        stored = claimed.stored
        with contextlib.suppress(Conflict, NotFound):
            self.store.delete(stored.key, revision=stored.revision, uid=stored.uid)

    def _candidates(self, pool: Pool) -> Iterator[IPNetwork]:
        """Go through a pool's blocks from this node's own place on, in this node's own order, from where it was left.

        The number of blocks is a power of two, so every odd stride comes by all of them.
        """
        digest = hashlib.sha256(f"{self.node}/{pool.name}".encode()).digest()
        start = int.from_bytes(digest[:16])
        # An odd number and a power of two have no common divisor, so the walk meets each block once before it
        # repeats.
        stride = int.from_bytes(digest[16:]) | 1
        place = (pool.name, pool.cidr)
        for _ in range(min(pool.block_count, 1 << 30)):
            step = self._cursors.get(place, 0)
            self._cursors[place] = step + 1
            yield pool.block_at((start + step * stride) % pool.block_count)

    def _try_block(self, pool: Pool, cidr: IPNetwork) -> Block | None:
        before = self.known.blocks.get(cidr)
        if cidr in self._unheard or (before is not None and before.node):
            return None
        if self.known.find_overlapping(cidr) is not None:
            return None
        kept = choose_kept(cidr, pool.reserved, lends=not pool.strict_affinity)
        # A higher epoch lets other nodes tell the newer of two claims, even when they hear of them in the wrong
        # order.
        epoch = before.epoch + 1 if before is not None else 1
        block = Block(cidr, pool.name, self.node, epoch, kept)
        document = encode_block(block)
        if before is None or before.stored is None:
            stored = self.store.create(StoredObject(key=block_key(cidr), document=document))
        else:
            stored = self.store.update(rewrite(before.stored, document))
        return replace(block, stored=stored)

    def _check_block(self, address: IPAddress, pool: Pool, cidr: IPNetwork) -> None:
        """Refuse an address that the owner of its block may give by itself."""
        try:
            stored = self.store.get(block_key(cidr))
        except UnreadableObject as error:
            raise _refuse(
                address, f"it is not known whose block {cidr} is: {error.message}"
            ) from None
        if stored is None:
            return
        block = decode_block(stored)
        if block is None:
            raise _refuse(
                address, f"it is not known whose block {cidr} is: its object is not a block"
            )
        # A block without a node has no owner to give the address, and a kept address not even the owner gives without
        # an object.
        if not block.node or block.keeps(address):
            return
        if block.node == self.node:
            raise _refuse(address, f"block {cidr} of this node is not in use yet, or not any more")
        raise _refuse(address, f"it is in block {cidr} of node {block.node} (pool {pool.name})")

    def _take_over(self, wanted: ClaimedAddress) -> ClaimedAddress:
        """Take an address whose object exists already: only one that this node itself has, for another pod."""
        try:
            stored = self.store.get(address_key(wanted.address))
        except UnreadableObject as error:
            raise _refuse(wanted.address, error.message) from None
        before = decode_claimed(stored) if stored is not None else None
        if stored is None or before is None or before.node != self.node:
            whose = f"node {before.node} has it for {before.key}" if before else "somebody has it"
            raise _refuse(wanted.address, whose)
        try:
            stored = self.store.update(rewrite(stored, encode_claimed(wanted)))
        except (Conflict, NotFound):
            raise _refuse(wanted.address, "another claim was faster") from None
        claimed = replace(wanted, stored=stored)
        self.known.put_claimed(claimed)
        return claimed

    def _lendable(self, pool: Pool) -> Iterator[IPAddress]:
        """Give kept addresses that are not known to be taken: those of own blocks first, then from this node's own
        place on."""
        with self.known.lock:
            blocks = [
                block
                for block in (
                    self.known.own if pool.strict_affinity else self.known.blocks
                ).values()
                if block.node and block.pool == pool.name
            ]
            taken = set(self.known.claimed)
        # Each node begins elsewhere, so that nodes that borrow at the same time do not race for one address after
        # another.
        shift = int.from_bytes(hashlib.sha256(self.node.encode()).digest()[:4])
        shift = shift % len(blocks) if blocks else 0
        ordered = blocks[shift:] + blocks[:shift]
        for block in sorted(ordered, key=lambda block: block.node != self.node):
            for address in block.kept_addresses():
                if (
                    address not in taken
                    and not pool.reserves(address)
                    and not self.known.find_node_at(address)
                ):
                    yield address

    def _is_heard(self, block: Block) -> bool:
        known = self.known.blocks.get(block.cidr)
        return known is not None and known.revision >= block.revision


def _refuse(address: IPAddress, why: str) -> AddressUnavailable:
    return AddressUnavailable(
        f"take address {address}: {why}",
        hint="fixed addresses that move between nodes belong in a pool's `reserved` ranges",
    )
