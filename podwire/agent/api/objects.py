"""The API's operations on objects: list, get, put, delete, apply; and what this node makes of services.

`agent.api.routes` includes ROUTES_OBJECTS in its table. `control.documents.apply` makes all decisions. The handlers
block on the store's disk, so all of them run on a thread.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from podwire.agent.api.context import Api
from podwire.agent.api.openapi import Call, Parameter, Route
from podwire.agent.api.shared import Document
from podwire.control.documents.apply import Applied, apply_documents, delete_object, put_object
from podwire.control.documents.kinds import make_key, show_document
from podwire.control.services.catalogue import ServiceView as KnownService
from podwire.model.endpoint import PROTOCOL_NAMES
from podwire.model.errors import InvalidRequest, NotFound
from podwire.model.interfaces import BackEnd, Frontend
from podwire.model.store import ObjectKey, StoredObject
from podwire.model.store.kinds import Kind, kind_of_plural


class AppliedView(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one object. `before` and `after` are its documents; only a dry run tells them.

    `revision`: the store's that holds it, for clients that wait until a policy is enforced.
    """

    kind: str
    namespace: str
    name: str
    action: str
    revision: int | None = None
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


class ObjectList(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Objects of a kind, as Kubernetes writes lists; `podwire apply` takes it back."""

    api_version: str = "v1"
    kind: str = "List"
    metadata: dict[str, str]
    items: list[dict[str, Any]]


def list_objects(api: Api, call: Call) -> ObjectList:
    kind = _kind(call)
    namespace = call.query.get("namespace")
    objects, revision = api.store.list(kind.plural, namespace if kind.namespaced else None)
    return ObjectList(
        metadata={"resourceVersion": str(revision)},
        items=[show_document(stored) for stored in objects],
    )


def get_object(api: Api, call: Call) -> dict[str, Any]:
    key = _key(call)
    stored = api.store.get(key)
    if stored is None:
        raise NotFound(f"get {key}: there is none", hint=f"see podwire get {key.kind}")
    return show_document(stored)


def put_one(api: Api, call: Call) -> dict[str, Any]:
    """Make one object so, and show it."""
    done = put_object(api.store, _key(call), call.body, dry_run=_is_dry(call))
    return show_document(_after(done))


def delete_one(api: Api, call: Call) -> AppliedView:
    return _view(delete_object(api.store, _key(call), dry_run=_is_dry(call)), dry=_is_dry(call))


def apply_all(api: Api, call: Call) -> list[AppliedView]:
    """Make many objects so: all are checked before the first is written."""
    namespace, dry = str(call.query.get("namespace", "")), _is_dry(call)
    done = apply_documents(api.store, call.body, namespace=namespace, dry_run=dry)
    return [_view(applied, dry=dry) for applied in done]


class ServicePortView(Document, frozen=True, kw_only=True):
    """One address and port of a service, and who answers there."""

    address: str
    port: int
    protocol: str
    back_ends: tuple[str, ...]
    """`10.0.0.7:8080`; IPv6 in brackets."""
    left: bool
    """This port is left to the stack because of its back ends; the service's problem says why."""


class ServiceView(Document, frozen=True, kw_only=True):
    """One service as this node knows it."""

    namespace: str
    name: str
    translated: bool
    """What pods of this node send there goes to a back end; false = it is left to the stack."""
    ports: tuple[ServicePortView, ...]
    problem: str
    """Why it is left to the stack, or who else has an address of it; empty when nothing is wrong."""


def list_services(api: Api, _call: Call) -> list[ServiceView]:
    """Show every service that this node knows."""
    read = api.services
    return [] if read is None else [_view_service(known) for known in read()]


def _view_service(known: KnownService) -> ServiceView:
    return ServiceView(
        namespace=known.name.namespace,
        name=known.name.name,
        translated=known.is_translated,
        ports=tuple(_view_ports(known)),
        problem=known.problem,
    )


def _view_ports(known: KnownService) -> Iterator[ServicePortView]:
    for frontend, back_ends in known.claims.items():
        if frontend.port:
            yield _view_port(frontend, back_ends)


def _view_port(frontend: Frontend, back_ends: Sequence[BackEnd]) -> ServicePortView:
    return ServicePortView(
        address=str(frontend.address),
        port=frontend.port,
        protocol=PROTOCOL_NAMES[frontend.protocol].lower(),
        back_ends=tuple(
            _write_back_end(back_end) for back_end in back_ends if not back_end.is_stack
        ),
        left=any(back_end.is_stack for back_end in back_ends),
    )


def _write_back_end(back_end: BackEnd) -> str:
    host = f"[{back_end.address}]" if back_end.address.version == 6 else str(back_end.address)
    return f"{host}:{back_end.port}"


def _after(done: Applied) -> StoredObject:
    assert done.after is not None, "what was put is there"
    return done.after


def _view(done: Applied, *, dry: bool) -> AppliedView:
    return AppliedView(
        kind=done.key.kind,
        namespace=done.key.namespace,
        name=done.key.name,
        action=done.action,
        revision=None if dry else done.revision,
        before=_document(done.before) if dry else None,
        after=_document(done.after) if dry else None,
    )


def _document(stored: StoredObject | None) -> dict[str, Any] | None:
    return None if stored is None else dict(stored.document)


def _is_dry(call: Call) -> bool:
    return bool(call.query.get("dryRun", False))


def _kind(call: Call) -> Kind:
    kind = kind_of_plural(_key_of(call.params["kind"], "", "-").kind)
    assert kind is not None, "keys have known kinds"
    return kind


def _key(call: Call) -> ObjectKey:
    params: Mapping[str, str] = call.params
    return _key_of(params["kind"], params.get("namespace", ""), params["name"])


def _key_of(kind: str, namespace: str, name: str) -> ObjectKey:
    try:
        return make_key(kind, namespace, name)
    except InvalidRequest as error:
        # The words come from the path: what cannot name an object is a path that does not exist.
        raise NotFound(error.message, hint=error.hint) from None


_DRY_RUN: Final = Parameter("dryRun", "Only report what would be done.", "boolean")
_NAMESPACE: Final = Parameter("namespace", "Only objects of this namespace.")
_DEFAULT: Final = Parameter(
    "namespace", "Namespace of objects that name none; by default `default`."
)
_Document = dict[str, Any]


def _routes_of_one(path: str) -> tuple[Route, ...]:
    """Give the operations on one object; its namespace is a part of the path, or `default`, or it has none."""
    return (
        Route("GET", path, "One object", get_object, _Document, errors=(404, 507), blocking=True),
        Route(
            "PUT",
            path,
            "Create or replace an object",
            put_one,
            _Document,
            body=_Document,
            query=(_DRY_RUN,),
            errors=(404, 409, 507),
            blocking=True,
        ),
        Route(
            "DELETE",
            path,
            "Delete an object",
            delete_one,
            AppliedView,
            query=(_DRY_RUN,),
            errors=(404, 409, 507),
            blocking=True,
        ),
    )


ROUTES_OBJECTS: Final[tuple[Route, ...]] = (
    Route("GET", "/service", "Services", list_services, list[ServiceView], blocking=True),
    Route(
        "GET",
        "/object/{kind}",
        "All objects of a kind",
        list_objects,
        ObjectList,
        query=(_NAMESPACE,),
        errors=(404, 507),
        blocking=True,
    ),
    *_routes_of_one("/object/{kind}/{name}"),
    *_routes_of_one("/object/{kind}/{namespace}/{name}"),
    Route(
        "POST",
        "/apply",
        "Create or replace objects, all or none if one is invalid",
        apply_all,
        list[AppliedView],
        body=list[Any],
        query=(_DRY_RUN, _DEFAULT),
        errors=(409, 507),
        blocking=True,
    ),
)
"""`{kind}` is the plural name; the singular and short names of the command line are taken too."""
