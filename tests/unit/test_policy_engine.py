"""The engine, case by case: how changes are written, what fails how, and what endpoints are told."""

from dataclasses import replace
from typing import Final

import pytest

from podwire.control.policy.labels_match import make_selector
from podwire.control.policy.oracle import Enforcement
from podwire.control.policy.rule import (
    TCP,
    CidrSelector,
    LabelSelector,
    PolicyId,
    PolicyRules,
    PortMatch,
    Requirement,
    Rule,
)
from podwire.model.errors import KernelFailure, NotFound, PolicyOverflow
from podwire.model.identity import IdentityFacts
from podwire.model.ids import EndpointId
from podwire.model.labels import Operator
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
    world.datapath.capacity = 100
    assert world.engine.is_pending
    assert world.engine.apply().recovered == (1, 2)


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


def test_flows_judged_under_audit_are_judged_again_when_it_ends() -> None:
    world = make_small_world(allow(80))
    before, slot = world.engine.generation, world.datapath.rows[EndpointId(1)].slot
    outcome = world.engine.attach(EndpointId(1), FIRST_IDENTITY, renew=True)
    assert outcome.changed.keys() == {1, 2}
    assert world.datapath.rows[EndpointId(1)].policy_revision > before
    assert world.datapath.rows[EndpointId(1)].slot == slot


def test_an_endpoint_that_is_attached_again_keeps_its_flows() -> None:
    world = make_small_world(allow(80))
    before = dict(world.datapath.rows)
    assert not world.engine.attach(EndpointId(1), FIRST_IDENTITY).changed
    assert world.datapath.rows == before


def test_rows_that_could_not_be_renewed_are_by_the_next_change() -> None:
    world = make_small_world(allow(80))
    before = world.engine.generation
    world.datapath.fail["update_endpoints"] = KernelFailure(5, "update map", "pw_config")
    with pytest.raises(KernelFailure):
        world.engine.attach(EndpointId(1), FIRST_IDENTITY, renew=True)
    assert world.engine.apply().recovered == (1, 2)
    assert world.datapath.rows[EndpointId(1)].policy_revision > before


# Room


def make_full_world() -> World:
    """Give a node whose pods of `app=a` are gone, and no room beside what is left of them."""
    world = make_small_world(allow(80), tuple(replace(one, policy=POLICIES[1]) for one in CLOSED_C))
    world.learn(IdentityFacts(FIRST_IDENTITY + 2, ("k8s:app=c",)))
    world.detach(EndpointId(1))
    world.detach(EndpointId(2))
    world.datapath.capacity = 1
    return world


CLOSED_C: Final = allow(80, app="c")


def test_what_pods_left_over_makes_room_for_an_add() -> None:
    world = make_full_world()
    world.attach(9, FIRST_IDENTITY + 2)
    assert world.datapath.list_slots() == [world.datapath.rows[EndpointId(9)].slot]


def test_what_pods_left_over_makes_room_for_a_change() -> None:
    world = make_full_world()
    world.set_policy(PolicyId("NetworkPolicy", "n", "b"), allow(81, app="b"))
    assert not world.engine.apply().failed
    assert world.datapath.rows[EndpointId(3)].slot


def test_a_former_slot_makes_room_for_the_next() -> None:
    world = make_small_world(allow(80))
    world.datapath.capacity = 2
    for port_number in (443, 80, 443):
        world.set_policy(POLICIES[0], allow(port_number))
        assert not world.engine.apply().failed


def test_slots_of_an_earlier_process_make_room_too() -> None:
    world = make_full_world()
    world.start()
    for policy, rules in world.policies.items():
        world.engine.set_policy(policy, rules)
    for facts in world.facts.values():
        world.engine.identity_added(facts)
    world.attach(9, FIRST_IDENTITY + 2)
    assert world.datapath.rows[EndpointId(9)].slot


def test_cidrs_that_nobody_names_make_room_for_others() -> None:
    world = make_small_world(allow_addresses(CidrSelector(NETWORKS[1])))
    world.remove_policy(POLICIES[0])
    world.engine.apply()
    world.datapath.cidr_capacity = 1
    world.set_policy(POLICIES[0], allow_addresses(CidrSelector(NETWORKS[5])))
    assert not world.engine.apply().failed
    assert world.engine.list_cidrs().keys() == world.datapath.cidrs.keys() == {NETWORKS[5]}


def test_cidrs_of_an_earlier_process_stay_while_a_slot_tells_them_apart() -> None:
    """Their addresses would meet the entries of the prefix around them, before the new rules are in force."""
    world = make_small_world(allow_addresses(CidrSelector(NETWORKS[1])))
    packet = Packet(Direction.EGRESS, WORLD, TCP, 80, NETWORKS[1][9])
    met: set[Verdict] = set()
    world.set_policy(POLICIES[0], allow_addresses(CidrSelector(NETWORKS[5])))
    del world.policies[POLICIES[0]]
    world.policies[POLICIES[1]] = (
        replace(allow_addresses(CidrSelector(NETWORKS[5]))[0], policy=POLICIES[1]),
    )
    world.datapath.cidr_capacity = 1
    world.datapath.watch = lambda: met.add(world.decide(EndpointId(1), packet))
    outcome = world.restart()
    assert met == {Verdict.ALLOW}
    assert [one.endpoints for one in outcome.failed] == [(1, 2)]


def test_waste_is_looked_for_only_after_something_happened() -> None:
    world = make_small_world(allow(80))
    told = [world.engine.has_waste]
    world.engine.collect()
    told.append(world.engine.has_waste)
    world.detach(EndpointId(1))
    told.append(world.engine.has_waste)
    assert told == [True, False, True]


def test_counters_of_rules_that_are_gone_go_too() -> None:
    world = make_small_world(allow(80))
    gone = world.datapath.rows[EndpointId(1)].default_rule_ingress
    world.set_policy(POLICIES[1], allow(80, app="b"))
    world.engine.apply()
    kept = world.datapath.rows[EndpointId(3)].default_rule_ingress
    former_process = 1 << 20
    world.datapath.hits = {gone, kept, former_process}
    world.engine.collect()
    assert world.datapath.hits == {gone, kept}
    world.remove_policy(POLICIES[0])
    world.engine.apply()
    world.engine.collect()
    assert world.datapath.hits == {kept}


def test_an_overflow_names_the_policies_that_take_the_room_and_the_setting() -> None:
    world = make_small_world(allow(80), tuple(replace(one, policy=POLICIES[1]) for one in BIG_B))
    world.datapath.capacity = world.datapath.count() + 1
    world.set_policy(POLICIES[0], allow(1, 2, 3))
    message = world.engine.apply().failed[0].error.message
    assert f"identity {FIRST_IDENTITY} with 3 entries, most of {POLICIES[0]} (3)" in message
    assert f"the largest is identity {FIRST_IDENTITY + 1} with 5 entries" in message
    assert f"{POLICIES[1]} (5)" in message
    assert "policy_entries" in message


BIG_B: Final = allow(1, 3, 5, 7, 9, app="b")


def test_what_nobody_bears_any_more_is_not_tried_again() -> None:
    world = make_small_world(allow(80))
    world.datapath.capacity = world.datapath.count()
    world.set_policy(POLICIES[0], allow(1, 2, 3))
    assert world.engine.apply().failed
    world.detach(EndpointId(1))
    assert world.engine.is_pending
    world.detach(EndpointId(2))
    is_pending: bool = world.engine.is_pending
    assert not is_pending
    assert not world.engine.apply().failed


# Who is who


def test_what_the_store_says_of_a_number_counts_more_than_an_endpoints_record() -> None:
    world = make_small_world(allow(80))
    outdated = IdentityFacts(FIRST_IDENTITY, ("k8s:app=former",))
    world.engine.identity_borne(outdated)
    assert not world.engine.is_pending
    fresh = IdentityFacts(FIRST_IDENTITY + 5, ("k8s:app=fresh",))
    world.engine.identity_borne(fresh)
    world.engine.apply()
    assert fresh.number in world.engine._peers


# Damage


def test_a_slot_that_somebody_emptied_is_written_again_under_a_new_revision() -> None:
    world = make_small_world(allow(80, 443))
    row = world.datapath.rows[EndpointId(1)]
    entries = dict(world.datapath.slots[row.slot])
    stranger = next(iter(entries))
    world.datapath.change_slot(row.slot, {}, list(entries))
    foreign = stranger._replace(identity=9)
    world.datapath.change_slot(row.slot, {foreign: entries[stranger]}, ())
    missing, superfluous = world.engine.compare_slot(FIRST_IDENTITY)
    assert missing == entries
    assert superfluous == [foreign]
    assert world.engine.mend(FIRST_IDENTITY).changed.keys() == {1, 2}
    assert world.datapath.slots[row.slot] == entries
    assert world.datapath.rows[EndpointId(1)].policy_revision > row.policy_revision
    assert not world.engine.mend(FIRST_IDENTITY).changed


def test_numbers_are_never_used_again_after_a_restart() -> None:
    world = make_small_world(allow(80))
    slot = world.datapath.rows[EndpointId(1)].slot
    revision = world.engine.generation
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
    before = world.engine.generation
    for number in range(1000):
        policy = PolicyId("NetworkPolicy", "n", f"many{number}")
        world.set_policy(policy, allow(1 + number))
    world.engine.apply()
    assert world.engine.generation == before + 1
    assert len([call for call in world.datapath.calls if call[0] == "update_endpoints"]) == 1
