"""What a store said last, in a file of the node's own, for a start while the store is away.

Opened by `agent.node`, written by the followers of the store (`agent.duties.follower`). It is a copy: a file that
cannot be used is started afresh, with a warning, and nothing is lost but the copy. Invariant: what is loaded of a kind
is one whole list with whole batches of later changes; each call of `save` is one transaction.
"""

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from podwire.database import transaction
from podwire.model.closing import Closing
from podwire.model.errors import StorageFailure
from podwire.model.store import ObjectKey, StoredObject, StoreEvent
from podwire.model.store.packed import encode_any
from podwire.store.sqlite_file import CACHE_KIB, OBJECT_TABLE, READ_ROWS, Row, read_object

FILE_NAME: Final = "remembered.db"
"""Below the state directory."""
FILE_MODE: Final = 0o600
LAYOUT: Final = 1
BUSY_TIMEOUT_S: Final = 2.0
"""Only a person's sqlite shell can hold the file."""

_SCHEMA: Final = f"""
CREATE TABLE source (url TEXT NOT NULL);
CREATE TABLE listed (kind TEXT PRIMARY KEY, revision INTEGER NOT NULL) WITHOUT ROWID;
{OBJECT_TABLE}
"""

_log = logging.getLogger(__name__)


class RememberedObjects(Closing):
    """The copy in the file at `path` of what the store at `url` said. Safe to call from several threads."""

    def __init__(self, path: Path, url: str) -> None:
        self._path = path
        self._url = url
        self._lock = threading.Lock()
        with self._reported("open"):
            self._connection = self._open()

    def load(self, kind: str) -> tuple[Sequence[StoredObject], int] | None:
        """Give what was said last of a kind, and the store's revision then; None when nothing ever was."""
        with self._lock, self._reported("read"):
            listed = self._connection.execute(
                "SELECT revision FROM listed WHERE kind = ?", (kind,)
            ).fetchone()
            if listed is None:
                return None
            rows = self._connection.execute(
                f"{READ_ROWS} WHERE kind = ? ORDER BY namespace, name", (kind,)
            ).fetchall()
            return [_make(row) for row in rows], listed[0]

    def index(self, kind: str) -> dict[ObjectKey, tuple[str, int]]:
        """Give uid and revision of every object of a kind."""
        with self._lock, self._reported("read"):
            rows = self._connection.execute(
                "SELECT namespace, name, uid, revision FROM object WHERE kind = ?", (kind,)
            )
            return {
                ObjectKey(kind, namespace, name): (uid, revision)
                for namespace, name, uid, revision in rows
            }

    def find(self, key: ObjectKey) -> StoredObject | None:
        """Give one object as it was said last; None when there is none, or it cannot be read."""
        with self._lock, self._reported("read"):
            row = self._connection.execute(
                f"{READ_ROWS} WHERE kind = ? AND namespace = ? AND name = ?",
                (key.kind, key.namespace, key.name),
            ).fetchone()
        made = None if row is None else _make(row)
        return None if made is None or made.fault else made

    def save(
        self,
        lists: Mapping[str, tuple[Sequence[StoredObject], int]],
        changes: Iterable[StoreEvent],
    ) -> None:
        """Keep whole lists of kinds, then changes; all or nothing."""
        connection = self._connection
        with self._lock, self._reported("write"), transaction(connection):
            # Lists before changes: changes that were kept were heard after the list of their kind.
            for kind, (objects, revision) in lists.items():
                connection.execute("DELETE FROM object WHERE kind = ?", (kind,))
                connection.executemany(_INSERT, map(_row, objects))
                connection.execute("INSERT OR REPLACE INTO listed VALUES (?, ?)", (kind, revision))
            for event in changes:
                key = event.object.key
                if event.deleted:
                    connection.execute(_DELETE, (key.kind, key.namespace, key.name))
                else:
                    connection.execute(_INSERT, _row(event.object))
                connection.execute(
                    "UPDATE listed SET revision = max(revision, ?) WHERE kind = ?",
                    (event.revision, key.kind),
                )

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _reported(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            message = f"{verb} {str(self._path)!r}: {error}"
        except OSError as error:
            message = f"{verb} {str(self._path)!r}: {error.strerror or error}"
        else:
            return
        raise StorageFailure(
            message,
            hint="pods are not affected, but a start without the store would be: is the disk full?",
        )

    def _open(self) -> sqlite3.Connection:
        """Open the file; one that is damaged, of another layout or of another store is begun anew."""
        if self._path.exists():
            try:
                return self._connect(self._check)
            except _Unusable as reason:
                _log.warning("forget what the store said last", extra={"cause": str(reason)})
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise  # locked, or a full disk: it may be whole
                _log.warning("forget what the store said last", extra={"cause": str(error)})
        # The log of a removed database must go with it: sqlite could replay it into the new file of the same name.
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._path}{suffix}")
        # Made here with its mode, because sqlite makes files as the umask says. Policies and addresses are not for
        # everybody.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
        return self._connect(self._make_tables)

    def _connect(self, prepare: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None
        )
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            # A crash of the machine may cost the last changes, never the file.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, connection: sqlite3.Connection) -> None:
        [layout] = connection.execute("PRAGMA user_version").fetchone()
        if layout != LAYOUT:
            raise _Unusable(f"it has layout {layout}, this podwire {LAYOUT}")
        [verdict] = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise _Unusable(f"it is damaged: {verdict}")
        [url] = connection.execute("SELECT url FROM source").fetchone()
        if url != self._url:
            raise _Unusable(f"it is of store {url!r}, not of {self._url!r}")

    def _make_tables(self, connection: sqlite3.Connection) -> None:
        with transaction(connection):
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute("INSERT INTO source VALUES (?)", (self._url,))
            connection.execute(f"PRAGMA user_version = {LAYOUT}")


class _Unusable(Exception):
    """Why a file is begun anew."""


_INSERT: Final = "INSERT OR REPLACE INTO object VALUES (?, ?, ?, ?, ?, ?, ?)"
_DELETE: Final = "DELETE FROM object WHERE kind = ? AND namespace = ? AND name = ?"


def _row(stored: StoredObject) -> Row:
    key = stored.key
    document = encode_any(stored.document)
    return key.kind, key.namespace, key.name, stored.uid, stored.created, stored.revision, document


def _make(row: Row) -> StoredObject:
    """Read an object back; one that cannot be read has a `fault`."""
    made = read_object(row, "remembered")
    if made.fault:
        _log.warning(
            "read what the store said last", extra={"object": str(made.key), "error": made.fault}
        )
    return made
