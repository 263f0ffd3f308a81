"""Pods of two nodes that reach each other natively, past both hosts' stacks, beside what needs the stack."""

import contextlib
import ipaddress
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from podwire.lab import labs, traffic
from tests.lab import test_nodes
from tests.lab.labrig import Lab, asking
from tests.lab.rig import run
from tests.lab.test_nodes import PORT
from tests.waiting import wait_for

pytestmark = pytest.mark.lab

SERVICE_PORT, NODE_PORT = 80, 30080
SERVICES = {4: "172.30.0.10", 6: "fd30::10"}
HELD_DEADLINE_S = 60
LOST_AFTER_S = 10
"""What has not come back by then is lost: a machine may stand still for a second or three."""
holds = partial(test_nodes.holds, deadline_s=HELD_DEADLINE_S)
connect = partial(traffic.connect, timeout_s=LOST_AFTER_S)
ping = partial(traffic.ping, timeout_s=LOST_AFTER_S)


def settled(lab: Lab) -> None:
    """Wait until every node has the other one's pods past its stack."""
    for node in lab.state.plan.nodes:
        wait_for(
            lambda node=node: lab.get("/map/settings", node.name)["rows"][0]["native_ifindex"],  # type: ignore[misc]
            f"{node.name} to look at its uplink",
        )


@pytest.fixture(scope="module", params=["46", "4", "6"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Two nodes; a server on the first, clients on both."""
    made = Lab(nodes=2, families=request.param, routing="native")
    try:
        settled(made)
        serve = [f"{PORT}/tcp", f"{PORT}/udp"]
        labs.run(made.name, "db", "node1", labels={"app": "db"}, serve=serve)
        labs.run(made.name, "near", "node1", labels={"app": "near"})
        labs.run(made.name, "proxy", "node2", labels={"app": "proxy"}, serve=serve)
        labs.run(made.name, "other", "node2", labels={"app": "other"})
        for source, target in (("proxy", "db"), ("near", "proxy")):
            holds(made, source, target, True)
        yield made
    finally:
        made.close()


def paths(lab: Lab, node: str, address: str) -> set[str]:
    """Give the ways of the flows of a node's pods with an address of another one's."""
    rows = lab.get("/map/ct", node)["rows"]
    return {row["path"] for row in rows if address in (row["source"], row["destination"])}


def steady_flow(lab: Lab, source: str, target: str) -> AbstractContextManager[list[bool]]:
    """Ask all the time, by echo, UDP and TCP; each entry is one answer or its lack."""

    def ask(namespace: str, address: str) -> Iterator[bool]:
        yield ping(namespace, address).ok
        # Nothing sends a lost datagram again.
        for protocol in ("udp", "tcp"):
            yield connect(namespace, address, PORT, protocol).ok

    return asking(lab, source, target, ask)


def test_pods_reach_each_other_past_both_stacks(lab: Lab) -> None:
    for source, target, nodes in (
        ("proxy", "db", ("node2", "node1")),
        ("near", "proxy", ("node1", "node2")),
    ):
        for address in labs.find_addresses(lab.state, target):
            namespace, _ = labs.locate(lab.state, source)
            for protocol in ("tcp", "udp"):
                assert connect(namespace, address, PORT, protocol).ok
            assert ping(namespace, address).ok
            assert ping(namespace, address, size_bytes=20_000).ok, "fragments"
            for node in nodes:
                assert "native" in paths(lab, node, address)


def test_a_policy_holds_past_the_stack(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(
        json.dumps(
            {
                "apiVersion": "networking.k8s.io/v1",
                "kind": "NetworkPolicy",
                "metadata": {"name": "db", "namespace": "default"},
                "spec": {
                    "podSelector": {"matchLabels": {"app": "db"}},
                    "policyTypes": ["Ingress"],
                    "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "proxy"}}}]}],
                },
            }
        )
    )
    assert lab.cli("apply", "-f", str(path)).code == 0
    try:
        holds(lab, "other", "db", False)
        holds(lab, "proxy", "db", True)
        holds(lab, "near", "db", False)
    finally:
        assert lab.cli("delete", "networkpolicies", "default/db").code == 0
    holds(lab, "other", "db", True)


def test_agents_that_are_killed_and_started_lose_no_packet(lab: Lab) -> None:
    with steady_flow(lab, "proxy", "db") as seen:
        for node in ("node1", "node2"):
            labs.change_agent(lab.name, node, "kill")
            labs.change_agent(lab.name, node, "start")
        wait_for(lambda: len(seen) > 50, "some packets")
    assert all(seen), f"{seen.count(False)} of {len(seen)} lost"
    settled(lab)


@pytest.mark.parametrize("what", ["filter", "qdisc"])
def test_what_is_taken_from_the_uplink_comes_back(lab: Lab, what: str) -> None:
    namespace = lab.node("node2").namespace
    if what == "filter":
        run("tc", "-n", namespace, "filter", "del", "dev", "uplink", "ingress")
    else:
        run("tc", "-n", namespace, "qdisc", "del", "dev", "uplink", "clsact")
    wait_for(
        lambda: (
            "from_netdev"
            in run("tc", "-n", namespace, "filter", "show", "dev", "uplink", "ingress", check=False)
        ),
        "the program to be back",
        HELD_DEADLINE_S,
    )
    holds(lab, "proxy", "db", True)


def test_hosts_reach_remote_pods_through_their_stacks(lab: Lab) -> None:
    for host, target in (("node1", "proxy"), ("node2", "db")):
        for address in labs.find_addresses(lab.state, target):
            namespace = lab.node(host).namespace
            assert connect(namespace, address, PORT).ok
            assert connect(namespace, address, PORT, "udp").ok
            assert ping(namespace, address).ok


def _family(address: str) -> tuple[str, str]:
    """Give nft's word for an address's family, and the address as it stands before a port."""
    six = ipaddress.ip_address(address).version == 6
    return ("ip6", f"[{address}]") if six else ("ip", address)


@contextlib.contextmanager
def translation(namespace: str, rules: list[str]) -> Iterator[None]:
    """Have a node's stack translate what its rules say, as kube-proxy has it."""
    table = "\n".join(
        [
            "table inet pwtservice {",
            "chain pre {",
            "type nat hook prerouting priority -100;",
            *rules,
            "}",
            "}",
        ]
    )
    run("ip", "netns", "exec", namespace, "nft", table)
    try:
        yield
    finally:
        run("ip", "netns", "exec", namespace, "nft", "delete table inet pwtservice")


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_service_with_its_back_end_on_the_other_node_is_answered(lab: Lab, protocol: str) -> None:
    namespace, _ = labs.locate(lab.state, "proxy")
    for address in labs.find_addresses(lab.state, "db"):
        family, shown = _family(address)
        service = SERVICES[ipaddress.ip_address(address).version]
        rule = f"{family} daddr {service} {protocol} dport {SERVICE_PORT} dnat {family} to {shown}:{PORT};"
        with translation(lab.node("node2").namespace, [rule]):
            for _ in range(5):
                assert connect(namespace, service, SERVICE_PORT, protocol).ok
                assert connect(namespace, address, PORT, protocol).ok


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("client", ["proxy", "node2"])
def test_a_node_port_of_the_back_ends_node_is_answered(
    lab: Lab, client: str, protocol: str
) -> None:
    """The back end sees the client's own address, and its answers have to be translated back."""
    is_host = client == "node2"
    namespace = lab.node(client).namespace if is_host else labs.locate(lab.state, client)[0]
    for address in labs.find_addresses(lab.state, "db"):
        family, shown = _family(address)
        node_address = _address_of(lab, "node1", ipaddress.ip_address(address).version)
        rule = (
            f"{family} daddr {node_address} {protocol} dport {NODE_PORT}"
            f" dnat {family} to {shown}:{PORT};"
        )
        with translation(lab.node("node1").namespace, [rule]):
            for _ in range(5):
                assert connect(namespace, node_address, NODE_PORT, protocol).ok
                assert connect(namespace, address, PORT, protocol).ok


def _address_of(lab: Lab, node: str, version: int) -> str:
    shown: list[dict[str, Any]] = json.loads(
        run("ip", "-n", lab.node(node).namespace, "-j", "address", "show", "dev", "uplink")
    )
    family = "inet" if version == 4 else "inet6"
    return next(
        str(address["local"])
        for address in shown[0]["addr_info"]
        if address["family"] == family and address["scope"] == "global"
    )


def test_filters_of_a_node_see_none_of_it_and_its_drops_concern_the_stack_alone(lab: Lab) -> None:
    namespace = lab.node("node1").namespace
    run("ip", "netns", "exec", namespace, "nft", "add table inet pwtdrop")
    run(
        *("ip", "netns", "exec", namespace, "nft"),
        "add chain inet pwtdrop f { type filter hook forward priority 0; ct state invalid drop; }",
    )
    try:
        for _ in range(5):
            for source, target in (("proxy", "db"), ("near", "proxy")):
                place, _ = labs.locate(lab.state, source)
                for address in labs.find_addresses(lab.state, target):
                    assert connect(place, address, PORT).ok
    finally:
        run("ip", "netns", "exec", namespace, "nft", "delete table inet pwtdrop")
