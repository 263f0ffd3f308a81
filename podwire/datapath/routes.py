"""Routes: how this host reaches its pods, and which addresses it refuses because no pod has them.

Called by `datapath.device` (while a pair is made or repaired) and `datapath.node`. Every route carries podwire's
protocol number, and nothing without it is ever changed or removed. A pod's route names the node's own address as
source; without it the kernel picked another bridge's address. A permanent neighbour accompanies each route, so that no
resolution is needed.
"""

import errno
import ipaddress
from collections.abc import Iterable, Sequence

import msgspec

from podwire.kernel.netlink import NetlinkSocket, Request
from podwire.kernel.rtnl.route import (
    AF_INET,
    AF_INET6,
    IPV6_DEFAULT_METRIC,
    ROUTE_UNICAST,
    ROUTE_UNREACHABLE,
    TABLE_MAIN,
    Neighbour,
    Route,
    add_route,
    delete_route,
    host_network,
    is_default,
    list_neighbours,
    list_routes,
    read_neighbour,
    read_next_hops,
    read_protocol,
    read_route,
    set_neighbour,
)
from podwire.model.endpoint import EndpointRecord, IPAddress, IPNetwork
from podwire.model.errors import ForeignObject, KernelFailure
from podwire.model.ids import ROUTE_PROTOCOL

_GONE = (errno.ESRCH, errno.ENODEV, errno.ENOENT)
_BLOCK_METRIC = 4_000_000_000
"""Weaker than any route to the same prefix, e.g. one that a cloud or a routing daemon installs."""


class SourceAddresses(msgspec.Struct, frozen=True):
    """The node's own address per family: what host processes use towards pods; None = leave it to the kernel."""

    ipv4: ipaddress.IPv4Address | None = None
    ipv6: ipaddress.IPv6Address | None = None

    def __str__(self) -> str:
        return (
            " and ".join(str(address) for address in (self.ipv4, self.ipv6) if address)
            or "the kernel's choice"
        )


def compute_routes(record: EndpointRecord, sources: SourceAddresses) -> list[Route]:
    """Compute the host's routes to an endpoint: one /32 and one /128 at most, straight to its device."""
    routes = []
    for address in record.addresses:
        is_ipv4 = address.version == 4
        routes.append(
            Route(
                host_network(address),
                index=record.device.host_ifindex,
                source=sources.ipv4 if is_ipv4 else sources.ipv6,
                protocol=ROUTE_PROTOCOL,
                metric=0 if is_ipv4 else IPV6_DEFAULT_METRIC,
            )
        )
    return routes


def compute_neighbours(record: EndpointRecord) -> list[Neighbour]:
    """Compute the host's neighbour entries for an endpoint's addresses."""
    return [
        Neighbour(record.device.host_ifindex, address, record.device.pod_mac)
        for address in record.addresses
    ]


def plan_requests(
    record: EndpointRecord, sources: SourceAddresses, *, replace: bool = False
) -> list[Request]:
    """Give the requests that make an endpoint's routes and neighbours."""
    routes = [add_route(route, replace=replace) for route in compute_routes(record, sources)]
    return routes + [set_neighbour(neighbour) for neighbour in compute_neighbours(record)]


def remove_host_routes(netlink: NetlinkSocket, record: EndpointRecord) -> None:
    """Remove an endpoint's routes to its own device; absent ones are success. Its neighbours go with the device."""
    # Without a source, which may have changed since: what is not given is not compared. The device is: the address
    # may belong to a successor already.
    unwanted = [delete_route(route) for route in compute_routes(record, SourceAddresses())]
    netlink.execute(unwanted, tolerated=_GONE)


def compare_host_routes(
    netlink: NetlinkSocket, record: EndpointRecord, sources: SourceAddresses
) -> list[str]:
    """Name what differs between the routes and neighbours wanted and those present."""
    index = record.device.host_ifindex
    differences = []
    present = {
        route.destination: route
        for family in _families(record)
        for route in dump_routes(netlink, family, index=index)
    }
    for wanted in compute_routes(record, sources):
        route = present.get(wanted.destination)
        if route is None:
            differences.append(f"host route to {wanted.destination} is missing")
        elif route.protocol != wanted.protocol:
            differences.append(f"host route to {wanted.destination} is not ours")
        elif route.source != wanted.source:
            differences.append(
                f"host route to {wanted.destination} has source {route.source},"
                f" wanted {wanted.source}"
            )
    neighbours = {read_neighbour(body) for body in netlink.dump(list_neighbours(index))}
    differences += [
        f"host neighbour {wanted.address} at {wanted.mac} is missing"
        for wanted in compute_neighbours(record)
        if wanted not in neighbours
    ]
    return differences


def require_free_destinations(netlink: NetlinkSocket, record: EndpointRecord) -> None:
    """Raise ForeignObject when a route without our mark leads where an endpoint's route must go."""
    wanted = {host_network(address) for address in record.addresses}
    for family in _families(record):
        for route in dump_routes(netlink, family, table=TABLE_MAIN):
            if route.destination in wanted and route.protocol != ROUTE_PROTOCOL:
                raise ForeignObject(
                    f"add route to {route.destination}: a route of protocol {route.protocol}"
                    f" to device index {route.index} has that destination",
                    hint=f"remove it: ip route del {route.destination}",
                )


def list_own_routes(netlink: NetlinkSocket) -> list[Route]:
    """List every route with our protocol number, both families, whatever table it is in."""
    return [
        route
        for family in (AF_INET, AF_INET6)
        for route in dump_routes(netlink, family, protocol=ROUTE_PROTOCOL)
    ]


def is_to_pod(route: Route) -> bool:
    """Tell whether a route has the form of those that lead to one address on a pod's device."""
    return (
        route.table == TABLE_MAIN
        and route.kind == ROUTE_UNICAST
        and route.index > 0
        and route.gateway is None
        and route.destination.prefixlen == route.destination.max_prefixlen
    )


def list_pod_routes(netlink: NetlinkSocket) -> list[Route]:
    """List our routes that lead to one address on a device, both families."""
    return [route for route in list_own_routes(netlink) if is_to_pod(route)]


def remove_routes(netlink: NetlinkSocket, routes: Iterable[Route]) -> None:
    """Remove routes of ours by value; absent ones are success."""
    ours = [delete_route(route) for route in routes if route.protocol == ROUTE_PROTOCOL]
    netlink.execute(ours, tolerated=_GONE)


def compute_block_routes(blocks: Iterable[IPNetwork]) -> list[Route]:
    """Compute the routes that refuse what no endpoint of the node's own blocks has."""
    return [
        Route(block, protocol=ROUTE_PROTOCOL, metric=_BLOCK_METRIC, kind=ROUTE_UNREACHABLE)
        for block in blocks
    ]


def is_of_block(route: Route) -> bool:
    """Tell whether a route of ours refuses a range."""
    return (route.table, route.kind) == (TABLE_MAIN, ROUTE_UNREACHABLE)


def ensure_block_routes(netlink: NetlinkSocket, blocks: Sequence[IPNetwork]) -> list[str]:
    """Make the unreachable routes be exactly those of `blocks`; name those that were missing."""
    # Without such a route a packet to an address that no pod has would leave by the default route, and a router that
    # sends the block to this node would send it back, until its hop limit is used up.
    wanted = {route.destination: route for route in compute_block_routes(blocks)}
    present = [route for route in list_own_routes(netlink) if is_of_block(route)]
    remove_routes(netlink, [route for route in present if route.destination not in wanted])
    have = {route.destination for route in present}
    missing = {network: route for network, route in wanted.items() if network not in have}
    netlink.execute([add_route(route) for route in missing.values()])
    return [f"unreachable route to {network} is missing" for network in missing]


def dump_routes(
    netlink: NetlinkSocket,
    family: int,
    *,
    table: int = 0,
    protocol: int = 0,
    index: int = 0,
    kind: int = 0,
    defaults_only: bool = False,
) -> list[Route]:
    """List routes; a table that does not exist has none. With `defaults_only` the many others are not decoded."""
    request = list_routes(family, table=table, protocol=protocol, index=index, kind=kind)
    # ENOENT: with strict checking, a dump of a table that does not exist is an error
    # (net/ipv4/fib_frontend.c:inet_dump_fib).
    bodies = netlink.dump(request, absent=_GONE)
    return [read_route(body) for body in bodies if not defaults_only or is_default(body)]


def list_foreign_ways(netlink: NetlinkSocket) -> tuple[set[IPNetwork], set[IPAddress]]:
    """Give what routes without our mark say is on a link of this host, and their next hops; nothing link-local."""
    on_link: set[IPNetwork] = set()
    gateways: set[IPAddress] = set()
    for family in (AF_INET, AF_INET6):
        for body in netlink.dump(list_routes(family)):
            if read_protocol(body) == ROUTE_PROTOCOL:
                continue  # not decoded: there may be thousands
            route = read_route(body)
            if route.kind != ROUTE_UNICAST:
                continue
            hops = read_next_hops(body)
            gateways |= hops
            if not hops and route.destination.prefixlen:
                on_link.add(route.destination)
    return (
        {
            network
            for network in on_link
            if not (network.is_link_local or network.is_loopback or network.is_multicast)
        },
        {address for address in gateways if not address.is_link_local},
    )


def _families(record: EndpointRecord) -> list[int]:
    return [AF_INET if address.version == 4 else AF_INET6 for address in record.addresses]


def is_to_node(route: Route) -> bool:
    """Tell whether a route of ours leads to another node: only those have a next hop."""
    return (route.table, route.protocol) == (TABLE_MAIN, ROUTE_PROTOCOL) and (
        route.gateway is not None
    )


class RouteChanges(msgspec.Struct, frozen=True):
    """What `ensure_node_routes` did: destinations that were missing or wrong, too many, or somebody else's."""

    put: tuple[IPNetwork, ...] = ()
    removed: tuple[IPNetwork, ...] = ()
    foreign: tuple[Route, ...] = ()
    """Routes without our mark where one of ours was to be: left alone, and ours left out."""
    failures: tuple[KernelFailure, ...] = ()
    """Of those that the kernel did not take; all others are there."""


class RouteReader:
    """Reads the main table again and again: what has not changed since the last time is not decoded again."""

    def __init__(self, netlink: NetlinkSocket) -> None:
        self._netlink = netlink
        self._known: dict[bytes, Route] = {}

    def read(self) -> list[Route]:
        """Give the routes of both families."""
        known, self._known = self._known, {}
        for family in (AF_INET, AF_INET6):
            for body in self._netlink.dump(list_routes(family, table=TABLE_MAIN)):
                # Decoding thousands of routes takes the interpreter for long; of an unchanged one the bytes are the
                # same.
                self._known[body] = known.get(body) or read_route(body)
        return list(self._known.values())


def ensure_node_routes(
    netlink: NetlinkSocket, present: Iterable[Route], wanted: Sequence[Route]
) -> RouteChanges:
    """Make our routes to other nodes be exactly `wanted`; what is missing is written before what is too much goes.

    `present`: the main table. What the kernel refuses stops nothing else; it is among what is given.
    """
    by_destination = {route.destination: route for route in wanted}
    ours: dict[IPNetwork, Route] = {}
    surplus: list[Route] = []
    foreign: dict[IPNetwork, Route] = {}
    for route in present:
        want = by_destination.get(route.destination)
        if is_to_node(route):
            if want is not None and want.metric == route.metric:
                ours[route.destination] = route
            else:
                surplus.append(route)
        elif want is not None and _stands_in_the_way(route, want):
            foreign[route.destination] = route
    put = [
        route
        for destination, route in by_destination.items()
        if destination not in foreign and ours.get(destination) != route
    ]
    # Only a route of ours is replaced. NLM_F_REPLACE takes whatever has the destination and metric, somebody else's
    # too.
    failures = netlink.attempt(
        [add_route(route, replace=route.destination in ours) for route in put]
    )
    remove_routes(netlink, surplus)
    return RouteChanges(
        tuple(route.destination for route in put),
        tuple(route.destination for route in surplus),
        tuple(foreign.values()),
        tuple(failure for failure in failures if failure is not None),
    )


def _stands_in_the_way(route: Route, wanted: Route) -> bool:
    """Tell whether a route of somebody else keeps ours from being taken."""
    # A weaker route may stay beside ours; of equal ones the kernel takes the older, or both.
    return route.protocol != ROUTE_PROTOCOL and route.metric <= wanted.metric
