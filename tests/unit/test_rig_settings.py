"""Settings of the machine that kubelets change: noted once and put back by the last cluster, in whatever order."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from podwire.lab.kubernetes import residue

NAMES = ("a", "b", "c")


@pytest.mark.parametrize("ends", [*itertools.permutations(NAMES)])
def test_the_last_cluster_puts_back_what_was_there_before_the_first(
    ends: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc, runs = tmp_path / "proc", tmp_path / "run"
    monkeypatch.setattr(residue, "_PROC_SYS", proc)
    for setting in residue.KUBELET_CHANGES:
        (proc / setting).parent.mkdir(parents=True, exist_ok=True)
        (proc / setting).write_text("own\n")
    for name in NAMES:
        (runs / name).mkdir(parents=True)
        residue.save_settings(runs / name)
        for setting in residue.KUBELET_CHANGES:
            (proc / setting).write_text("kubelet's\n")
    for name in ends:
        expected = {"own"} if name == ends[-1] else {"kubelet's"}
        residue.restore_settings(runs / name)
        (runs / name / "settings.json").unlink()
        found = {(proc / setting).read_text().strip() for setting in residue.KUBELET_CHANGES}
        assert found == expected
