"""The engine, case by case: how changes are written, what fails how, and what endpoints are told."""

from dataclasses import replace
from typing import Final

import pytest

from podwire.control.policy.engine import Enforcement
from podwire.control.policy.labels_match import make_selector
from podwire.control.policy.rule import (
    TCP,
    CidrSelector,
    IdentityFacts,
    LabelSelector,
    Operator,
    PolicyId,
    PolicyRules,
    PortMatch,
    Requirement,
    Rule,
)
from podwire.model.errors import NotFound, PolicyOverflow
from podwire.model.ids import EndpointId
from podwire.model.policy import Direction, Verdict
from tests.fakes.policy import Packet
from tests.fakes.policy_world import NETWORKS, WORLD, World

FIRST_IDENTITY: Final = 65536
POLICIES: Final = [PolicyId("NetworkPolicy", "n", f"p{number}") for number in range(2)]


def allow(*ports: int, peers: str = "a", app: str = "a") -> tuple[PolicyRules, ...]:
    """Give a policy for pods with `app`, closed but for these ports of these peers."""
    rules = tuple(
        Rule(Direction.INGRESS, Verdict.ALLOW, (app_is(peers),), (port(one),), f"ingress[{index}]")
        for index, one in enumerate(ports)
    )
    return (PolicyRules(POLICIES[0], app_is(app), frozenset({Direction.INGRESS}), rules),)


def port(number: int) -> PortMatch:
    return PortMatch(TCP, number, number)


def app_is(value: str) -> LabelSelector:
    return make_selector(Requirement("any", "app", Operator.IN, (value,)))


def make_small_world(*policies: tuple[PolicyRules, ...]) -> World:
    """Give a node with two endpoints of `app=a`, one of `app=b`, and policies."""
    world = World()
    for number, app in ((FIRST_IDENTITY, "a"), (FIRST_IDENTITY + 1, "b")):
        world.learn(IdentityFacts(number, (f"k8s:app={app}",)))
    for rules in policies:
        world.set_policy(rules[0].policy, rules)
    for number, identity in ((1, FIRST_IDENTITY), (2, FIRST_IDENTITY), (3, FIRST_IDENTITY + 1)):
        world.attach(number, identity)
    world.datapath.calls.clear()
    return world


@pytest.mark.parametrize(
    ("before", "after", "calls"),
    [
        pytest.param((80,), (80, 443), ["change_slot", "update_endpoints"], id="more"),
        pytest.param((80, 443), (80,), ["change_slot", "update_endpoints"], id="less"),
        pytest.param((80,), (443,), ["write_slot", "update_endpoints"], id="other"),
        pytest.param((80,), (80,), [], id="the same"),
        pytest.param((), (80,), ["write_slot", "update_endpoints"], id="first entry"),
        pytest.param((80,), (), ["change_slot", "update_endpoints"], id="last entry"),
    ],
)
def test_additions_and_removals_are_made_in_place_and_mixed_changes_under_a_new_number(
    before: tuple[int, ...], after: tuple[int, ...], calls: list[str]
) -> None:
    world = make_small_world(allow(*before))
    world.set_policy(POLICIES[0], allow(*after))
    outcome = world.engine.apply()
    assert [method for method, _slot in world.datapath.calls] == calls
    assert set(outcome.changed) == ({EndpointId(1), EndpointId(2)} if calls else set())


def test_where_new_prefixes_come_entries_of_others_change_under_a_new_number() -> None:
    """A program that has read the map of CIDRs before must find the entries that belonged to it."""
    wide, narrow, other = NETWORKS[1], NETWORKS[2], NETWORKS[5]
    world = make_small_world(allow_addresses(CidrSelector(wide), CidrSelector(other)))
    world.set_policy(POLICIES[0], allow_addresses(CidrSelector(wide, (narrow,))))
    world.engine.apply()
    calls = ["change_slot", "write_cidrs", "write_slot", "update_endpoints"]
    assert [method for method, _slot in world.datapath.calls] == calls


def test_a_new_prefix_changes_nothing_for_the_rules_of_others() -> None:
    wide, narrow = NETWORKS[1], NETWORKS[2]
    world = make_small_world(allow_addresses(CidrSelector(wide)))
    endpoint = EndpointId(1)
    packet = Packet(Direction.EGRESS, WORLD, TCP, 80, narrow[9])
    met: set[Verdict] = set()
    world.datapath.watch = lambda: met.add(world.decide(endpoint, packet))
    rules = replace(
        allow_addresses(CidrSelector(narrow))[0], policy=POLICIES[1], subject=app_is("b")
    )
    world.set_policy(POLICIES[1], (rules,))
    world.engine.apply()
    world.remove_policy(POLICIES[1])
    world.engine.apply()
    world.engine.collect()
    assert met | {world.decide(endpoint, packet)} == {Verdict.ALLOW}
    assert world.engine.list_cidrs().keys() == world.datapath.cidrs.keys() == {wide}


def allow_addresses(*cidrs: CidrSelector) -> tuple[PolicyRules, ...]:
    rule = Rule(Direction.EGRESS, Verdict.ALLOW, cidrs, (PortMatch(),), "egress[0]")
    return (PolicyRules(POLICIES[0], app_is("a"), frozenset({Direction.EGRESS}), (rule,)),)


def test_a_policy_touches_nobody_but_those_it_selects() -> None:
    world = make_small_world(allow(80))
    row = world.datapath.rows[EndpointId(3)]
    world.set_policy(POLICIES[0], allow(443))
    world.engine.apply()
    assert world.datapath.rows[EndpointId(3)] is row


def test_an_overflow_leaves_the_old_slot_and_names_the_policy() -> None:
    world = make_small_world(allow(80))
    rows = dict(world.datapath.rows)
    world.datapath.capacity = world.datapath.count() + 1
    world.set_policy(POLICIES[0], allow(1, 2, 3))
    outcome = world.engine.apply()
    failure = outcome.failed[0]
    assert failure.identity == FIRST_IDENTITY
    assert failure.endpoints == (1, 2)
    assert failure.policies == (POLICIES[0],)
    assert isinstance(failure.error, PolicyOverflow)
    assert world.datapath.rows == rows
    assert world.engine.realized_revision(EndpointId(1)) < world.engine.revision
    assert world.engine.realized_revision(EndpointId(3)) == world.engine.revision
    world.datapath.capacity = 100
    assert world.engine.is_pending
    assert world.engine.apply().recovered == (1, 2)
    assert world.engine.realized_revision(EndpointId(1)) == world.engine.revision


def test_an_add_that_does_not_fit_fails_and_leaves_nothing() -> None:
    world = make_small_world(allow(80, app="c"))
    world.learn(IdentityFacts(FIRST_IDENTITY + 2, ("k8s:app=c",)))
    world.datapath.capacity = 0
    world.engine.apply()
    with pytest.raises(PolicyOverflow):
        world.engine.attach(EndpointId(9), FIRST_IDENTITY + 2)
    with pytest.raises(NotFound):
        world.engine.config_for(FIRST_IDENTITY + 2)
    world.datapath.capacity = 10
    world.attach(9, FIRST_IDENTITY + 2)
    assert world.datapath.rows[EndpointId(9)].deny_ingress


def test_an_identity_of_other_endpoints_is_not_known_before_it_is_told() -> None:
    with pytest.raises(NotFound):
        make_small_world().engine.attach(EndpointId(9), FIRST_IDENTITY + 7)


def test_a_former_slot_is_deleted_by_collect_and_not_before() -> None:
    world = make_small_world(allow(80))
    former = world.datapath.rows[EndpointId(1)].slot
    world.set_policy(POLICIES[0], allow(443))
    world.engine.apply()
    assert former in world.datapath.list_slots()
    world.engine.collect()
    assert former not in world.datapath.list_slots()


def test_slots_go_when_their_endpoints_have_gone() -> None:
    world = make_small_world(allow(80))
    for endpoint in (EndpointId(1), EndpointId(2)):
        world.detach(endpoint)
    world.engine.collect()
    assert world.datapath.list_slots() == []


def test_an_endpoint_with_other_labels_gets_a_revision_its_flows_have_not_seen() -> None:
    world = make_small_world(allow(80))
    world.set_policy(POLICIES[1], allow(80, app="b"))
    world.engine.apply()
    before = world.datapath.rows[EndpointId(1)]
    world.attach(1, FIRST_IDENTITY + 1)
    after = world.datapath.rows[EndpointId(1)]
    assert after.policy_revision > before.policy_revision
    assert after.slot != before.slot
    assert world.datapath.rows[EndpointId(3)].slot == after.slot
    world.set_policy(POLICIES[0], allow(443))
    world.engine.apply()
    assert world.datapath.rows[EndpointId(1)] == after


def test_numbers_are_never_used_again_after_a_restart() -> None:
    world = make_small_world(allow(80))
    slot = world.datapath.rows[EndpointId(1)].slot
    revision = world.engine.revision
    world.restart()
    assert world.datapath.rows[EndpointId(1)].slot == slot
    world.set_policy(POLICIES[0], allow(443))
    world.engine.apply()
    assert world.datapath.rows[EndpointId(1)].slot > slot + 1
    assert world.datapath.rows[EndpointId(1)].policy_revision > revision


def test_a_denial_by_default_names_the_policy_that_closes() -> None:
    world = make_small_world(allow())
    row = world.datapath.rows[EndpointId(1)]
    assert str(world.engine.rule_name(row.default_rule_ingress)) == f"{POLICIES[0]} default-deny"
    assert row.deny_ingress
    assert not row.deny_egress
    assert row.slot == 0


def test_the_setting_always_closes_those_whom_no_policy_selects() -> None:
    world = make_small_world()
    world.engine.set_enforcement(Enforcement.ALWAYS)
    world.engine.apply()
    row = world.datapath.rows[EndpointId(3)]
    assert row.deny_ingress
    assert row.deny_egress
    assert world.engine.rule_name(row.default_rule_egress) is not None
    world.engine.set_enforcement(Enforcement.NEVER)
    world.engine.apply()
    assert not world.datapath.rows[EndpointId(3)].deny_ingress


def test_a_thousand_changes_are_one_revision() -> None:
    world = make_small_world()
    before = world.engine.revision
    for number in range(1000):
        policy = PolicyId("NetworkPolicy", "n", f"many{number}")
        world.set_policy(policy, allow(1 + number))
    world.engine.apply()
    assert world.engine.revision == before + 1
    assert len([one for one in world.datapath.calls if one[0] == "update_endpoints"]) == 1
