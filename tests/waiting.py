"""Wait in tests for what something else brings about: look until it is so, fail when it does not come in time."""

import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

Found = TypeVar("Found")
Result = TypeVar("Result")

DEADLINE_S: Final = 120.0
"""Long enough for a loaded machine; nobody waits for it unless something is wrong."""
LOOK_S: Final = 0.005
ASK_S: Final = 0.03
"""How long one waits between questions to a server, which computes for each."""


def wait_for(
    look: Callable[[], Found | None],
    what: str = "what is expected",
    deadline_s: float = DEADLINE_S,
    *,
    pause_s: float = LOOK_S,
) -> Found:
    """Look until `look` gives something true, and give that; AssertionError naming `what` after the deadline."""
    until_s = time.monotonic() + deadline_s
    while not (found := look()):
        if time.monotonic() > until_s:
            raise AssertionError(f"waited {deadline_s:g} s in vain for {what}")
        time.sleep(pause_s)
    return found


ask_until: Final = partial(wait_for, pause_s=ASK_S)
"""`wait_for` where a look is a question to a server."""


def within(seconds: float, attempt: Callable[[], Result], deadline_s: float = DEADLINE_S) -> Result:
    """Give what `attempt` does in less than `seconds`: one during which the machine stood still shows nothing."""
    until_s = time.monotonic() + deadline_s
    while True:
        began_s = time.monotonic()
        result = attempt()
        now_s = time.monotonic()
        if now_s - began_s < seconds:
            return result
        assert now_s < until_s, f"no attempt took less than {seconds:g} s"
