"""Who speaks SCTP by raw packets, because few kernels have it.

Each packet is one that a kernel would send; of what comes the checksum must be right.
"""

import contextlib
import socket
import struct
from dataclasses import dataclass
from typing import Final

from podwire.kernel import netns
from podwire.model.closing import Closing
from tests.packet.frames import crc32c, sctp
from tests.waiting import wait_for

_HEADER_BYTES: Final = 12


@dataclass(frozen=True)
class Heard:
    """A packet as it came."""

    source: str
    sport: int
    dport: int


class Voice(Closing):
    """Speaks from one address, inside the network at a path."""

    def __init__(self, network: str, address: str, patience_s: float) -> None:
        domain = socket.AF_INET6 if ":" in address else socket.AF_INET
        with netns.open_namespace(network) as fd, netns.namespace(fd.fileno()):
            self.socket = socket.socket(domain, socket.SOCK_RAW, socket.IPPROTO_SCTP)
        self.socket.settimeout(patience_s)
        self.socket.bind((address, 0))

    def say(self, to: str, sport: int, dport: int, chunk: int) -> None:
        """Send one chunk."""
        self.socket.sendto(sctp(sport, dport, chunk).data, (to, 0))

    def tell(self, other: "Voice", to: str, sport: int, dport: int, chunk: int) -> Heard:
        """Send one chunk until another hears it: as a kernel would, because what is new may lose a packet."""

        def hear() -> Heard | None:
            self.say(to, sport, dport, chunk)
            with contextlib.suppress(TimeoutError):
                return other.hear(chunk)
            return None

        return wait_for(hear, f"chunk {chunk} to be heard")

    def hear(self, chunk: int) -> Heard:
        """Receive that chunk; others are none of our business: who asks himself hears himself answer."""
        while True:
            data, peer = self.socket.recvfrom(2048)
            if self.socket.family == socket.AF_INET:  # which gives the IP header, too
                data = data[4 * (data[0] & 15) :]
            if data[_HEADER_BYTES] == chunk:
                right = struct.pack("<I", crc32c(data[:8] + bytes(4) + data[12:]))
                assert data[8:12] == right
                return Heard(peer[0], *struct.unpack_from("!HH", data))

    def close(self) -> None:
        """Fall silent."""
        self.socket.close()
