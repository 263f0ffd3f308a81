"""Flows that the kernel's own connection tracking remembers: list those to a port, and delete some of them.

Used by `datapath.stack_flows`. Over a netlink socket of nfnetlink; what a message says of a flow is kept as the kernel
wrote it, so that a deletion means exactly the flow that was seen. Formats: linux/netfilter/nfnetlink_conntrack.h.
"""

import errno
import ipaddress
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from podwire.kernel.netlink import (
    NLA_F_NESTED,
    Attributes,
    NetlinkSocket,
    Request,
    attribute,
    attribute_u32,
    nested,
    parse_attributes,
    unpack_body,
)
from podwire.model.endpoint import IPAddress

_GET: Final = 1 << 8 | 1
_DELETE: Final = 1 << 8 | 2
_GENERATION: Final = struct.Struct("=BBH")
"""struct nfgenmsg: family, version, resource."""
_FAMILIES: Final = {4: 2, 6: 10}
_TUPLE_ORIGINAL: Final = 1
_TUPLE_REPLY: Final = 2
_STATUS: Final = 3
_ZONE: Final = 18
_FILTER: Final = 25
_FILTER_ORIGINAL: Final = 1
_BY_PROTOCOL_AND_DESTINATION_PORT: Final = 1 << 3 | 1 << 5
_TUPLE_IP: Final = 1
_TUPLE_PROTOCOL: Final = 2
_IPV4_SOURCE: Final = 1
_IPV6_SOURCE: Final = 3
_PROTOCOL_NUMBER: Final = 1
_DESTINATION_PORT: Final = 3
_TRANSLATED: Final = 1 << 4 | 1 << 5
"""IPS_SRC_NAT, IPS_DST_NAT."""


@dataclass(frozen=True)
class TrackedFlow:
    """One flow: who answers it, and what names it to the kernel."""

    family: int
    """As the kernel numbers it."""
    original: bytes
    zone: bytes
    answered_by: IPAddress
    is_translated: bool


def list_flows(
    netlink: NetlinkSocket, version: int, protocol: int, destination_port: int
) -> list[TrackedFlow]:
    """List the flows of a family whose opener asked a port; the kernel goes over all flows and leaves the others out.

    It filters those of one family alone.
    """
    asked = nested(
        _TUPLE_PROTOCOL,
        attribute(_PROTOCOL_NUMBER, bytes([protocol])),
        attribute(_DESTINATION_PORT, destination_port.to_bytes(2, "big")),
    )
    body = (
        _GENERATION.pack(_FAMILIES[version], 0, 0)
        + nested(_TUPLE_ORIGINAL, asked)
        + nested(_FILTER, attribute_u32(_FILTER_ORIGINAL, _BY_PROTOCOL_AND_DESTINATION_PORT))
    )
    request = Request(_GET, 0, body, "list tracked flows", f"port {destination_port}")
    return [_read(*unpack_body(_GENERATION, one)) for one in netlink.dump(request)]


def delete_flows(netlink: NetlinkSocket, flows: Iterable[TrackedFlow]) -> None:
    """Delete flows; one that has ended meanwhile is success."""
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
    for failure in netlink.attempt(requests):
        if failure is not None and failure.errno != errno.ENOENT:
            raise failure


def _read(head: tuple[int, ...], attributes: Attributes) -> TrackedFlow:
    reply = parse_attributes(attributes[_TUPLE_REPLY])
    addresses = parse_attributes(reply[_TUPLE_IP])
    source = addresses.get(_IPV4_SOURCE) or addresses[_IPV6_SOURCE]
    status = int.from_bytes(attributes.get(_STATUS, b""), "big")
    return TrackedFlow(
        head[0],
        attributes[_TUPLE_ORIGINAL],
        attributes.get(_ZONE, b""),
        ipaddress.ip_address(source),
        bool(status & _TRANSLATED),
    )
