"""The journal on disk: one record per attachment, safe from any death of this process when a call returns.

Implements `model.interfaces.Journal` on sqlite with a write-ahead log and a file in front of it (`journal.recent`). A
record is written as one line there, and `fold` brings the lines into the database in a quiet moment. What is written
has reached the kernel. Only a crash of the whole machine can lose it, and after that the boot id differs and every
record is dropped anyway. Only facts that outlive a boot wait for the disk (docs/decisions/0004-what-is-synced.md).

Called by `control` under the node's turn, and for reading by the doors; one lock serialises them. It never deletes or
repairs a file that it cannot read, because a person must decide that. After a failure, even a full disk, it stays
usable.
"""

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from podwire.database import transaction
from podwire.journal import schema
from podwire.journal.recent import FILE_MODE, RecentFile
from podwire.model.endpoint import AttachmentKey, EndpointRecord, Phase
from podwire.model.errors import Bug, StorageFailure
from podwire.model.ids import EndpointId

ENDPOINT_ID_MAX: Final = (1 << 32) - 1
"""The maps carry the number in 32 bits."""
HOST_SETTINGS_FACT: Final = "host-settings"
"""Which settings of the host the agent changed, for `podwire cleanup`."""
UNDERLAY_HOOKS_FACT: Final = "underlay-hooks"
"""Which devices of the host the agent gave a clsact queue, for itself and for `podwire cleanup`."""
BUSY_TIMEOUT_S: Final = 2.0
"""Only a person's sqlite shell can hold the file; a write must not wait for it longer than a runtime would."""

RECENT_SUFFIX: Final = "-recent"
"""Of the name of the file in front of the database, as sqlite's own have -wal and -shm."""
_RECENT_FACT: Final = "recent-records"
"""The number of the last line that the database has."""
_RECENT_MAX_BYTES: Final = 1 << 20
"""A file of this size is folded by the next write: there was no quiet moment."""

_UPSERT = """
INSERT INTO endpoint (id, network, container_id, if_name, phase, ipv4, ipv6, record)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET phase = excluded.phase, ipv4 = excluded.ipv4, ipv6 = excluded.ipv6,
    record = excluded.record
"""

_Unique = AttachmentKey | str
"""What only one endpoint has: its attachment, unless it is ending, and each of its addresses."""

_log = logging.getLogger(__name__)


class SqliteJournal:
    """The records of one node below its state directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.json.Decoder(EndpointRecord).decode
        self._waiting: dict[EndpointId, tuple[EndpointRecord, bytes]] = {}
        """Records that the database does not have yet, or not like this."""
        self._is_in_doubt = False
        """Whether the last record could not be written."""
        self._owned: dict[EndpointId, tuple[_Unique, ...]] = {}
        self._owners: dict[_Unique, EndpointId] = {}
        with ExitStack() as stack, self._reported("open"):
            self._connection = stack.enter_context(contextlib.closing(_connect(path)))
            schema.LAYOUT.check(self._connection, str(path))
            schema.LAYOUT.bring_up(self._connection)
            # Only now: the journal mode is kept in the file, and a foreign file must stay as it is.
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._recent = RecentFile(path.with_name(path.name + RECENT_SUFFIX))
            stack.callback(self._recent.close)
            self._line = int(self._read_fact(_RECENT_FACT) or 0)
            self._last_id = self._read_last_id()
            self._load()
            self._files = stack.pop_all()

    def close(self, *, folds: bool = True) -> None:
        """Close the files; everything written is on disk already.

        `folds` is False where an agent may have the journal open as well: its file is not for others to empty.
        """
        if folds:
            with contextlib.suppress(StorageFailure):  # what waits is found by the next start
                self.fold()
        with self._lock:
            self._files.close()

    def next_endpoint_id(self) -> EndpointId:
        """Give a number that no record ever had. One that is never written may be given again after a restart."""
        with self._lock:
            if self._last_id >= ENDPOINT_ID_MAX:
                raise StorageFailure(
                    f"number an endpoint: all {ENDPOINT_ID_MAX} numbers of this node were used",
                    hint="drain the node, run `podwire cleanup --all` and start the agent again",
                )
            self._last_id += 1
            return EndpointId(self._last_id)

    def skip_ids(self, up_to: EndpointId) -> None:
        """Never give a number up to `up_to`: a journal that was moved away leaves its numbers in the kernel."""
        with self._lock:
            # Rows of maps and conntrack know an endpoint by this number alone: it must never come to mean another
            # one.
            self._last_id = max(self._last_id, up_to)

    def write(self, record: EndpointRecord) -> None:
        blob = self._encode(record)
        with self._lock, self._reported("write"):
            if taken := self._find_taken(record):
                raise Bug(f"write record {record.id} of {record.key}: {taken}")
            self._is_in_doubt = True
            if self._recent.size_bytes >= _RECENT_MAX_BYTES:
                self._fold()
            self._recent.append(self._line + 1, blob)
            self._is_in_doubt = False
            self._line += 1
            self._keep(record, blob)

    def require_writable(self) -> bool:
        with self._lock, self._reported("write"):
            was_in_doubt = self._is_in_doubt
            if was_in_doubt:
                self._recent.try_out()
                self._is_in_doubt = False
        return was_in_doubt

    @property
    def behind_at(self) -> int:
        """The number of the last line that the database does not have; 0 = it has all."""
        return self._line if self._waiting else 0

    def fold(self) -> None:
        """Bring what was written last into the database; for quiet moments."""
        with self._lock, self._reported("write"):
            self._fold()

    def remove(self, endpoint_ids: Iterable[EndpointId]) -> None:
        """Forget records, all in one transaction."""
        gone = tuple(endpoint_ids)
        with self._lock, self._reported("write"):
            self._fold(gone)
            for endpoint_id in gone:
                self._own(endpoint_id, ())

    def list_records(self) -> Sequence[EndpointRecord]:
        """Give every record, oldest id first. Raises StorageFailure naming a record that cannot be read."""
        with self._lock, self._reported("read"):
            blobs = dict(self._connection.execute("SELECT id, record FROM endpoint").fetchall())
            blobs |= {endpoint_id: blob for endpoint_id, (_, blob) in self._waiting.items()}
        return [self._read(f"record {number}", blob) for number, blob in sorted(blobs.items())]

    def write_fact(self, name: str, value: str) -> None:
        """Remember a fact about the node that is no attachment's; it waits for the disk."""
        with self._lock, self._reported("write"):
            # A fact outlives the boot, so it has to be on the disk; records of attachments do not (decisions/0004).
            self._connection.execute("PRAGMA synchronous = FULL")
            try:
                self._connection.execute("INSERT OR REPLACE INTO fact VALUES (?, ?)", (name, value))
            finally:
                self._connection.execute("PRAGMA synchronous = NORMAL")

    def read_fact(self, name: str) -> str:
        with self._lock, self._reported("read"):
            return self._read_fact(name)

    def _read_fact(self, name: str) -> str:
        query = "SELECT value FROM fact WHERE name = ?"
        row = self._connection.execute(query, (name,)).fetchone()
        return str(row[0]) if row else ""

    def _read(self, what: str, blob: bytes) -> EndpointRecord:
        try:
            return self._decode(blob)
        except msgspec.MsgspecError as error:
            raise StorageFailure(
                f"read {what} of journal {str(self._path)!r}: {error}",
                hint="the file was changed by something else; drain the node, remove it and its -recent",
            ) from error

    def _read_last_id(self) -> int:
        row = self._connection.execute(
            # The highest number that any row ever had (AUTOINCREMENT), also of rows that are gone.
            "SELECT seq FROM sqlite_sequence WHERE name = 'endpoint'"
        ).fetchone()
        return int(row[0]) if row else 0

    def _load(self) -> None:
        """Learn whose what is by the database, and what was written behind it."""
        keys: dict[EndpointId, AttachmentKey] = {}
        for number, phase, *names, ipv4, ipv6 in self._connection.execute(
            "SELECT id, phase, network, container_id, if_name, ipv4, ipv6 FROM endpoint"
        ):
            keys[number] = AttachmentKey(*names)
            key = () if phase == Phase.DELETING.value else (keys[number],)
            self._own(number, (*key, *filter(None, (ipv4, ipv6))))
        for line, blob in self._recent.read():
            if line <= self._line:
                continue  # the agent died between bringing it into the database and clearing the file
            self._line = line
            record = self._read(f"line {line}", blob)
            taken = self._find_taken(record)
            if not taken and keys.get(record.id, record.key) != record.key:
                taken = f"record {record.id} is of {keys[record.id]}"
            if taken:
                # A build that does not know the file has worked with the database since: it may have given the
                # number itself away, because the database had not heard of it.
                _log.warning(
                    "a record that was never brought into the journal is outdated",
                    extra={"endpoint": record.id, "cause": taken},
                )
                continue
            self._keep(record, blob)
            self._last_id = max(self._last_id, record.id)

    def _find_taken(self, record: EndpointRecord) -> str:
        """Say which address or attachment of a record another one has; "" = none: a second guard, should the code
        above ever be wrong."""
        for unique in _list_unique(record):
            owner = self._owners.get(unique, record.id)
            if owner != record.id:
                return f"record {owner} has {unique}"
        return ""

    def _keep(self, record: EndpointRecord, blob: bytes) -> None:
        """Let a record wait for the database."""
        self._waiting[record.id] = record, blob
        self._own(record.id, _list_unique(record))

    def _own(self, endpoint_id: EndpointId, owned: tuple[_Unique, ...]) -> None:
        for unique in self._owned.pop(endpoint_id, ()):
            del self._owners[unique]
        if owned:
            self._owned[endpoint_id] = owned
            self._owners.update(dict.fromkeys(owned, endpoint_id))

    def _fold(self, gone: Sequence[EndpointId] = ()) -> None:
        """Bring what waits into the database and take `gone` out of it, in one transaction."""
        with transaction(self._connection):
            # Also of those that are gone: the database remembers the highest number that it ever had (AUTOINCREMENT).
            rows = [_make_row(record, blob) for record, blob in self._waiting.values()]
            for row in rows:
                self._write_row(row)
            if rows:
                note = "INSERT OR REPLACE INTO fact VALUES (?, ?)"
                self._connection.execute(note, (_RECENT_FACT, str(self._line)))
            numbers = [(endpoint_id,) for endpoint_id in gone]
            self._connection.executemany("DELETE FROM endpoint WHERE id = ?", numbers)
        if rows:
            self._waiting.clear()
            self._recent.clear()

    def _write_row(self, row: tuple[object, ...]) -> None:
        try:
            self._connection.execute(_UPSERT, row)
        except sqlite3.IntegrityError as error:
            # A bug, because `write` refuses these. It must not keep every later record out of the database, nor
            # every ended one in it: the statement alone is undone.
            _log.error(
                "a record was refused by the journal's database",
                extra={"endpoint": row[0], "error": str(error)},
            )

    def _reported(self, verb: str) -> "_Reported":
        return _Reported(verb, self._path)


class _Reported:
    """Lets a block of code fail with StorageFailure only."""

    def __init__(self, verb: str, path: Path) -> None:
        self._verb = verb
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, sqlite3.DatabaseError | OSError):
            raise StorageFailure(
                f"{self._verb} journal {str(self._path)!r}: {error}", hint=_hint(error)
            ) from error


def _connect(path: Path) -> sqlite3.Connection:
    """Open the file so that only root can read it: the mode is set before anything is in it.

    sqlite gives its side files the same mode.
    """
    # sqlite would make the file with mode 0644. Its side files (-wal, -shm) get the mode of this one.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
    return sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None
    )


def _list_unique(record: EndpointRecord) -> tuple[_Unique, ...]:
    key = () if record.phase is Phase.DELETING else (record.key,)
    return (*key, *filter(None, (record.ipv4, record.ipv6)))


def _make_row(record: EndpointRecord, blob: bytes) -> tuple[object, ...]:
    key, addresses = record.key, (record.ipv4 or None, record.ipv6 or None)
    names = (key.network, key.container_id, key.if_name)
    return (record.id, *names, record.phase.value, *addresses, blob)


def _hint(error: Exception) -> str:
    text = str(error)
    if "full" in text or "No space" in text:
        return "free space below the state directory and try again"
    if "malformed" in text or "not a database" in text:
        return schema.LAYOUT.if_damaged
    if "locked" in text:
        return "another program has the file open: close it"
    return "look at the state directory: does it exist, may root write there, is its disk healthy?"
