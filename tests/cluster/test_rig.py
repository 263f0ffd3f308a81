"""The rig itself: nodes are Ready, pods run on each and talk, and nothing is left of it."""

import pytest

from podwire.lab.kubernetes import pods, residue
from podwire.lab.kubernetes.api_server import SERVICE_ADDRESS
from podwire.lab.kubernetes.cluster import Cluster
from podwire.lab.kubernetes.nodes import images


@pytest.fixture
def web(cluster: Cluster) -> dict[str, str]:
    """Give the address of a web server on each node."""
    cluster.apply(*[pods.describe(f"web-{node.name}", node=node.name) for node in cluster.nodes])
    ready = cluster.wait_for_pods(len(cluster.nodes))
    return {pod["spec"]["nodeName"]: pod["status"]["podIP"] for pod in ready}


def test_pods_of_both_nodes_reach_each_other(cluster: Cluster, web: dict[str, str]) -> None:
    for node in cluster.nodes:
        for address in web.values():
            said = pods.execute(cluster, f"web-{node.name}", "wget", "-qO-", f"http://{address}/")
            assert said == images.SERVED
    assert "web-node1" in cluster.kubectl("get", "pods", "--no-headers")
    cluster.kubectl("delete", "pods", "--all", "--now")
    cluster.wait_for_pods(0)


def test_the_rig_says_what_is_there(cluster: Cluster) -> None:
    left = residue.list_left(cluster.name)
    assert {residue.namespace_of(cluster.name, node.name) for node in cluster.nodes} < set(left)


def test_a_node_reaches_the_api_server_by_its_service(cluster: Cluster) -> None:
    machine = cluster.nodes[0].machine
    ask = f"exec 3<>/dev/tcp/{SERVICE_ADDRESS}/443"
    cluster.wait_for(lambda: not machine.place.run(["bash", "-c", ask]).status, "kube-proxy")
