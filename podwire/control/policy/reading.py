"""Read policies of every kind as the store has them: the rules that they say, or what they close in their place.

Used by `control.documents.damage` for what comes from the store, and by `control.endpoint.policies`. Pure. Invariants:
a policy is enforced whole, or it closes; none is enforced in part. What closes is a matter of the document alone, so
it is the same on every node, whatever that node saw before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from podwire.control.policy.labels_match import make_selector
from podwire.control.policy.rule import (
    ALL_PORTS,
    UNENFORCEABLE_PATH,
    LabelSelector,
    PolicyId,
    PolicyRules,
    Requirement,
    Rule,
)
from podwire.control.policy.rules_cilium import decode_cilium_policy, read_cilium_subjects
from podwire.control.policy.rules_k8s import decode_network_policy, read_network_subjects
from podwire.model.errors import InvalidRequest
from podwire.model.labels import NAMESPACE_KEY, SOURCE_K8S, Operator
from podwire.model.policy import Direction, Verdict
from podwire.model.store import ObjectKey
from podwire.model.store.kinds import (
    CILIUM_CLUSTERWIDE_POLICY,
    CILIUM_POLICY,
    NETWORK_POLICY,
    Kind,
)

REASON_MAX_CHARACTERS: Final = 240
UNEXPECTED: Final = (TypeError, ValueError, AttributeError, LookupError, RecursionError)
"""What decoders raise when they meet what nobody thought of: the object is as unreadable as any other."""

Rules = tuple[PolicyRules, ...]
Subjects = tuple[tuple[LabelSelector, frozenset[Direction]], ...]
"""What a policy selects, and in which directions it may deny what others allow."""


@dataclass(frozen=True, slots=True)
class Unenforceable:
    """A policy that cannot be enforced whole, and what it closes in place of what it says."""

    rules: Rules
    """They close both directions of what the policy selects, as far as that can be told."""
    closes: str
    """What it selects, for people."""
    reason: str
    """What is wrong with the document."""

    @property
    def message(self) -> str:
        """Say what is wrong, and what it does."""
        return f"{self.reason}; until it is corrected or deleted it closes {self.closes}"


def read_policy(key: ObjectKey, document: Mapping[str, Any]) -> Rules | Unenforceable:
    """Read a policy's document. Raises InvalidRequest when it has values of the wrong type: it is not readable, and
    what was last read of it says more."""
    try:
        return _READERS[key.kind].rules(document)
    except InvalidRequest as error:
        if any(fault.is_mistyped for fault in error.faults):
            raise
        closing = close_policy(key, document, error.message)
        if closing is None:
            raise
        return closing


def close_policy(key: ObjectKey, document: Mapping[str, Any], reason: str) -> Unenforceable | None:
    """Give what a policy closes that is not known to say anything else; None for what cannot be a policy's key."""
    readers = _READERS.get(key.kind)
    # A foreign key of etcd is shown as an object that has its path for a name.
    if readers is None or "/" in key.name or bool(key.namespace) is not readers.kind.namespaced:
        return None
    policy = name_policy(key)
    subjects = _read_subjects(key, document)
    closes = "the pods that it selects" if subjects else "no pods, because it selects none"
    if subjects is None:
        subjects, closes = _close_everything(policy)
    reason = reason[:REASON_MAX_CHARACTERS]
    denying: dict[LabelSelector, frozenset[Direction]] = {}
    for subject, directions in subjects:
        denying[subject] = denying.get(subject, frozenset()) | directions
    rules = (
        PolicyRules(policy, subject, frozenset(Direction), _deny(directions), reason)
        for subject, directions in denying.items()
    )
    return Unenforceable(tuple(rules), closes, reason)


def name_policy(key: ObjectKey) -> PolicyId:
    """Give a policy's name as rules carry it."""
    return PolicyId(_READERS[key.kind].kind.name, key.namespace, key.name)


def _read_subjects(key: ObjectKey, document: Mapping[str, Any]) -> Subjects | None:
    try:
        return _READERS[key.kind].subjects(document, key.namespace)
    except UNEXPECTED:
        return None


def _close_everything(policy: PolicyId) -> tuple[Subjects, str]:
    # What it selects is unknown, so it closes everything that it could select.
    may_deny = policy.kind != NETWORK_POLICY.name
    denying = frozenset(Direction) if may_deny else frozenset[Direction]()
    if not policy.namespace:
        return ((LabelSelector(), denying),), "all pods of all namespaces"
    own = Requirement(SOURCE_K8S, NAMESPACE_KEY, Operator.IN, (policy.namespace,))
    return ((make_selector(own), denying),), f"all pods of namespace {policy.namespace}"


def _deny(directions: frozenset[Direction]) -> tuple[Rule, ...]:
    """Deny everything, also what other policies allow: a policy that may deny must not be outvoted meanwhile."""
    return tuple(
        Rule(direction, Verdict.DENY, (LabelSelector(),), ALL_PORTS, UNENFORCEABLE_PATH)
        for direction in sorted(directions)
    )


def _read_network_policy(document: Mapping[str, Any]) -> Rules:
    return (decode_network_policy(document),)


def _read_network_subjects(document: Mapping[str, Any], namespace: str) -> Subjects | None:
    subjects = read_network_subjects(document, namespace)
    # A NetworkPolicy can only allow: what others allow would pass with it, too.
    return None if subjects is None else tuple((subject, frozenset()) for subject in subjects)


class _Readers(NamedTuple):
    """What reads the policies of a kind."""

    kind: Kind
    rules: Callable[[Mapping[str, Any]], Rules]
    subjects: Callable[[Mapping[str, Any], str], Subjects | None]


_READERS: Final[Mapping[str, _Readers]] = {
    readers.kind.plural: readers
    for readers in (
        _Readers(NETWORK_POLICY, _read_network_policy, _read_network_subjects),
        _Readers(CILIUM_POLICY, decode_cilium_policy, read_cilium_subjects),
        _Readers(CILIUM_CLUSTERWIDE_POLICY, decode_cilium_policy, read_cilium_subjects),
    )
}
POLICY_KINDS: Final = tuple(_READERS)
"""Kinds of the store whose objects are policies, beside the groups that these name."""
