"""Bring the kernel in line with the plan for other nodes, on a thread of its own, and keep it there.

Made by `agent.duties.cluster.duty`. Plans under the duty's lock, applies under the node's turn, never waits for the
store. Invariants: a new plan is applied at once. A plan that the kernel has refused is tried again as a whole, after a
delay that grows each time, whatever is reported meanwhile. Single rows never wait for that.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from podwire.agent.duties.cluster.publisher import DEBOUNCE_S
from podwire.agent.duties.worker import Worker
from podwire.agent.metrics import Metrics
from podwire.control.cluster.backoff import RETRY_CAP_S, Backoff
from podwire.control.cluster.planner import NodeNumbers
from podwire.control.cluster.remote import Changes
from podwire.control.cluster.state import OwnNode
from podwire.model.cluster import ClusterPlan
from podwire.model.errors import PodwireError
from podwire.model.interfaces import ClusterDatapath

if TYPE_CHECKING:
    from podwire.agent.duties.cluster.duty import ClusterDuty

RECONCILE_S: Final = 30.0
LOOK_AGAIN_S: Final = 1.0
"""Longest time between what the kernel tells and a look at it."""
LOOK_LEAST_S: Final = 0.1
LOOK_REST: Final = 4.0
"""After a look comes no other for so many times as long as it took: a kernel that tells all the time costs a fifth of
one core."""

_log = logging.getLogger(__name__)


class KernelNews(Protocol):
    """Tells that links, addresses, routes or filters have changed (`kernel.netlink_events.NetlinkEvents`)."""

    def wait(self, timeout_s: float) -> bool: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class Applier:
    """The thread that plans and applies."""

    def __init__(
        self,
        duty: "ClusterDuty",
        datapath: ClusterDatapath,
        turn: threading.RLock,
        metrics: Metrics,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._duty = duty
        self._datapath = datapath
        self._turn = turn
        self._metrics = metrics
        self._now = now
        self._news: KernelNews | None = None
        self._worker = Worker("cluster", self._work, interrupt=self._wake_news)
        self._reconcile_s = 0.0
        self._look_s = math.inf
        """When this node is looked at because the kernel told of a change."""
        self._quiet_until_s = 0.0
        self._wishes = threading.Lock()
        """Held around the two flags: `wake` sets them on any thread while a step takes them back."""
        self._must_apply = True
        """More than rows may have changed in the plan since it was applied."""
        self._must_look = True
        """This node itself may be another."""
        self._backoff = Backoff()
        """Has failures while the kernel may not have what the plan says."""
        self._refused: ClusterPlan | None = None
        """The plan that failed as a whole."""
        self._saved: NodeNumbers | None = None

    def start(self, news: KernelNews) -> None:
        self._news = news
        self._reconcile_s = self._now() + LOOK_AGAIN_S  # nobody listened since the first plan
        self._worker.start()

    def stop(self) -> None:
        """End the thread; what was applied stays."""
        self._worker.stop()
        if self._news is not None:
            self._news.close()

    def wake(self, *, whole: bool = False, look: bool = False) -> None:
        """Have a step soon; from any thread, cheap. `whole`: rows are not all; `look`: this node may be another."""
        self._ask_again(apply=whole, look=look)
        self._wake_news()

    def step(self, *, is_reconciliation: bool) -> None:
        """Bring the kernel to what is known now; what fails is reported, and tried again when its time has come."""
        try:
            self._step(is_reconciliation)
        except PodwireError as error:
            self._fail(error.told)
        except Exception as error:  # the thread's door
            _log.exception("apply what other nodes say")
            self._fail(f"{error!r}; see the agent's log")

    def _step(self, is_reconciliation: bool) -> None:
        duty, begin_s = self._duty, self._now()
        own = duty.own
        if self._take_look() or own is None or is_reconciliation:
            own = self._look()
        duty.own_changed(own)
        # Taken back before the step: what is asked for while it runs asks for another one.
        asked = self._take_apply()
        with duty.lock:
            replanned, changes = duty.state.advance(own)
            # Until the store was heard the predecessor's rows stay in force: an empty plan would cut every other node
            # off.
            if not duty.state.is_listed:
                self._ask_again(apply=True)
                return
            # Chosen under the duty's lock and applied without it: that lock is taken alone (docs/threads.md).
            plan = self._choose_plan(replanned or asked, is_reconciliation, begin_s)
        self._save_numbers()
        if plan is not None:
            is_repair = is_reconciliation and not (replanned or changes or asked)
            self._apply(plan, is_repair and not self._backoff.failures)
        elif changes:
            self._change_rows(changes)
        if not self._backoff.failures:
            duty.report("cluster", "")
        duty.show_problems()
        if plan is not None or changes:
            duty.pods_moved()
            duty.observe("rows" if plan is None else "apply", begin_s)

    def _look(self) -> OwnNode:
        try:
            return self._duty.look_at_self()
        except PodwireError:
            self._ask_again(look=True)
            raise

    def _take_look(self) -> bool:
        with self._wishes:
            must_look, self._must_look = self._must_look, False
            return must_look

    def _take_apply(self) -> bool:
        with self._wishes:
            must_apply, self._must_apply = self._must_apply, False
            return must_apply

    def _ask_again(self, *, apply: bool = False, look: bool = False) -> None:
        with self._wishes:
            self._must_apply |= apply
            self._must_look |= look

    def _choose_plan(
        self, is_asked: bool, is_reconciliation: bool, now_s: float
    ) -> ClusterPlan | None:
        """Give the plan if it is to be applied as a whole now. One that was refused waits, another one does not."""
        state = self._duty.state
        if self._backoff.is_waiting(now_s):
            return state.plan if is_asked and state.plan != self._refused else None
        return state.plan if is_asked or is_reconciliation or self._backoff.failures else None

    def _apply(self, plan: ClusterPlan, is_repair: bool) -> None:
        if self._backoff.is_waiting(self._now()):
            self._backoff.forget()  # another plan: what it fails at is its own
        # Before the try: if it fails, this very plan waits, and another one does not.
        self._refused = plan
        with self._turn:
            differences = self._datapath.apply_cluster(plan)
        self._refused = None
        self._backoff.forget()
        if is_repair and differences:
            self._note_repairs(differences)

    def _change_rows(self, changes: Changes) -> None:
        with self._turn:
            self._datapath.change_prefixes(changes.put, changes.remove)

    def _note_repairs(self, differences: Sequence[str]) -> None:
        for difference in differences:
            _log.warning("repaired the way to other nodes", extra={"cause": difference})
        self._metrics.count("cluster_repairs", by=len(differences))

    def _save_numbers(self) -> None:
        """Before the kernel has them: a number must never come to mean another name."""
        numbers = self._duty.state.numbers
        if numbers is not self._saved:
            self._duty.save_numbers()
            self._saved = numbers

    def _fail(self, message: str) -> None:
        now_s = self._now()
        if not self._backoff.failures:
            _log.warning("apply what other nodes say", extra={"error": message})
        if not self._backoff.is_waiting(now_s):  # else a look or a row: that postpones nothing
            self._backoff.failed(now_s)
        self._duty.report("cluster", f"{message}; tried again within {RETRY_CAP_S:g} s")
        self._duty.show_problems()

    def _wake_news(self) -> None:
        if self._news is not None:
            self._news.wake()

    def _work(self) -> float:
        """Wait for what the kernel, other nodes or the time ask for, then do a step."""
        assert self._news is not None
        due_s = min(self._reconcile_s, self._look_s)
        kernel_changed = self._news.wait(max(0.0, due_s - self._now()))
        now_s = self._now()
        if kernel_changed:  # what other nodes say does not wait for the look
            self._look_s = min(self._look_s, max(now_s + DEBOUNCE_S, self._quiet_until_s))
            if now_s < min(self._reconcile_s, self._look_s):
                return 0.0
        is_due = now_s >= min(self._reconcile_s, self._look_s)
        if is_due:
            self._look_s = math.inf
        # What several nodes say at the same time becomes one plan.
        if not self._worker.pause(0.0 if is_due else DEBOUNCE_S):
            self.step(is_reconciliation=is_due)
            self._schedule(now_s, is_due=is_due)
        return 0.0

    def _schedule(self, begin_s: float, *, is_due: bool) -> None:
        """Say when the next step comes by itself."""
        end_s = self._now()
        if self._backoff.failures:
            self._reconcile_s = self._backoff.until_s
        elif is_due:
            self._reconcile_s = end_s + RECONCILE_S
        if is_due:
            # A kernel that tells all the time would otherwise keep one core busy.
            rest_s = max(LOOK_LEAST_S, LOOK_REST * (end_s - begin_s))
            self._quiet_until_s = end_s + min(LOOK_AGAIN_S, rest_s)
