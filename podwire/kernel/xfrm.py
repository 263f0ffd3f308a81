"""Tell whether this host encrypts by policy (IPsec): a packet that bypasses its stack would not be encrypted.

Called by `datapath.native`. Changes nothing. Messages and structures: include/uapi/linux/xfrm.h.
"""

import errno
import socket
import struct
from typing import Final

from podwire.kernel.netlink import malformed, parse_attributes
from podwire.model.errors import KernelFailure

_NETLINK_XFRM: Final = 6
_XFRM_MSG_GETSPDINFO: Final = 0x25
_XFRM_MSG_NEWSPDINFO: Final = 0x24
_XFRMA_SPD_INFO: Final = 1
_NLM_F_REQUEST: Final = 1
_HEADER: Final = struct.Struct("=IHHII")
"""nlmsghdr: length, type, flags, sequence, port."""
_FLAGS: Final = struct.Struct("=I")
_COUNTS: Final = struct.Struct("=III")
"""Start of xfrmu_spdinfo: policies for what comes in, goes out, is forwarded; those of single sockets follow."""
_TIMEOUT_S: Final = 5


def has_policies() -> bool:
    """Tell whether the calling thread's namespace has any IPsec policy. Raises KernelFailure."""
    try:
        return any(_COUNTS.unpack_from(_ask()))
    except OSError as error:
        # A kernel without CONFIG_XFRM_USER has no such netlink family, and nothing to set policies with.
        if error.errno == errno.EPROTONOSUPPORT:
            return False
        raise KernelFailure(
            error.errno or errno.EIO, "count IPsec policies", "network namespace"
        ) from error


def _ask() -> bytes:
    flags = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_NETLINK, flags, _NETLINK_XFRM) as asking:
        asking.settimeout(_TIMEOUT_S)
        size = _HEADER.size + _FLAGS.size
        header = _HEADER.pack(size, _XFRM_MSG_GETSPDINFO, _NLM_F_REQUEST, 1, 0)
        # The body is one number, in the request and in the answer before its attributes
        # (net/xfrm/xfrm_user.c:xfrm_get_spdinfo).
        asking.send(header + _FLAGS.pack(0))
        answer = asking.recv(4096)
    if len(answer) < size or _HEADER.unpack_from(answer)[1] != _XFRM_MSG_NEWSPDINFO:
        raise malformed(f"count of IPsec policies in {len(answer)} bytes")
    counts = parse_attributes(answer[size:]).get(_XFRMA_SPD_INFO, b"")
    if len(counts) < _COUNTS.size:
        raise malformed(f"counts of IPsec policies of {len(counts)} bytes")
    return counts
