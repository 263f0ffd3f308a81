"""One agent per state directory: a lock that lives exactly as long as the process that holds it.

Taken by `agent.node` before anything else is opened. The kernel frees it when the holder dies, however it dies.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from podwire.model.errors import Conflict, StorageFailure

LOCK_FILE = "agent.lock"


@contextmanager
def locked_state_directory(state_dir: Path) -> Iterator[None]:
    """Hold the directory (made if missing, 0700); Conflict names the process that has it."""
    path = state_dir / LOCK_FILE
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageFailure(
            f"lock state directory {str(state_dir)!r}: {error.strerror}",
            hint="the agent must be able to write there; see the setting state_dir",
        ) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            raise Conflict(
                f"lock state directory {str(state_dir)!r}: the agent with pid {holder} holds it",
                hint="stop that agent, or give this one another state_dir",
            ) from None
        # Who holds it is only good to know: a full disk must not keep the agent from starting.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)
