"""From what nodes publish to what this node's kernel should hold because of them.

`agent.duties.cluster.duty` calls it at every change of a node. Pure: everything comes in, a new plan goes out.
Invariants: the plan does not depend on the order of the nodes. A node that goes takes only its own rows with it, and
claims that its claims had defeated may stand again. A node's number is never given to another name. Nothing that two
nodes claim is sent to both.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from podwire.control.cluster.belief import Belief, Grants, believe_nodes
from podwire.control.cluster.ownership import (
    Problem,
    claimed_ranges,
    describe_lost,
    find_cidr_owners,
    settle,
)
from podwire.control.cluster.reach import (
    LEAST_MTU_BYTES,
    ClusterSettings,
    Context,
    Reach,
    Routing,
    find_reach,
    next_hop,
    overhead,
    single,
)
from podwire.model.cluster import (
    ClusterPlan,
    HostRoute,
    NodeFacts,
    Prefix,
    TunnelMode,
    TunnelPlan,
    Underlay,
    Way,
)
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.identity import Reserved
from podwire.model.ids import IdentityId
from podwire.model.networks import NetworkIndex, is_within

FORGOTTEN_KEPT: Final = 1024
"""Numbers of so many nodes that are gone are kept (and as many as there are nodes): they may come back."""
UNMANAGED: Final = Prefix(IdentityId(Reserved.UNMANAGED), 0, None)
"""An address of the cluster that no node has, or that several say they have."""
REMOTE_NODE: Final = IdentityId(Reserved.REMOTE_NODE)


@dataclass(frozen=True)
class NodeNumbers:
    """This node's numbers of the others."""

    of: Mapping[str, int] = field(default_factory=dict)
    next: int = 1

    def extend(self, names: Iterable[str]) -> "NodeNumbers":
        """Give every name a number; names of nodes that are gone keep theirs until there are too many of them."""
        wanted = sorted(names)
        numbers = dict(self.of)
        # The numbers of nodes that are gone are kept, because they may come back. Without a bound, nodes that come
        # and go under new names would fill memory.
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
class Planned:
    """A plan without the rows of single pods, and what was found on the way."""

    plan: ClusterPlan
    problems: tuple[Problem, ...]
    numbers: NodeNumbers
    reaches: Mapping[str, Reach]
    """By name: nodes whose pods' identities may be believed."""
    facts: Mapping[str, NodeFacts]
    """By name: what is believed of what the other nodes say of themselves."""
    belief: Belief
    """By which it was decided."""
    cidr_owners: NetworkIndex[str]
    """The owner of each valid range; blocks are lent, so they are not here."""
    lost: str = ""
    """What of this node is another's; "" = nothing. Blocks follow the store by themselves."""
    lost_ranges: str = ""
    """The part of it that is about ranges of pods."""
    contested: frozenset[str] = frozenset()
    """Nodes that claim a range that another one claims, too."""


def plan_cluster(
    own: NodeFacts,
    underlay: Underlay,
    peers: Iterable[NodeFacts],
    settings: ClusterSettings,
    numbers: NodeNumbers,
    grants: Grants | None = None,
) -> Planned:
    """Compute the plan. `peers` are all other nodes, each name once; `numbers` what the last plan gave."""
    # By name, because the store lists nodes in any order and the plan must not depend on it.
    others = sorted(peers, key=lambda peer: peer.name)
    numbers = numbers.extend(facts.name for facts in others)
    belief, believed, problems = believe_nodes(
        _make_belief(own, underlay, settings, grants or Grants()), others
    )
    outcome = settle(own, believed)
    tunnel, found = _plan_tunnel(own, settings, bool(others))
    problems |= outcome.problems | found
    twins = _find_twins(own, others, problems)
    context = Context(own, underlay, settings, outcome, twins, tunnel is not None)
    if others and not own.addresses:
        problems.add(_no_underlay(own, len(others)))
    reaches: dict[str, Reach] = {}
    for facts in others:
        reach = find_reach(context, facts, numbers.of[facts.name], problems)
        if reach is not None:
            reaches[facts.name] = reach
    plan = ClusterPlan(
        tunnel=tunnel,
        peers=tuple(reach.peer for reach in reaches.values()),
        prefixes=_compute_prefixes(context, others, reaches),
        routes=tuple(
            route for reach in reaches.values() for route in _compute_routes(context, reach)
        ),
        pod_mtu_bytes=_compute_pod_mtu(context, tunnel, reaches.values()),
        inside=_compute_inside(context, believed),
    )
    return Planned(
        plan,
        tuple(sorted(problems)),
        numbers,
        reaches,
        {facts.name: facts for facts in believed},
        belief,
        find_cidr_owners(believed, outcome),
        describe_lost(outcome),
        describe_lost(outcome, only_ranges=True),
        frozenset(outcome.contested),
    )


def route_to_pod(own: NodeFacts, reach: Reach, address: IPAddress) -> HostRoute | None:
    """Give the route to a single pod whose address is in none of its node's ranges; None where none is needed."""
    if any(address in network for network in reach.ranges):
        return None
    return _route(own, reach, single(address))


def _make_belief(
    own: NodeFacts, underlay: Underlay, settings: ClusterSettings, grants: Grants
) -> Belief:
    around = replace(
        underlay.around,
        own=underlay.around.own | {*own.addresses},
        subnets=tuple(dict.fromkeys((*underlay.around.subnets, *underlay.connected))),
    )
    own_ranges = tuple(network for network, _ in claimed_ranges(own))
    return Belief(own.name, settings.cluster_cidrs, own.addresses, own_ranges, around, grants)


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
    addresses = tuple(
        address for address in own.tunnel_addresses if mtu >= LEAST_MTU_BYTES[address.version]
    )
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
    counts = Counter(facts.tunnel_mac for facts in (own, *peers) if facts.tunnel_mac)
    twins = frozenset(mac for mac, count in counts.items() if count > 1)
    for mac in twins:
        names = tuple(sorted(facts.name for facts in (own, *peers) if facts.tunnel_mac == mac))
        problems.add(
            Problem(
                names,
                f"nodes {', '.join(names)} have the same tunnel MAC {mac}: packets between their hosts are lost",
            )
        )
    return twins


def _no_underlay(own: NodeFacts, count: int) -> Problem:
    return Problem(
        (own.name,),
        f"node {own.name} has no address that other nodes could send to: {count} other nodes are not reached;"
        " give it a default route, or set node_address",
    )


def _compute_prefixes(
    context: Context, peers: Sequence[NodeFacts], reaches: Mapping[str, Reach]
) -> dict[IPNetwork, Prefix]:
    prefixes: dict[IPNetwork, Prefix] = dict.fromkeys(context.settings.cluster_cidrs, UNMANAGED)
    mine = {single(address) for address in context.own.addresses}
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
    # Local routes say what this node's own addresses are. A row here would make them another node's.
    for network in mine:
        prefixes.pop(network, None)
    return prefixes


def _find_ownerless(context: Context) -> list[IPNetwork]:
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


def _compute_routes(context: Context, reach: Reach) -> Iterable[HostRoute]:
    for network in reach.ranges:
        route = _route(
            context.own, reach, network, next_hop(context, reach.peer.name, network.version)
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
        # A classic device finds the outer address by the neighbour of the next hop. A flow-based one is told it by
        # the program.
        via = _of_family(reach.tunnel_addresses, family) if is_classic else None
    return HostRoute(network, way, via, source, reach.mtus[family], reach.peer.number)


def _of_family(addresses: Iterable[IPAddress], family: int) -> IPAddress | None:
    return next((address for address in addresses if address.version == family), None)


def _compute_pod_mtu(context: Context, tunnel: TunnelPlan | None, reaches: Iterable[Reach]) -> int:
    """The least of all ways; what no pod of this node could live with is left to path-MTU errors."""
    sizes = [reach.mtus[family] for reach in reaches for family, way in reach.ways.items() if way]
    if tunnel is not None and context.settings.routing == Routing.OVERLAY:
        sizes.append(tunnel.mtu_bytes)
    least = max((LEAST_MTU_BYTES[family] for family in context.families), default=0)
    size = max(min(sizes, default=context.own.underlay_mtu_bytes), least)
    return size if size < context.own.underlay_mtu_bytes else 0


def _compute_inside(context: Context, peers: Sequence[NodeFacts]) -> tuple[IPNetwork, ...]:
    """Every node's ranges and addresses, also where they are contested; cluster CIDRs stand for what they hold."""
    cluster = context.settings.cluster_cidrs
    inside: set[IPNetwork] = set(cluster)
    for facts in peers:
        alone = (single(address) for address in facts.addresses)
        for network in (*(network for network, _ in claimed_ranges(facts)), *alone):
            if not any(is_within(network, outer) for outer in cluster):
                inside.add(network)
    return tuple(sorted(inside, key=_network_order))


def _network_order(network: IPNetwork) -> tuple[int, int, int]:
    return network.version, int(network.network_address), network.prefixlen
