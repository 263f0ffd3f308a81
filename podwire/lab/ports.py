"""Ports of the loopback for servers that are started, killed and started again.

A probe that binds a port and lets go of it tells only that nobody has it now: the next question may draw the same
number, in this process or in another, before the server listens. So a port that was given out stays claimed until it
is released or this process ends. The claim is an abstract Unix socket: one network namespace holds a name once, as it
holds a port (unix(7)), and the kernel drops it with the process, so nothing is left to clear away.
"""

import atexit
import contextlib
import random
import socket
from typing import Final

_LOOPBACK: Final = "127.0.0.1"
_RANGE: Final = range(20_000, 32_000)
"""Below those that clients get (net.ipv4.ip_local_port_range)."""

_claims: dict[int, socket.socket] = {}


def claim() -> int:
    """Give a TCP port of the loopback that nobody uses now, and that nobody else is given until it is released."""
    for port in random.SystemRandom().sample(_RANGE, len(_RANGE)):
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            held.bind(f"\0podwire-lab-port-{port}")
            with contextlib.closing(socket.socket()) as probe:
                probe.bind((_LOOPBACK, port))
        except OSError:
            held.close()
            continue
        _claims[port] = held
        return port
    raise OSError(f"no port of {_RANGE.start}-{_RANGE.stop - 1} is free on {_LOOPBACK}")


def release(*given: int) -> None:
    """Let others have ports whose servers have ended for good; releasing one twice is harmless."""
    for port in given:
        held = _claims.pop(port, None)
        if held is not None:
            held.close()


@atexit.register
def _release_all() -> None:
    release(*list(_claims))
