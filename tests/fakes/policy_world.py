"""Random policies, identities and packets, small enough that they meet: what property tests of policy are run on.

Every draw comes from the generator that is handed in, so a printed seed gives the same world again.
"""

import ipaddress
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from podwire.control.policy import oracle
from podwire.control.policy.engine import PolicyEngine
from podwire.control.policy.labels_match import make_selector
from podwire.control.policy.oracle import Enforcement
from podwire.control.policy.realize.outcome import Outcome
from podwire.control.policy.resolve.rule_numbers import Numbers
from podwire.control.policy.resolve.subject import PolicyValues
from podwire.control.policy.rule import (
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
from podwire.model.endpoint import EndpointRecord, IPNetwork
from podwire.model.identity import RESERVED_LABELS, IdentityFacts, NamedPort
from podwire.model.ids import (
    EndpointId,
)
from podwire.model.interfaces import EndpointConfig
from podwire.model.labels import Operator
from podwire.model.policy import CIDR_IDENTITY_FIRST, CIDR_WORLD_BIT, Direction, PolicyRows, Verdict
from tests.fakes.policy import FakePolicyDatapath, Packet
from tests.fakes.records import make_record

NETWORKS: Final[tuple[IPNetwork, ...]] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/0",
        "10.0.0.0/8",
        "10.1.0.0/16",
        "10.1.2.0/24",
        "10.1.2.3/32",
        "192.0.2.0/24",
        "::/0",
        "fd00::/8",
        "fd00:1::/32",
        "fd00:1::5/128",
    )
)
ADDRESSES: Final = tuple(
    ipaddress.ip_address(text)
    for text in (
        "10.1.2.3",
        "10.1.2.9",
        "10.1.9.9",
        "10.9.9.9",
        "192.0.2.1",
        "198.51.100.1",
        "fd00:1::5",
        "fd00:1::6",
        "fd00:2::1",
        "2001:db8::1",
    )
)
LABELS: Final = ("app=a", "app=b", "tier=x", "tier=y", "ns=n1", "ns=n2")
GROUPS: Final = ("office", "lab")
PORTS: Final = (0, 79, 80, 81, 443, 8080, 8081, 65535)
NAMES: Final = ("http", "dns")
WORLD: Final = 2


def make_requirement(random: Random) -> Requirement:
    """Draw one condition."""
    key, _, value = random.choice(LABELS).partition("=")
    source = random.choice(("any", "any", "k8s", "cni", "reserved"))
    if source == "reserved":
        return Requirement(source, random.choice(("world", "host")), Operator.EXISTS)
    operator = random.choice(tuple(Operator))
    values: tuple[str, ...] = ()
    if operator in (Operator.IN, Operator.NOT_IN):
        others = [label.partition("=")[2] for label in LABELS if label.startswith(key)]
        values = tuple(sorted({value, random.choice(others)}))
    return Requirement(source, key, operator, values)


def make_label_selector(random: Random) -> LabelSelector:
    """Draw a selector of none to three conditions."""
    count = random.choice((0, 1, 1, 1, 2, 2, 3))
    return make_selector(*(make_requirement(random) for _ in range(count)))


def make_exceptions(random: Random, cidr: IPNetwork) -> tuple[IPNetwork, ...]:
    """Draw exceptions inside a CIDR."""
    inside = [
        network
        for network in NETWORKS
        if network.version == cidr.version
        and network.prefixlen > cidr.prefixlen
        and network.network_address in cidr
    ]
    return tuple(random.sample(inside, min(len(inside), random.choice((0, 0, 1, 2)))))


def make_peer(random: Random) -> PeerSelector:
    """Draw a peer of any kind."""
    kind = random.randrange(10)
    if kind < 6:
        return make_label_selector(random)
    if kind < 9:
        cidr = random.choice(NETWORKS)
        return CidrSelector(cidr, make_exceptions(random, cidr), random.random() < 0.5)
    exceptions = tuple(random.sample(NETWORKS, random.choice((0, 0, 1))))
    if random.random() < 0.5:
        return CidrGroupSelector(name=random.choice(GROUPS), exceptions=exceptions)
    label = random.choice(("a", "b"))
    labels = make_selector(Requirement("any", "app", Operator.IN, (label,)))
    return CidrGroupSelector(labels=labels, exceptions=exceptions)


def make_port(random: Random) -> PortMatch:
    """Draw what is asked for."""
    protocol = random.choice((TCP, TCP, UDP))
    kind = random.randrange(8)
    if kind == 0:
        return PortMatch()
    if kind == 1:
        return PortMatch(protocol)
    if kind == 2:
        kind_of_message = random.choice((0, 8))
        return PortMatch(ICMP, kind_of_message, kind_of_message, icmp=True)
    if kind == 3:
        return PortMatch(random.choice((protocol, 0)), name=random.choice(NAMES))
    first = random.choice(PORTS[1:])
    last = random.choice([port for port in PORTS if port >= first])
    return PortMatch(protocol, first, random.choice((first, last)))


def make_rule(random: Random, path: str) -> Rule:
    """Draw a rule. Names of ports towards CIDRs mean nothing at egress: nobody's address tells its ports."""
    direction = random.choice(tuple(Direction))
    peers = tuple(make_peer(random) for _ in range(random.choice((0, 1, 1, 1, 2, 3))))
    ports = tuple(make_port(random) for _ in range(random.choice((0, 1, 1, 2, 3))))
    if direction is Direction.EGRESS and any(isinstance(peer, CidrSelector) for peer in peers):
        ports = tuple(replace(port, name="", protocol=TCP) if port.name else port for port in ports)
    verdict = random.choice((Verdict.ALLOW, Verdict.ALLOW, Verdict.DENY))
    tier = random.choice((TIER_DEFAULT, TIER_DEFAULT, TIER_DEFAULT + 1, TIER_DEFAULT - 1))
    return Rule(direction, verdict, peers, ports, path, tier)


def make_policy(random: Random, policy: PolicyId) -> tuple[PolicyRules, ...]:
    """Draw a policy of one or two rule sets."""
    return tuple(
        PolicyRules(
            policy,
            make_label_selector(random),
            frozenset(direction for direction in Direction if random.random() < 0.6),
            tuple(
                make_rule(random, f"specs[{part}].rules[{n}]")
                for n in range(random.choice((0, 1, 2, 3)))
            ),
        )
        for part in range(random.choice((1, 1, 2)))
    )


def make_facts(random: Random, number: int) -> IdentityFacts:
    """Draw the labels and named ports of an identity."""
    labels = {
        f"{random.choice(('k8s', 'cni'))}:{key}={random.choice(values)}"
        for key, values in (("app", "ab"), ("tier", "xy"), ("ns", ("n1", "n2")))
        if random.random() < 0.8
    }
    ports = {
        NamedPort(name, random.choice((TCP, UDP)), random.choice((80, 8080)))
        for name in NAMES
        if random.random() < 0.4
    }
    return IdentityFacts(number, tuple(sorted(labels)), tuple(sorted(ports)))


def make_group(random: Random, name: str) -> CidrGroup:
    """Draw the addresses of a group."""
    cidrs = tuple(random.sample(NETWORKS, random.choice((0, 1, 2, 3))))
    return CidrGroup(name, (f"k8s:app={random.choice('ab')}",), cidrs)


def make_packets(random: Random, identities: Iterable[int], count: int) -> list[Packet]:
    """Draw packets from and to these identities and the reserved ones."""
    peers = [*identities, *RESERVED_LABELS, WORLD, WORLD, WORLD]
    packets: list[Packet] = []
    for _ in range(count):
        protocol = random.choice((TCP, TCP, UDP, ICMP, 47))
        port = random.choice(PORTS) if protocol in (TCP, UDP) else 0
        if protocol == ICMP:
            port = random.choice((0, 8, 3)) << 8 | random.choice((0, 1))
        direction = random.choice(tuple(Direction))
        packets.append(
            Packet(direction, random.choice(peers), protocol, port, random.choice(ADDRESSES))
        )
    return packets


@dataclass
class World:
    """An engine over a fake datapath, driven as the agent drives it, and what the oracle needs to know beside it."""

    enforcement: Enforcement = Enforcement.DEFAULT
    datapath: FakePolicyDatapath = field(default_factory=FakePolicyDatapath)
    numbers: Numbers = field(default_factory=Numbers)
    facts: dict[int, IdentityFacts] = field(default_factory=dict)
    policies: dict[PolicyId, tuple[PolicyRules, ...]] = field(default_factory=dict)
    groups: dict[str, CidrGroup] = field(default_factory=dict)
    endpoints: dict[EndpointId, int] = field(default_factory=dict)
    """Identity of each endpoint."""
    asked: int = 0
    """Comparisons with the oracle."""

    def __post_init__(self) -> None:
        self.engine = self.start()

    def start(self) -> PolicyEngine:
        """Begin as a new process of the agent does."""
        self.engine = PolicyEngine(
            datapath=self.datapath,
            rows=self.rows,
            numbers=self.numbers,
            remember=self._remember,
            cidrs=dict(self.datapath.cidrs),
            enforcement=self.enforcement,
        )
        return self.engine

    def _remember(self, numbers: Numbers) -> None:
        self.numbers = numbers

    def rows(
        self, endpoints: Sequence[EndpointId], values: PolicyValues
    ) -> list[tuple[EndpointRecord, EndpointConfig]]:
        """Give endpoints' rows with new values, as the agent does."""
        return [
            (make_record(endpoint), values.fill(self.datapath.rows[endpoint]))
            for endpoint in endpoints
        ]

    def restart(self) -> Outcome:
        """Come back as another process, with all that is known, and adopt the endpoints."""
        self.start()
        for policy, rules in self.policies.items():
            self.engine.set_policy(policy, rules)
        for group in self.groups.values():
            self.engine.set_group(group)
        for facts in self.facts.values():
            self.engine.identity_added(facts)
        for endpoint in self.endpoints:
            self.engine.adopt(endpoint, self.datapath.rows[endpoint])
        return self.engine.apply()

    def learn(self, facts: IdentityFacts) -> None:
        """Let an identity come."""
        self.facts[facts.number] = facts
        self.engine.identity_added(facts)

    def forget(self, number: int) -> None:
        """Let an identity go."""
        del self.facts[number]
        self.engine.identity_removed(number)

    def set_policy(self, policy: PolicyId, rules: tuple[PolicyRules, ...]) -> None:
        """Write a policy."""
        self.policies[policy] = rules
        self.engine.set_policy(policy, rules)

    def remove_policy(self, policy: PolicyId) -> None:
        """Delete a policy."""
        del self.policies[policy]
        self.engine.remove_policy(policy)

    def set_group(self, group: CidrGroup) -> None:
        """Write a group."""
        self.groups[group.name] = group
        self.engine.set_group(group)

    def attach(self, number: int, identity: int) -> None:
        """Add an endpoint, or give it another identity: what an ADD or a change of labels does."""
        endpoint = EndpointId(number)
        self.engine.apply()
        self.engine.attach(endpoint, identity)
        self.open(endpoint, identity)

    def open(self, endpoint: EndpointId, identity: int) -> None:
        """Write the row of an endpoint that was attached."""
        row = self.datapath.rows.get(endpoint, EndpointConfig())
        self.datapath.rows[endpoint] = self.engine.config_for(identity).fill(row)
        self.engine.realized(endpoint)
        self.endpoints[endpoint] = identity

    def detach(self, endpoint: EndpointId) -> None:
        """End an endpoint."""
        del self.datapath.rows[endpoint]
        del self.endpoints[endpoint]
        self.engine.detach(endpoint)

    def expect(self, endpoint: EndpointId, packet: Packet) -> Verdict:
        """Give what the oracle says of a packet of an endpoint."""
        self.asked += 1
        return ask_oracle(
            self.policies.values(),
            tuple(self.groups.values()),
            self.facts[self.endpoints[endpoint]],
            packet,
            (self.find_facts, self.enforcement),
        )

    def find_facts(self, number: int) -> IdentityFacts:
        """Give what is known of an identity, reserved ones included."""
        if number in RESERVED_LABELS:
            return IdentityFacts(number, RESERVED_LABELS[number])
        return self.facts[number]

    def decide(self, endpoint: EndpointId, packet: Packet) -> Verdict:
        """Give what the datapath says of it."""
        return self.datapath.decide(self.datapath.rows[endpoint], packet)

    def read(self, endpoint: EndpointId, cidrs: Collection[int]) -> PolicyRows:
        """Give the entries that an endpoint's row leads to, but for those of CIDRs that are not among these."""
        entries = self.datapath.slots.get(self.datapath.rows[endpoint].slot, {})
        return {
            key: entry
            for key, entry in entries.items()
            if key.identity < CIDR_IDENTITY_FIRST or key.identity & ~CIDR_WORLD_BIT in cidrs
        }

    def known(self) -> list[int]:
        """Give the identities that the engine has taken in: only their packets have a verdict before and after."""
        return [number for number in self.facts if number in self.engine._peers]

    def find_differences(self, packets: Iterable[Packet]) -> list[str]:
        """Name each packet of each endpoint that the datapath decides otherwise than the oracle."""
        packets = list(packets)
        return [
            f"endpoint {endpoint} ({self.endpoints[endpoint]}): {packet}, oracle {expected.name}"
            for endpoint in self.endpoints
            for packet in packets
            if (expected := self.expect(endpoint, packet)) is not self.decide(endpoint, packet)
        ]


def ask_oracle(
    policies: Iterable[tuple[PolicyRules, ...]],
    groups: Sequence[CidrGroup],
    subject: IdentityFacts,
    packet: Packet,
    context: tuple[Callable[[int], IdentityFacts], Enforcement],
) -> Verdict:
    """Let the oracle read the rules."""
    find_facts, enforcement = context
    question = oracle.Question(
        oracle.Party(subject, endpoint=True),
        oracle.Party(find_facts(packet.peer), packet.address),
        packet.direction,
        packet.protocol,
        packet.port,
    )
    settings = oracle.Settings(enforcement, host_allowed=False)
    parts = [part for rules in policies for part in rules]
    return oracle.evaluate(parts, groups, question, settings).verdict
