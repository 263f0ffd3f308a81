"""The rig itself: nodes are Ready, pods run on each and talk, and nothing is left of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from podwire.lab import traffic
from podwire.lab.kubernetes import cluster as clusters
from podwire.lab.kubernetes import pods, residue
from podwire.lab.kubernetes.api_server import SERVICE_ADDRESS
from podwire.lab.kubernetes.cluster import Cluster
from podwire.lab.kubernetes.nodes import images
from tests.waiting import wait_for


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
    networks = [pods.network_of(cluster, pod) for pod in cluster.list_pods()]
    for network in networks:
        attempts = [traffic.connect(network, address, 80) for address in web.values()]
        assert all(attempt.ok for attempt in attempts), attempts
    assert "web-node1" in cluster.kubectl("get", "pods", "--no-headers")
    cluster.kubectl("delete", "pods", "--all", "--now")
    cluster.wait_for_pods(0)


def test_a_node_has_only_the_network_that_was_put_on_it(cluster: Cluster) -> None:
    found = [path.name for path in cluster.nodes[0].machine.path("/etc/cni/net.d").iterdir()]
    assert found == ["20-ptp.conflist"]


def test_the_rig_says_what_is_there(cluster: Cluster) -> None:
    left = residue.list_left(cluster.name)
    assert {residue.namespace_of(cluster.name, node.name) for node in cluster.nodes} < set(left)


def test_a_node_reaches_the_api_server_by_its_service(cluster: Cluster) -> None:
    machine = cluster.nodes[0].machine
    ask = f"exec 3<>/dev/tcp/{SERVICE_ADDRESS}/443"
    cluster.wait_for(lambda: not machine.place.run(["bash", "-c", ask]).status, "kube-proxy")


def test_what_a_killed_rig_left_is_removed(cluster: Cluster) -> None:
    name = "killed"
    before = {one: (Path("/proc/sys") / one).read_text() for one in residue.KUBELET_CHANGES}
    up = [sys.executable, "-m", "podwire.lab.kubernetes", "up", "ptp"]
    rig = subprocess.Popen(up, env={**os.environ, "PODWIRE_CLUSTER": name})
    kubelet_log = residue.directory_of(name) / "node1" / "kubelet.log"
    try:
        wait_for(kubelet_log.exists, "the first kubelet")
    finally:
        rig.kill()
        rig.wait()
    assert cluster.name != name
    assert residue.list_left(name)
    clusters.down(name)
    assert not residue.list_left(name)
    assert before == {one: (Path("/proc/sys") / one).read_text() for one in before}
    cluster.wait_until_ready()
