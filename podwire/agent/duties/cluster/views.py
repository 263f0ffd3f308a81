"""What people see of other nodes: the nodes by name, counts, metrics, and conflicts between them.

Made by `agent.duties.cluster.duty`; called by the API, by the scraping of metrics, and after every step of the
applier. Only reads: it shows what the last plan says. Safe from any thread.
"""

import threading
from typing import Final

from podwire.agent.duties.cluster.liveness import Lives
from podwire.agent.health import Health
from podwire.agent.metrics import Gauge
from podwire.control.cluster.reach import Reach
from podwire.control.cluster.state import ClusterState, ClusterTotals, KnownNode, OwnNode
from podwire.model.cluster import NodeFacts

WARNINGS_MAX: Final = 10


class ClusterViews:
    """Other nodes as people see them."""

    def __init__(
        self, state: ClusterState, lock: threading.Lock, lives: Lives, routing: str
    ) -> None:
        self._state = state
        self._lock = lock
        """Held around the state."""
        self._lives = lives
        self._routing = routing

    def list_nodes(self, own: OwnNode | None) -> list[KnownNode]:
        """Give every node that has published itself, this one first."""
        with self._lock:
            facts = dict(self._state.facts)
            reaches = self._state.planned.reaches if self._state.planned else {}
        here = [] if own is None else [KnownNode(own.facts, "", ("local",), 0)]
        return here + [_view(facts[name], reaches.get(name)) for name in sorted(facts)]

    def totals(self) -> ClusterTotals:
        """Count what is known."""
        state = self._state
        return ClusterTotals(
            routing=self._routing,
            nodes=len(state.facts),
            reached=self._count_peers(),
            pods=state.pods.count,
            heard=state.is_listed,
        )

    def show_problems(self, health: Health) -> str:
        """Have what is wrong between nodes in `podwire status`; gives what of this node's ranges another has."""
        with self._lock:
            messages = [problem.message for problem in self._state.problems]
            planned = self._state.planned
            lost = planned.lost if planned else ""
            lost_ranges = planned.lost_ranges if planned else ""
        health.warn("cluster-lives", self._lives.describe_dead(self._list_names()))
        health.report("node-claims", ok=not lost, message=lost, critical=True)
        shown = messages[:WARNINGS_MAX]
        if len(messages) > WARNINGS_MAX:
            shown.append(f"{len(messages) - WARNINGS_MAX} more problems between nodes")
        for index in range(WARNINGS_MAX + 1):
            health.warn(f"cluster-{index}", shown[index] if index < len(shown) else "")
        return lost_ranges

    def gauges(self) -> list[Gauge]:
        state, lives = self._state, self._lives
        return [
            Gauge.single("cluster_nodes", "Other nodes known", lambda: len(state.facts)),
            Gauge.single(
                "cluster_nodes_dead",
                "Other nodes whose agents are not alive",
                lambda: len(lives.find_dead(self._list_names())),
            ),
            Gauge.single("cluster_peers", "Other nodes reached", self._count_peers),
            Gauge.single(
                "cluster_pods", "Addresses of other nodes' pods", lambda: state.pods.count
            ),
            Gauge.single(
                "cluster_problems", "Contradictions between nodes", lambda: len(state.problems)
            ),
        ]

    def _list_names(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._state.facts)

    def _count_peers(self) -> int:
        return len(self._state.planned.plan.peers) if self._state.planned else 0


def _view(facts: NodeFacts, reach: Reach | None) -> KnownNode:
    ways = () if reach is None else tuple(sorted({str(way) for way in reach.ways.values() if way}))
    if reach is None or not ways:
        return KnownNode(facts, "", ways, 0)
    return KnownNode(facts, str(reach.peer.outer), ways, reach.peer.mtu_bytes)
