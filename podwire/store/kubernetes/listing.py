"""Lists of objects, page by page, all of one moment.

Used by `store.kubernetes.store` and `watch` on the loop. Invariant: a list that is given is whole, and of the one
revision that is given with it. When the server forgets that revision between two pages the list is begun anew.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from podwire.model.errors import Unavailable
from podwire.store.kubernetes.api.client import Client, Request
from podwire.store.kubernetes.api.refusals import Intent, Refused
from podwire.store.kubernetes.api.resources import Resource, Selector, with_query
from podwire.store.kubernetes.api.wire import ObjectList, decode_headers, decode_list

PAGE: Final = 500
PATIENCE: Final = 4.0
"""A page is larger than an object, and an API server that has just started reads it from etcd first."""
ATTEMPTS: Final = 3
METADATA: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""Of a list: names and revisions alone."""


async def list_pages(
    client: Client,
    resource: Resource,
    selector: Selector,
    namespace: str | None = None,
    at_least: int | None = None,
) -> tuple[list[msgspec.Raw], int]:
    """Read all objects of a resource; gives them and their revision. Raises Refused, and Unavailable.

    `at_least`: a state not older than that revision will do, which the server may have in memory.
    """
    for _ in range(ATTEMPTS):
        try:
            return await _read(client, resource, selector, namespace, at_least)
        except Refused as refused:
            if refused.is_expired:
                continue  # between two pages, of which there are fewer the next time
            if at_least and _is_behind(refused):
                at_least = None
                continue
            raise
    raise Unavailable(
        f"list {resource.full_name}: the API server forgets pages before they are read",
        hint="does it compact its etcd all the time?",
    )


async def read_revision(client: Client, resource: Resource) -> int:
    """Give the revision that a resource is at now; 0 when the server does not know the resource."""
    page = await _read_page(client, resource, {"limit": 1}, None)
    return int(page.metadata.resource_version or 0)


async def read_newest(client: Client, resource: Resource) -> int:
    """Give the highest revision of any object of a resource; 0 when it has none. Raises Refused, and Unavailable.

    A revision of the list would not do: it is that of all resources, which a watch of this one may never be told.
    """
    # Without resourceVersion the answer is no older than the question ("Most Recent"). NotOlderThan with a revision
    # that was just heard answers 504 after 3 s where the API server's etcd is 3.4.
    intent = Intent("list", resource)
    request = Request(intent, "GET", resource.path(), accept=METADATA)
    listed = decode_headers(await client.call(request))
    return max(
        (int(header.metadata.resource_version or 0) for header in listed.items or ()), default=0
    )


async def _read(
    client: Client,
    resource: Resource,
    selector: Selector,
    namespace: str | None,
    at_least: int | None,
) -> tuple[list[msgspec.Raw], int]:
    query: dict[str, str | int] = {**selector.query(), "limit": PAGE}
    if at_least is not None:
        query["resourceVersion"] = at_least
        if at_least:  # 0 is any state already, and takes no word about how it is meant
            # Kubernetes API concepts, "Resource versions": without a match, a limit beside a revision asks for
            # exactly that revision, which the server may have forgotten.
            query["resourceVersionMatch"] = "NotOlderThan"
    found: list[msgspec.Raw] = []
    while True:
        page = await _read_page(client, resource, query, namespace)
        found += page.items or ()
        if not page.metadata.next_page:
            # The resourceVersion of every page of one list is the same: that of the moment of the first page.
            return found, int(page.metadata.resource_version or 0)
        # Goes on with what the first page was of; the server refuses other words about the revision beside it.
        query = {**selector.query(), "limit": PAGE, "continue": page.metadata.next_page}


async def _read_page(
    client: Client, resource: Resource, query: Mapping[str, str | int], namespace: str | None
) -> ObjectList:
    intent = Intent("list", resource, namespace=namespace or "")
    path = with_query(resource.path(namespace), query)
    try:
        return decode_list(await client.call(Request(intent, "GET", path, patience=PATIENCE)))
    except msgspec.MsgspecError as error:
        raise Unavailable(
            f"{intent}: what answers is no Kubernetes API: {error}",
            hint=f"is {client.access.server} the API server?",
        ) from None


def _is_behind(refused: Refused) -> bool:
    """Tell whether the server has not seen the revision yet, or never will: it was put back to an older state."""
    return any(
        cause.reason == "ResourceVersionTooLarge" for cause in refused.status.subject.causes or ()
    )
