"""A policy that does not fit: what was in force stays, people are told, and everything recovers.

The node has room for a handful of entries. What "in force" means is shown by packets, and what "nothing is left" means
by other tools.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest

from tests.lab.policy_rig import Scene, cni_arguments, open_scene, pod_environment
from tests.lab.prober import Fate, Prober
from tests.lab.rig import Outcome, Present
from tests.policy_cases import PODS, Pod, parse_flows
from tests.waiting import wait_for

pytestmark = pytest.mark.lab

ROOM: Final = 64
PLENTY: Final = 4096
TRY_AGAIN_LATER: Final = 102
"""The CNI error code of a policy that does not fit."""
DEADLINE_S: Final = 120.0
SUBJECT: Final = "blue/a"

Document = dict[str, Any]


def allow_ports(name: str, app: str, ports: Sequence[int]) -> Document:
    """Let everybody of the namespace reach these ports of a pod; ports that are odd make an entry each."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": "blue"},
        "spec": {
            "podSelector": {"matchLabels": {"app": app}},
            "ingress": [{"ports": [{"port": port} for port in ports]}],
        },
    }


SMALL: Final = allow_ports("small", "a", [81])
BIG_PORTS: Final = range(1001, 1401, 2)
BIG: Final = allow_ports("big", "a", BIG_PORTS)
BEFORE: Final = (
    *parse_flows("b>a:81/tcp", allowed=True),
    *parse_flows("b>a:1001/tcp b>a:99/udp", allowed=False),
)
"""What flows while SMALL alone is in force for a."""


@pytest.fixture(scope="module")
def shared_scene() -> Iterator[Scene]:
    with open_scene(policy_entries=ROOM) as made:
        yield made


@pytest.fixture
def scene(shared_scene: Scene) -> Scene:
    """Give a node whose pod a is behind; for tests that leave no pods."""
    return overflow(shared_scene)


@pytest.fixture
def own_scene() -> Iterator[Scene]:
    """Give such a node to one test alone."""
    with open_scene(policy_entries=ROOM) as made:
        yield overflow(made)


def overflow(scene: Scene) -> Scene:
    scene.api.must("PATCH", "/config", {"policy_entries": ROOM})
    scene.enforce([SMALL])
    scene.write([SMALL, BIG])
    wait_for(lambda: state_of(scene, SUBJECT) == "not-ready", "the overflow", DEADLINE_S)
    return scene


def state_of(scene: Scene, title: str) -> str:
    return str(scene.api.must("GET", f"/endpoint/{scene.pods[title].endpoint}")["state"])


def assert_flows(scene: Scene, flows: Sequence[Any]) -> None:
    with Prober(scene.places, str(scene.node.directory / "api.sock")) as prober:
        attempts = prober.play((flow, family) for flow in flows for family in (4, 6))
    wanted = {True: Fate.PASSED, False: Fate.DENIED}
    wrong = [
        attempt.told for attempt in attempts if attempt.fate is not wanted[attempt.flow.allowed]
    ]
    assert not wrong, "\n".join([*wrong, scene.entries(SUBJECT)])


def assert_big_is_in_force(scene: Scene) -> None:
    scene.wait_enforced(0)
    assert_flows(scene, parse_flows("b>a:81/tcp b>a:1001/tcp b>a:1399/tcp", allowed=True))
    assert_flows(scene, parse_flows("b>a:1002/tcp", allowed=False))


def assert_big_is_gone(scene: Scene) -> None:
    scene.wait_enforced(0)
    assert_flows(scene, BEFORE)
    wait_for(
        lambda: not scene.api.must("GET", "/status")["policy"]["notInForce"],
        "nothing to be out of force",
        DEADLINE_S,
    )


def new_pod(**changes: Any) -> Pod:
    """Give a pod of blue that policies about a select, with addresses of its own."""
    addresses = {"ipv4": "10.244.1.40", "ipv6": "fd10:244:0:1::40"}
    return replace(PODS[SUBJECT], name="late", **{**addresses, **changes})


def held(scene: Scene) -> Present:
    """Tell what the node holds; of records only whose they are, as what they say of a state may go on."""
    present = scene.node.look()
    return replace(present, records={number: {} for number in present.records})


def add(scene: Scene, namespace: str, pod: Pod) -> Outcome:
    config, names = cni_arguments(pod), pod_environment(pod)
    return scene.node.cni("ADD", namespace, namespace, config=config, environment=names)


def test_what_was_in_force_stays_and_the_endpoint_says_why(scene: Scene) -> None:
    assert_flows(scene, BEFORE)
    log = scene.api.must("GET", f"/endpoint/{scene.pods[SUBJECT].endpoint}/log")
    causes = [change["cause"] for change in log if change["new"] == "not-ready"]
    assert "200 new entries" in causes[0]
    assert "NetworkPolicy blue/big" in causes[0]
    wait_for(
        lambda: scene.api.must("GET", "/status")["policy"]["notInForce"], "the problem", DEADLINE_S
    )
    [told] = scene.api.must("GET", "/status")["policy"]["notInForce"]
    assert "NetworkPolicy blue/big" in told
    assert f"of {ROOM} are in use" in told
    problems = {policy["name"]: policy["problem"] for policy in scene.api.must("GET", "/policy")}
    assert "200 new entries" in problems["big"]


def test_everybody_else_is_ready_and_follows_other_policies(scene: Scene) -> None:
    others = [title for title in PODS if title != SUBJECT]
    wait_for(
        lambda: {state_of(scene, title) for title in others} == {"ready"},
        "the others to be ready",
        DEADLINE_S,
    )
    scene.write([SMALL, BIG, allow_ports("other", "c", [80])])
    [flow] = parse_flows("b>c:99/tcp", allowed=False)
    with Prober(scene.places, str(scene.node.directory / "api.sock")) as prober:
        wait_for(
            lambda: prober.play([(flow, 4)])[0].fate is Fate.DENIED, "the other policy", DEADLINE_S
        )
    assert_flows(scene, (*BEFORE, *parse_flows("b>c:80/tcp", allowed=True)))


@pytest.mark.parametrize(
    "changes", [{}, {"labels": {"app": "a"}}], ids=["a-known-identity", "a-new-identity"]
)
def test_an_add_that_needs_it_is_told_so_and_leaves_nothing(
    own_scene: Scene, changes: dict[str, Any]
) -> None:
    namespace = own_scene.node.make_pod_namespace()
    before = held(own_scene)
    outcome = add(own_scene, namespace, new_pod(**changes))
    assert (outcome.status, outcome.document["code"]) == (1, TRY_AGAIN_LATER)
    assert f"of {ROOM} are in use" in outcome.document["msg"]
    assert "policy_entries" in outcome.document["details"]

    def is_gone() -> bool:
        """The device goes behind the answer, as after a DEL."""
        return held(own_scene) == before

    wait_for(is_gone, "the failed ADD to leave nothing", DEADLINE_S)
    own_scene.enforce([SMALL])
    outcome = add(own_scene, namespace, new_pod(**changes))
    assert outcome.ok, outcome.document
    own_scene.wait_enforced(0)


def test_an_add_that_does_not_need_it_succeeds(own_scene: Scene) -> None:
    namespace = own_scene.node.make_pod_namespace()
    outcome = add(own_scene, namespace, new_pod(labels={"app": "other"}))
    assert outcome.ok, outcome.document
    assert_flows(own_scene, BEFORE)


def test_an_update_that_does_not_fit_leaves_the_version_before_in_force(scene: Scene) -> None:
    scene.write([SMALL])
    assert_big_is_gone(scene)
    scene.write([allow_ports("small", "a", BIG_PORTS)])
    wait_for(lambda: state_of(scene, SUBJECT) == "not-ready", "the overflow", DEADLINE_S)
    assert_flows(scene, BEFORE)


def test_it_recovers_when_the_policy_is_deleted(scene: Scene) -> None:
    scene.write([SMALL])
    assert_big_is_gone(scene)


def test_it_recovers_when_there_is_more_room(scene: Scene) -> None:
    scene.api.must("PATCH", "/config", {"policy_entries": PLENTY})
    assert_big_is_in_force(scene)


def test_it_recovers_when_others_make_room(scene: Scene) -> None:
    """Ten entries of c and fifty of a do not fit together; without those of c they do."""
    fitting = allow_ports("big", "a", range(1001, 1121, 2))
    others = allow_ports("other", "c", range(2001, 2021, 2))
    scene.enforce([SMALL, others])
    scene.write([SMALL, others, fitting])
    wait_for(lambda: state_of(scene, SUBJECT) == "not-ready", "the overflow", DEADLINE_S)
    scene.write([SMALL, fitting])
    scene.wait_enforced(0)
    assert_flows(scene, parse_flows("b>a:81/tcp b>a:1001/tcp b>c:99/tcp", allowed=True))


def test_a_restart_keeps_what_was_in_force_and_recovers_too(scene: Scene) -> None:
    scene.node.stop()
    scene.node.start()
    wait_for(lambda: state_of(scene, SUBJECT) == "not-ready", "the overflow, again", DEADLINE_S)
    assert_flows(scene, BEFORE)
    scene.write([SMALL])
    assert_big_is_gone(scene)


def test_the_maps_real_capacity_is_shown(scene: Scene) -> None:
    def shown() -> tuple[int, int]:
        [row] = [table for table in scene.api.must("GET", "/map") if table["name"] == "policy"]
        return row["maxEntries"], row["entries"]

    wait_for(lambda: shown() == (ROOM, 1), "the entry of the small policy alone", DEADLINE_S)
    assert b'map_capacity{map="policy"} 64.0' in scene.api.must("GET", "/metrics")
