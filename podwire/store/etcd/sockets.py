"""The sockets to etcd, which notice soon that nothing of them arrives any more.

Used by `store.etcd.gateway`, in the thread of its event loop. Invariant: no request waits for an answer to an address
that this host had already lost when the request began.
"""

import contextlib
import errno
import socket
import weakref
from typing import Any, Final

import aiohttp

_UNHEARD_MS: Final = 600
"""So long the other kernel may leave what was sent unacknowledged: two retransmissions in a near network (tcp(7))."""
_SEGMENT_BYTES: Final = 1220
"""What fits in 1,280 bytes, which every link carries IPv6 with (RFC 8200)."""


class Sockets:
    """Makes sockets for connections, and knows those that are open."""

    def __init__(self) -> None:
        self._made: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def make(self, address: aiohttp.AddrInfoType) -> socket.socket:
        """Open a socket.

        Answers do not get lost either when this host's underlay gets a smaller MTU: etcd is not told, and would go on
        sending segments that do not arrive any more.
        """
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNHEARD_MS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
        self._made.add(made)
        return made

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


def _is_here(family: int, place: Any) -> bool:
    """Tell whether this host has an address: nothing else can be bound."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(place)
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True
