"""The life of nodes on a real API server: a Node that is deleted, one that gets its range, and who tells of it."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import pytest

from podwire.agent.duties.cluster.duty import ClusterDuty, ClusterOptions
from podwire.agent.duties.cluster.publisher import take_name
from podwire.agent.duties.kubernetes.events import EventTeller, NodeEvents
from podwire.agent.duties.kubernetes.ranges import RangeKeeper, ServedRanges
from podwire.agent.duties.node_ranges import Addresses
from podwire.agent.health import Health
from podwire.agent.metrics import Metrics
from podwire.control.cluster.facts import decode_node, node_key
from podwire.control.cluster.reach import ClusterSettings
from podwire.control.endpoint.table import EndpointTable
from podwire.control.ipam.interface import Wish
from podwire.control.ipam.node import NodeIpam
from podwire.control.kubernetes.core_node import core_node_key, decode_core_node
from podwire.lab.kubernetes.api_server import ApiServer
from podwire.model.cluster import Underlay
from podwire.model.endpoint import IPNetwork
from podwire.model.errors import Unavailable
from podwire.model.ids import EndpointId
from podwire.store.kubernetes.api.kubeconfig import load_kubeconfig
from podwire.store.kubernetes.api.resources import selectors_of_node
from podwire.store.kubernetes.store import KubernetesStore
from tests.contract import api_rig, kubernetes_rig
from tests.fakes.node import FakeClock
from tests.unit.test_cluster_duty import Facts, FakeCluster, FakeNews
from tests.unit.test_cluster_planner import OVERLAY, ips, nets
from tests.waiting import wait_for

FOLLOWED_S: Final = 5.0
"""Within what peers follow a range to the node that has it now, by the issue."""
RANGE: Final = "10.244.5.0/24"


class Agent:
    """An agent of one node without a datapath: what it publishes, plans, gives out and tells."""

    def __init__(self, server: ApiServer, directory: Path, name: str, number: int) -> None:
        self.name = name
        self._stack = ExitStack()
        access = load_kubeconfig(server.write_kubeconfig(directory / f"kubeconfig-{name}"))
        self.store = self._stack.enter_context(
            closing(KubernetesStore(access, name=name, selectors=selectors_of_node(name)))
        )
        self.facts, self.health = Facts(), Health(FakeClock())
        stored = self.store.get(core_node_key(name))
        assert stored is not None
        self.ipam = NodeIpam(decode_core_node(stored).pod_cidrs)
        self.addresses = Addresses(self.ipam)
        teller = EventTeller(self.store.write_event, name, "nonce", self.health.warn)
        self._stack.callback(teller.stop)
        self.health.listen(NodeEvents(teller, name).hear)
        self.cluster = self._make_cluster(ips(f"192.0.2.{number}"))
        self.cluster.range_lost = lambda why: self.ipam.withhold("contest", why)
        self.keeper = RangeKeeper(
            store=self.store,
            node_name=name,
            facts=self.facts,
            served=ServedRanges(
                is_given=True,
                ranges=lambda: self.addresses.ranges,
                strays=lambda: self.addresses.strays,
                serve=self._serve,
                withhold=lambda why: self.ipam.withhold("core Node", why),
                tell=self.cluster.ranges_changed,
            ),
            core=self.addresses.core,
            warn=self.health.warn,
            shared=self.cluster.shared,
        )

    def _make_cluster(self, addresses: Any) -> ClusterDuty:
        kernel = FakeCluster()
        kernel.underlay = Underlay(addresses, nets("192.0.2.0/24"), 2, 1500)
        return ClusterDuty(
            options=ClusterOptions(
                self.name, ClusterSettings("overlay", OVERLAY.cluster_cidrs), has_core_nodes=True
            ),
            store=self.store,
            datapath=kernel,
            table=EndpointTable(),
            turn=threading.RLock(),
            journal=self.facts,
            health=self.health,
            metrics=Metrics(),
            own_ranges=self.addresses.own_ranges,
            open_news=FakeNews,
            name=take_name(self.store, self.facts, self.name, None),
        )

    def _serve(self, ranges: tuple[IPNetwork, ...]) -> None:
        self.ipam.change_ranges(ranges)
        self.cluster.ranges_changed()

    def start(self) -> "Agent":
        self.cluster.prepare()
        self.cluster.apply()
        self.cluster.start()
        self._stack.callback(self.cluster.stop)
        self.keeper.start()
        self._stack.callback(self.keeper.stop)
        return self

    def stop(self) -> None:
        self._stack.close()

    def sends_to(self, cidr: str) -> str:
        """Name the node that it sends packets for a range to."""
        with self.cluster.lock:
            planned = self.cluster.state.planned
        reaches = {} if planned is None else planned.reaches
        owners = [name for name, reach in reaches.items() if nets(cidr)[0] in reach.ranges]
        return owners[0] if len(owners) == 1 else ""

    def attach(self, owner: int) -> str:
        """Give an address to a pod, as an ADD does; "" = refused for now."""
        try:
            return str(self.ipam.take(EndpointId(owner), Wish())[0])
        except Unavailable:
            return ""

    def gives(self) -> str:
        """Tell whether a pod would get an address now, and which."""
        address = self.attach(99)
        self.ipam.release(EndpointId(99))
        return address


class Cluster:
    """Core Nodes of a real API server, without the controllers that would make and delete anything by themselves."""

    def __init__(self, server: ApiServer, directory: Path) -> None:
        self.server, self._directory = server, directory
        self._agents: list[Agent] = []

    def add_node(self, name: str, cidr: str) -> None:
        spec = {"podCIDR": cidr, "podCIDRs": [cidr]} if cidr else {}
        self.server.client.create("/api/v1/nodes", {"metadata": {"name": name}, "spec": spec})

    def delete_node(self, name: str) -> None:
        self.server.client.delete(f"/api/v1/nodes/{name}")

    def start(self, name: str) -> Agent:
        agent = Agent(self.server, self._directory, name, 10 + len(self._agents))
        self._agents.append(agent)
        return agent.start()

    def events(self, name: str, reason: str) -> list[str]:
        found = self.server.client.get("/api/v1/namespaces/default/events")["items"]
        return [
            one["message"]
            for one in found
            if one["involvedObject"]["name"] == name and one["reason"] == reason
        ]

    def close(self) -> None:
        for agent in self._agents:
            agent.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_rig.started(tmp_path_factory.mktemp("lives")) as made:
        kubernetes_rig.install_crds(made)
        yield made


@pytest.fixture
def cluster(server: ApiServer, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(server, tmp_path)
    yield made
    made.close()
    for path in ("/api/v1/nodes", "/apis/podwire.io/v1/nodes", "/apis/podwire.io/v1/nodeendpoints"):
        for one in server.client.get(path)["items"]:
            server.client.delete(f"{path}/{one['metadata']['name']}")


def test_a_range_passes_to_a_new_node_while_the_old_agent_still_runs(
    cluster: Cluster, record_property: Any
) -> None:
    cluster.add_node("old", RANGE)
    cluster.add_node("peer", "10.244.6.0/24")
    peer, old = cluster.start("peer"), cluster.start("old")
    wait_for(lambda: peer.sends_to(RANGE) == "old", "the old node")
    running = old.attach(1)
    assert running

    cluster.delete_node("old")
    cluster.add_node("new", RANGE)
    began_s = time.monotonic()
    new = cluster.start("new")
    wait_for(new.gives, "an address on the new node")
    wait_for(lambda: peer.sends_to(RANGE) == "new", "the peer to follow")
    taken_s = time.monotonic() - began_s
    record_property("followed_s", taken_s)
    print(f"served and followed after {taken_s:.2f} s")
    wait_for(lambda: not old.gives(), "the old node to give nothing")
    told = wait_for(lambda: cluster.events("old", "PodCIDRContested"), "the Event")
    assert "node old" in told[0]
    assert "node new" in told[0]
    assert new.health.ready or not [one for one in new.health.checks() if not one.ok]
    # What ran goes on running: only nothing new is given.
    assert old.ipam.find_owner(ips(running)[0]) == 1


def test_of_two_nodes_with_one_range_the_first_serves_and_the_other_when_the_contest_ends(
    cluster: Cluster,
) -> None:
    cluster.add_node("first", RANGE)
    cluster.add_node("second", RANGE)
    cluster.add_node("peer", "10.244.6.0/24")
    peer, first = cluster.start("peer"), cluster.start("first")
    wait_for(lambda: peer.sends_to(RANGE) == "first", "the first node")
    second = cluster.start("second")
    assert not second.gives()
    wait_for(lambda: cluster.events("second", "PodCIDRContested"), "the Event")
    assert first.attach(1)
    # The first node is made anew with a range of its own; nobody restarts an agent.
    cluster.delete_node("first")
    wait_for(lambda: not first.gives(), "the first node to give nothing")
    cluster.add_node("first", "10.244.7.0/24")
    address = wait_for(first.gives, "an address of the first node")
    assert address.startswith("10.244.7.")
    assert wait_for(second.gives, "an address of the second node").startswith("10.244.5.")
    wait_for(
        lambda: (peer.sends_to(RANGE), peer.sends_to("10.244.7.0/24")) == ("second", "first"),
        "the peer to follow",
    )
    said = wait_for(lambda: cluster.events("first", "PodCIDRsChanged"), "what is told of its pods")
    assert any("start them again" in one or "is gone" in one for one in said)


def test_core_nodes_of_others_are_read_only_for_a_contest(cluster: Cluster) -> None:
    before = len(cluster.server.read_audit())
    cluster.add_node("one", RANGE)
    cluster.add_node("two", "10.244.6.0/24")
    one, two = cluster.start("one"), cluster.start("two")
    wait_for(lambda: two.sends_to(RANGE) == "one", "one")
    wait_for(lambda: one.sends_to("10.244.6.0/24") == "two", "two")
    assert count_reads(cluster, before) == []
    cluster.add_node("three", RANGE)
    three = cluster.start("three")
    wait_for(lambda: not three.gives(), "the contest")
    wait_for(lambda: len(count_reads(cluster, before)) >= 6, "the reads of three agents")
    read = count_reads(cluster, before)
    assert sorted(read) == 3 * ["one"] + 3 * ["three"]


def find_owner(agent: Agent) -> str:
    stored = agent.store.get(node_key(agent.name))
    if stored is None:
        return ""
    assert decode_node(stored).core_uid, stored.document
    return decode_node(stored).core_uid


def count_reads(cluster: Cluster, before: int) -> list[str]:
    """Name the core Nodes that agents have asked for, beside the look of each at its own when it starts."""
    asked = [
        event["objectRef"]["name"]
        for event in cluster.server.read_audit()[before:]
        if event["stage"] == "ResponseComplete"
        and event["verb"] == "get"
        and event["requestURI"].startswith("/api/v1/nodes/")
    ]
    for name in ("one", "two", "three"):
        if name in asked:
            asked.remove(name)
    return asked


def test_what_a_node_publishes_goes_with_its_core_node_and_comes_with_the_next(
    cluster: Cluster,
) -> None:
    cluster.add_node("n", RANGE)
    agent = cluster.start("n")
    first = wait_for(lambda: find_owner(agent), "the publication")
    assert first == cluster.server.client.get("/api/v1/nodes/n")["metadata"]["uid"]
    cluster.delete_node("n")
    wait_for(lambda: not agent.gives(), "the end of the core Node")
    # As the garbage collector does, which this API server has no controller for.
    cluster.server.client.delete("/apis/podwire.io/v1/nodes/n")
    wait_for(
        lambda: any("no core Node n" in one.message for one in agent.health.checks()), "status"
    )
    assert agent.store.get(node_key("n")) is None
    cluster.add_node("n", RANGE)
    assert wait_for(lambda: find_owner(agent), "the publication") != first
    assert agent.gives()
