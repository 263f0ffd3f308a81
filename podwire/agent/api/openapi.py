"""The type of the API's table of operations, and its description as an OpenAPI 3.1 document.

`agent.api.routes` fills the table, `agent.api.server` serves it. The document is computed from the same types that
encode the answers, so it always agrees with what is sent. Pure.
"""

import http
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from podwire.agent.api.shared import ErrorBody

PREFIX = "/v1"
_PLACEHOLDER = re.compile(r"\{(?P<name>[a-z]+)\}")


class Parameter(msgspec.Struct, frozen=True):
    """One query parameter."""

    name: str
    about: str
    kind: Literal["string", "integer", "boolean"] = "string"


class Call(msgspec.Struct, frozen=True):
    """One request, taken apart and checked against its route."""

    params: Mapping[str, str] = msgspec.field(default_factory=dict)
    query: Mapping[str, Any] = msgspec.field(default_factory=dict)
    body: Any = None


class Route(msgspec.Struct, frozen=True):
    """One operation. `handler` gets the API's context and a Call and returns a value of `answer`."""

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    """Below the prefix, with `{name}` for a part of the path."""
    summary: str
    handler: Callable[[Any, Call], object]
    answer: Any = None
    """Type of the answer; None = no body (204)."""
    body: Any = None
    """Type of the request's body; None = none is read."""
    query: tuple[Parameter, ...] = ()
    errors: tuple[int, ...] = ()
    """Statuses besides 400, 408, 413, 429, 500 and 503, which every operation may answer."""
    blocking: bool = False
    """Whether the handler waits for kernel, disk or the node's turn: it then runs on a thread."""
    media: str = "application/json"


ALWAYS = (400, 408, 413, 429, 500, 503)

PATH_PARTS: Mapping[str, tuple[str, str]] = {
    "id": (
        # A pod's name comes after a slash, plain or encoded; a pod may be called like a sub-path.
        r"(?:pod-name:(?:(?!%2[Ff])[^/])+(?:/|%2[Ff])[^/]+|(?!pod-name:)[^/]+)",
        "A number, cni-attachment-id:CID[:IFNAME], container-id:CID, pod-name:NS/NAME,"
        " ipv4:ADDRESS or ipv6:ADDRESS.",
    ),
    "ip": (r"[^/]+", "An IP address."),
    "kind": (r"[^/]+", "The plural name of a kind, as in `podwire get`."),
    "namespace": (r"[^/]+", "A namespace."),
    "name": (r"[^/]+", "The name of an object, or of a map."),
}
"""Placeholder -> expression it matches, description."""


def describe(routes: tuple[Route, ...], version: str) -> dict[str, Any]:
    """Compute the OpenAPI document."""
    types = [kind for route in routes for kind in (route.answer, route.body) if kind is not None]
    types.append(ErrorBody)
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, schema_of)
        paths.setdefault(PREFIX + route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "podwire agent", "version": version},
        "servers": [{"url": "http://localhost", "description": "unix socket api.sock"}],
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(route: Route, schema_of: Mapping[str, Any]) -> dict[str, Any]:
    parameters = [
        {
            "name": match["name"],
            "in": "path",
            "required": True,
            "description": PATH_PARTS[match["name"]][1],
            "schema": {"type": "string"},
        }
        for match in _PLACEHOLDER.finditer(route.path)
    ] + [
        {
            "name": parameter.name,
            "in": "query",
            "required": False,
            "description": parameter.about,
            "schema": {"type": parameter.kind},
        }
        for parameter in route.query
    ]
    words = [re.sub(r"\W", "", part) for part in route.path.split("/") if part]
    operation: dict[str, Any] = {
        "operationId": "_".join([route.method.lower(), *words]),
        "summary": route.summary,
        "responses": _responses(route, schema_of),
    }
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[repr(route.body)]}},
        }
    return operation


def _responses(route: Route, schema_of: Mapping[str, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    if route.answer is None:
        responses["204"] = {"description": "done"}
    else:
        schema = schema_of[repr(route.answer)]
        responses["200"] = {"description": "done", "content": {route.media: {"schema": schema}}}
    for status in sorted({*ALWAYS, *route.errors}):
        responses[str(status)] = {
            "description": http.HTTPStatus(status).phrase.lower(),
            "content": {"application/json": {"schema": schema_of[repr(ErrorBody)]}},
        }
    return responses
