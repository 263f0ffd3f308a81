"""Match selectors with labels, and describe in words what a selector requires.

Used by the oracle, the selector cache and the doors. Pure. Invariant: a set of labels is parsed once and kept; nothing
here depends on the order of labels or requirements.
"""

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Final

from podwire.control.policy.rule import (
    ANY_SOURCE,
    CidrGroupSelector,
    CidrSelector,
    LabelSelector,
    PeerSelector,
    Requirement,
)
from podwire.model.labels import SOURCE_RESERVED, Operator, split_label

PARSED_SETS_KEPT: Final = 16384


class LabelSet:
    """The labels of one identity, ready to be asked."""

    __slots__ = ("_by_key", "_by_source")

    def __init__(self, labels: Iterable[str]) -> None:
        self._by_source: dict[tuple[str, str], str] = {}
        self._by_key: dict[str, frozenset[str]] = {}
        for text in labels:
            source, key, value = split_label(text)
            self._by_source[source, key] = value
            # A key without a source must not match a reserved label: `host` in a pod's policy means a label of pods,
            # never the node.
            if source != SOURCE_RESERVED:
                self._by_key[key] = self._by_key.get(key, frozenset()) | {value}

    def values(self, source: str, key: str) -> Collection[str]:
        """Give the values that a key has: of one source at most one; of "any", those of all but `reserved`."""
        if source == ANY_SOURCE:
            return self._by_key.get(key, ())
        value = self._by_source.get((source, key))
        return () if value is None else (value,)


@lru_cache(maxsize=PARSED_SETS_KEPT)
def parse_label_set(labels: tuple[str, ...]) -> LabelSet:
    """Give the labels of an identity in the form that can be asked; kept, because identities are asked often."""
    return LabelSet(labels)


def make_selector(*requirements: Requirement) -> LabelSelector:
    """Give the selector of these requirements in its one form: sorted, each once."""
    return LabelSelector(tuple(sorted(set(requirements))))


def fulfils(requirement: Requirement, labels: LabelSet) -> bool:
    """Tell whether labels meet one requirement. The negative ones hold for labels that lack the key."""
    values = labels.values(requirement.source, requirement.key)
    match requirement.operator:
        case Operator.EXISTS:
            return bool(values)
        case Operator.DOES_NOT_EXIST:
            return not values
        case Operator.IN:
            return any(value in requirement.values for value in values)
        case Operator.NOT_IN:
            # Kubernetes API, label selectors: NotIn and DoesNotExist hold for objects that lack the key.
            return not any(value in requirement.values for value in values)


def matches(selector: LabelSelector, labels: LabelSet) -> bool:
    """Tell whether labels meet every requirement of a selector."""
    return all(fulfils(requirement, labels) for requirement in selector.requirements)


def find_unmet(selector: LabelSelector, labels: LabelSet) -> Requirement | None:
    """Give the first requirement that labels do not meet; None when they match."""
    return next(
        (requirement for requirement in selector.requirements if not fulfils(requirement, labels)),
        None,
    )


def describe_requirement(requirement: Requirement) -> str:
    """Write a requirement as people do: `app=web`, `tier in (a,b)`, `!canary`."""
    name = (
        requirement.key
        if requirement.source == ANY_SOURCE
        else f"{requirement.source}:{requirement.key}"
    )
    values = ",".join(requirement.values)
    match requirement.operator:
        case Operator.EXISTS:
            return name
        case Operator.DOES_NOT_EXIST:
            return f"!{name}"
        case Operator.IN:
            return f"{name}={values}" if len(requirement.values) == 1 else f"{name} in ({values})"
        case Operator.NOT_IN:
            return (
                f"{name}!={values}" if len(requirement.values) == 1 else f"{name} notin ({values})"
            )


def describe_selector(selector: PeerSelector) -> str:
    """Write a selector as people do."""
    match selector:
        case LabelSelector(requirements=requirements):
            return ", ".join(map(describe_requirement, requirements)) or "everybody"
        case CidrSelector(cidr=cidr, everybody=everybody):
            text = str(cidr) if everybody else f"{cidr} outside the cluster"
        case CidrGroupSelector(name=name, labels=labels):
            wanted = name if labels is None else f"of {describe_selector(labels)}"
            text = f"CIDR group {wanted}"
    if selector.exceptions:
        text += f" except {', '.join(map(str, selector.exceptions))}"
    return text
