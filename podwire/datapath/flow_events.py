"""Read the programs' events: ring buffer -> flow values.

Called by the agent's event loop when `fd` is readable. Never asks which pod an endpoint is (that is `control`'s task),
never waits. Invariant: every record is returned once, in the ring's order. What could not be sent is counted in the
`lost` of a later record. Not thread-safe.
"""

from typing import Final

from podwire.datapath import abi
from podwire.datapath.maps import NodeMaps, from_mapped
from podwire.kernel.bpf_ring import RingReader
from podwire.model.closing import Closing
from podwire.model.flow import FlowEvent, Verdict
from podwire.model.ids import EndpointId, IdentityId, IfIndex

_ETHERTYPES_IP: Final = frozenset({0x0800, 0x86DD})
_PROTOCOLS: Final = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmpv6", 132: "sctp"}
_REASONS: Final = {reason.value: reason.name.lower().replace("_", "-") for reason in abi.DropReason}
_HOOKS: Final = {hook.value: hook.name.lower() for hook in abi.Hook}
_PATHS: Final = {path.value: path.name.lower() for path in abi.Path}
_KINDS: Final = {kind.value: kind.name.lower() for kind in abi.EventKind}


def reason_name(reason: int) -> str:
    """Name a drop reason as people see it; a number that this build does not know stays a number."""
    return _REASONS.get(reason, str(reason))


def hook_name(hook: int) -> str:
    """Name a hook: `from_pod`, `to_pod`, ..."""
    return _HOOKS.get(hook, str(hook))


def path_name(path: int) -> str:
    """Name a path: `local`, `stack`, ..."""
    return _PATHS.get(path, str(path))


def protocol_name(protocol: int) -> str:
    """Name an IP protocol; a number that has no short name here stays a number."""
    return _PROTOCOLS.get(protocol, str(protocol))


def decode_event(event: abi.Event) -> FlowEvent:
    """Turn a record into a flow event."""
    is_ip = event.ethertype in _ETHERTYPES_IP
    # The programs fill it only where a service's address was replaced.
    is_translated = is_ip and any(event.original_daddr)
    return FlowEvent(
        boottime_ns=event.time_ns,
        kind=_KINDS.get(event.kind, str(event.kind)),
        verdict=_verdict(event),
        reason=reason_name(event.reason) if event.reason else "",
        hook=hook_name(event.hook),
        direction="ingress" if event.direction == abi.Direction.INGRESS else "egress",
        path=path_name(event.path),
        endpoint=EndpointId(event.instance),
        ifindex=IfIndex(event.ifindex),
        source_identity=IdentityId(event.source_identity),
        destination_identity=IdentityId(event.destination_identity),
        ethertype=event.ethertype,
        protocol=protocol_name(event.protocol) if is_ip else "",
        source=str(from_mapped(event.saddr)) if is_ip else "",
        destination=str(from_mapped(event.daddr)) if is_ip else "",
        source_port=event.sport,
        destination_port=event.dport,
        original_destination=str(from_mapped(event.original_daddr)) if is_translated else "",
        original_port=event.original_dport,
        tcp_flags=event.tcp_flags,
        source_mac=event.source_mac.hex(":"),
        length_bytes=event.length_bytes,
        rule=event.rule,
        policy_revision=event.policy_revision,
        lost=event.lost,
    )


def _verdict(event: abi.Event) -> Verdict:
    if event.kind == abi.EventKind.DROP:
        return Verdict.DROPPED
    # A policy event that carries a reason tells of a packet that only the audit let through.
    audited = event.kind == abi.EventKind.POLICY and event.reason != abi.DropReason.NONE
    return Verdict.AUDIT if audited else Verdict.FORWARDED


class EventReader(Closing):
    """The node's one reader of the ring. Owner of its mapping."""

    def __init__(self, maps: NodeMaps) -> None:
        # A newer program may append fields, which the reader cuts off: for a moment of a return to an older build
        # such programs still run.
        self._ring = RingReader(maps.pw_events, record_bytes=abi.EVENT_BYTES)
        self.fd = self._ring.fd

    def read(self) -> list[FlowEvent]:
        """Give the events that are there, up to one buffer full; empty when there are none."""
        data, _ = self._ring.take()
        return [decode_event(event) for event in abi.Event.unpack_all(data)]

    def close(self) -> None:
        """Give the mapping back."""
        self._ring.close()
