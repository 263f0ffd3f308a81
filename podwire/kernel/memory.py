"""Memory of this process: have the kernel put what the interpreter uses most into huge pages.

Called once, when the agent's start is over. A request touches memory all over the heap. In a virtual machine each page
that the processor does not remember the place of costs two walks through tables. Changes only where pages are, never
what they hold; a kernel that cannot do it leaves everything as it is.
"""

import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MADV_COLLAPSE: Final = 25
"""include/uapi/asm-generic/mman-common.h, since Linux 6.1"""
_HUGE_PAGE_BYTES: Final = 1 << 21
_PAGES: Final = _HUGE_PAGE_BYTES // mmap.PAGESIZE
_MISSING_MAX: Final = _PAGES // 64
"""A huge page has all its pages: what was missing is memory that the process did not have before."""
_RANGE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *(\[heap\])?$")

_libc = ctypes.CDLL(None, use_errno=True)


def collapse_heap() -> int:
    """Move the heap into huge pages, where it fills them; gives how many bytes were moved."""
    moved = 0
    for start in _list_candidates():
        # A kernel that has no huge page to give, or does not know how, refuses (madvise(2)): all stays as it is.
        refused = _libc.madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(_HUGE_PAGE_BYTES), _MADV_COLLAPSE
        )
        moved += 0 if refused else _HUGE_PAGE_BYTES
    return moved


def _list_candidates() -> Iterator[int]:
    """Give the starts of huge pages that the heap fills. Stacks, and arenas with holes, would only grow."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if (found := _RANGE.match(line)) is None:
            continue
        first = -(-int(found[1], 16) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        for start in range(first, int(found[2], 16) - _HUGE_PAGE_BYTES + 1, _HUGE_PAGE_BYTES):
            if _count_missing(start) <= _MISSING_MAX:
                yield start


def _count_missing(start: int) -> int:
    """Tell how many pages of a huge page are not there (mincore(2)); all of them when it cannot be told."""
    there = (ctypes.c_ubyte * _PAGES)()
    if _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(_HUGE_PAGE_BYTES), there):
        return _PAGES
    return sum(1 for page in there if not page & 1)
