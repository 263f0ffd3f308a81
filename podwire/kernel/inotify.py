"""FileWaker: waits until somebody touches a file.

Opened by `agent.node` for the store's watches: the writer touches a file after its commit. Must never be the only sign
of a change: events are dropped when nobody reads them, and a file that is replaced takes its watch along.
"""

import contextlib
import math
import os
import select
import struct
import threading
from pathlib import Path
from typing import Final

from podwire.kernel.fd import Fd
from podwire.kernel.netns import call_libc
from podwire.model.errors import KernelFailure

_IN_ATTRIB: Final = 0x004
_IN_IGNORED: Final = 0x8000
_EVENT: Final = struct.Struct("=iIII")
"""struct inotify_event: watch descriptor, mask, cookie, length of the name that follows."""
_READ_BYTES: Final = 4096


class FileWaker:
    """Implements `model.store.Waker` for one file that exists."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        number = call_libc("inotify_init1", str(path), os.O_NONBLOCK | os.O_CLOEXEC)
        self._events = Fd(number, f"inotify of {path}")
        try:
            self._add()
            flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
            self._woken = Fd(os.eventfd(0, flags), f"wake-up of {path}")
        except (KernelFailure, OSError):
            self._events.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._events.fileno(), select.POLLIN)
        self._poll.register(self._woken.fileno(), select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Return when the file was touched, at `wake`, or after `timeout_s`."""
        self._poll.poll(max(0, math.ceil(timeout_s * 1000)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._woken.fileno())
        with contextlib.suppress(BlockingIOError):
            while _is_gone(os.read(self._events.fileno(), _READ_BYTES)):
                # Somebody put another file in its place: watch that one.
                with contextlib.suppress(KernelFailure):
                    self._add()

    def wake(self) -> None:
        """End `wait` on another thread; after `close` do nothing."""
        with self._lock:
            if not self._woken.closed:
                os.eventfd_write(self._woken.fileno(), 1)

    def close(self) -> None:
        """Give the descriptors back."""
        with self._lock:
            self._woken.close()
            self._events.close()

    def _add(self) -> None:
        call_libc(
            *("inotify_add_watch", str(self._path)),
            *(self._events.fileno(), os.fsencode(self._path), _IN_ATTRIB),
        )


def _is_gone(events: bytes) -> bool:
    """Tell whether one of the events says that the watch has ended."""
    offset = 0
    while offset < len(events):
        _, mask, _, length = _EVENT.unpack_from(events, offset)
        if mask & _IN_IGNORED:
            return True
        offset += _EVENT.size + length
    return False
