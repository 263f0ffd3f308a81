"""From what an endpoint brings to its labels and identity, with namespaces, Workloads and a store that goes away."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from podwire.cni.labels import complete_labels
from podwire.control.identity.allocator import IdentityAllocator
from podwire.control.identity.describe import describe_identities
from podwire.control.identity.feed import IdentityFeed
from podwire.control.identity.filter import LabelFilter
from podwire.control.identity.key import IdentityKey, NumberSpace, convert_ports
from podwire.control.identity.known import KnownIdentities, object_key
from podwire.control.identity.own_labels import change_own_labels
from podwire.control.identity.resolver import IdentityResolver, Resolution
from podwire.control.identity.sources import NAMESPACES, WORKLOADS, LabelSources, SourceChange
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import Cancelled, InvalidRequest, Unavailable
from podwire.model.identity import NamedPort
from podwire.model.request import NamedPort as RequestedPort
from podwire.model.store import ObjectKey, StoredObject
from tests.fakes import records
from tests.fakes.followers import follow_identities
from tests.fakes.store import MemoryStore
from tests.waiting import wait_for

HTTP = NamedPort("http", 6, 80)


class Agent:
    """Resolver and feed of one agent."""

    def __init__(self, store: MemoryStore, *patterns: str, wait_s: float = 0.0) -> None:
        self.store = store
        self.sources = LabelSources()
        self.allocator = IdentityAllocator(store, KnownIdentities())
        self.resolver = IdentityResolver(
            self.allocator, self.sources, LabelFilter.parse(patterns), wait_s=wait_s
        )
        self.feed = IdentityFeed(self.resolver)
        self.follower = follow_identities(store, self.feed)

    def sync(self) -> None:
        while self.follower.step(0):
            pass

    def resolve(self, pod: str = "web", *, namespace: str = "default", **labels: str) -> Resolution:
        return self.resolver.resolve(bring(pod, namespace, **labels), (), namespace)


def bring(pod: str, namespace: str = "default", **labels: str) -> tuple[str, ...]:
    """Give the labels of a request."""
    own = tuple(f"cni:{key}={value}" for key, value in labels.items())
    return complete_labels(own, network="net", namespace=namespace, pod=pod)


def synced(store: MemoryStore, *patterns: str, wait_s: float = 0.0) -> Agent:
    agent = Agent(store, *patterns, wait_s=wait_s)
    agent.sync()
    return agent


def put(store: MemoryStore, kind: str, name: str, body: Mapping[str, Any]) -> None:
    key = ObjectKey(kind, "", name)
    old = store.get(key)
    if old is None:
        store.create(StoredObject(key=key, document=body))
    else:
        store.update(StoredObject(key=key, revision=old.revision, document=body))


def put_namespace(store: MemoryStore, name: str, **labels: str) -> None:
    put(store, NAMESPACES, name, {"metadata": {"name": name, "labels": labels}})


def put_workload(
    store: MemoryStore, name: str, pattern: str, network: str = "", **labels: str
) -> None:
    spec = {"namePattern": pattern, "network": network, "labels": labels}
    put(store, WORKLOADS, name, {"metadata": {"name": name}, "spec": spec})


def make_record(number: int, resolution: Resolution, namespace: str = "default") -> EndpointRecord:
    return resolution.write_into(records.make_record(number, namespace=namespace))


def test_replicas_have_one_identity_and_names_of_their_own() -> None:
    agent = synced(MemoryStore())
    one, other = agent.resolve("web-1", app="web"), agent.resolve("web-2", app="web")
    assert one.number == other.number
    assert one.labels != other.labels
    assert one.facts.labels == (
        "cni:app=web",
        "cni:podwire.io/network=net",
        "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=default",
        "k8s:io.kubernetes.pod.namespace=default",
    )


@pytest.mark.parametrize("what", ["label", "namespace", "ports"])
def test_what_differs_for_policy_has_another_identity(what: str) -> None:
    agent = synced(MemoryStore())
    numbers = {agent.resolve(app="web").number}
    numbers.add(
        {
            "label": lambda: agent.resolve(app="db"),
            "namespace": lambda: agent.resolve(namespace="prod", app="web"),
            "ports": lambda: agent.resolver.resolve(bring("x", app="web"), [HTTP], "default"),
        }[what]().number
    )
    assert len(numbers) == 2


def test_ports_are_converted_and_sorted() -> None:
    ports = [
        RequestedPort("dns", 53, "UDP"),
        RequestedPort("a", 1),
        RequestedPort("dns", 53, "UDP"),
    ]
    assert convert_ports(ports) == (NamedPort("a", 6, 1), NamedPort("dns", 17, 53))


def test_a_namespace_is_made_on_first_use() -> None:
    store = MemoryStore()
    synced(store).resolve(namespace="prod")
    stored = store.get(ObjectKey(NAMESPACES, "", "prod"))
    assert stored is not None
    assert stored.document["metadata"]["labels"] == {"kubernetes.io/metadata.name": "prod"}


def test_a_namespace_that_somebody_else_makes_at_the_same_moment_is_used() -> None:
    store = MemoryStore()
    agent = synced(store)

    def be_faster(new: StoredObject) -> None:
        store.before_create = lambda _new: None
        put_namespace(store, new.key.name, team="a")

    store.before_create = be_faster
    found = agent.resolve(namespace="prod")
    assert "k8s:io.cilium.k8s.namespace.labels.team=a" in found.facts.labels


def test_a_known_key_needs_no_call_and_survives_the_store() -> None:
    store = MemoryStore()
    agent = synced(store)
    number = agent.resolve(app="web").number
    store.away = True
    assert agent.resolve("web-2", app="web").number == number
    with pytest.raises(Unavailable, match="away"):
        agent.resolve(app="db")
    with pytest.raises(Unavailable, match="away"):
        agent.resolve(namespace="new", app="web")
    assert agent.allocator.counts.unavailable == 2


def test_nothing_is_resolved_before_workloads_are_known() -> None:
    store = MemoryStore()
    put_workload(store, "w", "web*", role="proxy")
    agent = Agent(store)
    with pytest.raises(Unavailable, match="not been read"):
        agent.resolve()
    agent.sync()
    assert "cni:role=proxy" in agent.resolve().labels


def test_an_add_waits_for_the_store_and_goes_on_when_it_is_back() -> None:
    store = MemoryStore()
    agent = synced(store, wait_s=120)
    store.away = True
    found: list[Resolution] = []
    thread = threading.Thread(target=lambda: found.append(agent.resolve(app="web")))
    thread.start()
    wait_for(lambda: agent.allocator.counts.waits, "the ADD to wait")
    store.away = False
    agent.resolver.store_came_back()
    thread.join(60)
    assert len(found) == 1


def test_an_add_whose_caller_goes_away_stops_waiting() -> None:
    store = MemoryStore()
    agent = synced(store, wait_s=20)
    store.away = True
    with pytest.raises(Cancelled):
        agent.resolver.resolve(bring("web"), (), "default", cancelled=lambda: True)


def test_exhaustion_is_not_waited_for() -> None:
    agent = synced(MemoryStore(), wait_s=60)
    agent.allocator.space = NumberSpace(70_000, 1)
    agent.resolve(app="web")
    with pytest.raises(Unavailable, match="all its candidate numbers"):
        agent.resolve(app="db")


WORKLOAD_CASES: list[tuple[str, str, str, str, bool]] = [
    # what is shown, pattern, network, pod, whether it fits
    ("exact", "proxy", "", "proxy", True),
    ("another", "proxy", "", "proxy2", False),
    ("glob", "web-*", "", "web-1", True),
    ("case counts", "Web*", "", "web", False),
    ("one character", "web-?", "", "web-1", True),
    ("set", "web-[12]", "", "web-3", False),
    ("no pattern", "", "", "anything", True),
    ("network", "*", "net", "web", True),
    ("another network", "*", "other", "web", False),
]


@pytest.mark.parametrize(
    ("pattern", "network", "pod", "fits"),
    [case[1:] for case in WORKLOAD_CASES],
    ids=[case[0] for case in WORKLOAD_CASES],
)
def test_a_workload_labels_containers_by_name_and_network(
    pattern: str, network: str, pod: str, fits: bool
) -> None:
    store = MemoryStore()
    put_workload(store, "w", pattern, network, role="proxy")
    assert ("cni:role=proxy" in synced(store).resolve(pod).facts.labels) is fits


def test_a_workloads_label_replaces_the_networks_and_the_later_name_wins() -> None:
    store = MemoryStore()
    put_workload(store, "b", "*", role="two")
    put_workload(store, "a", "*", role="one", extra="x", **{"podwire.io/name": "forged"})
    labels = synced(store).resolve("web", role="zero").labels
    assert [label for label in labels if label.startswith("cni:")] == [
        "cni:extra=x",
        "cni:podwire.io/name=web",
        "cni:podwire.io/network=net",
        "cni:role=two",
    ]


def test_a_change_of_a_namespaces_labels_affects_its_endpoints_only() -> None:
    store = MemoryStore()
    agent = synced(store)
    records = [
        make_record(1, agent.resolve(app="web")),
        make_record(2, agent.resolve(namespace="prod", app="web"), "prod"),
    ]
    agent.sync()
    agent.feed.take_doubt()
    put_namespace(store, "prod", team="a")
    agent.sync()
    doubt = agent.feed.take_doubt()
    assert doubt.change == SourceChange(frozenset({"prod"}))
    [changed] = agent.resolver.affected([record for record in records if doubt.may_touch(record)])
    assert changed is records[1]
    old = changed.identity
    resolved = agent.resolver.resolve_again(changed)
    assert resolved.number != old
    assert agent.allocator.known.get(old) is not None
    assert agent.resolver.affected([make_record(2, resolved, "prod")]) == []


def test_a_namespaces_label_outside_the_filter_changes_labels_and_no_identity() -> None:
    store = MemoryStore()
    agent = synced(store, "!io.cilium.k8s.namespace.labels.note")
    record = make_record(1, agent.resolve())
    put_namespace(store, "default", note="hello")
    agent.sync()
    [changed] = agent.resolver.affected([record])
    resolved = agent.resolver.resolve_again(changed)
    assert resolved.number == record.identity
    assert "k8s:io.cilium.k8s.namespace.labels.note=hello" in resolved.labels


def test_a_deleted_namespace_leaves_its_pods_as_they_are() -> None:
    store = MemoryStore()
    put_namespace(store, "prod", team="a")
    agent = synced(store)
    record = make_record(1, agent.resolve(namespace="prod"), "prod")
    store.delete(ObjectKey(NAMESPACES, "", "prod"))
    agent.sync()
    assert agent.resolver.affected([record]) == []


def test_a_workload_that_comes_changes_or_goes_affects_its_containers() -> None:
    store = MemoryStore()
    agent = synced(store)
    record, other = make_record(1, agent.resolve("web")), make_record(2, agent.resolve("db"))
    plain = record.identity
    for step in ("come", "change", "go"):
        if step == "go":
            store.delete(ObjectKey(WORKLOADS, "", "w"))
        else:
            put_workload(store, "w", "web", role=step)
        agent.sync()
        assert agent.resolver.affected([record, other]) == [record]
        record = make_record(1, agent.resolver.resolve_again(record))
    assert record.identity == plain


def test_without_the_store_an_affected_endpoint_keeps_its_identity() -> None:
    store = MemoryStore()
    agent = synced(store)
    record = make_record(1, agent.resolve())
    put_namespace(store, "default", team="a")
    agent.sync()
    store.away = True
    with pytest.raises(Unavailable):
        agent.resolver.resolve_again(record)


def test_after_a_restart_without_the_store_labels_and_numbers_are_what_they_were() -> None:
    store = MemoryStore()
    put_namespace(store, "default", team="a")
    put_workload(store, "w", "web*", role="proxy")
    before = synced(store)
    record = make_record(1, before.resolver.resolve(bring("web"), [HTTP], "default"))
    store.away = True

    after = Agent(store)
    after.sources.load(before.sources.dump())
    after.resolver.adopt(record)
    assert after.resolver.affected([record]) == []
    again = after.resolver.resolve(bring("web-2"), [HTTP], "default")
    assert again.number == record.identity


def test_a_changed_filter_never_gives_an_old_number_another_meaning() -> None:
    store = MemoryStore()
    record = make_record(1, synced(store).resolve(app="web", version="1"))
    store.away = True
    after = Agent(store, "!version")
    after.sources.load(synced_dump(store))
    after.resolver.adopt(record)
    known = after.allocator.known.get(record.identity)
    assert known is not None
    assert "cni:version=1" in known.key.labels
    assert after.resolver.affected([record]) == [record]
    store.away = False
    after.sync()
    assert after.resolver.resolve_again(record).number != record.identity


def synced_dump(store: MemoryStore) -> str:
    """Give what an agent remembers of a store."""
    store.away = False
    text = synced(store).sources.dump()
    store.away = True
    return text


@pytest.mark.parametrize("text", ["", "{", '{"namespaces": 7}', "[]"], ids=repr)
def test_a_memory_that_cannot_be_read_is_none(text: str) -> None:
    sources = LabelSources()
    sources.load(text)
    assert not sources.is_complete


def test_a_number_that_the_store_gave_to_others_is_replaced() -> None:
    store = MemoryStore()
    agent = synced(store)
    record = make_record(1, agent.resolve(app="web"))
    agent.sync()
    agent.feed.take_doubt()
    store.delete(object_key(record.identity))
    assert synced(store).allocator._claim(record.identity, IdentityKey(("cni:other=1",)))
    agent.sync()
    assert agent.feed.take_doubt().everybody
    assert agent.resolver.affected([record]) == [record]
    assert agent.resolver.resolve_again(record).number != record.identity


def test_after_a_compaction_everything_is_listed_again() -> None:
    store = MemoryStore()
    agent = synced(store)
    put_namespace(store, "prod", team="a")
    store.compact()
    put_namespace(store, "test", team="b")
    agent.sync()
    assert agent.sources.knows_namespace("prod")
    assert agent.sources.knows_namespace("test")
    assert agent.feed.take_doubt().everybody


def test_labels_that_nobody_may_write_are_left_out() -> None:
    store = MemoryStore()
    labels = {"good": "1", "bad key": "1", "bad": "a;b", "number": 1}
    put(store, NAMESPACES, "prod", {"metadata": {"labels": labels}})
    put(store, NAMESPACES, "odd", {"metadata": 7})
    put(store, WORKLOADS, "odd", {"spec": [1]})
    assert [
        one for one in synced(store).sources.effective((), "prod") if "metadata.name" not in one
    ] == [
        "k8s:io.cilium.k8s.namespace.labels.good=1",
        "k8s:io.kubernetes.pod.namespace=prod",
    ]


CHANGES: list[tuple[str, list[str], list[str]]] = [
    ("set", ["tier=db"], ["app=web", "tier=db"]),
    ("change", ["app=db"], ["app=db"]),
    ("take away", ["app-"], []),
    ("take away what is not there", ["nothing-"], ["app=web"]),
    ("with its source", ["cni:tier=db", "cni:app-"], ["tier=db"]),
    ("empty value", ["app="], ["app="]),
    ("a value that ends with a dash is none", ["a-b=c"], ["a-b=c", "app=web"]),
    ("twice the same", ["a=1", "a=1"], ["a=1", "app=web"]),
    ("nothing", [], ["app=web"]),
]


@pytest.mark.parametrize(
    ("changes", "expected"), [case[1:] for case in CHANGES], ids=[case[0] for case in CHANGES]
)
def test_labels_are_changed_by_hand(changes: list[str], expected: list[str]) -> None:
    own = bring("web", app="web")
    kept = [label for label in own if label != "cni:app=web"]
    wanted = {*kept, *(f"cni:{one}" for one in expected)}
    assert set(change_own_labels(own, changes, lambda _key: "")) == wanted


REFUSED = [
    "reserved:host=",
    "k8s:app=web",
    "k8s:app-",
    "podwire.io/name=forged",
    "podwire.io/network-",
    "io.kubernetes.pod.namespace=kube-system",
    "cni:io.cilium.k8s.namespace.labels.team=a",
    "a b=c",
    "a=b;c",
    "app",
    "=x",
    "-",
    "",
    "a=-",
    "role=other",
    "role-",
]


@pytest.mark.parametrize("change", REFUSED, ids=repr)
def test_labels_that_are_not_ones_own_cannot_be_changed(change: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        change_own_labels(bring("web"), ["ok=1", change], lambda key: "w" if key == "role" else "")
    assert [fault.path for fault in raised.value.faults] == ["labels[1]"]


def test_contradicting_changes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        change_own_labels((), ["a=1", "a=2"], lambda _key: "")
    with pytest.raises(InvalidRequest, match="more than"):
        change_own_labels((), ["a=1"] * 257, lambda _key: "")


def test_the_workload_of_a_label_is_named() -> None:
    store = MemoryStore()
    put_workload(store, "a", "web", role="one")
    put_workload(store, "b", "web", role="two")
    sources = synced(store).sources
    assert sources.workload_of(bring("web"), "default", "role") == "b"
    assert sources.workload_of(bring("db"), "default", "role") == ""


def test_identities_are_described_with_who_has_them() -> None:
    store = MemoryStore()
    agent = synced(store)
    record = make_record(7, agent.resolver.resolve(bring("web"), [HTTP], "default"))
    idle = agent.resolve(app="idle")
    agent.allocator._claim(300, IdentityKey(("cni:app=fixed",)))
    rows = {
        identity.id: identity for identity in describe_identities(agent.allocator.known, [record])
    }
    assert rows[1].labels == ("reserved:host",)
    assert rows[1].source == "reserved"
    assert rows[300].source == "fixed"
    web = rows[record.identity]
    assert (web.named_ports, web.endpoint_ids, web.state) == (("http:TCP/80",), (7,), "used")
    assert (rows[idle.number].endpoints, rows[idle.number].state) == (0, "known")
