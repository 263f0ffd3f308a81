"""What people are told of policies that close: status, Events at the policies of nodes whose pods they close."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from podwire.agent.closed_policies import REASON, ClosedPolicies
from podwire.agent.health import SHOWN_MAX
from podwire.control.documents.damage import read_object
from podwire.model.store import ObjectKey, StoredObject, StoreEvent
from podwire.model.store.events import Subject
from tests.fakes.node import FakeNode
from tests.unit.policies import network_policy
from tests.unit.test_attach_service import NETNS, request

NETPOL = "networkpolicies"


@dataclass
class Told:
    """Hears Events and warnings."""

    events: list[tuple[Subject, str, str]] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)

    def tell(self, about: Subject, reason: str, message: str) -> None:
        self.events.append((about, reason, message))

    def warn(self, key: str, message: str) -> None:
        self.warnings[key] = message
        if not message:
            del self.warnings[key]


class Bench:
    def __init__(self, directory: Path) -> None:
        self.node = FakeNode(directory)
        self.told = Told()
        self.closed = ClosedPolicies(
            self.node.policies, self.node.enforcer, self.told.warn, self.told
        )

    def put(self, name: str, *, deleted: bool = False, **spec: Any) -> None:
        document = network_policy(name, **spec)
        key = ObjectKey(NETPOL, "default", name)
        stored, _ = read_object(StoredObject(key=key, uid=f"uid-{name}", document=document))
        self.node.policies.apply(StoreEvent(stored, 1, deleted=deleted))
        self.node.enforcer.apply("test")
        self.closed.show(())
        self.closed.tell()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    with made.node:
        yield made


def test_a_closed_policy_is_told_where_it_closes_pods(bench: Bench) -> None:
    bench.put("a", unknown=1)
    assert not bench.told.events, "it closes no pod of this node"
    bench.node.service.add(request(labels=("k8s:app=web",)), NETNS)
    bench.closed.tell()
    bench.closed.tell()
    [(about, reason, message)] = bench.told.events
    assert about == Subject(ObjectKey(NETPOL, "default", "a"), "uid-a")
    assert reason == REASON
    assert "spec.unknown is an unknown field" in message
    assert "closes the pods that it selects" in message
    assert message.endswith("podwire delete networkpolicies a -n default")
    assert list(bench.told.warnings.values()) == [message]
    bench.put("a", another=1)
    assert len(bench.told.events) == 2, "something else is wrong with it"
    bench.put("a")
    assert not bench.told.warnings
    bench.put("a", another=1)
    assert len(bench.told.events) == 3
    bench.put("a", deleted=True)
    assert not bench.told.warnings


def test_many_are_counted(bench: Bench) -> None:
    for number in range(20):
        bench.put(f"p{number:02}", unknown=1)
    assert len(bench.told.warnings) == SHOWN_MAX + 1
    assert "12 more policies" in " ".join(bench.told.warnings.values())
