"""Ids, and every name that is derived from them.

Everything of podwire that the kernel or a person sees is named here, from stable inputs and never at random, so that
DEL, GC, restore and `cleanup` can compute the same name again from the attachment alone. Pure.
"""

import hashlib
import re
from typing import Final, NewType

ContainerId = NewType("ContainerId", str)
NetworkName = NewType("NetworkName", str)
InterfaceName = NewType("InterfaceName", str)
EndpointId = NewType("EndpointId", int)
"""Number of an endpoint on its node, 1 .. 2^32-1; never used twice on a node.
In keys and values of BPF maps it is the field `instance`, a name that an upgrade finds in the maps of older builds.
"""
IdentityId = NewType("IdentityId", int)
IfIndex = NewType("IfIndex", int)

DEVICE_PREFIX: Final = "pw"
DEVICE_HASH_DIGITS: Final = 12
ALIAS_PREFIX: Final = "podwire"
ROUTE_PROTOCOL: Final = 199
"""Tells our routes from others'. The kernel interprets no number from RTPROT_STATIC on (rtnetlink.h); iproute2's
rt_protos gives 199 to no routing daemon."""
NFT_TABLE: Final = "podwire"
ABI_DIRECTORY_PREFIX: Final = "v"
INTERFACE_NAME_MAX_BYTES: Final = 15

FILTER_PRIORITY: Final = 1
FILTER_HANDLE: Final = 1
MARK_FILTER_HANDLE: Final = 2
"""Beside the other one at a tunnel's egress, so that builds which do not know it leave it there."""
NETDEV_FILTER_PRIORITY: Final = 7
"""On a device of the host: before those that the kernel chooses, so it is never taken."""
NETDEV_FILTER_HANDLE: Final = 0x7077

DEFAULT_NAMESPACE: Final = "default"
"""The namespace of pods and objects that name none."""
NAMESPACE_MAX_CHARACTERS: Final = 63

# Link-local addresses: they are never routed (RFC 3927 2.7, RFC 4291 2.5.6), so all pods can have the same gateway, and
# no range of pods can contain it (`model.config` refuses such ranges).
GATEWAY_IPV4: Final = "169.254.1.1"
GATEWAY_IPV6: Final = "fe80::1"

_CONTAINER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*")
_NETWORK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*")
_LABEL_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_ALIAS = re.compile(rf"{ALIAS_PREFIX}:(?P<node>[^:]+):(?P<id>[0-9]+)")


def host_device_name(container_id: ContainerId, if_name: InterfaceName) -> InterfaceName:
    """Name the host end of an attachment's device pair: 14 bytes, the same on every call."""
    # The kernel keeps 15 bytes of a name (IFNAMSIZ); a container id alone has 64 characters.
    digest = hashlib.sha256(f"{container_id}/{if_name}".encode()).hexdigest()
    return InterfaceName(DEVICE_PREFIX + digest[:DEVICE_HASH_DIGITS])


def device_mac(endpoint_id: EndpointId, side: int) -> str:
    """Give the MAC of one side of a pair (0 = pod, 1 = host): locally administered, from the endpoint's number."""
    if side not in (0, 1):
        raise ValueError(f"side must be 0 (pod) or 1 (host), not {side!r}")
    # 0x0A and 0x0E: locally administered and unicast. Ids are never used twice, so neither are MACs, and no neighbour
    # keeps a wrong one.
    raw = bytes([0x0A if side == 0 else 0x0E, 0x70]) + int(endpoint_id).to_bytes(4, "big")
    return raw.hex(":")


def device_alias(node_name: str, endpoint_id: EndpointId) -> str:
    """Give the mark that tells our devices from foreign ones: `podwire:<node>:<endpoint id>`."""
    return f"{ALIAS_PREFIX}:{node_name}:{endpoint_id}"


def parse_device_alias(alias: str) -> tuple[str, EndpointId] | None:
    """Read a mark written by `device_alias`; None for anything that is not ours."""
    match = _ALIAS.fullmatch(alias)
    return (match["node"], EndpointId(int(match["id"]))) if match else None


def is_valid_container_id(text: str) -> bool:
    """Tell whether `text` may name a container (CNI specification 1.1.0, "Parameters": CNI_CONTAINERID)."""
    return _CONTAINER_ID.fullmatch(text) is not None


def is_valid_network_name(text: str) -> bool:
    """Tell whether `text` may name a network (CNI specification 1.1.0, "Configuration format": name)."""
    return _NETWORK_NAME.fullmatch(text) is not None


def is_valid_namespace(text: str) -> bool:
    """Tell whether a namespace of pods and objects may be called so. Source: RFC 1123, a label; lower case only."""
    return len(text) <= NAMESPACE_MAX_CHARACTERS and _LABEL_NAME.fullmatch(text) is not None


def interface_name_fault(text: str) -> str | None:
    """Say what is wrong with an interface name, or None.

    The kernel's rules: dev_valid_name() in net/core/dev.c.
    """
    if not text:
        return "is empty"
    if len(text.encode()) > INTERFACE_NAME_MAX_BYTES:
        return f"is longer than {INTERFACE_NAME_MAX_BYTES} bytes"
    if text in (".", "..") or any(char in "/:%\0" or char.isspace() for char in text):
        return "is '.' or '..', or has a character that the kernel refuses or rewrites ('/:%', NUL, white space)"
    return None
