"""Time as the kernel counts it, and the boot that it counts from.

Made once by `agent.node` and handed to all parts that order events. Must never read the wall clock: records are
compared across clock steps and suspends, which only CLOCK_BOOTTIME survives.
"""

import os
import time
from pathlib import Path
from typing import Final

PROC_PATH: Final = Path("/proc")
FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"
"""The kernel's own (PROC_PID_INIT_INO): every process has a number in it."""
BOOT_ID_PATH: Final = Path("/proc/sys/kernel/random/boot_id")


class KernelClock:
    """The running kernel's clock (`model.interfaces.Clock`)."""

    def __init__(self) -> None:
        self._boot_id = BOOT_ID_PATH.read_text(encoding="ascii").strip()

    def boottime_ns(self) -> int:
        """Give CLOCK_BOOTTIME in nanoseconds: monotonic, goes on during suspend."""
        # CLOCK_MONOTONIC stands still during suspend: what was written before it would look younger than it is.
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def process_start_ns(self) -> int:
        """Give CLOCK_BOOTTIME of this process's start, as the kernel counts it: in ticks of 10 ms."""
        return _read_start_ns("self")

    def process_ran_at(self, pid: int, boottime_ns: int) -> bool | None:
        """Tell whether the process that had a number at a time still runs; None where this process cannot see all.

        A process that was given the number later does not count.
        """
        try:
            # In another PID namespace the number means another process, or none that is visible (pid_namespaces(7)).
            if os.readlink(PROC_PATH / "self/ns/pid") != FIRST_PID_NAMESPACE:
                return None
            # Numbers are used again. The start tells a process from a later one that was given its number.
            return _read_start_ns(str(pid)) <= boottime_ns
        except (FileNotFoundError, ProcessLookupError):
            return False

    def boot_id(self) -> str:
        """Give the random number that the kernel drew at this boot."""
        return self._boot_id


def _read_start_ns(process: str) -> int:
    # Behind the name, which may hold anything but ends at the last parenthesis: proc(5), field 22.
    fields = (PROC_PATH / process / "stat").read_bytes().rpartition(b")")[2].split()
    # The kernel counts the start on CLOCK_BOOTTIME (fs/proc/array.c:do_task_stat, start_boottime), like
    # `boottime_ns`.
    return int(fields[19]) * (1_000_000_000 // os.sysconf("SC_CLK_TCK"))
