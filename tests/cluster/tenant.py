"""A tenant of a real cluster who has more services than the programs have room for: 66 of 1,000 ports each."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from podwire.lab.kubernetes import pods
from podwire.lab.kubernetes.cluster import Cluster
from tests.cluster.agents import Agents, ask
from tests.waiting import wait_for

NAMESPACE: Final = "tenant"
SERVICES: Final = 66
PORTS: Final = 1000
FIRST_PORT: Final = 10_000
NODE: Final = "node1"
NOT_TRANSLATED: Final = "ServiceNotTranslated"


class Tenant:
    """His services, the oldest first, all of one pod."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._sockets = Agents(cluster).sockets
        self.names = [f"stall-{number:02}" for number in range(SERVICES)]
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        pod = pods.describe("stall", namespace=NAMESPACE, node=NODE, command=pods.IDLE)
        cluster.client.create(f"/api/v1/namespaces/{NAMESPACE}/pods", pod)
        (made,) = cluster.wait_for_pods(1, NAMESPACE)
        path = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
        cluster.client.create_many(path, (_slice(name, made) for name in self.names))
        path = f"/api/v1/namespaces/{NAMESPACE}/services"
        cluster.client.create_many(path, (_service(name) for name in self.names))

    def wait_until_told(self) -> list[str]:
        """Wait until every agent knows all, and Events name those that it leaves to the stack; gives these."""
        return wait_for(self._find_told, f"Events {NOT_TRANSLATED}")

    def _find_told(self) -> list[str]:
        left = [self._list_left(path) for path in self._sockets]
        told = self._list_told()
        return sorted(told) if all(names == told for names in left) else []

    def _list_left(self, path: str) -> set[str] | None:
        """List what an agent leaves to the stack; None while it does not know all."""
        rows = [row for row in ask(path, "/service") if row["namespace"] == NAMESPACE]
        left = {str(row["name"]) for row in rows if not row["translated"]}
        return left if len(rows) == SERVICES else None

    def _list_told(self) -> set[str]:
        events = self._cluster.client.get(f"/api/v1/namespaces/{NAMESPACE}/events")["items"]
        return {
            str(event["involvedObject"]["name"])
            for event in events
            if event.get("reason") == NOT_TRANSLATED
        }

    def leave(self) -> None:
        """Take all of it away, and wait until no agent knows a service of his."""
        self._cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
        wait_for(lambda: not any(map(self._knows_any, self._sockets)), "no service of the tenant")

    @staticmethod
    def _knows_any(path: str) -> bool:
        return any(row["namespace"] == NAMESPACE for row in ask(path, "/service"))


@contextmanager
def tenancy(cluster: Cluster) -> Iterator[Tenant]:
    """Give the tenant, and take away what is left of him."""
    try:
        yield Tenant(cluster)
    finally:
        cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")


def _ports() -> list[dict[str, Any]]:
    return [
        {"name": f"p{number}", "protocol": "TCP", "port": FIRST_PORT + number}
        for number in range(PORTS)
    ]


def _service(name: str) -> Mapping[str, Any]:
    return {"metadata": {"name": name}, "spec": {"ports": _ports()}}


def _slice(name: str, pod: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "ports": _ports(),
        "endpoints": [
            {
                "addresses": [pod["status"]["podIP"]],
                "conditions": {"ready": True},
                "nodeName": NODE,
                "targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": "stall"},
            }
        ],
    }
