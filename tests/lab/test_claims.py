"""A node that wants what another has: it is told why it cannot have it, and nobody else loses anything."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import pytest

from podwire.lab import etcd, labs, traffic
from podwire.lab.node import start_agent
from podwire.lab.state import changed_state
from podwire.lab.topology import NodePlan
from podwire.model.errors import Unavailable
from tests.lab.labrig import Lab
from tests.lab.rig import run
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

NEWCOMER = "node3"


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Two nodes with a pod each, and a third that has never been there."""
    etcd.require_program()
    lab = Lab(nodes=3, families="4", routing="overlay", store="etcd")
    try:
        labs.change_agent(lab.name, NEWCOMER, "stop")
        assert lab.cli("delete", "node", NEWCOMER, "--node", "node1").code == 0
        assert lab.cli("delete", "nodeendpoints", NEWCOMER, "--node", "node1").code == 0
        labs.run(lab.name, "a", "node1")
        labs.run(lab.name, "b", "node2")
        wait_for(lambda: known(lab, "node1") == {"node1", "node2"}, "the third to be forgotten")
        yield lab
    finally:
        lab.close()


def known(lab: Lab, node: str) -> set[str]:
    """Give the nodes that a node knows."""
    return {row["name"] for row in lab.get("/node", node)}


def change_settings(node: NodePlan, **settings: str) -> None:
    """Give a node's configuration other values."""
    path = node.directory / "agent.toml"
    lines = path.read_text().splitlines()
    kept = [line for line in lines if line.partition(" = ")[0] not in settings]
    path.write_text("\n".join([*kept, *(f"{name} = {value}" for name, value in settings.items())]))


@contextlib.contextmanager
def undisturbed(lab: Lab) -> Iterator[None]:
    """Send echoes from pod a to pod b and back all the time; none may be lost."""
    lost: list[str] = []
    sent = [0, 0]
    ended = threading.Event()

    def ask(index: int, source: str, target: str) -> None:
        namespace, _ = labs.locate(lab.state, source)
        address = labs.find_addresses(lab.state, target)[0]
        while not ended.wait(0.005):
            sent[index] += 1
            if not traffic.ping(namespace, address, timeout_s=10).ok:
                lost.append(f"{source} -> {target}, packet {sent[index]}")

    pairs = [(0, "a", "b"), (1, "b", "a")]
    threads = [threading.Thread(target=ask, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: min(sent) > 5, "the flow to begin")
        yield
        so_far = min(sent)
        wait_for(lambda: min(sent) > so_far + 50, "the flow to go on")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not lost, f"{len(lost)} of {sum(sent)} lost: {lost[:5]}"


def refusal(lab: Lab) -> str:
    """Start the newcomer, which must not come up; gives the end of its log."""
    with pytest.raises(Unavailable) as refused:
        labs.change_agent(lab.name, NEWCOMER, "start")
    return refused.value.message


def warnings(lab: Lab, node: str) -> Sequence[str]:
    """Give what a node's status warns of."""
    found = lab.get("/status", node)["warnings"]
    assert isinstance(found, list)
    return found


def route_to(lab: Lab, node: str, network: str) -> str:
    """Give a node's route to a range."""
    return run("ip", "-n", lab.node(node).namespace, "route", "show", network, "proto", "199")


def test_a_newcomer_with_a_running_nodes_range_or_address_is_told_why(lab: Lab) -> None:
    newcomer, victim = lab.node(NEWCOMER), lab.node("node2")
    [cidr], address = victim.pod_cidrs, victim.addresses[0]
    before = route_to(lab, "node1", cidr)
    assert before
    with undisturbed(lab):
        change_settings(newcomer, node_cidrs=f'["{cidr}"]')
        for _ in range(2):
            said = refusal(lab)
            assert (
                f"pod range {cidr} on node 'node3': node 'node2' at {address}, which lives" in said
            )
            assert "podwire delete node node2" in said
        change_settings(
            newcomer, node_cidrs=f'["{newcomer.pod_cidrs[0]}"]', node_address=f'"{address}"'
        )
        assert (
            f"address {address} on node 'node3': node 'node2' at {address}, which lives"
            in refusal(lab)
        )
    assert route_to(lab, "node1", cidr) == before
    assert known(lab, "node1") == known(lab, "node2") == {"node1", "node2"}
    change_settings(newcomer, node_address=f'"{newcomer.addresses[0]}"')
    labs.change_agent(lab.name, NEWCOMER, "start")
    wait_for(lambda: NEWCOMER in known(lab, "node2"), "it to be there as soon as it wants its own")


def test_all_settle_on_the_older_claim_when_both_got_in(lab: Lab) -> None:
    """The newcomer starts without the store, so nobody can refuse it; then it meets the others."""
    newcomer = lab.node(NEWCOMER)
    [cidr] = lab.node("node2").pod_cidrs
    before = route_to(lab, "node1", cidr)
    with undisturbed(lab):
        labs.set_partition(lab.name, NEWCOMER, "store")
        change_settings(newcomer, node_cidrs=f'["{cidr}"]')
        with changed_state(lab.name) as state:
            start_agent(state, newcomer, wait=False)
        wait_for((newcomer.directory / "api.sock").exists, "the newcomer to be there", 60)
        labs.heal(lab.name)
        for node in ("node1", "node2", NEWCOMER):
            said = wait_for(
                lambda node=node: [
                    warning for warning in warnings(lab, node) if "overlap" in warning
                ],  # type: ignore[misc]
                f"{node} to report the two",
                60,
            )
            assert (
                f"node2 ({cidr}) and node3 ({cidr}) overlap: node2 has the older claim" in said[0]
            )
        assert route_to(lab, "node1", cidr) == before
        wait_for(
            lambda: not lab.get("/status", NEWCOMER)["ready"], "the newcomer to be told unready"
        )
        wait_for(lambda: lab.get("/status", "node1")["ready"], "the first node to be ready")
        labs.change_agent(lab.name, "node2", "kill")
        labs.change_agent(lab.name, "node2", "start")  # it takes its range back
        labs.change_agent(lab.name, NEWCOMER, "stop")
        assert f"pod range {cidr} on node 'node3': node 'node2'" in refusal(lab)
        assert route_to(lab, "node1", cidr) == before
