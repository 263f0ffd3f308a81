"""One named thread of a duty: rounds of work, a wake-up, a stop, and one way to survive what fails.

Every duty that owns a thread makes one; docs/threads.md lists their names. The duty says what a round does and how long
to wait before the next one. Invariants: nothing that a round raises ends the thread. A wake-up is never lost: one that
comes during a round leads to another round. After `stop` no round runs.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final

from podwire.model.errors import Bug, PodwireError

FOREVER_S: Final = threading.TIMEOUT_MAX
"""For a round after which there is nothing to do until a wake-up."""
PAUSE_S: Final = 2.0
"""After a round that failed, unless the duty chooses another pause."""

_log = logging.getLogger(__name__)


def pause_as_usual(_error: PodwireError) -> float:
    """Do nothing about a failure but to try again."""
    return PAUSE_S


class Worker:
    """A thread that calls `work` until it is stopped.

    `work` gives how many seconds to wait before the next round, which `wake` shortens; None ends the thread. `failed`
    hears what a round raised (a bug as `Bug`) and gives the seconds before the next round. A wake-up shortens them only
    with `wake_ends_pause`: else each one would be one more try of what just failed. A round that waits for something
    else has `interrupt` end that wait. A stop calls it once, so the round looks at `is_stopping` after it has opened
    what it waits for.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], float | None],
        failed: Callable[[PodwireError], float] = pause_as_usual,
        *,
        wake_ends_pause: bool = False,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._work = work
        self._failed = failed
        self._wake_ends_pause = wake_ends_pause
        self._interrupt = interrupt
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.was_woken = False
        """Whether this round was begun by `wake`, and not by the time."""
        self._said = ""
        """What the last round failed with, as the log has it."""

    @property
    def is_started(self) -> bool:
        """Whether it was started and not stopped since."""
        return self._thread is not None

    @property
    def is_running(self) -> bool:
        """Whether the thread lives: it may have ended by itself."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        """Whether the thread is to end."""
        return self._stopping.is_set()

    def start(self) -> None:
        """Start the thread, also again after a stop; nothing when it was started already."""
        if self._thread is not None:
            return
        self._stopping.clear()
        self._woken.clear()
        # A daemon: the interpreter's end never waits for a duty that was not stopped.
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """End the thread after the round that runs. `wait=False`: a round that nothing can end is left behind."""
        self._stopping.set()
        self._woken.set()
        self._interrupt()
        thread, self._thread = self._thread, None
        if thread is not None and wait:
            thread.join()

    def wake(self) -> None:
        """Have a round soon; from any thread, cheap."""
        self._woken.set()

    def take_wake(self) -> bool:
        """Tell, once, whether somebody has called `wake` since this round began."""
        was_woken = self._woken.is_set()
        self._woken.clear()
        return was_woken

    def pause(self, seconds: float) -> bool:
        """Wait inside a round; a stop ends the wait. Tells whether the thread is to end."""
        return self._stopping.wait(seconds)

    def do_round(self) -> float | None:
        """Do one round and survive its failure; gives the seconds before the next one."""
        try:
            wait_s = self._work()
        except PodwireError as error:
            return self._survive(error)
        except Exception as error:  # the thread's door: a bug must not end the duty
            return self._survive(Bug(f"{self.name}: {error!r}"), bug=error)
        if self._said:
            _log.info("a duty works again", extra={"task": self.name})
        self._said = ""
        return wait_s

    def _run(self) -> None:
        wait_s: float | None = 0.0
        while wait_s is not None:
            self.was_woken = self._woken.wait(wait_s)
            # Before the round: what is asked for while it runs asks for another one.
            self._woken.clear()
            if self._stopping.is_set():
                return
            wait_s = self.do_round()
            if self._said and wait_s is not None and not self._wake_ends_pause:
                self._stopping.wait(wait_s)
                wait_s = 0.0

    def _survive(self, error: PodwireError, bug: Exception | None = None) -> float:
        # What fails again at each try is news only once.
        if error.message != self._said:
            told = {"task": self.name, "error": error.message, "hint": error.hint}
            _log.warning("a duty failed; it goes on", extra=told, exc_info=bug)
        self._said = error.message
        try:
            return self._failed(error)
        except Exception:  # the thread's door
            _log.exception("a duty failed at a failure; it goes on", extra={"task": self.name})
            return PAUSE_S


class WorkingDuty:
    """Base of a duty that works on a thread of its own."""

    _worker: Worker

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> None:
        self._worker.stop()
