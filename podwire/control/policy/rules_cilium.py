"""Decode CiliumNetworkPolicy, CiliumClusterwideNetworkPolicy and CiliumCIDRGroup (cilium.io/v2) into rules.

Called wherever such a document enters: apply, the store's watch, tests. Pure. Invariant: layers 3 and 4 are carried
out completely; every other field is refused by name, never ignored. `cilium.peers` and `cilium.ports` read the parts
of rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from podwire.control.policy.cilium.peers import Scope, read_peers, read_subject
from podwire.control.policy.cilium.ports import read_ports
from podwire.control.policy.rule import (
    CidrGroup,
    LabelSelector,
    Mention,
    PolicyId,
    PolicyRules,
    Rule,
)
from podwire.model.documents.fields import (
    ObjectName,
    describe_object,
    read_cidr,
    read_header,
    read_label_map,
)
from podwire.model.documents.reader import Faults, Node, root
from podwire.model.ids import DEFAULT_NAMESPACE
from podwire.model.labels import SOURCE_K8S, sort_labels
from podwire.model.policy import Direction, Verdict
from podwire.model.store.kinds import CIDR_GROUP, CILIUM_CLUSTERWIDE_POLICY, CILIUM_POLICY, Kind

HINT: Final = "see docs/policy.md for what is enforced and what is refused; nothing was changed"

_REFUSED_IN_SPEC: Final = {
    "nodeSelector": "policies of the host itself are not enforced",
    "log": "verdicts name the policy and the rule instead",
}
_DEFAULT_DENY_KEYS: Final = {"ingress": Direction.INGRESS, "egress": Direction.EGRESS}


@dataclass(frozen=True, slots=True)
class _Section:
    """One of the four lists of a spec."""

    key: str
    direction: Direction
    verdict: Verdict


_SECTIONS: Final = (
    _Section("ingress", Direction.INGRESS, Verdict.ALLOW),
    _Section("ingressDeny", Direction.INGRESS, Verdict.DENY),
    _Section("egress", Direction.EGRESS, Verdict.ALLOW),
    _Section("egressDeny", Direction.EGRESS, Verdict.DENY),
)

_KNOWN_IN_SPEC: Final = (
    *(section.key for section in _SECTIONS),
    "endpointSelector",
    "enableDefaultDeny",
    "labels",
    "description",
)


def decode_cilium_policy(
    document: Mapping[str, Any], mentions: list[Mention] | None = None
) -> tuple[PolicyRules, ...]:
    """Give the rule sets of a policy, one for `spec` and one for each of `specs`, in this order. `mentions` takes
    what it names.

    Raises InvalidRequest with every fault of the document.
    """
    faults = Faults(mentions)
    top = root(document, faults)
    rule_sets: list[PolicyRules | None] = []
    kind = CILIUM_POLICY
    if top.expect_object(("apiVersion", "kind", "metadata", "spec", "specs", "status")):
        name = read_header(
            top,
            api_versions=CILIUM_POLICY.api_versions,
            kinds=(CILIUM_POLICY.name, CILIUM_CLUSTERWIDE_POLICY.name),
        )
        if top.value.get("kind") == CILIUM_CLUSTERWIDE_POLICY.name:
            kind = CILIUM_CLUSTERWIDE_POLICY
        policy = _name_policy(top, name, kind)
        specs = [top.child("spec")] if top.child("spec").present else []
        specs += top.child("specs").items()
        if not specs:
            top.child("spec").wrong("is missing, and so is specs")
        rule_sets = [_read_spec(spec, policy) for spec in specs]
    faults.raise_if_any(f"decode {describe_object(document, kind.name)}", hint=HINT)
    return tuple(rules for rules in rule_sets if rules is not None)


def read_cilium_subjects(
    document: Mapping[str, Any], namespace: str
) -> tuple[tuple[LabelSelector, frozenset[Direction]], ...] | None:
    """Give what a policy of `namespace` ("" = clusterwide) selects, whatever is wrong with the rest, each with the
    directions in which it may deny what others allow; None where it cannot be told."""
    faults = Faults()
    top = root(document, faults)
    specs = [top.child("spec")] if top.child("spec").present else []
    specs += top.child("specs").items()
    if not specs or not all(isinstance(spec.value, Mapping) for spec in specs):
        return None
    subjects = []
    for spec in specs:
        selector = spec.child("endpointSelector")
        # One for nodes selects no pods.
        if selector.present or not spec.child("nodeSelector").present:
            subjects.append((read_subject(selector, Scope(namespace)), _find_denying(spec)))
    return None if faults.kept else tuple(subjects)


def _find_denying(spec: Node) -> frozenset[Direction]:
    """Say in which directions a spec may deny: those of its denials; both with a field that nobody knows."""
    if not {*spec.value} <= {*_KNOWN_IN_SPEC, *_REFUSED_IN_SPEC}:
        return frozenset(Direction)
    return frozenset(
        section.direction
        for section in _SECTIONS
        if section.verdict is Verdict.DENY and spec.child(section.key).value not in (None, [], ())
    )


def _name_policy(top: Node, name: ObjectName, kind: Kind) -> PolicyId:
    if kind.namespaced:
        return PolicyId(kind.name, name.namespace or DEFAULT_NAMESPACE, name.name)
    if name.namespace:
        top.child("metadata").child("namespace").wrong(
            "is set; a clusterwide policy has no namespace"
        )
    return PolicyId(kind.name, "", name.name)


def _read_spec(spec: Node, policy: PolicyId) -> PolicyRules | None:
    if not spec.expect_object(_KNOWN_IN_SPEC, _REFUSED_IN_SPEC):
        return None
    scope = Scope(policy.namespace)
    for_nodes = spec.child("nodeSelector").present
    subject = LabelSelector() if for_nodes else read_subject(spec.child("endpointSelector"), scope)
    rules: list[Rule] = []
    closing: set[Direction] = set()
    for section in _SECTIONS:
        items = spec.child(section.key).items()
        # Cilium: a list with rules closes its direction, even if all of its rules deny. An empty list does not.
        if items:
            closing.add(section.direction)
        rules += (rule for item in items if (rule := _read_rule(item, section, scope)) is not None)
    if not closing and not for_nodes:
        spec.wrong("has no rule: write ingress, ingressDeny, egress or egressDeny ([{}] denies)")
    _check_annotations(spec)
    return PolicyRules(policy, subject, _read_default_deny(spec, closing), tuple(rules))


def _read_default_deny(spec: Node, closing: set[Direction]) -> frozenset[Direction]:
    node = spec.child("enableDefaultDeny")
    if node.present and node.expect_object(_DEFAULT_DENY_KEYS):
        for key, direction in _DEFAULT_DENY_KEYS.items():
            wanted = node.child(key).boolean()
            if wanted is not None:
                (closing.add if wanted else closing.discard)(direction)
    return frozenset(closing)


def _check_annotations(spec: Node) -> None:
    """Check what people write for themselves: it changes nothing, and must be what it seems to be."""
    spec.child("description").text()
    for label in spec.child("labels").items():
        if isinstance(label.value, str):
            continue
        if label.expect_object(("key", "value", "source")):
            for key in ("key", "value", "source"):
                label.child(key).text()


def _read_rule(item: Node, section: _Section, scope: Scope) -> Rule | None:
    if not isinstance(item.value, Mapping):
        item.expect_object(())
        return None
    peers = read_peers(item, section.direction, scope, known=("toPorts", "icmps"))
    ports = read_ports(item, peers_named=peers is not None)
    # Cilium: ports without peers are open to every peer, while a rule with neither says nothing and selects nobody.
    if peers is None and ports is not None:
        peers = (LabelSelector(),)
    return Rule(section.direction, section.verdict, peers or (), ports or (), item.path)


def decode_cidr_group(document: Mapping[str, Any]) -> CidrGroup:
    """Give the addresses of a CiliumCIDRGroup. Raises InvalidRequest with every fault of the document."""
    faults = Faults()
    top = root(document, faults)
    name = ObjectName("", "")
    cidrs = []
    if top.expect_object(("apiVersion", "kind", "metadata", "spec", "status")):
        name = read_header(top, api_versions=CIDR_GROUP.api_versions, kinds=(CIDR_GROUP.name,))
        spec = top.child("spec")
        if spec.expect_object(("externalCIDRs",)):
            if not spec.child("externalCIDRs").present:
                spec.child("externalCIDRs").wrong("is missing (write [] for none)")
            items = spec.child("externalCIDRs").items()
            cidrs = [read_cidr(item, bare_address=True) for item in items]
    faults.raise_if_any(f"decode {describe_object(document, CIDR_GROUP.name)}", hint=HINT)
    labels = read_label_map(top.child("metadata").child("labels"))
    return CidrGroup(
        name.name,
        sort_labels(f"{SOURCE_K8S}:{key}={value}" for key, value in labels.items()),
        tuple(dict.fromkeys(cidr for cidr in cidrs if cidr is not None)),
    )
