"""Who waits for whom: one line of requests for each attachment, of which the first one runs.

Used by `agent.cni.dispatch`, on the loop for most requests and on the thread of `agent.cni.at_once` for those that need
not wait. One lock, held for moments. Invariants: two requests of one attachment never run side by side. An ADD that a
DEL or a GC has overtaken is cancelled before anything else of its line runs.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from podwire.agent.cni.received import Caller
from podwire.agent.cni.stale_adds import TakenDeletes, TakenLists
from podwire.model.endpoint import AttachmentKey
from podwire.model.errors import Cancelled, Unavailable
from podwire.model.interfaces import PodNamespace
from podwire.model.request import AttachRequest, AttachResult


def answer_later(_result: AttachResult | None) -> None:
    """Leave the answer to the task that waits for the result."""


def keep_nothing() -> None:
    """Have nothing to release."""


@dataclass(eq=False)
class Job:
    """One request in its line."""

    request: AttachRequest
    namespace: PodNamespace | None
    caller: Caller
    released: Callable[[], None] = keep_nothing
    answer: Callable[[AttachResult | None], None] = answer_later
    started: bool = False
    """A thread has it: `released` is called when the thread is done, not when the caller is."""
    cancel_cause: str = ""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its turn has come, or when it is cancelled before."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> AttachmentKey:
        """The attachment that it is about."""
        assert self.request.key is not None
        return self.request.key

    def __str__(self) -> str:
        return f"{self.request.command} {self.request.key or self.request.network}"

    def cancel(self, cause: str) -> None:
        """Tell it to end. On the loop, or on its own thread."""
        self.cancel_cause = self.cancel_cause or cause
        self.wake.set()

    def cancel_with_caller(self) -> None:
        """Tell it to end as soon as its caller leaves."""
        self.caller.on_leave.append(partial(self.cancel, "the caller went away"))
        if self.caller.gone:
            self.cancel("the caller went away")

    def is_unwanted(self) -> bool:
        """Tell whether it is to end, or its caller has left, for a thread that hears of no leave."""
        if not self.cancel_cause and self.caller.has_left():
            self.cancel("the caller went away")
        return bool(self.cancel_cause)

    def refuse_if_cancelled(self) -> None:
        """Raise Cancelled when it is to end."""
        if self.cancel_cause:
            raise Cancelled(
                f"{self}: {self.cancel_cause}",
                hint="nothing was left behind; call ADD again if the pod is still wanted",
            )


class Lines:
    """All requests that were taken, by attachment, and what came before them."""

    def __init__(self, requests_max: int, queue_max: int) -> None:
        self._requests_max = requests_max
        self._queue_max = queue_max
        self._lock = threading.Lock()
        self._lines: dict[AttachmentKey, deque[Job]] = {}
        """The first of each line runs, or is about to."""
        self._deletes = TakenDeletes()
        self._lists = TakenLists()
        self.count = 0
        """How many requests there are in all lines."""
        self.is_closed = False
        """Whether the agent is stopping."""

    def enter(self, job: Job) -> None:
        """Have a request wait for its turn; raises Unavailable where there are too many."""
        with self._lock:
            line = self._lines.get(job.key, deque())
            if self.count >= self._requests_max or len(line) >= self._queue_max:
                raise Unavailable(
                    f"{job}: too many requests at once", hint="call again in a moment"
                )
            self._lines[job.key] = line
            line.append(job)
            line[0].wake.set()
            self.count += 1

    def enter_at_once(self, job: Job) -> bool:
        """Let a request run now; False, and nothing is changed, where another one of its attachment does, or an ADD
        was overtaken."""
        with self._lock:
            if self.is_closed or job.key in self._lines or self.count >= self._requests_max:
                return False
            if job.request.command == "ADD" and self._overtaken_by(job.request):
                return False
            job.started = True
            self._lines[job.key] = deque([job])
            self.count += 1
            return True

    def close(self) -> None:
        """Let nothing run at once from now on, and have every end told on the loop."""
        with self._lock:
            self.is_closed = True

    def leave(self, job: Job) -> None:
        """Let the next one of the line run."""
        with self._lock:
            line = self._lines[job.key]
            line.remove(job)
            if line:
                line[0].wake.set()
            else:
                del self._lines[job.key]
            job.ended.set()
            self.count -= 1

    def leave_at_once(self, job: Job) -> bool:
        """End a request on its own thread; False where somebody waits for its end, whom only the loop may wake."""
        with self._lock:
            if self.is_closed or job.cancel_cause or len(self._lines[job.key]) > 1:
                return False
            del self._lines[job.key]
            self.count -= 1
            return True

    def note_delete(self, key: AttachmentKey, until_ns: int, now_ns: int) -> None:
        """Remember that ADDs of `key` that started before `until_ns` are over."""
        self._deletes.note(key, until_ns, now_ns)

    def overtake(self, key: AttachmentKey, until_ns: int) -> bool:
        """Cancel the ADDs of `key` that started before `until_ns`; whether one is to be undone."""
        undoing = False
        with self._lock:
            for job in self._lines.get(key, ()):
                if job.request.command == "ADD" and job.request.started_boottime_ns < until_ns:
                    job.cancel("a DEL overtook it")
                    undoing = undoing or job.started
        return undoing

    def overtake_unlisted(self, request: AttachRequest, now_ns: int) -> list[Job]:
        """Take a GC's list in, and cancel the ADDs that are older and not in it; gives these."""
        overtaken = []
        with self._lock:
            self._lists.note(request, now_ns)
            for add in self._list_adds():
                if self._lists.overtook(add.key, add.request.started_boottime_ns):
                    add.cancel("a GC that does not name it overtook it")
                    overtaken.append(add)
        return overtaken

    def cancel_adds(self, cause: str) -> None:
        """Tell all ADDs to end."""
        with self._lock:
            for add in self._list_adds():
                add.cancel(cause)

    def refuse_overtaken(self, request: AttachRequest) -> None:
        """Raise Unavailable for an ADD older than a DEL of its attachment, or than a GC that does not name it."""
        with self._lock:
            what = self._overtaken_by(request)
        if what:
            raise Unavailable(
                f"ADD {request.key}: {what} came after this ADD was started",
                hint="call ADD again if the pod is still wanted",
            )

    def _overtaken_by(self, request: AttachRequest) -> str:
        assert request.key is not None
        started_ns = request.started_boottime_ns
        # A launcher waits up to half a minute for an agent. Its runtime may have given the pod up, and deleted it,
        # since.
        if self._deletes.overtook(request.key, started_ns):
            return "a DEL of it"
        if self._lists.overtook(request.key, started_ns):
            return "a GC that does not name it"
        return ""

    def _list_adds(self) -> Iterator[Job]:
        for line in self._lines.values():
            yield from (job for job in line if job.request.command == "ADD")
