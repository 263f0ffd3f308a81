"""A trace between pods of two nodes, and what it says when a pod or an agent is not there."""

from collections.abc import Callable
from typing import Any

import pytest

from podwire.cli import trace
from podwire.cli.client import EXIT_NOT_FOUND, EXIT_UNREACHABLE, CliError
from podwire.cli.trace import trace_flow

AWAY = CliError(EXIT_UNREACHABLE, "ask the agent of node3: connection refused", "start it")
PODS = {"node1": "a", "node2": "b"}
SIDE = {"verdict": "allowed", "revision": 7}


def answer(agent: str, source: str, target: str, _port: str) -> dict[str, Any]:
    """Say what a node says that knows its own pod by name, and others by address."""
    for end in (source, target):
        name = end.removeprefix("pod:default/")
        if name != end and PODS.get(agent) != name:
            raise CliError(EXIT_NOT_FOUND, f"find {end}", "")
    return {"verdict": "allowed", "egress": SIDE, "ingress": SIDE, "why": [], "revision": 7}


@pytest.fixture
def is_away(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Stand in for three agents; give the place that says whether the third one is away."""
    away = [False]

    def ask_all(_opts: object, ask: Callable[[str], object]) -> tuple[list[Any], CliError | None]:
        names = ["node1", "node2"] if away[0] else ["node1", "node2", "node3"]
        return [(name, ask(name)) for name in names], AWAY if away[0] else None

    def rows(agent: str, _resource: str) -> list[dict[str, Any]]:
        if agent not in PODS:
            return []
        addresses = [f"10.0.0.{agent[-1]}"]
        return [{"id": 1, "namespace": "default", "pod": PODS[agent], "addresses": addresses}]

    monkeypatch.setattr(trace, "ask_all", ask_all)
    monkeypatch.setattr(trace, "get_rows", rows)
    monkeypatch.setattr(trace, "_ask", answer)
    return away


def ask(source: str, target: str) -> tuple[Any, CliError | None]:
    opts: Any = None
    return trace_flow(opts, f"pod:default/{source}", f"pod:default/{target}", "80/tcp")


def test_pods_of_two_nodes_are_traced_also_while_a_third_agent_is_away(is_away: list[bool]) -> None:
    assert ask("a", "b")[1] is None
    is_away[0] = True
    traced, failure = ask("a", "b")
    assert (traced["verdict"], failure) == ("allowed", AWAY)


@pytest.mark.parametrize(("source", "target"), [("a", "nope"), ("nope", "a"), ("b", "nope")])
def test_a_pod_that_nobody_has_is_named(is_away: list[bool], source: str, target: str) -> None:
    with pytest.raises(CliError, match="find pod:default/nope") as missing:
        ask(source, target)
    assert missing.value.exit_code == EXIT_NOT_FOUND
    is_away[0] = True
    with pytest.raises(CliError, match="node3") as unreachable:
        ask(source, target)
    assert unreachable.value.exit_code == EXIT_UNREACHABLE
