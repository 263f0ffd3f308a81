"""What test runs that were killed left on this machine: the next run removes it before it begins.

Called by tests/conftest.py. Each process of pytest has a mark, with which all names begin that it gives to namespaces,
labs, directories and pins, and notes in /run which process has it. Its children carry the process in their environment.
Invariant: nothing of a process that lives is touched. A pid is used again, so pid and start time together say which
process it is. A worker in a room of its own (scripts/own-room) has a /run of its own; its names go with the room, and
the room goes with the last process in it. Only cgroups are the machine's, so the name of a cluster says whose it is.
"""

import contextlib
import itertools
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Final

import msgspec

from podwire.kernel import netns
from podwire.lab import labs
from podwire.lab.kubernetes import cluster as clusters
from podwire.lab.kubernetes import residue
from podwire.lab.state import (
    Process,
    describe_process,
    end_all,
    is_running,
    list_processes_in,
)
from podwire.lab.topology import PIN_ROOT, RUN_ROOT
from podwire.model.errors import PodwireError

RUNS: Final = Path("/run/podwire-tests")
"""A file for each process of pytest, called by its mark."""
VARIABLE: Final = "PODWIRE_TEST_PROCESS"
MARK: Final = secrets.token_hex(3)
NAME: Final = f"pwt{MARK}"
"""Namespaces of tests, and directories below /run and the BPF file system, have names that begin so."""
LAB: Final = f"t{MARK}"
"""Names of labs begin so."""
_CLUSTER: Final = "tests"
_CLUSTER_NAME: Final = re.compile(rf"{_CLUSTER}-(\d+-\d+-\d+)-[a-z]+")
_numbers = itertools.count(1)


class Note(msgspec.Struct, frozen=True):
    """What is written down of a process of pytest."""

    process: Process
    temporary: str
    """Where its tests have their directories, on some of which a file system is mounted."""


def new_name() -> str:
    """Give a name that nothing else has; 10 characters or a few more, as names of devices are made of it."""
    return f"{NAME}{next(_numbers):x}"


def name_cluster(title: str) -> str:
    """Give a name that no other run's cluster has."""
    return f"{_CLUSTER}-{_describe_owner().replace('.', '-')}-{title}"


@contextlib.contextmanager
def noted(temporary: Path) -> Iterator[None]:
    """Keep it written down that this process lives, and what it may leave."""
    note = RUNS / MARK
    RUNS.mkdir(mode=0o700, exist_ok=True)
    fresh = note.with_suffix(".new")
    fresh.write_bytes(
        msgspec.json.encode(Note(describe_process(os.getpid()), str(temporary.resolve())))
    )
    fresh.rename(note)
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def mark_children() -> None:
    """Have processes that are started from here on tell whose they are."""
    os.environ[VARIABLE] = _describe_owner()


def _describe_owner() -> str:
    own = describe_process(os.getpid())
    return f"{own.pid}.{own.start_ticks}.{_pid_namespace('self')}"


def _has_lost_owner(text: str) -> bool:
    """Tell whether this describes a process that is gone."""
    pid, ticks, namespace = map(int, text.split("."))
    # A pid means nothing in another pid namespace, and there may be a living process behind it there.
    return namespace == _pid_namespace("self") and not is_running(Process(pid, ticks))


@dataclass
class Removal:
    """What was removed, and what could not be."""

    removed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def attempt(self, what: str, remove: Callable[[], object]) -> None:
        """Remove something; whatever goes wrong stops nothing else."""
        try:
            remove()
        except (PodwireError, OSError, subprocess.CalledProcessError) as error:
            self.failed.append(f"{what}: {error}")
        else:
            self.removed.append(what)


def remove_leavings() -> Removal:
    """Remove what processes of pytest left that are gone. What cannot be removed is left to the next run."""
    removal = Removal()
    # Workers may outlive for a while who handed out their tests. Their own children are orphans only when they have
    # been ended.
    while not removal.failed and (orphans := _list_orphans()):
        named = ", ".join(str(process.pid) for process in orphans)
        removal.attempt(f"processes {named}", partial(end_all, orphans))
    _remove_clusters(removal)
    for note in sorted(RUNS.glob("??????")):
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):  # it ends meanwhile
            known = msgspec.json.decode(note.read_bytes(), type=Note)
            if not is_running(known.process):
                remove_noted(removal, note, known)
    return removal


def remove_noted(removal: Removal, note: Path, known: Note) -> None:
    """Remove what a process left that a note tells of, and then the note."""
    failed_before = len(removal.failed)
    _remove_all(removal, note.name, known.temporary)
    if len(removal.failed) == failed_before:
        note.unlink(missing_ok=True)


def _list_orphans() -> list[Process]:
    """Find processes whose environment names a process of pytest that is gone."""
    found = []
    own, here = str(os.getpid()), _pid_namespace("self")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or entry.name == own:
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            namespace = _pid_namespace(entry.name)
        except OSError:
            continue  # it ended meanwhile
        for variable in variables:
            name, _, value = variable.decode(errors="replace").partition("=")
            is_mark = name == VARIABLE and value.count(".") == 2
            if is_mark and namespace == here and _has_lost_owner(value):
                found.append(describe_process(int(entry.name)))
    return found


def _pid_namespace(pid: str) -> int:
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def _remove_clusters(removal: Removal) -> None:
    """Remove clusters whose run is gone."""
    for name in residue.list_names():
        made = _CLUSTER_NAME.fullmatch(name)
        if made and _has_lost_owner(made[1].replace("-", ".")):
            removal.attempt(f"cluster {name}", partial(clusters.down, name))


def _remove_all(removal: Removal, mark: str, temporary: str) -> None:
    """Remove what carries a mark."""
    for lab in _list_labs(f"t{mark}-"):
        removal.attempt(f"lab {lab}", partial(labs.down, lab, progress=lambda _line: None))
    names = [name for name in netns.list_named() if name.startswith(f"pwt{mark}")]
    inside = list_processes_in({os.stat(netns.named_path(name)).st_ino for name in names})
    if inside:
        removal.attempt(f"{len(inside)} processes in namespaces", partial(end_all, inside))
    for name in names:
        removal.attempt(f"namespace {name}", partial(netns.delete_named, name))
    roots = [root / f"pwt{mark}" for root in (Path("/sys/fs/bpf"), Path("/run"), Path("/tmp"))]
    for mounted in _list_mounts_below(f"{temporary}/", *map(str, roots)):
        unmount = partial(subprocess.run, ["umount", "-l", mounted], check=True, stderr=PIPE)
        removal.attempt(f"what is mounted at {mounted}", unmount)
    for root in roots:
        for path in root.parent.glob(f"{root.name}*"):
            removal.attempt(str(path), partial(_remove_path, path))


def _remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _list_labs(prefix: str) -> list[str]:
    """Name labs of which anything is there: state, pins or a namespace."""
    inside = (name.split(".")[1] for name in netns.list_named() if name.startswith("pw."))
    paths = (path.name for root in (RUN_ROOT, PIN_ROOT) for path in root.glob(f"{prefix}*"))
    return sorted({name for name in (*inside, *paths) if name.startswith(prefix)})


def _list_mounts_below(*prefixes: str) -> list[str]:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    # The innermost first: one that is under another is hidden by it.
    return sorted((path for path in points if path.startswith(prefixes)), reverse=True)
