"""The engine: whatever happens in whatever order, entries say what the rules say, and nothing else on the way."""

from random import Random
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from podwire.control.policy.engine import Enforcement
from podwire.control.policy.rule import PolicyId
from podwire.model.ids import EndpointId
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
