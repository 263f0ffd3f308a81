"""A node of the cluster: namespaces of network and mounts, with a containerd and a kubelet that think it is a machine.

Programs find their usual paths: /run, /etc, /opt, /var/lib and /var/log are the node's own, everything else is the real
machine's, and what is hidden (the checkout) is empty. A process that sleeps keeps the mounts; they go away with it.
Everything of a node is found again by names: its network namespace, whose cookie all its own programs have, and its
cgroup, in which all containers are.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from podwire.kernel import netns
from podwire.lab.kubernetes.daemon import LOOK_S, Daemon, Place
from podwire.lab.kubernetes.nodes.cgroups import list_members, make_tree, move_in
from podwire.lab.state import Process, end_all, list_processes_in
from podwire.model.errors import Unavailable

SOCKET: Final = "/run/containerd/containerd.sock"
KEEPER_FILE: Final = "keeper.pid"
"""Whose mounts the node's are; a person enters with `nsenter --target PID --net --mount`."""
_END_DEADLINE_S: Final = 60.0

_ENTER: Final = """
set -e
base=$1; shared=$2; shift 2
mount --make-rprivate /
# Copies of others' namespaces would keep them alive. A mount can be listed twice, and go with the first.
awk '$3 == "nsfs" { print $2 }' /proc/mounts | xargs -r umount -n 2>/dev/null || true
mount -n -t sysfs sysfs "$base/sys"
mount -n --rbind /sys/fs/cgroup "$base/sys/fs/cgroup"
mount -n -t bpf bpf "$base/sys/fs/bpf"
mount -n --rbind "$base/sys" /sys
umount -n -l "$base/sys"
for directory in /etc /opt; do
    mkdir -p "$base/upper$directory" "$base/work$directory"
    mount -n -t overlay overlay -o "lowerdir=$directory,upperdir=$base/upper$directory,workdir=$base/work$directory" \
        "$directory"
done
rm -rf /etc/cni /opt/cni # of runtimes of the machine
mkdir -p "$base/lib" "$base/log"
mount -n --bind "$base/lib" /var/lib
mount -n --bind "$base/log" /var/log
# What all nodes and the control plane share stays visible, also where it is below a directory that is covered.
mkdir -p "$base/run"
mount -n -t tmpfs -o mode=755 node "$base/run"
case $shared in /run/*)
    mkdir -p "$base/run${shared#/run}"
    mount -n --rbind "$shared" "$base/run${shared#/run}" ;;
esac
mkdir -p "$base/run/lock" "$base/run/netns"
mount -n --move "$base/run" /run
for hidden; do
    mount -n -t tmpfs -o ro,size=4k hidden "$hidden"
done
mount --make-rshared /
echo ready
exec sleep 2147483647
"""
"""The fresh sysfs shows the node's own devices; `ip netns exec` would drop the cgroups with the old one."""

_PROBE: Final = """
set -e
name=pwk.probe.$$
group=
for hierarchy in /sys/fs/cgroup/memory /sys/fs/cgroup; do
    ! mkdir "$hierarchy/$name" 2>/dev/null || { group=$hierarchy/$name; break; }
done
[ -n "$group" ] || { echo "no cgroup can be made below /sys/fs/cgroup" >&2; exit 1; }
rmdir "$group"
mount -n -t tmpfs probe /tmp
mkdir /tmp/upper /tmp/work
mount -n -t overlay overlay -o lowerdir=/etc,upperdir=/tmp/upper,workdir=/tmp/work /etc
"""


@dataclass(frozen=True)
class MachinePlan:
    """One node as planned: `directory` is its own, `shared` that of the whole cluster."""

    name: str
    namespace: str
    addresses: tuple[str, ...]
    """One of each family, the preferred one first."""
    directory: Path
    shared: Path
    hidden: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """The preferred one."""
        return self.addresses[0]

    @property
    def cgroup(self) -> str:
        """The tree of cgroups of its programs and containers, in each hierarchy."""
        return self.namespace


class Machine:
    """A node that was made; its network namespace is there already."""

    def __init__(self, plan: MachinePlan) -> None:
        self.plan = plan
        self.directory = plan.directory
        self._log = plan.directory / "keeper.log"
        for name in ("sys", "etc"):
            (plan.directory / name).mkdir(mode=0o755, parents=True, exist_ok=True)
        self._keeper = Daemon(
            f"node {plan.name}",
            [
                *("unshare", "--mount", "--propagation", "private", "sh", "-c", _ENTER, "sh"),
                *(str(plan.directory), str(plan.shared), *plan.hidden),
            ],
            self._log,
            place=Place(network=netns.named_path(plan.namespace)),
        )

    @property
    def name(self) -> str:
        """Of the node."""
        return self.plan.name

    def open(self) -> None:
        """Make the mounts and the cgroups."""
        make_tree(self.plan.cgroup)
        self._log.unlink(missing_ok=True)
        self._keeper.start(lambda: self._keeper.read_tail().endswith("ready"))
        (self.directory / KEEPER_FILE).write_text(str(self._keeper.pid))

    @property
    def place(self) -> Place:
        """Where its programs run."""
        return Place(
            network=netns.named_path(self.plan.namespace),
            mount=f"/proc/{self._keeper.pid}/ns/mnt",
            move_in=partial(move_in, self.plan.cgroup),
        )

    def path(self, inside: str) -> Path:
        """Give the path by which we see one of the node's own files."""
        # proc(5): /proc/PID/root shows the file system as the process sees it, its mounts included.
        return Path(f"/proc/{self._keeper.pid}/root{inside}")

    def run(self, *command: str, input_bytes: bytes = b"", timeout_s: float = 120.0) -> str:
        """Run a program on the node and give what it printed; Unavailable shows what it complained of."""
        done = self.place.run(command, input_bytes=input_bytes, timeout_s=timeout_s)
        if done.status:
            said = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise Unavailable(f"run {' '.join(command)!r} on {self.name}: {said}")
        return done.stdout.decode(errors="replace")

    def write(self, inside: str, text: str, *, mode: int = 0o644) -> None:
        """Write one of the node's own files by rename: a process that watches the directory expects whole files."""
        self._put(inside, text.encode(), mode)

    def install(self, inside: str, source: Path) -> None:
        """Copy a program to the node."""
        self._put(inside, source.read_bytes(), 0o755)

    def _put(self, inside: str, data: bytes, mode: int) -> None:
        path = self.path(inside)
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_bytes(data)
        temporary.chmod(mode)
        temporary.rename(path)


def find_obstacle() -> str:
    """Say what keeps nodes from being made here; "" when nothing does."""
    done = Place().run(["unshare", "--mount", "--propagation", "private", "sh", "-c", _PROBE])
    if done.status:
        return f"this root cannot make what a node needs: {done.stderr.decode().strip()}"
    return ""


def end_inhabitants(namespaces: Sequence[str], cgroups: Sequence[str]) -> None:
    """End every process in these network namespaces and cgroups; first by SIGTERM, so that they can end well."""
    end_all(_list_in_namespaces(namespaces))
    deadline = time.monotonic() + _END_DEADLINE_S
    while True:
        left = [*_list_in_namespaces(namespaces), *_list_in_cgroups(cgroups)]
        if not left:
            return
        if time.monotonic() > deadline:
            numbers = ", ".join(str(process.pid) for process in left)
            raise Unavailable(f"end the processes of {', '.join(namespaces)}: {numbers} are left")
        # In rounds: what was listed may have started others before it ended.
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def _list_in_namespaces(names: Sequence[str]) -> list[Process]:
    cookies = []
    for name in names:
        with contextlib.suppress(OSError):
            cookies.append(os.stat(netns.named_path(name)).st_ino)
    return list_processes_in(cookies)


def _list_in_cgroups(names: Sequence[str]) -> list[Process]:
    return [Process(pid, 0) for pid in list_members(names)]
