"""A flow as people read it: a packet event whose ends have names.

Made by `control.flows.enrich`, sent by the API as it stands here. Values only.
"""

import msgspec

PROTOCOLS = frozenset({"tcp", "udp", "icmp", "icmpv6", "sctp", "arp"})


class FlowService(msgspec.Struct, frozen=True):
    """A service that was asked."""

    namespace: str
    name: str
    port: int
    """The service's own, not that of the back end."""


class FlowEnd(msgspec.Struct, frozen=True, rename="camel"):
    """One side of a flow. `endpoint` is 0 and names are empty when it is no pod of this node."""

    endpoint: int = 0
    namespace: str = ""
    pod: str = ""
    identity: int = 0
    labels: tuple[str, ...] = ()
    ip: str = ""
    port: int = 0
    service: FlowService | msgspec.UnsetType = msgspec.UNSET
    """Of a destination: the service whose address the sender used."""


class FlowPolicy(msgspec.Struct, frozen=True, rename="camel"):
    """A rule that decided."""

    kind: str
    namespace: str
    name: str
    rule: str
    """Where it is in its policy: `ingress[0]`, or `default-deny` when nothing allowed the packet."""


class Flow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One packet event as people read it."""

    time: str
    """RFC 3339 in UTC, with microseconds: as text, times sort as times."""
    node: str
    type: str
    """`drop`, `trace` or `policy`."""
    verdict: str
    """`forwarded`, `dropped` or `audit`."""
    reason: str
    direction: str
    """`ingress` or `egress`, seen from the endpoint at whose hook it happened."""
    hook: str
    path: str
    source: FlowEnd = msgspec.field(name="from")
    destination: FlowEnd = msgspec.field(name="to")
    original_to: FlowEnd | msgspec.UnsetType = msgspec.UNSET
    """The destination that the sender used, where a service was translated."""
    protocol: str
    """`tcp`, `udp`, `icmp`, `icmpv6`, `sctp`, `arp`, or the number."""
    tcp_flags: str
    policies: tuple[FlowPolicy, ...] = ()
    bytes: int
    lost: int
    """Events and flows that were left out before this one because nobody read them in time."""
