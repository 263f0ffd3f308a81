"""Which labels are part of an identity: the setting `identity_label_filter`.

Made once by `agent.node`, used by `control.identity.key`. Pure except for a memory of keys that it has decided. The
semantics are Cilium's: a pattern is a regular expression that must match at the beginning of the key. Of the patterns
that match, the longest match of an including one is compared with the shortest match of an excluding one, and the
longer wins. As soon as the setting has one including pattern, only what is included counts. Invariant: namespace and
network are always part of an identity; the workload's own name never is.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import msgspec

from podwire.model.errors import Fault, InvalidConfiguration
from podwire.model.labels import (
    NAME_KEY,
    NAMESPACE_KEY,
    NETWORK_KEY,
    SOURCE_CNI,
    SOURCE_K8S,
    SOURCE_RESERVED,
    SOURCES,
    split_label,
)

SETTING: Final = "identity_label_filter"
DEFAULT_PATTERNS: Final = (
    r"reserved:.*",
    r"k8s:io\.kubernetes\.pod\.namespace",
    r"k8s:io\.cilium\.k8s\.namespace\.labels",
    r"k8s:io\.cilium\.k8s\.policy\.cluster",
    r"k8s:io\.cilium\.k8s\.policy\.serviceaccount",
    r"cni:podwire\.io/network",
    r"app\.kubernetes\.io",
    r"!io\.kubernetes",
    r"!kubernetes\.io",
    r"!.*beta\.kubernetes\.io",
    r"!k8s\.io",
    r"!statefulset\.kubernetes\.io/pod-name",
    r"!apps\.kubernetes\.io/pod-index",
    r"!batch\.kubernetes\.io/job-completion-index",
    r"!batch\.kubernetes\.io/controller-uid",
    r"!pod-template-generation",
    r"!pod-template-hash",
    r"!controller-revision-hash",
    r"!controller-uid",
    r"!annotation.*",
    r"!etcd_node",
)
"""What differs from one replica to the next stays out. A setting of one's own is added to these."""
REMEMBERED_KEYS: Final = 4096

_ALWAYS: Final = frozenset({(SOURCE_K8S, NAMESPACE_KEY), (SOURCE_CNI, NETWORK_KEY)})
_NEVER: Final = (SOURCE_CNI, NAME_KEY)


class _Pattern(msgspec.Struct, frozen=True):
    """One entry of the list; `source` "" matches every source."""

    source: str
    expression: re.Pattern[str]

    def match_length(self, source: str, key: str) -> int:
        """Give how many characters of the key match from its beginning; -1 when it does not match."""
        if self.source not in ("", source):
            return -1
        match = self.expression.match(key)
        return -1 if match is None else match.end()


@dataclass
class LabelFilter:
    """Chooses the labels that make an identity."""

    _includes: Sequence[_Pattern]
    _excludes: Sequence[_Pattern]
    _only_included: bool
    _decided: dict[str, bool] = field(default_factory=dict)
    """By source and key as a label has them."""

    @classmethod
    def parse(cls, patterns: Iterable[str] = ()) -> Self:
        """Read the setting; InvalidConfiguration names every pattern that cannot be read."""
        given = tuple(patterns)
        includes: list[_Pattern] = []
        excludes: list[_Pattern] = []
        faults: list[Fault] = []
        for index, text in enumerate((*DEFAULT_PATTERNS, *given), -len(DEFAULT_PATTERNS)):
            try:
                (excludes if text.startswith("!") else includes).append(_read_pattern(text))
            except ValueError as error:
                faults.append(Fault(f"{SETTING}[{index}]", f"is {text!r}: {error}"))
        if faults:
            raise InvalidConfiguration(
                f"read {SETTING}: "
                + "; ".join(f"{fault.path} {fault.message}" for fault in faults),
                hint="a pattern is [!][SOURCE:]REGULAR-EXPRESSION, matched from the beginning of the key",
                faults=tuple(faults),
            )
        # The default patterns do not count: only an including pattern of the setting itself makes the list exclusive.
        own_includes = any(not text.startswith("!") for text in given)
        return cls(includes, excludes, own_includes)

    def choose(self, labels: Iterable[str]) -> tuple[str, ...]:
        """Give those of canonical labels that make the identity, in their order."""
        return tuple(label for label in labels if self._is_chosen(label))

    def _is_chosen(self, label: str) -> bool:
        name = label.partition("=")[0]
        decided = self._decided.get(name)
        if decided is None:
            if len(self._decided) >= REMEMBERED_KEYS:
                # Keys come from the labels of pods, so their number has no bound of its own.
                self._decided.clear()
            decided = self._decided[name] = self._decide(*split_label(label)[:2])
        return decided

    def _decide(self, source: str, key: str) -> bool:
        if (source, key) in _ALWAYS or source == SOURCE_RESERVED:
            return True
        if (source, key) == _NEVER:
            return False
        included = max(
            (pattern.match_length(source, key) for pattern in self._includes), default=-1
        )
        ignored = [pattern.match_length(source, key) for pattern in self._excludes]
        shortest = min((length for length in ignored if length >= 0), default=-1)
        if shortest < 0:
            return included >= 0 or not self._only_included
        return included > shortest


def _read_pattern(text: str) -> _Pattern:
    body = text.removeprefix("!")
    source, colon, key = body.partition(":")
    if not colon:
        source, key = "", body
    elif source not in SOURCES:
        raise ValueError(f"{source!r} is not a source of labels ({', '.join(SOURCES)})")
    if not key:
        raise ValueError("it matches nothing")
    try:
        return _Pattern(source, re.compile(key))
    except re.error as error:
        raise ValueError(f"{error}") from error
