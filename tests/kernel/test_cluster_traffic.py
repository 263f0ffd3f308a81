"""Two nodes as their datapath makes them, and pods that talk: each way between nodes, and changes under traffic."""

import contextlib
import ipaddress
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from podwire.datapath import abi
from podwire.datapath import maps as tables
from podwire.datapath.changes import watch_links
from podwire.datapath.inventory import remove_everything
from podwire.datapath.maps import read_metrics
from podwire.datapath.node import KernelDatapath
from podwire.datapath.plan import NodePlan
from podwire.kernel import netns
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl.link import LinkEnd, create_veth, set_link
from podwire.model.cluster import (
    TUNNEL_DEVICE,
    ClusterPlan,
    HostRoute,
    Peer,
    Prefix,
    TunnelMode,
    TunnelPlan,
    Way,
)
from podwire.model.endpoint import EndpointRecord, IPAddress, IPNetwork
from podwire.model.ids import (
    IdentityId,
)
from podwire.model.interfaces import EndpointConfig
from tests import kept_programs
from tests.kernel.conftest import Namespace, new_namespace, pings
from tests.kernel.node_world import bpf_directory
from tests.kernel.traffic import Stream, continuous_traffic
from tests.plain_pods import attach, make_record
from tests.waiting import wait_for

RESTARTS = 1 if "PODWIRE_GUEST" in os.environ else 3
"""An emulated machine takes seconds for each."""
CLUSTER = (ipaddress.ip_network("10.77.0.0/16"), ipaddress.ip_network("fd77::/64"))
UNMANAGED = IdentityId(abi.Identity.UNMANAGED)
REMOTE_NODE = IdentityId(abi.Identity.REMOTE_NODE)


@dataclass(frozen=True)
class Way2:
    """One way between two nodes."""

    way: Way
    mode: TunnelMode = TunnelMode.FLOW
    outer: int = 4
    """Family of the underlay that carries the tunnel."""

    def __str__(self) -> str:
        return f"{self.way}-{self.mode}-over-{self.outer}" if self.way is Way.TUNNEL else self.way


WAYS = [
    Way2(Way.NATIVE),
    Way2(Way.TUNNEL, TunnelMode.CLASSIC),
    Way2(Way.TUNNEL, TunnelMode.CLASSIC, 6),
    Way2(Way.TUNNEL),
    Way2(Way.TUNNEL, outer=6),
]


def facts(
    number: int,
) -> tuple[tuple[IPAddress, ...], tuple[IPNetwork, ...], tuple[IPAddress, ...]]:
    """Give a node's addresses, ranges and tunnel addresses, IPv4 first."""
    ranges = (
        ipaddress.ip_network(f"10.77.{number}.0/24"),
        ipaddress.ip_network(f"fd77::{number}:0/112"),
    )
    outside = (ipaddress.ip_address(f"10.50.0.{number}"), ipaddress.ip_address(f"fd50::{number}"))
    return outside, ranges, tuple(network.network_address for network in ranges)


def mac(number: int) -> str:
    return f"0e:79:00:00:00:{number:02x}"


def plan_for(number: int, other: int, chosen: Way2, mtu: int = 1430) -> ClusterPlan:
    """Plan what node `number` needs to reach `other`."""
    outside, ranges, inner = facts(other)
    own_outside, _, own_inner = facts(number)
    tunnel = chosen.way is Way.TUNNEL
    at = 0 if chosen.outer == 4 else 1
    prefixes: dict[IPNetwork, Prefix] = {network: Prefix(UNMANAGED, 0, None) for network in CLUSTER}
    for address in outside:
        prefixes[ipaddress.ip_network(address)] = Prefix(
            REMOTE_NODE, other, None, is_node_address=True
        )
    for network, address in zip(ranges, inner, strict=True):
        prefixes[network] = Prefix(UNMANAGED, other, chosen.way, mtu if tunnel else 1500)
        prefixes[ipaddress.ip_network(address)] = Prefix(
            REMOTE_NODE, other, chosen.way, mtu if tunnel else 1500, is_node_address=True
        )
    sources = own_inner if tunnel else own_outside
    routes = tuple(
        HostRoute(
            network, chosen.way, None if tunnel else via, source, mtu if tunnel else 1500, other
        )
        for network, via, source in zip(ranges, outside, sources, strict=True)
    )
    return ClusterPlan(
        tunnel=TunnelPlan(chosen.mode, 8472, mac(number), mtu, own_inner, local=own_outside[at])
        if tunnel
        else None,
        peers=(
            Peer(
                other, f"n{other}", outside[at], mtu, chosen.way, chosen.mode, mac(other), outside
            ),
        ),
        prefixes=prefixes,
        routes=routes,
        pod_mtu_bytes=mtu if tunnel else 0,
        inside=(*CLUSTER, *(ipaddress.ip_network(prefix) for prefix in (*outside, *own_outside))),
    )


@dataclass
class Node:
    """One node, and its pods by number."""

    number: int
    namespace: Namespace
    datapath: KernelDatapath
    stack: ExitStack
    pods: dict[int, Namespace] = field(default_factory=dict)
    records: dict[int, EndpointRecord] = field(default_factory=dict)

    def inside(self) -> contextlib.AbstractContextManager[object]:
        return netns.namespace(self.namespace.fd.fileno())

    def apply(self, plan: ClusterPlan) -> list[str]:
        with self.inside():
            return list(self.datapath.apply_cluster(plan))

    def attach(self, number: int, block: int = 0) -> Namespace:
        """Connect a pod; `block`: the node from whose range it borrows its address."""
        block = block or self.number
        pod = self.stack.enter_context(new_namespace())
        with self.inside():
            record = make_record(
                self.datapath,
                number,
                pod.pod,
                ipv4=f"10.77.{block}.{{}}",
                ipv6=f"fd77::{block}:{{:x}}",
            )
            config = EndpointConfig(identity=70_000 + self.number, policy_revision=1)
            attach(self.datapath, record, pod.pod, config)
        self.pods[number] = pod
        self.records[number] = record
        return pod


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Two prepared nodes on one underlay."""
    with two_nodes(tmp_path) as made:
        yield made


@contextlib.contextmanager
def two_nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Prepare two nodes on one underlay; everything is gone at the end."""
    with ExitStack() as stack:
        bpf_dir = stack.enter_context(bpf_directory(tmp_path))
        namespaces = [stack.enter_context(new_namespace()) for _ in range(2)]
        with netns.namespace(namespaces[0].fd.fileno()), NetlinkSocket() as netlink:
            netlink.execute(
                [
                    set_link(1, up=True),
                    create_veth(
                        LinkEnd("under", 50), LinkEnd("under", 51), namespaces[1].fd.fileno()
                    ),
                ]
            )
        made = []
        for number, namespace in enumerate(namespaces, 1):
            outside, ranges, _ = facts(number)
            for command in (
                "ip link set lo up",
                f"ip address add {outside[0]}/24 dev under",
                f"ip address add {outside[1]}/64 dev under nodad",
                "ip link set under up",
            ):
                namespace.run(*command.split())
            plan = NodePlan(
                node_name=f"n{number}",
                bpf_dir=bpf_dir.with_name(f"node{number}"),
                node_address=outside[0],
                cluster_cidrs=CLUSTER,
                node_cidrs=ranges,
                conntrack_entries=4096,
                conntrack_quota=512,
            )
            node = Node(number, namespace, KernelDatapath(plan), stack)
            loan = stack.enter_context(kept_programs.loan(plan))
            stack.callback(_clean, node)
            with node.inside():
                node.datapath.prepare()
            loan.learn()
            made.append(node)
        yield made


def _clean(node: Node) -> None:
    with node.inside():
        node.datapath.close()
        remove_everything(node.datapath.plan.bpf_dir)


def connect(nodes: list[Node], chosen: Way2, mtu: int = 1430) -> None:
    for one, other in ((0, 1), (1, 0)):
        nodes[one].apply(plan_for(nodes[one].number, nodes[other].number, chosen, mtu))


@pytest.mark.parametrize("chosen", WAYS, ids=str)
def test_pods_and_hosts_of_two_nodes_reach_each_other(nodes: list[Node], chosen: Way2) -> None:
    connect(nodes, chosen)
    pods = [node.attach(9) for node in nodes]
    for one, other in ((0, 1), (1, 0)):
        number = nodes[other].number
        for target in (f"10.77.{number}.9", f"fd77::{number}:9"):
            assert pings(pods[one], target), f"pod to pod {target}"
            assert pings(nodes[one].namespace, target), f"host to pod {target}"
            assert pings(pods[one], target, "-s", "20000"), f"fragments to pod {target}"
        for address in facts(number)[2] if chosen.way is Way.TUNNEL else ():
            assert pings(pods[one], address), f"pod to host {address}"
            assert pings(nodes[one].namespace, address), f"host to host {address}"
    for one, other in ((0, 1), (1, 0)):
        plan = plan_for(nodes[one].number, nodes[other].number, chosen)
        assert nodes[one].apply(plan) == []


def test_a_pod_is_told_what_fits_through_the_tunnel(nodes: list[Node]) -> None:
    connect(nodes, Way2(Way.TUNNEL))
    pods = [node.attach(9) for node in nodes]
    assert pods[0].ip("link", "show", "eth0")[0]["mtu"] == 1430
    connect(nodes, Way2(Way.TUNNEL), mtu=1300)
    text = pods[0].run(
        "ping", "-c", "2", "-W", "60", "-M", "do", "-s", "1372", "10.77.2.9", check=False
    )
    assert "mtu = 1300" in text or "mtu=1300" in text, text


def test_nothing_is_lost_while_a_pass_finds_nothing_and_peers_come_and_go(
    nodes: list[Node],
) -> None:
    chosen = Way2(Way.TUNNEL)
    connect(nodes, chosen)
    pods = [node.attach(9) for node in nodes]
    plan = plan_for(1, 2, chosen)
    stranger = plan_for(1, 3, chosen)
    more = replace(
        plan,
        peers=(*plan.peers, *stranger.peers),
        prefixes={**stranger.prefixes, **plan.prefixes},
        routes=(*plan.routes, *stranger.routes),
        inside=(*plan.inside, *stranger.inside),
    )
    done = threading.Event()
    heard: list[str] = []

    def listen() -> None:
        command = ("ping", "-i", "0.01", "-c", "300", "-W", "60", "10.77.2.9")
        heard.append(pods[0].run(*command, check=False))
        done.set()

    thread = threading.Thread(target=listen)
    thread.start()
    while not done.is_set():
        nodes[0].apply(more)
        nodes[0].apply(plan)
        nodes[0].apply(plan)
    thread.join()
    assert " 0% packet loss" in heard[0], heard[0]


def test_a_deleted_tunnel_device_carries_traffic_again_after_one_pass(nodes: list[Node]) -> None:
    chosen = Way2(Way.TUNNEL)
    connect(nodes, chosen)
    pods = [node.attach(9) for node in nodes]
    assert pings(pods[0], "10.77.2.9")
    with nodes[0].inside(), watch_links() as events:
        nodes[0].namespace.run("ip", "link", "del", TUNNEL_DEVICE)
        assert events.wait(30)
    assert not pings(pods[0], "10.77.2.9", deadline_s=1)
    assert any("is missing" in difference for difference in nodes[0].apply(plan_for(1, 2, chosen)))
    assert pings(pods[0], "10.77.2.9")


@pytest.mark.parametrize(
    ("hook", "names"),
    [("ingress", ["from_overlay"]), ("egress", ["to_overlay", "mark_tunnel"])],
)
def test_lost_programs_are_attached_again(nodes: list[Node], hook: str, names: list[str]) -> None:
    chosen = Way2(Way.TUNNEL)
    connect(nodes, chosen)
    nodes[0].namespace.run("tc", "filter", "del", "dev", TUNNEL_DEVICE, hook)
    named = nodes[0].apply(plan_for(1, 2, chosen))
    assert named == [f"program {name} of '{TUNNEL_DEVICE}' is not attached" for name in names]
    assert nodes[0].apply(plan_for(1, 2, chosen)) == []
    nodes[0].namespace.run("tc", "qdisc", "del", "dev", TUNNEL_DEVICE, "clsact")
    assert len(nodes[0].apply(plan_for(1, 2, chosen))) == 3


# Natively, past the stack


def passes(node: Node, hook: abi.Hook, path: abi.Path) -> int:
    """Give how many packets passed a hook by a path."""
    return sum(
        row.packets
        for row in read_metrics(node.datapath.maps)
        if (row.hook, row.reason, row.path) == (hook, abi.DropReason.NONE, path)
    )


def test_what_pods_of_two_nodes_exchange_natively_passes_by_both_stacks(nodes: list[Node]) -> None:
    connect(nodes, Way2(Way.NATIVE))
    pods = [node.attach(9) for node in nodes]
    natively(pods)

    def count() -> list[int]:
        """Count what left the first pod, came to the second by its stack, and came back past the first's."""
        return [
            passes(nodes[0], abi.Hook.FROM_POD, abi.Path.NATIVE),
            passes(nodes[1], abi.Hook.TO_POD, abi.Path.STACK),
            passes(nodes[0], abi.Hook.FROM_NETDEV, abi.Path.NATIVE),
        ]

    for target in ("10.77.2.9", "fd77::2:9"):
        before = count()
        assert pings(pods[0], target)

        # A machine that stood still has asked again, and that answer may be under way.
        def took_one_way(before: list[int] = before) -> bool:
            ways = {now - then for now, then in zip(count(), before, strict=True)}
            return len(ways) == 1 and min(ways) > 0

        wait_for(took_one_way, "the stack that is asked to ask its stack")


def restart(node: Node) -> None:
    """Let another agent take the node over."""
    with node.inside():
        node.datapath.close()
        node.datapath = KernelDatapath(node.datapath.plan)
        node.datapath.prepare()


def natively(pods: list[Namespace]) -> list[tuple[Namespace, Namespace, str]]:
    """Name every way between pods of two nodes, once the nodes know each other's MACs."""
    ways = [
        (pods[one], pods[other], address)
        for one, other in ((0, 1), (1, 0))
        for address in (f"10.77.{other + 1}.9", f"fd77::{other + 1}:9")
    ]
    assert all(pings(pod, address) for pod, _, address in ways)
    return ways


def test_nothing_is_lost_while_agents_start_and_look_again_at_native_nodes(
    nodes: list[Node],
) -> None:
    chosen = Way2(Way.NATIVE)
    connect(nodes, chosen)
    pods = [node.attach(9) for node in nodes]
    with continuous_traffic(natively(pods)) as flows:
        for _ in range(RESTARTS):
            for node in nodes:
                restart(node)
            connect(nodes, chosen)
        results = [flow.finish() for flow in flows]
    assert results == [[], ""] * 4
    for node in nodes:
        assert passes(node, abi.Hook.FROM_NETDEV, abi.Path.NATIVE) > 100


def test_flows_go_on_while_the_way_past_the_stack_is_lost_and_found(nodes: list[Node]) -> None:
    chosen = Way2(Way.NATIVE)
    connect(nodes, chosen)
    pods = [node.attach(9) for node in nodes]
    with continuous_traffic(natively(pods)) as flows:
        for _ in range(2):
            tables.write_settings(nodes[0].datapath.maps, native_ifindex=0)
            wanted = passes(nodes[0], abi.Hook.TO_POD, abi.Path.STACK) + 100
            wait_for(partial(has_passed, nodes[0], wanted))
            connect(nodes, chosen)
        results = [flow.finish() for flow in flows]
    assert results == [[], ""] * 4


def has_passed(node: Node, wanted: int) -> bool:
    """Tell whether so many packets came to pods by the stack."""
    return passes(node, abi.Hook.TO_POD, abi.Path.STACK) > wanted


def test_a_device_that_was_deleted_and_made_again_carries_native_packets_again(
    nodes: list[Node],
) -> None:
    chosen = Way2(Way.NATIVE)
    connect(nodes, chosen)
    pods = [node.attach(9) for node in nodes]
    nodes[0].namespace.run("ip", "link", "del", "under")
    with nodes[0].inside(), NetlinkSocket() as netlink:
        ends = LinkEnd("under", 60), LinkEnd("under", 61)
        netlink.execute([create_veth(*ends, nodes[1].namespace.fd.fileno())])
    for node in nodes:
        outside, _, _ = facts(node.number)
        node.namespace.run("ip", "address", "add", f"{outside[0]}/24", "dev", "under")
        node.namespace.run("ip", "address", "add", f"{outside[1]}/64", "dev", "under", "nodad")
        node.namespace.run("ip", "link", "set", "under", "up")
    connect(nodes, chosen)
    stream = Stream(pods[0], pods[1], "10.77.2.9", 7000)
    # Its threads may not have had their turn yet, and a stream without data is hardly any packets.
    wait_for(lambda: stream.received >= 4096 or stream.error, "numbers")
    assert stream.finish() == ""
    for node in nodes:
        assert passes(node, abi.Hook.FROM_NETDEV, abi.Path.NATIVE) >= 3
