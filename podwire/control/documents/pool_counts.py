"""How full pools are, as a whole and at each node, in numbers that add up.

Used by `agent.api.ipam`. Pure. A used address counts where its capacity counts: in the block that it is in, whichever
node has it. Invariant: capacity = used + free, everywhere.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from podwire.control.ipam.documents import Block
from podwire.control.ipam.pools import Pool, find_pool
from podwire.model.endpoint import IPAddress, IPNetwork


class Count(msgspec.Struct, frozen=True):
    """How full something is."""

    blocks: int
    """Claimed ones."""
    capacity: int
    """Addresses that pods can have: of a node's blocks; of a pool, if all its blocks were claimed."""
    used: int
    """Those of `capacity` that some pod has."""
    borrowed: int
    """What a node's pods have outside its blocks: of another's block, or claimed one by one. Of a pool: all of that."""

    @property
    def free(self) -> int:
        """Those of `capacity` that no pod has."""
        return self.capacity - self.used


class PoolCount(msgspec.Struct, frozen=True):
    """One pool, and every node that has something of it."""

    whole: Count
    nodes: Mapping[str, Count]


def count_pools(
    pools: Mapping[str, Pool],
    blocks: Iterable[Block],
    published: Mapping[str, Collection[IPAddress]],
    node_addresses: Collection[IPAddress] = (),
) -> dict[str, PoolCount]:
    """Count every pool. `published`: which addresses of pods each node has; `node_addresses`: what stands for nodes
    themselves, and can be no pod's.
    """
    claimed = {block.cidr: block for block in blocks if block.node}
    by_pool: dict[str, _Pool] = {
        name: _Pool(pool, frozenset(address for address in node_addresses if address in pool.cidr))
        for name, pool in sorted(pools.items())
    }
    for block in claimed.values():
        if block.pool in by_pool:
            by_pool[block.pool].add_block(block)
    for node, addresses in published.items():
        for address in addresses:
            pool = find_pool(pools, address)
            if pool is not None:
                by_pool[pool.name].add_address(node, address)
    return {name: pool.count() for name, pool in by_pool.items()}


class _Pool:
    """What there is of one pool."""

    def __init__(self, pool: Pool, node_addresses: frozenset[IPAddress]) -> None:
        self._pool = pool
        self._node_addresses = node_addresses
        self._blocks: dict[IPNetwork, str] = {}
        self._others: list[IPNetwork] = []
        """Claimed before the pool was cut as it is now."""
        self._used: set[IPAddress] = set()
        self._used_of: dict[str, set[IPAddress]] = {}
        self._borrowed: dict[str, int] = {}

    def add_block(self, block: Block) -> None:
        self._blocks[block.cidr] = block.node
        if not self._pool.is_block(block.cidr):
            self._others.append(block.cidr)

    def add_address(self, node: str, address: IPAddress) -> None:
        place = self._pool.block_of(address)
        is_for_pod = address not in self._node_addresses
        if is_for_pod:
            self._used.add(address)
        cidr = place
        if place not in self._blocks:
            same = (network for network in self._others if network.version == address.version)
            cidr = next((network for network in same if address in network), place)
        owner = self._blocks.get(cidr, "")
        if owner and is_for_pod:
            self._used_of.setdefault(owner, set()).add(address)
        if owner != node or not is_for_pod:
            self._borrowed[node] = self._borrowed.get(node, 0) + 1

    def count(self) -> PoolCount:
        nodes = {*self._blocks.values(), *self._borrowed}
        whole = Count(
            blocks=len(self._blocks),
            capacity=self._pool.cidr.num_addresses - len(self._node_addresses),
            used=len(self._used),
            borrowed=sum(self._borrowed.values()),
        )
        return PoolCount(whole, {node: self._count_node(node) for node in sorted(nodes)})

    def _count_node(self, node: str) -> Count:
        own = [cidr for cidr, owner in self._blocks.items() if owner == node]
        return Count(
            blocks=len(own),
            capacity=sum(map(self._capacity_of, own)),
            used=len(self._used_of.get(node, ())),
            borrowed=self._borrowed.get(node, 0),
        )

    def _capacity_of(self, cidr: IPNetwork) -> int:
        return cidr.num_addresses - sum(address in cidr for address in self._node_addresses)
