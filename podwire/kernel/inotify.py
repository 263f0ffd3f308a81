"""Wait until a file is touched (FileWaker), or until the content of a directory changes (DirectoryWaker).

`agent.node` opens the first for the store's watches: a writer touches a file after its commit. The second is for the
directories of a container runtime (`datapath.runtime`). Must never be the only sign of a change: the kernel drops
events that nobody reads, and a watch ends when the watched file is replaced.
"""

import contextlib
import math
import os
import select
import struct
from pathlib import Path
from typing import Final

from podwire.kernel.fd import Fd
from podwire.kernel.netns import call_libc
from podwire.kernel.wake_up import WakeUp
from podwire.model.errors import KernelFailure

_IN_ATTRIB: Final = 0x004
_IN_CLOSE_WRITE: Final = 0x008
_IN_MOVED: Final = 0x040 | 0x080
_IN_CREATE: Final = 0x100
_IN_DELETE: Final = 0x200
_IN_IGNORED: Final = 0x8000
_CONTENTS: Final = _IN_ATTRIB | _IN_CLOSE_WRITE | _IN_MOVED | _IN_CREATE | _IN_DELETE
_EVENT: Final = struct.Struct("=iIII")
"""struct inotify_event: watch descriptor, mask, cookie, length of the name that follows."""
_READ_BYTES: Final = 4096


class _Waker:
    """Implements `model.store.Waker` for paths that exist."""

    def __init__(self, paths: tuple[Path, ...], mask: int) -> None:
        self._paths = paths
        self._mask = mask
        self._lost = False
        """Something that was watched is gone, and nothing is in its place yet."""
        name = ", ".join(map(str, paths))
        # Non-blocking, because `wait` reads both descriptors, whichever of them ended it.
        number = call_libc("inotify_init1", name, os.O_NONBLOCK | os.O_CLOEXEC)
        self._events = Fd(number, f"inotify of {name}")
        try:
            self._add()
            self._woken = WakeUp(name)
        except (KernelFailure, OSError):
            self._events.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._events.fileno(), select.POLLIN)
        self._poll.register(self._woken.fileno(), select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Return when something was touched, at `wake`, or after `timeout_s`."""
        # The kernel does not tell when something new takes the path of what is gone, so each wait tries again. What
        # is there now was touched, perhaps several times, before the watch of it began.
        if self._lost and self._add_again():
            return
        self._poll.poll(max(0, math.ceil(timeout_s * 1000)))
        self._woken.take()
        with contextlib.suppress(BlockingIOError):
            while _is_gone(os.read(self._events.fileno(), _READ_BYTES)):
                # Somebody put another one in its place: watch that one.
                self._add_again()

    def wake(self) -> None:
        """End `wait` on another thread; after `close` do nothing."""
        self._woken.wake()

    def close(self) -> None:
        """Give the descriptors back."""
        self._woken.close()
        self._events.close()

    def _add_again(self) -> bool:
        """Watch what has taken the place of something gone; tells whether everything is there."""
        try:
            self._add()
            self._lost = False
        except KernelFailure:
            self._lost = True
        return not self._lost

    def _add(self) -> None:
        """Watch every path; a path that is watched already stays watched."""
        for path in self._paths:
            call_libc(
                *("inotify_add_watch", str(path)),
                *(self._events.fileno(), os.fsencode(path), self._mask),
            )


class FileWaker(_Waker):
    """Waits until one file is touched."""

    def __init__(self, path: Path) -> None:
        # A writer touches the file after its commit. Events of the write-ahead log itself would come before the
        # commit is visible.
        super().__init__((path,), _IN_ATTRIB)


class DirectoryWaker(_Waker):
    """Waits until files of some directories come, go, are renamed, or are written and closed."""

    def __init__(self, *paths: Path) -> None:
        super().__init__(paths, _CONTENTS)


def _is_gone(events: bytes) -> bool:
    """Tell whether one of the events says that the watch has ended."""
    offset = 0
    while offset < len(events):
        _, mask, _, length = _EVENT.unpack_from(events, offset)
        # inotify(7): sent whenever a watch has ended, because the file is gone or its file system was unmounted. The
        # mask need not ask for it.
        if mask & _IN_IGNORED:
            return True
        offset += _EVENT.size + length
    return False
