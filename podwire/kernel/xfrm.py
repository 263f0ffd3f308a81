"""Tell whether this host encrypts by policy (IPsec): a packet that bypasses its stack would not be encrypted.

Called by `datapath.native`. Changes nothing. Messages and structures: include/uapi/linux/xfrm.h.
"""

import errno
import struct
from typing import Final

from podwire.kernel.netlink import NetlinkSocket, Request, malformed, unpack_body
from podwire.model.errors import KernelFailure

_NETLINK_XFRM: Final = 6
_XFRM_MSG_GETSPDINFO: Final = 0x25
_XFRMA_SPD_INFO: Final = 1
_FLAGS: Final = struct.Struct("=I")
_COUNTS: Final = struct.Struct("=III")
"""Start of xfrmu_spdinfo: policies for what comes in, goes out, is forwarded; those of single sockets follow."""
_INTENT: Final = ("count IPsec policies", "network namespace")


def has_policies() -> bool:
    """Tell whether the calling thread's namespace has any IPsec policy. Raises KernelFailure."""
    # The body is one number, in the request and in the answer before its attributes
    # (net/xfrm/xfrm_user.c:xfrm_get_spdinfo).
    request = Request(_XFRM_MSG_GETSPDINFO, 0, _FLAGS.pack(0), *_INTENT)
    try:
        with NetlinkSocket(protocol=_NETLINK_XFRM) as netlink:
            _, attributes = unpack_body(_FLAGS, netlink.get(request))
    except OSError as error:
        # A kernel without CONFIG_XFRM_USER has no such netlink family, and nothing to set policies with.
        if error.errno == errno.EPROTONOSUPPORT:
            return False
        raise KernelFailure(error.errno or errno.EIO, *_INTENT) from error
    counts = attributes.get(_XFRMA_SPD_INFO, b"")
    if len(counts) < _COUNTS.size:
        raise malformed(f"counts of IPsec policies of {len(counts)} bytes")
    return any(_COUNTS.unpack_from(counts))
