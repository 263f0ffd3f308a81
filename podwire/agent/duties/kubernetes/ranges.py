"""Serve the ranges that the own core Node has now: another UID or other podCIDRs come into force without a restart.

Made by `agent.assemble` with the store `kubernetes`. Follows the core Node by the agent's watch, and works on a thread
of its own, because a change of ranges takes the node's turn. Invariants: no address is given out while the core Node is
gone or has no podCIDR, because its range may be another node's by then. Pods that run keep their addresses until they
end, and what is wrong with these is said. While the API server is away nothing changes.
"""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from podwire.agent.duties.address_source import OwnCoreNode
from podwire.agent.duties.follower import FollowingDuty, KindList, StoreFollower
from podwire.agent.duties.kubernetes.start import RANGES_FACT
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.duties.worker import FOREVER_S, Worker
from podwire.control.kubernetes.core_node import CoreNode, decode_core_node
from podwire.model.endpoint import IPNetwork
from podwire.model.errors import PodwireError
from podwire.model.interfaces import FactStore
from podwire.model.store import Revisions, Store, StoredObject, StoreEvent
from podwire.model.store.kinds import CORE_NODE

UID_FACT: Final = "core-node-uid"
WARNING: Final = "core-node"
AGAIN_S: Final = 1.0
"""After a change that failed."""
STRAYS_S: Final = 5.0
"""How often it is looked whether pods still have addresses of earlier ranges, while some do."""
SHOWN_MAX: Final = 5

_log = logging.getLogger(__name__)


class ServedRanges(msgspec.Struct, frozen=True):
    """How this node gives addresses."""

    is_given: bool
    """Whether the ranges are the core Node's; else settings or pools say them."""
    ranges: Callable[[], tuple[IPNetwork, ...]]
    strays: Callable[[], tuple[IPNetwork, ...]]
    """Addresses that pods have of earlier ranges."""
    serve: Callable[[tuple[IPNetwork, ...]], None]
    """Brings other ranges into force. Raises KernelFailure, InvalidConfiguration: then the earlier ones stand."""
    withhold: Callable[[str], None]
    """Hears why no address may be given, "" when they may."""
    tell: Callable[[], None]
    """Hears that this node publishes itself under another core Node, or under none."""


class RangeKeeper(FollowingDuty):
    """The thread that serves what the core Node says. `warn` hears what people should know."""

    def __init__(
        self,
        *,
        store: Store,
        node_name: str,
        facts: FactStore,
        served: ServedRanges,
        core: OwnCoreNode,
        warn: Callable[[str, str], None],
        shared: SharedWatch | None = None,
    ) -> None:
        self._node_name = node_name
        self._facts = facts
        self._served = served
        self._core = core
        self._warn = warn
        core.uid = facts.read_fact(UID_FACT)
        if not core.uid:
            # Nothing that Kubernetes would not delete with the node is published.
            core.why_silent = ""
        self._node: CoreNode | None = None
        self._is_heard = False
        self._is_misread = False
        """Whether the Node's last version could not be read, and a warning says so."""
        self._strays = served.strays()
        self.follower = StoreFollower(
            "core-ranges", store, (CORE_NODE.plural,), self, shared=shared
        )
        self._worker = Worker("node-ranges", self._step, self._fail)

    # Listener of the store

    def on_lists(self, lists: Sequence[KindList]) -> None:
        """Take the Node, or that there is none."""
        nodes = [stored for kind_list in lists for stored in kind_list.objects]
        self._hear(next((stored for stored in nodes if stored.key.name == self._node_name), None))

    def on_events(self, events: Sequence[StoreEvent], _revisions: Revisions) -> None:
        for event in events:
            if event.object.key.name == self._node_name:
                self._hear(None if event.deleted else event.object)

    def _hear(self, stored: StoredObject | None) -> None:
        try:
            node = None if stored is None else decode_core_node(stored)
        except PodwireError as error:
            self._warn(WARNING, error.told)
            self._is_misread = True
            return
        # One that is as before again is brought into force, too: that takes the warning back.
        if not self._is_heard or self._is_misread or node != self._node:
            self._node, self._is_heard, self._is_misread = node, True, False
            self._worker.wake()

    # The thread

    def _fail(self, error: PodwireError) -> float:
        self._warn(WARNING, f"serve the ranges of core Node {self._node_name}: {error.told}")
        return AGAIN_S

    def _step(self) -> float:
        """Bring what was heard into force; gives when to look again without news."""
        if not self._is_heard:
            return FOREVER_S
        node, served = self._node, self._served
        self._own_by(node)
        why = self._find_obstacle(node)
        if served.is_given:
            if node is not None and node.pod_cidrs:
                self._serve(node.pod_cidrs)
            served.withhold(why)
        strays = served.strays()
        if strays != self._strays:
            # What leaves the node from such an address is masqueraded as from any pod's, and not after the pod's end.
            served.serve(served.ranges())
            self._strays = strays
        self._warn(WARNING, "; ".join(filter(None, (why, self._describe(strays)))))
        return STRAYS_S if strays else FOREVER_S

    def _own_by(self, node: CoreNode | None) -> None:
        """Publish this node under the core Node that there is now."""
        core = self._core
        before = core.uid, core.why_silent
        if node is None:
            core.why_silent = (
                f"there is no core Node {self._node_name}; what this node publishes is left to go"
            )
        else:
            if node.uid != core.uid:
                self._facts.write_fact(UID_FACT, node.uid)
            core.uid, core.why_silent = node.uid, None
        if before != (core.uid, core.why_silent):
            _log.info(
                "the core Node",
                extra={"node": self._node_name, "cause": core.why_silent or core.uid},
            )
            self._served.tell()

    def _find_obstacle(self, node: CoreNode | None) -> str:
        if node is None:
            return (
                f"core Node {self._node_name} is gone, and its range may be another node's: no pod gets an address"
                " until it is back; kubelet registers it when it starts"
            )
        if not node.pod_cidrs and self._served.is_given:
            return (
                f"core Node {self._node_name} was made anew and has no podCIDR: no pod gets an address until it has;"
                " kube-controller-manager gives them (--allocate-node-cidrs, --cluster-cidr)"
            )
        return ""

    def _serve(self, wanted: tuple[IPNetwork, ...]) -> None:
        if set(wanted) == set(self._served.ranges()):
            return
        before = ", ".join(map(str, self._served.ranges()))
        self._facts.write_fact(RANGES_FACT, json.dumps([str(cidr) for cidr in wanted]))
        self._served.serve(wanted)
        _log.warning(
            "the core Node has other ranges now, and pods get addresses of these",
            extra={"node": self._node_name, "cause": f"{before} -> {', '.join(map(str, wanted))}"},
        )

    def _describe(self, strays: Sequence[IPNetwork]) -> str:
        if not strays:
            return ""
        shown = ", ".join(str(stray.network_address) for stray in strays[:SHOWN_MAX])
        more = f" and {len(strays) - SHOWN_MAX} more" if len(strays) > SHOWN_MAX else ""
        return (
            f"pods of this node have addresses of ranges that it had before ({shown}{more}); they keep them until they"
            " end, and are not reached once another node has these ranges; start them again"
        )
