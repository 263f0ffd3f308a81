"""Links: make, change, find, list and delete network devices.

Builders give `Request`s for `kernel.netlink.NetlinkSocket`; readers turn bodies of answers into `Link`. Pure: nothing
here talks to the kernel. Attributes and structures: include/uapi/linux/{rtnetlink,if_link}.h.
"""

import functools
import struct
from dataclasses import dataclass
from typing import Final

from podwire.kernel.netlink import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    Attributes,
    Request,
    attribute,
    attribute_text,
    attribute_u32,
    find_attribute,
    nested,
    parse_attributes,
    read_text,
    read_u32,
    unpack_body,
)

RTM_NEWLINK: Final = 16
RTM_DELLINK: Final = 17
RTM_GETLINK: Final = 18
RTM_SETLINK: Final = 19
MACS_REMEMBERED: Final = 256
"""An ADD writes those of its pair into several messages."""
IFF_UP: Final = 1
IFF_LOWER_UP: Final = 1 << 16
_IFLA_ADDRESS: Final = 1
_IFLA_IFNAME: Final = 3
_IFLA_MTU: Final = 4
_IFLA_LINK: Final = 5
_IFLA_MASTER: Final = 10
_IFLA_TXQLEN: Final = 13
_IFLA_OPERSTATE: Final = 16
_IFLA_LINKINFO: Final = 18
_IFLA_IFALIAS: Final = 20
_IFLA_AF_SPEC: Final = 26
_IFLA_GROUP: Final = 27
_IFLA_NET_NS_FD: Final = 28
_IFLA_EXT_MASK: Final = 29
_IFLA_NUM_TX_QUEUES: Final = 31
_IFLA_NUM_RX_QUEUES: Final = 32
_IFLA_INFO_KIND: Final = 1
_IFLA_INFO_DATA: Final = 2
_IFLA_INET6_ADDR_GEN_MODE: Final = 8
_VETH_INFO_PEER: Final = 1
_ADDR_GEN_MODE_NONE: Final = 1
_IF_OPER_UP: Final = bytes([6])
_RTEXT_FILTER_SKIP_STATS: Final = 1 << 3
_AF_INET6: Final = 10
_IFINFO: Final = struct.Struct("=BxHiII")
"""ifinfomsg: family, device type, index, flags, mask of flags to change."""


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """One end of a pair to be made.

    `mtu` in bytes; `index` is chosen by the caller; 0 = the kernel's default.
    """

    name: str
    index: int = 0
    mac: str = ""
    mtu: int = 0
    group: int = 0
    queues: int = 0
    """Transmit and receive queues. The default is one per CPU, each with files in sysfs."""


@dataclass(frozen=True, slots=True)
class Link:
    """A device as the kernel reports it.

    `peer_index` is the other end's index in its own namespace.
    """

    index: int
    name: str
    alias: str
    kind: str
    mac: str
    mtu: int
    group: int
    up: bool
    carrier: bool
    peer_index: int
    master: int
    addr_gen_mode: int | None


def create_veth(host: LinkEnd, peer: LinkEnd, peer_namespace_fd: int | None) -> Request:
    """Make a pair in one go, the peer directly in its namespace.

    Alias, address mode and the peer's state are set by a later `set_link`.
    """
    # Moving a finished device into the namespace would wait for an RCU grace period: 20 ms instead of less than one.
    namespace = (
        b"" if peer_namespace_fd is None else attribute_u32(_IFLA_NET_NS_FD, peer_namespace_fd)
    )
    peer_info = attribute(
        _VETH_INFO_PEER, _IFINFO.pack(0, 0, peer.index, 0, 0) + _end_attributes(peer) + namespace
    )
    info = nested(
        _IFLA_LINKINFO,
        attribute_text(_IFLA_INFO_KIND, "veth"),
        nested(_IFLA_INFO_DATA, peer_info),
    )
    # The creation ignores alias and address mode, and veth_open refuses an end that is set up before it has its peer
    # (ENOTCONN).
    return Request(
        RTM_NEWLINK,
        NLM_F_CREATE | NLM_F_EXCL,
        _IFINFO.pack(0, 0, host.index, 0, 0) + _end_attributes(host) + info,
        "create device pair",
        host.name,
    )


def create_link(kind: str, end: LinkEnd, settings: bytes = b"") -> Request:
    """Make a device (dummy, bridge, ...); `settings`: encoded attributes that only its kind has."""
    info = nested(_IFLA_LINKINFO, *_kind_attributes(kind, settings))
    return Request(
        RTM_NEWLINK,
        NLM_F_CREATE | NLM_F_EXCL,
        _IFINFO.pack(0, 0, end.index, 0, 0) + _end_attributes(end) + info,
        f"create {kind} device",
        end.name,
    )


def change_settings(index: int, kind: str, settings: bytes) -> Request:
    """Change encoded attributes of an existing device that only its kind has."""
    info = nested(_IFLA_LINKINFO, *_kind_attributes(kind, settings))
    body = _IFINFO.pack(0, 0, index, 0, 0) + info
    return Request(RTM_NEWLINK, 0, body, f"change {kind} device", f"index {index}")


def set_link(  # noqa: PLR0913 - each is an attribute of the one message
    index: int,
    *,
    name: str = "",
    up: bool | None = None,
    alias: str | None = None,
    mtu: int = 0,
    mac: str = "",
    group: int | None = None,
    queue_length: int | None = None,
    master: int | None = None,
    no_link_local: bool = False,
    rename: str = "",
) -> Request:
    """Change what is given of an existing device; `name` is only for messages.

    `no_link_local`: IPv6 makes no address itself. Send it before `up`: within one message the kernel does `up` first.
    """
    flags, mask = (IFF_UP if up else 0, IFF_UP) if up is not None else (0, 0)
    parts = [_IFINFO.pack(0, 0, index, flags, mask)]
    if rename:
        parts.append(attribute_text(_IFLA_IFNAME, rename))
    if alias is not None:
        parts.append(attribute(_IFLA_IFALIAS, alias.encode()))
    if mtu:
        parts.append(attribute_u32(_IFLA_MTU, mtu))
    if mac:
        parts.append(attribute(_IFLA_ADDRESS, parse_mac(mac)))
    for kind, value in (
        (_IFLA_GROUP, group),
        (_IFLA_TXQLEN, queue_length),
        (_IFLA_MASTER, master),
    ):
        if value is not None:
            parts.append(attribute_u32(kind, value))
    # net/core/rtnetlink.c:do_setlink changes the flags before it comes to AF_SPEC: sent together with `up`, the
    # address would be there already.
    if no_link_local:
        parts.append(_NO_LINK_LOCAL)
    return Request(RTM_SETLINK, 0, b"".join(parts), "change device", name or f"index {index}")


def delete_link(index: int = 0, *, name: str = "") -> Request:
    """Delete a device (and a pair's other end); waits 20 ms and more for RCU."""
    return Request(
        RTM_DELLINK, 0, _by_index_or_name(index, name), "delete device", name or f"index {index}"
    )


def delete_group(group: int) -> Request:
    """Delete every device of a group with one grace period for all; ENODEV when there is none."""
    # rtnl_group_dellink unregisters all of them together, so the group waits for RCU as long as one device does.
    body = _IFINFO.pack(0, 0, 0, 0, 0) + attribute_u32(_IFLA_GROUP, group)
    return Request(RTM_DELLINK, 0, body, "delete device group", f"{group:#x}")


def get_link(index: int = 0, *, name: str = "") -> Request:
    """Ask for one device, by index or else by name; statistics are left out."""
    return Request(
        RTM_GETLINK,
        0,
        _by_index_or_name(index, name) + _WITHOUT_STATISTICS,
        "look up device",
        name or f"index {index}",
    )


def list_links(*, kind: str = "") -> Request:
    """Ask for every device, or for those of one kind; statistics are left out."""
    info = nested(_IFLA_LINKINFO, attribute_text(_IFLA_INFO_KIND, kind)) if kind else b""
    body = _IFINFO.pack(0, 0, 0, 0, 0) + _WITHOUT_STATISTICS + info
    return Request(RTM_GETLINK, 0, body, "list devices", kind or "all")


def read_link(body: bytes) -> Link:
    """Read the answer to `get_link`, or one of those to `list_links`."""
    (_, _, index, flags, _), attributes = unpack_body(_IFINFO, body)
    info = parse_attributes(attributes.get(_IFLA_LINKINFO, b""))
    families = parse_attributes(attributes.get(_IFLA_AF_SPEC, b""))
    ipv6 = parse_attributes(families.get(_AF_INET6, b""))
    mode = ipv6.get(_IFLA_INET6_ADDR_GEN_MODE)
    return Link(
        index=index,
        name=read_text(attributes, _IFLA_IFNAME),
        alias=read_text(attributes, _IFLA_IFALIAS),
        kind=read_text(info, _IFLA_INFO_KIND),
        mac=attributes.get(_IFLA_ADDRESS, b"").hex(":"),
        mtu=read_u32(attributes, _IFLA_MTU),
        group=read_u32(attributes, _IFLA_GROUP),
        up=bool(flags & IFF_UP),
        carrier=bool(flags & IFF_LOWER_UP),
        # For a veth the kernel reports the other end here, even though that index belongs to another namespace.
        peer_index=read_u32(attributes, _IFLA_LINK),
        master=read_u32(attributes, _IFLA_MASTER),
        addr_gen_mode=mode[0] if mode else None,
    )


def is_operating(body: bytes) -> bool:
    """Tell from the same answers whether the kernel has acted on a device's carrier.

    Only then it has its queue; before, it drops what it is to send.
    """
    # net/core/link_watch.c:linkwatch_do_dev sets the state and activates the queue under one hold of the RTNL lock:
    # the state tells of the queue.
    return find_attribute(body[_IFINFO.size :], _IFLA_OPERSTATE) == _IF_OPER_UP


def read_settings(body: bytes, kind: str) -> Attributes | None:
    """Read what a device has that only its kind has, from the same answers; None when it is of another kind."""
    _, attributes = unpack_body(_IFINFO, body)
    info = parse_attributes(attributes.get(_IFLA_LINKINFO, b""))
    if read_text(info, _IFLA_INFO_KIND) != kind:
        return None
    return parse_attributes(info.get(_IFLA_INFO_DATA, b""))


@functools.lru_cache(MACS_REMEMBERED)
def parse_mac(text: str) -> bytes:
    """Decode `aa:bb:cc:dd:ee:ff`; ValueError for anything else."""
    raw = bytes.fromhex(text.replace(":", ""))
    # `fromhex` skips white space, so the length of the text is checked as well.
    if len(raw) != 6 or len(text) != 17:
        raise ValueError(f"MAC address {text!r} must be six bytes in hexadecimal, separated by ':'")
    return raw


def _end_attributes(end: LinkEnd) -> bytes:
    parts = [attribute_text(_IFLA_IFNAME, end.name)]
    if end.mac:
        parts.append(attribute(_IFLA_ADDRESS, parse_mac(end.mac)))
    for kind, value in (
        (_IFLA_MTU, end.mtu),
        (_IFLA_GROUP, end.group),
        (_IFLA_NUM_TX_QUEUES, end.queues),
        (_IFLA_NUM_RX_QUEUES, end.queues),
    ):
        if value:
            parts.append(attribute_u32(kind, value))
    return b"".join(parts)


def _kind_attributes(kind: str, settings: bytes) -> list[bytes]:
    parts = [attribute_text(_IFLA_INFO_KIND, kind)]
    return [*parts, nested(_IFLA_INFO_DATA, settings)] if settings else parts


def _by_index_or_name(index: int, name: str) -> bytes:
    if bool(index) == bool(name):
        raise ValueError("name a device by its index or by its name, not by both or neither")
    body = _IFINFO.pack(0, 0, index, 0, 0)
    return body + attribute_text(_IFLA_IFNAME, name) if name else body


_WITHOUT_STATISTICS: Final = attribute_u32(_IFLA_EXT_MASK, _RTEXT_FILTER_SKIP_STATS)
_NO_LINK_LOCAL: Final = nested(
    _IFLA_AF_SPEC,
    nested(_AF_INET6, attribute(_IFLA_INET6_ADDR_GEN_MODE, bytes([_ADDR_GEN_MODE_NONE]))),
)
