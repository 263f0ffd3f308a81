"""Every builder against two judges: iproute2, which reads the kernel, and pyroute2, which reads
our bytes.
"""

import ipaddress
from collections.abc import Callable
from typing import Any

import pytest
from pyroute2.netlink.rtnl.fibmsg import fibmsg
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from podwire.datapath.device import HostSide
from podwire.kernel.netlink import NetlinkSocket, Request
from podwire.kernel.rtnl.link import (
    LinkEnd,
    create_link,
    create_veth,
    delete_group,
    delete_link,
    get_link,
    list_links,
    parse_mac,
    read_link,
    set_link,
)
from podwire.kernel.rtnl.route import (
    AF_INET,
    AF_INET6,
    IPV6_DEFAULT_METRIC,
    ROUTE_UNREACHABLE,
    InterfaceAddress,
    Neighbour,
    Route,
    SourceRule,
    add_address,
    add_route,
    add_rule,
    delete_address,
    delete_neighbour,
    delete_route,
    list_addresses,
    list_neighbours,
    list_routes,
    list_rules,
    read_address,
    read_neighbour,
    read_route,
    read_source_rule,
    set_neighbour,
)
from podwire.kernel.rtnl.tc import (
    FROM_POD_HOOK,
    TO_POD_HOOK,
    TokenBucket,
    add_clsact,
    delete_clsact,
    delete_token_bucket,
    list_filters,
    list_queues,
    read_bpf_filter,
    read_queue,
    set_bpf_filter,
    set_token_bucket,
)
from podwire.model.errors import KernelFailure
from tests.kernel.conftest import Namespace

INDEX = 1_000_002
PEER = 1_000_003
MAC = "0e:70:00:00:00:01"
PEER_MAC = "0a:70:00:00:00:01"
V4 = ipaddress.IPv4Address("10.244.1.7")
V6 = ipaddress.IPv6Address("fd00:244::7")
GATEWAY4 = ipaddress.IPv4Address("169.254.1.1")
GATEWAY6 = ipaddress.IPv6Address("fe80::1")


@pytest.fixture
def pair(host: Namespace, netlink: NetlinkSocket, pod: Namespace) -> None:
    """A pair from host to pod, the host's end up."""
    netlink.execute(
        [
            create_veth(
                LinkEnd("pwhost", INDEX, MAC, 1450, group=77, queues=1),
                LinkEnd("eth0", PEER, PEER_MAC, 1450),
                pod.fd.fileno(),
            ),
            set_link(INDEX, up=True),
        ]
    )


def _subset(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    return {key: found.get(key) for key in wanted}


@pytest.mark.usefixtures("pair")
def test_pair_is_born_with_indexes_macs_mtu_group_and_in_its_namespace(
    host: Namespace, pod: Namespace
) -> None:
    wanted = {
        "ifindex": INDEX,
        "address": MAC,
        "mtu": 1450,
        "group": "77",
        "num_tx_queues": 1,
        "num_rx_queues": 1,
    }
    assert _subset(host.ip("link", "show", "pwhost")[0], wanted) == wanted
    inside = {"ifindex": PEER, "address": PEER_MAC, "mtu": 1450, "link_index": INDEX}
    assert _subset(pod.ip("link", "show", "eth0")[0], inside) == inside


LINK_CHANGES = [
    pytest.param({"alias": "podwire:n:1"}, {"ifalias": "podwire:n:1"}, id="alias"),
    pytest.param({"mtu": 1280}, {"mtu": 1280}, id="mtu"),
    pytest.param({"mac": "02:00:00:00:00:09"}, {"address": "02:00:00:00:00:09"}, id="mac"),
    pytest.param({"group": 0x70770002}, {"group": "1886846978"}, id="group"),
    pytest.param({"queue_length": 7}, {"txqlen": 7}, id="queue-length"),
    pytest.param({"no_link_local": True}, {"inet6_addr_gen_mode": "none"}, id="no-link-local"),
    pytest.param({"up": False}, {"operstate": "DOWN"}, id="down"),
]


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize(("change", "shown"), LINK_CHANGES)
def test_change_of_a_device_is_what_iproute2_shows(
    host: Namespace, netlink: NetlinkSocket, change: dict[str, Any], shown: dict[str, Any]
) -> None:
    netlink.execute([set_link(INDEX, **change)])
    assert _subset(host.ip("link", "show", "pwhost")[0], shown) == shown


@pytest.mark.usefixtures("pair")
def test_reading_a_device_agrees_with_iproute2(host: Namespace, netlink: NetlinkSocket) -> None:
    netlink.execute([set_link(INDEX, alias="podwire:n:1", no_link_local=True)])
    link = read_link(netlink.get(get_link(INDEX)))
    shown = host.ip("link", "show", "pwhost")[0]
    assert link.name == shown["ifname"]
    assert link.alias == shown["ifalias"]
    assert link.kind == shown["linkinfo"]["info_kind"]
    assert (link.mac, link.mtu, link.group) == (shown["address"], shown["mtu"], 77)
    assert (link.up, link.carrier, link.peer_index) == (True, False, PEER)
    assert link.addr_gen_mode == 1
    assert link == read_link(netlink.get(get_link(name="pwhost")))


@pytest.mark.usefixtures("pair")
def test_listing_devices_by_kind_leaves_the_others_out(netlink: NetlinkSocket) -> None:
    everything = {read_link(body).name for body in netlink.dump(list_links())}
    pairs = {read_link(body).name for body in netlink.dump(list_links(kind="veth"))}
    assert (everything, pairs) == ({"lo", "pwhost"}, {"pwhost"})


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize(
    "request_", [delete_link(INDEX), delete_link(name="pwhost"), delete_group(77)]
)
def test_deletion_takes_both_ends(
    host: Namespace, pod: Namespace, netlink: NetlinkSocket, request_: Request
) -> None:
    netlink.execute([request_])
    assert [link["ifname"] for link in host.ip("link")] == ["lo"]
    assert [link["ifname"] for link in pod.ip("link")] == ["lo"]


def test_other_kinds_and_rename(host: Namespace, netlink: NetlinkSocket) -> None:
    netlink.execute([create_link("bridge", LinkEnd("pwbr", INDEX))])
    netlink.execute([set_link(INDEX, rename="pwbr2")])
    assert host.ip("link", "show", "pwbr2")[0]["linkinfo"]["info_kind"] == "bridge"


@pytest.mark.usefixtures("pair")
def test_a_device_under_a_bridge_names_its_master(netlink: NetlinkSocket) -> None:
    netlink.execute([create_link("bridge", LinkEnd("pwbr", 55)), set_link(INDEX, master=55)])
    assert read_link(netlink.get(get_link(INDEX))).master == 55


@pytest.mark.parametrize("text", ["", "0e:70", "0e:70:00:00:00:01:02", "zz:70:00:00:00:01"])
def test_bad_macs_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_mac(text)


def test_naming_a_device_twice_or_not_at_all_is_refused() -> None:
    for wrong in ({"index": 1, "name": "lo"}, {}):
        with pytest.raises(ValueError, match="not by both or neither"):
            get_link(**wrong)  # type: ignore[arg-type]


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("address", [V4, V6], ids=["ipv4", "ipv6"])
def test_address_is_usable_at_once_and_brings_no_route(
    host: Namespace, netlink: NetlinkSocket, address: ipaddress.IPv4Address
) -> None:
    wanted = InterfaceAddress(INDEX, address, address.max_prefixlen)
    netlink.execute([add_address(wanted)])
    shown = host.ip("addr", "show", "dev", "pwhost")[0]["addr_info"][0]
    assert (shown["local"], shown["prefixlen"]) == (str(address), address.max_prefixlen)
    assert shown["noprefixroute"]
    assert "tentative" not in shown
    assert [read_address(body) for body in netlink.dump(list_addresses(INDEX))] == [wanted]
    netlink.execute([delete_address(wanted)])
    assert netlink.dump(list_addresses(INDEX)) == []


ROUTES = [
    pytest.param(
        Route(ipaddress.ip_network("10.244.1.7/32"), INDEX, protocol=199),
        {"dst": "10.244.1.7", "dev": "pwhost", "scope": "link"},
        id="ipv4-direct",
    ),
    pytest.param(
        Route(
            ipaddress.ip_network("10.244.1.7/32"),
            INDEX,
            source=ipaddress.ip_address("10.9.0.1"),
            protocol=199,
        ),
        {"dst": "10.244.1.7", "prefsrc": "10.9.0.1"},
        id="ipv4-with-source",
    ),
    pytest.param(
        Route(
            ipaddress.ip_network("0.0.0.0/0"),
            INDEX,
            gateway=GATEWAY4,
            protocol=199,
            metric=5,
            mtu=1400,
            onlink=True,
        ),
        {"dst": "default", "gateway": "169.254.1.1", "metric": 5},
        id="ipv4-default",
    ),
    pytest.param(
        Route(ipaddress.ip_network("10.1.0.0/16"), INDEX, table=1_000_003, protocol=199),
        {"dst": "10.1.0.0/16"},
        id="ipv4-big-table",
    ),
    pytest.param(
        Route(ipaddress.ip_network("10.244.1.0/24"), protocol=199, kind=ROUTE_UNREACHABLE),
        {"type": "unreachable", "dst": "10.244.1.0/24"},
        id="ipv4-unreachable",
    ),
    pytest.param(
        Route(
            ipaddress.ip_network("fd00:244::7/128"),
            INDEX,
            source=ipaddress.ip_address("fd99::1"),
            protocol=199,
            metric=IPV6_DEFAULT_METRIC,
        ),
        {"dst": "fd00:244::7", "dev": "pwhost", "prefsrc": "fd99::1"},
        id="ipv6-with-source",
    ),
    pytest.param(
        Route(
            ipaddress.ip_network("::/0"),
            INDEX,
            gateway=GATEWAY6,
            protocol=199,
            metric=9,
            mtu=1400,
            onlink=True,
        ),
        {"dst": "default", "gateway": "fe80::1", "metric": 9},
        id="ipv6-default",
    ),
]


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize(("route", "shown"), ROUTES)
def test_route_is_what_iproute2_shows_and_what_we_read_back(
    host: Namespace, netlink: NetlinkSocket, route: Route, shown: dict[str, Any]
) -> None:
    family = "-4" if route.destination.version == 4 else "-6"
    number = AF_INET if route.destination.version == 4 else AF_INET6
    netlink.execute([add_route(route)])
    found = host.ip(family, "route", "show", "table", str(route.table), "proto", "199")
    assert [_subset(present, shown) for present in found] == [shown]
    listed = [read_route(body) for body in netlink.dump(list_routes(number, protocol=199))]
    assert [
        (present.destination, present.gateway, present.source, present.mtu) for present in listed
    ] == [(route.destination, route.gateway, route.source, route.mtu)]
    assert (listed[0].table, listed[0].kind) == (route.table, route.kind)
    with pytest.raises(KernelFailure, match="EEXIST"):
        netlink.execute([add_route(route)])
    netlink.execute([add_route(route, replace=True), delete_route(route)])
    with pytest.raises(KernelFailure, match="ESRCH"):
        netlink.execute([delete_route(route)])


@pytest.mark.usefixtures("pair")
def test_kernel_filters_routes_by_device_and_protocol(netlink: NetlinkSocket) -> None:
    ours = Route(ipaddress.ip_network("10.244.1.7/32"), INDEX, protocol=199)
    theirs = Route(ipaddress.ip_network("10.244.1.8/32"), INDEX, protocol=4)
    elsewhere = Route(ipaddress.ip_network("10.244.1.9/32"), 1, protocol=199)
    netlink.execute([add_route(route) for route in (ours, theirs, elsewhere)])
    filtered = netlink.dump(list_routes(AF_INET, protocol=199, index=INDEX))
    assert [read_route(body).destination for body in filtered] == [ours.destination]


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("address", [V4, V6], ids=["ipv4", "ipv6"])
def test_neighbour_is_permanent_and_may_be_set_again(
    host: Namespace, netlink: NetlinkSocket, address: ipaddress.IPv4Address
) -> None:
    for mac in ("02:00:00:00:00:01", "02:00:00:00:00:02"):
        wanted = Neighbour(INDEX, address, mac)
        netlink.execute([set_neighbour(wanted)])
        shown = host.ip("neigh", "show", "dev", "pwhost")[0]
        assert (shown["dst"], shown["lladdr"], shown["state"]) == (
            str(address),
            mac,
            ["PERMANENT"],
        )
        assert [read_neighbour(body) for body in netlink.dump(list_neighbours(INDEX))] == [wanted]
    netlink.execute([delete_neighbour(wanted)])
    assert netlink.dump(list_neighbours(INDEX)) == []


@pytest.mark.parametrize("network", ["10.244.1.7/32", "fd00:244::7/128"])
def test_source_rule_is_what_iproute2_shows(
    host: Namespace, netlink: NetlinkSocket, network: str
) -> None:
    rule = SourceRule(ipaddress.ip_network(network), 1_000_003, 1990, 199)
    family, number = ("-4", AF_INET) if rule.source.version == 4 else ("-6", AF_INET6)
    netlink.execute([add_rule(rule)])
    shown = [rule for rule in host.ip(family, "rule") if rule["priority"] == 1990]
    assert [(known["src"], known["table"]) for known in shown] == [
        (str(rule.source.network_address), "1000003")
    ]
    listed = [read_source_rule(body) for body in netlink.dump(list_rules(number))]
    assert [known for known in listed if known is not None] == [rule]


@pytest.mark.usefixtures("pair")
def test_programs_are_attached_replaced_and_read_back(
    host: Namespace, netlink: NetlinkSocket, side: HostSide
) -> None:
    programs = side.programs
    netlink.execute(
        [
            add_clsact(INDEX),
            set_bpf_filter(INDEX, FROM_POD_HOOK, programs.from_pod_fd, "from_pod"),
            set_bpf_filter(INDEX, TO_POD_HOOK, programs.to_pod_fd, "to_pod"),
        ]
    )
    for direction, hook, number in (
        ("ingress", FROM_POD_HOOK, programs.from_pod_id),
        ("egress", TO_POD_HOOK, programs.to_pod_id),
    ):
        shown = host.tc("filter", "show", "dev", "pwhost", direction)
        options = [filter_["options"] for filter_ in shown if "options" in filter_]
        assert [(option["prog"]["id"], option["direct-action"]) for option in options] == [
            (number, True)
        ]
        listed = [read_bpf_filter(body) for body in netlink.dump(list_filters(INDEX, hook))]
        found = [filter_ for filter_ in listed if filter_ is not None]
        assert [(filter_.program_id, filter_.priority, filter_.handle) for filter_ in found] == [
            (number, 1, 1)
        ]
        assert found[0].direct_action
    netlink.execute([set_bpf_filter(INDEX, FROM_POD_HOOK, programs.to_pod_fd, "from_pod")])
    shown = host.tc("filter", "show", "dev", "pwhost", "ingress")
    assert [filter_["options"]["prog"]["id"] for filter_ in shown if "options" in filter_] == [
        programs.to_pod_id
    ]
    netlink.execute([delete_clsact(INDEX)])
    assert host.tc("filter", "show", "dev", "pwhost", "egress") == []


BUCKETS = [
    pytest.param(TokenBucket(1_250_000, 65_536, 100_000), id="10-mbit"),
    pytest.param(TokenBucket(125, 2_000, 4_000), id="1-kbit"),
    pytest.param(TokenBucket(5_000_000_000, 10_000_000, 20_000_000), id="40-gbit"),
]


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("bucket", BUCKETS)
def test_token_bucket_is_what_tc_shows(
    host: Namespace, netlink: NetlinkSocket, bucket: TokenBucket
) -> None:
    netlink.execute([set_token_bucket(INDEX, bucket), set_token_bucket(INDEX, bucket)])
    shown = host.tc("qdisc", "show", "dev", "pwhost")[0]
    assert (shown["kind"], shown["handle"], shown["root"]) == ("tbf", "777:", True)
    options = shown["options"]
    assert options["rate"] == bucket.rate_bytes_per_s
    assert options["burst"] == pytest.approx(bucket.burst_bytes, rel=0.02)
    queue = next(
        one for body in netlink.dump(list_queues(INDEX)) if (one := read_queue(body)).index == INDEX
    )
    assert (queue.kind, queue.parent) == ("tbf", 0xFFFFFFFF)
    assert queue.rate_bytes_per_s == bucket.rate_bytes_per_s
    assert queue.limit_bytes == bucket.limit_bytes
    netlink.execute([delete_token_bucket(INDEX)])
    assert host.tc("qdisc", "show", "dev", "pwhost")[0]["kind"] == "noqueue"


def _decoded(message: type[Any], request: Request) -> dict[str, Any]:
    decoded = message(_frame(request))
    decoded.decode()
    found = dict(decoded)
    found["attributes"] = dict(tuple(pair) for pair in decoded["attrs"])
    return found


def _frame(request: Request) -> bytes:
    header = (16 + len(request.body)).to_bytes(4, "little")
    return header + request.type.to_bytes(2, "little") + bytes(10) + request.body


DECODED = [
    pytest.param(
        ifinfmsg,
        set_link(7, up=True, alias="x", mtu=1400, group=3),
        {"index": 7, "flags": 1, "change": 1},
        {"IFLA_IFALIAS": "x", "IFLA_MTU": 1400, "IFLA_GROUP": 3},
        id="link",
    ),
    pytest.param(
        ifaddrmsg,
        add_address(InterfaceAddress(7, V4, 32)),
        {"family": 2, "prefixlen": 32, "index": 7},
        {"IFA_LOCAL": "10.244.1.7", "IFA_FLAGS": 0x202},
        id="address",
    ),
    pytest.param(
        rtmsg,
        add_route(Route(ipaddress.ip_network("::/0"), 7, GATEWAY6, protocol=199, onlink=True)),
        {"family": 10, "dst_len": 0, "proto": 199, "table": 254, "flags": 4},
        {"RTA_OIF": 7, "RTA_GATEWAY": "fe80::1"},
        id="route",
    ),
    pytest.param(
        ndmsg,
        set_neighbour(Neighbour(7, V6, MAC)),
        {"family": 10, "ifindex": 7, "state": 0x80},
        {"NDA_DST": "fd00:244::7", "NDA_LLADDR": MAC},
        id="neighbour",
    ),
    pytest.param(
        fibmsg,
        add_rule(SourceRule(ipaddress.ip_network("10.244.1.7/32"), 9, 1990, 199)),
        {"family": 2, "src_len": 32, "action": 1},
        {"FRA_SRC": "10.244.1.7", "FRA_PRIORITY": 1990, "FRA_TABLE": 9},
        id="rule",
    ),
    pytest.param(
        tcmsg,
        add_clsact(7),
        {"index": 7, "handle": 0xFFFF0000, "parent": 0xFFFFFFF1},
        {"TCA_KIND": "clsact"},
        id="clsact",
    ),
    pytest.param(
        tcmsg,
        set_bpf_filter(7, FROM_POD_HOOK, 3, "from_pod"),
        {"index": 7, "handle": 1, "parent": 0xFFFFFFF2, "info": 1 << 16 | 0x0300},
        {"TCA_KIND": "bpf"},
        id="filter",
    ),
]


@pytest.mark.parametrize(("message", "request_", "header", "attributes"), DECODED)
def test_bytes_are_what_another_library_reads(
    message: Callable[..., Any],
    request_: Request,
    header: dict[str, Any],
    attributes: dict[str, Any],
) -> None:
    found = _decoded(message, request_)  # type: ignore[arg-type]
    assert _subset(found, header) == header
    assert _subset(found["attributes"], attributes) == attributes
