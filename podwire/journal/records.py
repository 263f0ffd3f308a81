"""The journal on disk: one record per attachment, safe from any death of this process when a call returns.

Implements `model.interfaces.Journal` on sqlite with a write-ahead log. What is written has reached the kernel. Only a
crash of the whole machine can lose it, and after that the boot id differs and every record is dropped anyway. Only
facts that outlive a boot wait for the disk (docs/decisions/0004-what-is-synced.md).

Called by `control` under the node's turn, and for reading by the doors; one lock serialises them. It never deletes or
repairs a file that it cannot read, because a person must decide that. After a failure, even a full disk, it stays
usable.
"""

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from podwire.database import transaction
from podwire.journal import schema
from podwire.model.endpoint import EndpointRecord, Phase
from podwire.model.errors import Bug, NewerData, StorageFailure
from podwire.model.ids import EndpointId

ENDPOINT_ID_MAX: Final = (1 << 32) - 1
"""The maps carry the number in 32 bits."""
FILE_MODE: Final = 0o600
HOST_SETTINGS_FACT: Final = "host-settings"
"""Which settings of the host the agent changed, for `podwire cleanup`."""
UNDERLAY_HOOKS_FACT: Final = "underlay-hooks"
"""Which devices of the host the agent gave a clsact queue, for itself and for `podwire cleanup`."""
BUSY_TIMEOUT_S: Final = 2.0
"""Only a person's sqlite shell can hold the file; a write must not wait for it longer than a runtime would."""

_UPSERT = """
INSERT INTO endpoint (id, network, container_id, if_name, phase, ipv4, ipv6, record)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET phase = excluded.phase, ipv4 = excluded.ipv4, ipv6 = excluded.ipv6,
    record = excluded.record
"""
_UPDATE = """
UPDATE endpoint SET phase = ?, record = ? WHERE id = ? AND ipv4 IS ? AND ipv6 IS ?
"""
"""For a record that keeps its addresses: two indexes need not be written, half of what a commit costs."""


class SqliteJournal:
    """The records of one node below its state directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.json.Decoder(EndpointRecord).decode
        with self._reported("open"):
            self._connection = _connect(path)
        try:
            with self._reported("open"):
                schema.LAYOUT.check(self._connection, str(path))
                schema.LAYOUT.bring_up(self._connection)
                # Only now: the journal mode is kept in the file, and a foreign file must stay as it is.
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = NORMAL")
                self._last_id = self._read_last_id()
        except (StorageFailure, NewerData):
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the file; everything written is on disk already."""
        with self._lock:
            self._connection.close()

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
        """Insert or replace the record with this id."""
        phase, blob = record.phase.value, self._encode(record)
        addresses = (record.ipv4 or None, record.ipv6 or None)
        key = record.key
        names = (key.network, key.container_id, key.if_name)
        with self._lock, self._reported("write"):
            try:
                # A record that keeps its addresses: two unique indexes need not be written, half of what a commit
                # costs.
                if record.phase is not Phase.ADDING:
                    change = (phase, blob, record.id, *addresses)
                    if self._connection.execute(_UPDATE, change).rowcount:
                        return
                self._connection.execute(_UPSERT, (record.id, *names, phase, *addresses, blob))
            # The unique indexes are a second guard: an address or attachment given twice is a mistake of the code
            # above.
            except sqlite3.IntegrityError as error:
                raise Bug(f"write record {record.id} of {key}: {error}") from error

    def remove(self, endpoint_ids: Iterable[EndpointId]) -> None:
        """Forget records, all in one transaction."""
        with self._lock, self._reported("write"), transaction(self._connection):
            self._connection.executemany(
                "DELETE FROM endpoint WHERE id = ?",
                [(endpoint_id,) for endpoint_id in endpoint_ids],
            )

    def list_records(self) -> Sequence[EndpointRecord]:
        """Give every record, oldest id first. Raises StorageFailure naming a record that cannot be read."""
        with self._lock, self._reported("read"):
            rows = self._connection.execute(
                "SELECT id, record FROM endpoint ORDER BY id"
            ).fetchall()
        records = []
        for endpoint_id, blob in rows:
            try:
                records.append(self._decode(blob))
            except msgspec.MsgspecError as error:
                raise StorageFailure(
                    f"read record {endpoint_id} of journal {str(self._path)!r}: {error}",
                    hint="the file was changed by something else; drain the node and remove it",
                ) from error
        return records

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
        """Give a fact; "" when there is none."""
        with self._lock, self._reported("read"):
            row = self._connection.execute(
                "SELECT value FROM fact WHERE name = ?", (name,)
            ).fetchone()
        return str(row[0]) if row else ""

    def _read_last_id(self) -> int:
        row = self._connection.execute(
            # The highest number that any row ever had (AUTOINCREMENT), also of rows that are gone.
            "SELECT seq FROM sqlite_sequence WHERE name = 'endpoint'"
        ).fetchone()
        return int(row[0]) if row else 0

    @contextmanager
    def _reported(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.DatabaseError, OSError) as error:
            raise StorageFailure(
                f"{verb} journal {str(self._path)!r}: {error}", hint=_hint(error)
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


def _hint(error: Exception) -> str:
    text = str(error)
    if "full" in text or "No space" in text:
        return "free space below the state directory and try again"
    if "malformed" in text or "not a database" in text:
        return schema.LAYOUT.if_damaged
    if "locked" in text:
        return "another program has the file open: close it"
    return "look at the state directory: does it exist, may root write there, is its disk healthy?"
