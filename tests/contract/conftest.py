"""Fixtures of the launcher's contract."""

from pathlib import Path

import pytest

from podwire.model import wire
from tests.contract.launcher_clients import CLIENTS, LAUNCHER, Run, build_launcher


@pytest.fixture(scope="session")
def launcher() -> Path:
    """The C program, up to date."""
    build_launcher()
    return LAUNCHER


@pytest.fixture(params=CLIENTS)
def run(request: pytest.FixtureRequest, launcher: Path) -> Run:
    """One of the two clients, as a function of environment and stdin."""
    assert launcher.exists()
    return CLIENTS[request.param]


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    """Where nobody listens yet."""
    path = tmp_path / "cni.sock"
    assert len(str(path)) <= wire.SOCKET_PATH_MAX_BYTES
    return path
