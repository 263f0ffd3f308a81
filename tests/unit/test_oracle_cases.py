"""The tables of cases put to the oracle: each flow of each case passes or not, as the table says."""

from collections import Counter
from dataclasses import replace

import pytest

from podwire.control.policy.oracle import evaluate_flow
from tests.policy_cases import Case, cilium_policy, network_policy
from tests.policy_cases.sides import ask, decode_case

CASES = [*network_policy.CASES, *cilium_policy.CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_flows_pass_as_the_table_says(case: Case) -> None:
    policies, groups = decode_case(case)
    wrong = [
        f"IPv{family} {flow} {'denied' if flow.allowed else 'allowed'}"
        for family in case.families
        for flow in case.flows
        if flow.exists_in(family)
        and evaluate_flow(policies, groups, ask(case, flow, family)).passes is not flow.allowed
    ]
    assert not wrong


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_no_case_depends_on_the_order_of_its_policies(case: Case) -> None:
    policies, groups = decode_case(case)
    for family in case.families:
        for flow in case.flows:
            question = ask(case, flow, family)
            forwards = evaluate_flow(policies, groups, question)
            assert evaluate_flow(policies[::-1], groups[::-1], question) == forwards


def test_the_tables_are_as_large_as_promised() -> None:
    assert len(network_policy.CASES) >= 150
    assert len(cilium_policy.CASES) >= 120


def test_no_fact_is_pinned_twice() -> None:
    for table in (network_policy.CASES, cilium_policy.CASES):
        assert not [name for name, count in Counter(case.id for case in table).items() if count > 1]
        contents = Counter(replace(case, id="") for case in table)
        assert not [content for content, count in contents.items() if count > 1]


def test_every_case_asks_something() -> None:
    assert not [case.id for case in CASES if not case.flows or not case.families]
