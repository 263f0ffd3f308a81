"""Pods of the rig: documents of what busybox can do, and commands inside pods."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from podwire.lab.kubernetes.cluster import Cluster
from podwire.lab.kubernetes.nodes import images

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
