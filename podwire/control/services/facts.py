"""What is needed of a Service and of an EndpointSlice, decoded once.

Called by `control.services.catalogue`. Pure. What is ignored is what kube-proxy ignores: services of type
ExternalName, headless ones, those that another proxy serves, and slices of headless services. Invariant: nothing is
translated that is not understood whole: such a service says why it is left to the stack.
"""

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from podwire.model.endpoint import IPAddress
from podwire.model.store import StoredObject

SERVICE_NAME_LABEL: Final = "kubernetes.io/service-name"
"""On a slice: the service that it is of."""
OTHER_PROXY_LABEL: Final = "service.kubernetes.io/service-proxy-name"
HEADLESS_LABEL: Final = "service.kubernetes.io/headless"
PROTOCOLS: Final[Mapping[str, int]] = {"TCP": 6, "UDP": 17}
"""Those that are translated; SCTP is left to the stack."""
_FAMILIES: Final = {"IPv4": 4, "IPv6": 6}
_PORT_MAX: Final = 65535
_BROADCAST: Final = ipaddress.IPv4Address("255.255.255.255")


@dataclass(frozen=True, slots=True, order=True)
class ServiceName:
    """Which service."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ServicePort:
    """One port that is asked for."""

    name: str
    port: int
    protocol: int


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """One Service with addresses of the cluster."""

    name: ServiceName
    created: str
    addresses: tuple[IPAddress, ...]
    ports: tuple[ServicePort, ...]
    is_local_only: bool = False
    """internalTrafficPolicy Local: only back ends of this node answer."""
    left_because: str = ""
    """Why it is left to the stack; empty = it is translated."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One back end of a slice."""

    addresses: tuple[IPAddress, ...]
    is_ready: bool
    is_draining: bool
    """Terminating, and still serving."""
    node: str


@dataclass(frozen=True, slots=True)
class SliceFacts:
    """One EndpointSlice."""

    service: ServiceName
    ports: Mapping[tuple[str, int], int]
    """(name, protocol) -> number."""
    endpoints: tuple[Endpoint, ...]


def decode_service(stored: StoredObject) -> ServiceFacts | None:
    """Read a Service; None for one that is ignored."""
    metadata, spec = _members(stored.document, "metadata"), _members(stored.document, "spec")
    if OTHER_PROXY_LABEL in _members(metadata, "labels") or spec.get("type") == "ExternalName":
        return None
    listed = spec.get("clusterIPs") or [spec.get("clusterIP")]
    texts = [text for text in listed if isinstance(text, str)] if isinstance(listed, list) else []
    if "None" in texts:
        return None
    read = (_address(text) for text in texts)
    addresses = tuple(one for one in read if one and is_back_end_address(one, one.version))
    return ServiceFacts(
        name=ServiceName(stored.key.namespace, stored.key.name),
        created=stored.created,
        addresses=addresses,
        ports=tuple(_read_ports(spec)),
        is_local_only=spec.get("internalTrafficPolicy") == "Local",
        left_because=_find_reason(spec),
    )


def _find_reason(spec: Mapping[str, Any]) -> str:
    if spec.get("sessionAffinity") not in (None, "", "None"):
        return "it has session affinity"
    return ""


def _read_ports(spec: Mapping[str, Any]) -> Iterator[ServicePort]:
    for port in _items(spec, "ports"):
        protocol = PROTOCOLS.get(str(port.get("protocol") or "TCP"))
        number = _read_port(port)
        if protocol is not None and number:
            yield ServicePort(_text(port, "name"), number, protocol)


def decode_slice(stored: StoredObject) -> SliceFacts | None:
    """Read an EndpointSlice; None for one that is ignored."""
    document = stored.document
    labels = _members(_members(document, "metadata"), "labels")
    name = labels.get(SERVICE_NAME_LABEL)
    family = _FAMILIES.get(str(document.get("addressType")))
    if not isinstance(name, str) or not name or family is None:
        return None
    if HEADLESS_LABEL in labels or OTHER_PROXY_LABEL in labels:
        return None
    return SliceFacts(
        ServiceName(stored.key.namespace, name),
        dict(_read_slice_ports(document)),
        tuple(_read_endpoint(one, family) for one in _items(document, "endpoints")),
    )


def _read_slice_ports(document: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], int]]:
    for port in _items(document, "ports"):
        protocol = PROTOCOLS.get(str(port.get("protocol") or "TCP"))
        number = _read_port(port)
        if protocol is not None and number:
            yield (_text(port, "name"), protocol), number


def _read_endpoint(endpoint: Mapping[str, Any], family: int) -> Endpoint:
    conditions = _members(endpoint, "conditions")
    listed = endpoint.get("addresses")
    texts = [text for text in listed if isinstance(text, str)] if isinstance(listed, list) else []
    addresses = (_address(text) for text in texts[:1])
    return Endpoint(
        # Consumers take the first one: all of an endpoint's addresses are the same to it (EndpointSlice, v1).
        tuple(one for one in addresses if one is not None and is_back_end_address(one, family)),
        is_ready=conditions.get("ready") is not False,
        is_draining=conditions.get("serving") is not False
        and conditions.get("terminating") is True,
        node=_text(endpoint, "nodeName"),
    )


def is_back_end_address(address: IPAddress, family: int) -> bool:
    """Tell whether packets can be sent there: never to what means another host on each host."""
    if isinstance(address, ipaddress.IPv6Address):
        means_more = address.ipv4_mapped is not None or address.scope_id is not None
    else:
        means_more = address.packed[0] == 0 or address == _BROADCAST  # RFC 1122 3.2.1.3
    return address.version == family and not (
        address.is_loopback
        or address.is_unspecified
        or address.is_link_local
        or address.is_multicast
        or means_more
    )


def _address(text: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _read_port(port: Mapping[str, Any]) -> int:
    """Give its number; 0 = it has none."""
    number = port.get("port")
    if not isinstance(number, int) or isinstance(number, bool):
        return 0
    return number if 0 < number <= _PORT_MAX else 0


def _members(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = holder.get(name)
    return value if isinstance(value, Mapping) else {}


def _items(holder: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = holder.get(name)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _text(holder: Mapping[str, Any], name: str) -> str:
    value = holder.get(name)
    return value if isinstance(value, str) else ""
