"""What one duty follows of the store: some kinds, for one listener.

The agent has one watch of the store (`agent.duties.shared_watch`), whatever number of duties follow it; a follower that
is given none has one of its own. The follower decides nothing about objects: lists and changes come to its `Listener`
in order, one call at a time. Invariant: nothing is missed. After a gap, and after a listener that failed, all kinds of
the follower are listed again, and no change that a list already contains comes after it. An object that cannot be read
counts as its last readable version (`agent.duties.unreadable`).
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from podwire.agent.duties.keeper import KindList
from podwire.agent.duties.shared_watch import Change, SharedWatch, choose_delay_s
from podwire.agent.duties.unreadable import Unreadable
from podwire.agent.duties.worker import WorkingDuty
from podwire.model.errors import PodwireError, Unavailable
from podwire.model.store import Revisions, Store, StoredObject, StoreEvent

__all__ = ["FollowingDuty", "KindList", "Listener", "StoreFollower"]

_log = logging.getLogger(__name__)


class Listener(Protocol):
    """What a follower tells. One call at a time: first from `load`'s caller, then from the thread of the watch."""

    def on_lists(self, lists: Sequence[KindList], /) -> None:
        """Take whole lists in the place of all that was known of their kinds."""

    def on_events(self, events: Sequence[StoreEvent], revisions: Revisions, /) -> None:
        """Take changes; everything of each kind up to its revision was handed over with them. Called at each answer of
        the store, also when there are none: the store is there, and has nothing newer."""

    def on_away(self, error: PodwireError, /) -> None:
        """Hear that the store cannot be followed now, at each failed try; what is known stays."""

    def on_back(self) -> None:
        """Hear that the store is there (again), after everything was listed or the watch has answered."""


class StoreFollower:
    """Follows `kinds` of one store for one listener.

    `shared`: the watch that this follower has together with others. `tell_unreadable`: of which unreadable objects the
    listener is told, too, as changes after what was last read of them. `recalls`: whether it hands over what the store
    said in an earlier life when the store is away at the start.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        kinds: Sequence[str],
        listener: Listener,
        *,
        shared: SharedWatch | None = None,
        tell_unreadable: bool | Callable[[StoredObject], bool] = False,
        recalls: bool = True,
    ) -> None:
        self.name = name
        self.kinds = tuple(kinds)
        self.shared = shared or SharedWatch(store, name=name)
        self._listener = listener
        self._tell_unreadable = tell_unreadable
        self._recalls = recalls
        self._is_there: bool | None = None
        self._is_whole = False
        self._is_lacking = True
        """Whether lists have to come before changes make sense."""
        self._failures = 0
        self._again_s = 0.0

    @property
    def unreadable(self) -> Unreadable:
        """Objects that cannot be read, of all that the watch follows."""
        return self.shared.unreadable

    @property
    def revisions(self) -> Revisions:
        """Up to which revision of each kind everything was handed over; none before the first list."""
        known = self.shared.revisions
        return {kind: known[kind] for kind in self.kinds if kind in known}

    @property
    def is_whole(self) -> bool:
        """Whether all kinds were handed over, as the store has them or as it said last in an earlier life."""
        return self._is_whole

    def load(self) -> bool:
        """List everything once, before `start`; what the store said last when it is away. Raises all but Unavailable.

        False: the store is away, and some kind was never listed before. The watch goes on trying.
        """
        self.shared.join(self)
        try:
            self.shared.load()
        except Unavailable as error:
            self.note_away(error)
            return self._load_remembered()
        return True

    def recall(self, objects: Iterable[StoredObject]) -> None:
        """Say what was last read of objects in an earlier life, where no memory tells; before `load`."""
        self.shared.recall(objects)

    def step(self, timeout_s: float) -> bool:
        """List if need be, else wait for changes; tells whether anything came. Raises what store and listener raise."""
        self.shared.join(self)
        return self.shared.step(timeout_s)

    def start(self) -> None:
        """Have the watch go on, on a thread of its own."""
        self.shared.join(self)
        self.shared.start()

    def stop(self) -> None:
        """Stop telling the listener. The last follower to stop ends the watch; what was heard is kept."""
        self.shared.leave(self)

    def list_again(self) -> None:
        """Have everything listed again, soon; from any thread."""
        self._is_lacking = True
        self._again_s = 0.0

    # What the watch asks and tells, on its thread

    def is_due(self, now_s: float) -> bool:
        """Tell whether lists have to come, and it is time."""
        return self._is_lacking and now_s >= self._again_s

    @property
    def again_s(self) -> float | None:
        """When lists are due; None when nothing is lacking."""
        return self._again_s if self._is_lacking else None

    def take_lists(self, lists: Mapping[str, KindList], unreadable: Sequence[StoredObject]) -> None:
        """Hand lists over: of all kinds, or of some that others needed again. Raises what the listener does."""
        mine = [lists[kind] for kind in self.kinds if kind in lists]
        # A follower that lacks lists takes those of all its kinds together: a list that another one needed is not
        # enough.
        if not mine or (self._is_lacking and len(mine) < len(self.kinds)):
            return
        # Before the listener is called: `list_again` on another thread may ask for the next lists meanwhile.
        was_lacking, self._is_lacking = self._is_lacking, False
        self._listener.on_lists(mine)
        told = [
            StoreEvent(stored, stored.revision) for stored in unreadable if self._is_told_of(stored)
        ]
        self._listener.on_events(told, self.revisions)
        self._is_whole = self._is_whole or was_lacking
        self.note_back()

    def take_changes(self, changes: Sequence[Change], failing: Mapping[str, str]) -> None:
        """Hand changes over, as far as they are of this follower's kinds. Raises what the listener does."""
        if self._is_lacking:
            return
        told = [
            readable or raw
            for raw, readable in changes
            if raw.object.key.kind in self.kinds
            and (readable is not None or self._is_told_of(raw.object))
        ]
        self._listener.on_events(told, self.revisions)
        reasons = [failing[kind] for kind in self.kinds if kind in failing]
        if reasons:
            self.note_away(Unavailable("; ".join(dict.fromkeys(reasons))))
        else:
            self.note_back()

    def note_away(self, error: PodwireError) -> None:
        """Tell that the store cannot be followed now."""
        self._is_there = False
        self._listener.on_away(error)

    def note_back(self) -> None:
        """Tell, once, that it can be."""
        self._failures = 0
        if not self._is_there:
            self._is_there = True
            self._listener.on_back()

    def lack(self, error: PodwireError | None = None) -> None:
        """Note that lists must come again; after a failure not at once."""
        self._is_lacking = True
        if error is not None:
            # A listener that fails at what the store has would fail again at once.
            self._again_s = time.monotonic() + choose_delay_s(self._failures)
            self._failures += 1
            self.note_away(error)

    def _is_told_of(self, unreadable: StoredObject) -> bool:
        tell = self._tell_unreadable
        wanted = tell if isinstance(tell, bool) else tell(unreadable)
        return unreadable.key.kind in self.kinds and wanted

    def _load_remembered(self) -> bool:
        """Hand over what was kept of each kind. A kind of which nothing was is not handed over at all."""
        if not self._recalls:
            return False
        # Whole for policies: without one that cannot be read, more would be allowed than is meant.
        remembered = self.shared.load_remembered(self.kinds, whole=self._tell_unreadable is True)
        if remembered:
            self._listener.on_lists(remembered)
        self._is_whole = len(remembered) == len(self.kinds)
        told = {"task": self.name, "count": sum(len(kind_list.objects) for kind_list in remembered)}
        if self._is_whole:
            _log.warning("the store is away; what it said last is in force", extra=told)
        else:
            _log.warning("the store is away, and some of it was never read", extra=told)
        return self._is_whole


class FollowingDuty(WorkingDuty):
    """Base of a duty that is told of changes by its follower, and works on a thread of its own."""

    follower: StoreFollower

    def start(self) -> None:
        # First: a wake-up before the start is lost, and the follower may tell of something at once.
        super().start()
        self.follower.start()

    def stop(self) -> None:
        """End the threads; what is in force stays."""
        self.follower.stop()
        super().stop()

    def on_away(self, error: PodwireError) -> None:
        """Go on with what is known."""

    def on_back(self) -> None:
        """Go on."""
