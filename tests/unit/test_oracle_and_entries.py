"""The tables of cases put to the entries that the engine writes: what packets will meet, without a kernel."""

import pytest

from podwire.model.identity import Reserved
from podwire.model.ids import EndpointId
from podwire.model.policy import Direction, Verdict
from tests.fakes.policy import Packet
from tests.fakes.policy_world import World
from tests.policy_cases import OUTSIDE, PODS, Case, Flow, address_of, cilium_policy, network_policy
from tests.policy_cases.sides import decode_case, make_party


def number_of(name: str) -> int:
    """Give the identity of a pod or an outsider."""
    return OUTSIDE[name].identity if name in OUTSIDE else make_party(name, 4).facts.number


def enforce(case: Case) -> World:
    """Give a world with the table's pods, in which the case's documents hold."""
    world = World()
    for number, name in enumerate(PODS, 1):
        facts = make_party(name, 4, case.source).facts
        world.learn(facts)
        world.attach(number, facts.number)
    policies, groups = decode_case(case)
    for group in groups:
        world.set_group(group)
    for policy in {part.policy for part in policies}:
        world.set_policy(policy, tuple(part for part in policies if part.policy == policy))
    world.engine.apply()
    return world


def passes(world: World, flow: Flow, family: int) -> bool:
    """Tell whether both ends let a flow pass; what the programs decide before they look entries up is taken as said."""
    if flow.source == flow.target:
        return True
    protocol, port = flow.numbers(family)
    verdicts = []
    for subject, peer, direction in (
        (flow.source, flow.target, Direction.EGRESS),
        (flow.target, flow.source, Direction.INGRESS),
    ):
        by_host = direction is Direction.INGRESS and number_of(peer) == Reserved.HOST
        if subject in PODS and not by_host:
            packet = Packet(direction, number_of(peer), protocol, port, address_of(peer, family))
            endpoint = EndpointId(list(PODS).index(subject) + 1)
            verdicts.append(world.decide(endpoint, packet))
    return Verdict.DENY not in verdicts


@pytest.mark.parametrize(
    "case", [*network_policy.CASES, *cilium_policy.CASES], ids=lambda case: case.id
)
def test_entries_decide_as_the_table_says(case: Case) -> None:
    world = enforce(case)
    wrong = [
        f"IPv{family} {flow} {'denied' if flow.allowed else 'allowed'}"
        for family in case.families
        for flow in case.flows
        if flow.exists_in(family) and passes(world, flow, family) is not flow.allowed
    ]
    assert not wrong
