"""The identities that this agent knows, by number and by key; filled by list and watch of the store.

Written by the allocator and by the feed of the watch, read by any thread at any time without a lock (values are
replaced, never changed). Calls no store. Invariant: a number has one key, and what the store said last counts. A
number that is in use here is never forgotten, only found to be missing.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from podwire.control.identity.key import HASH_DIGITS, IdentityKey, read_spec, write_spec
from podwire.model.documents.lenient import members_of
from podwire.model.errors import InvalidRequest
from podwire.model.identity import IdentityFacts
from podwire.model.labels import OWN_PREFIX
from podwire.model.store import ObjectKey, StoredObject, StoreEvent, value_of

IDENTITIES: Final = "identities"
API_VERSION: Final = f"{OWN_PREFIX}/v1"
HASH_LABEL: Final = f"{OWN_PREFIX}/key-hash"
UNUSED_SINCE: Final = f"{OWN_PREFIX}/unused-since"
"""Annotation, the mark: the number was not in use at this time (RFC 3339). A node that wants it takes the mark away."""
RESTING_SINCE: Final = f"{OWN_PREFIX}/resting-since"
"""Annotation: the identity was given up at this time; the object is kept only so that no other key gets its number."""


@dataclass(frozen=True, slots=True)
class KnownIdentity:
    """One number and what it means."""

    number: int
    key: IdentityKey
    revision: int = 0
    """Of the store at the last change; 0 = the store does not have it (any more)."""
    is_marked: bool = False
    """Whether it may be taken away at any time: not to be used before the mark is."""
    is_resting: bool = False
    """Whether it was given up."""

    @property
    def is_stored(self) -> bool:
        """Whether the store has it."""
        return self.revision > 0


@dataclass(frozen=True, slots=True)
class IdentityChange:
    """What policy must know: identities that are new or mean something else now, and numbers that are gone."""

    added: tuple[IdentityFacts, ...] = ()
    removed: tuple[int, ...] = ()
    reassigned: tuple[int, ...] = ()
    """Numbers in use here which the store gave to another key: their endpoints need another number."""


Listener = Callable[[IdentityChange], None]


class KnownIdentities:
    """All identities, and which of them are in use on this node.

    A listener is called in the order of changes, under this object's lock: it must not wait for anything but a queue.
    """

    def __init__(self) -> None:
        self._order = threading.RLock()
        self._by_number: dict[int, KnownIdentity] = {}
        self._by_key: dict[IdentityKey, tuple[int, ...]] = {}
        self._in_use: frozenset[int] = frozenset()
        self._shown: dict[int, IdentityKey] = {}
        self._heard_revision = 0
        self._listeners: list[Listener] = []

    def __len__(self) -> int:
        return len(self._shown)

    def get(self, number: int) -> KnownIdentity | None:
        """Find by number."""
        return self._by_number.get(number)

    def numbers(self, key: IdentityKey) -> tuple[int, ...]:
        """Give the numbers of a key, lowest first: one, or more after a race that did no harm."""
        return self._by_key.get(key, ())

    def facts(self) -> list[IdentityFacts]:
        """Give all identities but the reserved ones, lowest number first."""
        return [key.facts(number) for number, key in sorted(self._shown.copy().items())]

    @property
    def in_use(self) -> frozenset[int]:
        """The numbers that endpoints of this node have, or are about to have."""
        return self._in_use

    def listen(self, listener: Listener) -> None:
        """Tell `listener` of all that is known, then of every change."""
        with self._order:
            # Under the lock: a change between the first list and the registration would be lost.
            listener(IdentityChange(added=tuple(self.facts())))
            self._listeners.append(listener)

    def set_in_use(self, numbers: Iterable[int]) -> None:
        """Say which numbers this node uses; missing ones that it no longer uses are forgotten."""
        with self._order:
            before, self._in_use = self._in_use, frozenset(numbers)
            left = before - self._in_use
            for number in left:
                known = self._by_number.get(number)
                if known is not None and not known.is_stored:
                    self._drop(known)
            self._tell(before ^ self._in_use)

    def adopt(self, number: int, key: IdentityKey) -> None:
        """Take over what an endpoint of this node has from before a restart: it holds although the store is away."""
        with self._order:
            self._in_use |= {number}
            if number not in self._by_number:
                self._put(KnownIdentity(number, key))
            self._tell([number])

    def learn(self, stored: StoredObject) -> None:
        """Take in an object as the store has it; an older state than the known one changes nothing."""
        with self._order:
            if (number := self._learn(stored)) is not None:
                self._tell([number])

    def apply(self, event: StoreEvent) -> None:
        """Take in one change from the watch."""
        if not event.deleted:
            self.learn(event.object)
            self._heard_revision = event.revision
            return
        number = read_number(event.object.key)
        with self._order:
            self._heard_revision = event.revision
            known = self._by_number.get(number or 0)
            # A number that was made anew since has a higher revision than the deletion of the old object.
            if known is not None and known.revision <= event.revision:
                self._lose(known)
                self._tell([known.number])

    def replace(self, objects: Sequence[StoredObject], revision: int) -> None:
        """Take in a whole list: what it lacks and was not written since is gone."""
        with self._order:
            # Revisions of one kind only grow in one store. A lower one means that the store was replaced or restored.
            if revision < self._heard_revision:
                self._forget_revisions()
            self._heard_revision = revision
            listed = {read_number(stored.key) for stored in objects}
            for known in list(self._by_number.values()):
                # This agent may have made a number after the list was read. The list is older than that write and
                # cannot have it.
                if known.number not in listed and known.revision <= revision:
                    self._lose(known)
            touched = set(self._shown)
            touched.update(filter(None, map(self._learn, objects)))
            self._tell(touched)

    def _forget_revisions(self) -> None:
        """The store went back in time (another file under its name): nothing that was known of it counts."""
        for known in self._by_number.values():
            self._by_number[known.number] = KnownIdentity(known.number, known.key)

    def _learn(self, stored: StoredObject) -> int | None:
        known = decode(stored)
        if known is None:
            return None
        before = self._by_number.get(known.number)
        if before is not None and before.revision > known.revision:
            return None
        self._put(known)
        return known.number

    def _put(self, known: KnownIdentity) -> None:
        before = self._by_number.get(known.number)
        if before is not None and before.key != known.key:
            self._drop(before)
        self._by_number[known.number] = known
        numbers = {*self._by_key.get(known.key, ()), known.number}
        self._by_key[known.key] = tuple(sorted(numbers))

    def _lose(self, known: KnownIdentity) -> None:
        if known.number in self._in_use:
            self._by_number[known.number] = KnownIdentity(known.number, known.key)
        else:
            self._drop(known)

    def _drop(self, known: KnownIdentity) -> None:
        self._by_number.pop(known.number, None)
        rest = tuple(number for number in self._by_key.get(known.key, ()) if number != known.number)
        if rest:
            self._by_key[known.key] = rest
        else:
            self._by_key.pop(known.key, None)

    def _tell(self, touched: Iterable[int]) -> None:
        """Tell listeners how these numbers differ now from what they were told last."""
        added, removed, reassigned = [], [], []
        for number in sorted(touched):
            known = self._by_number.get(number)
            before = self._shown.get(number)
            if known is None or (known.is_resting and number not in self._in_use):
                if before is not None:
                    del self._shown[number]
                    removed.append(number)
            elif before != known.key:
                self._shown[number] = known.key
                added.append(known.key.facts(number))
                if before is not None and number in self._in_use:
                    reassigned.append(number)
        if added or removed:
            change = IdentityChange(tuple(added), tuple(removed), tuple(reassigned))
            for listener in self._listeners:
                listener(change)


def object_key(number: int) -> ObjectKey:
    """Name the object of a number."""
    return ObjectKey(IDENTITIES, "", str(number))


def read_number(key: ObjectKey) -> int | None:
    """Read the number from an object's name; None when it is none."""
    name = key.name
    return int(name) if name.isascii() and name.isdigit() and str(int(name)) == name else None


def make_object(number: int, key: IdentityKey) -> StoredObject:
    """Give the object that says what a number means."""
    metadata = {
        "name": str(number),
        "labels": {HASH_LABEL: key.digest.hex()[:HASH_DIGITS]},
    }
    document = {
        "apiVersion": API_VERSION,
        "kind": "Identity",
        "metadata": metadata,
        "spec": write_spec(key),
    }
    return StoredObject(key=object_key(number), document=document)


def decode(stored: StoredObject) -> KnownIdentity | None:
    """Read an object; None when it is not one of ours to understand (its number is taken all the same)."""
    number = read_number(stored.key)
    if number is None:
        return None
    try:
        key = value_of(stored, IdentityKey) or read_spec(stored.document)
    except InvalidRequest:
        return None
    names = annotations(stored)
    return KnownIdentity(
        number, key, stored.revision, UNUSED_SINCE in names, RESTING_SINCE in names
    )


def annotations(stored: StoredObject) -> Mapping[str, str]:
    """Give an object's annotations."""
    return members_of(members_of(stored.document, "metadata"), "annotations")
