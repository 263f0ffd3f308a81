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
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from podwire.model.errors import Conflict, StorageFailure

LOCK_FILE = "agent.lock"
WAITING_FILE: Final = "agent.waiting"
"""Locked by an agent that waits for the other lock, so that the one that has it can tell of it."""
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
            holder = _read_number(fd)
            raise Conflict(
                f"lock directory {str(state_dir)!r}: the agent with pid {holder} holds it",
                hint="stop that agent, or give this one directories of its own (state_dir, run_dir)",
            ) from None

    try:
        with ExitStack() as waiting:
            _take(lock, patient=patient, wait=partial(_show_waiting, state_dir, waiting))
        # The holder is written for people alone: a full disk must not keep the agent from starting.
        with contextlib.suppress(OSError):
            _write_own_number(fd)
        yield
    finally:
        os.close(fd)


def find_waiting_agent(state_dir: Path) -> str:
    """Give the process of an agent that waits until the holder of this directory ends; "" = none."""
    try:
        fd = os.open(state_dir / WAITING_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_number(fd)
    finally:
        os.close(fd)
    return ""


def _show_waiting(state_dir: Path, stack: ExitStack) -> None:
    """Lock the file that tells which process waits, until `stack` is closed, unless another one waits already."""
    with contextlib.suppress(OSError), ExitStack() as opening:
        fd = os.open(state_dir / WAITING_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        opening.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write_own_number(fd)
        stack.push(opening.pop_all())


def _read_number(fd: int) -> str:
    return os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"


def _write_own_number(fd: int) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def _take(
    lock: Callable[[], None], *, patient: bool, wait: Callable[[], None] = lambda: None
) -> None:
    """Take a lock, or wait for it and say so. `wait` is called each time when somebody else has it."""
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
            wait()
            time.sleep(LOOK_S)
        else:
            return
