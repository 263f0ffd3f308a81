"""Children are started without a fork of ours, in the right place, and never outlive their
deadline.
"""

import contextlib
import errno
import gc
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwire.kernel.fd import Fd
from podwire.kernel.spawn import Child, Place, run, run_helper, start
from podwire.model.errors import KernelFailure, Unavailable
from tests.kernel.conftest import Namespace


def test_output_input_and_status_are_the_childs() -> None:
    script = "cat; echo problem >&2; exit 3"
    done = run(["sh", "-c", script], input_bytes=b"hello\n", timeout_s=60)
    assert (done.status, done.stdout, done.stderr) == (3, b"hello\n", b"problem\n")


def test_big_input_and_output_do_not_block_each_other() -> None:
    data = os.urandom(512 * 1024)
    assert run(["cat"], input_bytes=data, timeout_s=60).stdout == data


def test_input_that_nobody_reads_is_no_error() -> None:
    assert run(["true"], input_bytes=b"x" * 1_000_000, timeout_s=60).status == 0


def test_death_by_signal_is_a_negative_status() -> None:
    assert run(["sh", "-c", "kill -9 $$"], timeout_s=60).status == -9


def test_environment_is_exactly_what_was_given() -> None:
    done = run(["/usr/bin/env"], environment={"ONLY": "this"}, timeout_s=60)
    assert done.stdout == b"ONLY=this\n"


def test_ignored_signals_are_not_inherited() -> None:
    status = run(["grep", "SigIgn", "/proc/self/status"], timeout_s=60).stdout
    assert int(status.split()[1], 16) & (1 << 12) == 0  # SIGPIPE, which Python ignores


def test_missing_program_is_named() -> None:
    with pytest.raises(KernelFailure) as caught:
        run(["pwt-no-such-program"], timeout_s=60)
    assert caught.value.errno == errno.ENOENT
    assert "pwt-no-such-program" in caught.value.message


def test_deadline_ends_the_child_and_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    grandchild = ""
    # A machine that stands still may end the shell before it has begun; with more time it begins.
    for timeout_s in (1, 10, 60):
        began = time.monotonic()
        with pytest.raises(KernelFailure) as caught:
            run(["sh", "-c", f"sleep 600 & echo $! > {pid_file}; wait"], timeout_s=timeout_s)
        assert caught.value.errno == errno.ETIMEDOUT
        assert time.monotonic() - began < 300
        grandchild = pid_file.read_text(encoding="ascii") if pid_file.exists() else ""
        if grandchild:
            break
    _wait_until_gone(int(grandchild))


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/stat")
        try:
            if status.read_text(encoding="ascii").split()[2] == "Z":
                return
        except OSError:
            return
    raise AssertionError(f"process {pid} still runs")


def test_endless_output_is_refused() -> None:
    with pytest.raises(KernelFailure) as caught:
        run(["cat", "/dev/zero"], timeout_s=60)
    assert caught.value.errno == errno.EFBIG


def test_child_runs_in_the_given_network_namespace(pod: Namespace) -> None:
    place = Place(network_fd=pod.fd.fileno())
    done = run(["readlink", "/proc/self/ns/net"], place=place, timeout_s=60)
    assert done.stdout.strip() == f"net:[{pod.pod.cookie}]".encode()
    assert os.stat("/proc/self/ns/net").st_ino != pod.pod.cookie


def test_child_runs_in_the_given_mount_namespace(tmp_path: Path) -> None:
    with _mount_namespace_with(tmp_path) as (mounts, marker):
        place = Place(mount_fd=mounts.fileno())
        inside = run(["cat", str(marker)], place=place, timeout_s=60)
        outside = run(["cat", str(marker)], timeout_s=60)
    assert inside.stdout == b"inside"
    assert outside.status == 1


@contextlib.contextmanager
def _mount_namespace_with(directory: Path) -> Iterator[tuple[Fd, Path]]:
    """A mount namespace in which `directory` is another file system with one file on it."""
    marker = directory / "marker"
    script = f"mount -t tmpfs pwt {directory} && printf inside > {marker} && echo ok && sleep 60"
    reader, writer = os.pipe2(os.O_CLOEXEC)
    child = start(["unshare", "--mount", "sh", "-c", script], stdout_fd=writer)
    os.close(writer)
    try:
        assert os.read(reader, 16) == b"ok\n"
        fd = os.open(f"/proc/{child.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        with Fd(fd, "mounts") as mounts:
            yield mounts, marker
    finally:
        os.close(reader)
        child.close()


def test_started_child_is_signalled_and_reaped() -> None:
    child = start(["sleep", "60"])
    try:
        assert child.wait(0) is None
        child.send_signal(15)
        assert child.wait(10) == -15
        child.send_signal(15)
    finally:
        child.close()


def test_closing_a_running_child_ends_it() -> None:
    child: Child = start(["sleep", "60"])
    child.close()
    assert not Path(f"/proc/{child.pid}").exists()


def test_no_descriptor_is_left_behind() -> None:
    gc.collect()  # what others dropped would be closed at some moment
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        run(["true"], timeout_s=60)
    with pytest.raises(KernelFailure):
        run(["pwt-no-such-program"], timeout_s=60)
    assert len(os.listdir("/proc/self/fd")) == before


def test_library_is_not_forked() -> None:
    """A handler for fork never runs: children share no state of this process."""
    called: list[int] = []
    os.register_at_fork(before=lambda: called.append(1))
    run(["true"], timeout_s=60)
    assert called == []


def test_a_daemon_that_keeps_the_streams_open_does_not_hold_up_the_answer() -> None:
    began = time.monotonic()
    done = run(["sh", "-c", "sleep 100 & echo $!; echo answer"], timeout_s=60)
    assert time.monotonic() - began < 30
    pid, answer = done.stdout.split()
    os.kill(int(pid), 9)
    assert (done.status, answer) == (0, b"answer")


def test_a_closed_output_does_not_end_the_wait_for_the_child() -> None:
    done = run(["sh", "-c", "exec >&- 2>&-; sleep 0.2; exit 7"], timeout_s=60)
    assert done.status == 7


def test_a_process_with_many_descriptors_can_start_programs() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        done = run(["cat"], input_bytes=b"through", timeout_s=60)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert done.stdout == b"through"


def test_a_helper_gives_what_it_wrote_and_knows_what_it_was_told() -> None:
    environment = {**os.environ, "SAID": "secret"}
    assert run_helper(["sh", "-c", 'echo "$SAID"'], environment, 60) == b"secret\n"


@pytest.mark.parametrize(
    ("command", "timeout_s", "message"),
    [
        (["sh", "-c", "echo no rights >&2; exit 3"], 60, "exit status 3: no rights"),
        (["sleep", "600"], 0.2, "did not end in time"),
        (["pwt-no-such-program"], 60, "start 'pwt-no-such-program'"),
    ],
    ids=["fails", "hangs", "is not there"],
)
def test_a_helper_that_fails_is_unavailable(
    command: list[str], timeout_s: float, message: str
) -> None:
    with pytest.raises(Unavailable, match=message) as caught:
        run_helper(command, dict(os.environ), timeout_s)
    assert "kubeconfig" in caught.value.hint
