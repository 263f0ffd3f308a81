"""An agent's API with hardly more than objects behind it, on a real socket, for tests of the object commands."""

import http.server
import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from podwire.agent.api.objects import ROUTES_OBJECTS
from podwire.agent.api.openapi import Call
from podwire.agent.api.routes import error_answer
from podwire.model.store import Store


@dataclass(frozen=True)
class ObjectsContext:
    """What the handlers ask of the API."""

    store: Store
    label_patterns: tuple[str, ...] = ()
    policies: tuple[dict[str, Any], ...] = ()


class _Server(socketserver.ThreadingUnixStreamServer):
    context: ObjectsContext


class _Handler(http.server.BaseHTTPRequestHandler):
    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        """Tests read answers, not logs."""

    def _answer(self) -> None:
        status, body = self._serve()
        data = msgspec.json.encode(body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = _answer

    def _serve(self) -> tuple[int, Any]:
        parts = urlsplit(self.path)
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        assert isinstance(self.server, _Server)
        if parts.path == "/v1/config":
            patterns = list(self.server.context.label_patterns)
            return 200, {"settings": {"identity_label_filter": {"value": patterns}}}
        if parts.path == "/v1/policy":
            return 200, list(self.server.context.policies)
        for route in ROUTES_OBJECTS:
            pattern = "/v1" + re.sub(r"\{([a-z]+)\}", r"(?P<\1>[^/]+)", route.path)
            match = re.fullmatch(pattern, parts.path)
            if match is None or route.method != self.command:
                continue
            kinds = {parameter.name: parameter.kind for parameter in route.query}
            query = {
                name: value == "1" if kinds[name] == "boolean" else value
                for name, value in parse_qsl(parts.query)
            }
            params = {name: unquote(value) for name, value in match.groupdict().items()}
            try:
                body = msgspec.json.decode(raw, type=route.body) if route.body else None
                return 200, route.handler(self.server.context, Call(params, query, body))
            except Exception as error:
                return error_answer(error)
        return 404, {"error": {"code": "not-found", "message": f"no path {parts.path}"}}


@contextmanager
def serving_objects(
    path: Path,
    store: Store,
    *,
    label_patterns: tuple[str, ...] = (),
    policies: tuple[dict[str, Any], ...] = (),
) -> Iterator[None]:
    """Serve the object routes over `store` on a unix socket until the block ends; and what is told beside them."""
    server = _Server(str(path), _Handler)
    server.context = ObjectsContext(store, label_patterns, policies)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
