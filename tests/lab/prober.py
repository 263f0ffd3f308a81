"""Send the flows of policy cases as real packets, many at once, and tell what became of each.

Used by the policy tests of this folder. Everything runs in one thread of the test: sockets are opened inside the
namespaces and used from outside. No flow is judged by silence: what passes is answered, what does not is told by a drop
event; the deadline is for the case that neither comes.

SCTP is spoken by raw packets (INIT and INIT ACK), because few kernels have it; so are echo requests and other ICMP.
An answer that is dropped on its way back counts as what it is: the first packet did arrive.
"""

import contextlib
import enum
import functools
import json
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from podwire.model.closing import Closing
from tests.lab.policy_rig import Place
from tests.packet.frames import crc32c
from tests.policy_cases import PROTOCOLS, Flow

DEADLINE_S: Final = 60.0
LINGER_NOT: Final = struct.pack("ii", 1, 0)
ECHO_REPLY: Final = {4: 0, 6: 129}
_ICMP_PROTOCOL: Final = {4: socket.IPPROTO_ICMP, 6: socket.IPPROTO_ICMPV6}
_ICMP_NAME: Final = {4: "icmp", 6: "icmpv6"}
_SCTP_INIT: Final = 1
_SCTP_INIT_ACK: Final = 2
_SCTP_TAG: Final = 0x70770001
_BACKLOG: Final = 64


class Fate(enum.StrEnum):
    """What became of a flow."""

    PASSED = "passed"
    DENIED = "denied"
    """A drop event with the reason `policy` names its first packet."""
    DROPPED = "dropped"
    """Dropped for another reason."""
    ANSWER_DROPPED = "answer dropped"
    SILENT = "neither answered nor reported"
    FAILED = "failed at the socket"


@dataclass(frozen=True)
class Tuple5:
    """How an event names a packet. ICMP has no ports here."""

    protocol: str
    source: str
    source_port: int
    target: str
    target_port: int

    @property
    def reversed(self) -> "Tuple5":
        """The answer's."""
        return Tuple5(self.protocol, self.target, self.target_port, self.source, self.source_port)


@dataclass
class Attempt:
    """One flow in one family, under way or done."""

    flow: Flow
    family: int
    fate: Fate = Fate.SILENT
    event: Mapping[str, Any] = field(default_factory=dict)
    """The drop, when there was one."""
    detail: str = ""
    took_ms: float = 0.0

    def __str__(self) -> str:
        return f"{self.flow} over IPv{self.family}"

    @property
    def passed(self) -> bool:
        """Tell whether the first packet arrived and was answered."""
        return self.fate is Fate.PASSED

    @property
    def told(self) -> str:
        """Give what is to be told of it."""
        shown = {
            key: self.event[key] for key in ("reason", "direction", "policies") if key in self.event
        }
        return f"{self}: {self.fate}" + (f" {shown}" if shown else "") + f" {self.detail}".rstrip()


class DropFeed:
    """The node's drop events as they come, from one request that stays open."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(path)
        query = "follow=true&last=0&type=drop"
        self.socket.sendall(f"GET /v1/flows?{query} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.socket.recv(1)
        assert head.startswith(b"HTTP/1.1 200"), head
        self._rest = b""
        self.socket.setblocking(False)

    def take(self) -> list[dict[str, Any]]:
        """Give what has come."""
        with contextlib.suppress(BlockingIOError):
            while data := self.socket.recv(1 << 18):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        # The lengths of HTTP's chunks stand between them.
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def close(self) -> None:
        """Stop following."""
        self.socket.close()


def key_of(event: Mapping[str, Any]) -> Tuple5:
    """Name an event's packet."""
    protocol = str(event["protocol"])
    source, target = event["from"], event["to"]
    ports = (0, 0) if protocol.startswith("icmp") else (source["port"], target["port"])
    return Tuple5(protocol, source["ip"], ports[0], target["ip"], ports[1])


class Prober(Closing):
    """Servers at every place that flows lead to, and the sender of flows. The agents of some sockets tell of drops."""

    def __init__(self, places: Mapping[str, Place], *api_sockets: str) -> None:
        self._places = places
        self._selector = selectors.DefaultSelector()
        self._sockets: set[socket.socket] = set()
        self._served: set[tuple[str, str, int, int]] = set()
        self._raw: dict[tuple[str, str, int], socket.socket] = {}
        self._waiting: dict[Tuple5, tuple[Attempt, float]] = {}
        self._numbers = 0x4000
        self._feeds = [DropFeed(path) for path in api_sockets]
        for feed in self._feeds:
            self._selector.register(
                feed.socket, selectors.EVENT_READ, functools.partial(self._hear_drops, feed)
            )

    # What is asked

    def play(self, flows: Iterable[tuple[Flow, int]]) -> list[Attempt]:
        """Send the first packets of flows, each in a family (4 or 6), and wait for what becomes of all."""
        attempts = [Attempt(flow, family) for flow, family in flows]
        for attempt in attempts:
            self.serve(attempt.flow, attempt.family)
        left = attempts
        while left:
            left = self._play_distinct(left)
        return attempts

    def _play_distinct(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Play those whose events can be told apart; gives the others."""
        later, taken, mine = [], set(), []
        for attempt in attempts:
            name = (attempt.flow.source, attempt.flow.target, attempt.family)
            if _is_icmp(attempt.flow):
                if name in taken or (name[1], name[0], name[2]) in taken:
                    later.append(attempt)
                    continue
                taken.add(name)
            mine.append(attempt)
        opened = [closing for attempt in mine for closing in self._begin(attempt)]
        try:
            self._run()
        finally:
            for socket_ in opened:
                self._drop_socket(socket_)
            self._waiting.clear()
        return later

    def _run(self) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while self._waiting and time.monotonic() < until_s:
            for key, _ in self._selector.select(0.5):
                key.data()

    def _finish(self, key: Tuple5, fate: Fate, event: Mapping[str, Any] | None = None) -> None:
        found = self._waiting.pop(key, None)
        if found is None:
            return
        attempt, begin_s = found
        attempt.fate, attempt.event = fate, event or {}
        attempt.took_ms = (time.monotonic() - begin_s) * 1e3

    def _hear_drops(self, feed: DropFeed) -> None:
        for event in feed.take():
            key = key_of(event)
            if key.reversed in self._waiting:
                self._finish(key.reversed, Fate.ANSWER_DROPPED, event)
            else:
                fate = Fate.DENIED if event["reason"] == "policy" else Fate.DROPPED
                self._finish(key, fate, event)

    # Senders

    def _begin(self, attempt: Attempt) -> list[socket.socket]:
        start = {"tcp": self._begin_tcp, "udp": self._begin_udp, "sctp": self._begin_sctp}
        return start.get(attempt.flow.protocol, self._begin_icmp)(attempt)

    def _wait_for(self, attempt: Attempt, protocol: str, source_port: int, port: int) -> Tuple5:
        flow, family = attempt.flow, attempt.family
        key = Tuple5(
            protocol,
            self._places[flow.source].address(family),
            source_port,
            self._places[flow.target].address(family),
            port,
        )
        assert key not in self._waiting, f"two flows are {key}"
        self._waiting[key] = (attempt, time.monotonic())
        return key

    def _open_client(self, attempt: Attempt, kind: int) -> tuple[socket.socket, Tuple5]:
        place = self._places[attempt.flow.source]
        opened = place.open_socket(attempt.family, kind)
        self._sockets.add(opened)
        opened.bind((place.address(attempt.family), 0))
        protocol = attempt.flow.protocol
        port = opened.getsockname()[1]
        return opened, self._wait_for(attempt, protocol, port, attempt.flow.port)

    def _begin_tcp(self, attempt: Attempt) -> list[socket.socket]:
        opened, key = self._open_client(attempt, socket.SOCK_STREAM)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)

        def read() -> None:
            try:
                passed = opened.recv(1) == b"?"
            except BlockingIOError:
                return
            except OSError as error:
                attempt.detail = str(error)
                passed = False
            self._selector.unregister(opened)
            self._finish(key, Fate.PASSED if passed else Fate.FAILED)

        def connected() -> None:
            error = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                attempt.detail = f"errno {error}"
                self._selector.unregister(opened)
                self._finish(key, Fate.FAILED)
                return
            opened.send(b"?")
            self._selector.modify(opened, selectors.EVENT_READ, read)

        opened.connect_ex((key.target, key.target_port))
        self._selector.register(opened, selectors.EVENT_WRITE, connected)
        return [opened]

    def _begin_udp(self, attempt: Attempt) -> list[socket.socket]:
        opened, key = self._open_client(attempt, socket.SOCK_DGRAM)
        opened.connect((key.target, key.target_port))

        def read() -> None:
            try:
                passed = opened.recv(16) == b"?"
            except OSError as error:
                attempt.detail = str(error)
                passed = False
            self._finish(key, Fate.PASSED if passed else Fate.FAILED)

        self._selector.register(opened, selectors.EVENT_READ, read)
        opened.send(b"?")
        return [opened]

    def _begin_sctp(self, attempt: Attempt) -> list[socket.socket]:
        flow, family = attempt.flow, attempt.family
        raw = self._raw_socket(flow.source, "sctp", family)
        key = self._wait_for(attempt, "sctp", self._next_number(), flow.port)
        raw.sendto(sctp_packet(key.source_port, flow.port, _SCTP_INIT, 0), (key.target, 0))
        return []

    def _begin_icmp(self, attempt: Attempt) -> list[socket.socket]:
        """Echo requests are answered by the target's kernel; of other types the arrival counts."""
        flow, family = attempt.flow, attempt.family
        number = self._next_number()
        kind = {4: 8, 6: 128}[family] if flow.protocol == "ping" else flow.port
        raw = self._raw_socket(flow.source, "icmp", family)
        self._raw_socket(flow.target, "icmp", family)
        key = self._wait_for(attempt, _ICMP_NAME[family], 0, 0)
        raw.sendto(icmp_packet(family, kind, number), (key.target, 0))
        return []

    def _next_number(self) -> int:
        self._numbers = self._numbers + 1 if self._numbers < 0xFFFF else 0x4000
        return self._numbers

    # Servers

    def serve(self, flow: Flow, family: int) -> None:
        """Have a server for a flow."""
        key = (flow.target, flow.protocol, flow.port, family)
        if key in self._served:
            return
        self._served.add(key)
        if flow.protocol == "tcp":
            self._serve_tcp(flow, family)
        elif flow.protocol == "udp":
            self._serve_udp(flow, family)
        elif flow.protocol == "sctp":
            self._raw_socket(flow.target, "sctp", family)

    def _open_server(self, flow: Flow, family: int, kind: int) -> socket.socket:
        place = self._places[flow.target]
        opened = place.open_socket(family, kind)
        self._sockets.add(opened)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((place.address(family), flow.port))
        return opened

    def _serve_tcp(self, flow: Flow, family: int) -> None:
        listener = self._open_server(flow, family, socket.SOCK_STREAM)
        listener.listen(_BACKLOG)

        def accept() -> None:
            try:
                made, _ = listener.accept()
            except OSError:
                return  # it was reset before it was accepted
            made.setblocking(False)
            self._sockets.add(made)
            self._selector.register(made, selectors.EVENT_READ, lambda: echo(made))

        def echo(made: socket.socket) -> None:
            try:
                data = made.recv(64)
                if data:
                    made.send(data)
                    return
            except BlockingIOError:
                return
            except OSError:
                pass
            self._drop_socket(made)

        self._selector.register(listener, selectors.EVENT_READ, accept)

    def _serve_udp(self, flow: Flow, family: int) -> None:
        server = self._open_server(flow, family, socket.SOCK_DGRAM)

        def echo() -> None:
            with contextlib.suppress(OSError):
                data, sender = server.recvfrom(64)
                server.sendto(data, sender)

        self._selector.register(server, selectors.EVENT_READ, echo)

    def _raw_socket(self, name: str, protocol: str, family: int) -> socket.socket:
        key = (name, protocol, family)
        if key in self._raw:
            return self._raw[key]
        number = PROTOCOLS["sctp"] if protocol == "sctp" else _ICMP_PROTOCOL[family]
        place = self._places[name]
        opened = place.open_socket(family, socket.SOCK_RAW, number)
        # Else it would see what came to any address of the namespace, also before that was bound.
        opened.bind((place.address(family), 0))
        self._sockets.add(opened)
        self._raw[key] = opened
        read: Callable[[str, int, str, bytes], None] = (
            self._read_sctp if protocol == "sctp" else self._read_icmp
        )

        def take() -> None:
            with contextlib.suppress(OSError):
                data, sender = opened.recvfrom(2048)
                if family == 4:
                    data = data[(data[0] & 15) * 4 :]
                read(name, family, sender[0], data)

        self._selector.register(opened, selectors.EVENT_READ, take)
        return opened

    def _read_sctp(self, name: str, family: int, peer: str, data: bytes) -> None:
        source_port, target_port = struct.unpack_from("!HH", data)
        here = self._places[name].address(family)
        if data[12] == _SCTP_INIT and (name, "sctp", target_port, family) in self._served:
            answer = sctp_packet(target_port, source_port, _SCTP_INIT_ACK, _SCTP_TAG)
            self._raw[name, "sctp", family].sendto(answer, (peer, 0))
        elif data[12] == _SCTP_INIT_ACK:
            self._finish(Tuple5("sctp", here, target_port, peer, source_port), Fate.PASSED)

    def _read_icmp(self, name: str, family: int, peer: str, data: bytes) -> None:
        here, protocol = self._places[name].address(family), _ICMP_NAME[family]
        if data[0] == ECHO_REPLY[family]:
            self._finish_icmp(Tuple5(protocol, here, 0, peer, 0), "ping")
        self._finish_icmp(Tuple5(protocol, peer, 0, here, 0), protocol, data[0])

    def _finish_icmp(self, key: Tuple5, protocol: str, kind: int = 0) -> None:
        found = self._waiting.get(key)
        if found is None:
            return
        flow = found[0].flow
        named = "ping" if flow.protocol == "ping" else key.protocol
        if protocol == named and flow.port == kind:
            self._finish(key, Fate.PASSED)

    # The end

    def _drop_socket(self, one: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(one)
        one.close()
        self._sockets.discard(one)

    def close(self) -> None:
        """Close every socket."""
        for opened in list(self._sockets):
            self._drop_socket(opened)
        self._selector.close()
        for feed in self._feeds:
            feed.close()


def _is_icmp(flow: Flow) -> bool:
    return flow.protocol in ("ping", "icmp", "icmp6")


def icmp_packet(family: int, kind: int, number: int) -> bytes:
    """Write an ICMP message of a type; of ICMPv6 the kernel fills in the checksum."""
    packet = struct.pack("!BBHHH", kind, 0, 0, number, 1) + b"podwire-"
    if family == 6:
        return packet
    total = sum(struct.unpack(f"!{len(packet) // 2}H", packet))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return packet[:2] + struct.pack("!H", ~total & 0xFFFF) + packet[4:]


def sctp_packet(source_port: int, port: int, chunk: int, tag: int) -> bytes:
    """Write an SCTP packet with INIT or INIT ACK (RFC 9260, sections 3.3.2 and 3.3.3)."""
    body = struct.pack("!BBHIIHHI", chunk, 0, 20, _SCTP_TAG, 65536, 1, 1, 1)
    head = struct.pack("!HHI", source_port, port, tag)
    return head + struct.pack("<I", crc32c(head + bytes(4) + body)) + body
