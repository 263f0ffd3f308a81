"""Write Events at objects of Kubernetes, on a thread of its own that may wait for the API server.

Made by `agent.node`, before anything that may have something to tell. `control.kubernetes.event_queue` decides what is
written when. Invariants: whoever tells waits for nothing. No Event delays another duty; those that the API server will
not have are counted and given up.
"""

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from podwire.agent import closed_policies
from podwire.agent.duties.worker import FOREVER_S, Worker
from podwire.agent.health import Health
from podwire.agent.metrics import Gauge, Metrics
from podwire.control.kubernetes.core_node import core_node_key
from podwire.control.kubernetes.event_queue import EventQueue
from podwire.model.errors import Conflict, InvalidRequest, NotFound, PodwireError, Unavailable
from podwire.model.store import KindUnavailable
from podwire.model.store.events import Events, EventWrite, NoEvents, Subject

WARNING: Final = "events"
OTHER: Final = "PodwireWarning"
REASONS: Final = {
    "cluster": "RoutesNotApplied",
    "cni-files": "NetworkNotInstalled",
    "core-node": "PodCIDRsChanged",
    "identities": "IdentitiesUnavailable",
    "node-claims": "PodCIDRContested",
    "node-name": "NotPublished",
    "publication": "NotPublished",
    "second-agent": "SecondAgent",
    "start": "WaitsToStart",
    "store": "APIServerUnavailable",
}
"""Reasons of Events by the names of checks and warnings; all others share one Event."""
SILENT: Final = frozenset({WARNING})
SILENT_PREFIXES: Final = ("cluster-", f"{closed_policies.WARNING}-")
"""Of what each of 5,000 agents sees: other nodes tell what is wrong between them themselves, and a closed policy has
Events of its own."""
SETTLE_S: Final = 2.0
"""What is over sooner is told to nobody: starts and changes pass through states that nobody can do anything about."""
AGAIN_S: Final = (5.0, 30.0)
"""After a failure so long, at random: an outage ends for all agents at once, and each has it to tell."""

_log = logging.getLogger(__name__)

WaitFor = Callable[[str, str], None]
Write = Callable[[EventWrite], None]
"""Writes one Event. Raises NotFound when one that should be there is not; Conflict; Unavailable; InvalidRequest."""


class EventTeller:
    """Tells Events of one node. `warn` hears why none can be written, "" when they can."""

    def __init__(
        self,
        write: Write,
        node: str,
        nonce: str,
        warn: Callable[[str, str], None] = lambda _key, _message: None,
    ) -> None:
        self._write = write
        self._warn = warn
        self._queue = EventQueue(node, nonce)
        self._lock = threading.Lock()
        self._worker = Worker("events", self._work)
        self._is_closed = False
        self.written = 0

    @property
    def dropped(self) -> int:
        """How many Events were given up."""
        return self._queue.dropped

    def gauges(self) -> list[Gauge]:
        return [
            Gauge.single(
                "kubernetes_events_written",
                "Writes of Events at objects of Kubernetes",
                lambda: self.written,
                counter=True,
            ),
            Gauge.single(
                "kubernetes_events_dropped",
                "Events at objects of Kubernetes that were given up: too many at a time, or refused",
                lambda: self.dropped,
                counter=True,
            ),
        ]

    def tell(self, about: Subject, reason: str, message: str, *, settle_s: float = 0.0) -> None:
        """Have an Event written; see `model.store.events.Events`. `settle_s`: not before so long, as it may be over."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self._lock:
            self._queue.tell(about, reason, message, now, ready_s=time.monotonic() + settle_s)
            # Nearly no agent has anything to tell: the thread is made by the first Event.
            if not self._is_closed:
                self._worker.start()
        self._worker.wake()

    def withdraw(self, about: Subject, reason: str) -> None:
        """Forget what is over and was not written yet."""
        with self._lock:
            self._queue.withdraw(about, reason)

    def stop(self) -> None:
        """End the thread; what waits is lost."""
        with self._lock:
            self._is_closed = True
        self._worker.stop()

    def _work(self) -> float:
        with self._lock:
            wait_s = self._queue.due_in(time.monotonic())
            write = self._queue.take(time.monotonic()) if wait_s == 0 else None
        if write is not None:
            self._try(write)
        return FOREVER_S if wait_s is None else wait_s

    def _try(self, write: EventWrite) -> None:
        try:
            self._do(write)
        except Exception:  # the thread's door
            _log.exception("write an Event")
            self._settle(lambda: self._queue.drop(write))

    def _do(self, write: EventWrite) -> None:
        try:
            self._write(write)
        except NotFound:
            # Kubernetes deletes Events after an hour. One that cannot be made either has no place any more: its
            # namespace is gone.
            self._settle(
                lambda: (
                    self._queue.drop(write)
                    if write.is_new
                    else self._queue.failed(write, is_gone=True)
                )
            )
            # The server answers again, and perhaps nothing else is to be written for long.
            self._warn(WARNING, "")
        except (InvalidRequest, Conflict) as error:
            # The name is this process's own, so an Event that has it was made by a write whose answer was lost.
            if write.is_new and isinstance(error, Conflict):
                self._settle(lambda: self._queue.is_there(write))
                return
            self._settle(lambda: self._queue.drop(write))
            self._say(error)
        except KindUnavailable as error:
            self._settle(lambda: self._queue.refused(write))
            self._fail(error)
        except Unavailable as error:
            self._settle(lambda: self._queue.failed(write))
            self._fail(error)
        else:
            self.written += 1
            self._settle(lambda: self._queue.written(write, time.monotonic()))
            self._warn(WARNING, "")

    def _settle(self, change: Callable[[], None]) -> None:
        with self._lock:
            change()

    def _fail(self, error: PodwireError) -> None:
        self._say(error)
        self._worker.pause(random.uniform(*AGAIN_S))

    def _say(self, error: PodwireError) -> None:
        _log.warning("write an Event", extra={"error": error.message, "hint": error.hint})
        self._warn(WARNING, f"no Events can be written: {error.told}")


class NodeEvents:
    """Tells at the own core Node what `podwire status` says is wrong; listens to `agent.health.Health`.

    What is over before its time to be written has come is not written at all: an API server that was away for a moment
    is nobody's business any more. What could not be written meanwhile is told afterwards, as over.
    """

    def __init__(self, teller: EventTeller, node_name: str) -> None:
        self._teller = teller
        self._about = node_subject(node_name)
        self._others: dict[str, str] = {}
        self._lock = threading.Lock()

    def hear(self, name: str, message: str) -> None:
        """Take what is wrong under a name, "" = nothing any more."""
        if name in SILENT or name.startswith(SILENT_PREFIXES):
            return
        reason = REASONS.get(name)
        if reason is None:
            reason, message = OTHER, self._join(name, message)
        if message:
            self._teller.tell(self._about, reason, message, settle_s=SETTLE_S)
        else:
            self._teller.withdraw(self._about, reason)

    def _join(self, name: str, message: str) -> str:
        with self._lock:
            if message:
                self._others[name] = message
            else:
                self._others.pop(name, None)
            return "; ".join(self._others.values())


def open_events(
    write: Write | None,
    node_name: str,
    health: Health,
    metrics: Metrics,
    stack: ExitStack,
    wait_for: WaitFor,
) -> tuple[Events, WaitFor]:
    """Have what is wrong told at the core Node, from the start on; gives the writer of Events, and what is called with
    all that the start waits for. `write` None: the store has no Events."""
    if write is None:
        return NoEvents(), wait_for
    teller = EventTeller(write, node_name, secrets.token_hex(8), health.warn)
    stack.callback(teller.stop)
    metrics.look_up(teller.gauges())
    at_node = NodeEvents(teller, node_name)
    health.listen(at_node.hear)
    said = ""

    def tell_too(reason: str, hint: str) -> None:
        nonlocal said
        if reason != said:
            said = reason
            at_node.hear("start", f"the start waits: {reason}; {hint}" if hint else reason)
        wait_for(reason, hint)

    return teller, tell_too


def node_subject(node_name: str) -> Subject:
    """Give what Events about a node are about."""
    # As kubelet does: its Events have the node's name for a uid, and `kubectl describe node` looks for these, too.
    return Subject(core_node_key(node_name), node_name)
