"""Flows that the kernel's own connection tracking remembers: count them, list some, and delete some.

Used by `datapath.stack_flows`. Over a netlink socket of nfnetlink; what a message says of a flow is kept as the kernel
wrote it, so that a deletion means exactly the flow that was seen. Formats: linux/netfilter/nfnetlink_conntrack.h.
"""

import errno
import ipaddress
import struct
from collections.abc import Iterable
from typing import Final

import msgspec

from podwire.kernel.netlink import (
    NLA_F_NESTED,
    Attributes,
    NetlinkSocket,
    Request,
    attribute,
    attribute_u32,
    malformed,
    nested,
    parse_attributes,
    unpack_body,
)
from podwire.model.endpoint import IPAddress

_GET: Final = 1 << 8 | 1
_DELETE: Final = 1 << 8 | 2
_GET_STATISTICS: Final = 1 << 8 | 5
_GENERATION: Final = struct.Struct("=BBH")
"""struct nfgenmsg: family, version, resource."""
_FAMILIES: Final = {4: 2, 6: 10}
_TUPLE_ORIGINAL: Final = 1
_TUPLE_REPLY: Final = 2
_STATUS: Final = 3
_ZONE: Final = 18
_FILTER: Final = 25
_FILTER_ORIGINAL: Final = 1
_BY_PROTOCOL: Final = 1 << 3
_BY_DESTINATION_PORT: Final = 1 << 5
_TUPLE_IP: Final = 1
_TUPLE_PROTOCOL: Final = 2
_IPV4_SOURCE: Final = 1
_IPV6_SOURCE: Final = 3
_PROTOCOL_NUMBER: Final = 1
_DESTINATION_PORT: Final = 3
_STATISTICS_ENTRIES: Final = 1
_TRANSLATED: Final = 1 << 4 | 1 << 5
"""IPS_SRC_NAT, IPS_DST_NAT."""


class TrackedFlow(msgspec.Struct, frozen=True):
    """One flow: at which port it was asked, the address that answers it, and what names it to the kernel."""

    family: int
    """As the kernel numbers it."""
    original: bytes
    zone: bytes
    asked_port: int
    answered_by: IPAddress
    is_translated: bool


def list_flows(
    netlink: NetlinkSocket, version: int, protocol: int, destination_port: int | None = None
) -> list[TrackedFlow]:
    """List the flows of a family and a protocol that has ports, of all openers or of those that asked one port.

    The kernel goes over the flows of the whole machine in either case, and leaves the others out.
    """
    asked, flags = attribute(_PROTOCOL_NUMBER, bytes([protocol])), _BY_PROTOCOL
    if destination_port is not None:
        asked += attribute(_DESTINATION_PORT, destination_port.to_bytes(2, "big"))
        flags |= _BY_DESTINATION_PORT
    # One family at a time: net/netfilter/nf_conntrack_netlink.c:ctnetlink_parse_tuple_filter refuses AF_UNSPEC.
    body = (
        _GENERATION.pack(_FAMILIES[version], 0, 0)
        + nested(_TUPLE_ORIGINAL, nested(_TUPLE_PROTOCOL, asked))
        + nested(_FILTER, attribute_u32(_FILTER_ORIGINAL, flags))
    )
    what = "all ports" if destination_port is None else f"port {destination_port}"
    request = Request(_GET, 0, body, "list tracked flows", what)
    return [_read(*unpack_body(_GENERATION, body)) for body in netlink.dump(request)]


def count_flows(netlink: NetlinkSocket) -> int:
    """Count the flows of the socket's namespace, of every family and protocol, without going over them."""
    request = Request(
        _GET_STATISTICS,
        0,
        _GENERATION.pack(0, 0, 0),
        "count tracked flows",
        "all of this namespace",
    )
    _, attributes = unpack_body(_GENERATION, netlink.get(request))
    entries = attributes.get(_STATISTICS_ENTRIES)
    if entries is None:
        raise malformed("statistics without a count")
    return int.from_bytes(entries, "big")


def delete_flows(netlink: NetlinkSocket, flows: Iterable[TrackedFlow]) -> None:
    """Delete flows; one that has ended meanwhile is success."""
    # A request without a tuple would delete every flow of the family, and a tuple names a flow only within its zone
    # (net/netfilter/nf_conntrack_netlink.c:ctnetlink_del_conntrack).
    requests = [
        Request(
            _DELETE,
            0,
            _GENERATION.pack(flow.family, 0, 0)
            + attribute(_TUPLE_ORIGINAL | NLA_F_NESTED, flow.original)
            + (attribute(_ZONE, flow.zone) if flow.zone else b""),
            "delete a tracked flow",
            f"answered by {flow.answered_by}",
        )
        for flow in flows
    ]
    netlink.execute(requests, tolerated=(errno.ENOENT,))


def _read(head: tuple[int, ...], attributes: Attributes) -> TrackedFlow:
    reply = parse_attributes(attributes[_TUPLE_REPLY])
    addresses = parse_attributes(reply[_TUPLE_IP])
    source = addresses.get(_IPV4_SOURCE) or addresses[_IPV6_SOURCE]
    # Numbers in messages of nfnetlink are in network order, unlike those of rtnetlink.
    status = int.from_bytes(attributes.get(_STATUS, b""), "big")
    original = parse_attributes(attributes[_TUPLE_ORIGINAL])
    asked = parse_attributes(original[_TUPLE_PROTOCOL])
    return TrackedFlow(
        head[0],
        attributes[_TUPLE_ORIGINAL],
        attributes.get(_ZONE, b""),
        int.from_bytes(asked.get(_DESTINATION_PORT, b""), "big"),
        ipaddress.ip_address(source),
        bool(status & _TRANSLATED),
    )
