"""The back ends that the store's contract is held against, and what its tests have in common.

Processes that a test starts by the dozen import this file, so a back end is imported when it is opened.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from podwire.kernel.inotify import FileWaker
from podwire.model.errors import Conflict
from podwire.model.store import ObjectKey, Store, StoredObject, StoreEvent, Watch
from podwire.model.store.kinds import IP_POOL, NAMESPACE, NETWORK_POLICY, WORKLOAD
from podwire.store.sqlite import SqliteStore
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.fakes.server_store import ServerStore

Open = Callable[[Path], Store]
MakeNamespace = Callable[[Store, str], None]

DEADLINE_S = 120.0
"""Also of single requests: an etcd on a busy machine may not answer for longer than an agent would wait."""

POLICIES: Final = NETWORK_POLICY.plural
WORKLOADS: Final = WORKLOAD.plural
POOLS: Final = IP_POOL.plural


def make_namespace(store: Store, name: str) -> None:
    """Make a namespace in a store whose namespaces are podwire's."""
    document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    store.create(StoredObject(key=ObjectKey(NAMESPACE.plural, "", name), document=document))


@dataclass(frozen=True)
class BackEnd:
    """One back end under test. A real API server is one more of these: the cases stay as they are."""

    open: Open
    """Opens the store that belongs to a directory; every call of one directory gives the same store."""
    make_namespace: MakeNamespace = make_namespace
    """Makes a namespace as whoever may do so."""


_servers: dict[Path, "ServerStore"] = {}


def open_server(directory: Path) -> "ServerStore":
    """Open what behaves as an API server does, while others write to it."""
    from tests.fakes.server_store import ServerStore  # noqa: PLC0415

    if directory not in _servers:
        _servers[directory] = ServerStore()
    return ServerStore(_servers[directory])


@contextmanager
def others_at_work(name: str, directory: Path) -> Iterator[None]:
    """Let others write to a server while a test runs."""
    if name == KUBERNETES:
        from tests.contract import kubernetes_rig  # noqa: PLC0415

        with kubernetes_rig.others_at_work():
            yield
        return
    if name != SERVER:
        yield
        return
    from tests.fakes.server_store import OthersAtWork  # noqa: PLC0415

    others = OthersAtWork(open_server(directory)).start()
    try:
        yield
    finally:
        others.stop()
        del _servers[directory]


def _make_namespace_of_server(store: Store, name: str) -> None:
    from tests.fakes.server_store import ServerStore  # noqa: PLC0415

    assert isinstance(store, ServerStore)
    store.make_namespace(name)


def _open_etcd(_directory: Path) -> Store:
    from podwire.store.etcd.store import EtcdStore  # noqa: PLC0415
    from tests.contract.etcd_rig import ENDPOINT_VARIABLE  # noqa: PLC0415

    return EtcdStore([os.environ[ENDPOINT_VARIABLE]], deadline_s=DEADLINE_S)


def _open_kubernetes(directory: Path) -> Store:
    from tests.contract import kubernetes_rig  # noqa: PLC0415

    return kubernetes_rig.open_store(directory)


def _make_namespace_of_kubernetes(store: Store, name: str) -> None:
    from tests.contract import kubernetes_rig  # noqa: PLC0415

    kubernetes_rig.make_namespace(store, name)


SERVER: Final = "server"
KUBERNETES: Final = "kubernetes"
OWN: Final = ("sqlite", "sqlite-inotify", "etcd")
"""Those that are podwire's own: nothing else writes to them."""

BACK_ENDS: dict[str, BackEnd] = {
    "sqlite": BackEnd(lambda directory: SqliteStore(directory / "store.db")),
    "sqlite-inotify": BackEnd(
        lambda directory: SqliteStore(directory / "store.db", open_waker=FileWaker)
    ),
    "etcd": BackEnd(_open_etcd),
    KUBERNETES: BackEnd(_open_kubernetes, _make_namespace_of_kubernetes),
    SERVER: BackEnd(open_server, _make_namespace_of_server),
}


def now_at(store: Store, kind: str = POLICIES) -> int:
    """Give the revision that a kind is at."""
    return store.list(kind)[1]


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


class Place:
    """Where one test has its objects: a namespace and names that no other test has, nor anybody else."""

    def __init__(self, store: Store, back_end: BackEnd) -> None:
        self._store = store
        self._back_end = back_end
        self._mark = secrets.token_hex(4)
        self.namespace = self.another_namespace()

    def another_namespace(self, name: str = "ns") -> str:
        """Make one more namespace; they are in the order of these names."""
        made = self.name(name)
        self._back_end.make_namespace(self._store, made)
        return made

    def name(self, name: str) -> str:
        """Give a name for an object without a namespace."""
        return f"t{self._mark}-{name}"

    def key(self, name: str) -> ObjectKey:
        """Name a policy."""
        return ObjectKey(POLICIES, self.namespace, name)

    def policy(
        self, name: str, value: object = 0, *, revision: int = 0, namespace: str = ""
    ) -> StoredObject:
        """Give a policy that carries a value."""
        key = ObjectKey(POLICIES, namespace or self.namespace, name)
        document = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": name, "namespace": key.namespace, "labels": {"value": str(value)}},
            "spec": {
                "podSelector": {"matchLabels": {"app": "web"}},
                "ingress": [{"ports": [{"port": 80}]}],
            },
        }
        return StoredObject(key=key, revision=revision, document=document)

    def workload(self, name: str) -> StoredObject:
        """Give a Workload."""
        return self._own(
            WORKLOAD.name, WORKLOADS, name, {"namePattern": "db-*", "labels": {"a": "b"}}
        )

    def pool(self, name: str) -> StoredObject:
        """Give an IPPool."""
        return self._own(IP_POOL.name, POOLS, name, {"cidr": "10.9.0.0/16"})

    def policies(self, namespace: str = "") -> list[StoredObject]:
        """List the policies of a namespace of this place."""
        return list(self._store.list(POLICIES, namespace or self.namespace)[0])

    def watch(self, after_revision: int | None = None) -> Watch:
        """Watch policies, from now on or after a revision."""
        revision = now_at(self._store) if after_revision is None else after_revision
        return self._store.watch({POLICIES: revision})

    def is_here(self, stored: StoredObject) -> bool:
        """Tell whether an object is of this place."""
        return stored.key.namespace == self.namespace or self._mark in stored.key.name

    def take(self, watch: Watch, count: int) -> list[StoreEvent]:
        """Read `count` changes of this place, or fail."""
        found: list[StoreEvent] = []
        deadline_s = time.monotonic() + DEADLINE_S
        while len(found) < count and time.monotonic() < deadline_s:
            found += self.more(watch, 0.2)
        assert len(found) == count
        return found

    def more(self, watch: Watch, timeout_s: float = 0.1) -> list[StoreEvent]:
        """Read what changed here, if anything did."""
        return [event for event in watch.next(timeout_s) if self.is_here(event.object)]

    def _own(self, kind: str, plural: str, name: str, spec: Mapping[str, Any]) -> StoredObject:
        unique = self.name(name)
        document = {
            "apiVersion": "podwire.io/v1",
            "kind": kind,
            "metadata": {"name": unique},
            "spec": dict(spec),
        }
        return StoredObject(key=ObjectKey(plural, "", unique), document=document)


def carries(found: object, wanted: object) -> bool:
    """Tell whether everything that was written is there, whatever a server has added."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        return all(name in found and carries(found[name], one) for name, one in wanted.items())
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(carries, found, wanted))
    return found == wanted


def value_of(stored: StoredObject | None) -> str:
    """Give the value that a policy carries."""
    assert stored is not None
    value: str = stored.document["metadata"]["labels"]["value"]
    return value
