"""From what nodes say of themselves to what this node's kernel shall hold because of them.

Called by `agent.cluster_duty` with every change of a node. Pure: everything comes in, a new plan goes out.
Invariants: the plan does not depend on the order of the nodes; a node that goes takes only its own rows with it; a
node's number is never that of another name; nothing that two nodes claim in the same epoch is sent to either.
"""

import functools
import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from podwire.control.cluster.claims import Outcome, Problem, claimed_ranges, settle
from podwire.model.cluster import (
    TUNNEL_OVERHEAD_IPV4_BYTES,
    TUNNEL_OVERHEAD_IPV6_BYTES,
    ClusterPlan,
    HostRoute,
    IPAddress,
    IPNetwork,
    NodeFacts,
    Peer,
    Prefix,
    TunnelMode,
    TunnelPlan,
    Underlay,
    Way,
)
from podwire.model.identity import Reserved
from podwire.model.ids import IdentityId

FAMILIES: Final = (4, 6)
LEAST_MTU_BYTES: Final[Mapping[int, int]] = {4: 576, 6: 1280}
"""What every link must carry: RFC 791 (what hosts must accept), RFC 8200."""
FORGOTTEN_KEPT: Final = 1024
"""Numbers of so many nodes that are gone are kept (and as many as there are nodes): they may come back."""
UNMANAGED: Final = Prefix(IdentityId(Reserved.UNMANAGED), 0, None)
"""An address of the cluster that no node has, or that several say they have."""
REMOTE_NODE: Final = IdentityId(Reserved.REMOTE_NODE)


class Routing:
    """How pods of other nodes are reached: values of the setting `routing`."""

    OVERLAY: Final = "overlay"
    NATIVE: Final = "native"
    AUTO: Final = "auto"


@dataclass(frozen=True)
class ClusterSettings:
    """What this node's configuration says of the cluster."""

    routing: str = Routing.AUTO
    cluster_cidrs: tuple[IPNetwork, ...] = ()


@dataclass(frozen=True)
class NodeNumbers:
    """This node's numbers of the others."""

    of: Mapping[str, int] = field(default_factory=dict)
    next: int = 1

    def extend(self, names: Iterable[str]) -> "NodeNumbers":
        """Give every name a number; names of nodes that are gone keep theirs until there are too many of them."""
        wanted = sorted(names)
        numbers = dict(self.of)
        if len(numbers) > 2 * len(wanted) + FORGOTTEN_KEPT:
            numbers = {name: self.of[name] for name in wanted if name in self.of}
        following = self.next
        for name in wanted:
            if name not in numbers:
                numbers[name], following = following, following + 1
        return (
            self
            if following == self.next and len(numbers) == len(self.of)
            else NodeNumbers(numbers, following)
        )


@dataclass(frozen=True)
class Reach:
    """Another node, and how its pods are reached from here."""

    peer: Peer
    ranges: tuple[IPNetwork, ...]
    """Its ranges that stand."""
    ways: Mapping[int, Way | None]
    """By family of the pods; None: by the stack's own routes, if there are any."""
    mtus: Mapping[int, int]
    tunnel_addresses: tuple[IPAddress, ...] = ()
    """Those in its ranges."""

    def prefix(self, family: int, identity: IdentityId, *, is_node: bool = False) -> Prefix:
        """Give the row for addresses of that node."""
        way = self.ways.get(family)
        mtu = self.mtus.get(family, 0) if way else 0
        return Prefix(identity, self.peer.number, way, mtu, is_node)


@dataclass(frozen=True)
class Planned:
    """A plan without the rows of single pods, and what was found on the way."""

    plan: ClusterPlan
    problems: tuple[Problem, ...]
    numbers: NodeNumbers
    reaches: Mapping[str, Reach]
    """By name: nodes whose pods' identities may be believed."""


@dataclass(frozen=True)
class _Context:
    own: NodeFacts
    underlay: Underlay
    settings: ClusterSettings
    outcome: Outcome
    twins: frozenset[str]
    """Tunnel MACs that several nodes have."""
    has_tunnel: bool

    @property
    def families(self) -> frozenset[int]:
        """Of this node's own pods."""
        return frozenset(network.version for network, _ in claimed_ranges(self.own))


def plan_cluster(
    own: NodeFacts,
    underlay: Underlay,
    peers: Iterable[NodeFacts],
    settings: ClusterSettings,
    numbers: NodeNumbers,
) -> Planned:
    """Compute the plan. `peers` are all other nodes, each name once; `numbers` what the last plan gave."""
    others = sorted(peers, key=lambda one: one.name)
    numbers = numbers.extend(one.name for one in others)
    outcome = settle(own, others)
    tunnel, found = _plan_tunnel(own, settings, bool(others))
    problems = outcome.problems | found
    twins = _find_twins(own, others, problems)
    context = _Context(own, underlay, settings, outcome, twins, tunnel is not None)
    if others and not own.addresses:
        problems.add(_no_underlay(own, len(others)))
    reaches: dict[str, Reach] = {}
    for one in others:
        reach = _reach(context, one, numbers.of[one.name], problems)
        if reach is not None:
            reaches[one.name] = reach
    plan = ClusterPlan(
        tunnel=tunnel,
        peers=tuple(reach.peer for reach in reaches.values()),
        prefixes=_compute_prefixes(context, others, reaches),
        routes=tuple(
            route for reach in reaches.values() for route in _compute_routes(context, reach)
        ),
        pod_mtu_bytes=_compute_pod_mtu(context, tunnel, reaches.values()),
        inside=_compute_inside(context, others),
    )
    return Planned(plan, tuple(sorted(problems)), numbers, reaches)


def route_to_pod(own: NodeFacts, reach: Reach, address: IPAddress) -> HostRoute | None:
    """Give the route to a single pod whose address is in none of its node's ranges; None where none is needed."""
    if any(address in network for network in reach.ranges):
        return None
    return _route(own, reach, single(address))


def overhead(outer: IPAddress) -> int:
    """Give how many bytes of a packet the tunnel takes."""
    return TUNNEL_OVERHEAD_IPV4_BYTES if outer.version == 4 else TUNNEL_OVERHEAD_IPV6_BYTES


@functools.lru_cache(maxsize=1 << 18)
def single(address: IPAddress) -> IPNetwork:
    """Give the network of one address. By number: by text, as ipaddress does it, takes ten times as long."""
    if address.version == 4:
        return ipaddress.IPv4Network(int(address))
    return ipaddress.IPv6Network(int(address))


def _plan_tunnel(
    own: NodeFacts, settings: ClusterSettings, has_peers: bool
) -> tuple[TunnelPlan | None, set[Problem]]:
    """The device is there as soon as others could want to send through it; with `auto` nobody does without peers."""
    if settings.routing == Routing.NATIVE or not own.addresses:
        return None, set()
    if settings.routing == Routing.AUTO and not has_peers:
        return None, set()
    mtu = own.underlay_mtu_bytes - overhead(own.addresses[0])
    problems = {
        Problem(
            (own.name,),
            f"node {own.name} has an underlay MTU of {own.underlay_mtu_bytes}: tunnels to other nodes leave {mtu},"
            f" and IPv{family} needs {LEAST_MTU_BYTES[family]}",
        )
        for family in sorted({network.version for network, _ in claimed_ranges(own)})
        if mtu < LEAST_MTU_BYTES[family]
    }
    if mtu < LEAST_MTU_BYTES[4]:
        return None, problems
    addresses = tuple(one for one in own.tunnel_addresses if mtu >= LEAST_MTU_BYTES[one.version])
    return (
        TunnelPlan(
            mode=own.tunnel_mode,
            port=own.tunnel_port,
            mac=own.tunnel_mac,
            mtu_bytes=mtu,
            addresses=addresses,
            local=own.addresses[0],
        ),
        problems,
    )


def _find_twins(
    own: NodeFacts, peers: Sequence[NodeFacts], problems: set[Problem]
) -> frozenset[str]:
    counts = Counter(one.tunnel_mac for one in (own, *peers) if one.tunnel_mac)
    twins = frozenset(mac for mac, count in counts.items() if count > 1)
    for mac in twins:
        names = tuple(sorted(one.name for one in (own, *peers) if one.tunnel_mac == mac))
        problems.add(
            Problem(
                names,
                f"nodes {', '.join(names)} have the same tunnel MAC {mac}: what their hosts send each other is lost",
            )
        )
    return twins


def _reach(
    context: _Context, facts: NodeFacts, number: int, problems: set[Problem]
) -> Reach | None:
    """Find the way to a node; None when nothing that it says may be believed or used."""
    if not context.own.addresses:
        return None
    addresses = context.outcome.addresses[facts.name]
    outer = _choose_outer(context, addresses)
    ranges = tuple(context.outcome.ranges[facts.name])
    ranges = tuple(one for one in ranges if not _swallows(context, facts, one, problems))
    if outer is None:
        if facts.addresses and not addresses:
            return None  # named already: it is contested
        problems.add(_no_common_family(context.own, facts))
        return None
    ways: dict[int, Way | None] = {}
    mtus: dict[int, int] = {}
    for family in {network.version for network in ranges}:
        way, fault = _choose_way(context, facts, family, outer)
        if way is not None:
            mtus[family] = _mtu_towards(context, facts, way, outer)
            if mtus[family] < LEAST_MTU_BYTES[family]:
                way, fault = None, _mtu_too_small(context.own, facts, family, mtus[family])
        if fault is not None:
            problems.add(fault)
        ways[family] = way
    used = {one for one in ways.values() if one is not None}
    peer = Peer(
        number=number,
        name=facts.name,
        outer=outer,
        mtu_bytes=min(
            (mtus[family] for family, way in ways.items() if way is not None),
            default=min(context.own.underlay_mtu_bytes, facts.underlay_mtu_bytes),
        ),
        way=Way.NATIVE if used == {Way.NATIVE} else Way.TUNNEL,
        mode=facts.tunnel_mode,
        mac=facts.tunnel_mac,
        addresses=tuple(addresses),
    )
    inner = tuple(
        one for one in facts.tunnel_addresses if any(one in network for network in ranges)
    )
    return Reach(peer, ranges, ways, mtus, inner)


def _choose_outer(context: _Context, addresses: Sequence[IPAddress]) -> IPAddress | None:
    """The first of this node's families that the other has too; one fixed-VNI device has one family only."""
    own = context.own
    families = [one.version for one in own.addresses]
    if own.tunnel_mode is TunnelMode.CLASSIC and context.has_tunnel:
        families = families[:1]
    for family in families:
        for address in addresses:
            if address.version == family:
                return address
    return None


def _swallows(
    context: _Context, facts: NodeFacts, network: IPNetwork, problems: set[Problem]
) -> bool:
    """Tell whether a pod range has an address that tunnel packets go from or to: they would go in circles."""
    for name, addresses in (
        (context.own.name, context.own.addresses),
        (facts.name, facts.addresses),
    ):
        for address in addresses:
            if address in network:
                problems.add(
                    Problem(
                        tuple(sorted({facts.name, name})),
                        f"pod range {network} of node {facts.name} has the address {address} of node {name}:"
                        " it is not reached",
                    )
                )
                return True
    return False


def _choose_way(
    context: _Context, facts: NodeFacts, family: int, outer: IPAddress
) -> tuple[Way | None, Problem | None]:
    routing = context.settings.routing
    if routing != Routing.OVERLAY and _next_hop(context, facts.name, family) is not None:
        return Way.NATIVE, None
    if routing == Routing.NATIVE:
        return None, Problem(
            tuple(sorted((context.own.name, facts.name))),
            f"IPv{family} pods of node {facts.name} are not reached natively: no address of it ({_listed(facts)})"
            f" is in a subnet of node {context.own.name}; use routing = auto, or have routers know its ranges",
        )
    return _check_tunnel(context, facts, outer)


def _next_hop(context: _Context, name: str, family: int) -> IPAddress | None:
    """Give the node's address of that family if it needs no router."""
    for address in context.outcome.addresses[name]:
        if address.version == family and any(
            address in subnet for subnet in context.underlay.connected
        ):
            return address
    return None


def _check_tunnel(
    context: _Context, facts: NodeFacts, outer: IPAddress
) -> tuple[Way | None, Problem | None]:
    own = context.own
    fault = ""
    if not context.has_tunnel:
        fault = f"node {own.name} cannot have a tunnel"
    elif facts.tunnel_port != own.tunnel_port:
        fault = (
            f"it listens on port {facts.tunnel_port}, node {own.name} uses port {own.tunnel_port}"
        )
    elif TunnelMode.CLASSIC in (own.tunnel_mode, facts.tunnel_mode):
        if not facts.tunnel_mac:
            fault = "a classic tunnel needs its MAC, which it does not say"
        elif facts.tunnel_mac in context.twins:
            fault = f"another node has its tunnel MAC {facts.tunnel_mac}"
    if not fault:
        return Way.TUNNEL, None
    return None, Problem(
        tuple(sorted((own.name, facts.name))),
        f"node {facts.name} ({outer}) is not reached by a tunnel: {fault}",
    )


def _mtu_towards(context: _Context, facts: NodeFacts, way: Way, outer: IPAddress) -> int:
    link = min(context.own.underlay_mtu_bytes, facts.underlay_mtu_bytes)
    return link if way is Way.NATIVE else link - overhead(outer)


def _mtu_too_small(own: NodeFacts, facts: NodeFacts, family: int, mtu: int) -> Problem:
    return Problem(
        tuple(sorted((own.name, facts.name))),
        f"IPv{family} pods of node {facts.name} (underlay MTU {facts.underlay_mtu_bytes}) are not reached from node"
        f" {own.name} (underlay MTU {own.underlay_mtu_bytes}): packets of {mtu} bytes would be left,"
        f" IPv{family} needs {LEAST_MTU_BYTES[family]}",
    )


def _no_common_family(own: NodeFacts, facts: NodeFacts) -> Problem:
    return Problem(
        tuple(sorted((own.name, facts.name))),
        f"node {facts.name} ({_listed(facts)}) has no underlay address that node {own.name} ({_listed(own)})"
        " could send to",
    )


def _no_underlay(own: NodeFacts, count: int) -> Problem:
    return Problem(
        (own.name,),
        f"node {own.name} has no address that other nodes could send to: {count} other nodes are not reached;"
        " give it a default route, or set node_address",
    )


def _listed(facts: NodeFacts) -> str:
    return ", ".join(map(str, facts.addresses)) or "none"


def _compute_prefixes(
    context: _Context, peers: Sequence[NodeFacts], reaches: Mapping[str, Reach]
) -> dict[IPNetwork, Prefix]:
    prefixes: dict[IPNetwork, Prefix] = dict.fromkeys(context.settings.cluster_cidrs, UNMANAGED)
    mine = {single(one) for one in context.own.addresses}
    for network in _find_ownerless(context):
        prefixes[network] = UNMANAGED
    for facts in peers:
        reach = reaches.get(facts.name)
        ranges = context.outcome.ranges[facts.name] if reach is None else reach.ranges
        for network in ranges:
            prefixes[network] = (
                UNMANAGED if reach is None else reach.prefix(network.version, UNMANAGED.identity)
            )
    for facts in peers:
        reach = reaches.get(facts.name)
        number = 0 if reach is None else reach.peer.number  # it may send from there by the tunnel
        for address in context.outcome.addresses[facts.name]:
            prefixes[single(address)] = Prefix(REMOTE_NODE, number, None, is_node_address=True)
        if reach is not None:
            for address in reach.tunnel_addresses:
                row = reach.prefix(address.version, REMOTE_NODE, is_node=True)
                prefixes[single(address)] = row
    for network in mine:
        prefixes.pop(network, None)
    return prefixes


def _find_ownerless(context: _Context) -> list[IPNetwork]:
    """Give refused ranges that are in nobody's: a row for the others would be a hole in what its owner keeps."""
    kept = {network for ranges in context.outcome.ranges.values() for network in ranges}
    kept.update(network for network, _ in claimed_ranges(context.own))
    lengths = {(network.version, network.prefixlen) for network in kept}
    return [
        network
        for network in sorted(context.outcome.refused, key=_network_order)
        if not any(
            network.supernet(new_prefix=length) in kept
            for version, length in lengths
            if version == network.version and length <= network.prefixlen
        )
    ]


def _compute_routes(context: _Context, reach: Reach) -> Iterable[HostRoute]:
    for network in reach.ranges:
        route = _route(
            context.own, reach, network, _next_hop(context, reach.peer.name, network.version)
        )
        if route is not None and network.version in context.families:
            yield route


def _route(
    own: NodeFacts, reach: Reach, network: IPNetwork, next_hop: IPAddress | None = None
) -> HostRoute | None:
    family = network.version
    way = reach.ways.get(family)
    if way is None:
        return None
    if way is Way.NATIVE:
        source = _of_family(own.addresses, family)
        via = next_hop or _of_family(reach.peer.addresses, family)
    else:
        source = _of_family(own.tunnel_addresses, family)
        is_classic = own.tunnel_mode is TunnelMode.CLASSIC
        via = _of_family(reach.tunnel_addresses, family) if is_classic else None
    return HostRoute(network, way, via, source, reach.mtus[family], reach.peer.number)


def _of_family(addresses: Iterable[IPAddress], family: int) -> IPAddress | None:
    return next((one for one in addresses if one.version == family), None)


def _compute_pod_mtu(context: _Context, tunnel: TunnelPlan | None, reaches: Iterable[Reach]) -> int:
    """The least of all ways; what no pod of this node could live with is left to path-MTU errors."""
    sizes = [reach.mtus[family] for reach in reaches for family, way in reach.ways.items() if way]
    if tunnel is not None and context.settings.routing == Routing.OVERLAY:
        sizes.append(tunnel.mtu_bytes)
    least = max((LEAST_MTU_BYTES[family] for family in context.families), default=0)
    size = max(min(sizes, default=context.own.underlay_mtu_bytes), least)
    return size if size < context.own.underlay_mtu_bytes else 0


def _compute_inside(context: _Context, peers: Sequence[NodeFacts]) -> tuple[IPNetwork, ...]:
    """Every node's ranges and addresses, also where they are contested; cluster CIDRs stand for what they hold."""
    cluster = context.settings.cluster_cidrs
    found: set[IPNetwork] = set(cluster)
    for facts in peers:
        alone = (single(one) for one in facts.addresses)
        for network in (*(network for network, _ in claimed_ranges(facts)), *alone):
            if not any(_within(network, outer) for outer in cluster):
                found.add(network)
    return tuple(sorted(found, key=_network_order))


def _within(inner: IPNetwork, outer: IPNetwork) -> bool:
    return inner.version == outer.version and (
        outer.prefixlen <= inner.prefixlen and inner.network_address in outer
    )


def _network_order(network: IPNetwork) -> tuple[int, int, int]:
    return network.version, int(network.network_address), network.prefixlen
