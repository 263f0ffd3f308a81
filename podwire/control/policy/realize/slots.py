"""Slots: bring a subject's entries into the datapath so that no flow meets a third verdict on the way.

Called by the engine. A change that only opens or only closes (in each direction) is made in place. Entries are put
longest prefix first and removed shortest first, so that a packet's entry in one family changes once, and changes of
several families all move its verdict the same way. Any other change is written under a new number, and then all rows
are switched to it. Rows of endpoints, with a new generation, always come after entries. Invariant: a slot that any row
may name is neither deleted nor partly filled.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Final

import msgspec
from msgspec.structs import replace

from podwire.control.policy.resolve.cidrs import Prefix
from podwire.control.policy.resolve.compile import Block, find_entry, length, unpack
from podwire.control.policy.resolve.rule_numbers import Counter
from podwire.control.policy.resolve.subject import PolicyValues, Subject
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import PodwireError, PolicyOverflow, Unavailable
from podwire.model.ids import EndpointId
from podwire.model.interfaces import EndpointConfig, PolicyDatapath
from podwire.model.policy import (
    CIDR_IDENTITY_FIRST,
    Direction,
    PolicyEntry,
    PolicyKey,
    PolicyRows,
    Verdict,
)

EndpointRows = Callable[
    [Sequence[EndpointId], PolicyValues], Iterable[tuple[EndpointRecord, EndpointConfig]]
]
"""Gives the rows of endpoints with new values: `(table[id].record, values.fill(table[id].config))`, for those that
have a row."""


class Push(IntFlag):
    """Where a change of entries can push verdicts."""

    NOWHERE = 0
    OPEN = 1
    CLOSED = 2
    BOTH = 3


class Difference(msgspec.Struct, frozen=True):
    """From one family of entries to another."""

    put: tuple[tuple[int, PolicyEntry], ...]
    """Longest prefix first."""
    remove: tuple[int, ...]
    """Shortest prefix first."""
    push: Push


_NO_ROWS: Final[dict[int, PolicyEntry]] = {}


def compare(old: Block | None, new: Block | None) -> Difference:
    """Compute how one family of entries becomes another."""
    before = old.rows if old else _NO_ROWS
    after = new.rows if new else _NO_ROWS
    put = [(prefix, entry) for prefix, entry in after.items() if before.get(prefix) != entry]
    remove = [prefix for prefix in before if prefix not in after]
    push = Push.NOWHERE
    for prefix in (*(prefix for prefix, _entry in put), *remove):
        was = _openness(find_entry(before, prefix))
        becomes = _openness(find_entry(after, prefix))
        if was != becomes:
            push |= Push.OPEN if becomes > was else Push.CLOSED
    put.sort(key=lambda entry: -length(entry[0]))
    remove.sort(key=length)
    return Difference(tuple(put), tuple(remove), push)


def _openness(entry: PolicyEntry | None) -> int:
    """Order entries by how much they let through: a strong denial least, a strong permission most. Whatever else a
    packet meets, replacing its entry by a higher one never closes it."""
    if entry is None:
        return 0
    strength = entry.precedence + 1
    return strength if entry.verdict is Verdict.ALLOW else -strength


@dataclass(slots=True)
class _Plan:
    """What is to be done to one slot."""

    steps: list[tuple[int, Direction, Difference]] = field(default_factory=list)
    """Of each family that changes. Keys are made of them only for a change in place: the slot of a mixed one is written
    whole."""
    is_mixed: bool = False

    def list_put(self) -> PolicyRows:
        """Give the entries to be put, in the order of the steps."""
        return {
            unpack(number, direction, at): entry
            for number, direction, step in self.steps
            for at, entry in step.put
        }

    def list_removed(self) -> list[PolicyKey]:
        """Give the keys to be removed, in the order of the steps."""
        return [
            unpack(number, direction, at)
            for number, direction, step in self.steps
            for at in step.remove
        ]


@dataclass
class Slots:
    """Writes slots and rows. `numbers` gives slot numbers, never twice on a node."""

    datapath: PolicyDatapath
    rows: EndpointRows
    numbers: Counter
    retired: set[int] = field(default_factory=set)
    """Slots that no row names any more; programs under way may still read them."""

    def realize(
        self,
        subject: Subject,
        wanted: PolicyValues,
        generation: int,
        *,
        churned: Collection[int] = frozenset(),
        fresh: Collection[int] = frozenset(),
    ) -> bool:
        """Bring a subject to what it wants; False when it has it already. `churned`: identities that came or went with
        this generation; `fresh`: identities of CIDRs that came into the map with it. Raises PolicyOverflow (nothing was
        written), KernelFailure; what was in force for each endpoint stays in force."""
        plan = self._plan(subject, wanted, churned, fresh)
        has_rows = bool(plan.steps)
        is_same = replace(wanted, slot=subject.slot) == subject.values
        if is_same and not has_rows and not subject.is_unsure and not subject.lingering:
            _settle(subject)
            return False
        if has_rows or subject.is_unsure:
            # A change that opens some flows and closes others has a moment in between in which a flow meets neither
            # the old verdict nor the new one. Written elsewhere, it takes effect with one write to each row.
            if plan.is_mixed or subject.is_unsure or not subject.slot:
                self._replace(subject)
            else:
                self.change(subject, plan.list_put(), plan.list_removed())
        _settle(subject)
        subject.target = replace(wanted, slot=subject.slot)
        self.flip(subject, generation)
        return True

    def extend(self, subject: Subject, prefixes: Iterable[tuple[Prefix, Prefix | None]]) -> None:
        """Before (prefix, its parent) pairs come into the map of CIDRs, parents first: give the prefix the entries
        that its addresses meet now, those of the parent. No verdict changes."""
        if subject.lingering or subject.is_unsure:
            raise Unavailable(
                f"add CIDRs for identity {subject.number}: its last change is not complete"
            )
        put: PolicyRows = {}
        remove: list[PolicyKey] = []
        become: dict[tuple[Direction, int], Block | None] = {}
        for prefix, parent in prefixes:
            sources = parent.families if parent else (0, 0)
            for number, source in zip(prefix.families, sources, strict=True):
                for direction in Direction:
                    block = become.get((direction, source)) if source else None
                    if source and (direction, source) not in become:
                        block = subject.realized(direction, source)
                    become[direction, number] = block
                    step = compare(subject.realized(direction, number), block)
                    put.update((unpack(number, direction, at), entry) for at, entry in step.put)
                    remove += [unpack(number, direction, at) for at in step.remove]
        if put or remove:
            self.change(subject, put, remove)
        for (direction, number), block in become.items():
            subject.set_realized(direction, number, block)

    def change(self, subject: Subject, put: PolicyRows, remove: Sequence[PolicyKey]) -> None:
        """Change the entries in place; rows are to be flipped after it. Raises PolicyOverflow (nothing was written),
        KernelFailure."""
        try:
            self.datapath.change_slot(subject.slot, put, remove)
        except PolicyOverflow:
            raise
        except PodwireError:
            subject.is_unsure = True
            raise

    def flip(self, subject: Subject, generation: int) -> None:
        """Rewrite the rows of all live endpoints to the subject's target; after that nobody names a former slot."""
        values = subject.target = replace(subject.target, generation=generation)
        try:
            if subject.live:
                self.datapath.update_endpoints(self.rows(sorted(subject.live), values))
        except PodwireError:
            # Some rows were rewritten and others not. 0 stands for the slot in force, whose rows still have the old
            # generation.
            if not subject.lingering:
                subject.lingering.append(0)
            raise
        # Only after every row is written. Before, the rows disagree, and what they hold has no single value.
        subject.values = values
        self.retired.update(slot for slot in subject.lingering if slot)
        subject.lingering.clear()

    def finish_flips(self, behind: Iterable[Subject], generation: int) -> None:
        """Try again to rewrite rows that a former change could not: CIDRs can only be added to slots that are known."""
        for subject in [
            subject for subject in behind if subject.lingering and not subject.is_unsure
        ]:
            try:
                self.flip(subject, generation)
            except PodwireError as error:
                subject.failure = error

    def compare(self, subject: Subject) -> tuple[PolicyRows, Sequence[PolicyKey]]:
        """Give what a subject's slot in the kernel lacks or has otherwise, and what it has too much."""
        wanted = subject.rows()
        entries = self.datapath.read_slot(subject.slot) if subject.slot else {}
        missing = {key: entry for key, entry in wanted.items() if entries.get(key) != entry}
        return missing, [key for key in entries if key not in wanted]

    def retire(self, subject: Subject) -> None:
        """Give up the slots of a subject that no row names any more."""
        self.retired.update(slot for slot in (subject.slot, *subject.lingering) if slot)
        subject.slot = 0
        subject.lingering.clear()

    def collect(self) -> bool:
        """Delete the entries of retired slots, after the fence; False when there are none."""
        if not self.retired:
            return False
        self.datapath.remove_slots(sorted(self.retired))
        self.retired.clear()
        return True

    def _plan(
        self,
        subject: Subject,
        wanted: PolicyValues,
        churned: Collection[int],
        fresh: Collection[int],
    ) -> _Plan:
        plan = _Plan()
        for direction in Direction:
            push = Push.NOWHERE
            if wanted.is_closed(direction) != subject.values.is_closed(direction):
                push = Push.CLOSED if wanted.is_closed(direction) else Push.OPEN
            self._plan_direction(plan, subject, direction, push, (churned, fresh))
        return plan

    @staticmethod
    def _plan_direction(
        plan: _Plan,
        subject: Subject,
        direction: Direction,
        push: Push,
        special: tuple[Collection[int], Collection[int]],
    ) -> None:
        """Add one direction's differences. Identities that came or went are judged each for itself: their packets
        meet one family that changes, and any way from its old to its new entries is safe."""
        churned, fresh = special
        families = subject.families[direction]
        known: dict[tuple[Block | None, Block | None], Difference] = {}
        alone: set[Push] = set()
        for number, old in subject.stale[direction].items():
            new = families.get(number)
            if old is new:
                continue
            step = known.get((old, new))
            if step is None:
                step = known[old, new] = compare(old, new)
            if step.put or step.remove:
                plan.steps.append((number, direction, step))
            if number in churned:
                alone.add(step.push)
            else:
                push |= step.push
                if fresh and number >= CIDR_IDENTITY_FIRST and number not in fresh and step.push:
                    plan.is_mixed = True
        if push:
            plan.is_mixed |= any(push | write == Push.BOTH for write in (push, *alone))

    def _replace(self, subject: Subject) -> None:
        """Write all that is wanted under a new number; no entries need no slot."""
        rows = {
            unpack(number, direction, at): entry
            for direction in Direction
            for number, block in subject.families[direction].items()
            for at, entry in block.rows.items()
        }
        # A slot's number is never used twice: a program under way may still read entries under the old one.
        slot = self.numbers.take() if rows else 0
        if slot:
            try:
                self.datapath.write_slot(slot, rows)
            except PolicyOverflow:
                raise
            except PodwireError:
                # Half of it may be written. No row names it, so it can be removed like a slot that was given up.
                self.retired.add(slot)
                raise
        if subject.slot:
            subject.lingering.append(subject.slot)
        subject.slot = slot
        subject.is_unsure = False


def _settle(subject: Subject) -> None:
    """Note that the slot holds all that is wanted."""
    for stale in subject.stale:
        stale.clear()
