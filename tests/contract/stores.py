"""The back ends that the store's contract is held against, and what its tests have in common."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from podwire.kernel.inotify import FileWaker
from podwire.model.errors import Conflict
from podwire.model.store import ObjectKey, Store, StoredObject, StoreEvent, Watch
from podwire.store.etcd.store import EtcdStore
from podwire.store.sqlite import SqliteStore
from tests.contract.etcd_rig import ENDPOINT_VARIABLE
from tests.waiting import wait_for

Open = Callable[[Path], Store]

DEADLINE_S = 120.0
"""Also of single requests: an etcd on a busy machine may not answer for longer than an agent would wait."""

BACK_ENDS: dict[str, Open] = {
    "sqlite": lambda directory: SqliteStore(directory / "store.db"),
    "sqlite-inotify": lambda directory: SqliteStore(directory / "store.db", open_waker=FileWaker),
    "etcd": lambda _directory: EtcdStore([os.environ[ENDPOINT_VARIABLE]], deadline_s=DEADLINE_S),
}


def now_at(store: Store) -> int:
    """Give the revision that the store is at."""
    return store.list("nothing")[1]


def key(name: str, namespace: str = "default", kind: str = "networkpolicies") -> ObjectKey:
    return ObjectKey(kind, namespace, name)


def make(name: str, value: object = 0, *, revision: int = 0, **where: str) -> StoredObject:
    return StoredObject(key=key(name, **where), revision=revision, document={"spec": {"v": value}})


def take(watch: Watch, count: int) -> list[StoreEvent]:
    """Read `count` events, or fail."""
    found: list[StoreEvent] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while len(found) < count and time.monotonic() < deadline_s:
        found += watch.next(0.2)
    assert len(found) == count
    return found


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, or fail."""
    wait_for(condition, deadline_s=DEADLINE_S)


def seen(events: Sequence[StoreEvent]) -> list[tuple[str, bool]]:
    return [(event.object.key.name, event.deleted) for event in events]


def increment(store: Store, times: int) -> None:
    """Count up by compare-and-swap; each conflict is tried again."""
    for _ in range(times):
        while True:
            found = store.get(key("counter"))
            assert found is not None
            value = found.document["spec"]["v"] + 1
            try:
                store.update(make("counter", value, revision=found.revision))
                break
            except Conflict:
                continue
