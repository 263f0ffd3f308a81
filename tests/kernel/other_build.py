"""Another build of podwire: this tree with another map layout, compiled and run as a process of its own.

Run as a script it prepares a node and prints what it found, with whatever `podwire` package is in its path.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
LAST_BUILD: Final = "1c4d882ca8a1ba0323b0cf4a72c4cafee07adeb2"
"""The build of this layout that nodes come from, and may go back to."""
ABI_HEADER = ROOT / "bpf" / "include" / "podwire" / "abi.h"


@dataclass(frozen=True)
class Build:
    """A tree with its own layout version."""

    tree: Path
    version: int

    def prepare_node(self, bpf_dir: Path, *, die_before_swap: bool = False) -> dict[str, Any]:
        """Let this build take the node over, in the caller's namespace; gives what it says about it."""
        done = subprocess.run(
            [sys.executable, __file__, str(bpf_dir), "die" if die_before_swap else ""],
            env=self._environment(),
            cwd=self.tree,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == (9 if die_before_swap else 0), done.stderr
        return {} if die_before_swap else dict(json.loads(done.stdout))

    def _environment(self) -> dict[str, str]:
        return dict(os.environ, PYTHONPATH=f"{self.tree}:{os.environ.get('PYTHONPATH', '')}")

    @contextlib.contextmanager
    def taking_over(self, bpf_dir: Path, number: int, other: int) -> Iterator[None]:
        """Let this build take over a node with a tunnel, as test_cluster_traffic.py plans it, in its namespace.

        During the block its programs are attached and nothing else is its own yet. Afterwards all is.
        """
        process = subprocess.Popen(
            [sys.executable, __file__, str(bpf_dir), "tunnel", str(number), str(other)],
            env=self._environment(),
            cwd=self.tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == "swapped\n"
                yield
                process.stdin.close()
                assert process.stdout.readline() == "done\n"
            finally:
                if process.poll() is None and not process.stdin.closed:
                    process.kill()
        assert process.returncode == 0


def _copy_tree(tree: Path) -> Path:
    for name in ("podwire", "bpf", "scripts", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


def _compile_programs(tree: Path) -> None:
    """Compile what nodes run; the programs of the packet tests would take as long again."""
    sources = (tree / "bpf").glob("*.bpf.c")
    objects = [str(tree / "build" / "bpf" / path.with_suffix(".o").name) for path in sources]
    subprocess.run(
        ["make", "-s", "-C", "bpf", f"OBJECTS={' '.join(objects)}"], cwd=tree, check=True
    )


def make_build_without_maps(directory: Path, version: int, names: Sequence[str]) -> Build:
    """Compile this tree as if it did not know some maps: it has them under other names, which says the same."""
    tree = _copy_tree(directory / "build-without")
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    for path in (*tree.glob("bpf/**/*.[ch]"), *tree.glob("podwire/datapath/*.py")):
        path.write_text(pattern.sub(lambda found: f"{found[0]}_x", path.read_text()))
    _compile_programs(tree)
    return Build(tree, version)


def make_last_layout(directory: Path) -> Build | None:
    """Build the last tree that had the layout before this one, from the repository's history; None without history."""
    version = int(re.search(r"#define PW_ABI_VERSION (\d+)", ABI_HEADER.read_text())[1])  # type: ignore[index]
    search = ("log", "--format=%H", f"-S#define PW_ABI_VERSION {version}", "--", str(ABI_HEADER))
    found = _ask_history(*search).stdout.decode().split()
    return make_earlier(directory, f"{found[-1]}^", version - 1) if found else None


def make_earlier(directory: Path, commit: str, version: int) -> Build | None:
    """Build the tree of a commit, which has this layout; None where the repository's history is not here."""
    archive = _ask_history("archive", commit)
    if archive.returncode:
        return None
    tree = directory / commit
    tree.mkdir()
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    for built in (ROOT / "podwire" / "kernel").glob("*.so"):
        shutil.copy(built, tree / "podwire" / "kernel")
    _compile_programs(tree)
    return Build(tree, version)


def _ask_history(*question: str) -> subprocess.CompletedProcess[bytes]:
    git = ("git", "-c", f"safe.directory={ROOT}")
    return subprocess.run([*git, *question], cwd=ROOT, capture_output=True, check=False)


def make_build(directory: Path, version: int, *, oldest_reader: int) -> Build:
    """Compile this tree with one field more in the rows of flows, devices and addresses."""
    tree = _copy_tree(directory / f"build-{version}")
    _change_layout(
        tree,
        (r"(#define PW_ABI_VERSION) \d+", rf"\1 {version}"),
        (r"(#define PW_ABI_OLDEST_READER) \d+", rf"\1 {oldest_reader}"),
        (r"(struct pw_conntrack_value \{\n[^\n]*\n)", r"\1\t__u64 zone;\n"),
        (r"(struct pw_endpoint_value \{\n[^\n]*\n)", r"\1\t__u32 zone;\n"),
        (r"(\t__u32 policy_revision;\n\t__u32 mtu;\n)", r"\1\t__u32 zone;\n\t__u32 region;\n"),
    )
    _compile_programs(tree)
    return Build(tree, version)


def forbid_way_back(directory: Path, build: Build) -> Build:
    """Give the same build with nobody else to read its layout. Programs do not know who reads: nothing is compiled."""
    tree = directory / build.tree.name
    shutil.copytree(build.tree, tree)
    reader = rf"\1 {build.version}"
    _change_layout(tree, (r"(#define PW_ABI_OLDEST_READER) \d+", reader))
    return Build(tree, build.version)


def _change_layout(tree: Path, *changes: tuple[str, str]) -> None:
    header = tree / "bpf" / "include" / "podwire" / "abi.h"
    text = header.read_text()
    for pattern, replacement in changes:
        text, count = re.subn(pattern, replacement, text, count=1)
        assert count == 1, pattern
    header.write_text(text)
    subprocess.run([sys.executable, "scripts/generate-abi"], cwd=tree, check=True)


def _list_conntrack(node_maps: Any) -> Any:
    try:
        from podwire.datapath.conntrack_maps import list_conntrack  # noqa: PLC0415
    except ImportError:  # layout 2
        from podwire.datapath.maps import list_conntrack  # type: ignore[attr-defined,no-redef] # noqa: PLC0415
    return list_conntrack(node_maps)


def _count_flows(row: Any) -> int:
    return int(row.conntrack_entries) if hasattr(row, "conntrack_entries") else sum(row.connections)


def _program_givers() -> tuple[Any, Any, Any]:
    """Find what gives a pod's, a tunnel's and the underlay's programs, which older builds have in another module."""
    try:
        from podwire.datapath import loading  # noqa: PLC0415 (another build's)
    except ImportError:
        from podwire.datapath import node  # noqa: PLC0415

        names = ("_programs_of", "_tunnel_programs_of", "_netdev_program_of")
        return tuple(getattr(node, name) for name in names)
    return loading.programs_of, loading.tunnel_programs_of, loading.netdev_program_of


def _run(bpf_dir: Path, *, die: bool) -> None:
    from podwire.datapath import abi, maps, upgrade  # noqa: PLC0415 (another build's)
    from podwire.datapath.node import KernelDatapath  # noqa: PLC0415
    from podwire.kernel.netlink import NetlinkSocket  # noqa: PLC0415
    from tests.kernel.node_world import make_plan  # noqa: PLC0415

    if die:
        upgrade.replace_programs = lambda *_: os._exit(9)
    with KernelDatapath(make_plan(bpf_dir)) as datapath, NetlinkSocket() as netlink:
        # What restore does device by device.
        loaded = datapath._node.loaded
        programs = [give(loaded) for give in _program_givers()]
        upgrade.replace_programs(netlink, datapath.plan.node_name, *programs)
        flows = [
            [flow.instance, flow.direction, str(flow.source), flow.source_port, flow.value.packets]
            for flow in _list_conntrack(datapath.maps)
        ]
        print(
            json.dumps(
                {
                    "version": abi.ABI_VERSION,
                    "programs": [
                        program.info.id for program in datapath._node.loaded.programs.values()
                    ],
                    "seed": maps.read_settings(datapath.maps).hash_seed,
                    "usage": {
                        str(key): _count_flows(row) for key, row in maps.list_usage(datapath.maps)
                    },
                    "flows": flows,
                }
            )
        )


def _take_tunnel_over(bpf_dir: Path, number: int, other: int) -> None:
    from podwire.datapath import upgrade  # noqa: PLC0415 (another build's)
    from podwire.datapath.node import KernelDatapath  # noqa: PLC0415
    from podwire.datapath.plan import NodePlan  # noqa: PLC0415
    from podwire.model.cluster import Way  # noqa: PLC0415
    from tests.kernel import test_cluster_traffic as town  # noqa: PLC0415

    outside, ranges, _ = town.facts(number)
    plan = NodePlan(
        node_name=f"n{number}",
        bpf_dir=bpf_dir,
        node_address=outside[0],
        cluster_cidrs=town.CLUSTER,
        node_cidrs=ranges,
        conntrack_entries=4096,
        conntrack_quota=512,
    )
    swap = upgrade.replace_programs

    def swap_and_wait(*arguments: Any) -> int:
        count = swap(*arguments)
        print("swapped", flush=True)
        sys.stdin.read()
        return count

    upgrade.replace_programs = swap_and_wait  # type: ignore[assignment]
    with KernelDatapath(plan) as datapath:
        datapath.apply_cluster(town.plan_for(number, other, town.Way2(Way.TUNNEL)))
        print("done", flush=True)


if __name__ == "__main__":
    if sys.argv[2] == "tunnel":
        _take_tunnel_over(Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        _run(Path(sys.argv[1]), die=sys.argv[2] == "die")
