"""Documents that are refused whole: where the fault is, and the words that say what it is."""

from collections.abc import Mapping
from typing import Any, Final

import yaml

from tests.policy_cases import BadDocument, ccnp, cidr_group, cnp, np

A: Final = "podSelector: {matchLabels: {app: a}}"
E: Final = "endpointSelector: {matchLabels: {app: a}}"


def read(text: str) -> Any:
    """Read YAML."""
    return yaml.load(text, yaml.CSafeLoader)


def bad(fact: str, document: str | Mapping[str, Any], path: str, message: str) -> BadDocument:
    """Write down a bad document."""
    found = read(document) if isinstance(document, str) else document
    return BadDocument(fact.replace(" ", "-"), found, path, message)


def change(text: str, **fields: object) -> dict[str, Any]:
    """Give a document with other values at its top; None takes one away."""
    document = {**read(text), **fields}
    return {key: value for key, value in document.items() if value is not None}


def subject(selector: str) -> str:
    """Write a NetworkPolicy with this podSelector."""
    return np(f"podSelector: {selector}")


def peer(text: str) -> str:
    """Write a NetworkPolicy with this peer."""
    return np(f"{A}\ningress: [{{from: [{text}]}}]")


def port(text: str) -> str:
    """Write a NetworkPolicy with this port."""
    return np(f"{A}\ningress: [{{ports: [{text}]}}]")


def rule(text: str) -> str:
    """Write a CiliumNetworkPolicy with this ingress rule."""
    return cnp(f"{E}\ningress: [{text}]")


def sends(text: str) -> str:
    """Write a CiliumNetworkPolicy with this egress rule."""
    return cnp(f"{E}\negress: [{text}]")


def cilium_port(text: str) -> str:
    """Write a CiliumNetworkPolicy with this port."""
    return rule(f"{{toPorts: [{{ports: [{text}]}}]}}")


def cilium_type(text: str) -> str:
    """Write a CiliumNetworkPolicy with this type of ICMP."""
    return rule(f"{{icmps: [{{fields: [{text}]}}]}}")


GOOD: Final = np(A)
GOOD_CILIUM: Final = cnp(f"{E}\ningress: [{{}}]")
PEER: Final = "spec.ingress[0].from[0]"
PORT: Final = "spec.ingress[0].ports[0]"
CILIUM_PORT: Final = "spec.ingress[0].toPorts[0].ports[0]"
LONG: Final = "x" * 64

DOCUMENTS: Final[list[BadDocument]] = [
    bad("no apiVersion", change(GOOD, apiVersion=None), "apiVersion", "is missing"),
    bad(
        "an old apiVersion",
        change(GOOD, apiVersion="extensions/v1beta1"),
        "apiVersion",
        "not one of",
    ),
    bad("an apiVersion that is a number", change(GOOD, apiVersion=1), "apiVersion", "not text"),
    bad("no kind", change(GOOD, kind=None), "kind", "is missing"),
    bad("another kind", change(GOOD, kind="Networkpolicy"), "kind", "'Networkpolicy', not one of"),
    bad("no metadata", change(GOOD, metadata=None), "metadata", "not an object"),
    bad("metadata that is a list", change(GOOD, metadata=["p"]), "metadata", "a list of 1"),
    bad("no name", change(GOOD, metadata={"namespace": "blue"}), "metadata.name", "is missing"),
    bad(
        "a name in capitals",
        change(GOOD, metadata={"name": "Web"}),
        "metadata.name",
        "not an object name",
    ),
    bad(
        "a name that is too long",
        change(GOOD, metadata={"name": "a" * 254}),
        "metadata.name",
        "not an object name",
    ),
    bad("a name that is a number", change(GOOD, metadata={"name": 7}), "metadata.name", "quote it"),
    bad(
        "a namespace with a slash",
        change(GOOD, metadata={"name": "p", "namespace": "a/b"}),
        "metadata.namespace",
        "not an object name",
    ),
    bad(
        "a label of the policy that breaks the grammar",
        change(GOOD, metadata={"name": "p", "labels": {"app": "-"}}),
        "metadata.labels.app",
        "not a label value",
    ),
    bad("no spec", change(GOOD, spec=None), "spec", "is null, not an object"),
    bad("a spec that is text", change(GOOD, spec="all"), "spec", "is 'all', not an object"),
    bad("an unknown field at the top", change(GOOD, rules=[]), "rules", "unknown field"),
    bad("an unknown field of spec", np(f"{A}\nselector: {{}}"), "spec.selector", "unknown field"),
    bad("a field in another case", np(f"{A}\nIngress: []"), "spec.Ingress", "unknown field"),
    bad("a key that is a number", np(f"{A}\n1: x"), "spec", "has the key 1, which is not text"),
    bad("a key that is no word", np(f'{A}\n"a b": x'), "spec['a b']", "unknown field"),
]

SELECTORS: Final[list[BadDocument]] = [
    bad("a selector that is a list", subject("[]"), "spec.podSelector", "not an object"),
    bad("a field beside matchLabels", subject("{app: a}"), "spec.podSelector.app", "unknown field"),
    bad(
        "matchLabels that is a list",
        subject("{matchLabels: [a]}"),
        "spec.podSelector.matchLabels",
        "not an object",
    ),
    bad(
        "a label value that is a number",
        subject("{matchLabels: {v: 1}}"),
        "spec.podSelector.matchLabels.v",
        "quote it",
    ),
    bad(
        "a label value that is true",
        subject("{matchLabels: {v: true}}"),
        "spec.podSelector.matchLabels.v",
        "is true",
    ),
    bad(
        "a label value that is null",
        subject("{matchLabels: {v: }}"),
        "spec.podSelector.matchLabels.v",
        "is null",
    ),
    bad(
        "a label value with a blank",
        subject("{matchLabels: {v: a b}}"),
        "spec.podSelector.matchLabels.v",
        "not a label value",
    ),
    bad(
        "a label value that is too long",
        subject(f"{{matchLabels: {{v: {LONG}}}}}"),
        "spec.podSelector.matchLabels.v",
        "not a label value",
    ),
    bad(
        "a label value that ends in a dash",
        subject("{matchLabels: {v: a-}}"),
        "spec.podSelector.matchLabels.v",
        "not a label value",
    ),
    bad(
        "a label key that is too long",
        subject(f"{{matchLabels: {{{LONG}: v}}}}"),
        "spec.podSelector.matchLabels",
        "not a label key",
    ),
    bad(
        "a label key with two slashes",
        subject("{matchLabels: {a/b/c: v}}"),
        "spec.podSelector.matchLabels",
        "not a label key",
    ),
    bad(
        "a label key with a source",
        subject('{matchLabels: {"k8s:app": v}}'),
        "spec.podSelector.matchLabels",
        "not a label key",
    ),
    bad(
        "an empty label key",
        subject('{matchLabels: {"": v}}'),
        "spec.podSelector.matchLabels",
        "not a label key",
    ),
    bad(
        "the name of a workload",
        subject("{matchLabels: {podwire.io/name: web}}"),
        "spec.podSelector.matchLabels['podwire.io/name']",
        "not part of its identity",
    ),
    bad(
        "an expression without a key",
        subject("{matchExpressions: [{operator: Exists}]}"),
        "spec.podSelector.matchExpressions[0].key",
        "is missing",
    ),
    bad(
        "an expression without an operator",
        subject("{matchExpressions: [{key: a}]}"),
        "spec.podSelector.matchExpressions[0].operator",
        "is missing",
    ),
    bad(
        "an unknown operator",
        subject("{matchExpressions: [{key: a, operator: Gt, values: [b]}]}"),
        "spec.podSelector.matchExpressions[0].operator",
        "not one of In, NotIn",
    ),
    bad(
        "In without values",
        subject("{matchExpressions: [{key: a, operator: In}]}"),
        "spec.podSelector.matchExpressions[0].values",
        "at least one",
    ),
    bad(
        "NotIn with an empty list",
        subject("{matchExpressions: [{key: a, operator: NotIn, values: []}]}"),
        "spec.podSelector.matchExpressions[0].values",
        "at least one",
    ),
    bad(
        "Exists with values",
        subject("{matchExpressions: [{key: a, operator: Exists, values: [b]}]}"),
        "spec.podSelector.matchExpressions[0].values",
        "takes none",
    ),
    bad(
        "a value of an expression that breaks the grammar",
        subject("{matchExpressions: [{key: a, operator: In, values: [b, 'c d']}]}"),
        "spec.podSelector.matchExpressions[0].values[1]",
        "not a label value",
    ),
    bad(
        "values that are text",
        subject("{matchExpressions: [{key: a, operator: In, values: b}]}"),
        "spec.podSelector.matchExpressions[0].values",
        "not a list",
    ),
    bad(
        "an expression that is text",
        subject("{matchExpressions: [a]}"),
        "spec.podSelector.matchExpressions[0]",
        "not an object",
    ),
    bad(
        "an expression with a wrong key",
        subject("{matchExpressions: [{key: '-', operator: Exists}]}"),
        "spec.podSelector.matchExpressions[0]",
        "not a label key",
    ),
    bad(
        "an unknown field of an expression",
        subject("{matchExpressions: [{key: a, operator: Exists, value: b}]}"),
        "spec.podSelector.matchExpressions[0].value",
        "unknown field",
    ),
]

TYPES_AND_PEERS: Final[list[BadDocument]] = [
    bad(
        "an unknown policyType",
        np(f"{A}\npolicyTypes: [ingress]"),
        "spec.policyTypes[0]",
        "not one of Ingress, Egress",
    ),
    bad(
        "a policyType that is null",
        np(f"{A}\npolicyTypes: [null]"),
        "spec.policyTypes[0]",
        "is null",
    ),
    bad(
        "policyTypes that is text",
        np(f"{A}\npolicyTypes: Ingress"),
        "spec.policyTypes",
        "not a list",
    ),
    bad(
        "three policyTypes",
        np(f"{A}\npolicyTypes: [Ingress, Egress, Ingress]"),
        "spec.policyTypes",
        "at most two",
    ),
    bad("ingress that is an object", np(f"{A}\ningress: {{}}"), "spec.ingress", "not a list"),
    bad("a rule that is null", np(f"{A}\ningress: [null]"), "spec.ingress[0]", "is null"),
    bad(
        "to in an ingress rule",
        np(f"{A}\ningress: [{{to: []}}]"),
        "spec.ingress[0].to",
        "unknown field",
    ),
    bad(
        "from in an egress rule",
        np(f"{A}\negress: [{{from: []}}]"),
        "spec.egress[0].from",
        "unknown field",
    ),
    bad(
        "from that is an object",
        np(f"{A}\ningress: [{{from: {{podSelector: {{}}}}}}]"),
        "spec.ingress[0].from",
        "not a list",
    ),
    bad("a peer that names nothing", peer("{}"), PEER, "names no podSelector"),
    bad("a peer whose selector is null", peer("{podSelector: null}"), PEER, "names no podSelector"),
    bad(
        "an unknown field of a peer",
        peer("{podSelector: {}, pods: {}}"),
        f"{PEER}.pods",
        "unknown field",
    ),
    bad(
        "a namespaceSelector by name",
        peer("{namespaceSelector: {name: red}}"),
        f"{PEER}.namespaceSelector.name",
        "unknown field",
    ),
    bad(
        "an ipBlock beside a selector",
        peer("{ipBlock: {cidr: 10.0.0.0/8}, podSelector: {}}"),
        f"{PEER}.ipBlock",
        "stands alone",
    ),
    bad("an ipBlock without a cidr", peer("{ipBlock: {}}"), f"{PEER}.ipBlock.cidr", "is missing"),
    bad(
        "an ipBlock without a length",
        peer("{ipBlock: {cidr: 10.0.0.1}}"),
        f"{PEER}.ipBlock.cidr",
        "not a CIDR",
    ),
    bad(
        "a length that is too long for IPv4",
        peer("{ipBlock: {cidr: 10.0.0.0/33}}"),
        f"{PEER}.ipBlock.cidr",
        "not a CIDR",
    ),
    bad(
        "a length that is too long for IPv6",
        peer('{ipBlock: {cidr: "fd00::/129"}}'),
        f"{PEER}.ipBlock.cidr",
        "not a CIDR",
    ),
    bad(
        "a netmask instead of a length",
        peer("{ipBlock: {cidr: 10.0.0.0/255.0.0.0}}"),
        f"{PEER}.ipBlock.cidr",
        "not a CIDR",
    ),
    bad(
        "a length with a leading zero",
        peer("{ipBlock: {cidr: 10.0.0.0/08}}"),
        f"{PEER}.ipBlock.cidr",
        "not a CIDR",
    ),
    bad(
        "an address with leading zeros",
        peer("{ipBlock: {cidr: 010.0.0.0/8}}"),
        f"{PEER}.ipBlock.cidr",
        "not a CIDR",
    ),
    bad(
        "an address of five parts",
        peer("{ipBlock: {cidr: 10.0.0.0.0/8}}"),
        f"{PEER}.ipBlock.cidr",
        "not a CIDR",
    ),
    bad(
        "an address with a zone",
        peer('{ipBlock: {cidr: "fe80::1%eth0/64"}}'),
        f"{PEER}.ipBlock.cidr",
        "not a CIDR",
    ),
    bad(
        "an IPv4-mapped block",
        peer('{ipBlock: {cidr: "::ffff:10.0.0.0/104"}}'),
        f"{PEER}.ipBlock.cidr",
        "IPv4-mapped",
    ),
    bad(
        "a cidr that is a number", peer("{ipBlock: {cidr: 10}}"), f"{PEER}.ipBlock.cidr", "not text"
    ),
    bad("an empty cidr", peer('{ipBlock: {cidr: ""}}'), f"{PEER}.ipBlock.cidr", "not a CIDR"),
    bad(
        "an exception outside the block",
        peer("{ipBlock: {cidr: 10.0.0.0/8, except: [11.0.0.0/16]}}"),
        f"{PEER}.ipBlock.except[0]",
        "not a smaller part",
    ),
    bad(
        "an exception that is the block",
        peer("{ipBlock: {cidr: 10.0.0.0/8, except: [10.0.0.0/8]}}"),
        f"{PEER}.ipBlock.except[0]",
        "not a smaller part",
    ),
    bad(
        "an exception wider than the block",
        peer("{ipBlock: {cidr: 10.0.0.0/8, except: [0.0.0.0/0]}}"),
        f"{PEER}.ipBlock.except[0]",
        "not a smaller part",
    ),
    bad(
        "an exception of the other family",
        peer('{ipBlock: {cidr: 10.0.0.0/8, except: ["fd00::/8"]}}'),
        f"{PEER}.ipBlock.except[0]",
        "not a smaller part",
    ),
    bad(
        "an exception that is no block",
        peer("{ipBlock: {cidr: 10.0.0.0/8, except: [x]}}"),
        f"{PEER}.ipBlock.except[0]",
        "not a CIDR",
    ),
    bad(
        "an exception that is null",
        peer("{ipBlock: {cidr: 10.0.0.0/8, except: [null]}}"),
        f"{PEER}.ipBlock.except[0]",
        "is missing",
    ),
    bad(
        "exceptions in the plural",
        peer("{ipBlock: {cidr: 10.0.0.0/8, excepts: []}}"),
        f"{PEER}.ipBlock.excepts",
        "unknown field",
    ),
]

PORTS: Final[list[BadDocument]] = [
    bad("port zero", port("{port: 0}"), f"{PORT}.port", "not from 1 to 65535"),
    bad("a port beyond the last", port("{port: 65536}"), f"{PORT}.port", "not from 1 to 65535"),
    bad("a negative port", port("{port: -1}"), f"{PORT}.port", "not from 1 to 65535"),
    bad(
        "a port that is huge",
        change(GOOD, spec={"podSelector": {}, "ingress": [{"ports": [{"port": 10**5000}]}]}),
        f"{PORT}.port",
        "more than 64 bits",
    ),
    bad("a port with a fraction", port("{port: 80.5}"), f"{PORT}.port", "not a whole number"),
    bad("a port that is true", port("{port: true}"), f"{PORT}.port", "is true"),
    bad("a number in quotes", port('{port: "80"}'), f"{PORT}.port", "without quotes"),
    bad("a port name in capitals", port("{port: HTTP}"), f"{PORT}.port", "not a port name"),
    bad(
        "a port name that is too long",
        port("{port: sixteen-letters-}"),
        f"{PORT}.port",
        "not a port name",
    ),
    bad(
        "a port name with two dashes in a row",
        port("{port: my--port}"),
        f"{PORT}.port",
        "not a port name",
    ),
    bad("an empty port name", port('{port: ""}'), f"{PORT}.port", "not a port name"),
    bad(
        "an unknown protocol",
        port("{protocol: ICMP}"),
        f"{PORT}.protocol",
        "not one of TCP, UDP, SCTP",
    ),
    bad(
        "a protocol in small letters",
        port("{protocol: tcp, port: 80}"),
        f"{PORT}.protocol",
        "not one of",
    ),
    bad(
        "a protocol that is a number",
        port("{protocol: 6, port: 80}"),
        f"{PORT}.protocol",
        "not text",
    ),
    bad(
        "a range that runs backwards",
        port("{port: 90, endPort: 80}"),
        f"{PORT}.endPort",
        "is 80, below the port 90",
    ),
    bad("a range without a beginning", port("{endPort: 80}"), f"{PORT}.endPort", "without a port"),
    bad(
        "a range that begins with a name",
        port("{port: http, endPort: 90}"),
        f"{PORT}.endPort",
        "beside the name",
    ),
    bad(
        "a range beyond the last port",
        port("{port: 80, endPort: 65536}"),
        f"{PORT}.endPort",
        "not from 1",
    ),
    bad(
        "an endPort that is text",
        port('{port: 80, endPort: "90"}'),
        f"{PORT}.endPort",
        "not a whole number",
    ),
    bad("ports as a list of numbers", port("80"), PORT, "is 80, not an object"),
    bad(
        "an unknown field of a port",
        port("{port: 80, name: http}"),
        f"{PORT}.name",
        "unknown field",
    ),
]

CILIUM: Final[list[BadDocument]] = [
    bad(
        "cilium: another apiVersion",
        change(GOOD_CILIUM, apiVersion="cilium.io/v1"),
        "apiVersion",
        "not one of",
    ),
    bad("cilium: neither spec nor specs", change(GOOD_CILIUM, spec=None), "spec", "so is specs"),
    bad("cilium: specs that is an object", change(GOOD_CILIUM, specs={}), "specs", "not a list"),
    bad(
        "cilium: a fault in specs names its place",
        change(GOOD_CILIUM, specs=[read(f"{{{E}, ingress: [{{fromEntities: [moon]}}]}}")]),
        "specs[0].ingress[0].fromEntities[0]",
        "'moon', not one of",
    ),
    bad(
        "cilium: a clusterwide policy with a namespace",
        change(ccnp(f"{E}\ningress: [{{}}]"), metadata={"name": "p", "namespace": "blue"}),
        "metadata.namespace",
        "has no namespace",
    ),
    bad("cilium: no endpointSelector", cnp("ingress: [{}]"), "spec.endpointSelector", "is missing"),
    bad("cilium: no rules", cnp(E), "spec", "has no rule"),
    bad(
        "cilium: empty lists of rules", cnp(f"{E}\ningress: []\negress: []"), "spec", "has no rule"
    ),
    bad(
        "cilium: a nodeSelector",
        cnp("nodeSelector: {}\ningress: [{}]"),
        "spec.nodeSelector",
        "not supported: policies of the host",
    ),
    bad(
        "cilium: an unknown field",
        cnp(f"{E}\ningress: [{{}}]\nselector: {{}}"),
        "spec.selector",
        "unknown field",
    ),
    bad("cilium: a rule that is null", rule("null"), "spec.ingress[0]", "is null"),
    bad(
        "cilium: an unknown field of a rule",
        rule("{fromPods: []}"),
        "spec.ingress[0].fromPods",
        "unknown field",
    ),
    bad(
        "cilium: toEndpoints in an ingress rule",
        rule("{toEndpoints: []}"),
        "spec.ingress[0].toEndpoints",
        "unknown field",
    ),
    bad(
        "cilium: a subject of another namespace",
        cnp(
            "endpointSelector: {matchLabels: {k8s:io.kubernetes.pod.namespace: red}}\ningress: [{}]"
        ),
        "spec.endpointSelector",
        "another namespace",
    ),
    bad(
        "cilium: a subject that is the host",
        cnp('endpointSelector: {matchLabels: {"reserved:host": ""}}\ningress: [{}]'),
        "spec.endpointSelector",
        "only endpoints",
    ),
    bad(
        "cilium: an unknown source",
        rule('{fromEndpoints: [{matchLabels: {"container:app": b}}]}'),
        "spec.ingress[0].fromEndpoints[0].matchLabels",
        "source is not one of",
    ),
    bad(
        "cilium: an unknown reserved label",
        rule('{fromEndpoints: [{matchLabels: {"reserved:kube-apiserver": ""}}]}'),
        "spec.ingress[0].fromEndpoints[0].matchLabels",
        "known are host",
    ),
    bad(
        "cilium: a reserved label with a value",
        rule('{fromEndpoints: [{matchLabels: {"reserved:world": x}}]}'),
        "spec.ingress[0].fromEndpoints[0].matchLabels['reserved:world']",
        "has none",
    ),
    bad(
        "cilium: a cluster",
        rule("{fromEndpoints: [{matchLabels: {k8s:io.cilium.k8s.policy.cluster: x}}]}"),
        "spec.ingress[0].fromEndpoints[0].matchLabels['k8s:io.cilium.k8s.policy.cluster']",
        "one cluster",
    ),
    bad(
        "cilium: the name of a workload",
        rule("{fromEndpoints: [{matchLabels: {podwire.io/name: x}}]}"),
        "spec.ingress[0].fromEndpoints[0].matchLabels['podwire.io/name']",
        "not part of its identity",
    ),
    bad(
        "cilium: a label value that is a number",
        rule("{fromEndpoints: [{matchLabels: {v: 1}}]}"),
        "spec.ingress[0].fromEndpoints[0].matchLabels.v",
        "quote it",
    ),
    bad(
        "cilium: a label key that breaks the grammar",
        rule('{fromEndpoints: [{matchLabels: {"k8s:a b": x}}]}'),
        "spec.ingress[0].fromEndpoints[0].matchLabels",
        "not a label key",
    ),
    bad(
        "cilium: an endpoint that is text",
        rule("{fromEndpoints: [b]}"),
        "spec.ingress[0].fromEndpoints[0]",
        "not an object",
    ),
    bad(
        "cilium: peers of two kinds",
        rule("{fromEndpoints: [{}], fromEntities: [world]}"),
        "spec.ingress[0].fromEntities",
        "beside fromEndpoints",
    ),
    bad(
        "cilium: both lists of CIDRs",
        rule("{fromCIDR: [10.0.0.0/8], fromCIDRSet: [{cidr: 11.0.0.0/8}]}"),
        "spec.ingress[0].fromCIDRSet",
        "beside fromCIDR",
    ),
    bad(
        "cilium: an unknown entity",
        rule("{fromEntities: [moon]}"),
        "spec.ingress[0].fromEntities[0]",
        "not one of all, world",
    ),
    bad(
        "cilium: an entity that is null",
        rule("{fromEntities: [null]}"),
        "spec.ingress[0].fromEntities[0]",
        "is null",
    ),
    bad(
        "cilium: the entity kube-apiserver",
        sends("{toEntities: [kube-apiserver]}"),
        "spec.egress[0].toEntities[0]",
        "use its addresses",
    ),
    bad(
        "cilium: the entity ingress",
        rule("{fromEntities: [ingress]}"),
        "spec.ingress[0].fromEntities[0]",
        "no ingress proxy",
    ),
    bad(
        "cilium: a CIDR that is none",
        rule("{fromCIDR: [10.0.0.0/40]}"),
        "spec.ingress[0].fromCIDR[0]",
        "not a CIDR",
    ),
    bad(
        "cilium: a CIDR that is null",
        rule("{fromCIDR: [null]}"),
        "spec.ingress[0].fromCIDR[0]",
        "is missing",
    ),
    bad(
        "cilium: a CIDR set entry without a length",
        rule("{fromCIDRSet: [{cidr: 10.0.0.1}]}"),
        "spec.ingress[0].fromCIDRSet[0].cidr",
        "not a CIDR",
    ),
    bad(
        "cilium: a CIDR set entry that names nothing",
        rule("{fromCIDRSet: [{except: [10.0.0.0/8]}]}"),
        "spec.ingress[0].fromCIDRSet[0]",
        "exactly one of",
    ),
    bad(
        "cilium: a CIDR set entry that names two things",
        rule("{fromCIDRSet: [{cidr: 10.0.0.0/8, cidrGroupRef: g}]}"),
        "spec.ingress[0].fromCIDRSet[0]",
        "names cidr and cidrGroupRef",
    ),
    bad(
        "cilium: an exception outside its CIDR",
        rule("{fromCIDRSet: [{cidr: 10.0.0.0/8, except: [11.0.0.0/8]}]}"),
        "spec.ingress[0].fromCIDRSet[0].except[0]",
        "not inside",
    ),
    bad(
        "cilium: an exception that reaches beyond its CIDR",
        rule("{fromCIDRSet: [{cidr: 10.0.0.0/8, except: [10.0.0.0/7]}]}"),
        "spec.ingress[0].fromCIDRSet[0].except[0]",
        "not inside",
    ),
    bad(
        "cilium: fromRequires",
        rule("{fromRequires: [{}]}"),
        "spec.ingress[0].fromRequires",
        "not supported",
    ),
    bad(
        "cilium: fromNodes", rule("{fromNodes: [{}]}"), "spec.ingress[0].fromNodes", "not supported"
    ),
    bad(
        "cilium: fromGroups",
        rule("{fromGroups: [{}]}"),
        "spec.ingress[0].fromGroups",
        "not supported",
    ),
    bad(
        "cilium: authentication",
        rule("{authentication: {mode: required}, fromEndpoints: [{}]}"),
        "spec.ingress[0].authentication",
        "not supported",
    ),
    bad(
        "cilium: toFQDNs",
        sends("{toFQDNs: [{matchName: example.com}]}"),
        "spec.egress[0].toFQDNs",
        "not supported: names are not resolved",
    ),
    bad(
        "cilium: toServices",
        sends("{toServices: []}"),
        "spec.egress[0].toServices",
        "not supported",
    ),
    bad(
        "cilium: toRequires",
        sends("{toRequires: []}"),
        "spec.egress[0].toRequires",
        "not supported",
    ),
    bad("cilium: toNodes", sends("{toNodes: [{}]}"), "spec.egress[0].toNodes", "not supported"),
    bad("cilium: toGroups", sends("{toGroups: [{}]}"), "spec.egress[0].toGroups", "not supported"),
    bad(
        "cilium: rules of layer 7",
        rule("{toPorts: [{ports: [{port: '80'}], rules: {http: [{}]}}]}"),
        "spec.ingress[0].toPorts[0].rules",
        "not supported: nothing above layer 4",
    ),
    bad(
        "cilium: a listener",
        sends("{toPorts: [{ports: [{port: '80'}], listener: {name: x}}]}"),
        "spec.egress[0].toPorts[0].listener",
        "not supported",
    ),
    bad(
        "cilium: TLS that is ended",
        sends("{toPorts: [{ports: [{port: '443'}], terminatingTLS: {}}]}"),
        "spec.egress[0].toPorts[0].terminatingTLS",
        "not supported",
    ),
    bad(
        "cilium: TLS that is begun",
        sends("{toPorts: [{ports: [{port: '443'}], originatingTLS: {}}]}"),
        "spec.egress[0].toPorts[0].originatingTLS",
        "not supported",
    ),
    bad(
        "cilium: names of servers",
        sends("{toPorts: [{ports: [{port: '443'}], serverNames: [x]}]}"),
        "spec.egress[0].toPorts[0].serverNames",
        "not supported",
    ),
    bad(
        "cilium: toPorts without ports",
        rule("{toPorts: [{}]}"),
        "spec.ingress[0].toPorts[0].ports",
        "names nothing",
    ),
    bad(
        "cilium: an empty list of ports",
        rule("{toPorts: [{ports: []}]}"),
        "spec.ingress[0].toPorts[0].ports",
        "names nothing",
    ),
    bad(
        "cilium: 41 ports",
        rule("{toPorts: [{ports: [" + ", ".join(f"{{port: '{n}'}}" for n in range(1, 42)) + "]}]}"),
        "spec.ingress[0].toPorts[0].ports",
        "at most 40",
    ),
    bad(
        "cilium: a port without quotes",
        cilium_port("{port: 80}"),
        f"{CILIUM_PORT}.port",
        "quote it",
    ),
    bad(
        "cilium: a port entry without a port",
        cilium_port("{protocol: TCP}"),
        f"{CILIUM_PORT}.port",
        "is missing",
    ),
    bad(
        "cilium: a port beyond the last",
        cilium_port("{port: '65536'}"),
        f"{CILIUM_PORT}.port",
        "not from 0",
    ),
    bad(
        "cilium: a port that is neither number nor name",
        cilium_port("{port: '80-90'}"),
        f"{CILIUM_PORT}.port",
        "neither",
    ),
    bad("cilium: an empty port", cilium_port("{port: ''}"), f"{CILIUM_PORT}.port", "neither"),
    bad(
        "cilium: the protocol ICMP in toPorts",
        cilium_port("{port: '8', protocol: ICMP}"),
        f"{CILIUM_PORT}.protocol",
        "not one of ANY, TCP",
    ),
    bad(
        "cilium: a range that runs backwards",
        cilium_port("{port: '90', endPort: 80}"),
        f"{CILIUM_PORT}.endPort",
        "below the port 90",
    ),
    bad(
        "cilium: a range from port zero",
        cilium_port("{port: '0', endPort: 80}"),
        f"{CILIUM_PORT}.endPort",
        "every port",
    ),
    bad(
        "cilium: a range that begins with a name",
        cilium_port("{port: http, endPort: 80}"),
        f"{CILIUM_PORT}.endPort",
        "beside the name",
    ),
    bad(
        "cilium: an endPort in quotes",
        cilium_port("{port: '80', endPort: '90'}"),
        f"{CILIUM_PORT}.endPort",
        "not a whole number",
    ),
    bad(
        "cilium: types beside ports",
        rule("{toPorts: [{ports: [{port: '80'}]}], icmps: [{fields: [{type: 8}]}]}"),
        "spec.ingress[0].icmps",
        "beside toPorts",
    ),
    bad(
        "cilium: icmps without fields",
        rule("{icmps: [{}]}"),
        "spec.ingress[0].icmps[0].fields",
        "names nothing",
    ),
    bad(
        "cilium: 41 types",
        rule("{icmps: [{fields: [" + ", ".join(f"{{type: {n}}}" for n in range(41)) + "]}]}"),
        "spec.ingress[0].icmps[0].fields",
        "at most 40",
    ),
    bad(
        "cilium: a field without a type",
        cilium_type("{family: IPv4}"),
        "spec.ingress[0].icmps[0].fields[0].type",
        "is missing",
    ),
    bad(
        "cilium: a type beyond the last",
        cilium_type("{type: 256}"),
        "spec.ingress[0].icmps[0].fields[0].type",
        "not from 0 to 255",
    ),
    bad(
        "cilium: a type in quotes beyond the last",
        cilium_type("{type: '256'}"),
        "spec.ingress[0].icmps[0].fields[0].type",
        "not from 0 to 255",
    ),
    bad(
        "cilium: a type of the other family",
        cilium_type("{family: IPv4, type: PacketTooBig}"),
        "spec.ingress[0].icmps[0].fields[0].type",
        "not a type of ICMP for IPv4",
    ),
    bad(
        "cilium: an unknown family",
        cilium_type("{family: ipv4, type: 8}"),
        "spec.ingress[0].icmps[0].fields[0].family",
        "not one of IPv4, IPv6",
    ),
    bad(
        "cilium: default deny that is text",
        cnp(f"{E}\ningress: [{{}}]\nenableDefaultDeny: {{ingress: 'no'}}"),
        "spec.enableDefaultDeny.ingress",
        "not true or false",
    ),
    bad(
        "cilium: an unknown direction of default deny",
        cnp(f"{E}\ningress: [{{}}]\nenableDefaultDeny: {{both: true}}"),
        "spec.enableDefaultDeny.both",
        "unknown field",
    ),
    bad(
        "cilium: a description that is a list",
        cnp(f"{E}\ningress: [{{}}]\ndescription: [x]"),
        "spec.description",
        "not text",
    ),
    bad(
        "cilium: log", cnp(f"{E}\ningress: [{{}}]\nlog: {{value: x}}"), "spec.log", "not supported"
    ),
]

GROUPS: Final[list[BadDocument]] = [
    bad(
        "group: no externalCIDRs",
        change(cidr_group("g"), spec={}),
        "spec.externalCIDRs",
        "is missing",
    ),
    bad("group: no spec", change(cidr_group("g"), spec=None), "spec", "is null"),
    bad(
        "group: an entry that is no CIDR",
        cidr_group("g", "10.0.0.0/8", "moon"),
        "spec.externalCIDRs[1]",
        "not a CIDR",
    ),
    bad(
        "group: an unknown field",
        change(cidr_group("g"), spec={"externalCIDRs": [], "cidrs": []}),
        "spec.cidrs",
        "unknown field",
    ),
    bad(
        "group: a label that breaks the grammar",
        cidr_group("g", labels="{kind: a b}"),
        "metadata.labels.kind",
        "not a label value",
    ),
    bad(
        "group: another apiVersion",
        change(cidr_group("g"), apiVersion="cilium.io/v3"),
        "apiVersion",
        "not one of",
    ),
]

CASES: Final = [*DOCUMENTS, *SELECTORS, *TYPES_AND_PEERS, *PORTS, *CILIUM, *GROUPS]
