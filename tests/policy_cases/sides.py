"""Turn cases into what policy code takes: rules, groups of CIDRs, and the two sides of a flow."""

from collections.abc import Mapping
from typing import Any, Final

import yaml

from podwire.control.policy.oracle import Party, Question
from podwire.control.policy.rule import CidrGroup, PolicyRules
from podwire.control.policy.rules_cilium import decode_cidr_group, decode_cilium_policy
from podwire.control.policy.rules_k8s import decode_network_policy
from podwire.model.identity import IdentityFacts
from podwire.model.policy import Direction
from podwire.model.store.kinds import CIDR_GROUP, NETWORK_POLICY
from tests.policy_cases import OUTSIDE, PODS, Case, Flow, address_of

FIRST_IDENTITY: Final = 70000


def decode_case(case: Case) -> tuple[list[PolicyRules], list[CidrGroup]]:
    """Read a case's documents."""
    policies: list[PolicyRules] = []
    groups: list[CidrGroup] = []
    for text in case.documents:
        document: Mapping[str, Any] = yaml.load(text, yaml.CSafeLoader)
        if document["kind"] == NETWORK_POLICY.name:
            policies.append(decode_network_policy(document))
        elif document["kind"] == CIDR_GROUP.name:
            groups.append(decode_cidr_group(document))
        else:
            policies.extend(decode_cilium_policy(document))
    return policies, groups


def make_party(name: str, family: int, source: str = "cni") -> Party:
    """Give a pod or an outsider as policy sees it; pods are identities of their own, from FIRST_IDENTITY."""
    address = address_of(name, family)
    if name in OUTSIDE:
        return Party(OUTSIDE[name].facts, address)
    pod = PODS[name]
    number = FIRST_IDENTITY + list(PODS).index(name)
    facts = IdentityFacts(number, pod.canonical_labels(source), pod.ports)
    return Party(facts, address, endpoint=True)


def ask(case: Case, flow: Flow, family: int) -> Question:
    """Write a flow as the question that its source asks."""
    source, target = (make_party(name, family, case.source) for name in (flow.source, flow.target))
    protocol, port = flow.numbers(family)
    return Question(source, target, Direction.EGRESS, protocol, port)
