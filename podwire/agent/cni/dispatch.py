"""When each request runs: one operation per attachment at a time, in order, on a thread, under a deadline.

The only bridge between the loop and the synchronous decisions: `agent.cni.requests` submits, and a worker thread runs
what `control.attach` does. Everything here except the work itself happens on the loop, but for `do_at_once`; what both
share is in `agent.cni.lines`. A thread cannot be cancelled; it is notified, and checks between its steps. Invariants:
two operations of one attachment never overlap. An ADD that started before a DEL of its attachment was taken is never
carried out after that DEL. Every request is answered or cancelled.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Protocol

import msgspec

from podwire.agent.cni.lines import Job, Lines, answer_later, keep_nothing
from podwire.agent.cni.received import Caller
from podwire.agent.cni.spool import Spool, SpooledDelete
from podwire.agent.cni.worker_threads import WorkerThreads, guarded
from podwire.model.endpoint import AttachmentKey
from podwire.model.errors import CannotServe, PodwireError, Unavailable
from podwire.model.ids import ContainerId, InterfaceName
from podwire.model.interfaces import Clock, PodNamespace
from podwire.model.request import AttachRequest, AttachResult

_log = logging.getLogger(__name__)


class Attachments(Protocol):
    """What carries requests out (`control.attach.service`). Its calls block, and raise only PodwireError."""

    def add(
        self,
        request: AttachRequest,
        namespace: PodNamespace | None,
        cancelled: Callable[[], bool],
        /,
    ) -> AttachResult:
        """Attach; looks at `cancelled` between steps and then takes everything back."""

    def add_at_once(
        self,
        request: AttachRequest,
        namespace: PodNamespace | None,
        cancelled: Callable[[], bool],
        /,
    ) -> AttachResult | None:
        """Attach if the store need not be asked; else give None, without having done or waited for anything."""

    def announce(self) -> None:
        """Let others hear of what an ADD has made; called behind its answer."""

    def delete(self, request: AttachRequest, namespace: PodNamespace | None, /) -> None:
        """Detach; changes nothing about an attachment that is younger than the request."""

    def check(self, request: AttachRequest, namespace: PodNamespace | None, /) -> None:
        """Compare; CheckFailed names every difference."""

    def collect(self, request: AttachRequest, /) -> None:
        """Detach what GC's list does not name."""

    def status(self) -> None:
        """Tell whether an ADD would succeed now."""


class Limits(msgspec.Struct, frozen=True):
    """How much is taken on at once, and how long anything may last."""

    threads: int = 4
    """All kernel work happens in one turn: more threads only fight for it. Sixteen launchers at
    once, work that does nothing: 16 threads 1685 requests/s, 4 threads 2080, 1 thread 2266."""
    patient_threads: int = 8
    """For ADDs that ask the store: while it is away, these threads are held and the others stay free."""
    requests_max: int = 512
    """Running and queued; above it requests are refused."""
    queue_max: int = 16
    """Running and queued for one attachment."""
    status_max: int = 32
    deadline_s: float = 60.0
    """For ADD, CHECK and GC, from being taken to the end; then they are cancelled."""
    del_deadline_s: float = 14.0
    """With `undo_s` below the launcher's own (wire.DEL_WAIT_MS): it hears what became of it."""
    undo_s: float = 5.0
    """How long a DEL, a GC or an answer waits for the undo of a cancelled ADD."""


class Dispatcher:
    """Takes requests and has them carried out. Belongs to one event loop."""

    def __init__(
        self, attachments: Attachments, spool: Spool, clock: Clock, limits: Limits | None = None
    ) -> None:
        self._attachments = attachments
        self._spool = spool
        self._clock = clock
        self._limits = limits or Limits()
        self._loop = asyncio.get_running_loop()
        self._lines = Lines(self._limits.requests_max, self._limits.queue_max)
        self._prompt: tuple[Job, float] | None = None
        """What is carried out at once, and since when."""
        self._status_count = 0
        self._idle = asyncio.Event()
        self._threads = WorkerThreads[AttachResult](
            self._limits.threads, self._limits.patient_threads
        )
        self._side_threads = ThreadPoolExecutor(2, thread_name_prefix="status")

    async def submit(
        self,
        request: AttachRequest,
        namespace: PodNamespace | None = None,
        caller: Caller | None = None,
        released: Callable[[], None] = keep_nothing,
        answer: Callable[[AttachResult | None], None] = answer_later,
    ) -> AttachResult | None:
        """Have `request` carried out; raises what became of it, as PodwireError.

        `answer` is told of success by the thread that an ADD or a DEL ends on. `released` is called exactly once,
        on the loop, when nothing uses `namespace` any more: work that outlives its deadline keeps it longer than the
        answer takes.
        """
        job = Job(request, namespace, caller or Caller(), released, answer)
        carry_out = {
            "ADD": self._add,
            "DEL": self._delete,
            "CHECK": self._check,
            "GC": self._collect,
            "STATUS": self._status,
        }[request.command]
        try:
            if self._lines.is_closed:
                raise Unavailable(f"{job}: the agent is stopping", hint="call again in a moment")
            return await carry_out(job)
        finally:
            if not job.started:
                released()

    def do_at_once(
        self,
        request: AttachRequest,
        namespace: PodNamespace | None,
        caller: Caller,
        answer: Callable[[AttachResult | None], None],
    ) -> bool:
        """Carry an ADD or a DEL out on this thread; raises what became of it, as PodwireError.

        False, and nothing was done: another request of its attachment is under way, or the store must be asked.
        Only one thread may call it.
        """
        job = Job(request, namespace, caller, answer=answer)
        if not self._lines.enter_at_once(job):
            return False
        self._prompt = job, monotonic()
        try:
            if request.command == "ADD":
                return guarded(partial(self._attach, job)) is not None
            self._note_delete(job)
            guarded(partial(self._detach, job))
            return True
        finally:
            self._prompt = None
            if not self._lines.leave_at_once(job):
                with contextlib.suppress(RuntimeError):  # the loop has ended before this thread
                    self._loop.call_soon_threadsafe(self._leave, job)

    def end_late(self) -> PodwireError | None:
        """Tell what is carried out at once to end when its time is over; gives its refusal when it does not end."""
        prompt = self._prompt
        if prompt is None:
            return None
        job, begin_s = prompt
        is_add = job.request.command == "ADD"
        late_s = monotonic() - begin_s
        late_s -= self._limits.deadline_s if is_add else self._limits.del_deadline_s
        if late_s >= 0:
            job.cancel("its deadline has passed")
        return _not_done(job) if late_s >= self._limits.undo_s else None

    async def replay(self) -> tuple[int, int]:
        """Carry out what is spooled and due; how many DELs were done, and how many failed."""
        loop = asyncio.get_running_loop()
        records = await loop.run_in_executor(self._side_threads, self._spool.read)
        done = 0
        for record in records:
            # Its launcher has answered long ago: the DEL is as old as that launcher.
            job = Job(record.request, None, Caller(gone=True))
            try:
                await self._delete(job, partial(self._replay_record, record))
                done += 1
            except PodwireError as error:
                self._spool.postpone(record, error)
        return done, len(records) - done

    async def close(self, deadline_s: float) -> None:
        """Take nothing more; let work end; cancel the ADDs that have not after `deadline_s`."""
        self._lines.close()
        self._note_idle()
        if not await _happens(self._idle, deadline_s):
            self._lines.cancel_adds("the agent is stopping")
            if not await _happens(self._idle, self._limits.undo_s):
                _log.error("work does not end", extra={"count": self._lines.count})
        self._threads.shut_down()
        self._side_threads.shutdown(wait=False, cancel_futures=True)

    # --- what each command does before and around its turn ------------------------------------

    async def _add(self, job: Job) -> AttachResult | None:
        self._lines.refuse_overtaken(job.request)
        # The connection is the request's life: nobody would use, or delete, what an ADD makes after its caller has
        # gone.
        job.cancel_with_caller()
        return await self._in_line(
            job,
            partial(self._attach, job),
            self._limits.deadline_s,
            patient=partial(self._attach_patiently, job),
        )

    async def _delete(
        self, job: Job, work: Callable[[], AttachResult | None] | None = None
    ) -> AttachResult | None:
        """Overtake the ADDs that are older than this DEL, then take its turn."""
        until_ns = self._note_delete(job)
        undoing = self._lines.overtake(job.key, until_ns)
        # A cancelled ADD undoes what it did within `undo_s`. If it does not, the caller hears so, and spools the DEL,
        # in time.
        turn_s = self._limits.undo_s if undoing else self._limits.del_deadline_s
        return await self._in_line(
            job, work or partial(self._detach, job), self._limits.del_deadline_s, turn_s=turn_s
        )

    def _note_delete(self, job: Job) -> int:
        """Remember a DEL, and make it as young as it may be; gives up to when it ends what was begun."""
        now_ns = self._clock.boottime_ns()
        until_ns = job.request.started_boottime_ns
        # While its caller waits, nobody has been told that the DEL is done, so it is as young as this moment. A DEL
        # whose caller has gone is as old as that caller: a new life of the attachment may have begun since.
        if not job.caller.has_left():
            until_ns = max(until_ns, now_ns)
        self._lines.note_delete(job.key, until_ns, now_ns)
        job.request = msgspec.structs.replace(job.request, started_boottime_ns=until_ns)
        return until_ns

    async def _check(self, job: Job) -> AttachResult | None:
        job.cancel_with_caller()
        work = partial(self._attachments.check, job.request, job.namespace)
        return await self._in_line(job, work, self._limits.deadline_s)

    async def _collect(self, job: Job) -> AttachResult | None:
        """Overtake the ADDs that are older than this GC and not in its list, whether they are here or still to come."""
        request = job.request
        overtaken: list[Job] = []
        if request.valid_attachments is not None:
            overtaken = self._lines.overtake_unlisted(request, self._clock.boottime_ns())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.undo_s):
                for add in overtaken:
                    await add.ended.wait()
        # One GC of a network at a time; no attachment has this key.
        key = AttachmentKey(request.network, ContainerId(""), InterfaceName(""))
        job.request = msgspec.structs.replace(request, key=key)
        work = partial(self._attachments.collect, request)
        return await self._in_line(job, work, self._limits.deadline_s)

    async def _status(self, job: Job) -> None:
        """Never in a line: a runtime that hears nothing in time takes the node out of service."""
        if self._status_count >= self._limits.status_max:
            raise CannotServe(f"{job}: too many at once", hint="ask less often")
        self._status_count += 1
        try:
            loop = asyncio.get_running_loop()
            work = partial(guarded, self._attachments.status)
            await loop.run_in_executor(self._side_threads, work)
        finally:
            self._status_count -= 1

    # --- lines ----------------------------------------------------------------------------------

    async def _in_line(
        self,
        job: Job,
        work: Callable[[], AttachResult | None],
        deadline_s: float,
        *,
        turn_s: float | None = None,
        patient: Callable[[], AttachResult | None] | None = None,
    ) -> AttachResult | None:
        """Wait for the job's turn, have a thread do `work`, give its result, all in time.

        `patient` is done where waiting keeps nobody else waiting, when `work` gives no result.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + deadline_s
        self._lines.enter(job)
        self._note_idle()
        try:
            if not await _happens(job.wake, deadline_s if turn_s is None else turn_s):
                raise Unavailable(
                    f"{job}: an earlier request for it has not ended", hint="call again later"
                )
            job.refuse_if_cancelled()
        except BaseException:
            self._leave(job)
            raise
        # From here on the thread uses the namespace's descriptor, also where the caller is answered or gone before it
        # ends.
        job.started = True
        future = self._threads.start(work, patient, partial(self._end, job))
        return await self._outcome(job, future, until_s)

    async def _outcome(
        self, job: Job, future: "asyncio.Future[AttachResult | None]", until_s: float
    ) -> AttachResult | None:
        """Wait for a job's thread. A thread that is late is told to stop, and waited for once more."""
        loop = asyncio.get_running_loop()

        def give_up() -> None:
            if not future.done():
                future.set_exception(_not_done(job))

        timers = [
            loop.call_at(until_s, job.cancel, "its deadline has passed"),
            # A thread cannot be cancelled. It is told, looks between its steps, and gets this time to take everything
            # back.
            loop.call_at(max(until_s, loop.time()) + self._limits.undo_s, give_up),
        ]
        try:
            return await future
        except asyncio.CancelledError:
            job.cancel("the agent is stopping")
            raise
        finally:
            for timer in timers:
                timer.cancel()

    def _leave(self, job: Job) -> None:
        self._lines.leave(job)
        self._note_idle()

    def _note_idle(self) -> None:
        if self._lines.count:
            self._idle.clear()
        else:
            self._idle.set()

    def _end(self, job: Job) -> None:
        self._leave(job)
        job.released()

    # --- on a worker thread ---------------------------------------------------------------------

    def _attach(self, job: Job) -> AttachResult | None:
        """Attach; None when that may have to wait for the store."""
        self._prepare(job)
        return self._answer_unless_cancelled(
            job, self._attachments.add_at_once(job.request, job.namespace, job.is_unwanted)
        )

    def _attach_patiently(self, job: Job) -> AttachResult | None:
        self._prepare(job)
        return self._answer_unless_cancelled(
            job, self._attachments.add(job.request, job.namespace, job.is_unwanted)
        )

    def _prepare(self, job: Job) -> None:
        """Carry out the DELs of an attachment that are spooled, and refuse an ADD that is older than one."""
        job.refuse_if_cancelled()
        # What an earlier DEL was to remove has the name, and perhaps the address, that this ADD needs.
        for record in self._spool.pending(job.key):
            self._lines.note_delete(
                job.key, record.request.started_boottime_ns, self._clock.boottime_ns()
            )
            self._replay_record(record)
        self._lines.refuse_overtaken(job.request)

    def _answer_unless_cancelled(
        self, job: Job, result: AttachResult | None
    ) -> AttachResult | None:
        if result is None:
            return None
        try:
            if job.is_unwanted():
                # Cancelled behind its last step: nobody is going to hear of what was made.
                self._attachments.delete(job.request, job.namespace)
                job.refuse_if_cancelled()
            job.answer(result)
        finally:
            self._attachments.announce()
        return result

    def _detach(self, job: Job) -> None:
        self._attachments.delete(job.request, job.namespace)
        job.answer(None)

    def _replay_record(self, record: SpooledDelete) -> None:
        self._attachments.delete(record.request, None)
        # After the DEL: an agent that is killed in between does it once more, which changes nothing.
        self._spool.remove(record)


def _not_done(job: Job) -> Unavailable:
    return Unavailable(f"{job}: not done in time; it is being undone", hint="see the agent's log")


async def _happens(event: asyncio.Event, wait_s: float) -> bool:
    """Wait for an event for at most `wait_s`; whether it came."""
    if event.is_set():
        return True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await event.wait()
    return event.is_set()
