"""Nothing is lost and nothing is left over: six views of a node's pods, which must be one.

Pods as the API server has them, sandboxes as the runtime has them, endpoints, addresses and maps as the agent has them,
devices as the kernel has them.
"""

import contextlib
import json
from typing import Any

from podwire.lab.kubernetes.cluster import Cluster, Node
from podwire.lab.kubernetes.networks.installed import Podwire
from podwire.lab.kubernetes.nodes.machine import SOCKET
from podwire.model.errors import Unavailable


def wait_until_all_agree(cluster: Cluster, network: Podwire) -> None:
    """Wait until every view of every node shows the same; the failure shows how the last ones differed."""
    for node in cluster.nodes:
        seen: list[dict[str, Any]] = []

        def agree(node: Node = node, seen: list[dict[str, Any]] = seen) -> bool:
            # While something changes, a container may be gone between two looks.
            with contextlib.suppress(Unavailable):
                seen[:] = [_look(cluster, network, node)]
                return _agrees(seen[0])
            return False

        try:
            cluster.wait_for(agree, f"all views of {node.name} to show the same")
        except Unavailable as failure:
            raise AssertionError(f"{seen}\n{failure}") from failure


def _agrees(view: dict[str, Any]) -> bool:
    expected = sorted(view["pods"].values())
    return (
        sorted(view["sandboxes"].values()) == sorted(view["pods"])
        and sorted(view["endpoints"]) == sorted(view["sandboxes"])
        and sorted(view["endpoints"].values()) == expected
        and view["used"] == [len(expected)] * len(view["used"])
        and view["faults"] == []
        and view["devices"] == len(expected)
        and view["rows"] == sorted(address for pod in expected for address in pod)
    )


def _look(cluster: Cluster, network: Podwire, node: Node) -> dict[str, Any]:
    """Look at a node; addresses are lists, one of each family."""

    def ask(*words: str) -> Any:
        return json.loads(network.run(cluster, node.name, *words, "-o", "json"))

    pods = {
        pod["metadata"]["uid"]: sorted(one["ip"] for one in pod["status"].get("podIPs", ()))
        for pod in cluster.client.get("/api/v1/pods")["items"]
        if pod["spec"].get("nodeName") == node.name and not pod["spec"].get("hostNetwork")
    }
    devices = node.machine.run("ip", "-o", "link", "show", "type", "veth")
    return {
        "pods": pods,
        "sandboxes": list_sandboxes(node),
        "endpoints": {
            endpoint["containerId"]: sorted(filter(None, (endpoint["ipv4"], endpoint["ipv6"])))
            for endpoint in network.list_endpoints(cluster, node.name)
        },
        "used": [usage["used"] for usage in ask("ipam", "show")],
        "faults": ask("ipam", "check")["faults"],
        "devices": devices.count("alias podwire:"),
        "rows": sorted(row["address"] for row in ask("bpf", "endpoint", "list")),
    }


def list_sandboxes(node: Node) -> dict[str, str]:
    """Give the UID of the pod of each sandbox that has a network of its own and runs, by the sandbox's id."""
    ctr = ("ctr", "-a", SOCKET, "-n", "k8s.io")
    wanted = 'labels."io.cri-containerd.kind"==sandbox'
    running = {
        words[0]
        for words in map(str.split, node.machine.run(*ctr, "tasks", "ls").splitlines())
        if words[-1] == "RUNNING"
    }
    found = {}
    # One that does not run may be gone before it is asked about.
    for one in running.intersection(
        node.machine.run(*ctr, "containers", "ls", "-q", wanted).split()
    ):
        document = json.loads(node.machine.run(*ctr, "containers", "info", one))
        namespaces = document["Spec"]["linux"]["namespaces"]
        if any(space["type"] == "network" for space in namespaces):
            found[one] = document["Labels"]["io.kubernetes.pod.uid"]
    return found
