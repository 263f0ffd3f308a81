"""The tables of cases put to the oracle: each flow of each case passes or not, as the table says."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from podwire.control.policy.oracle import Party, Question, evaluate_flow
from podwire.control.policy.rule import CidrGroup, IdentityFacts, PolicyRules
from podwire.control.policy.rules_cilium import KIND_GROUP, decode_cidr_group, decode_cilium_policy
from podwire.control.policy.rules_k8s import KIND, decode_network_policy
from podwire.model.policy import Direction
from tests.policy_cases import OUTSIDE, PODS, Case, Flow, address_of, cilium_policy, network_policy

FIRST_IDENTITY = 70000
CASES = [*network_policy.CASES, *cilium_policy.CASES]


def decode(case: Case) -> tuple[list[PolicyRules], list[CidrGroup]]:
    """Read a case's documents."""
    policies: list[PolicyRules] = []
    groups: list[CidrGroup] = []
    for text in case.documents:
        document: Mapping[str, Any] = yaml.safe_load(text)
        if document["kind"] == KIND:
            policies.append(decode_network_policy(document))
        elif document["kind"] == KIND_GROUP:
            groups.append(decode_cidr_group(document))
        else:
            policies.extend(decode_cilium_policy(document))
    return policies, groups


def party(name: str, family: int, source: str) -> Party:
    """Give one side of a flow as policy sees it."""
    address = address_of(name, family)
    if name in OUTSIDE:
        return Party(OUTSIDE[name].facts, address)
    pod = PODS[name]
    number = FIRST_IDENTITY + list(PODS).index(name)
    facts = IdentityFacts(number, pod.canonical_labels(source), pod.ports)
    return Party(facts, address, endpoint=True)


def passes(
    case: Case, flow: Flow, family: int, policies: list[PolicyRules], groups: list[CidrGroup]
) -> bool:
    """Tell what the oracle makes of a flow."""
    sides = [party(name, family, case.source) for name in (flow.source, flow.target)]
    question = Question(*sides, Direction.EGRESS, *flow.numbers(family))
    return evaluate_flow(policies, groups, question).passes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_flows_pass_as_the_table_says(case: Case) -> None:
    policies, groups = decode(case)
    wrong = [
        f"IPv{family} {flow} {'denied' if flow.allowed else 'allowed'}"
        for family in case.families
        for flow in case.flows
        if flow.exists_in(family)
        and passes(case, flow, family, policies, groups) is not flow.allowed
    ]
    assert not wrong


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_no_case_depends_on_the_order_of_its_policies(case: Case) -> None:
    policies, groups = decode(case)
    for family in case.families:
        for flow in case.flows:
            forwards = passes(case, flow, family, policies, groups)
            assert passes(case, flow, family, policies[::-1], groups[::-1]) is forwards


def test_the_tables_are_as_large_as_promised() -> None:
    assert len(network_policy.CASES) >= 150
    assert len(cilium_policy.CASES) >= 120


def test_no_fact_is_pinned_twice() -> None:
    for table in (network_policy.CASES, cilium_policy.CASES):
        assert not [name for name, count in Counter(case.id for case in table).items() if count > 1]
        contents = Counter(
            (case.documents, case.flows, case.families, case.source) for case in table
        )
        assert not [content for content, count in contents.items() if count > 1]


def test_every_case_asks_something() -> None:
    assert not [case.id for case in CASES if not case.flows or not case.families]
