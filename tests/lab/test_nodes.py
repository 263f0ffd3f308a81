"""Several nodes as people use them: everybody reaches everybody, policy holds across nodes, and nodes come and go."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from podwire.lab import etcd, labs, traffic
from podwire.lab.show import matrix
from tests.lab.labrig import Lab, asking, lab_name, podwire
from tests.lab.rig import run
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "overlay": {"nodes": 2},
    "overlay-one-node": {"nodes": 1},
    "overlay-five-nodes-etcd": {"nodes": 5, "store": "etcd"},
    "overlay-ipv6-underlay": {"nodes": 2, "underlay": "6"},
    "overlay-ipv6-only": {"nodes": 2, "families": "6"},
    "overlay-ipv4-only": {"nodes": 2, "families": "4"},
    "overlay-small-mtu": {"nodes": 2, "mtu": 1400},
    "native": {"nodes": 2, "routing": "native"},
    "native-one-node": {"nodes": 1, "routing": "native"},
    "native-five-nodes": {"nodes": 5, "families": "4", "routing": "native"},
    "auto-one-node": {"nodes": 1, "routing": "auto"},
    "auto-five-nodes-etcd": {"nodes": 5, "families": "4", "routing": "auto", "store": "etcd"},
    "auto-two-subnets": {"nodes": 3, "routing": "auto"},
    "pools": {"nodes": 3, "ipam": "pool"},
    "pools-native-etcd": {"nodes": 2, "ipam": "pool", "routing": "native", "store": "etcd"},
}
PORT = 5432
HELD_DEADLINE_S = 60.0


def serve_everywhere(lab: Lab, per_node: int = 2) -> None:
    """Run pods on every node."""
    for node in lab.state.plan.nodes:
        for number in range(per_node):
            labs.run(lab.name, f"{node.name}-{number}", node.name)


CHECKS_MAX = 3


def assert_everybody_reached(lab: Lab) -> None:
    """A large datagram is what a path's MTU is learned by.

    A busy machine may stand still for seconds: so one question in a hundred may have to be asked again, and one
    connection in a hundred, which is tried once, may fail, but not each time.
    """
    for _ in range(CHECKS_MAX):
        pairs = matrix.check(lab.name)
        few = 1 + len(pairs) // 100
        failed = [pair for pair in pairs if not pair.attempt.ok]
        lost = find_lost(pairs)
        assert len(failed) <= few, "\n".join(map(str, failed[:20]))
        if not failed and len(lost) <= few:
            return
    raise AssertionError("\n".join(map(str, [*failed, *lost][:20])))


def find_lost(pairs: Sequence[matrix.CheckedPair]) -> Sequence[matrix.CheckedPair]:
    """List the short questions that had to be asked again."""
    return [pair for pair in pairs if pair.attempt.tries > 1 and not pair.size_bytes]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_everybody_reaches_everybody(shape: Mapping[str, Any]) -> None:
    if shape.get("store") == "etcd":
        etcd.require_program()
    lab = Lab(**{"routing": "overlay", **shape})
    try:
        serve_everywhere(lab, 1 if len(lab.state.plan.nodes) > 3 else 2)
        settled(lab)
        assert_everybody_reached(lab)
    finally:
        lab.close()


def settled(lab: Lab) -> None:
    """Wait until every node sees all others."""
    names = {node.name for node in lab.state.plan.nodes}
    for node in sorted(names):
        wait_for(
            lambda node=node: {row["name"] for row in lab.get("/node", node)} == names,  # type: ignore[misc]
            f"{node} to see every node",
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Lab]:
    """Three nodes with an overlay; a database on the first, and who asks it on the others."""
    lab = Lab(nodes=3, routing="overlay")
    try:
        settled(lab)
        for name, node, serve in (
            ("db", "node1", [f"{PORT}/tcp", f"{PORT}/udp"]),
            ("near", "node1", []),
            ("proxy", "node2", [f"{PORT}/tcp"]),
            ("other", "node2", []),
            ("far", "node3", []),
        ):
            labs.run(lab.name, name, node, labels={"app": name}, serve=serve)
        yield lab
    finally:
        lab.close()


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    """The cluster without policies; those of a test go with it."""
    yield cluster
    for kind in ("networkpolicies", "ciliumnetworkpolicies"):
        for name in cluster.cli("get", kind, "-o", "name").lines:
            assert cluster.cli("delete", kind, name.partition("/")[2]).code == 0
    for node in cluster.state.plan.nodes:
        wait_for(
            lambda node=node: cluster.get("/policy", node.name) == [],  # type: ignore[misc]
            "policies to be out of force",
        )


def apply(lab: Lab, tmp_path: Path, *documents: Mapping[str, Any]) -> None:
    """Apply objects, and wait until every node has them in force."""
    path = tmp_path / "objects.json"
    path.write_text("\n---\n".join(json.dumps(document) for document in documents))
    said = lab.cli("apply", "-f", str(path))
    assert said.code == 0, said.err
    for node in lab.state.plan.nodes:
        wait_for(
            lambda node=node: len(lab.get("/policy", node.name)) >= len(documents),  # type: ignore[misc]
            f"policies to reach {node.name}",
        )


def reaches(lab: Lab, source: str, target: str, protocol: str = "tcp") -> set[bool]:
    """Try each address of the target; gives what happened."""
    namespace, _ = labs.locate(lab.state, source)
    return {
        traffic.connect(namespace, address, PORT, protocol, timeout_s=0.4).ok
        for address in labs.find_addresses(lab.state, target)
    }


def holds(
    lab: Lab,
    source: str,
    target: str,
    wanted: bool,
    protocol: str = "tcp",
    *,
    deadline_s: float = HELD_DEADLINE_S,
) -> None:
    """Wait until the way is as wanted in every family."""
    wait_for(
        lambda: reaches(lab, source, target, protocol) == {wanted},
        f"{source} -> {target} to be {'open' if wanted else 'closed'}",
        deadline_s,
    )


def network_policy(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Give a NetworkPolicy of the namespace default."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }


def cilium_policy(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Give a CiliumNetworkPolicy of the namespace default."""
    return network_policy(name, spec) | {
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNetworkPolicy",
    }


def ingress_from(app: str) -> dict[str, Any]:
    return network_policy(
        "db-only-from",
        {
            "podSelector": {"matchLabels": {"app": "db"}},
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": app}}}]}],
        },
    )


# Policy across nodes


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_ingress_is_judged_by_the_identity_of_a_pod_on_another_node(
    lab: Lab, tmp_path: Path, protocol: str
) -> None:
    holds(lab, "other", "db", True, protocol)
    apply(lab, tmp_path, ingress_from("proxy"))
    holds(lab, "proxy", "db", True, protocol)
    for denied in ("other", "far", "near"):
        holds(lab, denied, "db", False, protocol)


def test_egress_is_judged_where_the_sender_is(lab: Lab, tmp_path: Path) -> None:
    policy = network_policy(
        "far-only-to-proxy",
        {
            "podSelector": {"matchLabels": {"app": "far"}},
            "policyTypes": ["Egress"],
            "egress": [{"to": [{"podSelector": {"matchLabels": {"app": "proxy"}}}]}],
        },
    )
    apply(lab, tmp_path, policy)
    holds(lab, "far", "proxy", True)
    holds(lab, "far", "db", False)


def test_a_host_of_another_node_is_a_remote_node(lab: Lab, tmp_path: Path) -> None:
    apply(lab, tmp_path, ingress_from("proxy"))
    holds(lab, "node1", "db", True)
    holds(lab, "node2", "db", False)
    entity = cilium_policy(
        "remote-nodes-too",
        {
            "endpointSelector": {"matchLabels": {"app": "db"}},
            "ingress": [{"fromEntities": ["remote-node"]}],
        },
    )
    apply(lab, tmp_path, ingress_from("proxy"), entity)
    holds(lab, "node2", "db", True)
    holds(lab, "other", "db", False)


def test_a_pod_that_comes_later_is_judged_as_its_labels_say(lab: Lab, tmp_path: Path) -> None:
    apply(lab, tmp_path, ingress_from("late"))
    labs.run(lab.name, "late", "node3", labels={"app": "late"})
    try:
        holds(lab, "late", "db", True)
        holds(lab, "far", "db", False)
    finally:
        labs.remove(lab.name, "late")


# Nodes come and go


def steady_flow(lab: Lab, source: str, target: str) -> AbstractContextManager[list[bool]]:
    """Ask echoes all the time; each entry is one answer or its lack."""
    return asking(lab, source, target, lambda *way: [traffic.ping(*way, timeout_s=10).ok])


def test_agents_that_are_killed_and_started_lose_no_packet(lab: Lab) -> None:
    with steady_flow(lab, "proxy", "db") as seen:
        for node in ("node1", "node2"):
            labs.change_agent(lab.name, node, "kill")
            labs.change_agent(lab.name, node, "start")
        wait_for(lambda: len(seen) > 50, "some packets")
    assert all(seen), f"{seen.count(False)} of {len(seen)} lost"


def test_an_agent_that_is_stopped_leaves_the_guard_of_the_tunnel_as_it_is(lab: Lab) -> None:
    """Also for builds whose programs do not mark: the program that does stays beside theirs (test_node_upgrade.py)."""

    def show_guard() -> str:
        command = ("nft", "list", "chain", "inet", "podwire", "tunnel_sent")
        return run("ip", "netns", "exec", lab.node("node2").namespace, *command)

    before = show_guard()
    assert "meta mark" in before
    with steady_flow(lab, "proxy", "db") as seen:
        labs.change_agent(lab.name, "node2", "stop")
        try:
            assert show_guard() == before
        finally:
            labs.change_agent(lab.name, "node2", "start")
        wait_for(lambda: len(seen) > 50, "some packets")
    assert all(seen), f"{seen.count(False)} of {len(seen)} lost"


def test_nodes_that_are_parted_and_healed_find_each_other_again(lab: Lab) -> None:
    with steady_flow(lab, "near", "db") as local, steady_flow(lab, "far", "db") as unaffected:
        labs.set_partition(lab.name, "node1", "node2")
        holds(lab, "proxy", "db", False)
        labs.heal(lab.name)
        holds(lab, "proxy", "db", True)
    assert all(local)
    assert all(unaffected)


def test_what_is_deleted_comes_back(lab: Lab) -> None:
    namespace = lab.node("node2").namespace
    run("ip", "-n", namespace, "link", "del", "pw-tunnel")
    holds(lab, "proxy", "db", True)
    show = ("tc", "-n", namespace, "filter", "show", "dev", "pw-tunnel", "ingress")
    wait_for(lambda: "from_overlay" in run(*show, check=False), "the program of the new device")
    run("tc", "-n", namespace, "filter", "del", "dev", "pw-tunnel", "ingress")
    holds(lab, "proxy", "db", True)
    wait_for(lambda: "from_overlay" in run(*show, check=False), "the program to be back")


def set_underlay_mtu(lab: Lab, node: str, mtu: int) -> None:
    """Change what a node's uplink carries."""
    run("ip", "-n", lab.node(node).namespace, "link", "set", "uplink", "mtu", str(mtu))


def tunnel_mtu(lab: Lab, node: str) -> int:
    """Read the MTU of a node's tunnel device."""
    [link] = json.loads(
        run("ip", "-n", lab.node(node).namespace, "-j", "link", "show", "pw-tunnel")
    )
    return int(link["mtu"])


def test_an_underlay_that_was_too_small_for_a_while_leaves_nothing_behind(lab: Lab) -> None:
    """Below 1,280 the kernel takes IPv6 off the tunnel device."""
    set_underlay_mtu(lab, "node2", 1290)
    wait_for(lambda: tunnel_mtu(lab, "node2") == 1240, "the tunnel to follow")
    set_underlay_mtu(lab, "node2", 1500)
    wait_for(lambda: tunnel_mtu(lab, "node2") == 1450, "the tunnel to follow back")
    holds(lab, "proxy", "db", True)


def test_datagrams_that_a_pod_has_cut_for_a_larger_mtu_arrive_whole(lab: Lab) -> None:
    place, _ = labs.locate(lab.state, "proxy")
    address = labs.find_addresses(lab.state, "db")[0]
    set_underlay_mtu(lab, "node2", 1400)
    try:
        wait_for(lambda: tunnel_mtu(lab, "node2") == 1350, "the tunnel to follow")
        wait_for(lambda: traffic.ping(place, address, size_bytes=3000).ok, "3,000 bytes to arrive")
        wait_for(lambda: traffic.ping(place, address, size_bytes=60_000).ok, "60,000 bytes")
    finally:
        set_underlay_mtu(lab, "node2", 1500)
        wait_for(lambda: tunnel_mtu(lab, "node2") == 1450, "the tunnel to follow back")


def test_a_node_that_vanishes_while_another_is_away_is_forgotten(tmp_path: Path) -> None:
    lab = Lab(nodes=3, families="4", routing="overlay")
    try:
        settled(lab)
        labs.change_agent(lab.name, "node1", "stop")
        labs.change_agent(lab.name, "node3", "kill")
        said = lab.cli("delete", "node", "node3", "--node", "node2")
        assert said.code == 0, said.err
        labs.change_agent(lab.name, "node1", "start")
        wait_for(
            lambda: {node["name"] for node in lab.get("/node", "node1")} == {"node1", "node2"},
            "node3 to be forgotten",
        )
        show = ("ip", "-n", lab.node("node1").namespace, "route", "show", "proto", "199")
        wait_for(lambda: "10.244.3.0/24" not in run(*show), "the route to node3 to go")
    finally:
        lab.close()


def test_a_node_replaced_under_its_name_takes_its_place(tmp_path: Path) -> None:
    lab = Lab(nodes=2, families="4", routing="overlay", store="etcd")
    try:
        settled(lab)
        serve_everywhere(lab, 1)
        before = lab.node("node2")
        labs.replace_node(lab.name, "node2", progress=lambda _line: None)
        assert lab.node("node2") == before
        labs.run(lab.name, "again", "node2")
        wait_for(
            lambda: all(pair.attempt.ok for pair in matrix.check(lab.name)),
            "everybody to reach everybody",
        )
    finally:
        lab.close()


# The store goes away


def test_without_the_store_flows_and_known_pods_go_on(tmp_path: Path) -> None:
    lab = Lab(nodes=2, families="4", routing="overlay", store="etcd")
    try:
        settled(lab)
        labs.run(lab.name, "web", "node1", labels={"app": "web"}, serve=[f"{PORT}/tcp"])
        labs.run(lab.name, "client", "node2", labels={"app": "client"})
        holds(lab, "client", "web", True)
        with steady_flow(lab, "client", "web") as seen:
            labs.change_store(lab.name, "kill")
            labs.run(lab.name, "web2", "node2", labels={"app": "web"})
            labs.remove(lab.name, "web2")
            labs.run(lab.name, "web3", "node2", labels={"app": "web"})
            labs.change_store(lab.name, "start")
            started = time.monotonic()
            labs.run(lab.name, "new", "node1", labels={"app": "new"})
            assert time.monotonic() - started < 15
        assert all(seen), f"{seen.count(False)} of {len(seen)} lost"
        wait_for(
            lambda: all(pair.attempt.ok for pair in matrix.check(lab.name)),
            "everything to agree again",
        )
    finally:
        lab.close()


def test_a_shape_that_cannot_be_is_refused_with_what_to_do() -> None:
    for words, says in (
        (("--families", "46", "--underlay", "4", "--routing", "native"), "overlay"),
        (("--mtu", "500"), "1360"),
        (("--nodes", "0"), "1 to"),
    ):
        said = podwire("lab", "up", "--name", lab_name(), *words)
        assert said.code == 6, said
        assert says in said.err
