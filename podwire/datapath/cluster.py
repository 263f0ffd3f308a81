"""Other nodes in this one's kernel: tunnel device, peers, ipcache, routes, masquerade, as a `ClusterPlan` wants them.

Made by `datapath.node`, called under the node's turn, any number of times: each pass looks at the kernel, repairs what
differs and reports it. Never decides which other nodes there are. Invariant: whatever a row names exists already (the
order is device, nodes, prefixes, routes), and removals happen in the opposite order. Until the first plan of this
agent, what its predecessor knew of other nodes stays in force.
"""

import ipaddress
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from podwire.datapath import abi, routes
from podwire.datapath import maps as tables
from podwire.datapath.host import detect_underlay, list_host_networks, list_usable_addresses
from podwire.datapath.maps import NodeMaps, RowChanges, Rows
from podwire.datapath.masquerade import Masquerade
from podwire.datapath.native import (
    NetdevProgram,
    OwnHooks,
    ensure_attached,
    find_obstacle,
    find_program,
    list_attached,
    remove_attached,
)
from podwire.datapath.node_maps import (
    Hops,
    is_about_other_node,
    list_direct,
    list_node_numbers,
    list_ranges,
    node_number_rows,
    node_rows,
    prefix_rows,
)
from podwire.datapath.plan import NodePlan, compute_ipcache, compute_masquerade, list_own_addresses
from podwire.datapath.tunnel import (
    GATEWAYS,
    TunnelPrograms,
    TunnelSide,
    ensure_tunnel,
    find_tunnel,
    list_own_tunnels,
    name_differences,
    remove_tunnel,
    require_free,
)
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl.route import (
    IPV6_DEFAULT_METRIC,
    InterfaceAddress,
    Route,
    host_network,
)
from podwire.model.cluster import (
    ClusterPlan,
    HostRoute,
    Prefix,
    Surroundings,
    TunnelMode,
    TunnelPlan,
    Underlay,
    Way,
)
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import ForeignObject, KernelFailure, StorageFailure, Unavailable
from podwire.model.ids import ROUTE_PROTOCOL

_log = logging.getLogger(__name__)

_CLASSIC_GATEWAYS_IPV6: Final = ipaddress.IPv6Address("fe80::7077:0:0")
"""Plus a peer's number: its next hop on a classic device."""


@dataclass
class _InForce:
    """What is in force, so that what the node itself changes does not forget it."""

    plan: ClusterPlan = field(default_factory=ClusterPlan)
    rows: Rows = field(default_factory=dict)
    """Of the ipcache, about other nodes; changes of single ones included."""
    inside: tuple[IPNetwork, ...] = ()
    """Where packets of this node's pods keep their addresses."""
    pod_networks: tuple[IPNetwork, ...] = ()
    """The part of `inside` that no address of a node is in."""
    outer: tuple[IPAddress, ...] = ()
    """Where tunnels of other nodes may end."""
    port: int = 0
    mtu_bytes: int = 0
    """Of pod devices, 0 = nothing is known against the underlay's."""
    direct: frozenset[tuple[int, int]] = frozenset()
    """Which nodes' pods are reached past the stack, by IP version."""

    def tunnel_peers(self) -> tuple[IPNetwork, ...] | None:
        """Give the senders that a classic device accepts, None for a flow-based one: its program judges them."""
        if _own_mode(self.plan) is TunnelMode.FLOW:
            return None
        return tuple(host_network(address) for address in _outer_addresses(self.plan))


class OtherNodes:
    """What the kernel holds because of other nodes."""

    def __init__(
        self,
        netlink: NetlinkSocket,
        maps: NodeMaps,
        programs: TunnelPrograms,
        netdev: NetdevProgram,
        masquerade: Masquerade,
        hooks: OwnHooks,
    ) -> None:
        self._netlink = netlink
        self._maps = maps
        self._programs = programs
        self._netdev = netdev
        self._masquerade = masquerade
        self._hooks = hooks
        self._routes = routes.RouteReader(netlink)
        self._known = _InForce()
        self._fresh = False
        """Whether `_known` is exactly what its plan says."""
        self._weak: Rows = {}
        self._strong: Rows = {}
        self._outer: Sequence[IPAddress] = ()
        """Addresses of this host to which tunnels of others may lead."""
        self._attached: set[int] = set()
        """Devices that may have the program for native packets by this process."""
        self._obstacle = ""
        """Why native packets have to go through the stack, "" = they do not."""

    @property
    def pod_mtu_bytes(self) -> int:
        """Give the MTU of new pod devices that the way to other nodes asks for, 0 = none."""
        return self._known.mtu_bytes

    def recall(self, own: NodePlan) -> None:
        """Take over what an earlier agent left in the kernel; it stays in force until the first plan."""
        # The store may be away for hours: until the first plan the ipcache itself says what other nodes have.
        tunnel = find_tunnel(self._netlink, own.node_name)
        rows = {key: row for key, row in self._maps.pw_ipcache.items() if is_about_other_node(row)}
        known = _InForce(
            rows=rows,
            inside=tuple(list_ranges(rows)),
            pod_networks=tuple(list_ranges(rows, [abi.Identity.UNMANAGED])),
            outer=tuple(address for address, _ in list_node_numbers(self._maps)),
            direct=frozenset(list_direct(rows)),
        )
        index = 0
        if tunnel is not None:
            known.port, known.mtu_bytes = tunnel.settings.port, tunnel.link.mtu
            index = tunnel.link.index if tunnel.settings.flow_based else 0
        self._known = known
        native = tables.read_settings(self._maps).native_ifindex
        # Without the program what comes in takes the stack, so what goes out has to as well: a node's stack sees both
        # directions of a flow or neither.
        if native and not find_program(self._netlink, native):
            native = 0
        tables.write_settings(self._maps, tunnel_ifindex=index, native_ifindex=native)
        self._hooks.compare(self._netlink)
        attached = {*list_attached(self._netlink), *self._hooks.devices}
        # An agent that was killed between attaching and switching leaves a program that nothing refers to.
        remove_attached(self._netlink, attached - {native}, self._hooks)

    def apply_own(self, own: NodePlan) -> None:
        """Put this node's own rows into force, beside those of the others."""
        tables.write_settings(
            self._maps, conntrack_quota=own.own_conntrack_quota, tunnel_port=self._port(own)
        )
        # Missing rows are written before surplus ones go, so that no address is without a row that it had and is to
        # have.
        tables.remove_surplus(self._maps.pw_ipcache, self._put_ipcache(own))
        routes.ensure_block_routes(self._netlink, own.node_cidrs)
        self._ensure_masquerade(own)

    def apply(self, own: NodePlan, plan: ClusterPlan) -> list[str]:
        """Make the kernel hold what `plan` says; name what differed.

        Raises ForeignObject: changing nothing where a device has the tunnel's port or name; after everything else
        was done, where routes of others lead to other nodes' pods. KernelFailure, after everything else was done, where
        the kernel takes no route to another node.
        """
        # Before anything is changed: a device of somebody else on the tunnel's port refuses the plan as a whole.
        differences, index = self._prepare_tunnel(own, plan)
        flow_index = index if _own_mode(plan) is TunnelMode.FLOW else 0
        native, hops = self._prepare_native(own, plan, differences)
        self._learn(plan, frozenset(hops))
        # A row of the ipcache names a node by number: the node's row has to be there first, and goes last.
        nodes = tables.put_missing(self._maps.pw_nodes, node_rows(plan.peers, hops))
        numbers = tables.put_missing(self._maps.pw_node_numbers, node_number_rows(plan.peers))
        # Whatever a row names exists already: a new device is in the settings before the prefixes, and one that goes
        # leaves them after those.
        if flow_index:
            differences += self._ensure_settings(own, flow_index)
        differences += self._switch_native(native)
        prefixes = self._put_ipcache(own)
        differences += self._ensure_masquerade(own)
        differences += routes.ensure_block_routes(self._netlink, own.node_cidrs)
        wanted = self._compute_routes(plan, index, own.node_address)
        changed = routes.ensure_node_routes(self._netlink, self._routes.read(), wanted)
        tables.remove_surplus(self._maps.pw_ipcache, prefixes)
        tables.remove_surplus(self._maps.pw_node_numbers, numbers)
        tables.remove_surplus(self._maps.pw_nodes, nodes)
        differences += self._ensure_settings(own, flow_index)
        if plan.tunnel is None:
            differences += remove_tunnel(self._netlink, own.node_name)
        differences += [
            *_name_rows("prefix {} in the ipcache", prefixes, tables.from_prefix_key),
            *_name_rows("address {} of another node", numbers, tables.from_mapped),
            *_name_rows("number {} of another node", nodes, tables.from_u32),
            *name_differences("route to {}", map(str, changed.put), map(str, changed.removed)),
        ]
        # Raised at the very end: neither a route of somebody else's nor one that the kernel refuses may keep all other
        # nodes from being reached, or what nodes had that are gone from being taken away.
        _refuse_foreign(changed.foreign, differences)
        if changed.failures:
            raise changed.failures[0]
        return differences

    def change_prefixes(
        self, put: Mapping[IPNetwork, Prefix], remove: Iterable[IPNetwork] = ()
    ) -> None:
        """Change single rows, `put` before `remove`; where one goes, this node's own row for the prefix returns."""
        rows = prefix_rows(put, _own_mode(self._known.plan), self._known.direct)
        gone = [key for network in remove if (key := tables.to_prefix_key(network)) not in rows]
        # What is in force is no longer what the plan says, so the next `apply` of the same plan must not take it as
        # done.
        self._fresh = False
        self._known.rows.update(rows)
        for key in gone:
            self._known.rows.pop(key, None)
        back = {key: self._weak[key] for key in gone if key in self._weak}
        # An address that this node has itself is never another node's, whatever is published (the node's own rows
        # win).
        changed = [(key, row) for key, row in (rows | back).items() if key not in self._strong]
        self._maps.pw_ipcache.update_batch(changed)
        self._maps.pw_ipcache.delete_batch(
            key for key in gone if key not in back and key not in self._strong
        )

    def _prepare_tunnel(self, own: NodePlan, plan: ClusterPlan) -> tuple[list[str], int]:
        if plan.tunnel is None:
            return [], 0
        require_free(self._netlink, plan.tunnel.port, own.node_name)
        side = _describe_tunnel(own.node_name, plan, plan.tunnel, self._programs)
        index, differences = ensure_tunnel(self._netlink, side)
        return differences, index

    def _prepare_native(
        self, own: NodePlan, plan: ClusterPlan, differences: list[str]
    ) -> tuple[int, Hops]:
        """Attach the program where native packets come in; gives the device and the next hops, none = by the stack."""
        hops: dict[tuple[int, int], IPAddress] = {
            (route.peer, route.destination.version): route.via
            for route in plan.routes
            if route.way is Way.NATIVE and route.via is not None
        }
        if not hops:
            return 0, {}
        index, obstacle = 0, ""
        try:
            index = detect_underlay(self._netlink, own.node_address).index
            obstacle = find_obstacle(self._netlink, index)
            if not obstacle:
                self._attached.add(index)
                differences += ensure_attached(self._netlink, index, self._netdev, self._hooks)
        except (Unavailable, KernelFailure, StorageFailure) as failure:
            obstacle = failure.message
        # Each pass finds the same obstacle again; only a change is news.
        if obstacle != self._obstacle:
            _log.info("way of native packets", extra={"cause": obstacle or "past the stack"})
        self._obstacle = obstacle
        return (0, {}) if obstacle else (index, hops)

    def _switch_native(self, index: int) -> list[str]:
        """Let the programs send past the stack by a device whose program is there, in the one moment for both ways."""
        before = tables.read_settings(self._maps).native_ifindex
        differences = []
        # One number in the settings turns both directions over: a flow must pass this node's stack both ways or
        # neither way.
        if before != index:
            tables.write_settings(self._maps, native_ifindex=index)
            differences = [f"device for native packets is index {before}, wanted {index}"]
        # Also one that a pass attached to and did not come so far as to use.
        surplus = (self._attached | self._hooks.devices | {before}) - {index, 0}
        differences += remove_attached(self._netlink, surplus, self._hooks)
        self._attached = {index} - {0}
        return differences

    def _learn(self, plan: ClusterPlan, direct: frozenset[tuple[int, int]]) -> None:
        if self._fresh and plan is self._known.plan and direct == self._known.direct:
            return
        self._known = _InForce(
            plan=plan,
            rows=prefix_rows(plan.prefixes, _own_mode(plan), direct),
            inside=tuple(plan.inside),
            pod_networks=_pod_networks(plan),
            outer=_outer_addresses(plan),
            port=0 if plan.tunnel is None else plan.tunnel.port,
            mtu_bytes=plan.pod_mtu_bytes,
            direct=direct,
        )
        self._fresh = True

    def _port(self, own: NodePlan) -> int:
        return self._known.port or own.tunnel_port

    def _ensure_settings(self, own: NodePlan, flow_index: int) -> list[str]:
        port = self._port(own)
        if tables.write_settings(self._maps, tunnel_port=port, tunnel_ifindex=flow_index):
            return ["tunnel device and port in the programs' settings were others"]
        return []

    def _put_ipcache(self, own: NodePlan) -> RowChanges:
        """Write the rows that are missing: this node's own rows take precedence over those of others."""
        # A tunnel device that is about to go takes its addresses with it: rows for them would be removed by the next
        # pass only.
        tunnels = {tunnel.link.index for tunnel in list_own_tunnels(self._netlink, own.node_name)}
        going = tunnels if self._fresh and self._known.plan.tunnel is None else ()
        present = list_own_addresses(self._netlink)
        self._outer = [address for index, address in present if index not in tunnels]
        # Beside what the kernel routes: it installs the route of a new IPv6 address a moment later.
        singles = [(index, host_network(address)) for index, address in present]
        networks = [*singles, *list_host_networks(self._netlink)]
        host = [network for index, network in networks if index not in going]
        certain = abi.IpcacheFlags.LOCAL | abi.IpcacheFlags.NODE_ADDRESS
        entries = compute_ipcache(own, host)
        self._weak = tables.ipcache_rows(entry for entry in entries if not entry.flags & certain)
        self._strong = tables.ipcache_rows(entry for entry in entries if entry.flags & certain)
        wanted = self._weak | self._known.rows | self._strong
        return tables.put_missing(self._maps.pw_ipcache, wanted)

    def _ensure_masquerade(self, own: NodePlan) -> list[str]:
        plan = compute_masquerade(own)
        return self._masquerade.ensure(
            replace(
                plan,
                inside=(*plan.inside, *self._known.inside),
                pod_networks=(*plan.pod_networks, *self._known.pod_networks),
                tunnel_port=self._port(own),
                tunnel_peers=self._known.tunnel_peers(),
                tunnel_ends=(*self._outer, *self._known.outer),
                tunnel_mark=tables.read_settings(self._maps).tunnel_mark if self._known.port else 0,
            )
        )

    def _compute_routes(
        self, plan: ClusterPlan, tunnel_index: int, node_address: IPAddress | None
    ) -> list[Route]:
        underlay_index = 0
        if any(route.way is Way.NATIVE for route in plan.routes):
            underlay_index = detect_underlay(self._netlink, node_address).index
        mode = _own_mode(plan)
        return [
            _tunnel_route(route, tunnel_index, mode)
            if route.way is Way.TUNNEL
            else _route(route, underlay_index, route.via)
            for route in plan.routes
        ]


def read_underlay(netlink: NetlinkSocket, node_address: IPAddress | None) -> Underlay:
    """Look at the device that carries the node's traffic. Raises Unavailable when there is none."""
    device = detect_underlay(netlink, node_address)
    everywhere = list_usable_addresses(netlink)
    usable = [address for address in everywhere if address.index == device.index]
    chosen: dict[int, IPAddress] = {}
    for address in usable:
        if address.address == node_address:
            chosen[address.address.version] = address.address
        chosen.setdefault(address.address.version, address.address)
    return Underlay(
        addresses=tuple(chosen[version] for version in sorted(chosen)),
        connected=tuple(dict.fromkeys(address.network for address in usable)),
        ifindex=device.index,
        mtu_bytes=device.mtu,
        around=_look_around(netlink, everywhere),
    )


def _look_around(netlink: NetlinkSocket, addresses: Sequence[InterfaceAddress]) -> Surroundings:
    """Look at what this host reaches by itself. Single addresses on a link are left out: each pod of another plugin has
    a route like that, and comes and goes."""
    links, gateways = routes.list_foreign_ways(netlink)
    links.update(address.network for address in addresses)
    return Surroundings(
        own=frozenset(address.address for address in addresses),
        subnets=tuple(
            sorted(
                (network for network in links if network.prefixlen < network.max_prefixlen), key=str
            )
        ),
        gateways=frozenset(gateways),
    )


def _outer_addresses(plan: ClusterPlan) -> tuple[IPAddress, ...]:
    addresses = (address for peer in plan.peers for address in (peer.outer, *peer.addresses))
    return tuple(dict.fromkeys(addresses))


def _pod_networks(plan: ClusterPlan) -> tuple[IPNetwork, ...]:
    """Give the networks of pods that a plan names, without single addresses of nodes."""
    nodes = {network for network, prefix in plan.prefixes.items() if prefix.is_node_address}
    return tuple(network for network in plan.inside if network not in nodes)


def _own_mode(plan: ClusterPlan) -> TunnelMode:
    return TunnelMode.FLOW if plan.tunnel is None else plan.tunnel.mode


def _describe_tunnel(
    node_name: str, plan: ClusterPlan, tunnel: TunnelPlan, programs: TunnelPrograms
) -> TunnelSide:
    peers = {peer.number: peer for peer in plan.peers}
    through = [route for route in plan.routes if route.way is Way.TUNNEL]
    families = {route.destination.version for route in through}
    families |= {address.version for address in tunnel.addresses}
    neighbours: dict[IPAddress, str] = {}
    forwarding: dict[str, IPAddress] = {}
    if tunnel.mode is TunnelMode.CLASSIC:
        for route in through:
            peer = peers[route.peer]
            neighbours[_classic_gateway(route)] = peer.mac
            forwarding[peer.mac] = peer.outer
    return TunnelSide(
        tunnel,
        node_name,
        programs,
        frozenset(families),
        tuple(neighbours.items()),
        tuple(forwarding.items()),
    )


def _classic_gateway(route: HostRoute) -> IPAddress:
    """Give a next hop of the peer's own: its tunnel address, or the first of its range, as nothing is asked of it."""
    # With IPv6 a link-local one: the kernel refuses any that another route leads to by another device.
    if route.destination.version == 6:
        return _CLASSIC_GATEWAYS_IPV6 + route.peer
    return route.via or route.destination.network_address


def _tunnel_route(route: HostRoute, index: int, mode: TunnelMode) -> Route:
    gateway = GATEWAYS[route.destination.version]
    if mode is TunnelMode.CLASSIC:
        gateway = _classic_gateway(route)
    return replace(_route(route, index, gateway), onlink=True)


def _route(route: HostRoute, index: int, gateway: IPAddress | None) -> Route:
    return Route(
        route.destination,
        index=index,
        gateway=gateway,
        source=route.source,
        protocol=ROUTE_PROTOCOL,
        # The kernel turns metric 0 of IPv6 into 1024; a wanted 0 would differ from what is read back, on every pass.
        metric=0 if route.destination.version == 4 else IPV6_DEFAULT_METRIC,
        mtu=route.mtu_bytes,
    )


def _refuse_foreign(foreign: Sequence[Route], differences: Sequence[str]) -> None:
    """Raise ForeignObject that names every route in the way; what was done meanwhile goes to the log."""
    if not foreign:
        return
    for difference in differences:
        _log.info("repaired cluster state", extra={"cause": difference})
    first = foreign[0]
    others = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
    raise ForeignObject(
        f"add route to {first.destination}{others}: a route of protocol {first.protocol} to device"
        f" index {first.index} has that destination; everything else is done",
        hint="remove: " + "; ".join(f"ip route del {route.destination}" for route in foreign[:8]),
    )


def _name_rows(what: str, changes: RowChanges, read: Callable[[bytes], object]) -> list[str]:
    put, removed = ((str(read(key)) for key in keys) for keys in (changes.put, changes.removed))
    return name_differences(what, put, removed)
