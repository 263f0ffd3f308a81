"""What a lab remembers between two commands: its plan, its pods, and which processes are its own.

One JSON file per lab, replaced by rename under a lock, so that two commands at once do not lose each other's pods. A
process is known by pid and start time: a pid that the kernel gave to somebody else is never taken for ours.
"""

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from podwire.lab.topology import RUN_ROOT, LabPlan, plan_lab
from podwire.model.errors import NotFound, Unavailable

STATE_FILE = "lab.json"
_END_DEADLINE_S = 15.0


class Process(msgspec.Struct, frozen=True):
    """A process of ours."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat, see proc(5)."""


class Server(msgspec.Struct, frozen=True):
    """A server inside a pod."""

    port: int
    protocol: str
    process: Process


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of the lab."""

    namespace: str
    name: str
    node: str
    container_id: str
    netns: str
    labels: dict[str, str]
    addresses: tuple[str, ...] = ()
    servers: tuple[Server, ...] = ()

    @property
    def full_name(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


class LabState(msgspec.Struct, kw_only=True):
    """A lab as the file has it."""

    name: str
    nodes: int
    families: str
    agents: dict[str, Process] = msgspec.field(default_factory=dict)
    pods: list[Pod] = msgspec.field(default_factory=list)

    @property
    def plan(self) -> LabPlan:
        """The lab's plan, computed again."""
        return plan_lab(self.name, self.nodes, self.families)

    def find_pod(self, text: str) -> Pod:
        """Find a pod by `name` (namespace default) or `namespace/name`; NotFound lists what there is."""
        namespace, _, name = text.rpartition("/")
        for pod in self.pods:
            if (pod.namespace, pod.name) == (namespace or "default", name):
                return pod
        known = ", ".join(pod.full_name for pod in self.pods) or "none"
        raise NotFound(
            f"find pod {text!r}: lab {self.name!r} has {known}", hint="podwire lab status"
        )


def list_labs() -> list[str]:
    """Name the labs of this machine."""
    return sorted(path.parent.name for path in RUN_ROOT.glob(f"*/{STATE_FILE}"))


def choose_lab(name: str | None) -> str:
    """Give the lab that is meant: the named one, else the only one."""
    labs = list_labs()
    if name:
        if name not in labs:
            raise NotFound(
                f"find lab {name!r}: there is {', '.join(labs) or 'none'}", hint="podwire lab up"
            )
        return name
    if len(labs) == 1:
        return labs[0]
    if not labs:
        raise NotFound("find a lab: none is up", hint="podwire lab up")
    raise NotFound(f"choose a lab: there are {', '.join(labs)}", hint="say --lab NAME")


def read_state(name: str) -> LabState:
    """Read a lab's file."""
    try:
        return msgspec.json.decode((RUN_ROOT / name / STATE_FILE).read_bytes(), type=LabState)
    except FileNotFoundError:
        raise NotFound(f"find lab {name!r}", hint="podwire lab list") from None


@contextmanager
def changed_state(name: str) -> Iterator[LabState]:
    """Give a lab's state to change; it is written when the block ends without an error."""
    with locked(RUN_ROOT / name):
        state = read_state(name)
        yield state
        write_state(state)


def write_state(state: LabState) -> None:
    """Replace a lab's file."""
    path = RUN_ROOT / state.name / STATE_FILE
    temporary = path.with_suffix(".new")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    temporary.rename(path)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Let one command at a time change a lab."""
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def describe_process(pid: int) -> Process:
    """Remember a process that was just started."""
    return Process(pid, _start_ticks(pid) or 0)


def is_running(process: Process | None) -> bool:
    """Tell whether it is this very process that runs, and not a zombie."""
    return process is not None and _start_ticks(process.pid) == process.start_ticks != 0


def end_process(process: Process | None, number: signal.Signals = signal.SIGTERM) -> None:
    """Signal a process and wait for its end; Unavailable when it does not end in time."""
    if process is None or not is_running(process):
        return
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if not is_running(process):
            return
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)
    deadline = time.monotonic() + _END_DEADLINE_S
    while is_running(process):
        if time.monotonic() > deadline:
            raise Unavailable(
                f"end process {process.pid}: it is still there after {_END_DEADLINE_S:.0f} s"
            )
        _reap(process.pid)
        time.sleep(0.01)


def _reap(pid: int) -> None:
    """Collect a child of ours that ended; somebody else's is its parent's affair."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
