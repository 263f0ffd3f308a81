"""From keys to numbers that mean the same on every node, over the store's contract.

Called by the resolver, never under the node's turn, because an unknown key costs calls to the store. Protocol
(docs/identity.md): the candidates of a key are hashes of it. The object of a number is created only if there is none.
If it exists with the same key, the number is adopted; if it has another key, the next candidate is tried. Invariant:
unique names give a number one key. A number with a mark is used only after the mark was removed by compare-and-swap.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from podwire.control.identity.key import IdentityKey, NumberSpace
from podwire.control.identity.known import (
    RESTING_SINCE,
    UNUSED_SINCE,
    KnownIdentities,
    decode,
    make_object,
    object_key,
)
from podwire.model.errors import Conflict, NotFound, Unavailable
from podwire.model.store import Store, UnreadableObject

SILENCE_S: Final = 30 * 60.0
"""After a watch was silent for so long, marks may have been missed: only numbers in use here are used."""
GIVEN_S: Final = 10 * 60.0
"""How long a number counts as used after it was given: longer than any ADD takes to write it into its record."""
OTHER_S: Final = 0.5
"""How long one call waits for another one about the same key, so that its caller can look again."""
ATTEMPTS: Final = 16
"""How often one number is looked at again because somebody else changed it at the same moment."""


class IdentitiesExhausted(Unavailable):
    """All numbers that a key may have mean other keys."""


@dataclass
class Counts:
    """What happened since the start, for metrics."""

    allocated: int = 0
    """Numbers that this agent was the first to make."""
    adopted: int = 0
    """Numbers that another agent had made a moment before."""
    collisions: int = 0
    """Candidates that meant another key."""
    waits: int = 0
    """Resolutions that needed the store."""
    unavailable: int = 0
    """Resolutions that gave up waiting for the store."""
    exhausted: int = 0
    remade: int = 0
    """Numbers in use that were missing from the store and were made again."""


@dataclass
class IdentityAllocator:
    """Finds, makes and keeps the numbers of keys."""

    store: Store
    known: KnownIdentities
    space: NumberSpace = field(default_factory=NumberSpace)
    jitter_s: float = 0.0
    """How long to wait at most for somebody else to make the key's number; 0 where all agents share one file."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._lock = threading.Condition()
        self._in_flight: set[IdentityKey] = set()
        self._given: dict[int, float] = {}
        self._heard_s = float("-inf")

    def heard(self) -> None:
        """Say that the store's watch answered now."""
        self._heard_s = self.clock()

    def find(self, key: IdentityKey) -> int | None:
        """Give the number of a key without the store; None when the store must be asked."""
        fresh = self.clock() - self._heard_s <= SILENCE_S
        for number in self.known.numbers(key):
            known = self.known.get(number)
            if known is None or known.key != key:
                continue
            # A number that is in use here is safe whatever the watch has missed: this node holds it, and no collector
            # gives up what a node holds.
            if number in self.known.in_use or (fresh and known.is_stored and not known.is_marked):
                self._give(number)
                return number
        return None

    def allocate(self, key: IdentityKey) -> int:
        """Give the number of a key, making it if need be.

        Raises Unavailable when the store is away, IdentitiesExhausted when every candidate means another key.
        """
        with self._alone(key):
            number = self.find(key)
            # Many nodes meet a new label set at the same moment, when a Deployment starts. Each waits a different
            # time, and most find the number that one of them made.
            if number is None and self.jitter_s:
                self.sleep(random.uniform(0, self.jitter_s))
                number = self.find(key)
            return self._make(key) if number is None else number

    def adopt(self, number: int, key: IdentityKey) -> None:
        """Keep the number that an endpoint of this node had before the restart."""
        self.known.adopt(number, key)

    def set_held(self, numbers: Iterable[int]) -> frozenset[int]:
        """Say which numbers the endpoints of this node have; gives those in use, with what was given a moment ago."""
        oldest = self.clock() - GIVEN_S
        with self._lock:
            self._given = {number: when for number, when in self._given.items() if when >= oldest}
            self.known.set_in_use({*numbers, *self._given})
            return self.known.in_use

    def reassert(self) -> None:
        """Make again what is in use and missing in the store, and take marks away from what is in use.

        A number that means another key by now is learnt as such; listeners hear of it.
        """
        for number in sorted(self.known.in_use):
            known = self.known.get(number)
            if known is not None and (not known.is_stored or known.is_marked):
                claimed = self._claim(number, known.key)
                self.counts.remade += claimed and not known.is_stored

    def _make(self, key: IdentityKey) -> int:
        for number in self.known.numbers(key):
            if self._take_over(number, key):
                self._give(number)
                return number
        for number in self.space.candidates(key):
            if self._claim(number, key):
                self._give(number)
                return number
            self.counts.collisions += 1
        self.counts.exhausted += 1
        raise IdentitiesExhausted(
            f"number identity {key.text.splitlines()[0]!r}: all its candidate numbers stand for other labels",
            hint="too many identities: look at `podwire identity list`, and leave labels that differ"
            " from pod to pod out of identity_label_filter",
        )

    def _claim(self, number: int, key: IdentityKey) -> bool:
        """Make the object of a number, or adopt it; False when it means another key."""
        for _ in range(ATTEMPTS):
            try:
                self.known.learn(self.store.create(make_object(number, key)))
            except Conflict:
                # The create lost a race, or the number means another key. Only the object itself tells which.
                taken = self._take_over(number, key)
                if taken is None:
                    continue
                self.counts.adopted += taken
                return taken
            self.counts.allocated += 1
            return True
        raise Unavailable(f"number identity {number}: others keep changing it")

    def _take_over(self, number: int, key: IdentityKey) -> bool | None:
        """Use a number that exists, without its mark; False when it means another key, None when it is gone."""
        for _ in range(ATTEMPTS):
            try:
                stored = self.store.get(object_key(number))
            except UnreadableObject:
                return False  # whatever it means: the number is taken
            if stored is None:
                return None
            self.known.learn(stored)
            stored_identity = decode(stored)
            if stored_identity is None or stored_identity.key != key:
                return False
            if not (stored_identity.is_marked or stored_identity.is_resting):
                return True
            try:
                unmarked = {"metadata": {"annotations": {UNUSED_SINCE: None, RESTING_SINCE: None}}}
                self.known.learn(
                    self.store.patch(stored.key, unmarked, revision=stored.revision, uid=stored.uid)
                )
                return True
            except Conflict:
                continue
            except NotFound:
                return None
        raise Unavailable(f"number identity {number}: others keep changing it")

    def _give(self, number: int) -> None:
        with self._lock:
            self._given[number] = self.clock()
            if number not in self.known.in_use:
                self.known.set_in_use({*self.known.in_use, number})

    @contextmanager
    def _alone(self, key: IdentityKey) -> Iterator[None]:
        """Let one thread at a time ask the store for a key; the others find it made, or come again: Unavailable."""
        with self._lock:
            if not self._lock.wait_for(lambda: key not in self._in_flight, OTHER_S):
                raise Unavailable("another request asks the store for the same labels; it is slow")
            self._in_flight.add(key)
        try:
            yield
        finally:
            with self._lock:
                self._in_flight.discard(key)
                self._lock.notify_all()
