"""podwire in clusters of other shapes than that of test_podwire: both families, iptables, newer programs, three nodes.

One shape unites what differs; `--full` adds the others, and the reference plugins, by which the rig itself is judged.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from podwire.lab import traffic
from podwire.lab.kubernetes import cluster as clusters
from podwire.lab.kubernetes import pods, programs, residue
from podwire.lab.kubernetes.api_server import SERVICE_ADDRESS
from podwire.lab.kubernetes.cluster import Cluster, is_ready
from podwire.lab.kubernetes.networks.installed import Podwire
from podwire.lab.kubernetes.nodes import images
from tests import leavings
from tests.cluster import flows, probing
from tests.cluster.audit import wait_until_all_agree
from tests.waiting import wait_for

ECHO_PORT: Final = 7007
FLOW_PORT: Final = 7008
FLOWS, FLOWS_FULL = 200, 10_000
"""So many connections to a service stay open while agents and the mode of kube-proxy change."""
OTHER_PROXY: Final = {"iptables": "nftables", "nftables": "iptables"}
NEXT: Final = "localhost/podwire:next"
Pods = list[Mapping[str, Any]]
CLOSED: Final = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "closed", "namespace": "default"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
}


@pytest.fixture
def web(shaped: Cluster) -> Any:
    """Give a web server on each node; they are gone afterwards."""
    names = [node.name for node in shaped.nodes]
    shaped.apply(*[pods.describe(f"web-{name}", node=name) for name in names])
    yield shaped.wait_for_pods(len(names))
    shaped.kubectl("delete", "pod,service,networkpolicy", "--all", "--now")
    shaped.wait_for_pods(0)


def addresses_of(pod: Mapping[str, Any]) -> list[str]:
    return [str(pod_ip["ip"]) for pod_ip in pod["status"]["podIPs"]]


def reach(shaped: Cluster, web: list[Mapping[str, Any]], *, timeout_s: float) -> list[bool]:
    """Connect from every pod to every address of every pod."""
    return [
        traffic.connect(pods.network_of(shaped, pod), address, 80, timeout_s=timeout_s).ok
        for pod in web
        for other in web
        if pod is not other
        for address in addresses_of(other)
    ]


def wait_until_served(shaped: Cluster, web: Pods) -> None:
    """Wait until all are answered: pods are Ready before their server listens, and refuse until then."""
    wait_for(lambda: all(reach(shaped, web, timeout_s=60)), "every answer")


def installed(shaped: Cluster) -> Podwire:
    if not isinstance(shaped.network, Podwire):
        pytest.skip("only with podwire as it is installed")
    return shaped.network


def test_pods_of_all_nodes_reach_each_other(shaped: Cluster, web: Pods) -> None:
    families = {"6" if ":" in one else "4" for pod in web for one in addresses_of(pod)}
    assert families == set(shaped.shape.families)
    wait_until_served(shaped, web)
    for pod in web:
        for address in addresses_of(pod):
            url = f"http://[{address}]/" if ":" in address else f"http://{address}/"
            name = f"web-{shaped.nodes[0].name}"
            assert pods.execute(shaped, name, "wget", "-qO-", url) == images.SERVED


def test_a_policy_closes_both_families(shaped: Cluster, web: Pods) -> None:
    installed(shaped)
    wait_until_served(shaped, web)
    shaped.apply(CLOSED)
    wait_for(lambda: not any(reach(shaped, web, timeout_s=1)), "the cut")
    shaped.kubectl("delete", "networkpolicy", "closed")
    wait_for(lambda: all(reach(shaped, web, timeout_s=1)), "the way of all")


@pytest.fixture
def service(shaped: Cluster, web: Pods) -> list[str]:
    """Give the addresses of a service of all web servers."""
    assert web
    shaped.kubectl("label", "pod", "--all", "app=web", "--overwrite")
    spec = {
        "selector": {"app": "web"},
        "ports": [{"name": f"port-{port}", "port": port} for port in (80, FLOW_PORT)],
        "ipFamilyPolicy": "PreferDualStack",
    }
    document = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": spec}
    made = shaped.client.create("/api/v1/namespaces/default/services", document)
    assert len(made["spec"]["clusterIPs"]) == len(shaped.shape.families)
    return list(made["spec"]["clusterIPs"])


def test_pods_and_nodes_reach_services(shaped: Cluster, web: Pods, service: list[str]) -> None:
    network = pods.network_of(shaped, web[0])
    for address in service:
        wait_for(
            lambda address=address: traffic.connect(network, address, 80, timeout_s=1).ok,  # type: ignore[misc]
            f"an answer of {address}",
        )
    for node in shaped.nodes:
        wait_for(
            lambda name=node.machine.plan.namespace: (  # type: ignore[misc]
                traffic.connect(name, SERVICE_ADDRESS, 443, timeout_s=1).answer != "timed out"
            ),
            f"kube-proxy of {node.name}",
        )


def test_an_upgrade_and_the_way_back_lose_no_packet(
    shaped: Cluster, web: Pods, service: list[str], full: bool
) -> None:
    network = installed(shaped)
    for node in shaped.nodes:
        node.services.tag_image(network.image, NEXT)
    one, other = (pods.network_of(shaped, pod) for pod in web[:2])
    streams = [probing.Stream(one, address) for address in addresses_of(web[1])]
    works = [stream.ping for stream in streams]
    talk = probing.Stream(one, addresses_of(web[1])[-1])
    unready: list[str] = []
    watch = partial(note_unready, shaped, unready)
    with (
        held_open(web, shaped, service, FLOWS_FULL if full else FLOWS) as held,
        probing.echoing(other, ECHO_PORT),
        probing.running(watch, partial(talk.talk, port=ECHO_PORT), *works),
    ):
        for change in upgrade_and_back(shaped, network):
            change()
            assert held.check() == []
    assert not unready, unready[0]
    for stream in (*streams, talk):
        assert stream.sent
        assert not stream.lost
    assert all(reach(shaped, web, timeout_s=60))
    wait_until_all_agree(shaped, network)


def upgrade_and_back(shaped: Cluster, network: Podwire) -> Iterator[Callable[[], object]]:
    """Give other agents, and another mode of kube-proxy, and the way back of both."""
    before = agents_images(shaped, network)
    yield partial(roll, shaped, network, "set", "image", "daemonset/podwire-agent", f"*={NEXT}")
    assert agents_images(shaped, network) == {NEXT}
    yield partial(shaped.use_proxy, OTHER_PROXY[shaped.shape.proxy])
    yield partial(roll, shaped, network, "rollout", "undo", "daemonset/podwire-agent")
    assert agents_images(shaped, network) == before
    yield partial(shaped.use_proxy, shaped.shape.proxy)


@contextmanager
def held_open(
    web: Pods, shaped: Cluster, service: Sequence[str], count: int
) -> Iterator[flows.OpenFlows]:
    """Hold so many connections open from the first pod to a service of all."""
    networks = [pods.network_of(shaped, pod) for pod in web]
    with flows.room_for(count) as room, flows.Echoes(networks, FLOW_PORT):
        for address in service:
            wait_for(
                lambda address=address: flows.can_connect(networks[0], address, FLOW_PORT),  # type: ignore[misc]
                f"an answer of {address}",
            )
        with flows.OpenFlows(networks[0], service, FLOW_PORT, room) as held:
            assert held.check() == []
            yield held


def roll(shaped: Cluster, network: Podwire, *words: str) -> None:
    shaped.kubectl("-n", network.namespace, *words)
    shaped.kubectl(
        *("-n", network.namespace, "rollout", "status", "daemonset/podwire-agent"),
        "--timeout=240s",
        timeout_s=260,
    )
    shaped.wait_for_pods(len(shaped.nodes), network.namespace, network.selector)


def agents_images(shaped: Cluster, network: Podwire) -> set[str]:
    found = shaped.list_pods(network.namespace, network.selector)
    return {container["image"] for pod in found for container in pod["spec"]["containers"]}


def note_unready(shaped: Cluster, unready: list[str], stop: threading.Event) -> None:
    """Look all the time whether a node is not Ready."""
    while not stop.wait(0.2):
        for node in shaped.client.get("/api/v1/nodes")["items"]:
            if not is_ready(node):
                unready.append(json.dumps([node["metadata"]["name"], node["status"]["conditions"]]))


def test_its_programs_are_the_newer_ones(shaped: Cluster) -> None:
    if not shaped.shape.newer:
        pytest.skip(
            "containerd 2.x and etcd 3.6: only where scripts/kubernetes-programs --newer built them"
        )
    for node in shaped.client.get("/api/v1/nodes")["items"]:
        assert node["status"]["nodeInfo"]["containerRuntimeVersion"].startswith("containerd://2.")
    assert Path(shaped.control.api.etcd.command[0]).parent == programs.newer_directory()


def test_a_node_has_only_the_network_that_was_put_on_it(shaped: Cluster) -> None:
    found = [path.name for path in shaped.nodes[0].machine.path("/etc/cni/net.d").iterdir()]
    assert len(found) == 1, found


def test_the_rig_says_what_is_there(shaped: Cluster) -> None:
    left = residue.list_left(shaped.name)
    assert {residue.namespace_of(shaped.name, node.name) for node in shaped.nodes} < set(left)


def test_what_a_killed_rig_left_is_removed(shaped: Cluster) -> None:
    name = leavings.name_cluster("killed")
    before = {path: (Path("/proc/sys") / path).read_text() for path in residue.KUBELET_CHANGES}
    up = [sys.executable, "-m", "podwire.lab.kubernetes", "up", "ptp"]
    rig = subprocess.Popen(up, env={**os.environ, "PWK_CLUSTER": name})
    kubelet_log = residue.directory_of(name) / "node1" / "kubelet.log"
    try:
        wait_for(kubelet_log.exists, "the first kubelet")
    finally:
        rig.kill()
        rig.wait()
    assert residue.list_left(name)
    clusters.down(name)
    assert not residue.list_left(name)
    assert before == {one: (Path("/proc/sys") / one).read_text() for one in before}
    shaped.wait_until_ready()
