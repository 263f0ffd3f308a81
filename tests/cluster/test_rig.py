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
def web(reference: Cluster) -> dict[str, str]:
    """Give the address of a web server on each node."""
    reference.apply(
        *[pods.describe(f"web-{node.name}", node=node.name) for node in reference.nodes]
    )
    ready = reference.wait_for_pods(len(reference.nodes))
    return {pod["spec"]["nodeName"]: pod["status"]["podIP"] for pod in ready}


def test_pods_of_both_nodes_reach_each_other(reference: Cluster, web: dict[str, str]) -> None:
    for node in reference.nodes:
        for address in web.values():
            said = pods.execute(reference, f"web-{node.name}", "wget", "-qO-", f"http://{address}/")
            assert said == images.SERVED
    networks = [pods.network_of(reference, pod) for pod in reference.list_pods()]
    for network in networks:
        attempts = [traffic.connect(network, address, 80, timeout_s=60) for address in web.values()]
        assert all(attempt.ok for attempt in attempts), attempts
    assert "web-node1" in reference.kubectl("get", "pods", "--no-headers")
    reference.kubectl("delete", "pods", "--all", "--now")
    reference.wait_for_pods(0)


def test_a_node_has_only_the_network_that_was_put_on_it(reference: Cluster) -> None:
    found = [path.name for path in reference.nodes[0].machine.path("/etc/cni/net.d").iterdir()]
    assert found == ["20-ptp.conflist"]


def test_the_rig_says_what_is_there(reference: Cluster) -> None:
    left = residue.list_left(reference.name)
    assert {residue.namespace_of(reference.name, node.name) for node in reference.nodes} < set(left)


def test_a_node_reaches_the_api_server_by_its_service(reference: Cluster) -> None:
    machine = reference.nodes[0].machine
    ask = f"exec 3<>/dev/tcp/{SERVICE_ADDRESS}/443"
    reference.wait_for(lambda: not machine.place.run(["bash", "-c", ask]).status, "kube-proxy")


def test_what_a_killed_rig_left_is_removed(reference: Cluster) -> None:
    name = "killed"
    before = {one: (Path("/proc/sys") / one).read_text() for one in residue.KUBELET_CHANGES}
    up = [sys.executable, "-m", "podwire.lab.kubernetes", "up", "ptp"]
    rig = subprocess.Popen(up, env={**os.environ, "PWK_CLUSTER": name})
    kubelet_log = residue.directory_of(name) / "node1" / "kubelet.log"
    try:
        wait_for(kubelet_log.exists, "the first kubelet")
    finally:
        rig.kill()
        rig.wait()
    assert reference.name != name
    assert residue.list_left(name)
    clusters.down(name)
    assert not residue.list_left(name)
    assert before == {one: (Path("/proc/sys") / one).read_text() for one in before}
    reference.wait_until_ready()
