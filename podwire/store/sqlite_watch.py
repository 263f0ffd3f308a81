"""Watches of a sqlite store: read the log of changes, sleep until somebody writes, read again.

Made by `store.sqlite`. Never writes. A wake-up is only a hint: the log is also read every second, so a lost wake-up
delays a change and loses nothing. Invariant: each change that is returned follows the previous one without a gap, or
Compacted is raised.
"""

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from podwire.model.closing import Closing
from podwire.model.store import Compacted, Revisions, StoredObject, StoreEvent, Waker
from podwire.store.sqlite_file import StoreFile

LOOK_EVERY_S: Final = 1.0
EVENTS_MAX: Final = 250
"""Changes that one call gives at most; the next call goes on. More would only be in memory together."""

_Change = TypeVar("_Change")
ReadObject = Callable[[Sequence[object]], StoredObject]
"""Makes an object of kind, namespace, name, uid, created, revision, document."""


class ThreadWaker:
    """Wakes for writes of this process alone; those of others are seen at the next look."""

    def __init__(self, _path: Path) -> None:
        self._event = threading.Event()

    def wait(self, timeout_s: float) -> None:
        """Return at `wake` or after `timeout_s`."""
        self._event.wait(timeout_s)
        self._event.clear()

    def wake(self) -> None:
        """End `wait` on another thread."""
        self._event.set()

    def close(self) -> None:
        """Nothing is held."""


class FileWatch(Closing, Generic[_Change]):
    """A watch that looks into the file, sleeps until somebody writes or it is time, and looks again."""

    def __init__(self, waker: Waker, forget: Callable[[], None]) -> None:
        self._waker = waker
        self._forget = forget
        self._closed = False
        self._reading = threading.Lock()

    def next(self, timeout_s: float) -> Sequence[_Change]:
        """Give what has happened; see `model.store.Watch`."""
        deadline_s = time.monotonic() + timeout_s
        with self._reading:
            while not self._closed:
                changes, again_s = self._look()
                left_s = deadline_s - time.monotonic()
                if changes or left_s <= 0:
                    return changes
                self._waker.wait(min(left_s, LOOK_EVERY_S, again_s))
        return ()

    def wake(self) -> None:
        """Look now: this process has written."""
        self._waker.wake()

    def close(self) -> None:
        """Stop watching; a waiting `next` on another thread returns ()."""
        self._closed = True
        self._waker.wake()
        with self._reading:
            self._waker.close()
            self._release()
        self._forget()

    @abstractmethod
    def _look(self) -> tuple[Sequence[_Change], float]:
        """Give what has changed, and in how many seconds something may change without a write."""

    def _release(self) -> None:
        """Give back what `_look` needs; it is not called any more."""


class SqliteWatch(FileWatch[StoreEvent]):
    """Implements `model.store.Watch`."""

    def __init__(
        self,
        file: StoreFile,
        waker: Waker,
        *,
        after: Revisions,
        read_object: ReadObject,
        forget: "Callable[[SqliteWatch], None]",
    ) -> None:
        super().__init__(waker, lambda: forget(self))
        self._file = file
        self._after = dict(after)
        self._revision = min(after.values())
        """Of the file: up to which the log was read. What a kind was listed with may be ahead of it."""
        self._read_object = read_object
        # A connection of its own: a watch reads on the thread of its reader, and must not wait for the store's other
        # readers.
        self._connection = file.connect()

    @property
    def revisions(self) -> Revisions:
        """Up to which revision of each kind everything was given."""
        return {kind: max(after, self._revision) for kind, after in self._after.items()}

    @property
    def failing(self) -> Mapping[str, str]:
        """Nothing: a file can be read or not, with all that is in it."""
        return {}

    def _look(self) -> tuple[Sequence[StoreEvent], float]:
        with self._file.reported("watch"):
            self._file.check_same()
            self._connection.execute("BEGIN")
            try:
                newest, oldest = self._connection.execute(_BOUNDS).fetchone()
                self._check(newest, newest + 1 if oldest is None else oldest)
                rows = self._read() if newest > self._revision else []
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
        # A full batch may have been cut in the middle of the log, so the next look goes on behind its last row.
        self._revision = rows[-1][5] if len(rows) == EVENTS_MAX else newest
        # row: kind, ..., the change's revision at 5
        fresh = [row for row in rows if row[5] > self._after[row[0]]]
        return tuple(_make_event(row, self._read_object) for row in fresh), math.inf

    def _release(self) -> None:
        self._connection.close()

    def _check(self, newest: int, oldest: int) -> None:
        if self._revision > newest:
            message = f"the store is at {newest}: it is another one, or was restored"
        elif self._revision < oldest - 1:
            message = f"the store remembers changes from {oldest} on"
        else:
            return
        raise Compacted(
            f"watch store {str(self._file.path)!r} after revision {self._revision}: {message}",
            hint="list the objects again and watch from the revision of that list",
            kinds=self._after,
        )

    def _read(self) -> list[tuple[str, str, str, str, str, int, bytes, int, int]]:
        """Read changes after the revision: an object's columns, with the change's revision in place of the object's,
        then the object's own revision and whether it was deleted."""
        marks = ",".join("?" * len(self._after))
        query = (
            "SELECT kind, namespace, name, uid, created, revision, document, object_revision,"
            f" deleted FROM change WHERE revision > ? AND kind IN ({marks})"
            " ORDER BY revision LIMIT ?"
        )
        parameters = (self._revision, *self._after, EVENTS_MAX)
        return self._connection.execute(query, parameters).fetchall()


_BOUNDS: Final = "SELECT (SELECT revision FROM state), (SELECT min(revision) FROM change)"


def _make_event(row: Sequence[object], read_object: ReadObject) -> StoreEvent:
    *columns, revision, document, object_revision, deleted = row
    made = read_object((*columns, object_revision, document))
    assert isinstance(revision, int)
    return StoreEvent(made, revision, bool(deleted))
