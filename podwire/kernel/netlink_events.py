"""NetlinkEvents: waits until links, addresses, routes or filters of a network namespace change.

Opened by `datapath.node` for a duty that looks at the kernel again. Must never be the only sign of a change: the
kernel tells what happened after it was opened only, and drops what nobody reads (which counts as a change). Bound to
the namespace of the thread that opened it; any thread may wait.
"""

import errno
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from podwire.kernel.fd import Fd
from podwire.kernel.netlink import split_messages
from podwire.model.errors import KernelFailure

# include/uapi/linux/rtnetlink.h
GROUP_LINK: Final = 0x001
GROUP_FILTER: Final = 0x008
GROUP_IPV4_ADDRESS: Final = 0x010
GROUP_IPV4_ROUTE: Final = 0x040
GROUP_IPV6_ADDRESS: Final = 0x100
GROUP_IPV6_ROUTE: Final = 0x400
_RECEIVE_BYTES: Final = 1 << 16
_RECEIVE_BUFFER_BYTES: Final = 1 << 20
_SO_RCVBUFFORCE: Final = 33
_DATAGRAMS_AT_ONCE: Final = 1000


class NetlinkEvents:
    """What the kernel tells of changes. `matters` gets type and body of each message; the others are not told."""

    def __init__(
        self,
        groups: int,
        matters: Callable[[int, bytes], bool],
        *,
        buffer_bytes: int = _RECEIVE_BUFFER_BYTES,
    ) -> None:
        self._matters = matters
        self._lock = threading.Lock()
        self._socket = socket.socket(
            socket.AF_NETLINK,
            socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
            socket.NETLINK_ROUTE,
        )
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, buffer_bytes)
            self._socket.bind((0, groups))
            flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
            self._woken = Fd(os.eventfd(0, flags), "wake-up of netlink events")
        except OSError as error:
            self._socket.close()
            raise KernelFailure(
                error.errno or errno.EIO, "listen for", "netlink events", detail=str(error)
            ) from error
        self._poll = select.poll()
        self._poll.register(self._socket.fileno(), select.POLLIN)
        self._poll.register(self._woken.fileno(), select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Return True as soon as something that matters has changed, False after `timeout_s` or at `wake`."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            ready = dict(self._poll.poll(max(0, math.ceil(left * 1000))))
            if self._socket.fileno() in ready and self._read():
                return True
            if self._woken.fileno() in ready:
                os.eventfd_read(self._woken.fileno())
                return False
            if left <= 0:
                return False

    def wake(self) -> None:
        """End `wait` on another thread; after `close` do nothing."""
        with self._lock:
            if not self._woken.closed:
                os.eventfd_write(self._woken.fileno(), 1)

    def close(self) -> None:
        """Give the descriptors back; nobody may be waiting any more."""
        with self._lock:
            self._woken.close()
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> bool:
        """Take what is there, all of it, so that a burst is one change; tell whether any of it matters."""
        changed = False
        for _ in range(_DATAGRAMS_AT_ONCE):
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise KernelFailure(
                        error.errno or errno.EIO, "read", "netlink events", detail=str(error)
                    ) from error
                changed = True
                continue
            changed = changed or any(
                self._matters(kind, body) for kind, _, _, body in split_messages(data)
            )
        return changed
