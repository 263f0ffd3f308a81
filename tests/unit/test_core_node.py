"""What podwire reads of a core Node, in every form that an API server gives it."""

from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from podwire.control.kubernetes.core_node import CoreNode, core_node_key, decode_core_node
from podwire.model.errors import InvalidConfiguration
from podwire.model.store import StoredObject

V4, V6 = ip_network("10.244.1.0/24"), ip_network("fd00:244:1::/64")


def read(**document: Any) -> CoreNode:
    return decode_core_node(StoredObject(key=core_node_key("n1"), uid="u", document=document))


@pytest.mark.parametrize(
    ("spec", "ranges"),
    [
        ({"podCIDRs": [str(V4), str(V6)], "podCIDR": str(V4)}, (V4, V6)),
        ({"podCIDR": str(V4)}, (V4,)),
        ({"podCIDRs": []}, ()),
        ({"podCIDR": ""}, ()),
        ({"podCIDRs": "10.0.0.0/8"}, ()),
        ({}, ()),
    ],
)
def test_ranges(spec: dict[str, Any], ranges: tuple[Any, ...]) -> None:
    assert read(spec=spec).pod_cidrs == ranges


def test_a_range_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfiguration, match=r"'n1'.*10\.0\.0\.1/8"):
        read(spec={"podCIDRs": ["10.0.0.1/8"]})


def test_only_internal_addresses_count() -> None:
    addresses = [
        {"type": "Hostname", "address": "n1"},
        {"type": "InternalIP", "address": "192.0.2.1"},
        {"type": "ExternalIP", "address": "198.51.100.1"},
        {"type": "InternalIP", "address": "2001:db8::1"},
        {"type": "InternalIP", "address": "nonsense"},
        "nonsense",
    ]
    found = read(status={"addresses": addresses}).addresses
    assert found == (ip_address("192.0.2.1"), ip_address("2001:db8::1"))


@pytest.mark.parametrize(
    ("said", "unavailable"),
    [("True", True), ("Unknown", True), ("False", False), (None, False)],
)
def test_the_networks_condition(said: str | None, *, unavailable: bool) -> None:
    conditions = [{"type": "Ready", "status": "True"}]
    if said is not None:
        conditions.append({"type": "NetworkUnavailable", "status": said})
    assert read(status={"conditions": conditions}).is_called_unavailable is unavailable
