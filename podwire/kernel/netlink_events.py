"""NetlinkEvents: wait until links, addresses, routes, filters or nftables of a network namespace change.

Opened by `datapath.changes` for duties that look at the kernel again. Must never be the only sign of a change: the
kernel reports only what happens after the socket was opened, and it drops events that nobody reads (which counts as a
change). Bound to the namespace of the thread that opened it; any thread may wait. A filter in the kernel drops events
of devices that are to be ignored, because every wake-up of a thread takes the interpreter from another one.
"""

import ctypes
import errno
import math
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Final

from podwire.kernel.netlink import split_messages
from podwire.kernel.rtnl.route import RTA_OIF, RTM_DELROUTE, RTM_NEWROUTE
from podwire.kernel.rtnl.tc import RTM_DELQDISC, RTM_DELTFILTER
from podwire.kernel.wake_up import WakeUp
from podwire.model.closing import Closing
from podwire.model.errors import KernelFailure

# include/uapi/linux/rtnetlink.h
GROUP_LINK: Final = 0x001
GROUP_FILTER: Final = 0x008
GROUP_IPV4_ADDRESS: Final = 0x010
GROUP_IPV4_ROUTE: Final = 0x040
GROUP_IPV6_ADDRESS: Final = 0x100
GROUP_IPV6_ROUTE: Final = 0x400
NETLINK_NETFILTER: Final = 12
"""include/uapi/linux/netlink.h; Python's socket module does not have it."""
# include/uapi/linux/netfilter/nfnetlink.h, nf_tables.h: what ends a commit, whatever was in it
GROUP_TABLES: Final = 1 << (7 - 1)
COMMITTED: Final = 10 << 8 | 15
_MESSAGE_TYPE_AT: Final = 4
"""In struct nlmsghdr, which is where a filter of a netlink socket begins to read."""
_INDEX_AT: Final = 16 + 4
"""The device's index in ifinfomsg, ifaddrmsg and tcmsg, behind nlmsghdr."""
_ROUTE_ATTRIBUTES_AT: Final = 16 + 12
"""Behind nlmsghdr and rtmsg."""
_SO_ATTACH_FILTER: Final = 26
_RECEIVE_BYTES: Final = 1 << 16
_RECEIVE_BUFFER_BYTES: Final = 1 << 20
_SO_RCVBUFFORCE: Final = 33
_DATAGRAMS_AT_ONCE: Final = 1000


class NetlinkEvents(Closing):
    """What the kernel tells of changes. `matters` gets type and body of each message, and says which ones count.

    With `ignored_from`, a power of two, nothing about devices with this or a higher index arrives at all; with
    `losses_from` only that a route, filter or queue of those devices is gone; with `only_kind` only messages of one
    type.
    """

    def __init__(
        self,
        groups: int,
        matters: Callable[[int, bytes], bool],
        *,
        ignored_from: int = 0,
        losses_from: int = 0,
        only_kind: int = 0,
        protocol: int = socket.NETLINK_ROUTE,
        buffer_bytes: int = _RECEIVE_BUFFER_BYTES,
    ) -> None:
        self._matters = matters
        self._has_lost = False
        self._socket = socket.socket(
            socket.AF_NETLINK,
            socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
            protocol,
        )
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, buffer_bytes)
            if ignored_from:
                _attach_filter(self._socket, _ignore_devices(ignored_from))
            if losses_from:
                _attach_filter(self._socket, _keep_losses(losses_from))
            if only_kind:
                _attach_filter(self._socket, _keep_kind(only_kind))
            # Bound after the filters are attached: an event that came in between would be one of those that are to be
            # ignored.
            self._socket.bind((0, groups))
            self._woken = WakeUp("netlink events")
        except OSError as error:
            self._socket.close()
            raise KernelFailure(
                error.errno or errno.EIO, "listen for", "netlink events", detail=str(error)
            ) from error
        self._poll = select.poll()
        self._poll.register(self._socket.fileno(), select.POLLIN)
        self._poll.register(self._woken.fileno(), select.POLLIN)

    def fileno(self) -> int:
        """Give the descriptor that is readable when there is something to read."""
        return self._socket.fileno()

    def wait(self, timeout_s: float) -> bool:
        """Return True as soon as something that matters has changed, False after `timeout_s` or at `wake`."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            ready = dict(self._poll.poll(max(0, math.ceil(left * 1000))))
            if self._socket.fileno() in ready and self._read():
                return True
            if self._woken.fileno() in ready:
                self._woken.take()
                return False
            if left <= 0:
                return False

    def take_lost(self) -> bool:
        """Tell, once, whether the kernel has dropped messages that nobody read: they may have been about anything."""
        lost, self._has_lost = self._has_lost, False
        return lost

    def wake(self) -> None:
        """End `wait` on another thread; after `close` do nothing."""
        self._woken.wake()

    def close(self) -> None:
        """Give the descriptors back; nobody may be waiting any more."""
        self._woken.close()
        self._socket.close()

    def _read(self) -> bool:
        """Take what is there, all of it, so that a burst is one change; tell whether any of it matters."""
        changed = False
        for _ in range(_DATAGRAMS_AT_ONCE):
            try:
                # All that waits is taken, up to a limit that keeps a flood of events from holding this thread for
                # ever.
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise KernelFailure(
                        error.errno or errno.EIO, "read", "netlink events", detail=str(error)
                    ) from error
                # ENOBUFS: the buffer was full and messages were dropped (net/netlink/af_netlink.c:netlink_overrun).
                # They may have been about anything, so this is a change.
                changed = self._has_lost = True
                continue
            told = [self._matters(kind, body) for kind, _, _, body in split_messages(data)]
            changed = changed or any(told)
        return changed


# Classic BPF (include/uapi/linux/{filter,bpf_common}.h). It reads words as they stand on a wire, netlink has them in
# the machine's order: constants are turned around instead. A route's device is in an attribute, which SKF_AD_NLATTR
# looks up.
_LOAD_HALF: Final = 0x28
_LOAD_WORD: Final = 0x20
_LOAD_WORD_AT_X: Final = 0x40
_LOAD: Final = 0x00
_LOAD_X: Final = 0x01
_TO_X: Final = 0x07
_IF_EQUAL: Final = 0x15
_IF_ANY_BIT: Final = 0x45
_GIVE_BACK: Final = 0x06
_FIND_ATTRIBUTE: Final = (-0x1000 + 12) & 0xFFFFFFFF
"""SKF_AD_OFF + SKF_AD_NLATTR"""
_EVERYTHING: Final = 0xFFFFFFFF
_NOTHING: Final = 0


def _high_bits(first_index: int) -> int:
    """Give the bits of which an index has one if it is `first_index`, a power of two, or more."""
    # The first index is a power of two, so that one test of bits does what comparing byte-swapped numbers could not.
    return socket.htonl(~(first_index - 1) & 0xFFFFFFFF)


def _assemble(*instructions: tuple[int, int, int, int]) -> bytes:
    """Join instructions: code, jump if true, jump if false, constant."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def _ignore_devices(first_index: int) -> bytes:
    """Give a filter that drops what is about devices from `first_index` on; a route without a device arrives."""
    high_bits = _high_bits(first_index)
    return _assemble(
        (_LOAD_HALF, 0, 0, _MESSAGE_TYPE_AT),
        (_IF_EQUAL, 3, 0, socket.htons(RTM_NEWROUTE)),  # true: the attributes
        (_IF_EQUAL, 2, 0, socket.htons(RTM_DELROUTE)),
        (_LOAD_WORD, 0, 0, _INDEX_AT),
        (_IF_ANY_BIT, 8, 7, high_bits),  # true: nothing, false: everything
        *_load_device_of_route(unknown=3),  # unknown: everything
        (_IF_ANY_BIT, 1, 0, high_bits),
        (_GIVE_BACK, 0, 0, _EVERYTHING),
        (_GIVE_BACK, 0, 0, _NOTHING),
    )


def _keep_losses(first_index: int) -> bytes:
    """Give a filter that keeps only that something of devices from `first_index` on is gone."""
    high_bits = _high_bits(first_index)
    return _assemble(
        (_LOAD_HALF, 0, 0, _MESSAGE_TYPE_AT),
        (_IF_EQUAL, 4, 0, socket.htons(RTM_DELROUTE)),  # true: the attributes
        (_IF_EQUAL, 1, 0, socket.htons(RTM_DELTFILTER)),
        (_IF_EQUAL, 0, 10, socket.htons(RTM_DELQDISC)),  # false: nothing
        (_LOAD_WORD, 0, 0, _INDEX_AT),
        (_IF_ANY_BIT, 7, 8, high_bits),  # true: everything, false: nothing
        *_load_device_of_route(unknown=4),  # unknown: nothing
        (_IF_ANY_BIT, 0, 1, high_bits),
        (_GIVE_BACK, 0, 0, _EVERYTHING),
        (_GIVE_BACK, 0, 0, _NOTHING),
    )


def _keep_kind(kind: int) -> bytes:
    """Give a filter that keeps messages of one type."""
    return _assemble(
        (_LOAD_HALF, 0, 0, _MESSAGE_TYPE_AT),
        (_IF_EQUAL, 0, 1, socket.htons(kind)),
        (_GIVE_BACK, 0, 0, _EVERYTHING),
        (_GIVE_BACK, 0, 0, _NOTHING),
    )


def _load_device_of_route(unknown: int) -> tuple[tuple[int, int, int, int], ...]:
    """Give six instructions that load the index of a route's device; `unknown`: where to jump, from the fourth on."""
    return (
        (_LOAD, 0, 0, _ROUTE_ATTRIBUTES_AT),
        (_LOAD_X, 0, 0, RTA_OIF),
        (_LOAD_WORD, 0, 0, _FIND_ATTRIBUTE),
        (_IF_EQUAL, unknown, 0, 0),
        (_TO_X, 0, 0, 0),
        (_LOAD_WORD_AT_X, 0, 0, 4),  # behind the attribute's own header
    )


def _attach_filter(target: socket.socket, program: bytes) -> None:
    """Attach a classic BPF program: struct sock_fprog, a count and a pointer."""
    code = ctypes.create_string_buffer(program, len(program))
    target.setsockopt(
        socket.SOL_SOCKET,
        _SO_ATTACH_FILTER,
        # The kernel copies the instructions during the call (net/core/filter.c:sk_attach_filter): `code` need not
        # outlive it.
        struct.pack("@HP", len(program) // 8, ctypes.addressof(code)),
    )
