"""Documents of the API that are about addresses.

Used by `agent.api.ipam` and `agent.api.shared`. Values only.
"""

from collections.abc import Sequence

import msgspec

from podwire.control.endpoint.table import Endpoint


class Document(msgspec.Struct, frozen=True, rename="camel"):
    """Base of all answers about addresses."""


class RangeView(Document, frozen=True, kw_only=True):
    """One range of addresses."""

    cidr: str
    family: int
    capacity: int
    used: int
    resting: int
    """Of pods that ended: held until the old device is really gone."""
    free: int
    pool: str = ""
    """With IPAM mode `pool`: which pool the block is of."""


class PoolNodeView(Document, frozen=True, kw_only=True):
    """What one node has of a pool."""

    node: str
    blocks: int
    capacity: int
    """Addresses of its blocks that pods could have."""
    used: int
    """Addresses of its blocks that pods have, whosesoever, as nodes published them last."""
    free: int
    borrowed: int
    """Addresses that its pods have outside its blocks: of other nodes' blocks, or claimed one by one."""


class PoolView(Document, frozen=True, kw_only=True):
    """One pool in the whole cluster."""

    name: str
    cidr: str
    use: str
    disabled: bool
    problem: str
    """Why nothing is taken of it; "" = nothing is wrong."""
    blocks: int
    """How many it is cut into."""
    blocks_claimed: int
    capacity: int
    """Addresses that pods could have if all blocks were claimed."""
    used: int
    free: int
    borrowed: int
    """Addresses that pods have outside their nodes' blocks; part of `used`."""
    nodes: tuple[PoolNodeView, ...]


class BorrowedView(Document, frozen=True, kw_only=True):
    """One address that an object claims: borrowed, or asked for."""

    ip: str
    node: str
    """Its owner."""
    pool: str
    block: str
    block_node: str
    """Whose block it is in; "" = nobody's."""
    handle: str
    """Network/container/interface."""


class AllocationView(Document, frozen=True, kw_only=True):
    """One address in use."""

    ip: str
    endpoint: int
    owner: str
    """Its owner: namespace/pod."""
    state: str
    """`used`, or `ending` while the old device is on its way out."""


class IpamView(Document, frozen=True, kw_only=True):
    """Addresses of this node."""

    mode: str
    ranges: tuple[RangeView, ...]
    allocations: tuple[AllocationView, ...]
    pools: tuple[PoolView, ...] = ()
    borrowed: tuple[BorrowedView, ...] = ()


class IpamFault(Document, frozen=True, kw_only=True):
    """One address that memory, journal and kernel do not agree about."""

    ip: str
    problem: str
    releasable: bool


class IpamCheck(Document, frozen=True, kw_only=True):
    """Result of comparing addresses."""

    ok: bool
    checked: int
    faults: tuple[IpamFault, ...]


class IpamTotals(Document, frozen=True, kw_only=True):
    """Addresses, summed up."""

    mode: str
    ranges: tuple[RangeView, ...]


def allocation_views(endpoints: Sequence[Endpoint]) -> tuple[AllocationView, ...]:
    """Show the owner of each address; endpoints on their way out hold theirs until the device is gone."""
    return tuple(
        AllocationView(
            ip=str(address),
            endpoint=endpoint.record.id,
            owner=f"{endpoint.record.namespace}/{endpoint.record.pod}",
            state="ending" if endpoint.state.value == "disconnecting" else "used",
        )
        for endpoint in endpoints
        for address in endpoint.record.addresses
    )
