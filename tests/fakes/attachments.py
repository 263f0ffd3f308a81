"""Attachments that wait at gates, for the dispatcher's tests: threads are real, the work is not.

Each operation stops before each of its steps until the test lets it go on. What must never happen
(two operations of one attachment at once, an ADD after its DEL) is noted in `violations`.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from podwire.model.endpoint import AttachmentKey
from podwire.model.errors import Cancelled, Conflict, PodwireError
from podwire.model.interfaces import PodNamespace
from podwire.model.request import AttachRequest, AttachResult

GATE_DEADLINE_S = 20.0


@dataclass(eq=False)
class Operation:
    """One operation at work in its thread."""

    request: AttachRequest
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waiting: threading.Event = field(default_factory=threading.Event)
    is_cancelled: Callable[[], bool] = bool
    """Whether an ADD has been told to end; False for everything else."""

    def step(self) -> None:
        self.waiting.set()
        assert self.gate.acquire(timeout=GATE_DEADLINE_S), (
            f"nobody opened the gate of {self.request}"
        )


class GatedAttachments:
    """In memory: which attachment was made by a launcher that started when."""

    def __init__(self, steps: int = 1) -> None:
        self.steps = steps
        self.attached: dict[AttachmentKey, int] = {}
        self.running: list[Operation] = []
        self.history: list[tuple[str, AttachmentKey | None]] = []
        self.dead_until: dict[AttachmentKey, int] = {}
        self.violations: list[str] = []
        self.failures: list[PodwireError] = []
        """Raised by the next operations, one each."""
        self.unknown: set[AttachmentKey | None] = set()
        """Whose labels are not known yet."""
        self.unknown_all = False
        """Nobody's labels are known yet."""
        self.announced = 0
        """How often others were told that an endpoint may have come."""
        self.threads: list[str] = []
        """On which thread each operation ran."""
        self.open_all = False
        self._lock = threading.Lock()

    def open_gates(self) -> None:
        """Let everything go on to its end, now and later."""
        with self._lock:
            self.open_all = True
            for operation in self.running:
                operation.gate.release(100)

    def add(
        self,
        request: AttachRequest,
        _namespace: PodNamespace | None,
        cancelled: Callable[[], bool],
        /,
    ) -> AttachResult:
        with _Turn(self, request) as operation:
            operation.is_cancelled = cancelled
            if request.key in self.attached:
                raise Conflict(f"{request.key} is attached already")
            for _ in range(self.steps):
                if cancelled():
                    operation.step()  # the undo takes its time too
                    raise Cancelled(f"{request.key}: cancelled")
                operation.step()
            assert request.key
            if request.started_boottime_ns < self.dead_until.get(request.key, 0):
                self.violations.append(f"{request.key}: attached behind its DEL")
            self.attached[request.key] = request.started_boottime_ns
        return AttachResult()

    def add_at_once(
        self,
        request: AttachRequest,
        namespace: PodNamespace | None,
        cancelled: Callable[[], bool],
        /,
    ) -> AttachResult | None:
        if self.unknown_all or request.key in self.unknown:
            return None
        return self.add(request, namespace, cancelled)

    def announce(self) -> None:
        self.announced += 1

    def delete(self, request: AttachRequest, _namespace: PodNamespace | None, /) -> None:
        # The undo of an ADD calls this inside the ADD's own turn.
        assert request.key
        if request.command == "ADD":
            self.attached.pop(request.key, None)
            return
        with _Turn(self, request) as operation:
            operation.step()
            if self.attached.get(request.key, 1 << 63) <= request.started_boottime_ns:
                del self.attached[request.key]

    def check(self, request: AttachRequest, _namespace: PodNamespace | None, /) -> None:
        with _Turn(self, request) as operation:
            operation.step()

    def collect(self, request: AttachRequest, /) -> None:
        with _Turn(self, request) as operation:
            operation.step()

    def status(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


class _Turn:
    """Notes who runs, and that nobody else does with the same key."""

    def __init__(self, attachments: GatedAttachments, request: AttachRequest) -> None:
        self._attachments = attachments
        self._operation = Operation(request)

    def __enter__(self) -> Operation:
        all_, request = self._attachments, self._operation.request
        with all_._lock:
            if request.key and any(other.request.key == request.key for other in all_.running):
                all_.violations.append(f"{request.command} {request.key} overlaps")
            all_.running.append(self._operation)
            all_.history.append((request.command, request.key))
            all_.threads.append(threading.current_thread().name)
            if all_.open_all:
                self._operation.gate.release(100)
            failure = all_.failures.pop(0) if all_.failures else None
        if failure:
            self.__exit__()
            raise failure
        return self._operation

    def __exit__(self, *_: object) -> None:
        with self._attachments._lock:
            self._attachments.running.remove(self._operation)
