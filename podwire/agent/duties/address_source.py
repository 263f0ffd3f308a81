"""Choose this node's source of addresses by the setting `ipam`: its own ranges, a range of a pool, or blocks.

Called by `agent.node` before the datapath is opened, because the datapath must know the node's ranges.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Protocol

from podwire.agent.duties.addresses import HOST_NAME_LABEL, IpamDuty, read_labels
from podwire.agent.duties.cluster.duty import OwnRanges
from podwire.agent.duties.kubernetes.start import RANGES_FACT, Start
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.control.documents.damage import find_fault
from podwire.control.documents.pools import decode_pools, find_problems, fixed_ranges
from podwire.control.ipam import node_ranges
from podwire.control.ipam.claiming.claims import Claims
from podwire.control.ipam.documents import block_key
from podwire.control.ipam.interface import Ipam
from podwire.control.ipam.node import NodeIpam
from podwire.control.ipam.pool import PoolIpam
from podwire.control.ipam.pool_cache import PoolCache
from podwire.model.config import AgentConfig
from podwire.model.endpoint import IPNetwork
from podwire.model.errors import InvalidConfiguration
from podwire.model.interfaces import FactStore
from podwire.model.store import Store
from podwire.model.store.kinds import IP_BLOCK, IP_POOL, NODE


@dataclass
class OwnCoreNode:
    """What is known of the core Node under which this node publishes itself; written by one thread, read by any."""

    uid: str = ""
    why_silent: str | None = None
    """Why nothing is published: the core Node that would own it is not there, or "" = was not heard of yet. None:
    nothing is in the way."""


class BlockListener(Protocol):
    """Hears of the blocks of this node. The first list comes before anything else of the node is opened."""

    def before_open(self, blocks: Collection[IPNetwork]) -> None:
        """Hear which blocks there are going to be, before the first address of a new one is given."""

    def changed(self) -> None:
        """Hear that blocks were opened or lost."""


@dataclass(frozen=True)
class Addresses:
    """The source of addresses, and the duty that looks after it."""

    ipam: Ipam
    duty: IpamDuty | None = None
    """With IPAM mode `pool`."""
    core: OwnCoreNode = field(default_factory=OwnCoreNode)
    """With the store `kubernetes`."""

    @property
    def ranges(self) -> tuple[IPNetwork, ...]:
        """Give the ranges of this node's pods now."""
        return tuple(usage.cidr for usage in self.ipam.usage())

    @property
    def families(self) -> frozenset[int]:
        """Give the IP versions that pods here have, or are going to have."""
        versions: set[int] = {cidr.version for cidr in self.ranges}
        if self.duty is not None:
            versions.update(pool.version for pool in self.duty.ipam.ordinary_pools())
        return frozenset(versions)

    def own_ranges(self) -> OwnRanges:
        """Say what other nodes hear; one address of a family stands for the node itself."""
        usage = self.ipam.usage()
        own = [
            cidr_usage.node_address for cidr_usage in usage if cidr_usage.node_address is not None
        ]
        blocks = self.duty.ipam.blocks if self.duty is not None else {}
        return OwnRanges(
            pod_cidrs=()
            if self.duty is not None
            else tuple(cidr_usage.cidr for cidr_usage in usage),
            blocks=blocks,
            tunnel_addresses=tuple(sorted(own, key=lambda address: address.version)),
            core_uid=self.core.uid,
            why_silent=self.core.why_silent,
        )

    @property
    def strays(self) -> tuple[IPNetwork, ...]:
        """Give the addresses that pods here have outside of the node's ranges, which were others once."""
        if not isinstance(self.ipam, NodeIpam):
            return ()
        return tuple(ip_network(address) for address in self.ipam.list_strays())


def open_addresses(
    config: AgentConfig,
    store: Store,
    facts: FactStore,
    report: Callable[[str], None],
    wait_for: Callable[[str, str], None],
    blocks: BlockListener,
    shared: SharedWatch | None = None,
) -> Addresses:
    """Make what the settings ask for, and let it hear what the store says.

    With the store `kubernetes` it waits for the range of the core Node; `wait_for` hears what is missing, and a hint.
    """
    if config.node.ipam == "pool":
        duty = IpamDuty(
            ipam=PoolIpam(
                Claims(store, PoolCache(config.node.node_name)), before_open=blocks.before_open
            ),
            store=store,
            facts=facts,
            report=report,
            shared=shared,
            blocks_changed=blocks.changed,
        )
        duty.prepare()
        return Addresses(duty.ipam, duty)
    if config.store.is_kubernetes and not config.node.node_cidrs:
        start = Start(store, facts, wait_for)
        return Addresses(NodeIpam(start.wait_for_ranges(config.node.node_name)))
    ranges = config.node.node_cidrs or take_ranges(config.node.node_name, store, facts)
    if not ranges:
        raise InvalidConfiguration(
            f"give addresses to pods of node {config.node.node_name}: node_cidrs is empty, and no IPPool"
            " with `use: nodes` selects the node",
            hint='set node_cidrs, apply such a pool, or set ipam = "pool"; see docs/ipam.md',
        )
    return Addresses(NodeIpam(ranges))


def take_ranges(node: str, store: Store, facts: FactStore) -> Sequence[IPNetwork]:
    """Give the ranges that pools with `use: nodes` have for a node, and remember them for a start without the store.

    Raises as `control.ipam.node_ranges` does.
    """
    before = [ip_network(text) for text in json.loads(facts.read_fact(RANGES_FACT) or "[]")]
    ranges = node_ranges.take_ranges(node, store, before, lambda: _look(node, store, before))
    if list(ranges) != before:
        facts.write_fact(RANGES_FACT, json.dumps([str(cidr) for cidr in ranges]))
    return ranges


def _look(node: str, store: Store, before: Sequence[IPNetwork]) -> node_ranges.RangeFacts:
    pool_objects = store.list(IP_POOL.plural)[0]
    blocks = store.list(IP_BLOCK.plural)[0]
    nodes = store.list(NODE.plural)[0]
    pools = decode_pools(pool_objects)
    own_keys = {block_key(cidr) for cidr in before}
    gave = [*pool_objects, *(block for block in blocks if block.key in own_keys)]
    labels = next((read_labels(stored.document) for stored in nodes if stored.key.name == node), {})
    return node_ranges.RangeFacts(
        pools=pools,
        problems=find_problems(pools, {stored.key.name: fixed_ranges(stored) for stored in nodes}),
        labels={HOST_NAME_LABEL: node, **labels},
        blocks=blocks,
        faults=[f"{stored.key}: {fault}" for stored in gave if (fault := find_fault(stored))],
    )
