"""How many blocks a node should have: which to claim before an ADD needs one, and which to give back.

Called by `agent.duties.addresses` on its own thread, never under the node's turn, because every claim waits for the
store. Invariant: a block is forgotten on disk before it is given back, so a start without the store never uses a block
that another node may have by then.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from podwire.control.ipam.blocks import OwnBlock
from podwire.control.ipam.pool import PoolIpam
from podwire.control.ipam.pools import Pool, is_for_pods, selects
from podwire.model.endpoint import IPNetwork
from podwire.model.errors import Conflict, Exhausted

EMPTY_S: Final = 300.0
"""How long a block stays empty before it is given back."""
UNWANTED_S: Final = 10.0
"""The same for a block of a pool that this node may not use (any more)."""
LOW_WATER: Final = 8
"""With fewer free addresses than this, the next block is claimed."""

_log = logging.getLogger(__name__)


class BlockDemand:
    """What one node should claim and give back."""

    def __init__(self, ipam: PoolIpam, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._ipam = ipam
        self._known = ipam.known
        self._claims = ipam.claims
        self._monotonic = monotonic

    def settle_claims(self) -> None:
        """Give back single addresses that nobody here has, claim ahead, and write what own blocks are to keep."""
        for claimed in self._ipam.list_unheld():
            self._claims.return_address(claimed)
        self._claim_ahead()
        with self._ipam.lock:
            outdated = self._ipam.mine.list_outdated()
        for block, kept in outdated:
            self._claims.change_kept(block, kept)

    def give_back(self, forget: Callable[[], None]) -> None:
        """Give back blocks that stayed empty, and those that were never opened; `forget` has what is closed forgotten
        on disk.
        """
        for cidr in self._choose_empty():
            block = self._ipam.close_block(cidr)
            if block is None:
                continue
            # The disk forgets the block before the store does. In the other order, a start without the store could
            # give addresses of a block that another node has by then.
            forget()
            if self._claims.release_block(block):
                _log.info("gave a block back", extra={"cause": f"{cidr} of pool {block.pool}"})
        with self._ipam.lock, self._known.lock:
            unopened = [
                block for cidr, block in self._known.own.items() if cidr not in self._ipam.own
            ]
        for block in unopened:
            # A pool that was cut anew left a block of another size over this one: it can never be opened.
            if self._known.find_overlapping(block.cidr) is not None:
                self._claims.release_block(block)

    def _claim_ahead(self) -> None:
        """Claim the next block of a family, or of a pool that pods here use by name, while a few addresses are left."""
        for pools in self._list_groups():
            free = sum(self._ipam.count_free(pool.name) for pool in pools)
            if free < _low_water(pools[0]):
                self._claim_one(pools)

    def _list_groups(self) -> list[list[Pool]]:
        """Give groups of pools. Any pool of a group can serve the next pod: one group for each family, one for each
        pool that is used by name."""
        ordinary = self._ipam.ordinary_pools()
        groups = [[pool for pool in ordinary if pool.version == version] for version in (4, 6)]
        names = {pool.name for pool in ordinary}
        with self._ipam.lock:
            used = {own.block.pool for own in self._ipam.own.values() if own.fifo.held}
        usable = self._known.usable()
        groups += [
            [usable[name]]
            for name in sorted(used - names)
            if name in usable and is_for_pods(usable[name])
        ]
        return [pools for pools in groups if pools]

    def _claim_one(self, pools: Sequence[Pool]) -> None:
        for pool in pools:
            if self._claims.count_own(pool.name) > self._count_open(pool.name):
                return  # one is on its way
            try:
                block = self._claims.claim_block(pool)
            except (Exhausted, Conflict):
                continue
            _log.info("claimed a block", extra={"cause": f"{block.cidr} of pool {pool.name}"})
            return

    def _count_open(self, pool: str) -> int:
        with self._ipam.lock:
            return sum(own.block.pool == pool for own in self._ipam.own.values())

    def _choose_empty(self) -> list[IPNetwork]:
        now_s = self._monotonic()
        due: list[IPNetwork] = []
        with self._ipam.lock:
            for cidr, own in self._ipam.own.items():
                if own.fifo.held or own.lost:
                    own.empty_since_s = None
                    continue
                if own.empty_since_s is None:
                    own.empty_since_s = now_s
                age_s = now_s - own.empty_since_s
                if own.closing or (age_s >= UNWANTED_S and not self._is_wanted(own)):
                    due.append(cidr)
                elif age_s >= EMPTY_S and own.fifo.node_address is None and not due:
                    # One at a time: what is left must be enough after each.
                    rest = self._ipam.count_free(own.block.pool) - own.fifo.free
                    # Twice the low-water mark: with only once, the next pod would have the block claimed again.
                    if rest >= 2 * LOW_WATER:
                        due.append(cidr)
        return due

    def _is_wanted(self, own: OwnBlock) -> bool:
        """Tell whether pods of this node may have addresses of a block's pool."""
        pool = self._known.pools.get(own.block.pool)
        return (
            pool is not None
            and is_for_pods(pool)
            and pool.is_block(own.block.cidr)
            and (selects(pool.node_selector, self._known.node_labels) or self._is_named(pool.name))
        )

    def _is_named(self, pool: str) -> bool:
        return any(pool in namespace.pools for namespace in list(self._known.namespaces.values()))


def _low_water(pool: Pool) -> int:
    addresses = 1 << (pool.cidr.max_prefixlen - pool.block_size)
    return max(1, min(LOW_WATER, addresses // 8))
