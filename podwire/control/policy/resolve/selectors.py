"""The selector cache: which identities each selector selects, kept up to date as identities come and go.

Called by the engine. Pure. A new identity touches only the selectors that could match it. Each selector is filed under
its most selective requirement; the few that have none (only negative ones) are kept apart. A new selector asks for
sets of identities per label, never for each identity. Invariant: `Selection.members` is what a comparison of every
identity with the selector gives.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

from podwire.control.policy.labels_match import LabelSet, describe_selector, matches
from podwire.control.policy.rule import ANY_SOURCE, LabelSelector, PeerSelector, Requirement
from podwire.model.identity import IdentityFacts
from podwire.model.labels import SOURCE_RESERVED, Label, Operator, split_label

_Key = TypeVar("_Key")

NOBODY: Final[frozenset[int]] = frozenset()


class Selection:
    """One selector in use: the identities that it selects now, and the rules that use it."""

    __slots__ = ("filed", "members", "selector", "users")

    def __init__(self, selector: PeerSelector | str, members: set[int]) -> None:
        self.selector = selector
        """The name of a port means every endpoint that has a port of that name."""
        self.members = members
        """Identities of peers, local ones of CIDRs included. Read by everybody, changed by the owner alone."""
        self.users: set[Any] = set()
        self.filed: tuple[Any, ...] = ()
        """Where the index has it; () = among the rest."""

    def describe(self) -> dict[str, Any]:
        """Give what people are shown: the selector in words, its identities, and how many rules use it."""
        selector = self.selector
        text = f"port {selector}" if isinstance(selector, str) else describe_selector(selector)
        return {"selector": text, "identities": sorted(self.members), "users": len(self.users)}


class LabelIndex:
    """Identities by label, and label selectors by what they require."""

    def __init__(self) -> None:
        self._facts: dict[int, IdentityFacts] = {}
        self._sources: set[str] = set()
        self._with_pair: dict[Label, set[int]] = {}
        self._with_key: dict[tuple[str, str], set[int]] = {}
        self._with_port: dict[str, set[int]] = {}
        self._selections: dict[LabelSelector | str, Selection] = {}
        self._filed: dict[tuple[str, ...], set[Selection]] = {}
        """Under (key, value) or (key,); () for the rest."""

    def __contains__(self, number: int) -> bool:
        return number in self._facts

    def __iter__(self) -> Iterator[Selection]:
        return iter(self._selections.values())

    def facts(self, number: int) -> IdentityFacts | None:
        """Give what is known of an identity."""
        return self._facts.get(number)

    def use(self, selector: LabelSelector | str, user: object) -> Selection:
        """Give a selector's selection and note one more user. A string is the name of a port."""
        selection = self._selections.get(selector)
        if selection is None:
            if isinstance(selector, str):
                selection = Selection(selector, set(self._with_port.get(selector, ())))
            else:
                selection = Selection(selector, self._select(selector))
                self._file(selection, selector)
            self._selections[selector] = selection
        selection.users.add(user)
        return selection

    def release(self, selection: Selection, user: object) -> None:
        """Note that a user is gone; a selection without users is forgotten."""
        selection.users.discard(user)
        selector = selection.selector
        if selection.users or not isinstance(selector, LabelSelector | str):
            return
        self._selections.pop(selector, None)
        for place in selection.filed:
            filed = self._filed[place]
            filed.discard(selection)
            if not filed:
                del self._filed[place]

    def add_identity(self, facts: IdentityFacts) -> list[Selection]:
        """Learn of an identity; gives the selections that select it now."""
        number = facts.number
        self._facts[number] = facts
        labels = [split_label(text) for text in facts.labels]
        for label in labels:
            self._sources.add(label.source)
            self._with_pair.setdefault(label, set()).add(number)
            self._with_key.setdefault(label[:2], set()).add(number)
        for port in facts.named_ports:
            self._with_port.setdefault(port.name, set()).add(number)
        asked = LabelSet(facts.labels)
        selections = [
            selection
            for selection in self._candidates(labels)
            if isinstance(selection.selector, LabelSelector) and matches(selection.selector, asked)
        ]
        selections += self._of_ports(facts)
        for selection in selections:
            selection.members.add(number)
        return selections

    def remove_identity(self, number: int) -> list[Selection]:
        """Forget an identity; gives the selections that selected it."""
        facts = self._facts.pop(number, None)
        if facts is None:
            return []
        labels = [split_label(text) for text in facts.labels]
        for label in labels:
            _take_out(self._with_pair, label, number)
            _take_out(self._with_key, label[:2], number)
        for port in facts.named_ports:
            _take_out(self._with_port, port.name, number)
        selections = [
            selection for selection in self._candidates(labels) if number in selection.members
        ]
        selections += self._of_ports(facts)
        for selection in selections:
            selection.members.discard(number)
        return selections

    def _of_ports(self, facts: IdentityFacts) -> list[Selection]:
        names = {port.name for port in facts.named_ports}
        return [self._selections[name] for name in names if name in self._selections]

    def _candidates(self, labels: Iterable[Label]) -> set[Selection]:
        places: set[tuple[str, ...]] = {()}
        for label in labels:
            places.add((label.key,))
            places.add((label.key, label.value))
        selections: set[Selection] = set()
        for place in places & self._filed.keys():
            selections |= self._filed[place]
        return selections

    def _file(self, selection: Selection, selector: LabelSelector) -> None:
        """File a selection where fewest others are, so that a common label (a namespace) does not gather them all."""
        choices: list[tuple[tuple[str, ...], ...]] = []
        for requirement in selector.requirements:
            if requirement.operator is Operator.IN:
                choices.append(tuple((requirement.key, value) for value in requirement.values))
            elif requirement.operator is Operator.EXISTS:
                choices.append(((requirement.key,),))
        places = min(choices, key=self._crowd, default=((),))
        selection.filed = places
        for place in places:
            self._filed.setdefault(place, set()).add(selection)

    def _crowd(self, places: tuple[tuple[str, ...], ...]) -> tuple[int, int]:
        exists_only = sum(len(place) == 1 for place in places)
        return exists_only, sum(len(self._filed.get(place, NOBODY)) for place in places)

    def _select(self, selector: LabelSelector) -> set[int]:
        """Select among all identities: the smallest positive set, narrowed by the others."""
        positive: list[set[int]] = []
        negative: list[set[int]] = []
        for requirement in selector.requirements:
            is_positive = requirement.operator in (Operator.IN, Operator.EXISTS)
            (positive if is_positive else negative).append(self._bearers(requirement))
        positive.sort(key=len)
        # A selector of negative requirements alone begins with everybody: they hold for identities that lack the key.
        numbers = set(positive[0]) if positive else set(self._facts)
        for others in positive[1:]:
            numbers &= others
        for others in negative:
            numbers -= others
        return numbers

    def _bearers(self, requirement: Requirement) -> set[int]:
        """Give the identities that have the key, or one of the values: a negative requirement excludes these."""
        key = requirement.key
        wanted = requirement.source
        # A key without a source never means a reserved identity, as in `LabelSet`.
        sources = self._sources - {SOURCE_RESERVED} if wanted == ANY_SOURCE else {wanted}
        bearers: list[set[int]] = []
        for source in sources:
            if requirement.operator in (Operator.EXISTS, Operator.DOES_NOT_EXIST):
                bearers.append(self._with_key.get((source, key), set()))
            else:
                pairs = (Label(source, key, value) for value in requirement.values)
                bearers += [self._with_pair.get(pair, set()) for pair in pairs]
        bearers = [matching for matching in bearers if matching]
        return bearers[0] if len(bearers) == 1 else set().union(*bearers)


def _take_out(index: dict[_Key, set[int]], key: _Key, number: int) -> None:
    numbers = index.get(key)
    if numbers is None:
        return
    numbers.discard(number)
    if not numbers:
        del index[key]
