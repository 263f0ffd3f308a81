"""The journal's tables and how an older layout becomes today's.

Used by `journal.records` alone. `user_version` of the file is the layout's number. A newer one is refused, whatever
is in it: what a later podwire wrote may mean something that this one would destroy.
"""

import sqlite3
from typing import Final

from podwire.model.errors import NewerData

SCHEMA_VERSION: Final = 1

_TABLES = """
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
CREATE UNIQUE INDEX endpoint_attachment ON endpoint (network, container_id, if_name) WHERE phase != 'deleting';
CREATE UNIQUE INDEX endpoint_ipv4 ON endpoint (ipv4);
CREATE UNIQUE INDEX endpoint_ipv6 ON endpoint (ipv6);
CREATE TABLE fact (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


def prepare(connection: sqlite3.Connection, path: str) -> None:
    """Make or migrate the tables; raises NewerData when the file's layout is not known yet."""
    [found] = connection.execute("PRAGMA user_version").fetchone()
    if found > SCHEMA_VERSION:
        raise NewerData(
            f"open journal {path!r}: its layout is {found}, this podwire knows up to {SCHEMA_VERSION}",
            hint="run the newer podwire that wrote it, or drain the node and remove the file",
        )
    if found == SCHEMA_VERSION:
        return
    connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
