"""The first packets to a new pod: one echo request and one SYN of each family, of which none may need a second try.

Sockets are opened inside a namespace and used from outside. Nothing is judged by time: an echo request is sent once,
and the kernel itself counts how often it has repeated a SYN. Nobody listens in the pod, so its answer is a reset.
"""

import ipaddress
import itertools
import os
import select
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from podwire.kernel import netns

ANSWER_S: Final = 10.0
"""For an answer on a loaded machine; only what is lost takes so long."""
PORT: Final = 80
_IDENTIFIER: Final = os.getpid() & 0xFFFF
_ECHO: Final = struct.Struct("!BBHHH")
"""Type, code, checksum, identifier, number."""
_REQUEST_TYPE: Final = {4: 8, 6: 128}
_REPLY_TYPE: Final = {4: 0, 6: 129}
_FAMILY: Final = {4: socket.AF_INET, 6: socket.AF_INET6}
_PROTOCOL: Final = {4: socket.IPPROTO_ICMP, 6: socket.IPPROTO_ICMPV6}
_IPV4_HEADER_BYTES: Final = 20
_TCP_INFO_BYTES: Final = 104
_TOTAL_RETRANSMISSIONS: Final = struct.Struct("=100xI")
"""tcpi_total_retrans in `struct tcp_info` (include/uapi/linux/tcp.h)."""
_numbers: Final = itertools.count(1)


@dataclass
class _Sent:
    address: str
    version: int
    number: int
    connection: socket.socket


class Sender:
    """Sends first packets from one namespace, and tells which of them were lost."""

    def __init__(self, name: str, namespace_path: str) -> None:
        self._name = name
        self._namespace = netns.open_namespace(namespace_path)
        with netns.namespace(self._namespace.fileno()):
            self._echo = {
                version: socket.socket(_FAMILY[version], socket.SOCK_RAW, _PROTOCOL[version])
                for version in (4, 6)
            }
        self._sent: list[_Sent] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection in (*self._echo.values(), *(sent.connection for sent in self._sent)):
            connection.close()
        self._namespace.close()

    def send(self, addresses: Iterable[str]) -> None:
        """Send one echo request and one SYN to each address."""
        with netns.namespace(self._namespace.fileno()):
            for address in addresses:
                version = ipaddress.ip_address(address).version
                number = next(_numbers) & 0xFFFF
                self._echo[version].sendto(_request(version, number), (address, 0))
                connection = socket.socket(_FAMILY[version], socket.SOCK_STREAM)
                connection.setblocking(False)
                connection.connect_ex((address, PORT))
                self._sent.append(_Sent(address, version, number, connection))

    def list_lost(self) -> list[str]:
        """Wait for the answers to everything sent since the last call; name what got none at the first try."""
        sent, self._sent = self._sent, []
        lost = []
        for opening in sent:
            with opening.connection:
                if not self._is_echoed(opening):
                    lost.append(f"echo from {self._name} to {opening.address}")
                if not _is_reset_at_once(opening.connection):
                    lost.append(f"SYN from {self._name} to {opening.address}")
        return lost

    def _is_echoed(self, sent: _Sent) -> bool:
        echo = self._echo[sent.version]
        until_s = time.monotonic() + ANSWER_S
        while (left_s := until_s - time.monotonic()) > 0:
            if not select.select([echo], [], [], left_s)[0]:
                break
            packet = echo.recv(256)[_IPV4_HEADER_BYTES if sent.version == 4 else 0 :]
            kind, _, _, identifier, number = _ECHO.unpack_from(packet)
            if (kind, identifier, number) == (
                _REPLY_TYPE[sent.version],
                _IDENTIFIER,
                sent.number,
            ):
                return True
        return False


def _is_reset_at_once(connection: socket.socket) -> bool:
    done = select.select([], [connection], [], ANSWER_S)[1]
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return bool(done) and _TOTAL_RETRANSMISSIONS.unpack(information) == (0,)


def _request(version: int, number: int) -> bytes:
    """Give an echo request; the kernel puts in the checksum of ICMPv6, which covers addresses as well."""
    head = _ECHO.pack(_REQUEST_TYPE[version], 0, 0, _IDENTIFIER, number)
    if version == 6:
        return head
    total = sum(struct.unpack("!4H", head))
    checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    return _ECHO.pack(_REQUEST_TYPE[version], 0, checksum, _IDENTIFIER, number)
