"""Nodes without kubelet and containers: a lab whose agents have a real API server for their store.

For tests and measurements of what agents do with objects of Kubernetes. A pod is bound through the API, and attached by
`labs.run`, as every pod of a lab is. The API server runs on the underlay, in the place of a lab's etcd, so the lab's
own commands part nodes from it and remove all of it.
"""

import contextlib
import json
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from podwire.kernel import netns
from podwire.lab import labs
from podwire.lab import node as lab_nodes
from podwire.lab import state as states
from podwire.lab.kubernetes.api_server import ApiServer, Shape, User
from podwire.lab.kubernetes.client import ApiClient, Refused
from podwire.lab.kubernetes.daemon import LOOK_S
from podwire.lab.kubernetes.networks.agents import MANIFEST
from podwire.lab.state import LabState
from podwire.lab.topology import LabPlan, LabShape, NodePlan, plan_lab
from podwire.model.errors import NotFound, Unavailable

AGENT: Final = "system:serviceaccount:podwire-system:podwire-agent"
PORT: Final = 6443
_DEADLINE_S: Final = 120.0
_RBAC: Final = "/apis/rbac.authorization.k8s.io/v1"
_PATHS: Final = {
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "ClusterRole": f"{_RBAC}/clusterroles",
    "ClusterRoleBinding": f"{_RBAC}/clusterrolebindings",
    "Role": f"{_RBAC}/namespaces/kube-system/roles",
    "RoleBinding": f"{_RBAC}/namespaces/kube-system/rolebindings",
}
"""What of the manifest the API server is given, and where."""


@dataclass(frozen=True)
class BareCluster:
    """A lab with an API server; `raised` makes one."""

    plan: LabPlan
    api: ApiServer

    @property
    def name(self) -> str:
        """The lab's."""
        return self.plan.name

    @property
    def client(self) -> ApiClient:
        """A way to the API server that may do anything."""
        return self.api.client

    @property
    def kubeconfig(self) -> Path:
        """The agents', which gives no more rights than the manifest."""
        return self.plan.directory / "agent.kubeconfig"

    def add_namespace(self, name: str) -> None:
        """Make a namespace in which pods can be created."""
        with contextlib.suppress(Refused):
            self.client.create("/api/v1/namespaces", {"metadata": {"name": name}})
        path = f"/api/v1/namespaces/{name}/serviceaccounts"
        # The API server makes `default` by itself, some time after it is ready.
        _wait(lambda: self.client.answers(f"/api/v1/namespaces/{name}"), f"namespace {name}")
        self.client.create(path, {"metadata": {"name": "default"}})

    def bind(
        self,
        name: str,
        node: str,
        *,
        labels: Mapping[str, str] | None = None,
        namespace: str = "default",
    ) -> None:
        """Create a pod that is bound to a node already."""
        pod = {
            "metadata": {"name": name, "labels": dict(labels or {})},
            "spec": {"nodeName": node, "containers": [{"name": "main", "image": "none"}]},
        }
        self.client.create(f"/api/v1/namespaces/{namespace}/pods", pod)

    def unbind(self, name: str, *, namespace: str = "default") -> None:
        """Delete a pod at once."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        self.client.delete(path, {"gracePeriodSeconds": 0})

    def write_config(self, node: NodePlan, settings: Mapping[str, object]) -> None:
        """Write the configuration of a node's agent, which reads it when it is started."""
        lab_nodes.write_config(self.plan, node)
        path = node.directory / lab_nodes.CONFIG_FILE
        known = tomllib.loads(path.read_text(encoding="utf-8"))
        # The core Node has both.
        del known["node_cidrs"], known["node_address"]
        known |= {"store": "kubernetes", "kubeconfig": str(self.kubeconfig), **settings}
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in known.items())
        path.write_text(text, encoding="utf-8")


@contextmanager
def raised(
    name: str,
    *,
    nodes: int = 1,
    settings: Mapping[str, object] | None = None,
    start: bool = True,
) -> Iterator[BareCluster]:
    """Give such a cluster, of IPv4 only, with agents that run unless `start` is false; it is removed afterwards."""
    # With etcd for its store a lab has an address on the underlay for it.
    shape = LabShape(nodes=nodes, families="4", store="etcd")
    plan = plan_lab(name, shape)
    with contextlib.suppress(NotFound):
        labs.down(name, progress=labs.say_nothing)
    plan.directory.mkdir(mode=0o700, parents=True)
    states.write_state(LabState(name=name, shape=shape))
    try:
        lab_nodes.create_network(plan)
        api = _start_api(plan)
        try:
            cluster = BareCluster(plan, api)
            _furnish(cluster)
            for node in plan.nodes:
                cluster.write_config(node, settings or {})
            if start:
                for node in plan.nodes:
                    labs.change_agent(name, node.name, "start")
                lab_nodes.wait_until_joined(plan)
            yield cluster
        finally:
            api.stop()
    finally:
        labs.down(name, progress=labs.say_nothing)


def _start_api(plan: LabPlan) -> ApiServer:
    directory = plan.directory / "api"
    directory.mkdir(mode=0o700)
    shape = Shape(
        address=plan.store_addresses[0],
        port=PORT,
        network=netns.named_path(plan.underlay_namespace),
    )
    api = ApiServer(directory, [User(AGENT)], shape)
    try:
        api.start()
    except BaseException:
        api.stop()
        raise
    return api


def _furnish(cluster: BareCluster) -> None:
    """Give the API server podwire's kinds and rights, and a core Node for each node."""
    documents = yaml.load_all(MANIFEST.read_text(encoding="utf-8"), yaml.CSafeLoader)
    for document in documents:
        if document and document["kind"] in _PATHS:
            cluster.client.create(_PATHS[document["kind"]], document)
    for node in cluster.plan.nodes:
        spec = {"podCIDR": node.pod_cidrs[0], "podCIDRs": list(node.pod_cidrs)}
        cluster.client.create("/api/v1/nodes", {"metadata": {"name": node.name}, "spec": spec})
        addresses = [{"type": "InternalIP", "address": address} for address in node.addresses]
        status = {"status": {"addresses": addresses}}
        cluster.client.patch(f"/api/v1/nodes/{node.name}/status", status)
    cluster.add_namespace("default")
    path = "/apis/podwire.io/v1/nodeendpoints"
    _wait(lambda: cluster.client.answers(path), "podwire's kinds")
    cluster.api.write_kubeconfig(cluster.kubeconfig, AGENT)


def _wait(look: Any, what: str) -> None:
    until_s = time.monotonic() + _DEADLINE_S
    while not look():
        if time.monotonic() > until_s:
            raise Unavailable(f"wait for {what}: not within {_DEADLINE_S:g} s")
        time.sleep(LOOK_S)
