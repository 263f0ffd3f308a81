"""Watches of a sqlite store: read the log of changes, sleep until somebody writes, read again.

Made by `store.sqlite`. Never writes. A wake-up is only a hint: the log is also read every second, so a lost wake-up
delays a change and loses nothing. Invariant: each change that is returned follows the previous one without a gap, or
Compacted is raised.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from podwire.model.store import Compacted, Revisions, StoredObject, StoreEvent, Waker
from podwire.store.sqlite_file import StoreFile

LOOK_EVERY_S: Final = 1.0
EVENTS_MAX: Final = 1000
"""Changes that one call gives at most; the next call goes on."""

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


class SqliteWatch:
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
        self._file = file
        self._waker = waker
        self._after = dict(after)
        self._revision = min(after.values())
        """Of the file: up to which the log was read. What a kind was listed with may be ahead of it."""
        self._read_object = read_object
        self._forget = forget
        self._closed = False
        self._reading = threading.Lock()
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

    def next(self, timeout_s: float) -> Sequence[StoreEvent]:
        """Give what has happened; see `model.store.Watch`."""
        deadline_s = time.monotonic() + timeout_s
        with self._reading:
            while not self._closed:
                events = self._look()
                left_s = deadline_s - time.monotonic()
                if events or left_s <= 0:
                    return events
                self._waker.wait(min(left_s, LOOK_EVERY_S))
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
            self._connection.close()
        self._forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _look(self) -> Sequence[StoreEvent]:
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
        return tuple(_make_event(row, self._read_object) for row in fresh)

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
