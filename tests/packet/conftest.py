"""One rig for all packet tests; each test finds it fresh."""

from collections.abc import Iterator

import pytest

from tests.packet.rig import FEW_ROWS, Rig, open_rig


@pytest.fixture(scope="session")
def loaded_rig() -> Iterator[Rig]:
    """Load the programs once: the verifier takes its time under emulation."""
    with open_rig(rows=FEW_ROWS) as rig:
        yield rig


@pytest.fixture
def rig(loaded_rig: Rig) -> Iterator[Rig]:
    """Give the rig with the rows of rig.py and without memory."""
    loaded_rig.reset()
    with loaded_rig.visited():
        yield loaded_rig
