"""Tell Kubernetes that pods have a network on this node: the condition NetworkUnavailable of the own core Node.

Made by `agent.assemble` with the store `kubernetes`, and runs beside a started agent on a thread of its own, which ends
when the condition is set. Must never set it before a runtime can attach pods here.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from podwire.agent.duties.follower import FollowingDuty, KindList, StoreFollower
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.duties.worker import FOREVER_S, Worker
from podwire.control.kubernetes.core_node import (
    core_node_key,
    decode_core_node,
    network_is_available,
)
from podwire.model.errors import PodwireError
from podwire.model.store import Revisions, Store, StoredObject, StoreEvent
from podwire.model.store.kinds import CORE_NODE

AGAIN_S: Final = 1.0
AGAIN_MAX_S: Final = 30.0

_log = logging.getLogger(__name__)


class NetworkCondition(FollowingDuty):
    """Sets the condition NetworkUnavailable of the own core Node to False, once, when pods have a network here.

    Cloud providers set it to True when they make a Node, and pods wait for that. `write` replaces a condition of a Node
    that has not changed since it was read. Follows the Node, since the condition may come later than the network.
    """

    def __init__(
        self,
        store: Store,
        node_name: str,
        write: Callable[[StoredObject, Mapping[str, str]], None],
        shared: SharedWatch | None = None,
    ) -> None:
        self._store = store
        self._node_name = node_name
        self._write = write
        self.follower = StoreFollower("core-node", store, (CORE_NODE.plural,), self, shared=shared)
        self._is_there = False
        """Whether a runtime can attach pods here."""
        self._is_asked = False
        """Whether the Node says that it has no network."""
        self._pause_s = AGAIN_S
        self._worker = Worker("core-node", self._work, self._fail)

    @property
    def is_running(self) -> bool:
        """Whether it still waits for something to do."""
        return self._worker.is_running

    def network_is_there(self) -> None:
        """Hear that a runtime can attach pods here; from any thread."""
        self._is_there = True
        self._worker.wake()

    def on_lists(self, lists: Sequence[KindList]) -> None:
        self._look(stored for kind_list in lists for stored in kind_list.objects)

    def on_events(self, events: Sequence[StoreEvent], _revisions: Revisions) -> None:
        self._look(event.object for event in events if not event.deleted)

    def _look(self, nodes: Iterable[StoredObject]) -> None:
        for node in map(decode_core_node, nodes):
            if node.is_called_unavailable:
                self._is_asked = True
                self._worker.wake()

    def _work(self) -> float | None:
        if not (self._is_there and self._is_asked):
            return FOREVER_S
        self._is_asked = False  # before the look: what changes from here on is looked at once more
        return None if self._set() else FOREVER_S

    def _fail(self, _error: PodwireError) -> float:
        self._is_asked = True
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, AGAIN_MAX_S)
        return pause_s

    def _set(self) -> bool:
        """Write it where somebody said otherwise; tells whether that is done."""
        stored = self._store.get(core_node_key(self._node_name))
        if stored is None or not decode_core_node(stored).is_called_unavailable:
            return False
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._write(stored, network_is_available(now))
        _log.info("set the condition NetworkUnavailable", extra={"node": self._node_name})
        return True
