"""The store in one file, for one machine: several threads, several processes, several lab nodes.

Opened by `store.open`. Implements `model.store.Store` on sqlite with a write-ahead log; a write that has returned is
on disk. Must never hold a lock while a caller does something else: each call is one transaction. Invariant: each
change takes the next revision of the whole file and adds one row to the log of changes, in the same transaction.
"""

import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from podwire.database import transaction
from podwire.model.errors import Unavailable
from podwire.model.store import (
    Fields,
    Known,
    ObjectKey,
    OpenWaker,
    Revisions,
    StoredObject,
    UnreadableObject,
)
from podwire.model.store.packed import LazyList
from podwire.model.store.promises import FULL, Promises
from podwire.store.documents import encode_document, exists, find_conflict, merge, none_there
from podwire.store.leases_sqlite import SqliteLeases
from podwire.store.sqlite_file import READ_ROWS, Row, open_file, read_object
from podwire.store.sqlite_watch import SqliteWatch, ThreadWaker

CHANGES_KEPT: Final = 20_000
"""Changes that the log holds. A watch lags by milliseconds; one that lags by more than this lists again."""
BUSY_TIMEOUT_S: Final = 10.0
"""How long a write waits for those of other processes; one takes milliseconds."""

_ONE = "kind = ? AND namespace = ? AND name = ?"
_LOG = "INSERT INTO change VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


class SqliteStore:
    """Objects in a file at `path`.

    `open_waker` opens what wakes a watch when another process has written; by default it looks each second. `create`
    false: a file that is missing is a StorageFailure. `open_timeout_s`: how long opening waits for others (None: as
    long as a write).
    """

    def __init__(
        self,
        path: Path,
        *,
        open_waker: OpenWaker = ThreadWaker,
        create: bool = True,
        changes_kept: int = CHANGES_KEPT,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        open_timeout_s: float | None = None,
    ) -> None:
        wait_s = busy_timeout_s if open_timeout_s is None else open_timeout_s
        opened_file = open_file(path, busy_timeout_s=wait_s, create=create)
        self._file = replace(opened_file, busy_timeout_s=busy_timeout_s)
        self._open_waker = open_waker
        blame = f"something else has changed store {str(path)!r}"
        self._make = partial(read_object, blame=blame)
        self._changes_kept = changes_kept
        # Two connections: with a write-ahead log (sqlite, "WAL") readers do not wait for the writer, but one
        # connection has one transaction at a time.
        self._read_lock = threading.Lock()
        self._write_lock = threading.RLock()
        self._watches: set[SqliteWatch] = set()
        self._watches_lock = threading.Lock()
        self._leases = SqliteLeases(self._file, open_waker)
        with ExitStack() as opened, self._file.reported("open"):
            self._reader = self._file.connect()
            opened.callback(self._reader.close)
            self._writer = self._file.connect()
            opened.pop_all()

    @property
    def promises(self) -> Promises:
        """Give what this back end promises: everything."""
        return FULL

    def get(self, key: ObjectKey) -> StoredObject | None:
        """Give one object; None when there is none."""
        with self._read_lock, self._file.reported("read"):
            self._file.check_same()
            row = self._reader.execute(f"{READ_ROWS} WHERE {_ONE}", _columns(key)).fetchone()
        if row is None:
            return None
        stored = self._make(row)
        if stored.fault:
            raise UnreadableObject(stored)
        return stored

    def list(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        at_least: int | None = None,
        known: Known | None = None,
    ) -> tuple[Sequence[StoredObject], int]:
        """Give all objects of a kind (of one namespace), by namespace and name, and the file's revision."""
        del at_least, known  # nothing is cheaper than the file as it is
        chosen, parameters = "WHERE kind = ?", [kind]
        if namespace is not None:
            chosen, parameters = f"{chosen} AND namespace = ?", [kind, namespace]
        with self._read_lock, self._file.reported("read"):
            self._file.check_same()
            # One transaction for both statements: the revision belongs to exactly this list, so that a watch after it
            # misses nothing.
            self._reader.execute("BEGIN")
            try:
                [revision] = self._reader.execute("SELECT revision FROM state").fetchone()
                rows = self._reader.execute(
                    f"{READ_ROWS} {chosen} ORDER BY namespace, name", parameters
                ).fetchall()
            finally:
                if self._reader.in_transaction:
                    self._reader.execute("ROLLBACK")
        return LazyList(rows, self._make), revision

    def create(self, new: StoredObject) -> StoredObject:
        """Write an object that must not exist (else Conflict); gives it with uid, revision and time."""
        document = encode_document(new)
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self._changing("write") as connection:
            if (present := self._find(connection, new.key)) is not None:
                raise exists(new.key, present[5])
            revision = _next_revision(connection)
            row = (*_columns(new.key), str(uuid.uuid4()), created, revision, document)
            connection.execute("INSERT INTO object VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            self._log(connection, revision, row)
        return self._make(row)

    def update(self, new: StoredObject) -> StoredObject:
        """Replace an object whose revision must still be `new.revision` (else Conflict; NotFound)."""
        document = encode_document(new)
        with self._changing("write") as connection:
            row = self._expect(connection, "update", new.key, new.revision, new.uid)
            return self._replace(connection, row, document)

    def patch(
        self, key: ObjectKey, changes: Fields, *, revision: int | None = None, uid: str = ""
    ) -> StoredObject:
        """Change single fields of an object and leave all others; None takes one away."""
        with self._changing("write") as connection:
            row = self._expect(connection, "patch", key, revision, uid)
            stored = self._make(row)
            if stored.fault:
                raise UnreadableObject(stored)
            document = merge(stored.document, changes)
            if document == stored.document:
                return stored
            encoded = encode_document(StoredObject(key=key, document=document))
            return self._replace(connection, row, encoded)

    def delete(self, key: ObjectKey, *, revision: int | None = None, uid: str = "") -> StoredObject:
        """Remove an object, under the preconditions that are given; gives what was there. NotFound, Conflict."""
        with self._changing("write") as connection:
            row = self._expect(connection, "delete", key, revision, uid)
            connection.execute(f"DELETE FROM object WHERE {_ONE}", _columns(key))
            self._log(connection, _next_revision(connection), row, deleted=True)
        return self._make(row)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make one transaction of this thread's writes in the block; other writers wait for its end."""
        with self._changing("write"):
            yield

    def watch(self, after: Revisions) -> SqliteWatch:
        """Watch changes of some kinds, of each after a revision."""
        # The waker is opened before the watch first reads, so that a write in between wakes it.
        waker = self._open_waker(self._file.revision_path)
        try:
            with self._file.reported("watch"):
                made = SqliteWatch(
                    self._file,
                    waker,
                    after=after,
                    read_object=self._make,
                    forget=self._forget,
                )
        except BaseException:
            waker.close()
            raise
        with self._watches_lock:
            self._watches.add(made)
        return made

    def leases(self) -> SqliteLeases:
        """Give the store's leases."""
        return self._leases

    def close(self) -> None:
        """Close the file and all watches; everything written is on disk already."""
        self._leases.close()
        for watch in self._open_watches():
            watch.close()
        with self._read_lock, self._write_lock:
            self._reader.close()
            self._writer.close()

    def _open_watches(self) -> Sequence[SqliteWatch]:
        with self._watches_lock:
            return tuple(self._watches)

    def _forget(self, watch: SqliteWatch) -> None:
        with self._watches_lock:
            self._watches.discard(watch)

    @contextmanager
    def _changing(self, verb: str) -> Iterator[sqlite3.Connection]:
        """Do one transaction that writes, and tell the watches when it is on disk."""
        connection = self._writer
        with self._one_writer(verb), self._file.reported(verb):
            is_inside = connection.in_transaction
            if is_inside:  # of `together`, begun by this thread, as it has the lock
                yield connection
                return
            self._file.check_same()
            with transaction(connection):
                yield connection
        # After the commit: a watch that wakes earlier would read the log without the change and sleep again.
        self._file.touch()
        for watch in self._open_watches():
            watch.wake()

    @contextmanager
    def _one_writer(self, verb: str) -> Iterator[None]:
        """Let one thread write; while another process keeps the file locked, the others must not queue for ever."""
        if not self._write_lock.acquire(timeout=self._file.busy_timeout_s):
            raise Unavailable(
                f"{verb} store {str(self._file.path)!r}: others have been waiting to write for"
                f" {self._file.busy_timeout_s:.0f} s",
                hint="is another program keeping the file locked (a sqlite shell, a backup)?",
            )
        try:
            yield
        finally:
            self._write_lock.release()

    def _replace(
        self, connection: sqlite3.Connection, before: Row, document: bytes
    ) -> StoredObject:
        """Write another document in the place of what was found."""
        revision = _next_revision(connection)
        row = (*before[:5], revision, document)
        connection.execute(
            f"UPDATE object SET revision = ?, document = ? WHERE {_ONE}",
            (revision, document, *before[:3]),
        )
        self._log(connection, revision, row)
        return self._make(row)

    def _find(self, connection: sqlite3.Connection, key: ObjectKey) -> Row | None:
        row: Row | None = connection.execute(f"{READ_ROWS} WHERE {_ONE}", _columns(key)).fetchone()
        return row

    def _expect(
        self,
        connection: sqlite3.Connection,
        verb: str,
        key: ObjectKey,
        revision: int | None,
        uid: str,
    ) -> Row:
        """Find what is to be changed, and check that it still is what the caller has seen."""
        row = self._find(connection, key)
        if row is None:
            raise none_there(verb, key)
        if conflict := find_conflict(verb, key, (row[3], row[5]), uid, revision):
            raise conflict
        return row

    def _log(
        self, connection: sqlite3.Connection, revision: int, row: Row, *, deleted: bool = False
    ) -> None:
        *columns, object_revision, document = row
        # In the writer's transaction: a watch sees a change exactly when readers see its effect.
        connection.execute(_LOG, (revision, *columns, object_revision, document, deleted))
        connection.execute(
            "DELETE FROM change WHERE revision <= ?", (revision - self._changes_kept,)
        )


def _columns(key: ObjectKey) -> tuple[str, str, str]:
    return key.kind, key.namespace, key.name


def _next_revision(connection: sqlite3.Connection) -> int:
    # All rows are fetched: a statement that is still running would keep the transaction open.
    [[revision]] = connection.execute(
        "UPDATE state SET revision = revision + 1 RETURNING revision"
    ).fetchall()
    return int(revision)
