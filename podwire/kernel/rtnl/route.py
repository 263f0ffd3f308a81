"""Addresses, routes, policy rules and neighbours.

`Route`, `Neighbour` and `InterfaceAddress` are what is wanted and what is found alike, so a plan and a dump can be
compared as values. Pure. Attributes and structures: include/uapi/linux/{rtnetlink,if_addr,neighbour,fib_rules}.h.
"""

import functools
import ipaddress
import struct
from dataclasses import dataclass
from typing import Final

from podwire.kernel.netlink import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    Attributes,
    Request,
    attribute,
    attribute_u32,
    malformed,
    nested,
    parse_attributes,
    read_u32,
    unpack_body,
)
from podwire.kernel.rtnl.link import parse_mac
from podwire.model.endpoint import IPAddress, IPNetwork

RTM_NEWADDR: Final = 20
RTM_DELADDR: Final = 21
RTM_GETADDR: Final = 22
RTM_NEWROUTE: Final = 24
RTM_DELROUTE: Final = 25
RTM_GETROUTE: Final = 26
RTM_NEWNEIGH: Final = 28
RTM_DELNEIGH: Final = 29
RTM_GETNEIGH: Final = 30
RTM_NEWRULE: Final = 32
RTM_GETRULE: Final = 34

AF_INET: Final = 2
AF_INET6: Final = 10
TABLE_MAIN: Final = 254
SCOPE_UNIVERSE: Final = 0
SCOPE_LINK: Final = 253
_SCOPE_ANY: Final = 255
"""RT_SCOPE_NOWHERE, by which the kernel removes a route of any scope."""
TABLE_LOCAL: Final = 255
ROUTE_UNICAST: Final = 1
ROUTE_LOCAL: Final = 2
ROUTE_BROADCAST: Final = 3
ROUTE_ANYCAST: Final = 4
ROUTE_UNREACHABLE: Final = 7
NEIGHBOUR_PERMANENT: Final = 0x80
IPV6_DEFAULT_METRIC: Final = 1024
_RTNH_F_ONLINK: Final = 4
_RT_TABLE_COMPAT: Final = 252
_RT_TABLE_UNSPEC: Final = 0
_FR_ACT_TO_TBL: Final = 1
_PROTOCOL_BOOT: Final = 3
_IFA_F_NODAD: Final = 0x02
_IFA_F_NOPREFIXROUTE: Final = 0x200
_IFA_ADDRESS: Final = 1
_IFA_LOCAL: Final = 2
_IFA_FLAGS: Final = 8
_RTA_DST: Final = 1
RTA_OIF: Final = 4
_RTA_GATEWAY: Final = 5
_RTA_PRIORITY: Final = 6
_RTA_PREFSRC: Final = 7
_RTA_METRICS: Final = 8
_RTA_MULTIPATH: Final = 9
_RTA_TABLE: Final = 15
_RTA_VIA: Final = 18
_RTA_EXPIRES: Final = 23
_RTAX_MTU: Final = 2
NDA_DST: Final = 1
NDA_LLADDR: Final = 2
NDA_IFINDEX: Final = 8
_FRA_SRC: Final = 2
_FRA_PRIORITY: Final = 6
_FRA_TABLE: Final = 15
_FRA_PROTOCOL: Final = 21
_IFADDR: Final = struct.Struct("=BBBBI")
"""ifaddrmsg: family, prefix length, flags, scope, index."""
_RTMSG: Final = struct.Struct("=BBBBBBBBI")
"""rtmsg: family, destination bits, source bits, tos, table, protocol, scope, type, flags."""
_RTNEXTHOP: Final = struct.Struct("=HBBi")
"""rtnexthop: length with the attributes behind it, flags, weight less one, index."""
_RTMSG_PROTOCOL: Final = 5
"""The offset of the protocol in it."""
_RTMSG_SCOPE: Final = 6
"""The offset of the scope in it."""
_NETWORKS_REMEMBERED: Final = 1024
NDMSG: Final = struct.Struct("=BxxxiHBB")
"""ndmsg: family, index, state, flags, type."""


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """An address on a device, with its prefix length."""

    index: int
    address: IPAddress
    prefix_bits: int

    @property
    def network(self) -> IPNetwork:
        """Give the subnet that the address is in."""
        return ipaddress.ip_network((self.address, self.prefix_bits), strict=False)


@dataclass(frozen=True, slots=True)
class Route:
    """A route.

    `metric` 0 is IPv4's default; IPv6's is IPV6_DEFAULT_METRIC, also where 0 is asked for. With `lifetime_s` the kernel
    removes it by itself afterwards (IPv6 only); it is not read back.
    """

    destination: IPNetwork
    index: int = 0
    gateway: IPAddress | None = None
    source: IPAddress | None = None
    table: int = TABLE_MAIN
    protocol: int = _PROTOCOL_BOOT
    metric: int = 0
    mtu: int = 0
    onlink: bool = False
    kind: int = ROUTE_UNICAST
    lifetime_s: int = 0


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A neighbour entry; `permanent` ones are never asked for on the wire."""

    index: int
    address: IPAddress
    mac: str
    permanent: bool = True


@dataclass(frozen=True, slots=True)
class SourceRule:
    """A policy rule: what has this source address looks into `table` first."""

    source: IPNetwork
    table: int
    priority: int
    protocol: int = _PROTOCOL_BOOT


@functools.lru_cache(_NETWORKS_REMEMBERED)
def host_network(address: IPAddress) -> IPNetwork:
    """Give the /32 or /128 of an address. From numbers: of an address `ipaddress` writes the text and reads it."""
    whole = int(address), address.max_prefixlen
    if isinstance(address, ipaddress.IPv4Address):
        return ipaddress.IPv4Network(whole)
    return ipaddress.IPv6Network(whole)


def add_address(wanted: InterfaceAddress) -> Request:
    """Add an address: usable at once (no duplicate address detection) and without a route of its own."""
    # Duplicate address detection would leave an IPv6 address tentative, and unusable, for about a second (RFC 4862,
    # section 5.4). The kernel's own prefix route would compete with ours.
    return Request(
        RTM_NEWADDR,
        NLM_F_CREATE | NLM_F_EXCL,
        _address_body(wanted) + attribute_u32(_IFA_FLAGS, _IFA_F_NODAD | _IFA_F_NOPREFIXROUTE),
        "add address",
        wanted.address,
    )


def delete_address(unwanted: InterfaceAddress) -> Request:
    """Remove an address."""
    return Request(RTM_DELADDR, 0, _address_body(unwanted), "remove address", unwanted.address)


def list_addresses(index: int = 0) -> Request:
    """Ask for the addresses of one device, or of all."""
    return Request(RTM_GETADDR, 0, _IFADDR.pack(0, 0, 0, 0, index), "list addresses", str(index))


def read_address(body: bytes) -> InterfaceAddress:
    """Read one answer to `list_addresses`."""
    (_, bits, _, _, index), attributes = unpack_body(_IFADDR, body)
    # On a point-to-point device IFA_ADDRESS is the other end's; IPv6 has only that one otherwise (linux/if_addr.h).
    raw = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS, b""))
    return InterfaceAddress(index=index, address=_read_ip(raw), prefix_bits=bits)


def add_route(wanted: Route, *, replace: bool = False) -> Request:
    """Add a route; EEXIST when one with this destination, table and metric is there, unless it may be replaced."""
    return Request(
        RTM_NEWROUTE,
        NLM_F_CREATE | (NLM_F_REPLACE if replace else NLM_F_EXCL),
        _route_body(wanted),
        "add route",
        wanted.destination,
    )


def delete_route(unwanted: Route) -> Request:
    """Remove the route that agrees in everything given, of whatever scope; ESRCH when there is none."""
    body = bytearray(_route_body(unwanted))
    # A route of any scope: net/ipv4/fib_trie.c:fib_table_delete would compare it otherwise, and a start removes
    # every route that has our protocol number and no owner.
    body[_RTMSG_SCOPE] = _SCOPE_ANY
    return Request(RTM_DELROUTE, 0, bytes(body), "remove route", unwanted.destination)


def list_routes(
    family: int, *, table: int = 0, protocol: int = 0, index: int = 0, kind: int = 0
) -> Request:
    """Ask for routes; the kernel itself filters by table, protocol, device and kind where they are given."""
    body = _RTMSG.pack(family, 0, 0, 0, 0, protocol, 0, kind, 0)
    if table:
        body += attribute_u32(_RTA_TABLE, table)
    if index:
        body += attribute_u32(RTA_OIF, index)
    return Request(RTM_GETROUTE, 0, body, "list routes", f"family {family}")


def is_default(body: bytes) -> bool:
    """Tell whether an answer to `list_routes` is about a default route, without decoding it."""
    return len(body) >= _RTMSG.size and body[1] == 0


def read_route(body: bytes) -> Route:
    """Read one answer to `list_routes`."""
    header, attributes = unpack_body(_RTMSG, body)
    family, bits, _, _, table, protocol, _, kind, flags = header
    metrics = parse_attributes(attributes.get(_RTA_METRICS, b""))
    return Route(
        destination=_read_network(family, bits, attributes.get(_RTA_DST)),
        index=read_u32(attributes, RTA_OIF),
        gateway=_read_optional_ip(attributes, _RTA_GATEWAY),
        source=_read_optional_ip(attributes, _RTA_PREFSRC),
        # The header has eight bits for the table; larger numbers are in the attribute only.
        table=read_u32(attributes, _RTA_TABLE, table),
        protocol=protocol,
        metric=read_u32(attributes, _RTA_PRIORITY),
        mtu=read_u32(metrics, _RTAX_MTU),
        onlink=bool(flags & _RTNH_F_ONLINK),
        kind=kind,
    )


def read_protocol(body: bytes) -> int:
    """Give whose mark an answer to `list_routes` carries, without decoding it."""
    return body[_RTMSG_PROTOCOL]


def read_next_hops(body: bytes) -> frozenset[IPAddress]:
    """Give all next hops of an answer to `list_routes`, those of a route with several ways too."""
    _, attributes = unpack_body(_RTMSG, body)
    several = attributes.get(_RTA_MULTIPATH, b"")
    next_hops = {_read_hop(attributes)}
    while len(several) >= _RTNEXTHOP.size:
        # A length below the structure's own would keep this loop from getting on.
        length = max(_RTNEXTHOP.unpack_from(several)[0], _RTNEXTHOP.size)
        next_hops.add(_read_hop(parse_attributes(several[_RTNEXTHOP.size : length])))
        several = several[length:]
    return frozenset(address for address in next_hops if address is not None)


def set_neighbour(wanted: Neighbour) -> Request:
    """Add or replace a neighbour entry that never expires."""
    body = _neighbour_body(wanted) + attribute(NDA_LLADDR, parse_mac(wanted.mac))
    return Request(
        RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, body, "set neighbour", wanted.address
    )


def delete_neighbour(unwanted: Neighbour) -> Request:
    """Remove a neighbour entry."""
    return Request(RTM_DELNEIGH, 0, _neighbour_body(unwanted), "remove neighbour", unwanted.address)


def list_neighbours(index: int = 0) -> Request:
    """Ask for the neighbour entries of one device, or of all."""
    body = NDMSG.pack(0, 0, 0, 0, 0)
    if index:
        # A strict dump refuses an index in the header (net/core/neighbour.c:neigh_valid_dump_req).
        body += attribute_u32(NDA_IFINDEX, index)
    return Request(RTM_GETNEIGH, 0, body, "list neighbours", str(index))


def read_neighbour(body: bytes) -> Neighbour:
    """Read one answer to `list_neighbours`."""
    (_, index, state, _, _), attributes = unpack_body(NDMSG, body)
    return Neighbour(
        index=index,
        address=_read_ip(attributes.get(NDA_DST, b"")),
        mac=attributes.get(NDA_LLADDR, b"").hex(":"),
        permanent=bool(state & NEIGHBOUR_PERMANENT),
    )


def add_rule(wanted: SourceRule) -> Request:
    """Add a policy rule; EEXIST when the same one is there."""
    return Request(
        RTM_NEWRULE,
        NLM_F_CREATE | NLM_F_EXCL,
        _rule_body(wanted),
        "add rule for source",
        wanted.source,
    )


def list_rules(family: int) -> Request:
    """Ask for the policy rules of a family."""
    body = _RTMSG.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)
    return Request(RTM_GETRULE, 0, body, "list rules", f"family {family}")


def read_source_rule(body: bytes) -> SourceRule | None:
    """Read one answer to `list_rules`; None for a rule that does not select by source alone."""
    header, attributes = unpack_body(_RTMSG, body)
    family, destination_bits, source_bits, _, table, _, _, action, _ = header
    # Rules of other programs may have any form: what this type cannot hold must not look like one of ours.
    if action != _FR_ACT_TO_TBL or not source_bits or destination_bits:
        return None
    protocol = attributes.get(_FRA_PROTOCOL, b"\0")
    return SourceRule(
        source=_read_network(family, source_bits, attributes.get(_FRA_SRC)),
        table=read_u32(attributes, _FRA_TABLE, table),
        priority=read_u32(attributes, _FRA_PRIORITY),
        protocol=protocol[0] if protocol else 0,
    )


def _family(version: int) -> int:
    return AF_INET if version == 4 else AF_INET6


def _address_body(address: InterfaceAddress) -> bytes:
    raw = address.address.packed
    return (
        _IFADDR.pack(
            _family(address.address.version), address.prefix_bits, 0, SCOPE_UNIVERSE, address.index
        )
        + attribute(_IFA_LOCAL, raw)
        + attribute(_IFA_ADDRESS, raw)
    )


def _route_body(route: Route) -> bytes:
    network = route.destination
    on_link = route.gateway is None and route.kind == ROUTE_UNICAST
    # net/ipv4/fib_semantics.c:fib_check_nh_v4_gw looks next hops up among routes of link scope only: another scope
    # would make this route useless as the way to a gateway. IPv6 has no scopes.
    scope = SCOPE_LINK if on_link and network.version == 4 else SCOPE_UNIVERSE
    parts = [
        _RTMSG.pack(
            _family(network.version),
            network.prefixlen,
            0,
            0,
            _RT_TABLE_COMPAT if route.table > 255 else route.table,
            route.protocol,
            scope,
            route.kind,
            _RTNH_F_ONLINK if route.onlink else 0,
        )
    ]
    if network.prefixlen:
        parts.append(attribute(_RTA_DST, network.network_address.packed))
    if route.gateway is not None:
        parts.append(attribute(_RTA_GATEWAY, route.gateway.packed))
    if route.source is not None:
        parts.append(attribute(_RTA_PREFSRC, route.source.packed))
    for kind, value in (
        (RTA_OIF, route.index),
        (_RTA_PRIORITY, route.metric),
        (_RTA_TABLE, route.table if route.table > 255 else 0),
        (_RTA_EXPIRES, route.lifetime_s),
    ):
        if value:
            parts.append(attribute_u32(kind, value))
    if route.mtu:
        parts.append(nested(_RTA_METRICS, attribute_u32(_RTAX_MTU, route.mtu)))
    return b"".join(parts)


def _neighbour_body(neighbour: Neighbour) -> bytes:
    state = NEIGHBOUR_PERMANENT if neighbour.permanent else 0
    return NDMSG.pack(_family(neighbour.address.version), neighbour.index, state, 0, 0) + attribute(
        NDA_DST, neighbour.address.packed
    )


def _rule_body(rule: SourceRule) -> bytes:
    network = rule.source
    # The header has eight bits for the table; FRA_TABLE below has all of it.
    table = _RT_TABLE_UNSPEC if rule.table > 255 else rule.table
    return b"".join(
        (
            _RTMSG.pack(
                _family(network.version), 0, network.prefixlen, 0, table, 0, 0, _FR_ACT_TO_TBL, 0
            ),
            attribute(_FRA_SRC, network.network_address.packed),
            attribute_u32(_FRA_PRIORITY, rule.priority),
            attribute_u32(_FRA_TABLE, rule.table),
            attribute(_FRA_PROTOCOL, bytes([rule.protocol])),
        )
    )


def _read_ip(raw: bytes) -> IPAddress:
    if len(raw) == 4:
        return ipaddress.IPv4Address(raw)
    if len(raw) == 16:
        return ipaddress.IPv6Address(raw)
    raise malformed(f"address of {len(raw)} bytes")


def _read_hop(attributes: Attributes) -> IPAddress | None:
    via = attributes.get(
        _RTA_VIA
    )  # of the other family than the route's: family in two bytes, then the address
    return _read_optional_ip(attributes, _RTA_GATEWAY) if via is None else _read_ip(via[2:])


def _read_optional_ip(attributes: Attributes, kind: int) -> IPAddress | None:
    raw = attributes.get(kind)
    return None if raw is None else _read_ip(raw)


def _read_network(family: int, bits: int, raw: bytes | None) -> IPNetwork:
    size = 4 if family == AF_INET else 16
    address = _read_ip(bytes(size) if raw is None else raw)
    if bits > address.max_prefixlen:
        raise malformed(f"prefix of {bits} bits")
    if isinstance(address, ipaddress.IPv4Address):
        return ipaddress.IPv4Network((address, bits), strict=False)
    return ipaddress.IPv6Network((address, bits), strict=False)
