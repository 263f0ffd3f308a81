"""The agent's duty: endpoints follow their labels, what is in use is published, and a restart changes no number."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from podwire.agent.duties.identity import COLLECT_S, IdentityDuty
from podwire.control.endpoint.changes import EndpointChanges
from podwire.control.endpoint.queue import Level
from podwire.control.endpoint.states import DisconnectAccepted, State
from podwire.control.endpoint.table import Endpoint, EndpointTable
from podwire.control.identity.allocator import GIVEN_S, IdentityAllocator
from podwire.control.identity.collect import MARKED_S, NODES, UNUSED_S, read_holds
from podwire.control.identity.feed import IdentityFeed
from podwire.control.identity.filter import LabelFilter
from podwire.control.identity.known import KnownIdentities, object_key
from podwire.control.identity.resolver import IdentityResolver
from podwire.control.identity.sources import LabelSources
from podwire.journal.records import SqliteJournal
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import InvalidRequest, NotFound, Unavailable
from podwire.model.ids import EndpointId
from podwire.model.interfaces import EndpointConfig
from podwire.model.store import ObjectKey
from podwire.model.store.leases import IDENTITY_DUTY
from podwire.store.sqlite import SqliteStore
from tests.fakes.store import MemoryStore
from tests.unit.test_identity_resolver import bring, make_record, put_namespace, put_workload
from tests.waiting import wait_for


class FakeClock:
    """Time that stands still."""

    def boottime_ns(self) -> int:
        return 1

    def boot_id(self) -> str:
        return "b"


class Node:
    """The duty over the real table and journal; time moves by hand."""

    def __init__(self, store: MemoryStore, directory: Path, name: str = "n1") -> None:
        self.store = store
        self.now_s = 1_000_000.0
        self.table = EndpointTable()
        self.journal = SqliteJournal(directory / f"{name}.db")
        self.builds: list[str] = []
        self.allocator = IdentityAllocator(store, KnownIdentities(), clock=lambda: self.now_s)
        self.resolver = IdentityResolver(
            self.allocator, LabelSources(), LabelFilter.parse(), wait_s=0
        )
        self.duty = IdentityDuty(
            node_name=name,
            feed=IdentityFeed(self.resolver),
            table=self.table,
            facts=self.journal,
            changes=EndpointChanges(
                self.table, self.journal, self, self.resolver, threading.RLock()
            ),
            monotonic=lambda: self.now_s,
            now=lambda: datetime.fromtimestamp(self.now_s, UTC),
        )
        records = self.journal.list_records()
        self.duty.prepare(records)
        for record in records:
            self.table.insert(Endpoint(record, State.READY, FakeClock(), cause="restored"))

    def request(self, _endpoint_id: EndpointId, _level: Level, cause: str) -> None:
        """Take the place of the regenerator."""
        self.builds.append(cause)

    def run_due(self) -> bool:
        """Build nothing: what was asked for is what counts."""
        return False

    def add(self, number: int, pod: str = "web", **labels: str) -> EndpointRecord:
        resolution = self.resolver.resolve(bring(pod, **labels), (), "default")
        return self.insert(make_record(number, resolution))

    def insert(self, record: EndpointRecord) -> EndpointRecord:
        self.journal.write(record)
        self.table.insert(Endpoint(record, State.READY, FakeClock(), cause="added"))
        return record

    def record(self, number: int) -> EndpointRecord:
        endpoint = self.table.get(EndpointId(number))
        assert endpoint is not None
        return endpoint.record

    def hear(self) -> None:
        while self.duty.follower.step(0):
            pass

    def tick(self, after_s: float = 1.0) -> None:
        self.now_s += after_s
        self.hear()
        self.duty.tick()

    def close(self) -> None:
        self.duty.follower.stop()
        self.journal.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(MemoryStore(), tmp_path)
    yield made
    made.close()


def test_a_change_of_labels_ends_the_pause_between_ticks(node: Node) -> None:
    node.add(1, app="web")
    node.tick()
    before = node.record(1)
    node.duty._worker.start()  # the clock stands still, so its pause never ends by itself
    put_namespace(node.store, "default", team="a")
    node.hear()
    wait_for(lambda: node.record(1).identity != before.identity)
    node.duty.stop()


def holds(node: Node) -> frozenset[int]:
    return read_holds(node.store.list(NODES)[0])


def test_what_is_in_use_is_published_once(node: Node) -> None:
    number = node.add(1, app="web").identity
    node.tick()
    assert holds(node) == {number}
    revision = node.store.events[-1].revision
    node.tick()
    assert node.store.events[-1].revision == revision


def test_a_number_is_published_while_its_add_is_still_running(node: Node) -> None:
    number = node.resolver.resolve(bring("web"), (), "default").number
    node.tick()
    assert holds(node) == {number}
    node.tick(GIVEN_S + 1)
    assert holds(node) == frozenset()


def test_an_endpoint_follows_its_namespaces_labels(node: Node) -> None:
    old = node.add(1, app="web").identity
    node.tick()
    put_namespace(node.store, "default", team="a")
    node.tick()
    new = node.record(1)
    assert new.identity != old
    assert "k8s:io.cilium.k8s.namespace.labels.team=a" in new.labels
    assert list(node.journal.list_records()) == [new]
    assert node.builds == [f"labels changed: identity {old} -> {new.identity}"]
    assert {old, new.identity} <= holds(node) or old in node.allocator.known.in_use


def test_an_endpoint_follows_a_workload(node: Node) -> None:
    node.add(1, "web")
    put_workload(node.store, "w", "web", role="proxy")
    node.tick()
    assert "cni:role=proxy" in node.record(1).identity_labels


def test_an_endpoint_that_was_added_during_a_change_is_found(node: Node) -> None:
    resolution = node.resolver.resolve(bring("web"), (), "default")
    put_namespace(node.store, "default", team="a")
    node.tick()  # the change is over before the endpoint is in the table
    node.insert(make_record(1, resolution))
    node.tick()
    assert "k8s:io.cilium.k8s.namespace.labels.team=a" in node.record(1).identity_labels


def test_without_the_store_an_endpoint_keeps_its_identity_until_the_new_one_is_there(
    node: Node,
) -> None:
    old = node.add(1, app="web")
    node.tick()
    put_workload(node.store, "w", "web", role="proxy")
    node.hear()
    node.store.away = True
    for _ in range(3):
        with pytest.raises(Unavailable):
            node.duty.tick()
        node.now_s += 100
    assert node.record(1) == old
    node.store.away = False
    node.tick()
    assert node.record(1).identity != old.identity


def test_an_ending_endpoint_is_left_alone(node: Node) -> None:
    old = node.add(1)
    endpoint = node.table.get(EndpointId(1))
    assert endpoint is not None
    endpoint.report(DisconnectAccepted("DEL"))
    put_namespace(node.store, "default", team="a")
    node.tick()
    assert node.record(1) == old


def test_labels_are_changed_by_hand(node: Node) -> None:
    old = node.add(1, app="web")
    changed = node.duty.changes.change_labels(EndpointId(1), ["app=db", "tier=1"])
    assert changed.identity != old.identity
    assert node.record(1) == changed
    node.tick()
    assert node.record(1) == changed
    back = node.duty.changes.change_labels(EndpointId(1), ["app=web", "tier-"])
    assert back == old


def test_a_label_outside_the_identity_is_changed_without_a_build(node: Node) -> None:
    old = node.add(1, app="web")
    changed = node.duty.changes.change_labels(EndpointId(1), ["pod-template-hash=1"])
    assert changed.identity == old.identity
    assert "cni:pod-template-hash=1" in changed.labels
    assert node.builds == []


def test_refused_changes_change_nothing(node: Node) -> None:
    put_workload(node.store, "w", "web", role="proxy")
    node.hear()
    old = node.add(1)
    with pytest.raises(InvalidRequest, match="Workload object 'w'"):
        node.duty.changes.change_labels(EndpointId(1), ["ok=1", "role=x"])
    with pytest.raises(NotFound):
        node.duty.changes.change_labels(EndpointId(2), ["ok=1"])
    node.store.away = True
    with pytest.raises(Unavailable):
        node.duty.changes.change_labels(EndpointId(1), ["ok=1"])
    assert node.record(1) == old


def test_a_restart_without_the_store_keeps_every_number_and_label(tmp_path: Path) -> None:
    store = MemoryStore()
    node = Node(store, tmp_path)
    put_workload(store, "w", "web", role="proxy")
    node.hear()
    before = [node.add(1, "web"), node.add(2, "db", app="db")]
    node.tick()
    node.close()
    store.away = True

    again = Node(store, tmp_path)
    assert [again.record(1), again.record(2)] == before
    again.now_s += 1
    with pytest.raises(Unavailable):
        again.duty.tick()
    assert [again.record(1), again.record(2)] == before
    assert again.resolver.resolve(bring("db", app="db"), (), "default").number == before[1].identity
    store.away = False
    again.tick()
    assert [again.record(1), again.record(2)] == before
    again.close()


def test_numbers_in_use_are_made_again_when_the_store_lost_them(node: Node) -> None:
    number = node.add(1, app="web").identity
    node.tick()
    node.store.delete(object_key(number))
    node.tick()
    assert node.store.get(object_key(number)) is not None
    assert node.allocator.counts.remade == 1


def test_a_namespace_with_pods_is_made_again_when_the_store_lost_it(node: Node) -> None:
    put_namespace(node.store, "default", team="web")
    put_namespace(node.store, "empty")
    node.tick()
    record = node.add(1, app="web")
    for name in ("default", "empty"):
        node.store.delete(ObjectKey("namespaces", "", name))
    node.tick()
    assert node.store.get(ObjectKey("namespaces", "", "default")) is None, "somebody deleted it"
    node.duty.follower.list_again()
    node.tick()
    found = node.store.get(ObjectKey("namespaces", "", "default"))
    assert found is not None
    assert found.document["metadata"]["labels"]["team"] == "web"
    assert node.store.get(ObjectKey("namespaces", "", "empty")) is None
    node.tick()
    assert node.record(1) == record


def test_an_unused_number_is_collected_in_the_end(node: Node) -> None:
    number = node.resolver.resolve(bring("web"), (), "default").number
    for _ in range(int((GIVEN_S + UNUSED_S + MARKED_S) / COLLECT_S) + 5):
        node.tick(COLLECT_S)
    assert node.allocator.known.facts() == []
    assert node.store.get(object_key(number)) is not None  # it rests
    assert node.add(1).identity == number
    assert [fact.number for fact in node.allocator.known.facts()] == [number]


def test_one_agent_collects_and_another_follows_when_it_ends(tmp_path: Path) -> None:
    store = MemoryStore()
    one, other = Node(store, tmp_path, "n1"), Node(store, tmp_path, "n2")
    one.tick(COLLECT_S)
    other.tick(COLLECT_S)
    assert dict(store.leases().holders(IDENTITY_DUTY)) == {IDENTITY_DUTY: "n1"}
    one.duty.stop()
    other.tick(COLLECT_S)
    assert dict(store.leases().holders(IDENTITY_DUTY)) == {IDENTITY_DUTY: "n2"}


def test_what_node_endpoints_name_is_not_held_too(node: Node) -> None:
    number = int(node.add(1).identity)
    node.duty.named = lambda: frozenset({number})
    node.tick()
    assert number not in read_holds(node.store.list(NODES)[0])
    node.duty.named = frozenset
    node.tick()
    assert number in read_holds(node.store.list(NODES)[0])


def test_two_agents_on_one_file_agree(tmp_path: Path) -> None:
    stores = [SqliteStore(tmp_path / "store.db") for _ in range(2)]
    nodes = [
        Node(store, tmp_path, name)  # type: ignore[arg-type]  # the real store in place of the fake
        for store, name in zip(stores, ("n1", "n2"), strict=True)
    ]
    try:
        numbers = [node.add(1, app="web").identity for node in nodes]
        assert len(set(numbers)) == 1
        for one in nodes:
            one.tick()
        assert [stored.key.name for stored in stores[0].list(NODES)[0]] == ["n1", "n2"]
        nodes[1].add(2, app="db")
        nodes[0].hear()
        assert {fact.number for fact in nodes[0].allocator.known.facts()} == {
            fact.number for fact in nodes[1].allocator.known.facts()
        }
    finally:
        for one in nodes:
            one.close()
        for store in stores:
            store.close()


def test_a_number_that_a_row_still_has_is_held_back(node: Node) -> None:
    old = node.add(1, app="web").identity
    endpoint = node.table.get(EndpointId(1))
    assert endpoint is not None
    endpoint.config = EndpointConfig(identity=old)
    node.tick()
    node.duty.changes.change_labels(EndpointId(1), ["app=db"])
    node.tick(GIVEN_S + 1)  # the build has not happened, or fails
    assert old in holds(node)
    endpoint.config = EndpointConfig(identity=node.record(1).identity)
    node.tick(GIVEN_S + 1)
    assert holds(node) == {node.record(1).identity}
