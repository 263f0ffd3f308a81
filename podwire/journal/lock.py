"""One agent per state directory, and per node name of a network namespace: locks that live as long as their process.

`agent.node` takes them before anything else is opened. The kernel frees a lock when its holder dies, however it dies.
"""

import contextlib
import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from podwire.model.errors import Conflict, StorageFailure

LOCK_FILE = "agent.lock"
LOOK_S: Final = 0.2
"""How often a patient agent looks whether the lock is free."""

_log = logging.getLogger(__name__)


@contextmanager
def locked_node_name(node_name: str, *, patient: bool = False) -> Iterator[None]:
    """Hold a node's name within this network namespace: what an agent finds there under it, it takes for its own.

    Raises Conflict; when `patient`, waits instead. An abstract socket belongs to the network namespace and goes with
    the process (unix(7)).
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:

        def bind() -> None:
            try:
                held.bind(f"\0podwire-agent/{node_name[:80]}")
            except OSError as error:
                raise Conflict(
                    f"be node {node_name!r}: another agent is that already in this network namespace",
                    hint="stop that agent, or give this one another node_name",
                ) from error

        _take(bind, patient=patient)
        yield


@contextmanager
def locked_state_directory(state_dir: Path, *, patient: bool = False) -> Iterator[None]:
    """Hold the directory (made if missing, 0700); Conflict names the process that has it. When `patient`, wait until
    it is gone.
    """
    path = state_dir / LOCK_FILE
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageFailure(
            f"lock state directory {str(state_dir)!r}: {error.strerror}",
            hint="the agent must be able to write there; see the setting state_dir",
        ) from error

    def lock() -> None:
        try:
            # The kernel frees it however the holder dies, which a file with a process id would not tell.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise Conflict(
                f"lock state directory {str(state_dir)!r}: the agent with pid {holder} holds it",
                hint="stop that agent, or give this one another state_dir",
            ) from None

    try:
        _take(lock, patient=patient)
        # Who holds it is only good to know: a full disk must not keep the agent from starting.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def _take(lock: Callable[[], None], *, patient: bool) -> None:
    """Take a lock, or wait for it and say so. Nothing else tells: the holder has the sockets."""
    said = ""
    while True:
        try:
            lock()
        except Conflict as error:
            if not patient:
                raise
            if error.message != said:
                said = error.message
                _log.warning(
                    "another agent runs on this node; this one waits until it ends",
                    extra={"cause": error.message, "hint": error.hint},
                )
            time.sleep(LOOK_S)
        else:
            return
