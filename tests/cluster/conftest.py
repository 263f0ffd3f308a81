"""Clusters that tests share: real ones of two nodes, or none, and then the tier is skipped as a whole.

Two are raised, one after the other, with podwire as its manifest installs it: one as most clusters are, and one that
differs in all that may differ, services by the programs included. `--full` raises more.
"""

import shutil
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest
from msgspec.structs import replace

from podwire.lab.kubernetes import cluster as clusters
from podwire.lab.kubernetes import programs, residue
from podwire.lab.kubernetes.cluster import Cluster, ClusterShape
from podwire.lab.kubernetes.networks import Network
from podwire.lab.kubernetes.networks.agents import ROOT, read_definitions
from podwire.lab.kubernetes.networks.installed import Podwire, find_image
from podwire.lab.kubernetes.networks.reference import REFERENCE_PLUGINS, Ptp
from podwire.lab.kubernetes.nodes import machine
from podwire.model.errors import NotFound, PodwireError
from tests import leavings

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


OTHER: Final = ClusterShape(families="46", proxy="iptables", hidden=(str(ROOT),))
"""With the newer programs where they are built, and with services by the programs."""
SHAPES: Final[Mapping[str, ClusterShape]] = {
    "three nodes": ClusterShape(nodes=3, hidden=(str(ROOT),)),
    "iptables": ClusterShape(proxy="iptables", hidden=(str(ROOT),)),
    "both families": ClusterShape(families="46", hidden=(str(ROOT),)),
    "three nodes, both families, iptables": replace(OTHER, nodes=3),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Raise one other shape, and with --full every one; a module says in ON_SHAPES if it is for some alone."""
    if "shaped" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        names = ["other", *(("ptp", *SHAPES) if full else ())]
        names = getattr(metafunc.module, "ON_SHAPES", names)
        metafunc.parametrize("shaped", names, indirect=True, scope="package")


@pytest.fixture(scope="package")
def shaped(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Give a cluster of another shape than `cluster`."""
    network: Network
    if request.param == "ptp":
        shape, network = ClusterShape(), Ptp()
    elif request.param == "other":
        shape = replace(OTHER, newer=_list_newer())
        network = _find_podwire(past_services=True)
    else:
        shape, network = SHAPES[request.param], _find_podwire()
    yield from _give(leavings.name_cluster("shaped"), shape, network)


def _give(name: str, shape: ClusterShape, network: Network) -> Iterator[Cluster]:
    """Give a cluster of which nothing is left afterwards."""
    with clusters.raised(name, shape, network) as made:
        yield made
    assert not residue.list_left(name)


def _list_newer() -> frozenset[str]:
    try:
        programs.find_newer()
    except NotFound:
        return frozenset()
    return frozenset({"containerd", "etcd"})


@pytest.fixture(scope="module")
def network() -> Podwire:
    """Give podwire as it is installed."""
    return _find_podwire()


def _find_podwire(**more: Any) -> Podwire:
    """Give podwire as it is installed; the image must have been built where there is a way to Debian's packages."""
    if not read_definitions():
        pytest.skip(
            "deploy/podwire.yaml has no kinds of podwire's own: no agent could keep its objects there"
        )
    try:
        find_image()
    except PodwireError as error:
        pytest.skip(f"no image of podwire: {error.message}")
    return Podwire(**more)


@pytest.fixture(scope="module")
def cluster(network: Podwire) -> Iterator[Cluster]:
    """Give a cluster with podwire, whose nodes see nothing of the checkout."""
    shape = ClusterShape(hidden=(str(ROOT),))
    yield from _give(leavings.name_cluster("podwire"), shape, network)
