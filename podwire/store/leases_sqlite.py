"""Leases in the store's file: a row with the time until which its holder is alive, renewed by a thread.

Made by `store.sqlite`. Must never touch objects or their log of changes, because renewing a lease changes nothing that
is watched. Times count from boot and go with the boot's name, so neither a changed clock nor a reboot makes a dead
holder look alive. Invariant: a row is replaced only by its holder or after its time.
"""

import contextlib
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from podwire.database import transaction
from podwire.model.errors import Conflict, PodwireError, Unavailable
from podwire.model.store import OpenWaker, Waker
from podwire.model.store.leases import LeaseChange, compare_holders
from podwire.store.sqlite_file import StoreFile
from podwire.store.sqlite_watch import FileWatch

LOOK_EVERY_S: Final = 1.0
"""How often a watch looks by itself, and how soon a renewal that failed is tried again at most."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_ALIVE: Final = "boot = ? AND until_ns > ?"


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class SqliteLease:
    """Implements `model.store.leases.Lease`."""

    def __init__(self, leases: "SqliteLeases", name: str, holder: str, ttl_s: float) -> None:
        self.name = name
        self.holder = holder
        self.ttl_s = ttl_s
        self.token = uuid.uuid4().hex
        self.taken_by = ""
        self.until_ns = 0
        self._leases = leases

    @property
    def lost(self) -> bool:
        """Whether another may hold it."""
        return bool(self.taken_by) or _now_ns() >= self.until_ns

    def close(self) -> None:
        """Give it up at once."""
        self._leases.give_up(self)

    def renew(self) -> None:
        """Live for another `ttl_s`, or find out which process took it."""
        try:
            self._leases.write(self)
        except Conflict as error:
            self.taken_by = self._leases.holders(self.name).get(self.name, error.message)


class SqliteLeases:
    """Implements `model.store.leases.Leases` in the file of a store."""

    def __init__(self, file: StoreFile, open_waker: OpenWaker) -> None:
        self._file = file
        self._open_waker = open_waker
        self._boot = _BOOT_ID.read_text(encoding="ascii").strip()
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._changed = threading.Condition()
        self._held: set[SqliteLease] = set()
        self._watches: set[SqliteLeaseWatch] = set()
        self._keeper: threading.Thread | None = None
        self._closed = False

    def acquire(self, name: str, holder: str, ttl_s: float) -> SqliteLease:
        """Take a name; Conflict names the holder when another has it."""
        made = SqliteLease(self, name, holder, ttl_s)
        self.write(made)
        with self._changed:
            self._held.add(made)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="leases", daemon=True)
                self._keeper.start()
            self._changed.notify_all()
        self._wake()
        return made

    def holders(self, prefix: str = "") -> Mapping[str, str]:
        """Give the holders that live."""
        return self.read(prefix)[0]

    def watch(self, prefix: str = "") -> "SqliteLeaseWatch":
        """Watch holders come and vanish."""
        with self._file.reported("watch leases of"):
            waker = self._open_waker(self._file.revision_path)
        made = SqliteLeaseWatch(self, waker, prefix, self._forget)
        with self._changed:
            self._watches.add(made)
        return made

    def close(self) -> None:
        """Let go of everything; what is held runs out."""
        with self._changed:
            self._closed = True
            watches, keeper = tuple(self._watches), self._keeper
            self._changed.notify_all()
        for watch in watches:
            watch.close()
        if keeper is not None:
            keeper.join()
        with self._lock:
            if self._connection is not None:
                self._connection.close()

    def give_up(self, lease: SqliteLease) -> None:
        """Remove the row of a lease, if it still is its own."""
        with self._changed:
            self._held.discard(lease)
        lease.until_ns = 0
        # By token: a later life of this holder may have the row, and giving up the earlier lease must not remove it.
        with contextlib.suppress(PodwireError), self._writing() as connection:
            connection.execute(
                "DELETE FROM lease WHERE name = ? AND token = ?", (lease.name, lease.token)
            )
        self._wake()

    def read(self, prefix: str) -> tuple[dict[str, str], float]:
        """Give the holders that live, and in how many seconds the first of them may vanish."""
        now_ns = _now_ns()
        with self._using() as connection:
            rows = connection.execute(
                f"SELECT name, holder, until_ns FROM lease WHERE {_ALIVE}"
                " AND substr(name, 1, ?) = ?",
                (self._boot, now_ns, len(prefix), prefix),
            ).fetchall()
        # A lease that runs out changes no row, so no write wakes the watch. It has to look again when the first one
        # may have.
        first_ns = min((row[2] for row in rows), default=now_ns + 10**12)
        return {name: holder for name, holder, _ in rows}, (first_ns - now_ns) / 1e9

    def write(self, lease: SqliteLease) -> None:
        """Write the row of a lease with a new time; Conflict when another's lives."""
        # The time is taken before the write. A lease must end here no later than others see it end, even if the write
        # waits long for the lock.
        started_ns = _now_ns()
        until_ns = started_ns + int(lease.ttl_s * 1e9)
        with self._writing() as connection:
            row = connection.execute(
                f"SELECT holder, token FROM lease WHERE name = ? AND {_ALIVE}",
                (lease.name, self._boot, started_ns),
            ).fetchone()
            is_first = lease.until_ns == 0
            # Renewed by token: a second life of this holder may have it by now.
            is_ours = row is None or (row[0] == lease.holder if is_first else row[1] == lease.token)
            if not is_ours:
                raise Conflict(
                    f"take lease {lease.name!r} for {lease.holder}: {row[0]} has it",
                    hint="it is free when the holder gives it up, or when its time to live ends after the holder died",
                )
            connection.execute(
                "INSERT OR REPLACE INTO lease VALUES (?, ?, ?, ?, ?)",
                (lease.name, lease.holder, lease.token, self._boot, until_ns),
            )
        lease.until_ns = until_ns

    def _keep(self) -> None:
        """Renew what is held, each three times within its time to live."""
        due_s: dict[SqliteLease, float] = {}
        while True:
            with self._changed:
                held = [lease for lease in self._held if not lease.taken_by]
                now_s = time.monotonic()
                due_s = {lease: due_s.get(lease, now_s + lease.ttl_s / 3) for lease in held}
                wait_s = min(due_s.values()) - now_s if due_s else None
                if not self._closed and (wait_s is None or wait_s > 0):
                    self._changed.wait(wait_s)
                if self._closed:
                    return
            for lease in [lease for lease in held if due_s[lease] <= time.monotonic()]:
                try:
                    lease.renew()
                    due_s[lease] = time.monotonic() + lease.ttl_s / 3
                except (
                    PodwireError
                ):  # the store's users hear of it; the lease itself tells that it is lost
                    due_s[lease] = time.monotonic() + min(lease.ttl_s / 3, LOOK_EVERY_S)

    def _wake(self) -> None:
        self._file.touch()
        with self._changed:
            watches = tuple(self._watches)
        for watch in watches:
            watch.wake()

    def _forget(self, watch: "SqliteLeaseWatch") -> None:
        with self._changed:
            self._watches.discard(watch)

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._file.reported("use leases of"):
            if self._closed:
                raise Unavailable("use leases: the store is closed")
            self._file.check_same()
            if self._connection is None:
                self._connection = self._file.connect()
                # Nobody lives on after a power cut: these rows need not be on disk before a write returns.
                self._connection.execute("PRAGMA synchronous = NORMAL")
            yield self._connection

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._using() as connection, transaction(connection):
            yield connection


class SqliteLeaseWatch(FileWatch[LeaseChange]):
    """Implements `model.store.leases.LeaseWatch`."""

    def __init__(
        self,
        leases: SqliteLeases,
        waker: Waker,
        prefix: str,
        forget: "Callable[[SqliteLeaseWatch], None]",
    ) -> None:
        super().__init__(waker, lambda: forget(self))
        self.is_listed = False
        self._leases = leases
        self._prefix = prefix
        self._holders: dict[str, str] = {}

    @property
    def holders(self) -> Mapping[str, str]:
        """What was given so far, put together."""
        return dict(self._holders)

    def _look(self) -> tuple[Sequence[LeaseChange], float]:
        holders, vanish_s = self._leases.read(self._prefix)
        changes = compare_holders(self._holders, holders)
        self._holders, self.is_listed = holders, True
        return changes, max(vanish_s, 0.01)
