"""The oracle beyond the tables: settings, precedence, what it says for whom, and laws that hold for all policies."""

import re
from dataclasses import replace
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from podwire.control.policy.labels_match import LabelSet, make_selector, matches
from podwire.control.policy.oracle import (
    Basis,
    Decision,
    Enforcement,
    Party,
    Question,
    RuleName,
    Settings,
    evaluate,
    evaluate_flow,
)
from podwire.control.policy.rule import (
    ALL_PORTS,
    ICMP,
    TCP,
    TIER_DEFAULT,
    UDP,
    CidrGroup,
    CidrGroupSelector,
    CidrSelector,
    LabelSelector,
    PeerSelector,
    PolicyId,
    PolicyRules,
    PortMatch,
    Requirement,
    Rule,
)
from podwire.control.policy.rules_cilium import decode_cilium_policy
from podwire.control.policy.rules_k8s import decode_network_policy
from podwire.control.policy.trace import trace
from podwire.model.identity import IdentityFacts, NamedPort
from podwire.model.labels import Operator
from podwire.model.policy import Direction, Verdict
from tests.policy_cases import cnp, np
from tests.policy_cases.sides import make_party

GRE = 47


def read_np(spec: str, name: str = "p") -> PolicyRules:
    """Give the rules of a NetworkPolicy."""
    return decode_network_policy(yaml.safe_load(np(spec, name=name)))


def question(source: str, target: str, port: int = 80, protocol: int = TCP) -> Question:
    """Ask at the target whether it takes a packet of IPv4."""
    return Question(make_party(target, 4), make_party(source, 4), Direction.INGRESS, protocol, port)


CLOSED = read_np("podSelector: {}\npolicyTypes: [Ingress, Egress]", "closed")
B_TO_A = read_np(
    "podSelector: {matchLabels: {app: a}}\n"
    "ingress: [{from: [{podSelector: {matchLabels: {app: b}}}], ports: [{port: 80}]}]"
)


def make_rule(verdict: Verdict, *, precedence: int = TIER_DEFAULT, path: str = "x") -> Rule:
    """Give a rule that speaks of everything that comes in."""
    return Rule(Direction.INGRESS, verdict, (LabelSelector(),), ALL_PORTS, path, precedence)


def make_policy(*rules: Rule, name: str = "m") -> PolicyRules:
    """Give a policy of every endpoint."""
    return PolicyRules(PolicyId("Made", "", name), LabelSelector(), frozenset(), rules)


# Settings and basis.


def test_always_closes_pods_that_no_policy_selects() -> None:
    decided = evaluate([], [], question("blue/b", "blue/a"), Settings(Enforcement.ALWAYS))
    assert (decided.verdict, decided.basis, decided.rule) == (
        Verdict.DENY,
        Basis.DEFAULT_DENY,
        None,
    )
    assert decided.why == ("policy_enforcement is always, and no policy allows ingress",)


def test_always_still_obeys_rules_that_allow() -> None:
    always = Settings(Enforcement.ALWAYS)
    assert evaluate([B_TO_A], [], question("blue/b", "blue/a"), always).passes
    assert not evaluate([B_TO_A], [], question("blue/b", "blue/a", 81), always).passes


def test_always_leaves_a_pod_to_itself_and_the_node_to_its_pods() -> None:
    always = Settings(Enforcement.ALWAYS)
    assert evaluate([], [], question("blue/a", "blue/a"), always).basis is Basis.SELF
    assert evaluate([], [], question("host", "blue/a"), always).basis is Basis.HOST


def test_never_ignores_denials_too() -> None:
    denial = make_policy(make_rule(Verdict.DENY))
    never = Settings(Enforcement.NEVER)
    decided = evaluate([CLOSED, denial], [], question("blue/b", "blue/a"), never)
    assert (decided.verdict, decided.basis) == (Verdict.ALLOW, Basis.NOT_ENFORCED)


def test_without_host_access_the_node_is_judged_as_anybody() -> None:
    judged = Settings(host_allowed=False)
    assert evaluate([CLOSED], [], question("host", "blue/a")).passes
    assert not evaluate([CLOSED], [], question("host", "blue/a"), judged).passes


def test_host_access_is_for_what_comes_in_only() -> None:
    outwards = Question(make_party("blue/a", 4), make_party("host", 4), Direction.EGRESS, TCP, 22)
    assert not evaluate([CLOSED], [], outwards).passes


def test_audit_lets_pass_what_it_calls_denied() -> None:
    for policies in ([CLOSED], [make_policy(make_rule(Verdict.DENY))]):
        decided = evaluate(policies, [], question("blue/c", "blue/a"), Settings(audit=True))
        assert (decided.verdict, decided.audited, decided.passes) == (Verdict.DENY, True, True)
        assert decided.why


def test_audit_says_nothing_about_what_is_allowed() -> None:
    decided = evaluate([B_TO_A], [], question("blue/b", "blue/a"), Settings(audit=True))
    assert (decided.verdict, decided.audited) == (Verdict.ALLOW, False)


def test_an_open_direction_is_named_so() -> None:
    decided = evaluate([], [], question("blue/b", "blue/a"))
    assert decided == Decision(Verdict.ALLOW, Basis.DEFAULT_ALLOW)


def test_policies_hold_for_endpoints_only() -> None:
    flow = Question(make_party("client", 4), make_party("server", 4), Direction.EGRESS, TCP, 80)
    everything = make_policy(make_rule(Verdict.DENY))
    decided = evaluate_flow([everything], [], flow)
    assert (decided.egress, decided.ingress, decided.verdict) == (None, None, Verdict.ALLOW)


def test_protocols_without_ports_match_rules_about_everything_only() -> None:
    by_peer = read_np("podSelector: {}\ningress: [{from: [{podSelector: {}}]}]")
    by_port = read_np("podSelector: {}\ningress: [{ports: [{protocol: TCP}, {protocol: UDP}]}]")
    asked = question("blue/b", "blue/a", 0, GRE)
    assert evaluate([by_peer], [], asked).passes
    assert not evaluate([by_port], [], asked).passes


def test_a_type_of_icmp_covers_all_its_codes() -> None:
    (policy,) = decode_cilium_policy(
        yaml.safe_load(cnp("endpointSelector: {}\ningress: [{icmps: [{fields: [{type: 3}]}]}]"))
    )
    for code in (0, 4, 255):
        assert evaluate([policy], [], question("blue/b", "blue/a", 3 << 8 | code, ICMP)).passes
    assert not evaluate([policy], [], question("blue/b", "blue/a", 4 << 8, ICMP)).passes


def test_without_an_address_no_cidr_matches() -> None:
    policy = read_np("podSelector: {}\ningress: [{from: [{ipBlock: {cidr: 0.0.0.0/0}}]}]")
    asked = question("client", "blue/a")
    assert evaluate([policy], [], asked).passes
    unknown = replace(asked, peer=replace(asked.peer, address=None))
    assert not evaluate([policy], [], unknown).passes


def test_two_parties_without_addresses_are_not_the_same() -> None:
    asked = question("blue/a", "blue/a")
    nowhere = replace(asked.peer, address=None)
    assert not evaluate([CLOSED], [], replace(asked, subject=nowhere, peer=nowhere)).passes


# Precedence.


@pytest.mark.parametrize(
    ("stronger", "weaker"), [(Verdict.ALLOW, Verdict.DENY), (Verdict.DENY, Verdict.ALLOW)]
)
def test_higher_precedence_wins_whatever_the_verdicts(stronger: Verdict, weaker: Verdict) -> None:
    policy = make_policy(
        make_rule(weaker, path="weak"),
        make_rule(stronger, precedence=TIER_DEFAULT + 1, path="strong"),
    )
    decided = evaluate([policy], [], question("blue/b", "blue/a"))
    assert decided.verdict is stronger
    assert [name.path for name in decided.rules] == ["strong"]


def test_at_equal_precedence_deny_wins_and_is_named() -> None:
    policy = make_policy(make_rule(Verdict.ALLOW, path="yes"), make_rule(Verdict.DENY, path="no"))
    decided = evaluate([policy], [], question("blue/b", "blue/a"))
    assert decided.rule == RuleName(policy.policy, "no")
    assert decided.why == ("Made m no denies it",)


def test_every_rule_that_would_have_decided_is_named_once() -> None:
    one = make_policy(make_rule(Verdict.ALLOW), name="one")
    two = make_policy(make_rule(Verdict.ALLOW), name="two")
    decided = evaluate([two, one, two], [], question("blue/b", "blue/a"))
    assert [str(name) for name in decided.rules] == ["Made one x", "Made two x"]


# What people are told.

WHY: list[tuple[str, Question, str]] = [
    ("a peer's labels", question("blue/c", "blue/a"), "labels do not match app=b.*not app=b"),
    ("the namespace", question("red/b", "blue/a"), r"not k8s:io.kubernetes.pod.namespace=blue\)"),
    ("the port", question("blue/b", "blue/a", 81), "81/TCP is not in 80/TCP"),
    ("the protocol", question("blue/b", "blue/a", 80, UDP), "80/UDP is not in 80/TCP"),
    ("the type", question("blue/b", "blue/a", 8 << 8, ICMP), "ICMP type 8 code 0 is not in"),
    ("another protocol", question("blue/b", "blue/a", 0, GRE), "protocol 47 is not in"),
]


@pytest.mark.parametrize(("asked", "words"), [row[1:] for row in WHY], ids=[row[0] for row in WHY])
def test_a_denial_says_what_each_rule_wanted(asked: Question, words: str) -> None:
    decided = evaluate([CLOSED, B_TO_A], [], asked)
    assert decided.why[:2] == (
        "NetworkPolicy blue/closed closes ingress for what no rule allows",
        "NetworkPolicy blue/p closes ingress for what no rule allows",
    )
    assert len(decided.why) == 3
    assert decided.why[2].startswith("NetworkPolicy blue/p ingress[0]: ")
    assert re.search(words, decided.why[2])


def test_a_denial_by_address_says_which_address_and_which_block() -> None:
    (policy,) = decode_cilium_policy(
        yaml.safe_load(cnp("endpointSelector: {}\ningress: [{fromCIDR: [10.0.0.0/8]}, {}]"))
    )
    outside = evaluate([policy], [], question("client", "blue/a")).why
    assert (
        "the peer has 198.51.100.10, which is not in 10.0.0.0/8 outside the cluster" in outside[1]
    )
    assert outside[2].endswith("spec.ingress[1]: selects nobody")
    inside = evaluate([policy], [], question("blue/b", "blue/a")).why
    assert "10.244.1.22 and is inside the cluster" in inside[1]


def test_a_default_denial_names_all_policies_that_close() -> None:
    decided = evaluate([B_TO_A, CLOSED], [], question("blue/c", "blue/a"))
    assert [(name.policy.name, name.path) for name in decided.rules] == [
        ("closed", "default-deny"),
        ("p", "default-deny"),
    ]


# The document of a trace.


def traced(source: str, target: str, *policies: PolicyRules, audit: bool = False) -> dict[str, Any]:
    """Trace a flow to port 80."""
    flow = Question(make_party(source, 4), make_party(target, 4), Direction.EGRESS, TCP, 80)
    return trace(policies, [], flow, revision=7, settings=Settings(audit=audit))


def test_a_trace_of_what_is_allowed_names_the_rule() -> None:
    found = traced("blue/b", "blue/a", B_TO_A)
    assert found == {
        "verdict": "allowed",
        "egress": {"verdict": "allowed", "policy": "", "rule": "", "basis": "default-allow"},
        "ingress": {
            "verdict": "allowed",
            "policy": "NetworkPolicy blue/p",
            "rule": "ingress[0]",
            "basis": "rule",
        },
        "why": [],
        "audit": False,
        "revision": 7,
    }


def test_a_trace_of_what_is_denied_says_at_which_end_and_why() -> None:
    found = traced("blue/b", "red/a", CLOSED)
    assert (found["verdict"], found["egress"]["verdict"]) == ("denied", "denied")
    assert found["ingress"]["verdict"] == "allowed"
    assert found["egress"]["rule"] == "default-deny"
    assert found["why"] == [
        "egress: NetworkPolicy blue/closed closes egress for what no rule allows"
    ]


def test_a_trace_from_the_world_has_no_egress() -> None:
    found = traced("client", "blue/a", B_TO_A)
    assert found["egress"]["basis"] == "no-endpoint"
    assert found["verdict"] == "denied"


def test_a_trace_in_audit_says_denied_and_that_it_passes() -> None:
    found = traced("client", "blue/a", B_TO_A, audit=True)
    assert (found["verdict"], found["audit"]) == ("denied", True)
    assert traced("blue/b", "blue/a", B_TO_A, audit=True)["audit"] is False


# Labels.


@pytest.mark.parametrize(
    ("requirement", "labels", "met"),
    [
        (("any", "a", Operator.IN, ("x",)), ["k8s:a=x"], True),
        (("any", "a", Operator.IN, ("x",)), ["reserved:a=x"], False),
        (("reserved", "a", Operator.EXISTS), ["reserved:a="], True),
        (("any", "a", Operator.DOES_NOT_EXIST), ["reserved:a="], True),
        (("k8s", "a", Operator.IN, ("x",)), ["cni:a=x"], False),
        (("any", "a", Operator.IN, ("y",)), ["cni:a=x", "k8s:a=y"], True),
        (("any", "a", Operator.NOT_IN, ("y",)), ["cni:a=x", "k8s:a=y"], False),
        (("k8s", "a", Operator.NOT_IN, ("x",)), ["cni:a=x"], True),
        (("any", "a", Operator.IN, ("",)), ["cni:a="], True),
        (("any", "a", Operator.IN, ("",)), [], False),
        (("any", "a", Operator.EXISTS), ["k8s:a="], True),
        (("any", "a", Operator.NOT_IN, ("x",)), [], True),
    ],
    ids=str,
)
def test_a_requirement_is_met(requirement: tuple[Any, ...], labels: list[str], met: bool) -> None:
    assert matches(make_selector(Requirement(*requirement)), LabelSet(labels)) is met


# Laws, for random policies and questions.

KEYS = ("app", "tier")
VALUES = ("a", "b")
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.1.0.1", "fd00::1")
NETWORKS = tuple(
    ip_network(text) for text in ("10.0.0.0/8", "10.0.0.0/24", "10.0.0.1/32", "0.0.0.0/0", "::/0")
)
LABEL_SETS = st.frozensets(
    st.builds(
        "{}:{}={}".format,
        st.sampled_from(("k8s", "cni")),
        st.sampled_from(KEYS),
        st.sampled_from(VALUES),
    ),
    max_size=3,
).map(lambda labels: tuple(sorted(labels)))
REQUIREMENTS = st.builds(
    lambda source, key, operator, values: Requirement(
        source, key, operator, values if operator in (Operator.IN, Operator.NOT_IN) else ()
    ),
    st.sampled_from(("any", "k8s")),
    st.sampled_from(KEYS),
    st.sampled_from(list(Operator)),
    st.sampled_from([("a",), ("b",), ("a", "b")]),
)
SELECTORS = st.lists(REQUIREMENTS, max_size=2).map(lambda found: make_selector(*found))
EXCEPTIONS = st.lists(st.sampled_from(NETWORKS), max_size=1).map(tuple)
PEERS: st.SearchStrategy[PeerSelector] = st.one_of(
    SELECTORS,
    st.builds(CidrSelector, st.sampled_from(NETWORKS), EXCEPTIONS, st.booleans()),
    st.builds(CidrGroupSelector, st.just("g"), st.none(), EXCEPTIONS),
)
PORTS = st.sampled_from(
    [
        PortMatch(),
        PortMatch(TCP),
        PortMatch(TCP, 80, 80),
        PortMatch(TCP, 79, 82),
        PortMatch(TCP, name="http"),
        PortMatch(ICMP, 8, 8, icmp=True),
    ]
)
RULES = st.builds(
    Rule,
    st.sampled_from(list(Direction)),
    st.sampled_from(list(Verdict)),
    st.lists(PEERS, max_size=2).map(tuple),
    st.lists(PORTS, max_size=2).map(tuple),
    st.sampled_from(["r0", "r1"]),
    st.sampled_from([TIER_DEFAULT, TIER_DEFAULT + 1]),
)
POLICIES = st.lists(
    st.builds(
        PolicyRules,
        st.builds(PolicyId, st.just("Made"), st.just(""), st.sampled_from(["m", "n"])),
        SELECTORS,
        st.frozensets(st.sampled_from(list(Direction))),
        st.lists(RULES, max_size=3).map(tuple),
    ),
    max_size=4,
)
GROUPS = st.lists(st.builds(CidrGroup, st.just("g"), st.just(()), EXCEPTIONS), max_size=2)
FACTS = st.builds(
    IdentityFacts,
    st.sampled_from([2, 70000, 70001]),
    LABEL_SETS,
    st.sampled_from([(), (NamedPort("http", TCP, 80),)]),
)
PARTIES = st.builds(
    Party, FACTS, st.sampled_from(ADDRESSES).map(ip_address) | st.none(), st.just(True)
)
QUESTIONS = st.builds(
    Question,
    PARTIES,
    PARTIES,
    st.sampled_from(list(Direction)),
    st.sampled_from([TCP, ICMP]),
    st.sampled_from([80, 81, 8 << 8]),
)
MODES = st.builds(Settings, st.sampled_from(list(Enforcement)), st.booleans(), st.booleans())


@given(POLICIES, GROUPS, QUESTIONS, MODES, st.randoms(use_true_random=False))
def test_the_order_of_everything_is_without_effect(
    policies: list[PolicyRules],
    groups: list[CidrGroup],
    asked: Question,
    mode: Settings,
    shuffled: Any,
) -> None:
    before = evaluate(policies, groups, asked, mode)
    other = [
        replace(policy, rules=tuple(shuffled.sample(policy.rules, len(policy.rules))))
        for policy in policies
    ]
    shuffled.shuffle(other)
    after = evaluate(other, groups[::-1], asked, mode)
    assert (after.verdict, after.basis, after.rules) == (before.verdict, before.basis, before.rules)


@given(POLICIES, GROUPS, QUESTIONS, MODES, RULES)
def test_one_more_rule_moves_the_verdict_its_own_way_only(
    policies: list[PolicyRules],
    groups: list[CidrGroup],
    asked: Question,
    mode: Settings,
    rule: Rule,
) -> None:
    before = evaluate(policies, groups, asked, mode).verdict
    more = [*policies, make_policy(rule)]
    after = evaluate(more, groups, asked, mode).verdict
    assert after in (before, rule.verdict)


@given(POLICIES, GROUPS, QUESTIONS, SELECTORS)
def test_closing_a_direction_never_opens_it(
    policies: list[PolicyRules], groups: list[CidrGroup], asked: Question, subject: LabelSelector
) -> None:
    before = evaluate(policies, groups, asked)
    closing = PolicyRules(PolicyId("Made", "", "x"), subject, frozenset(Direction), ())
    after = evaluate([*policies, closing], groups, asked)
    assert before.verdict is Verdict.ALLOW or after.verdict is Verdict.DENY
    assert before.basis is not Basis.RULE or after == before


@given(POLICIES, GROUPS, QUESTIONS, MODES)
def test_a_denial_has_a_reason_and_an_allowance_needs_none(
    policies: list[PolicyRules], groups: list[CidrGroup], asked: Question, mode: Settings
) -> None:
    decided = evaluate(policies, groups, asked, mode)
    assert bool(decided.why) is (decided.verdict is Verdict.DENY)
    assert bool(decided.rules) or decided.basis is not Basis.RULE
    assert decided.audited is (mode.audit and decided.verdict is Verdict.DENY)


@given(POLICIES, GROUPS, QUESTIONS)
def test_a_flow_passes_only_where_both_ends_let_it(
    policies: list[PolicyRules], groups: list[CidrGroup], asked: Question
) -> None:
    flow = replace(asked, direction=Direction.EGRESS)
    back = Question(flow.peer, flow.subject, Direction.INGRESS, flow.protocol, flow.port)
    ends = [evaluate(policies, groups, one) for one in (flow, back)]
    assert evaluate_flow(policies, groups, flow).passes is all(end.passes for end in ends)
