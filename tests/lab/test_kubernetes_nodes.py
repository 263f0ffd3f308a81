"""Real agents with a real API server for their store, without kubelets: identities, publications, addresses, two agents
of one node.
"""

import ipaddress
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import pytest

from podwire.control.cluster.facts import encode_node, tunnel_mac
from podwire.control.cluster.published import Publication, encode_endpoints
from podwire.kernel import netns
from podwire.lab import labs, traffic
from podwire.lab import node as lab_nodes
from podwire.lab.kubernetes import programs
from podwire.lab.kubernetes.client import Refused
from podwire.lab.kubernetes.nodes import bare
from podwire.lab.kubernetes.nodes.bare import BareCluster
from podwire.lab.node import run_ip
from podwire.model.cluster import NodeFacts
from podwire.model.endpoint import IPAddress
from podwire.model.errors import NotFound
from podwire.model.ids import IdentityId
from tests.lab.labrig import Lab, lab_name
from tests.lab.test_claims import undisturbed
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

OWN: Final = "/apis/podwire.io/v1"
SHARED: Final = "10.99.0.9"
POOL: Final = {
    "apiVersion": "podwire.io/v1",
    "kind": "IPPool",
    "metadata": {"name": "shared"},
    "spec": {"cidr": "10.99.0.0/24"},
}
IDENTITY: Final = IdentityId(70_000)


class KubernetesLab(Lab):
    """Such a cluster, asked as every lab is."""

    def __init__(self, cluster: BareCluster) -> None:
        self.name, self.cluster = cluster.name, cluster

    def run(self, name: str, node: str, **labels: str) -> str:
        """Bind and attach a pod; gives its address."""
        self.cluster.bind(name, node, labels=labels)
        return labs.run(self.name, name, node).addresses[0]

    def objects(self, plural: str) -> dict[str, Mapping[str, Any]]:
        """Give podwire's own objects of a kind, by name."""
        found = self.cluster.client.get(f"{OWN}/{plural}")["items"]
        return {item["metadata"]["name"]: item for item in found}

    def events(self, reason: str) -> list[str]:
        """Give what Events of a reason say."""
        found = self.cluster.client.get("/api/v1/namespaces/default/events")["items"]
        return [item["message"] for item in found if item.get("reason") == reason]

    def warns(self, text: str, node: str = "node1") -> bool:
        """Tell whether a node's status says something."""
        return any(text in warning for warning in self.get("/status", node)["warnings"])

    def identity_at(self, address: str, node: str) -> int:
        """Give the identity that a node's programs have for an address; 0 = none of its own."""
        rows = self.get("/map/ipcache?limit=1000", node)["rows"]
        return next((row["identity"] for row in rows if row["prefix"] == f"{address}/32"), 0)


@pytest.fixture(scope="module")
def lab() -> Iterator[KubernetesLab]:
    """Two nodes with a pod each."""
    try:
        programs.find(programs.API_SERVER)
        programs.require("etcd", "etcd-server")
    except NotFound as missing:
        pytest.skip(f"{missing.message} ({missing.hint})")
    with bare.raised(lab_name(), nodes=2) as cluster:
        made = KubernetesLab(cluster)
        a, b = made.run("a", "node1", app="a"), made.run("b", "node2", app="b")
        for address, node in ((b, "node1"), (a, "node2")):
            wait_for(
                lambda address=address, node=node: made.identity_at(address, node) > 255,  # type: ignore[misc]
                "the other node's pod to be known",
            )
        yield made


def test_an_identity_that_is_deleted_by_hand_comes_back_under_its_number(
    lab: KubernetesLab,
) -> None:
    [address] = labs.find_addresses(lab.state, "a")
    number = lab.identity_at(address, "node2")
    before = lab.objects("identities")[str(number)]
    with undisturbed(lab):
        lab.cluster.client.delete(f"{OWN}/identities/{number}")
        wait_for(lambda: str(number) in lab.objects("identities"), "the identity to be made again")
    after = lab.objects("identities")[str(number)]
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert after["spec"] == before["spec"]
    assert lab.identity_at(address, "node2") == number
    assert [endpoint["identity"] for endpoint in lab.get("/endpoint")] == [number]


class Ghosts:
    """Nodes that exist in the API alone, and publish one pod address, both of them."""

    def __init__(self, lab: KubernetesLab) -> None:
        self._lab = lab
        self._client = lab.cluster.client

    def publish(self, name: str, host: int, epoch: int) -> None:
        """Say that a node has the address since an epoch."""
        own = ipaddress.ip_network(f"10.244.{host}.0/24")
        facts = NodeFacts(
            name=name,
            instance=f"instance-{name}",
            epoch=epoch,
            addresses=(ipaddress.ip_address(f"192.0.2.{host}"),),
            pod_cidrs=(own,),
            tunnel_addresses=(own[1],),
            tunnel_mac=tunnel_mac(name),
            underlay_mtu_bytes=1500,
        )
        pods: dict[IPAddress, IdentityId] = {ipaddress.ip_address(SHARED): IDENTITY}
        said = Publication(name, epoch, 1, pods)
        self._put("nodes", name, encode_node(facts))
        self._put("nodeendpoints", name, encode_endpoints(said, [own]))

    def _put(self, plural: str, name: str, document: Mapping[str, Any]) -> None:
        path = f"{OWN}/{plural}"
        kind = {"nodes": "Node", "nodeendpoints": "NodeEndpoints"}[plural]
        document = {"apiVersion": "podwire.io/v1", "kind": kind, **document}
        metadata = {**document.get("metadata", {}), "name": name}
        try:
            known = self._client.get(f"{path}/{name}")
        except Refused:
            self._client.create(path, {**document, "metadata": metadata})
        else:
            metadata["resourceVersion"] = known["metadata"]["resourceVersion"]
            self._client.replace(f"{path}/{name}", {**document, "metadata": metadata})

    def withdraw(self) -> None:
        """Take all of it away."""
        for path in (
            "nodeendpoints/ghost1",
            "nodeendpoints/ghost2",
            "nodes/ghost1",
            "nodes/ghost2",
        ):
            with suppress(Refused):
                self._client.delete(f"{OWN}/{path}")


@pytest.fixture
def ghosts(lab: KubernetesLab) -> Iterator[Ghosts]:
    lab.cluster.client.create(f"{OWN}/ippools", POOL)
    made = Ghosts(lab)
    yield made
    made.withdraw()
    lab.cluster.client.delete(f"{OWN}/ippools/shared")
    wait_for(lambda: not lab.warns("both publish"), "the end of the contest")


def test_an_address_in_two_publications_is_the_newer_ones_or_nobodys(
    lab: KubernetesLab, ghosts: Ghosts
) -> None:
    ghosts.publish("ghost1", 101, 1)
    for node in ("node1", "node2"):
        wait_for(lambda node=node: lab.identity_at(SHARED, node) == IDENTITY, "its row")  # type: ignore[misc]
    ghosts.publish("ghost2", 102, 1)
    for node in ("node1", "node2"):
        wait_for(
            lambda node=node: lab.warns(
                f"both publish pod address {SHARED}: no node gets it", node
            ),  # type: ignore[misc]
            "both to be named",
        )
        wait_for(lambda node=node: lab.identity_at(SHARED, node) != IDENTITY, "the row to go")  # type: ignore[misc]
    ghosts.publish("ghost2", 102, 2)
    for node in ("node1", "node2"):
        wait_for(lambda node=node: lab.warns("ghost2 has it by the newer claim", node), "who won")  # type: ignore[misc]
        wait_for(lambda node=node: lab.identity_at(SHARED, node) == IDENTITY, "its row")  # type: ignore[misc]


def test_a_second_agent_of_a_node_waits_and_the_first_tells_of_it(lab: KubernetesLab) -> None:
    node = lab.node()
    with open(node.directory / "second.log", "wb") as log:
        second = subprocess.Popen(
            [
                *("nsenter", f"--net={netns.named_path(node.namespace)}"),
                *(lab_nodes.agent_program(), "--config", str(node.directory / "agent.toml")),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        with undisturbed(lab):
            said = f"process {second.pid}, waits until this one ends"
            wait_for(lambda: lab.warns(said), "the first to name it")
            wait_for(lambda: any(said in event for event in lab.events("SecondAgent")), "the Event")
            wait_for(
                lambda: (
                    "this one waits until it ends" in (node.directory / "second.log").read_text()
                ),
                "the second to say so",
            )
            wait_for(
                lambda: "another agent of this node" in "\n".join(lab_nodes.read_log(node)),
                "the first one's log",
            )
            labs.change_agent(lab.name, "node1", "stop")
            wait_for(lambda: lab_nodes.answers(node), "the second to serve")
            assert not lab.warns("waits until this one ends")
            assert [endpoint["pod"] for endpoint in lab.get("/endpoint")] == ["a"]
    finally:
        second.terminate()
        second.wait()
        labs.change_agent(lab.name, "node1", "start")


CARD: Final = "data0"


@contextmanager
def second_cards(lab: KubernetesLab) -> Iterator[None]:
    """Join the nodes by second cards, which carry their default routes."""
    plan = lab.state.plan
    run_ip(plan.underlay_namespace, ["link add second type bridge", "link set second up"])
    for index, node in enumerate(plan.nodes, 1):
        peer = f"peer name {CARD} netns {node.namespace}"
        run_ip(
            plan.underlay_namespace,
            [
                f"link add second{index} type veth {peer}",
                f"link set second{index} master second up",
            ],
        )
        run_ip(
            node.namespace,
            [
                f"addr add 198.51.100.{index}/24 dev {CARD}",
                f"link set {CARD} up",
                f"route replace default via 198.51.100.254 dev {CARD}",
            ],
        )
    yield
    run_ip(plan.underlay_namespace, ["link del second1", "link del second2", "link del second"])


def published(lab: KubernetesLab) -> dict[str, list[str]]:
    """Give the addresses that each node publishes."""
    return {name: one["spec"]["addresses"] for name, one in lab.objects("nodes").items()}


def restart(lab: KubernetesLab, **settings: str) -> None:
    for node in lab.state.plan.nodes:
        labs.change_agent(lab.name, node.name, "stop")
        lab.cluster.write_config(node, settings)
        labs.change_agent(lab.name, node.name, "start")
    lab_nodes.wait_until_joined(lab.state.plan)


def test_a_pattern_of_cards_beats_internal_ips_and_these_beat_the_default_route(
    lab: KubernetesLab,
) -> None:
    here = {node.name: list(node.addresses) for node in lab.state.plan.nodes}
    other = {"node1": ["198.51.100.1"], "node2": ["198.51.100.2"]}
    source, _ = labs.locate(lab.state, "a")
    [target] = labs.find_addresses(lab.state, "b")
    with second_cards(lab):
        restart(lab)
        wait_for(lambda: published(lab) == here, "the InternalIPs")
        wait_for(lambda: traffic.ping(source, target, timeout_s=5).ok, "the way by the first cards")
        restart(lab, node_interface="data*")
        wait_for(lambda: published(lab) == other, "the addresses of the second cards")
        # What is left of the first cards does not carry it.
        labs.set_partition(lab.name, "node1", "node2")
        wait_for(
            lambda: traffic.ping(source, target, timeout_s=5).ok, "the way by the second cards"
        )
        labs.heal(lab.name)
        restart(lab)
        wait_for(lambda: published(lab) == here, "the InternalIPs again")
