"""Machines with a podwire agent, for the tests of real runtimes."""

import shutil
from collections.abc import Iterator

import pytest

from tests.runtime.containerd import Containerd
from tests.runtime.machine import REFERENCE_PLUGINS, Machine
from tests.runtime.podman import Podman

_NEEDED = (
    *("containerd", "ctr", "runc", "podman", "conmon", "busybox", "iptables"),
    *("nsenter", "unshare"),
)


@pytest.fixture(autouse=True, scope="session")
def _tools() -> None:
    """Skip, naming what is missing, where the runtimes are not installed."""
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if not (REFERENCE_PLUGINS / "ptp").exists():
        missing.append("containernetworking-plugins")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Give a machine whose agent runs and whose runtimes will find podwire."""
    with Machine() as made:
        made.node.start()
        made.write_conflist()
        try:
            yield made
        finally:
            print(made.node.log_tail(40))  # shown when the test failed


@pytest.fixture
def containerd(machine: Machine) -> Iterator[Containerd]:
    """Give a containerd that has read its network configuration."""
    with Containerd(machine) as made:
        made.wait_network_ready()
        yield made


@pytest.fixture
def podman(machine: Machine) -> Iterator[Podman]:
    """Give a podman."""
    with Podman(machine) as made:
        yield made
