"""Short flows from fresh ports between two pods that may do nothing else: all are answered, with an agent and without.

An answer to a single question comes through a closed door only because the question is remembered. Nothing is asked
twice; and as TCP sends again by itself, the packets that both pods' stacks sent and received are compared as well. The
clients ask no faster than they are answered: on a slow machine the same questions take longer.
10 seconds each; with `--full` three minutes with the agent and ten without.
"""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from bench.contestants import compile_c
from bench.exchanges import Town, read_outcome
from tests import leavings
from tests.lab.policy_rig import Scene, open_scene
from tests.lab.prober import Fate, Prober
from tests.policy_cases import parse_flows

pytestmark = [pytest.mark.lab, pytest.mark.timeout(3000)]

CLIENT, SERVER = "blue/a", "blue/b"
PER_S: Final = 500
SECONDS: Final = 10
PORTS: Final = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 80}]
OPEN: Final = parse_flows("a>b:53/udp a>b:80/tcp", allowed=True)
CLOSED: Final = parse_flows("a>b:54/udp a>c:53/udp c>b:53/udp b>a:53/udp b>a:80/tcp", allowed=False)


def policy(name: str, app: str, **spec: object) -> Mapping[str, Any]:
    """Give a policy that denies the pods of an app all but this."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": "blue"},
        "spec": {
            "podSelector": {"matchLabels": {"app": app}},
            "policyTypes": ["Ingress", "Egress"],
            **spec,
        },
    }


def only(app: str) -> dict[str, Any]:
    """Give the peer that is one app."""
    return {"podSelector": {"matchLabels": {"app": app}}}


POLICIES: Final = (
    policy("client", "a", egress=[{"to": [only("b")], "ports": PORTS}]),
    policy("server", "b", ingress=[{"from": [only("a")], "ports": PORTS}]),
)


@pytest.fixture(scope="module")
def tool() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix=leavings.NAME) as directory:
        yield compile_c("exchanges", Path(directory))


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Give a node with its default memory of flows, on which a may ask b, and b may do nothing but answer."""
    with open_scene(conntrack_entries=0, conntrack_quota=0) as made:
        made.enforce(POLICIES)
        with Prober(made.places, str(made.node.directory / "api.sock")) as prober:
            attempts = prober.play((flow, 4) for flow in (*OPEN, *CLOSED))
        wanted = {True: Fate.PASSED, False: Fate.DENIED}
        assert not [
            attempt.told for attempt in attempts if attempt.fate is not wanted[attempt.flow.allowed]
        ]
        yield made


def assert_all_answered(
    scene: Scene, tool: str, seconds: int, *, udp_per_s: int, tcp_per_s: int = 0
) -> None:
    """Ask for so long, and fail unless each question was answered and no packet lost."""
    pods = scene.pods
    server = pods[SERVER]
    town = Town([pods[CLIENT].namespace], [(server.namespace, server.pod.ipv4)])
    before = town.count_packets()
    with town.start(
        tool,
        seconds=seconds,
        udp_per_s=udp_per_s,
        tcp_per_s=tcp_per_s,
        at_most_s=3 * seconds + 240,
    ) as running:
        found = read_outcome(running)
    for protocol, rate in (("udp", udp_per_s), ("tcp", tcp_per_s)):
        counts = found[protocol]
        assert counts["answered"] == counts["asked"] == rate * seconds, found
    sent, received = town.count_packets_since(before)
    assert sent == received, found
    assert sent >= (2 * udp_per_s + 5 * tcp_per_s) * seconds


def test_each_question_is_answered(scene: Scene, tool: str, full: bool) -> None:
    assert_all_answered(scene, tool, 180 if full else SECONDS, udp_per_s=PER_S)


def test_new_flows_need_no_agent(scene: Scene, tool: str, full: bool) -> None:
    """The programs judge and remember, and what is over is collected, while no process of podwire runs."""
    scene.node.kill()
    try:
        seconds = 600 if full else SECONDS
        assert_all_answered(scene, tool, seconds, udp_per_s=PER_S, tcp_per_s=PER_S)
        assert not scene.node.is_running()
    finally:
        scene.node.start()
