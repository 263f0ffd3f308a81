"""Flow events: what a program reported about one packet, as frozen values.

Made by `datapath.flow_events`, enriched and kept by `control`, shown by `monitor` and `observe`. Values only; names of
reasons, hooks and paths are those of bpf/include/podwire/abi.h in lower case with dashes.
"""

import enum

import msgspec

from podwire.model.ids import EndpointId, IdentityId, IfIndex


class Verdict(enum.Enum):
    """What became of a packet."""

    FORWARDED = "forwarded"
    DROPPED = "dropped"
    AUDIT = "audit"
    """Forwarded although a policy denies it, because the endpoint is only being audited."""


class FlowEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One packet as one of our programs saw it."""

    boottime_ns: int
    """CLOCK_BOOTTIME when the program ran."""
    kind: str
    """`drop`, `trace` or `policy`."""
    verdict: Verdict
    reason: str = ""
    """Why it was dropped; "" when it was not."""
    hook: str
    direction: str
    """`ingress` or `egress`, seen from the endpoint."""
    path: str
    endpoint: EndpointId
    """The endpoint at whose hook it happened; 0 = the device has no row."""
    ifindex: IfIndex
    source_identity: IdentityId
    destination_identity: IdentityId
    ethertype: int
    protocol: str = ""
    """`tcp`, `udp`, `icmp`, `icmpv6`, `sctp`, or the number; "" for what is not IP."""
    source: str = ""
    destination: str = ""
    source_port: int = 0
    """Port, or the type of an ICMP message."""
    destination_port: int = 0
    """Port, or the code of an ICMP message."""
    original_destination: str = ""
    """Address that the sender meant, before a service was translated; "" = nothing was."""
    original_port: int = 0
    tcp_flags: int = 0
    source_mac: str = ""
    length_bytes: int
    rule: int = 0
    policy_revision: int = 0
    lost: int = 0
    """Events of this endpoint that were not sent since the one before."""
