"""Pods that are bound to this node have their identity before their ADD asks for it."""

from typing import Any

import pytest

from podwire.cni.labels import complete_labels
from podwire.control.identity.allocator import IdentityAllocator
from podwire.control.identity.bound_pods import BoundPods
from podwire.control.identity.feed import IdentityFeed
from podwire.control.identity.filter import LabelFilter
from podwire.control.identity.key import convert_ports
from podwire.control.identity.known import KnownIdentities
from podwire.control.identity.resolver import IdentityResolver
from podwire.control.identity.sources import LabelSources
from podwire.control.kubernetes.own_pods import OwnPods
from podwire.control.kubernetes.pod import PodFacts
from podwire.model.errors import Unavailable
from podwire.model.store import StoredObject, StoreEvent
from tests.fakes.followers import follow_identities
from tests.fakes.store import MemoryStore
from tests.unit.test_identity_resolver import put_namespace
from tests.unit.test_own_pods import add, pod


def labels_at_add(facts: PodFacts) -> tuple[str, ...]:
    return complete_labels(
        facts.labels, network="podwire", namespace=facts.namespace, pod=facts.name
    )


class Node:
    """What an agent knows, with a store that can be counted and taken away."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        put_namespace(self.store, "shop")
        self.resolver = IdentityResolver(
            IdentityAllocator(self.store, KnownIdentities()),
            LabelSources(),
            LabelFilter.parse(),
            wait_s=0,
        )
        self.pods = OwnPods(self.store, "n1", wait_s=0)
        self.feed = IdentityFeed(self.resolver, self.pods)
        self.bound = BoundPods(self.resolver, self.pods, labels_at_add)
        self.feed.bound = self.bound
        follower = follow_identities(self.store, IdentityFeed(self.resolver))
        while follower.step(0):
            pass

    def bind(self, stored: StoredObject, *, deleted: bool = False) -> None:
        self.feed.apply(StoreEvent(stored, 1, deleted))

    @property
    def made(self) -> int:
        return self.resolver.allocator.counts.allocated

    def add_finds(self) -> bool:
        request = self.pods.complete_at_once(add())
        assert request is not None
        return self.resolver.find(request.labels, convert_ports(request.ports), "shop") is not None


def test_the_add_of_a_pod_that_was_bound_finds_its_identity() -> None:
    node = Node()
    container = {"ports": [{"name": "http", "containerPort": 80, "protocol": "TCP"}]}
    node.bind(pod(labels={"app": "web"}, containers=[container]))
    assert not node.add_finds()
    node.bound.number()
    assert node.add_finds()
    assert node.made == 1


def test_replicas_have_one_identity_made_once() -> None:
    node = Node()
    for number in range(5):
        node.bind(pod(f"web-{number}", uid=f"u{number}", labels={"app": "web"}))
    node.bound.number()
    node.bound.number()
    assert node.made == 1


@pytest.mark.parametrize(
    ("spec", "deleted"),
    [
        pytest.param({"hostNetwork": True}, False, id="on the host's network"),
        pytest.param({}, True, id="deleted"),
    ],
)
def test_others_get_none(spec: dict[str, Any], deleted: bool) -> None:
    node = Node()
    node.bind(pod(labels={"app": "web"}, **spec), deleted=deleted)
    node.bound.number()
    assert not node.made


def test_a_store_that_is_away_is_left_to_the_add(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.bind(pod(labels={"app": "web"}))

    def create(_stored: StoredObject) -> StoredObject:
        raise Unavailable("away")

    with monkeypatch.context() as away:
        away.setattr(node.store, "create", create)
        node.bound.number()
    assert not node.add_finds()
    assert node.resolver.resolve(add().labels, (), "shop").number


def test_whoever_numbers_is_told_of_each_pod() -> None:
    node, told = Node(), []
    node.bound.noted = lambda: told.append(1)
    node.bind(pod(labels={"app": "web"}))
    assert told == [1]
