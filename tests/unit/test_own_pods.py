"""The pods of a node as the API server says them: labels and ports of an ADD, changes of labels, static pods."""

import threading
from typing import Any

import msgspec
import pytest

from podwire.cni.labels import complete_labels
from podwire.control.kubernetes.own_pods import OwnPods
from podwire.control.kubernetes.pod import decode_pod
from podwire.model.endpoint import AttachmentKey
from podwire.model.errors import Cancelled, Unavailable
from podwire.model.ids import ContainerId, InterfaceName, NetworkName
from podwire.model.request import AttachRequest, NamedPort
from podwire.model.store import ObjectKey, StoredObject, StoreEvent
from tests.fakes.records import make_record
from tests.fakes.store import MemoryStore
from tests.waiting import wait_for

KEY = AttachmentKey(NetworkName("podwire"), ContainerId("c" * 12), InterfaceName("eth0"))
HASH = "0123456789abcdef" * 2
"""The UID of a static pod, as kubelet computes it."""
ACCOUNT = "k8s:io.cilium.k8s.policy.serviceaccount=default"


def pod(
    name: str = "web", *, uid: str = "u1", labels: dict[str, Any] | None = None, **spec: Any
) -> StoredObject:
    annotations = spec.pop("annotations", {})
    metadata = {"name": name, "namespace": "shop", "labels": labels or {}}
    metadata["annotations"] = annotations
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    return StoredObject(key=ObjectKey("pods", "shop", name), uid=uid, document=document)


def add(name: str = "web", uid: str = "u1") -> AttachRequest:
    return AttachRequest(
        command="ADD",
        network=KEY.network,
        cni_version="1.0.0",
        key=KEY,
        namespace="shop",
        pod=name,
        pod_uid=uid,
        labels=complete_labels((), network="podwire", namespace="shop", pod=name),
    )


def labels_of(request: AttachRequest | None) -> set[str]:
    assert request is not None
    mine = set(request.labels) - set(add(request.pod).labels)
    return mine


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def pods(store: MemoryStore) -> OwnPods:
    return OwnPods(store, "n1", wait_s=0)


def test_an_add_gets_labels_and_named_ports_of_its_pod(pods: OwnPods) -> None:
    container = {
        "ports": [
            {"name": "http", "containerPort": 80, "protocol": "TCP"},
            {"name": "dns", "containerPort": 53, "protocol": "UDP"},
            {"containerPort": 81},
        ]
    }
    stored = pod(labels={"app": "web"}, containers=[container], serviceAccountName="seller")
    pods.replace([stored])
    done = pods.complete(add())
    account = "k8s:io.cilium.k8s.policy.serviceaccount=seller"
    assert labels_of(done) == {"k8s:app=web", account}
    assert done.ports == (NamedPort("dns", 53, "UDP"), NamedPort("http", 80))
    assert done == pods.complete_at_once(add())


@pytest.mark.parametrize(
    "key",
    [
        "io.cilium.k8s.policy.serviceaccount",
        "io.cilium.k8s.namespace.labels.team",
        "io.kubernetes.pod.namespace",
        "podwire.io/name",
        "podwire.io/network",
    ],
)
def test_a_pods_own_labels_cannot_say_what_only_the_cluster_says(key: str) -> None:
    facts = decode_pod(pod(labels={key: "forged", "app": "web"}))
    assert set(facts.labels) == {"k8s:app=web", ACCOUNT}


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"metadata": 7, "spec": []},
        {"metadata": {"labels": ["app"], "annotations": "x"}, "spec": {"containers": {"a": 1}}},
        {"spec": {"containers": [{"ports": [{"name": 5, "containerPort": 80}, "x"]}, None]}},
        {"spec": {"containers": [{"ports": [{"name": "big", "containerPort": 70000}]}]}},
    ],
)
def test_what_has_another_form_is_left_out(document: dict[str, Any]) -> None:
    facts = decode_pod(StoredObject(key=ObjectKey("pods", "shop", "web"), document=document))
    assert facts.labels == (ACCOUNT,)
    assert facts.ports == ()


def test_ports_of_a_sidecar_count_and_those_of_other_init_containers_do_not() -> None:
    inits = [
        {"restartPolicy": "Always", "ports": [{"name": "proxy", "containerPort": 1}]},
        {"ports": [{"name": "setup", "containerPort": 2}]},
    ]
    assert decode_pod(pod(initContainers=inits)).ports == (NamedPort("proxy", 1),)


def test_a_pod_that_comes_while_an_add_waits_ends_the_wait(store: MemoryStore) -> None:
    pods = OwnPods(store, "n1", wait_s=60)
    done: list[AttachRequest] = []
    thread = threading.Thread(target=lambda: done.append(pods.complete(add())))
    thread.start()
    pods.apply(StoreEvent(pod(labels={"app": "web"}), 1))
    wait_for(lambda: done)
    thread.join()
    assert "k8s:app=web" in done[0].labels
    assert store.calls == []


def test_a_pod_that_the_watch_does_not_bring_is_asked_for_once(
    pods: OwnPods, store: MemoryStore
) -> None:
    created = store.create(pod(labels={"app": "web"}))
    assert "k8s:app=web" in pods.complete(add(uid=created.uid)).labels
    assert store.calls.count("get") == 1
    assert pods.complete_at_once(add(uid=created.uid)) is None


def test_another_pod_of_the_name_is_not_taken_for_it(pods: OwnPods, store: MemoryStore) -> None:
    pods.replace([pod(uid="later")])
    assert pods.complete_at_once(add()) is None
    with pytest.raises(Unavailable, match="none"):
        pods.complete(add())
    store.create(pod())
    with pytest.raises(Unavailable, match="another one"):
        pods.complete(add())


def test_a_caller_that_is_gone_ends_the_wait(store: MemoryStore) -> None:
    with pytest.raises(Cancelled):
        OwnPods(store, "n1", wait_s=60).complete(add(), lambda: True)


def test_a_static_pod_is_known_by_the_annotation_of_its_mirror(pods: OwnPods) -> None:
    mirror = {"kubernetes.io/config.mirror": HASH}
    pods.replace([pod("etcd-n1", labels={"tier": "control"}, annotations=mirror)])
    assert "k8s:tier=control" in pods.complete(add("etcd-n1", uid=HASH)).labels
    assert pods.complete_at_once(add("etcd-n1", uid="other")) is None


@pytest.mark.parametrize("is_away", [False, True])
def test_a_static_pod_starts_before_its_mirror_and_without_the_api_server(
    pods: OwnPods, store: MemoryStore, *, is_away: bool
) -> None:
    store.away = is_away
    request = add("etcd-n1", uid=HASH)
    assert pods.complete(request) == request


@pytest.mark.parametrize("is_away", [False, True])
def test_a_tenants_pod_that_is_named_like_a_static_one_does_not_start_without_its_labels(
    pods: OwnPods, store: MemoryStore, *, is_away: bool
) -> None:
    store.away = is_away
    with pytest.raises(Unavailable):
        pods.complete(add("web-n1", uid="5a3c0d5e-6d0f-4b6e-9a53-1c1f0e2d3b4a"))


@pytest.mark.parametrize("name", [KEY.container_id, "web"])
def test_a_plain_container_is_no_pod_whatever_its_name_is(pods: OwnPods, name: str) -> None:
    pods.replace([pod("web", labels={"app": "web"})])
    request = msgspec.structs.replace(add(name, ""), is_plain=True)
    assert pods.complete_at_once(request) is request
    assert pods.complete(request) is request
    record = make_record(
        1, key=KEY, namespace="shop", pod=name, own_labels=("k8s:a=b",), is_plain=True
    )
    assert not pods.has(record)
    assert pods.own_labels(record) == ("k8s:a=b",)
    assert pods.has(msgspec.structs.replace(record, is_plain=False)) is (name == "web")


def test_changes_are_told_once_and_forgotten_pods_keep_labels(pods: OwnPods) -> None:
    pods.replace([pod(labels={"app": "web"}), pod("db", uid="u2")])
    assert pods.take_changed() == {("shop", "web"), ("shop", "db")}
    pods.apply(StoreEvent(pod(labels={"app": "api"}), 2))
    pods.apply(StoreEvent(pod("db", uid="u2"), 3))
    assert pods.take_changed() == {("shop", "web")}
    assert pods.take_changed() == frozenset()


def test_what_was_known_is_there_after_a_restart(pods: OwnPods, store: MemoryStore) -> None:
    pods.replace([pod(labels={"app": "web"})])
    later = OwnPods(store, "n1", wait_s=0)
    later.load(pods.dump())
    assert later.complete(add()) == pods.complete(add())
    later.load("nonsense")
    assert later.dump() == pods.dump()
