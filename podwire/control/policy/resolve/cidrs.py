"""Local identities of CIDRs: one number for each distinct prefix that a rule, an exception or a group names.

Called by the engine. Pure. An address has the number of the longest prefix that contains it. A selector therefore
selects the numbers of all prefixes inside its CIDRs and outside its exceptions, and that is exact. Numbers are given
in order and never reused. Invariant: every selection's members are right for the prefixes known at that moment.
"""

import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping
from ipaddress import IPv4Network

from podwire.control.policy.labels_match import LabelSet, matches
from podwire.control.policy.resolve.selectors import Selection
from podwire.control.policy.rule import CidrGroup, CidrGroupSelector, CidrSelector
from podwire.model.endpoint import IPNetwork
from podwire.model.policy import CIDR_IDENTITY_FIRST, CIDR_WORLD_BIT

_BITS = {4: 32, 6: 128}


class Prefix:
    """A prefix in numbers, and its identity."""

    __slots__ = ("bits", "first", "is_mapped", "network", "number", "users", "version")

    def __init__(self, network: IPNetwork, number: int) -> None:
        self.network = network
        self.version = 4 if isinstance(network, IPv4Network) else 6
        self.bits = network.prefixlen
        self.first = int(network.network_address)
        self.number = number
        self.users = 0
        self.is_mapped = False
        """The datapath's map holds it."""

    @property
    def families(self) -> tuple[int, int]:
        """Give the identities that entries have: for every peer, and for those outside the cluster."""
        return self.number, self.number | CIDR_WORLD_BIT


class _CidrSelection(Selection):
    """A selection with its CIDRs in force."""

    __slots__ = ("cidrs", "everybody", "exceptions", "own")

    def __init__(self, selector: CidrSelector | CidrGroupSelector) -> None:
        super().__init__(selector, set())
        self.own = selector
        self.everybody = isinstance(selector, CidrSelector) and selector.everybody
        self.cidrs: tuple[IPNetwork, ...] = ()
        self.exceptions = selector.exceptions

    def families_of(self, prefix: Prefix) -> tuple[int, ...]:
        """Give the identities under which this selector's entries for a prefix stand."""
        return prefix.families if self.everybody else prefix.families[1:]


Delta = tuple[Selection, tuple[int, ...], tuple[int, ...]]
"""A selection, what came to it, what left it."""


class CidrTable:
    """Prefixes by number, selections of CIDRs, and the groups they speak of."""

    def __init__(self, known: Mapping[IPNetwork, int]) -> None:
        self._next = max((CIDR_IDENTITY_FIRST - 1, *known.values())) + 1
        self._numbers = set(known.values())
        self._prefixes: dict[IPNetwork, Prefix] = {}
        self._order: dict[int, list[tuple[int, int]]] = {4: [], 6: []}
        """(first address, bits) of each version, sorted: what is inside a prefix is one stretch."""
        self._lengths: dict[int, list[int]] = {4: [], 6: []}
        """Lengths in use, sorted; with how often in `_length_uses`."""
        self._length_uses: dict[tuple[int, int], int] = {}
        self._places: dict[tuple[int, int, int], Prefix] = {}
        self._selections: dict[CidrSelector | CidrGroupSelector, _CidrSelection] = {}
        self._by_cidr: dict[IPNetwork, set[_CidrSelection]] = {}
        self.groups: dict[str, CidrGroup] = {}
        for network, number in known.items():
            self._insert(Prefix(network, number)).is_mapped = True

    def __iter__(self) -> Iterator[Selection]:
        return iter(self._selections.values())

    def __contains__(self, network: IPNetwork) -> bool:
        return network in self._prefixes

    def mapping(self, more: Iterable[Prefix] = ()) -> dict[IPNetwork, int]:
        """Give the numbers of the prefixes that the datapath's map holds, and of those in `more`."""
        mapped = (prefix for prefix in self._prefixes.values() if prefix.is_mapped)
        return {prefix.network: prefix.number for prefix in (*mapped, *more)}

    def needs(
        self, selector: CidrSelector | CidrGroupSelector, groups: Mapping[str, CidrGroup]
    ) -> Iterable[IPNetwork]:
        """Give the prefixes that must have numbers before a selector is used, if the groups were these."""
        return (*self._cidrs_of(selector, groups), *selector.exceptions)

    def ensure(self, networks: Iterable[IPNetwork]) -> list[Delta]:
        """Give numbers to prefixes that have none; gives the selections that select them."""
        deltas: list[Delta] = []
        for network in networks:
            if network in self._prefixes:
                continue
            prefix = self._insert(Prefix(network, self._take_number()))
            for selection in self._covering(prefix):
                if _selects(selection, prefix):
                    came = selection.families_of(prefix)
                    selection.members.update(came)
                    deltas.append((selection, came, ()))
        return deltas

    def unmapped(self, networks: Iterable[IPNetwork]) -> list[Prefix]:
        """Give those of the prefixes that the datapath's map lacks, shorter ones first."""
        prefixes = {self._prefixes[network] for network in networks}
        return sorted(
            (prefix for prefix in prefixes if not prefix.is_mapped), key=lambda prefix: prefix.bits
        )

    def parent(self, prefix: Prefix, more: Collection[Prefix]) -> Prefix | None:
        """Give the longest prefix around this one that is in the map, or among those that come into it with it."""
        around = self._around(prefix, itself=False)
        return next((prefix for prefix in around if prefix.is_mapped or prefix in more), None)

    def unused(self) -> list[Prefix]:
        """Give the prefixes that no selector names any more."""
        return [prefix for prefix in self._prefixes.values() if not prefix.users]

    def forget(self, prefixes: Collection[Prefix]) -> list[Delta]:
        """Take prefixes out; gives the selections that selected them."""
        deltas: list[Delta] = []
        for prefix in prefixes:
            for selection in self._covering(prefix):
                went = tuple(family for family in prefix.families if family in selection.members)
                if went:
                    selection.members.difference_update(went)
                    deltas.append((selection, (), went))
            self._remove(prefix)
        return deltas

    def use(self, selector: CidrSelector | CidrGroupSelector, user: object) -> Selection:
        """Give a selector's selection and note one more user. What it `needs` must have numbers."""
        selection = self._selections.get(selector)
        if selection is None:
            selection = self._selections[selector] = _CidrSelection(selector)
            for network in selector.exceptions:
                self._prefixes[network].users += 1
            self._set_cidrs(selection, self._cidrs_of(selector, self.groups))
        selection.users.add(user)
        return selection

    def release(self, selection: Selection, user: object) -> None:
        """Note that a user is gone; a selection without users is forgotten, its prefixes are not (see `unused`)."""
        selection.users.discard(user)
        if selection.users or not isinstance(selection, _CidrSelection):
            return
        if self._selections.pop(selection.own, None) is None:
            return
        for network in selection.exceptions:
            self._prefixes[network].users -= 1
        self._set_cidrs(selection, ())

    def needs_of_groups(self, groups: Mapping[str, CidrGroup]) -> list[IPNetwork]:
        """Give the prefixes that selectors in use would name if the groups were these."""
        return [
            network
            for selector in self._selections
            if isinstance(selector, CidrGroupSelector)
            for network in self._cidrs_of(selector, groups)
        ]

    def set_groups(self, groups: dict[str, CidrGroup]) -> list[Delta]:
        """Take other groups; their prefixes must have numbers. Gives the selections that changed."""
        self.groups = groups
        deltas: list[Delta] = []
        for selector, selection in self._selections.items():
            if not isinstance(selector, CidrGroupSelector):
                continue
            cidrs = self._cidrs_of(selector, groups)
            if cidrs != selection.cidrs:
                before = set(selection.members)
                self._set_cidrs(selection, cidrs)
                came, went = selection.members - before, before - selection.members
                deltas.append((selection, tuple(came), tuple(went)))
        return deltas

    def _take_number(self) -> int:
        """Give the next number; after the last one those that are free again, from the first."""
        while True:
            number, self._next = self._next, self._next + 1
            # Numbers are not given again soon after they are free: programs under way may still hold them.
            if self._next >= CIDR_WORLD_BIT:
                self._next = CIDR_IDENTITY_FIRST
            if number not in self._numbers:
                self._numbers.add(number)
                return number

    @staticmethod
    def _cidrs_of(
        selector: CidrSelector | CidrGroupSelector, groups: Mapping[str, CidrGroup]
    ) -> tuple[IPNetwork, ...]:
        if isinstance(selector, CidrSelector):
            return (selector.cidr,)
        if selector.labels is None:
            group = groups.get(selector.name)
            return tuple(dict.fromkeys(group.cidrs)) if group else ()
        networks = [
            network
            for _name, group in sorted(groups.items())
            if matches(selector.labels, LabelSet(group.labels))
            for network in group.cidrs
        ]
        return tuple(dict.fromkeys(networks))

    def _set_cidrs(self, selection: _CidrSelection, cidrs: tuple[IPNetwork, ...]) -> None:
        for network in selection.cidrs:
            self._prefixes[network].users -= 1
            users = self._by_cidr[network]
            users.discard(selection)
            if not users:
                del self._by_cidr[network]
        for network in cidrs:
            self._prefixes[network].users += 1
            self._by_cidr.setdefault(network, set()).add(selection)
        selection.cidrs = cidrs
        inside = {prefix for network in cidrs for prefix in self._inside(network)}
        for network in selection.exceptions:
            inside.difference_update(self._inside(network))
        selection.members = {
            family for prefix in inside for family in selection.families_of(prefix)
        }

    def _inside(self, network: IPNetwork) -> list[Prefix]:
        prefix = self._prefixes[network]
        order = self._order[prefix.version]
        # What is inside a prefix is one stretch of the sorted list, because CIDRs are nested or apart, never crossed.
        end = prefix.first + (1 << (_BITS[prefix.version] - prefix.bits))
        begin = bisect.bisect_left(order, (prefix.first, prefix.bits))
        stretch = order[begin : bisect.bisect_left(order, (end, 0))]
        return [self._places[prefix.version, bits, first] for first, bits in stretch]

    def _around(self, prefix: Prefix, *, itself: bool) -> Iterator[Prefix]:
        width = _BITS[prefix.version]
        # One look-up for each length that is in use, instead of a walk of a trie in Python.
        for bits in reversed(self._lengths[prefix.version]):
            if bits > prefix.bits or (bits == prefix.bits and not itself):
                continue
            shift = width - bits
            wider = self._places.get((prefix.version, bits, prefix.first >> shift << shift))
            if wider is not None:
                yield wider

    def _covering(self, prefix: Prefix) -> set[_CidrSelection]:
        covering: set[_CidrSelection] = set()
        for around in self._around(prefix, itself=True):
            covering |= self._by_cidr.get(around.network, set())
        return covering

    def _insert(self, prefix: Prefix) -> Prefix:
        self._prefixes[prefix.network] = prefix
        self._places[prefix.version, prefix.bits, prefix.first] = prefix
        bisect.insort(self._order[prefix.version], (prefix.first, prefix.bits))
        place = prefix.version, prefix.bits
        uses = self._length_uses[place] = self._length_uses.get(place, 0) + 1
        if uses == 1:
            bisect.insort(self._lengths[prefix.version], prefix.bits)
        return prefix

    def _remove(self, prefix: Prefix) -> None:
        self._numbers.discard(prefix.number)
        del self._prefixes[prefix.network]
        del self._places[prefix.version, prefix.bits, prefix.first]
        self._order[prefix.version].remove((prefix.first, prefix.bits))
        place = prefix.version, prefix.bits
        self._length_uses[place] -= 1
        if not self._length_uses[place]:
            self._lengths[prefix.version].remove(prefix.bits)


def _selects(selection: _CidrSelection, prefix: Prefix) -> bool:
    """Tell whether a prefix inside one of the selection's CIDRs is outside of its exceptions."""
    width = _BITS[prefix.version]
    for network in selection.exceptions:
        if network.version != prefix.version or network.prefixlen > prefix.bits:
            continue
        shift = width - network.prefixlen
        if prefix.first >> shift == int(network.network_address) >> shift:
            return False
    return True
