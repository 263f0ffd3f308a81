"""The directories that a container runtime reads: plugins and networks, written in one step each.

Implements `model.installation.files.CniDirectories`; what is written, and when, `control.installation` decides.
Runtimes look whenever they like, and containerd loads the networks at every change of their directory (measured: it
ignores files that come by being created, not by being renamed). So each file is written whole under a name that no
runtime reads, is synced, and gets its own name by a rename. A lock on the directory keeps two that install from each
other's files.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from podwire.model.errors import StorageFailure, Unavailable
from podwire.model.installation.files import (
    CONFLIST_FILE,
    LAUNCHER_FILE,
    LOOPBACK_FILE,
    CniFiles,
    Loopback,
)
from podwire.model.installation.shipped import LAUNCHER

_NETWORK_SUFFIXES: Final = (".conf", ".conflist", ".json")
"""What libcni takes for a network."""
_PROGRAM_MODE: Final = 0o755
_NETWORK_MODE: Final = 0o600
"""Runtimes run as root, and the CIS benchmark wants nobody else to read it."""
_HINT: Final = "root must be able to write it: see the settings cni_bin_dir and cni_conf_dir"


def read_launcher() -> bytes:
    """Read the launcher of this build. Raises Unavailable."""
    try:
        return LAUNCHER.read_bytes()
    except OSError as error:
        raise Unavailable(
            f"read the launcher {str(LAUNCHER)!r}: {error.strerror}",
            hint="in a checkout scripts/setup builds it; a wheel has it",
        ) from error


class RuntimeDirectories:
    """The two directories of one runtime."""

    def __init__(self, conf_dir: Path, bin_dir: Path) -> None:
        self.conf_dir = conf_dir
        self.bin_dir = bin_dir

    def read(self) -> CniFiles:
        with _failing_as("read", self.bin_dir):
            return CniFiles(
                launcher=_read(self.bin_dir / LAUNCHER_FILE),
                conflist=_read(self.conf_dir / CONFLIST_FILE),
                loopback=self._read_loopback(),
                earlier=self._list_earlier(),
            )

    def write_launcher(self, program: bytes) -> None:
        _write(self.bin_dir / LAUNCHER_FILE, program, _PROGRAM_MODE)

    def write_conflist(self, text: bytes) -> None:
        _write(self.conf_dir / CONFLIST_FILE, text, _NETWORK_MODE)

    def link_loopback(self) -> None:
        """Let `loopback` lead to the launcher, by a name beside it, so that it holds wherever the directory is."""
        path = self.bin_dir / LOOPBACK_FILE
        with _replacing(path) as temporary:
            temporary.symlink_to(LAUNCHER_FILE)

    def remove_conflist(self) -> None:
        _remove(self.conf_dir / CONFLIST_FILE)

    def remove_loopback(self) -> None:
        """Take our link away; somebody else's plugin stays."""
        if self._read_loopback() is Loopback.OURS:
            _remove(self.bin_dir / LOOPBACK_FILE)

    def remove_launcher(self) -> None:
        _remove(self.bin_dir / LAUNCHER_FILE)

    def _read_loopback(self) -> Loopback:
        path = self.bin_dir / LOOPBACK_FILE
        if path.is_symlink() and os.readlink(path) == LAUNCHER_FILE:
            return Loopback.OURS
        return Loopback.FOREIGN if path.exists() else Loopback.MISSING

    def _list_earlier(self) -> tuple[str, ...]:
        if not self.conf_dir.is_dir():
            return ()
        names = (path.name for path in self.conf_dir.iterdir() if path.suffix in _NETWORK_SUFFIXES)
        # Runtimes take the first network in the order of the file names.
        return tuple(sorted(name for name in names if name < CONFLIST_FILE))


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _write(path: Path, content: bytes, mode: int) -> None:
    with _replacing(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            # The mode of open(2) is cut by the umask.
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Give a name that no runtime reads; what was made there takes the place of `path` afterwards."""
    temporary = path.with_name(f".{path.name}.tmp")
    with _failing_as("write", path):
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # The agent and `podwire cni install` may write at the same time, under the same temporary name.
            fcntl.flock(directory, fcntl.LOCK_EX)
            temporary.unlink(missing_ok=True)  # of a process that was killed in the middle
            try:
                yield temporary
                # In the same directory, so that the rename is atomic: a runtime reads, or executes, the old file or
                # the new one.
                temporary.rename(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            os.fsync(directory)
        finally:
            os.close(directory)


def _remove(path: Path) -> None:
    with _failing_as("remove", path):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _failing_as(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise StorageFailure(
            f"{verb} {str(where)!r}: {error.strerror or error}", hint=_HINT
        ) from error
