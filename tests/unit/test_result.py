"""Results in every CNI version: the exact shapes, and back again."""

import json
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.cni.result import decode_result, encode_result
from podwire.model.errors import InvalidConfiguration, InvalidRequest, UndecodableRequest
from podwire.model.request import (
    AttachedAddress,
    AttachedRoute,
    AttachResult,
    Dns,
    Interface,
)
from podwire.model.wire import SUPPORTED_CNI_VERSIONS

GATEWAY4, GATEWAY6 = IPv4Address("169.254.1.1"), IPv6Address("fe80::1")
RESULT = AttachResult(
    interfaces=(
        Interface("pw0123456789ab", "0e:70:00:00:00:01", 1500),
        Interface("eth0", "0a:70:00:00:00:01", 1500, "/run/netns/a"),
    ),
    ips=(
        AttachedAddress(IPv4Address("10.244.1.7"), 32, GATEWAY4, 1),
        AttachedAddress(IPv6Address("fd00:1::7"), 128, GATEWAY6, 1),
    ),
    routes=(
        AttachedRoute(ip_network("0.0.0.0/0"), GATEWAY4, 1450),
        AttachedRoute(ip_network("::/0"), GATEWAY6),
    ),
)
OLD = {
    "ip4": {
        "ip": "10.244.1.7/32",
        "gateway": "169.254.1.1",
        "routes": [{"dst": "0.0.0.0/0", "gw": "169.254.1.1"}],
    },
    "ip6": {
        "ip": "fd00:1::7/128",
        "gateway": "fe80::1",
        "routes": [{"dst": "::/0", "gw": "fe80::1"}],
    },
    "dns": {},
}
HOST = {"name": "pw0123456789ab", "mac": "0e:70:00:00:00:01"}
POD = {"name": "eth0", "mac": "0a:70:00:00:00:01", "sandbox": "/run/netns/a"}
IP4 = {"interface": 1, "address": "10.244.1.7/32", "gateway": "169.254.1.1"}
IP6 = {"interface": 1, "address": "fd00:1::7/128", "gateway": "fe80::1"}
ROUTE4 = {"dst": "0.0.0.0/0", "gw": "169.254.1.1"}
ROUTE6 = {"dst": "::/0", "gw": "fe80::1"}
LISTS = {
    "interfaces": [HOST, POD],
    "ips": [{"version": "4", **IP4}, {"version": "6", **IP6}],
    "routes": [ROUTE4, ROUTE6],
    "dns": {},
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.1.0": OLD,
    "0.2.0": OLD,
    "0.3.0": LISTS,
    "0.3.1": LISTS,
    "0.4.0": LISTS,
    "1.0.0": {**LISTS, "ips": [IP4, IP6]},
    "1.1.0": {
        "interfaces": [{**HOST, "mtu": 1500}, {**POD, "mtu": 1500}],
        "ips": [IP4, IP6],
        "routes": [{**ROUTE4, "mtu": 1450}, ROUTE6],
        "dns": {},
    },
}


def test_every_supported_version_has_its_shape_here() -> None:
    assert tuple(SHAPES) == SUPPORTED_CNI_VERSIONS


@pytest.mark.parametrize("version", SHAPES)
def test_a_result_is_written_in_the_asked_version(version: str) -> None:
    assert json.loads(encode_result(version, RESULT)) == {"cniVersion": version, **SHAPES[version]}


def test_the_old_shape_keeps_the_first_address_of_each_family() -> None:
    more = (*RESULT.ips, AttachedAddress(IPv4Address("10.9.9.9"), 32))
    written = json.loads(encode_result("0.2.0", msgspec.structs.replace(RESULT, ips=more)))
    assert written["ip4"]["ip"] == "10.244.1.7/32"


LATER = {
    "cniVersion": "1.1.0",
    "interfaces": [{"name": "eth0", "mac": None, "socketPath": "/x", "pciID": "0000:00"}],
    "ips": [{"version": 4, "interface": -1, "address": "10.0.0.1/24", "gateway": None}],
    "routes": [{"dst": "10.0.0.9/8", "advmss": 1400, "priority": 5, "table": 100, "scope": 253}],
    "dns": {"nameservers": ["10.0.0.10"], "domain": None, "search": ["a"], "options": None},
    "code": None,
}


def test_what_other_plugins_write_is_read() -> None:
    assert decode_result("1.1.0", LATER) == AttachResult(
        interfaces=(Interface("eth0"),),
        ips=(AttachedAddress(IPv4Address("10.0.0.1"), 24),),
        routes=(AttachedRoute(ip_network("10.0.0.0/8")),),
        dns=Dns(nameservers=("10.0.0.10",), search=("a",)),
    )


@pytest.mark.parametrize("raw", [{}, {"ips": None, "interfaces": None, "routes": None}])
def test_an_empty_result_is_read(raw: dict[str, Any]) -> None:
    assert decode_result("1.0.0", raw) == AttachResult()


BAD: list[tuple[str, type[InvalidRequest], object]] = [
    ("no object", UndecodableRequest, []),
    ("interfaces no list", UndecodableRequest, {"interfaces": {}}),
    ("name a number", UndecodableRequest, {"interfaces": [{"name": 5}]}),
    ("mtu a text", UndecodableRequest, {"interfaces": [{"name": "a", "mtu": "1500"}]}),
    ("address missing", UndecodableRequest, {"ips": [{}]}),
    ("address a number", UndecodableRequest, {"ips": [{"address": 1}]}),
    ("address of nothing", InvalidConfiguration, {"ips": [{"address": "x"}]}),
    ("index beyond", InvalidConfiguration, {"ips": [{"address": "10.0.0.1", "interface": 0}]}),
    ("index below", InvalidConfiguration, {"ips": [{"address": "10.0.0.1", "interface": -2}]}),
    ("route to nowhere", InvalidConfiguration, {"routes": [{"dst": "x"}]}),
    ("gateway of nothing", InvalidConfiguration, {"routes": [{"dst": "::/0", "gw": "x"}]}),
    ("old shape", InvalidConfiguration, {"ip4": {"ip": "fe80"}}),
]


@pytest.mark.parametrize(("kind", "raw"), [r[1:] for r in BAD], ids=[r[0] for r in BAD])
def test_what_is_no_result_is_refused(kind: type[InvalidRequest], raw: object) -> None:
    with pytest.raises(kind, match=r"is no result of CNI 1\.1\.0"):
        decode_result("1.1.0", raw)


ADDRESSES = st.ip_addresses(v=4) | st.ip_addresses(v=6)
TEXTS = st.text("abcdef", max_size=5)


@st.composite
def results(draw: st.DrawFn) -> AttachResult:
    """Any result that the newest version can carry."""
    interfaces = tuple(
        draw(st.lists(st.builds(Interface, TEXTS, TEXTS, st.integers(0, 9), TEXTS), max_size=3))
    )
    indexes = st.none() | (st.integers(0, len(interfaces) - 1) if interfaces else st.none())
    gateways = st.none() | ADDRESSES
    ips = st.builds(AttachedAddress, ADDRESSES, st.integers(0, 32), gateways, indexes)
    routes = st.builds(AttachedRoute, ADDRESSES.map(ip_network), gateways, st.integers(0, 9))
    texts = st.lists(TEXTS, max_size=2).map(tuple)
    return AttachResult(
        interfaces,
        tuple(draw(st.lists(ips, max_size=3))),
        tuple(draw(st.lists(routes, max_size=3))),
        draw(st.builds(Dns, texts, TEXTS, texts, texts)),
    )


@given(results())
def test_what_is_written_is_read_back(result: AttachResult) -> None:
    assert decode_result("1.1.0", json.loads(encode_result("1.1.0", result))) == result


@given(results(), st.sampled_from(SUPPORTED_CNI_VERSIONS))
def test_every_version_of_a_result_is_read_back_without_inventing(
    result: AttachResult, version: str
) -> None:
    back = decode_result(version, json.loads(encode_result(version, result)))
    assert set(back.interfaces) <= {
        msgspec.structs.replace(interface, mtu=mtu)
        for interface in result.interfaces
        for mtu in (0, interface.mtu)
    }
    assert {ip.address for ip in back.ips} <= {ip.address for ip in result.ips}
    assert {route.destination for route in back.routes} <= {r.destination for r in result.routes}
