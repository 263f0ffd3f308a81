"""The store's file: opened for root only, checked, and brought to today's layout; and what its errors mean.

Used by `store.sqlite` and its watches alone. Invariant: a file is never changed before it is known to be a store of
podwire, and never repaired or removed, because a person must decide that. Several processes may open one file at once.
"""

import contextlib
import errno
import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from podwire.database import Layout
from podwire.model.errors import StorageFailure, Unavailable
from podwire.model.store import ObjectKey, StoredObject

FILE_MODE: Final = 0o600
REVISION_SUFFIX: Final = ".rev"
"""The file beside the store that is touched after each commit. It is empty: the store alone knows its revision."""
JOURNAL_LIMIT_BYTES: Final = 8 << 20
_LOCK_PAUSE_S: Final = 0.01

CACHE_KIB: Final = 256
"""Of each connection. The default of 2 MiB fills with one long list, and an agent has five connections; the kernel has
the file's pages anyway."""
OBJECT_TABLE: Final = """
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
"""
STEPS: Final = (
    f"""
    CREATE TABLE state (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), revision INTEGER NOT NULL);
    INSERT INTO state VALUES (1, 0);
    {OBJECT_TABLE}
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


Row = tuple[str, str, str, str, str, int, bytes]
READ_ROWS: Final = "SELECT kind, namespace, name, uid, created, revision, document FROM object"
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def read_object(row: Sequence[Any], blame: str) -> StoredObject:
    """Make the object of a row; one that cannot be read has a `fault`, which begins with `blame`."""
    kind, namespace, name, uid, created, revision, document = row
    key = ObjectKey(kind, namespace, name)
    try:
        decoded, fault = _decode(document), ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
        decoded, fault = {}, f"{blame}: {error}"
    return StoredObject(
        key=key, uid=uid, revision=revision, created=created, document=decoded, fault=fault
    )


class StoreFile(msgspec.Struct, frozen=True):
    """Which file is meant, and how long its locks are waited for."""

    path: Path
    busy_timeout_s: float
    identity: tuple[int, int] = msgspec.field(default=(0, 0))
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
        try:
            # With a write-ahead log, NORMAL may lose the last commits when the power fails. A write that has
            # returned must be on disk.
            connection.execute("PRAGMA synchronous = FULL")
            # Without a limit the log keeps the size that one long reader once made it grow to.
            connection.execute(f"PRAGMA journal_size_limit = {JOURNAL_LIMIT_BYTES}")
            connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        except BaseException:
            connection.close()
            raise
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
_LAYOUT: Final = Layout(
    name="store",
    application_id=0x70777331,  # "pws1"
    steps=STEPS,
    if_newer="run the newer podwire that wrote it; nothing was touched",
    if_foreign="name another file; nothing was touched",
    if_damaged=_DAMAGED,
)
_HINT: Final = "does the directory exist, may root write there, is its disk healthy?"
_HINTS: Final = {
    sqlite3.SQLITE_FULL: "free space on the disk of the file and try again; nothing was written",
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: "this is not a store of podwire, or it is damaged: name another file,"
    " or move this one away",
    sqlite3.SQLITE_READONLY: "the file or its directory cannot be written: see its mode and mount",
}


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
            _LAYOUT.check(connection, str(path))
            # Only now: the journal mode is kept in the file, and a foreign file must stay as it is.
            connection.execute("PRAGMA journal_mode = WAL")
            _LAYOUT.bring_up(connection)
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
