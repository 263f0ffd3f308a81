"""Memory of this process: have the kernel put what the interpreter uses most into huge pages.

Called once, when the agent's start is over. A request touches memory all over the heap. In a virtual machine each page
that the processor does not remember the place of costs two walks through tables. Changes only where pages are, never
what they hold; a kernel that cannot do it leaves everything as it is.
"""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MADV_COLLAPSE: Final = 25
"""include/uapi/asm-generic/mman-common.h, since Linux 6.1"""
_HUGE_PAGE_BYTES: Final = 1 << 21
_WELL_FILLED: Final = 0.75
_RANGE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(\S*)$")
_RESIDENT: Final = re.compile(r"Rss: +([0-9]+) kB$")

_libc = ctypes.CDLL(None, use_errno=True)


def collapse_heap() -> int:
    """Move the heap into huge pages, as far as it fills them; gives how many bytes were moved."""
    moved = 0
    for start, length in _list_heaps():
        # A kernel that has no room or no huge pages refuses (madvise(2)): the pages stay where they are.
        call = (ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_COLLAPSE)
        moved += 0 if _libc.madvise(*call) else length
    return moved


def _list_heaps() -> Iterator[tuple[int, int]]:
    """Give start and length of the heaps' whole huge pages. Stacks are hardly filled: in huge pages they would grow."""
    start = end = 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if found := _RANGE.match(line):
            is_heap = found[3] in ("", "[heap]")
            start, end = (int(found[1], 16), int(found[2], 16)) if is_heap else (0, 0)
        elif (found := _RESIDENT.match(line)) and start:
            first = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
            length = end // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES - first
            if length > 0 and int(found[1]) * 1024 >= _WELL_FILLED * (end - start):
                yield first, length
            start = 0
