"""A real kube-apiserver on the loopback for tests: skipped, with the reason, where its program cannot be had."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from podwire.lab.kubernetes import api_server, programs
from podwire.lab.kubernetes.api_server import ON_LOOPBACK, ApiServer, Shape, User
from podwire.model.errors import NotFound


@contextmanager
def started(
    directory: Path, users: Sequence[User] = (), shape: Shape = ON_LOOPBACK
) -> Iterator[ApiServer]:
    """Give an API server with an etcd of its own; its files are below `directory`."""
    try:
        programs.find(programs.API_SERVER)
        programs.require("etcd", "etcd-server")
    except NotFound as missing:
        pytest.skip(f"{missing.message} ({missing.hint})")
    with api_server.started(directory, users, shape) as server:
        yield server
