"""An endpoint as the node remembers it: attachment, device, addresses, phase.

`EndpointRecord` is the journal's unit and the input of every step, of DEL, CHECK and restore. Values only.
"""

import enum
import functools
import ipaddress
from collections.abc import Mapping
from typing import Final

import msgspec

from podwire.model.identity import NamedPort
from podwire.model.ids import (
    ContainerId,
    EndpointId,
    IdentityId,
    IfIndex,
    InterfaceName,
    NetworkName,
)

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
PROTOCOLS: Final[Mapping[str, int]] = {"TCP": 6, "UDP": 17, "SCTP": 132}
"""Those that have ports, as CNI and Kubernetes write them: their numbers in IP headers."""
PROTOCOL_NAMES: Final[Mapping[int, str]] = {number: name for name, number in PROTOCOLS.items()}
_ADDRESSES_REMEMBERED = 4096
"""Texts of addresses that were read lately: an ADD asks for the same ones again and again."""


@functools.lru_cache(_ADDRESSES_REMEMBERED)
def _parse_address(text: str) -> IPAddress:
    return ipaddress.ip_address(text)


class AttachmentKey(msgspec.Struct, frozen=True, order=True):
    """What CNI calls an attachment: state is keyed by all three (specification 1.1.0, GC)."""

    network: NetworkName
    container_id: ContainerId
    if_name: InterfaceName

    def __str__(self) -> str:
        return f"{self.network}/{self.container_id}/{self.if_name}"


class Phase(enum.Enum):
    """How far the journal knows an attachment to be. Side effects exist only between the phases' writes."""

    ADDING = "adding"
    """The intent is on disk; any part of the datapath may exist."""
    LIVE = "live"
    """ADD was answered, or was complete and about to be."""
    DELETING = "deleting"
    """DEL was accepted; any part of the datapath may still exist, the addresses are held back."""


class Device(msgspec.Struct, frozen=True):
    """A device pair. Both indexes are chosen by us before the kernel makes the pair, so that rows can precede it."""

    kind: str
    host_name: InterfaceName
    host_ifindex: IfIndex
    host_mac: str
    pod_name: InterfaceName
    pod_ifindex: IfIndex
    pod_mac: str
    mtu: int


class Bandwidth(msgspec.Struct, frozen=True):
    """Limits of one endpoint; 0 = none. Directions are the pod's: CNI's "ingress" is towards the pod."""

    to_pod_bits_per_s: int = 0
    to_pod_burst_bits: int = 0
    from_pod_bits_per_s: int = 0
    from_pod_burst_bits: int = 0


class HostPort(msgspec.Struct, frozen=True, order=True):
    """A port of this host that leads to a port of the pod."""

    protocol: str
    """TCP, UDP or SCTP."""
    host_port: int
    pod_port: int
    host_ip: str = ""
    """The host's address; "" = each, 0.0.0.0 or :: = each of that family."""


class EndpointRecord(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything the node must know to finish, check, restore or undo one attachment."""

    id: EndpointId
    key: AttachmentKey
    phase: Phase
    boot_id: str
    """The kernel's boot id at the intent: under another one, nothing of this record exists any more."""
    taken_boottime_ns: int
    """CLOCK_BOOTTIME of the launcher's start: orders this attachment against DELs of the same key."""
    netns_path: str
    netns_cookie: int
    """Inode number of the namespace, so that a path that was reused is not taken for the old namespace."""
    device: Device
    ipv4: str = ""
    ipv6: str = ""
    """The endpoint's addresses without prefix length (they are always /32 and /128); "" = none of that family."""
    namespace: str = "default"
    pod: str = ""
    pod_uid: str = ""
    labels: tuple[str, ...] = ()
    """Canonical labels `source:key=value`, sorted: all of them, those of the namespace and of Workloads too."""
    own_labels: tuple[str, ...] = ()
    """Of `labels`, those that the attachment itself brought or was given by name."""
    identity_labels: tuple[str, ...] = ()
    """Of `labels`, those that `identity` is the number of."""
    named_ports: tuple[NamedPort, ...] = ()
    """What the pod calls its ports; part of its identity."""
    identity: IdentityId = IdentityId(0)
    """0 only in records of builds that had no identities."""
    policy_audit: bool | None = None
    """Whether policies only report what they would drop; None = as the node's setting says."""
    bandwidth: Bandwidth = Bandwidth()
    cni_version: str = ""
    fixed_addresses: bool = False
    is_plain: bool = False
    """Whether it is a container beside Kubernetes; a Pod object of that name is not it."""
    host_ports: tuple[HostPort, ...] = ()
    """Which ports of this host lead to it, sorted. An older one with the same UID gives them up to it."""
    may_ask_host_ports: bool = False
    """Whether its network hands host ports to podwire. False, also in records of builds that served none: `portmap`,
    chained, may serve some."""

    @functools.cached_property
    def addresses(self) -> tuple[IPAddress, ...]:
        """Addresses of the endpoint, IPv4 first."""
        return tuple(_parse_address(text) for text in (self.ipv4, self.ipv6) if text)
