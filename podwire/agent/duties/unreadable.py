"""Objects of the store that cannot be read: withheld from the listeners, reported, and passed on once repaired.

Used by `agent.duties.shared_watch`, on its thread; each watch has one. Decides by checking the object alone. Invariant:
an unreadable object counts as its last readable version. If there was none, it counts as its stand-in: a policy closes
what it could select, and every other object counts as absent. No other object is affected.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from podwire.agent.health import WarningList
from podwire.control.policy.reading import Unenforceable
from podwire.model.store import ObjectKey, StoredObject, StoreEvent, value_of
from podwire.model.store.kinds import IDENTITY, IP_ADDRESS, IP_BLOCK

REASON_MAX_CHARACTERS: Final = 240

_IN_USE: Final = (IP_BLOCK.plural, IP_ADDRESS.plural, IDENTITY.plural)
"""When one of these is deleted, others may take what pods still have."""

Read = Callable[[StoredObject], tuple[StoredObject, str]]
"""Gives an object decoded, or as it is and why it cannot be read."""
StandIn = Callable[[StoredObject, str], StoredObject | None]
"""Gives what counts in place of an object that never could be read, for the reason given; None: it counts as absent."""
FindLast = Callable[[ObjectKey], StoredObject | None]
Warn = Callable[[str, str], None]
"""Shows a message under a key until an empty one takes it back."""

_log = logging.getLogger(__name__)


def read_as_stored(stored: StoredObject) -> tuple[StoredObject, str]:
    """Decode nothing, and ask no more than what the store itself could not read."""
    return stored, stored.fault


def advise(key: ObjectKey) -> str:
    """Say what people can do about an object that is of no use as it is."""
    where = f" -n {key.namespace}" if key.namespace else ""
    then = " once nothing uses it" if key.kind in _IN_USE else ""
    return f"Correct it, or delete it{then}: podwire delete {key.kind} {key.name}{where}"


class Reading(msgspec.Struct, frozen=True):
    """How a watch reads objects, and what becomes of one that cannot be read."""

    read: Read = read_as_stored
    stand_in: StandIn = lambda _stored, _fault: None
    warn: Warn = lambda _key, _message: None
    is_own: Callable[[StoredObject], bool] = lambda _stored: False
    """Whether this node publishes an object itself: it is then repaired here, and not reported."""


AS_STORED: Final = Reading()


class Unreadable:
    """The unreadable objects of some kinds. `find_last` gives what was last read of one."""

    def __init__(self, name: str, find_last: FindLast, reading: Reading) -> None:
        self._reading = reading
        self._name = name
        self._find_last = find_last
        self._faults: dict[ObjectKey, str] = {}
        self._bad: dict[ObjectKey, StoredObject] = {}
        self._shown = WarningList(f"unreadable-{name}", "more objects of the store cannot be read")

    @property
    def faults(self) -> Mapping[ObjectKey, str]:
        """Which objects cannot be read, and why."""
        return self._faults

    @property
    def objects(self) -> Sequence[StoredObject]:
        """The unreadable objects as the store has them."""
        return list(self._bad.values())

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._bad

    def sift_list(self, kind: str, objects: Iterable[StoredObject]) -> list[StoredObject]:
        """Put what was last read in the place of what cannot be read now."""
        good: list[StoredObject] = []
        bad: dict[ObjectKey, StoredObject] = {}
        for stored in objects:
            readable, fault = self._reading.read(stored)
            if not fault:
                good.append(readable)
                continue
            bad[stored.key] = stored
            standing = self._note(stored, fault)
            # Leaving the object out would withdraw it: pods of a policy that somebody has mistyped would be open.
            if standing is not None:
                good.append(standing)
        for key in [key for key in self._bad if key.kind == kind and key not in bad]:
            self._forget(key)
        self._bad.update(bad)
        return good

    def sift_remembered(self, objects: Sequence[StoredObject]) -> list[StoredObject]:
        """Read what was kept of an earlier life. What could not be read then cannot be read now, and counts as then."""
        kept: list[StoredObject] = []
        for stored in objects:
            readable, fault = self._reading.read(stored)
            if fault:
                self._bad[stored.key] = stored
            kept.append((self._note(stored, fault) or stored) if fault else readable)
        return kept

    def sift_event(self, event: StoreEvent) -> StoreEvent | None:
        """Give a change that can be told; None when what it wrote cannot be read, and what was before it stands."""
        stored = event.object
        readable, fault = self._reading.read(stored)
        if event.deleted:
            self._forget(stored.key)
            # Listeners know what was last read, and are told that this is gone.
            last = self._find_last(stored.key) if fault else None
            return event if last is None else StoreEvent(last, event.revision, deleted=True)
        if not fault:
            self._forget(stored.key)
            return StoreEvent(readable, event.revision)
        self._bad[stored.key] = stored
        standing = self._note(stored, fault)
        # A stand-in is of this revision. What was last read is of an earlier one, and everybody has it.
        if standing is None or standing.revision != stored.revision:
            return None
        return StoreEvent(standing, event.revision)

    def show(self) -> None:
        """Let `podwire status` name what there is."""
        self._shown.show(self._reading.warn, [self._faults[key] for key in sorted(self._faults)])

    def _find_standing(self, stored: StoredObject, fault: str) -> tuple[StoredObject | None, str]:
        """Give what counts in place of an unreadable object, and say so for people."""
        last = self._find_last(stored.key)
        if last is not None:
            # What was heard last may itself have been a stand-in.
            readable, fault_of_last = self._reading.read(last)
            if not fault_of_last:
                return readable, "what was last read of it stays in force"
        standing = self._reading.stand_in(stored, fault)
        closing = None if standing is None else value_of(standing, Unenforceable)
        return standing, f"it closes {closing.closes}" if closing else "it counts as absent"

    def _note(self, stored: StoredObject, fault: str) -> StoredObject | None:
        """Let people know of an unreadable object; gives what counts in its place."""
        standing, state = self._find_standing(stored, fault)
        if self._reading.is_own(stored):
            return standing
        key = stored.key
        message = (
            f"{key} in the store cannot be read: {fault[:REASON_MAX_CHARACTERS]}; {state}."
            f" {advise(key)}"
        )
        # Each list finds the same fault again; it is news only once.
        if self._faults.get(key) != message:
            _log.error(
                "an object of the store cannot be read",
                extra={"task": self._name, "object": str(key), "error": message},
            )
        self._faults[key] = message
        return standing

    def _forget(self, key: ObjectKey) -> None:
        self._bad.pop(key, None)
        if self._faults.pop(key, None) is not None:
            _log.warning(
                "an object of the store can be read again, or is gone",
                extra={"task": self._name, "object": str(key)},
            )
