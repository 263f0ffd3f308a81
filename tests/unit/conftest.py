"""What several files of unit tests share: a store in a file, nodes with pools in it, and the API of a node."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from podwire.model.store import Store
from podwire.store.sqlite import SqliteStore
from tests.fakes.node import FakeNode
from tests.fakes.pool_nodes import Nodes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store as an agent without a cluster has it."""
    with closing(SqliteStore(tmp_path / "store.db")) as made:
        yield made


@pytest.fixture
def nodes(store: Store) -> Iterator[Nodes]:
    """Nodes by name, whose agents share the store."""
    made = Nodes(store)
    yield made
    made.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    """A node with everything but a kernel."""
    with FakeNode(tmp_path) as made:
        yield made
