"""Ask Kubernetes whose a range is that two nodes claim: both core Nodes are read, once for the contest.

Made by `agent.duties.cluster.duty` with the store `kubernetes`. A thread of its own, because it may wait for the API
server. Invariants: nothing is read where nobody contradicts anybody, and a core Node is read again only when its node
publishes something else. While it cannot be read, the older claim stands (`control.cluster.ownership`).
"""

import logging
import random
import time
from typing import TYPE_CHECKING

from podwire.agent.duties.worker import FOREVER_S, Worker, WorkingDuty
from podwire.control.cluster.backoff import Backoff
from podwire.control.kubernetes.core_node import core_node_key, decode_core_node
from podwire.model.cluster import Granted, NodeFacts
from podwire.model.errors import InvalidConfiguration, PodwireError
from podwire.model.store import Store

if TYPE_CHECKING:
    from podwire.agent.duties.cluster.duty import ClusterDuty

_log = logging.getLogger(__name__)


class Contests(WorkingDuty):
    """The thread that reads core Nodes."""

    def __init__(self, store: Store, duty: "ClusterDuty") -> None:
        self._store = store
        self._duty = duty
        self._backoff = Backoff()
        self._worker = Worker("contests", self._work, self._fail)

    def look(self) -> None:
        """Look soon whether something is contested; from any thread, cheap."""
        self._worker.wake()

    def read_all(self) -> bool:
        """Read what has to be read now; tells whether anything was. Raises what the store does."""
        undecided = self._duty.list_undecided()
        for facts in undecided:
            self._duty.decide(facts, self._read(facts))
        return bool(undecided)

    def _work(self) -> float:
        self.read_all()
        self._backoff.forget()
        return FOREVER_S

    def _fail(self, _error: PodwireError) -> float:
        now_s = time.monotonic()
        self._backoff.failed(now_s)
        # Spread, because every agent asks the API server when it is back.
        return (self._backoff.until_s - now_s) * random.uniform(0.5, 1.0)

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
