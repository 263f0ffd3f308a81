"""Labs for the tests of this folder, and the check that none of them leaves anything on the machine."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests import leavings
from tests.lab.labrig import Lab, leaks, own_namespace
from tests.lab.quick_labs import quick_labs

MakeLab = Callable[..., Lab]


@pytest.fixture(scope="session", autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail at the end of the session when a lab left something, whatever its tests said."""
    before = own_namespace()
    yield
    found = leaks([leavings.LAB], before)
    assert not found, f"labs left {found}"


@pytest.fixture(scope="session", autouse=True)
def labs_are_quick(no_leaks: None) -> Iterator[None]:
    """Fork the agents of labs, and lend them programs. A rig executes its agent, which loads its programs itself."""
    del no_leaks
    with quick_labs():
        yield


@pytest.fixture
def make_lab() -> Iterator[MakeLab]:
    """Make labs that end with the test: `make_lab(nodes=1, families="46")`."""
    with ExitStack() as made:

        def make(nodes: int = 1, families: str = "46", name: str = "", **shape: object) -> Lab:
            lab = Lab(nodes, families, name, **shape)
            made.callback(lab.close)
            return lab

        yield make


def _lab(nodes: int, families: str) -> Iterator[Lab]:
    lab = Lab(nodes, families)
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture(scope="session")
def node_lab() -> Iterator[Lab]:
    """One dual-stack node that tests share; each takes away the pods that it made."""
    yield from _lab(1, "46")


@pytest.fixture(scope="session")
def pair_lab() -> Iterator[Lab]:
    """Two dual-stack nodes that tests share; each takes away the pods that it made."""
    yield from _lab(2, "46")


@pytest.fixture(scope="session")
def small_lab() -> Iterator[Lab]:
    """One node of IPv4 only, with five addresses."""
    for lab in _lab(1, "4"):
        settings = lab.node().directory / "agent.toml"
        assert lab.cli("lab", "node", "stop", "node1").code == 0
        settings.write_text(settings.read_text().replace("10.244.1.0/24", "10.244.1.0/29"))
        assert lab.cli("lab", "node", "start", "node1").code == 0
        yield lab


@pytest.fixture(scope="session")
def ipv6_lab() -> Iterator[Lab]:
    """One node of IPv6 only."""
    yield from _lab(1, "6")
