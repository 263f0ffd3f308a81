"""An object that something else wrote into a store stops no other: it is named, stands for what was last read of it,
and comes back when it is put right."""

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from podwire.agent.duties.follower import KindList, StoreFollower
from podwire.agent.duties.keeper import Memory
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.duties.unreadable import Reading
from podwire.control.cluster.facts import encode_node
from podwire.control.cluster.published import Publication, encode_endpoints
from podwire.control.documents.apply import apply_documents, delete_object
from podwire.control.documents.damage import find_fault, read_object, stand_in
from podwire.control.identity.key import IdentityKey
from podwire.control.identity.known import make_object
from podwire.control.policy.reading import POLICY_KINDS, Unenforceable
from podwire.model.cluster import NodeFacts
from podwire.model.errors import PodwireError
from podwire.model.store import (
    ObjectKey,
    Revisions,
    Store,
    StoredObject,
    StoreEvent,
    UnreadableObject,
    value_of,
)
from podwire.store.etcd.store import EtcdStore
from podwire.store.remembered import RememberedObjects
from podwire.store.sqlite import SqliteStore
from tests.contract.etcd_rig import Etcd
from tests.contract.stores import key, make, now_at, take, until
from tests.fakes.store import since

PREFIX = "/podwire/v1/objects/"
POLICY_KEY = PREFIX + "networkpolicies/default/{}"
VALUE = '{"uid":"u","created":"","mark":"","document":%s}'
BAD_VALUES = {
    "empty": b"",
    "text": b"x",
    "no-object": b"[1]",
    "no-fields": b"{}",
    "wrong-type": b'{"uid":1,"created":"","mark":"","document":{}}',
    "document-is-text": (VALUE % '"x"').encode(),
    "document-is-cut": (VALUE % '{"spec":').encode(),
    "no-utf-8": (VALUE % '{"a":"B"}').encode().replace(b"B", b"\xff\xfe"),
    "half-a-surrogate": (VALUE % r'{"a":"\ud800"}').encode(),
    "very-deep": (VALUE % ("[" * 100_000)).encode(),
}
a_bad_value = pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)


@pytest.fixture
def own_etcd(etcd: Etcd) -> Etcd:
    """One for all, emptied: nobody here stops it."""
    etcd.wipe()
    return etcd


# ------------------------------------------------------------------ the store's part


@a_bad_value
def test_lists_and_watches_go_on_beside_what_cannot_be_read(
    own_etcd: Etcd, etcd_store: EtcdStore, value: bytes
) -> None:
    revision = now_at(etcd_store)
    etcd_store.create(make("a"))
    written = own_etcd.put(POLICY_KEY.format("b"), value)
    etcd_store.create(make("c"))
    found, _ = etcd_store.list("networkpolicies")
    assert [(stored.key.name, bool(stored.fault)) for stored in found] == [
        ("a", False),
        ("b", True),
        ("c", False),
    ]
    assert POLICY_KEY.format("b") in found[1].fault
    assert (found[1].document, found[1].revision) == ({}, written)
    with etcd_store.watch(since(revision, "networkpolicies")) as watch:
        assert [event.object for event in take(watch, 3)] == list(found)
    with pytest.raises(UnreadableObject, match="networkpolicies default/b") as caught:
        etcd_store.get(key("b"))
    assert "podwire apply" in caught.value.hint
    assert own_etcd.read(POLICY_KEY.format("b")) == value


@a_bad_value
def test_what_cannot_be_read_can_be_replaced_and_deleted(
    own_etcd: Etcd, etcd_store: EtcdStore, value: bytes
) -> None:
    own_etcd.put(POLICY_KEY.format("b"), value)
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "b", "namespace": "default"},
        "spec": {"podSelector": {}},
    }
    [done] = apply_documents(etcd_store, [policy])
    assert done.action == "configured"
    repaired = etcd_store.get(key("b"))
    assert repaired is not None
    assert repaired.uid
    assert repaired.created
    own_etcd.put(POLICY_KEY.format("b"), value)
    delete_object(etcd_store, key("b"))
    assert own_etcd.read(POLICY_KEY.format("b")) is None


@pytest.mark.parametrize(
    "name",
    ["networkpolicies/x", "networkpolicies/a/b/c", "networkpolicies/_/%61"],
    ids=["too-short", "too-long", "written-otherwise"],
)
def test_a_key_that_is_no_objects_is_named_as_it_is(
    own_etcd: Etcd, etcd_store: EtcdStore, name: str
) -> None:
    revision = now_at(etcd_store)
    own_etcd.put(PREFIX + name, (VALUE % "{}").encode())
    etcd_store.create(make("a", namespace=""))
    found, _ = etcd_store.list("networkpolicies")
    assert {(stored.key.name, bool(stored.fault)) for stored in found} == {
        ("a", False),
        (PREFIX + name, True),
    }
    [foreign] = [stored for stored in found if stored.fault]
    assert f"etcdctl del '{PREFIX}{name}'" in foreign.fault
    with etcd_store.watch(since(revision, "networkpolicies")) as watch:
        assert {stored.object.key for stored in take(watch, 2)} == {stored.key for stored in found}


def test_a_foreign_key_of_another_kind_is_none_of_a_watchs_business(
    own_etcd: Etcd, etcd_store: EtcdStore
) -> None:
    revision = now_at(etcd_store)
    own_etcd.put(PREFIX + "namespaces/x", b"x")
    etcd_store.create(make("a"))
    with etcd_store.watch(since(revision, "ippools", "networkpolicies")) as watch:
        assert [event.object.key for event in take(watch, 1)] == [key("a")]


def test_the_store_in_a_file_goes_on_too(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "store.db")) as store:
        store.create(make("a"))
        store.create(make("b"))
        with closing(sqlite3.connect(tmp_path / "store.db")) as other:
            other.execute("UPDATE object SET document = 'x' WHERE name = 'b'")
            other.commit()
        found, _ = store.list("networkpolicies")
        assert [(stored.key.name, bool(stored.fault)) for stored in found] == [
            ("a", False),
            ("b", True),
        ]
        with pytest.raises(UnreadableObject):
            store.get(key("b"))
        store.update(make("b", 7, revision=found[1].revision))
        repaired = store.get(key("b"))
        assert repaired is not None
        assert repaired.document == {"spec": {"v": 7}}


# ------------------------------------------------------------------ the followers' part


class Mirror:
    """Has what it is told."""

    def __init__(self) -> None:
        self.objects: dict[ObjectKey, Mapping[str, Any]] = {}
        self.unreadable: set[ObjectKey] = set()
        """Told beside what was last read of them."""
        self.closing: set[ObjectKey] = set()
        """Listed as policies that close."""
        self.away = ""

    def on_lists(self, lists: Sequence[KindList]) -> None:
        for listed in lists:
            for name in [name for name in self.objects if name.kind == listed.kind]:
                del self.objects[name]
            self.objects.update(
                (stored.key, stored.document)
                for stored in listed.objects
                if value_of(stored, Unenforceable) is None
            )
            self.closing = {
                stored.key
                for stored in listed.objects
                if value_of(stored, Unenforceable) is not None
            }

    def on_events(self, events: Sequence[StoreEvent], _revisions: Revisions) -> None:
        for event in events:
            stored = event.object
            self.unreadable.discard(stored.key)
            if event.deleted:
                self.objects.pop(stored.key, None)  # one that never could be read was not told
            elif find_fault(stored):
                self.unreadable.add(stored.key)
            else:
                self.objects[stored.key] = stored.document

    def on_away(self, error: PodwireError) -> None:
        self.away = error.message

    def on_back(self) -> None:
        pass


class Followed:
    """One running follower of one kind."""

    def __init__(
        self, store: Store, kind: str, memory: Memory | None = None, *, tell: bool = False
    ) -> None:
        self.mirror = Mirror()
        self.warnings: dict[str, str] = {}
        reading = Reading(read_object, stand_in, self._warn)
        self.follower = StoreFollower(
            "test",
            store,
            [kind],
            self.mirror,
            shared=SharedWatch(store, memory, reading=reading),
            tell_unreadable=tell,
        )

    @property
    def warning(self) -> str:
        """All that `podwire status` would show."""
        return " ".join(self.warnings.values())

    def _warn(self, name: str, message: str) -> None:
        self.warnings[name] = message
        if not message:
            del self.warnings[name]


@contextmanager
def followed(
    store: Store, kind: str, memory: Memory | None = None, *, tell: bool = False
) -> Iterator[Followed]:
    made = Followed(store, kind, memory, tell=tell)
    assert made.follower.load()
    made.follower.start()
    try:
        yield made
    finally:
        made.follower.stop()
    assert not made.mirror.away, "the follower gave up"


def _policy(kind: str, api: str, name: str) -> StoredObject:
    selector = "podSelector" if kind == "NetworkPolicy" else "endpointSelector"
    plural = {"NetworkPolicy": "networkpolicies", "CiliumNetworkPolicy": "ciliumnetworkpolicies"}
    spec: dict[str, Any] = {selector: {}}
    if kind == "CiliumNetworkPolicy":
        spec["ingress"] = [{}]
    return StoredObject(
        key=ObjectKey(plural[kind], "default", name),
        document={
            "apiVersion": api,
            "kind": kind,
            "metadata": {"name": name, "namespace": "default"},
            "spec": spec,
        },
    )


def _plain(plural: str, name: str, spec: Mapping[str, Any]) -> StoredObject:
    document = {"apiVersion": "podwire.io/v1", "metadata": {"name": name}, "spec": spec}
    return StoredObject(key=ObjectKey(plural, "", name), document=document)


def _node(number: int) -> StoredObject:
    facts = NodeFacts(name=f"n{number}", instance="i", epoch=1, addresses=())
    return StoredObject(key=ObjectKey("nodes", "", facts.name), document=encode_node(facts))


def _endpoints(number: int) -> StoredObject:
    publication = Publication(f"n{number}", 1, 1, {})
    return StoredObject(
        key=ObjectKey("nodeendpoints", "", f"n{number}"),
        document=encode_endpoints(publication, []),
    )


def _block(number: int) -> StoredObject:
    spec = {"cidr": f"10.{number}.0.0/26", "pool": "p", "node": "n", "epoch": 1, "kept": []}
    return _plain("ipblocks", f"10-{number}-0-0-26", spec)


def _address(number: int) -> StoredObject:
    spec = {"address": f"10.{number}.0.9", "pool": "p", "node": "n", "handle": {}}
    return _plain("ipaddresses", f"10-{number}-0-9", spec)


MAKERS: dict[str, Callable[[int], StoredObject]] = {
    "NetworkPolicy": lambda number: _policy("NetworkPolicy", "networking.k8s.io/v1", f"p{number}"),
    "CiliumNetworkPolicy": lambda number: _policy(
        "CiliumNetworkPolicy", "cilium.io/v2", f"p{number}"
    ),
    "Node": _node,
    "NodeEndpoints": _endpoints,
    "IPPool": lambda number: _plain("ippools", f"p{number}", {"cidr": f"10.{number}.0.0/16"}),
    "IPBlock": _block,
    "IPAddress": _address,
    "Identity": lambda number: make_object(1000 + number, IdentityKey((f"k8s:app=a{number}",), ())),
    "Namespace": lambda number: _plain("namespaces", f"ns{number}", {}),
}
BREAK: dict[str, Callable[[StoredObject], bytes]] = {
    "no-json": lambda _stored: b"{",
    "spec-is-a-list": lambda stored: _value({**stored.document, "spec": [1]}),
    "labels-are-a-number": lambda stored: _value(
        {**stored.document, "metadata": {"name": stored.key.name, "labels": 7}}
    ),
}


def _value(document: Mapping[str, Any]) -> bytes:
    return (VALUE % json.dumps(document)).encode()


def _changed(stored: StoredObject) -> dict[str, Any]:
    metadata = {**stored.document["metadata"], "annotations": {"changed": "yes"}}
    return {**stored.document, "metadata": metadata}


def _raw_key(stored: StoredObject) -> str:
    one = stored.key
    return f"{PREFIX}{one.kind}/{one.namespace or '_'}/{one.name}"


@pytest.mark.parametrize("break_it", BREAK.values(), ids=BREAK)
@pytest.mark.parametrize("make_one", MAKERS.values(), ids=MAKERS)
def test_one_unreadable_object_stands_for_what_it_was_and_stops_no_other(
    own_etcd: Etcd,
    etcd_store: EtcdStore,
    make_one: Callable[[int], StoredObject],
    break_it: Callable[[StoredObject], bytes],
) -> None:
    hit, never, later = make_one(1), make_one(2), make_one(3)
    etcd_store.create(hit)
    own_etcd.put(_raw_key(never), break_it(never))
    with followed(etcd_store, hit.key.kind) as one:
        objects = one.mirror.objects
        assert objects == {hit.key: hit.document}
        assert str(never.key) in one.warning
        is_policy = hit.key.kind in POLICY_KINDS
        assert one.mirror.closing == ({never.key} if is_policy else set())
        assert ("it closes" if is_policy else "it counts as absent") in one.warning
        own_etcd.put(_raw_key(hit), break_it(hit))
        etcd_store.create(later)
        until(lambda: later.key in objects)
        assert objects == {hit.key: hit.document, later.key: later.document}
        assert set(one.follower.unreadable.faults) == {hit.key, never.key}
        assert "what was last read of it stays in force" in one.warning
        assert f": podwire delete {hit.key.kind} {hit.key.name}" in one.warning

        one.follower.list_again()  # as after a gap: the list says no more than the watch
        own_etcd.put(_raw_key(later), _value(_changed(later)))
        until(lambda: objects.get(later.key) == _changed(later))
        assert objects[hit.key] == hit.document
        assert never.key not in objects

        own_etcd.put(_raw_key(hit), _value(_changed(hit)))
        etcd_store.delete(never.key)
        until(lambda: objects.get(hit.key) == _changed(hit))
        until(lambda: not one.warning)
        own_etcd.put(_raw_key(hit), break_it(hit))
        until(lambda: bool(one.warning))
        etcd_store.delete(hit.key)
        until(lambda: hit.key not in objects)
        until(lambda: not one.warning)


def test_what_was_last_read_outlives_a_restart(
    own_etcd: Etcd, etcd_store: EtcdStore, tmp_path: Path
) -> None:
    hit = MAKERS["NetworkPolicy"](1)
    etcd_store.create(hit)
    url = "etcd://x"
    path = tmp_path / "remembered.db"
    with (
        RememberedObjects(path, url) as memory,
        followed(etcd_store, hit.key.kind, memory) as one,
    ):
        own_etcd.put(_raw_key(hit), b"{")
        until(lambda: bool(one.warning))
    for _ in range(2):
        with (
            RememberedObjects(path, url) as memory,
            followed(etcd_store, hit.key.kind, memory, tell=True) as one,
        ):
            assert one.mirror.objects == {hit.key: hit.document}
            assert one.mirror.unreadable == {hit.key}  # told, so that lists of policies name it
            assert "stays in force" in one.warning


def test_many_unreadable_objects_are_counted_and_not_all_written_out(
    own_etcd: Etcd, etcd_store: EtcdStore
) -> None:
    for number in range(20):
        own_etcd.put(POLICY_KEY.format(f"x{number:02}"), b"x" * 10_000)
    with followed(etcd_store, "networkpolicies") as one:
        assert len(one.follower.unreadable.faults) == 20
        assert "12 more objects" in one.warning
        assert len(one.warnings) == 9
        assert len(one.warning) < 9 * 600
        for number in range(20):
            etcd_store.delete(key(f"x{number:02}"))
        until(lambda: not one.warnings)
