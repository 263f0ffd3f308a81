"""The API of an agent that cannot serve yet: it says what the start waits for.

`agent.main` opens it when a start has to wait for something that only others can bring, such as the node's range, and
closes it before the real API opens the same socket. A thread of its own serves it, because the start occupies the main
one. Invariant: nothing but `status` and `healthz` is answered, and nothing is changed.
"""

import http.server
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import msgspec

from podwire import __version__
from podwire.agent.api.shared import CheckView, ErrorBody, ErrorView
from podwire.agent.unix_socket import open_unix_socket
from podwire.model.config import AgentConfig

CHECK: Final = "start"
CLIENT_DEADLINE_S: Final = 5.0
"""How long one client may take to ask: the next one waits for it no longer."""
END_LOOK_S: Final = 0.02
"""How often the thread looks whether it is to end: the start goes on only then, and pods wait for that."""


class WaitingApi:
    """Answers `GET /v1/status` and `GET /v1/healthz` while the agent starts."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._started = _now()
        self._reason = ""
        self._since = ""
        self._server: _Server | None = None

    def wait_for(self, reason: str, hint: str = "") -> None:
        """Say what the start waits for, from now on; the first time, open the socket."""
        text = f"{reason} ({hint})" if hint else reason
        if text != self._reason:
            self._reason, self._since = text, _now()
        if self._server is None:
            self._server = _Server(self._config.files.api_socket, self.answer)

    def close(self) -> None:
        """Close the socket; the second time do nothing."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def answer(self, path: str) -> tuple[HTTPStatus, Any]:
        """Give status and document of the answer to a GET."""
        if path == "/v1/status":
            return HTTPStatus.OK, self._status()
        view = ErrorView(
            code="unavailable",
            message=f"serve: the agent is starting: {self._reason}",
            hint="see `podwire status` and the agent's log",
        )
        return HTTPStatus.SERVICE_UNAVAILABLE, ErrorBody(error=view)

    def _status(self) -> dict[str, Any]:
        """Give what `status` of a started agent has, as far as it is known."""
        check = CheckView(name=CHECK, ok=False, message=self._reason, since=self._since)
        return {
            "ready": False,
            "version": __version__,
            "node": self._config.node.node_name,
            "started": self._started,
            "pid": os.getpid(),
            "store": {"kind": self._config.store.store.partition(":")[0], "ok": False},
            "datapath": {"mode": self._config.datapath.datapath, "programs": ""},
            "endpoints": {"total": 0, "byState": {}},
            "ipam": {"mode": self._config.node.ipam, "ranges": []},
            "checks": [check],
            "warnings": [f"{CHECK}: {self._reason}"],
        }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class _Server(socketserver.ThreadingMixIn, socketserver.BaseServer):
    """Serves on a listening unix socket, each client on a thread."""

    daemon_threads = True

    def __init__(self, path: Path, answer: Callable[[str], tuple[HTTPStatus, Any]]) -> None:
        super().__init__(os.fspath(path), _Handler)
        self.answer = answer
        self._path = path
        self._listener = open_unix_socket(path)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(END_LOOK_S,), name="api-waiting", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop answering, and remove the socket's file, because the next socket has its name."""
        self.shutdown()
        self._thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def fileno(self) -> int:
        return self._listener.fileno()

    def get_request(self) -> tuple[socket.socket, str]:
        client, _ = self._listener.accept()
        client.settimeout(CLIENT_DEADLINE_S)
        # The standard library wants an address, and a client of a unix socket has none.
        return client, "unix"

    def shutdown_request(self, request: Any) -> None:
        request.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        status, document = self.server.answer(self.path.partition("?")[0])
        body = msgspec.json.encode(document)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        # The real API takes over the socket's name: a connection that was kept would go on asking this one.
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_arguments: object) -> None:
        """Say nothing: the agent's log has its own form."""
