"""The records that were written last, in a file in front of the database: an ADD waits for one short write, no more.

Used by `journal.records` alone, under its lock. A line is a number and a record as JSON; numbers ascend for as long as
the database lives. The database notes up to which number it has taken lines over, so that none counts twice, however
this process dies in between (docs/decisions/0011-records-in-front-of-the-database.md). Invariants: a line that is not
whole counts as never written. After a failed write the file is as it was before, at the latest when the next line
comes.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from podwire.model.errors import StorageFailure

FILE_MODE: Final = 0o600
_NEVER_WRITTEN: Final = b"\0"
"""File systems give zeros where a crash of the machine kept data from arriving; no record has any."""

_TRIAL_BYTES: Final = 4096
"""What file systems give at least. Most records are shorter."""


class RecentFile:
    """The file. Owner of its descriptor. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
        self._whole_bytes = 0
        self._may_be_torn = True
        """Whether there may be something behind the whole lines."""

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Give number and record of each whole line, oldest first; called once, before the first `append`.

        Raises StorageFailure for what is no such line.
        """
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        self._whole_bytes = data.rfind(b"\n") + 1
        self._may_be_torn = self._whole_bytes < len(data)
        for line in data[: self._whole_bytes].split(b"\n")[:-1]:
            if _NEVER_WRITTEN in line:
                continue
            number, _, record = line.partition(b" ")
            if not (number.isdigit() and record):
                raise StorageFailure(
                    f"read journal {str(self._path)!r}: it is malformed: {line[:40]!r}",
                    hint="the file was changed by something else; drain the node and remove it",
                )
            yield int(number), record

    @property
    def size_bytes(self) -> int:
        """How long the whole lines are."""
        return self._whole_bytes

    def append(self, number: int, record: bytes) -> None:
        """Write one line."""
        if self._may_be_torn:
            os.ftruncate(self._fd, self._whole_bytes)
        line = b"%d %s\n" % (number, record)
        self._may_be_torn = True
        # A full disk may take the first part of it; write(2) says how much it took.
        if os.write(self._fd, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._may_be_torn = False
        self._whole_bytes += len(line)

    def try_out(self) -> None:
        """Write as many bytes as most records have, and take them back."""
        if self._may_be_torn:
            os.ftruncate(self._fd, self._whole_bytes)
        self._may_be_torn = True
        if os.write(self._fd, _NEVER_WRITTEN * _TRIAL_BYTES) != _TRIAL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self._fd, self._whole_bytes)
        self._may_be_torn = False

    def clear(self) -> None:
        """Forget every line: the database has them."""
        self._whole_bytes = 0
        self._may_be_torn = True
        with contextlib.suppress(OSError):  # the database says that they do not count any more
            os.ftruncate(self._fd, 0)
            self._may_be_torn = False

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)
