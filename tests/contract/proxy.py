"""A TCP proxy of the loopback that can fail in the ways that networks and middleboxes do."""

import contextlib
import selectors
import socket
import threading
from typing import Self

OPEN = "open"
STALLED = "stalled"
"""Connections stay, new ones are taken, and nothing goes through them any more, whatever the proxy becomes."""
DEAF = "deaf"
"""Requests go through; answers do not, and the connection ends in their place."""
CLOSED = "closed"
"""Connections end, and new ones do too."""


class Proxy:
    """Forwards to HOST:PORT while it is open."""

    def __init__(self, target: str) -> None:
        self.mode = OPEN
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._peers: dict[socket.socket, socket.socket] = {}
        self._clients: set[socket.socket] = set()
        self._dead: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._stopping = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    @property
    def endpoint(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def connections(self) -> int:
        """How many clients are connected now."""
        with self._lock:
            return len(self._clients)

    def become(self, mode: str) -> None:
        """Behave in another way from now on."""
        with self._lock:
            self.mode = mode
            if mode == STALLED:
                self._dead.update(self._peers)
            if mode == CLOSED:
                for client in list(self._clients):
                    self._drop(client)

    def __enter__(self) -> Self:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stopping = True
        self._waker.send(b"x")
        self._thread.join()
        with self._lock:
            for client in list(self._clients):
                self._drop(client)
        self._selector.close()
        for opened in (self._listener, self._wake, self._waker):
            opened.close()

    def _run(self) -> None:
        while not self._stopping:
            for chosen, _ in self._selector.select(0.05):
                with self._lock:
                    self._serve(chosen.fileobj)  # type: ignore[arg-type]

    def _serve(self, one: socket.socket) -> None:
        if one is self._listener:
            self._accept()
        elif one in self._peers:
            self._forward(one)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self.mode == CLOSED:
            client.close()
            return
        try:
            server = socket.create_connection(self._target, timeout=30)
        except OSError:
            client.close()
            return
        server.settimeout(30)
        client.settimeout(30)
        self._peers[client], self._peers[server] = server, client
        self._clients.add(client)
        for side in (client, server):
            self._selector.register(side, selectors.EVENT_READ)
            if self.mode == STALLED:
                self._dead.add(side)

    def _forward(self, one: socket.socket) -> None:
        is_answer = one not in self._clients
        try:
            chunk = one.recv(1 << 16)
        except OSError:
            chunk = b""
        if one in self._dead:
            if not chunk:
                self._selector.unregister(one)
            return
        if not chunk or (is_answer and self.mode == DEAF):
            self._drop(self._peers[one] if is_answer else one)
            return
        try:
            self._peers[one].sendall(chunk)
        except OSError:
            self._drop(self._peers[one] if is_answer else one)

    def _drop(self, client: socket.socket) -> None:
        server = self._peers.pop(client)
        self._peers.pop(server)
        self._clients.discard(client)
        self._dead -= {client, server}
        for side in (client, server):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(side)
            side.close()
