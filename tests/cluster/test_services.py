"""Services in a real cluster whose agents translate them, beside an unmodified kube-proxy."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from podwire.cli.client import request
from podwire.lab import traffic
from podwire.lab.kubernetes import cluster as clusters
from podwire.lab.kubernetes import pods, residue
from podwire.lab.kubernetes.cluster import Cluster, ClusterShape
from podwire.lab.kubernetes.networks.agents import API_SOCKET, PlainAgents
from tests.waiting import wait_for

PORT: Final = 8080
REFUSED: Final = 9999
WEB: Final = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web", "namespace": "default"},
    "spec": {"selector": {"app": "web"}, "ports": [{"port": PORT, "targetPort": 80}]},
}


def only_to(app: str) -> Mapping[str, Any]:
    """Give the policy that lets the client speak to pods of an app, and to nobody else."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "client", "namespace": "default"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "client"}},
            "policyTypes": ["Egress"],
            "egress": [
                {"to": [{"podSelector": {"matchLabels": {"app": app}}}], "ports": [{"port": 80}]}
            ],
        },
    }


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with clusters.raised("services", ClusterShape(), PlainAgents(translate_services="on")) as made:
        yield made
    assert not residue.list_left("services")


@pytest.fixture(scope="module")
def address(cluster: Cluster) -> str:
    """Start a web server on each node behind a service, and give the service's address."""
    cluster.apply(pods.describe_deployment("web", 2), WEB)
    web = cluster.wait_for_pods(2, selector="app=web")
    assert {pod["spec"]["nodeName"] for pod in web} == {"node1", "node2"}
    service = json.loads(cluster.kubectl("get", "service", "web", "-o", "json"))
    wait_for(lambda: back_ends(cluster, "node1") == served(cluster), "both back ends")
    return str(service["spec"]["clusterIP"])


@pytest.fixture(scope="module")
def client(cluster: Cluster, address: str) -> str:
    """Start a pod, and give a path to its network."""
    assert address
    labels = {"app": "client"}
    cluster.apply(pods.describe("client", node="node1", labels=labels, command=pods.IDLE))
    (found,) = cluster.wait_for_pods(1, selector="app=client")
    return pods.network_of(cluster, found)


def back_ends(cluster: Cluster, node: str) -> set[str]:
    """Give who answers for the service, as a node's programs have it."""
    socket = str(cluster.node(node).machine.path(API_SOCKET))
    rows = request(socket, "GET", "/map/service")["rows"]
    return {one for row in rows if row["port"] == PORT for one in row["back_ends"]}


def served(cluster: Cluster) -> set[str]:
    """Give who should answer."""
    return {f"{pod['status']['podIP']} 80" for pod in cluster.list_pods(selector="app=web")}


def answers(network: str, address: str, port: int = PORT) -> bool:
    return traffic.connect(network, address, port, timeout_s=1).ok


def test_a_policy_names_the_pods_behind_the_service(
    cluster: Cluster, address: str, client: str
) -> None:
    assert all(traffic.connect(client, address, PORT, timeout_s=60).ok for _ in range(10))
    cluster.apply(only_to("somebody-else"))
    wait_for(lambda: not answers(client, address), "the cut")
    cluster.apply(only_to("web"))
    wait_for(lambda: answers(client, address), "the way to the pods behind it")
    assert all(traffic.connect(client, address, PORT, timeout_s=60).ok for _ in range(10))


def test_another_port_is_refused_at_once(address: str, client: str) -> None:
    said = traffic.connect(client, address, REFUSED, timeout_s=60)
    assert not said.ok
    assert "refused" in said.answer


def test_back_ends_follow_a_rollout(cluster: Cluster, address: str, client: str) -> None:
    before = served(cluster)
    cluster.kubectl("rollout", "restart", "deployment/web")
    cluster.kubectl("rollout", "status", "deployment/web", "--timeout=120s")
    wait_for(lambda: len(served(cluster)) == 2, "the old pods to be gone")
    assert served(cluster).isdisjoint(before)
    for node in cluster.nodes:
        wait_for(
            lambda node=node: back_ends(cluster, node.name) == served(cluster),  # type: ignore[misc]
            f"the new pods on {node.name}",
        )
    assert all(traffic.connect(client, address, PORT, timeout_s=60).ok for _ in range(10))


def test_the_hosts_are_served_by_kube_proxy(cluster: Cluster, address: str) -> None:
    ask = f"exec 3<>/dev/tcp/{address}/{PORT}"
    place = cluster.nodes[0].machine.place
    cluster.wait_for(lambda: not place.run(["bash", "-c", ask]).status, "kube-proxy")
