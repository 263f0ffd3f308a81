"""While the store is away: ADDs that need it wait and fail in time, and keep nobody else waiting."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from podwire.agent.cni.dispatch import Dispatcher
from podwire.agent.cni.spool import Spool
from podwire.cni.errors import code_of
from podwire.cni.netconf import decode_request
from podwire.model import wire
from podwire.model.errors import StorageFailure, Unavailable
from podwire.model.interfaces import PodNamespace
from podwire.model.request import AttachRequest
from podwire.model.store import StoredObject
from podwire.store.sqlite import SqliteStore
from tests.fakes.node import FakeNode
from tests.fakes.store import MemoryStore
from tests.unit.test_attach_service import NETNS, request

BUSY_S = 12.0
NEW_ADDS = 8


class Bench:
    """A dispatcher with the real decisions behind it, one pod that lives, and a store that can be taken away."""

    def __init__(self, node: FakeNode, directory: Path, take_store: Callable[[], None]) -> None:
        self.node = node
        self.take_store = take_store
        spool = Spool(directory / wire.SPOOL_DIRECTORY, node.clock, _decode, ran_at=lambda *_: None)
        node.identities.wait_s = BUSY_S
        node.service.add(request(container="old", labels=("cni:app=old",)), NETNS)
        self.dispatcher = Dispatcher(node.service, spool, node.clock)

    async def submit(self, one: AttachRequest, namespace: PodNamespace | None = NETNS) -> object:
        return await self.dispatcher.submit(one, namespace)


def _decode(frame: wire.Frame) -> AttachRequest:
    return decode_request(frame.environment, frame.stdin, frame.started_boottime_ns)


def _lock(other: sqlite3.Connection) -> None:
    other.execute("BEGIN EXCLUSIVE")


@pytest.fixture(params=["away", "locked"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    if request.param == "away":
        store = MemoryStore()
        with FakeNode(tmp_path, store=store) as node:
            yield Bench(node, tmp_path, lambda: setattr(store, "away", True))
        return
    path = tmp_path / "store.db"
    with (
        closing(SqliteStore(path, busy_timeout_s=BUSY_S)) as file,
        FakeNode(tmp_path, store=file) as node,
        closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        yield Bench(node, tmp_path, partial(_lock, other))
        node.follower.stop()


async def test_adds_of_new_labels_leave_threads_for_the_others(bench: Bench) -> None:
    bench.take_store()
    begin_s = time.monotonic()
    adds = [
        asyncio.create_task(
            bench.submit(request(container=f"new-{number}", labels=(f"cni:app={number}",)))
        )
        for number in range(NEW_ADDS)
    ]
    await asyncio.sleep(0)
    await bench.submit(request("DEL", container="old", at_ns=200))
    assert time.monotonic() - begin_s < BUSY_S / 2
    await bench.submit(request(container="again", labels=("cni:app=old",), at_ns=200))
    assert time.monotonic() - begin_s < BUSY_S / 2
    assert not any(add.done() for add in adds)
    failures = await asyncio.gather(*adds, return_exceptions=True)
    assert {type(failure) for failure in failures} == {Unavailable}
    assert time.monotonic() - begin_s < 4 * BUSY_S
    await bench.dispatcher.close(30.0)


async def test_adds_of_the_same_new_labels_fail_together(bench: Bench) -> None:
    bench.take_store()
    begin_s = time.monotonic()
    failures = await asyncio.gather(
        *(
            bench.submit(request(container=f"new-{number}", labels=("cni:app=new",)))
            for number in range(NEW_ADDS)
        ),
        return_exceptions=True,
    )
    assert {type(failure) for failure in failures} == {Unavailable}
    assert time.monotonic() - begin_s < 4 * BUSY_S
    await bench.dispatcher.close(30.0)


def test_a_store_that_cannot_be_written_is_code_11(tmp_path: Path) -> None:
    def refuse(_new: StoredObject) -> None:
        raise StorageFailure("write store: the disk is full", hint="free space")

    store = MemoryStore()
    with FakeNode(tmp_path, store=store) as node:
        node.identities.wait_s = 60
        store.before_create = refuse
        with pytest.raises(Unavailable, match="disk is full") as caught:
            node.service.add(request(labels=("cni:app=new",)), NETNS)
        assert code_of(caught.value) == 11
        assert caught.value.hint == "free space"
