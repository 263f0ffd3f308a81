"""Decide a question by reading the rules as they are written: what the specification says, and nothing faster.

`policy trace` answers with it, and the datapath is tested against it. Pure. It must never share a shortcut with the
resolver: no prefixes of ports, no longest match, no entries. Invariant: the verdict does not depend on the order of
policies, rules or groups.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from podwire.control.policy.labels_match import (
    describe_requirement,
    describe_selector,
    find_unmet,
    matches,
    parse_label_set,
)
from podwire.control.policy.rule import (
    ICMP,
    ICMPV6,
    SCTP,
    TCP,
    UDP,
    CidrGroup,
    CidrGroupSelector,
    CidrSelector,
    LabelSelector,
    PeerSelector,
    PolicyId,
    PolicyRules,
    PortMatch,
    Rule,
)
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.identity import IdentityFacts, Reserved
from podwire.model.policy import Direction, Verdict

PROTOCOL_NAMES: Final[Mapping[int, str]] = {
    TCP: "TCP",
    UDP: "UDP",
    SCTP: "SCTP",
    ICMP: "ICMP",
    ICMPV6: "ICMPv6",
}


class Enforcement(enum.StrEnum):
    """The setting `policy_enforcement`: which endpoints are closed."""

    DEFAULT = "default"
    """Those that a policy with default deny selects, per direction."""
    ALWAYS = "always"
    NEVER = "never"


class Basis(enum.StrEnum):
    """What a decision rests on."""

    RULE = "rule"
    DEFAULT_DENY = "default-deny"
    """The direction is closed and no rule matched."""
    DEFAULT_ALLOW = "default-allow"
    """The direction is open and no rule matched."""
    NOT_ENFORCED = "not-enforced"
    """The setting says `never`."""
    SELF = "self"
    """A pod always reaches itself."""
    HOST = "host"
    """A process of this host reaches its pods."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is not policy and decides with it."""

    enforcement: Enforcement = Enforcement.DEFAULT
    host_allowed: bool = True
    audit: bool = False


DEFAULT_SETTINGS: Final = Settings()


@dataclass(frozen=True, slots=True)
class Party:
    """One side of a flow. `endpoint`: policies hold for it. `address` None: unknown, then no CIDR matches it."""

    facts: IdentityFacts
    address: IPAddress | None = None
    endpoint: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """One direction of one flow, seen from `subject`. `port`: the destination's; of ICMP type << 8 | code; else 0."""

    subject: Party
    peer: Party
    direction: Direction
    protocol: int
    port: int

    @property
    def is_self(self) -> bool:
        """Tell whether the peer is the subject itself."""
        return self.subject.address is not None and self.subject.address == self.peer.address


@dataclass(frozen=True, slots=True)
class RuleName:
    """Which rule of which policy."""

    policy: PolicyId
    path: str

    def __str__(self) -> str:
        return f"{self.policy} {self.path}"


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, and why. `verdict` is the policies' own; audit lets a denied packet pass all the same."""

    verdict: Verdict
    basis: Basis
    rules: tuple[RuleName, ...] = ()
    """The rules that match with the winning precedence and verdict, sorted: the datapath names one of them. A default
    denial: the policies that close the direction, with the path "default-deny" or "unenforceable"."""
    why: tuple[str, ...] = ()
    """Of a denial: what each rule of each selecting policy wanted and did not get, or which rule denies."""
    audited: bool = False

    @property
    def passes(self) -> bool:
        """Tell whether the packet goes through."""
        return self.verdict is Verdict.ALLOW or self.audited

    @property
    def rule(self) -> RuleName | None:
        """Give the rule that people are shown."""
        return self.rules[0] if self.rules else None


@dataclass(frozen=True, slots=True)
class FlowDecision:
    """Both ends of a flow; None where no policy holds for that end."""

    egress: Decision | None
    ingress: Decision | None

    @property
    def verdict(self) -> Verdict:
        """Give what the policies of both ends say together."""
        denied = any(decision.verdict is Verdict.DENY for decision in self._ends)
        return Verdict.DENY if denied else Verdict.ALLOW

    @property
    def passes(self) -> bool:
        """Tell whether the first packet arrives."""
        return all(decision.passes for decision in self._ends)

    @property
    def _ends(self) -> list[Decision]:
        return [decision for decision in (self.egress, self.ingress) if decision is not None]


def evaluate(
    policies: Iterable[PolicyRules],
    groups: Sequence[CidrGroup],
    question: Question,
    settings: Settings = DEFAULT_SETTINGS,
) -> Decision:
    """Decide one direction of a flow at the endpoint `question.subject`."""
    if question.is_self:
        return Decision(Verdict.ALLOW, Basis.SELF)
    inwards = question.direction is Direction.INGRESS
    # Kubernetes, "Network Policies": traffic from the node that a pod runs on is always allowed.
    if settings.host_allowed and inwards and question.peer.facts.number == Reserved.HOST:
        return Decision(Verdict.ALLOW, Basis.HOST)
    if settings.enforcement is Enforcement.NEVER:
        return Decision(Verdict.ALLOW, Basis.NOT_ENFORCED)
    labels = parse_label_set(question.subject.facts.labels)
    selecting = [policy for policy in policies if matches(policy.subject, labels)]
    rules = [
        (RuleName(policy.policy, rule.path), rule)
        for policy in selecting
        for rule in policy.rules
        if rule.direction is question.direction
    ]
    matching = [(name, rule) for name, rule in rules if covers(rule, groups, question)]
    if matching:
        return _decide_by_rules(matching, settings)
    closing = [rules for rules in selecting if question.direction in rules.default_deny]
    if not closing and settings.enforcement is not Enforcement.ALWAYS:
        return Decision(Verdict.ALLOW, Basis.DEFAULT_ALLOW)
    names = {RuleName(each.policy, each.default_path): each.closed_because for each in closing}
    why = _explain_default(names, rules, groups, question)
    named = tuple(sorted(names, key=str))
    return Decision(Verdict.DENY, Basis.DEFAULT_DENY, named, why, settings.audit)


def evaluate_flow(
    policies: Sequence[PolicyRules],
    groups: Sequence[CidrGroup],
    flow: Question,
    settings: Settings = DEFAULT_SETTINGS,
) -> FlowDecision:
    """Decide a whole flow. `flow` is asked from its source: `subject` sends, `direction` is EGRESS."""
    source, destination = flow.subject, flow.peer
    inwards = Question(destination, source, Direction.INGRESS, flow.protocol, flow.port)
    outwards = Question(source, destination, Direction.EGRESS, flow.protocol, flow.port)
    return FlowDecision(
        evaluate(policies, groups, outwards, settings) if source.endpoint else None,
        evaluate(policies, groups, inwards, settings) if destination.endpoint else None,
    )


def covers(rule: Rule, groups: Sequence[CidrGroup], question: Question) -> bool:
    """Tell whether a rule speaks of the question's peer and port; its direction and subject are not looked at."""
    return any(
        covers_port(port, question) and may_name_ports(peer, port, question.direction)
        for peer in rule.peers
        if selects_peer(peer, groups, question.peer)
        for port in rule.ports
    )


def may_name_ports(peer: PeerSelector, port: PortMatch, direction: Direction) -> bool:
    """Tell whether a port match has a meaning towards such a peer: at egress names of ports are those of peers that are
    selected by labels; an address does not tell whose it is."""
    return not port.name or direction is Direction.INGRESS or isinstance(peer, LabelSelector)


def selects_peer(selector: PeerSelector, groups: Sequence[CidrGroup], peer: Party) -> bool:
    """Tell whether a selector means this peer."""
    match selector:
        case LabelSelector():
            return matches(selector, parse_label_set(peer.facts.labels))
        case CidrSelector(cidr=cidr, exceptions=exceptions, everybody=everybody):
            # Cilium's CIDR rules never mean a pod or a node; a NetworkPolicy's ipBlock means any address.
            return (everybody or _is_world(peer)) and _contains((cidr,), exceptions, peer.address)
        case CidrGroupSelector(exceptions=exceptions):
            cidrs = [
                cidr for group in groups if _means_group(selector, group) for cidr in group.cidrs
            ]
            return _is_world(peer) and _contains(cidrs, exceptions, peer.address)


def _is_world(peer: Party) -> bool:
    return peer.facts.number == Reserved.WORLD


def _means_group(selector: CidrGroupSelector, group: CidrGroup) -> bool:
    if selector.labels is not None:
        return matches(selector.labels, parse_label_set(group.labels))
    return selector.name == group.name


def _contains(
    cidrs: Iterable[IPNetwork], exceptions: Iterable[IPNetwork], address: IPAddress | None
) -> bool:
    if address is None:
        return False
    return any(address in cidr for cidr in cidrs) and not any(
        address in network for network in exceptions
    )


def covers_port(match: PortMatch, question: Question) -> bool:
    """Tell whether a port match means the question's protocol and port."""
    if match.protocol not in (0, question.protocol):
        return False
    if match.name:
        inwards = question.direction is Direction.INGRESS
        # A named port is one of the pod that receives: the subject at ingress, the peer at egress.
        owner = question.subject if inwards else question.peer
        return any(
            (named.name, named.protocol, named.port)
            == (match.name, question.protocol, question.port)
            for named in owner.facts.named_ports
        )
    if match.icmp:
        return match.first <= question.port >> 8 <= match.last
    if match.last == 0:
        return True
    return match.first <= question.port <= match.last


def _decide_by_rules(matching: list[tuple[RuleName, Rule]], settings: Settings) -> Decision:
    strongest = max(rule.precedence for _name, rule in matching)
    among = [(name, rule) for name, rule in matching if rule.precedence == strongest]
    # Among rules of one precedence a denial wins, as in Cilium.
    denied = any(rule.verdict is Verdict.DENY for _name, rule in among)
    verdict = Verdict.DENY if denied else Verdict.ALLOW
    names = tuple(sorted({name for name, rule in among if rule.verdict is verdict}, key=str))
    if not denied:
        return Decision(verdict, Basis.RULE, names)
    why = tuple(f"{name} denies it" for name in names)
    return Decision(verdict, Basis.RULE, names, why, settings.audit)


def _explain_default(
    closing: Mapping[RuleName, str],
    rules: list[tuple[RuleName, Rule]],
    groups: Sequence[CidrGroup],
    question: Question,
) -> tuple[str, ...]:
    direction = question.direction.name.lower()
    lines = [
        f"{name.policy} closes {direction} for what no rule allows"
        + (f", because it cannot be enforced whole: {closing[name]}" if closing[name] else "")
        for name in sorted(closing, key=str)
    ]
    if not closing:
        lines = [f"policy_enforcement is always, and no policy allows {direction}"]
    allowing = [(name, rule) for name, rule in rules if rule.verdict is Verdict.ALLOW]
    for name, rule in sorted(allowing, key=lambda pair: str(pair[0])):
        lines.append(f"{name}: {_explain_miss(rule, groups, question)}")
    return tuple(lines)


def _explain_miss(rule: Rule, groups: Sequence[CidrGroup], question: Question) -> str:
    if not rule.peers:
        return "selects nobody"
    if not any(selects_peer(peer, groups, question.peer) for peer in rule.peers):
        return "; ".join(_explain_peer(peer, question.peer) for peer in rule.peers)
    wanted = ", ".join(describe_port(port) for port in rule.ports)
    return f"{describe_asked(question)} is not in {wanted or 'no port'}"


def _explain_peer(selector: PeerSelector, peer: Party) -> str:
    if isinstance(selector, LabelSelector):
        unmet = find_unmet(selector, parse_label_set(peer.facts.labels))
        wanted = describe_requirement(unmet) if unmet else "nothing"
        return f"the peer's labels do not match {describe_selector(selector)} (not {wanted})"
    address = "an unknown address" if peer.address is None else str(peer.address)
    inside = "" if _is_world(peer) else " and is inside the cluster"
    return f"the peer has {address}{inside}, which is not in {describe_selector(selector)}"


def describe_port(match: PortMatch) -> str:
    """Write what a port match wants: `80/TCP`, `8000-8999/UDP`, `http/TCP`, `ICMP type 8`, `everything`."""
    if not match.protocol and not match.name and not match.last:
        return "everything"
    protocol = PROTOCOL_NAMES.get(match.protocol, f"protocol {match.protocol}")
    if match.icmp:
        return f"{protocol} type {match.first}"
    if match.name:
        return f"{match.name}/{protocol if match.protocol else 'any'}"
    if not match.last:
        return f"every port of {protocol}"
    ports = str(match.first) if match.first == match.last else f"{match.first}-{match.last}"
    return f"{ports}/{protocol}"


def describe_asked(question: Question) -> str:
    """Write the protocol and port of a question: `80/TCP`, `ICMP type 8 code 0`, `protocol 47`."""
    name = PROTOCOL_NAMES.get(question.protocol)
    if name is None:
        return f"protocol {question.protocol}"
    if question.protocol in (ICMP, ICMPV6):
        return f"{name} type {question.port >> 8} code {question.port & 0xFF}"
    return f"{question.port}/{name}"
