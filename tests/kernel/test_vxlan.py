"""VXLAN devices and forwarding entries: iproute2 judges what the kernel has, pyroute2 what we send."""

import ipaddress
import json
from typing import Any

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg

from podwire.kernel.netlink import NetlinkSocket, Request
from podwire.kernel.rtnl.link import LinkEnd, create_link, get_link, list_links
from podwire.kernel.rtnl.vxlan import (
    KIND,
    ForwardingEntry,
    Vxlan,
    change_local,
    create_vxlan,
    delete_forwarding,
    list_forwarding,
    read_forwarding,
    read_vxlan,
    set_forwarding,
)
from podwire.model.errors import KernelFailure
from tests.kernel.conftest import Namespace

INDEX = 4321
MAC = "0e:77:00:00:00:01"
PEER_MAC = "0e:77:00:00:00:02"
V4 = ipaddress.IPv4Address("10.50.0.1")
V6 = ipaddress.IPv6Address("fd50::1")
END = LinkEnd("pwvx", INDEX, MAC, 1450)

DEVICES = [
    pytest.param(
        Vxlan(8472, flow_based=True),
        {"external": True, "port": 8472, "learning": False},
        id="flow-based",
    ),
    pytest.param(
        Vxlan(4789, flow_based=False, vni=1, local=V4),
        {"id": 1, "port": 4789, "local": str(V4), "learning": False},
        id="classic-ipv4",
    ),
    pytest.param(
        Vxlan(8472, flow_based=False, vni=16_777_215, local=V6),
        {"id": 16_777_215, "local6": str(V6), "learning": False},
        id="classic-ipv6",
    ),
    pytest.param(
        Vxlan(8472, flow_based=False, vni=7, learning=True),
        {"id": 7, "learning": True},
        id="learning",
    ),
]


@pytest.mark.parametrize(("settings", "shown"), DEVICES)
def test_a_device_is_what_was_asked_for_and_what_iproute2_shows(
    host: Namespace, netlink: NetlinkSocket, settings: Vxlan, shown: dict[str, Any]
) -> None:
    netlink.execute([create_vxlan(END, settings)])
    link = host.ip("link", "show", "pwvx")[0]
    assert (link["ifindex"], link["address"], link["mtu"]) == (INDEX, MAC, 1450)
    found = link["linkinfo"]["info_data"]
    assert {key: found.get(key) for key in shown} == shown
    assert read_vxlan(netlink.get(get_link(INDEX))) == settings
    assert [read_vxlan(body) for body in netlink.dump(list_links(kind=KIND))] == [settings]


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        pytest.param(
            ("external", "dstport", "6081"), Vxlan(6081, flow_based=True), id="flow-based"
        ),
        pytest.param(
            ("id", "9", "local", "10.50.0.1", "dstport", "4789", "nolearning"),
            Vxlan(4789, flow_based=False, vni=9, local=V4),
            id="ipv4",
        ),
        pytest.param(
            ("id", "9", "local", "fd50::1", "dstport", "4789"),
            Vxlan(4789, flow_based=False, vni=9, local=V6, learning=True),
            id="ipv6",
        ),
    ],
)
def test_a_device_made_by_iproute2_is_read(
    host: Namespace, netlink: NetlinkSocket, arguments: tuple[str, ...], settings: Vxlan
) -> None:
    host.run("ip", "link", "add", "vx0", "type", "vxlan", *arguments)
    assert read_vxlan(netlink.get(get_link(name="vx0"))) == settings


def test_a_device_of_another_kind_has_no_such_settings(netlink: NetlinkSocket) -> None:
    netlink.execute([create_link("bridge", LinkEnd("pwbr", 55))])
    assert read_vxlan(netlink.get(get_link(55))) is None
    assert read_vxlan(netlink.get(get_link(1))) is None


def test_the_same_port_and_vni_twice_is_refused(netlink: NetlinkSocket) -> None:
    netlink.execute([create_vxlan(END, Vxlan(8472, flow_based=True))])
    with pytest.raises(KernelFailure, match="EEXIST"):
        netlink.execute([create_vxlan(LinkEnd("pwvx2"), Vxlan(8472, flow_based=True))])


def test_the_outer_address_changes_on_a_living_device(
    host: Namespace, netlink: NetlinkSocket
) -> None:
    netlink.execute([create_vxlan(END, Vxlan(8472, flow_based=False, vni=1, local=V4))])
    netlink.execute([change_local(INDEX, V4 + 8)])
    link = host.ip("link", "show", "pwvx")[0]
    assert link["linkinfo"]["info_data"]["local"] == str(V4 + 8)
    assert link["ifindex"] == INDEX


@pytest.mark.parametrize("outer", [V4 + 1, V6 + 1], ids=["ipv4", "ipv6"])
def test_a_forwarding_entry_comes_changes_and_goes(
    host: Namespace, netlink: NetlinkSocket, outer: ipaddress.IPv4Address | ipaddress.IPv6Address
) -> None:
    local = V4 if outer.version == 4 else V6
    netlink.execute([create_vxlan(END, Vxlan(8472, flow_based=False, vni=1, local=local))])

    def entries() -> list[ForwardingEntry | None]:
        return [read_forwarding(body) for body in netlink.dump(list_forwarding(INDEX))]

    assert entries() == []
    for destination in (outer, outer + 1):
        entry = ForwardingEntry(INDEX, PEER_MAC, destination)
        netlink.execute([set_forwarding(entry)])
        assert entries() == [entry]
        (shown,) = json.loads(host.run("bridge", "-j", "fdb", "show", "dev", "pwvx"))
        assert (shown["mac"], shown["dst"]) == (PEER_MAC, str(destination))
        assert (shown["state"], shown["flags"]) == ("permanent", ["self"])
    netlink.execute([delete_forwarding(entry)])
    assert entries() == []
    with pytest.raises(KernelFailure, match="ENOENT"):
        netlink.execute([delete_forwarding(entry)])


def _attributes(message: type[Any], request: Request) -> dict[str, Any]:
    header = (16 + len(request.body)).to_bytes(4, "little")
    decoded = message(header + request.type.to_bytes(2, "little") + bytes(10) + request.body)
    decoded.decode()
    return dict(tuple(pair) for pair in decoded["attrs"])


def test_pyroute2_reads_the_device_that_we_ask_for() -> None:
    settings = Vxlan(8472, flow_based=False, vni=5, local=V4)
    found = _attributes(ifinfmsg, create_vxlan(END, settings))
    info = dict(tuple(pair) for pair in found["IFLA_LINKINFO"]["attrs"])
    data = dict(tuple(pair) for pair in info["IFLA_INFO_DATA"]["attrs"])
    assert info["IFLA_INFO_KIND"] == "vxlan"
    assert data == {
        "IFLA_VXLAN_PORT": 8472,
        "IFLA_VXLAN_LEARNING": 0,
        "IFLA_VXLAN_ID": 5,
        "IFLA_VXLAN_LOCAL": str(V4),
    }


def test_pyroute2_reads_the_forwarding_entry_that_we_ask_for() -> None:
    found = _attributes(ndmsg, set_forwarding(ForwardingEntry(INDEX, PEER_MAC, V4)))
    assert found["NDA_LLADDR"] == PEER_MAC
    assert found["NDA_DST"] == str(V4)
