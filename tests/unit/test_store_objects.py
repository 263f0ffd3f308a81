"""What documents may say, and what applying them does: refused whole or done whole, and nothing is written twice."""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from podwire.control.documents import apply as applying
from podwire.control.documents.apply import (
    apply_documents,
    decode_all,
    delete_object,
    identify_all,
    put_object,
)
from podwire.control.documents.kinds import decode, identify, make_key, show_document
from podwire.model.errors import Conflict, InvalidRequest, NotFound, StorageFailure
from podwire.model.store import ObjectKey, StoredObject
from podwire.model.store.kinds import KINDS, find_kind, kind_of_document, kind_of_plural
from podwire.store.sqlite import SqliteStore
from tests.fakes.store import since
from tests.unit.policies import (
    cidr_group,
    cilium_policy,
    namespace_object,
    network_policy,
    workload,
)

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with contextlib.closing(SqliteStore(tmp_path / "store.db")) as opened:
        yield opened


def revision_of(store: SqliteStore) -> int:
    return store.list("workloads")[1]


# ------------------------------------------------------------------ kinds

WORDS = {
    "networkpolicies": "netpol networkpolicy networkpolicies NetworkPolicy NETPOL",
    "ciliumnetworkpolicies": "cnp ciliumnetworkpolicy CiliumNetworkPolicy",
    "ciliumclusterwidenetworkpolicies": "ccnp CiliumClusterwideNetworkPolicy",
    "ciliumcidrgroups": "ccg CiliumCIDRGroup ciliumcidrgroups",
    "namespaces": "ns namespace Namespace",
    "workloads": "workload Workload",
    "identities": "identity Identity",
}


@pytest.mark.parametrize(
    ("word", "plural"), [(word, plural) for plural in WORDS for word in WORDS[plural].split()]
)
def test_every_word_for_a_kind_finds_it(word: str, plural: str) -> None:
    found = find_kind(word)
    assert found is not None
    assert found.plural == plural
    assert kind_of_plural(plural) is found


def test_no_word_means_two_kinds() -> None:
    words = [word for kind in KINDS for word in set(kind.words)]
    assert len(words) == len(set(words))
    assert find_kind("deployments") is None
    assert kind_of_document("v1", "NetworkPolicy") is None


def test_a_key_is_made_of_what_people_say() -> None:
    assert make_key("netpol", "", "a") == ObjectKey("networkpolicies", "default", "a")
    assert make_key("cnp", "x", "a") == ObjectKey("ciliumnetworkpolicies", "x", "a")
    assert make_key("ns", "", "a") == ObjectKey("namespaces", "", "a")
    with pytest.raises(InvalidRequest, match="have no namespace"):
        make_key("ccnp", "x", "a")
    with pytest.raises(InvalidRequest, match="no such kind") as caught:
        make_key("deployments", "", "a")
    assert "networkpolicies" in caught.value.hint


# ------------------------------------------------------------------ documents

GOOD: dict[str, tuple[dict[str, Any], ObjectKey]] = {
    "NetworkPolicy": (network_policy(), ObjectKey("networkpolicies", "default", "web")),
    "without a namespace": (
        network_policy(namespace=None),
        ObjectKey("networkpolicies", "default", "web"),
    ),
    "CiliumNetworkPolicy": (
        cilium_policy(namespace="shop"),
        ObjectKey("ciliumnetworkpolicies", "shop", "web"),
    ),
    "clusterwide": (
        cilium_policy(namespace=None),
        ObjectKey("ciliumclusterwidenetworkpolicies", "", "web"),
    ),
    "CiliumCIDRGroup": (cidr_group(), ObjectKey("ciliumcidrgroups", "", "office")),
    "Namespace": (namespace_object("shop", team="a"), ObjectKey("namespaces", "", "shop")),
    "Workload": (workload(network="podwire"), ObjectKey("workloads", "", "web")),
    "a dotted name": (
        network_policy("a.b-c.d"),
        ObjectKey("networkpolicies", "default", "a.b-c.d"),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_document_is_taken_and_taken_again_as_it_was_stored(name: str) -> None:
    document, key = GOOD[name]
    before = copy.deepcopy(document)
    draft = decode(document)
    assert document == before, "what is given is not changed"
    assert draft.key == key
    again = decode(draft.document)
    assert again == draft
    assert identify(document) == key


def test_what_kubernetes_owns_is_left_out() -> None:
    document = network_policy()
    document["status"] = {"conditions": []}
    document["metadata"] |= {
        "uid": "x",
        "resourceVersion": "7",
        "creationTimestamp": None,
        "managedFields": [{}],
        "ownerReferences": [{}],
        "labels": {"a": "b"},
        "annotations": {"note": "kept"},
    }
    stored = decode(document).document
    assert stored["metadata"] == {
        "name": "web",
        "namespace": "default",
        "labels": {"a": "b"},
        "annotations": {"note": "kept"},
    }
    assert set(stored) == {"apiVersion", "kind", "metadata", "spec"}
    namespace = namespace_object("shop") | {"spec": {"finalizers": ["x"]}, "status": {}}
    assert set(decode(namespace).document) == {"apiVersion", "kind", "metadata"}


def test_a_namespace_carries_its_name_as_a_label() -> None:
    stored = decode(namespace_object("shop", team="a")).document
    assert stored["metadata"]["labels"] == {"team": "a", "kubernetes.io/metadata.name": "shop"}


def test_an_older_version_of_a_kind_is_stored_as_today_s() -> None:
    document = cidr_group() | {"apiVersion": "cilium.io/v2alpha1"}
    assert decode(document).document["apiVersion"] == "cilium.io/v2"


def test_the_namespace_that_is_asked_for_is_that_of_whoever_names_none() -> None:
    assert decode(network_policy(namespace=None), namespace="x").key.namespace == "x"
    assert decode(network_policy(namespace="x"), namespace="x").key.namespace == "x"
    assert decode(cidr_group(), namespace="x").key.namespace == ""
    with pytest.raises(InvalidRequest, match="not 'y' as was asked for"):
        decode(network_policy(namespace="x"), namespace="y")


def put(path: str, value: Any) -> Change:
    """Give a change that sets a field of metadata, spec or the document itself."""

    def change(document: dict[str, Any]) -> None:
        *parts, last = path.split("/")
        for part in parts:
            document = document[part]
        document[last] = value

    return change


def drop(name: str) -> Change:
    return lambda document: document.pop(name)


BAD: dict[str, tuple[dict[str, Any], Change, str, str]] = {
    # document, what is changed, where the fault is, what it says
    "no apiVersion": (network_policy(), drop("apiVersion"), "apiVersion", "is missing"),
    "no kind": (network_policy(), drop("kind"), "kind", "is missing"),
    "a kind that is a number": (network_policy(), put("kind", 7), "kind", "not text"),
    "an unknown kind": (network_policy(), put("kind", "Pod"), "kind", "not one of Namespace"),
    "an unknown group": (
        network_policy(),
        put("apiVersion", "v1"),
        "apiVersion",
        "is of networking",
    ),
    "another case": (network_policy(), put("kind", "networkpolicy"), "kind", "not one of"),
    "a kind that agents make": (
        {"apiVersion": "podwire.io/v1", "kind": "Identity", "metadata": {"name": "70000"}},
        lambda _: None,
        "kind",
        "agents make these",
    ),
    "no metadata": (network_policy(), drop("metadata"), "metadata", "not an object with a name"),
    "metadata that is a list": (network_policy(), put("metadata", []), "metadata", "not an object"),
    "no name": (network_policy(), put("metadata", {}), "metadata.name", "is missing"),
    "a generated name": (
        network_policy(),
        put("metadata", {"generateName": "a-"}),
        "metadata.name",
        "generateName is not supported",
    ),
    "a name in capitals": (network_policy("Web"), lambda _: None, "metadata.name", "not a name"),
    "a name with two dots": (network_policy("a..b"), lambda _: None, "metadata.name", "not a name"),
    "a name that is a path": (
        network_policy("../a"),
        lambda _: None,
        "metadata.name",
        "not a name",
    ),
    "a name too long": (network_policy("a" * 254), lambda _: None, "metadata.name", "not a name"),
    "a name that is a number": (
        network_policy(),
        put("metadata/name", 5),
        "metadata.name",
        "not text",
    ),
    "a namespace with a dot": (
        network_policy(namespace="a.b"),
        lambda _: None,
        "metadata.namespace",
        "not a name",
    ),
    "a Namespace with a dot": (
        namespace_object("a.b"),
        lambda _: None,
        "metadata.name",
        "not a name",
    ),
    "a Namespace too long": (
        namespace_object("a" * 64),
        lambda _: None,
        "metadata.name",
        "not a name",
    ),
    "a Namespace of another name": (
        namespace_object("a"),
        put("metadata/labels", {"kubernetes.io/metadata.name": "b"}),
        "metadata.labels['kubernetes.io/metadata.name']",
        "not the namespace's name",
    ),
    "a namespace where there is none": (
        cidr_group(),
        put("metadata/namespace", "x"),
        "metadata.namespace",
        "have no namespace",
    ),
    "a label's key": (
        network_policy(),
        put("metadata/labels", {"a b": "c"}),
        "metadata.labels",
        "not a label key",
    ),
    "a label's value": (
        network_policy(),
        put("metadata/labels", {"a": "-b"}),
        "metadata.labels.a",
        "not a label value",
    ),
    "a label that is a number": (
        network_policy(),
        put("metadata/labels", {"a": 1}),
        "metadata.labels.a",
        "quote it",
    ),
    "labels that are a list": (
        network_policy(),
        put("metadata/labels", ["a"]),
        "metadata.labels",
        "not an object",
    ),
    "an annotation that is a number": (
        network_policy(),
        put("metadata/annotations", {"a": 1}),
        "metadata.annotations.a",
        "not text",
    ),
    "annotations without end": (
        network_policy(),
        put("metadata/annotations", {"a": "x" * 300_000}),
        "metadata.annotations",
        "more than",
    ),
    "an unknown field": (network_policy(), put("specc", {}), "specc", "unknown field"),
    "an unknown field of a Namespace": (namespace_object("a"), put("x", 1), "x", "unknown field"),
    "an unknown field of a Workload": (workload(), put("specs", []), "specs", "unknown field"),
    "no spec": (network_policy(), drop("spec"), "spec", "not an object"),
    "an unknown field of the spec": (
        network_policy(ingres=[]),
        lambda _: None,
        "spec.ingres",
        "unknown",
    ),
    "a port of a policy": (
        network_policy(ingress=[{"ports": [{"port": 70000}]}]),
        lambda _: None,
        "spec.ingress[0].ports[0].port",
        "not from 1 to 65535",
    ),
    "a Cilium rule that is not enforced": (
        cilium_policy(),
        put("spec/egress", [{"toFQDNs": [{"matchName": "x.y"}]}]),
        "spec.egress[0].toFQDNs",
        "not supported",
    ),
    "a CIDR of a group": (
        cidr_group(),
        put("spec/externalCIDRs", ["10.0.0.0/33"]),
        "spec.externalCIDRs[0]",
        "not a CIDR",
    ),
    "a Workload without labels": (workload(labels={}), lambda _: None, "spec.labels", "is missing"),
    "a Workload for everybody": (
        workload(),
        put("spec", {"labels": {"a": "b"}}),
        "spec",
        "every container",
    ),
    "a Workload with our labels": (
        workload(labels={"podwire.io/name": "x"}),
        lambda _: None,
        "spec.labels['podwire.io/name']",
        "reserved",
    ),
    "a Workload that speaks for a namespace": (
        workload(labels={"io.cilium.k8s.namespace.labels.team": "red"}),
        lambda _: None,
        "spec.labels['io.cilium.k8s.namespace.labels.team']",
        "label the Namespace object",
    ),
    "a Workload's pattern": (
        workload(namePattern="a b"),
        lambda _: None,
        "spec.namePattern",
        "not a pattern",
    ),
    "a Workload's network": (
        workload(network="a b"),
        lambda _: None,
        "spec.network",
        "not a name of a network",
    ),
    "a Workload's label": (
        workload(labels={"a": "!"}),
        lambda _: None,
        "spec.labels.a",
        "not a label value",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_document_is_refused_with_field_and_reason(name: str) -> None:
    document, change, path, message = BAD[name]
    document = copy.deepcopy(document)
    change(document)
    with pytest.raises(InvalidRequest) as caught:
        decode(document)
    found = [(fault.path, fault.message) for fault in caught.value.faults]
    assert any(where == path and message in what for where, what in found), found
    assert len(found) == len(set(found)), "each fault is said once"
    assert caught.value.hint


@pytest.mark.parametrize("document", [None, 7, "x", [], [{}]])
def test_what_is_no_object_is_refused(document: object) -> None:
    with pytest.raises(InvalidRequest, match="not an object"):
        decode(document)


def test_all_faults_of_a_document_are_named_at_once() -> None:
    document = network_policy("Bad", ingress=[{"ports": [{"port": 0}]}]) | {"extra": 1}
    with pytest.raises(InvalidRequest) as caught:
        decode(document)
    assert {fault.path for fault in caught.value.faults} == {
        "metadata.name",
        "extra",
        "spec.ingress[0].ports[0].port",
    }


def test_two_thousand_documents_are_read_in_linear_time() -> None:
    documents = [network_policy(f"a{number}") for number in range(1000)]
    documents += [cilium_policy(f"b{number}") for number in range(1000)]
    took_s = []
    for _ in range(5):  # one of them is not held up by the machine
        begin_s = time.process_time()
        assert len(decode_all(documents)) == 2000
        took_s.append(time.process_time() - begin_s)
    assert min(took_s) < 3, took_s  # of the processor; quadratic would be minutes


# ------------------------------------------------------------------ applying


def actions(done: list[applying.Applied]) -> list[tuple[str, str]]:
    return [(str(applied.key), applied.action) for applied in done]


def test_objects_are_created_configured_or_left_alone(store: SqliteStore) -> None:
    first = [network_policy("a"), network_policy("b"), cidr_group()]
    assert [applied.action for applied in apply_documents(store, first)] == ["created"] * 3
    changed = network_policy("b", ingress=[])
    done = apply_documents(store, [network_policy("a"), changed, cidr_group()])
    assert [one.action for one in done] == ["unchanged", "configured", "unchanged"]
    assert revision_of(store) == 4
    found = store.get(ObjectKey("networkpolicies", "default", "b"))
    assert found is not None
    assert found.document["spec"]["ingress"] == []
    assert done[1].after == found
    assert done[1].before is not None


def test_what_is_shown_can_be_applied_again_and_changes_nothing(store: SqliteStore) -> None:
    documents = {key: document for document, key in GOOD.values()}
    apply_documents(store, [*documents.values()])
    shown = [show_document(stored) for kind in KINDS for stored in store.list(kind.plural)[0]]
    assert all(one["metadata"]["uid"] for one in shown)
    revision = revision_of(store)
    assert {applied.action for applied in apply_documents(store, shown)} == {"unchanged"}
    assert revision_of(store) == revision


def test_with_one_fault_nothing_is_written_and_every_fault_is_named(store: SqliteStore) -> None:
    documents = [
        network_policy("good"),
        network_policy("bad", ingress=[{"ports": [{"port": 0}]}]),
        7,
        workload(labels={}),
    ]
    with pytest.raises(InvalidRequest, match="3 faults") as caught:
        apply_documents(store, documents)
    assert [fault.path for fault in caught.value.faults] == [
        "documents[1].spec.ingress[0].ports[0].port",
        "documents[2]",
        "documents[3].spec.labels",
    ]
    assert revision_of(store) == 0


def test_an_object_that_comes_twice_is_refused(store: SqliteStore) -> None:
    documents = [network_policy(), cidr_group(), network_policy(namespace=None, ingress=[])]
    with pytest.raises(InvalidRequest) as caught:
        apply_documents(store, documents)
    [fault] = caught.value.faults
    assert fault.path == "documents[2]"
    assert "is networkpolicies default/web again: documents[0]" in fault.message
    assert revision_of(store) == 0


def test_a_policy_of_a_namespace_that_does_not_exist_is_refused(store: SqliteStore) -> None:
    documents = [network_policy("a"), network_policy("b", "shop"), cilium_policy("c", "shop")]
    with pytest.raises(InvalidRequest) as caught:
        apply_documents(store, documents)
    assert [fault.path for fault in caught.value.faults] == [
        "documents[1].metadata.namespace",
        "documents[2].metadata.namespace",
    ]
    assert "'shop', which does not exist" in caught.value.faults[0].message
    assert revision_of(store) == 0


def test_a_namespace_may_come_in_the_same_set_and_is_written_first(store: SqliteStore) -> None:
    done = apply_documents(store, [network_policy("b", "shop"), namespace_object("shop")])
    assert actions(done) == [
        ("networkpolicies shop/b", "created"),
        ("namespaces shop", "created"),
    ]
    with store.watch(since(0)) as watch:
        assert [event.object.key.kind for event in watch.next(0)] == [
            "namespaces",
            "networkpolicies",
        ]
    assert actions(apply_documents(store, [network_policy("c", "shop")])) == [
        ("networkpolicies shop/c", "created")
    ]


def test_a_dry_run_checks_everything_and_writes_nothing(store: SqliteStore) -> None:
    apply_documents(store, [network_policy("a")])
    documents = [
        network_policy("a", ingress=[]),
        network_policy("b", "shop"),
        namespace_object("shop"),
    ]
    done = apply_documents(store, documents, dry_run=True)
    assert [applied.action for applied in done] == ["configured", "created", "created"]
    assert revision_of(store) == 1
    with pytest.raises(InvalidRequest):
        apply_documents(store, [network_policy("B")], dry_run=True)


def test_two_who_apply_at_once_both_succeed(store: SqliteStore) -> None:
    def write(number: int) -> None:
        for step in range(20):
            documents = [network_policy("a", ingress=[{}] * (number + 1) + [{}] * step)]
            apply_documents(store, documents)

    with ThreadPoolExecutor(4) as threads:
        for one in [threads.submit(write, number) for number in range(4)]:
            one.result()
    assert store.get(ObjectKey("networkpolicies", "default", "a")) is not None


class FailingStore(SqliteStore):
    """A disk that is full after one object."""

    def create(self, new: StoredObject) -> StoredObject:
        if new.key.name == "b":
            raise StorageFailure("write store: disk is full", hint="free space")
        return super().create(new)


def test_a_store_that_fails_half_way_has_written_nothing(tmp_path: Path) -> None:
    documents = [network_policy("a"), network_policy("b")]
    with contextlib.closing(FailingStore(tmp_path / "store.db")) as store:
        with pytest.raises(StorageFailure, match="disk is full"):
            apply_documents(store, documents)
        assert revision_of(store) == 0
        assert [applied.action for applied in apply_documents(store, documents[:1])] == ["created"]


# ------------------------------------------------------------------ one object


def test_put_creates_and_replaces(store: SqliteStore) -> None:
    key = ObjectKey("networkpolicies", "default", "web")
    assert put_object(store, key, network_policy()).action == "created"
    assert put_object(store, key, network_policy()).action == "unchanged"
    assert put_object(store, key, network_policy(ingress=[])).action == "configured"
    assert put_object(store, key, network_policy(), dry_run=True).action == "configured"
    assert revision_of(store) == 2


def test_put_under_an_older_revision_is_a_conflict(store: SqliteStore) -> None:
    key = ObjectKey("networkpolicies", "default", "web")
    shown = show_document(store.create(decode(network_policy())))
    changed = copy.deepcopy(shown)
    changed["spec"]["ingress"] = []
    assert put_object(store, key, changed).action == "configured"
    with pytest.raises(Conflict, match="it is at revision 2, not at '1'"):
        put_object(store, key, shown)
    store.delete(key)
    with pytest.raises(Conflict, match="no longer there"):
        put_object(store, key, changed)


@pytest.mark.parametrize(
    ("document", "path"),
    [
        (network_policy("other"), "metadata.name"),
        (network_policy(namespace="other"), "metadata.namespace"),
        (cilium_policy(), "kind"),
    ],
    ids=["name", "namespace", "kind"],
)
def test_put_of_another_object_is_refused(
    store: SqliteStore, document: dict[str, Any], path: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        put_object(store, ObjectKey("networkpolicies", "default", "web"), document)
    assert caught.value.faults[0].path == path
    assert revision_of(store) == 0


def test_put_into_a_namespace_that_does_not_exist_is_refused(store: SqliteStore) -> None:
    with pytest.raises(InvalidRequest):
        put_object(store, ObjectKey("networkpolicies", "x", "web"), network_policy(namespace="x"))


def test_a_namespace_with_policies_stays(store: SqliteStore) -> None:
    apply_documents(store, [namespace_object("shop"), network_policy("a", "shop")])
    key = ObjectKey("namespaces", "", "shop")
    with pytest.raises(Conflict, match="it has 1 networkpolicies"):
        delete_object(store, key)
    delete_object(store, ObjectKey("networkpolicies", "shop", "a"))
    assert delete_object(store, key, dry_run=True).action == "deleted"
    assert store.get(key) is not None
    assert delete_object(store, key).before is not None
    with pytest.raises(NotFound):
        delete_object(store, key)


def test_the_default_namespace_stays(store: SqliteStore) -> None:
    apply_documents(store, [namespace_object("default")])
    with pytest.raises(Conflict, match="always exists"):
        delete_object(store, ObjectKey("namespaces", "", "default"))


def test_what_others_are_in_is_deleted_last() -> None:
    documents = [namespace_object("shop"), network_policy("a", "shop"), network_policy("a", "shop")]
    assert [str(one) for one in identify_all(documents)] == [
        "networkpolicies shop/a",
        "namespaces shop",
    ]


def test_a_document_that_is_wrong_in_itself_can_still_be_deleted() -> None:
    assert identify(network_policy(ingress=7)).name == "web"
    with pytest.raises(InvalidRequest) as caught:
        identify_all([network_policy(), network_policy("Bad"), {"kind": "x"}])
    assert {fault.path for fault in caught.value.faults} == {
        "documents[1].metadata.name",
        "documents[2].apiVersion",
    }
