"""Leases in etcd: a key that etcd removes when its lease is not kept alive.

Made by `store.etcd.store`. The loop keeps leases alive without etcd's log, so this costs no write. Invariant: only its
own holder replaces a key. A key of another holder ends when that holder gives it up or when etcd removes it.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from podwire.model.closing import Closing
from podwire.model.errors import Conflict, PodwireError, Unavailable
from podwire.model.store import Compacted
from podwire.model.store.leases import LeaseChange, compare_holders
from podwire.store.etcd import wire
from podwire.store.etcd.cluster import Cluster
from podwire.store.etcd.keys import LEASES
from podwire.store.etcd.watch import KeyWatch
from podwire.store.etcd.wire import KeyValue, LeaseAnswer

TTL_MIN_S: Final = 2
"""What etcd makes of anything shorter, with its usual election timeout of one second."""
CLAIM_ATTEMPTS: Final = 10
_AGAIN_S: Final = 1.0
LOOK_EVERY: Final = 3
"""With every so many signs of life it is looked whether the key is there: somebody may have deleted it."""


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class EtcdLease:
    """Implements `model.store.leases.Lease`."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        holder: str,
        ttl_s: float,
        forget: "Callable[[EtcdLease], None]",
    ) -> None:
        self.name = name
        self.holder = holder
        self.taken_by = ""
        self._cluster = cluster
        self._ttl_s = max(TTL_MIN_S, math.ceil(ttl_s))
        self._forget = forget
        self._number = 0
        self._until_s = 0.0
        self._renewals = 0
        self._closed = False
        self._keeping: asyncio.Task[None]
        self._is_stopped = False

    @property
    def lost(self) -> bool:
        """Whether another may hold it."""
        return self._closed or bool(self.taken_by) or _now_s() >= self._until_s

    def open(self) -> None:
        """Take it, and keep it alive from now on."""
        self._cluster.run(self._begin())

    def close(self) -> None:
        """Give it up at once; what keeps it alive has ended when this returns."""
        self._closed = True
        self._forget(self)
        self.let_go()
        with contextlib.suppress(PodwireError):
            self._cluster.run(self._give_up())

    def let_go(self) -> None:
        """Keep it alive no longer; it runs out."""
        with contextlib.suppress(Unavailable):  # the loop is closed: its tasks have ended
            self._cluster.thread.start(self._stop_keeping())

    async def _begin(self) -> None:
        await self._claim()
        self._keeping = asyncio.create_task(self._keep(), name=f"lease {self.name}")

    async def _stop_keeping(self) -> None:
        if not self._is_stopped:
            # Only once: a second cancellation would interrupt `_claim` where it takes back what it was granted.
            self._is_stopped = True
            self._keeping.cancel()
        await asyncio.wait([self._keeping])

    async def _give_up(self) -> None:
        # A renewal that is under way may write the key again, with a new lease: which one it is, is known at its end.
        await self._stop_keeping()
        await self._revoke(self._number)

    async def _keep(self) -> None:
        # Three signs of life in one time to live, so that one may be lost.
        wait_s = self._ttl_s / 3
        while not self.taken_by:
            await asyncio.sleep(wait_s)
            try:
                await self._renew()
                wait_s = self._ttl_s / 3
            except Conflict:
                return
            except (
                PodwireError
            ):  # the store's users hear of it; the lease itself tells that it is lost
                wait_s = min(self._ttl_s / 3, _AGAIN_S)

    async def _renew(self) -> None:
        """Live on; when etcd has let it run out, take it again if nobody else has."""
        started_s = _now_s()
        answer = await self._cluster.call(
            "lease/keepalive", {"ID": self._number}, wire.Framed[LeaseAnswer]
        )
        # etcd answers the keepalive of a lease that it does not know with TTL 0 and no error.
        if answer.result is None or not answer.result.TTL:
            await self._claim()
            return
        self._renewals += 1
        if not self._renewals % LOOK_EVERY:
            await self._restore()
        # Counted from before the request. etcd began to count later, so this side never believes in a lease that
        # others see end.
        self._until_s = started_s + answer.result.TTL

    async def _restore(self) -> None:
        """Write the key again if it is gone; Conflict when another has it by now. Past etcd's log while it is there."""
        key = LEASES + self.name.encode()
        pairs, _ = await self._cluster.read_range(key, key + b"\0")
        if not any(pair.lease == self._number for pair in pairs):
            await self._write(self._number)

    async def _claim(self) -> None:
        """Take the name with a lease of etcd's; Conflict when another has it."""
        started_s = _now_s()
        granted = await self._cluster.call("lease/grant", {"TTL": self._ttl_s}, LeaseAnswer)
        try:
            await self._write(granted.ID)
        except BaseException:
            with contextlib.suppress(PodwireError):
                # The lease would keep nothing, but etcd would carry it until its time is over.
                await self._revoke(granted.ID)
            raise
        self._number, self._until_s = granted.ID, started_s + granted.TTL

    async def _write(self, number: int) -> None:
        key, expected = LEASES + self.name.encode(), 0
        for _ in range(CLAIM_ATTEMPTS):
            answer, _is_doubtful = await self._cluster.transact(
                [wire.equal(key, expected)],
                [wire.put(key, self.holder.encode(), number)],
                [wire.read(key)],
            )
            pair = None if answer.succeeded else answer.values()[0]
            # The second condition: the first attempt was carried out and its answer was lost.
            if answer.succeeded or (pair is not None and pair.lease == number):
                return
            if pair is not None and pair.value != self.holder.encode():
                other = pair.value.decode(errors="replace")
                if self._number:
                    self.taken_by = other
                raise Conflict(
                    f"take lease {self.name!r} for {self.holder}: {other} has it",
                    hint="it is free when the holder gives it up, or when its time to live ends after the holder died",
                )
            # The key is this holder's, from an earlier life or lease. It is replaced under the condition that it
            # still is.
            expected = pair.mod_revision if pair is not None else 0
        raise Unavailable(f"take lease {self.name!r}: it keeps changing")

    async def _revoke(self, number: int) -> None:
        await self._cluster.call("lease/revoke", {"ID": number}, LeaseAnswer)


class EtcdLeases:
    """Implements `model.store.leases.Leases`."""

    def __init__(self, cluster: Cluster, *, idle_s: float) -> None:
        self._cluster = cluster
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._open: set[EtcdLease | EtcdLeaseWatch] = set()

    def acquire(self, name: str, holder: str, ttl_s: float) -> EtcdLease:
        """Take a name; Conflict names the holder when another has it."""
        made = EtcdLease(self._cluster, name, holder, ttl_s, self._forget)
        made.open()
        with self._lock:
            self._open.add(made)
        return made

    def holders(self, prefix: str = "") -> Mapping[str, str]:
        """Give the holders that live."""
        return read_holders(self._cluster, prefix)[0]

    def watch(self, prefix: str = "") -> "EtcdLeaseWatch":
        """Watch holders come and vanish."""
        made = EtcdLeaseWatch(self._cluster, prefix, self._forget, idle_s=self._idle_s)
        with self._lock:
            self._open.add(made)
        return made

    def close(self) -> None:
        """Let go of everything; what is held runs out."""
        with self._lock:
            opened = tuple(self._open)
        for lease in opened:
            if isinstance(lease, EtcdLease):
                lease.let_go()
            else:
                lease.close()

    def _forget(self, opened: "EtcdLease | EtcdLeaseWatch") -> None:
        with self._lock:
            self._open.discard(opened)


class EtcdLeaseWatch(Closing):
    """Implements `model.store.leases.LeaseWatch`."""

    def __init__(
        self,
        cluster: Cluster,
        prefix: str,
        forget: "Callable[[EtcdLeaseWatch], None]",
        *,
        idle_s: float,
    ) -> None:
        self.is_listed = False
        self._cluster = cluster
        self._prefix = prefix
        self._forget = forget
        self._idle_s = idle_s
        self._holders: dict[str, str] = {}
        self._keys: KeyWatch | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def holders(self) -> Mapping[str, str]:
        """What was given so far, put together."""
        return dict(self._holders)

    def next(self, timeout_s: float) -> Sequence[LeaseChange]:
        """Give what has changed; see `model.store.leases.LeaseWatch`."""
        deadline_s = time.monotonic() + timeout_s
        while not self._closed:
            try:
                holders = self._look(deadline_s)
            except Compacted:
                self._drop()
                continue
            changes = compare_holders(self._holders, holders)
            self._holders = holders
            if changes or time.monotonic() >= deadline_s:
                return changes
        return ()

    def close(self) -> None:
        """Stop watching; a waiting `next` on another thread returns ()."""
        self._closed = True
        self._drop()
        self._forget(self)

    def _look(self, deadline_s: float) -> dict[str, str]:
        """Give all holders as they are after the next change, or now when nothing is known yet."""
        keys = self._keys
        if keys is None:
            present, revision = read_holders(self._cluster, self._prefix)
            first, end = _range(self._prefix)
            with self._lock:
                if not self._closed:
                    self._keys = KeyWatch(self._cluster, first, end, revision, idle_s=self._idle_s)
            self.is_listed = True
            return present
        batch = keys.take(deadline_s - time.monotonic())
        holders = dict(self._holders)
        for event in batch[0] if batch is not None else ():
            if event.type == "DELETE":
                holders.pop(_name(event.kv), None)
            else:
                holders[_name(event.kv)] = _holder(event.kv)
        return holders

    def _drop(self) -> None:
        with self._lock:
            keys, self._keys = self._keys, None
        if keys is not None:
            keys.close()


def read_holders(cluster: Cluster, prefix: str) -> tuple[dict[str, str], int]:
    """Read the holders that live, and the revision of that list."""
    pairs, revision = cluster.run(cluster.read_range(*_range(prefix)))
    return {_name(pair): _holder(pair) for pair in pairs}, revision


def _range(prefix: str) -> tuple[bytes, bytes]:
    first = LEASES + prefix.encode()
    return first, wire.prefix_end(first)


def _name(pair: KeyValue) -> str:
    return pair.key.removeprefix(LEASES).decode(errors="replace")


def _holder(pair: KeyValue) -> str:
    return pair.value.decode(errors="replace")
