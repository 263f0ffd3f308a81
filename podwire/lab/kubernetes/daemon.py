"""One program that runs in the background: started in its place, watched until it serves, ended by its own number.

Used for every program of the cluster. Its output goes to a file, whose end is in every error. Invariant: a daemon that
did not get ready does not run any more.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final

from podwire.kernel import netns, spawn
from podwire.kernel.fd import Fd
from podwire.lab.state import Process, describe_process, end_all, freeze_process, is_running
from podwire.model.errors import Unavailable

READY_DEADLINE_S: Final = 180.0
"""Other work may keep the machine busy; nobody waits so long unless something is wrong."""
LOOK_S: Final = 0.02
TAIL_LINES: Final = 12


class Place:
    """Namespaces that programs are started in; None = where we are."""

    def __init__(
        self,
        network: str | None = None,
        mount: str | None = None,
        move_in: Callable[[int], None] = lambda _pid: None,
    ) -> None:
        self.network, self.mount = network, mount
        """Paths that can be opened, such as /proc/PID/ns/mnt."""
        self._move_in = move_in
        """Called with the process of a program that was started, to put it into cgroups."""

    def start(
        self, command: Sequence[str], log: int, environment: Mapping[str, str] | None = None
    ) -> spawn.Child:
        """Start a program here."""
        with self._opened() as place:
            child = spawn.start(
                command, environment=environment, place=place, stdout_fd=log, stderr_fd=log
            )
            self._move_in(child.pid)
            return child

    def run(
        self, command: Sequence[str], *, input_bytes: bytes = b"", timeout_s: float = 120.0
    ) -> spawn.Completed:
        """Run a program here to its end."""
        with self._opened() as place:
            return spawn.run(command, input_bytes=input_bytes, place=place, timeout_s=timeout_s)

    @contextmanager
    def _opened(self) -> Iterator[spawn.Place]:
        network_fd = mount_fd = None
        with ExitStack() as stack:
            if self.network:
                network_fd = stack.enter_context(netns.open_namespace(self.network)).fileno()
            if self.mount:
                number = os.open(self.mount, os.O_RDONLY | os.O_CLOEXEC)
                mount_fd = stack.enter_context(Fd(number, self.mount)).fileno()
            yield spawn.Place(network_fd=network_fd, mount_fd=mount_fd)


class Daemon:
    """A program with its log; `command` may be changed while it does not run."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        place: Place | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self.place = place or Place()
        self.environment = environment
        self.process: Process | None = None

    @property
    def runs(self) -> bool:
        """Tell whether it runs."""
        return is_running(self.process)

    @property
    def pid(self) -> int:
        """Of the process that runs; Unavailable when none does."""
        if self.process is None:
            raise Unavailable(f"ask for the process of {self.name}: it was not started")
        return self.process.pid

    def start(self, is_ready: Callable[[], bool] | None = None) -> None:
        """Start it unless it runs, and wait until it is ready."""
        if not self.runs:
            self.launch()
        if is_ready is not None:
            self.wait_until(is_ready)

    def launch(self) -> None:
        """Start it without waiting; what it says is added to its log."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with closing(Fd(os.open(self.log, flags, 0o600), str(self.log))) as log:
            child = self.place.start(self.command, log.fileno(), self.environment)
        self.process = describe_process(child.pid)
        child.release()

    def wait_until(
        self, is_so: Callable[[], bool], what: str = "", deadline_s: float = READY_DEADLINE_S
    ) -> None:
        """Wait until something is so that this program brings about; else end it and show its log."""
        deadline = time.monotonic() + deadline_s
        while not is_so():
            if self.runs and time.monotonic() < deadline:
                time.sleep(LOOK_S)
                continue
            said = "is not ready in time" if self.runs else "ended"
            tail = self.read_tail()
            self.kill()
            raise Unavailable(
                f"start {self.name}: it {said}{what and f', waiting for {what}'}:\n{tail}",
                hint=f"the whole log is {str(self.log)!r}",
            )

    def stop(self) -> None:
        """End it, by force when it does not obey; it may be started again."""
        if self.process is not None:
            self.thaw()
            end_all([self.process])
        self.process = None

    def kill(self) -> None:
        """End it without warning."""
        if self.process is not None:
            self._send(signal.SIGKILL)
            end_all([self.process])
        self.process = None

    def freeze(self) -> None:
        """Let it answer nobody, and keep its connections."""
        if self.process is not None:
            freeze_process(self.process)

    def thaw(self) -> None:
        """End `freeze`."""
        self._send(signal.SIGCONT)

    def read_tail(self, lines: int = TAIL_LINES) -> str:
        """Give the end of its log."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _send(self, number: signal.Signals) -> None:
        if self.process is not None and self.runs:
            os.kill(self.process.pid, number)
