"""What the API shows of pools, with everything that it looks at while others change it."""

import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from podwire.agent.api.ipam import check_ipam, get_ipam
from podwire.agent.api.openapi import Call
from tests.fakes.pool_nodes import Ticking, add, apply, pool_document
from tests.fakes.store import MemoryStore


class Guarded(dict[Any, Any]):
    """Blocks that may be looked at under the lock only: other threads open and close some."""

    def __init__(self, blocks: Mapping[Any, Any], lock: Any) -> None:
        super().__init__(blocks)
        self._lock = lock

    def items(self) -> Any:
        assert self._lock._is_owned()
        return super().items()

    def values(self) -> Any:
        assert self._lock._is_owned()
        return super().values()

    def __iter__(self) -> Iterator[Any]:
        assert self._lock._is_owned()
        return super().__iter__()


@pytest.mark.parametrize("show", [get_ipam, check_ipam])
def test_blocks_are_looked_at_under_their_lock(show: Any) -> None:
    store = MemoryStore()
    apply(store, pool_document("p", "10.0.0.0/24", blockSize=28))
    ticking = Ticking(store, "n1")
    ticking.settle()
    add(ticking, 1)
    ipam = ticking.ipam
    ipam.own = ipam.mine.by_cidr = Guarded(ipam.own, ipam.lock)
    node = SimpleNamespace(node_name="n1", ipam="pool")
    api: Any = SimpleNamespace(
        config=SimpleNamespace(current=SimpleNamespace(node=node)),
        table=(),
        ipam=ipam,
        pools=ipam,
        store=store,
        turn=threading.RLock(),
        journal=SimpleNamespace(list_records=list),
        datapath=SimpleNamespace(
            read_inventory=lambda: SimpleNamespace(endpoint_addresses=frozenset())
        ),
    )
    assert show(api, Call()) is not None
