"""What documents become: the forms that the resolver reads. What they mean is in the tables of tests/policy_cases."""

from ipaddress import ip_network
from typing import Any

import pytest
import yaml

from podwire.control.policy.labels_match import describe_selector, make_selector
from podwire.control.policy.oracle import describe_port
from podwire.control.policy.rule import (
    ALL_PORTS,
    ICMP,
    ICMPV6,
    SCTP,
    TCP,
    UDP,
    CidrGroup,
    CidrGroupSelector,
    CidrSelector,
    LabelSelector,
    PeerSelector,
    PolicyId,
    PortMatch,
    Requirement,
    Rule,
)
from podwire.control.policy.rules_cilium import decode_cidr_group, decode_cilium_policy
from podwire.control.policy.rules_k8s import decode_network_policy
from podwire.model.labels import Operator
from podwire.model.policy import Direction, Verdict
from tests.policy_cases import ccnp, cidr_group, cnp, np

NAMESPACE = "io.kubernetes.pod.namespace"
LABELS = "io.cilium.k8s.namespace.labels"
IN_BLUE = Requirement("k8s", NAMESPACE, Operator.IN, ("blue",))
ANYWHERE = Requirement("k8s", NAMESPACE, Operator.EXISTS)


def has(key: str, *values: str, source: str = "any") -> Requirement:
    """Give the requirement that a label has one of `values`."""
    return Requirement(source, key, Operator.IN, values)


def read(text: str) -> Any:
    """Read YAML."""
    return yaml.load(text, yaml.CSafeLoader)


def k8s_peer(text: str) -> PeerSelector:
    """Give the one peer of a NetworkPolicy."""
    policy = decode_network_policy(read(np(f"ingress: [{{from: [{text}]}}]")))
    return policy.rules[0].peers[0]


def cilium_rule(text: str, *, clusterwide: bool = False) -> Rule:
    """Give the one rule of a CiliumNetworkPolicy."""
    write = ccnp if clusterwide else cnp
    (policy,) = decode_cilium_policy(read(write(f"endpointSelector: {{}}\ningress: [{text}]")))
    return policy.rules[0]


K8S_PEERS: list[tuple[str, PeerSelector]] = [
    ("{podSelector: {}}", make_selector(IN_BLUE)),
    ("{podSelector: {matchLabels: {app: b}}}", make_selector(IN_BLUE, has("app", "b"))),
    ("{namespaceSelector: {}}", make_selector(ANYWHERE)),
    (
        "{namespaceSelector: {matchLabels: {a.b/c: d}}}",
        make_selector(ANYWHERE, has(f"{LABELS}.a.b/c", "d", source="k8s")),
    ),
    (
        "{namespaceSelector: {matchExpressions: [{key: t, operator: DoesNotExist}]},"
        " podSelector: {matchLabels: {x: y}}}",
        make_selector(
            ANYWHERE,
            has("x", "y"),
            Requirement("k8s", f"{LABELS}.t", Operator.DOES_NOT_EXIST),
        ),
    ),
    (
        "{ipBlock: {cidr: 10.1.2.3/8, except: [10.2.0.0/16, 10.2.0.0/16]}}",
        CidrSelector(ip_network("10.0.0.0/8"), (ip_network("10.2.0.0/16"),), everybody=True),
    ),
]


@pytest.mark.parametrize(("text", "expected"), K8S_PEERS, ids=[text for text, _ in K8S_PEERS])
def test_a_peer_of_a_network_policy_becomes(text: str, expected: PeerSelector) -> None:
    assert k8s_peer(text) == expected


def test_a_network_policy_is_named_and_its_rules_have_paths() -> None:
    policy = decode_network_policy(
        read(
            np(
                "podSelector: {matchLabels: {app: a}}\ningress: [{}, {ports: [{port: 80}]}]\negress: [{}]"
            )
        )
    )
    assert policy.policy == PolicyId("NetworkPolicy", "blue", "p")
    assert policy.subject == make_selector(IN_BLUE, has("app", "a"))
    assert policy.default_deny == {Direction.INGRESS, Direction.EGRESS}
    assert [rule.path for rule in policy.rules] == ["ingress[0]", "ingress[1]", "egress[0]"]
    assert policy.rules[0].peers == (LabelSelector(),)
    assert policy.rules[0].ports == ALL_PORTS
    assert policy.rules[1].ports == (PortMatch(TCP, 80, 80),)


def test_selectors_that_say_the_same_are_the_same() -> None:
    one = k8s_peer(
        "{podSelector: {matchExpressions: [{key: b, operator: In, values: [y, x, y]}, {key: a, operator: Exists}]}}"
    )
    two = k8s_peer(
        "{podSelector: {matchExpressions: [{key: a, operator: Exists}, {key: b, operator: In, values: [x, y]}]}}"
    )
    assert one == two
    assert hash(one) == hash(two)


def test_what_is_required_twice_is_required_once() -> None:
    assert k8s_peer(
        "{podSelector: {matchLabels: {a: x}, matchExpressions: [{key: a, operator: In, values: [x]}]}}"
    ) == k8s_peer("{podSelector: {matchLabels: {a: x}}}")


def test_one_value_in_a_list_is_a_match_label() -> None:
    assert k8s_peer(
        "{podSelector: {matchExpressions: [{key: a, operator: In, values: [x]}]}}"
    ) == k8s_peer("{podSelector: {matchLabels: {a: x}}}")


CILIUM_PEERS: list[tuple[str, bool, tuple[PeerSelector, ...]]] = [
    ("{fromEndpoints: []}", False, ()),
    ("{fromEndpoints: [{}]}", False, (make_selector(IN_BLUE),)),
    ("{fromEndpoints: [{}]}", True, (make_selector(ANYWHERE),)),
    (
        '{fromEndpoints: [{matchLabels: {"k8s:app": b}}]}',
        False,
        (make_selector(IN_BLUE, has("app", "b", source="k8s")),),
    ),
    (
        f"{{fromEndpoints: [{{matchLabels: {{{NAMESPACE}: red}}}}]}}",
        False,
        (make_selector(ANYWHERE, has(NAMESPACE, "red")),),
    ),
    (
        '{fromEndpoints: [{matchLabels: {"reserved:world": ""}}]}',
        False,
        (make_selector(has("world", "", source="reserved")),),
    ),
    ("{fromEntities: [all]}", False, (LabelSelector(),)),
    (
        "{fromEntities: [cluster]}",
        False,
        (make_selector(Requirement("reserved", "world", Operator.DOES_NOT_EXIST)),),
    ),
    ("{fromEntities: [none]}", False, ()),
    (
        "{fromEntities: [world-ipv4, world-ipv4]}",
        False,
        (CidrSelector(ip_network("0.0.0.0/0")),),
    ),
    ("{fromCIDR: [10.0.0.1]}", False, (CidrSelector(ip_network("10.0.0.1/32")),)),
    (
        '{fromCIDRSet: [{cidr: "fd00::/8", except: ["fd01::/16"]}]}',
        False,
        (CidrSelector(ip_network("fd00::/8"), (ip_network("fd01::/16"),)),),
    ),
    (
        "{fromCIDRSet: [{cidrGroupRef: g, except: [10.0.0.0/8]}]}",
        False,
        (CidrGroupSelector(name="g", exceptions=(ip_network("10.0.0.0/8"),)),),
    ),
    (
        "{fromCIDRSet: [{cidrGroupSelector: {matchLabels: {kind: own}}}]}",
        False,
        (CidrGroupSelector(labels=make_selector(has("kind", "own"))),),
    ),
]


@pytest.mark.parametrize(
    ("text", "clusterwide", "expected"),
    CILIUM_PEERS,
    ids=[f"{text}{'-clusterwide' if wide else ''}" for text, wide, _ in CILIUM_PEERS],
)
def test_peers_of_a_cilium_policy_become(
    text: str, clusterwide: bool, expected: tuple[PeerSelector, ...]
) -> None:
    rule = cilium_rule(text, clusterwide=clusterwide)
    assert rule.peers == expected
    assert rule.ports == ALL_PORTS


CILIUM_PORTS: list[tuple[str, tuple[PortMatch, ...]]] = [
    (
        "{toPorts: [{ports: [{port: '80'}]}]}",
        (PortMatch(TCP, 80, 80), PortMatch(UDP, 80, 80), PortMatch(SCTP, 80, 80)),
    ),
    ("{toPorts: [{ports: [{port: '0', protocol: TCP}]}]}", (PortMatch(TCP),)),
    ("{toPorts: [{ports: [{port: '1', endPort: 9, protocol: UDP}]}]}", (PortMatch(UDP, 1, 9),)),
    ("{toPorts: [{ports: [{port: Http, protocol: TCP}]}]}", (PortMatch(TCP, name="http"),)),
    (
        "{toPorts: [{ports: [{port: '7', protocol: TCP}, {port: '7', protocol: TCP}]}]}",
        (PortMatch(TCP, 7, 7),),
    ),
    (
        "{icmps: [{fields: [{type: 0}, {type: EchoRequest, family: IPv6}]}]}",
        (PortMatch(ICMP, 0, 0, icmp=True), PortMatch(ICMPV6, 128, 128, icmp=True)),
    ),
]


@pytest.mark.parametrize(("text", "expected"), CILIUM_PORTS, ids=[text for text, _ in CILIUM_PORTS])
def test_ports_of_a_cilium_policy_become(text: str, expected: tuple[PortMatch, ...]) -> None:
    rule = cilium_rule(text)
    assert rule.ports == expected
    assert rule.peers == (LabelSelector(),)


def test_a_cilium_rule_that_says_nothing_matches_nothing() -> None:
    assert (cilium_rule("{}").peers, cilium_rule("{}").ports) == ((), ())


def test_each_spec_becomes_a_rule_set_of_its_own_with_paths_that_say_which() -> None:
    document = read(cnp("endpointSelector: {}\ningress: [{}]\ningressDeny: [{}]"))
    document["specs"] = [read("{endpointSelector: {}, egress: [{}, {}]}"), document["spec"]]
    found = decode_cilium_policy(document)
    assert [[rule.path for rule in entry.rules] for entry in found] == [
        ["spec.ingress[0]", "spec.ingressDeny[0]"],
        ["specs[0].egress[0]", "specs[0].egress[1]"],
        ["specs[1].ingress[0]", "specs[1].ingressDeny[0]"],
    ]
    assert {entry.policy for entry in found} == {PolicyId("CiliumNetworkPolicy", "blue", "p")}
    assert [rule.verdict for rule in found[0].rules] == [Verdict.ALLOW, Verdict.DENY]


@pytest.mark.parametrize("kind", ["ingress", "ingressDeny", "egress", "egressDeny"])
def test_each_list_closes_its_direction_unless_told_otherwise(kind: str) -> None:
    direction = Direction.INGRESS if kind.startswith("in") else Direction.EGRESS
    text = f"endpointSelector: {{}}\n{kind}: [{{}}]\n"
    (closing,) = decode_cilium_policy(read(cnp(text)))
    assert closing.default_deny == {direction}
    word = direction.name.lower()
    (open_,) = decode_cilium_policy(read(cnp(f"{text}enableDefaultDeny: {{{word}: false}}")))
    assert not open_.default_deny


def test_a_clusterwide_subject_is_everybody_where_nothing_is_said() -> None:
    (policy,) = decode_cilium_policy(read(ccnp("endpointSelector: {}\ningress: [{}]")))
    assert policy.subject == LabelSelector()
    assert policy.policy == PolicyId("CiliumClusterwideNetworkPolicy", "", "p")


def test_a_cidr_group_becomes_its_networks_each_once() -> None:
    text = cidr_group("g", "10.0.0.7/8", "10.0.0.0/8", "fd00::1", labels="{kind: own}")
    assert decode_cidr_group(read(text)) == CidrGroup(
        "g", ("k8s:kind=own",), (ip_network("10.0.0.0/8"), ip_network("fd00::1/128"))
    )


def test_a_cidr_group_of_the_older_version_is_read() -> None:
    document = {**read(cidr_group("g", "10.0.0.0/8")), "apiVersion": "cilium.io/v2alpha1"}
    assert decode_cidr_group(document).name == "g"


WORDS: list[tuple[PeerSelector, str]] = [
    (LabelSelector(), "everybody"),
    (
        make_selector(has("app", "a"), has("tier", "x", "y", source="k8s")),
        "app=a, k8s:tier in (x,y)",
    ),
    (
        make_selector(
            Requirement("any", "a", Operator.NOT_IN, ("b",)),
            Requirement("any", "b", Operator.NOT_IN, ("c", "d")),
            Requirement("any", "c", Operator.EXISTS),
            Requirement("any", "d", Operator.DOES_NOT_EXIST),
        ),
        "a!=b, b notin (c,d), c, !d",
    ),
    (CidrSelector(ip_network("10.0.0.0/8")), "10.0.0.0/8 outside the cluster"),
    (
        CidrSelector(ip_network("10.0.0.0/8"), (ip_network("10.1.0.0/16"),), everybody=True),
        "10.0.0.0/8 except 10.1.0.0/16",
    ),
    (CidrGroupSelector(name="g"), "CIDR group g"),
    (CidrGroupSelector(labels=make_selector(has("a", "b"))), "CIDR group of a=b"),
]


@pytest.mark.parametrize(("selector", "words"), WORDS, ids=[words for _, words in WORDS])
def test_a_selector_is_said_in_words(selector: PeerSelector, words: str) -> None:
    assert describe_selector(selector) == words


@pytest.mark.parametrize(
    ("match", "words"),
    [
        (PortMatch(), "everything"),
        (PortMatch(TCP), "every port of TCP"),
        (PortMatch(TCP, 80, 80), "80/TCP"),
        (PortMatch(UDP, 1, 9), "1-9/UDP"),
        (PortMatch(SCTP, name="x"), "x/SCTP"),
        (PortMatch(name="x"), "x/any"),
        (PortMatch(ICMP, 0, 0, icmp=True), "ICMP type 0"),
        (PortMatch(ICMPV6, 128, 128, icmp=True), "ICMPv6 type 128"),
        (PortMatch(112), "every port of protocol 112"),
    ],
)
def test_a_port_is_said_in_words(match: PortMatch, words: str) -> None:
    assert describe_port(match) == words
