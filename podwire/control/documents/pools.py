"""IPPool documents: read strictly, and compared with the pools, blocks and nodes that a store already has.

`control.documents.kinds` and `control.documents.apply` call it before anything is written, and
`agent.duties.addresses` for what the store says. Invariant: a pool that is accepted shares no address with another
pool nor with a node's fixed range, contains no node's own address, and is cut into blocks of the same size for as long
as it has any.
"""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from podwire.control.cluster.facts import decode_node
from podwire.control.ipam.documents import decode_block
from podwire.control.ipam.pools import (
    BLOCK_SIZES,
    DEFAULT_BLOCK_SIZE,
    NODES,
    PODS,
    AddressRange,
    Pool,
    Requirement,
    Selector,
    find_overlaps,
)
from podwire.model.documents.fields import read_cidr, read_expression, read_label_map
from podwire.model.documents.lenient import read_address
from podwire.model.documents.reader import Faults, Node, root, shown
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import Fault, InvalidRequest
from podwire.model.store import Store, StoredObject, value_of
from podwire.model.store.kinds import IP_BLOCK, IP_POOL, NODE

FIELDS: Final = (
    "cidr",
    "blockSize",
    "nodeSelector",
    "namespaceSelector",
    "strictAffinity",
    "maxBlocksPerNode",
    "reserved",
    "use",
    "disabled",
)
MAX_BLOCKS: Final = 1_000_000
RESERVED_MAX: Final = 256
HINT: Final = "nothing was changed; see docs/ipam.md for the fields of a pool"
_ANY: Final = ipaddress.ip_network("0.0.0.0/32")


def decode_pool(document: Mapping[str, Any]) -> Pool:
    """Read a pool; InvalidRequest with every fault."""
    faults = Faults()
    top = root(document, faults)
    spec = top.child("spec")
    if not spec.expect_object(FIELDS):
        faults.raise_if_any("decode IPPool", hint=HINT)
    cidr = _read_cidr(spec.child("cidr"))
    pool = Pool(
        name=top.child("metadata").child("name").text(),
        cidr=cidr or _ANY,
        block_size=_read_block_size(spec.child("blockSize"), cidr),
        node_selector=_read_selector(spec.child("nodeSelector")),
        namespace_selector=_read_selector(spec.child("namespaceSelector")),
        strict_affinity=bool(spec.child("strictAffinity").boolean()),
        max_blocks_per_node=spec.child("maxBlocksPerNode").integer(0, MAX_BLOCKS) or 0,
        reserved=_read_reserved(spec.child("reserved"), cidr),
        use=spec.child("use").choice((PODS, NODES)) or PODS,
        disabled=bool(spec.child("disabled").boolean()),
    )
    faults.raise_if_any("decode IPPool", hint=HINT)
    return pool


def check_pools(store: Store, drafts: Sequence[StoredObject]) -> list[tuple[int, Fault]]:
    """Compare the pools among `drafts` with each other and with what the store has.

    Gives what is wrong: (index of the draft, fault).
    """
    wanted = {
        stored.key.name: (index, decode_pool(stored.document))
        for index, stored in enumerate(drafts)
        if stored.key.kind == IP_POOL.plural
    }
    if not wanted:
        return []
    before = decode_pools(store.list(IP_POOL.plural)[0])
    after = {**before, **{name: pool for name, (_, pool) in wanted.items()}}
    problems = _find_shared(after, wanted)
    problems += _find_changed(store, before, wanted)
    ranges = {stored.key.name: fixed_ranges(stored) for stored in store.list(NODE.plural)[0]}
    for name, cidr, pool in find_static(ranges, after.values()):
        if pool.name in wanted:
            message = f"is {pool.cidr}: {_describe_own(name, cidr)}"
            problems.append((wanted[pool.name][0], Fault("spec.cidr", message)))
    return problems


def decode_pools(objects: Iterable[StoredObject]) -> dict[str, Pool]:
    """Read the pools of a store, by name. An object that cannot be read is left out."""
    pools: dict[str, Pool] = {}
    for stored in objects:
        try:
            pools[stored.key.name] = value_of(stored, Pool) or decode_pool(stored.document)
        except InvalidRequest:
            continue
    return pools


def fixed_ranges(node: StoredObject) -> tuple[IPNetwork, ...]:
    """Give the ranges that a node has of its own, its blocks not among them, and its addresses; () of what cannot be
    read.
    """
    try:
        facts = decode_node(node)
    except InvalidRequest:
        return ()
    ranges = [cidr for cidr in facts.pod_cidrs if cidr not in facts.blocks]
    return *ranges, *(ipaddress.ip_network(address) for address in facts.addresses)


def own_addresses(node: StoredObject) -> tuple[IPAddress, ...]:
    """Give the addresses inside the pods' ranges that stand for a node itself; () of what cannot be read."""
    try:
        return decode_node(node).tunnel_addresses
    except InvalidRequest:
        return ()


def find_static(
    ranges: Mapping[str, Iterable[IPNetwork]], pools: Iterable[Pool]
) -> list[tuple[str, IPNetwork, Pool]]:
    """Give (node, range, pool) of ranges that share addresses with a pool and are not what a pool gave the node."""
    kept = list(pools)
    return [
        (name, cidr, pool)
        for name, cidrs in ranges.items()
        for cidr in cidrs
        for pool in kept
        if cidr.overlaps(pool.cidr) and not (pool.use == NODES and pool.is_block(cidr))
    ]


def find_problems(
    pools: Mapping[str, Pool], ranges: Mapping[str, Iterable[IPNetwork]]
) -> dict[str, str]:
    """Give the pools that cannot be used, by name, with the reason. Of two that overlap neither can be used."""
    problems: dict[str, str] = {}
    for first, other in find_overlaps(pools.values()):
        message = f"pools {first.name} ({first.cidr}) and {other.name} ({other.cidr}) overlap"
        problems.setdefault(first.name, message)
        problems.setdefault(other.name, message)
    for name, cidr, pool in find_static(ranges, pools.values()):
        problems.setdefault(
            pool.name,
            f"pool {pool.name} is {pool.cidr}: {_describe_own(name, cidr)}",
        )
    return problems


def _describe_own(node: str, cidr: IPNetwork) -> str:
    if cidr.prefixlen == cidr.max_prefixlen:
        return f"node {node} itself has the address {cidr.network_address}"
    return f"node {node} has {cidr} as a range of its own"


def _find_shared(
    after: Mapping[str, Pool], wanted: Mapping[str, tuple[int, Pool]]
) -> list[tuple[int, Fault]]:
    problems = []
    for pair in find_overlaps(after.values()):
        for pool, other in (pair, pair[::-1]):
            if pool.name in wanted:
                message = f"is {pool.cidr}: it overlaps pool {other.name} ({other.cidr})"
                problems.append((wanted[pool.name][0], Fault("spec.cidr", message)))
                break
    return problems


def _find_changed(
    store: Store, before: Mapping[str, Pool], wanted: Mapping[str, tuple[int, Pool]]
) -> list[tuple[int, Fault]]:
    """Find pools that would be cut anew while nodes have blocks of them."""
    changed = {
        name
        for name, (_, pool) in wanted.items()
        if name in before
        and (before[name].cidr, before[name].block_size) != (pool.cidr, pool.block_size)
    }
    if not changed:
        return []
    counts = dict.fromkeys(changed, 0)
    for stored in store.list(IP_BLOCK.plural)[0]:
        block = decode_block(stored)
        if block is not None and block.node and block.pool in counts:
            counts[block.pool] += 1
    problems = []
    for name, count in counts.items():
        index, pool = wanted[name]
        field = "cidr" if before[name].cidr != pool.cidr else "blockSize"
        was = before[name].cidr if field == "cidr" else before[name].block_size
        if count:
            message = f"cannot be changed from {was}: nodes have {count} blocks of the pool"
            problems.append((index, Fault(f"spec.{field}", message)))
    return problems


def _read_cidr(node: Node) -> IPNetwork | None:
    cidr = read_cidr(node)
    if cidr is None:
        return None
    if str(node.value).partition("/")[0] != str(cidr.network_address):
        exact = ipaddress.ip_interface(str(node.value)).ip
        if exact != cidr.network_address:
            node.wrong(f"is {shown(node.value)}, not the network {cidr}: bits after the length")
            return None
    if cidr.is_loopback or cidr.is_multicast or cidr.is_link_local or cidr.is_unspecified:
        node.wrong(f"is {cidr}, not a range that pods can have")
        return None
    return cidr


def _read_block_size(node: Node, cidr: IPNetwork | None) -> int:
    if cidr is None:
        return node.integer(20, 126) or 26
    low, high = BLOCK_SIZES[cidr.version]
    size = node.integer(low, high)
    if size is None:
        size = max(DEFAULT_BLOCK_SIZE[cidr.version], min(cidr.prefixlen, high))
    if size < cidr.prefixlen:
        node.wrong(f"is {size}: larger than the pool itself ({cidr})")
    return size


def _read_selector(node: Node) -> Selector:
    if not node.present or not node.expect_object(("matchLabels", "matchExpressions")):
        return ()
    requirements = [
        Requirement(key, "In", (value,))
        for key, value in sorted(read_label_map(node.child("matchLabels")).items())
    ]
    for item in node.child("matchExpressions").items():
        read = read_expression(item)
        if read is not None:
            requirements.append(Requirement(read[0], str(read[1]), read[2]))
    return tuple(requirements)


def _read_reserved(node: Node, cidr: IPNetwork | None) -> tuple[AddressRange, ...]:
    items = node.items()
    if len(items) > RESERVED_MAX:
        node.wrong(f"has {len(items)} ranges, more than {RESERVED_MAX}")
        return ()
    ranges = [_read_range(item) for item in items]
    for item, range_ in zip(items, ranges, strict=True):
        if range_ is None or cidr is None:
            continue
        same = range_.first.version == cidr.version
        if not same or range_.first not in cidr or range_.last not in cidr:
            item.wrong(f"is {range_}, which is not in the pool ({cidr})")
    return tuple(range_ for range_ in ranges if range_ is not None)


def _read_range(node: Node) -> AddressRange | None:
    """Read `CIDR`, `ADDRESS` or `ADDRESS-ADDRESS`."""
    text = node.text()
    first, dash, last = text.partition("-")
    if not dash:
        network = read_cidr(node, bare_address=True)
        if network is None:
            return None
        return AddressRange(network.network_address, network.broadcast_address)
    ends = [read_address(end.strip()) for end in (first, last)]
    if ends[0] is None or ends[1] is None or ends[0].version != ends[1].version:
        node.wrong(f"is {shown(text)}, not a range (address, address-address or CIDR)")
        return None
    if int(ends[0]) > int(ends[1]):
        node.wrong(f"is {shown(text)}: it ends before it begins")
        return None
    return AddressRange(ends[0], ends[1])
