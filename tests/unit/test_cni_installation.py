"""What a container runtime gets of podwire: which files, in which order, whole or not at all."""

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from podwire.agent.duties.installer import _LOOK_S, CHECK, Installer
from podwire.agent.health import Health
from podwire.cni.directories import RuntimeDirectories
from podwire.control.installation.steps import (
    Installation,
    find_obstacles,
    make_conflist,
    uninstall,
)
from podwire.kernel.clock import KernelClock
from podwire.kernel.inotify import DirectoryWaker
from podwire.model.errors import CannotServe, StorageFailure
from podwire.model.installation.files import CONFLIST_FILE, CniFiles, Loopback
from tests.waiting import wait_for, within

DEFAULT = Path("/run/podwire/cni.sock")
LAUNCHER = b"\x7fELF launcher"


def always() -> bool:
    return True


def never() -> bool:
    return False


def test_the_network_hands_all_that_a_pod_asks_for_to_podwire_alone() -> None:
    network = json.loads(make_conflist(DEFAULT))
    assert (network["cniVersion"], network["name"]) == ("1.0.0", "podwire")
    assert network["cniVersions"] == ["1.0.0", "1.1.0"]
    (plugin,) = network["plugins"]
    assert plugin["type"] == "podwire-cni"
    assert set(plugin["capabilities"]) == {"bandwidth", "ips", "mac", "portMappings"}
    assert "socket" not in plugin


def test_the_network_names_a_socket_that_the_launcher_would_not_find() -> None:
    elsewhere = Path("/run/other/cni.sock")
    (plugin,) = json.loads(make_conflist(elsewhere))["plugins"]
    assert plugin["socket"] == str(elsewhere)


@dataclass
class Watched:
    """Real directories; notes the order of what is done to them."""

    real: RuntimeDirectories
    done: list[str] = field(default_factory=list)

    def read(self) -> CniFiles:
        return self.real.read()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def noted(*arguments: bytes) -> None:
            self.done.append(name)
            getattr(self.real, name)(*arguments)

        return noted


@pytest.fixture
def real(tmp_path: Path) -> RuntimeDirectories:
    return RuntimeDirectories(tmp_path / "net.d", tmp_path / "bin")


@pytest.fixture
def installation(real: RuntimeDirectories) -> Installation:
    return Installation(Watched(real), LAUNCHER, DEFAULT)


def steps_of(installation: Installation) -> list[str]:
    watched = installation.directories
    assert isinstance(watched, Watched)
    done, watched.done = watched.done, []
    return done


def test_the_network_comes_last_and_goes_first(installation: Installation) -> None:
    assert installation.install(serves=always) == ["podwire-cni", "loopback", "05-podwire.conflist"]
    assert steps_of(installation) == ["write_launcher", "link_loopback", "write_conflist"]
    assert installation.is_complete(installation.directories.read())
    assert installation.install(serves=never) == []
    assert uninstall(installation.directories) == ["05-podwire.conflist", "loopback", "podwire-cni"]
    assert steps_of(installation) == ["remove_conflist", "remove_loopback", "remove_launcher"]
    assert uninstall(installation.directories) == []


def test_uninstalling_leaves_no_file(installation: Installation, real: RuntimeDirectories) -> None:
    installation.install(serves=always)
    uninstall(installation.directories)
    assert list(real.bin_dir.iterdir()) + list(real.conf_dir.iterdir()) == []


def test_the_network_waits_until_an_add_would_succeed(installation: Installation) -> None:
    assert installation.install(serves=never) == ["podwire-cni", "loopback"]
    states = installation.states(installation.directories.read())
    assert states["05-podwire.conflist"] == "missing"
    assert installation.install(serves=always) == ["05-podwire.conflist"]


def test_what_somebody_changed_is_renewed(
    installation: Installation, real: RuntimeDirectories
) -> None:
    installation.install(serves=always)
    (real.bin_dir / "podwire-cni").write_bytes(b"older")
    (real.conf_dir / "05-podwire.conflist").write_text("{}")
    before = installation.states(installation.directories.read())
    assert set(before.values()) == {"differs", "installed"}
    assert installation.install(serves=always) == ["podwire-cni", "05-podwire.conflist"]
    assert installation.is_complete(installation.directories.read())


def test_a_network_that_differs_stays_while_an_add_would_fail(
    installation: Installation, real: RuntimeDirectories
) -> None:
    installation.install(serves=always)
    (real.conf_dir / "05-podwire.conflist").write_text("{}")
    assert installation.install(serves=never) == []
    assert (real.conf_dir / "05-podwire.conflist").read_text() == "{}"


def test_modes_are_what_runtimes_and_benchmarks_want(
    installation: Installation, real: RuntimeDirectories
) -> None:
    before = os.umask(0o077)
    try:
        installation.install(serves=always)
    finally:
        os.umask(before)
    assert (real.bin_dir / "podwire-cni").stat().st_mode & 0o777 == 0o755
    assert (real.conf_dir / "05-podwire.conflist").stat().st_mode & 0o777 == 0o600


def test_a_loopback_of_somebody_else_stays(
    installation: Installation, real: RuntimeDirectories
) -> None:
    real.bin_dir.mkdir()
    (real.bin_dir / "loopback").write_text("theirs")
    assert "loopback" not in installation.install(serves=always)
    assert installation.states(installation.directories.read())["loopback"] == "foreign"
    uninstall(installation.directories)
    assert (real.bin_dir / "loopback").read_text() == "theirs"


def test_a_loopback_that_replaces_ours_stays(
    installation: Installation, real: RuntimeDirectories
) -> None:
    installation.install(serves=always)
    (real.bin_dir / "theirs").write_text("theirs")
    (real.bin_dir / "theirs").rename(real.bin_dir / "loopback")
    assert real.read().loopback is Loopback.FOREIGN
    real.remove_loopback()
    assert (real.bin_dir / "loopback").read_text() == "theirs"


def test_a_network_that_chained_portmap_is_renewed_under_its_name(
    installation: Installation, real: RuntimeDirectories
) -> None:
    installation.install(serves=always)
    wanted = (real.conf_dir / "05-podwire.conflist").read_bytes()
    earlier = json.loads(wanted)
    earlier["plugins"].append({"type": "portmap", "capabilities": {"portMappings": True}})
    (real.conf_dir / "05-podwire.conflist").write_text(json.dumps(earlier))
    assert installation.install(serves=always) == ["05-podwire.conflist"]
    assert (real.conf_dir / "05-podwire.conflist").read_bytes() == wanted


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("00-other.conf", True),
        ("05-a.conflist", True),
        ("04.json", True),
        ("10-later.conflist", False),
        ("00-other.conflist.bak", False),
        (".05-podwire.conflist.tmp", False),
    ],
)
def test_networks_that_a_runtime_reads_first_are_named(
    installation: Installation, real: RuntimeDirectories, name: str, named: bool
) -> None:
    installation.install(serves=always)
    (real.conf_dir / name).write_text("{}")
    assert any(name in obstacle for obstacle in find_obstacles(real.read())) is named


def test_what_a_killed_installer_left_is_written_over(
    installation: Installation, real: RuntimeDirectories
) -> None:
    real.bin_dir.mkdir()
    (real.bin_dir / ".podwire-cni.tmp").write_bytes(b"half")
    installation.install(serves=always)
    assert sorted(path.name for path in real.bin_dir.iterdir()) == ["loopback", "podwire-cni"]
    assert (real.bin_dir / "podwire-cni").read_bytes() == LAUNCHER


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "bin").write_text("a file")
    installation = Installation(
        RuntimeDirectories(tmp_path / "net.d", tmp_path / "bin"),
        LAUNCHER,
        DEFAULT,
    )
    with pytest.raises(StorageFailure) as caught:
        installation.install(serves=always)
    assert str(tmp_path / "bin") in caught.value.message
    assert "cni_bin_dir" in caught.value.hint


class Status:
    """CNI STATUS, which fails until told otherwise."""

    fails = True

    def __call__(self) -> None:
        if self.fails:
            raise CannotServe("the pool is empty")


def test_the_agent_says_what_it_waits_for_and_tells_once_that_all_is_there(
    real: RuntimeDirectories,
) -> None:
    health, status, told = Health(KernelClock()), Status(), []
    installer = Installer(
        Installation(real, LAUNCHER, DEFAULT),
        (real.conf_dir, real.bin_dir),
        status=status,
        watch=lambda *_paths: pytest.fail("nothing is watched here"),
        health=health,
        installed=lambda: told.append("installed"),
    )
    assert installer.look() is False
    (check,) = (one for one in health.checks() if one.name == CHECK)
    assert (check.ok, "the pool is empty" in check.message) == (False, True)
    assert told == []
    status.fails = False
    assert installer.look() is True
    status.fails = True
    real.remove_launcher()
    assert installer.look() is True
    assert told == ["installed"]
    (real.conf_dir / "00-other.conflist").write_text("{}")
    installer.look()
    assert any("00-other.conflist" in warning for warning in health.warnings())
    (real.conf_dir / "00-other.conflist").unlink()
    installer.look()
    assert not any("00-other.conflist" in warning for warning in health.warnings())


def test_what_changes_before_the_watch_begins_is_put_right_too(real: RuntimeDirectories) -> None:
    network, begun = real.conf_dir / CONFLIST_FILE, threading.Event()

    def watch(*paths: Path) -> DirectoryWaker:
        network.unlink()
        begun.set()
        return DirectoryWaker(*paths)

    installer = Installer(
        Installation(real, LAUNCHER, DEFAULT),
        (real.conf_dir, real.bin_dir),
        status=lambda: None,
        watch=watch,
        health=Health(KernelClock()),
    )
    installer.start()
    try:
        assert begun.wait(_LOOK_S / 2)
        wait_for(network.exists, "the network", _LOOK_S / 2)
    finally:
        installer.stop()


def test_a_directory_that_is_made_anew_counts_as_changed(tmp_path: Path) -> None:
    """Files that came before the new directory was watched are in none of its events."""
    watched = tmp_path / "net.d"
    watched.mkdir()
    waker = DirectoryWaker(watched)
    watched.rmdir()
    waker.wait(60.0)
    watched.mkdir()
    (watched / "network").touch()
    within(30.0, lambda: waker.wait(60.0))
    waker.close()
