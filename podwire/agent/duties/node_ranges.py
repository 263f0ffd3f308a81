"""Choose this node's source of addresses by the setting `ipam`: its own ranges, a range of a pool, or blocks.

Called by `agent.node` before the datapath is opened, because the datapath must know the node's ranges. Invariant: a
node that took its range from a pool keeps the range for as long as it has its name, with or without the store.
"""

import ipaddress
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from podwire.agent.duties.addresses import HOST_NAME_LABEL, Facts, IpamDuty
from podwire.agent.duties.cluster.duty import OwnRanges
from podwire.agent.duties.core_node import wait_for_ranges
from podwire.control.documents.pools import decode_pools, find_problems, node_ranges
from podwire.control.documents.readable import find_fault
from podwire.control.ipam.claims import Claims
from podwire.control.ipam.documents import block_key, decode_block
from podwire.control.ipam.interface import Ipam
from podwire.control.ipam.node import NodeIpam
from podwire.control.ipam.pool import PoolIpam
from podwire.control.ipam.pool_cache import PoolCache
from podwire.control.ipam.pools import NODES, selects
from podwire.model.config import AgentConfig
from podwire.model.errors import Conflict, Exhausted, InvalidConfiguration, Unavailable
from podwire.model.request import IPNetwork
from podwire.model.store import Store, StoredObject
from podwire.model.store.kinds import IP_BLOCK, IP_POOL, NODE

RANGES_FACT: Final = "node-ranges"
ATTEMPTS: Final = 10

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Addresses:
    """The source of addresses, and the duty that looks after it."""

    ipam: Ipam
    duty: IpamDuty | None = None
    """With IPAM mode `pool`."""

    @property
    def ranges(self) -> tuple[IPNetwork, ...]:
        """Give the ranges of this node's pods now."""
        return tuple(one.cidr for one in self.ipam.usage())

    @property
    def families(self) -> frozenset[int]:
        """Give the IP versions that pods here have, or are going to have."""
        found: set[int] = {one.version for one in self.ranges}
        if self.duty is not None:
            found.update(one.version for one in self.duty.ipam.ordinary_pools())
        return frozenset(found)

    def own_ranges(self) -> OwnRanges:
        """Say what other nodes hear; one address of a family stands for the node itself."""
        usage = self.ipam.usage()
        own = [one.node_address for one in usage if one.node_address is not None]
        blocks = self.duty.ipam.blocks if self.duty is not None else {}
        return OwnRanges(
            pod_cidrs=() if self.duty is not None else tuple(one.cidr for one in usage),
            blocks=blocks,
            tunnel_addresses=tuple(sorted(own, key=lambda one: one.version)),
        )

    def on_blocks(
        self,
        before_open: Callable[[Mapping[IPNetwork, int]], None],
        changed: Callable[[], None],
    ) -> None:
        """Have it told before blocks are used, and after they have changed."""
        if self.duty is not None:
            self.duty.ipam.before_open = before_open
            self.duty.blocks_changed = changed


def open_addresses(
    config: AgentConfig,
    store: Store,
    facts: Facts,
    report: Callable[[str], None],
    wait_for: Callable[[str, str], None],
) -> Addresses:
    """Make what the settings ask for, and let it hear what the store says.

    With the store `kubernetes` it waits for the range of the core Node; `wait_for` hears what is missing, and a hint.
    """
    if config.node.ipam == "pool":
        duty = IpamDuty(
            ipam=PoolIpam(Claims(store, PoolCache(config.node.node_name))),
            store=store,
            facts=facts,
            report=report,
        )
        duty.prepare()
        return Addresses(duty.ipam, duty)
    if config.store.is_kubernetes and not config.node.node_cidrs:
        return Addresses(NodeIpam(wait_for_ranges(store, config.node.node_name, facts, wait_for)))
    ranges = config.node.node_cidrs or take_ranges(config.node.node_name, store, facts)
    if not ranges:
        raise InvalidConfiguration(
            f"give addresses to pods of node {config.node.node_name}: node_cidrs is empty, and no IPPool"
            " with `use: nodes` selects the node",
            hint='set node_cidrs, apply such a pool, or set ipam = "pool"; see docs/ipam.md',
        )
    return Addresses(NodeIpam(ranges))


def take_ranges(node: str, store: Store, facts: Facts) -> Sequence[IPNetwork]:
    """Give the ranges that pools with `use: nodes` have for a node: those it had, else a block of each family.

    () when there are no such pools. Raises Exhausted; Unavailable when the store is away and the node had none before.
    """
    before = [ipaddress.ip_network(one) for one in json.loads(facts.read_fact(RANGES_FACT) or "[]")]
    try:
        doubt = _find_doubt(store, before)
        if doubt:
            _log.warning("the node keeps its earlier ranges", extra={"cause": doubt})
            return before
        ranges = _retried(lambda: _claim_ranges(node, store))
    except Unavailable:
        if not before:
            raise
        _log.warning("the store is away; the node keeps its earlier ranges")
        return before
    text = json.dumps([str(one) for one in ranges])
    if ranges or before:
        facts.write_fact(RANGES_FACT, text)
    return ranges


def _find_doubt(store: Store, before: Sequence[IPNetwork]) -> str:
    """Say which of what gave the node its ranges cannot be read now; "" when all can, or it had none."""
    if not before:
        return ""
    own = {block_key(one) for one in before}
    found = [
        *store.list(IP_POOL.plural)[0],
        *(one for one in store.list(IP_BLOCK.plural)[0] if one.key in own),
    ]
    return next((f"{one.key}: {fault}" for one in found if (fault := find_fault(one))), "")


def _labels_of(stored: StoredObject) -> Mapping[str, str]:
    metadata = stored.document.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, Mapping) else None
    return labels if isinstance(labels, Mapping) else {}


def _retried(claim: Callable[[], list[IPNetwork]]) -> list[IPNetwork]:
    """Try again while other nodes are faster; the last Conflict when that does not end."""
    for _ in range(ATTEMPTS - 1):
        try:
            return claim()
        except Conflict:
            continue
    return claim()


def _claim_ranges(node: str, store: Store) -> list[IPNetwork]:
    known = PoolCache(node)
    pools = decode_pools(store.list(IP_POOL.plural)[0])
    wanted = [one for _, one in sorted(pools.items()) if one.use == NODES and not one.disabled]
    if not wanted:
        return []
    nodes = store.list(NODE.plural)[0]
    own = [_labels_of(one) for one in nodes if one.key.name == node]
    known.node_labels = {HOST_NAME_LABEL: node, **(own[0] if own else {})}
    known.set_pools(pools, find_problems(pools, {one.key.name: node_ranges(one) for one in nodes}))
    blocks = store.list(IP_BLOCK.plural)[0]
    known.replace(IP_BLOCK.plural, blocks)
    claims = Claims(store, known)
    found = [
        block.cidr
        for block in map(decode_block, blocks)
        if block is not None and block.node == node and pools.get(block.pool) in wanted
    ]
    for version in sorted({one.version for one in wanted} - {one.version for one in found}):
        limits = []
        for pool in (one for one in wanted if one.version == version):
            if pool.name in known.problems:
                limits.append(known.problems[pool.name])
            elif selects(pool.node_selector, known.node_labels):
                try:
                    found.append(claims.claim_block(pool).cidr)
                    break
                except Exhausted as error:
                    limits.append(error.message)
        else:
            if limits:
                raise Exhausted(
                    f"take a range for node {node}: {'; '.join(limits)}",
                    hint="add an IPPool with `use: nodes`, or set node_cidrs",
                )
    return sorted(found, key=lambda one: one.version)
