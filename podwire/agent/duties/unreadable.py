"""Objects of the store that cannot be read: withheld from the listeners, reported, and passed on once repaired.

Used by `agent.duties.shared_watch`, on its thread; each watch has one. Decides by checking the object alone. Invariant:
an unreadable object counts as its last readable version, or as absent if there was none. No other object is affected.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from podwire.model.store import ObjectKey, StoredObject, StoreEvent
from podwire.model.store.kinds import IDENTITY, IP_ADDRESS, IP_BLOCK

SHOWN_MAX: Final = 8
"""So many are named one by one in `podwire status`."""
REASON_MAX_CHARACTERS: Final = 240

_IN_USE: Final = (IP_BLOCK.plural, IP_ADDRESS.plural, IDENTITY.plural)
"""When one of these is deleted, others may take what pods still have."""

Read = Callable[[StoredObject], tuple[StoredObject, str]]
"""Gives an object decoded, or as it is and why it cannot be read."""
FindLast = Callable[[ObjectKey], StoredObject | None]
Warn = Callable[[str, str], None]
"""Shows a message under a key until an empty one takes it back."""

_log = logging.getLogger(__name__)


def read_as_stored(stored: StoredObject) -> tuple[StoredObject, str]:
    """Decode nothing, and ask no more than what the store itself could not read."""
    return stored, stored.fault


class Unreadable:
    """The unreadable objects of some kinds. `find_last` gives what was last read of one."""

    def __init__(self, name: str, find_last: FindLast) -> None:
        self.read: Read = read_as_stored
        self.warn: Warn = lambda _key, _message: None
        self.is_own: Callable[[StoredObject], bool] = lambda _stored: False
        """Whether this node publishes an object itself: it is then repaired here, and not reported."""
        self._name = name
        self._find_last = find_last
        self._faults: dict[ObjectKey, str] = {}
        self._bad: dict[ObjectKey, StoredObject] = {}
        self._shown = 0

    @property
    def faults(self) -> Mapping[ObjectKey, str]:
        """Which objects cannot be read, and why."""
        return self._faults

    @property
    def objects(self) -> Sequence[StoredObject]:
        """The unreadable objects as the store has them."""
        return list(self._bad.values())

    def sift_list(self, kind: str, objects: Sequence[StoredObject]) -> list[StoredObject]:
        """Put what was last read in the place of what cannot be read now."""
        good: list[StoredObject] = []
        bad: dict[ObjectKey, StoredObject] = {}
        for stored in objects:
            readable, fault = self.read(stored)
            if not fault:
                good.append(readable)
                continue
            bad[stored.key] = stored
            last = self._find_last(stored.key)
            # Leaving the object out would withdraw it: pods of a policy that somebody has mistyped would be open.
            if last is not None:
                good.append(last)
            self._note(stored, fault, has_last=last is not None)
        for key in [key for key in self._bad if key.kind == kind and key not in bad]:
            self._forget(key)
        self._bad.update(bad)
        return good

    def sift_event(self, event: StoreEvent) -> StoreEvent | None:
        """Give a change that can be told; None when what it wrote cannot be read."""
        stored = event.object
        readable, fault = self.read(stored)
        if event.deleted:
            self._forget(stored.key)
            # Listeners know what was last read, and are told that this is gone.
            last = self._find_last(stored.key) if fault else None
            return event if last is None else StoreEvent(last, event.revision, deleted=True)
        if not fault:
            self._forget(stored.key)
            return StoreEvent(readable, event.revision)
        self._bad[stored.key] = stored
        self._note(stored, fault, has_last=self._find_last(stored.key) is not None)
        return None

    def show(self) -> None:
        """Let `podwire status` name what there is."""
        lines = [self._faults[key] for key in sorted(self._faults)]
        shown = lines[:SHOWN_MAX]
        if len(lines) > len(shown):
            shown.append(f"{len(lines) - len(shown)} more objects of the store cannot be read")
        for index in range(max(len(shown), self._shown)):
            key = f"unreadable-{self._name}-{index}"
            self.warn(key, shown[index] if index < len(shown) else "")
        self._shown = len(shown)

    def _note(self, stored: StoredObject, fault: str, *, has_last: bool) -> None:
        if self.is_own(stored):
            return
        key = stored.key
        state = "what was last read of it stays in force" if has_last else "it counts as absent"
        where = f" -n {key.namespace}" if key.namespace else ""
        then = " once nothing uses it" if key.kind in _IN_USE else ""
        message = (
            f"{key} in the store cannot be read: {fault[:REASON_MAX_CHARACTERS]}; {state}."
            f" Correct it, or delete it{then}: podwire delete {key.kind} {key.name}{where}"
        )
        # Each list finds the same fault again; it is news only once.
        if self._faults.get(key) != message:
            _log.error(
                "an object of the store cannot be read",
                extra={"task": self._name, "object": str(key), "error": message},
            )
        self._faults[key] = message

    def _forget(self, key: ObjectKey) -> None:
        self._bad.pop(key, None)
        if self._faults.pop(key, None) is not None:
            _log.warning(
                "an object of the store can be read again, or is gone",
                extra={"task": self._name, "object": str(key)},
            )
