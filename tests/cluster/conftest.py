"""Clusters that tests share: real ones of two nodes, or none, and then the tier is skipped as a whole.

Two are raised, one after the other: the rig itself is tried with the reference plugins, everything else with podwire as
its manifest installs it.
"""

import shutil
from collections.abc import Iterator

import pytest

from podwire.lab.kubernetes import cluster as clusters
from podwire.lab.kubernetes import programs, residue
from podwire.lab.kubernetes.cluster import Cluster, ClusterShape
from podwire.lab.kubernetes.networks.agents import ROOT, read_definitions
from podwire.lab.kubernetes.networks.installed import Podwire, find_image
from podwire.lab.kubernetes.networks.reference import REFERENCE_PLUGINS, Ptp
from podwire.lab.kubernetes.nodes import machine
from podwire.model.errors import NotFound, PodwireError

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


@pytest.fixture(scope="module")
def reference() -> Iterator[Cluster]:
    """Give a cluster whose pods are attached by the reference plugins."""
    with clusters.raised("reference", ClusterShape(), Ptp()) as made:
        yield made
    assert not residue.list_left("reference")


@pytest.fixture(scope="module")
def network() -> Podwire:
    """Give podwire as it is installed; the image must have been built where there is a way to Debian's packages."""
    if not read_definitions():
        pytest.skip(
            "deploy/podwire.yaml has no kinds of podwire's own: no agent could keep its objects there"
        )
    try:
        find_image()
    except PodwireError as error:
        pytest.skip(f"no image of podwire: {error.message}")
    return Podwire()


@pytest.fixture(scope="module")
def cluster(network: Podwire) -> Iterator[Cluster]:
    """Give a cluster with podwire, whose nodes see nothing of the checkout."""
    with clusters.raised("podwire", ClusterShape(hidden=(str(ROOT),)), network) as made:
        yield made
    assert not residue.list_left("podwire")
