"""See a drop as a person would: follow the flows of a node's agent while something happens.

Used by the demo and by tests.
"""

import json
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from podwire.lab.state import read_state

DEADLINE_S: Final = 5.0


def wait_for_drop(
    lab: str, node_name: str, provoke: Callable[[], None], *, source: str = ""
) -> dict[str, Any] | None:
    """Follow the drops of a node, call `provoke`, give the first one from `source`; None when none comes in time."""
    node = read_state(lab).plan.node(node_name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect(str(node.directory / "api.sock"))
        query = "follow=true&last=0&type=drop"
        connection.sendall(f"GET /v1/flows?{query} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        with connection.makefile("rb") as reader:
            while reader.readline().strip():
                pass
            provoke()
            return _find(reader, source)


def _find(reader: Any, source: str) -> dict[str, Any] | None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            line = reader.readline().strip()
        except TimeoutError:
            return None
        if not line.startswith(b"{"):
            continue  # the length of an HTTP chunk, or the end of one
        flow: dict[str, Any] = json.loads(line)
        if not source or flow.get("from", {}).get("ip") == source:
            return flow
    return None
