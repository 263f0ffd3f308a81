"""The host is prepared once and put back, obstacles are named with what to do, the MTU is found."""

import ipaddress
import shutil

import pytest

from podwire.agent.duties.kubernetes.start import choose_address
from podwire.datapath.cluster import read_underlay
from podwire.datapath.host import (
    SettingChange,
    Underlay,
    detect_underlay,
    find_warnings,
    list_device_addresses,
    prepare_host,
    undo_host,
)
from podwire.datapath.routes import ensure_block_routes, list_own_routes
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.nft import Nftables
from podwire.kernel.rtnl.link import LinkEnd, create_veth, set_link
from podwire.kernel.sysctl import read_sysctl, write_sysctl
from podwire.model.errors import Unavailable
from tests.kernel.conftest import Namespace

FORWARD4 = ("ipv4", "ip_forward")
FORWARD6 = ("ipv6", "conf", "all", "forwarding")


@pytest.fixture
def uplink(host: Namespace, netlink: NetlinkSocket) -> str:
    """A device `up0` with an address, MTU 1400."""
    netlink.execute(
        [create_veth(LinkEnd("up0", 11, mtu=1400), LinkEnd("up1", 12), None), set_link(11, up=True)]
    )
    host.run("ip", "addr", "add", "192.0.2.1/24", "dev", "up0")
    write_sysctl("0", *FORWARD4)
    write_sysctl("0", *FORWARD6)
    return "up0"


@pytest.mark.parametrize(
    ("ipv4", "ipv6", "values"),
    [
        pytest.param(True, False, ("1", "0"), id="ipv4"),
        pytest.param(False, True, ("0", "1"), id="ipv6"),
        pytest.param(True, True, ("1", "1"), id="dual"),
    ],
)
def test_forwarding_is_switched_on_once_and_put_back(
    uplink: str, netlink: NetlinkSocket, *, ipv4: bool, ipv6: bool, values: tuple[str, str]
) -> None:
    changes = prepare_host(netlink, ipv4=ipv4, ipv6=ipv6)
    assert (read_sysctl(*FORWARD4), read_sysctl(*FORWARD6)) == values
    assert prepare_host(netlink, ipv4=ipv4, ipv6=ipv6) == []
    assert list(reversed(undo_host(changes))) == changes
    assert (read_sysctl(*FORWARD4), read_sysctl(*FORWARD6)) == ("0", "0")


def test_devices_that_listen_to_routers_go_on_listening(
    uplink: str, netlink: NetlinkSocket
) -> None:
    write_sysctl("1", "ipv6", "conf", uplink, "accept_ra")
    write_sysctl("0", "ipv6", "conf", "up1", "accept_ra")
    changes = prepare_host(netlink, ipv4=False, ipv6=True)
    assert read_sysctl("ipv6", "conf", uplink, "accept_ra") == "2"
    assert read_sysctl("ipv6", "conf", "up1", "accept_ra") == "0"
    undo_host(changes)
    assert read_sysctl("ipv6", "conf", uplink, "accept_ra") == "1"


def test_undo_leaves_what_somebody_else_changed_or_removed(
    uplink: str, netlink: NetlinkSocket
) -> None:
    changes = prepare_host(netlink, ipv4=True, ipv6=False)
    write_sysctl("0", *FORWARD4)
    gone = SettingChange(("ipv6", "conf", "gone0", "accept_ra"), "1", "2")
    assert undo_host([*changes, gone]) == []


def test_missing_forwarding_is_named(uplink: str, netlink: NetlinkSocket) -> None:
    with Nftables() as tables:
        found = find_warnings(netlink, tables, ipv4=True, ipv6=True)
        assert [warning.message.split(" ")[0] for warning in found] == [
            "net.ipv4.ip_forward",
            "net.ipv6.conf.all.forwarding",
        ]
        assert all(warning.hint.startswith("sysctl -w") for warning in found)
        prepare_host(netlink, ipv4=True, ipv6=True)
        assert find_warnings(netlink, tables, ipv4=True, ipv6=True) == []


def test_a_forward_chain_that_drops_is_named_with_dockers_way_out(
    host: Namespace, netlink: NetlinkSocket
) -> None:
    prepare_host(netlink, ipv4=True, ipv6=False)
    host.run("nft", "add table ip filter")
    host.run(
        "nft", "add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }"
    )
    with Nftables() as tables:
        found = find_warnings(netlink, tables, ipv4=True, ipv6=False)
    assert len(found) == 1
    assert "FORWARD" in found[0].message
    assert "DOCKER-USER" in found[0].hint


@pytest.mark.skipif(shutil.which("iptables-legacy") is None, reason="iptables-legacy is missing")
@pytest.mark.parametrize(
    ("command", "version"), [("iptables-legacy", 4), ("ip6tables-legacy", 6)], ids=["ipv4", "ipv6"]
)
def test_a_legacy_forward_policy_is_named(
    host: Namespace, netlink: NetlinkSocket, command: str, version: int
) -> None:
    families = {"ipv4": version == 4, "ipv6": version == 6}
    prepare_host(netlink, **families)
    with Nftables() as tables:
        assert find_warnings(netlink, tables, **families) == []
        host.run(command, "-P", "FORWARD", "DROP")
        found = find_warnings(netlink, tables, **families)
    assert [command in warning.message for warning in found] == [True]


def test_a_learnt_default_route_that_will_expire_is_named(
    uplink: str, host: Namespace, netlink: NetlinkSocket
) -> None:
    prepare_host(netlink, ipv4=False, ipv6=True)
    write_sysctl("1", "ipv6", "conf", uplink, "accept_ra")
    host.run(
        *["ip", "-6", "route", "add", "default", "via", "fe80::99", "dev", "up0", "proto", "ra"]
    )
    with Nftables() as tables:
        found = find_warnings(netlink, tables, ipv4=False, ipv6=True)
        assert [warning.hint for warning in found] == ["sysctl -w net.ipv6.conf.up0.accept_ra=2"]
        write_sysctl("2", "ipv6", "conf", uplink, "accept_ra")
        assert find_warnings(netlink, tables, ipv4=False, ipv6=True) == []


def test_underlay_is_the_device_of_the_nodes_address_else_of_the_default_route(
    uplink: str, host: Namespace, netlink: NetlinkSocket
) -> None:
    with pytest.raises(Unavailable, match="MTU"):
        detect_underlay(netlink)
    found = detect_underlay(netlink, ipaddress.ip_address("192.0.2.1"))
    assert found == Underlay("up0", 11, 1400)
    host.run(*["ip", "route", "add", "default", "via", "192.0.2.9", "dev", "up0", "metric", "7"])
    host.run(*["ip", "route", "add", "default", "dev", "lo", "metric", "9"])
    assert detect_underlay(netlink).name == "up0"
    assert detect_underlay(netlink, ipaddress.ip_address("198.51.100.1")).name == "up0"
    host.run(
        *[
            "ip",
            "route",
            "change",
            "default",
            "via",
            "192.0.2.9",
            "dev",
            "up0",
            "metric",
            "7",
            "mtu",
            "1300",
        ]
    )
    assert detect_underlay(netlink).mtu == 1300


def test_a_named_second_card_carries_the_traffic_though_the_default_route_is_elsewhere(
    uplink: str, host: Namespace, netlink: NetlinkSocket
) -> None:
    netlink.execute(
        [create_veth(LinkEnd("world0", 21), LinkEnd("world1", 22), None), set_link(21, up=True)]
    )
    host.run("ip", "addr", "add", "198.51.100.1/24", "dev", "world0")
    host.run("ip", "route", "add", "default", "via", "198.51.100.9", "dev", "world0")
    host.run("ip", "addr", "add", "2001:db8::1/64", "dev", uplink, "nodad")
    assert detect_underlay(netlink).name == "world0"
    address = choose_address("up*", list_device_addresses())
    assert str(address) == "192.0.2.1"
    assert detect_underlay(netlink, address).name == uplink
    both = {str(own) for own in read_underlay(netlink, address).addresses}
    assert both == {"192.0.2.1", "2001:db8::1"}


def test_own_blocks_are_unreachable_where_no_pod_is(
    host: Namespace, netlink: NetlinkSocket
) -> None:
    host.run(*["ip", "route", "add", "unreachable", "10.1.0.0/16", "proto", "static"])
    blocks = [ipaddress.ip_network("10.244.1.0/24"), ipaddress.ip_network("fd00:244:1::/64")]
    for wanted in (blocks, blocks, blocks[:1], []):
        ensure_block_routes(netlink, wanted)
        assert [route.destination for route in list_own_routes(netlink)] == wanted
    assert host.ip("route", "show", "10.1.0.0/16")[0]["type"] == "unreachable"
