"""Name the two ends of a packet event: addresses become pods, numbers become words.

Called for each event when it is read, because the endpoint may be gone when somebody looks. Pure: the owner of an
address and the time are asked of arguments.
"""

import time
from collections.abc import Callable

import msgspec
from msgspec import UNSET, UnsetType

from podwire.control.flows.flow import Flow, FlowEnd, FlowPolicy, FlowService
from podwire.model.endpoint import EndpointRecord
from podwire.model.flow import FlowEvent

ETHERTYPE_ARP = 0x0806
_TCP_FLAGS = ((0x02, "SYN"), (0x10, "ACK"), (0x01, "FIN"), (0x04, "RST"), (0x08, "PSH"))
_EGRESS = "egress"
_WITH_PORTS = frozenset({"tcp", "udp", "sctp"})


FindByAddress = Callable[[str], EndpointRecord | None]
FindById = Callable[[int], EndpointRecord | None]
NameRule = Callable[[int], FlowPolicy | None]
NameService = Callable[[str, int, str], FlowService | None]
"""Whose an address, port and protocol (`tcp`, `udp`) are."""
FindLabels = Callable[[int], tuple[str, ...]]
"""Labels of an identity, () for one that nobody knows."""


class FlowMaker(msgspec.Struct, frozen=True):
    """Turns events of one node into flows."""

    node: str
    by_address: FindByAddress
    by_id: FindById
    name_rule: NameRule
    labels_of: FindLabels
    wall_offset_ns: Callable[[], int]
    name_service: NameService

    def make(self, event: FlowEvent) -> Flow:
        """Describe an event. The end at whose hook it happened is known by number, the other by
        address."""
        own = self.by_id(event.endpoint)
        has_ports = event.protocol in _WITH_PORTS
        source = own if event.direction == _EGRESS else self._find(event.source)
        destination = self._find(event.destination) if event.direction == _EGRESS else own
        policy = self.name_rule(event.rule) if event.rule else None
        return Flow(
            time=format_time_ns(event.boottime_ns + self.wall_offset_ns()),
            node=self.node,
            type=event.kind,
            verdict=event.verdict.value,
            reason=event.reason,
            direction=event.direction,
            hook=event.hook,
            path=event.path,
            source=self._end(
                source, event.source_identity, event.source, has_ports * event.source_port
            ),
            destination=self._end(
                destination,
                event.destination_identity,
                event.destination,
                has_ports * event.destination_port,
                self._find_service(event),
            ),
            original_to=self._original(event),
            protocol="arp" if event.ethertype == ETHERTYPE_ARP else event.protocol,
            tcp_flags=",".join(name for bit, name in _TCP_FLAGS if event.tcp_flags & bit),
            policies=(policy,) if policy else (),
            bytes=event.length_bytes,
            lost=event.lost,
        )

    def _end(
        self,
        endpoint: EndpointRecord | None,
        identity: int,
        ip: str,
        port: int,
        service: FlowService | UnsetType = UNSET,
    ) -> FlowEnd:
        if endpoint is None:
            labels = self.labels_of(identity)
            return FlowEnd(identity=identity, labels=labels, ip=ip, port=port, service=service)
        return FlowEnd(
            endpoint.id,
            endpoint.namespace,
            endpoint.pod,
            identity,
            endpoint.labels,
            ip,
            port,
            service,
        )

    def _find_service(self, event: FlowEvent) -> FlowService | UnsetType:
        """Name the service that the sender asked, if any; before a translation it is the destination itself."""
        if event.protocol not in _WITH_PORTS or event.direction != _EGRESS:
            return UNSET
        asked = (event.destination, event.destination_port)
        if event.original_destination:
            asked = (event.original_destination, event.original_port)
        return self.name_service(*asked, event.protocol) or UNSET

    def _original(self, event: FlowEvent) -> FlowEnd | UnsetType:
        if not event.original_destination:
            return UNSET
        return FlowEnd(ip=event.original_destination, port=event.original_port)

    def _find(self, address: str) -> EndpointRecord | None:
        return self.by_address(address) if address else None


def format_time_ns(unix_ns: int) -> str:
    """Write a Unix time as RFC 3339 in UTC with microseconds."""
    seconds, rest_ns = divmod(unix_ns, 1_000_000_000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{rest_ns // 1000:06d}Z"
