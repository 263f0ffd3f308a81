"""How another node is reached from this one: the address, the way of each family, and the room on it.

Used by `control.cluster.planner`, once for each node of a plan. Pure. Invariant: a way is given only where a packet of
the smallest size that its family requires gets through. Where there is no way, the reason names both nodes.
"""

import functools
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from podwire.control.cluster.facts import tunnel_mac
from podwire.control.cluster.ownership import Outcome, Problem, claimed_ranges
from podwire.model.cluster import (
    TUNNEL_OVERHEAD_IPV4_BYTES,
    TUNNEL_OVERHEAD_IPV6_BYTES,
    NodeFacts,
    Peer,
    Prefix,
    TunnelMode,
    Underlay,
    Way,
)
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.ids import IdentityId

LEAST_MTU_BYTES: Final[Mapping[int, int]] = {4: 576, 6: 1280}
"""What every link must carry: RFC 791 (what hosts must accept), RFC 8200."""


class Routing:
    """How pods of other nodes are reached: values of the setting `routing`."""

    OVERLAY: Final = "overlay"
    NATIVE: Final = "native"
    AUTO: Final = "auto"


class ClusterSettings(msgspec.Struct, frozen=True):
    """What this node's configuration says of the cluster."""

    routing: str = Routing.AUTO
    cluster_cidrs: tuple[IPNetwork, ...] = ()


class Reach(msgspec.Struct, frozen=True):
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


class Context(msgspec.Struct, frozen=True):
    """What the way to every node depends on."""

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


def overhead(outer: IPAddress) -> int:
    """Give how many bytes of a packet the tunnel takes."""
    return TUNNEL_OVERHEAD_IPV4_BYTES if outer.version == 4 else TUNNEL_OVERHEAD_IPV6_BYTES


@functools.lru_cache(maxsize=1 << 18)
def single(address: IPAddress) -> IPNetwork:
    """Give the network of one address. By number: by text, as ipaddress does it, takes ten times as long."""
    if address.version == 4:
        return ipaddress.IPv4Network(int(address))
    return ipaddress.IPv6Network(int(address))


def find_reach(
    context: Context, facts: NodeFacts, number: int, problems: set[Problem]
) -> Reach | None:
    """Find the way to a node; None when nothing that it says may be believed or used."""
    if not context.own.addresses:
        return None
    addresses = context.outcome.addresses[facts.name]
    outer = _choose_outer(context, addresses)
    ranges = tuple(context.outcome.ranges[facts.name])
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
            # Below it a family does not work at all (RFC 8200, section 5: every link must carry 1280 bytes). No route
            # is better than one that swallows large packets.
            if mtus[family] < LEAST_MTU_BYTES[family]:
                way, fault = None, _mtu_too_small(context.own, facts, family, mtus[family])
        if fault is not None:
            problems.add(fault)
        ways[family] = way
    used = {way for way in ways.values() if way is not None}
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
        address
        for address in facts.tunnel_addresses
        if any(address in network for network in ranges)
    )
    return Reach(peer, ranges, ways, mtus, inner)


def _choose_outer(context: Context, addresses: Sequence[IPAddress]) -> IPAddress | None:
    """The first of this node's families that the other has too; one fixed-VNI device has one family only."""
    own = context.own
    families = [address.version for address in own.addresses]
    if own.tunnel_mode is TunnelMode.CLASSIC and context.has_tunnel:
        # A VXLAN device with a fixed VNI sends from one local address, so its outer packets are of one family.
        families = families[:1]
    for family in families:
        for address in addresses:
            if address.version == family:
                return address
    return None


def _choose_way(
    context: Context, facts: NodeFacts, family: int, outer: IPAddress
) -> tuple[Way | None, Problem | None]:
    routing = context.settings.routing
    if routing != Routing.OVERLAY and next_hop(context, facts.name, family) is not None:
        return Way.NATIVE, None
    if routing == Routing.NATIVE:
        return None, Problem(
            tuple(sorted((context.own.name, facts.name))),
            f"IPv{family} pods of node {facts.name} are not reached natively:"
            f" no address of it ({list_addresses(facts)}) is in a subnet of node {context.own.name};"
            " use routing = auto, or make routers know its ranges",
        )
    return _check_tunnel(context, facts, outer)


def next_hop(context: Context, name: str, family: int) -> IPAddress | None:
    """Give the node's address of that family if it needs no router."""
    for address in context.outcome.addresses[name]:
        if address.version == family and any(
            address in subnet for subnet in context.underlay.connected
        ):
            return address
    return None


def _check_tunnel(
    context: Context, facts: NodeFacts, outer: IPAddress
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
            fault = "a classic tunnel needs its MAC, which it does not publish"
        elif facts.tunnel_mac in context.twins and facts.tunnel_mac != tunnel_mac(facts.name):
            # A node that repeats another's MAC does not take the way to it away: the other's MAC follows from its name.
            fault = f"another node has its tunnel MAC {facts.tunnel_mac}"
    if not fault:
        return Way.TUNNEL, None
    return None, Problem(
        tuple(sorted((own.name, facts.name))),
        f"node {facts.name} ({outer}) is not reached by a tunnel: {fault}",
    )


def _mtu_towards(context: Context, facts: NodeFacts, way: Way, outer: IPAddress) -> int:
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
        f"node {facts.name} ({list_addresses(facts)}) has no underlay address that"
        f" node {own.name} ({list_addresses(own)}) could send to",
    )


def list_addresses(facts: NodeFacts) -> str:
    return ", ".join(map(str, facts.addresses)) or "none"
