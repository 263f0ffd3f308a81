"""Which Events are written when: series instead of repetitions, so many a minute, and no more than fit.

Used by `agent.duties.kubernetes.event_writer` under its lock. Pure: time is a parameter. A series is what has happened
at one object for one reason. It is one Event, whose count rises. Invariants: a series is written at most once a minute.
All series together are written no faster than the bucket allows. What does not fit is counted, and delays nobody.
"""

import hashlib
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from podwire.model.store.events import EventWrite, Subject

REPEAT_S: Final = 60.0
"""Shortest time between two writes of a series: at 5,000 nodes one Event per second of each would be a storm."""
BURST: Final = 20
"""So many Events may be written at once, ..."""
REFILL_S: Final = 3.0
"""... and then one each so many seconds."""
WAITING_MAX: Final = 256
"""So many series may wait to be written; others are dropped and counted."""
KNOWN_MAX: Final = 1024
"""So many are remembered after they were written; an older one becomes a new Event when it happens again."""
REFUSED_MAX: Final = 3
"""So often an Event is refused for want of rights before it is given up: an API server that starts does not know the
cluster's roles yet."""
MESSAGE_MAX_BYTES: Final = 1024
"""The API server refuses longer ones (validation of core/v1 Event)."""
_CUT: Final = " ..."
OVER: Final = "this is over, and could not be told before: "
"""Before the message of what ended while no Event could be written."""


@dataclass
class _Series:
    """One Event over time."""

    write: EventWrite
    written_s: float = -math.inf
    is_waiting: bool = True
    ready_s: float = -math.inf
    is_taken: bool = False
    """Whether a write of it is on its way."""
    has_failed: bool = False
    """Whether its first write was tried in vain."""
    refused: int = 0
    """How often in a row it was refused."""
    is_over: bool = False
    """Whether it ended during that try."""

    def end(self) -> None:
        """Have it told as over."""
        if not self.write.message.startswith(OVER):
            self.write = replace(self.write, message=_cut(OVER + self.write.message))


class EventQueue:
    """Series of Events. `nonce` makes the names of this process's Events differ from those of an earlier one."""

    def __init__(self, node: str, nonce: str) -> None:
        self.dropped = 0
        """Events that were not written, and never will be."""
        self._node = node
        self._nonce = nonce
        self._series: OrderedDict[tuple[Subject, str], _Series] = OrderedDict()
        self._tokens = float(BURST)
        self._filled_s = -math.inf

    def tell(
        self, about: Subject, reason: str, message: str, now: str, *, ready_s: float = -math.inf
    ) -> None:
        """Take what has happened at an object; `now` as in RFC 3339. Nothing new is written before `ready_s`: it may be
        withdrawn until then."""
        key = about, reason
        known = self._series.get(key)
        if known is None:
            if self._count_waiting() >= WAITING_MAX:
                self.dropped += 1
                return
            name = self._name(about, reason)
            made = EventWrite(name, about, reason, _cut(message), now, now, 1, is_new=True)
            self._series[key] = _Series(made, ready_s=ready_s)
            self._forget_oldest()
            return
        before = known.write
        known.write = replace(before, message=_cut(message), last=now, count=before.count + 1)
        known.is_waiting, known.is_over = True, False
        self._series.move_to_end(key)

    def withdraw(self, about: Subject, reason: str) -> None:
        """Forget what nobody tried to write: it is over, and nobody could have done anything about it. What could not
        be written, as the API server was away, is written as over."""
        known = self._series.get((about, reason))
        if known is None or not known.write.is_new:
            return
        if known.has_failed:
            known.end()
        elif known.is_taken:
            known.is_over = True
        else:
            del self._series[about, reason]

    def due_in(self, now_s: float) -> float | None:
        """Give in how many seconds there is something to write (0 = now); None: nothing waits."""
        waiting = [series for series in self._series.values() if series.is_waiting]
        if not waiting:
            return None
        earliest_s = min(map(_due_s, waiting))
        return max(0.0, earliest_s - now_s, (1 - self._fill(now_s)) * REFILL_S)

    def take(self, now_s: float) -> EventWrite | None:
        """Give one write that is due; None when none is. `written` or `failed` must follow."""
        if self._fill(now_s) < 1:
            return None
        for series in self._series.values():
            if series.is_waiting and _due_s(series) <= now_s:
                self._tokens -= 1
                series.is_waiting, series.is_taken = False, True
                return series.write
        return None

    def written(self, write: EventWrite, now_s: float) -> None:
        """Note that a write was done."""
        known = self._series.get((write.about, write.reason))
        if known is not None:
            known.written_s, known.is_taken, known.has_failed = now_s, False, False
            known.refused = 0
            known.write = replace(known.write, is_new=False)

    def failed(self, write: EventWrite, *, is_gone: bool = False) -> None:
        """Note that a write is to be tried again; `is_gone`: its Event is not there any more, a new one is made."""
        known = self._series.get((write.about, write.reason))
        if known is not None:
            known.is_waiting, known.is_taken, known.has_failed = True, False, True
            if known.is_over:
                known.end()
            if is_gone:
                known.write = replace(known.write, is_new=True)

    def is_there(self, write: EventWrite) -> None:
        """Note that a new Event is there already: an answer was lost on its way. What is known now is still written."""
        known = self._series.get((write.about, write.reason))
        if known is not None:
            self.failed(write)
            known.write = replace(known.write, is_new=False)

    def refused(self, write: EventWrite) -> None:
        """Note that the API server will not have an Event, which may be for the moment only."""
        known = self._series.get((write.about, write.reason))
        if known is not None:
            known.refused += 1
            self.drop(write) if known.refused == REFUSED_MAX else self.failed(write)

    def drop(self, write: EventWrite) -> None:
        """Give an Event up that the API server will not have."""
        self.dropped += 1
        self._series.pop((write.about, write.reason), None)

    def _fill(self, now_s: float) -> float:
        if self._filled_s > -math.inf:
            self._tokens = min(float(BURST), self._tokens + (now_s - self._filled_s) / REFILL_S)
        self._filled_s = now_s
        return self._tokens

    def _count_waiting(self) -> int:
        return sum(series.is_waiting for series in self._series.values())

    def _forget_oldest(self) -> None:
        if len(self._series) > KNOWN_MAX:
            oldest = next(
                (
                    key
                    for key, series in self._series.items()
                    if not (series.is_waiting or series.is_taken)
                ),
                None,
            )
            if oldest is not None:
                del self._series[oldest]

    def _name(self, about: Subject, reason: str) -> str:
        """Give the Event's name: like kubelet's, the object's name and something unique."""
        told = f"{self._nonce}/{self._node}/{about.key}/{about.uid}/{reason}"
        return f"{about.key.name[:200]}.{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def _due_s(series: _Series) -> float:
    return max(series.written_s + REPEAT_S, series.ready_s)


def _cut(message: str) -> str:
    text = message.encode()
    if len(text) <= MESSAGE_MAX_BYTES:
        return message
    return text[: MESSAGE_MAX_BYTES - len(_CUT)].decode(errors="ignore") + _CUT
