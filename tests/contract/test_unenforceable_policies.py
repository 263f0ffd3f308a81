"""Policies that an agent cannot enforce whole close on every store, and still do after a restart, with the store and
without; they open when they are corrected or deleted. One that was read before and cannot be read now stands."""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from podwire.agent.duties.follower import KindList, StoreFollower
from podwire.agent.duties.shared_watch import SharedWatch
from podwire.agent.duties.unreadable import Reading
from podwire.control.documents.damage import read_object, stand_in
from podwire.control.endpoint.policies import POLICY_KINDS, PolicyObjects
from podwire.control.policy.oracle import Party, Question, evaluate
from podwire.model.errors import PodwireError, Unavailable
from podwire.model.identity import RESERVED_LABELS, IdentityFacts, Reserved
from podwire.model.labels import namespace_labels, sort_labels
from podwire.model.policy import Direction, Verdict
from podwire.model.store import ObjectKey, Revisions, Store, StoredObject, StoreEvent
from podwire.store.remembered import RememberedObjects
from tests.contract.etcd_rig import Etcd
from tests.contract.stores import KUBERNETES, OWN, Place, until
from tests.fakes.policy import make_engine

URL: Final = "store"
BOTH: Final = {Direction.INGRESS, Direction.EGRESS}
WEB: Final = {"podSelector": {"matchLabels": {"app": "web"}}}


class AwayStore:
    """A store that does not answer."""

    def list(self, kind: str, *_: object, **__: object) -> tuple[Sequence[StoredObject], int]:
        raise Unavailable(f"list {kind}: away")

    def watch(self, _after: Revisions) -> Any:
        raise Unavailable("watch: away")


class Agent:
    """What of an agent knows policies: the watch, its memory, the objects and the engine."""

    def __init__(self, store: Store, memory: Path) -> None:
        self.engine = make_engine()
        self.objects = PolicyObjects(self.engine)
        self.warnings: dict[str, str] = {}
        self._turn = threading.Lock()
        """Held while changes are taken in, so that a test sees all of them or none."""
        self._stack = ExitStack()
        kept = self._stack.enter_context(RememberedObjects(memory, URL))
        reading = Reading(read_object, stand_in, self.warnings.__setitem__)
        self.follower = StoreFollower(
            "policies",
            store,
            POLICY_KINDS,
            self,
            shared=SharedWatch(store, kept, reading=reading),
            tell_unreadable=True,
        )
        self.follower.load()

    def follow(self) -> "Agent":
        self.follower.start()
        self._stack.callback(self.follower.stop)
        return self

    def close(self) -> None:
        self._stack.close()

    def find_closed(self, namespace: str, **labels: str) -> set[Direction]:
        """Say which directions of a pod are closed towards the world."""
        own = [f"k8s:{key}={value}" for key, value in labels.items()]
        facts = IdentityFacts(70000, sort_labels([*own, *namespace_labels(namespace, {})]))
        world = Party(IdentityFacts(Reserved.WORLD, RESERVED_LABELS[Reserved.WORLD]))
        with self._turn:
            self.engine.apply()
            policies = [policy for policy in self.engine.list_policies()]
        return {
            direction
            for direction in Direction
            if evaluate(
                policies, (), Question(Party(facts, endpoint=True), world, direction, 6, 80)
            ).verdict
            is Verdict.DENY
        }

    def on_lists(self, lists: Sequence[KindList]) -> None:
        with self._turn:
            for listed in lists:
                self.objects.replace(listed.kind, listed.objects)

    def on_events(self, events: Sequence[StoreEvent], _revisions: Revisions) -> None:
        with self._turn:
            for event in events:
                self.objects.apply(event)

    def on_away(self, error: PodwireError) -> None:
        pass

    def on_back(self) -> None:
        pass


class Scene:
    """A store, and the agents that come and go on one node."""

    def __init__(self, store: Store, place: Place, memory: Path) -> None:
        self.store, self.place, self.memory = store, place, memory
        self._agent: Agent | None = None

    def start(self, store: Any = None) -> Agent:
        """Start an agent after the one before."""
        self.stop()
        self._agent = Agent(store or self.store, self.memory)
        return self._agent if store else self._agent.follow()

    def stop(self) -> None:
        if self._agent is not None:
            self._agent.close()
        self._agent = None

    def write(self, spec: object, **fields: object) -> ObjectKey:
        """Write a NetworkPolicy past all that checks it."""
        key = self.place.key("p")
        document = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "p", "namespace": key.namespace},
            "spec": spec,
            **fields,
        }
        old = self.store.get(key)
        stored = StoredObject(key=key, revision=old.revision if old else 0, document=document)
        self.store.update(stored) if old else self.store.create(stored)
        return key

    def is_closed(self, agent: Agent, directions: set[Direction], app: str = "web") -> bool:
        return agent.find_closed(self.place.namespace, app=app) == directions


@pytest.fixture
def scene(store: Store, place: Place, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(store, place, tmp_path / "remembered.db")
    try:
        yield made
    finally:
        made.stop()


of_own_stores = pytest.mark.parametrize("back_end", OWN, indirect=True)
"""An API server takes no such NetworkPolicy."""

CASES: Final[Mapping[str, tuple[dict[str, Any], bool]]] = {
    "a field that is unknown": ({**WEB, "x": 1}, False),
    "a field of a rule": ({**WEB, "ingress": [{"x": 1}]}, False),
    "a value that is unknown": ({**WEB, "policyTypes": ["Both"]}, False),
    "egress alone": ({**WEB, "policyTypes": ["Egress"], "x": 1}, False),
    "a bad block": ({**WEB, "ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/99"}}]}]}, False),
    "a wrong type": ({**WEB, "ingress": "all"}, False),
    "an unreadable selector": ({"podSelector": [1]}, True),
    "a selector that is not supported": ({"podSelector": {"matchNames": ["a"]}}, True),
    "a field of no selector": ({"x": 1}, True),
}


@of_own_stores
@pytest.mark.parametrize(("spec", "is_whole"), CASES.values(), ids=CASES)
def test_what_cannot_be_enforced_whole_closes_until_it_is_corrected(
    scene: Scene, spec: dict[str, Any], is_whole: bool
) -> None:
    scene.write(spec)
    others = BOTH if is_whole else set()
    for store in (None, AwayStore(), AwayStore(), None):
        agent = scene.start(store)
        assert scene.is_closed(agent, BOTH)
        assert scene.is_closed(agent, others, "other")
        assert [key.name for key in agent.objects.closed] == ["p"]
        assert (
            "until it is corrected or deleted it closes"
            in agent.objects.problems[scene.place.key("p")]
        )
    key = scene.write({**WEB, "ingress": []})
    until(lambda: scene.is_closed(agent, {Direction.INGRESS}))
    assert scene.is_closed(agent, set(), "other")
    assert not agent.objects.closed
    assert not any(agent.warnings.values())
    scene.write(spec)
    scene.store.delete(key)
    until(lambda: scene.is_closed(agent, set()))
    assert not agent.objects.problems


@of_own_stores
@pytest.mark.parametrize("has_history", [True, False], ids=["read before", "never read"])
def test_what_is_not_enforced_whole_closes_whatever_the_node_saw_before(
    scene: Scene, has_history: bool
) -> None:
    if has_history:
        scene.write({**WEB, "ingress": [{}]})
        assert scene.is_closed(scene.start(), set())
    scene.write({**WEB, "ingress": [{}], "x": 1})
    agent = scene.start()
    assert scene.is_closed(agent, BOTH)


@of_own_stores
def test_what_was_read_before_and_cannot_be_now_stands(scene: Scene) -> None:
    scene.write({**WEB, "ingress": []})
    agent = scene.start()
    assert scene.is_closed(agent, {Direction.INGRESS})
    scene.write("cut", x=1)
    until(lambda: bool(agent.follower.unreadable.faults))
    for store in (None, AwayStore(), None):
        agent = scene.start(store)
        assert scene.is_closed(agent, {Direction.INGRESS})
        assert not agent.objects.closed
    assert "what was last read of it stays in force" in " ".join(agent.warnings.values())
    scene.write({**WEB, "ingress": [{}]})
    until(lambda: scene.is_closed(agent, set()))


@of_own_stores
def test_two_changes_in_one_answer_leave_what_was_read_last(scene: Scene, back_end: str) -> None:
    agent = scene.start()
    with scene.store.together() if back_end.startswith("sqlite") else ExitStack():
        scene.write({**WEB, "ingress": []})
    scene.write("cut")
    until(lambda: bool(agent.follower.unreadable.faults))
    until(lambda: scene.is_closed(agent, {Direction.INGRESS}))


# ------------------------------------------------------------------ bytes that are no object


def _cut_sqlite(scene: Scene, directory: Path) -> None:
    with closing(sqlite3.connect(directory / "store.db")) as other, other:
        for table in ("object", "change"):
            other.execute(f"UPDATE {table} SET document = '{{' WHERE name = 'p'")


def _cut_etcd(scene: Scene, etcd: Etcd) -> None:
    etcd.put(f"/podwire/v1/objects/networkpolicies/{scene.place.namespace}/p", b"{")


@of_own_stores
@pytest.mark.parametrize("was_read", [True, False], ids=["read before", "never read"])
def test_bytes_that_are_no_object(
    scene: Scene,
    back_end: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    was_read: bool,
) -> None:
    cut: Callable[[], None] = partial(_cut_sqlite, scene, tmp_path)
    if back_end == "etcd":
        cut = partial(_cut_etcd, scene, request.getfixturevalue("etcd"))
    key = scene.write({**WEB, "ingress": []})
    if was_read:
        assert scene.is_closed(scene.start(), {Direction.INGRESS})
        scene.stop()
    cut()
    wanted = {Direction.INGRESS} if was_read else BOTH
    for store in (None, AwayStore(), None):
        agent = scene.start(store)
        assert scene.is_closed(agent, wanted)
        assert scene.is_closed(agent, set() if was_read else BOTH, "other")
    scene.store.delete(key)
    until(lambda: scene.is_closed(agent, set()))


# ------------------------------------------------------------------ what an API server takes, and podwire does not


@pytest.mark.parametrize("back_end", [KUBERNETES], indirect=True)
def test_a_policy_that_an_api_server_takes_and_podwire_does_not(scene: Scene) -> None:
    key = scene.write({"podSelector": {"matchLabels": {"podwire.io/name": "web"}}})
    for store in (None, AwayStore(), None):
        agent = scene.start(store)
        assert scene.is_closed(agent, BOTH, "anything")
        assert not agent.find_closed("elsewhere", app="web")
    scene.store.delete(key)
    until(lambda: scene.is_closed(agent, set(), "anything"))
    assert not agent.objects.problems
