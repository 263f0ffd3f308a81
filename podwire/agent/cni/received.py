"""One request as it came through the launchers' door, and the launcher that waits for its answer.

Made by `agent.cni.socket` and `agent.cni.at_once`, answered by `agent.cni.requests`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from podwire.model.wire import Frame, Reply


@dataclass(eq=False)
class Caller:
    """The other end of a request. Only the loop changes it; any thread may look at it."""

    gone: bool = False
    on_leave: list[Callable[[], None]] = field(default_factory=list)

    def leave(self) -> None:
        """Note that nobody waits for the answer any more."""
        if not self.gone:
            self.gone = True
            for call in self.on_leave:
                call()

    def has_left(self) -> bool:
        """Tell whether the caller is known to have gone; one that nobody listens to is looked for."""
        return self.gone


@dataclass(eq=False)
class Received:
    """One request: the frame, its descriptors, and the caller that waits for the answer."""

    frame: Frame
    caller: Caller
    descriptors: list[int] = field(default_factory=list)
    answer_at_once: Callable[[Reply], bool] = lambda _reply: False
    """Sends the reply from any thread; False when there was one already, or nobody to send it to."""

    @property
    def netns_fd(self) -> int | None:
        """The pod's network namespace; None when CNI_NETNS was empty or could not be opened."""
        return self.descriptors[0] if self.frame.has_netns else None

    @property
    def mntns_fd(self) -> int | None:
        """The launcher's mount namespace; None when it could not be opened."""
        return self.descriptors[-1] if self.frame.has_mntns else None

    def close(self) -> None:
        """Close the descriptors; called by the code that answers, once nothing uses them."""
        while self.descriptors:
            os.close(self.descriptors.pop())
