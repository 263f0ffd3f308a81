"""The engine: whatever happens in whatever order, entries say what the rules say, and nothing else on the way."""

import contextlib
from random import Random
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from podwire.control.policy.engine import Enforcement
from podwire.control.policy.labels_match import make_selector
from podwire.control.policy.rule import (
    TCP,
    IdentityFacts,
    LabelSelector,
    Operator,
    PolicyId,
    PolicyRules,
    PortMatch,
    Requirement,
    Rule,
)
from podwire.model.errors import KernelFailure, NotFound, PolicyOverflow
from podwire.model.ids import EndpointId
from podwire.model.policy import Direction, Verdict
from tests.fakes.policy import Packet
from tests.fakes.policy_world import (
    GROUPS,
    World,
    make_facts,
    make_group,
    make_packets,
    make_policy,
)

FIRST_IDENTITY: Final = 65536
IDENTITIES: Final = 8
LOCALS: Final = 4
POLICIES: Final = [PolicyId("NetworkPolicy", "n", f"p{number}") for number in range(6)]

EXAMPLES: Final = 15
SETTINGS: Final = settings(
    max_examples=EXAMPLES,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
SEEDS: Final = st.integers(min_value=0, max_value=(1 << 32) - 1)


def make_world(random: Random, enforcement: Enforcement = Enforcement.DEFAULT) -> World:
    """Give a node with identities, groups and endpoints, and a policy or more."""
    world = World(enforcement)
    for number in range(FIRST_IDENTITY, FIRST_IDENTITY + IDENTITIES):
        world.learn(make_facts(random, number))
    for name in GROUPS:
        world.set_group(make_group(random, name))
    for policy in random.sample(POLICIES, random.choice((1, 2, 4))):
        world.set_policy(policy, make_policy(random, policy))
    for number in range(1, LOCALS + 1):
        world.attach(number, FIRST_IDENTITY + number % 3)
    return world


def change_something(random: Random, world: World) -> None:
    """Do one of the things that happen to a node, without applying it."""
    match random.randrange(8):
        case 0 | 1 | 2 | 3:
            policy = random.choice(POLICIES)
            if policy in world.policies and random.random() < 0.4:
                world.remove_policy(policy)
            else:
                world.set_policy(policy, make_policy(random, policy))
        case 4:
            world.set_group(make_group(random, random.choice(GROUPS)))
        case 5:
            change_identity(random, world)
        case 6:
            world.engine.collect()
        case _:
            change_endpoint(random, world)


def change_identity(random: Random, world: World) -> None:
    """Let an identity come, or one that no endpoint bears go."""
    number = FIRST_IDENTITY + random.randrange(3, IDENTITIES)
    if number not in world.facts:
        world.learn(make_facts(random, number))
    elif number not in world.endpoints.values():
        world.forget(number)


def change_endpoint(random: Random, world: World) -> None:
    """Let an endpoint come, go, or get other labels."""
    number = random.randrange(1, LOCALS + 3)
    if EndpointId(number) in world.endpoints and random.random() < 0.5:
        world.detach(EndpointId(number))
    else:
        world.attach(number, random.choice(sorted(world.facts)))


@SETTINGS
@given(seed=SEEDS)
@pytest.mark.parametrize("enforcement", list(Enforcement))
def test_entries_say_what_the_rules_say(seed: int, enforcement: Enforcement) -> None:
    random = Random(seed)
    world = make_world(random, enforcement)
    assert not world.find_differences(make_packets(random, world.facts, 60))


@SETTINGS
@given(seed=SEEDS)
def test_whatever_happens_entries_stay_those_of_a_new_engine(seed: int) -> None:
    random = Random(seed)
    world = make_world(random)
    for _ in range(12):
        for _ in range(random.choice((1, 1, 2, 5))):
            change_something(random, world)
        assert not world.engine.apply().failed
        assert not world.find_differences(make_packets(random, world.facts, 25))
    world.engine.collect()
    world.engine.apply()
    fresh = World()
    for facts in world.facts.values():
        fresh.learn(facts)
    for group in world.groups.values():
        fresh.set_group(group)
    for policy, rules in world.policies.items():
        fresh.set_policy(policy, rules)
    for endpoint, identity in world.endpoints.items():
        fresh.attach(endpoint, identity)
        assert say(world, identity) == say(fresh, identity)


def say(world: World, identity: int) -> object:
    """Give what an identity's entries say, whatever the numbers of rules and CIDRs are."""
    names = {number: network for network, number in world.engine.list_cidrs().items()}
    values = world.engine.config_for(identity)
    rows = {
        (
            names.get(key.identity & ~(1 << 25), key.identity),
            key.identity >> 25 & 1,
            key.direction,
            key.protocol,
            key.port,
            key.port_bits,
        ): (entry.verdict, entry.precedence)
        for key, entry in world.engine.rows_for(identity).items()
        if key.identity < 1 << 24 or key.identity & ~(1 << 25) in names
    }
    return rows, values.deny_egress, values.deny_ingress, values.cidr_egress, values.cidr_ingress


class Witness:
    """Asks the datapath about packets after each element that is written, and notes how verdicts go."""

    def __init__(self, world: World, packets: list[Packet]) -> None:
        self._world = world
        self._seen = {
            (endpoint, packet): [world.decide(endpoint, packet)]
            for endpoint in world.endpoints
            for packet in packets
        }
        world.datapath.watch = self.look

    def look(self) -> None:
        for (endpoint, packet), verdicts in self._seen.items():
            verdict = self._world.decide(endpoint, packet)
            if verdict is not verdicts[-1]:
                verdicts.append(verdict)

    def find_changes(self) -> list[tuple[EndpointId, Packet]]:
        """Give the packets whose verdict changed at all."""
        self.look()
        self._world.datapath.watch = lambda: None
        return [one for one, verdicts in self._seen.items() if len(verdicts) > 1]

    def find_third_verdicts(self) -> list[tuple[EndpointId, Packet]]:
        """Give the packets whose verdict changed more than once."""
        self.look()
        self._world.datapath.watch = lambda: None
        return [one for one, verdicts in self._seen.items() if len(verdicts) > 2]


@SETTINGS
@given(seed=SEEDS)
def test_between_two_revisions_no_packet_meets_a_third_verdict(seed: int) -> None:
    random = Random(seed)
    world = make_world(random)
    for _ in range(3):
        for _ in range(random.choice((1, 1, 2, 4))):
            change_something(random, world)
        witness = Witness(world, make_packets(random, world.known(), 25))
        world.engine.apply()
        world.engine.collect()
        assert not witness.find_third_verdicts()


@SETTINGS
@given(seed=SEEDS)
def test_each_change_of_a_slot_raises_the_revision_of_the_rows_that_name_it(seed: int) -> None:
    random = Random(seed)
    world = make_world(random)
    for _ in range(6):
        known = set(world.datapath.cidrs.values())
        before = {one: (row, world.read(one, known)) for one, row in world.datapath.rows.items()}
        change_something(random, world)
        world.engine.apply()
        for endpoint, (row, entries) in before.items():
            now = world.datapath.rows.get(endpoint)
            if now is not None and (entries != world.read(endpoint, known) or now != row):
                assert row.policy_revision < now.policy_revision <= world.engine.revision


@SETTINGS
@given(seed=SEEDS)
def test_an_agent_that_comes_back_finds_its_slots_right_and_leaves_them(seed: int) -> None:
    random = Random(seed)
    world = make_world(random)
    world.engine.collect()
    slots = {one: row.slot for one, row in world.datapath.rows.items()}
    world.datapath.calls.clear()
    witness = Witness(world, make_packets(random, world.known(), 10))
    assert not world.restart().failed
    world.engine.collect()
    assert not witness.find_changes()
    assert slots == {one: row.slot for one, row in world.datapath.rows.items()}
    assert "write_slot" not in {method for method, _slot in world.datapath.calls}


@SETTINGS
@given(seed=SEEDS)
def test_what_changed_while_the_agent_was_away_comes_into_force_without_a_gap(seed: int) -> None:
    random = Random(seed)
    world = make_world(random)
    for _ in range(3):
        away = world.engine
        for _ in range(random.choice((1, 3))):
            policy = random.choice(POLICIES)
            world.set_policy(policy, make_policy(random, policy))
            world.set_group(make_group(random, random.choice(GROUPS)))
        witness = Witness(world, make_packets(random, [FIRST_IDENTITY + 3], 20))
        assert not world.restart().failed
        assert world.engine is not away
        world.engine.collect()
        assert not witness.find_third_verdicts()
        assert not world.find_differences(make_packets(random, world.facts, 25))
        assert set(world.datapath.list_slots()) <= {r.slot for r in world.datapath.rows.values()}


FAILURES: Final = ("write_slot", "change_slot", "update_endpoints", "write_cidrs", "remove_slots")


def break_something(random: Random, world: World) -> None:
    """Let one of the next calls fail, at its beginning or in its midst."""
    if random.random() < 0.5:
        world.datapath.fail[random.choice(FAILURES)] = KernelFailure(12, "update", "pw_policy")
    else:
        world.datapath.fail_after = random.randrange(30)


@SETTINGS
@given(seed=SEEDS)
def test_a_failure_leaves_what_was_in_force_and_the_next_try_heals_it(seed: int) -> None:
    random = Random(seed)
    world = make_world(random)
    for _ in range(4):
        for _ in range(random.choice((1, 2, 4))):
            policy = random.choice(POLICIES)
            world.set_policy(policy, make_policy(random, policy))
            change_identity(random, world)
        packets = make_packets(random, world.known(), 20)
        witness = Witness(world, packets)
        break_something(random, world)
        world.engine.apply()
        with contextlib.suppress(KernelFailure):
            world.engine.collect()
        world.datapath.fail.clear()
        world.datapath.fail_after = None
        for _ in range(3):
            healed = world.engine.apply()
        assert not healed.failed
        world.engine.collect()
        assert not witness.find_third_verdicts()
        assert not world.find_differences(make_packets(random, world.facts, 20))


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


def test_20000_packets_are_decided_as_the_oracle_decides_them(
    full: bool, pytestconfig: pytest.Config
) -> None:
    random = Random(pytestconfig.getoption("--seed"))
    wanted = 20_000 if full else 2_000
    asked = 0
    while asked < wanted:
        world = make_world(random)
        assert not world.find_differences(make_packets(random, world.facts, 50))
        asked += world.asked
