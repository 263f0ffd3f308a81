"""The datapath's map of CIDRs: adding or removing a prefix changes no verdict by itself.

Owned by the engine. An address has the number of the longest prefix in the map. Before a prefix is added, every slot
gets entries for it that equal what its addresses meet now. After it is removed, its addresses meet the entries of the
prefix around it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from podwire.control.policy.realize.slots import Slots
from podwire.control.policy.realize.subjects import Subjects
from podwire.control.policy.resolve.cidrs import CidrTable, Prefix
from podwire.control.policy.resolve.subject import Subject
from podwire.model.endpoint import IPNetwork
from podwire.model.errors import PolicyOverflow
from podwire.model.interfaces import PolicyDatapath


@dataclass
class MappedCidrs:
    """Which prefixes the map holds, and the way to change it."""

    datapath: PolicyDatapath
    cidrs: CidrTable
    subjects: Subjects
    slots: Slots
    explain: Callable[[PolicyOverflow, Subject], PolicyOverflow]

    def add(self, needed: Collection[IPNetwork]) -> frozenset[int]:
        """Bring what is missing of these prefixes into the map; gives the identities that came. Doing it again after
        a failure is safe. Raises PolicyOverflow, KernelFailure, Unavailable while rows are not flipped."""
        fresh = self.cidrs.unmapped(needed)
        pairs = [(prefix, self.cidrs.parent(prefix, fresh)) for prefix in fresh]
        for subject in self.subjects:
            try:
                self.slots.extend(subject, pairs)
            except PolicyOverflow as error:
                raise self.explain(error, subject) from error
        # Entries first, the map after them: as soon as the map has the prefix, packets meet its number.
        self.datapath.write_cidrs(self.cidrs.mapping(fresh))
        for prefix in fresh:
            prefix.is_mapped = True
        return frozenset(number for prefix in fresh for number in prefix.families)

    def find_unused(self, needed: Collection[IPNetwork] = ()) -> list[Prefix]:
        """Give the prefixes that no rule names, nor is going to (`needed`), as far as their addresses meet no other
        verdict without them: with subjects that have work to do, what is in force may still tell them apart."""
        unsettled = self.subjects.touched | self.subjects.behind
        return [
            prefix
            for prefix in self.cidrs.unused()
            if prefix.network not in needed
            and all(self._is_idle(prefix, subject) for subject in unsettled)
        ]

    def remove(self, prefixes: Collection[Prefix]) -> set[int]:
        """Take unused prefixes out of the map; when no program can hold a number any more, its entries may go too:
        nobody meets a gap. Gives the identities that went."""
        if not prefixes:
            return set()
        for prefix in prefixes:
            prefix.is_mapped = False
        self.datapath.write_cidrs(self.cidrs.mapping())
        # With nothing to remove this waits for the programs that run: one of them may have read the old number a
        # moment ago.
        self.datapath.remove_slots(())
        self.subjects.spread(self.cidrs.forget(prefixes))
        return {number for prefix in prefixes for number in prefix.families}

    def _is_idle(self, prefix: Prefix, subject: Subject) -> bool:
        """Tell whether a subject's slot has for a prefix what it has for the one around it."""
        around = self.cidrs.parent(prefix, ())
        return not (subject.lingering or subject.is_unsure) and subject.says_the_same(
            prefix.families, around.families if around else ()
        )
