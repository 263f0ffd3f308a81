"""Leases in memory: they live until they are closed, or until a test lets them vanish."""

import threading
import time
from collections.abc import Mapping, Sequence

from podwire.model.closing import Closing
from podwire.model.errors import Conflict, Unavailable
from podwire.model.store import Store
from podwire.model.store.leases import LeaseChange, Leases, compare_holders


def leases_of(store: Store) -> Leases:
    """Give the leases of a store that has some."""
    leases = store.leases()
    assert leases is not None
    return leases


class MemoryLease:
    """Implements `model.store.leases.Lease`."""

    def __init__(self, leases: "MemoryLeases", name: str, holder: str) -> None:
        self.name = name
        self.holder = holder
        self._leases = leases

    @property
    def lost(self) -> bool:
        return self._leases.living.get(self.name) != self.holder

    @property
    def taken_by(self) -> str:
        found = self._leases.living.get(self.name, "")
        return "" if found == self.holder else found

    def close(self) -> None:
        if not self.lost:
            self._leases.vanish(self.name)


class MemoryLeases:
    """Implements `model.store.leases.Leases`. `away` makes every call raise Unavailable."""

    def __init__(self) -> None:
        self.away = False
        self.living: dict[str, str] = {}
        self.changed = threading.Condition(threading.RLock())

    def acquire(self, name: str, holder: str, ttl_s: float) -> MemoryLease:
        assert ttl_s > 0
        self.check()
        with self.changed:
            found = self.living.get(name, holder)
            if found != holder:
                raise Conflict(f"take lease {name!r} for {holder}: {found} has it")
            self.living[name] = holder
            self.changed.notify_all()
        return MemoryLease(self, name, holder)

    def vanish(self, name: str) -> None:
        """Let a holder die."""
        with self.changed:
            self.living.pop(name, None)
            self.changed.notify_all()

    def holders(self, prefix: str = "") -> Mapping[str, str]:
        self.check()
        with self.changed:
            return {name: who for name, who in self.living.items() if name.startswith(prefix)}

    def watch(self, prefix: str = "") -> "MemoryLeaseWatch":
        return MemoryLeaseWatch(self, prefix)

    def check(self) -> None:
        """Raise Unavailable when that is wanted."""
        if self.away:
            raise Unavailable("use leases: the store is away")


class MemoryLeaseWatch(Closing):
    """Implements `model.store.leases.LeaseWatch`."""

    def __init__(self, leases: MemoryLeases, prefix: str) -> None:
        self.holders: Mapping[str, str] = {}
        self.is_listed = False
        self._leases = leases
        self._prefix = prefix
        self._closed = False

    def next(self, timeout_s: float) -> Sequence[LeaseChange]:
        deadline_s = time.monotonic() + timeout_s
        with self._leases.changed:
            while not self._closed:
                found = self._leases.holders(self._prefix)
                changes = compare_holders(self.holders, found)
                self.holders, self.is_listed = found, True
                left_s = deadline_s - time.monotonic()
                if changes or left_s <= 0:
                    return changes
                self._leases.changed.wait(left_s)
        return ()

    def close(self) -> None:
        with self._leases.changed:
            self._closed = True
            self._leases.changed.notify_all()
