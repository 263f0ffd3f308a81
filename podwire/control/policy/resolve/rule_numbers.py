"""Numbers for rules, which entries, events and counters carry in place of a name.

Called by the engine. Invariant: a rule keeps its number for as long as its policy exists, and no number ever stands
for two rules, even across restarts: numbers are reserved in spans, and a span is on disk before its first number is
used.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Final

import msgspec
from msgspec.structs import replace

from podwire.control.policy.oracle import RuleName
from podwire.control.policy.rule import DEFAULT_DENY_PATH, PolicyId

SPAN: Final = 1024
FORMER_NAMES: Final = 4096
"""Names of rules that are gone, kept for events and counters that still carry their numbers."""


class Counter:
    """Numbers, each given once. `reserve` is told the first number of the next process before it could be used here."""

    def __init__(self, first: int, reserve: Callable[[int], None]) -> None:
        self._next = first
        self.limit = first
        """What the next process begins with."""
        self._reserve = reserve

    def prepare(self, count: int) -> None:
        """Reserve so that the next `count` numbers can be taken; raises what `reserve` raises, nothing is lost then."""
        if self._next + count > self.limit:
            # In spans, so that the disk is written once in many changes and not for each number.
            limit = self._next + count + SPAN
            self._reserve(limit)
            self.limit = limit

    def take(self) -> int:
        """Give the next number; raises what `reserve` raises, and has then used none."""
        self.prepare(1)
        self._next += 1
        return self._next - 1


class Numbers(msgspec.Struct, frozen=True):
    """Numbers from which on nothing was ever used on this node: kept by the agent across restarts."""

    slot: int = 1
    rule: int = 1
    revision: int = 1
    """Of generations: the journal has had it under this name before they were called so."""


class Counters:
    """The counters of a node, all told to `remember` at once."""

    def __init__(self, first: Numbers, remember: Callable[[Numbers], None]) -> None:
        self._remember = remember
        self.slot = Counter(first.slot, lambda limit: self._reserve(slot=limit))
        self.rule = Counter(first.rule, lambda limit: self._reserve(rule=limit))
        self.generation = Counter(first.revision, lambda limit: self._reserve(revision=limit))

    def _reserve(self, **limit: int) -> None:
        now = Numbers(self.slot.limit, self.rule.limit, self.generation.limit)
        self._remember(replace(now, **limit))


class RuleNumbers:
    """Which number each rule has, and which rule each number is."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._by_policy: dict[PolicyId, dict[str, int]] = {}
        self._names: dict[int, RuleName] = {}
        self._former: OrderedDict[int, RuleName] = OrderedDict()
        self.have_gone = True
        """Whether counters may stand under numbers that no rule has, of an earlier process or of policies that went."""

    def number(self, policy: PolicyId, path: str = DEFAULT_DENY_PATH) -> int:
        """Give a rule's number, a new one at first."""
        paths = self._by_policy.setdefault(policy, {})
        number = paths.get(path)
        if number is None:
            number = paths[path] = self._counter.take()
            self._names[number] = RuleName(policy, path)
        return number

    def name(self, number: int) -> RuleName | None:
        """Give the rule of a number, also of a policy that went a while ago; None for 0 and for strangers."""
        return self._names.get(number) or self._former.get(number)

    def numbers(self) -> Collection[int]:
        """Give the numbers of all rules there are."""
        return self._names.keys()

    def release(self, policy: PolicyId) -> None:
        """Forget a policy; its name stays readable for a while."""
        for number in self._by_policy.pop(policy, {}).values():
            self._former[number] = self._names.pop(number)
            self.have_gone = True
        while len(self._former) > FORMER_NAMES:
            self._former.popitem(last=False)
