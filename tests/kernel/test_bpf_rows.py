"""Addresses, prefixes and events on their way between bytes and values."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.datapath import abi
from podwire.datapath.flow_events import decode_event
from podwire.datapath.maps import from_mapped, from_prefix_key, mac_bytes, to_mapped, to_prefix_key
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.flow import Verdict

ADDRESSES = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6, network="2000::/3"))


@given(ADDRESSES)
def test_addresses_survive_a_round_trip(address: IPAddress) -> None:
    assert from_mapped(to_mapped(address)) == address
    assert len(to_mapped(address)) == 16


@st.composite
def networks(draw: st.DrawFn) -> IPNetwork:
    address = draw(ADDRESSES)
    length = draw(st.integers(0, address.max_prefixlen))
    return ipaddress.ip_network((address, length), strict=False)


@given(networks())
def test_prefixes_survive_a_round_trip_and_ipv4_stays_below_its_own_prefix(
    network: IPNetwork,
) -> None:
    assert from_prefix_key(to_prefix_key(network)) == network
    bits = abi.PrefixKey.unpack(to_prefix_key(network)).prefix_bits
    assert bits == network.prefixlen + (96 if network.version == 4 else 0)


@pytest.mark.parametrize(
    ("text", "bits"),
    [("0.0.0.0/0", 96), ("10.244.0.0/16", 112), ("10.1.2.3/32", 128), ("::/0", 0)],
)
def test_prefix_lengths_count_the_sixteen_bytes(text: str, bits: int) -> None:
    key = abi.PrefixKey.unpack(to_prefix_key(ipaddress.ip_network(text)))
    assert key.prefix_bits == bits


def test_macs_are_read() -> None:
    assert mac_bytes("0a:70:00:00:00:ff") == b"\x0a\x70\0\0\0\xff"


def make_event(**changes: object) -> abi.Event:
    blank = abi.Event.unpack(bytes(abi.EVENT_BYTES))
    return blank._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        pytest.param(
            {"kind": abi.EventKind.DROP, "reason": abi.DropReason.SOURCE_MAC},
            Verdict.DROPPED,
            "source-mac",
            id="drop",
        ),
        pytest.param(
            {"kind": abi.EventKind.POLICY, "reason": abi.DropReason.POLICY},
            Verdict.AUDIT,
            "policy",
            id="audit",
        ),
        pytest.param({"kind": abi.EventKind.POLICY}, Verdict.FORWARDED, "", id="allowed"),
        pytest.param({"kind": abi.EventKind.TRACE}, Verdict.FORWARDED, "", id="trace"),
        pytest.param(
            {"kind": abi.EventKind.DROP, "reason": 250}, Verdict.DROPPED, "250", id="newer-reason"
        ),
    ],
)
def test_events_say_what_became_of_a_packet(
    changes: dict[str, object], verdict: Verdict, reason: str
) -> None:
    event = decode_event(make_event(**changes))
    assert (event.verdict, event.reason) == (verdict, reason)


def test_an_event_of_ip_has_addresses_ports_and_protocol() -> None:
    event = decode_event(
        make_event(
            kind=abi.EventKind.TRACE,
            ethertype=0x0800,
            protocol=6,
            saddr=to_mapped(ipaddress.ip_address("10.0.0.1")),
            daddr=to_mapped(ipaddress.ip_address("10.0.0.2")),
            sport=1,
            dport=65535,
            hook=abi.Hook.TO_POD,
            direction=abi.Direction.INGRESS,
            path=abi.Path.STACK,
        )
    )
    assert (event.source, event.source_port) == ("10.0.0.1", 1)
    assert (event.destination, event.destination_port) == ("10.0.0.2", 65535)
    assert (event.protocol, event.hook, event.direction) == ("tcp", "to_pod", "ingress")
    assert event.path == "stack"


def test_an_event_without_ip_has_no_addresses() -> None:
    event = decode_event(make_event(kind=abi.EventKind.DROP, ethertype=0x0806))
    assert (event.source, event.destination, event.protocol) == ("", "", "")
