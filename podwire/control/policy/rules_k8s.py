"""Decode NetworkPolicy v1 into rules.

Called wherever such a document enters: apply, the store's watch, tests. Pure. Invariant: every field below `spec` is
either carried out or refused by name. Source: networking.k8s.io/v1, NetworkPolicySpec, and the API server's own
validation of it. Where both leave room, docs/policy.md says what podwire does.
"""

from collections.abc import Mapping
from typing import Any, Final

from podwire.control.policy.labels_match import make_selector
from podwire.control.policy.rule import (
    ALL_PORTS,
    ANY_SOURCE,
    TCP,
    CidrSelector,
    LabelMention,
    LabelSelector,
    Mention,
    PeerSelector,
    PolicyId,
    PolicyRules,
    PortMatch,
    Requirement,
    Rule,
)
from podwire.model.documents.fields import (
    PORT_MAX,
    check_label_key,
    describe_object,
    is_port_name,
    read_cidr,
    read_expression,
    read_header,
    read_label_map,
)
from podwire.model.documents.reader import Faults, Node, join_path, root, shown
from podwire.model.endpoint import PROTOCOLS, IPNetwork
from podwire.model.errors import Bug
from podwire.model.ids import DEFAULT_NAMESPACE
from podwire.model.labels import (
    NAME_KEY,
    NAMESPACE_KEY,
    NAMESPACE_LABELS_PREFIX,
    SOURCE_K8S,
    Operator,
)
from podwire.model.networks import is_within
from podwire.model.policy import Direction, Verdict
from podwire.model.store.kinds import NETWORK_POLICY

HINT: Final = "see docs/policy.md for what a NetworkPolicy may say; nothing was changed"
NAME_IS_NO_LABEL: Final = (
    "is the workload's name, which is not part of its identity: give it a label (object Workload)"
)

_POLICY_TYPES: Final = {"Ingress": Direction.INGRESS, "Egress": Direction.EGRESS}


def decode_network_policy(
    document: Mapping[str, Any], mentions: list[Mention] | None = None
) -> PolicyRules:
    """Give the rules of a NetworkPolicy; without a namespace it is of `default`. `mentions` takes what it names.

    Raises InvalidRequest with every fault of the document.
    """
    faults = Faults(mentions)
    top = root(document, faults)
    known = ("apiVersion", "kind", "metadata", "spec", "status")
    policy = _read_policy(top) if top.expect_object(known) else None
    faults.raise_if_any(f"decode {describe_object(document, NETWORK_POLICY.name)}", hint=HINT)
    if policy is None:
        raise Bug("a NetworkPolicy gave neither rules nor faults")
    return policy


def read_network_subjects(
    document: Mapping[str, Any], namespace: str
) -> tuple[LabelSelector, ...] | None:
    """Give what a NetworkPolicy of `namespace` selects, whatever is wrong with its rules; None: that cannot be told."""
    faults = Faults()
    spec = root(document, faults).child("spec")
    if not isinstance(spec.value, Mapping):
        return None
    required = _read_selector(spec.child("podSelector"), ANY_SOURCE, "")
    return None if faults.kept else (make_selector(_in_namespace(namespace), *required),)


def _read_policy(top: Node) -> PolicyRules | None:
    name = read_header(top, api_versions=NETWORK_POLICY.api_versions, kinds=(NETWORK_POLICY.name,))
    namespace = name.namespace or DEFAULT_NAMESPACE
    spec = top.child("spec")
    if not spec.expect_object(("podSelector", "policyTypes", "ingress", "egress")):
        return None
    own = _in_namespace(namespace)
    # The namespace is a label like any other here, so one cache of selectors serves policies of all namespaces.
    subject = make_selector(own, *_read_selector(spec.child("podSelector"), ANY_SOURCE, ""))
    types = _read_policy_types(spec)
    rules = (
        *_read_rules(spec.child("ingress"), Direction.INGRESS, "from", own),
        *_read_rules(spec.child("egress"), Direction.EGRESS, "to", own),
    )
    return PolicyRules(
        PolicyId(NETWORK_POLICY.name, namespace, name.name),
        subject,
        types,
        # As in Kubernetes, a direction that policyTypes does not name is not this policy's business.
        tuple(rule for rule in rules if rule.direction in types),
    )


def _in_namespace(namespace: str) -> Requirement:
    return Requirement(SOURCE_K8S, NAMESPACE_KEY, Operator.IN, (namespace,))


def _read_policy_types(spec: Node) -> frozenset[Direction]:
    directions = [
        (node, node.choice(tuple(_POLICY_TYPES))) for node in spec.child("policyTypes").items()
    ]
    for node, _text in directions:
        if not node.present:
            node.wrong("is null; it is Ingress or Egress")
    if len(directions) > len(_POLICY_TYPES):
        spec.child("policyTypes").wrong(f"has {len(directions)} elements; at most two are allowed")
    if directions:
        return frozenset(_POLICY_TYPES[text] for _node, text in directions if text)
    # NetworkPolicySpec, policyTypes: without the field a policy affects ingress, and egress only if it has egress
    # rules. So a policy that forbids all egress has to name the type.
    has_egress = bool(spec.value.get("egress"))
    return frozenset({Direction.INGRESS, *([Direction.EGRESS] if has_egress else [])})


def _read_rules(node: Node, direction: Direction, peers_key: str, own: Requirement) -> list[Rule]:
    rules = []
    for index, item in enumerate(node.items()):
        if not item.expect_object((peers_key, "ports")):
            continue
        peer_nodes = item.child(peers_key).items()
        peers = [peer for node in peer_nodes if (peer := _read_peer(node, own)) is not None]
        port_nodes = item.child("ports").items()
        ports = [port for node in port_nodes if (port := _read_port(node)) is not None]
        rules.append(
            Rule(
                direction,
                Verdict.ALLOW,
                # An empty or missing list means every peer, not none (NetworkPolicyIngressRule, from). Peers that
                # were at fault leave it empty too, but then the whole document is refused.
                tuple(peers) if peer_nodes else (LabelSelector(),),
                tuple(ports) if port_nodes else ALL_PORTS,
                f"{direction.name.lower()}[{index}]",
            )
        )
    return rules


def _read_peer(node: Node, own: Requirement) -> PeerSelector | None:
    if not node.expect_object(("podSelector", "namespaceSelector", "ipBlock")):
        return None
    pods, namespaces = node.child("podSelector"), node.child("namespaceSelector")
    block = node.child("ipBlock")
    if block.present:
        if pods.present or namespaces.present:
            block.wrong("stands beside a selector; an ipBlock stands alone")
        return _read_block(block)
    if not pods.present and not namespaces.present:
        node.wrong("names no podSelector, namespaceSelector or ipBlock")
        return None
    # A podSelector alone selects in the policy's own namespace (NetworkPolicyPeer).
    where = [own]
    if namespaces.present:
        # Also beside requirements on labels: the negative ones hold for what has no namespace at all.
        where = [
            Requirement(SOURCE_K8S, NAMESPACE_KEY, Operator.EXISTS),
            *_read_selector(namespaces, SOURCE_K8S, f"{NAMESPACE_LABELS_PREFIX}."),
        ]
    return make_selector(*where, *_read_selector(pods, ANY_SOURCE, ""))


def _read_selector(node: Node, source: str, prefix: str) -> list[Requirement]:
    """Read a label selector; its keys get `source` and `prefix`. Absent = nothing is required."""
    if not node.present or not node.expect_object(("matchLabels", "matchExpressions")):
        return []
    requirements = []
    labels = node.child("matchLabels")
    for key, value in read_label_map(labels).items():
        path = join_path(labels.path, key)
        _refuse_name(labels, path, key)
        labels.faults.mention(LabelMention(path, source, prefix + key))
        requirements.append(Requirement(source, prefix + key, Operator.IN, (value,)))
    for item in node.child("matchExpressions").items():
        expression = read_expression(item)
        if expression is None:
            continue
        key, operator, values = expression
        if check_label_key(item, key, key):
            _refuse_name(item, f"{item.path}.key", key)
            item.faults.mention(LabelMention(f"{item.path}.key", source, prefix + key))
            requirements.append(Requirement(source, prefix + key, operator, values))
    return requirements


def _refuse_name(node: Node, path: str, key: str) -> None:
    if key == NAME_KEY:
        node.faults.note(path, NAME_IS_NO_LABEL)


def _read_block(node: Node) -> CidrSelector | None:
    if not node.expect_object(("cidr", "except")):
        return None
    cidr = read_cidr(node.child("cidr"))
    exceptions: list[IPNetwork] = []
    for item in node.child("except").items():
        network = read_cidr(item)
        if network is None or cidr is None:
            continue
        if network == cidr or not is_within(network, cidr):
            item.wrong(f"is {network}, which is not a smaller part of {cidr}")
        exceptions.append(network)
    if cidr is None:
        return None
    # An ipBlock of a NetworkPolicy matches addresses, whoever has them; Cilium's CIDR rules mean only what is outside
    # the cluster.
    return CidrSelector(cidr, tuple(dict.fromkeys(exceptions)), everybody=True)


def _read_port(node: Node) -> PortMatch | None:
    if not node.expect_object(("protocol", "port", "endPort")):
        return None
    protocol_node = node.child("protocol")
    # NetworkPolicyPort: the protocol is TCP when the field is missing.
    protocol = PROTOCOLS.get(protocol_node.choice(tuple(PROTOCOLS)), TCP)
    port, end = node.child("port"), node.child("endPort")
    if isinstance(port.value, str):
        if end.present:
            end.wrong("stands beside the name of a port; a range begins with a number")
        if not is_port_name(port.value):
            port.wrong(f"is {shown(port.value)}, not a port name (write a number without quotes)")
        return PortMatch(protocol, name=port.value)
    first = port.integer(1, PORT_MAX)
    last = end.integer(1, PORT_MAX)
    if end.present and not port.present:
        end.wrong("stands without a port; a range has both")
    if first is not None and last is not None and last < first:
        end.wrong(f"is {last}, below the port {first}")
    if first is None:
        return PortMatch(protocol)
    return PortMatch(protocol, first, first if last is None else last)
