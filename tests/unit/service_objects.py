"""Services and EndpointSlices for tests, in as few words as they need."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from podwire.model.store import ObjectKey, StoredObject
from podwire.model.store.kinds import ENDPOINT_SLICE, SERVICE


def service(
    name: str = "web",
    addresses: Sequence[str] = ("10.96.0.10",),
    ports: Iterable[Mapping[str, Any]] = ({"port": 80},),
    *,
    labels: Mapping[str, str] | None = None,
    ingress: Iterable[Mapping[str, str]] = (),
    **spec: object,
) -> dict[str, Any]:
    """Give a Service; `ingress`: what a load balancer has given it."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default", "labels": dict(labels or {})},
        "spec": {"clusterIPs": list(addresses), "ports": [dict(port) for port in ports], **spec},
        "status": {"loadBalancer": {"ingress": [dict(point) for point in ingress]}},
    }


def endpoint(
    address: str,
    *,
    node: str = "",
    zones: Sequence[str] = (),
    nodes: Sequence[str] = (),
    **conditions: object,
) -> dict[str, Any]:
    """Give a back end of a slice; `zones` and `nodes`: whom hints give it to."""
    hints = {
        name: [{"name": one} for one in given]
        for name, given in (("forZones", zones), ("forNodes", nodes))
        if given
    }
    one = {"addresses": [address], "conditions": conditions, "nodeName": node}
    return {**one, "hints": hints} if hints else one


def slice_of(
    name: str = "web",
    endpoints: Iterable[Mapping[str, Any]] = (),
    ports: Iterable[Mapping[str, Any]] = ({"port": 8080},),
    *,
    number: int = 1,
    family: str = "IPv4",
    labels: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Give the EndpointSlice of that number of a service."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{name}-{number}",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": name, **(labels or {})},
        },
        "addressType": family,
        "ports": [dict(port) for port in ports],
        "endpoints": [dict(endpoint) for endpoint in endpoints],
    }


def stored(document: Mapping[str, Any], created: str = "2026-01-01T00:00:00Z") -> StoredObject:
    """Give an object as the store has it."""
    kind = SERVICE if document["kind"] == SERVICE.name else ENDPOINT_SLICE
    metadata = document["metadata"]
    key = ObjectKey(kind.plural, metadata["namespace"], metadata["name"])
    return StoredObject(key=key, document=document, created=created)
