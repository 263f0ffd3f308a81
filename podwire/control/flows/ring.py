"""The last flows of the node, the followers of new ones, and what must be reported because of them.

Filled by the agent's event loop, read by the API. A follower that does not keep up loses flows and is told how many.
It never slows down the others and never grows: what does not fit into its queue is dropped. Used from one thread only,
except for `watch`.
"""

from collections import deque
from collections.abc import Callable

import msgspec

from podwire.control.flows.flow import Flow
from podwire.control.flows.flow_filter import FlowFilter

FOLLOWER_QUEUE_FLOWS = 1024
"""Flows that wait for one follower; a further one is dropped and counted in the next flow's `lost`.
"""


class Follower:
    """One reader of new flows."""

    def __init__(self, wanted: FlowFilter, wake: Callable[[], None]) -> None:
        self.wanted = wanted
        self._wake = wake
        self._waiting: deque[Flow] = deque()
        self._lost = 0

    def offer(self, flow: Flow) -> bool:
        """Queue a flow that is wanted; False when it was dropped because the queue is full."""
        if not self.wanted.matches(flow):
            return True
        if len(self._waiting) >= FOLLOWER_QUEUE_FLOWS:
            self._lost += 1
            return False
        if self._lost:
            flow = msgspec.structs.replace(flow, lost=flow.lost + self._lost)
            self._lost = 0
        self._waiting.append(flow)
        self._wake()
        return True

    def take(self) -> list[Flow]:
        """Give what waits, oldest first, and empty the queue."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken


class Watch(msgspec.Struct, frozen=True):
    """The endpoints of which somebody wants to see also what passes."""

    everything: bool = False
    endpoints: frozenset[int] = frozenset()

    def includes(self, endpoint: int) -> bool:
        """Tell whether the endpoint is one of them."""
        return self.everything or endpoint in self.endpoints


class FlowRing:
    """The newest `capacity` flows and the followers.

    A `trace`, one packet that passed, is only offered: there are none but for followers, and kept
    they would push out the drops.
    """

    def __init__(self, capacity: int) -> None:
        self._flows: deque[Flow] = deque(maxlen=capacity)
        self._followers: list[Follower] = []
        self.watch = Watch()
        """Replaced as a whole when followers come and go; to be read from any thread."""
        self.dropped_for_followers = 0

    def __len__(self) -> int:
        return len(self._flows)

    def append(self, flow: Flow) -> None:
        """Keep a flow, unless it is a trace, and offer it to every follower."""
        if flow.type != "trace":
            self._flows.append(flow)
        for follower in self._followers:
            if not follower.offer(flow):
                self.dropped_for_followers += 1

    def last(self, count: int, wanted: FlowFilter) -> list[Flow]:
        """Give the newest `count` flows that match, oldest first."""
        flows: list[Flow] = []
        for flow in reversed(self._flows):
            if len(flows) == count:
                break
            if wanted.matches(flow):
                flows.append(flow)
        return flows[::-1]

    def follow(self, wanted: FlowFilter, wake: Callable[[], None]) -> Follower:
        """Begin to follow; `wake` is called when something waits. End it with `leave`."""
        follower = Follower(wanted, wake)
        self._followers.append(follower)
        self._change_watch()
        return follower

    def leave(self, follower: Follower) -> None:
        """Stop following."""
        self._followers.remove(follower)
        self._change_watch()

    def _change_watch(self) -> None:
        # One assignment of a frozen value: a thread that reads it meanwhile has the old or the new one, no mixture.
        wanted = [follower.wanted for follower in self._followers if follower.wanted.passes]
        self.watch = Watch(
            any(filter_.endpoint is None for filter_ in wanted),
            frozenset(filter_.endpoint for filter_ in wanted if filter_.endpoint is not None),
        )
