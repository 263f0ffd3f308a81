"""Tables of cases: what a policy means, written as policies and the flows that pass or do not.

`network_policy.CASES`, `cilium_policy.CASES` and `bad_documents.CASES` are data, used twice: unit tests put them to the
oracle, and lab tests send real packets. A case's id is the fact that it pins; no two pin the same one.

Who there is, in every case (NAMESPACES, PODS, OUTSIDE below):

- namespaces `default` (no labels), `blue` (team=blue, env=prod), `red` (team=red, env=dev); each also has its
  `kubernetes.io/metadata.name`;
- in each of them pods `a`, `b` and `c` with the same labels and named ports everywhere; labels have the source `cni`,
  as those of containers without Kubernetes do, unless the case says `source="k8s"`;
- `host`: a process of the node the pods are on; `client` and `server`: two addresses outside the cluster;
- `remote` (another node) and `unmanaged` (an address of the cluster that no endpoint has): for the oracle only.

A flow is written `FROM>TO:PORT/PROTOCOL` with tcp, udp, sctp, `FROM>TO:ping` for an echo request of either family, or
`FROM>TO:TYPE/icmp` (IPv4), `FROM>TO:TYPE/icmp6`. A pod without namespace is of `blue`. "Passes" means that the first
packet arrives and its answer comes back. Every case holds for IPv4 and IPv6 unless `families` says otherwise.
"""

import ipaddress
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from podwire.control.policy.rule import ICMP, ICMPV6, SCTP, TCP, UDP
from podwire.model.endpoint import IPAddress
from podwire.model.identity import RESERVED_LABELS, IdentityFacts, NamedPort, Reserved
from podwire.model.labels import namespace_labels, sort_labels

HOME: Final = "blue"
"""The namespace of policies and of pods that name none."""

NAMESPACES: Final[Mapping[str, Mapping[str, str]]] = {
    "default": {},
    "blue": {"team": "blue", "env": "prod"},
    "red": {"team": "red", "env": "dev"},
}

PROTOCOLS: Final = {"tcp": TCP, "udp": UDP, "sctp": SCTP, "icmp": ICMP, "icmp6": ICMPV6}
ECHO_REQUEST: Final = {4: 8, 6: 128}


@dataclass(frozen=True)
class Pod:
    """A pod of the table's world: fixed addresses, labels without source, named ports."""

    namespace: str
    name: str
    labels: Mapping[str, str]
    ports: tuple[NamedPort, ...]
    ipv4: str
    ipv6: str

    @property
    def title(self) -> str:
        """Its name in flows."""
        return f"{self.namespace}/{self.name}"

    def canonical_labels(self, source: str) -> tuple[str, ...]:
        """Its labels as an identity has them."""
        own = (f"{source}:{key}={value}" for key, value in self.labels.items())
        return sort_labels([*own, *namespace_labels(self.namespace, NAMESPACES[self.namespace])])


@dataclass(frozen=True)
class Outsider:
    """Somebody who is no endpoint."""

    name: str
    identity: Reserved
    ipv4: str
    ipv6: str
    real: bool = True
    """Whether a lab of one node has it."""

    @property
    def facts(self) -> IdentityFacts:
        """What policy knows of it."""
        return IdentityFacts(self.identity, RESERVED_LABELS[self.identity])


@dataclass(frozen=True)
class Flow:
    """One attempt to talk, and whether it succeeds. `protocol` is a key of PROTOCOLS, or "ping" (then `port` is 0)."""

    source: str
    target: str
    protocol: str
    port: int
    allowed: bool

    def __str__(self) -> str:
        what = "ping" if self.protocol == "ping" else f"{self.port}/{self.protocol}"
        return f"{self.source}>{self.target}:{what}"

    def numbers(self, family: int) -> tuple[int, int]:
        """Give protocol number and port as the datapath has them: of ICMP type << 8 | code (0)."""
        if self.protocol == "ping":
            return (ICMP if family == 4 else ICMPV6), ECHO_REQUEST[family] << 8
        number = PROTOCOLS[self.protocol]
        return number, self.port << 8 if number in (ICMP, ICMPV6) else self.port

    def exists_in(self, family: int) -> bool:
        """Tell whether there are such packets in IPv4 (4) or IPv6 (6)."""
        return self.protocol != ("icmp6" if family == 4 else "icmp")

    @property
    def real(self) -> bool:
        """Tell whether a lab of one node can send it."""
        return all(
            OUTSIDE[name].real for name in (self.source, self.target) if name in OUTSIDE
        ) and self.protocol not in ("icmp", "icmp6")


@dataclass(frozen=True)
class Case:
    """One fact: with these policies in force, these flows pass and these do not."""

    id: str
    documents: tuple[str, ...]
    """YAML, one document each, complete: as `podwire apply -f` takes them."""
    flows: tuple[Flow, ...]
    families: tuple[int, ...] = (4, 6)
    source: str = "cni"
    """Source of the pods' labels; a lab without Kubernetes has `cni` only."""


@dataclass(frozen=True)
class BadDocument:
    """A document that is refused: one of its faults has `path`, and a message with `message` in it."""

    id: str
    document: object
    path: str
    message: str


def _make_pods() -> dict[str, Pod]:
    kinds: tuple[tuple[str, dict[str, str], tuple[NamedPort, ...]], ...] = (
        (
            "a",
            {"app": "a", "tier": "front"},
            (NamedPort("dns", UDP, 5353), NamedPort("http", TCP, 8080)),
        ),
        (
            "b",
            {"app": "b", "tier": "back"},
            (NamedPort("http", TCP, 8081), NamedPort("metrics", TCP, 9090)),
        ),
        ("c", {"app": "c", "canary": "", "example.com/role": "db"}, ()),
    )
    pods = [
        Pod(
            namespace,
            name,
            labels,
            ports,
            f"10.244.1.{10 * row + column}",
            f"fd10:244:0:1::{10 * row + column}",
        )
        for row, namespace in enumerate(NAMESPACES, 1)
        for column, (name, labels, ports) in enumerate(kinds, 1)
    ]
    return {pod.title: pod for pod in pods}


PODS: Final = _make_pods()
"""default/a 10.244.1.11 to red/c 10.244.1.33; IPv6 fd10:244:0:1::11 to ::33, the digits are the same."""

OUTSIDE: Final = {
    one.name: one
    for one in (
        Outsider("host", Reserved.HOST, "192.0.2.10", "fd99::a"),
        Outsider("client", Reserved.WORLD, "198.51.100.10", "2001:db8:51::10"),
        Outsider("server", Reserved.WORLD, "203.0.113.20", "2001:db8:113::20"),
        Outsider("remote", Reserved.REMOTE_NODE, "192.0.2.11", "fd99::b", real=False),
        Outsider("unmanaged", Reserved.UNMANAGED, "10.244.9.9", "fd10:244:0:9::9", real=False),
    )
}

_FLOW: Final = re.compile(
    r"(?P<source>[a-z/]+)>(?P<target>[a-z/]+):(?:(?P<port>\d+)/(?P<protocol>[a-z0-9]+)|ping)"
)


def address_of(name: str, family: int) -> IPAddress:
    """Give the address of a pod or an outsider."""
    owner = PODS.get(name) or OUTSIDE[name]
    return ipaddress.ip_address(owner.ipv4 if family == 4 else owner.ipv6)


def parse_flows(text: str, *, allowed: bool) -> tuple[Flow, ...]:
    """Read flows that stand side by side."""
    return tuple(_parse_flow(word, allowed) for word in text.split())


def _parse_flow(word: str, allowed: bool) -> Flow:
    match = _FLOW.fullmatch(word)
    if match is None:
        raise ValueError(f"{word!r} is no flow")
    protocol = match["protocol"] or "ping"
    if protocol not in (*PROTOCOLS, "ping"):
        raise ValueError(f"{word!r} has no protocol of {', '.join(PROTOCOLS)}")
    names = [_complete(match[side]) for side in ("source", "target")]
    return Flow(names[0], names[1], protocol, int(match["port"] or 0), allowed)


def _complete(name: str) -> str:
    full = name if name in OUTSIDE or "/" in name else f"{HOME}/{name}"
    if full not in PODS and full not in OUTSIDE:
        raise ValueError(f"nobody is called {name!r}")
    return full


def make_case(
    fact: str,
    *documents: str,
    yes: str = "",
    no: str = "",
    families: Iterable[int] = (4, 6),
    source: str = "cni",
) -> Case:
    """Write down a case: `yes` are the flows that pass, `no` those that do not."""
    flows = (*parse_flows(yes, allowed=True), *parse_flows(no, allowed=False))
    return Case(fact.replace(" ", "-"), documents, flows, tuple(families), source)


def np(spec: str, *, name: str = "p", namespace: str = HOME) -> str:
    """Write a NetworkPolicy; `namespace` "" leaves it out."""
    return _document("networking.k8s.io/v1", "NetworkPolicy", name, namespace, spec)


def cnp(spec: str, *, name: str = "p", namespace: str = HOME) -> str:
    """Write a CiliumNetworkPolicy."""
    return _document("cilium.io/v2", "CiliumNetworkPolicy", name, namespace, spec)


def ccnp(spec: str, *, name: str = "p") -> str:
    """Write a CiliumClusterwideNetworkPolicy."""
    return _document("cilium.io/v2", "CiliumClusterwideNetworkPolicy", name, "", spec)


def cidr_group(name: str, *cidrs: str, labels: str = "{}") -> str:
    """Write a CiliumCIDRGroup."""
    listed = ", ".join(f'"{cidr}"' for cidr in cidrs)
    spec = f"externalCIDRs: [{listed}]"
    return _document("cilium.io/v2", "CiliumCIDRGroup", name, "", spec, labels=labels)


def _document(
    version: str, kind: str, name: str, namespace: str, spec: str, *, labels: str = "{}"
) -> str:
    where = f", namespace: {namespace}" if namespace else ""
    return (
        f"apiVersion: {version}\nkind: {kind}\n"
        f"metadata: {{name: {name}{where}, labels: {labels}}}\n"
        f"spec:\n{textwrap.indent(textwrap.dedent(spec).strip(), '  ')}\n"
    )
