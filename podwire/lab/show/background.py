"""What goes on beside a demo: threads that ask or move something all the time, and waiting for what they see."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Background(ABC):
    """Something that goes on until `stop` is set."""

    stop: threading.Event = field(default_factory=threading.Event, kw_only=True)

    @abstractmethod
    def run(self) -> None:
        """Do it."""


@contextmanager
def going_on(*activities: Background) -> Iterator[None]:
    """Have all of these go on, each in a thread of its own, as long as the block takes."""
    threads = [threading.Thread(target=activity.run) for activity in activities]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for activity in activities:
            activity.stop.set()
        for thread in threads:
            thread.join()


def wait_until(holds: Callable[[], bool], deadline_s: float, every_s: float) -> bool:
    """Wait until something holds; False when it does not come to that in time."""
    until_s = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > until_s:
            return False
        time.sleep(every_s)
    return True
