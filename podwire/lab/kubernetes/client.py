"""Requests to an API server by other code than podwire's own: what the rig waits for, and what tests write.

Speaks HTTPS with a token from within a network namespace. Answers are plain JSON documents.
"""

import http.client
import json
import socket
import ssl
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from podwire.kernel import netns
from podwire.model.errors import PodwireError

JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"
_TIMEOUT_S: Final = 60.0


class Refused(PodwireError):
    """The API server answered with an error: `status` as in HTTP."""

    kind = "refused"

    def __init__(self, intent: str, status: int, text: str) -> None:
        super().__init__(f"{intent}: {status}: {text}")
        self.status = status


class ApiClient:
    """One user's way to an API server; each request is a connection of its own."""

    def __init__(
        self, address: str, port: int, *, ca: Path, token: str, network: str | None = None
    ) -> None:
        self.address, self.port, self.token = address, port, token
        self.network = network
        self._context = ssl.create_default_context(cafile=str(ca))

    def get(self, path: str) -> Any:
        """Read a path."""
        return self.request("GET", path)

    def create(self, path: str, document: Mapping[str, Any]) -> Any:
        """Post a document to a collection."""
        return self.request("POST", path, document)

    def replace(self, path: str, document: Mapping[str, Any]) -> Any:
        """Put a document."""
        return self.request("PUT", path, document)

    def patch(self, path: str, document: Mapping[str, Any]) -> Any:
        """Merge a document into an object."""
        return self.request("PATCH", path, document, content_type=MERGE_PATCH)

    def create_many(self, path: str, documents: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Post documents to a collection, one after the other over one connection."""
        connection = http.client.HTTPConnection(self.address, self.port)
        with self._connect() as connection.sock:
            return [
                self._exchange(connection, "POST", path, document, JSON) for document in documents
            ]

    def delete(self, path: str, options: Mapping[str, Any] | None = None) -> Any:
        """Delete an object, or a collection."""
        return self.request("DELETE", path, options)

    def apply(self, path: str, document: Mapping[str, Any]) -> Any:
        """Create an object or bring it to what the document says."""
        query = f"{path}?fieldManager=rig&force=true"
        return self.request("PATCH", query, document, content_type=APPLY_PATCH)

    def request(
        self,
        method: str,
        path: str,
        document: Mapping[str, Any] | None = None,
        *,
        content_type: str = JSON,
    ) -> Any:
        """Send a request; gives the answer's document, or its text. Refused, or OSError when nobody answers."""
        connection = http.client.HTTPConnection(self.address, self.port)
        with self._connect() as connection.sock:
            return self._exchange(connection, method, path, document, content_type)

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        document: Mapping[str, Any] | None,
        content_type: str,
    ) -> Any:
        body = None if document is None else json.dumps(document).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Accept": JSON}
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            raw = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path}: {error!r}") from error
        text = raw.decode(errors="replace")
        if answer.status >= 400:
            raise Refused(f"{method} {path}", answer.status, text.strip())
        kind = answer.headers.get_content_type()
        return json.loads(text) if kind == JSON else text

    def answers(self, path: str = "/readyz") -> bool:
        """Tell whether the server answers a path with success."""
        try:
            self.get(path)
        except (OSError, Refused):
            return False
        return True

    def _connect(self) -> ssl.SSLSocket:
        make = partial(socket.socket, _family(self.address), socket.SOCK_STREAM)
        raw = make() if self.network is None else netns.run_at(self.network, make)
        try:
            raw.settimeout(_TIMEOUT_S)
            raw.connect((self.address, self.port))
            return self._context.wrap_socket(raw, server_hostname=self.address)
        except BaseException:
            raw.close()
            raise


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
