"""A closed pod stays closed to whoever comes by node ports and load balancers, which kube-proxy serves.

Its masquerade makes others look like a node: the world, pods that are denied, other nodes. None of them gets in; who is
allowed does.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import pytest

from podwire.lab import traffic
from podwire.lab.kubernetes import cluster as clusters
from podwire.lab.kubernetes import pods, residue
from podwire.lab.kubernetes.cluster import Cluster
from podwire.lab.node import run_ip
from tests.cluster.agents import Agents
from tests.waiting import wait_for

ON_SHAPES: Final = ("other",)
NAMESPACE: Final = "exposed"
PORT: Final = 80
BALANCERS: Final = {
    "behind-node2": ("203.0.113.50", "2001:db8:113::50"),
    "behind-node1": ("203.0.113.51", "2001:db8:113::51"),
}
"""Addresses of load balancers, and which node the network outside leads them to."""
POLICY_OF: Final = {
    "node-port": "Cluster",
    "node-port-local": "Local",
    "behind-node2": "Cluster",
    "behind-node1": "Local",
}
"""The externalTrafficPolicy of each service."""
POD_PLACES: Final = {
    "guarded": ("guarded", "node1"),
    "friend": ("friend", "node2"),
    "stranger-here": ("stranger", "node1"),
    "stranger-there": ("stranger", "node2"),
}


@dataclass(frozen=True, order=True)
class Door:
    """One way to the closed pod from outside."""

    service: str
    address: str
    port: int


@dataclass(frozen=True)
class Exposed:
    """The pods, by their networks, and the ways to the closed one."""

    cluster: Cluster
    networks: Mapping[str, str]
    addresses: Mapping[str, str]
    doors: Sequence[Door]
    cluster_ips: Sequence[str]

    def senders(self) -> dict[str, str]:
        """Give the networks of those who are not allowed."""
        strangers = {one: self.networks[one] for one in ("stranger-here", "stranger-there")}
        node = self.cluster.nodes[1].machine.plan.namespace
        return {"world": self.cluster.world, "another node": node, **strangers}

    def knock(
        self, senders: Mapping[str, str], doors: Sequence[Door], *, timeout_s: float
    ) -> set[tuple[str, Door]]:
        """Give which senders are answered at which doors."""
        pairs = list(itertools.product(senders, doors))

        def answers(pair: tuple[str, Door]) -> bool:
            name, door = pair
            return traffic.connect(senders[name], door.address, door.port, timeout_s=timeout_s).ok

        with ThreadPoolExecutor(16) as threads:
            return {pair for pair, ok in zip(pairs, threads.map(answers, pairs), strict=True) if ok}

    def wait_until_open(self, senders: Mapping[str, str], doors: Sequence[Door]) -> None:
        """Wait until all of them are answered."""
        wanted = set(itertools.product(senders, doors))
        missing: set[tuple[str, Door]] = set()

        def open_() -> bool:
            missing.clear()
            missing.update(wanted - self.knock(senders, doors, timeout_s=3))
            return not missing

        try:
            wait_for(open_, "every door to be open")
        except AssertionError as failure:
            raise AssertionError(f"{failure}: {missing}") from failure


@pytest.fixture(scope="module")
def exposed(shaped: Cluster) -> Iterator[Exposed]:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    shaped.apply(
        namespace,
        *(
            pods.describe(name, namespace=NAMESPACE, node=node, labels={"app": app})
            for name, (app, node) in POD_PLACES.items()
        ),
    )
    try:
        found = {
            pod["metadata"]["name"]: pod for pod in shaped.wait_for_pods(len(POD_PLACES), NAMESPACE)
        }
        lead_to_balancers(shaped)
        services = {name: create_service(shaped, name) for name in POLICY_OF}
        yield Exposed(
            shaped,
            {name: pods.network_of(shaped, pod) for name, pod in found.items()},
            {name: str(pod["status"]["podIP"]) for name, pod in found.items()},
            list(list_doors(shaped, services)),
            services["node-port"]["spec"]["clusterIPs"],
        )
    finally:
        shaped.kubectl("delete", "namespace", NAMESPACE)


def create_service(shaped: Cluster, name: str) -> Mapping[str, Any]:
    path = f"/api/v1/namespaces/{NAMESPACE}/services"
    spec = {
        "type": "LoadBalancer" if name in BALANCERS else "NodePort",
        "selector": {"app": "guarded"},
        "ipFamilyPolicy": "PreferDualStack",
        "ports": [{"port": PORT}],
        "externalTrafficPolicy": POLICY_OF[name],
    }
    document = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
    made: Mapping[str, Any] = shaped.client.create(path, document)
    if name in BALANCERS:
        ingress = [{"ip": address} for address in BALANCERS[name]]
        status = {"status": {"loadBalancer": {"ingress": ingress}}}
        shaped.client.patch(f"{path}/{name}/status", status)
    return made


def lead_to_balancers(shaped: Cluster) -> None:
    """Let the network outside lead the balancers' addresses to their nodes."""
    control = residue.namespace_of(shaped.name, clusters.CONTROL)
    run_ip(
        control,
        [
            f"route replace {address} via {via}"
            for (name, addresses) in BALANCERS.items()
            for address, via in zip(
                addresses,
                shaped.node(name.removeprefix("behind-")).machine.plan.addresses,
                strict=True,
            )
        ],
    )


def list_doors(shaped: Cluster, services: Mapping[str, Mapping[str, Any]]) -> Iterator[Door]:
    for name, addresses in BALANCERS.items():
        for address in addresses:
            yield Door(name, address, PORT)
    for node in shaped.nodes:
        for name in ("node-port", "node-port-local"):
            # Where no back end is, such a port is closed.
            if POLICY_OF[name] == "Local" and node.name != POD_PLACES["guarded"][1]:
                continue
            for address in node.machine.plan.addresses:
                yield Door(name, address, services[name]["spec"]["ports"][0]["nodePort"])


def closed(**more: object) -> Mapping[str, Any]:
    """Write the policy that lets friends in, and who else is named."""
    friends = {"podSelector": {"matchLabels": {"app": "friend"}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "guarded", "namespace": NAMESPACE},
        "spec": {
            "podSelector": {"matchLabels": {"app": "guarded"}},
            "ingress": [{"from": [friends, *([more] if more else [])]}],
        },
    }


def enforce(exposed: Exposed, *policies: Mapping[str, Any]) -> None:
    Agents(exposed.cluster).enforce(
        policies, namespaces=[NAMESPACE], addresses=list(exposed.addresses.values())
    )


def test_a_closed_pod_is_closed_behind_every_door(exposed: Exposed) -> None:
    enforce(exposed)
    senders = exposed.senders()
    exposed.wait_until_open(senders, exposed.doors)
    enforce(exposed, closed())
    assert exposed.knock(senders, exposed.doors, timeout_s=2) == set()
    inside = [Door("node-port", address, PORT) for address in exposed.cluster_ips]
    strangers = {name: path for name, path in senders.items() if name.startswith("stranger")}
    assert exposed.knock(strangers, inside, timeout_s=2) == set()
    exposed.wait_until_open({"friend": exposed.networks["friend"]}, inside)


def test_who_is_named_by_address_gets_in_where_addresses_are_kept(exposed: Exposed) -> None:
    cidr = f"{clusters.WORLD_ADDRESSES['4']}/32"
    enforce(exposed, closed(ipBlock={"cidr": cidr}))
    doors = [
        door
        for door in exposed.doors
        if POLICY_OF[door.service] == "Local" and ":" not in door.address
    ]
    assert len(doors) == 2
    exposed.wait_until_open({"world": exposed.cluster.world}, doors)
    others = {name: path for name, path in exposed.senders().items() if name != "world"}
    assert exposed.knock(others, exposed.doors, timeout_s=2) == set()


def test_the_own_node_gets_in_as_documented(exposed: Exposed) -> None:
    enforce(exposed, closed())
    own = exposed.cluster.nodes[0]
    doors = [door for door in exposed.doors if door.address in own.machine.plan.addresses]
    exposed.wait_until_open({"own node": own.machine.plan.namespace}, doors)
