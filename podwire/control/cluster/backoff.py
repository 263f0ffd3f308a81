"""When something that failed is tried again: after 1 s, then after twice as long each time, up to half a minute.

Used by `agent.duties.cluster.applier`, `agent.duties.cluster.publisher` and `control.cluster.publish`. Pure: time is a
parameter, in seconds of any clock that only goes forward. Invariant: nothing waits without a failure.
"""

import math
from dataclasses import dataclass
from typing import Final

RETRY_BASE_S: Final = 1.0
RETRY_CAP_S: Final = 30.0
_DOUBLINGS_MAX: Final = 16


@dataclass
class Backoff:
    """Failures in a row, and until when the next try waits."""

    failures: int = 0
    until_s: float = -math.inf

    def failed(self, now_s: float) -> None:
        """Note one more failure."""
        doublings = min(self.failures, _DOUBLINGS_MAX)
        self.until_s = now_s + min(RETRY_CAP_S, RETRY_BASE_S * 2.0**doublings)
        self.failures += 1

    def forget(self) -> None:
        """Wait for nothing: it worked, or the cause is known to be gone."""
        self.failures, self.until_s = 0, -math.inf

    def stop_waiting(self) -> None:
        """Let the next try be now; it is still one after failures."""
        self.until_s = -math.inf

    def is_waiting(self, now_s: float) -> bool:
        """Tell whether the next try is not due yet."""
        return now_s < self.until_s
