"""Start children by posix_spawn alone, wait for them by descriptor, and end them with their whole group.

Used for delegated plugins, hooks, `nft` and by the lab for agents and pods. The agent never forks: a child that shares
only descriptors with the agent cannot run the agent's code. A child that must be in another network or mount namespace
is spawned from a thread that entered it and ends afterwards, so no thread of the agent stays there. Invariant: no child
outlives its deadline, and none is left unreaped.
"""

import contextlib
import errno
import math
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from podwire.kernel import netns
from podwire.kernel.fd import Fd
from podwire.model.errors import KernelFailure, Unavailable

CLONE_NEWNS: Final = 0x00020000
_CLONE_FS: Final = 0x00000200
_OUTPUT_MAX_BYTES: Final = 1 << 20
_CHUNK_BYTES: Final = 1 << 16
_SHOWN_CHARACTERS: Final = 400
_DEFAULT_SIGNALS: Final = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Place:
    """Where a child runs; None = where we are. Descriptors of namespaces, borrowed."""

    network_fd: int | None = None
    mount_fd: int | None = None


@dataclass(frozen=True)
class Completed:
    """A child that ended: exit status, negative = signal number."""

    status: int
    stdout: bytes
    stderr: bytes


@dataclass
class Child:
    """A running child; `close` ends and reaps it."""

    pid: int
    name: str
    _pidfd: Fd = field(repr=False)
    _status: int | None = None

    def fileno(self) -> int:
        """Give the descriptor that becomes readable when the child ends."""
        return self._pidfd.fileno()

    def wait(self, timeout_s: float | None) -> int | None:
        """Wait for the end; gives the exit status (negative = signal), or None when the time is over."""
        if self._status is None:
            limit = None if timeout_s is None else max(0.0, timeout_s)
            # A pidfd becomes readable at the end of this very process; SIGCHLD would be of all children, and goes to
            # the main thread.
            if _wait_for([self._pidfd.fileno()], [], limit)[0]:
                self._reap()
        return self._status

    def send_signal(self, number: int) -> None:
        """Send a signal to the child; a child that has ended already is success."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd.fileno(), number)

    def kill(self) -> None:
        """End the child and all of its process group, and reap it."""
        if self._status is None:
            # Not reaped yet, so its number, and the group's, cannot belong to anybody else.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.send_signal(signal.SIGKILL)
            self._reap()

    def close(self) -> None:
        """End the child if it still runs, and release the descriptor."""
        self.kill()
        self._pidfd.close()

    def release(self) -> None:
        """Let the child run on by itself; the caller must know how to end it later."""
        self._pidfd.close()

    def _reap(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self._status = os.waitstatus_to_exitcode(status)


def start(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    place: Place = Place(),
    stdin_fd: int | None = None,
    stdout_fd: int | None = None,
    stderr_fd: int | None = None,
) -> Child:
    """Start a child in a process group of its own; a missing stream is /dev/null.

    Raises KernelFailure.

    The program is looked up in PATH, inside the place's mount namespace. Other descriptors of
    ours are close-on-exec and stay behind.
    """
    actions: list[tuple[int, int, int] | tuple[int, int, str, int, int]] = []
    for target, (fd, mode) in enumerate(
        ((stdin_fd, os.O_RDONLY), (stdout_fd, os.O_WRONLY), (stderr_fd, os.O_WRONLY))
    ):
        if fd is None:
            actions.append((os.POSIX_SPAWN_OPEN, target, os.devnull, mode, 0))
        else:
            actions.append((os.POSIX_SPAWN_DUP2, fd, target))

    def spawn() -> int:
        # A group of its own lets `kill` reach what the child has started. A child inherits the mask and what is
        # ignored (Python ignores SIGPIPE and SIGXFSZ), so both are reset.
        return os.posix_spawnp(
            arguments[0],
            list(arguments),
            dict(os.environ if environment is None else environment),
            file_actions=actions,
            setpgroup=0,
            setsigmask=(),
            setsigdef=_DEFAULT_SIGNALS,
        )

    try:
        pid = spawn() if place == Place() else netns.run_on_thread(lambda: _enter(place), spawn)
    except OSError as error:
        raise KernelFailure(error.errno or errno.EIO, "start", arguments[0]) from error
    # Until it is reaped the child keeps its number, even if it has ended, so the descriptor is of no other process.
    return Child(pid, arguments[0], Fd(os.pidfd_open(pid), f"process {pid}"))


def run(
    arguments: Sequence[str],
    *,
    input_bytes: bytes = b"",
    environment: Mapping[str, str] | None = None,
    place: Place = Place(),
    timeout_s: float,
) -> Completed:
    """Run a child to its end; at the deadline it is killed and KernelFailure(ETIMEDOUT) raised.

    More than a mebibyte of output on one stream is KernelFailure(EFBIG): it is no plugin's answer.
    """
    deadline = time.monotonic() + timeout_s
    with _pipe() as stdin, _pipe() as stdout, _pipe() as stderr:
        child = start(
            arguments,
            environment=environment,
            place=place,
            stdin_fd=stdin.reader.fileno(),
            stdout_fd=stdout.writer.fileno(),
            stderr_fd=stderr.writer.fileno(),
        )
        with contextlib.closing(child):
            # With our copies open the end of the streams would never be seen.
            for used in (stdin.reader, stdout.writer, stderr.writer):
                used.close()
            output = _converse(child, (stdin, stdout, stderr), input_bytes, deadline)
            status = child.wait(deadline - time.monotonic())
            if status is None:
                raise _too_late(arguments[0])
    return Completed(status, *output)


def run_helper(arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> bytes:
    """Run a program that gives credentials (`model.store.RunHelper`). Unavailable when it fails or takes too long."""
    hint = "see `exec` in the kubeconfig: does it run by hand, with the agent's environment?"
    try:
        done = run(arguments, environment=environment, timeout_s=timeout_s)
    except KernelFailure as error:
        raise Unavailable(error.message, hint=hint) from error
    if done.status:
        said = done.stderr.decode(errors="replace").strip()[-_SHOWN_CHARACTERS:]
        raise Unavailable(f"run {arguments[0]!r}: exit status {done.status}: {said}", hint=hint)
    return done.stdout


@dataclass(frozen=True)
class _Pipe:
    reader: Fd
    writer: Fd


@contextlib.contextmanager
def _pipe() -> Iterator[_Pipe]:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with Fd(reader, "pipe") as read_end, Fd(writer, "pipe") as write_end:
        yield _Pipe(read_end, write_end)


def _converse(
    child: Child, pipes: tuple[_Pipe, _Pipe, _Pipe], input_bytes: bytes, deadline: float
) -> tuple[bytes, bytes]:
    """Feed the child's input and take its output until it closed both streams or ended.

    A grandchild may keep the streams open for long: what the child itself wrote is in the pipes when it has ended.
    """
    stdin, stdout, stderr = pipes
    # A child that does not read its input would block this thread beyond the deadline.
    os.set_blocking(stdin.writer.fileno(), False)
    output = {stdout.reader.fileno(): bytearray(), stderr.reader.fileno(): bytearray()}
    reading = set(output)
    rest = memoryview(input_bytes)
    while reading:
        if not rest:
            stdin.writer.close()
        writing = [stdin.writer.fileno()] if rest else []
        # Asked before the streams are looked at: what the child wrote was in the pipes when it ended.
        ended = child.wait(0) is not None
        limit = 0.0 if ended else max(0.0, deadline - time.monotonic())
        watched = [*reading, *([] if ended else [child.fileno()])]
        readable, writable = _wait_for(watched, writing, limit)
        if ended and not readable:
            break
        if not readable and not writable:
            raise _too_late(child.name)
        if writable:
            rest = _feed(stdin.writer.fileno(), rest)
        for fd in reading.intersection(readable):
            if not _take(child.name, fd, output[fd]):
                reading.discard(fd)
    first, second = output.values()
    return bytes(first), bytes(second)


def _wait_for(
    reading: Sequence[int], writing: Sequence[int], timeout_s: float | None
) -> tuple[set[int], set[int]]:
    """Give which descriptors can be read, or have ended, and which can be written, as soon as there are any."""
    # select(2) takes no descriptor from 1,024 on, and an agent with many pods has more.
    poll = select.poll()
    for fd in reading:
        poll.register(fd, select.POLLIN)
    for fd in writing:
        poll.register(fd, select.POLLOUT)
    ready = {fd for fd, _ in poll.poll(None if timeout_s is None else math.ceil(timeout_s * 1e3))}
    return ready.intersection(reading), ready.intersection(writing)


def _take(name: str, fd: int, output: bytearray) -> bool:
    """Add what is there to read to `output`; False at the end of the stream."""
    chunk = os.read(fd, _CHUNK_BYTES)
    output += chunk
    # Otherwise a plugin that runs wild would fill the agent's memory until the deadline.
    if len(output) > _OUTPUT_MAX_BYTES:
        raise KernelFailure(errno.EFBIG, "read the output of", name)
    return bool(chunk)


def _feed(fd: int, rest: memoryview) -> memoryview:
    try:
        return rest[os.write(fd, rest) :]
    except BrokenPipeError:  # it does not want to read all of it
        return rest[:0]


def _too_late(name: str) -> KernelFailure:
    return KernelFailure(errno.ETIMEDOUT, "wait for", name, detail="it did not end in time")


def _enter(place: Place) -> None:
    if place.network_fd is not None:
        netns.set_namespace(place.network_fd, netns.CLONE_NEWNET)
    if place.mount_fd is not None:
        # A mount namespace can only be changed by a thread that shares its root directory with no other.
        netns.call_libc("unshare", "the thread's root directory", _CLONE_FS)
        netns.set_namespace(place.mount_fd, CLONE_NEWNS)
