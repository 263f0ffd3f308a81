"""What one reader gets of the shared watches: changes in order, faults, and when to list again.

Made by `store.kubernetes.store`. Filled from the loop's thread by `store.kubernetes.streams`, read by one thread.
Invariant: each change that is returned follows the previous one of its kind without a gap, or Compacted is raised.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from podwire.model.closing import Closing
from podwire.model.errors import PodwireError, Unavailable
from podwire.model.store import Compacted, Revisions, StoreEvent

WAITING_MAX: Final = 20_000
"""Changes that wait for the reader. A slower one lists again: others read the same stream."""

Batch = tuple[str, Sequence[StoreEvent], int]
"""A kind, changes of it, and the revision up to which everything was given with them."""


class KubernetesWatch(Closing):
    """Implements `model.store.Watch`, filled by streams.

    They call `heard`, `hand`, `fail` and `compact` under the hub's lock, so none of these may call the hub.
    """

    def __init__(self, after: Revisions, forget: "Callable[[KubernetesWatch], None]") -> None:
        self._revisions = dict(after)
        """Given to the reader."""
        self._heard = dict(after)
        """Handed over by the streams."""
        self._forget = forget
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._waiting = 0
        self._errors: dict[str, PodwireError] = {}
        self._settled: set[str] = set()
        self._compacted: dict[str, str] = {}
        self._is_news = False
        self._failing: Mapping[str, str] = {}
        self._closed = False

    @property
    def revisions(self) -> Revisions:
        """Up to which revision of each kind everything was given."""
        return dict(self._revisions)

    @property
    def failing(self) -> Mapping[str, str]:
        """Kinds that cannot be followed now while others can, and why, as of the last `next`."""
        return self._failing

    def wait_until_open(self, timeout_s: float) -> None:
        """Return when every kind is watched, or it is known that it cannot be."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._settled) == len(self._heard) or self._compacted or self._closed,
                timeout_s,
            )

    def stop_waiting(self) -> None:
        """Have `wait_until_open` return."""
        with self._changed:
            self._settled.update(self._heard)
            self._changed.notify_all()

    def next(self, timeout_s: float) -> Sequence[StoreEvent]:
        """Give what has happened; see `model.store.Watch`."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._closed:
                events = self._take()
                self._failing = {kind: error.told for kind, error in self._errors.items()}
                if events:
                    return events
                if self._compacted:
                    raise self._end_compacted()
                is_news, self._is_news = self._is_news, False
                left_s = end_s - time.monotonic()
                if is_news or left_s <= 0:
                    self._raise_if_all_fail()
                    return ()
                self._changed.wait(left_s)
        return ()

    def close(self) -> None:
        """Stop watching; a waiting `next` on another thread returns ()."""
        with self._changed:
            self._closed = True
            self._batches.clear()
            self._changed.notify_all()
        self._forget(self)

    def heard(self, kind: str) -> int:
        """Give the revision up to which this was handed everything of a kind."""
        return self._heard[kind]

    def hand(self, kind: str, events: Sequence[StoreEvent], revision: int) -> None:
        """Take changes, perhaps some that are known already, and the revision up to which they are all."""
        with self._changed:
            # A stream that begins again for another reader hands over what this one knows already.
            if self._closed or kind in self._compacted or revision <= self._heard[kind]:
                return
            fresh = tuple(event for event in events if event.revision > self._heard[kind])
            self._heard[kind] = revision
            self._waiting += len(fresh)
            if self._waiting > WAITING_MAX:
                self._compacted[kind] = f"{self._waiting} changes wait to be read"
            else:
                self._batches.append((kind, fresh, revision))
            self._changed.notify_all()

    def fail(self, kind: str, error: PodwireError | None) -> None:
        """Hear that a kind cannot be followed now, or (None) that it can."""
        with self._changed:
            self._settled.add(kind)
            if error is None:
                self._errors.pop(kind, None)
            else:
                # The reader hears of a break once, and of none if the watch came back before it looked.
                self._is_news |= kind not in self._errors
                self._errors[kind] = error
            self._changed.notify_all()

    def compact(self, kind: str, reason: str) -> None:
        """Hear that changes of a kind may have been missed."""
        with self._changed:
            self._compacted[kind] = reason
            self._changed.notify_all()

    def _take(self) -> Sequence[StoreEvent]:
        """Give all that waits, and note how far it is."""
        found: list[StoreEvent] = []
        while self._batches:
            kind, events, revision = self._batches.popleft()
            found += events
            self._revisions[kind] = max(self._revisions[kind], revision)
        self._waiting = 0
        return found

    def _raise_if_all_fail(self) -> None:
        if self._errors and len(self._errors) == len(self._heard):
            self._failing = {}
            error = next(iter(self._errors.values()))
            raise Unavailable(error.message, hint=error.hint)

    def _end_compacted(self) -> Compacted:
        told = "; ".join(f"{kind} {reason}" for kind, reason in self._compacted.items())
        return Compacted(
            f"watch {told}",
            hint="list the objects again and watch from the revision of that list",
            kinds=self._compacted,
        )
