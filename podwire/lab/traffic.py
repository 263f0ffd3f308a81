"""Packets between the parts of a lab: servers inside pods, and single connections with the time they took.

Used by `lab.labs`, `lab connect`, `lab check` and tests. A thread visits the source's namespace only to open the socket
of a connection; the socket stays bound to that namespace.
"""

import ipaddress
import os
import socket
import struct
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
_READY_TIMEOUT_S: Final = 60.0
_REPLY_MAX_BYTES: Final = 4096
_DATAGRAM_MAX_BYTES: Final = 65_535
_LARGE_ECHO_TRIES: Final = 3
_SOL_RAW: Final = 255
_ICMP_FILTER: Final = 1
"""Of <linux/icmp.h>; ICMP6_FILTER of <linux/icmpv6.h> has the same number."""


@dataclass(frozen=True)
class Attempt:
    """One connection: what came back, or why nothing did."""

    ok: bool
    ms: float
    answer: str
    """The server's line, or the error."""
    tries: int = 1
    """How often it was asked: more than once where datagrams may be lost on the way."""


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
                    # -P: from a directory that happens to have a socket.py, `-m` would import that one.
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
    # The server outlives this process: nobody here will wait for it.
    child.release()
    return tuple(Server(port, protocol, process) for port, protocol in ports)


def connect(
    namespace: str,
    address: str,
    port: int,
    protocol: str = "tcp",
    *,
    timeout_s: float = TIMEOUT_S,
    size_bytes: int = 0,
    tries: int = 1,
) -> Attempt:
    """Open one connection from a namespace, send `size_bytes` along with the question, and read the server's line.

    A question of UDP that nobody answers is asked up to `tries` times within the timeout, by the same socket.
    """
    begin = time.perf_counter()
    asked = 0
    try:
        # A namespace takes time to enter. The clock of the connection starts when the socket is open, and the one
        # above serves only a failure before that.
        with socket_in(namespace, address, protocol) as connection:
            begin = time.perf_counter()
            connection.settimeout(timeout_s / tries)
            connection.connect((address, port))
            while True:
                asked += 1
                connection.sendall(_question(protocol, size_bytes))
                try:
                    answer = _read_line(connection, protocol)
                    break
                except TimeoutError:
                    if asked >= tries:
                        raise
    except OSError as error:
        return Attempt(False, (time.perf_counter() - begin) * 1e3, _reason(error), max(asked, 1))
    taken_ms = (time.perf_counter() - begin) * 1e3
    return Attempt(bool(answer), taken_ms, answer or "no answer", asked)


def _question(protocol: str, size_bytes: int) -> bytes:
    if protocol == "udp":
        return b"?" * max(size_bytes, 1)
    if not size_bytes:
        return b"GET / HTTP/1.0\r\n\r\n"
    return b"POST / HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % size_bytes + bytes(size_bytes)


def _reason(error: OSError) -> str:
    return "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error))


def ping(
    namespace: str,
    address: str,
    *,
    size_bytes: int = 0,
    timeout_s: float = TIMEOUT_S,
    tries: int = 0,
) -> Attempt:
    """Ask for an echo from a namespace up to `tries` times, and wait for the answer.

    0 tries: as many as it needs, which is one, and more for a large one, as the answer may be what its sender learns
    the path MTU by, and be lost.
    """
    tries = tries or (_LARGE_ECHO_TRIES if size_bytes else 1)
    is_ipv4 = ":" not in address
    family, protocol = (
        (socket.AF_INET, socket.IPPROTO_ICMP)
        if is_ipv4
        else (socket.AF_INET6, socket.IPPROTO_ICMPV6)
    )
    request, reply = (8, 0) if is_ipv4 else (128, 129)
    token = os.urandom(8)
    payload = token + bytes(max(size_bytes, 56) - len(token))
    begin = time.perf_counter()
    asked, has_answered = 0, False
    try:
        with _socket_of(namespace, family, socket.SOCK_RAW, protocol) as connection:
            _hear_only(connection, reply, is_ipv4=is_ipv4)
            begin = time.perf_counter()
            connection.connect((address, 0))
            while not has_answered and asked < tries:
                asked += 1
                connection.send(_echo(request, payload, checksum=is_ipv4))
                until = time.perf_counter() + timeout_s / tries
                has_answered = _await_echo(connection, reply, token, until, skip_header=is_ipv4)
    except OSError as error:
        return Attempt(False, (time.perf_counter() - begin) * 1e3, _reason(error), max(asked, 1))
    taken_ms = (time.perf_counter() - begin) * 1e3
    return Attempt(
        has_answered, taken_ms, f"{len(payload)} bytes" if has_answered else "timed out", asked
    )


def _hear_only(connection: socket.socket, kind: int, *, is_ipv4: bool) -> None:
    """Keep other messages from a raw socket: others' large echoes would fill it, and ours would be lost."""
    if is_ipv4:
        # A bit that is set blocks its type (raw(7), ICMP_FILTER).
        connection.setsockopt(_SOL_RAW, _ICMP_FILTER, struct.pack("=I", 0xFFFFFFFF & ~(1 << kind)))
        return
    words = [0xFFFFFFFF] * 8
    words[kind >> 5] &= ~(1 << (kind & 31))
    connection.setsockopt(socket.IPPROTO_ICMPV6, _ICMP_FILTER, struct.pack("=8I", *words))


def _echo(kind: int, payload: bytes, *, checksum: bool) -> bytes:
    """Write an echo request; the kernel adds the checksum of ICMPv6 by itself (RFC 3542 3.1)."""
    # Its number is that of this question alone: pods that share a number share an entry of the masquerade.
    message = struct.pack("!BBH2sH", kind, 0, 0, payload[:2], 1) + payload
    if not checksum:
        return message
    words = struct.unpack(f"!{(len(message) + 1) // 2}H", message + b"\0" * (len(message) % 2))
    total = sum(words)
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return message[:2] + struct.pack("!H", ~total & 0xFFFF) + message[4:]


def _await_echo(
    connection: socket.socket, kind: int, token: bytes, deadline: float, *, skip_header: bool
) -> bool:
    """Read until the answer with our token comes; raw sockets hear of everybody's."""
    while (left := deadline - time.perf_counter()) > 0:
        connection.settimeout(left)
        try:
            packet = connection.recv(_DATAGRAM_MAX_BYTES)
        except TimeoutError:
            return False
        message = packet[(packet[0] & 0x0F) * 4 :] if skip_header else packet
        if message[:1] == bytes([kind]) and message[8:].startswith(token):
            return True
    return False


def every(count: int, period_ms: int) -> Iterator[int]:
    """Count to `count` (0 = for ever), once in `period_ms` milliseconds by the clock."""
    done, due = 0, time.monotonic()
    while count == 0 or done < count:
        time.sleep(max(0.0, due - time.monotonic()))
        yield done
        done, due = done + 1, due + period_ms / 1e3


def socket_in(namespace: str, address: str, protocol: str) -> socket.socket:
    """Open a socket inside a namespace (its name, or a path to it), of the family of `address`."""
    version = ipaddress.ip_address(address).version
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    kind = socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM
    return _socket_of(namespace, family, kind, 0)


def _socket_of(
    namespace: str, family: socket.AddressFamily, kind: socket.SocketKind, protocol: int
) -> socket.socket:
    path = namespace if "/" in namespace else netns.named_path(namespace)
    return netns.run_at(path, lambda: socket.socket(family, kind, protocol))


def _read_line(connection: socket.socket, protocol: str) -> str:
    if protocol == "udp":
        return connection.recv(_REPLY_MAX_BYTES).decode(errors="replace").strip()
    data = b""
    while len(data) < _REPLY_MAX_BYTES and (chunk := connection.recv(_REPLY_MAX_BYTES)):
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
