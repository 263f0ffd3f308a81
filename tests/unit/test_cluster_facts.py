"""What nodes say of themselves and of their pods is read back the same, and refused where it is wrong."""

import ipaddress
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.control.cluster.facts import (
    decode_node,
    encode_node,
    is_published,
    node_key,
    same_for_peers,
    tunnel_mac,
)
from podwire.control.cluster.published import (
    Publication,
    decode_endpoints,
    encode_endpoints,
    endpoints_key,
)
from podwire.model.cluster import NodeFacts, TunnelMode
from podwire.model.errors import InvalidRequest
from podwire.model.ids import IdentityId
from podwire.model.store import StoredObject

FACTS = NodeFacts(
    name="alpha",
    instance="0123456789abcdef",
    epoch=3,
    addresses=(ipaddress.ip_address("192.0.2.1"), ipaddress.ip_address("2001:db8::1")),
    pod_cidrs=(ipaddress.ip_network("10.1.0.0/24"), ipaddress.ip_network("fd00:1::/64")),
    tunnel_addresses=(ipaddress.ip_address("10.1.0.1"), ipaddress.ip_address("fd00:1::1")),
    tunnel_mac=tunnel_mac("alpha"),
    tunnel_mode=TunnelMode.CLASSIC,
    tunnel_port=4789,
    underlay_mtu_bytes=9000,
    blocks={ipaddress.ip_network("10.9.0.64/26"): 7},
    holds=(IdentityId(256), IdentityId(70000)),
    claims={
        ipaddress.ip_address("192.0.2.1"): -2,
        ipaddress.ip_network("10.1.0.0/24"): 12,
        ipaddress.ip_network("10.9.0.64/26"): 13,
    },
)


def stored_node(spec: Any) -> Any:
    return StoredObject(key=node_key("alpha"), document={"spec": spec})


def stored_endpoints(spec: Any) -> Any:
    return StoredObject(key=endpoints_key("alpha"), document={"spec": spec})


def through_json(document: Any) -> Any:
    return json.loads(json.dumps(document))


def test_facts_are_read_back_the_same() -> None:
    document = through_json(encode_node(FACTS))
    assert decode_node(StoredObject(key=node_key("alpha"), document=document)) == FACTS
    assert is_published(document)


def test_writing_keeps_what_others_have_put_there() -> None:
    before = {
        "metadata": {"name": "alpha", "labels": {"zone": "a"}, "annotations": {"x": "y"}},
        "spec": {"newerField": {"a": 1}, "epoch": 1, "requires": []},
    }
    document = encode_node(FACTS, before)
    assert document["metadata"]["labels"] == {"zone": "a"}
    assert document["metadata"]["annotations"]["x"] == "y"
    assert document["spec"]["newerField"] == {"a": 1}
    assert document["spec"]["epoch"] == 3


def test_a_field_of_a_newer_node_is_left_alone() -> None:
    spec = {**encode_node(FACTS)["spec"], "encryption": {"kind": "none"}}
    assert decode_node(stored_node(spec)) == FACTS


def test_a_node_that_only_holds_identities_is_not_published_yet() -> None:
    assert not is_published({"spec": {"holds": [70000]}})
    assert not is_published({})


@pytest.mark.parametrize(
    ("change", "path"),
    [
        pytest.param({"requires": ["wireguard"]}, "spec.requires", id="demands what is unknown"),
        pytest.param({"instance": ""}, "spec.instance", id="no instance"),
        pytest.param({"instance": 7}, "spec.instance", id="instance is a number"),
        pytest.param({"epoch": -1}, "spec.epoch", id="negative epoch"),
        pytest.param({"epoch": True}, "spec.epoch", id="epoch is a truth value"),
        pytest.param({"epoch": "3"}, "spec.epoch", id="epoch is text"),
        pytest.param({"addresses": "192.0.2.1"}, "spec.addresses", id="addresses are no list"),
        pytest.param({"addresses": ["192.0.2"]}, "spec.addresses", id="no address"),
        pytest.param({"addresses": [5]}, "spec.addresses[0]", id="address is a number"),
        pytest.param({"addresses": ["127.0.0.1"]}, "spec.addresses", id="loopback"),
        pytest.param({"addresses": ["fe80::1"]}, "spec.addresses", id="link-local"),
        pytest.param({"addresses": ["192.0.2.1", "192.0.2.2"]}, "spec.addresses", id="two of one"),
        pytest.param({"addresses": ["2001:db8::2%x"]}, "spec.addresses", id="a scope"),
        pytest.param({"addresses": ["::ffff:192.0.2.2"]}, "spec.addresses", id="IPv4 as IPv6"),
        pytest.param(
            {"tunnelAddresses": ["fd00:1::1%x"]}, "spec.tunnelAddresses", id="tunnel with a scope"
        ),
        pytest.param({"podCIDRs": ["fd00:1::%x/64"]}, "spec.podCIDRs", id="range with a scope"),
        pytest.param(
            {"podCIDRs": ["::ffff:10.1.0.0/120"]}, "spec.podCIDRs", id="IPv4 range as IPv6"
        ),
        pytest.param({"podCIDRs": ["::fffe:0:0/95"]}, "spec.podCIDRs", id="range with IPv4 in it"),
        pytest.param({"blocks": {"fd00:1::%x/64": 1}}, "spec.blocks", id="block with a scope"),
        pytest.param({"claims": {"fd00:1::5%x": 1}}, "spec.claims", id="claim with a scope"),
        pytest.param({"podCIDRs": ["10.1.0.1/24"]}, "spec.podCIDRs", id="bits behind the prefix"),
        pytest.param({"podCIDRs": ["0.0.0.0/0"]}, "spec.podCIDRs", id="everything"),
        pytest.param({"podCIDRs": ["127.5.0.0/16"]}, "spec.podCIDRs", id="loopback range"),
        pytest.param({"podCIDRs": ["fe80::/64"]}, "spec.podCIDRs", id="link-local range"),
        pytest.param({"claims": [1]}, "spec.claims", id="claims are no object"),
        pytest.param(
            {"claims": {"10.1.0.0/24": "1"}}, "spec.claims['10.1.0.0/24']", id="number is text"
        ),
        pytest.param({"claims": {"10.1.0.1/24": 1}}, "spec.claims", id="claim of no range"),
        pytest.param({"tunnelMAC": "01:00:00:00:00:01"}, "spec.tunnelMAC", id="multicast MAC"),
        pytest.param({"tunnelMAC": "00:00:00:00:00:00"}, "spec.tunnelMAC", id="zero MAC"),
        pytest.param({"tunnelMAC": "0e:70"}, "spec.tunnelMAC", id="short MAC"),
        pytest.param({"tunnelMode": "geneve"}, "spec.tunnelMode", id="mode of a newer node"),
        pytest.param({"tunnelPort": 0}, "spec.tunnelPort", id="port 0"),
        pytest.param({"underlayMTU": 70000}, "spec.underlayMTU", id="MTU too large"),
        pytest.param({"blocks": ["10.9.0.0/26"]}, "spec.blocks", id="blocks are a list"),
        pytest.param(
            {"blocks": {"10.9.0.0/26": "1"}},
            "spec.blocks['10.9.0.0/26']",
            id="epoch of a block is text",
        ),
        pytest.param({"blocks": {"10.9.0.1/26": 1}}, "spec.blocks", id="block with bits behind"),
        pytest.param({"holds": [0]}, "spec.holds[0]", id="holds 0"),
        pytest.param({"holds": [1 << 24]}, "spec.holds[0]", id="holds too large a number"),
    ],
)
def test_a_wrong_node_is_refused_by_field(change: Any, path: Any) -> None:
    spec = {**encode_node(FACTS)["spec"], **change}
    with pytest.raises(InvalidRequest) as refused:
        decode_node(stored_node(spec))
    assert [fault.path for fault in refused.value.faults][:1] == [path]
    assert "alpha" in refused.value.message


@pytest.mark.parametrize("spec", [None, [], "x", 5], ids=repr)
def test_a_node_without_fields_is_refused(spec: Any) -> None:
    with pytest.raises(InvalidRequest):
        decode_node(stored_node(spec))


def test_what_a_node_holds_is_nothing_to_its_peers() -> None:
    spec = {**encode_node(FACTS)["spec"], "holds": [70001]}
    assert same_for_peers(FACTS, decode_node(stored_node(spec)))
    spec["epoch"] = 4
    assert not same_for_peers(FACTS, decode_node(stored_node(spec)))


def test_every_name_has_its_own_tunnel_mac() -> None:
    names = [f"node-{index}" for index in range(5000)]
    assert len({tunnel_mac(name) for name in names}) == len(names)
    assert tunnel_mac("alpha") == tunnel_mac("alpha")


BASES = tuple(map(ipaddress.ip_network, ("10.1.0.0/24", "fd00:1::/64", "10.2.3.64/26")))
ADDRESSES = st.one_of(
    st.sampled_from(BASES).flatmap(
        lambda base: st.integers(0, base.num_addresses - 1).map(lambda offset: base[offset])
    ),
    # No pod has an address of IPv4 in the form of IPv6, and none is believed.
    st.ip_addresses().filter(lambda one: not (one.version == 6 and one.ipv4_mapped)),
)


@given(
    identities=st.dictionaries(
        ADDRESSES, st.integers(1, (1 << 24) - 1).map(IdentityId), max_size=40
    ),
    epoch=st.integers(0, 1 << 40),
    sequence=st.integers(0, 1 << 40),
    bases=st.lists(st.sampled_from(BASES), unique=True),
)
def test_endpoints_are_read_back_the_same(
    identities: Any, epoch: Any, sequence: Any, bases: Any
) -> None:
    publication = Publication("alpha", epoch, sequence, identities)
    document = through_json(encode_endpoints(publication, bases))
    stored = StoredObject(key=endpoints_key("alpha"), document=document)
    assert decode_endpoints(stored) == publication


def test_thirty_pods_take_less_than_a_kilobyte() -> None:
    identities = {BASES[0][offset]: IdentityId(16_000_000 + offset) for offset in range(200, 230)}
    identities |= {BASES[1][offset]: IdentityId(16_000_000 + offset) for offset in range(200, 230)}
    document = encode_endpoints(Publication("alpha", 12, 3456, identities), BASES[:2])
    assert len(json.dumps(document, separators=(",", ":"))) < 1000


GOOD = {"epoch": 1, "sequence": 1, "bases": ["10.1.0.0/24"], "endpoints": "2:256", "others": []}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        pytest.param({"endpoints": "2"}, "spec.endpoints", id="no identity"),
        pytest.param({"endpoints": "2:"}, "spec.endpoints", id="empty identity"),
        pytest.param({"endpoints": "2:0"}, "spec.endpoints", id="identity 0"),
        pytest.param({"endpoints": "2:16777216"}, "spec.endpoints", id="identity too large"),
        pytest.param({"endpoints": "256:256"}, "spec.endpoints", id="offset outside"),
        pytest.param({"endpoints": "-1:256"}, "spec.endpoints", id="negative offset"),
        pytest.param({"endpoints": "+2:256"}, "spec.endpoints", id="sign"),
        pytest.param({"endpoints": "1_0:256"}, "spec.endpoints", id="underscore"),
        pytest.param({"endpoints": "2:256,2:257"}, "spec.endpoints", id="two identities"),
        pytest.param({"endpoints": "2:256;3:256"}, "spec.endpoints", id="section too many"),
        pytest.param({"endpoints": ["2:256"]}, "spec.endpoints", id="list"),
        pytest.param({"bases": []}, "spec.endpoints", id="no bases"),
        pytest.param({"bases": ["10.1.0.5/24"]}, "spec.bases", id="base with bits behind"),
        pytest.param({"others": ["10.7.0.1"]}, "spec.others", id="other without identity"),
        pytest.param({"others": ["10.7.0.=256"]}, "spec.others", id="other is not an address"),
        pytest.param({"others": ["fd00:7::5%x=256"]}, "spec.others", id="other with a scope"),
        pytest.param(
            {"others": ["::ffff:10.7.0.1=256"]}, "spec.others", id="other is IPv4 as IPv6"
        ),
        pytest.param({"bases": ["fd00:1::%x/64"]}, "spec.bases", id="base with a scope"),
        pytest.param({"others": ["10.1.0.2=300"]}, "spec.others", id="other contradicts"),
        pytest.param({"sequence": "1"}, "spec.sequence", id="sequence is text"),
    ],
)
def test_wrong_endpoints_are_refused_by_field(change: Any, path: Any) -> None:
    assert decode_endpoints(stored_endpoints(GOOD)).identities
    with pytest.raises(InvalidRequest) as refused:
        decode_endpoints(stored_endpoints({**GOOD, **change}))
    assert path in [fault.path for fault in refused.value.faults]
