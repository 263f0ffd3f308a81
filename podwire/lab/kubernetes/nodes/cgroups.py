"""The cgroups of a node: one tree, as a machine has one, with its own programs and its pods side by side in it.

kubelet weighs pods against the machine's programs as it does everywhere: pods get 1024 for each processor together, all
of the machine's programs 1024. Everything is found again by the tree's name, in each hierarchy.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from podwire.lab.kubernetes.daemon import LOOK_S
from podwire.model.errors import Unavailable

CGROUPS: Final = Path("/sys/fs/cgroup")
_SYSTEM: Final = "system"
"""Beside kubelet's own `kubepods`."""
_PROCESSES: Final = "cgroup.procs"
_SHARES: Final = {"cpu.shares": "16384", "cpu.weight": "626"}
"""Of a whole node: beside it, each single process outside of it weighs 1024 (100 with cgroup2)."""
_INHERITED: Final = ("cpuset.cpus", "cpuset.mems")
_END_DEADLINE_S: Final = 60.0


def make_tree(name: str) -> None:
    """Make the tree of a node, in every hierarchy."""
    for hierarchy in _list_hierarchies():
        for directory in (hierarchy / name, hierarchy / name / _SYSTEM):
            directory.mkdir(exist_ok=True)
            # Of the old kind: without them no process can be put there.
            for setting in _INHERITED:
                if (directory / setting).exists():
                    (directory / setting).write_text((directory.parent / setting).read_text())
        for setting, shares in _SHARES.items():
            if (hierarchy / name / setting).exists():
                (hierarchy / name / setting).write_text(shares)


def move_in(name: str, pid: int) -> None:
    """Put one of the machine's own programs, and what it will start, into the tree of its node."""
    for hierarchy in _list_hierarchies():
        (hierarchy / name / _SYSTEM / _PROCESSES).write_text(str(pid))


def read_cpu_s(name: str) -> float:
    """Read how long the processors have worked for a node, its own programs and its pods."""
    for path in CGROUPS.glob(f"*/{name}/cpuacct.usage"):
        return int(path.read_text()) / 1e9
    # cgroup2 has no cpuacct: cpu.stat counts microseconds instead of nanoseconds.
    usage = (CGROUPS / name / "cpu.stat").read_text().split()
    return int(usage[usage.index("usage_usec") + 1]) / 1e6


def list_cgroups(names: Sequence[str]) -> list[Path]:
    """List the cgroups of these names and those below them, the innermost first."""
    cgroups = []
    for name in names:
        for top in [CGROUPS / name, *CGROUPS.glob(f"*/{name}")]:
            cgroups += [Path(directory) for directory, _, _ in os.walk(top, topdown=False)]
    return cgroups


def list_members(names: Sequence[str]) -> list[int]:
    """List the processes in the trees of these names."""
    found = []
    for directory in list_cgroups(names):
        with contextlib.suppress(OSError):
            found += [int(number) for number in (directory / _PROCESSES).read_text().split()]
    # 0 stands for a process that cannot be seen from here.
    return [pid for pid in found if pid]


def remove_cgroups(names: Sequence[str]) -> None:
    """Remove cgroups, in every hierarchy; the kernel frees one some time after its last process."""
    deadline = time.monotonic() + _END_DEADLINE_S
    while left := list_cgroups(names):
        for directory in left:
            with contextlib.suppress(OSError):
                directory.rmdir()
        if time.monotonic() > deadline:
            raise Unavailable(f"remove cgroup {str(left[0])!r}: it is in use")
        time.sleep(LOOK_S)


def _list_hierarchies() -> list[Path]:
    """List where cgroups can be made: one place with cgroup2 alone, else one for each controller."""
    if (CGROUPS / _PROCESSES).exists():
        return [CGROUPS]
    return [path.parent for path in sorted(CGROUPS.glob(f"*/{_PROCESSES}"))]
