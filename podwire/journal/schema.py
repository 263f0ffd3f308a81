"""The journal's tables, and how an older layout becomes today's.

Used by `journal.records` alone. `user_version` of the file is the layout's number: how many of STEPS it has been
through. A newer layout is refused, whatever it contains, because a later podwire may have written something that this
one would destroy. Invariant: a file is never left between two layouts, and never changed before it is known to be a
journal.
"""

import sqlite3
from typing import Final

from podwire.model.errors import NewerData, StorageFailure

APPLICATION_ID: Final = 0x70777231
"""Marks the file as ours ("pwr1"), for file(1) and against opening another program's database."""

STEPS: Final = (
    """
    CREATE TABLE endpoint (
        -- AUTOINCREMENT: a number is never given twice, not even after its row is gone
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        network TEXT NOT NULL,
        container_id TEXT NOT NULL,
        if_name TEXT NOT NULL,
        phase TEXT NOT NULL,
        ipv4 TEXT,
        ipv6 TEXT,
        record BLOB NOT NULL
    );
    -- The second guard, should the code above ever be wrong: a living attachment and an address are unique.
    CREATE UNIQUE INDEX endpoint_attachment
        ON endpoint (network, container_id, if_name) WHERE phase != 'deleting';
    CREATE UNIQUE INDEX endpoint_ipv4 ON endpoint (ipv4);
    CREATE UNIQUE INDEX endpoint_ipv6 ON endpoint (ipv6);
    CREATE TABLE fact (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    """,
)
"""Step n makes layout n + 1 of layout n. Released steps are never changed, only followed by another."""


def prepare(connection: sqlite3.Connection, path: str) -> None:
    """Check that the file is a whole journal of a known layout, and make today's layout of it in one transaction.

    Raises NewerData and StorageFailure; the file is then as it was.
    """
    newest = len(STEPS)
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if version > newest:
        raise NewerData(
            f"open journal {path!r}: its layout is {version}, this podwire knows up to {newest}",
            hint="run the newer podwire that wrote it, or drain the node and move the file away",
        )
    _refuse_foreign(connection, path)
    _refuse_damaged(connection, path)
    if version == newest:
        return
    # The connection is in autocommit mode: every transaction is begun by hand. IMMEDIATE takes the lock before
    # anything is read.
    connection.execute("BEGIN IMMEDIATE")
    try:
        for step in STEPS[version:]:
            _execute_all(connection, step)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {newest}")
        connection.execute("COMMIT")
    except sqlite3.Error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _refuse_foreign(connection: sqlite3.Connection, path: str) -> None:
    [owner] = connection.execute("PRAGMA application_id").fetchone()
    tables = connection.execute("SELECT name FROM sqlite_master LIMIT 1").fetchall()
    if tables and owner != APPLICATION_ID:
        raise StorageFailure(
            f"open journal {path!r}: it is another program's database (application id {owner:#x})",
            hint="give podwire a state_dir of its own",
        )


def _refuse_damaged(connection: sqlite3.Connection, path: str) -> None:
    """Look at every page: a damaged journal must not be found half-way through restore."""
    [verdict] = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise StorageFailure(
            f"open journal {path!r}: it is malformed: {verdict}",
            hint="the file is damaged: drain the node, move the file away and start the agent again",
        )


def _execute_all(connection: sqlite3.Connection, script: str) -> None:
    """Execute the statements one by one: executescript() would commit the open transaction first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""
