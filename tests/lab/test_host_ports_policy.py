"""Host ports across nodes, and what policies say behind them: a client is judged by its own identity, whatever NAT did.

Two nodes, by the tunnel and natively: the pod that serves is on the first, and everybody asks the first node's address.
"""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import pytest

from podwire.lab import labs, traffic
from tests.lab.labrig import Lab
from tests.lab.test_policy_cli import shell
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

HOST_PORT, POD_PORT = 8080, 80
ANSWER_S, REFUSED_S = 30.0, 0.5
PROTOCOLS: Final = ("tcp", "udp")
PODS: Final = {
    "near-friend": ("node1", "friend"),
    "near-stranger": ("node1", "stranger"),
    "far-friend": ("node2", "friend"),
    "far-stranger": ("node2", "stranger"),
}
POLICY: Final[dict[str, Any]] = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "friends-only", "namespace": "default"},
    "spec": {
        "podSelector": {"matchLabels": {"app": "web"}},
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "friend"}}}]}],
    },
}
EVERYBODY: Final = (*PODS, "web", "node1", "node2", "world")
ALLOWED: Final = {
    # A pod always reaches itself, and a node its own pods (docs/policy.md).
    "native": ("near-friend", "far-friend", "node1", "web"),
    # What a pod behind the tunnel sends to another node's address comes without the tunnel: anybody on the wire could
    # have sent it.
    "overlay": ("near-friend", "node1", "web"),
}


def start_pods(lab: Lab) -> None:
    """Start the pod that serves, and those that ask."""
    mappings = [
        {"hostPort": HOST_PORT, "containerPort": POD_PORT, "protocol": protocol}
        for protocol in PROTOCOLS
    ]
    extra = {"runtimeConfig": {"portMappings": mappings}}
    serve = [f"{POD_PORT}/{protocol}" for protocol in PROTOCOLS]
    labs.run(lab.name, "web", "node1", labels={"app": "web"}, serve=serve, extra=extra)
    for name, (node, app) in PODS.items():
        labs.run(lab.name, name, node, labels={"app": app})


@pytest.fixture(scope="module", params=ALLOWED)
def routing(request: pytest.FixtureRequest) -> str:
    """How the nodes reach each other's pods."""
    return str(request.param)


@pytest.fixture(scope="module")
def lab(routing: str) -> Iterator[Lab]:
    """Two nodes; one of them serves."""
    made = Lab(2, "46", routing=routing)
    try:
        start_pods(made)
        yield made
    finally:
        made.close()


def place_of(lab: Lab, name: str) -> str:
    """Give the namespace of somebody who asks."""
    if name == "world":
        return lab.state.plan.world_namespace
    if name in PODS or name == "web":
        [pod] = [pod for pod in lab.state.pods if pod.name == name]
        return pod.netns
    return lab.node(name).namespace


def ask(lab: Lab, name: str, address: str, protocol: str, timeout_s: float) -> traffic.Attempt:
    """Have somebody ask the first node's port."""
    tries = 3 if protocol == "udp" and timeout_s == ANSWER_S else 1
    return traffic.connect(
        place_of(lab, name), address, HOST_PORT, protocol, timeout_s=timeout_s, tries=tries
    )


def expected_peer(lab: Lab, name: str, address: str) -> str | None:
    """Give whom the pod sees; None: an address of the node's."""
    family = 1 if ":" in address else 0
    if name in PODS:
        [pod] = [pod for pod in lab.state.pods if pod.name == name]
        return pod.addresses[family]
    return lab.node("node2").addresses[family] if name == "node2" else None


def assert_answered(lab: Lab, name: str, protocol: str) -> None:
    """Fail unless the pod answers at both addresses of the node, and saw who asked."""
    for address in lab.node("node1").addresses:
        attempt = ask(lab, name, address, protocol, ANSWER_S)
        assert attempt.ok, (name, address, protocol, attempt.answer)
        assert attempt.answer.startswith("default/web node1 ")
        peer = attempt.answer.split()[-1]
        assert peer == (expected_peer(lab, name, address) or peer)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_everybody_reaches_the_pod_by_the_nodes_port(lab: Lab, protocol: str) -> None:
    for name in EVERYBODY:
        assert_answered(lab, name, protocol)


@pytest.fixture
def closed(lab: Lab) -> Iterator[Lab]:
    """The lab in which only friends may ask."""
    done = shell(lab, "apply", "-f", "-", stdin=json.dumps(POLICY))
    assert done.code == 0, done.err
    wait_for(partial(is_closed, lab), "the policy to be in force")
    yield lab
    assert lab.cli("delete", "networkpolicy", "default/friends-only").code == 0
    wait_for(lambda: not is_closed(lab), "the policy to be out of force")


def is_closed(lab: Lab) -> bool:
    """Tell whether the pod's ingress is restricted."""
    [web] = [endpoint for endpoint in lab.get("/endpoint", "node1") if endpoint["pod"] == "web"]
    return bool(web["policyEnforcement"]["ingress"] == "enabled")


def count_drops(lab: Lab) -> int:
    """Count what the policy dropped on its way to the pod."""
    rows = lab.get("/map/metrics", "node1")["rows"]
    return sum(row["packets"] for row in rows if row["reason"] == "policy")


def has_dropped_more(lab: Lab, before: int) -> bool:
    """Tell whether the policy dropped something since."""
    return count_drops(lab) > before


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_default_deny_holds_behind_the_nodes_port(closed: Lab, routing: str, protocol: str) -> None:
    for name in EVERYBODY:
        if name in ALLOWED[routing]:
            assert_answered(closed, name, protocol)
            continue
        for address in closed.node("node1").addresses:
            before = count_drops(closed)
            attempt = ask(closed, name, address, protocol, REFUSED_S)
            assert not attempt.ok, (name, address, attempt.answer)
            wait_for(partial(has_dropped_more, closed, before), f"{name} to be dropped")


def test_an_open_connection_ends_with_the_policy_that_closes_it(lab: Lab) -> None:
    """The node's stack goes on translating it; the pod's program judges it anew."""
    address = lab.node("node1").addresses[0]
    with traffic.socket_in(place_of(lab, "world"), address, "udp") as talker:
        talker.settimeout(ANSWER_S)
        talker.connect((address, HOST_PORT))
        talker.send(b"?")
        assert talker.recv(512)
        done = shell(lab, "apply", "-f", "-", stdin=json.dumps(POLICY))
        assert done.code == 0, done.err
        wait_for(partial(is_closed, lab), "the policy to be in force")
        before = count_drops(lab)
        talker.settimeout(REFUSED_S)
        talker.send(b"?")
        with pytest.raises(TimeoutError):
            talker.recv(512)
        wait_for(partial(has_dropped_more, lab, before), "the question to be dropped")
        assert lab.cli("delete", "networkpolicy", "default/friends-only").code == 0
        wait_for(lambda: not is_closed(lab), "the policy to be out of force")
