"""Which endpoint is regenerated next: one serial queue per endpoint, coalesced triggers, back-off after failures.

Pure: time is a parameter, callers use `take` and report `finish`. `control.endpoint.regenerate` is the only user. A
trigger that arrives while its endpoint is being regenerated starts another regeneration afterwards. It is never lost
and never doubled.
"""

import enum
from dataclasses import dataclass

import msgspec

from podwire.model.ids import EndpointId

RETRY_BASE_NS = 500_000_000
RETRY_CAP_NS = 60_000_000_000


class Level(enum.IntEnum):
    """How much a regeneration does; a higher level includes the lower ones."""

    POLICY = 1
    """Map entries of the policy slot only."""
    REWRITE = 2
    """The endpoint's rows are written again and its programs attached again."""


class Regeneration(msgspec.Struct, frozen=True):
    """One regeneration to do: all triggers since the last one, folded."""

    endpoint_id: EndpointId
    level: Level
    causes: tuple[str, ...]


@dataclass
class _Waiting:
    level: Level
    causes: list[str]
    due_ns: int


class RegenerationQueue:
    """Requests in, regenerations out, in the order of their first trigger; at most `parallel` at once."""

    def __init__(self, parallel: int = 1) -> None:
        self._parallel = parallel
        self._waiting: dict[EndpointId, _Waiting] = {}
        self._running: dict[EndpointId, Regeneration] = {}
        self._failures: dict[EndpointId, int] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def request(self, endpoint_id: EndpointId, level: Level, cause: str, now_ns: int) -> None:
        """Ask for a regeneration as soon as possible, also when a retry was to come later."""
        waiting = self._waiting.get(endpoint_id)
        if waiting is None:
            self._waiting[endpoint_id] = _Waiting(level, [cause], now_ns)
            return
        waiting.level = max(waiting.level, level)
        waiting.due_ns = min(waiting.due_ns, now_ns)
        if cause not in waiting.causes:
            waiting.causes.append(cause)

    def take(self, now_ns: int) -> Regeneration | None:
        """Give the next regeneration that is due and whose endpoint has none under way; None when there is none."""
        # One at a time by default: four workers that did kernel work side by side were measured to be slower than one.
        if len(self._running) >= self._parallel:
            return None
        # A dict keeps the order of insertion, which is the order of the first triggers. A trigger that joins a
        # waiting regeneration does not move it back.
        for endpoint_id, waiting in self._waiting.items():
            if waiting.due_ns <= now_ns and endpoint_id not in self._running:
                del self._waiting[endpoint_id]
                regeneration = Regeneration(endpoint_id, waiting.level, tuple(waiting.causes))
                self._running[endpoint_id] = regeneration
                return regeneration
        return None

    def finish(self, regeneration: Regeneration, *, ok: bool, now_ns: int) -> None:
        """Report the end of one. What failed comes back at its level after 0.5 s, 1 s, 2 s, ... up to 60 s."""
        self._running.pop(regeneration.endpoint_id, None)
        if ok:
            self._failures.pop(regeneration.endpoint_id, None)
            return
        failures = self._failures[regeneration.endpoint_id] = (
            self._failures.get(regeneration.endpoint_id, 0) + 1
        )
        delay_ns = min(RETRY_CAP_NS, RETRY_BASE_NS << min(failures - 1, 16))
        # A trigger that came during the regeneration waits already and is due at once. The retry joins it instead of
        # delaying it.
        waiting = self._waiting.setdefault(
            regeneration.endpoint_id,
            _Waiting(regeneration.level, ["retry after failure"], now_ns + delay_ns),
        )
        waiting.level = max(waiting.level, regeneration.level)

    def owes(self, endpoint_id: EndpointId) -> bool:
        """Tell whether an endpoint is being regenerated or waits for it, a retry included."""
        return endpoint_id in self._waiting or endpoint_id in self._running

    def forget(self, endpoint_id: EndpointId) -> None:
        """Drop what waits for an endpoint that ends."""
        self._waiting.pop(endpoint_id, None)
        self._failures.pop(endpoint_id, None)
