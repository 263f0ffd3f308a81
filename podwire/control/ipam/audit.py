"""Check whether all parts that should know of an address agree about its owner: on this node, and in the whole cluster.

Called by the API (`podwire ipam check`). Pure: memory, journal and kernel are arguments, taken at one moment under the
node's turn; so is what the store says, with IPAM mode `pool`. A node publishes some time after its ADDs and DELs, so
only what is wrong both before and after that counts as a fault in the cluster. An address is releasable when only the
allocator's memory knows it, when its object belongs to this node and no endpoint has the address, or when its object
belongs to a node that is gone.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from podwire.control.ipam.documents import Block, ClaimedAddress
from podwire.control.ipam.interface import Holding
from podwire.control.ipam.pools import Pool
from podwire.model.endpoint import EndpointRecord, IPAddress, Phase
from podwire.model.ids import EndpointId
from podwire.model.networks import index_networks, overlap


@dataclass(frozen=True)
class AddressFault:
    """One address that they do not agree about."""

    address: str
    problem: str
    releasable: bool = False


def find_address_faults(
    holdings: Mapping[EndpointId, Holding],
    records: Iterable[EndpointRecord],
    kernel_addresses: Collection[str],
) -> list[AddressFault]:
    """Name every disagreement, ordered by address.

    What is being made or ended may have rows or none; the rows of a live endpoint must be there.
    """
    by_id = {record.id: record for record in records}
    held = {
        str(address): owner for owner, holding in holdings.items() for address in holding.addresses
    }
    delivered = frozenset(kernel_addresses)
    recorded, faults = _index(by_id.values())
    for address, owner in held.items():
        if owner not in by_id:
            faults.append(AddressFault(address, f"held for {owner}, no such endpoint", True))
    for address, owner in recorded.items():
        if held.get(address) != owner:
            faults.append(AddressFault(address, f"endpoint {owner} has it, but it is not held"))
        # An endpoint that is being made has no rows yet, and one that ends has none any more. Both are in order.
        if by_id[owner].phase is Phase.LIVE and address not in delivered:
            problem = f"endpoint {owner} has it, but the datapath does not deliver it"
            faults.append(AddressFault(address, problem))
    for address in delivered:
        if address not in recorded:
            faults.append(AddressFault(address, "the datapath delivers it, but no endpoint has it"))
    return sorted(faults, key=lambda fault: (":" in fault.address, fault.address))


def _index(records: Iterable[EndpointRecord]) -> tuple[dict[str, EndpointId], list[AddressFault]]:
    """Give which endpoint has which address, and those that two have."""
    recorded: dict[str, EndpointId] = {}
    faults = []
    for record in records:
        for address in map(str, record.addresses):
            other = recorded.setdefault(address, record.id)
            if other != record.id:
                faults.append(AddressFault(address, f"endpoints {other} and {record.id} have it"))
    return recorded, faults


@dataclass(frozen=True)
class ClusterView:
    """What one node knows of all, taken as close together as can be."""

    node: str
    """The node that looks."""
    living: Collection[str]
    """Nodes that have an object or a lease."""
    pools: Mapping[str, Pool]
    blocks: Iterable[Block]
    claimed: Iterable[ClaimedAddress]
    published: Mapping[str, Collection[IPAddress]]
    """By node: addresses of its pods."""
    held: Collection[IPAddress]
    """By endpoints of this node."""


def find_cluster_faults(view: ClusterView) -> list[AddressFault]:
    """Name blocks of unknown nodes, addresses outside blocks, objects without endpoint, and two owners."""
    blocks = [block for block in view.blocks if block.node]
    claimed = {claimed.address: claimed for claimed in view.claimed}
    faults = [
        *_find_block_faults(view, blocks),
        *_find_claim_faults(view, claimed.values()),
        *_find_published_faults(view, blocks, claimed),
    ]
    return sorted(faults, key=lambda fault: (":" in fault.address, fault.address))


def _find_block_faults(view: ClusterView, blocks: Iterable[Block]) -> Iterator[AddressFault]:
    ordered = sorted(
        blocks,
        key=lambda block: (
            block.cidr.version,
            int(block.cidr.network_address),
            block.cidr.prefixlen,
        ),
    )
    around: list[Block] = []
    for block in ordered:
        if block.node not in view.living:
            yield AddressFault(str(block.cidr), f"block of node {block.node}, which is unknown")
        pool = view.pools.get(block.pool)
        if pool is None:
            yield AddressFault(str(block.cidr), f"block of pool {block.pool}, which is gone")
        elif not pool.is_block(block.cidr):
            yield AddressFault(
                str(block.cidr), f"is not a block of pool {block.pool} ({pool.cidr})"
            )
        # In the order of first addresses, a block that does not reach this one overlaps none of the later ones
        # either.
        around = [other for other in around if overlap(other.cidr, block.cidr)]
        for other in around:
            problem = f"nodes {other.node} ({other.cidr}) and {block.node} have it as their block"
            yield AddressFault(str(block.cidr), problem)
        around.append(block)


def _find_claim_faults(
    view: ClusterView, claimed: Iterable[ClaimedAddress]
) -> Iterator[AddressFault]:
    for claim in claimed:
        if claim.node == view.node and claim.address not in view.held:
            problem = f"claimed for {claim.key}, which is not an endpoint here"
            yield AddressFault(str(claim.address), problem, releasable=True)
        elif claim.node not in view.living:
            problem = f"claimed by node {claim.node}, which is unknown"
            yield AddressFault(str(claim.address), problem, releasable=True)


def _find_published_faults(
    view: ClusterView, blocks: Iterable[Block], claimed: Mapping[IPAddress, ClaimedAddress]
) -> Iterator[AddressFault]:
    owners = index_networks((block.cidr, block.node) for block in blocks)
    # This node's publication lags behind its endpoints, and here the endpoints themselves are known.
    published = {**view.published, view.node: view.held}
    first: dict[IPAddress, str] = {}
    for node, addresses in sorted(published.items()):
        for address in addresses:
            other = first.setdefault(address, node)
            if other != node:
                yield AddressFault(str(address), f"nodes {other} and {node} have a pod with it")
            pool = next((pool for pool in view.pools.values() if address in pool.cidr), None)
            owner = claimed[address].node if address in claimed else owners.find(address)
            if pool is not None and owner != node:
                whose = f"node {owner} owns it" if owner else "no node owns it"
                yield AddressFault(str(address), f"a pod of node {node} has it, but {whose}")
