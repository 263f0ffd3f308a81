"""The cluster that the tests share: two nodes with everything real, or none, and then the tier is skipped."""

import shutil
from collections.abc import Iterator

import pytest

from podwire.lab.kubernetes import cluster as clusters
from podwire.lab.kubernetes import programs, residue
from podwire.lab.kubernetes.cluster import Cluster, ClusterShape
from podwire.lab.kubernetes.networks.reference import REFERENCE_PLUGINS, Ptp
from podwire.lab.kubernetes.nodes import machine
from podwire.model.errors import NotFound

NAME = "test"
_NEEDED = ("etcd", "containerd", "ctr", "runc", "busybox", "openssl", "nsenter", "unshare")


def find_obstacle() -> str:
    """Say what keeps this machine from running a cluster; "" when nothing does."""
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if not (REFERENCE_PLUGINS / "ptp").exists():
        missing.append("containernetworking-plugins")
    if missing:
        return f"not installed: {', '.join(missing)}"
    try:
        programs.find(programs.CLUSTER)
    except NotFound as error:
        return f"{error.message} ({error.hint})"
    return machine.find_obstacle()


@pytest.fixture(autouse=True, scope="session")
def _can_run() -> None:
    if obstacle := find_obstacle():
        pytest.skip(f"no cluster on this machine: {obstacle}")


@pytest.fixture(scope="session")
def cluster(_can_run: None) -> Iterator[Cluster]:
    """Give the cluster; its pods are attached by the reference plugins."""
    with clusters.raised(NAME, ClusterShape(), Ptp()) as made:
        yield made
    assert not residue.list_left(NAME)
