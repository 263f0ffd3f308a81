"""Name the two ends of a packet event: addresses become pods, numbers become words.

Called for each event when it is read, because the endpoint may be gone when somebody looks. Pure: the owner of an
address and the time are asked of arguments.
"""

import time
from collections.abc import Callable
from typing import Protocol

from msgspec import UNSET, UnsetType

from podwire.control.flows.flow import Flow, FlowEnd, FlowPolicy, FlowService
from podwire.model.flow import FlowEvent

ETHERTYPE_ARP = 0x0806
_TCP_FLAGS = ((0x02, "SYN"), (0x10, "ACK"), (0x01, "FIN"), (0x04, "RST"), (0x08, "PSH"))
_EGRESS = "egress"
_WITH_PORTS = frozenset({"tcp", "udp", "sctp"})


class NamedEndpoint(Protocol):
    """What a flow tells of an endpoint."""

    @property
    def id(self) -> int:
        """Its number."""
        ...

    @property
    def namespace(self) -> str:
        """Namespace of its pod."""
        ...

    @property
    def pod(self) -> str:
        """Name of its pod."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Its canonical labels."""
        ...


FindByAddress = Callable[[str], NamedEndpoint | None]
FindById = Callable[[int], NamedEndpoint | None]
NameRule = Callable[[int], FlowPolicy | None]
NameService = Callable[[str, int, str], FlowService | None]
"""Whose an address, port and protocol (`tcp`, `udp`) are."""
FindLabels = Callable[[int], tuple[str, ...]]
"""Labels of an identity, () for one that nobody knows."""


class FlowMaker:
    """Turns events of one node into flows."""

    def __init__(
        self,
        node: str,
        *,
        by_address: FindByAddress,
        by_id: FindById,
        name_rule: NameRule,
        labels_of: FindLabels,
        wall_offset_ns: Callable[[], int],
        name_service: NameService = lambda _address, _port, _protocol: None,
    ) -> None:
        self._node = node
        self._by_address = by_address
        self._by_id = by_id
        self._name_rule = name_rule
        self._labels_of = labels_of
        self._wall_offset_ns = wall_offset_ns
        self._name_service = name_service

    def make(self, event: FlowEvent) -> Flow:
        """Describe an event. The end at whose hook it happened is known by number, the other by
        address."""
        own = self._by_id(event.endpoint)
        has_ports = event.protocol in _WITH_PORTS
        source = own if event.direction == _EGRESS else self._find(event.source)
        destination = self._find(event.destination) if event.direction == _EGRESS else own
        policy = self._name_rule(event.rule) if event.rule else None
        return Flow(
            time=format_time_ns(event.boottime_ns + self._wall_offset_ns()),
            node=self._node,
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
        endpoint: NamedEndpoint | None,
        identity: int,
        ip: str,
        port: int,
        service: FlowService | UnsetType = UNSET,
    ) -> FlowEnd:
        if endpoint is None:
            labels = self._labels_of(identity)
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
        return self._name_service(*asked, event.protocol) or UNSET

    def _original(self, event: FlowEvent) -> FlowEnd | UnsetType:
        if not event.original_destination:
            return UNSET
        return FlowEnd(ip=event.original_destination, port=event.original_port)

    def _find(self, address: str) -> NamedEndpoint | None:
        return self._by_address(address) if address else None


def format_time_ns(unix_ns: int) -> str:
    """Write a Unix time as RFC 3339 in UTC with microseconds."""
    seconds, rest_ns = divmod(unix_ns, 1_000_000_000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{rest_ns // 1000:06d}Z"
