"""The blocks of this node: which addresses of each are held, which rest, and which the owner may not give freely.

Owned by `control.ipam.pool`, under its lock. Pure, in memory. Invariant: what a block keeps, what an object claims and
what the pool reserves is given only on request. A block that another node has gives no more addresses.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from podwire.control.ipam.documents import Block, addresses_of, choose_kept
from podwire.control.ipam.fifo import AddressFifo
from podwire.control.ipam.interface import CidrUsage
from podwire.control.ipam.pool_cache import PoolCache
from podwire.control.ipam.pools import AddressRange, Pool
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.ids import IdentityId
from podwire.model.networks import overlap


@dataclass
class OwnBlock:
    """A block of this node."""

    block: Block
    fifo: AddressFifo
    closing: bool = False
    """It is on its way back: nothing is given from it."""
    lost: bool = False
    """Another node has it: its endpoints keep running, nothing more is given from it."""
    empty_since_s: float | None = None
    kept: tuple[AddressRange, ...] = ()
    """What it shall keep, as the pool is now; the block's object follows."""

    @property
    def is_open(self) -> bool:
        """Tell whether addresses may be given from it."""
        return not (self.closing or self.lost)


class OwnBlocks:
    """The blocks of one node, in the order in which they were opened."""

    def __init__(self, known: PoolCache) -> None:
        self.known = known
        self.by_cidr: dict[IPNetwork, OwnBlock] = {}
        self.node_addresses: dict[int, IPAddress] = {}
        """By IP version: the node's own address; remembered across restarts."""

        self._followed: Mapping[str, Pool] = {}
        """The pools that the blocks were last compared with."""

    def epochs(self) -> dict[IPNetwork, int]:
        """Give the blocks that are this node's with the epochs of their claims."""
        return {cidr: own.block.epoch for cidr, own in self.by_cidr.items() if not own.lost}

    def list_open(self, pools: Iterable[str]) -> Iterator[OwnBlock]:
        """Give the blocks of some pools that addresses may be given from, pool by pool."""
        for pool in pools:
            for own in self.by_cidr.values():
                if own.block.pool == pool and own.is_open:
                    yield own

    def choose_next(self, pools: Iterable[str], identity: IdentityId) -> IPAddress | None:
        """Name a free address: one that the same identity had, else one never used, else what rested longest."""
        candidates = list(self.list_open(pools))
        for own in candidates:
            rested = own.fifo.find_rested_of(identity)
            if rested is not None:
                return rested
        for own in candidates:
            fresh = own.fifo.find_fresh()
            if fresh is not None:
                return fresh
        longest = [
            rest for own in candidates if (rest := own.fifo.find_rested_longest()) is not None
        ]
        return min(longest, key=lambda rested: rested[0])[1] if longest else None

    def usage(self, waiting: Collection[IPAddress]) -> Sequence[CidrUsage]:
        """Tell how full each block is; `waiting` ones are in quarantine."""
        return [
            CidrUsage(
                cidr=cidr,
                node_address=own.fifo.node_address,
                capacity=own.fifo.held + (own.fifo.free if own.is_open else 0),
                held=own.fifo.held,
                quarantined=sum(own.fifo.is_assignable(address) for address in waiting),
                free=own.fifo.free if own.is_open else 0,
                pool=own.block.pool,
            )
            for cidr, own in self.by_cidr.items()
        ]

    def take(self, address: IPAddress) -> None:
        """Hold an address, if it is in a block. A pod of an earlier life may have what would stand for the node now."""
        own = self.find(address)
        if own is None:
            return
        stood_for_node = own.fifo.node_address == address
        if stood_for_node:
            own.fifo.set_node_address(None)
        if own.fifo.is_assignable(address):
            own.fifo.take(address)
            own.empty_since_s = None
        if stood_for_node:
            self.settle_node_addresses()

    def give_back(self, address: IPAddress, identity: IdentityId) -> None:
        """Let an address rest if it is in a block and no object claims it."""
        own = self.find(address)
        if own is not None and own.fifo.is_assignable(address):
            own.fifo.release(address, identity)
            if own.fifo.is_excluded(address):
                self.exclude(own)  # from now on it can be kept for a pod that asks for it

    def find(self, address: IPAddress) -> OwnBlock | None:
        """Give the block that an address is in."""
        pool = self.known.find_pool(address)
        if pool is not None:
            own = self.by_cidr.get(pool.block_of(address))
            if own is not None:
                return own
        # Its pool may be gone, or unknown yet.
        blocks = (own for cidr, own in self.by_cidr.items() if cidr.version == address.version)
        return next((own for own in blocks if address in own.block.cidr), None)

    def open(self, block: Block, held: Iterable[IPAddress]) -> None:
        """Use a block from now on, but for a claim of other blocks over it; `held` addresses are held in it."""
        # Blocks of two sizes overlap after a pool was deleted and made anew with another blockSize. Only the first of
        # them gives addresses, else two pods could get the same one.
        if block.cidr in self.by_cidr or self.known.find_overlapping(block.cidr) is not None:
            return
        own = OwnBlock(block, AddressFifo(block.cidr))
        self.by_cidr[block.cidr] = own
        for address in held:
            if own.fifo.is_assignable(address):
                own.fifo.take(address)
                own.fifo.continue_after(address)
        self.exclude(own)
        self.settle_node_addresses()

    def exclude(self, own: OwnBlock) -> None:
        """Exclude addresses of a block from free choice: those that it keeps or is going to keep, and those that are
        claimed."""
        cidr = own.block.cidr
        with self.known.lock:  # else claims that are listed anew are seen in part
            pool = self.known.pools.get(own.block.pool)
            claimed = {
                address
                for address in self.known.claimed
                if address.version == cidr.version and address in cidr
            }
        wanted: tuple[AddressRange, ...] = ()
        own.kept = own.block.kept
        if pool is not None:
            lends = not pool.strict_affinity
            wanted = choose_kept(cidr, pool.reserved, lends=lends)
            given = self._list_given(own, claimed)
            # The block's object must not keep an address that a pod was given freely: another node could claim it by
            # an object.
            own.kept = choose_kept(cidr, pool.reserved, lends=lends, busy=given)
        shall = (address for range_ in wanted for address in addresses_of(range_))
        own.fifo.exclude((*own.block.kept_addresses(), *claimed, *shall))

    def _list_given(self, own: OwnBlock, claimed: Collection[IPAddress]) -> set[IPAddress]:
        """List what the node itself has, and what it gave to pods that claimed it by no object."""
        given = own.fifo.list_held().difference(claimed)
        if own.fifo.node_address is not None:
            given.add(own.fifo.node_address)
        return given

    def settle_node_addresses(self) -> None:
        """Keep one address of each family as the node's own: the same as before where that is possible."""
        for version in (4, 6):
            blocks = [
                own for cidr, own in self.by_cidr.items() if cidr.version == version and own.is_open
            ]
            before = self.node_addresses.get(version)
            # The node's own address is the source of its host processes, and other nodes know it as such. It changes
            # only when it must.
            if any(own.fifo.node_address == before for own in blocks if before is not None):
                continue
            chosen = self._choose_node_address(blocks, before)
            for own in self.by_cidr.values():
                if own.block.cidr.version == version:
                    is_here = chosen is not None and chosen in own.block.cidr
                    own.fifo.set_node_address(chosen if is_here else None)
            if chosen is not None:
                self.node_addresses[version] = chosen

    def _choose_node_address(
        self, blocks: Sequence[OwnBlock], before: IPAddress | None
    ) -> IPAddress | None:
        for own in blocks:
            if (
                before is not None
                and before in own.block.cidr
                and before not in self.known.claimed
                and before not in own.fifo.list_held()
            ):
                return before
        addresses = (own.fifo.find_node_address() for own in blocks)
        return next((address for address in addresses if address is not None), None)

    def list_node_addresses(self) -> set[IPAddress]:
        """Give the addresses that are nodes' own, of this node and of the others."""
        addresses = {own.fifo.node_address for own in self.by_cidr.values()}
        for name, has in list(self.known.node_addresses.items()):
            if name != self.known.node:
                addresses.update(has)
        return {address for address in addresses if address is not None}

    def list_outdated(self) -> list[tuple[Block, tuple[AddressRange, ...]]]:
        """Give blocks that keep something else than they shall, with what that is."""
        return [
            (own.block, own.kept)
            for own in self.by_cidr.values()
            if own.is_open and own.kept != own.block.kept
        ]

    def list_lost(self) -> list[tuple[IPNetwork, int]]:
        """Give blocks that another node has by now, with how many addresses of endpoints they hold here."""
        return [(cidr, own.fifo.held) for cidr, own in self.by_cidr.items() if own.lost]

    def refresh(self, own: OwnBlock, block: Block) -> None:
        """Take over the object of an own block; a lost or closing block is open again if the object changed."""
        # An own block was claimed again, or its object changed: whatever was said of it before no longer counts.
        if own.block != block:
            own.block, own.lost, own.closing = block, False, False
            self.exclude(own)
            self.settle_node_addresses()

    def follow_pools(self) -> None:
        """Have the blocks keep what their pools reserve by now, if pools have changed."""
        if self._followed is not self.known.pools:
            self._followed = self.known.pools
            for own in self.by_cidr.values():
                self.exclude(own)

    def lose(self, cidr: IPNetwork) -> None:
        """Another node has a block, or nobody: its endpoints keep what they have."""
        own = self.by_cidr[cidr]
        # A pod that runs keeps its address even when the block is lost. The block stays to know which of its
        # addresses are in use.
        if own.fifo.held:
            own.lost = True
        else:
            del self.by_cidr[cidr]
        self.settle_node_addresses()


def leave_out_overlapped(blocks: Iterable[Block]) -> tuple[list[Block], list[str]]:
    """Give blocks that share no address, and what is left out, and why.

    Only a pool that was made anew with another block size can have left such blocks. The larger one stays: it has all
    addresses of the smaller, so no pod loses its own, and none is given twice. Of two of one CIDR the later claim
    stays.
    """
    opened: list[Block] = []
    left_out: list[str] = []
    for block in sorted(blocks, key=lambda block: (block.cidr.prefixlen, -block.epoch)):
        over = next((other for other in opened if overlap(other.cidr, block.cidr)), None)
        if over is None:
            opened.append(block)
        else:
            left_out.append(
                f"block {block.cidr} of pool {block.pool} is left out until the store has been read:"
                f" it overlaps block {over.cidr} of pool {over.pool}, which this node remembers too"
            )
    return opened, left_out
