"""One watch of the API server for each kind, whoever reads it: resumed after every break, and shared.

Made by `store.kubernetes.store`. What comes is decoded once and handed to every reader (`store.kubernetes.watch`); a
window of the last changes lets a reader join that listed a moment ago. Never writes. Invariant: what a reader is handed
of a kind follows what it had without a gap; else it is told that it is compacted.
"""

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

from podwire.model.errors import PodwireError, Unavailable
from podwire.model.store import Revisions, StoreEvent
from podwire.store.kubernetes.api.client import AGAIN_BASE_S, Client, Request
from podwire.store.kubernetes.api.refusals import Intent, Refused
from podwire.store.kubernetes.api.resources import (
    EVERYTHING,
    Resource,
    Selector,
    Selectors,
    find_resource,
    with_query,
)
from podwire.store.kubernetes.api.wire import decode_event, decode_header, read_status
from podwire.store.kubernetes.definitions import Definitions
from podwire.store.kubernetes.listing import read_revision
from podwire.store.kubernetes.objects import decode_object
from podwire.store.kubernetes.watch import KubernetesWatch
from podwire.store.loop import LoopThread

IDLE_S: Final = 100.0
"""A watch that brings nothing for so long is opened anew, as it may be dead: bookmarks come about once a minute."""
LASTS_S: Final = (300, 600)
"""How long one watch may last: each ends at another time, so that they spread over several API servers again."""
WINDOW: Final = 1_000
"""Changes kept for readers that join."""
AGAIN_CAP_S: Final = 1.0


class Hub:
    """The streams of one client, one for each kind that somebody reads."""

    def __init__(
        self, thread: LoopThread, client: Client, selectors: Selectors, *, idle_s: float = IDLE_S
    ) -> None:
        self.thread = thread
        self.client = client
        self.definitions = Definitions(client)
        self.idle_s = idle_s
        self.lock = threading.Lock()
        self._selectors = selectors
        self._streams: dict[str, Stream] = {}
        self._newest: dict[str, int] = {}

    def select(self, kind: str) -> Selector:
        """Give which objects of a kind are read."""
        return self._selectors.get(kind, EVERYTHING)

    def note(self, kind: str, revision: int) -> None:
        """Remember that the server has had a revision of a kind."""
        if revision > self._newest.get(kind, 0):
            self._newest[kind] = revision

    def attach(self, reader: KubernetesWatch, after: Revisions) -> None:
        """Hand a reader all changes of some kinds, of each after a revision."""
        with self.lock:
            for kind, revision in after.items():
                stream = self._streams.get(kind)
                if stream is None:
                    stream = self._streams[kind] = Stream(self, find_resource(kind), revision)
                stream.join(reader, is_new=revision > self._newest.get(kind, 0))

    def detach(self, reader: KubernetesWatch) -> None:
        """Hand a reader nothing more; a stream that nobody reads ends."""
        with self.lock:
            for kind, stream in tuple(self._streams.items()):
                stream.leave(reader)
                if not stream.readers:
                    stream.stop()
                    del self._streams[kind]


class Stream:
    """What comes of one kind after the revision `first`. Everything but `_run` happens under the hub's lock."""

    def __init__(self, hub: Hub, resource: Resource, first: int) -> None:
        self.readers: list[KubernetesWatch] = []
        self._hub = hub
        self._resource = resource
        self._first = first
        """The window has everything after it."""
        self._heard = first
        self._window: deque[StoreEvent] = deque()
        self._is_open = False
        self._is_doubtful = False
        """Whether the server may be at an older revision than what it is asked for: put back, or another one."""
        self._error: PodwireError | None = None
        self._life = 0
        self._running: Future[None] | None = None

    def join(self, reader: KubernetesWatch, *, is_new: bool) -> None:
        """Take a reader in. `is_new`: it has a revision that the server has never named."""
        kind = self._resource.kind
        after = reader.heard(kind)
        self.readers.append(reader)
        self._is_doubtful |= is_new
        # It is new, or all its readers were compacted: where they were the server does not know the kind any more.
        if self._running is None:
            self._begin_at(after)
            return
        if is_new or after < self._first:
            self._begin_at(min(after, self._heard))
            return
        reader.hand(kind, tuple(self._window), self._heard)
        if self._is_open or self._error is not None:
            reader.fail(kind, self._error)

    def leave(self, reader: KubernetesWatch) -> None:
        """Let a reader go."""
        self.readers = [other for other in self.readers if other is not reader]

    def stop(self) -> None:
        """End the watch."""
        # A coroutine that is cancelled may still be between two awaits. By its life it finds out that it has nothing
        # to say any more.
        self._life += 1
        if self._running is not None:
            self._running.cancel()
            self._running = None

    def _begin_at(self, revision: int) -> None:
        """Watch anew from a revision; readers that are further are handed what they know, and leave it out."""
        self.stop()
        self._first = self._heard = revision
        self._window.clear()
        self._is_open = False
        self._running = self._hub.thread.start(self._run(self._life))

    async def _run(self, life: int) -> None:
        delay_s = AGAIN_BASE_S
        while True:
            began_s, wait_s = time.monotonic(), 0.0
            try:
                # A server that was restored from a backup may take a revision of its future and wait for it in
                # silence.
                if self._is_doubtful and not await self._check(life):
                    return
                await self._follow(life)
            except Refused as refused:
                if refused.is_expired:
                    self._expire(life, refused.status.message)
                    return
                if refused.is_without_resource and self._resource.is_optional:
                    await self._wait_for_definition(life)
                    return
                wait_s = refused.retry_after_s
                self._break(life, self._hub.client.explain(refused))
            except PodwireError as error:
                self._break(life, error)
            except Exception as error:  # the task's door: readers are told, and all is tried again
                self._break(life, Unavailable(f"watch {self._resource.full_name}: {error!r}"))
            if self._is_open and time.monotonic() - began_s > AGAIN_CAP_S:
                delay_s = AGAIN_BASE_S
            # Never earlier than Retry-After asks, and spread, because all agents lose an API server at the same
            # moment.
            await asyncio.sleep(max(wait_s, delay_s) * random.uniform(0.5, 1.0) + wait_s / 2)
            delay_s = min(AGAIN_CAP_S, delay_s * 2)

    async def _follow(self, life: int) -> None:
        """Open the watch and hand on what comes, until it ends or is silent for too long."""
        resource = self._resource
        query: dict[str, str | int] = {
            **self._hub.select(resource.kind).query(),
            "watch": 1,
            # Bookmarks move the revision on when a kind is quiet. Without them a watch would resume at a revision
            # that etcd compacted, five minutes later by default, and list everything again.
            "allowWatchBookmarks": "true",
            "resourceVersion": self._heard,
            "timeoutSeconds": random.randint(*LASTS_S),
        }
        intent = Intent("watch", resource)
        request = Request(intent, "GET", with_query(resource.path(), query))
        async with self._hub.client.stream(request) as lines:
            self._note_open(life)
            async for line in _until_silent(lines, self._hub.idle_s):
                told = decode_event(line)
                # A watch fails within its stream: HTTP 200 was answered long ago. The object is a Status, usually 410
                # "Expired".
                if told.type == "ERROR":
                    raise Refused(intent, read_status(bytes(told.object), 500))
                if told.type == "BOOKMARK":
                    header = decode_header(told.object)
                    self._hand(life, (), int(header.metadata.resource_version or 0))
                    continue
                made = decode_object(resource, told.object)
                event = StoreEvent(made, made.revision, deleted=told.type == "DELETED")
                self._hand(life, (event,), made.revision)

    async def _check(self, life: int) -> bool:
        """Compact the readers that are ahead of the server; False when this watch has no right to go on."""
        newest = await read_revision(self._hub.client, self._resource)
        reason = f"the API server is at {newest}: it is another one, or was put back"
        return not self._compact(life, lambda heard: heard > newest, reason, checked=True)

    async def _wait_for_definition(self, life: int) -> None:
        """Nothing can be there until the CRD is; then whoever listed nothing lists again."""
        self._note_open(life)
        while True:
            try:
                await self._hub.definitions.wait_for(self._resource, partial(self._note_open, life))
                break
            except (Refused, Unavailable) as error:
                told = self._hub.client.explain(error) if isinstance(error, Refused) else error
                self._break(life, told)
            await asyncio.sleep(AGAIN_CAP_S * random.uniform(0.5, 1.0))
        self._compact(life, lambda _: True, "the API server did not know the resource until now")

    def _expire(self, life: int, message: str) -> None:
        here = self._heard
        self._compact(life, lambda heard: heard <= here, message)

    def _compact(
        self, life: int, is_hit: Callable[[int], bool], reason: str, *, checked: bool = False
    ) -> bool:
        """Tell readers, by what they have heard, that they may have missed something; the others are served from where
        the first of them is. Gives whether this watch has ended."""
        kind = self._resource.kind
        with self._hub.lock:
            if life != self._life:
                return True
            self._is_doubtful = self._is_doubtful and not checked
            hit = [reader for reader in self.readers if is_hit(reader.heard(kind))]
            for reader in hit:
                reader.compact(kind, f"after revision {reader.heard(kind)}: {reason}")
                self.leave(reader)
            if checked and not hit:
                return False
            if self.readers:
                self._begin_at(min(reader.heard(kind) for reader in self.readers))
            else:
                self.stop()
            return True

    def _note_open(self, life: int) -> None:
        with self._hub.lock:
            if life == self._life:
                self._is_open, self._error = True, None
                for reader in self.readers:
                    reader.fail(self._resource.kind, None)

    def _break(self, life: int, error: PodwireError) -> None:
        with self._hub.lock:
            if life == self._life:
                self._is_open, self._error, self._is_doubtful = False, error, True
                for reader in self.readers:
                    reader.fail(self._resource.kind, error)

    def _hand(self, life: int, events: Sequence[StoreEvent], revision: int) -> None:
        kind = self._resource.kind
        with self._hub.lock:
            if life != self._life:
                return
            self._heard = max(self._heard, revision)
            self._hub.note(kind, revision)
            self._window.extend(events)
            while len(self._window) > WINDOW:
                self._first = self._window.popleft().revision
            for reader in self.readers:
                reader.hand(kind, events, revision)


async def _until_silent(lines: AsyncIterator[bytes], idle_s: float) -> AsyncIterator[bytes]:
    """Give lines until they end, or none comes for too long."""
    while True:
        try:
            async with asyncio.timeout(idle_s):
                line = await anext(lines)
        except (TimeoutError, StopAsyncIteration):
            return
        yield line
