"""Accept a connection of a Unix socket together with what has come on it: one call where Python's own take five.

Handed to `agent.cni.socket` by `agent.node`. Never waits. Every descriptor that came belongs to the caller.
"""

import os

from podwire.kernel._libbpf import ffi, lib
from podwire.model.wire import Arrival


def accept(listener_fd: int) -> Arrival:
    """Accept the next connection of a listener that does not block; OSError as of accept(2)."""
    came = ffi.new("struct pw_arrival *")
    if lib.pw_accept(listener_fd, came):
        number = ffi.errno
        raise OSError(number, os.strerror(number))
    return Arrival(
        came.fd,
        came.pid,
        came.uid,
        None if came.size < 0 else ffi.buffer(came.data, came.size)[:],
        list(came.descriptors[0 : came.count]),
        bool(came.is_cut),
    )
