"""A server adds to what is written: a second apply of the same file changes nothing, and what was taken out goes."""

import copy
from typing import Any

import pytest

from podwire.control.documents.apply import CONFIGURED, UNCHANGED, apply_documents, put_object
from podwire.model.store import StoredObject
from tests.fakes.server_store import complete
from tests.fakes.store import MemoryStore

POLICY: Any = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "web", "namespace": "default", "labels": {"a": "b"}},
    "spec": {
        "podSelector": {"matchLabels": {"app": "web"}},
        "ingress": [{"from": [{"namespaceSelector": {}}], "ports": [{"port": 80}, {"port": "dns", "protocol": "UDP"}]}],
    },
}  # fmt: skip
CLOSED: Any = {
    **POLICY,
    "spec": {"podSelector": {}, "ingress": [], "policyTypes": ["Ingress", "Egress"], "egress": []},
}
OPEN: Any = {**POLICY, "spec": {"podSelector": {}, "ingress": [{}], "egress": [{"to": []}]}}
CILIUM: Any = {
    "apiVersion": "cilium.io/v2",
    "kind": "CiliumNetworkPolicy",
    "metadata": {"name": "web", "namespace": "default"},
    "spec": {"endpointSelector": {}, "ingress": [{}]},
}
NAMESPACE: Any = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}
POOL: Any = {
    "apiVersion": "podwire.io/v1",
    "kind": "IPPool",
    "metadata": {"name": "p"},
    "spec": {"cidr": "10.9.0.0/16"},
}
DOCUMENTS = {
    "policy": POLICY, "closed": CLOSED, "open": OPEN, "cilium": CILIUM, "namespace": NAMESPACE, "pool": POOL
}  # fmt: skip


class Server(MemoryStore):
    """Writes objects back as an API server of Kubernetes does."""

    def create(self, new: StoredObject) -> StoredObject:
        return super().create(self._complete(new))

    def update(self, new: StoredObject) -> StoredObject:
        return super().update(self._complete(new))

    def _complete(self, new: StoredObject) -> StoredObject:
        return StoredObject(key=new.key, revision=new.revision, document=complete(new.document))


def annotated(stored: StoredObject) -> StoredObject:
    """As another tool leaves an object behind."""
    document: Any = copy.deepcopy(dict(stored.document))
    document["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": "{}"}
    return StoredObject(key=stored.key, revision=stored.revision, document=document)


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("of_tool", [False, True], ids=["alone", "with another tool"])
def test_a_second_apply_of_the_same_file_says_unchanged(document: Any, of_tool: bool) -> None:
    store = Server()
    [first] = apply_documents(store, [document])
    assert first.after is not None
    if of_tool:
        store.update(annotated(first.after))
    before = store.get(first.key)
    assert [applied.action for applied in apply_documents(store, [document])] == [UNCHANGED]
    assert [applied.action for applied in apply_documents(store, [document], dry_run=True)] == [
        UNCHANGED
    ]
    assert store.get(first.key) == before


def changed(document: Any, change: Any) -> Any:
    made = copy.deepcopy(document)
    change(made)
    return made


CHANGES = {
    "a label goes": lambda one: one["metadata"].pop("labels"),
    "a rule goes": lambda one: one["spec"].pop("ingress"),
    "a rule becomes open": lambda one: one["spec"]["ingress"][0].pop("ports"),
    "a protocol": lambda one: one["spec"]["ingress"][0]["ports"][0].update(protocol="UDP"),
    "a protocol goes": lambda one: one["spec"]["ingress"][0]["ports"][1].pop("protocol"),
    "a type": lambda one: one["spec"].update(policyTypes=["Ingress", "Egress"]),
    "a selector": lambda one: one["spec"].update(podSelector={}),
    "a port": lambda one: one["spec"]["ingress"][0]["ports"].pop(),
    "an open rule": lambda one: one["spec"]["ingress"].append({}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
@pytest.mark.parametrize("make", [Server, MemoryStore])
def test_what_somebody_changed_is_a_difference(make: Any, change: Any, back: bool) -> None:
    store, other = make(), changed(POLICY, change)
    old, new = (other, POLICY) if back else (POLICY, other)
    [first] = apply_documents(store, [old])
    assert [applied.action for applied in apply_documents(store, [new])] == [CONFIGURED]
    assert [applied.action for applied in apply_documents(store, [new])] == [UNCHANGED]
    stored = store.get(first.key)
    assert stored is not None
    if make is MemoryStore:
        assert stored.document == {**new, "spec": new["spec"]}


def test_a_diff_shows_what_somebody_wrote_and_nothing_of_the_server() -> None:
    store = Server()
    apply_documents(store, [POLICY])
    new = changed(POLICY, lambda one: one["metadata"]["labels"].update(a="c"))
    [done] = apply_documents(store, [new], dry_run=True)
    assert done.action == CONFIGURED
    assert done.before is not None
    assert done.after is not None
    assert done.before.document == POLICY
    assert done.after.document == new


def test_what_a_server_needs_stays_when_an_object_is_replaced() -> None:
    store = Server()
    [first] = apply_documents(store, [POLICY])
    assert first.after is not None
    store.update(annotated(first.after))
    new = changed(POLICY, lambda one: one["spec"].update(podSelector={}))
    [done] = apply_documents(store, [new])
    assert done.after is not None
    metadata = done.after.document["metadata"]
    assert metadata["finalizers"] == ["foregroundDeletion"]
    assert "kubectl.kubernetes.io/last-applied-configuration" in metadata["annotations"]
    put_object(store, first.key, POLICY)
    found = store.get(first.key)
    assert found is not None
    assert found.document["metadata"]["labels"] == {"a": "b"}


def test_an_object_that_nobody_could_have_applied_is_replaced() -> None:
    store = MemoryStore()
    [first] = apply_documents(store, [POLICY])
    assert first.after is not None
    broken = {**POLICY, "spec": {"podSelector": 7}}
    store.update(StoredObject(key=first.key, revision=first.after.revision, document=broken))
    assert [applied.action for applied in apply_documents(store, [POLICY])] == [CONFIGURED]
    found = store.get(first.key)
    assert found is not None
    assert found.document == POLICY
