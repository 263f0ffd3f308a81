"""A pod that asks for a host port on a node that serves none gets an Event instead of silence."""

from typing import Any

import msgspec
import pytest

from podwire.agent.duties.follower import KindList
from podwire.agent.duties.kubernetes.host_ports import REASON, HostPorts, list_host_ports
from podwire.model.store import ObjectKey, StoredObject, StoreEvent
from podwire.model.store.events import Subject
from podwire.store.kubernetes.api.resources import find_resource
from podwire.store.kubernetes.objects import decode_object
from tests.fakes.store import MemoryStore

ASKS: dict[str, Any] = {"containers": [{"ports": [{"containerPort": 80, "hostPort": 8080}]}]}


def pod(uid: str = "u1", **spec: Any) -> StoredObject:
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": spec}
    return StoredObject(key=ObjectKey("pods", "shop", "web"), uid=uid, document=document)


class Node:
    """Notes what is told at which pod."""

    def __init__(self, served: bool | None = False) -> None:
        self.served = served
        self.told: list[tuple[str, str]] = []
        self.ports = HostPorts(MemoryStore(), self, lambda: self.served)

    def tell(self, about: Subject, reason: str, message: str) -> None:
        assert reason == REASON
        self.told.append((about.uid, message))

    def hear(self, *pods: StoredObject, deleted: bool = False) -> None:
        self.ports.on_events([StoreEvent(one, 1, deleted=deleted) for one in pods], {})


def test_the_event_names_the_port_and_what_to_do_once() -> None:
    node = Node()
    node.ports.on_lists([KindList("pods", [pod(**ASKS)], 1)])
    node.hear(pod(**ASKS))
    ((uid, message),) = node.told
    assert uid == "u1"
    assert "host port 8080" in message
    assert "install the reference CNI plugins" in message
    node.hear(pod(**ASKS), deleted=True)
    node.hear(pod("u2", **ASKS))
    assert [uid for uid, _ in node.told] == ["u1", "u2"]


def test_before_the_network_was_looked_at_nobody_knows() -> None:
    node = Node(served=None)
    node.hear(pod(**ASKS))
    assert node.told == []
    node.served = False
    node.hear()
    assert len(node.told) == 1


def test_a_node_that_serves_host_ports_tells_nothing() -> None:
    node = Node(served=True)
    node.hear(pod(**ASKS))
    assert node.told == []


@pytest.mark.parametrize(
    ("spec", "phase", "expected"),
    [
        (ASKS, "Running", [8080]),
        ({"initContainers": ASKS["containers"]}, "Pending", [8080]),
        ({**ASKS, "hostNetwork": True}, "Running", []),
        (ASKS, "Succeeded", []),
        ({"containers": [{"ports": [{"containerPort": 80}]}]}, "Running", []),
        ({"containers": [{}]}, "", []),
    ],
)
def test_which_pods_ask_for_a_host_port(spec: Any, phase: str, expected: list[int]) -> None:
    raw = {
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": spec,
        "status": {"phase": phase},
    }
    stored = decode_object(find_resource("pods"), msgspec.json.encode(raw))
    assert list_host_ports(stored.document) == expected
