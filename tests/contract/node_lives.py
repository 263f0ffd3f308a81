"""Agents without a datapath on a real API server: what they publish, plan, give out and tell."""

import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from podwire.agent.duties.address_source import Addresses
from podwire.agent.duties.cluster.duty import ClusterDuty, ClusterOptions
from podwire.agent.duties.cluster.publisher import take_name
from podwire.agent.duties.kubernetes.event_writer import EventTeller, NodeEvents
from podwire.agent.duties.kubernetes.ranges import RangeKeeper, ServedRanges
from podwire.agent.health import Health
from podwire.agent.metrics import Metrics
from podwire.control.cluster.reach import ClusterSettings
from podwire.control.endpoint.table import EndpointTable
from podwire.control.ipam.interface import Wish
from podwire.control.ipam.node import NodeIpam
from podwire.control.kubernetes.core_node import core_node_key, decode_core_node
from podwire.lab.kubernetes.api_server import ADMIN, ApiServer, write_kubeconfig
from podwire.model.cluster import Underlay
from podwire.model.endpoint import IPNetwork
from podwire.model.errors import Unavailable
from podwire.model.ids import EndpointId
from podwire.store.kubernetes.api.kubeconfig import load_kubeconfig
from podwire.store.kubernetes.api.resources import selectors_of_node
from podwire.store.kubernetes.store import KubernetesStore
from tests.fakes.node import FakeClock
from tests.unit.test_cluster_duty import Facts, FakeCluster, FakeNews
from tests.unit.test_cluster_planner import OVERLAY, ips, nets


class Agent:
    """An agent of one node without a datapath: what it publishes, plans, gives out and tells."""

    def __init__(
        self,
        server: ApiServer,
        directory: Path,
        name: str,
        number: int,
        user: str = ADMIN,
        token_file: Path | None = None,
    ) -> None:
        self.name = name
        self._stack = ExitStack()
        kubeconfig = server.write_kubeconfig(directory / f"kubeconfig-{name}", user)
        if token_file is not None:
            credentials = {"tokenFile": str(token_file)}
            write_kubeconfig(kubeconfig, server.url, server.ca, user, credentials)
        access = load_kubeconfig(kubeconfig)
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

    def __init__(self, server: ApiServer, directory: Path, user: str = ADMIN) -> None:
        self.server, self._directory, self._user = server, directory, user
        self._agents: list[Agent] = []

    def add_node(self, name: str, cidr: str) -> None:
        spec = {"podCIDR": cidr, "podCIDRs": [cidr]} if cidr else {}
        self.server.client.create("/api/v1/nodes", {"metadata": {"name": name}, "spec": spec})

    def delete_node(self, name: str) -> None:
        self.server.client.delete(f"/api/v1/nodes/{name}")

    def start(self, name: str, token_file: Path | None = None) -> Agent:
        number = 10 + len(self._agents)
        agent = Agent(self.server, self._directory, name, number, self._user, token_file)
        self._agents.append(agent)
        return agent.start()

    def events(self, name: str, reason: str) -> list[str]:
        found = self.server.client.get("/api/v1/namespaces/default/events")["items"]
        return [
            item["message"]
            for item in found
            # Events of others, with other reasons, may be about something that has no name.
            if item.get("reason") == reason and item["involvedObject"]["name"] == name
        ]

    def close(self) -> None:
        for agent in self._agents:
            agent.stop()

    def clean(self) -> None:
        """Delete what agents and their nodes left."""
        client = self.server.client
        for path in (
            "/api/v1/nodes",
            "/apis/podwire.io/v1/nodes",
            "/apis/podwire.io/v1/nodeendpoints",
            "/api/v1/namespaces/default/events",
        ):
            for item in client.get(path)["items"]:
                client.delete(f"{path}/{item['metadata']['name']}")
