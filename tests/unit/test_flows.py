"""Flows: naming ends, the ring, followers that do not keep up, filters."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.cli.observe import _line
from podwire.cli.output import Style
from podwire.control.flows.enrich import FlowMaker, format_time_ns
from podwire.control.flows.flow import Flow, FlowEnd, FlowPolicy, FlowService
from podwire.control.flows.flow_filter import FlowFilter, parse_filter
from podwire.control.flows.ring import FOLLOWER_QUEUE_FLOWS, FlowRing
from podwire.model.endpoint import EndpointRecord
from podwire.model.errors import UndecodableRequest
from podwire.model.flow import FlowEvent, Verdict
from podwire.model.ids import EndpointId, IdentityId, IfIndex
from tests.fakes.records import make_record

EVERYTHING = FlowFilter()


def make_endpoint(number: int, pod: str) -> EndpointRecord:
    return make_record(number, namespace="shop", pod=pod, labels=(f"cni:app={pod}",))


def make_event(**changes: object) -> FlowEvent:
    event = FlowEvent(
        boottime_ns=1_000,
        kind="drop",
        verdict=Verdict.DROPPED,
        reason="source-address",
        hook="from_pod",
        direction="egress",
        path="none",
        endpoint=EndpointId(7),
        ifindex=IfIndex(3),
        source_identity=IdentityId(0),
        destination_identity=IdentityId(2),
        ethertype=0x0800,
        protocol="tcp",
        source="10.0.0.9",
        destination="10.0.0.8",
        source_port=4000,
        destination_port=80,
        tcp_flags=0x12,
        length_bytes=60,
    )
    return msgspec.structs.replace(event, **changes)


ASKED = {("10.96.0.10", 80, "tcp"): FlowService("shop", "web", 80)}


def make_flow(**changes: object) -> Flow:
    maker = FlowMaker(
        "n1",
        by_address={"10.0.0.8": make_endpoint(8, "db")}.get,
        by_id={7: make_endpoint(7, "web")}.get,
        name_rule={5: FlowPolicy("NetworkPolicy", "shop", "only-web", "ingress[0]")}.get,
        labels_of=lambda identity: ("reserved:world=",) if identity == 2 else (),
        wall_offset_ns=lambda: 1_767_225_600_000_000_000,
        name_service=lambda address, port, protocol: ASKED.get((address, port, protocol)),
    )
    return maker.make(make_event(**changes))


def test_the_end_at_the_hook_is_known_by_number_even_with_a_forged_address() -> None:
    flow = make_flow()
    assert flow.source == FlowEnd(7, "shop", "web", 0, ("cni:app=web",), "10.0.0.9", 4000)
    assert flow.destination == FlowEnd(8, "shop", "db", 2, ("cni:app=db",), "10.0.0.8", 80)
    assert (flow.verdict, flow.reason, flow.tcp_flags) == ("dropped", "source-address", "SYN,ACK")
    assert flow.time == "2026-01-01T00:00:00.000001Z"


VIP = {"original_destination": "10.96.0.10", "original_port": 80}


@pytest.mark.parametrize(
    ("changes", "is_named"),
    [
        pytest.param(VIP, True, id="translated"),
        pytest.param({"destination": "10.96.0.10"}, True, id="refused, or left to the stack"),
        pytest.param({**VIP, "original_port": 81}, False, id="nobody's port"),
        pytest.param({**VIP, "protocol": "udp"}, False, id="another protocol"),
        pytest.param({**VIP, "protocol": "icmp"}, False, id="no ports"),
        pytest.param({**VIP, "direction": "ingress"}, False, id="the receiver's side"),
        pytest.param({}, False, id="a pod"),
    ],
)
def test_the_service_that_was_asked_is_named(changes: Mapping[str, Any], is_named: bool) -> None:
    shown = msgspec.to_builtins(make_flow(**changes))
    wanted = {"namespace": "shop", "name": "web", "port": 80} if is_named else None
    assert shown["to"].get("service") == wanted
    assert "service" not in shown["from"]


def test_the_rule_that_decided_is_named() -> None:
    [policy] = make_flow(rule=5).policies
    assert (policy.name, policy.rule) == ("only-web", "ingress[0]")
    assert make_flow(rule=6).policies == ()
    assert make_flow(rule=0).policies == ()


def test_an_end_that_is_no_pod_has_the_labels_of_its_identity() -> None:
    flow = make_flow(destination="192.0.2.1")
    assert flow.destination.labels == ("reserved:world=",)


@pytest.mark.parametrize("address", ["10.96.0.1", "fd96::1"])
def test_a_translated_event_names_whom_the_sender_meant(address: str) -> None:
    flow = make_flow(original_destination=address, original_port=443)
    shown = json.loads(msgspec.json.encode(flow))
    assert (shown["originalTo"]["ip"], shown["originalTo"]["port"]) == (address, 443)
    assert shown["to"]["ip"] == "10.0.0.8"
    place = f"[{address}]" if ":" in address else address
    assert f"10.0.0.8:80 (to {place}:443)" in _line(shown, Style())


def test_an_event_that_nobody_translated_says_nothing_of_it() -> None:
    shown = json.loads(msgspec.json.encode(make_flow()))
    assert "originalTo" not in shown
    assert "(to " not in _line(shown, Style())


def test_an_ingress_event_names_the_endpoint_as_destination() -> None:
    flow = make_flow(direction="ingress", source="10.0.0.8", destination="10.0.0.7")
    assert (flow.source.pod, flow.destination.pod) == ("db", "web")


def test_arp_and_unknown_ends_have_no_names() -> None:
    flow = make_flow(ethertype=0x0806, protocol="", source="", destination="", endpoint=0)
    assert flow.protocol == "arp"
    assert flow.source == FlowEnd(identity=0)


def test_the_type_of_an_icmp_message_is_no_port() -> None:
    flow = make_flow(protocol="icmp", source_port=8)
    assert (flow.source.port, flow.destination.port) == (0, 0)


def test_json_has_the_names_of_the_contract() -> None:
    document = msgspec.json.decode(msgspec.json.encode(make_flow()))
    wanted = {"time", "node", "verdict", "reason", "direction", "from", "to", "protocol"}
    assert wanted | {"policies", "bytes", "lost"} <= set(document)
    assert set(document["from"]) == {
        *("endpoint", "namespace", "pod", "identity", "labels", "ip", "port")
    }


def test_the_ring_keeps_the_newest_in_order() -> None:
    ring = FlowRing(3)
    for size in range(5):
        ring.append(make_flow(length_bytes=size))
    assert [flow.bytes for flow in ring.last(10, EVERYTHING)] == [2, 3, 4]
    assert [flow.bytes for flow in ring.last(2, EVERYTHING)] == [3, 4]
    assert len(ring) == 3


def test_a_slow_follower_loses_flows_and_is_told_how_many() -> None:
    ring = FlowRing(1)
    slow = ring.follow(EVERYTHING, lambda: None)
    quick = ring.follow(EVERYTHING, lambda: None)
    seen = 0
    for size in range(FOLLOWER_QUEUE_FLOWS + 5):
        ring.append(make_flow(length_bytes=size))
        seen += len(quick.take())
    assert seen == FOLLOWER_QUEUE_FLOWS + 5
    assert len(slow.take()) == FOLLOWER_QUEUE_FLOWS
    ring.append(make_flow(lost=2))
    assert [flow.lost for flow in slow.take()] == [7]
    assert ring.dropped_for_followers == 5
    ring.leave(slow)
    ring.leave(quick)
    assert not ring._followers


def test_a_follower_is_woken_only_for_what_it_wants() -> None:
    ring = FlowRing(4)
    wakes: list[int] = []
    follower = ring.follow(parse_filter({"verdict": "dropped"}), lambda: wakes.append(1))
    ring.append(make_flow(verdict=Verdict.FORWARDED))
    ring.append(make_flow())
    assert (len(wakes), len(follower.take())) == (1, 1)


def test_a_packet_that_passed_goes_to_followers_and_pushes_out_no_drop() -> None:
    ring = FlowRing(1)
    ring.append(make_flow())
    follower = ring.follow(EVERYTHING, lambda: None)
    ring.append(make_flow(kind="trace", verdict=Verdict.FORWARDED))
    assert [flow.type for flow in follower.take()] == ["trace"]
    assert [flow.type for flow in ring.last(9, EVERYTHING)] == ["drop"]
    ring.append(make_flow(kind="policy", verdict=Verdict.FORWARDED))
    assert [flow.type for flow in ring.last(9, EVERYTHING)] == ["policy"]


WATCHES: dict[str, tuple[list[dict[str, str]], set[int]]] = {
    "nobody": ([], set()),
    "everything": ([{}], {7, 8}),
    "drops only": ([{"type": "drop"}, {"verdict": "dropped"}], set()),
    "audit is told anyway": ([{"verdict": "audit"}], set()),
    "what passed": ([{"type": "trace"}], {7, 8}),
    "verdicts": ([{"type": "policy", "verdict": "forwarded"}], {7, 8}),
    "one endpoint": ([{"endpoint": "8"}], {8}),
    "two of one each": ([{"endpoint": "8"}, {"endpoint": "7", "port": "80"}], {7, 8}),
    "drops of one": ([{"endpoint": "8", "type": "drop"}], set()),
    "by name": ([{"pod": "shop/web"}], {7, 8}),
}


@pytest.mark.parametrize(("filters", "watched"), WATCHES.values(), ids=WATCHES.keys())
def test_passes_are_watched_where_a_follower_may_want_them(
    filters: list[dict[str, str]], watched: set[int]
) -> None:
    ring = FlowRing(1)
    followers = [ring.follow(parse_filter(words), lambda: None) for words in filters]
    assert {number for number in (7, 8) if ring.watch.includes(number)} == watched
    for follower in followers:
        ring.leave(follower)
    assert not ring.watch.includes(7)


MATCHES = {
    "pod with namespace": ({"from": "shop/web"}, True),
    "pod alone": ({"to": "db"}, True),
    "other namespace": ({"from": "other/web"}, False),
    "wrong end": ({"from": "shop/db"}, False),
    "either end": ({"pod": "shop/db"}, True),
    "address": ({"to": "10.0.0.8"}, True),
    "range": ({"from": "10.0.0.0/24"}, True),
    "other range": ({"from": "fd00::/8"}, False),
    "label": ({"from": "app=web"}, True),
    "label with source": ({"from": "cni:app=web"}, True),
    "label of another source": ({"from": "k8s:app=web"}, False),
    "port of either end": ({"port": "80"}, True),
    "port and protocol": ({"port": "80/tcp"}, True),
    "port of another protocol": ({"port": "80/udp"}, False),
    "protocol alone": ({"port": "tcp"}, True),
    "verdict": ({"verdict": "forwarded"}, False),
    "type": ({"type": "drop"}, True),
    "endpoint": ({"endpoint": "8"}, True),
    "other endpoint": ({"endpoint": "9"}, False),
    "noise": ({"noise": "false"}, True),
    "since before": ({"since": "2026-01-01T00:00:00Z"}, True),
    "since after": ({"since": "2026-01-01T00:00:00.000002Z"}, False),
    "all conditions": ({"from": "web", "to": "db", "verdict": "dropped"}, True),
    "one condition fails": ({"from": "web", "to": "web"}, False),
}


@pytest.mark.parametrize(("words", "matches"), MATCHES.values(), ids=MATCHES.keys())
def test_filter(words: dict[str, str], matches: bool) -> None:
    assert parse_filter(words).matches(make_flow()) is matches


@pytest.mark.parametrize(
    ("words", "matches"), [({}, True), ({"noise": "true"}, True), ({"noise": "false"}, False)]
)
def test_what_pods_send_unasked_can_be_left_out(words: dict[str, str], matches: bool) -> None:
    flow = msgspec.structs.replace(make_flow(), reason="quiet")
    assert parse_filter(words).matches(flow) is matches


def test_since_takes_a_duration() -> None:
    asked: list[int] = []

    def ago(seconds: int) -> str:
        asked.append(seconds)
        return "2026-01-01T00:00:00.000000Z"

    assert parse_filter({"since": "5m"}, format_ago=ago).matches(make_flow())
    assert asked == [300]


def test_every_fault_of_a_filter_is_named() -> None:
    words = {"verdict": "x", "type": "y", "port": "80/", "endpoint": "z", "since": "soon"}
    with pytest.raises(UndecodableRequest) as caught:
        parse_filter({**words, "from": "", "bogus": "1"})
    assert {fault.path for fault in caught.value.faults} == {*words, "from", "bogus"}


def test_a_port_that_cannot_be_is_refused() -> None:
    assert parse_filter({"port": "65535"})
    with pytest.raises(UndecodableRequest, match="not a port"):
        parse_filter({"port": "65536/tcp"})


@given(
    st.dictionaries(
        st.sampled_from(["from", "to", "pod", "port", "since", "endpoint", "verdict"]), st.text()
    )
)
def test_any_words_give_a_filter_or_an_error(words: dict[str, str]) -> None:
    try:
        wanted = parse_filter(words)
    except UndecodableRequest:
        return
    assert wanted.matches(make_flow()) in (True, False)


@given(st.integers(0, 4 * 10**18), st.integers(0, 4 * 10**18))
def test_times_sort_as_text(one: int, other: int) -> None:
    one, other = one // 1000 * 1000, other // 1000 * 1000
    assert (one < other) == (format_time_ns(one) < format_time_ns(other))
