"""End another thread's wait in poll(2): a descriptor that becomes readable when somebody calls `wake`.

Used by what waits for files and for netlink events. Invariant: after `close`, `wake` writes nothing anywhere.
"""

import contextlib
import os
import threading

from podwire.kernel.fd import Fd
from podwire.model.closing import Closing


class WakeUp(Closing):
    """An eventfd. `what` names the thread that waits, for messages."""

    def __init__(self, what: str) -> None:
        self._lock = threading.Lock()
        self._fd = Fd(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), f"wake-up of {what}")

    def fileno(self) -> int:
        """Give the descriptor that is readable after `wake`, until `take`."""
        return self._fd.fileno()

    def wake(self) -> None:
        """End the wait, or the next one; after `close` do nothing."""
        with self._lock:
            if not self._fd.closed:
                # Under the lock, because after `close` the number may belong to another file, which eight bytes would
                # be written to.
                os.eventfd_write(self._fd.fileno(), 1)

    def take(self) -> bool:
        """Tell whether somebody has called `wake` since the last time."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd.fileno())
            return True
        return False

    def close(self) -> None:
        """Give the descriptor back; nobody may be waiting any more."""
        with self._lock:
            self._fd.close()
