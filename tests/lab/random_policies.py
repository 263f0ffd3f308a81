"""Random policies of every kind, as documents, over the world of the tables; every one of them is valid.

Used by test_policy_random. All choices are of the given Random, so that a seed repeats them. Values are few, so that
selectors, ranges and addresses meet: most policies select somebody, and most flows meet a rule.
"""

from ipaddress import ip_network
from random import Random
from typing import Any, Final

from tests.policy_cases import NAMESPACES

Document = dict[str, Any]

POLICIES_MAX: Final = 5
LABELS: Final = {
    "app": ("a", "b", "c"),
    "tier": ("front", "back"),
    "canary": ("",),
    "example.com/role": ("db",),
}
NAMESPACE_LABELS: Final = {
    "team": ("blue", "red", "green"),
    "env": ("prod", "dev"),
    "kubernetes.io/metadata.name": tuple(NAMESPACES),
}
PORTS: Final = (1, 53, 80, 81, 443, 1024, 5353, 8080, 8081, 8087, 9090, 65535)
PORT_NAMES: Final = ("http", "metrics", "dns", "nobody")
PROTOCOLS: Final = ("TCP", "UDP", "SCTP")
CIDRS: Final = (
    "0.0.0.0/0",
    "10.0.0.0/8",
    "10.244.0.0/16",
    "10.244.1.0/24",
    "10.244.1.16/29",
    "10.244.1.21/32",
    "10.244.1.22/32",
    "192.0.2.0/24",
    "198.51.100.0/24",
    "198.51.100.10/32",
    "198.51.100.0/28",
    "203.0.113.20/32",
    "203.0.113.0/27",
    "::/0",
    "fd10:244::/32",
    "fd10:244:0:1::/64",
    "fd10:244:0:1::20/124",
    "fd10:244:0:1::21/128",
    "fd99::/64",
    "2001:db8::/32",
    "2001:db8:51::/48",
    "2001:db8:51::10/128",
    "2001:db8:113::20/128",
)
GROUPS: Final = ("one", "two")
ENTITIES: Final = (
    "all",
    "world",
    "world-ipv4",
    "world-ipv6",
    "cluster",
    "host",
    "remote-node",
    "unmanaged",
    "none",
)
ICMP_TYPES: Final = {"IPv4": (8, 13, "EchoRequest"), "IPv6": (128, 139, "EchoRequest")}


class Maker:
    """Makes documents."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def documents(self) -> list[Document]:
        """Make a set of policies, and the groups that they may name."""
        count = self._random.randint(1, POLICIES_MAX)
        makers = (self._k8s, self._k8s, self._cilium, self._cilium, self._clusterwide)
        made = [self._random.choice(makers)(f"p{number}") for number in range(count)]
        groups = [self._group(name) for name in GROUPS if self._chance(0.7)]
        return [*made, *groups]

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _some(self, make: Any, low: int, high: int) -> list[Any]:
        return [make() for _ in range(self._random.randint(low, high))]

    # NetworkPolicy

    def _k8s(self, name: str) -> Document:
        spec: Document = {"podSelector": self._selector(LABELS)}
        if self._chance(0.7):
            kinds = self._random.choice((["Ingress"], ["Egress"], ["Ingress", "Egress"]))
            spec["policyTypes"] = kinds
        for key, side in (("ingress", "from"), ("egress", "to")):
            if self._chance(0.6):
                spec[key] = self._some(lambda side=side: self._k8s_rule(side), 0, 3)
        return _document("networking.k8s.io/v1", "NetworkPolicy", name, self._namespace(), spec)

    def _k8s_rule(self, side: str) -> Document:
        rule: Document = {}
        if self._chance(0.8):
            rule[side] = self._some(self._k8s_peer, 0, 3)
        if self._chance(0.6):
            rule["ports"] = self._some(self._k8s_port, 0, 3)
        return rule

    def _k8s_peer(self) -> Document:
        if self._chance(0.35):
            cidr = self._random.choice(CIDRS)
            inside = [smaller for smaller in CIDRS if smaller != cidr and _is_inside(smaller, cidr)]
            excepted = self._random.sample(inside, min(len(inside), self._random.randint(0, 2)))
            return {"ipBlock": {"cidr": cidr, "except": excepted}}
        peer: Document = {}
        if self._chance(0.6):
            peer["podSelector"] = self._selector(LABELS)
        if not peer or self._chance(0.5):
            peer["namespaceSelector"] = self._selector(NAMESPACE_LABELS)
        return peer

    def _k8s_port(self) -> Document:
        port: Document = {"protocol": self._random.choice(PROTOCOLS)}
        kind = self._random.random()
        if kind < 0.2:
            return port
        if kind < 0.4:
            return {**port, "port": self._random.choice(PORT_NAMES)}
        first, last = sorted(self._random.choices(PORTS, k=2))
        port["port"] = first
        if self._chance(0.5):
            port["endPort"] = last
        return port

    # Selectors

    def _namespace(self) -> str:
        return self._random.choice(tuple(NAMESPACES))

    def _selector(self, labels: Any, prefix: str = "") -> Document:
        """Make a selector with nought to two requirements."""
        found: Document = {}
        for key in self._random.sample(tuple(labels), self._random.choice((0, 1, 1, 1, 2))):
            values = labels[key]
            if self._chance(0.5):
                found.setdefault("matchLabels", {})[prefix + key] = self._random.choice(values)
                continue
            operator = self._random.choice(("In", "NotIn", "Exists", "DoesNotExist"))
            expression: Document = {"key": prefix + key, "operator": operator}
            if operator in ("In", "NotIn"):
                count = self._random.randint(1, len(values))
                expression["values"] = self._random.sample(values, count)
            found.setdefault("matchExpressions", []).append(expression)
        return found

    def _cilium_selector(self) -> Document:
        prefix = self._random.choice(("", "", "any:", "cni:", "k8s:"))
        found = self._selector(LABELS, prefix)
        if self._chance(0.4):
            more = self._selector(NAMESPACE_LABELS, "k8s:io.cilium.k8s.namespace.labels.")
            found = _merge(found, more)
        elif self._chance(0.3):
            namespace = {"k8s:io.kubernetes.pod.namespace": self._namespace()}
            found = _merge(found, {"matchLabels": namespace})
        return found

    # CiliumNetworkPolicy

    def _cilium(self, name: str) -> Document:
        namespace = self._namespace()
        return _document("cilium.io/v2", "CiliumNetworkPolicy", name, namespace, *self._specs())

    def _clusterwide(self, name: str) -> Document:
        kind = "CiliumClusterwideNetworkPolicy"
        return _document("cilium.io/v2", kind, name, "", *self._specs(clusterwide=True))

    def _specs(self, *, clusterwide: bool = False) -> list[Document]:
        return self._some(lambda: self._spec(clusterwide=clusterwide), 1, 2)

    def _spec(self, *, clusterwide: bool) -> Document:
        subject = self._cilium_selector() if clusterwide else self._selector(LABELS)
        spec: Document = {"endpointSelector": subject}
        sections = ("ingress", "egress", "ingressDeny", "egressDeny")
        chosen = [section for section in sections if self._chance(0.45)] or ["ingress"]
        for key in chosen:
            side = "from" if key.startswith("ingress") else "to"
            spec[key] = self._some(lambda side=side: self._cilium_rule(side), 1, 3)
        if self._chance(0.3):
            keys = self._random.sample(("ingress", "egress"), self._random.randint(1, 2))
            spec["enableDefaultDeny"] = {key: self._chance(0.5) for key in keys}
        return spec

    def _cilium_rule(self, side: str) -> Document:
        rule: Document = {}
        kind = self._random.random()
        if kind < 0.4:
            rule[f"{side}Endpoints"] = self._some(self._cilium_selector, 1, 2)
        elif kind < 0.6:
            rule[f"{side}Entities"] = self._random.sample(ENTITIES, self._random.randint(1, 2))
        elif kind < 0.7:
            rule[f"{side}CIDR"] = self._random.sample(CIDRS, self._random.randint(1, 3))
        elif kind < 0.85:
            rule[f"{side}CIDRSet"] = self._some(self._cidr_rule, 1, 2)
        kind = self._random.random()
        if kind < 0.5:
            ports = self._some(self._cilium_port, 1, 3)
            rule["toPorts"] = [{"ports": ports}]
        elif kind < 0.65:
            rule["icmps"] = [{"fields": self._some(self._icmp, 1, 2)}]
        return rule

    def _cidr_rule(self) -> Document:
        kind = self._random.random()
        excepted = self._random.sample(CIDRS, self._random.randint(0, 2))
        if kind < 0.25:
            return {"cidrGroupRef": self._random.choice(GROUPS), "except": excepted}
        if kind < 0.4:
            wanted = {"matchLabels": {"kind": self._random.choice(("near", "far"))}}
            return {"cidrGroupSelector": wanted, "except": excepted}
        cidr = self._random.choice(CIDRS)
        return {
            "cidr": cidr,
            "except": [smaller for smaller in excepted if _is_inside(smaller, cidr)],
        }

    def _cilium_port(self) -> Document:
        port: Document = {"protocol": self._random.choice((*PROTOCOLS, "ANY"))}
        kind = self._random.random()
        if kind < 0.2:
            return {**port, "port": self._random.choice(PORT_NAMES)}
        if kind < 0.3:
            return {**port, "port": "0"}
        first, last = sorted(self._random.choices(PORTS, k=2))
        port["port"] = str(first)
        if self._chance(0.4):
            port["endPort"] = last
        return port

    def _icmp(self) -> Document:
        family = self._random.choice(("IPv4", "IPv6"))
        return {"family": family, "type": self._random.choice(ICMP_TYPES[family])}

    def _group(self, name: str) -> Document:
        document = _document(
            "cilium.io/v2",
            "CiliumCIDRGroup",
            name,
            "",
            {"externalCIDRs": self._random.sample(CIDRS, self._random.randint(0, 4))},
        )
        document["metadata"]["labels"] = {"kind": self._random.choice(("near", "far"))}
        return document


def _document(
    version: str, kind: str, name: str, namespace: str, *specs: Document | list[Document]
) -> Document:
    metadata: Document = {"name": name, **({"namespace": namespace} if namespace else {})}
    body = {"spec": specs[0]} if len(specs) == 1 else {"specs": list(specs)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}


def _merge(one: Document, other: Document) -> Document:
    merged: Document = {}
    if "matchLabels" in one or "matchLabels" in other:
        merged["matchLabels"] = {**one.get("matchLabels", {}), **other.get("matchLabels", {})}
    expressions = [*one.get("matchExpressions", []), *other.get("matchExpressions", [])]
    if expressions:
        merged["matchExpressions"] = expressions
    return merged


def _is_inside(inner: str, outer: str) -> bool:
    one, other = ip_network(inner), ip_network(outer)
    return one.version == other.version and one.subnet_of(other)  # type: ignore[arg-type]
