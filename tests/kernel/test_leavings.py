"""A run of the tests that is killed: the next one removes what it left, and nothing of a run that lives."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from podwire.kernel import bpf, netns
from podwire.lab.kubernetes import residue
from podwire.lab.state import Process, describe_process, is_running
from podwire.lab.topology import RUN_ROOT
from tests import leavings, waiting

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import contextlib, subprocess, sys, time
from pathlib import Path
from podwire.kernel import bpf, netns
from podwire.lab.kubernetes import residue
from podwire.lab.kubernetes.nodes import cgroups
from podwire.lab.topology import RUN_ROOT
from tests import leavings

leavings.mark_children()
with leavings.noted(Path(sys.argv[1])):
    name = leavings.new_name()
    netns.create_named(name).close()
    inside = subprocess.Popen(["ip", "netns", "exec", name, "sleep", "900"])
    outside = subprocess.Popen(["sleep", "900"])
    for directory in (Path("/sys/fs/bpf") / name, Path("/run") / name, RUN_ROOT / f"{leavings.LAB}-1"):
        directory.mkdir(parents=True)
    mounted = Path(sys.argv[1]) / "bpf"
    mounted.mkdir()
    bpf.mount_bpffs(str(mounted))
    cluster = leavings.name_cluster("any")
    residue.directory_of(cluster).mkdir(parents=True)
    node = residue.namespace_of(cluster, "node1")
    netns.create_named(node).close()
    with contextlib.suppress(OSError):  # a container's, that may not be written
        cgroups.make_tree(node)
    print(leavings.MARK, cluster, inside.pid, outside.pid, flush=True)
    time.sleep(900)
"""


class Run:
    """A run of the tests, and what it has made."""

    def __init__(self, process: "subprocess.Popen[str]", temporary: Path) -> None:
        assert process.stdout
        self.process = process
        self.mark, self.cluster, *pids = process.stdout.readline().split()
        self.children = [describe_process(int(pid)) for pid in pids]
        self.mounted = temporary / "bpf"

    def left(self) -> dict[str, bool]:
        """Tell what of it is there."""
        name = f"pwt{self.mark}1"
        return {
            "namespace": name in netns.list_named(),
            "pins": Path("/sys/fs/bpf", name).exists(),
            "directory": Path("/run", name).exists(),
            "lab": (RUN_ROOT / f"t{self.mark}-1").exists(),
            "cluster": len(residue.list_left(self.cluster)) > 1,
            "mount": bpf.is_bpffs(str(self.mounted)),
            "process in the namespace": is_running(self.children[0]),
            "process elsewhere": is_running(self.children[1]),
            "note": (leavings.RUNS / self.mark).exists(),
        }


@contextmanager
def a_run(temporary: Path) -> Iterator[Run]:
    temporary.mkdir()
    command = [sys.executable, "-c", RUN, str(temporary)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Run(process, temporary)
        finally:
            process.kill()


def test_what_a_killed_run_left_is_removed_and_nothing_of_one_that_lives(tmp_path: Path) -> None:
    with a_run(tmp_path / "killed") as killed, a_run(tmp_path / "living") as living:
        assert all(killed.left().values()), killed.left()
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait(waiting.DEADLINE_S)
        removed = leavings.remove_leavings().removed
        assert not any(killed.left().values()), killed.left()
        assert all(living.left().values()), living.left()
        assert not residue.list_left(killed.cluster)
        assert {f"namespace pwt{killed.mark}1", f"cluster {killed.cluster}"} <= set(removed)
        assert not [what for what in removed if living.mark in what or living.cluster in what]
    leavings.remove_leavings()
    assert not any(living.left().values())


def test_a_pid_that_is_used_again_does_not_keep_what_was_left() -> None:
    """This very process has the pid, but was not the one that wrote the note."""
    own = describe_process(os.getpid())
    mark = "0ddba1"
    note = leavings.Note(Process(own.pid, own.start_ticks - 1), "/nonexistent")
    (leavings.RUNS / mark).write_bytes(msgspec.json.encode(note))
    netns.create_named(f"pwt{mark}x").close()
    assert f"namespace pwt{mark}x" in leavings.remove_leavings().removed
    assert not (leavings.RUNS / mark).exists()


def test_a_run_is_noted_while_it_lives() -> None:
    assert (leavings.RUNS / leavings.MARK).exists()
    assert not [what for what in leavings.remove_leavings().removed if leavings.MARK in what]
    assert (leavings.RUNS / leavings.MARK).exists()


def test_what_cannot_be_removed_is_named_and_left_to_the_next_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = describe_process(os.getpid())
    mark = "0ddba2"
    directory, note = Path("/run", f"pwt{mark}x"), leavings.RUNS / mark
    killed = leavings.Note(Process(own.pid, own.start_ticks - 1), "/nonexistent")
    note.write_bytes(msgspec.json.encode(killed))
    directory.mkdir()

    def refuse(path: Path) -> None:
        raise OSError(f"{path} is busy")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        first = leavings.remove_leavings()
    assert f"{directory}: {directory} is busy" in first.failed
    assert str(directory) not in first.removed
    assert note.exists()
    assert str(directory) in leavings.remove_leavings().removed
    assert not note.exists()


@pytest.mark.parametrize("text", ["", "{", '{"process": 1}'])
def test_a_note_that_cannot_be_read_stops_no_run(text: str) -> None:
    note = leavings.RUNS / "bad000"
    note.write_text(text)
    try:
        leavings.remove_leavings()
    finally:
        note.unlink()
