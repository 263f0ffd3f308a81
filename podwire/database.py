"""The files that podwire keeps in sqlite: whose a file is, which layout it has, and how it gets today's.

Used by `journal` and `store`, each with a layout of its own. `user_version` of a file is the layout's number: how many
of its steps it has been through. Invariant: a file is never left between two layouts, and never changed before it is
known to be of podwire, whole, and no newer than this podwire. The caller's connection is in autocommit mode, so every
transaction is begun by hand.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from podwire.model.errors import NewerData, StorageFailure


class Layout(msgspec.Struct, frozen=True):
    """What one kind of file has inside, and what a person can do about a file that cannot be used."""

    name: str
    """What messages call the file."""
    application_id: int
    """Marks a file as ours, for file(1) and against opening another program's database."""
    steps: tuple[str, ...]
    """Step n makes layout n + 1 of layout n. Released steps are never changed, only followed by another."""
    if_newer: str
    if_foreign: str
    if_damaged: str

    def check(self, connection: sqlite3.Connection, path: str) -> None:
        """See to it that the file is a whole one of a known layout; changes nothing.

        Raises NewerData: a later podwire may have written something that this one would destroy. Raises StorageFailure.
        """
        [layout] = connection.execute("PRAGMA user_version").fetchone()
        if layout > len(self.steps):
            raise NewerData(
                f"open {self.name} {path!r}: its layout is {layout}, this podwire knows up to"
                f" {len(self.steps)}",
                hint=self.if_newer,
            )
        [owner] = connection.execute("PRAGMA application_id").fetchone()
        tables = connection.execute("SELECT name FROM sqlite_master LIMIT 1").fetchall()
        if tables and owner != self.application_id:
            raise StorageFailure(
                f"open {self.name} {path!r}: it is another program's database (application id"
                f" {owner:#x})",
                hint=self.if_foreign,
            )
        # Every page: damage must not be found in the middle of the work. Unlike integrity_check, quick_check does not
        # compare indexes with tables: its time grows with the file alone.
        [verdict] = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise StorageFailure(
                f"open {self.name} {path!r}: it is malformed: {verdict}", hint=self.if_damaged
            )

    def bring_up(self, connection: sqlite3.Connection) -> None:
        """Make today's layout of an older one."""
        [layout] = connection.execute("PRAGMA user_version").fetchone()
        if layout == len(self.steps):
            return
        # All steps in one transaction, the number of the layout included: a kill in between leaves the old layout
        # whole.
        with transaction(connection):
            for step in self.steps[layout:]:
                _execute_all(connection, step)
            connection.execute(f"PRAGMA application_id = {self.application_id}")
            connection.execute(f"PRAGMA user_version = {len(self.steps)}")


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


def _execute_all(connection: sqlite3.Connection, script: str) -> None:
    """Execute the statements one by one: executescript() would commit the open transaction first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""
