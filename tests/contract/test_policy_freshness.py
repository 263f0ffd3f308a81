"""Policies written to a real API server just before their pods: no pod is attached without its own, however late the
watch is, and no ADD asks the API server for anything."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from podwire.agent.duties.follower import KindList, StoreFollower
from podwire.agent.duties.kubernetes.freshness import MOMENT_S, open_freshness
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.duties.unreadable import Reading
from podwire.control.documents.damage import read_object, stand_in
from podwire.control.endpoint.policies import PolicyObjects
from podwire.control.kubernetes.own_pods import OwnPods
from podwire.control.policy.labels_match import matches, parse_label_set
from podwire.lab.kubernetes import programs
from podwire.lab.kubernetes.api_server import ApiServer, Shape
from podwire.model.endpoint import AttachmentKey
from podwire.model.errors import NotFound, PodwireError
from podwire.model.ids import ContainerId, InterfaceName, NetworkName
from podwire.model.labels import namespace_labels, sort_labels
from podwire.model.request import AttachRequest
from podwire.model.store import Revisions, StoreEvent
from podwire.store.kubernetes.api.kubeconfig import load_kubeconfig
from podwire.store.kubernetes.api.resources import selectors_of_node
from podwire.store.kubernetes.store import KubernetesStore
from tests.contract import api_rig, kubernetes_rig
from tests.contract.stores import until
from tests.fakes.policy import make_engine

NODE: Final = "n1"
NAMESPACE: Final = "fresh"
PODS: Final = f"/api/v1/namespaces/{NAMESPACE}/pods"
POLICIES: Final = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies"
COUNT: Final = 200
LATE_S: Final = 0.15
"""How late the watch of policies is: longer than it takes to make a pod and to call ADD."""
KIND: Final = "networkpolicies"


class Pods:
    """Hands pods over, as the identities' follower does."""

    def __init__(self, own: OwnPods) -> None:
        self.own = own

    def on_lists(self, lists: Sequence[KindList]) -> None:
        for listed in lists:
            self.own.replace(listed.objects)

    def on_events(self, events: Sequence[StoreEvent], _revisions: Revisions) -> None:
        for event in events:
            self.own.apply(event)

    def on_away(self, error: PodwireError) -> None: ...

    def on_back(self) -> None: ...


class Policies:
    """Takes policies in, late; as the policy duty does."""

    def __init__(self, own: OwnPods, late_s: float) -> None:
        self.own, self.late_s = own, late_s
        self.engine = make_engine()
        self.objects = PolicyObjects(self.engine)
        self.turn = threading.Lock()
        self.gate = threading.Event()
        """While it is closed nothing comes at all."""
        self.gate.set()

    def on_lists(self, lists: Sequence[KindList]) -> None:
        for listed in lists:
            self.objects.replace(listed.kind, listed.objects)

    def on_events(self, events: Sequence[StoreEvent], revisions: Revisions) -> None:
        if events:
            time.sleep(self.late_s)
            assert self.gate.wait(60)
        with self.turn:
            for event in events:
                self.objects.apply(event)
        self.own.freshness.reach(revisions)

    def on_away(self, error: PodwireError) -> None: ...

    def on_back(self) -> None: ...

    def is_closed(self, app: str) -> bool:
        """Tell whether a policy that has been taken in selects a pod."""
        labels = [f"k8s:app={app}", *namespace_labels(NAMESPACE, {})]
        found = parse_label_set(sort_labels(labels))
        with self.turn:
            self.engine.apply()
            return any(matches(policy.subject, found) for policy in self.engine.list_policies())


@pytest.fixture(scope="module")
def server(own_kinds: ApiServer) -> ApiServer:
    return furnish(own_kinds)


@pytest.fixture(scope="module")
def newer_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server whose etcd tells of its progress, which the distribution's does not."""
    try:
        shape = Shape(etcd=programs.find_etcd(newer=True))
    except NotFound as missing:
        pytest.skip(f"{missing.message} ({missing.hint})")
    with api_rig.started(tmp_path_factory.mktemp("newer"), shape=shape) as made:
        kubernetes_rig.install_crds(made)
        yield furnish(made)


def furnish(server: ApiServer) -> ApiServer:
    """Make a namespace in which pods can be created."""
    server.client.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    server.client.create(account, {"metadata": {"name": "default"}})
    return server


@pytest.fixture(autouse=True)
def _clean(server: ApiServer) -> Iterator[None]:
    yield
    clean(server)


def clean(server: ApiServer) -> None:
    server.client.delete(POLICIES)
    server.client.delete(PODS, {"gracePeriodSeconds": 0})


class Node:
    """What of an agent takes part in an ADD."""

    def __init__(
        self, store: KubernetesStore, stack: ExitStack, *, late_s: float, asks: bool
    ) -> None:
        self.own = OwnPods(store, NODE, wait_s=60.0)
        self.policies = Policies(self.own, late_s)
        duty = open_freshness(store, self.own.freshness)
        assert duty is not None
        self.own.freshness.is_asking = asks
        # Watches of their own: pods must not come late with the policies.
        pods = StoreFollower("pods", store, ["pods"], Pods(self.own))
        shared = SharedWatch(store, reading=Reading(read_object, stand_in))
        policies = StoreFollower("policies", store, [KIND], self.policies, shared=shared)
        for follower in (pods, policies):
            assert follower.load()
            follower.start()
            stack.callback(follower.stop)
        duty.start()
        stack.callback(duty.stop)

    def add(self, name: str, uid: str) -> tuple[bool, float]:
        """Do what an ADD waits for; tells whether the pod is closed then, and how long it took."""
        key = AttachmentKey(NetworkName("podwire"), ContainerId(name), InterfaceName("eth0"))
        request = AttachRequest(
            command="ADD",
            network=key.network,
            cni_version="1.0.0",
            key=key,
            namespace=NAMESPACE,
            pod=name,
            pod_uid=uid,
        )
        begin_s = time.monotonic()
        self.own.complete_at_once(request) or self.own.complete(request)
        took_s = time.monotonic() - begin_s
        return self.policies.is_closed(name), took_s


@contextmanager
def node(tmp_path: Path, server: ApiServer, **how: Any) -> Iterator[Node]:
    kubeconfig = tmp_path / "kubeconfig"
    server.write_kubeconfig(kubeconfig)
    with ExitStack() as stack:
        store = KubernetesStore(
            load_kubeconfig(kubeconfig), selectors=selectors_of_node(NODE), name=NODE
        )
        stack.callback(store.close)
        yield Node(store, stack, **how)


def start(server: ApiServer, name: str, *, closed: bool = True) -> str:
    """Write a policy and its pod; gives the pod's UID."""
    if closed:
        spec = {
            "podSelector": {"matchLabels": {"app": name}},
            "policyTypes": ["Ingress", "Egress"],
        }
        server.client.create(POLICIES, {"metadata": {"name": name}, "spec": spec})
    pod = {
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"nodeName": NODE, "containers": [{"name": "main", "image": "x"}]},
    }
    return str(server.client.create(PODS, pod)["metadata"]["uid"])


def run(server: ApiServer, made: Node, count: int) -> list[tuple[bool, float]]:
    def one(number: int) -> tuple[bool, float]:
        name = f"p{number}"
        return made.add(name, start(server, name))

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(one, range(count)))


def test_no_pod_is_attached_without_the_policy_that_was_written_just_before(
    server: ApiServer, tmp_path: Path
) -> None:
    with node(tmp_path, server, late_s=LATE_S, asks=True) as made:
        results = run(server, made, COUNT)
    assert [closed for closed, _ in results] == [True] * COUNT


def test_so_it_is_with_the_newer_etcd(
    newer_server: ApiServer, tmp_path: Path, *, full: bool
) -> None:
    count = COUNT if full else COUNT // 10
    with node(tmp_path, newer_server, late_s=LATE_S, asks=True) as made:
        results = run(newer_server, made, count)
    clean(newer_server)
    assert [closed for closed, _ in results] == [True] * count


def test_without_the_question_pods_are_attached_without_it(
    server: ApiServer, tmp_path: Path
) -> None:
    with node(tmp_path, server, late_s=0.0, asks=False) as made:
        made.policies.gate.clear()
        results = run(server, made, 10)
        made.policies.gate.set()
    assert not any(closed for closed, _ in results), "the test above shows nothing"


def test_questions_are_few_and_none_is_asked_by_an_add(server: ApiServer, tmp_path: Path) -> None:
    with node(tmp_path, server, late_s=0.0, asks=True) as made:
        before = len(server.read_audit())
        begin_s = time.monotonic()
        with ThreadPoolExecutor(8) as threads:
            uids = list(threads.map(lambda number: start(server, f"p{number}"), range(30)))
        until(lambda: all(made.own.freshness.is_fresh(uid) for uid in uids))
        # One for the pods of each moment, however long the machine takes to make them.
        at_most = 3 + (time.monotonic() - begin_s) / MOMENT_S
        until(lambda: bool(_questions(server, before)))
        for number, uid in enumerate(uids):
            assert made.add(f"p{number}", uid)[0]
        # An ADD that asks would ask for each pod. The server may write its log behind its answers.
        assert len(_questions(server, before)) <= at_most


def _questions(server: ApiServer, before: int) -> list[str]:
    return [
        event["requestURI"]
        for event in server.read_audit()[before:]
        if event["stage"] == "ResponseComplete"
        and event["verb"] == "list"
        and event["requestURI"].endswith(f"/{KIND}")
        and "podwire" in event.get("userAgent", "")
    ]
