"""The heap in huge pages: moved where it fills them, unchanged in what it holds, left alone where it does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COLLAPSE = """
import json
from podwire.kernel.memory import collapse_heap

def read(name):
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

held = [str(number) * 20 for number in range({strings})]
before = read("Rss:"), read("AnonHugePages:")
moved = collapse_heap()
after = read("Rss:"), read("AnonHugePages:")
assert held == [str(number) * 20 for number in range({strings})]
print(json.dumps([moved, before, after]))
"""
KNOWS_COLLAPSE = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 1)
HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").is_dir()


def collapse(strings: int) -> tuple[int, list[int], list[int]]:
    done = subprocess.run(
        [sys.executable, "-c", COLLAPSE.format(strings=strings)], capture_output=True, check=True
    )
    moved, before, after = json.loads(done.stdout)
    return moved, before, after


def test_what_was_freed_goes_back_to_the_kernel() -> None:
    # Every second text stays, so that no part of the heap is free as a whole at its end.
    script = """
from podwire.kernel.memory import read_resident_bytes, trim_heap
kept, freed = [], []
for number in range(2_000):
    kept.append(str(number) * 200)
    freed.append(str(number) * 4000)
del freed
before = read_resident_bytes()
trim_heap()
print(before - read_resident_bytes())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert int(done.stdout) > 8 << 20


@pytest.mark.skipif(not (KNOWS_COLLAPSE and HAS_HUGE_PAGES), reason="Linux 6.1 and huge pages")
def test_a_large_heap_is_moved_and_hardly_grows() -> None:
    moved, (resident_kb, huge_kb), (resident_after_kb, huge_after_kb) = collapse(200_000)
    if not moved:
        pytest.skip("the kernel had no huge page to give")
    assert huge_after_kb - huge_kb >= moved >> 10
    assert resident_after_kb - resident_kb <= 0.05 * resident_kb


def test_a_heap_smaller_than_a_huge_page_is_left_alone_or_moved_without_harm() -> None:
    moved, (resident_kb, _), (resident_after_kb, _) = collapse(10)
    assert moved % (2 << 20) == 0
    assert resident_after_kb - resident_kb <= 2 << 10


OF_MALLOC = ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
THREAD = """
import threading
from podwire.kernel.memory import read_resident_bytes, share_heap, trim_heap

def fill():
    bytes(16 << 20)  # when this is freed the library trims no longer by itself what is smaller
    [bytes(2000) for _ in range(10_000)]

if {is_shared}:
    share_heap()
before = read_resident_bytes()
thread = threading.Thread(target=fill)
thread.start()
thread.join()
trim_heap()
print(read_resident_bytes() - before)
"""


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "control"])
def test_what_a_thread_has_freed_goes_back_to_the_kernel(is_shared: bool) -> None:
    script = THREAD.format(is_shared=is_shared)
    command = [sys.executable, "-c", script]
    settings = {name: text for name, text in os.environ.items() if name not in OF_MALLOC}
    done = subprocess.run(command, env=settings, capture_output=True, check=True)
    grown_bytes = int(done.stdout)
    assert grown_bytes < 4 << 20 if is_shared else grown_bytes > 12 << 20
