"""A server in front of an API server that passes everything on, and shows another time in the heads of its answers.

For tests of clocks that differ: no process can have a real time of its own. It looks at bytes, not at requests, so that
watches pass through it as they come.
"""

import contextlib
import re
import select
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime
from typing import Final

from podwire.kernel import netns
from podwire.lab.kubernetes.api_server import ApiServer

_DATE: Final = re.compile(rb"(?<=\r\nDate: )[^\r\n]+")
"""The API server writes the head of an answer in one piece, and no JSON has a line break of two bytes."""
_CHUNK_BYTES: Final = 65_536
_LOOK_S: Final = 0.05
"""How often connections look whether they are to end."""
_PATIENCE_S: Final = 30.0


@contextmanager
def showing_another_time(server: ApiServer, by: timedelta) -> Iterator[str]:
    """Serve beside the API server, in its network, with its clock put on by so much; gives the URL."""
    with netns.open_namespace(server.shape.network or "/proc/self/ns/net") as there:
        proxy = netns.run_in(there.fileno(), lambda: _Proxy(server, by, there.fileno()))
        with proxy:
            thread = threading.Thread(target=proxy.serve_forever, args=(_LOOK_S,))
            thread.start()
            try:
                yield f"https://{server.shape.address}:{proxy.server_address[1]}"
            finally:
                proxy.is_ending = True
                proxy.shutdown()
                thread.join()


class _Proxy(socketserver.ThreadingTCPServer):
    """Each connection has a thread; `server_close` waits for all."""

    def __init__(self, server: ApiServer, by: timedelta, network_fd: int) -> None:
        pair = server.authority.issue_server("another-time", [server.shape.address])
        self.is_ending = False
        self._api = (server.shape.address, server.port)
        self._by = by
        self._network_fd = network_fd
        self._to_clients = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._to_clients.load_cert_chain(pair.certificate, pair.key)
        self._to_server = ssl.create_default_context(cafile=str(server.ca))
        super().__init__((server.shape.address, 0), socketserver.BaseRequestHandler)

    def finish_request(self, request: object, client_address: object) -> None:
        """Pass on what comes of one client, on its thread."""
        assert isinstance(request, socket.socket)
        request.settimeout(_PATIENCE_S)
        with (
            contextlib.suppress(OSError),
            self._to_clients.wrap_socket(request, server_side=True) as client,
            self._connect() as api,
        ):
            while not self.is_ending:
                for source, target in ((client, api), (api, client)):
                    chunk = _take(source)
                    if chunk == b"":
                        return
                    if chunk:
                        target.sendall(_DATE.sub(self._show_later, chunk))
                if not (client.pending() or api.pending()):
                    select.select([client, api], [], [], _LOOK_S)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that have gone."""

    def _show_later(self, found: re.Match[bytes]) -> bytes:
        told = parsedate_to_datetime(found[0].decode())
        return format_datetime(told + self._by, usegmt=True).encode()

    def _connect(self) -> ssl.SSLSocket:
        plain = netns.run_in(
            self._network_fd, lambda: socket.create_connection(self._api, _PATIENCE_S)
        )
        return self._to_server.wrap_socket(plain, server_hostname=self._api[0])


def _take(source: ssl.SSLSocket) -> bytes | None:
    """Give what has come; None: nothing yet; b"": it has ended."""
    source.setblocking(False)
    try:
        return source.recv(_CHUNK_BYTES)
    except ssl.SSLWantReadError:
        return None
    finally:
        source.settimeout(_PATIENCE_S)
