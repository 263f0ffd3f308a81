"""Documents of objects, for tests of whoever reads and stores them."""

from typing import Any


def network_policy(
    name: str = "web", namespace: str | None = "default", **spec: Any
) -> dict[str, Any]:
    """Give a NetworkPolicy that names a pod selector, a range and a port."""
    metadata = {"name": name} | ({} if namespace is None else {"namespace": namespace})
    peers = [
        {"podSelector": {"matchLabels": {"app": "proxy"}}},
        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
    ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": {
            "podSelector": {"matchLabels": {"app": "web"}},
            "ingress": [{"from": peers, "ports": [{"protocol": "TCP", "port": 80}]}],
            **spec,
        },
    }


def cilium_policy(name: str = "web", namespace: str | None = "default") -> dict[str, Any]:
    """Give a CiliumNetworkPolicy; without a namespace the clusterwide one."""
    kind = "CiliumNetworkPolicy" if namespace else "CiliumClusterwideNetworkPolicy"
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    rule = {"fromEndpoints": [{"matchLabels": {"app": "proxy"}}]}
    spec = {"endpointSelector": {"matchLabels": {"app": "web"}}, "ingress": [rule]}
    return {"apiVersion": "cilium.io/v2", "kind": kind, "metadata": metadata, "spec": spec}


def cidr_group(name: str = "office") -> dict[str, Any]:
    """Give a CiliumCIDRGroup."""
    return {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumCIDRGroup",
        "metadata": {"name": name},
        "spec": {"externalCIDRs": ["192.0.2.0/24"]},
    }


def namespace_object(name: str, **labels: str) -> dict[str, Any]:
    """Give a Namespace."""
    metadata: dict[str, Any] = {"name": name} | ({"labels": labels} if labels else {})
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


def workload(name: str = "web", **spec: Any) -> dict[str, Any]:
    """Give a Workload."""
    spec = {"namePattern": "web-*", "labels": {"app": "web"}, **spec}
    return {
        "apiVersion": "podwire.io/v1",
        "kind": "Workload",
        "metadata": {"name": name},
        "spec": spec,
    }
