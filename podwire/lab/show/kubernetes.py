"""The demo of Kubernetes: podwire installed by its manifest in a real cluster, and a table of what held.

Run by `scripts/demo kubernetes`. Pods are created through the API server and started by kubelet and containerd; the
agents run from the image, and the nodes see nothing of the checkout.
"""

import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from podwire.lab import traffic
from podwire.lab.kubernetes import cluster as clusters
from podwire.lab.kubernetes import pods, residue
from podwire.lab.kubernetes.cluster import Cluster, ClusterShape
from podwire.lab.kubernetes.networks.agents import ROOT
from podwire.lab.kubernetes.networks.installed import Podwire
from podwire.lab.show.background import Background, going_on, wait_until
from podwire.lab.show.report import Report, say
from podwire.model.errors import PodwireError

NAME: Final = "demo"
REPLICAS: Final = 6
POLICY: Final = "web-only-from-proxy"
_CUT_DEADLINE_S: Final = 10.0
_ASK_TIMEOUT_S: Final = 0.3
_EVERY_S: Final = 0.02
_ONLY_PROXY: Final = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": POLICY, "namespace": "default"},
    "spec": {
        "podSelector": {"matchLabels": {"app": "web"}},
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "proxy"}}}]}],
    },
}


@dataclass(frozen=True)
class _Pods:
    """What the demo looks at: a client, and web servers on both nodes."""

    client: str
    """Path of its network namespace."""
    web: list[dict[str, Any]]

    @property
    def addresses(self) -> list[str]:
        return [str(pod["status"]["podIP"]) for pod in self.web]


@dataclass
class _Asker(Background):
    """Opens one connection after the other from the client, and counts those that fail."""

    network: str
    address: str
    asked: int = 0
    failed: int = 0

    def run(self) -> None:
        while not self.stop.wait(_EVERY_S):
            self.asked += 1
            self.failed += not traffic.connect(self.network, self.address, 80).ok


def main() -> int:
    """Run the demo; gives the exit status."""
    report, begin = Report(), time.monotonic()
    try:
        _show(report, begin)
    except PodwireError as error:
        report.add("the demo came to its end", False, error.message)
        if error.hint:
            print(f"hint: {error.hint}", flush=True)
    left = residue.list_left(NAME)
    report.add("nothing is left on this machine", not left, ", ".join(left) or "nothing")
    report.print_table(time.monotonic() - begin)
    return 0 if report.holds else 1


def _show(report: Report, begin: float) -> None:
    network = Podwire()
    with ExitStack() as stack:
        stack.callback(clusters.down, NAME)
        say(
            "two nodes: containerd, kubelet and kube-proxy; podwire by `kubectl apply -f deploy/podwire.yaml`"
        )
        cluster = clusters.up(NAME, ClusterShape(hidden=(str(ROOT),)), network, progress=say)
        report.add(
            f"{len(cluster.nodes)} nodes Ready",
            True,
            f"{time.monotonic() - begin:.1f} s after nothing was there",
        )
        made = _show_pods(cluster, report)
        _show_connectivity(made, report)
        _show_policy(cluster, network, made, report)
        _show_rollout(cluster, made, report)
        _show_uninstall(cluster, network, report)


def _show_pods(cluster: Cluster, report: Report) -> _Pods:
    say(f"{REPLICAS} replicas of a web server, and a client")
    begin = time.monotonic()
    client = pods.describe("client", node="node1", labels={"app": "client"}, command=pods.IDLE)
    cluster.apply(client, pods.describe_deployment("web", REPLICAS))
    web = cluster.wait_for_pods(REPLICAS, selector="app=web")
    (running,) = cluster.wait_for_pods(1, selector="app=client")
    nodes = {pod["spec"]["nodeName"] for pod in web}
    taken_s = time.monotonic() - begin
    report.add(
        f"{REPLICAS} replicas Ready", len(nodes) == 2, f"on {len(nodes)} nodes, {taken_s:.1f} s"
    )
    return _Pods(pods.network_of(cluster, running), [dict(pod) for pod in web])


def _show_connectivity(made: _Pods, report: Report) -> None:
    for what, node in (("same node", "node1"), ("other node", "node2")):
        addresses = [pod["status"]["podIP"] for pod in made.web if pod["spec"]["nodeName"] == node]
        attempts = [traffic.connect(made.client, address, 80) for address in addresses]
        report.add_attempts(f"pods reach pods, {what}", attempts)


def _show_policy(cluster: Cluster, network: Podwire, made: _Pods, report: Report) -> None:
    say("a NetworkPolicy by kubectl: only pods labelled app=proxy may reach web")
    target = made.web[0]
    address, node = target["status"]["podIP"], target["spec"]["nodeName"]
    begin = time.monotonic()
    cluster.apply(_ONLY_PROXY)
    cut = _wait_until_answers(made.client, address, False)
    report.add(
        "a policy cuts", cut, f"{time.monotonic() - begin:.1f} s after `kubectl apply` began"
    )
    flows = network.run(
        cluster, node, *("observe", "--verdict", "dropped", "--last", "50", "-o", "jsonl")
    )
    drops = [json.loads(line) for line in flows.splitlines() if line.startswith("{")]
    names = {policy["name"] for drop in drops for policy in drop.get("policies", ())}
    report.add("the drop carries the policy's name", names == {POLICY}, ", ".join(names) or "none")
    begin = time.monotonic()
    cluster.kubectl("label", "pod", "client", "app=proxy", "--overwrite")
    back = _wait_until_answers(made.client, address, True)
    report.add("a label opens", back, f"{time.monotonic() - begin:.1f} s after `kubectl label`")
    cluster.kubectl("delete", "networkpolicy", POLICY)


def _wait_until_answers(network: str, address: str, expected: bool) -> bool:
    """Wait until the address answers, or does not; False when it does not come to that in time."""
    return wait_until(
        lambda: traffic.connect(network, address, 80, timeout_s=_ASK_TIMEOUT_S).ok is expected,
        _CUT_DEADLINE_S,
        _EVERY_S,
    )


def _show_rollout(cluster: Cluster, made: _Pods, report: Report) -> None:
    say("a rollout, in the middle of which the agents of both nodes are killed")
    standing = pods.describe("standing", node="node2", labels={"app": "standing"})
    cluster.apply(standing)
    (pod,) = cluster.wait_for_pods(1, selector="app=standing")
    asker = _Asker(made.client, str(pod["status"]["podIP"]))
    with going_on(asker):
        cluster.kubectl("rollout", "restart", "deployment/web")
        killed = [_kill_agents(cluster, node.name) for node in cluster.nodes]
        cluster.kubectl("rollout", "status", "deployment/web", "--timeout=180s")
        cluster.wait_for_pods(REPLICAS, selector="app=web")
    old = {pod["metadata"]["uid"] for pod in made.web}
    new = cluster.wait_for_pods(REPLICAS, selector="app=web")
    renewed = not old & {pod["metadata"]["uid"] for pod in new}
    figure = f"{sum(killed)} processes killed, {len(new)} of {REPLICAS} new pods Ready"
    report.add("a rollout goes on when agents are killed", renewed and all(killed), figure)
    figure = f"{asker.failed} of {asker.asked} connections failed"
    report.add("and running pods keep talking", bool(asker.asked) and not asker.failed, figure)


def _kill_agents(cluster: Cluster, node: str) -> int:
    agents = pods.find_agents(cluster, node)
    for process in agents:
        os.kill(process.pid, signal.SIGKILL)
    return len(agents)


def _show_uninstall(cluster: Cluster, network: Podwire, report: Report) -> None:
    say("pods go, then podwire, as docs/kubernetes.md says")
    cluster.kubectl("delete", "deployment,pod", "--all", "--now")
    cluster.wait_for_pods(0)
    # The API forgets a pod that is killed at once before the runtime has taken its network away.
    begin = time.monotonic()
    network.wait_until_detached(cluster)
    report.add("pods go, and leave no endpoint", True, f"{time.monotonic() - begin:.1f} s later")
    before = len(network.list_left(cluster))
    network.remove(cluster)
    left = network.list_left(cluster)
    figure = ", ".join(left) or f"none of {before} files, devices, tables and routes"
    report.add("podwire goes, and nothing of it stays in force", bool(before) and not left, figure)


if __name__ == "__main__":
    sys.exit(main())
