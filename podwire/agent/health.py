"""Whether the agent works, from facts that other parts record, and the file that lets STATUS succeed during a restart.

Every part reports its own checks here when something happens. Nothing is probed when somebody asks, so asking is
always cheap and can never hang. Kubernetes must not see a node as not ready because its agent is being upgraded; that
is what `alive` is for.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwire.model.errors import PodwireError
from podwire.model.interfaces import Clock
from podwire.model.wire import ALIVE_FILE, Alive, encode_alive

ALIVE_REFRESH_S = 10.0
SHOWN_MAX = 8
"""So many warnings of one kind are named one by one in `podwire status`."""


@dataclass(frozen=True)
class Check:
    """The last known state of one thing."""

    name: str
    ok: bool
    message: str
    since_ns: int
    """CLOCK_BOOTTIME of the last change between ok and not ok."""
    critical: bool


class Health:
    """The checks of one agent. Safe to use from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._checks: dict[str, Check] = {}
        self._warnings: dict[str, str] = {}
        self._listener: Callable[[str, str], None] = lambda _name, _message: None

    def listen(self, listener: Callable[[str, str], None]) -> None:
        """Have every change of what is wrong told: its name, and what it is; "" = it is over. Also what is wrong now.

        The listener is called on the thread that reports, and must wait for nothing."""
        with self._lock:
            self._listener = listener
            failing = {check.name: check.message for check in self._checks.values() if not check.ok}
            wrong = {**failing, **self._warnings}
        for name, message in wrong.items():
            listener(name, message)

    def report(self, name: str, ok: bool, message: str = "", *, critical: bool = True) -> None:
        """Record a fact. The agent is ready while every critical one is ok."""
        with self._lock:
            before = self._checks.get(name)
            if before is not None and before.ok and ok and before.critical == critical:
                return
            since_ns = (
                before.since_ns
                if before is not None and before.ok == ok
                else self._clock.boottime_ns()
            )
            after = Check(name, ok, "" if ok else message, since_ns, critical)
            self._checks[name] = after
        if after.message != ("" if before is None else before.message):
            self._listener(name, after.message)

    def warn(self, key: str, message: str) -> None:
        """Show a warning in `podwire status` until it is taken back with an empty message."""
        with self._lock:
            before = self._warnings.get(key, "")
            if message:
                self._warnings[key] = message
            else:
                self._warnings.pop(key, None)
        if message != before:
            self._listener(key, message)

    @property
    def ready(self) -> bool:
        """Whether every critical check is ok; False before the first report."""
        with self._lock:
            return bool(self._checks) and all(
                check.ok for check in self._checks.values() if check.critical
            )

    def checks(self) -> list[Check]:
        """Give every check, by name."""
        with self._lock:
            return sorted(self._checks.values(), key=lambda check: check.name)

    def warnings(self) -> list[str]:
        """Give what people should look at: warnings, and checks that fail without being critical."""
        with self._lock:
            failing = [
                f"{check.name}: {check.message}" for check in self._checks.values() if not check.ok
            ]
            return [*failing, *self._warnings.values()]


class WarningList:
    """Warnings of one kind: the first are shown one by one, and the others are counted."""

    def __init__(self, name: str, others: str) -> None:
        self._name = name
        self._others = others
        self._shown = 0

    def show(self, warn: Callable[[str, str], None], lines: Sequence[str]) -> None:
        """Show these in place of those that were shown before."""
        shown = list(lines[:SHOWN_MAX])
        if len(lines) > len(shown):
            shown.append(f"{len(lines) - len(shown)} {self._others}")
        for index in range(max(len(shown), self._shown)):
            warn(f"{self._name}-{index}", shown[index] if index < len(shown) else "")
        self._shown = len(shown)


class AliveFile:
    """The file beside the sockets that says until when STATUS may succeed without the agent."""

    def __init__(self, run_dir: Path, clock: Clock, grace_s: int) -> None:
        self._path = run_dir / ALIVE_FILE
        self._clock = clock
        self._grace_s = grace_s

    def refresh(self, status: Callable[[], None]) -> str:
        """Move the deadline on while `status` (what CNI STATUS would do) succeeds, else take it away; gives why, ""
        when it succeeds."""
        try:
            status()
            self.write()
        except PodwireError as error:
            self.remove()
            return error.message
        except OSError as error:
            self.remove()
            return f"write {str(self._path)!r}: {error.strerror or error}"
        return ""

    def write(self) -> None:
        """Write boot id and deadline (CLOCK_BOOTTIME in ms). Readers find the old line or the new one, never a part."""
        deadline_ms = self._clock.boottime_ns() // 1_000_000 + self._grace_s * 1000
        temporary = self._path.with_name(f".{ALIVE_FILE}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(encode_alive(Alive(self._clock.boot_id(), deadline_ms)))
        # A launcher may read at any moment: it finds the old line or the new one, never a part.
        os.rename(temporary, self._path)

    def remove(self) -> None:
        """Take the file away: STATUS fails at once when the agent goes."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
