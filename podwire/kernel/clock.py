"""Clock: time as the kernel counts it, and which boot it counts from.

Made once by `agent.node` and handed to whoever orders events. Must never read the wall clock:
records are compared across clock steps and suspends, so only CLOCK_BOOTTIME will do.
"""

import os
import time
from pathlib import Path
from typing import Final

SELF_STAT_PATH: Final = Path("/proc/self/stat")
BOOT_ID_PATH: Final = Path("/proc/sys/kernel/random/boot_id")


class KernelClock:
    """The running kernel's clock (`model.interfaces.Clock`)."""

    def __init__(self) -> None:
        self._boot_id = BOOT_ID_PATH.read_text(encoding="ascii").strip()

    def boottime_ns(self) -> int:
        """Give CLOCK_BOOTTIME in nanoseconds: monotonic, goes on during suspend."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def process_start_ns(self) -> int:
        """Give CLOCK_BOOTTIME of this process's start, as the kernel counts it: in ticks of 10 ms."""
        # Behind the name, which may hold anything but ends at the last parenthesis: proc(5), field 22.
        fields = SELF_STAT_PATH.read_bytes().rpartition(b")")[2].split()
        return int(fields[19]) * (1_000_000_000 // os.sysconf("SC_CLK_TCK"))

    def boot_id(self) -> str:
        """Give the random number that the kernel drew at this boot."""
        return self._boot_id
