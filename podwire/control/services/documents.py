"""Service and EndpointSlice documents that people apply without Kubernetes: read strictly.

Called by `control.documents.kinds` before anything is written. Pure. Invariant: what is accepted is translated; what
Kubernetes would have a controller or kube-proxy do is refused by name.
"""

import ipaddress
from collections.abc import Mapping
from typing import Any, Final

from podwire.control.services.facts import (
    AFFINITY_MAX_S,
    CLIENT_IP,
    SAME_NODE,
    SERVICE_NAME_LABEL,
)
from podwire.control.services.reading import is_back_end_address
from podwire.model.documents.fields import is_port_name, read_label_map
from podwire.model.documents.reader import Faults, Node, root, shown
from podwire.model.endpoint import PROTOCOLS, IPAddress
from podwire.model.labels import NAME_KEY, NAMESPACE_KEY

HINT: Final = "nothing was changed; see docs/services.md"
PORTS_MAX: Final = 1000
ENDPOINTS_MAX: Final = 1000
_SERVICE_FIELDS: Final = (
    "type",
    "clusterIP",
    "clusterIPs",
    "ipFamilies",
    "ipFamilyPolicy",
    "ports",
    "sessionAffinity",
    "sessionAffinityConfig",
    "internalTrafficPolicy",
    "externalIPs",
    "externalTrafficPolicy",
    "publishNotReadyAddresses",
    "selector",
    "trafficDistribution",
)
_REFUSED: Final[Mapping[str, str]] = {
    "loadBalancerIP": "there are no load balancers here: write externalIPs",
    "externalName": "podwire answers no names",
}
_FAMILIES: Final = {"IPv4": 4, "IPv6": 6}


def decode_service_document(document: Mapping[str, Any]) -> None:
    """Check a Service; InvalidRequest with every fault."""
    faults = Faults()
    spec = root(document, faults).child("spec")
    if spec.expect_object(_SERVICE_FIELDS, _REFUSED):
        _check_choice(spec.child("type"), ("ClusterIP",))
        _check_affinity(spec)
        for policy in ("internalTrafficPolicy", "externalTrafficPolicy"):
            _check_choice(spec.child(policy), ("Cluster", "Local"))
        spec.child("publishNotReadyAddresses").boolean()
        _check_addresses(spec)
        _check_selector(spec)
        ports = spec.child("ports").items()
        if not 1 <= len(ports) <= PORTS_MAX:
            spec.child("ports").wrong(f"has {len(ports)} ports, not 1 to {PORTS_MAX}")
        seen: set[tuple[int | None, str]] = set()
        for port in ports:
            _check_service_port(port, len(ports), seen)
    faults.raise_if_any("decode Service", hint=HINT)


def _check_affinity(spec: Node) -> None:
    _check_choice(spec.child("sessionAffinity"), ("None", CLIENT_IP))
    config = spec.child("sessionAffinityConfig")
    if not config.present or not config.expect_object(("clientIP",)):
        return
    if spec.child("sessionAffinity").value != CLIENT_IP:
        config.wrong(f"is there, and sessionAffinity is not {CLIENT_IP}")
    client = config.child("clientIP")
    if client.expect_object(("timeoutSeconds",)):
        client.child("timeoutSeconds").integer(1, AFFINITY_MAX_S)


def _check_choice(node: Node, allowed: tuple[str, ...]) -> None:
    if node.present:
        node.choice(allowed)


def _check_addresses(spec: Node) -> None:
    one, several = spec.child("clusterIP"), spec.child("clusterIPs")
    nodes = several.items() or ([one] if one.present else [])
    if not nodes:
        one.wrong(
            "is missing: podwire chooses no addresses; take one that is in no range of pods or nodes"
        )
    if one.present and several.present and one.value != nodes[0].value:
        one.wrong(f"is {shown(one.value)}, not the first of clusterIPs")
    versions = [address.version for node in nodes if (address := _read_address(node)) is not None]
    if len(versions) != len(set(versions)):
        several.wrong("names two addresses of one family")
    for node in spec.child("externalIPs").items():
        _read_address(node)


def _check_selector(spec: Node) -> None:
    labels = read_label_map(spec.child("selector"))
    for key in labels:
        if key in (NAME_KEY, NAMESPACE_KEY):
            spec.child("selector").wrong(f"names {key}, which is no label of pods' identities")
    distribution = spec.child("trafficDistribution")
    if not distribution.present:
        return
    if not labels:
        distribution.wrong(
            "is for pods that a selector chooses: write hints into the EndpointSlices"
        )
    elif distribution.value in ("PreferClose", "PreferSameZone"):
        distribution.wrong("asks for zones, which nodes have with Kubernetes only")
    else:
        distribution.choice((SAME_NODE,))


def _read_address(node: Node) -> IPAddress | None:
    try:
        address = ipaddress.ip_address(node.text())
    except ValueError:
        node.wrong(f"is {shown(node.value)}, not an address")
        return None
    if not is_back_end_address(address, address.version):
        node.wrong(f"is {address}, which no packet can be sent to")
        return None
    return address


def _check_service_port(port: Node, count: int, seen: set[tuple[int | None, str]]) -> None:
    if not port.expect_object(("name", "port", "protocol", "targetPort", "appProtocol")):
        return
    protocol = _check_protocol(port)
    number = port.child("port").integer(1, 65535)
    if not port.child("port").present:
        port.child("port").wrong("is missing")
    _check_target(port.child("targetPort"))
    if protocol == "SCTP":
        _check_same_port(port.child("targetPort"), number)
    if (number, protocol) in seen:
        port.wrong("is there twice")
    seen.add((number, protocol))
    if not port.child("name").text() and count > 1:
        port.child("name").wrong("is missing: with several ports each has one")


def _check_target(target: Node) -> None:
    if isinstance(target.value, str):
        if not is_port_name(target.value):
            target.wrong(f"is {shown(target.value)}, not a port's name")
    elif target.present:
        target.integer(1, 65535)


def _check_same_port(target: Node, number: int | None) -> None:
    if target.present and target.value != number:
        target.wrong(
            f"is {shown(target.value)}, not the port: the programs change no ports of SCTP"
        )


def _check_protocol(port: Node) -> str:
    protocol = port.child("protocol")
    return protocol.choice(tuple(PROTOCOLS)) if protocol.present else "TCP"


def decode_slice_document(document: Mapping[str, Any]) -> None:
    """Check an EndpointSlice; InvalidRequest with every fault."""
    faults = Faults()
    top = root(document, faults)
    labels = top.child("metadata").child("labels")
    if not labels.child(SERVICE_NAME_LABEL).text():
        labels.child(SERVICE_NAME_LABEL).wrong("is missing: it names the service")
    family = _FAMILIES.get(top.child("addressType").choice(tuple(_FAMILIES)), 0)
    for port in top.child("ports").items():
        if port.expect_object(("name", "port", "protocol", "appProtocol")):
            _check_protocol(port)
            port.child("name").text()
            if port.child("port").integer(1, 65535) is None and not port.child("port").present:
                port.child("port").wrong("is missing")
    endpoints = top.child("endpoints").items()
    if len(endpoints) > ENDPOINTS_MAX:
        top.child("endpoints").wrong(f"has {len(endpoints)}, more than {ENDPOINTS_MAX}")
    for endpoint in endpoints[:ENDPOINTS_MAX]:
        _check_endpoint(endpoint, family)
    faults.raise_if_any("decode EndpointSlice", hint=HINT)


def _check_endpoint(endpoint: Node, family: int) -> None:
    known = ("addresses", "conditions", "hostname", "targetRef", "nodeName", "zone", "hints")
    if not endpoint.expect_object(known):
        return
    addresses = endpoint.child("addresses").items()
    if not addresses:
        endpoint.child("addresses").wrong("is missing")
    for node in addresses:
        address = _read_address(node)
        if address is not None and family and address.version != family:
            node.wrong(f"is {address}, which is not of the slice's addressType")
    conditions = endpoint.child("conditions")
    if conditions.present and conditions.expect_object(("ready", "serving", "terminating")):
        for name in ("ready", "serving", "terminating"):
            conditions.child(name).boolean()
