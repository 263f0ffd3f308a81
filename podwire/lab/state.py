"""What a lab remembers between two commands: its plan, its pods, and which processes are its own.

There is one JSON file per lab. It is replaced by rename under a lock, so that two commands at once do not lose each
other's pods. A process is identified by pid and start time, so another process that got a recycled pid is never taken
for one of the lab.
"""

import fcntl
import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from podwire.kernel import netns, spawn
from podwire.kernel.fd import Fd
from podwire.lab.topology import RUN_ROOT, LabPlan, LabShape, check_lab_name, plan_lab
from podwire.model.errors import NotFound, StorageFailure, Unavailable

STATE_FILE = "lab.json"
LOCK_FILE = "lock"
_END_DEADLINE_S = 15.0
_GRACE_S = 3.0


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
    shape: LabShape
    agents: dict[str, Process] = msgspec.field(default_factory=dict)
    pods: list[Pod] = msgspec.field(default_factory=list)
    store: Process | None = None
    """The etcd of the lab."""
    partitions: list[tuple[str, str]] = msgspec.field(default_factory=list)
    """Pairs of nodes (or a node and `store`) that do not hear each other."""

    @property
    def plan(self) -> LabPlan:
        """The lab's plan, computed again."""
        return plan_lab(self.name, self.shape)

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
    check_lab_name(name)
    path = RUN_ROOT / name / STATE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=LabState)
    except FileNotFoundError:
        raise NotFound(f"find lab {name!r}", hint="podwire lab list") from None
    except msgspec.MsgspecError as error:
        raise StorageFailure(
            f"read {str(path)!r}: {error}", hint=f"podwire lab down --lab {name}"
        ) from error


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
    # A command that is killed while it writes leaves the old file whole.
    temporary.rename(path)


@contextmanager
def locked(directory: Path, *, create: bool = False) -> Iterator[None]:
    """Let one command at a time change a lab; NotFound when the lab is gone."""
    fd = _open_lock(directory / LOCK_FILE, create)
    try:
        yield
    finally:
        os.close(fd)


def _open_lock(path: Path, create: bool) -> int:
    while True:
        if create:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            if create:
                continue
            raise NotFound(f"find lab {path.parent.name!r}", hint="podwire lab list") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # While we waited, `down` may have removed the file that we hold.
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def launch(namespace: str, command: Sequence[str], log: Path) -> Process:
    """Start a program in a network namespace, which outlives this process; what it says is added to its log."""
    # Appended to: a test that kills a program wants to read afterwards what it said before.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    with (
        Fd(os.open(log, flags, 0o600), str(log)) as output,
        netns.open_namespace(netns.named_path(namespace)) as fd,
    ):
        child = spawn.start(
            command,
            place=spawn.Place(network_fd=fd.fileno()),
            stdout_fd=output.fileno(),
            stderr_fd=output.fileno(),
        )
    process = describe_process(child.pid)
    # Nobody here will wait for it.
    child.release()
    return process


def describe_process(pid: int) -> Process:
    """Remember a process that was just started."""
    return Process(pid, _start_ticks(pid) or 0)


# A pid is used again sooner or later; pid and start time together are not.
def is_running(process: Process | None) -> bool:
    """Tell whether it is this very process, with any of its threads, and not a zombie."""
    return process is not None and _start_ticks(process.pid) == process.start_ticks != 0


def end_process(process: Process | None, number: signal.Signals = signal.SIGTERM) -> None:
    """Signal a process and wait for its end; Unavailable when it does not end in time."""
    if process is None or not is_running(process):
        return
    _send(process, number)
    if _wait_ended([process], _END_DEADLINE_S):
        raise Unavailable(
            f"end process {process.pid}: it is still there after {_END_DEADLINE_S:.0f} s",
            hint="it may wait for a disk; podwire lab down kills what does not end",
        )


def end_all(processes: Sequence[Process]) -> None:
    """End processes together, those that do not obey by SIGKILL."""
    for process in processes:
        _send(process, signal.SIGTERM)
    for process in (left := _wait_ended(processes, _GRACE_S)):
        _send(process, signal.SIGKILL)
    if _wait_ended(left, _END_DEADLINE_S):
        raise Unavailable(f"end processes {', '.join(str(process.pid) for process in left)}")


def freeze_process(process: Process) -> None:
    """Stop a process where it is; Unavailable when one of its threads goes on. SIGCONT ends it."""
    _send(process, signal.SIGSTOP)
    # The signal waits for one thread to handle it, and until that one gets its turn of a busy processor the others
    # still answer.
    deadline = time.monotonic() + _END_DEADLINE_S
    while is_running(process) and not _is_frozen(process.pid):
        if time.monotonic() > deadline:
            raise Unavailable(
                f"stop process {process.pid}: it still runs after {_END_DEADLINE_S:.0f} s"
            )
        time.sleep(0.001)


def _is_frozen(pid: int) -> bool:
    return all(_read_state(thread) in "TtZX" for thread in Path(f"/proc/{pid}/task").iterdir())


def _read_state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def list_processes_in(namespaces: Collection[int]) -> list[Process]:
    """Find the processes in network namespaces, known by their inode numbers; never this one."""
    processes = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            inode = os.stat(entry / "ns" / "net").st_ino
        except OSError:
            continue  # it ended meanwhile
        if inode in namespaces and (ticks := _start_ticks(int(entry.name))):
            processes.append(Process(int(entry.name), ticks))
    return processes


def _send(process: Process, number: signal.Signals) -> None:
    """Signal this very process; one that ended is success."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if is_running(process):
            signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)


def _wait_ended(processes: Sequence[Process], seconds: float) -> list[Process]:
    """Wait until all ended; gives those that did not in time."""
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if is_running(process)]:
        if time.monotonic() > deadline:
            break
        for process in left:
            _reap(process.pid)
        time.sleep(0.005)
    for process in processes:
        _reap(process.pid)
    return left


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
    # The first thread of a killed process is a zombie while others are still leaving the kernel, and until they have
    # left, the process holds its files and locks.
    if fields[0] in "ZX" and _count_threads(pid) <= 1:
        return None
    return int(fields[19])


def _count_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0
