"""What a cluster leaves on a machine, found by names alone: processes, cgroups, namespaces, settings, files.

Used by `cluster` before it makes one and after. Works as well for a cluster whose rig was killed.
"""

import contextlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from podwire.kernel import netns
from podwire.lab.kubernetes.nodes.cgroups import CGROUPS, list_cgroups, remove_cgroups
from podwire.lab.kubernetes.nodes.machine import end_inhabitants

RUN_ROOT: Final = Path("/run/pwk")
PREFIX: Final = "pwk"
_SETTINGS_FILE: Final = "settings.json"
_PROC_SYS: Final = Path("/proc/sys")
KUBELET_CHANGES: Final = (
    *("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"),
)
"""Settings of the whole machine that a kubelet sets at its start."""


def directory_of(name: str) -> Path:
    """Give the directory of a cluster."""
    return RUN_ROOT / name


def namespace_of(name: str, place: str) -> str:
    """Name the network namespace of a place of a cluster."""
    return f"{PREFIX}.{name}.{place}"


def list_namespaces(name: str) -> list[str]:
    """List the namespaces of a cluster that are there."""
    return [
        netns_name
        for netns_name in netns.list_named()
        if netns_name.startswith(f"{PREFIX}.{name}.")
    ]


def list_names() -> Sequence[str]:
    """Name the clusters of which anything is there."""
    namespaces = (name.split(".") for name in netns.list_named())
    marked = (path.name.split(".") for top in _list_tops() for path in top.glob(f"{PREFIX}.*.*"))
    names = {words[1] for words in (*namespaces, *marked) if words[0] == PREFIX and len(words) > 2}
    return sorted(names | {path.name for path in RUN_ROOT.glob("*/")})


def save_settings(directory: Path) -> None:
    """Note what kubelets will change, unless an earlier rig that was killed has noted it."""
    path = directory / _SETTINGS_FILE
    if path.exists():
        return
    # The kubelets of another cluster have changed them already: only what that one noted is the machine's own.
    others = _list_noted(directory)
    if others:
        path.write_text(others[0].read_text())
        return
    known = {change: (_PROC_SYS / change).read_text().strip() for change in KUBELET_CHANGES}
    path.write_text(json.dumps(known))


def _list_noted(directory: Path) -> list[Path]:
    """List the files in which clusters but that of `directory` have noted settings."""
    files = directory.parent.glob(f"*/{_SETTINGS_FILE}")
    return sorted(path for path in files if path.parent != directory)


def restore_settings(directory: Path) -> None:
    """Put back what was noted, unless another cluster still runs: its kubelets need what they have set."""
    path = directory / _SETTINGS_FILE
    if path.exists() and not _list_noted(directory):
        for setting, value in json.loads(path.read_text()).items():
            with contextlib.suppress(FileNotFoundError):
                (_PROC_SYS / setting).write_text(value)


def list_left(name: str) -> Sequence[str]:
    """Say what there is of a cluster; nothing after `remove`."""
    namespaces = list_namespaces(name)
    cgroups = [str(path) for path in list_cgroups(_list_cgroup_names(name))]
    directory = directory_of(name)
    return [*namespaces, *cgroups, *([str(directory)] if directory.exists() else [])]


def remove(name: str) -> None:
    """Remove all there is of a cluster; none is success."""
    directory, namespaces = directory_of(name), list_namespaces(name)
    cgroups = _list_cgroup_names(name)
    end_inhabitants(namespaces, cgroups)
    remove_cgroups(cgroups)
    restore_settings(directory)
    for namespace in namespaces:
        netns.delete_named(namespace)
    shutil.rmtree(directory, ignore_errors=True)


def _list_cgroup_names(name: str) -> Sequence[str]:
    """Name the cgroups by what is there: the namespace of a node may be gone while they are not."""
    return sorted({path.name for top in _list_tops() for path in top.glob(f"{PREFIX}.{name}.*")})


def _list_tops() -> Sequence[Path]:
    return [CGROUPS, *CGROUPS.glob("*/")]
