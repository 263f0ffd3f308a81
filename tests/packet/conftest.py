"""One rig for all packet tests; each test finds it fresh."""

from collections.abc import Iterator

import pytest

from tests.packet.rig import Rig, open_rig


@pytest.fixture(scope="session")
def loaded_rig() -> Iterator[Rig]:
    """Load the programs once: the verifier takes its time under emulation."""
    with open_rig() as rig:
        yield rig


@pytest.fixture
def rig(loaded_rig: Rig) -> Rig:
    """Give the rig with the rows of rig.py and without memory."""
    loaded_rig.reset()
    return loaded_rig
