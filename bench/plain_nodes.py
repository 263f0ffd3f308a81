"""Nodes without podwire: one veth pair per pod and routes; two of them joined as a lab's are, by VXLAN or routes alone.

What the kernel does by itself, at its best: no bridge, no rules, no connection tracking. IPv4. On demand with what
podwire's nodes have and a bare kernel lacks: a flow-based device, the rules that masquerade needs, and tracking.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from bench.pair import PodPair
from podwire.kernel import netns, spawn
from podwire.lab import labs, node
from podwire.lab.topology import UPLINK, LabPlan, LabShape, NodePlan, plan_lab
from podwire.model.errors import NotFound

TUNNEL_ID: Final = 1
TUNNEL_PORT: Final = 8472
TUNNEL_BYTES: Final = 50
GATEWAY: Final = "169.254.1.1"
"""Of every pod; its device answers for it by a fixed neighbour entry."""
HOST_MAC: Final = "ee:ee:ee:ee:ee:ee"


_RULES: Final = """
table inet plain {{
    chain leave {{
        type nat hook postrouting priority srcnat; policy accept;
        ip saddr {own} ip daddr != {inside} masquerade fully-random
    }}
    chain prerouting {{
        type filter hook prerouting priority raw; policy accept;
        udp dport {port} notrack
    }}
    chain output {{
        type filter hook output priority raw; policy accept;
        udp dport {port} notrack
    }}
}}
"""
"""The least that lets pods reach the world by the node's address, without an entry per tunnel flow."""
_TRACKING: Final = """
table inet plain {
    chain forward {
        type filter hook forward priority filter; policy accept;
        ct state established,related accept
    }
}
"""
"""The least for which the kernel tracks what a node forwards."""


@contextmanager
def plain_node(name: str, pods: int) -> Iterator[tuple[NodePlan, list[tuple[str, str]]]]:
    """Give a node that tracks every flow, named like a lab's, and its pods by namespace and address; on leaving all of
    it goes.
    """
    plan = plan_lab(name, LabShape(nodes=1, families="4", routing="native"))
    own = plan.nodes[0]
    try:
        node.create_network(plan)
        _let_forward(own.namespace)
        run_in(own.namespace, ["nft", _TRACKING])
        yield own, [_add_pod(plan, own, plan.shape.mtu, number) for number in range(pods)]
    finally:
        with suppress(NotFound):
            labs.down(name, progress=labs.say_nothing)


@contextmanager
def plain_pair(
    name: str, *, tunnel: bool, flow_based: bool = False, masquerade: bool = False
) -> Iterator[PodPair]:
    """Give two pods on two nodes that are named like a lab's; on leaving all of it goes."""
    plan = plan_lab(
        name, LabShape(nodes=2, families="4", routing="overlay" if tunnel else "native")
    )
    try:
        node.create_network(plan)
        mtu = plan.shape.mtu - (TUNNEL_BYTES if tunnel else 0)
        for number, own in enumerate(plan.nodes):
            _let_forward(own.namespace)
            other = plan.nodes[1 - number]
            if masquerade:
                _masquerade(plan, own)
            if tunnel:
                _join_by_tunnel(own, other, number, mtu, flow_based=flow_based)
            else:
                route = f"{other.pod_cidrs[0]} via {other.addresses[0]} dev {UPLINK}"
                node.run_ip(own.namespace, [f"route replace {route}"])
        client, server = (_add_pod(plan, planned, mtu) for planned in plan.nodes)
        yield PodPair(client[0], server[0], server[1], mtu)
    finally:
        with suppress(NotFound):
            labs.down(name, progress=labs.say_nothing)


def _let_forward(namespace: str) -> None:
    write = partial(Path("/proc/sys/net/ipv4/ip_forward").write_text, "1")
    netns.run_at(netns.named_path(namespace), write)


def _join_by_tunnel(
    own: NodePlan, other: NodePlan, number: int, mtu: int, *, flow_based: bool
) -> None:
    """As flannel does it: a route, a neighbour and a forwarding entry for each other node. `flow_based`: by routes
    that say the tunnel's end, as the device knows none, like podwire's."""
    away = ipaddress.ip_network(other.pod_cidrs[0])
    here = ipaddress.ip_network(own.pod_cidrs[0])
    ends, encapsulated = f"id {TUNNEL_ID} local {own.addresses[0]} dev {UPLINK}", ""
    if flow_based:
        ends = "external"
        encapsulated = f" encap ip id {TUNNEL_ID} dst {other.addresses[0]} csum"
    node.run_ip(
        own.namespace,
        [
            f"link add vxlan1 mtu {mtu} address {_tunnel_mac(number)} type vxlan {ends}"
            f" dstport {TUNNEL_PORT} nolearning",
            f"addr add {here[0]}/32 dev vxlan1",
            "link set vxlan1 up",
            f"neigh add {away[0]} lladdr {_tunnel_mac(1 - number)} dev vxlan1 nud permanent",
            f"route add {away}{encapsulated} via {away[0]} dev vxlan1 onlink",
        ],
    )
    if not flow_based:
        mac, outer = _tunnel_mac(1 - number), other.addresses[0]
        run_in(own.namespace, ["bridge", "fdb", "append", mac, "dev", "vxlan1", "dst", outer])


def _masquerade(plan: LabPlan, own: NodePlan) -> None:
    rules = _RULES.format(own=own.pod_cidrs[0], inside=plan.cluster_cidrs[0], port=TUNNEL_PORT)
    run_in(own.namespace, ["nft", rules])


def run_in(namespace: str, words: Sequence[str]) -> None:
    """Run a command in a node's namespace; RuntimeError shows what it said when it failed."""
    with netns.open_namespace(netns.named_path(namespace)) as fd:
        done = spawn.run(list(words), place=spawn.Place(network_fd=fd.fileno()), timeout_s=10)
    if done.status:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.decode()}")


def _tunnel_mac(number: int) -> str:
    return f"02:00:00:00:00:{number + 1:02x}"


def _add_pod(plan: LabPlan, own: NodePlan, mtu: int, number: int = 0) -> tuple[str, str]:
    namespace = f"pw.{plan.name}.pod{number}.{own.name}"
    address = str(ipaddress.ip_network(own.pod_cidrs[0])[2 + number])
    device = f"pod{number}"
    netns.create_named(namespace).close()
    node.run_ip(
        own.namespace,
        [
            f"link add {device} mtu {mtu} address {HOST_MAC} type veth"
            f" peer name eth0 mtu {mtu} netns {namespace}",
            f"link set {device} up",
            f"route add {address}/32 dev {device}",
        ],
    )
    node.run_ip(
        namespace,
        [
            "link set lo up",
            f"addr add {address}/32 dev eth0",
            "link set eth0 up",
            f"neigh add {GATEWAY} lladdr {HOST_MAC} dev eth0 nud permanent",
            f"route add default via {GATEWAY} dev eth0 onlink",
        ],
    )
    return namespace, address
