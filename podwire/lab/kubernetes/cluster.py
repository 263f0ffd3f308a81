"""The cluster as a whole: up, what is done with it, down. All or nothing: what fails half-way is taken back.

The way in for the demo and for tests. Nodes are joined by a bridge in a namespace of its own, where the control plane
runs, too; nothing is changed in the caller's network. `down` works from the name alone, also after the rig was killed.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml

from podwire.kernel import netns, spawn
from podwire.lab.kubernetes import programs, ranges, residue
from podwire.lab.kubernetes.client import ApiClient
from podwire.lab.kubernetes.control_plane import ControlPlane
from podwire.lab.kubernetes.daemon import LOOK_S, Place
from podwire.lab.kubernetes.networks import Network
from podwire.lab.kubernetes.nodes.machine import Machine, MachinePlan
from podwire.lab.kubernetes.nodes.services import Access, NodeServices, Options
from podwire.lab.node import run_ip
from podwire.lab.state import locked
from podwire.model.errors import Unavailable

DEADLINE_S: Final = 240.0
"""Long enough for a loaded machine; nobody waits for it unless something is wrong."""
CONTROL: Final = "control"
WORLD: Final = "world"
"""The place outside of the cluster; its way to everybody is the control plane's, like that of the nodes to it."""
WORLD_ADDRESSES: Final = {"4": "198.51.100.10", "6": "2001:db8:51::10"}
_BRIDGE: Final = "underlay"
_UPLINK: Final = "eth0"
_WORLD_LINKS: Final = {"4": ("198.51.100.1", 24), "6": ("2001:db8:51::1", 64)}
"""The router's address on the way to the world, and the length of that prefix."""
_FORWARD: Final = """
echo 1 > /proc/sys/net/ipv4/ip_forward
[ ! -e /proc/sys/net/ipv6 ] || echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
"""

Progress = Callable[[str], None]
_Found = TypeVar("_Found")


class ClusterShape(msgspec.Struct, frozen=True):
    """What a cluster is like."""

    nodes: int = 2
    families: str = "4"
    """`4`, or `46` for both, of which the first is preferred."""
    proxy: str = "nftables"
    """The mode of kube-proxy; or `iptables`; empty: there is none."""
    newer: frozenset[str] = frozenset()
    """Which of `containerd` and `etcd` are newer ones than the distribution's."""
    mtu: int = 1500
    runtime_log: str = "info"
    """With `debug` containerd says when the network part of a sandbox begins and ends."""
    hidden: tuple[str, ...] = ()
    """Directories that are empty on the nodes, such as the checkout."""


class Node(msgspec.Struct, frozen=True):
    """One node with its programs."""

    machine: Machine
    services: NodeServices

    @property
    def name(self) -> str:
        """Of the node."""
        return self.machine.name


class Cluster:
    """A cluster; `up` makes one."""

    def __init__(self, name: str, shape: ClusterShape, network: Network) -> None:
        self.name, self.shape, self.network = name, shape, network
        self.directory = residue.directory_of(name)
        self.control: ControlPlane
        self.nodes: tuple[Node, ...] = ()

    @property
    def client(self) -> ApiClient:
        """A way to the API server that may do anything."""
        return self.control.api.client

    def node(self, name: str) -> Node:
        """Find a node."""
        return next(node for node in self.nodes if node.name == name)

    def pod_cidrs(self, node: Node) -> list[str]:
        """Give the ranges that the controller manager has given to a node, one of each family."""
        return list(self.client.get(f"/api/v1/nodes/{node.name}")["spec"]["podCIDRs"])

    def kubectl(self, *arguments: str, input_text: str = "", timeout_s: float = DEADLINE_S) -> str:
        """Run kubectl as the administrator; Unavailable shows what it complained of."""
        done = self.try_kubectl(*arguments, input_text=input_text, timeout_s=timeout_s)
        if done.status:
            said = done.stderr.decode(errors="replace").strip()
            raise Unavailable(f"kubectl {' '.join(arguments)}: {said}")
        return done.stdout.decode(errors="replace")

    def try_kubectl(
        self, *arguments: str, input_text: str = "", timeout_s: float = DEADLINE_S
    ) -> spawn.Completed:
        """Run kubectl as the administrator, whatever comes of it."""
        kubectl = programs.find(programs.CLUSTER)["kubectl"]
        command = [kubectl, f"--kubeconfig={self.kubeconfig}", *arguments]
        place = Place(network=netns.named_path(residue.namespace_of(self.name, CONTROL)))
        return place.run(command, input_bytes=input_text.encode(), timeout_s=timeout_s)

    @property
    def world(self) -> str:
        """The network namespace of a host outside."""
        return residue.namespace_of(self.name, WORLD)

    def use_proxy(self, mode: str) -> None:
        """Run kube-proxy in another mode on every node, or stop it ("")."""
        with ThreadPoolExecutor(len(self.nodes)) as threads:
            list(threads.map(lambda node: node.services.use_proxy(mode), self.nodes))

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.directory / "admin.kubeconfig"

    def apply(self, *documents: Mapping[str, Any]) -> None:
        """Give documents to kubectl."""
        text = "\n---\n".join(json.dumps(document) for document in documents)
        self.kubectl("apply", "-f", "-", input_text=text)

    def list_pods(self, namespace: str = "default", selector: str = "") -> list[Mapping[str, Any]]:
        """List the pods of a namespace."""
        query = f"?labelSelector={selector}" if selector else ""
        return list(self.client.get(f"/api/v1/namespaces/{namespace}/pods{query}")["items"])

    def wait_for(
        self, look: Callable[[], _Found], what: str, deadline_s: float = DEADLINE_S
    ) -> _Found:
        """Look until there is something, and give that; Unavailable says how things stand."""
        until_s = time.monotonic() + deadline_s
        while not (answer := look()):
            if time.monotonic() > until_s:
                raise Unavailable(
                    f"wait for {what}: not within {deadline_s:g} s\n{self.describe()}"
                )
            time.sleep(LOOK_S)
        return answer

    def wait_for_pods(
        self, count: int, namespace: str = "default", selector: str = ""
    ) -> list[Mapping[str, Any]]:
        """Wait until so many pods are Ready and no others are there."""

        def look() -> list[Mapping[str, Any]]:
            found = self.list_pods(namespace, selector)
            return found if len(found) == count and all(map(is_ready, found)) else []

        if not count:
            self.wait_for(lambda: not self.list_pods(namespace, selector), f"no {selector} pods")
            return []
        return self.wait_for(look, f"{count} Ready pods {selector}")

    def wait_until_ready(self) -> None:
        """Wait until every node is Ready."""

        def look() -> bool:
            found = self.client.get("/api/v1/nodes")["items"]
            return len(found) == len(self.nodes) and all(map(is_ready, found))

        self.wait_for(look, "every node to be Ready")

    def describe(self) -> str:
        """Say how things stand: the logs of nodes and of pods that are not Ready, recent events, pods, nodes."""
        parts = [
            f"{daemon.name}:\n{daemon.read_tail(6)}"
            for node in self.nodes
            for daemon in (node.services.containerd, node.services.kubelet)
        ]
        for pod in self.client.get("/api/v1/pods")["items"]:
            if not is_ready(pod):
                namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
                done = self.try_kubectl(
                    *("logs", "-n", namespace, name, "--all-containers", "--tail=8")
                )
                parts.append(f"{namespace}/{name}:\n{(done.stdout or done.stderr).decode()}")
        for words in (
            ("get", "events", "-A", "--sort-by=.lastTimestamp"),
            ("get", "pods", "-A", "-o", "wide"),
            ("get", "nodes", "-o", "wide"),
        ):
            said = self.try_kubectl(*words).stdout.decode(errors="replace")
            parts.append("\n".join(said.splitlines()[-20:]))
        return "\n".join(parts)


def up(name: str, shape: ClusterShape, network: Network, *, progress: Progress = print) -> Cluster:
    """Make a cluster, whose nodes are Ready if its network makes them so; what an earlier one left is removed first."""
    programs.find(programs.CLUSTER)
    with locked(residue.RUN_ROOT, create=True):
        residue.remove(name)
        cluster = Cluster(name, shape, network)
        try:
            _raise(cluster, progress)
        except BaseException:
            residue.remove(name)
            raise
    return cluster


def down(name: str) -> None:
    """Remove a cluster, or what is left of one."""
    with locked(residue.RUN_ROOT, create=True):
        residue.remove(name)


@contextmanager
def raised(
    name: str, shape: ClusterShape, network: Network, *, progress: Progress = print
) -> Iterator[Cluster]:
    """Give a cluster that is removed afterwards."""
    cluster = up(name, shape, network, progress=progress)
    try:
        yield cluster
    finally:
        down(name)


def is_ready(document: Mapping[str, Any]) -> bool:
    """Tell whether a node or a pod has the condition Ready, and is not about to go."""
    if document["metadata"].get("deletionTimestamp"):
        return False
    conditions = document.get("status", {}).get("conditions", [])
    return any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )


def _raise(cluster: Cluster, progress: Progress) -> None:
    cluster.directory.mkdir(mode=0o755, parents=True)
    residue.save_settings(cluster.directory)
    plans = _plan_machines(cluster)
    control = _make_network(cluster, plans)
    _make_world(cluster)
    cluster.control = ControlPlane(
        cluster.directory,
        network=netns.named_path(control),
        families=cluster.shape.families,
        etcd=programs.find_etcd(newer="etcd" in cluster.shape.newer),
    )
    cluster.control.start()
    cluster.control.api.write_kubeconfig(cluster.kubeconfig)
    _write_as_kubeadm(cluster)
    progress(f"API server, controller manager and scheduler run ({cluster.control.api.url})")
    cluster.nodes = tuple(_make_node(cluster, plan) for plan in plans)
    with ThreadPoolExecutor(len(plans)) as threads:
        list(threads.map(_start_node, cluster.nodes))
    cluster.wait_for(lambda: _have_ranges(cluster), "the pod CIDR of every node")
    progress(f"{len(plans)} nodes with containerd and kubelet are registered")
    cluster.network.prepare(cluster)
    for node in cluster.nodes:
        cluster.network.install(cluster, node)
    if cluster.network.makes_ready:
        cluster.wait_until_ready()
        progress(f"{len(plans)} nodes are Ready with the network {cluster.network.name}")


def _write_as_kubeadm(cluster: Cluster) -> None:
    """Write what kubeadm leaves in a cluster, and networks look at."""
    families = cluster.shape.families
    subnets = {
        "podSubnet": ranges.join_pods(families),
        "serviceSubnet": ranges.join_services(families),
    }
    text = yaml.safe_dump({"kind": "ClusterConfiguration", "networking": subnets})
    cluster.client.create(
        "/api/v1/namespaces/kube-system/configmaps",
        {"metadata": {"name": "kubeadm-config"}, "data": {"ClusterConfiguration": text}},
    )
    cluster.client.create(
        "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
        {
            "metadata": {"name": "kube-proxy"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": "system:node-proxier",
            },
            "subjects": [{"kind": "User", "name": "system:kube-proxy"}],
        },
    )


def _plan_machines(cluster: Cluster) -> Sequence[MachinePlan]:
    return [
        MachinePlan(
            name=f"node{number}",
            namespace=residue.namespace_of(cluster.name, f"node{number}"),
            addresses=tuple(
                family.node_address(number) for family in ranges.of(cluster.shape.families)
            ),
            directory=cluster.directory / f"node{number}",
            shared=cluster.directory,
            hidden=cluster.shape.hidden,
        )
        for number in range(1, cluster.shape.nodes + 1)
    ]


def _make_network(cluster: Cluster, plans: Sequence[MachinePlan]) -> str:
    """Make the namespaces and join them; gives the one of the control plane."""
    control, mtu = residue.namespace_of(cluster.name, CONTROL), cluster.shape.mtu
    netns.create_named(control).close()
    run_ip(
        control,
        [
            "link set lo up",
            f"link add {_BRIDGE} type bridge mcast_snooping 0",
            f"link set {_BRIDGE} mtu {mtu} addrgenmode none up",
            *(
                f"addr add {family.with_length(family.router)} dev {_BRIDGE} nodad"
                for family in ranges.of(cluster.shape.families)
            ),
        ],
    )
    for plan in plans:
        netns.create_named(plan.namespace).close()
        peer = f"peer name {_UPLINK} mtu {mtu} netns {plan.namespace}"
        run_ip(
            control,
            [
                f"link add {plan.name} mtu {mtu} type veth {peer}",
                f"link set {plan.name} master {_BRIDGE} up",
            ],
        )
        run_ip(
            plan.namespace,
            [
                "link set lo up",
                *(
                    f"addr add {family.with_length(address)} dev {_UPLINK} nodad"
                    for family, address in _pairs(cluster, plan)
                ),
                f"link set {_UPLINK} up",
                *(
                    f"route add default via {family.router} dev {_UPLINK}"
                    for family, _ in _pairs(cluster, plan)
                ),
            ],
        )
    return control


def _make_world(cluster: Cluster) -> None:
    """Make the place outside, and let the control plane's forward to it and from it."""
    control, world = (residue.namespace_of(cluster.name, place) for place in (CONTROL, WORLD))
    netns.create_named(world).close()
    links = [(family, *_WORLD_LINKS[family]) for family in cluster.shape.families]
    run_ip(
        control,
        [
            f"link add {WORLD} type veth peer name {_UPLINK} netns {world}",
            *(f"addr add {router}/{length} dev {WORLD} nodad" for _, router, length in links),
            f"link set {WORLD} up",
        ],
    )
    run_ip(
        world,
        [
            "link set lo up",
            *(
                f"addr add {WORLD_ADDRESSES[family]}/{length} dev {_UPLINK} nodad"
                for family, _, length in links
            ),
            f"link set {_UPLINK} up",
            *(f"route add default via {router} dev {_UPLINK}" for _, router, _ in links),
        ],
    )
    done = Place(network=netns.named_path(control)).run(["sh", "-c", _FORWARD])
    if done.status:
        raise Unavailable(f"forward to the world: {done.stderr.decode(errors='replace').strip()}")


def _pairs(cluster: Cluster, plan: MachinePlan) -> Iterator[tuple[ranges.Ranges, str]]:
    return zip(ranges.of(cluster.shape.families), plan.addresses, strict=True)


def _make_node(cluster: Cluster, plan: MachinePlan) -> Node:
    control = cluster.control
    access = Access(
        kubelet=control.kubeconfig_of(f"system:node:{plan.name}", "system:nodes"),
        proxy=control.kubeconfig_of("system:kube-proxy"),
        ca=control.api.ca,
    )
    machine = Machine(plan)
    return Node(machine, NodeServices(machine, access, _options_of(cluster.shape)))


def _options_of(shape: ClusterShape) -> Options:
    return Options(
        shape.proxy,
        ranges.join_pods(shape.families),
        programs.find_containerd(newer="containerd" in shape.newer),
        shape.runtime_log,
    )


def _start_node(node: Node) -> None:
    node.machine.open()
    node.services.start()


def _have_ranges(cluster: Cluster) -> bool:
    nodes = cluster.client.get("/api/v1/nodes")["items"]
    return len(nodes) == len(cluster.nodes) and all(node["spec"].get("podCIDR") for node in nodes)
