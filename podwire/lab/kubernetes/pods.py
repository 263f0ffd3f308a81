"""Pods of the rig: documents of what busybox can do, commands inside pods, and where pods and agents are."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from podwire.kernel import netns
from podwire.lab.kubernetes.cluster import Cluster
from podwire.lab.kubernetes.nodes import images
from podwire.lab.kubernetes.nodes.machine import SOCKET
from podwire.lab.state import Process, list_processes_in
from podwire.model.errors import NotFound

IDLE: Final = ("sleep", "2147483647")
WEB: Final = ("httpd", "-f", "-p", "80", "-h", "/www")


def describe(
    name: str,
    *,
    namespace: str = "default",
    node: str = "",
    labels: Mapping[str, str] | None = None,
    command: Sequence[str] = WEB,
) -> dict[str, Any]:
    """Describe a pod; with `node` the scheduler is not asked."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels or {})},
        "spec": _spec(command) | ({"nodeName": node} if node else {}),
    }


def describe_deployment(
    name: str, replicas: int, *, namespace: str = "default", command: Sequence[str] = WEB
) -> dict[str, Any]:
    """Describe so many equal pods, spread over the nodes, with the label `app`."""
    labels = {"app": name}
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": _spec(command) | {"topologySpreadConstraints": [spread]},
            },
        },
    }


def execute(cluster: Cluster, pod: str, *command: str, namespace: str = "default") -> str:
    """Run a command in a pod and give what it printed."""
    return cluster.kubectl("exec", "-n", namespace, pod, "--", *command)


def network_of(cluster: Cluster, pod: Mapping[str, Any]) -> str:
    """Give a path to the network namespace of a running pod, as the API shows it."""
    container = str(pod["status"]["containerStatuses"][0]["containerID"]).partition("://")[2]
    machine = cluster.node(pod["spec"]["nodeName"]).machine
    listed = machine.run("ctr", "-a", SOCKET, "-n", "k8s.io", "tasks", "ls")
    for line in listed.splitlines():
        if line.startswith(container):
            return f"/proc/{line.split()[1]}/ns/net"
    raise NotFound(f"find container {container} of {pod['metadata']['name']!r} in:\n{listed}")


def find_agents(cluster: Cluster, node: str) -> list[Process]:
    """Find the processes of podwire's agent on a node, however it was started."""
    inode = os.stat(netns.named_path(cluster.node(node).machine.plan.namespace)).st_ino
    return [process for process in list_processes_in([inode]) if _is_agent(process.pid)]


def _is_agent(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(word.endswith(b"podwire-agent") for word in words[:3])


def _spec(command: Sequence[str]) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": images.BUSYBOX_IMAGE,
        "imagePullPolicy": "Never",
        "command": list(command),
    }
    return {
        "containers": [container],
        "terminationGracePeriodSeconds": 0,
        "enableServiceLinks": False,
        "tolerations": [{"operator": "Exists"}],
    }
