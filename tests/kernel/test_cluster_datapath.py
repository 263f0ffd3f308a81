"""Other nodes in the running kernel: what a plan makes, what a second pass finds, what is put back, what is refused."""

import contextlib
import ipaddress
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from podwire.datapath import abi
from podwire.datapath import maps as tables
from podwire.datapath.node_maps import list_node_numbers, list_nodes
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl.link import LinkEnd, create_veth, set_link
from podwire.kernel.rtnl.route import InterfaceAddress, add_address
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
from podwire.model.errors import ForeignObject
from podwire.model.ids import IdentityId
from tests.kernel.conftest import NODE
from tests.kernel.node_world import KernelWorld, kernel_world

UNDERLAY = "pwtunder"
UNDERLAY_INDEX = 77
OWN4 = ipaddress.IPv4Address("10.50.0.1")
OWN6 = ipaddress.IPv6Address("fd50::1")
OWN_TUNNEL = (ipaddress.IPv4Address("10.77.0.0"), ipaddress.IPv6Address("fd77::"))
MAC = "0e:77:00:00:00:01"
UNMANAGED = IdentityId(abi.Identity.UNMANAGED)
REMOTE_NODE = IdentityId(abi.Identity.REMOTE_NODE)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KernelWorld]:
    with kernel_world(tmp_path) as made:
        with NetlinkSocket() as netlink:
            netlink.execute(
                [create_veth(LinkEnd(UNDERLAY, UNDERLAY_INDEX), LinkEnd("pwtfar", 78), None)]
            )
            netlink.execute(
                [
                    set_link(UNDERLAY_INDEX, up=True),
                    *(
                        add_address(InterfaceAddress(UNDERLAY_INDEX, address, bits))
                        for address, bits in ((OWN4, 24), (OWN6, 64))
                    ),
                ]
            )
        made.host.run("ip", "route", "add", "10.50.0.0/24", "dev", UNDERLAY)
        made.restart(node_address=OWN4, mtu=0)
        yield made


def make_peer(number: int, mode: TunnelMode = TunnelMode.FLOW) -> Peer:
    outer = ipaddress.IPv4Address("10.50.0.0") + number + 1
    return Peer(
        number=number,
        name=f"node-{number}",
        outer=outer,
        mtu_bytes=1450,
        way=Way.TUNNEL,
        mode=mode,
        mac=f"0e:78:00:00:{number >> 8:02x}:{number & 255:02x}",
        addresses=(outer, ipaddress.IPv6Address("fd50::1") + number),
    )


def pods_of(number: int) -> tuple[ipaddress.IPv4Network, ipaddress.IPv6Network]:
    four = int(ipaddress.IPv4Address("10.77.0.0")) + (number << 8)
    six = int(ipaddress.IPv6Address("fd77::")) + (number << 16)
    return ipaddress.IPv4Network((four, 24)), ipaddress.IPv6Network((six, 112))


def make_cluster(
    peers: int, *, way: Way = Way.TUNNEL, mode: TunnelMode = TunnelMode.FLOW, families: str = "46"
) -> ClusterPlan:
    """Say what a planner says of a node among `peers` others."""
    prefixes: dict[ipaddress.IPv4Network | ipaddress.IPv6Network, Prefix] = {
        ipaddress.ip_network("10.77.0.0/16"): Prefix(UNMANAGED, 0, None)
    }
    routes = []
    numbers = range(1, peers + 1)
    for number in numbers:
        peer = make_peer(number, mode)
        prefixes[ipaddress.ip_network(peer.outer)] = Prefix(
            REMOTE_NODE, number, None, is_node_address=True
        )
        for network in pods_of(number):
            if str(network.version) not in families:
                continue
            prefixes[network] = Prefix(UNMANAGED, number, way, 1450)
            is_v4 = network.version == 4
            via = peer.outer if is_v4 else peer.addresses[1]
            source = (
                OWN_TUNNEL[0 if is_v4 else 1] if way is Way.TUNNEL else (OWN4 if is_v4 else OWN6)
            )
            routes.append(
                HostRoute(network, way, via if way is Way.NATIVE else None, source, 1450, number)
            )
    tunnel = TunnelPlan(mode, 8472, MAC, 1450, OWN_TUNNEL, OWN4)
    return ClusterPlan(
        tunnel=tunnel if way is Way.TUNNEL else None,
        peers=tuple(make_peer(number, mode) for number in numbers),
        prefixes=prefixes,
        routes=tuple(routes),
        pod_mtu_bytes=1450 if way is Way.TUNNEL else 0,
        inside=(ipaddress.ip_network("10.77.0.0/16"), ipaddress.ip_network("10.50.0.0/24")),
    )


def routes_of(world: KernelWorld, family: str) -> set[tuple[object, ...]]:
    """Give what iproute2 shows of our routes with a next hop."""
    return {
        (
            one["dst"],
            one["gateway"],
            one["dev"],
            one.get("prefsrc"),
            one["metrics"][0].get("mtu"),
            "onlink" in one["flags"],
        )
        for one in world.host.ip(family, "route", "show", "table", "main", "proto", "199")
        if "gateway" in one
    }


def test_a_plan_of_the_overlay_is_in_the_kernel_and_found_there(world: KernelWorld) -> None:
    plan = make_cluster(2)
    differences = world.datapath.apply_cluster(plan)
    assert any("tunnel device 'pw-tunnel' is missing" in one for one in differences)
    link = world.host.ip("link", "show", TUNNEL_DEVICE)[0]
    info = link["linkinfo"]["info_data"]
    assert (link["mtu"], link["address"], link["ifalias"]) == (1450, MAC, f"podwire:{NODE}:tunnel")
    assert (info["external"], info["port"], info.get("learning")) == (True, 8472, False)
    assert "UP" in link["flags"]
    assert link["inet6_addr_gen_mode"] == "none"
    assert routes_of(world, "-4") == {
        (f"10.77.{n}.0/24", "169.254.1.1", TUNNEL_DEVICE, "10.77.0.0", 1450, True) for n in (1, 2)
    }
    assert routes_of(world, "-6") == {
        (f"fd77::{n}:0/112", "fe80::1", TUNNEL_DEVICE, "fd77::", 1450, True) for n in (1, 2)
    }
    neighbours = world.host.ip("neigh", "show", "dev", TUNNEL_DEVICE, "nud", "permanent")
    assert {one["dst"] for one in neighbours} == {"169.254.1.1", "fe80::1"}
    addresses = world.host.ip("address", "show", "dev", TUNNEL_DEVICE)[0]["addr_info"]
    assert {(one["local"], one["prefixlen"]) for one in addresses} == {
        ("10.77.0.0", 32),
        ("fd77::", 128),
    }
    settings = tables.read_settings(world.datapath.maps)
    assert (settings.tunnel_ifindex, settings.tunnel_port) == (link["ifindex"], 8472)
    assert world.datapath.mtu == 1450
    found = {str(one.network): one for one in tables.list_ipcache(world.datapath.maps)}
    assert found["10.77.1.0/24"].flags == abi.IpcacheFlags.TUNNEL
    assert (found["10.77.1.0/24"].node, found["10.77.1.0/24"].mtu) == (1, 1450)
    assert found["10.77.0.0/24"].flags == abi.IpcacheFlags.LOCAL
    assert found["10.77.0.0/16"].flags == 0
    assert found["10.50.0.2/32"].identity == abi.Identity.REMOTE_NODE
    assert found["10.77.0.0/32"].identity == abi.Identity.HOST
    assert {one.number: str(one.outer) for one in list_nodes(world.datapath.maps)} == {
        1: "10.50.0.2",
        2: "10.50.0.3",
    }
    assert dict(list_node_numbers(world.datapath.maps))[ipaddress.ip_address("fd50::3")] == 2
    assert world.datapath.apply_cluster(plan) == []
