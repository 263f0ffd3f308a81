"""What policies mean, as packets meet it: every case of the tables of tests/policy_cases, in both families.

The oracle is put to the same tables by unit tests. Here the agent decides, the kernel enforces, and a flow that is
denied must be told: as a drop whose policy is the oracle's.
"""

from collections.abc import Iterator, Mapping

import pytest
import yaml

from podwire.control.policy.oracle import Decision, FlowDecision, evaluate_flow
from tests.lab.policy_rig import Scene, open_scene
from tests.lab.prober import Attempt, Fate, Prober
from tests.policy_cases import PODS, Case, Flow, cilium_policy, network_policy
from tests.policy_cases.sides import ask, decode_case

pytestmark = pytest.mark.lab

ICMP_ERRORS = {"icmp": (3, 4, 5, 11, 12), "icmp6": (1, 2, 3, 4)}
"""An error is about another packet; alone it is none."""


def is_playable(flow: Flow) -> bool:
    """Tell whether one node can show what becomes of a flow."""
    if flow.protocol in ICMP_ERRORS:
        return flow.port not in ICMP_ERRORS[flow.protocol]
    return flow.real


def select_cases() -> list[Case]:
    """Give the cases that can be played; a lab without Kubernetes has labels of the source `cni` alone."""
    return [
        case
        for case in (*network_policy.CASES, *cilium_policy.CASES)
        if case.source == "cni" and any(map(is_playable, case.flows))
    ]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with open_scene() as made:
        yield made


@pytest.fixture(scope="module")
def prober(scene: Scene) -> Iterator[Prober]:
    with Prober(scene.places, str(scene.node.directory / "api.sock")) as made:
        yield made


@pytest.mark.parametrize("case", select_cases(), ids=lambda case: case.id)
def test_packets_meet_what_the_table_says(scene: Scene, prober: Prober, case: Case) -> None:
    scene.enforce([yaml.safe_load(text) for text in case.documents])
    attempts = prober.play(
        (flow, family)
        for flow in case.flows
        if is_playable(flow)
        for family in case.families
        if flow.exists_in(family)
    )
    faults = {str(attempt): found for attempt in attempts if (found := find_faults(case, attempt))}
    assert not faults, explain(scene, case, attempts, faults)


def explain(
    scene: Scene, case: Case, attempts: list[Attempt], faults: Mapping[str, list[str]]
) -> str:
    """Show what went wrong, the policies, and what the programs held."""
    ends = {
        name
        for attempt in attempts
        if str(attempt) in faults
        for name in (attempt.flow.source, attempt.flow.target)
        if name in PODS
    }
    shown = [line for found in faults.values() for line in found]
    entries = [f"{name}:\n{scene.entries(name)}" for name in sorted(ends)]
    return "\n".join([*shown, *case.documents, *entries])


def find_faults(case: Case, attempt: Attempt) -> list[str]:
    """Name what is not as the table and the oracle say."""
    wanted = Fate.PASSED if attempt.flow.allowed else Fate.DENIED
    if attempt.fate is not wanted:
        return [f"wanted {wanted}: {attempt.told}"]
    if attempt.flow.allowed:
        return []
    policies, groups = decode_case(case)
    decided = evaluate_flow(policies, groups, ask(case, attempt.flow, attempt.family))
    denial = find_denial(decided)
    named = {
        (policy["kind"], policy["namespace"], policy["name"])
        for policy in attempt.event["policies"]
    }
    meant = {(rule.policy.kind, rule.policy.namespace, rule.policy.name) for rule in denial.rules}
    if len(meant) == 1 and named != meant:
        return [f"wanted the drop of {meant}: {attempt.told}"]
    return [] if named <= meant else [f"wanted the drop of one of {meant}: {attempt.told}"]


def find_denial(decided: FlowDecision) -> Decision:
    """Give the decision that a packet meets first."""
    return next(half for half in (decided.egress, decided.ingress) if half and not half.passes)
