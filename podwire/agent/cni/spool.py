"""DELs that launchers wrote down while no agent answered: read, and kept until they are done.

`agent.cni.dispatch` replays them before the sockets open, every second, and before an ADD of the same attachment.
Blocking, so never called on the loop. Invariant: a record is removed only when its DEL is done or cannot have anything
to do. A record that cannot be read is moved aside, and the log gives the reason. Format and rules: docs/protocol.md,
"Spool".
"""

import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from podwire.model import wire
from podwire.model.endpoint import AttachmentKey
from podwire.model.errors import PodwireError, StorageFailure, UndecodableRequest
from podwire.model.interfaces import Clock
from podwire.model.request import AttachRequest
from podwire.model.wire import Frame

BAD_DIRECTORY: Final = "bad"
BAD_KEPT: Final = 100
"""Unreadable records that are kept for people; the oldest give way."""
TEMPORARY_MAX_AGE_NS: Final = 120_000_000_000
"""Launchers write at most 20 s after their start. Counts where nobody can tell whether the launcher still runs."""
_NO_FILE: Final = frozenset({errno.ELOOP, errno.ENXIO})
"""What open(2) says of a symbolic link, and of a socket."""
RETRY_BASE_NS: Final = 1_000_000_000
RETRY_CAP_NS: Final = 60_000_000_000

_log = logging.getLogger(__name__)


class SpooledDelete(msgspec.Struct, frozen=True):
    """A DEL that waits: the record's name, and the request it holds."""

    name: str
    request: AttachRequest

    @property
    def key(self) -> AttachmentKey:
        """The attachment to delete."""
        assert self.request.key is not None
        return self.request.key


@dataclass
class _Retry:
    failures: int
    due_ns: int


class Spool:
    """The directory beside the socket. Safe to use from several threads."""

    def __init__(
        self,
        directory: Path,
        clock: Clock,
        decode: Callable[[Frame], AttachRequest],
        *,
        ran_at: Callable[[int, int], bool | None],
    ) -> None:
        """`decode` turns a frame into a request or raises PodwireError (`cni.netconf`).

        `ran_at` tells whether the process that had a number at a time still runs, None = unknown (`kernel.clock`).
        """
        self._directory = directory
        self._clock = clock
        self._decode = decode
        self._ran_at = ran_at
        self._lock = threading.Lock()
        self._known: dict[str, SpooledDelete] = {}
        self._left_alone: set[str] = set()
        self._unreadable: set[str] = set()
        """Records that could not be read when somebody looked, and were named in the log."""
        self._retries: dict[str, _Retry] = {}

    def read(self) -> Sequence[SpooledDelete]:
        """Give every record whose time has come, oldest first; StorageFailure when none is readable."""
        now_ns = self._clock.boottime_ns()
        with self._lock:
            self._look()
            return [
                record
                for record in self._known.values()
                if record.name not in self._retries or self._retries[record.name].due_ns <= now_ns
            ]

    def pending(self, key: AttachmentKey) -> Sequence[SpooledDelete]:
        """Give the records of one attachment, oldest first, also those that failed a moment ago."""
        with self._lock:
            self._look()
            return [record for record in self._known.values() if record.key == key]

    def remove(self, record: SpooledDelete) -> None:
        """Forget a record whose DEL is done; one that is gone already is fine."""
        with self._lock:
            self._known.pop(record.name, None)
            self._retries.pop(record.name, None)
            self._unlink(record.name)

    def postpone(self, record: SpooledDelete, error: PodwireError) -> None:
        """Keep a record whose DEL failed: again after 1 s, 2 s, 4 s, ... at most a minute."""
        with self._lock:
            retry = self._retries.setdefault(record.name, _Retry(0, 0))
            delay_ns = min(RETRY_CAP_NS, RETRY_BASE_NS << min(retry.failures, 16))
            retry.failures += 1
            retry.due_ns = self._clock.boottime_ns() + delay_ns
        if retry.failures == 1:
            _log.warning(
                "a spooled DEL failed; it is tried again",
                extra={
                    "container": record.key.container_id,
                    "path": record.name,
                    "error": error.message,
                },
            )

    def _list_directory(self) -> list[str]:
        try:
            return os.listdir(self._directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageFailure(
                f"read the spool {str(self._directory)!r}: {error.strerror}",
                hint="the agent must be able to read its run_dir",
            ) from error

    def _look(self) -> None:
        """Bring `_known` up to the directory. New records are read once, the others not again."""
        everything = self._list_directory()
        # A name begins with the launcher's start, so that the order of names is that of the DELs (docs/protocol.md,
        # "Spool").
        names = sorted(name for name in everything if wire.is_record_name(name))
        if len(names) < len(everything):
            self._remove_abandoned(everything)
        # Nearly always, and this is done each second: no file is opened.
        if names == list(self._known):
            return
        known = self._known
        self._known = {}
        self._left_alone.intersection_update(names)
        self._unreadable.intersection_update(names)
        self._retries = {name: self._retries[name] for name in names if name in self._retries}
        for name in names:
            if name in self._left_alone:
                continue
            record = known.get(name) or self._read_record(name)
            if record is not None:
                self._known[name] = record

    def _remove_abandoned(self, names: Sequence[str]) -> None:
        """Remove temporary files that no launcher is going to finish. Today's give a record its name when it is whole,
        but where the file system cannot do that; those of before always wrote such files."""
        now_ns = self._clock.boottime_ns()
        for name in names:
            writer = wire.temporary_writer(name)
            if writer is not None and not self._is_written(*writer, now_ns):
                self._unlink(name)

    def _is_written(self, started_ns: int, pid: int, now_ns: int) -> bool:
        age_ns = now_ns - started_ns
        if age_ns < 0:
            return False  # of another boot
        still_runs = self._ran_at(pid, started_ns)
        return age_ns < TEMPORARY_MAX_AGE_NS if still_runs is None else still_runs

    def _read_record(self, name: str) -> SpooledDelete | None:
        try:
            frame = wire.decode_record(self._read_file(name))
            # Devices, maps and namespaces of another boot are gone, and restore drops its records (decisions/0004).
            if frame.boot_id not in ("", self._clock.boot_id()):
                self._unlink(name)
                _log.info("removed a spooled DEL of another boot", extra={"path": name})
                return None
            if frame.program == wire.IPAM_PROGRAM:
                self._unlink(name)  # it never gave an address, so there is nothing to release
                return None
            request = self._decode(frame)
            if request.command != "DEL" or request.key is None:
                raise UndecodableRequest(
                    f"read a spooled request: it is not a DEL but {request.command}"
                )
            return SpooledDelete(name, request)
        except FileNotFoundError:
            return None
        # A newer launcher wrote it, and an agent that understands it may follow: neither removed nor moved.
        except wire.UnsupportedProtocol as error:
            self._left_alone.add(name)
            _log.warning("left a spooled DEL alone", extra={"path": name, "error": error.message})
        except PodwireError as error:
            self._move_aside(name, error.message)
        except OSError as error:
            if error.errno in _NO_FILE:
                self._move_aside(name, str(error))
            else:
                # This machine lacks something (descriptors, memory, a disk that can be read). What is not known is read
                # again at the next look; the runtime was told that this DEL is done.
                self._note_unreadable(name, error)
        return None

    def _note_unreadable(self, name: str, error: OSError) -> None:
        if name not in self._unreadable:
            self._unreadable.add(name)
            _log.warning(
                "a spooled DEL cannot be read now; it is tried again",
                extra={"path": name, "error": error.strerror},
            )

    def _read_file(self, name: str) -> bytes:
        # O_NONBLOCK: whatever it is, opening it must not wait.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self._directory / name, flags)
        try:
            status = os.fstat(fd)
            # A record is an order to delete a pod: it counts only where root wrote it.
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise UndecodableRequest("read a spooled request: it is not a file of podwire")
            # Not the file's to close: open() refuses what is a directory, and leaves the descriptor open.
            with open(fd, "rb", closefd=False) as file:
                # One byte more than a frame may have, so that a file that is too long is recognised.
                return file.read(wire.FRAME_MAX_BYTES + 1)
        finally:
            os.close(fd)

    def _move_aside(self, name: str, reason: str) -> None:
        bad = self._directory / BAD_DIRECTORY
        try:
            bad.mkdir(mode=0o700, exist_ok=True)
            kept = sorted(os.listdir(bad))
            for oldest in kept[: max(0, len(kept) + 1 - BAD_KEPT)]:
                (bad / oldest).unlink(missing_ok=True)
            (self._directory / name).rename(bad / name)
        except OSError as error:
            # It stays where it is and is not looked at again.
            self._left_alone.add(name)
            reason = f"{reason}; not moved: {error}"
        _log.warning("moved a spooled request aside", extra={"path": name, "error": reason})

    def _unlink(self, name: str) -> None:
        try:
            (self._directory / name).unlink(missing_ok=True)
        except OSError as error:
            self._left_alone.add(name)
            _log.warning("remove a spooled DEL", extra={"path": name, "error": str(error)})
