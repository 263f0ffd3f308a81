"""One launcher's frame as it arrives on its connection, with its descriptors.

Used by `agent.cni.socket` on the loop and by `agent.cni.at_once` on its thread; a connection that one of them hands to
the other keeps what it has read. Never waits. Invariant: every descriptor that arrives has one owner, the reader until
`take_descriptors`, and is closed exactly once.
"""

import array
import os
import socket
import struct
from typing import Final

from podwire.model import wire
from podwire.model.errors import PodwireError, Unavailable, UndecodableRequest
from podwire.model.wire import Frame

READ_BYTES: Final = 65_536
DESCRIPTORS_MAX: Final = 2
_CONTROL_BYTES: Final = socket.CMSG_SPACE((DESCRIPTORS_MAX + 2) * array.array("i").itemsize)
"""Room for more than are allowed, so that too many are seen (and closed), not cut off."""
_RECEIVE_FLAGS: Final = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
"""CLOEXEC: a plugin that another thread starts at this moment must not inherit the pod's namespace."""
_CREDENTIALS: Final = struct.Struct("iII")


class FrameReader:
    """The bytes of one connection until its frame is whole."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.descriptors: list[int] = []
        self.frame: Frame | None = None
        """The frame once it is whole."""
        self.fault: PodwireError | None = None
        """Why what came is no frame, when that was found before the connection was handed over."""
        self._buffer = bytearray()
        self._total_bytes = 0
        self._caller: tuple[int, int] | None = None

    def read_caller(self) -> tuple[int, int]:
        """Give process and user id of the caller."""
        if self._caller is None:
            self._caller = self._ask_for_caller()
        return self._caller

    def _ask_for_caller(self) -> tuple[int, int]:
        # The kernel notes these at connect(2) (unix(7)): nothing that the caller sends counts.
        credentials = self.connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        pid, uid, _gid = _CREDENTIALS.unpack(credentials)
        return pid, uid

    def receive(self) -> bytes | None:
        """Give the next bytes, b"" at the end, None when there are none yet; keep descriptors."""
        try:
            data, ancillary, flags, _ = self.connection.recvmsg(
                READ_BYTES, _CONTROL_BYTES, _RECEIVE_FLAGS
            )
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                # A control message that was cut may end within a number.
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                self.descriptors.extend(numbers)
        # The kernel has closed those that did not fit (unix(7)); the others are closed with the connection.
        if len(self.descriptors) > DESCRIPTORS_MAX:
            raise UndecodableRequest("read the request: too many descriptors came with it")
        # There was room for more in the message, so this process may have no more (net/core/scm.c:scm_detach_fds).
        if flags & socket.MSG_CTRUNC:
            raise Unavailable(
                "read the request: the agent has no descriptor left for what came with it",
                hint="call again; raise the agent's limit of open files (LimitNOFILE)",
            )
        return data

    def add(self, data: bytes) -> bool:
        """Take the next bytes in; whether the frame is whole now."""
        self._buffer += data
        if not self._total_bytes and len(self._buffer) >= wire.COMMON_HEADER_BYTES:
            self._total_bytes = wire.request_bytes(self._buffer)
        if not self._total_bytes or len(self._buffer) < self._total_bytes:
            return False
        frame = wire.decode_frame(bytes(self._buffer))
        if frame.descriptor_count != len(self.descriptors):
            raise UndecodableRequest(
                f"read the request: it says that {frame.descriptor_count} descriptors come with it,"
                f" {len(self.descriptors)} came"
            )
        self.frame = frame
        self._buffer = bytearray()
        return True

    def take_descriptors(self) -> list[int]:
        """Hand the descriptors to a request: a thread may use them for longer than the connection lasts."""
        taken, self.descriptors = self.descriptors, []
        return taken

    def close(self) -> None:
        """Close the connection, and the descriptors that nobody has taken."""
        self.connection.close()
        while self.descriptors:
            os.close(self.descriptors.pop())
