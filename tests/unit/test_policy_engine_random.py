"""The engine: whatever happens in whatever order, entries say what the rules say, and nothing else on the way."""

import contextlib
from random import Random
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from podwire.control.policy.oracle import Enforcement
from podwire.control.policy.resolve import subject
from podwire.control.policy.rule import (
    PolicyId,
)
from podwire.model.errors import KernelFailure
from podwire.model.ids import EndpointId
from podwire.model.interfaces import EndpointConfig
from podwire.model.policy import Verdict
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

Asked = tuple[EndpointId, Packet]

EXAMPLES: Final = settings().max_examples * 15 // 100
WATCHED_EXAMPLES: Final = settings().max_examples * 5 // 100
"""Of tests that ask between any two elements."""
SETTINGS: Final = settings(
    max_examples=EXAMPLES,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
WATCHED: Final = settings(SETTINGS, max_examples=WATCHED_EXAMPLES)
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
@pytest.mark.parametrize("at_once", [True, False], ids=["all rules at once", "one by one"])
def test_whatever_happens_entries_stay_those_of_a_new_engine(
    seed: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "ONE_BY_ONE_MAX", 0 if at_once else subject.ONE_BY_ONE_MAX)
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
    """Asks the datapath about packets after each element that is written, and notes how verdicts go.

    It also plays the programs that are slow: those that have read the endpoint's row and the map of CIDRs at an earlier
    moment, back to the last fence, and look the entries up now.
    """

    def __init__(self, world: World, packets: list[Packet]) -> None:
        self._world = world
        asked = [(endpoint, packet) for endpoint in world.endpoints for packet in packets]
        self._seen = {question: [world.decide(*question)] for question in asked}
        self._under_way: dict[Asked, set[tuple[EndpointConfig, tuple[int, ...]]]] = {}
        self._late: dict[Asked, set[Verdict]] = {question: set() for question in asked}
        world.datapath.watch = self.look
        world.datapath.fence = self._under_way.clear

    def look(self) -> None:
        datapath = self._world.datapath
        for one, verdicts in self._seen.items():
            endpoint, packet = one
            row = datapath.rows[endpoint]
            under_way = self._under_way.setdefault(one, set())
            under_way.add((row, datapath.families(row, packet)))
            for started in under_way:
                self._late[one].add(datapath.finish(started[0], packet, started[1]))
            verdict = self._world.decide(endpoint, packet)
            if verdict is not verdicts[-1]:
                verdicts.append(verdict)

    def find_changes(self) -> list[Asked]:
        """Give the packets whose verdict changed at all."""
        self._end()
        return [one for one, verdicts in self._seen.items() if len(verdicts) > 1]

    def find_third_verdicts(self) -> list[Asked]:
        """Give the packets whose verdict changed more than once, or was neither the old nor the new for the slow."""
        self._end()
        return [
            one
            for one, verdicts in self._seen.items()
            if len(verdicts) > 2 or not self._late[one] <= {verdicts[0], verdicts[-1]}
        ]

    def _end(self) -> None:
        self.look()
        self._world.datapath.watch = self._world.datapath.fence = lambda: None


@WATCHED
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
                assert row.policy_revision < now.policy_revision <= world.engine.generation


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


@WATCHED
@given(seed=SEEDS)
def test_what_changed_while_the_agent_was_away_comes_into_force_without_a_gap(seed: int) -> None:
    random = Random(seed)
    world = make_world(random)
    for _ in range(2):
        away = world.engine
        for _ in range(random.choice((1, 3))):
            policy = random.choice(POLICIES)
            world.set_policy(policy, make_policy(random, policy))
            world.set_group(make_group(random, random.choice(GROUPS)))
        witness = Witness(world, make_packets(random, [FIRST_IDENTITY + 3], 10))
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


@WATCHED
@given(seed=SEEDS)
def test_a_failure_leaves_what_was_in_force_and_the_next_try_heals_it(seed: int) -> None:
    random = Random(seed)
    world = make_world(random)
    for _ in range(4):
        for _ in range(random.choice((1, 2, 4))):
            policy = random.choice(POLICIES)
            world.set_policy(policy, make_policy(random, policy))
            change_identity(random, world)
        witness = Witness(world, make_packets(random, world.known(), 20))
        break_something(random, world)
        world.engine.apply()
        assert not witness.find_third_verdicts()
        with contextlib.suppress(KernelFailure):
            world.engine.collect()
        world.datapath.fail.clear()
        world.datapath.fail_after = None
        # What had to wait for another thing comes into force later than the rest: each try is a change of its own.
        for _ in range(3):
            witness = Witness(world, make_packets(random, world.known(), 20))
            healed = world.engine.apply()
            world.engine.collect()
            assert not witness.find_third_verdicts()
        assert not healed.failed
        assert not world.find_differences(make_packets(random, world.facts, 20))


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
