"""The store's file: opened for root only, checked, and brought to today's layout; and what its errors mean.

Used by `store.sqlite` and its watches alone. `user_version` of the file is the layout's number: how many of STEPS it
has been through. Invariant: a file is never left between two layouts, never changed before it is known to be a store
of podwire, and never repaired or removed, because a person must decide that. Several processes may open one file at
once.
"""

import contextlib
import errno
import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from podwire.model.errors import NewerData, StorageFailure, Unavailable

APPLICATION_ID: Final = 0x70777331
"""Marks the file as ours ("pws1"), for file(1) and against opening another program's database."""
FILE_MODE: Final = 0o600
REVISION_SUFFIX: Final = ".rev"
"""The file beside the store that is touched after each commit. It is empty: the store alone knows its revision."""
JOURNAL_LIMIT_BYTES: Final = 8 << 20
_LOCK_PAUSE_S: Final = 0.01

STEPS: Final = (
    """
    CREATE TABLE state (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), revision INTEGER NOT NULL);
    INSERT INTO state VALUES (1, 0);
    CREATE TABLE object (
        kind TEXT NOT NULL,
        namespace TEXT NOT NULL,
        name TEXT NOT NULL,
        uid TEXT NOT NULL,
        created TEXT NOT NULL,
        revision INTEGER NOT NULL,
        document BLOB NOT NULL,
        PRIMARY KEY (kind, namespace, name)
    ) WITHOUT ROWID;
    -- One row for each revision without a gap, the oldest ones forgotten.
    CREATE TABLE change (
        revision INTEGER PRIMARY KEY,
        kind TEXT NOT NULL,
        namespace TEXT NOT NULL,
        name TEXT NOT NULL,
        uid TEXT NOT NULL,
        created TEXT NOT NULL,
        object_revision INTEGER NOT NULL,
        document BLOB NOT NULL,
        deleted INTEGER NOT NULL
    );
    """,
    """
    CREATE TABLE lease (
        name TEXT PRIMARY KEY,
        holder TEXT NOT NULL,
        token TEXT NOT NULL,
        -- Until which time since that boot it lives; it does not outlive the boot.
        boot TEXT NOT NULL,
        until_ns INTEGER NOT NULL
    ) WITHOUT ROWID;
    """,
)
"""Step n makes layout n + 1 of layout n. Released steps are never changed, only followed by another."""


@dataclass(frozen=True)
class StoreFile:
    """Which file is meant, and how long its locks are waited for."""

    path: Path
    busy_timeout_s: float
    identity: tuple[int, int] = field(default=(0, 0))
    """Device and inode that were opened."""

    @property
    def revision_path(self) -> Path:
        """The file that is touched after each commit."""
        return self.path.with_name(self.path.name + REVISION_SUFFIX)

    def connect(self) -> sqlite3.Connection:
        """Open a connection with the settings that every connection has."""
        # `isolation_level=None` turns off the transactions that Python's module would begin by itself before each
        # write.
        connection = sqlite3.connect(
            self.path,
            timeout=self.busy_timeout_s,
            check_same_thread=False,
            isolation_level=None,
        )
        # With a write-ahead log, NORMAL may lose the last commits when the power fails. A write that has returned
        # must be on disk.
        connection.execute("PRAGMA synchronous = FULL")
        # Without a limit the log keeps the size that one long reader once made it grow to.
        connection.execute(f"PRAGMA journal_size_limit = {JOURNAL_LIMIT_BYTES}")
        return connection

    def check_same(self) -> None:
        """Raise StorageFailure when the path leads to another file by now: nobody would see what is written."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            status = None
        # sqlite goes on writing to a file that was unlinked or renamed, without an error (sqlite.org, "How To Corrupt
        # An SQLite Database File").
        if status is None or (status.st_dev, status.st_ino) != self.identity:
            done = "removed" if status is None else "replaced"
            raise StorageFailure(
                f"use store {str(self.path)!r}: the file was {done} while it was open",
                hint="stop every podwire that uses it, put the right file there, and start them again",
            )

    def touch(self) -> None:
        """Wake the watches of other processes. They also look by themselves, so failing here loses nothing."""
        with contextlib.suppress(OSError):
            try:
                os.utime(self.revision_path)
            except FileNotFoundError:
                _make_private(self.revision_path)

    @contextmanager
    def reported(self, verb: str) -> Iterator[None]:
        """Turn what sqlite and the disk say into our errors."""
        try:
            yield
        except sqlite3.Error as error:
            # The lower byte is the primary result code; extended codes have more above it.
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            message = f"{verb} store {str(self.path)!r}: {error}"
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise Unavailable(
                    f"{message} for {self.busy_timeout_s:.0f} s",
                    hint="another program keeps the file locked: close it (a sqlite shell, a backup)",
                ) from error
            raise StorageFailure(message, hint=_HINTS.get(code, _HINT)) from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise StorageFailure(f"{verb} store {str(self.path)!r}: {reason}", hint=_HINT) from (
                error
            )


_DAMAGED: Final = (
    "the file is damaged: stop what uses it, move it away with its -wal and -shm, start again,"
    " and apply your objects again"
)
_HINT: Final = "does the directory exist, may root write there, is its disk healthy?"
_HINTS: Final = {
    sqlite3.SQLITE_FULL: "free space on the disk of the file and try again; nothing was written",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: "this is not a store of podwire, or it is damaged: name another file,"
    " or move this one away",
    sqlite3.SQLITE_READONLY: "the file or its directory cannot be written: see its mode and mount",
}


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit what is written inside, or nothing of it."""
    # A deferred transaction takes the write lock at its first write, and fails there with SQLITE_BUSY at once, without
    # waiting, when another process has written since its first read.
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def open_file(path: Path, *, busy_timeout_s: float, create: bool) -> StoreFile:
    """Make the file ready: there, for root only, whole, of today's layout.

    `create` false: a file that is missing is StorageFailure. Raises NewerData, StorageFailure, Unavailable.
    """
    file = StoreFile(path, busy_timeout_s)
    if not create and not path.exists():
        raise StorageFailure(
            f"open store {str(path)!r}: there is none",
            hint="podwire apply makes one; is the path right?",
        )
    with file.reported("open"):
        _make_private(path)
        status = os.stat(path)
    file = StoreFile(path, busy_timeout_s, (status.st_dev, status.st_ino))
    with file.reported("open"), _one_at_a_time(file):
        connection = file.connect()
        try:
            _prepare(connection, str(path))
        finally:
            connection.close()
    return file


def _make_private(path: Path) -> None:
    """See to it that the file is there and only its owner can read it: before anything is in it.

    sqlite gives its side files the same mode. A file that was there is never opened here: closing it again would take
    away the locks that this process's other connections have on it (fcntl(2), "advisory record locking"), and the next
    process to close the file would remove the log that they write to.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    except FileExistsError:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EISDIR, "it is a directory, or no file at all") from None
        if stat.S_IMODE(mode) & 0o077:
            os.chmod(path, FILE_MODE)


@contextmanager
def _one_at_a_time(file: StoreFile) -> Iterator[None]:
    """Keep other processes from preparing the file: sqlite does not wait where the journal mode is changed."""
    deadline_s = time.monotonic() + file.busy_timeout_s
    _make_private(file.revision_path)
    number = os.open(file.revision_path, os.O_RDWR | os.O_CLOEXEC)
    try:
        while not _try_lock(number):
            if time.monotonic() > deadline_s:
                raise Unavailable(
                    f"open store {str(file.path)!r}: another process has been opening it for"
                    f" {file.busy_timeout_s:.0f} s",
                    hint=f"see who keeps {str(file.revision_path)!r} locked (lslocks)",
                )
            time.sleep(_LOCK_PAUSE_S)
        yield
    finally:
        os.close(number)


def _try_lock(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _prepare(connection: sqlite3.Connection, path: str) -> None:
    """Check that the file is a whole store of a known layout, and make today's layout of it in one transaction."""
    newest = len(STEPS)
    [layout] = connection.execute("PRAGMA user_version").fetchone()
    if layout > newest:
        raise NewerData(
            f"open store {path!r}: its layout is {layout}, this podwire knows up to {newest}",
            hint="run the newer podwire that wrote it; nothing was touched",
        )
    [owner] = connection.execute("PRAGMA application_id").fetchone()
    if owner != APPLICATION_ID and connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise StorageFailure(
            f"open store {path!r}: it is another program's database (application id {owner:#x})",
            hint="name another file; nothing was touched",
        )
    # Unlike integrity_check, quick_check does not compare indexes with tables: its time grows with the file alone.
    [verdict] = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise StorageFailure(f"open store {path!r}: it is malformed: {verdict}", hint=_DAMAGED)
    # Only now: the journal mode is kept in the file, and a foreign file must stay as it is.
    connection.execute("PRAGMA journal_mode = WAL")
    if layout < newest:
        _bring_up(connection, layout)


def _bring_up(connection: sqlite3.Connection, layout: int) -> None:
    # All steps in one transaction, the number of the layout included: a kill in between leaves the old layout whole.
    with transaction(connection):
        for step in STEPS[layout:]:
            _execute_all(connection, step)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(STEPS)}")


def _execute_all(connection: sqlite3.Connection, script: str) -> None:
    """Execute the statements one by one: executescript() would commit the open transaction first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""
