"""Read the subject of a CiliumNetworkPolicy and the peers of its rules.

Called by `rules_cilium`. Pure. Invariant: selectors of endpoints never match anything that is not an endpoint, unless
they name a `reserved:` label themselves. A list that is present and empty selects no peer.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Final

from podwire.control.policy.labels_match import make_selector
from podwire.control.policy.rule import (
    ANY_SOURCE,
    CidrGroupSelector,
    CidrSelector,
    GroupMention,
    LabelMention,
    LabelSelector,
    PeerSelector,
    Requirement,
)
from podwire.control.policy.rules_k8s import NAME_IS_NO_LABEL
from podwire.model.documents.fields import (
    check_label_key,
    read_cidr,
    read_expression,
    read_label_value,
)
from podwire.model.documents.reader import Node, join_path, shown
from podwire.model.endpoint import IPNetwork
from podwire.model.identity import RESERVED_LABELS
from podwire.model.labels import (
    NAME_KEY,
    NAMESPACE_KEY,
    NAMESPACE_LABELS_PREFIX,
    SOURCE_CNI,
    SOURCE_K8S,
    SOURCE_RESERVED,
    Operator,
    split_label,
)
from podwire.model.networks import is_within
from podwire.model.policy import Direction

_SOURCES: Final = (ANY_SOURCE, SOURCE_K8S, SOURCE_CNI, SOURCE_RESERVED)
_RESERVED_NAMES: Final = tuple(split_label(labels[0]).key for labels in RESERVED_LABELS.values())
_NEGATIVE: Final = (Operator.NOT_IN, Operator.DOES_NOT_EXIST)

_UNKNOWN_KEYS: Final = {
    "io.cilium.k8s.policy.cluster": "there is one cluster, and its name is not part of identities",
    NAME_KEY: NAME_IS_NO_LABEL.removeprefix("is "),
}

_REFUSED_IN_RULE: Final[Mapping[Direction, Mapping[str, str]]] = {
    Direction.INGRESS: {
        "fromRequires": "write the requirement into each fromEndpoints",
        "fromGroups": "groups of a cloud provider are not known here",
        "fromNodes": "nodes have no labels here; use the entities host and remote-node",
        "authentication": "peers are not authenticated",
    },
    Direction.EGRESS: {
        "toRequires": "write the requirement into each toEndpoints",
        "toGroups": "groups of a cloud provider are not known here",
        "toNodes": "nodes have no labels here; use the entities host and remote-node",
        "toServices": "name the pods behind the service, or its addresses",
        "toFQDNs": "names are not resolved; use toCIDRSet or a CiliumCIDRGroup",
        "authentication": "peers are not authenticated",
    },
}

_WORLD: Final = Requirement(SOURCE_RESERVED, "world", Operator.EXISTS)
_ENTITIES: Final[Mapping[str, tuple[PeerSelector, ...]]] = {
    "all": (LabelSelector(),),
    "world": (LabelSelector((_WORLD,)),),
    "world-ipv4": (CidrSelector(ip_network("0.0.0.0/0")),),
    "world-ipv6": (CidrSelector(ip_network("::/0")),),
    "cluster": (LabelSelector((Requirement(SOURCE_RESERVED, "world", Operator.DOES_NOT_EXIST),)),),
    "none": (),
    **{
        name: (LabelSelector((Requirement(SOURCE_RESERVED, name, Operator.EXISTS),)),)
        for name in ("host", "remote-node", "health", "init", "unmanaged")
    },
}
_REFUSED_ENTITIES: Final = {
    "kube-apiserver": "the API server has no identity here: use its addresses",
    "ingress": "there is no ingress proxy here",
}


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a policy holds: its namespace, "" = the whole cluster."""

    namespace: str

    @property
    def requirement(self) -> Requirement:
        """Give what an endpoint in scope fulfils."""
        if self.namespace:
            return Requirement(SOURCE_K8S, NAMESPACE_KEY, Operator.IN, (self.namespace,))
        return _HAS_NAMESPACE


_HAS_NAMESPACE: Final = Requirement(SOURCE_K8S, NAMESPACE_KEY, Operator.EXISTS)


def read_subject(node: Node, scope: Scope) -> LabelSelector:
    """Read `endpointSelector`: always within the policy's own namespace; clusterwide every endpoint."""
    if not node.present:
        node.wrong("is missing (write {} for every endpoint)")
        return LabelSelector()
    requirements = _read_requirements(node, mentioned=True)
    for requirement in requirements:
        if requirement.source == SOURCE_RESERVED and requirement.operator not in _NEGATIVE:
            node.wrong(f"wants {SOURCE_RESERVED}:{requirement.key}; only endpoints can be selected")
        elif scope.namespace and _excludes_namespace(requirement, scope.namespace):
            node.wrong(f"names another namespace than the policy's own, {scope.namespace!r}")
    return make_selector(*requirements, *([scope.requirement] if scope.namespace else []))


def read_peers(
    rule: Node, direction: Direction, scope: Scope, *, known: Collection[str]
) -> tuple[PeerSelector, ...] | None:
    """Read the peers of a rule; None if it has no list of peers. `known`: what else the rule may hold."""
    side = "from" if direction is Direction.INGRESS else "to"
    readers: Mapping[str, Callable[[Node], Collection[PeerSelector]]] = {
        f"{side}Endpoints": lambda item: _read_endpoints(item, scope),
        f"{side}Entities": _read_entity,
        f"{side}CIDR": _read_cidr,
        f"{side}CIDRSet": _read_cidr_rule,
    }
    rule.expect_object((*readers, *known), _REFUSED_IN_RULE[direction])
    lists = {key: rule.child(key) for key in readers if rule.child(key).present}
    named = [key for key, node in lists.items() if node.value]
    for key in named[1:]:
        lists[key].wrong(f"stands beside {named[0]}; give each a rule of its own")
    if not lists:
        return None
    return tuple(
        dict.fromkeys(
            peer
            for key, node in lists.items()
            for item in node.items()
            for peer in readers[key](item)
        )
    )


def _names_namespace(requirement: Requirement) -> bool:
    return requirement.key == NAMESPACE_KEY and requirement.source != SOURCE_RESERVED


def _excludes_namespace(requirement: Requirement, namespace: str) -> bool:
    wanted = requirement.operator is Operator.IN and _names_namespace(requirement)
    return wanted and namespace not in requirement.values


def _read_endpoints(node: Node, scope: Scope) -> tuple[PeerSelector, ...]:
    requirements = _read_requirements(node, mentioned=True)
    # Reserved identities (host, world) have no namespace, so a requirement on one would make the selector match
    # nothing.
    if any(requirement.source == SOURCE_RESERVED for requirement in requirements):
        return (make_selector(*requirements),)
    if any(
        _names_namespace(requirement) or requirement.key.startswith(f"{NAMESPACE_LABELS_PREFIX}.")
        for requirement in requirements
    ):
        # A negative requirement holds for what has no namespace, too; this rule is about endpoints.
        return (make_selector(*requirements, _HAS_NAMESPACE),)
    # Cilium adds the policy's namespace to every selector that does not speak of namespaces itself.
    return (make_selector(*requirements, scope.requirement),)


def _read_requirements(node: Node, *, mentioned: bool = False) -> list[Requirement]:
    """Read a selector; `mentioned`: of endpoints, whose labels others may want to know."""
    if not node.expect_object(("matchLabels", "matchExpressions")):
        return []
    requirements: list[Requirement] = []
    paths: list[str] = []
    labels = node.child("matchLabels")
    if labels.present and not isinstance(labels.value, Mapping):
        labels.mistyped(f"is {shown(labels.value)}, not an object")
    elif labels.present:
        for text in labels.value:
            if (name := _read_key(labels, text)) is not None:
                value = labels.child(text)
                _check_reserved(value, name, (read_label_value(value),))
                requirements.append(Requirement(*name, Operator.IN, (str(value.value or ""),)))
                paths.append(value.path)
    for item in node.child("matchExpressions").items():
        expression = read_expression(item)
        if expression is not None and (name := _read_key(item, expression[0])) is not None:
            _check_reserved(item, name, expression[2])
            requirements.append(Requirement(*name, *expression[1:]))
            paths.append(f"{item.path}.key")
    if mentioned:
        for path, requirement in zip(paths, requirements, strict=True):
            node.faults.mention(LabelMention(path, requirement.source, requirement.key))
    return requirements


def _read_key(node: Node, text: object) -> tuple[str, str] | None:
    """Give source and key of `k8s:app`, `any:app`, `app`; None when it is at fault."""
    source, colon, key = text.partition(":") if isinstance(text, str) else ("", "", "")
    if not colon:
        source, key = ANY_SOURCE, source
    if source not in _SOURCES:
        node.wrong(f"has the key {shown(text)}; its source is not one of {', '.join(_SOURCES)}")
        return None
    # Cilium puts this prefix in front of a namespace's label, whose key may have a prefix and a slash of its own. The
    # grammar of keys holds for what is behind it.
    bare = key.removeprefix(f"{NAMESPACE_LABELS_PREFIX}.")
    if not check_label_key(node, text, bare):
        return None
    if source == SOURCE_RESERVED and key not in _RESERVED_NAMES:
        node.wrong(f"has the key {shown(text)}; known are {', '.join(_RESERVED_NAMES)}")
        return None
    if key in _UNKNOWN_KEYS:
        node.faults.note(join_path(node.path, str(text)), f"is {_UNKNOWN_KEYS[key]}")
        return None
    return source, key


def _check_reserved(node: Node, name: tuple[str, str], values: Collection[str]) -> None:
    if name[0] == SOURCE_RESERVED and any(values):
        node.wrong(f'gives {SOURCE_RESERVED}:{name[1]} a value; it has none (write "")')


def _read_entity(node: Node) -> tuple[PeerSelector, ...]:
    if not node.present:
        node.wrong("is null, not the name of an entity")
    name = node.text()
    if name in _REFUSED_ENTITIES:
        node.wrong(f"is {name!r}, which is not supported: {_REFUSED_ENTITIES[name]}")
    elif isinstance(node.value, str) and name not in _ENTITIES:
        node.wrong(f"is {shown(name)}, not one of {', '.join(_ENTITIES)}")
    return _ENTITIES.get(name, ())


def _read_cidr(node: Node) -> tuple[PeerSelector, ...]:
    cidr = read_cidr(node, bare_address=True)
    return () if cidr is None else (CidrSelector(cidr),)


def _read_cidr_rule(node: Node) -> tuple[PeerSelector, ...]:
    if not node.expect_object(("cidr", "cidrGroupRef", "cidrGroupSelector", "except")):
        return ()
    kinds = ("cidr", "cidrGroupRef", "cidrGroupSelector")
    given = [key for key in kinds if node.child(key).present and node.child(key).value != ""]
    if len(given) != 1:
        node.wrong(f"names {' and '.join(given) or 'nothing'}; exactly one of {', '.join(kinds)}")
        return ()
    exceptions = [(item, read_cidr(item)) for item in node.child("except").items()]
    kept = tuple(dict.fromkeys(network for _item, network in exceptions if network is not None))
    if given[0] == "cidrGroupRef":
        group = node.child("cidrGroupRef")
        node.faults.mention(GroupMention(group.path, group.text()))
        return (CidrGroupSelector(name=group.text(), exceptions=kept),)
    if given[0] == "cidrGroupSelector":
        labels = make_selector(*_read_requirements(node.child("cidrGroupSelector")))
        return (CidrGroupSelector(labels=labels, exceptions=kept),)
    cidr = read_cidr(node.child("cidr"))
    for item, network in exceptions:
        if cidr is not None and network is not None and not is_within(network, cidr):
            item.wrong(f"is {network}, which is not inside {cidr}")
    return () if cidr is None else (CidrSelector(cidr, _drop_outside(kept, cidr)),)


def _drop_outside(exceptions: tuple[IPNetwork, ...], cidr: IPNetwork) -> tuple[IPNetwork, ...]:
    return tuple(network for network in exceptions if is_within(network, cidr))
