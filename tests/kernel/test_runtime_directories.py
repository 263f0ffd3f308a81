"""What installing asks of the kernel: news of directories, a plugin of the runtime's, and our own loopback."""

import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from podwire.datapath.runtime import run_chained, watch_directories
from podwire.model.errors import KernelFailure
from podwire.model.installation.files import LOOPBACK_FILE
from podwire.model.installation.shipped import LAUNCHER
from podwire.model.store import Waker
from tests import leavings
from tests.contract.launcher_clients import build_launcher

LONG_S = 60.0


def ends_by_itself(waker: Waker) -> bool:
    """Tell whether `wait` ends long before its time."""
    woken = threading.Event()

    def wait() -> None:
        waker.wait(LONG_S * 2)
        woken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    try:
        return woken.wait(LONG_S)
    finally:
        waker.wake()
        waiter.join()


CHANGES: Final[Mapping[str, Callable[[Path], object]]] = {
    "removed": lambda d: (d / "there").unlink(),
    "renamed onto": lambda d: (d / "other").rename(d / "there"),
    "written": lambda d: (d / "there").write_text("new"),
    "made": lambda d: (d / "new").symlink_to("there"),
    "mode": lambda d: (d / "there").chmod(0o600),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", ["first", "second"])
def test_changes_of_either_directory_wake(tmp_path: Path, change: str, which: str) -> None:
    directories = tmp_path / "first", tmp_path / "second"
    for directory in directories:
        directory.mkdir()
        directory.joinpath("there").write_text("old")
        directory.joinpath("other").write_text("other")
    with closing(watch_directories(*directories)) as waker:
        CHANGES[change](tmp_path / which)
        assert ends_by_itself(waker)


def test_a_directory_that_is_made_again_is_watched_again(tmp_path: Path) -> None:
    directory = tmp_path / "net.d"
    directory.mkdir()
    with closing(watch_directories(directory)) as waker:
        directory.rmdir()
        waker.wait(LONG_S)  # ends at once: the directory is gone
        directory.mkdir()
        waker.wait(0)  # looks for it
        directory.joinpath("new").write_text("")
        assert ends_by_itself(waker)


def test_a_directory_that_is_not_there_cannot_be_watched(tmp_path: Path) -> None:
    with pytest.raises(KernelFailure):
        watch_directories(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("script", "wrong"),
    [
        (
            '[ "$(cat)" = words ] && [ "$CNI_COMMAND" = DEL ] && case $PATH in *:/usr/sbin:*) ;; *) exit 9 ;; esac',
            "",
        ),
        ('echo \'{"msg": "no way"}\'; exit 1', "no way"),
        ("echo nothing said >&2; exit 3", "exit status 3: nothing said"),
    ],
)
def test_a_plugin_of_the_runtime_is_run_as_the_runtime_does(
    tmp_path: Path, script: str, wrong: str
) -> None:
    plugin = tmp_path / "portmap"
    plugin.write_text(f"#!/bin/sh\n{script}\n")
    plugin.chmod(0o755)
    variables = {"CNI_COMMAND": "DEL", "CNI_PATH": str(tmp_path)}
    with Path("/proc/self/ns/mnt").open("rb") as mount:
        for mount_fd in (None, mount.fileno()):
            said = run_chained("portmap", variables, b"words", mount_fd)
            assert said == wrong or (wrong and wrong in said)


def test_a_plugin_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "nobody" in run_chained("nobody", {"CNI_PATH": str(tmp_path)}, b"", None)


# --- our loopback -------------------------------------------------------------------------------


@pytest.fixture
def loopback(tmp_path: Path) -> Path:
    """The link as the installer makes it."""
    build_launcher()
    (tmp_path / "podwire-cni").write_bytes(LAUNCHER.read_bytes())
    (tmp_path / "podwire-cni").chmod(0o755)
    (tmp_path / LOOPBACK_FILE).symlink_to("podwire-cni")
    return tmp_path / LOOPBACK_FILE


def call(
    plugin: Path, command: str, netns: str = "", version: str = "1.0.0"
) -> tuple[int, dict[str, object]]:
    variables = {"CNI_COMMAND": command, "CNI_CONTAINERID": "c", "CNI_IFNAME": "lo"}
    done = subprocess.run(
        [plugin],
        env={**variables, "CNI_NETNS": netns, "CNI_PATH": str(plugin.parent)},
        input=json.dumps({"cniVersion": version, "name": "cni-loopback", "type": "loopback"}),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}


def is_up(namespace: str) -> bool:
    shown = subprocess.run(
        ["ip", "-n", namespace, "-j", "link", "show", "lo"],
        capture_output=True,
        check=True,
        text=True,
    )
    return "UP" in json.loads(shown.stdout)[0]["flags"]


@pytest.fixture
def namespace() -> Iterator[str]:
    name = leavings.new_name()
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield name
    subprocess.run(["ip", "netns", "del", name], check=True)


VERSIONS = ["0.1.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]


@pytest.mark.parametrize("version", VERSIONS)
def test_loopback_sets_the_device_up_in_the_pod(
    loopback: Path, namespace: str, version: str
) -> None:
    netns = f"/run/netns/{namespace}"
    assert not is_up(namespace)
    status, failure = call(loopback, "CHECK", netns, version)
    assert (status, failure["code"]) == (1, 5)
    status, result = call(loopback, "ADD", netns, version)
    assert (status, result["cniVersion"]) == (0, version)
    if version != "0.1.0":
        assert result["interfaces"] == [
            {"name": "lo", "mac": "00:00:00:00:00:00", "sandbox": netns}
        ]
        family = {"version": "4"} if version < "1" else {}
        assert result["ips"] == [{"interface": 0, "address": "127.0.0.1/8", **family}]
    assert is_up(namespace)
    assert call(loopback, "CHECK", netns, version) == (0, {})
    assert call(loopback, "DEL", netns, version) == (0, {})
    assert call(loopback, "DEL", "", version) == (0, {})


@pytest.mark.parametrize("netns", ["", "/run/netns/nobody", "/dev/null"])
def test_loopback_names_a_namespace_that_is_none(loopback: Path, netns: str) -> None:
    status, failure = call(loopback, "ADD", netns)
    assert (status, failure["code"]) == (1, 4)
    assert (netns or "CNI_NETNS") in str(failure["msg"])


def test_loopback_tells_its_versions(loopback: Path) -> None:
    status, answer = call(loopback, "VERSION")
    versions = answer["supportedVersions"]
    assert status == 0
    assert isinstance(versions, list)
    assert {"1.0.0", "1.1.0"} <= set(versions)
