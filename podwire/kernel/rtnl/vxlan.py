"""VXLAN devices and their forwarding tables.

Used by `datapath.tunnel`. Pure: builders give `Request`s, readers turn bodies of answers into values that compare with
what was asked for. Attributes and structures: include/uapi/linux/{if_link,neighbour}.h.
"""

import ipaddress
import struct
from typing import Final

import msgspec

from podwire.kernel.netlink import (
    NLM_F_CREATE,
    NLM_F_REPLACE,
    Attributes,
    Request,
    attribute,
    attribute_u32,
    malformed,
    read_u32,
    unpack_body,
)
from podwire.kernel.rtnl.link import (
    LinkEnd,
    change_settings,
    create_link,
    parse_mac,
    read_settings,
)
from podwire.kernel.rtnl.route import (
    NDA_DST,
    NDA_IFINDEX,
    NDA_LLADDR,
    NDMSG,
    NEIGHBOUR_PERMANENT,
    RTM_DELNEIGH,
    RTM_GETNEIGH,
    RTM_NEWNEIGH,
)
from podwire.model.endpoint import IPAddress

KIND: Final = "vxlan"
_IFLA_ID: Final = 1
_IFLA_LOCAL: Final = 4
_IFLA_LEARNING: Final = 7
_IFLA_PORT: Final = 15
_IFLA_LOCAL6: Final = 17
_IFLA_COLLECT_METADATA: Final = 25
_AF_BRIDGE: Final = 7
_NUD_NOARP: Final = 0x40
_NTF_SELF: Final = 0x02


class Vxlan(msgspec.Struct, frozen=True):
    """Settings of a VXLAN device: flow-based (each packet says its own VNI and receiver), or of one VNI."""

    port: int
    """UDP port that it listens on and sends to."""
    flow_based: bool
    vni: int = 0
    local: IPAddress | None = None
    """Outer source address; None = the route decides. A flow-based device has none."""
    learning: bool = False


class ForwardingEntry(msgspec.Struct, frozen=True):
    """Frames to `mac` go to the VXLAN endpoint `destination`. Never expires."""

    index: int
    mac: str
    destination: IPAddress


def create_vxlan(end: LinkEnd, settings: Vxlan) -> Request:
    """Make a VXLAN device; EEXIST when the name, or the VNI on that port, is taken."""
    parts = [
        attribute(_IFLA_PORT, struct.pack(">H", settings.port)),
        # The kernel's default is to learn: any sender of the underlay could then write forwarding entries
        # (vxlan_snoop).
        attribute(_IFLA_LEARNING, bytes([settings.learning])),
    ]
    if settings.flow_based:
        parts.append(attribute(_IFLA_COLLECT_METADATA, b"\1"))
    else:
        parts.append(attribute_u32(_IFLA_ID, settings.vni))
    return create_link(KIND, end, b"".join(parts) + _local(settings.local))


def change_local(index: int, local: IPAddress) -> Request:
    """Give a device another outer source address of the same family."""
    return change_settings(index, KIND, _local(local))


def read_vxlan(body: bytes) -> Vxlan | None:
    """Read what one answer to `get_link` or `list_links` says of VXLAN; None for a device of another kind."""
    settings = read_settings(body, KIND)
    if settings is None:
        return None
    port = settings.get(_IFLA_PORT, b"\0\0")
    if len(port) != 2:
        raise malformed(f"port of {len(port)} bytes")
    return Vxlan(
        port=int.from_bytes(port, "big"),
        flow_based=_read_flag(settings, _IFLA_COLLECT_METADATA),
        vni=read_u32(settings, _IFLA_ID),
        local=_read_local(settings),
        learning=_read_flag(settings, _IFLA_LEARNING),
    )


def set_forwarding(wanted: ForwardingEntry) -> Request:
    """Add an entry, or replace the one that the MAC has."""
    return Request(
        RTM_NEWNEIGH,
        NLM_F_CREATE | NLM_F_REPLACE,
        _forwarding_body(wanted),
        "set forwarding entry",
        wanted.mac,
    )


def delete_forwarding(unwanted: ForwardingEntry) -> Request:
    """Remove an entry."""
    return Request(
        RTM_DELNEIGH, 0, _forwarding_body(unwanted), "remove forwarding entry", unwanted.mac
    )


def list_forwarding(index: int) -> Request:
    """Ask for the entries of one device."""
    body = NDMSG.pack(_AF_BRIDGE, 0, 0, 0, 0) + attribute_u32(NDA_IFINDEX, index)
    return Request(RTM_GETNEIGH, 0, body, "list forwarding entries of device", f"index {index}")


def read_forwarding(body: bytes) -> ForwardingEntry | None:
    """Read one answer to `list_forwarding`; None for an entry that leads to no address."""
    (_, index, _, _, _), attributes = unpack_body(NDMSG, body)
    raw = attributes.get(NDA_DST)
    if raw is None:
        return None
    return ForwardingEntry(
        index, attributes.get(NDA_LLADDR, b"").hex(":"), ipaddress.ip_address(raw)
    )


def _forwarding_body(entry: ForwardingEntry) -> bytes:
    state = NEIGHBOUR_PERMANENT | _NUD_NOARP
    return (
        # SELF: the device's own table, and not that of a bridge which it may be a port of.
        NDMSG.pack(_AF_BRIDGE, entry.index, state, _NTF_SELF, 0)
        + attribute(NDA_LLADDR, parse_mac(entry.mac))
        + attribute(NDA_DST, entry.destination.packed)
    )


def _local(address: IPAddress | None) -> bytes:
    if address is None:
        return b""
    return attribute(_IFLA_LOCAL if address.version == 4 else _IFLA_LOCAL6, address.packed)


def _read_local(settings: Attributes) -> IPAddress | None:
    for kind in (_IFLA_LOCAL, _IFLA_LOCAL6):
        raw = settings.get(kind)
        # The kernel reports an address of zeros where none is set.
        if raw is not None and any(raw):
            return ipaddress.ip_address(raw)
    return None


def _read_flag(settings: Attributes, kind: int) -> bool:
    return any(settings.get(kind, b""))
