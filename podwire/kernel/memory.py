"""Memory of this process: give back what was freed, and have the kernel put what is used most into huge pages.

Called when the agent's start begins and is over, and when memory has grown since. A request touches memory all over the
heap. In a virtual machine each page that the processor does not remember the place of costs two walks through tables.
Changes only where pages are, never what they hold; a kernel that cannot do it leaves everything as it is.
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

_M_ARENA_MAX: Final = -8
"""malloc.h"""

_libc = ctypes.CDLL(None, use_errno=True)


def read_resident_bytes() -> int:
    """Tell how much of this process is in memory (proc(5), /proc/pid/statm)."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def share_heap() -> None:
    """Let all threads have one heap (mallopt(3), M_ARENA_MAX), before there are threads."""
    # Of a thread's own heap the end is not given back, though all of it is free: after a start with 10,000 services
    # that was 8 MB. Heaps of their own would save threads little: the interpreter lets one at a time make objects.
    _libc.mallopt(_M_ARENA_MAX, 1)


def trim_heap() -> None:
    """Give the kernel back what was freed in the heap, wherever it is (malloc_trim(3)).

    The interpreter goes on; a thread that allocates from the heap meanwhile waits.
    """
    _libc.malloc_trim(ctypes.c_size_t(0))


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
