"""The life of nodes on a real API server: a Node that is deleted, one that gets its range, and who tells of it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from podwire.control.cluster.facts import decode_node, node_key
from podwire.lab.kubernetes.api_server import ApiServer
from tests.contract import api_rig, kubernetes_rig
from tests.contract.node_lives import Agent, Cluster
from tests.unit.test_cluster_planner import ips
from tests.waiting import ask_until

RANGE: Final = "10.244.5.0/24"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_rig.started(tmp_path_factory.mktemp("lives")) as made:
        kubernetes_rig.install_crds(made)
        yield made


@pytest.fixture
def cluster(server: ApiServer, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(server, tmp_path)
    yield made
    made.close()
    made.clean()


def test_a_range_passes_to_a_new_node_while_the_old_agent_still_runs(
    cluster: Cluster, record_property: Any
) -> None:
    cluster.add_node("old", RANGE)
    cluster.add_node("peer", "10.244.6.0/24")
    peer, old = cluster.start("peer"), cluster.start("old")
    ask_until(lambda: peer.sends_to(RANGE) == "old", "the old node")
    running = old.attach(1)
    assert running

    cluster.delete_node("old")
    cluster.add_node("new", RANGE)
    began_s = time.monotonic()
    new = cluster.start("new")
    ask_until(new.gives, "an address on the new node")
    ask_until(lambda: peer.sends_to(RANGE) == "new", "the peer to follow")
    taken_s = time.monotonic() - began_s
    record_property("followed_s", taken_s)
    print(f"served and followed after {taken_s:.2f} s")
    ask_until(lambda: not old.gives(), "the old node to give nothing")
    told = ask_until(lambda: cluster.events("old", "PodCIDRContested"), "the Event")
    assert "node old" in told[0]
    assert "node new" in told[0]
    assert new.health.ready or not [check for check in new.health.checks() if not check.ok]
    # What ran goes on running: only nothing new is given.
    assert old.ipam.find_owner(ips(running)[0]) == 1


def test_of_two_nodes_with_one_range_the_first_serves_and_the_other_when_the_contest_ends(
    cluster: Cluster,
) -> None:
    cluster.add_node("first", RANGE)
    cluster.add_node("second", RANGE)
    cluster.add_node("peer", "10.244.6.0/24")
    peer, first = cluster.start("peer"), cluster.start("first")
    ask_until(lambda: peer.sends_to(RANGE) == "first", "the first node")
    second = cluster.start("second")
    assert not second.gives()
    ask_until(lambda: cluster.events("second", "PodCIDRContested"), "the Event")
    assert first.attach(1)
    # The first node is made anew with a range of its own; nobody restarts an agent.
    cluster.delete_node("first")
    ask_until(lambda: not first.gives(), "the first node to give nothing")
    cluster.add_node("first", "10.244.7.0/24")
    address = ask_until(first.gives, "an address of the first node")
    assert address.startswith("10.244.7.")
    assert ask_until(second.gives, "an address of the second node").startswith("10.244.5.")
    ask_until(
        lambda: (peer.sends_to(RANGE), peer.sends_to("10.244.7.0/24")) == ("second", "first"),
        "the peer to follow",
    )
    said = ask_until(lambda: cluster.events("first", "PodCIDRsChanged"), "what is told of its pods")
    assert any("start them again" in text or "is gone" in text for text in said)


def test_core_nodes_of_others_are_read_only_for_a_contest(cluster: Cluster) -> None:
    before = len(cluster.server.read_audit())
    cluster.add_node("one", RANGE)
    cluster.add_node("two", "10.244.6.0/24")
    one, two = cluster.start("one"), cluster.start("two")
    ask_until(lambda: two.sends_to(RANGE) == "one", "one")
    ask_until(lambda: one.sends_to("10.244.6.0/24") == "two", "two")
    assert count_reads(cluster, before) == []
    cluster.add_node("three", RANGE)
    three = cluster.start("three")
    ask_until(lambda: not three.gives(), "the contest")
    ask_until(lambda: len(count_reads(cluster, before)) >= 6, "the reads of three agents")
    read = count_reads(cluster, before)
    assert sorted(read) == 3 * ["one"] + 3 * ["three"]


def find_owner(agent: Agent) -> str:
    stored = agent.store.get(node_key(agent.name))
    if stored is None:
        return ""
    assert decode_node(stored).core_uid, stored.document
    return decode_node(stored).core_uid


def count_reads(cluster: Cluster, before: int) -> list[str]:
    """Name the core Nodes that agents have asked for, beside the look of each at its own when it starts."""
    asked = [
        event["objectRef"]["name"]
        for event in cluster.server.read_audit()[before:]
        if event["stage"] == "ResponseComplete"
        and event["verb"] == "get"
        and event["requestURI"].startswith("/api/v1/nodes/")
    ]
    for name in ("one", "two", "three"):
        if name in asked:
            asked.remove(name)
    return asked


def test_what_a_node_publishes_goes_with_its_core_node_and_comes_with_the_next(
    cluster: Cluster,
) -> None:
    cluster.add_node("n", RANGE)
    agent = cluster.start("n")
    first = ask_until(lambda: find_owner(agent), "the publication")
    assert first == cluster.server.client.get("/api/v1/nodes/n")["metadata"]["uid"]
    cluster.delete_node("n")
    ask_until(lambda: not agent.gives(), "the end of the core Node")
    # As the garbage collector does, which this API server has no controller for.
    cluster.server.client.delete("/apis/podwire.io/v1/nodes/n")
    ask_until(
        lambda: any("no core Node n" in check.message for check in agent.health.checks()), "status"
    )
    assert agent.store.get(node_key("n")) is None
    cluster.add_node("n", RANGE)
    assert ask_until(lambda: find_owner(agent), "the publication") != first
    assert agent.gives()


@pytest.mark.parametrize("kind", ["nodes", "nodeendpoints"])
@pytest.mark.parametrize("how", ["deleted", "written over"])
def test_what_somebody_else_does_to_a_publication_is_put_right(
    cluster: Cluster, kind: str, how: str
) -> None:
    cluster.add_node("n", RANGE)
    agent, client = cluster.start("n"), cluster.server.client
    path = f"/apis/podwire.io/v1/{kind}/n"
    ask_until(lambda: client.answers(path), "the publication")
    ask_until(lambda: find_owner(agent), "its owner")
    before = client.get(path)
    if how == "deleted":
        client.delete(path)
    elif kind == "nodes":
        client.patch(path, {"spec": {"instance": "somebody", "podCIDRs": ["10.244.99.0/24"]}})
    else:
        client.patch(path, {"spec": {"endpoints": "no such thing", "bases": []}})

    def is_right() -> bool:
        if not client.answers(path):
            return False
        now = client.get(path)
        changed = now["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"]
        names = ("instance", "podCIDRs") if kind == "nodes" else ("endpoints", "bases")
        return changed and all(now["spec"].get(name) == before["spec"].get(name) for name in names)

    ask_until(is_right, "the publication to be right again")
