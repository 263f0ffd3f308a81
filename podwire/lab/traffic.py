"""Packets between the parts of a lab: servers inside pods, and single connections with the time they took.

Used by `lab.labs`, `lab connect`, `lab check` and tests. A connection is made by a thread that visits the source's
namespace only to open its socket; the socket then stays there.
"""

import ipaddress
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from podwire.kernel import netns, spawn
from podwire.lab.state import Pod, Server, describe_process
from podwire.model.errors import Conflict, InvalidRequest

TIMEOUT_S: Final = 3.0
_PORT_DIGITS: Final = 5
_READY_TIMEOUT_S: Final = 15.0
_REPLY_MAX_BYTES: Final = 4096


@dataclass(frozen=True)
class Attempt:
    """One connection: what came back, or why nothing did."""

    ok: bool
    ms: float
    answer: str
    """The server's line, or the error."""


def parse_port(text: str) -> tuple[int, str]:
    """Read `PORT[/tcp|/udp]`."""
    port, slash, protocol = text.lower().partition("/")
    protocol = protocol if slash else "tcp"
    if (
        not (port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS)
        or not 1 <= int(port) <= 65_535
        or protocol not in ("tcp", "udp")
    ):
        raise InvalidRequest(
            f"read port {text!r}", hint="write PORT/tcp or PORT/udp, PORT from 1 to 65535"
        )
    return int(port), protocol


def start_servers(pod: Pod, ports: Sequence[tuple[int, str]]) -> tuple[Server, ...]:
    """Start one process in the pod that serves all `ports`; returns when they are open."""
    if not ports:
        return ()
    reader, writer = os.pipe()
    try:
        with netns.open_namespace(netns.named_path(pod.netns)) as fd:
            child = spawn.start(
                [
                    *(sys.executable, "-P", "-m", "podwire.lab.serve", pod.full_name, pod.node),
                    *(f"{port}/{protocol}" for port, protocol in ports),
                ],
                place=spawn.Place(network_fd=fd.fileno()),
                stdout_fd=writer,
                stderr_fd=2,
            )
        os.close(writer)
        writer = -1
        if not _says_ready(reader):
            child.close()
            raise Conflict(
                f"serve in pod {pod.full_name!r}: the server did not come up",
                hint="is one of its ports taken? see the line above, and podwire lab exec ... -- ss -lntu",
            )
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
    process = describe_process(child.pid)
    child.release()
    return tuple(Server(port, protocol, process) for port, protocol in ports)


def connect(
    namespace: str, address: str, port: int, protocol: str = "tcp", *, timeout_s: float = TIMEOUT_S
) -> Attempt:
    """Open one connection from a namespace and read the server's line."""
    begin = time.perf_counter()
    try:
        with socket_in(namespace, address, protocol) as one:
            begin = time.perf_counter()
            one.settimeout(timeout_s)
            one.connect((address, port))
            one.sendall(b"GET / HTTP/1.0\r\n\r\n" if protocol == "tcp" else b"?")
            answer = _read_line(one, protocol)
    except OSError as error:
        reason = "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error))
        return Attempt(False, (time.perf_counter() - begin) * 1e3, reason)
    return Attempt(bool(answer), (time.perf_counter() - begin) * 1e3, answer or "no answer")


def every(count: int, period_ms: int) -> Iterator[int]:
    """Count to `count` (0 = for ever), once in `period_ms` milliseconds by the clock."""
    done, due = 0, time.monotonic()
    while count == 0 or done < count:
        time.sleep(max(0.0, due - time.monotonic()))
        yield done
        done, due = done + 1, due + period_ms / 1e3


def socket_in(namespace: str, address: str, protocol: str) -> socket.socket:
    """Open a socket inside a namespace, of the family of `address`."""
    version = ipaddress.ip_address(address).version
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    kind = socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM
    with netns.open_namespace(netns.named_path(namespace)) as fd:
        return netns.run_in(fd.fileno(), lambda: socket.socket(family, kind))


def _read_line(one: socket.socket, protocol: str) -> str:
    if protocol == "udp":
        return one.recv(_REPLY_MAX_BYTES).decode(errors="replace").strip()
    data = b""
    while len(data) < _REPLY_MAX_BYTES and (chunk := one.recv(_REPLY_MAX_BYTES)):
        data += chunk
    head, blank, body = data.partition(b"\r\n\r\n")
    text = (body if blank else head).decode(errors="replace").strip()
    return text.splitlines()[0] if text else ""


def _says_ready(reader: int) -> bool:
    os.set_blocking(reader, False)
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            return os.read(reader, 16).startswith(b"ready")
        except BlockingIOError:
            time.sleep(0.005)
    return False
