"""Ask Kubernetes whose a range is that two nodes claim: both core Nodes are read, once for the contest.

Made by `agent.duties.cluster.duty` with the store `kubernetes`. A thread of its own, because it may wait for the API
server. Invariants: nothing is read where nobody contradicts anybody, and a core Node is read again only when its node
publishes something else. While it cannot be read, the older claim stands (`control.cluster.ownership`).
"""

import logging
import random
import threading
import time
from collections.abc import Sequence
from typing import Final, Protocol

from podwire.control.cluster.backoff import Backoff
from podwire.control.kubernetes.core_node import core_node_key, decode_core_node
from podwire.model.cluster import Granted, NodeFacts
from podwire.model.errors import InvalidConfiguration, PodwireError
from podwire.model.store import Store

LOOK_S: Final = 60.0

_log = logging.getLogger(__name__)


class Contested(Protocol):
    """Who has contests; it hears how they are decided."""

    def list_undecided(self) -> Sequence[NodeFacts]:
        """Give the nodes whose core Nodes have to be read."""
        ...

    def decide(self, facts: NodeFacts, granted: Granted) -> None:
        """Take what a core Node says."""
        ...


class Contests:
    """The thread that reads core Nodes."""

    def __init__(self, store: Store, duty: Contested) -> None:
        self._store = store
        self._duty = duty
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._backoff = Backoff()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="contests", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> None:
        """Look soon whether something is contested; from any thread, cheap."""
        self._woken.set()

    def read_all(self) -> bool:
        """Read what has to be read now; tells whether anything was. A store that is away decides nothing."""
        found = False
        try:
            for facts in self._duty.list_undecided():
                self._duty.decide(facts, self._read(facts))
                found = True
        except PodwireError as error:
            self._backoff.failed(time.monotonic())
            _log.warning(
                "ask whose a contested range is", extra={"error": error.message, "hint": error.hint}
            )
        else:
            self._backoff.forget()
        return found

    def _run(self) -> None:
        while not self._stopping.is_set():
            wait_s = self._backoff.until_s - time.monotonic()
            if wait_s > 0:
                # Spread, because every agent asks the API server when it is back.
                self._stopping.wait(wait_s * random.uniform(0.5, 1.0))
            else:
                self._woken.wait(LOOK_S)
            self._woken.clear()
            if self._stopping.is_set():
                return
            try:
                self.read_all()
            except Exception:  # the thread's door
                self._backoff.failed(time.monotonic())
                _log.exception("ask whose a contested range is")

    def _read(self, facts: NodeFacts) -> Granted:
        """Read what a node's core Node says of its ranges; one that does not own its publication says nothing."""
        stored = self._store.get(core_node_key(facts.name))
        try:
            node = None if stored is None else decode_core_node(stored)
        except InvalidConfiguration:
            return Granted()
        # An older version publishes without an owner: then the name has to do.
        if stored is None or node is None or facts.core_uid not in ("", node.uid):
            granted = Granted()
        else:
            granted = Granted(node.pod_cidrs, stored.created)
        told = ", ".join(map(str, granted.ranges)) or "no range"
        _log.info("read a core Node for a contest", extra={"node": facts.name, "cause": told})
        return granted
