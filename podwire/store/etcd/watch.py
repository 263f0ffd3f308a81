"""Watches of etcd: one stream of a key range, continued after every break where it was left.

Made by `store.etcd.store`. The stream is followed on the loop's thread; what it brings waits for the reader, within
bounds. Never writes. Invariant: each change that is returned follows the previous one without a gap, or Compacted is
raised.
"""

import asyncio
import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final

import msgspec

from podwire.model.closing import Closing
from podwire.model.errors import PodwireError, Unavailable
from podwire.model.store import Compacted, ObjectKey, Revisions, StoredObject, StoreEvent
from podwire.store.etcd import wire
from podwire.store.etcd.cluster import Cluster
from podwire.store.etcd.gateway import Refused
from podwire.store.etcd.keys import FORMAT_KEY, decode_object, name_key, range_of_kinds
from podwire.store.etcd.wire import Event, WatchAnswer

IDLE_S: Final = 60.0
"""A stream that brings nothing for so long is opened anew: it may be dead without a sign."""
WAITING_MAX: Final = 64
"""Messages that wait for the reader before the stream is left to etcd; one has up to 1,000 revisions."""
_AGAIN_BASE_S: Final = 0.1
_AGAIN_CAP_S: Final = 1.0

_decode = msgspec.json.Decoder(wire.Framed[WatchAnswer], strict=False).decode

Batch = tuple[Sequence[Event], int]
"""Changes, and the revision up to which everything was given with them."""


class KeyWatch:
    """Changes of the keys from `first` to before `end`, after a revision. One thread reads it; any may close it."""

    def __init__(
        self, cluster: Cluster, first: bytes, end: bytes, after_revision: int, *, idle_s: float
    ) -> None:
        self._cluster = cluster
        self._range = (first, end)
        self._heard = after_revision
        self._idle_s = idle_s
        self._cluster_id = 0
        self._batches: deque[Batch] = deque()
        self._changed = threading.Condition()
        self._error: PodwireError | None = None
        self._is_news = False
        self._is_settled = False
        self._closed = False
        self._room = asyncio.Event()
        self._room.set()
        self._following = cluster.thread.start(self._follow())

    def wait_until_open(self, timeout_s: float) -> None:
        """Return when the stream is open, or it is known that it cannot be."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled or self._closed, timeout_s)

    def stop_waiting(self) -> None:
        """Have `wait_until_open` return."""
        with self._changed:
            self._is_settled = True
            self._changed.notify_all()

    def take(self, timeout_s: float) -> Batch | None:
        """Give the oldest changes, waiting for them; None when none came, or it is closed.

        Unavailable when the stream broke, at once; afterwards each time when it did not come back in `timeout_s`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._batches or self._is_news or self._closed, max(timeout_s, 0)
            )
            if self._closed:
                return None
            if self._batches:
                self._leave_room(len(self._batches) - 1)
                return self._batches.popleft()
            if self._error is not None:
                self._is_news = not isinstance(self._error, Unavailable) or isinstance(
                    self._error, Compacted
                )
                raise self._error
        return None

    def close(self) -> None:
        """Stop; a waiting `take` gives None."""
        with self._changed:
            self._closed = True
            self._batches.clear()
            self._changed.notify_all()
        self._following.cancel()

    def _leave_room(self, left: int) -> None:
        if left < WAITING_MAX and not self._room.is_set():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._cluster.thread.loop.call_soon_threadsafe(self._room.set)

    async def _follow(self) -> None:
        delay_s = _AGAIN_BASE_S
        while not self._closed:
            try:
                await self._read_stream()
                delay_s = _AGAIN_BASE_S
                continue
            except Unavailable as error:
                self._tell(error)
                if isinstance(error, Compacted):
                    return
            except PodwireError as error:
                self._tell(error)
                return
            except (
                Exception
            ) as error:  # the task's door: the reader is told, and all is tried again
                self._tell(Unavailable(f"watch etcd: {error!r}"))
            # Every agent's stream breaks at the same moment when an etcd stops. Without jitter all of them would come
            # back at once.
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(_AGAIN_CAP_S, delay_s * 2)

    def _tell(self, error: PodwireError | None) -> None:
        with self._changed:
            # The reader hears of a break once, and of none if the stream came back before the reader looked.
            self._is_news = error is not None and (
                self._error is None or not isinstance(error, Unavailable) or self._is_news
            )
            self._error = error
            self._is_settled = True
            self._changed.notify_all()

    async def _read_stream(self) -> None:
        """Follow the stream until it is silent for too long; all other ends are errors."""
        await self._cluster.check()
        first, end = self._range
        body = {
            "create_request": {
                "key": first,
                "range_end": end,
                # Not the revision behind it: told to compact up to a deletion, etcd before 3.5.16 forgets that one and
                # lets a watch begin there as if nothing had been deleted (etcd issue 18089).
                "start_revision": max(self._heard, 1),
                # etcd then says from time to time how far it is, even when no key of the range changes. Without it a
                # quiet watch would resume at a revision that was compacted meanwhile, and list again.
                "progress_notify": True,
                # An event of a deletion has only the key; the contract also gives what was there.
                "prev_kv": True,
            }
        }
        try:
            async with self._cluster.gateway.stream("watch", body) as lines:
                with contextlib.suppress(_Idle):
                    async for answer in self._read_answers(lines):
                        await self._hear(answer)
        except Refused as error:
            raise self._cluster.gateway.refuse(error) from None

    async def _read_answers(self, lines: AsyncIterator[bytes]) -> AsyncIterator[WatchAnswer]:
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    line = await anext(lines)
            except TimeoutError:
                raise _Idle from None
            message = _decode(line)
            if message.result is None:
                failure = msgspec.json.decode(bytes(message.error), type=wire.Failure)
                reason = failure.message or failure.error
                raise Refused(
                    failure.grpc_code or failure.code, reason, self._cluster.gateway.where
                )
            yield message.result

    async def _hear(self, answer: WatchAnswer) -> None:
        # etcd cancels a watch whose first revision was compacted and names the oldest that is left (etcd API,
        # WatchResponse).
        if answer.compact_revision:
            raise self._compacted(f"the store remembers changes from {answer.compact_revision} on")
        if answer.canceled:
            reason = answer.cancel_reason or "etcd ended the watch"
            if "auth token" in reason:  # told here and not where the stream is opened
                self._cluster.gateway.forget_login()
            code = wire.PERMISSION_DENIED if "permission" in reason else wire.UNAVAILABLE
            raise Refused(code, reason, self._cluster.gateway.where)
        if answer.created:
            await self._check_same(answer.header)
            self._tell(None)
            return
        revision = answer.events[-1].kv.mod_revision if answer.events else answer.header.revision
        if revision > self._heard:
            # The stream begins at a revision that was given already (see `_read_stream`), so its first changes may be
            # known.
            news = tuple(event for event in answer.events if event.kv.mod_revision > self._heard)
            # A reader that is slow holds up the stream here. TCP then holds up etcd, which keeps the changes, so no
            # memory grows.
            await self._room.wait()
            with self._changed:
                self._heard = revision
                self._batches.append((news, revision))
                if len(self._batches) >= WAITING_MAX:
                    self._room.clear()
                self._changed.notify_all()

    async def _check_same(self, header: wire.Header) -> None:
        """Raise Compacted when what answers is another etcd by now, or was put back to an older state."""
        known, self._cluster_id = self._cluster_id or header.cluster_id, header.cluster_id
        # Revisions of two clusters have nothing to do with each other: going on would skip changes in silence.
        if header.cluster_id != known:
            raise self._compacted("another etcd answers by now")
        if header.revision >= self._heard:
            return
        _, newest = await self._cluster.read(FORMAT_KEY)  # a member may lag, but not this
        if newest < self._heard:
            raise self._compacted(f"the store is at {newest}: it is another one, or was restored")

    def _compacted(self, reason: str) -> Compacted:
        where = self._cluster.gateway.where
        return Compacted(
            f"watch etcd at {where} after revision {self._heard}: {reason}",
            hint="list the objects again and watch from the revision of that list",
        )


class _Idle(Exception):
    """Nothing came for long."""


class EtcdWatch(Closing):
    """Implements `model.store.Watch`."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        after: Revisions,
        forget: "Callable[[EtcdWatch], None]",
        idle_s: float = IDLE_S,
    ) -> None:
        first, end = range_of_kinds(list(after))
        self._after = dict(after)
        self._revision = min(after.values())
        """Of etcd: up to which the stream was read. What a kind was listed with may be ahead of it."""
        self._forget = forget
        self._keys = KeyWatch(cluster, first, end, self._revision, idle_s=idle_s)

    @property
    def revisions(self) -> Revisions:
        """Up to which revision of each kind everything was given."""
        return {kind: max(after, self._revision) for kind, after in self._after.items()}

    @property
    def failing(self) -> Mapping[str, str]:
        """Nothing: one stream gives all kinds."""
        return {}

    def wait_until_open(self, timeout_s: float) -> None:
        """Return when the stream is open, or it is known that it cannot be."""
        self._keys.wait_until_open(timeout_s)

    def stop_waiting(self) -> None:
        """Have `wait_until_open` return."""
        self._keys.stop_waiting()

    def next(self, timeout_s: float) -> Sequence[StoreEvent]:
        """Give what has happened; see `model.store.Watch`."""
        deadline_s = time.monotonic() + timeout_s
        while (batch := self._take(deadline_s - time.monotonic())) is not None:
            events = tuple(filter(None, map(self._make_event, batch[0])))
            self._revision = batch[1]
            if events:
                return events
        return ()

    def close(self) -> None:
        """Stop watching; a waiting `next` on another thread returns ()."""
        self._keys.close()
        self._forget(self)

    def _take(self, timeout_s: float) -> Batch | None:
        try:
            return self._keys.take(timeout_s)
        except Compacted as error:
            raise Compacted(error.message, hint=error.hint, kinds=self._after) from None

    def _make_event(self, event: Event) -> StoreEvent | None:
        key, revision = name_key(event.kv.key), event.kv.mod_revision
        if revision <= self._after.get(key.kind, revision):
            return None
        if event.type != "DELETE":
            return StoreEvent(decode_object(event.kv), revision)
        return StoreEvent(_make_last(event, key), revision, deleted=True)


def _make_last(event: Event, key: ObjectKey) -> StoredObject:
    """Make what was there before it was deleted; etcd may have forgotten it."""
    return StoredObject(key=key) if event.prev_kv is None else decode_object(event.prev_kv)
