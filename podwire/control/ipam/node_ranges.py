"""Which ranges a node has for its pods when pools with `use: nodes` give them: those it had, else a block of a family.

Called by `agent.duties.address_source` when an agent starts, before the datapath is opened. Invariant: a node that took
its range from a pool keeps the range for as long as it has its name, with or without the store.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from podwire.control.ipam.claiming.claims import Claims
from podwire.control.ipam.documents import decode_block
from podwire.control.ipam.pool_cache import PoolCache
from podwire.control.ipam.pools import NODES, Labels, Pool, selects
from podwire.model.endpoint import IPNetwork
from podwire.model.errors import Conflict, Exhausted, Unavailable
from podwire.model.store import Store, StoredObject
from podwire.model.store.kinds import IP_BLOCK

ATTEMPTS: Final = 10

_log = logging.getLogger(__name__)


class RangeFacts(msgspec.Struct, frozen=True):
    """What the store says now: all that a node's ranges depend on."""

    pools: Mapping[str, Pool]
    problems: Mapping[str, str]
    """By pool: why nothing is taken of it."""
    labels: Labels
    """The node's own."""
    blocks: Sequence[StoredObject]
    faults: Sequence[str] = ()
    """What gave the node its ranges and cannot be read now."""


def take_ranges(
    node: str, store: Store, before: Sequence[IPNetwork], look: Callable[[], RangeFacts]
) -> Sequence[IPNetwork]:
    """Give the ranges that pools with `use: nodes` have for a node: those of `before`, else a block of each family.

    () when there are no such pools. Raises Exhausted; Unavailable when the store is away and the node had none before;
    Conflict when other nodes were faster each time.
    """
    for attempt in range(ATTEMPTS):
        try:
            facts = look()
            if before and facts.faults:
                # What cannot be read may be what gave the ranges. Others would cut off the pods that have the old ones.
                _log.warning("the node keeps its earlier ranges", extra={"cause": facts.faults[0]})
                return before
            return _claim(node, store, facts)
        except Conflict:
            # Another node took the block between the list and the claim. The next look knows that.
            if attempt == ATTEMPTS - 1:
                raise
        except Unavailable:
            if not before:
                raise
            _log.warning("the store is away; the node keeps its earlier ranges")
            return before
    raise AssertionError("unreachable: the last attempt returns or raises")


def _claim(node: str, store: Store, facts: RangeFacts) -> list[IPNetwork]:
    wanted = [
        pool for _, pool in sorted(facts.pools.items()) if pool.use == NODES and not pool.disabled
    ]
    if not wanted:
        return []
    known = PoolCache(node)
    known.node_labels = facts.labels
    known.set_pools(facts.pools, facts.problems)
    known.replace(IP_BLOCK.plural, facts.blocks)
    claims = Claims(store, known)
    ranges = [
        block.cidr
        for block in map(decode_block, facts.blocks)
        # A node keeps its block by its name alone: pods that ran before a restart have addresses of it.
        if block is not None and block.node == node and facts.pools.get(block.pool) in wanted
    ]
    lacking = {pool.version for pool in wanted} - {cidr.version for cidr in ranges}
    for version in sorted(lacking):
        cidr = _claim_one(claims, (pool for pool in wanted if pool.version == version))
        if cidr is not None:
            ranges.append(cidr)
    return sorted(ranges, key=lambda cidr: cidr.version)


def _claim_one(claims: Claims, pools: Iterable[Pool]) -> IPNetwork | None:
    """Take a block of the first pool that has one for this node; None when no pool is meant for it."""
    known = claims.known
    limits = []
    for pool in pools:
        if pool.name in known.problems:
            limits.append(known.problems[pool.name])
        elif selects(pool.node_selector, known.node_labels):
            try:
                return claims.claim_block(pool).cidr
            except Exhausted as error:
                limits.append(error.message)
    if limits:
        raise Exhausted(
            f"take a range for node {known.node}: {'; '.join(limits)}",
            hint="add an IPPool with `use: nodes`, or set node_cidrs",
        )
    return None
