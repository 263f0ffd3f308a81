"""Waits until the API server knows a resource that it does not know yet: somebody creates its CRD.

Used by `store.kubernetes.streams` for kinds that a cluster may go without. One watch of the CRDs' metadata, and only
while somebody waits; where RBAC does not allow it, a look now and then. Invariant: a resource that is served is
noticed.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from podwire.model.errors import Unavailable
from podwire.store.kubernetes.api.client import Client, Request
from podwire.store.kubernetes.api.refusals import Intent, Refused
from podwire.store.kubernetes.api.resources import Resource, with_query
from podwire.store.kubernetes.api.wire import decode_event, decode_header, decode_list

DEFINITIONS: Final = Resource(
    kind="customresourcedefinitions",
    name="CustomResourceDefinition",
    group="apiextensions.k8s.io",
    version="v1",
    plural="customresourcedefinitions",
    namespaced=False,
    is_read_only=True,
)
LOOK_S: Final = 300.0
"""How often a waiter looks by itself while the watch works, and how long one watch lasts."""
LOOK_UNWATCHED_S: Final = 30.0
SERVED_S: Final = 0.2
SERVED_LOOKS: Final = 100
"""After its CRD was made a resource is served within a second or two."""
_AGAIN_S: Final = 2.0
_METADATA: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_METADATA_LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


@dataclass
class _Waiter:
    """The watches that wait for one resource."""

    look: asyncio.Event = field(default_factory=asyncio.Event)
    is_made: bool = False
    """Whether its CRD was seen: the resource is about to be served."""


class Definitions:
    """The watches that wait for CRDs. All calls on the loop's thread."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: dict[str, _Waiter] = {}
        self._following: asyncio.Task[None] | None = None
        self._is_watched = True

    async def wait_for(self, resource: Resource, absent: Callable[[], None]) -> None:
        """Return when the API server serves a resource. Raises Refused and Unavailable, as a list of it would.

        `absent` is called each time the server has said that it does not: then nothing is wrong.
        """
        waiter = self._waiting.setdefault(resource.full_name, _Waiter())
        if self._following is None:
            self._following = asyncio.create_task(self._follow(), name="watch CRDs")
        try:
            while not await self._is_served(resource):
                absent()
                wait_s = LOOK_S if self._is_watched else LOOK_UNWATCHED_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s * random.uniform(0.5, 1.0)):
                        await waiter.look.wait()
                waiter.look.clear()
                # A CRD exists before its resource is served: the API server first has to establish it and rebuild its
                # discovery.
                if waiter.is_made and await self._is_served_soon(resource):
                    return
                waiter.is_made = False
        finally:
            self._waiting.pop(resource.full_name, None)
            if not self._waiting and self._following is not None:
                self._following.cancel()
                self._following = None

    async def _is_served_soon(self, resource: Resource) -> bool:
        for _ in range(SERVED_LOOKS):
            if await self._is_served(resource):
                return True
            await asyncio.sleep(SERVED_S)
        return False

    async def _is_served(self, resource: Resource) -> bool:
        path = with_query(resource.path(), {"limit": 1})
        try:
            await self._client.call(Request(Intent("list", resource), "GET", path))
        except Refused as refused:
            if refused.is_without_resource:
                return False
            raise
        return True

    async def _follow(self) -> None:
        while True:
            try:
                await self._watch()
                self._is_watched = True
            except (Refused, Unavailable, msgspec.MsgspecError):
                self._is_watched = False
            await asyncio.sleep(_AGAIN_S * random.uniform(0.5, 1.0))

    async def _watch(self) -> None:
        """Follow changes from now on; whoever waits looks once more when the watch stands."""
        # The list is for its revision alone: annotations of CRDs are large.
        query: dict[str, str | int] = {"limit": 1}
        listing = Request(
            Intent("list", DEFINITIONS),
            "GET",
            with_query(DEFINITIONS.path(), query),
            accept=_METADATA_LIST,
        )
        revision = decode_list(await self._client.call(listing)).metadata.resource_version
        query = {"watch": 1, "resourceVersion": revision, "timeoutSeconds": int(LOOK_S)}
        watching = Request(
            Intent("watch", DEFINITIONS),
            "GET",
            with_query(DEFINITIONS.path(), query),
            accept=_METADATA,
        )
        async with self._client.stream(watching) as lines:
            for waiter in self._waiting.values():
                waiter.look.set()
            async for line in lines:
                told = decode_event(line)
                if told.type == "ERROR":
                    return
                if told.type == "DELETED":
                    continue
                name = decode_header(told.object).metadata.name
                if name in self._waiting:
                    self._waiting[name].is_made = True
                    self._waiting[name].look.set()
