"""Wait in tests for what something else brings about: look until it is so, fail when it does not come in time."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

Found = TypeVar("Found")

DEADLINE_S: Final = 120.0
"""Long enough for a loaded machine; nobody waits for it unless something is wrong."""
LOOK_S: Final = 0.005


def wait_for(
    look: Callable[[], Found | None], what: str = "what is expected", deadline_s: float = DEADLINE_S
) -> Found:
    """Look until `look` gives something true, and give that; AssertionError naming `what` after the deadline."""
    until_s = time.monotonic() + deadline_s
    while not (found := look()):
        if time.monotonic() > until_s:
            raise AssertionError(f"waited {deadline_s:g} s in vain for {what}")
        time.sleep(LOOK_S)
    return found
