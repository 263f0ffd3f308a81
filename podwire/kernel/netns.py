"""Network namespaces: open, identify, enter for a moment, make and remove named ones.

Called by the datapath (pods' namespaces, through the descriptor that the launcher sent), the lab and the tests. A visit
changes only the calling thread. Invariant: no thread ever goes on in a namespace that it did not ask for: a visitor
that cannot return ends the process, because everything it did afterwards would hit the wrong machine.
"""

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from podwire.kernel.fd import Fd
from podwire.model.errors import InvalidConfiguration, KernelFailure

CLONE_NEWNET: Final = 0x40000000
NAMED_DIRECTORY: Final = Path("/run/netns")
_CURRENT: Final = "/proc/thread-self/ns/net"
_MS_BIND: Final = 0x1000
_MS_REC: Final = 0x4000
_MS_SHARED: Final = 1 << 20
_MNT_DETACH: Final = 2

_T = TypeVar("_T")

_libc = ctypes.CDLL(None, use_errno=True)


def call_libc(call: str, object_name: str, *arguments: object) -> int:
    """Call a function of the C library; -1 becomes KernelFailure with its errno."""
    result = int(getattr(_libc, call)(*arguments))
    if result == -1:
        raise KernelFailure(ctypes.get_errno(), call, object_name)
    return result


def set_namespace(fd: int, kind: int) -> None:
    """Move the calling thread into a namespace for good (os.setns exists since Python 3.12 only)."""
    call_libc("setns", f"fd {fd}", fd, kind)


def open_namespace(path: str) -> Fd:
    """Open a namespace by path; KernelFailure names the path when it is gone or is no network namespace."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise KernelFailure(error.errno or errno.EIO, "open namespace", path) from error
    fd = Fd(number, path)
    try:
        require_network_namespace(number, path)
    except KernelFailure:
        fd.close()
        raise
    return fd


def open_current() -> Fd:
    """Open the calling thread's own network namespace."""
    return Fd(os.open(_CURRENT, os.O_RDONLY | os.O_CLOEXEC), _CURRENT)


def require_network_namespace(fd: int, object_name: str) -> None:
    """Raise KernelFailure(EINVAL) unless `fd` is a network namespace (its link text is `net:[inode]`)."""
    if not os.readlink(f"/proc/thread-self/fd/{fd}").startswith("net:["):
        # A bind mount shows its own path as link text: ask the kernel itself, by NS_GET_NSTYPE.
        kind = _libc.ioctl(fd, 0xB703)
        if kind != CLONE_NEWNET:
            raise KernelFailure(
                errno.EINVAL, "use namespace", object_name, detail="not a network namespace"
            )


def cookie(fd: int) -> int:
    """Give the namespace's inode number, which tells it from another one that has the same path later."""
    # nsfs numbers its inodes for the whole machine, and a namespace that is held open keeps its number to itself.
    return os.fstat(fd).st_ino


def current_cookie() -> int:
    """Give the cookie of the calling thread's own namespace."""
    return os.stat(_CURRENT).st_ino


def namespace(fd: int, home: Fd | None = None) -> "Visit":
    """Be in the namespace of `fd` with the calling thread only; what is opened inside stays bound to it.

    `home`: the namespace that the thread is in, where the caller has it open.
    """
    return Visit(fd, home)


class Visit:
    """The time that a thread is in another namespace, as a context manager."""

    def __init__(self, fd: int, home: Fd | None) -> None:
        self._fd = fd
        self._home = home
        self._opened: Fd | None = None

    def __enter__(self) -> None:
        if self._home is None:
            self._home = self._opened = open_current()
        try:
            set_namespace(self._fd, CLONE_NEWNET)
        except BaseException:
            self._close()
            raise

    def __exit__(self, *_exception: object) -> None:
        assert self._home is not None
        try:
            set_namespace(self._home.fileno(), CLONE_NEWNET)
        except KernelFailure:
            # A thread that is in a pod's namespace by mistake would give that pod the host's devices, routes and
            # tables.
            os.abort()
        self._close()

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()


def run_in(fd: int, action: Callable[[], _T]) -> _T:
    """Run `action` on a new thread inside the namespace and give its result or exception."""
    return run_on_thread(lambda: set_namespace(fd, CLONE_NEWNET), action)


def run_at(path: str, action: Callable[[], _T]) -> _T:
    """Do the same inside the namespace that a path leads to, such as that of `named_path`."""
    with open_namespace(path) as fd:
        return run_in(fd.fileno(), action)


def open_new() -> Fd:
    """Make a namespace without a name; it lives as long as the descriptor or a socket inside it."""
    # On a thread of its own: unshare(2) moves only its caller, which ends there instead of having to come back.
    return run_on_thread(lambda: _unshare("anonymous"), open_current)


def create_named(name: str) -> Fd:
    """Make a namespace that `ip netns` shows; EEXIST when the name is taken.

    The caller owns the descriptor.
    """
    path = Path(named_path(name))
    _prepare_directory()
    try:
        # O_EXCL makes the file a lock: of two makers of one name only one goes on to mount over it.
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0))
    except OSError as error:
        raise KernelFailure(error.errno or errno.EIO, "create namespace", name) from error
    try:
        run_on_thread(lambda: _unshare(name), lambda: _bind(_CURRENT, str(path)))
    except KernelFailure:
        path.unlink()
        raise
    return open_namespace(str(path))


def delete_named(name: str) -> None:
    """Take the name away; the namespace ends with its last user. A missing one is success."""
    path = Path(named_path(name))
    try:
        # Detached, because processes that have the mount open would make a plain unmount fail with EBUSY.
        call_libc("umount2", str(path), os.fsencode(path), _MNT_DETACH)
    except KernelFailure as failure:
        # EINVAL: the file is there and nothing is mounted on it, as after a maker that died in between.
        if failure.errno not in (errno.ENOENT, errno.EINVAL):
            raise
    path.unlink(missing_ok=True)


def list_named() -> list[str]:
    """List the names that `ip netns` shows, sorted."""
    if not NAMED_DIRECTORY.is_dir():
        return []
    return sorted(entry.name for entry in NAMED_DIRECTORY.iterdir())


def named_path(name: str) -> str:
    """Give the path under which a named namespace can be opened, as a runtime hands it to a plugin."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise InvalidConfiguration(f"name namespace {name!r}: must be one path component")
    return str(NAMED_DIRECTORY / name)


def _prepare_directory() -> None:
    """Make the directory a shared mount, as iproute2 does, so that unmounting reaches every mount namespace."""
    NAMED_DIRECTORY.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = os.fsencode(NAMED_DIRECTORY)
    flags = _MS_SHARED | _MS_REC
    try:
        call_libc("mount", str(NAMED_DIRECTORY), b"", path, b"none", flags, None)
    except KernelFailure as failure:
        # EINVAL: the directory is no mount yet, and only mounts can be shared.
        if failure.errno != errno.EINVAL:
            raise
        _bind(str(NAMED_DIRECTORY), str(NAMED_DIRECTORY), _MS_REC)
        call_libc("mount", str(NAMED_DIRECTORY), b"", path, b"none", flags, None)


def _bind(source: str, target: str, flags: int = 0) -> None:
    call_libc(
        "mount", target, os.fsencode(source), os.fsencode(target), b"none", _MS_BIND | flags, None
    )


def _unshare(object_name: str) -> None:
    call_libc("unshare", object_name, CLONE_NEWNET)


def run_on_thread(enter: Callable[[], None], action: Callable[[], _T]) -> _T:
    """Run `enter`, then `action`, on a new thread that ends with them; gives the result or raises."""
    results: list[_T] = []
    failures: list[BaseException] = []

    def visit() -> None:
        try:
            enter()
            results.append(action())
        except BaseException as error:  # handed to the caller below, whatever it is
            failures.append(error)

    # The thread ends inside the namespace, so there is no way back that could fail.
    thread = threading.Thread(target=visit, name="namespace-visit", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
