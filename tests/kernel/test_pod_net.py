"""The pod's side: configured in one visit, several networks beside each other, every difference
named.
"""

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator

import pytest

from podwire.datapath.device import HostSide, create_device
from podwire.datapath.pod_net import (
    RULE_PRIORITY,
    compare_pod,
    configure_pod,
    plan_family,
)
from podwire.kernel import netns
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.sysctl import write_sysctl
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import KernelFailure
from tests.kernel.conftest import NODE_IPV4, NODE_IPV6, DeviceRig, Namespace, RecordMaker, pings
from tests.waiting import wait_for


@pytest.fixture
def record(
    netlink: NetlinkSocket, pod: Namespace, side: HostSide, make_record: RecordMaker
) -> EndpointRecord:
    """An attached pod of both families."""
    made = make_record(1, namespace=pod)
    create_device(netlink, made, pod.pod, side)
    configure_pod(made, pod.pod)
    return made


@pytest.mark.parametrize("families", ["4", "6", "46"])
def test_a_configured_pod_compares_equal(rig: DeviceRig, families: str) -> None:
    record = rig.make_record(1, namespace=rig.pod, families=families)
    rig.create(record)
    configure_pod(record, rig.pod.pod)
    assert compare_pod(record, rig.pod.pod) == []


def test_iproute2_sees_the_plan(pod: Namespace, record: EndpointRecord) -> None:
    device = record.device
    link = pod.ip("link", "show", "eth0")[0]
    assert (link["ifindex"], link["address"], link["mtu"]) == (
        device.pod_ifindex,
        device.pod_mac,
        device.mtu,
    )
    # Kernels before 6.8 show the carrier when a thread of theirs has acted on it.
    wait_for(
        lambda: pod.ip("link", "show", "eth0")[0]["operstate"] == "UP", "the pod's end to be up"
    )
    addresses = [
        (address["local"], address["prefixlen"], address.get("tentative", False))
        for address in pod.ip("addr", "show", "eth0")[0]["addr_info"]
    ]
    assert addresses == [(record.ipv4, 32, False), (record.ipv6, 128, False)]
    assert [(route["dst"], route.get("gateway")) for route in pod.ip("-4", "route")] == [
        ("default", "169.254.1.1"),
        ("169.254.1.1", None),
    ]
    assert {(route["dst"], route.get("gateway")) for route in pod.ip("-6", "route")} == {
        ("default", "fe80::1"),
        ("fe80::1", None),
    }
    assert {
        (neighbour["dst"], neighbour["lladdr"], neighbour["state"][0])
        for neighbour in pod.ip("neigh")
    } == {
        ("169.254.1.1", device.host_mac, "PERMANENT"),
        ("fe80::1", device.host_mac, "PERMANENT"),
    }
    assert "UP" in pod.ip("link", "show", "lo")[0]["flags"]


def test_host_and_pod_reach_each_other(
    host: Namespace, pod: Namespace, record: EndpointRecord
) -> None:
    for address in record.addresses:
        assert pings(host, address)
    assert pings(pod, NODE_IPV4)
    assert pings(pod, NODE_IPV6)


def test_ipv6_switched_off_by_the_runtime_is_switched_on_where_it_is_wanted(rig: DeviceRig) -> None:
    with netns.namespace(rig.pod.fd.fileno()):
        for name in ("default", "all"):
            write_sysctl("1", "ipv6", "conf", name, "disable_ipv6")
    record = rig.make_record(1, namespace=rig.pod)
    rig.create(record)
    configure_pod(record, rig.pod.pod)
    assert compare_pod(record, rig.pod.pod) == []


def test_ipv6_switched_off_stays_off_for_a_pod_without_it(rig: DeviceRig) -> None:
    with netns.namespace(rig.pod.fd.fileno()):
        write_sysctl("1", "ipv6", "conf", "default", "disable_ipv6")
    record = rig.make_record(1, namespace=rig.pod, families="4")
    rig.create(record)
    configure_pod(record, rig.pod.pod)
    assert rig.pod.run("sysctl", "-n", "net.ipv6.conf.eth0.disable_ipv6").strip() == "1"


@pytest.mark.parametrize(("route_mtu", "shown"), [(0, None), (1450, None), (1400, 1400)])
def test_route_mtu_is_on_the_default_routes_where_it_differs(
    rig: DeviceRig, route_mtu: int, shown: int | None
) -> None:
    record = rig.make_record(1, namespace=rig.pod)
    rig.create(record)
    configure_pod(record, rig.pod.pod, route_mtu=route_mtu)
    for family in ("-4", "-6"):
        default = rig.pod.ip(family, "route", "show", "default")[0]
        metrics = default.get("metrics", [{}])[0]
        assert metrics.get("mtu") == shown
    assert compare_pod(record, rig.pod.pod, route_mtu=route_mtu) == []
    if shown is not None:
        assert any(
            "default" in text or "::/0" in text or "0.0.0.0/0" in text
            for text in compare_pod(record, rig.pod.pod)
        )


DAMAGES = [
    pytest.param(["ip", "link", "set", "eth0", "mtu", "1300"], "mtu", id="mtu"),
    pytest.param(["ip", "link", "set", "eth0", "address", "02:00:00:00:00:07"], "mac", id="mac"),
    pytest.param(["ip", "link", "set", "eth0", "down"], "state", id="down"),
    pytest.param(["ip", "addr", "flush", "dev", "eth0"], "address 10.244.1.2", id="no-address"),
    pytest.param(
        ["ip", "-6", "addr", "del", "fd00:244::2/128", "dev", "eth0"],
        "address fd00:244::2",
        id="no-address6",
    ),
    pytest.param(["ip", "route", "del", "default"], "0.0.0.0/0", id="no-default"),
    pytest.param(["ip", "-6", "route", "del", "default"], "::/0", id="no-default6"),
    pytest.param(["ip", "route", "del", "169.254.1.1"], "169.254.1.1/32", id="no-gateway-route"),
    pytest.param(
        ["ip", "neigh", "del", "169.254.1.1", "dev", "eth0"],
        "neighbour 169.254.1.1",
        id="no-neighbour",
    ),
    pytest.param(
        ["ip", "neigh", "replace", "fe80::1", "dev", "eth0", "lladdr", "02:00:00:00:00:01"],
        "neighbour fe80::1",
        id="neighbour-elsewhere",
    ),
    pytest.param(
        [
            *("ip", "route", "change", "default", "via", "169.254.1.1", "dev", "eth0"),
            *("onlink", "proto", "199", "mtu", "1300"),
        ],
        "another mtu",
        id="route-mtu",
    ),
    pytest.param(["ip", "link", "set", "lo", "down"], "'lo'", id="loopback-down"),
    pytest.param(["ip", "link", "del", "eth0"], "missing", id="no-device"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_damage_inside_the_pod_is_named(
    pod: Namespace, record: EndpointRecord, damage: list[str], named: str
) -> None:
    pod.run(*damage)
    differences = compare_pod(record, pod.pod)
    assert any(named in text for text in differences), differences


def test_an_occupied_address_fails_with_the_kernels_words(rig: DeviceRig) -> None:
    record = rig.make_record(1, namespace=rig.pod)
    rig.create(record)
    configure_pod(record, rig.pod.pod)
    with pytest.raises(KernelFailure, match="add address"):
        configure_pod(record, rig.pod.pod)


@pytest.fixture
def second(
    netlink: NetlinkSocket,
    pod: Namespace,
    side: HostSide,
    make_record: RecordMaker,
    record: EndpointRecord,
) -> EndpointRecord:
    """A second network of the same container."""
    made = make_record(2, namespace=pod, if_name="net1")
    create_device(netlink, made, pod.pod, side)
    configure_pod(made, pod.pod)
    return made


def test_a_second_network_stands_beside_the_first(
    pod: Namespace, record: EndpointRecord, second: EndpointRecord
) -> None:
    assert compare_pod(record, pod.pod) == []
    assert compare_pod(second, pod.pod) == []
    for family in ("-4", "-6"):
        defaults = pod.ip(family, "route", "show", "default")
        assert [route["dev"] for route in defaults] == ["eth0", "net1"]
        rules = [rule for rule in pod.ip(family, "rule") if rule["priority"] == RULE_PRIORITY]
        assert [int(rule["table"]) for rule in rules] == [second.device.pod_ifindex]


def test_each_network_is_left_by_its_own_interface(
    pod: Namespace, record: EndpointRecord, second: EndpointRecord
) -> None:
    for one, name in ((record, "eth0"), (second, "net1")):
        for source, target in ((one.ipv4, "192.0.2.99"), (one.ipv6, "2001:db8::99")):
            got = pod.ip("route", "get", target, "from", source)
            assert got[0]["dev"] == name, got


def test_host_reaches_both_networks_of_a_container(
    host: Namespace, record: EndpointRecord, second: EndpointRecord
) -> None:
    for address in (*record.addresses, *second.addresses):
        assert pings(host, address)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (["ip", "rule", "del", "from", "10.244.1.3"], "rule for source 10.244.1.3"),
        (["ip", "route", "flush", "table", "1048581"], "table 1048581"),
        (["ip", "route", "del", "default", "dev", "net1"], "table 254"),
    ],
    ids=["no-rule", "no-table", "no-further-default"],
)
def test_damage_of_a_second_network_is_named(
    pod: Namespace, second: EndpointRecord, damage: list[str], named: str
) -> None:
    pod.run(*damage)
    differences = compare_pod(second, pod.pod)
    assert any(named in text for text in differences), differences


def test_another_plugins_default_route_is_left_alone(rig: DeviceRig) -> None:
    rig.pod.run("ip", "link", "set", "lo", "up")
    rig.pod.run("ip", "route", "add", "default", "dev", "lo", "proto", "static")
    record = rig.make_record(1, namespace=rig.pod, families="4")
    rig.create(record)
    configure_pod(record, rig.pod.pod)
    assert [route["dev"] for route in rig.pod.ip("-4", "route", "show", "default")] == [
        "lo",
        "eth0",
    ]
    assert compare_pod(record, rig.pod.pod) == []


def test_a_tcp_connection_works_as_soon_as_the_pod_is_configured(rig: DeviceRig) -> None:
    """No duplicate address detection, no resolution, no pause: bind and connect at once, both
    families.
    """
    record = rig.make_record(1, namespace=rig.pod)
    rig.create(record)
    configure_pod(record, rig.pod.pod)
    for address in record.addresses:
        with _echo_server(rig.pod, address) as port, socket.socket(_family(address)) as client:
            client.settimeout(20)
            client.connect((str(address), port))
            client.sendall(b"hello")
            assert client.recv(16) == b"hello"


def _family(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> socket.AddressFamily:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


@contextlib.contextmanager
def _echo_server(
    pod: Namespace, address: ipaddress.IPv4Address | ipaddress.IPv6Address
) -> Iterator[int]:
    with netns.namespace(pod.fd.fileno()):
        server = socket.create_server((str(address), 0), family=_family(address))

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(connection.recv(16))

    server.settimeout(20)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        thread.join()
        server.close()


def test_planning_is_pure_and_names_both_families(make_record: RecordMaker) -> None:
    record = make_record(1)
    plans = [plan_family(record.device, address) for address in record.addresses]
    assert [str(plan.address.address) for plan in plans] == [record.ipv4, record.ipv6]
    assert [str(plan.default_route.gateway) for plan in plans] == ["169.254.1.1", "fe80::1"]
    assert all(plan.neighbour.mac == record.device.host_mac for plan in plans)
