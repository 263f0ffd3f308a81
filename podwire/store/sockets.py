"""The sockets to a store on the network, which notice soon that nothing of them arrives any more.

Used by `store.etcd.gateway` and `store.kubernetes.api.client`, each in the thread of its event loop. Invariant: no
request waits for an answer to an address that this host had already lost when the request began.
"""

import asyncio
import contextlib
import errno
import socket
import weakref
from typing import Any, Final

import aiohttp

UNHEARD_MS: Final = 600
"""So long the other kernel may leave what was sent unacknowledged: two retransmissions in a near network (tcp(7))."""
_PROBES: Final = 3
_ENDING_LOOK_S: Final = 0.002
_ENDING_LOOKS: Final = 500
_SEGMENT_BYTES: Final = 1220
"""What fits in 1,280 bytes, which every link carries IPv6 with (RFC 8200)."""


class Sockets:
    """Makes sockets for connections, and knows those that are open.

    `probe_s`: a connection on which nothing comes for so long is asked whether its other end is still there, again and
    again, and ends when that does not answer; 0: never.
    """

    def __init__(self, unheard_ms: int = UNHEARD_MS, *, probe_s: int = 0) -> None:
        self._unheard_ms = unheard_ms
        self._probe_s = probe_s
        self._made: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._session: aiohttp.ClientSession | None = None

    def make(self, address: aiohttp.AddrInfoType) -> socket.socket:
        """Open a socket.

        Answers do not get lost either when this host's underlay gets a smaller MTU: the server is not told, and would
        go on sending segments that do not arrive any more.
        """
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        # Without it the kernel retransmits for a quarter of an hour before it gives a connection up (tcp(7),
        # tcp_retries2).
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._unheard_ms)
        # The option is announced to the other end, so it bounds what the server sends, too.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
        if self._probe_s:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self._probe_s)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self._probe_s)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        # Weak references: aiohttp closes and drops sockets without telling.
        self._made.add(made)
        return made

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session whose connections use these sockets, opened when it is first asked for. On the loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    # aiohttp's default of 100 connections would let streams, which never end, starve requests.
                    limit=0,
                    limit_per_host=0,
                    keepalive_timeout=60.0,
                    socket_factory=self.make,
                ),
                # aiohttp's default ends everything after five minutes, watches included. Deadlines are set where
                # requests are made.
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            )
        return self._session

    async def close_session(self) -> None:
        """Close the session and its connections."""
        if self._session is not None:
            await self._session.close()

    async def end_all(self) -> None:
        """End what is open, and return when the loop has closed it.

        A TLS connection that is closed waits for the other end to say goodbye, which may never come.
        """
        for _ in range(_ENDING_LOOKS):
            open_ones = [server for server in tuple(self._made) if server.fileno() >= 0]
            if not open_ones:
                return
            for server in open_ones:
                with contextlib.suppress(OSError):  # not connected yet, or not any more
                    server.shutdown(socket.SHUT_RDWR)
            await asyncio.sleep(_ENDING_LOOK_S)

    async def leave_old_addresses(self) -> None:
        """Have requests take new connections after this host got another address, at once."""
        if self.drop_homeless():
            for _ in range(2):  # the loop hears of the ends, and takes them out of its pool
                await asyncio.sleep(0)

    def drop_homeless(self) -> int:
        """End the connections from addresses that this host has no more; gives how many. Takes some 10 us."""
        by_place: dict[tuple[int, Any], list[socket.socket]] = {}
        for server in tuple(self._made):
            with contextlib.suppress(OSError):  # closed
                host, _, *scope = server.getsockname()
                by_place.setdefault((server.family, (host, 0, *scope)), []).append(server)
        count = 0
        for (family, place), several in by_place.items():
            if _is_here(family, place):
                continue
            for server in several:
                with contextlib.suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count


def is_of_old_connection(error: Exception) -> bool:
    """Tell whether a new connection may do: the server may have restarted, or this host have another address."""
    return isinstance(
        error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError
    ) and not isinstance(error, aiohttp.ClientConnectorError)


def _is_here(family: int, place: Any) -> bool:
    """Tell whether this host has an address: nothing else can be bound."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(place)
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True
