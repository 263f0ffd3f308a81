"""Something else writes policies into the store that cannot be enforced whole: packets stop, drops say why, the node
still reaches its pods, and all is open again when they are corrected."""

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final

import pytest

from podwire.model.store import ObjectKey, StoredObject
from podwire.store.sqlite import SqliteStore
from tests.lab.policy_rig import Scene, open_scene
from tests.lab.prober import Fate, Prober
from tests.policy_cases import parse_flows
from tests.waiting import wait_for

pytestmark = pytest.mark.lab

DEADLINE_S: Final = 60.0
KEY: Final = ObjectKey("networkpolicies", "blue", "odd")
UNKNOWN: Final = {"podSelector": {"matchLabels": {"app": "a"}}, "ingress": [{}], "level": 7}
UNREADABLE: Final = ["all"]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with open_scene() as made:
        yield made


@pytest.fixture(autouse=True)
def _clean(scene: Scene) -> Iterator[None]:
    yield
    scene.api.ask("DELETE", "/object/networkpolicies/blue/odd")
    wait_for(lambda: not list_policies(scene), "the end of the policy", DEADLINE_S)


def write(scene: Scene, spec: object) -> None:
    """Write past everything that checks policies."""
    document = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": KEY.name, "namespace": KEY.namespace},
        "spec": spec,
    }
    with closing(SqliteStore(scene.node.directory / "state" / "store.db")) as store:
        old = store.get(KEY)
        new = StoredObject(key=KEY, revision=old.revision if old else 0, document=document)
        store.update(new) if old else store.create(new)


def list_policies(scene: Scene) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = scene.api.must("GET", "/policy")
    return found


def wait_for_state(scene: Scene, state: str) -> None:
    def is_there() -> bool:
        return [policy["state"] for policy in list_policies(scene)] == [state]

    wait_for(is_there, f"a policy that is {state}", DEADLINE_S)
    scene.wait_enforced(0)


def play(scene: Scene, flows: str, *, allowed: bool) -> list[Any]:
    with Prober(scene.places, str(scene.node.directory / "api.sock")) as prober:
        attempts = list(prober.play((flow, 4) for flow in parse_flows(flows, allowed=allowed)))
    wanted = Fate.PASSED if allowed else Fate.DENIED
    wrong = [attempt.told for attempt in attempts if attempt.fate is not wanted]
    assert not wrong, wrong
    return attempts


def restart(scene: Scene) -> None:
    scene.api.close()
    scene.node.kill()
    scene.node.start()
    scene.node.settle()


def test_packets_stop_and_the_drop_names_the_policy(scene: Scene) -> None:
    play(scene, "b>a:80/tcp a>server:80/tcp b>c:80/tcp", allowed=True)
    write(scene, UNKNOWN)
    wait_for_state(scene, "closed")
    for _ in range(2):
        attempts = play(scene, "b>a:80/tcp a>server:80/tcp client>a:80/tcp", allowed=False)
        for attempt in attempts:
            assert [(told["name"], told["rule"]) for told in attempt.event["policies"]] == [
                ("odd", "unenforceable")
            ]
        play(scene, "b>c:80/tcp c>server:80/tcp host>a:80/tcp", allowed=True)
        restart(scene)
        wait_for_state(scene, "closed")
    [warning] = [text for text in scene.api.must("GET", "/status")["warnings"] if "odd" in text]
    assert "spec.level is an unknown field" in warning
    assert "podwire delete networkpolicies odd -n blue" in warning
    asked = {"from": "pod:blue/b", "to": "pod:blue/a", "port": "80/tcp"}
    traced = scene.api.must("POST", "/policy/trace", asked)
    assert traced["verdict"] == "denied"
    assert "because it cannot be enforced whole" in json.dumps(traced["why"])
    write(scene, {name: value for name, value in UNKNOWN.items() if name != "level"})
    wait_for_state(scene, "enforced")
    play(scene, "b>a:80/tcp a>server:80/tcp", allowed=True)


def test_what_never_could_be_read_closes_its_namespace(scene: Scene) -> None:
    write(scene, UNREADABLE)
    wait_for_state(scene, "closed")
    play(scene, "b>a:80/tcp c>server:80/tcp red/a>b:80/tcp", allowed=False)
    play(scene, "red/a>red/b:80/tcp host>a:80/tcp host>c:80/tcp", allowed=True)
    assert scene.api.must("DELETE", "/object/networkpolicies/blue/odd")
    wait_for(lambda: not list_policies(scene), "the end of the policy", DEADLINE_S)
    scene.wait_enforced(0)
    play(scene, "b>a:80/tcp c>server:80/tcp red/a>b:80/tcp", allowed=True)


def test_what_was_read_before_stands(scene: Scene) -> None:
    write(scene, {"podSelector": {}, "policyTypes": ["Egress"]})
    wait_for_state(scene, "enforced")
    write(scene, UNREADABLE)
    wait_for_state(scene, "kept")
    for _ in range(2):
        play(scene, "a>server:80/tcp", allowed=False)
        play(scene, "red/a>b:80/tcp", allowed=True)
        restart(scene)
        wait_for_state(scene, "kept")
