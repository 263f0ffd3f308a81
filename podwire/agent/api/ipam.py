"""The API's operations on addresses: count them, find their owners, check them, and release what no endpoint has.

`agent.api.routes` includes ROUTES_IPAM in its table. With IPAM mode `pool` the handlers ask the store what other nodes
have. While the store is away, they show what this node knows. All handlers run on a thread.
"""

import ipaddress
from collections.abc import Collection, Iterable, Mapping

from podwire.agent.api.context import Api
from podwire.agent.api.ipam_views import (
    BorrowedView,
    IpamCheck,
    IpamFault,
    IpamView,
    PoolNodeView,
    PoolView,
    RangeView,
    allocation_views,
)
from podwire.agent.api.openapi import Call, Route
from podwire.control.cluster.published import decode_endpoints
from podwire.control.documents.pool_counts import count_pools
from podwire.control.documents.pools import decode_pools
from podwire.control.ipam.audit import (
    AddressFault,
    ClusterView,
    find_address_faults,
    find_cluster_faults,
)
from podwire.control.ipam.documents import (
    Block,
    ClaimedAddress,
    address_key,
    decode_block,
    decode_claimed,
)
from podwire.control.ipam.pool import PoolIpam
from podwire.model.endpoint import IPAddress
from podwire.model.errors import Conflict, InvalidRequest, NotFound, Unavailable, UndecodableRequest
from podwire.model.store.kinds import IP_ADDRESS, IP_BLOCK, IP_POOL, NODE, NODE_ENDPOINTS
from podwire.model.store.leases import list_living_nodes


def range_views(api: Api) -> tuple[RangeView, ...]:
    """Show how full this node's ranges are."""
    return tuple(
        RangeView(
            cidr=str(usage.cidr),
            family=usage.cidr.version,
            capacity=usage.capacity,
            used=usage.held - usage.quarantined,
            resting=usage.quarantined,
            free=usage.free,
            pool=usage.pool,
        )
        for usage in api.ipam.usage()
    )


def get_ipam(api: Api, _call: Call) -> IpamView:
    pools: tuple[PoolView, ...] = ()
    borrowed: tuple[BorrowedView, ...] = ()
    if api.pools is not None:
        blocks = list(api.pools.known.blocks.values())
        claimed = list(api.pools.known.claimed.values())
        pools = tuple(_pool_views(api.pools, blocks, _published(api)))
        borrowed = tuple(_borrowed_views(api.pools, claimed))
    return IpamView(
        mode=api.config.current.node.ipam,
        ranges=range_views(api),
        allocations=allocation_views(list(api.table)),
        pools=pools,
        borrowed=borrowed,
    )


def _published(api: Api) -> dict[str, Collection[IPAddress]]:
    """Give what nodes say of their pods; this node's own addresses as they are now."""
    addresses: dict[str, Collection[IPAddress]] = {}
    try:
        for stored in api.store.list(NODE_ENDPOINTS.plural)[0]:
            try:
                addresses[stored.key.name] = frozenset(decode_endpoints(stored).identities)
            except InvalidRequest:
                continue
    except Unavailable:
        pass  # what this node knows by itself is worth showing while the store is away
    addresses[api.config.current.node.node_name] = _held(api)
    return addresses


def _held(api: Api) -> frozenset[IPAddress]:
    return frozenset(address for held in api.ipam.holders().values() for address in held.addresses)


def _pool_views(
    ipam: PoolIpam, blocks: Iterable[Block], published: Mapping[str, Collection[IPAddress]]
) -> Iterable[PoolView]:
    pools = ipam.known.pools
    with ipam.lock:
        stand_for_nodes = ipam.mine.list_node_addresses()
    for name, count in count_pools(pools, blocks, published, stand_for_nodes).items():
        pool, whole = pools[name], count.whole
        yield PoolView(
            name=name,
            cidr=str(pool.cidr),
            use=pool.use,
            disabled=pool.disabled,
            problem=ipam.known.problems.get(name, ""),
            blocks=pool.block_count,
            blocks_claimed=whole.blocks,
            capacity=whole.capacity,
            used=whole.used,
            free=whole.free,
            borrowed=whole.borrowed,
            nodes=tuple(
                PoolNodeView(
                    node=node,
                    blocks=counted.blocks,
                    capacity=counted.capacity,
                    used=counted.used,
                    free=counted.free,
                    borrowed=counted.borrowed,
                )
                for node, counted in count.nodes.items()
            ),
        )


def _borrowed_views(ipam: PoolIpam, claimed: Iterable[ClaimedAddress]) -> Iterable[BorrowedView]:
    for address in sorted(
        claimed, key=lambda address: (address.address.version, int(address.address))
    ):
        pool = ipam.known.find_pool(address.address)
        cidr = pool.block_of(address.address) if pool is not None else None
        block = ipam.known.blocks.get(cidr) if cidr is not None else None
        yield BorrowedView(
            ip=str(address.address),
            node=address.node,
            pool=address.pool,
            block=str(cidr or ""),
            block_node=block.node if block is not None else "",
            handle=str(address.key),
        )


def check_ipam(api: Api, _call: Call) -> IpamCheck:
    """Compare what memory, journal and kernel say of addresses; with pools, what all nodes and the store say too."""
    with api.turn:
        holdings = api.ipam.holders()
        records = api.journal.list_records()
        # All three under one turn, or an ADD in between would look like a fault.
        present = api.datapath.read_inventory().endpoint_addresses
    faults = find_address_faults(holdings, records, present)
    if api.pools is not None:
        faults += find_cluster_faults(_view_cluster(api, api.pools))
        with api.pools.lock:
            lost = api.pools.mine.list_lost()
        faults += [
            AddressFault(
                str(cidr), f"lost to another node; {held} addresses of pods here are in it"
            )
            for cidr, held in lost
        ]
    checked = sum(len(holding.addresses) for holding in holdings.values())
    return IpamCheck(
        ok=not faults,
        checked=checked,
        faults=tuple(
            IpamFault(ip=fault.address, problem=fault.problem, releasable=fault.releasable)
            for fault in faults
        ),
    )


def _view_cluster(api: Api, ipam: PoolIpam) -> ClusterView:
    """Read all of the store that is about addresses: the check must not trust what it looks for faults in."""
    blocks = map(decode_block, api.store.list(IP_BLOCK.plural)[0])
    claimed = map(decode_claimed, api.store.list(IP_ADDRESS.plural)[0])
    return ClusterView(
        node=ipam.known.node,
        living=_living(api) | {ipam.known.node},
        pools=decode_pools(api.store.list(IP_POOL.plural)[0]),
        blocks=[block for block in blocks if block is not None],
        claimed=[claim for claim in claimed if claim is not None],
        published=_published(api),
        held=_held(api),
    )


def release_address(api: Api, call: Call) -> None:
    """Release an address that no endpoint has; Conflict where an endpoint has it."""
    try:
        address = ipaddress.ip_address(call.params["ip"])
    except ValueError:
        raise UndecodableRequest(f"release {call.params['ip']!r}: this is not an address") from None
    with api.turn:
        owner = api.ipam.find_owner(address)
        if owner is not None:
            endpoint = api.table.get(owner)
            if endpoint is not None:
                raise Conflict(
                    f"release {address}: endpoint {owner} has it ({endpoint.state.value})",
                    hint="end the pod; its address comes back when its device is gone",
                )
            api.ipam.release(owner)
    if not _release_claimed(api, address) and owner is None:
        raise NotFound(f"release {address}: no endpoint holds it", hint="see `podwire ipam show`")


def _release_claimed(api: Api, address: IPAddress) -> bool:
    """Delete the object that claims an address, unless a node that lives may have an endpoint with it."""
    if api.pools is None:
        return False
    stored = api.store.get(address_key(address))
    claimed = decode_claimed(stored) if stored is not None else None
    if stored is None or claimed is None:
        return False
    is_own = claimed.node == api.pools.known.node
    if not is_own and claimed.node in _living(api):
        raise Conflict(
            f"release {address}: node {claimed.node} has it for {claimed.key}",
            hint=f"ask that node: podwire ipam release --ip {address} --node {claimed.node}",
        )
    if is_own and all(claimed.address != address for claimed in api.pools.list_unheld()):
        return False
    # Only the object that was judged above: meanwhile another node may have claimed the address.
    api.store.delete(stored.key, revision=stored.revision, uid=stored.uid)
    return True


def _living(api: Api) -> frozenset[str]:
    """Name the nodes that have an object or a living lease."""
    named = frozenset(stored.key.name for stored in api.store.list(NODE.plural)[0])
    return named | (list_living_nodes(api.store.leases()) or frozenset())


ROUTES_IPAM: tuple[Route, ...] = (
    Route("GET", "/ipam", "Pools, ranges and addresses", get_ipam, IpamView, blocking=True),
    Route(
        "GET",
        "/ipam/check",
        "Compare addresses",
        check_ipam,
        IpamCheck,
        errors=(503,),
        blocking=True,
    ),
    Route(
        "DELETE",
        "/ipam/{ip}",
        "Release an address that no endpoint has",
        release_address,
        errors=(404, 409),
        blocking=True,
    ),
)
