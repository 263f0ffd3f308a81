"""What a container runtime finds of podwire: installed by an agent, renewed after somebody's change, and by hand."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from podwire.model.installation.files import CONFLIST_FILE, LAUNCHER_FILE, LOOPBACK_FILE
from podwire.model.installation.shipped import LAUNCHER
from tests.contract.launcher_clients import build_launcher
from tests.lab.rig import ROOT, Rig
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

SOON_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def _launcher() -> None:
    build_launcher()


class Node(Rig):
    """A node whose agent installs, or not, into directories of its own."""

    def __init__(
        self, conf_dir: Path, bin_dir: Path, *, installs: bool, cidr: str = "10.99.0.0/24"
    ) -> None:
        self.conf_dir, self.bin_dir = conf_dir, bin_dir
        super().__init__(
            cidrs=(cidr,),
            cni_install=installs,
            cni_conf_dir=str(conf_dir),
            cni_bin_dir=str(bin_dir),
        )

    @property
    def conflist(self) -> Path:
        return self.conf_dir / CONFLIST_FILE

    @property
    def launcher(self) -> Path:
        return self.bin_dir / LAUNCHER_FILE

    def is_installed(self) -> bool:
        return (
            self.conflist.exists()
            and self.launcher.exists()
            and self.launcher.read_bytes() == LAUNCHER.read_bytes()
            and (self.bin_dir / LOOPBACK_FILE).exists()
        )

    def files(self) -> list[Path]:
        return [*self.conf_dir.glob("*"), *self.bin_dir.glob("*")]

    def podwire(self, *words: str) -> tuple[int, str]:
        """Run the command line on this node."""
        done = subprocess.run(
            [
                *("nsenter", f"--net=/run/netns/{self.name}", sys.executable, "-c"),
                "from podwire.cli.main import main; main()",
                *(*words, "--config", str(self._config)),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        return done.returncode, done.stdout + done.stderr

    def cni_status(self) -> tuple[int, Any]:
        code, text = self.podwire("cni", "status", "-o", "json")
        return code, json.loads(text)


@pytest.fixture
def installing(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "net.d", tmp_path / "bin", installs=True) as node:
        yield node


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "net.d", tmp_path / "bin", installs=False) as node:
        yield node


def add_as_a_runtime_does(node: Node, command: str, container: str, namespace: str) -> int:
    """Take the network and the plugin from where the agent put them."""
    network = json.loads(node.conflist.read_bytes())
    plugin = network["plugins"][0]
    document = {"cniVersion": network["cniVersion"], "name": network["name"], **plugin}
    done = subprocess.run(
        [node.bin_dir / plugin["type"]],
        input=json.dumps(document).encode(),
        env={
            "CNI_COMMAND": command,
            "CNI_CONTAINERID": container,
            "CNI_IFNAME": "eth0",
            "CNI_NETNS": f"/run/netns/{namespace}",
            "CNI_PATH": str(node.bin_dir),
        },
        capture_output=True,
        check=False,
        timeout=150,
    )
    return done.returncode


def test_an_agent_installs_what_a_runtime_needs_and_leaves_it(installing: Node) -> None:
    installing.start()
    wait_for(installing.is_installed, "launcher and network", SOON_S)
    pod = installing.make_pod_namespace()
    assert add_as_a_runtime_does(installing, "ADD", "c1", pod) == 0
    assert installing.stop() == 0
    assert installing.is_installed()
    assert add_as_a_runtime_does(installing, "DEL", "c1", pod) == 0  # spooled
    inodes = [path.stat().st_ino for path in installing.files()]
    installing.start()
    wait_for(lambda: not installing.spooled(), "the spooled DEL to be carried out", SOON_S)
    assert [path.stat().st_ino for path in installing.files()] == inodes


def remove(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink()


CHANGES: Final[Mapping[str, Callable[[Node], object]]] = {
    "network removed": lambda node: node.conflist.unlink(),
    "network changed": lambda node: node.conflist.write_text("{}"),
    "launcher removed": lambda node: node.launcher.unlink(),
    "launcher of another version": lambda node: node.launcher.write_bytes(b"#!/bin/false\n"),
    "everything removed": lambda node: remove(node.files()),
    "directory removed": lambda node: shutil.rmtree(node.conf_dir),
}


def test_what_somebody_changes_is_put_right_at_once(installing: Node) -> None:
    installing.start()
    wait_for(installing.is_installed, "launcher and network", SOON_S)
    network = installing.conflist.read_bytes()
    for name, change in CHANGES.items():
        change(installing)

        def is_renewed() -> bool:
            return installing.is_installed() and installing.conflist.read_bytes() == network

        wait_for(
            is_renewed,
            f"the files to be renewed after: {name}",
            SOON_S,
        )
    code, document = installing.cni_status()
    assert (code, document["installed"]) == (0, True)


def test_the_network_comes_only_when_an_add_would_succeed(tmp_path: Path) -> None:
    few = "10.99.0.0/29"
    with Node(tmp_path / "net.d", tmp_path / "bin", installs=True, cidr=few) as node:
        node.start()
        wait_for(node.is_installed, "launcher and network", SOON_S)
        taken: list[str] = []
        while (outcome := node.cni("ADD", f"c{len(taken)}", pod := node.make_pod_namespace())).ok:
            taken.append(pod)
            if len(taken) > 8:
                pytest.fail("the range has no end")
        assert outcome.document["code"] == 100
        node.conflist.unlink()
        node.launcher.unlink()
        wait_for(node.launcher.exists, "the launcher to be renewed", SOON_S)

        def warnings() -> str:
            return str(node.get("/status")[1]["warnings"])

        wait_for(lambda: "not installed yet" in warnings(), "the agent to say why", SOON_S)
        assert not node.conflist.exists()
        assert node.cni("DEL", "c0", taken[0]).ok
        wait_for(node.conflist.exists, "the network, now that an address is free", SOON_S)


def test_by_hand(by_hand: Node) -> None:
    code, text = by_hand.podwire("cni", "install")
    assert (code, "nothing was installed" in text) == (3, True)
    assert by_hand.files() == []
    by_hand.start()
    assert by_hand.cni_status()[0] == 1
    assert by_hand.podwire("cni", "install")[0] == 0
    assert by_hand.is_installed()
    assert "installed already" in by_hand.podwire("cni", "install")[1]
    assert by_hand.cni_status()[0] == 0
    other = by_hand.conf_dir / "00-other.conflist"
    other.write_text("{}")
    code, document = by_hand.cni_status()
    assert (code, "00-other.conflist" in document["obstacles"][0]) == (1, True)
    other.unlink()
    assert by_hand.podwire("cni", "uninstall")[0] == 0
    assert by_hand.files() == []
    code, text = by_hand.podwire("cni", "uninstall")
    assert (code, "nothing of podwire" in text) == (0, True)


def test_nothing_is_uninstalled_under_an_agent_that_installs(installing: Node) -> None:
    installing.start()
    wait_for(installing.is_installed, "launcher and network", SOON_S)
    code, text = installing.podwire("cni", "uninstall")
    assert (code, "stop the agent first" in text) == (5, True)
    assert installing.is_installed()
    installing.stop()
    assert installing.podwire("cni", "uninstall")[0] == 0
    assert installing.files() == []
