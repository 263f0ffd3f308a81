"""Clock: time as the kernel counts it, and which boot it counts from.

Made once by `agent.main` and handed to whoever orders events. Must never read the wall clock:
records are compared across clock steps and suspends, so only CLOCK_BOOTTIME will do.
"""

import time
from pathlib import Path
from typing import Final

BOOT_ID_PATH: Final = Path("/proc/sys/kernel/random/boot_id")


class KernelClock:
    """The running kernel's clock (`model.interfaces.Clock`)."""

    def __init__(self) -> None:
        self._boot_id = BOOT_ID_PATH.read_text(encoding="ascii").strip()

    def boottime_ns(self) -> int:
        """Give CLOCK_BOOTTIME in nanoseconds: monotonic, goes on during suspend."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def boot_id(self) -> str:
        """Give the random number that the kernel drew at this boot."""
        return self._boot_id
