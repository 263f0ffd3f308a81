"""Cause a drop, and follow the flows of a node's agent meanwhile, as a person would.

Used by the demo and by tests.
"""

import json
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from podwire.kernel import netns
from podwire.lab.state import read_state

DEADLINE_S: Final = 20.0


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


def send_forged(namespace: str, source: str, target: str) -> None:
    """Send a UDP packet from port 4444 to port 80 with a forged IPv4 source; our program judges it, not the kernel."""
    payload = b"forged"
    udp = struct.pack("!4H", 4444, 80, 8 + len(payload), 0) + payload
    head = struct.pack(
        "!BBHHHBBH4s4s",
        *(0x45, 0, 20 + len(udp), 1, 0, 64, socket.IPPROTO_UDP, 0),
        *(socket.inet_aton(source), socket.inet_aton(target)),
    )
    open_raw = partial(socket.socket, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    with netns.run_at(netns.named_path(namespace), open_raw) as raw:
        raw.sendto(head + udp, (target, 0))


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
