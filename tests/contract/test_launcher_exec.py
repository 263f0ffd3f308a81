"""`podwire-cni exec`: a command in other namespaces, without a fork in the agent."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import leavings
from tests.contract.launcher_clients import LAUNCHER

pytestmark = pytest.mark.kernel


@pytest.fixture(autouse=True)
def _built(launcher: Path) -> None:
    assert launcher.exists()


@pytest.fixture
def netns() -> Iterator[Path]:
    name = leavings.new_name()
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        yield Path("/run/netns") / name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
def mntns(tmp_path: Path) -> Iterator[Path]:
    """A mount namespace in which `tmp_path` shows one file more; lives as long as a process in it."""
    script = f"mount -t tmpfs pwt {tmp_path} && touch {tmp_path}/inside && echo ready && read _"
    process = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout
    assert process.stdin
    try:
        assert process.stdout.readline() == b"ready\n"
        yield Path(f"/proc/{process.pid}/ns/mnt")
    finally:
        process.stdin.close()
        process.wait(120)
        process.stdout.close()


def helper(*arguments: str, fds: tuple[int, ...] = ()) -> subprocess.CompletedProcess[str]:
    # CNI_COMMAND is the delegated plugin's: it must not make the helper a plugin.
    return subprocess.run(
        [LAUNCHER, "exec", *arguments],
        env={"PATH": os.environ["PATH"], "CNI_COMMAND": "ADD"},
        capture_output=True,
        text=True,
        check=False,
        pass_fds=fds,
        timeout=120,
    )


def test_the_command_runs_with_its_arguments_and_environment() -> None:
    done = helper("--", "/bin/sh", "-c", 'echo "$CNI_COMMAND $0 $1"', "a b", "--netns")
    assert (done.returncode, done.stdout) == (0, "ADD a b --netns\n")


@pytest.mark.parametrize("by", ["path", "descriptor"])
def test_the_command_runs_in_the_network_namespace(netns: Path, by: str) -> None:
    fd = os.open(netns, os.O_RDONLY)
    try:
        where = str(netns) if by == "path" else str(fd)
        done = helper("--netns", where, "stat", "-Lc%i", "/proc/self/ns/net", fds=(fd,))
    finally:
        os.close(fd)
    assert (done.returncode, done.stdout) == (0, f"{netns.stat().st_ino}\n")


@pytest.mark.parametrize("by", ["path", "descriptor"])
def test_the_command_runs_in_both_namespaces(
    netns: Path, mntns: Path, tmp_path: Path, by: str
) -> None:
    fd = os.open(mntns, os.O_RDONLY)
    script = f"ls {tmp_path} && stat -Lc%i /proc/self/ns/net"
    try:
        where = str(mntns) if by == "path" else str(fd)
        options = ("--mntns", where, "--netns", str(netns))
        done = helper(*options, "--", "/bin/sh", "-c", script, fds=(fd,))
    finally:
        os.close(fd)
    assert (done.returncode, done.stdout) == (0, f"inside\n{netns.stat().st_ino}\n")
    assert os.listdir(tmp_path) == []


def test_the_namespaces_descriptors_are_closed_in_the_command(netns: Path) -> None:
    fd = os.open(netns, os.O_RDONLY)
    try:
        done = helper(
            "--netns", str(fd), "--", "/bin/sh", "-c", f"test -e /proc/$$/fd/{fd}", fds=(fd,)
        )
    finally:
        os.close(fd)
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        pytest.param((), 125, "usage", id="nothing"),
        pytest.param(("--",), 125, "usage", id="no command"),
        pytest.param(("--netns",), 125, "usage", id="no value"),
        pytest.param(("--pidns", "1", "--", "true"), 125, "usage", id="unknown option"),
        pytest.param(("--netns", "/nowhere", "true"), 125, "/nowhere", id="no such namespace"),
        pytest.param(("--netns", "/proc/self/ns/mnt", "true"), 125, "enter", id="wrong kind"),
        pytest.param(("--mntns", "/dev/null", "true"), 125, "enter", id="no namespace"),
        pytest.param(("--netns", "99", "true"), 125, "enter", id="no such descriptor"),
        pytest.param(("/nowhere/cmd",), 127, "/nowhere/cmd", id="no such command"),
        pytest.param(("/etc/passwd",), 126, "/etc/passwd", id="not executable"),
        pytest.param(("/bin/sh", "-c", "exit 42"), 42, "", id="the command's own"),
    ],
)
def test_the_exit_status_tells_whose_failure_it_was(
    arguments: tuple[str, ...], status: int, words: str
) -> None:
    done = helper(*arguments)
    assert done.returncode == status
    assert words in done.stderr
