"""Netlink: frames, attributes, and a socket that sends many requests at once and tells which of them failed.

Used by `kernel.rtnl` builders and by all parts of `datapath` and `lab` that send what they build. A socket stays bound
to the namespace of the thread that opened it and may be used from any thread afterwards. Must never mix up answers:
each request has its own sequence number, and late answers of an abandoned exchange are dropped. The kernel continues
after a failed request of a batch, so a request that must not run without its predecessor belongs in a later send.
"""

import errno
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, Self

import msgspec

from podwire.kernel import netns
from podwire.model.closing import Closing
from podwire.model.errors import KernelFailure

# include/uapi/linux/netlink.h
NLM_F_REQUEST: Final = 0x001
NLM_F_ACK: Final = 0x004
NLM_F_DUMP_INTR: Final = 0x010
NLM_F_REPLACE: Final = 0x100
NLM_F_EXCL: Final = 0x200
NLM_F_CREATE: Final = 0x400
NLM_F_DUMP: Final = 0x300
NLA_F_NESTED: Final = 0x8000
_NLA_TYPE_MASK: Final = 0x3FFF
_NLMSG_ERROR: Final = 2
_NLMSG_DONE: Final = 3
_NLM_F_CAPPED: Final = 0x100
_NLM_F_ACK_TLVS: Final = 0x200
_NLMSGERR_ATTR_MSG: Final = 1
_SOL_NETLINK: Final = 270
_NETLINK_CAP_ACK: Final = 10
_NETLINK_EXT_ACK: Final = 11
_NETLINK_GET_STRICT_CHK: Final = 12
_SO_RCVBUFFORCE: Final = 33

_SIOCGIFNAME: Final = 0x8910
_IFREQ_INDEX: Final = struct.Struct("=16xi20x")
"""struct ifreq: room for the name, the index, the rest of a union."""

_HEADER: Final = struct.Struct("=IHHII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_ERRNO: Final = struct.Struct("=i")
_SEQUENCE: Final = struct.Struct("=I")
_SEQUENCE_AT: Final = 8
_ACKNOWLEDGEMENT: Final = struct.Struct("=4xH2xI4xi")
"""Type and sequence number of an answer, and the error that it tells."""
_ECHOED_BYTES: Final = _ERRNO.size + _HEADER.size
_RECEIVE_BYTES: Final = 1 << 17
_RECEIVE_BUFFER_BYTES: Final = 1 << 21
_SOCKET_KIND: Final = int(socket.SOCK_RAW | socket.SOCK_CLOEXEC)
_RECEIVE_TIMEOUT: Final = struct.pack("@ll", 30, 0)
"""struct timeval: seconds and microseconds."""
_BATCH_REQUESTS: Final = 128
"""Failures wait in the receive buffer, so a batch is cut before they could overflow it."""
_DUMP_TRIES: Final = 10

Attributes = dict[int, bytes]


class Request(msgspec.Struct, frozen=True):
    """One message to the kernel; `call` and `target` are what an error says was tried on what.

    `target` becomes text only then: most requests succeed, and addresses take their time.
    """

    type: int
    flags: int
    body: bytes
    call: str
    target: object


class EncodedBatch(msgspec.Struct, frozen=True):
    """Requests in the bytes that are sent; `requests` makes them as they are, for the one case that some fail."""

    data: bytearray
    starts: Sequence[int]
    """Where each message begins: its sequence number is written when it is sent."""
    requests: Callable[[], Sequence[Request]]


def encode_batch(requests: Sequence[Request]) -> tuple[bytes, Sequence[int]]:
    """Encode requests of which only the last is acknowledged; gives where each of them begins, too."""
    frames, starts, at = [], [], 0
    for number, request in enumerate(requests, 1):
        frame = _encode_message(request, NLM_F_ACK if number == len(requests) else 0, 0)
        frames.append(frame)
        starts.append(at)
        at += len(frame)
    return b"".join(frames), starts


def _encode_message(request: Request, flags: int, sequence: int) -> bytes:
    length = _HEADER.size + len(request.body)
    flags |= request.flags | NLM_F_REQUEST
    header = _HEADER.pack(length, request.type, flags, sequence & 0xFFFFFFFF, 0)
    return header + request.body + b"\0" * (-length & 3)


def attribute(kind: int, payload: bytes) -> bytes:
    """Encode one attribute, padded to four bytes."""
    length = 4 + len(payload)
    return _ATTRIBUTE.pack(length, kind) + payload + b"\0" * (-length & 3)


def attribute_u32(kind: int, value: int) -> bytes:
    """Encode an attribute with an unsigned number of 32 bits in host order."""
    return struct.pack("=HHI", 8, kind, value)


def attribute_text(kind: int, text: str) -> bytes:
    """Encode an attribute with a NUL-terminated string."""
    return attribute(kind, text.encode() + b"\0")


def nested(kind: int, *attributes: bytes) -> bytes:
    """Encode an attribute that holds attributes."""
    return attribute(kind | NLA_F_NESTED, b"".join(attributes))


def parse_attributes(data: bytes) -> Attributes:
    """Decode a list of attributes by number, the last of each; KernelFailure(EBADMSG) when it is cut short."""
    attributes: Attributes = {}
    offset, end = 0, len(data)
    while offset + 4 <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < 4 or offset + length > end:
            raise malformed(f"attribute of {length} bytes where {end - offset} are left")
        attributes[kind & _NLA_TYPE_MASK] = data[offset + 4 : offset + length]
        offset += (length + 3) & ~3
    if offset < end:
        raise malformed(f"{end - offset} bytes behind the last attribute")
    return attributes


def find_attribute(data: bytes, wanted: int) -> bytes | None:
    """Give the first attribute with a number, without decoding those behind it; None when there is none."""
    offset, end = 0, len(data)
    while offset + 4 <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < 4 or offset + length > end:
            raise malformed(f"attribute of {length} bytes where {end - offset} are left")
        if kind & _NLA_TYPE_MASK == wanted:
            return data[offset + 4 : offset + length]
        offset += (length + 3) & ~3
    return None


def unpack_body(layout: struct.Struct, body: bytes) -> tuple[tuple[int, ...], Attributes]:
    """Split a message's body into its fixed header and its attributes."""
    if len(body) < layout.size:
        raise malformed(f"body of {len(body)} bytes where {layout.size} are needed")
    return layout.unpack_from(body), parse_attributes(body[(layout.size + 3) & ~3 :])


def read_u32(attributes: Attributes, kind: int, default: int = 0) -> int:
    """Read a number of 32 bits in host order."""
    payload = attributes.get(kind)
    if payload is None:
        return default
    if len(payload) < 4:
        raise malformed(f"number of {len(payload)} bytes in attribute {kind}")
    return int.from_bytes(payload[:4], "little" if _LITTLE else "big")


def read_text(attributes: Attributes, kind: int) -> str:
    """Read a string; "" when it is absent."""
    return attributes.get(kind, b"").split(b"\0", 1)[0].decode(errors="replace")


def malformed(detail: str) -> KernelFailure:
    """Make the error for a message that is not what the protocol says."""
    return KernelFailure(errno.EBADMSG, "read", "netlink message", detail=detail)


_LITTLE: Final = struct.pack("=H", 1) == b"\x01\x00"


class NetlinkSocket(Closing):
    """A socket of rtnetlink, or of another protocol: `execute` changes, `dump` and `get` look.

    One exchange at a time (it locks itself).
    """

    def __init__(self, protocol: int = socket.NETLINK_ROUTE) -> None:
        self._lock = threading.Lock()
        self._sequence = 0
        self._socket = socket.socket(socket.AF_NETLINK, _SOCKET_KIND, protocol)
        # CAP_ACK: an error does not quote the request, which may be longer than the receive buffer has room for.
        # EXT_ACK: it says why in words. STRICT_CHK: the kernel filters dumps by what the request names; without it a
        # dump of routes ignores table, protocol and device.
        for option in (_NETLINK_CAP_ACK, _NETLINK_EXT_ACK, _NETLINK_GET_STRICT_CHK):
            self._socket.setsockopt(_SOL_NETLINK, option, 1)
        # FORCE, because net.core.rmem_max is 208 KiB by default and limits SO_RCVBUF.
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
        self._socket.setsockopt(
            # An answer that the kernel had to drop would be waited for without end.
            socket.SOL_SOCKET,
            socket.SO_RCVTIMEO,
            _RECEIVE_TIMEOUT,
        )

    @classmethod
    def open_in(cls, namespace_fd: int) -> Self:
        """Open a socket inside a namespace; the calling thread is there only for a moment."""
        # A socket belongs to the namespace it was created in for its whole life, wherever it is used later.
        with netns.namespace(namespace_fd):
            return cls()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def execute(self, requests: Sequence[Request], tolerated: Collection[int] = ()) -> None:
        """Send the requests at once; raise the first failure whose errno is not `tolerated`, after all were tried."""
        for failure in self.attempt(requests):
            if failure is not None and failure.errno not in tolerated:
                raise failure

    def attempt(self, requests: Sequence[Request]) -> list[KernelFailure | None]:
        """Send the requests at once; give for each, in order, its failure or None."""
        results: list[KernelFailure | None] = []
        with self._lock:
            for start in range(0, len(requests), _BATCH_REQUESTS):
                results += self._exchange(requests[start : start + _BATCH_REQUESTS])
        return results

    def attempt_batch(self, batch: EncodedBatch) -> Sequence[KernelFailure | None]:
        """Send what is encoded already; gives what `attempt` does, and () when all of it is done."""
        with self._lock:
            first = self._sequence + 1
            for number, start in enumerate(batch.starts, first):
                _SEQUENCE.pack_into(batch.data, start + _SEQUENCE_AT, number & 0xFFFFFFFF)
            count = len(batch.starts)
            self._sequence = (first + count - 1) & 0xFFFFFFFF
            self._transmit(batch.data, "send an encoded batch", changes=True)
            data = self._take("send an encoded batch")
            if len(data) >= _ACKNOWLEDGEMENT.size and _ACKNOWLEDGEMENT.unpack_from(data) == (
                *(_NLMSG_ERROR, self._sequence, 0),
            ):
                return ()
            return self._read_results(batch.requests(), first & 0xFFFFFFFF, data)

    def dump(self, request: Request, absent: Collection[int] = ()) -> list[bytes]:
        """Give the bodies of every message of a dump; one that the kernel calls inconsistent is taken again.

        `absent`: errnos that say that there is nothing to list.
        """
        with self._lock:
            for _ in range(_DUMP_TRIES):
                try:
                    bodies = self._dump_once(request)
                except KernelFailure as failure:
                    if failure.errno in absent:
                        return []
                    raise
                if bodies is not None:
                    return bodies
        raise KernelFailure(
            errno.EAGAIN, request.call, str(request.target), detail="the list changed on every try"
        )

    def get(self, request: Request) -> bytes:
        """Give the body of the one message that answers `request`."""
        with self._lock:
            sequence = self._send([request])
            for kind, _, number, body in self._receive(request):
                if number != sequence:
                    continue
                if kind == _NLMSG_ERROR:
                    raise _failure(request, body, 0) or malformed("an acknowledgement, no answer")
                return body
        raise malformed("no answer")

    def has_index(self, index: int) -> bool:
        """Tell whether a device has this index in the socket's namespace, without the kernel's lock for devices."""
        try:
            # net/core/dev_ioctl.c:dev_ifname takes no RTNL lock, for which RTM_GETLINK would wait behind every
            # deletion of a device.
            fcntl.ioctl(self._socket, _SIOCGIFNAME, _IFREQ_INDEX.pack(index))
        except OSError as error:
            if error.errno == errno.ENODEV:
                return False
            raise KernelFailure(
                error.errno or errno.EIO, "look up device", f"index {index}"
            ) from error
        return True

    def find(self, request: Request) -> bytes | None:
        """Like `get`, but None when the kernel says that there is no such device or object."""
        try:
            return self.get(request)
        except KernelFailure as failure:
            if failure.errno in (errno.ENODEV, errno.ENOENT, errno.ESRCH):
                return None
            raise

    def _exchange(self, requests: Sequence[Request]) -> list[KernelFailure | None]:
        """Send one batch; give for each request, in order, its failure or None."""
        # net/netlink/af_netlink.c:netlink_rcv_skb handles a datagram's messages one after the other and acknowledges
        # each that asks for it or fails.
        first = self._send(requests, NLM_F_ACK)
        return self._read_results(requests, first)

    def _read_results(
        self, requests: Sequence[Request], first: int, data: bytes = b""
    ) -> list[KernelFailure | None]:
        """Read the failures of a batch, and the acknowledgement of its last request; `data` was read already."""
        last = len(requests) - 1
        results: list[KernelFailure | None] = [None] * len(requests)
        for kind, flags, number, body in self._receive(requests[0], data):
            position = (number - first) & 0xFFFFFFFF
            # Positions count modulo 2^32, so an answer to an abandoned exchange lies beyond the last one.
            if kind != _NLMSG_ERROR or position > last:
                continue
            results[position] = _failure(requests[position], body, flags)
            if position == last:
                break
        return results

    def _dump_once(self, request: Request) -> list[bytes] | None:
        bodies: list[bytes] = []
        consistent = True
        sequence = self._send([request], NLM_F_DUMP)
        for kind, flags, number, body in self._receive(request):
            if number != sequence:
                continue
            # The kernel sets the flag when the list changed between two parts of the dump (nl_dump_check_consistent):
            # an entry may be missing or there twice.
            consistent = consistent and not flags & NLM_F_DUMP_INTR
            if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                failure = _failure(request, body, flags)
                if failure is not None:
                    raise failure
                return bodies if consistent else None
            bodies.append(body)
        raise malformed("a dump without an end")

    def _send(self, requests: Sequence[Request], last_flags: int = 0) -> int:
        """Send in one system call, the last request with flags; gives the sequence number of the first one."""
        first, last = self._sequence + 1, self._sequence + len(requests)
        frames = [
            _encode_message(request, last_flags if number == last else 0, number)
            for number, request in enumerate(requests, first)
        ]
        self._sequence = last & 0xFFFFFFFF
        changes = bool(last_flags & NLM_F_ACK)
        self._transmit(b"".join(frames), requests[0].call, changes=changes)
        return first & 0xFFFFFFFF

    def _transmit(self, data: bytes | bytearray, call: str, *, changes: bool) -> None:
        """Send messages: the one place where anything leaves. `changes`: they are more than a look."""
        try:
            # Requests are handled within send(2), by the calling thread: when it returns, the acknowledgements are in
            # the receive buffer.
            self._socket.send(data)
        except OSError as error:
            raise KernelFailure(
                error.errno or errno.EIO, call, "netlink socket", detail=str(error)
            ) from error

    def _take(self, call: str) -> bytes:
        """Read one datagram of answers."""
        try:
            return self._socket.recv(_RECEIVE_BYTES)
        except OSError as error:
            number = errno.ETIMEDOUT if error.errno == errno.EAGAIN else error.errno
            raise KernelFailure(
                number or errno.EIO, call, "netlink socket", detail="no answer"
            ) from error

    def _receive(
        self, request: Request, data: bytes = b""
    ) -> Iterator[tuple[int, int, int, bytes]]:
        """Give messages as (type, flags, sequence number, body) until the caller has enough; first those of `data`."""
        yield from split_messages(data)
        while True:
            yield from split_messages(self._take(request.call))


def split_messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Split a datagram into messages: (type, flags, sequence number, body)."""
    offset, end = 0, len(data)
    while offset < end:
        if end - offset < _HEADER.size:
            raise malformed(f"{end - offset} bytes where a header should be")
        length, kind, flags, sequence, _ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size or offset + length > end:
            raise malformed(f"message of {length} bytes where {end - offset} are left")
        yield kind, flags, sequence, data[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def _failure(request: Request, body: bytes, flags: int) -> KernelFailure | None:
    """Read an acknowledgement or the end of a dump: None = done, else the error with the kernel's own words."""
    if len(body) < _ERRNO.size:
        return None
    number = -_ERRNO.unpack_from(body)[0]
    if number <= 0:
        return None
    detail = ""
    # Only a capped error has its attributes right behind the header; an uncapped one has the whole request in
    # between.
    if flags & _NLM_F_ACK_TLVS and flags & _NLM_F_CAPPED:
        detail = read_text(parse_attributes(body[_ECHOED_BYTES:]), _NLMSGERR_ATTR_MSG)
    return KernelFailure(
        number, request.call, str(request.target), detail=detail or os.strerror(number).lower()
    )
