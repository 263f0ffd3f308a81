"""Settings below /proc/sys/net, as the calling thread's network namespace has them.

Called by the datapath on the host and, inside `netns.namespace`, in pods. Must never build a path from a part that
could lead elsewhere.
"""

import errno
import os
from typing import Final

from podwire.model.errors import InvalidConfiguration, KernelFailure

# The files are those of the namespace of the thread that looks them up (net/sysctl_net.c:net_ctl_header_lookup), so no
# path names a namespace.
ROOT: Final = "/proc/sys/net"
_MAX_BYTES: Final = 4096


def read_sysctl(*parts: str) -> str:
    """Read e.g. `read_sysctl("ipv4", "conf", "eth0", "rp_filter")`, without the line end."""
    path = _path(parts)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, _MAX_BYTES).decode("ascii").strip()
        finally:
            os.close(fd)
    except OSError as error:
        raise KernelFailure(error.errno or errno.EIO, "read sysctl", path) from error


def write_sysctl(value: str, *parts: str) -> None:
    """Write one setting, e.g. `write_sysctl("1", "ipv4", "ip_forward")`."""
    path = _path(parts)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode("ascii"))
        finally:
            os.close(fd)
    except OSError as error:
        raise KernelFailure(
            error.errno or errno.EIO,
            f"write {value!r} to sysctl",
            path,
            # Container runtimes mount /proc/sys read-only in containers that are not privileged.
            hint="mount /proc/sys/net read-write" if error.errno == errno.EROFS else "",
        ) from error


def ensure_sysctl(value: str, *parts: str) -> str | None:
    """Write unless the setting has this value already; gives the value it had, or None when nothing was written."""
    before = read_sysctl(*parts)
    if before == value:
        return None
    write_sysctl(value, *parts)
    return before


def sysctl_exists(*parts: str) -> bool:
    """Tell whether this kernel, in this namespace, has the setting (IPv6 may be compiled out or switched off)."""
    return os.path.exists(_path(parts))


def _path(parts: tuple[str, ...]) -> str:
    # Interface names come from a request, and one such as `..` would lead to a file elsewhere.
    for part in parts:
        if not part or part in (".", "..") or "/" in part or "\0" in part:
            raise InvalidConfiguration(
                f"name sysctl {'/'.join(parts)!r}: {part!r} is not one path component"
            )
    return "/".join((ROOT, *parts))
