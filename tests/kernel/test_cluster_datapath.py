"""Other nodes in the running kernel: what a plan makes, what a second pass finds, what is put back, what is refused."""

import contextlib
import ipaddress
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from podwire.datapath import abi
from podwire.datapath import maps as tables
from podwire.datapath.changes import watch_links
from podwire.datapath.inventory import remove_everything
from podwire.datapath.native import OwnHooks
from podwire.datapath.node_maps import list_node_numbers, list_nodes
from podwire.datapath.rows import read_rows
from podwire.datapath.survey import survey_host, survey_leftovers
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.netlink_events import NetlinkEvents
from podwire.kernel.rtnl.link import LinkEnd, create_veth, set_link
from podwire.kernel.rtnl.route import InterfaceAddress, add_address
from podwire.kernel.rtnl.tc import FROM_POD_HOOK, TO_POD_HOOK, add_clsact, set_bpf_filter
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
from podwire.model.errors import ForeignObject, KernelFailure, StorageFailure
from podwire.model.identity import Reserved
from podwire.model.ids import IdentityId
from tests.kernel.conftest import NODE, new_namespace, pings
from tests.kernel.node_world import PODS_IPV4, KernelWorld, kernel_world

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
        for network in ("10.50.0.0/24", "fd50::/64"):
            made.host.run("ip", "route", "add", network, "dev", UNDERLAY)
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
            route["dst"],
            route["gateway"],
            route["dev"],
            route.get("prefsrc"),
            route["metrics"][0].get("mtu"),
            "onlink" in route["flags"],
        )
        for route in world.host.ip(family, "route", "show", "table", "main", "proto", "199")
        if "gateway" in route
    }


def test_a_plan_of_the_overlay_is_in_the_kernel_and_found_there(world: KernelWorld) -> None:
    plan = make_cluster(2)
    differences = world.datapath.apply_cluster(plan)
    assert any("tunnel device 'pw-tunnel' is missing" in difference for difference in differences)
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
    assert {neighbour["dst"] for neighbour in neighbours} == {"169.254.1.1", "fe80::1"}
    addresses = world.host.ip("address", "show", "dev", TUNNEL_DEVICE)[0]["addr_info"]
    assert {(address["local"], address["prefixlen"]) for address in addresses} == {
        ("10.77.0.0", 32),
        ("fd77::", 128),
    }
    settings = tables.read_settings(world.datapath.maps)
    assert (settings.tunnel_ifindex, settings.tunnel_port) == (link["ifindex"], 8472)
    assert world.datapath.mtu == 1450
    found = {str(row.network): row for row in tables.list_ipcache(world.datapath.maps)}
    assert found["10.77.1.0/24"].flags == abi.IpcacheFlags.TUNNEL
    assert (found["10.77.1.0/24"].node, found["10.77.1.0/24"].mtu) == (1, 1450)
    assert found["10.77.0.0/24"].flags == abi.IpcacheFlags.LOCAL
    assert found["10.77.0.0/16"].flags == 0
    assert found["10.50.0.2/32"].identity == abi.Identity.REMOTE_NODE
    assert found["10.77.0.0/32"].identity == abi.Identity.HOST
    assert {node.number: str(node.outer) for node in list_nodes(world.datapath.maps)} == {
        1: "10.50.0.2",
        2: "10.50.0.3",
    }
    assert dict(list_node_numbers(world.datapath.maps))[ipaddress.ip_address("fd50::3")] == 2
    assert world.datapath.apply_cluster(plan) == []


def test_a_nodes_row_shows_that_what_goes_there_has_to_be_encrypted(world: KernelWorld) -> None:
    world.datapath.apply_cluster(make_cluster(2))
    table, key = world.datapath.maps.pw_nodes, (1).to_bytes(4, "little")
    raw = table.lookup(key)
    assert raw is not None
    row = abi.NodeValue.unpack(raw)
    table.update(key, row._replace(flags=row.flags | abi.NodeFlags.ENCRYPTED).pack())
    shown = {
        shown_row["node"]: shown_row["flags"]
        for shown_row in read_rows(world.datapath.maps, "nodes", 10)[0]
    }
    assert shown == {1: ["encrypted"], 2: []}


Damage = Callable[[KernelWorld], object]


def _delete_row(name: str, key: bytes) -> Damage:
    return lambda world: getattr(world.datapath.maps, name).delete(key)


def _run(*command: str) -> Damage:
    return lambda world: world.host.run(*command)


PREFIX_KEY = tables.to_prefix_key(ipaddress.ip_network("10.77.1.0/24"))
DAMAGE = [
    pytest.param(_run("ip", "link", "del", TUNNEL_DEVICE), "is missing", id="device"),
    pytest.param(
        _run("ip", "link", "set", TUNNEL_DEVICE, "mtu", "1300"), "mtu is 1300", id="device-mtu"
    ),
    pytest.param(_run("ip", "link", "set", TUNNEL_DEVICE, "down"), "state is 'down'", id="down"),
    pytest.param(
        _run("ip", "link", "set", TUNNEL_DEVICE, "down", "name", "elsewhere"),
        "tunnel device 'elsewhere' is there, wanted none",
        id="renamed",
    ),
    pytest.param(
        _run(
            *("sh", "-c"),
            f"ip link set {TUNNEL_DEVICE} down name elsewhere && ip link set elsewhere up",
        ),
        "tunnel device 'pw-tunnel' is missing",
        id="renamed-and-on-the-port",
    ),
    pytest.param(
        _run("ip", "link", "set", TUNNEL_DEVICE, "down", "address", "0e:00:00:00:00:09"),
        "mac is '0e:00:00:00:00:09'",
        id="device-mac",
    ),
    pytest.param(
        _run("ip", "address", "del", "10.77.0.0/32", "dev", TUNNEL_DEVICE),
        "address 10.77.0.0 of 'pw-tunnel' was missing",
        id="address-ipv4",
    ),
    pytest.param(
        _run("ip", "address", "del", "fd77::/128", "dev", TUNNEL_DEVICE),
        "address fd77:: of 'pw-tunnel' was missing",
        id="address-ipv6",
    ),
    pytest.param(
        _run("ip", "address", "add", "10.99.9.9/24", "dev", TUNNEL_DEVICE),
        "address 10.99.9.9 of 'pw-tunnel' was too much",
        id="address-too-much",
    ),
    pytest.param(
        _run("ip", "neigh", "del", "169.254.1.1", "dev", TUNNEL_DEVICE),
        "neighbour 169.254.1.1",
        id="neighbour-ipv4",
    ),
    pytest.param(
        _run(
            *("ip", "neigh", "replace", "fe80::1", "dev", TUNNEL_DEVICE),
            *("lladdr", "02:00:00:00:00:01", "nud", "permanent"),
        ),
        "neighbour fe80::1",
        id="neighbour-ipv6-changed",
    ),
    pytest.param(
        _run("ip", "route", "del", "10.77.2.0/24"), "route to 10.77.2.0/24", id="route-ipv4"
    ),
    pytest.param(
        _run("ip", "-6", "route", "del", "fd77::1:0/112"), "route to fd77::1:0/112", id="route-ipv6"
    ),
    pytest.param(
        _run("ip", "route", "del", "unreachable", str(PODS_IPV4)),
        f"unreachable route to {PODS_IPV4}",
        id="own-range",
    ),
    pytest.param(
        _run(
            *("ip", "route", "change", "10.77.2.0/24", "via", "169.254.1.1", "onlink"),
            *("dev", TUNNEL_DEVICE, "proto", "199"),
        ),
        "route to 10.77.2.0/24",
        id="route-without-source-and-mtu",
    ),
    pytest.param(
        _run(
            *("ip", "route", "add", "10.77.9.0/24", "via", "169.254.1.1", "onlink"),
            *("dev", TUNNEL_DEVICE, "proto", "199"),
        ),
        "route to 10.77.9.0/24 was too much",
        id="route-too-much",
    ),
    pytest.param(
        _run("sysctl", "-qw", f"net.ipv4.conf.{TUNNEL_DEVICE}.rp_filter=1"),
        "rp_filter",
        id="reverse-path-filter",
    ),
    pytest.param(
        _delete_row("pw_ipcache", PREFIX_KEY), "prefix 10.77.1.0/24 in the ipcache", id="prefix"
    ),
    pytest.param(
        lambda world: world.datapath.maps.pw_ipcache.update(PREFIX_KEY, bytes(16)),
        "prefix 10.77.1.0/24 in the ipcache was missing or wrong",
        id="prefix-changed",
    ),
    pytest.param(
        lambda world: world.datapath.maps.pw_ipcache.update(
            tables.to_prefix_key(ipaddress.ip_network("10.88.0.0/16")), bytes(16)
        ),
        "prefix 10.88.0.0/16 in the ipcache was too much",
        id="prefix-too-much",
    ),
    pytest.param(
        _delete_row("pw_nodes", (2).to_bytes(4, "little")), "number 2 of another node", id="node"
    ),
    pytest.param(
        _delete_row("pw_node_numbers", tables.to_mapped(ipaddress.ip_address("10.50.0.3"))),
        "address 10.50.0.3 of another node",
        id="node-address",
    ),
    pytest.param(
        lambda world: tables.write_settings(world.datapath.maps, tunnel_ifindex=0),
        "tunnel device and port",
        id="settings",
    ),
    pytest.param(
        _run("nft", "delete", "table", "inet", "podwire"),
        "nftables table 'podwire' is missing",
        id="nftables",
    ),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGE)
def test_what_is_damaged_is_named_and_put_back(
    world: KernelWorld, damage: Damage, named: str
) -> None:
    plan = make_cluster(2)
    world.datapath.apply_cluster(plan)
    before = _state(world)
    damage(world)
    assert _state(world) != before or "nft" in named
    differences = world.datapath.apply_cluster(plan)
    assert any(named in difference for difference in differences), differences
    assert _state(world) == before
    assert world.datapath.apply_cluster(plan) == []


def _state(world: KernelWorld) -> tuple[object, ...]:
    """Give what there is of other nodes, without the device's number."""
    links = world.host.ip("link", "show", "type", "vxlan")
    return (
        [(link["ifname"], link["mtu"], link["address"], "UP" in link["flags"]) for link in links],
        *(
            _lines(world, "ip", *arguments)
            for arguments in (
                ("route", "show", "proto", "199"),
                ("-6", "route", "show", "proto", "199"),
                ("-o", "-br", "address", "show", "type", "vxlan"),
                ("neigh", "show", "nud", "permanent"),
            )
        ),
        _lines(world, "sysctl", "-a", "-r", f"conf.{TUNNEL_DEVICE}.(rp_filter|forwarding)"),
        _lines(world, "nft", "-s", "list", "table", "inet", "podwire"),
        # The host's own addresses are no other node's, and the kernel gives those of IPv6 when it comes to it.
        sorted(
            str(row)
            for row in tables.list_ipcache(world.datapath.maps)
            if row.identity != Reserved.HOST
        ),
        sorted(map(str, list_nodes(world.datapath.maps))),
        sorted(map(str, list_node_numbers(world.datapath.maps))),
        tables.read_settings(world.datapath.maps)._replace(tunnel_ifindex=0),
        bool(tables.read_settings(world.datapath.maps).tunnel_ifindex),
    )


def _lines(world: KernelWorld, *command: str) -> list[str]:
    return sorted(world.host.run(*command, check=False).splitlines())


def test_without_other_nodes_nothing_of_them_stays(world: KernelWorld) -> None:
    before = _state(world)
    assert before[0] == []
    for plan in (
        make_cluster(3),
        make_cluster(3, mode=TunnelMode.CLASSIC),
        make_cluster(3, way=Way.NATIVE),
    ):
        world.datapath.apply_cluster(plan)
        assert _state(world) != before
        assert world.datapath.apply_cluster(ClusterPlan())
        assert _state(world) == before
        assert world.datapath.apply_cluster(ClusterPlan()) == []


def test_what_an_earlier_agent_knew_stays_until_the_first_plan(world: KernelWorld) -> None:
    world.datapath.apply_cluster(make_cluster(3))
    before = _state(world)
    world.restart()
    assert _state(world)[:5] == before[:5]
    assert _state(world)[7:] == before[7:]
    assert world.datapath.mtu == 1450
    assert "udp dport 8472 goto tunnel_arriving" in world.host.run(
        "nft", "list", "table", "inet", "podwire"
    )
    differences = world.datapath.apply_cluster(make_cluster(2))
    assert "route to 10.77.3.0/24 was too much" in differences
    assert "prefix 10.77.3.0/24 in the ipcache was too much" in differences
    assert "number 3 of another node was too much" in differences
    assert len(routes_of(world, "-4")) == 2


def test_an_agent_that_finds_no_device_points_its_programs_at_none(world: KernelWorld) -> None:
    world.datapath.apply_cluster(make_cluster(1))
    world.datapath.close()
    world.host.run("ip", "link", "del", TUNNEL_DEVICE)
    world.restart()
    assert tables.read_settings(world.datapath.maps).tunnel_ifindex == 0


# What is not ours


FOREIGN_DEVICES = [
    pytest.param(("flannel.1", "id", "1"), "'flannel.1' on port 8472", id="vni"),
    pytest.param(("geneve0", "external"), "'geneve0' on port 8472", id="flow-based"),
    pytest.param((TUNNEL_DEVICE, "id", "5"), "'pw-tunnel' on port 8472", id="our-name"),
]


@pytest.mark.parametrize(("device", "named"), FOREIGN_DEVICES)
def test_a_foreign_tunnel_on_the_port_is_named_and_nothing_is_changed(
    world: KernelWorld, device: tuple[str, ...], named: str
) -> None:
    world.host.run("ip", "link", "add", device[0], "type", "vxlan", *device[1:], "dstport", "8472")
    before = _state(world)
    with pytest.raises(ForeignObject, match=named) as refused:
        world.datapath.apply_cluster(make_cluster(2))
    assert f"ip link del {device[0]}" in refused.value.hint
    assert "tunnel_port" in refused.value.hint
    assert _state(world) == before
    world.host.run("ip", "link", "del", device[0])
    assert world.datapath.apply_cluster(make_cluster(2))


def test_a_foreign_device_with_our_name_is_named(world: KernelWorld) -> None:
    world.host.run("ip", "link", "add", TUNNEL_DEVICE, "type", "bridge")
    with pytest.raises(ForeignObject, match="bridge device of somebody else has that name"):
        world.datapath.apply_cluster(make_cluster(1))


def test_a_foreign_tunnel_on_another_port_does_no_harm(world: KernelWorld) -> None:
    world.host.run("ip", "link", "add", "vx0", "type", "vxlan", "id", "1", "dstport", "4789")
    world.datapath.apply_cluster(make_cluster(1))
    assert world.datapath.apply_cluster(make_cluster(1)) == []


@pytest.mark.parametrize("mode", TunnelMode)
def test_a_process_on_the_port_is_told_and_leaves_no_device(
    world: KernelWorld, mode: TunnelMode
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("0.0.0.0", 8472))
        with pytest.raises(ForeignObject, match="UDP port 8472") as refused:
            world.datapath.apply_cluster(make_cluster(1, mode=mode))
        assert "ss -ulpn" in refused.value.hint
        assert world.host.ip("link", "show", "type", "vxlan") == []
    world.datapath.apply_cluster(make_cluster(1, mode=mode))


def test_a_foreign_route_is_named_and_the_others_are_made(world: KernelWorld) -> None:
    plan = make_cluster(3)
    for route in (("10.77.2.0/24",), ("-6", "fd77::3:0/112")):
        world.host.run("ip", *route[:-1], "route", "add", route[-1], "dev", UNDERLAY)
    with pytest.raises(ForeignObject, match=r"route to 10.77.2.0/24 and 1 more") as refused:
        world.datapath.apply_cluster(plan)
    assert "ip route del 10.77.2.0/24; ip route del fd77::3:0/112" in refused.value.hint
    assert {present[0] for present in routes_of(world, "-4")} == {"10.77.1.0/24", "10.77.3.0/24"}
    assert {present[0] for present in routes_of(world, "-6")} == {"fd77::1:0/112", "fd77::2:0/112"}
    found = world.host.ip("route", "show", "10.77.2.0/24")
    assert [foreign["dev"] for foreign in found] == [UNDERLAY]
    world.host.run("ip", "route", "del", "10.77.2.0/24")
    world.host.run("ip", "-6", "route", "del", "fd77::3:0/112")
    assert len(world.datapath.apply_cluster(plan)) == 2
    assert len(routes_of(world, "-4") | routes_of(world, "-6")) == 6


def test_a_route_that_the_kernel_refuses_keeps_nothing_else_from_being_done(
    world: KernelWorld,
) -> None:
    """Whatever a node publishes, the others are reached, and what is gone goes."""
    world.datapath.apply_cluster(make_cluster(4, way=Way.NATIVE))
    plan = make_cluster(3, way=Way.NATIVE)
    refused = replace(plan.routes[0], via=ipaddress.ip_address("10.50.0.255"))
    assert str(refused.destination) == "10.77.1.0/24"
    bad = replace(plan, routes=(refused, *plan.routes[1:]))
    with pytest.raises(KernelFailure, match=r"10\.77\.1\.0/24"):
        world.datapath.apply_cluster(bad)
    assert {present[0] for present in routes_of(world, "-4")} >= {"10.77.2.0/24", "10.77.3.0/24"}
    assert "10.77.4.0/24" not in {present[0] for present in routes_of(world, "-4")}
    numbers = {row.number for row in list_nodes(world.datapath.maps)}
    assert numbers == {1, 2, 3}
    world.datapath.apply_cluster(plan)
    assert len(routes_of(world, "-4")) == 3
    assert world.datapath.apply_cluster(plan) == []


def test_a_weaker_foreign_route_stays_beside_ours(world: KernelWorld) -> None:
    world.host.run("ip", "route", "add", "10.77.1.0/24", "dev", UNDERLAY, "metric", "50")
    world.datapath.apply_cluster(make_cluster(1))
    assert len(world.host.ip("route", "show", "10.77.1.0/24")) == 2
    world.datapath.apply_cluster(ClusterPlan())
    assert len(world.host.ip("route", "show", "10.77.1.0/24")) == 1


def test_routes_to_pods_and_refused_blocks_are_none_of_its_business(world: KernelWorld) -> None:
    record, _ = world.attach(5)
    before = _lines(world, "ip", "route", "show", "proto", "199")
    assert len(before) == 2
    world.datapath.apply_cluster(make_cluster(1))
    world.datapath.apply_cluster(ClusterPlan())
    assert _lines(world, "ip", "route", "show", "proto", "199") == before
    world.detach(record)


# What changes


def tunnel_link(world: KernelWorld) -> dict[str, Any]:
    return world.host.ip("link", "show", TUNNEL_DEVICE)[0]


def _with_tunnel(plan: ClusterPlan, **changes: object) -> ClusterPlan:
    assert plan.tunnel is not None
    return replace(plan, tunnel=replace(plan.tunnel, **changes))


def test_mtu_and_address_change_in_place(world: KernelWorld) -> None:
    plan = make_cluster(1)
    world.datapath.apply_cluster(plan)
    index = tunnel_link(world)["ifindex"]
    moved = ipaddress.ip_address("10.77.0.9")
    changed = _with_tunnel(plan, mtu_bytes=1430, addresses=(moved,))
    changed = replace(
        changed,
        pod_mtu_bytes=1430,
        routes=tuple(
            replace(route, mtu_bytes=1430, source=moved if route.destination.version == 4 else None)
            for route in plan.routes
        ),
    )
    differences = world.datapath.apply_cluster(changed)
    assert any("mtu is 1450, wanted 1430" in difference for difference in differences)
    link = tunnel_link(world)
    assert (link["ifindex"], link["mtu"]) == (index, 1430)
    assert {present[3:5] for present in routes_of(world, "-4")} == {("10.77.0.9", 1430)}
    assert world.datapath.mtu == 1430
    assert world.datapath.apply_cluster(changed) == []


OTHER_DEVICES = [
    pytest.param(lambda plan: _with_tunnel(plan, port=4789), id="port"),
    pytest.param(lambda _: make_cluster(1, mode=TunnelMode.CLASSIC), id="classic"),
]


@pytest.mark.parametrize("change", OTHER_DEVICES)
def test_another_port_or_mode_takes_another_device(
    world: KernelWorld, change: Callable[[ClusterPlan], ClusterPlan]
) -> None:
    plan = make_cluster(1)
    world.datapath.apply_cluster(plan)
    index = tunnel_link(world)["ifindex"]
    changed = change(plan)
    differences = world.datapath.apply_cluster(changed)
    assert any("made anew" in difference for difference in differences)
    assert tunnel_link(world)["ifindex"] != index
    assert len(routes_of(world, "-4")) == 1
    assert world.datapath.apply_cluster(changed) == []
    assert world.datapath.apply_cluster(plan)
    assert world.datapath.apply_cluster(plan) == []


def test_native_routes_lead_over_the_underlay(world: KernelWorld) -> None:
    plan = make_cluster(2, way=Way.NATIVE)
    world.datapath.apply_cluster(plan)
    assert world.host.ip("link", "show", "type", "vxlan") == []
    assert routes_of(world, "-4") == {
        (f"10.77.{n}.0/24", f"10.50.0.{n + 1}", UNDERLAY, str(OWN4), 1450, False) for n in (1, 2)
    }
    assert routes_of(world, "-6") == {
        (f"fd77::{n}:0/112", f"fd50::{n + 1}", UNDERLAY, str(OWN6), 1450, False) for n in (1, 2)
    }
    found = {str(row.network): row for row in tables.list_ipcache(world.datapath.maps)}
    assert found["10.77.1.0/24"].flags == abi.IpcacheFlags.NATIVE | abi.IpcacheFlags.DIRECT
    assert found["10.50.0.2/32"].flags == abi.IpcacheFlags.NODE_ADDRESS
    assert tables.read_settings(world.datapath.maps).tunnel_ifindex == 0
    assert world.datapath.mtu == 1500
    assert world.datapath.apply_cluster(plan) == []


def test_the_way_changes_without_a_trace_of_the_other_one(world: KernelWorld) -> None:
    for plan in (make_cluster(2), make_cluster(2, way=Way.NATIVE), make_cluster(2)):
        world.datapath.apply_cluster(plan)
        assert world.datapath.apply_cluster(plan) == []
        assert len(routes_of(world, "-4")) == 2


def _shuffled(random: Random, plan: ClusterPlan) -> ClusterPlan:
    """Leave out peers, so that numbers have gaps, and let some pods be known by address."""
    gone = {peer.number for peer in plan.peers if random.random() < 0.3}
    prefixes = {net: row for net, row in plan.prefixes.items() if row.node not in gone}
    for peer in plan.peers:
        if peer.number not in gone and random.random() < 0.5:
            pod = ipaddress.ip_network(pods_of(peer.number)[0].network_address + 7)
            way = plan.routes[0].way if plan.routes else None
            prefixes[pod] = Prefix(IdentityId(random.randrange(65_536, 70_000)), peer.number, way)
    return replace(
        plan,
        peers=tuple(peer for peer in plan.peers if peer.number not in gone),
        prefixes=prefixes,
        routes=tuple(route for route in plan.routes if route.peer not in gone),
    )


def test_any_plan_after_any_other_is_in_the_kernel_whatever_was_damaged_before(
    world: KernelWorld, seed: int
) -> None:
    random = Random(seed)
    own = len(ipcache_of(world))
    for _ in range(40):
        way, mode = random.choice(list(Way)), random.choice(list(TunnelMode))
        families = random.choice(["4", "6", "46"])
        plan = _shuffled(
            random, make_cluster(random.randrange(7), way=way, mode=mode, families=families)
        )
        for damage in random.sample(DAMAGE, 3):
            with contextlib.suppress(AssertionError):  # there may be nothing to damage
                damage.values[0](world)  # type: ignore[operator]
        world.datapath.apply_cluster(plan)
        assert world.datapath.apply_cluster(plan) == []
        shown = routes_of(world, "-4") | routes_of(world, "-6")
        assert {str(route[0]) for route in shown} == {
            str(route.destination) for route in plan.routes
        }
        assert {node.number for node in list_nodes(world.datapath.maps)} == {
            peer.number for peer in plan.peers
        }
        # The cluster's range is in both; the tunnel device brings the node two addresses.
        expected = own + len(plan.prefixes) - 1 + (2 if plan.tunnel is not None else 0)
        assert len(ipcache_of(world)) == expected
        assert len(world.host.ip("link", "show", "type", "vxlan")) == (plan.tunnel is not None)


# Classic


def test_a_classic_device_has_a_neighbour_and_an_entry_for_each_peer(world: KernelWorld) -> None:
    plan = make_cluster(2, mode=TunnelMode.CLASSIC)
    routes = (replace(route, via=route.destination.network_address + 1) for route in plan.routes)
    plan = replace(plan, routes=tuple(routes))
    world.datapath.apply_cluster(plan)
    info = tunnel_link(world)["linkinfo"]["info_data"]
    assert (info["id"], info["port"], info["local"]) == (1, 8472, str(OWN4))
    assert info.get("learning") is False
    assert routes_of(world, "-4") == {
        (f"10.77.{n}.0/24", f"10.77.{n}.1", TUNNEL_DEVICE, "10.77.0.0", 1450, True) for n in (1, 2)
    }
    neighbours = world.host.ip("neigh", "show", "dev", TUNNEL_DEVICE, "nud", "permanent")
    assert {(neighbour["dst"], neighbour["lladdr"]) for neighbour in neighbours} == {
        (address, f"0e:78:00:00:00:0{n}")
        for n in (1, 2)
        for address in (f"10.77.{n}.1", f"fe80::7077:0:{n}")
    }
    entries = json.loads(world.host.run("bridge", "-j", "fdb", "show", "dev", TUNNEL_DEVICE))
    assert {(entry["mac"], entry["dst"]) for entry in entries} == {
        (f"0e:78:00:00:00:0{n}", f"10.50.0.{n + 1}") for n in (1, 2)
    }
    found = {str(row.network): row for row in tables.list_ipcache(world.datapath.maps)}
    assert found["10.77.1.0/24"].flags == abi.IpcacheFlags.NATIVE
    assert tables.read_settings(world.datapath.maps).tunnel_ifindex == 0
    assert tables.read_settings(world.datapath.maps).tunnel_port == 8472
    assert world.datapath.apply_cluster(plan) == []
    world.host.run("bridge", "fdb", "del", "0e:78:00:00:00:01", "dev", TUNNEL_DEVICE)
    assert any(
        "0e:78:00:00:00:01" in difference for difference in world.datapath.apply_cluster(plan)
    )
    assert world.datapath.apply_cluster(plan) == []


def test_the_outer_address_of_a_classic_device_changes_in_place(world: KernelWorld) -> None:
    plan = make_cluster(1, mode=TunnelMode.CLASSIC)
    world.datapath.apply_cluster(plan)
    index = tunnel_link(world)["ifindex"]
    world.host.run("ip", "address", "add", "10.50.0.9/24", "dev", UNDERLAY)
    moved = _with_tunnel(plan, local=ipaddress.ip_address("10.50.0.9"))
    differences = world.datapath.apply_cluster(moved)
    assert any(
        "outer address is 10.50.0.1, wanted 10.50.0.9" in difference for difference in differences
    )
    link = tunnel_link(world)
    assert (link["ifindex"], link["linkinfo"]["info_data"]["local"]) == (index, "10.50.0.9")


@pytest.mark.parametrize("family", ["4", "6"])
def test_a_host_talks_to_a_peer_that_only_has_iproute2_by_a_classic_tunnel(
    world: KernelWorld, family: str
) -> None:
    plan = make_cluster(1, mode=TunnelMode.CLASSIC)
    with new_namespace() as peer:
        world.host.run("ip", "link", "set", "pwtfar", "netns", peer.name)
        for command in (
            "ip link set lo up",
            "ip link set pwtfar up",
            "ip address add 10.50.0.2/24 dev pwtfar",
            "ip link add flannel.1 address 0e:78:00:00:00:01 mtu 1450 type vxlan id 1"
            " local 10.50.0.2 dstport 8472 nolearning",
            "ip address add 10.77.1.0/32 dev flannel.1",
            "ip address add fd77::1:0/128 dev flannel.1 nodad",
            "ip link set flannel.1 up",
            f"ip neigh add 10.77.0.0 lladdr {MAC} dev flannel.1 nud permanent",
            f"ip neigh add fd77:: lladdr {MAC} dev flannel.1 nud permanent",
            f"bridge fdb append {MAC} dev flannel.1 dst 10.50.0.1",
            "ip route add 10.77.0.0/24 via 10.77.0.0 dev flannel.1 onlink",
            "ip route add fd77::/112 via fd77:: dev flannel.1 onlink",
        ):
            peer.run(*command.split())
        world.datapath.apply_cluster(plan)
        target = "10.77.1.0" if family == "4" else "fd77::1:0"
        assert pings(world.host, target)
        peer.run(*["ip", "address", "add", "10.50.0.99/24", "dev", "pwtfar"])
        peer.run(*["ip", "link", "set", "flannel.1", "type", "vxlan", "local", "10.50.0.99"])
        assert not pings(world.host, target, deadline_s=1), "answered by somebody who is no peer"


# Single prefixes, and the node's own


def ipcache_of(world: KernelWorld) -> dict[str, tables.IpcacheEntry]:
    return {str(row.network): row for row in tables.list_ipcache(world.datapath.maps)}


def test_single_prefixes_come_and_go_between_plans(world: KernelWorld) -> None:
    plan = make_cluster(1)
    world.datapath.apply_cluster(plan)
    pod = ipaddress.ip_network("10.77.1.7/32")
    row = Prefix(IdentityId(70_000), 1, Way.TUNNEL, 1450)
    world.datapath.change_prefixes({pod: row})
    assert ipcache_of(world)["10.77.1.7/32"].identity == 70_000
    world.datapath.change_plan(replace(world.plan, conntrack_quota=77))
    assert ipcache_of(world)["10.77.1.7/32"].identity == 70_000, (
        "forgotten by the node's own change"
    )
    known = replace(plan, prefixes={**plan.prefixes, pod: row})
    assert world.datapath.apply_cluster(known) == []
    world.datapath.change_prefixes({}, [pod])
    assert "10.77.1.7/32" not in ipcache_of(world)
    assert world.datapath.apply_cluster(known) == [
        "prefix 10.77.1.7/32 in the ipcache was missing or wrong"
    ]


def test_what_the_node_says_of_itself_beats_what_is_said_of_others(world: KernelWorld) -> None:
    own = ipaddress.ip_network("10.77.0.0/24")
    cluster = ipaddress.ip_network("10.77.0.0/16")
    claimed = Prefix(UNMANAGED, 1, Way.TUNNEL, 1450)
    plan = make_cluster(1)
    world.datapath.apply_cluster(replace(plan, prefixes={**plan.prefixes, own: claimed}))
    assert ipcache_of(world)[str(own)].flags == abi.IpcacheFlags.LOCAL
    world.datapath.change_prefixes({own: claimed, cluster: claimed})
    assert ipcache_of(world)[str(own)].flags == abi.IpcacheFlags.LOCAL
    assert ipcache_of(world)[str(cluster)].node == 1
    world.datapath.change_prefixes({}, [own, cluster])
    assert ipcache_of(world)[str(own)].flags == abi.IpcacheFlags.LOCAL
    shown = ipcache_of(world)[str(cluster)]
    assert (shown.identity, shown.node) == (abi.Identity.UNMANAGED, 0)


def test_masquerade_leaves_alone_what_stays_in_the_cluster(world: KernelWorld) -> None:
    world.datapath.apply_cluster(make_cluster(1))
    text = world.host.run("nft", "list", "table", "inet", "podwire")
    assert "10.50.0.0/24" in text
    assert "10.77.0.0/16" in text
    assert text.count("udp dport 8472 goto tunnel_") == text.count("notrack") == 2
    world.datapath.change_plan(replace(world.plan, masquerade=False))
    text = world.host.run("nft", "list", "table", "inet", "podwire")
    assert "masquerade" not in text
    assert text.count("udp dport 8472 goto tunnel_") == text.count("notrack") == 2


# Underlay and events


def test_the_underlay_is_the_device_with_the_nodes_address(world: KernelWorld) -> None:
    underlay = world.datapath.read_underlay()
    assert underlay.addresses == (OWN4, OWN6)
    assert set(underlay.connected) == {
        ipaddress.ip_network("10.50.0.0/24"),
        ipaddress.ip_network("fd50::/64"),
    }
    assert (underlay.ifindex, underlay.mtu_bytes) == (UNDERLAY_INDEX, 1500)
    world.host.run("ip", "link", "set", UNDERLAY, "mtu", "1400")
    assert world.datapath.read_underlay().mtu_bytes == 1400


def test_what_this_host_reaches_by_itself_is_known(world: KernelWorld) -> None:
    """Addresses and links of every device, and every next hop; nothing of ours, and no single address on a link."""
    run = world.host.run
    world.datapath.apply_cluster(make_cluster(1))
    before = world.datapath.read_underlay().around
    assert before.gateways == frozenset()
    run("ip", "link", "add", "other0", "type", "veth", "peer", "name", "other1")
    run("ip", "link", "set", "other1", "up")
    run("ip", "address", "add", "172.17.0.1/16", "dev", "other0")
    run("ip", "address", "add", "fd17::1/64", "dev", "other0", "nodad")
    run("ip", "link", "set", "other0", "up")
    run("ip", "route", "add", "10.8.0.0/24", "dev", "other0")
    run("ip", "route", "add", "10.8.1.7/32", "dev", "other0")
    run("ip", "route", "add", "10.19.0.0/24", "via", "10.50.0.77")
    run("ip", "route", "add", "10.10.0.0/24", "via", "inet6", "fd17::9", "dev", "other0")
    run(
        *("ip", "route", "add", "10.11.0.0/24", "nexthop", "via", "10.50.0.78"),
        *("nexthop", "via", "172.17.0.9"),
    )
    run("ip", "route", "add", "10.12.0.0/24", "via", "172.17.0.10", "table", "77")
    run("ip", "-6", "route", "add", "fd18::/64", "via", "fe80::9", "dev", "other0")
    around = world.datapath.read_underlay().around
    hops = ("10.50.0.77", "fd17::9", "10.50.0.78", "172.17.0.9", "172.17.0.10")
    assert {str(gateway) for gateway in around.gateways} == set(hops)
    links = {"172.17.0.0/16", "fd17::/64", "10.8.0.0/24"}
    assert {str(subnet) for subnet in {*around.subnets} - {*before.subnets}} == links
    assert {ipaddress.ip_network("10.50.0.0/24"), ipaddress.ip_network("fd50::/64")} <= {
        *before.subnets
    }
    assert {str(address) for address in around.own - before.own} == {"172.17.0.1", "fd17::1"}
    assert {OWN4, OWN6} <= before.own


def test_own_addresses_and_mtu_are_followed(world: KernelWorld) -> None:
    world.restart(node_address=None)
    world.host.run("ip", "route", "add", "default", "dev", UNDERLAY)
    world.datapath.apply_cluster(make_cluster(1, way=Way.NATIVE))
    record, pod = world.attach(5)
    for command in (
        f"sysctl -qw net.ipv4.conf.{UNDERLAY}.promote_secondaries=1",
        f"ip address add 10.50.0.9/24 dev {UNDERLAY}",
        f"ip address del {OWN4}/24 dev {UNDERLAY}",
        f"ip link set {UNDERLAY} mtu 1400",
    ):
        world.host.run(*command.split())
    assert "10.77.0.5" not in world.host.run("ip", "route"), "it named an address that is gone"
    moved = ipaddress.IPv4Address("10.50.0.9")
    plan = make_cluster(1, way=Way.NATIVE)
    routes = tuple(
        replace(route, source=moved if route.destination.version == 4 else route.source)
        for route in plan.routes
    )
    differences = world.datapath.apply_cluster(replace(plan, routes=routes))
    assert "MTU of the underlay is 1400, was 1500" in differences
    assert any("10.50.0.9 and fd50::1, were 10.50.0.1" in difference for difference in differences)
    assert world.datapath.node_addresses == ("10.50.0.9", "fd50::1")
    assert world.datapath.mtu == 1400
    world.datapath.repair_device(record)
    assert world.host.ip("route", "show", "10.77.0.5")[0]["prefsrc"] == "10.50.0.9"
    assert pings(pod, "10.50.0.9")


EVENTS = [
    pytest.param(_run("ip", "link", "del", TUNNEL_DEVICE), id="tunnel-device-deleted"),
    pytest.param(_run("ip", "link", "set", UNDERLAY, "mtu", "1400"), id="underlay-mtu"),
    pytest.param(_run("ip", "address", "add", "10.50.0.9/24", "dev", UNDERLAY), id="address"),
    pytest.param(_run("ip", "-6", "address", "del", "fd50::1/64", "dev", UNDERLAY), id="address6"),
    pytest.param(_run("ip", "route", "del", "10.77.1.0/24"), id="our-route"),
    pytest.param(_run("ip", "-6", "route", "del", "fd77::1:0/112"), id="our-route-ipv6"),
    pytest.param(_run("ip", "route", "add", "default", "dev", UNDERLAY), id="default-route"),
]


def drain(events: NetlinkEvents) -> None:
    """Take the news of what was done before, which the kernel may tell late."""
    while events.wait(0.2):
        pass


def is_once_quiet(events: NetlinkEvents, act: Callable[[], object]) -> bool:
    """Tell whether something makes no news, at the third try at the latest.

    A carrier's change is told by a work of the kernel, a second later or on a busy machine still later, but once.
    """
    for _ in range(3):
        drain(events)
        act()
        if not events.wait(0.05):
            return True
    return False


@pytest.mark.parametrize("change", EVENTS)
def test_a_change_on_the_way_to_other_nodes_is_told(world: KernelWorld, change: Damage) -> None:
    world.datapath.apply_cluster(make_cluster(1))
    with watch_links() as events:
        drain(events)
        change(world)
        assert events.wait(30)


def test_pods_and_passing_routes_are_no_news(world: KernelWorld) -> None:
    world.datapath.apply_cluster(make_cluster(1))
    numbers = iter(range(7, 10))

    def come_and_go() -> None:
        number = next(numbers)
        record, _ = world.attach(number)
        world.detach(record)
        world.datapath.reap_devices()
        world.host.run("ip", "route", "add", f"192.0.{number}.0/24", "dev", UNDERLAY)

    with watch_links() as events:
        assert is_once_quiet(events, come_and_go)


def test_a_pass_without_changes_makes_no_news(world: KernelWorld) -> None:
    plan = make_cluster(2)
    world.datapath.apply_cluster(plan)

    def look() -> None:
        assert world.datapath.apply_cluster(plan) == []

    with watch_links() as events:
        assert is_once_quiet(events, look)


# Many, and the end


@pytest.mark.timeout(300)
def test_five_thousand_nodes_are_applied_and_looked_through_in_linear_time(
    world: KernelWorld,
) -> None:
    plan = make_cluster(5000, families="4")
    began = time.monotonic()
    world.datapath.apply_cluster(plan)
    assert world.datapath.apply_cluster(plan) == []
    named = world.datapath.apply_cluster(ClusterPlan())
    assert time.monotonic() - began < 60  # 2 s on a quiet machine; quadratic would be minutes
    assert any("more" in difference for difference in named)
    assert len(named) < 50


def test_cleanup_names_and_removes_device_and_routes(world: KernelWorld) -> None:
    world.datapath.apply_cluster(make_cluster(1))
    world.host.run(
        *("ip", "route", "add", "10.78.0.0/24", "via", "10.50.0.2", "dev", UNDERLAY, "proto", "199")
    )
    left = survey_leftovers(world.plan.bpf_dir)
    expected = {f"tunnel device {TUNNEL_DEVICE}", "route to 10.78.0.0/24", "route to 10.77.1.0/24"}
    assert expected <= set(left)
    world.datapath.close()
    assert expected <= set(remove_everything(world.plan.bpf_dir))
    assert world.host.ip("link", "show", "type", "vxlan") == []
    assert not any("199" in line for line in _lines(world, "ip", "route"))
    assert survey_leftovers(world.plan.bpf_dir) == []


def test_doctor_warns_of_a_foreign_tunnel_on_the_port(world: KernelWorld) -> None:
    world.datapath.apply_cluster(make_cluster(1))
    assert not [finding for finding in survey_host() if finding.check == "tunnel"]
    world.datapath.apply_cluster(ClusterPlan())
    world.host.run("ip", "link", "add", "flannel.1", "type", "vxlan", "id", "1", "dstport", "8472")
    found = [finding for finding in survey_host() if finding.check == "tunnel"]
    assert [finding.level for finding in found] == ["warning"]
    assert "flannel.1" in found[0].message


def test_people_can_read_the_other_nodes(world: KernelWorld) -> None:
    world.datapath.apply_cluster(make_cluster(1, mode=TunnelMode.CLASSIC))
    rows, truncated = read_rows(world.datapath.maps, "nodes", 10)
    assert not truncated
    assert rows == [
        {
            "node": 1,
            "address": "10.50.0.2",
            "known_addresses": ["10.50.0.2", "fd50::2"],
            "mtu": 1450,
            "flags": ["classic"],
            "mac": "0e:78:00:00:00:01",
            "hops": [],
        }
    ]


# Past the stack


def filters_of(world: KernelWorld, device: str = UNDERLAY) -> list[str]:
    """Give the programs at a device's ingress, in the order in which they see a packet."""
    shown = json.loads(world.host.run("tc", "-j", "filter", "show", "dev", device, "ingress"))
    return [
        route["options"]["bpf_name"] for route in shown if "bpf_name" in route.get("options", {})
    ]


def native_device(world: KernelWorld) -> int:
    return tables.read_settings(world.datapath.maps).native_ifindex


def attach_foreign(
    world: KernelWorld, priority: int, handle: int = 1, hook: int = FROM_POD_HOOK
) -> None:
    """Attach a filter of somebody else."""
    with NetlinkSocket() as netlink:
        netlink.attempt([add_clsact(UNDERLAY_INDEX)])
        program = world.datapath._node.loaded.fd("from_netdev")
        place = {"priority": priority, "handle": handle}
        netlink.execute([set_bpf_filter(UNDERLAY_INDEX, hook, program, "other", **place)])


def priorities_of(world: KernelWorld) -> set[int]:
    shown = json.loads(world.host.run("tc", "-j", "filter", "show", "dev", UNDERLAY, "ingress"))
    return {int(route["pref"]) for route in shown}


def test_a_native_peer_brings_the_program_to_the_device_and_the_last_one_takes_it_away(
    world: KernelWorld,
) -> None:
    assert filters_of(world) == []
    plan = make_cluster(2, way=Way.NATIVE)
    assert "program from_netdev of device index 77 is not attached" in world.datapath.apply_cluster(
        plan
    )
    assert filters_of(world) == ["from_netdev"]
    assert native_device(world) == UNDERLAY_INDEX
    rows, _ = read_rows(world.datapath.maps, "nodes", 10)
    assert [row["hops"] for row in rows] == [["10.50.0.2", "fd50::2"], ["10.50.0.3", "fd50::3"]]
    assert world.datapath.apply_cluster(plan) == []
    for other in (make_cluster(2), ClusterPlan()):
        world.datapath.apply_cluster(plan)
        assert "program from_netdev of device index 77 was too much" in (
            world.datapath.apply_cluster(other)
        )
        assert (filters_of(world), native_device(world)) == ([], 0)


@pytest.mark.parametrize(
    "command",
    [
        ("tc", "filter", "del", "dev", UNDERLAY, "ingress", "prio", "7"),
        ("tc", "qdisc", "del", "dev", UNDERLAY, "clsact"),
    ],
    ids=["filter", "hooks"],
)
def test_the_program_comes_back_when_somebody_takes_it_away(
    world: KernelWorld, command: tuple[str, ...]
) -> None:
    plan = make_cluster(1, way=Way.NATIVE)
    world.datapath.apply_cluster(plan)
    world.host.run(*command)
    assert world.datapath.apply_cluster(plan) == [
        "program from_netdev of device index 77 is not attached"
    ]
    assert filters_of(world) == ["from_netdev"]


def test_an_agent_that_starts_keeps_the_way_and_replaces_the_program_in_place(
    world: KernelWorld,
) -> None:
    plan = make_cluster(1, way=Way.NATIVE)
    world.datapath.apply_cluster(plan)
    world.restart()
    assert (filters_of(world), native_device(world)) == (["from_netdev"], UNDERLAY_INDEX)
    pod = ipaddress.ip_network("10.77.1.9/32")
    world.datapath.change_prefixes({pod: Prefix(IdentityId(70_000), 1, Way.NATIVE, 1450)})
    assert ipcache_of(world)[str(pod)].flags & abi.IpcacheFlags.DIRECT
    world.restart(constants={"none": 1})
    assert "number" in " ".join(world.datapath.apply_cluster(plan))
    assert filters_of(world) == ["from_netdev"]


def test_an_agent_that_finds_the_program_gone_sends_nothing_past_the_stack(
    world: KernelWorld,
) -> None:
    world.datapath.apply_cluster(make_cluster(1, way=Way.NATIVE))
    world.host.run("tc", "filter", "del", "dev", UNDERLAY, "ingress")
    world.restart()
    assert native_device(world) == 0


def test_an_agent_that_starts_removes_a_program_that_nobody_sends_by(world: KernelWorld) -> None:
    world.datapath.apply_cluster(make_cluster(1, way=Way.NATIVE))
    tables.write_settings(world.datapath.maps, native_ifindex=0)
    world.restart()
    assert filters_of(world) == []


def test_filters_of_others_stay_and_one_that_comes_first_keeps_native_packets_on_the_stack(
    world: KernelWorld,
) -> None:
    plan = make_cluster(1, way=Way.NATIVE)
    attach_foreign(world, 100)
    world.datapath.apply_cluster(plan)
    assert (native_device(world), priorities_of(world)) == (UNDERLAY_INDEX, {7, 100})
    attach_foreign(world, 3)
    world.datapath.apply_cluster(plan)
    assert (native_device(world), priorities_of(world)) == (0, {3, 100})
    assert not ipcache_of(world)["10.77.1.0/24"].flags & abi.IpcacheFlags.DIRECT
    assert world.datapath.apply_cluster(plan) == []
    world.host.run("tc", "filter", "del", "dev", UNDERLAY, "ingress", "prio", "3")
    world.datapath.apply_cluster(plan)
    assert (native_device(world), priorities_of(world)) == (UNDERLAY_INDEX, {7, 100})
    world.datapath.apply_cluster(ClusterPlan())
    assert priorities_of(world) == {100}


@pytest.mark.parametrize("handle", [1, 0x7077])
def test_a_filter_of_somebody_else_in_our_place_is_left_there(
    world: KernelWorld, handle: int
) -> None:
    attach_foreign(world, 7, handle)
    plan = make_cluster(1, way=Way.NATIVE)
    world.datapath.apply_cluster(plan)
    assert (native_device(world), priorities_of(world)) == (0, {7})
    assert world.datapath.apply_cluster(plan) == []


def test_a_device_without_ethernet_addresses_keeps_native_packets_on_the_stack(
    world: KernelWorld,
) -> None:
    world.host.run("ip", "link", "del", UNDERLAY)
    world.host.run("ip", "tuntap", "add", "mode", "tun", "name", UNDERLAY)
    world.host.run("ip", "address", "add", f"{OWN4}/24", "dev", UNDERLAY)
    world.host.run("ip", "link", "set", UNDERLAY, "up")
    plan = make_cluster(1, way=Way.NATIVE, families="4")
    world.datapath.apply_cluster(plan)
    assert (filters_of(world), native_device(world)) == ([], 0)
    assert not ipcache_of(world)["10.77.1.0/24"].flags & abi.IpcacheFlags.DIRECT
    assert len(routes_of(world, "-4")) == 1


def test_a_host_that_encrypts_keeps_native_packets_in_its_stack(world: KernelWorld) -> None:
    plan = make_cluster(1, way=Way.NATIVE)
    world.datapath.apply_cluster(plan)
    policy = ("dst", "10.77.1.0/24", "dir", "out")
    made = world.host.run(
        "ip", "xfrm", "policy", "add", *policy, "tmpl", "proto", "esp", check=False
    )
    if "not supported" in made:
        pytest.skip("this kernel has no IPsec")
    world.datapath.apply_cluster(plan)
    assert (filters_of(world), native_device(world)) == ([], 0)
    world.host.run("ip", "xfrm", "policy", "delete", *policy)
    world.datapath.apply_cluster(plan)
    assert native_device(world) == UNDERLAY_INDEX


def test_a_classic_tunnel_is_no_way_past_the_stack(world: KernelWorld) -> None:
    world.datapath.apply_cluster(make_cluster(1, mode=TunnelMode.CLASSIC))
    assert native_device(world) == 0
    assert ipcache_of(world)["10.77.1.0/24"].flags == abi.IpcacheFlags.NATIVE


def test_cleanup_names_and_removes_the_program_and_nothing_of_others(world: KernelWorld) -> None:
    attach_foreign(world, 100)
    world.datapath.apply_cluster(make_cluster(1, way=Way.NATIVE))
    world.close()
    named = "program from_netdev of device index 77"
    assert named in survey_leftovers(world.plan.bpf_dir)
    assert named in remove_everything(world.plan.bpf_dir)
    assert named not in survey_leftovers(world.plan.bpf_dir)
    assert priorities_of(world) == {100}


# Whose the hooks at the underlay device are


def has_hooks(world: KernelWorld) -> bool:
    return "clsact" in world.host.run("tc", "qdisc", "show", "dev", UNDERLAY)


def detach_foreign(world: KernelWorld) -> None:
    world.host.run("tc", "filter", "del", "dev", UNDERLAY, "ingress", "prio", "100")


def go_native(world: KernelWorld) -> None:
    world.datapath.apply_cluster(make_cluster(1, way=Way.NATIVE))


def leave_native(world: KernelWorld) -> None:
    world.datapath.apply_cluster(make_cluster(1))


def start_without_native(world: KernelWorld) -> None:
    """The setting was changed while the agent did not run."""
    tables.write_settings(world.datapath.maps, native_ifindex=0)
    world.restart()


def clean_up(world: KernelWorld) -> None:
    world.close()
    named = "clsact queue of device index 77" in survey_leftovers(
        world.plan.bpf_dir, world.read_hooks()
    )
    removed = remove_everything(world.plan.bpf_dir, world.read_hooks())
    assert named == ("clsact queue of device index 77" in removed)


ENDS = {
    "the last peer goes": leave_native,
    "the agent starts without": start_without_native,
    "cleanup": clean_up,
}
ends = pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)


@ends
@pytest.mark.parametrize("restarted", [False, True])
def test_hooks_that_were_made_for_the_program_go_with_it(
    world: KernelWorld, end: Callable[[KernelWorld], None], restarted: bool
) -> None:
    go_native(world)
    assert has_hooks(world)
    if restarted:
        world.restart()
        go_native(world)
    end(world)
    assert not has_hooks(world)
    assert json.loads(world.hooks_noted)["devices"] == {}


@ends
def test_hooks_of_somebody_else_stay(
    world: KernelWorld, end: Callable[[KernelWorld], None]
) -> None:
    world.host.run("tc", "qdisc", "add", "dev", UNDERLAY, "clsact")
    go_native(world)
    end(world)
    assert has_hooks(world)


@ends
@pytest.mark.parametrize(
    ("hook", "priority"), [(FROM_POD_HOOK, 100), (TO_POD_HOOK, 7)], ids=["ingress", "egress"]
)
def test_hooks_stay_while_somebody_else_uses_them(
    world: KernelWorld, end: Callable[[KernelWorld], None], hook: int, priority: int
) -> None:
    go_native(world)
    attach_foreign(world, priority, hook=hook)
    end(world)
    side = "ingress" if hook == FROM_POD_HOOK else "egress"
    assert "other" in world.host.run("tc", "filter", "show", "dev", UNDERLAY, side)
    assert "from_netdev" not in filters_of(world)


@pytest.mark.parametrize("restarted", [False, True])
def test_hooks_go_when_the_last_who_used_them_has_gone(world: KernelWorld, restarted: bool) -> None:
    go_native(world)
    attach_foreign(world, 100)
    leave_native(world)
    assert has_hooks(world)
    detach_foreign(world)
    if restarted:
        world.restart()
    leave_native(world)
    assert not has_hooks(world)


def test_an_agent_that_died_before_it_made_hooks_leaves_those_of_others(world: KernelWorld) -> None:
    world.read_hooks().note(UNDERLAY_INDEX, made=False)
    world.host.run("tc", "qdisc", "add", "dev", UNDERLAY, "clsact")
    world.restart()
    go_native(world)
    leave_native(world)
    assert has_hooks(world)


def test_an_agent_that_died_when_it_had_made_hooks_takes_them_away(world: KernelWorld) -> None:
    go_native(world)
    world.read_hooks().note(UNDERLAY_INDEX, made=False)
    world.restart()
    go_native(world)
    leave_native(world)
    assert not has_hooks(world)


def test_an_agent_that_died_when_it_had_taken_hooks_away_leaves_those_of_others(
    world: KernelWorld,
) -> None:
    go_native(world)
    noted_while_they_go: list[str] = []
    world.datapath._hooks._write = noted_while_they_go.append
    leave_native(world)
    world.hooks_noted = noted_while_they_go[0]
    world.host.run("tc", "qdisc", "add", "dev", UNDERLAY, "clsact")
    world.restart()
    leave_native(world)
    assert has_hooks(world)


def test_what_was_noted_before_a_boot_is_nothing(world: KernelWorld) -> None:
    go_native(world)
    assert world.read_hooks().devices == {UNDERLAY_INDEX}
    assert OwnHooks(world.hooks_noted, boot_id="another").devices == frozenset()


def test_hooks_that_are_not_needed_any_more_stay_while_that_cannot_be_noted(
    world: KernelWorld,
) -> None:
    """Nothing else waits for it: packets go by the stack, whatever is attached."""
    go_native(world)
    write = world.datapath._hooks._write

    def refuse(_note: str) -> None:
        raise StorageFailure("write the journal: no space left on device")

    world.datapath._hooks._write = refuse
    leave_native(world)
    assert native_device(world) == 0
    assert has_hooks(world)
    world.datapath._hooks._write = write
    leave_native(world)
    assert not has_hooks(world)


def test_no_hooks_are_made_that_cannot_be_noted(world: KernelWorld) -> None:
    def refuse(_note: str) -> None:
        raise StorageFailure("write the journal: no space left on device")

    world.datapath._hooks._write = refuse
    go_native(world)
    assert not has_hooks(world)
    assert native_device(world) == 0


def test_a_lost_program_at_the_device_is_news(world: KernelWorld) -> None:
    world.datapath.apply_cluster(make_cluster(1, way=Way.NATIVE))
    with watch_links() as events:
        world.host.run("tc", "filter", "del", "dev", UNDERLAY, "ingress")
        assert events.wait(30)
