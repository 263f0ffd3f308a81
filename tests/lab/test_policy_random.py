"""Random policies, labels and flows: the oracle and the datapath say the same, 20,000 times (`--full`).

Real: the agent, its store, its API, its maps and programs, the devices. Packets are put to the programs by test runs,
which cost a hundredth of sent ones (test_policy_cases sends real ones); how many were dropped for which reason is read
from the node's own counters. A flow that passed is remembered by the programs; under later policies it is asked again,
and so is its answer: a memory must never outlive what it was made under.
"""

import ipaddress
import itertools
import json
import time
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from podwire.control.policy.oracle import (
    Enforcement,
    Party,
    Question,
    Settings,
    evaluate_flow,
)
from podwire.control.policy.rule import CidrGroup, PolicyRules
from podwire.control.policy.rules_cilium import decode_cidr_group, decode_cilium_policy
from podwire.control.policy.rules_k8s import decode_network_policy
from podwire.datapath.abi import DropReason
from podwire.model.identity import RESERVED_LABELS, IdentityFacts, Reserved
from podwire.model.labels import namespace_labels, sort_labels
from podwire.model.policy import Direction
from podwire.model.store.kinds import CIDR_GROUP, NETWORK_POLICY
from tests.lab.hooks import Hooks, Wire, open_hooks
from tests.lab.policy_rig import Scene, open_scene
from tests.lab.random_policies import LABELS, PORTS, Document, Maker
from tests.packet.frames import ICMP, ICMPV6, SCTP, TCP, UDP
from tests.policy_cases import NAMESPACES, OUTSIDE, PODS

pytestmark = pytest.mark.lab

COMPARISONS, COMPARISONS_FULL = 2_000, 20_000
FLOWS_PER_ROUND = 30
REPEATED_PER_ROUND = 12
"""Flows of earlier rounds that are asked again."""
REMEMBERED = 200
REMEMBERED_S = 10.0
"""No longer are flows asked again: the programs forget them after 30 s."""
ENFORCEMENT = {Enforcement.DEFAULT: 0.86, Enforcement.ALWAYS: 0.07, Enforcement.NEVER: 0.07}
"""Shares of rounds under each value of the setting `policy_enforcement`."""
RESTARTS = 0.03
"""Share of rounds before which the agent is restarted."""
CHATTER = (DropReason.QUIET, DropReason.NEIGHBOUR)
STRANGERS = {
    4: ("198.51.100.10", "198.51.100.77", "203.0.113.20", "203.0.113.200", "8.8.8.8"),
    6: ("2001:db8:51::10", "2001:db8:51:1::1", "2001:db8:113::20", "2600::1"),
}


@dataclass
class Subject:
    """The node as the oracle must know it."""

    random: Random
    labels: dict[str, dict[str, str]] = field(
        default_factory=lambda: {title: dict(pod.labels) for title, pod in PODS.items()}
    )
    """Of each pod, as they are now."""
    policies: list[PolicyRules] = field(default_factory=list)
    groups: list[CidrGroup] = field(default_factory=list)
    settings: Settings = field(default_factory=Settings)

    def learn(self, documents: list[Document]) -> None:
        """Take in what is in force now."""
        self.policies, self.groups = [], []
        for document in documents:
            if document["kind"] == NETWORK_POLICY.name:
                self.policies.append(decode_network_policy(document))
            elif document["kind"] == CIDR_GROUP.name:
                self.groups.append(decode_cidr_group(document))
            else:
                self.policies.extend(decode_cilium_policy(document))

    def party(self, name: str, address: str) -> Party:
        """Describe one end."""
        found = ipaddress.ip_address(address)
        if name not in PODS:
            number = Reserved[name.upper()]
            return Party(IdentityFacts(number, RESERVED_LABELS[number]), found)
        pod = PODS[name]
        own = (f"cni:{key}={value}" for key, value in self.labels[name].items())
        space = namespace_labels(pod.namespace, NAMESPACES[pod.namespace])
        facts = IdentityFacts(1 << 16, sort_labels([*own, *space]), pod.ports)
        return Party(facts, found, endpoint=True)

    def allows(self, asked: "Asked") -> bool:
        """Ask the oracle."""
        wire = asked.wire
        question = Question(
            self.party(asked.source, wire.source),
            self.party(asked.target, wire.target),
            Direction.EGRESS,
            wire.protocol,
            wire.port,
        )
        return evaluate_flow(self.policies, self.groups, question, self.settings).passes

    def change_labels(self) -> tuple[str, list[str]]:
        """Choose other labels for a pod; gives its name and the changes as the API takes them."""
        title = self.random.choice(list(PODS))
        labels, changes = self.labels[title], []
        for key in self.random.sample(list(LABELS), self.random.randint(1, 2)):
            value = self.random.choice((None, *LABELS[key]))
            if value is None:
                if labels.pop(key, None) is not None:
                    changes.append(f"{key}-")
            elif labels.get(key) != value:
                labels[key] = value
                changes.append(f"{key}={value}")
        return title, changes


@dataclass(frozen=True)
class Asked:
    """A flow, by the names of its ends ("host", "world" and "unmanaged" are no pods)."""

    source: str
    target: str
    wire: Wire

    def __str__(self) -> str:
        wire = self.wire
        ports = f"{wire.source_port} > {wire.port}"
        return f"{self.source} {wire.source} > {self.target} {wire.target} protocol {wire.protocol} {ports}"


class Flows:
    """Makes random flows; no two have the same source port."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._numbers = itertools.cycle(range(10_000, 60_000))

    def next_number(self) -> int:
        """Give a source port that no other flow has had."""
        return next(self._numbers)

    def make(self) -> Asked:
        """Make a flow with a pod on one end at least."""
        family = self._random.choice((4, 6))
        pod, other = self._random.sample(list(PODS), 2)
        if self._random.random() < 0.4:
            other = self._random.choice(("world", "world", "host", "unmanaged"))
        source, target = self._random.sample((pod, other), 2)
        ends = self._address(source, family), self._address(target, family)
        protocol, port = self._port(family)
        return Asked(source, target, Wire(*ends, protocol, self.next_number(), port))

    def _address(self, name: str, family: int) -> str:
        if name == "world":
            return self._random.choice(STRANGERS[family])
        owner = PODS.get(name) or OUTSIDE[name]
        return owner.ipv4 if family == 4 else owner.ipv6

    def _port(self, family: int) -> tuple[int, int]:
        protocol = self._random.choice((TCP, TCP, UDP, SCTP, ICMP))
        if protocol == ICMP:
            kinds = {4: (ICMP, (8, 8, 13)), 6: (ICMPV6, (128, 128, 139))}
            number, types = kinds[family]
            return number, self._random.choice(types) << 8
        return protocol, self._random.choice(PORTS)


def ask(scene: Scene, hooks: Hooks, asked: Asked, *, is_answer: bool = False) -> bool:
    """Put a flow's packet, or its answer, to the program that meets it first."""
    wire = asked.wire.answer if is_answer else asked.wire
    source, target = (asked.target, asked.source) if is_answer else (asked.source, asked.target)
    packet = wire.packet(is_answer=is_answer)
    if source in PODS:
        return hooks.send(scene.pods[source], packet)
    return hooks.receive(scene.pods[target], packet, from_host=source == "host")


@dataclass
class Run:
    """One run: comparisons made, flows remembered, what differed."""

    scene: Scene
    hooks: Hooks
    subject: Subject
    flows: Flows
    documents: list[Document] = field(default_factory=list)
    compared: int = 0
    denied: int = 0
    relabelled: int = 0
    restarts: int = 0
    wrong: list[tuple[str, Asked | None]] = field(default_factory=list)
    passed: list[tuple[float, Asked]] = field(default_factory=list)
    """When each flow passed first."""

    def round(self) -> None:
        """Bring other policies and labels into force, and compare."""
        random = self.subject.random
        documents = Maker(random).documents() if random.random() < 0.95 else []
        self.documents = documents
        self._change_enforcement()
        if random.random() < RESTARTS:
            self._restart()
        self.scene.enforce(documents)
        self.subject.learn(documents)
        if random.random() < 0.5:
            title, changes = self.subject.change_labels()
            if changes:
                self.scene.relabel(title, *changes)
                self.relabelled += 1
        before = self.hooks.count_drops()
        denied_before = self.denied
        self._ask_again()
        for _ in range(FLOWS_PER_ROUND):
            asked = self.flows.make()
            if self._compare(asked, "a new flow"):
                self.passed.append((time.monotonic(), asked))
        self.passed = self.passed[-REMEMBERED:]
        self._check_drops(before, self.denied - denied_before)

    def _change_enforcement(self) -> None:
        [wanted] = self.subject.random.choices(tuple(ENFORCEMENT), tuple(ENFORCEMENT.values()))
        if wanted is self.subject.settings.enforcement:
            return
        self.scene.api.must("PATCH", "/config", {"policy_enforcement": wanted.value})
        self.subject.settings = replace(self.subject.settings, enforcement=wanted)

    def _restart(self) -> None:
        """End the agent, as its service manager does or by force; what it left in the kernel is taken over."""
        node = self.scene.node
        self.subject.random.choice((node.stop, node.kill))()
        node.start()
        # What was set through the API is forgotten.
        self.subject.settings = replace(self.subject.settings, enforcement=Enforcement.DEFAULT)
        self.restarts += 1

    def _ask_again(self) -> None:
        random = self.subject.random
        again = random.sample(self.passed, min(len(self.passed), REPEATED_PER_ROUND))
        for passed_s, asked in again:
            if time.monotonic() > passed_s + REMEMBERED_S:
                continue
            has_answer = asked.wire.protocol not in (ICMP, ICMPV6)
            if has_answer and random.random() < 0.5:
                self._compare(asked, "the answer of an old flow", is_answer=True)
            else:
                self._compare(asked, "an old flow")

    def _compare(self, asked: Asked, what: str, *, is_answer: bool = False) -> bool:
        """Ask both; gives whether the packet passes."""
        wanted = self.subject.allows(asked)
        found = ask(self.scene, self.hooks, asked, is_answer=is_answer)
        self.compared += 1
        self.denied += not found
        if wanted != found:
            verdicts = f"the oracle {_allows(wanted)} it, the datapath {_allows(found)} it"
            self.wrong.append((f"{what}: {asked}: {verdicts}", asked))
        return wanted and found

    def explain(self) -> str:
        """Show the differences; of the first also the fewest policies that make it, and what the programs held."""
        shown = [text for text, _ in self.wrong]
        flow = next((asked for _, asked in self.wrong if asked is not None), None)
        if flow is None:
            return "\n".join(shown)
        documents = self._shrink(flow)
        shown += ["the first one, as a new flow, under", *map(json.dumps, documents)]
        for title in (flow.source, flow.target):
            if title in PODS:
                shown += [f"{title} {self.subject.labels[title]}", self.scene.entries(title)]
        return "\n".join(shown)

    def _shrink(self, flow: Asked) -> list[Document]:
        """Take policies away as long as a flow like this one is decided differently without them."""
        kept = list(self.documents)
        for document in self.documents:
            fewer = [other for other in kept if other is not document]
            if self._differs_under(fewer, flow):
                kept = fewer
        self._differs_under(kept, flow)
        return kept

    def _differs_under(self, documents: list[Document], flow: Asked) -> bool:
        self.scene.enforce(documents)
        self.subject.learn(documents)
        fresh = replace(flow, wire=replace(flow.wire, source_port=self.flows.next_number()))
        return self.subject.allows(fresh) != ask(self.scene, self.hooks, fresh)

    def _check_drops(self, before: dict[DropReason, int], denied: int) -> None:
        """What was denied was dropped for that reason; the pods' own chatter is the kernel's."""
        after = self.hooks.count_drops()
        dropped = {reason: after[reason] - before.get(reason, 0) for reason in after}
        dropped = {
            reason: dropped[reason]
            for reason in dropped
            if dropped[reason] and reason not in CHATTER
        }
        expected = {DropReason.POLICY: denied} if denied else {}
        if dropped != expected:
            self.wrong.append((f"dropped {dropped}, not {expected}", None))


def _allows(verdict: bool) -> str:
    return "allows" if verdict else "denies"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("settings", "share"),
    [
        (Settings(), 0.7),
        (Settings(host_allowed=False), 0.2),
        (Settings(audit=True), 0.1),
    ],
    ids=["default", "without-host-access", "audit"],
)
def test_the_datapath_decides_as_the_oracle(
    settings: Settings, share: float, full: bool, seed: int
) -> None:
    random, wanted = Random(seed), int((COMPARISONS_FULL if full else COMPARISONS) * share)
    with open_scene(
        conntrack_entries=1_048_576,
        conntrack_quota=262_144,
        host_access=settings.host_allowed,
        policy_audit=settings.audit,
    ) as scene:
        with open_hooks(scene) as hooks:
            run = Run(scene, hooks, Subject(random, settings=settings), Flows(random))
            while run.compared < wanted:
                run.round()
                count = len(run.wrong)
                assert not count, f"seed {seed}, {count} differences\n{run.explain()}"
        print(
            f"{run.compared} comparisons, {run.denied} denied, "
            f"{run.relabelled} relabellings, {run.restarts} restarts"
        )
    denied = run.denied / run.compared
    assert settings.audit or 0.2 < denied < 0.8, f"{denied:.0%} denied: the policies decide little"
