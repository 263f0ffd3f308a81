"""What is needed of a Service and of an EndpointSlice, decoded once.

Called by `control.services.catalogue`. Pure. What is ignored is what kube-proxy ignores: services of type
ExternalName, headless ones, those that another proxy serves, and slices of headless services. Invariant: nothing is
translated that is not understood whole: such a service says why it is left to the stack.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from podwire.control.services.external import read_external
from podwire.control.services.reading import Left, is_back_end_address, read_number
from podwire.model.documents.fields import PORT_MAX
from podwire.model.documents.lenient import items_of, members_of, read_address, text_of, texts_of
from podwire.model.endpoint import PROTOCOLS, IPAddress, IPNetwork
from podwire.model.store import StoredObject
from podwire.model.store.packed import unpack

SERVICE_NAME_LABEL: Final = "kubernetes.io/service-name"
"""On a slice: the service that it is of."""
OTHER_PROXY_LABEL: Final = "service.kubernetes.io/service-proxy-name"
HEADLESS_LABEL: Final = "service.kubernetes.io/headless"
SAME_NODE: Final = "PreferSameNode"
"""Of trafficDistribution."""
_FAMILIES: Final = {"IPv4": 4, "IPv6": 6}
CLIENT_IP: Final = "ClientIP"
AFFINITY_S: Final = 10_800
AFFINITY_MAX_S: Final = 86_400
"""Kubernetes' own default and limit of timeoutSeconds."""


class ServiceName(msgspec.Struct, frozen=True, order=True):
    """Which service."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ServicePort(msgspec.Struct, array_like=True, frozen=True):
    """One port that is asked for."""

    name: str
    port: int
    protocol: int
    target: int | str = 0
    """At the pods, where they are chosen by labels: a number, a port's name, or 0 = the same."""


class ServiceFacts(msgspec.Struct, frozen=True):
    """One Service with addresses of the cluster."""

    name: ServiceName
    created: str
    addresses: tuple[IPAddress, ...]
    ports: tuple[ServicePort, ...]
    is_local_only: bool = False
    """internalTrafficPolicy Local: only back ends of this node answer."""
    external: tuple[IPAddress, ...] = ()
    """Where it is asked, too: externalIPs and those of load balancers. Their other ports are not refused."""
    affinity_s: int = 0
    """For how long after its last flow a pod keeps its back end; 0: not at all."""
    is_left: bool = False
    """Whether it is left to the stack as a whole."""
    left: tuple[Left, ...] = ()
    """What of it is left to the stack whoever its back ends are, and why."""
    uid: str = ""
    selector: tuple[tuple[str, str], ...] = ()
    """The labels of its pods; (): EndpointSlices alone say who answers."""
    prefers_node: bool = False
    """trafficDistribution PreferSameNode, for pods that are chosen by labels; in EndpointSlices hints say it."""


class Endpoint(msgspec.Struct, array_like=True, frozen=True):
    """What is said of a back end beside its address."""

    is_ready: bool
    is_draining: bool
    """Terminating, and still serving."""
    node: str
    for_nodes: frozenset[str] = frozenset()
    """The nodes whose pods it should answer; empty: no hint says."""
    for_zones: frozenset[str] = frozenset()


class SliceFacts(msgspec.Struct, frozen=True):
    """One EndpointSlice."""

    service: ServiceName
    ports: Mapping[tuple[str, int], int]
    """(name, protocol) -> number."""
    addresses: tuple[IPAddress, ...]
    endpoints: tuple[Endpoint, ...]
    """What is said of the back end at each address."""


def decode_service(stored: StoredObject, pods: Sequence[IPNetwork] = ()) -> ServiceFacts | None:
    """Read a Service; None for one that is ignored. `pods`: the ranges of all pods, as far as they are known."""
    document = unpack(stored.document)
    metadata, spec = members_of(document, "metadata"), members_of(document, "spec")
    if OTHER_PROXY_LABEL in members_of(metadata, "labels") or spec.get("type") == "ExternalName":
        return None
    texts = texts_of(spec, "clusterIPs") or [text_of(spec, "clusterIP")]
    if "None" in texts:
        return None
    read = (read_address(text) for text in texts)
    addresses = tuple(
        address for address in read if address and is_back_end_address(address, address.version)
    )
    external, left = read_external(document, pods)
    whole = tuple(_find_reasons(spec))
    return ServiceFacts(
        name=ServiceName(stored.key.namespace, stored.key.name),
        created=stored.created,
        addresses=addresses,
        ports=tuple(_read_ports(spec)),
        is_local_only=spec.get("internalTrafficPolicy") == "Local",
        external=tuple(address for address in external if address not in addresses),
        affinity_s=_read_affinity(spec),
        is_left=bool(whole),
        left=(*whole, *left),
        uid=stored.uid,
        selector=_read_selector(spec),
        prefers_node=spec.get("trafficDistribution") == SAME_NODE,
    )


def _read_selector(spec: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, str(value)) for key, value in members_of(spec, "selector").items()))


def _find_reasons(spec: Mapping[str, Any]) -> Iterator[Left]:
    """Say why a service is left to the stack as a whole."""
    if spec.get("sessionAffinity") not in (None, "", "None", CLIENT_IP):
        yield Left("session-affinity", "its sessionAffinity is neither None nor ClientIP")


def _read_affinity(spec: Mapping[str, Any]) -> int:
    if spec.get("sessionAffinity") != CLIENT_IP:
        return 0
    config = members_of(members_of(spec, "sessionAffinityConfig"), "clientIP")
    return read_number(config.get("timeoutSeconds"), AFFINITY_MAX_S) or AFFINITY_S


def _read_ports(spec: Mapping[str, Any]) -> Iterator[ServicePort]:
    for port in items_of(spec, "ports"):
        protocol = PROTOCOLS.get(str(port.get("protocol") or "TCP"))
        number = read_number(port.get("port"), PORT_MAX)
        if protocol is not None and number:
            yield ServicePort(text_of(port, "name"), number, protocol, _read_target(port))


def _read_target(port: Mapping[str, Any]) -> int | str:
    target = port.get("targetPort")
    return target if isinstance(target, str) else read_number(target, PORT_MAX)


def decode_slice(stored: StoredObject) -> SliceFacts | None:
    """Read an EndpointSlice; None for one that is ignored."""
    document = unpack(stored.document)
    labels = members_of(members_of(document, "metadata"), "labels")
    name = labels.get(SERVICE_NAME_LABEL)
    family = _FAMILIES.get(str(document.get("addressType")))
    if not isinstance(name, str) or not name or family is None:
        return None
    if HEADLESS_LABEL in labels or OTHER_PROXY_LABEL in labels:
        return None
    found = [
        (address, _read_endpoint(endpoint))
        for endpoint in items_of(document, "endpoints")
        # Consumers take the first one: all of an endpoint's addresses are the same to it (EndpointSlice, v1).
        for address in map(read_address, texts_of(endpoint, "addresses")[:1])
        if address is not None and is_back_end_address(address, family)
    ]
    return SliceFacts(
        ServiceName(stored.key.namespace, name),
        {(port.name, port.protocol): port.port for port in _read_ports(document)},
        tuple(address for address, _ in found),
        tuple(endpoint for _, endpoint in found),
    )


def _read_endpoint(endpoint: Mapping[str, Any]) -> Endpoint:
    conditions, hints = members_of(endpoint, "conditions"), members_of(endpoint, "hints")
    return Endpoint(
        conditions.get("ready") is not False,
        conditions.get("serving") is not False and conditions.get("terminating") is True,
        text_of(endpoint, "nodeName"),
        _read_hints(hints, "forNodes"),
        _read_hints(hints, "forZones"),
    )


def _read_hints(hints: Mapping[str, Any], name: str) -> frozenset[str]:
    return frozenset(text_of(hint, "name") for hint in items_of(hints, name)) - {""}
