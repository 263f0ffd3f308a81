"""What a node's kernel shall hold because of others: each rule of the planner, and what holds for every cluster."""

import ipaddress
import itertools
import random
import time
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from podwire.control.cluster.facts import tunnel_mac
from podwire.control.cluster.ownership import claimed_ranges, everything_claimed
from podwire.control.cluster.planner import NodeNumbers, plan_cluster, route_to_pod
from podwire.control.cluster.reach import ClusterSettings
from podwire.model.cluster import NodeFacts, Prefix, TunnelMode, Underlay, Way
from podwire.model.ids import IdentityId


def nets(*texts: Any) -> Any:
    return tuple(map(ipaddress.ip_network, texts))


def ips(*texts: Any) -> Any:
    return tuple(map(ipaddress.ip_address, texts))


def make(number: Any, **changes: Any) -> Any:
    """A node of both families on one subnet, named by its number."""
    facts = NodeFacts(
        name=f"n{number}",
        instance=f"i{number}",
        epoch=1,
        addresses=ips(f"192.0.2.{number}", f"2001:db8::{number:x}"),
        pod_cidrs=nets(f"10.244.{number}.0/24", f"fd00:0:0:{number:x}::/64"),
        tunnel_addresses=ips(f"10.244.{number}.1", f"fd00:0:0:{number:x}::1"),
        tunnel_mac=tunnel_mac(f"n{number}"),
    )
    return msgspec.structs.replace(facts, **changes)


OWN = make(1)
UNDERLAY = Underlay(OWN.addresses, nets("192.0.2.0/24", "2001:db8::/64"), 2, 1500)
OVERLAY = ClusterSettings(
    "overlay", nets("10.244.0.0/16", "10.250.0.0/16", "100.64.0.0/10", "fd00::/48")
)
NATIVE = ClusterSettings("native", OVERLAY.cluster_cidrs)
AUTO = ClusterSettings("auto", OVERLAY.cluster_cidrs)


def plan(
    *peers: Any,
    own: Any = OWN,
    settings: Any = OVERLAY,
    underlay: Any = UNDERLAY,
    numbers: Any = None,
) -> Any:
    return plan_cluster(own, underlay, peers, settings, numbers or NodeNumbers())


def row(planned: Any, text: Any) -> Any:
    return planned.plan.prefixes[ipaddress.ip_network(text)]


def routes(planned: Any) -> Any:
    return {str(route.destination): route for route in planned.plan.routes}


def messages(planned: Any) -> Any:
    return " | ".join(problem.message for problem in planned.problems)


def test_a_peer_over_the_overlay() -> None:
    planned = plan(make(2))
    assert planned.problems == ()
    (peer,) = planned.plan.peers
    assert (peer.number, peer.name, peer.outer, peer.mtu_bytes) == (
        1,
        "n2",
        *ips("192.0.2.2"),
        1450,
    )
    assert row(planned, "10.244.2.0/24") == Prefix(IdentityId(3), 1, Way.TUNNEL, 1450)
    assert row(planned, "10.244.2.1/32") == Prefix(
        IdentityId(6), 1, Way.TUNNEL, 1450, is_node_address=True
    )
    assert row(planned, "192.0.2.2/32") == Prefix(IdentityId(6), 1, None, is_node_address=True)
    assert row(planned, "10.244.0.0/16") == Prefix(IdentityId(3), 0, None)
    route = routes(planned)["fd00:0:0:2::/64"]
    assert (route.way, route.via, route.mtu_bytes, route.peer) == (Way.TUNNEL, None, 1450, 1)
    assert route.source == OWN.tunnel_addresses[1]
    tunnel = planned.plan.tunnel
    assert (tunnel.local, tunnel.mtu_bytes, tunnel.mac) == (OWN.addresses[0], 1450, OWN.tunnel_mac)
    assert tunnel.addresses == OWN.tunnel_addresses
    assert planned.plan.pod_mtu_bytes == 1450
    assert ipaddress.ip_network("192.0.2.2/32") in planned.plan.inside


@pytest.mark.parametrize(
    ("settings", "peers", "has_tunnel", "pod_mtu"),
    [
        pytest.param(OVERLAY, [], True, 1450, id="overlay alone: others can come"),
        pytest.param(AUTO, [], False, 0, id="auto alone: nothing is made"),
        pytest.param(NATIVE, [], False, 0, id="native alone"),
        pytest.param(AUTO, [make(2)], True, 0, id="auto, peer on the subnet"),
        pytest.param(NATIVE, [make(2)], False, 0, id="native, peer on the subnet"),
        pytest.param(
            AUTO, [make(2, addresses=ips("198.51.100.2"))], True, 1450, id="auto, peer elsewhere"
        ),
    ],
)
def test_when_there_is_a_tunnel(settings: Any, peers: Any, has_tunnel: Any, pod_mtu: Any) -> None:
    planned = plan(*peers, settings=settings)
    assert (planned.plan.tunnel is not None) is has_tunnel
    assert planned.plan.pod_mtu_bytes == pod_mtu
    assert planned.problems == ()


def test_native_needs_the_peer_on_a_connected_subnet() -> None:
    near, far = make(2), make(3, addresses=ips("198.51.100.3", "2001:db8::3"))
    planned = plan(near, far, settings=NATIVE)
    assert routes(planned)["10.244.2.0/24"].via == near.addresses[0]
    assert routes(planned)["10.244.2.0/24"].source == OWN.addresses[0]
    assert routes(planned)["fd00:0:0:3::/64"].via == far.addresses[1]
    assert "10.244.3.0/24" not in routes(planned)
    assert row(planned, "10.244.3.0/24") == Prefix(IdentityId(3), 2, None)
    assert "IPv4 pods of node n3 are not reached natively" in messages(planned)
    assert len(planned.problems) == 1


def test_auto_takes_the_tunnel_for_what_is_not_connected() -> None:
    planned = plan(make(2), make(3, addresses=ips("198.51.100.3", "2001:db8::3")), settings=AUTO)
    assert row(planned, "10.244.2.0/24").way is Way.NATIVE
    assert row(planned, "10.244.3.0/24") == Prefix(IdentityId(3), 2, Way.TUNNEL, 1450)
    assert row(planned, "fd00:0:0:3::/64") == Prefix(IdentityId(3), 2, Way.NATIVE, 1500)
    assert planned.plan.pod_mtu_bytes == 1450
    assert planned.problems == ()


@pytest.mark.parametrize(
    ("own_addresses", "peer_addresses", "outer", "mtu"),
    [
        pytest.param(["192.0.2.1"], ["192.0.2.2", "2001:db8::2"], "192.0.2.2", 1350, id="only v4"),
        pytest.param(["2001:db8::1"], ["192.0.2.2", "2001:db8::2"], "2001:db8::2", 1330, id="only v6"),
        pytest.param(
            ["2001:db8::1", "192.0.2.1"], ["192.0.2.2", "2001:db8::2"], "2001:db8::2", 1330,
            id="the first of ours",
        ),
        pytest.param(
            ["192.0.2.1", "2001:db8::1"], ["2001:db8::2"], "2001:db8::2", 1330, id="what it has"
        ),
    ],
)  # fmt: skip
def test_outer_family_and_mtu(
    own_addresses: Any, peer_addresses: Any, outer: Any, mtu: Any
) -> None:
    own = make(1, addresses=ips(*own_addresses))
    peer = make(2, addresses=ips(*peer_addresses), underlay_mtu_bytes=1400)
    planned = plan(peer, own=own)
    assert planned.plan.peers[0].outer == ipaddress.ip_address(outer)
    assert planned.plan.peers[0].mtu_bytes == mtu
    assert planned.plan.pod_mtu_bytes == mtu


def test_no_common_family_is_named() -> None:
    planned = plan(make(2, addresses=ips("2001:db8::2")), own=make(1, addresses=ips("192.0.2.1")))
    assert planned.plan.peers == ()
    assert row(planned, "10.244.2.0/24") == Prefix(IdentityId(3), 0, None)
    assert "n2 (2001:db8::2)" in messages(planned)
    assert "n1 (192.0.2.1)" in messages(planned)


def test_a_node_without_underlay_says_so_once() -> None:
    planned = plan(make(2), make(3), own=make(1, addresses=()))
    assert planned.plan.peers == ()
    assert planned.plan.tunnel is None
    assert len(planned.problems) == 1
    assert plan(own=make(1, addresses=())).problems == ()


def numbered(facts: Any, number: Any) -> Any:
    """Give facts whose claims all have one number."""
    return msgspec.structs.replace(facts, claims=dict.fromkeys(everything_claimed(facts), number))


@pytest.mark.parametrize(
    ("numbers", "keeper"),
    [
        pytest.param((1, 2), "n2", id="the older claim"),
        pytest.param((7, 3), "n3", id="the older claim, whatever the name"),
        pytest.param((4, 4), "n2", id="of equal ones the first name"),
    ],
)
def test_overlapping_ranges(numbers: Any, keeper: Any) -> None:
    one = make(2, pod_cidrs=nets("10.244.8.0/23"), tunnel_addresses=())
    other = make(3, pod_cidrs=nets("10.244.9.0/24"), tunnel_addresses=(), epoch=9)
    parties = [numbered(facts, number) for facts, number in zip((one, other), numbers, strict=True)]
    planned = plan(*parties)
    for facts in parties:
        assert (str(facts.pod_cidrs[0]) in routes(planned)) is (facts.name == keeper)
    assert "n2 (10.244.8.0/23) and n3 (10.244.9.0/24) overlap" in messages(planned)
    assert f"{keeper} has the older claim and keeps it" in messages(planned)
    assert len(planned.problems) == 1
    inner = ipaddress.ip_network("10.244.9.0/24")
    if keeper == "n2":  # no hole in what the winner keeps
        assert inner not in planned.plan.prefixes
    else:
        assert row(planned, "10.244.8.0/23") == Prefix(IdentityId(3), 0, None)


def test_what_has_fallen_takes_nothing_from_a_third() -> None:
    outer = numbered(make(2, pod_cidrs=nets("10.244.0.0/20"), tunnel_addresses=()), 2)
    left = numbered(make(3, pod_cidrs=nets("10.244.2.0/24"), tunnel_addresses=()), 1)
    right = numbered(make(4, pod_cidrs=nets("10.244.3.0/24"), tunnel_addresses=()), 3)
    planned = plan(outer, left, right, own=make(1, pod_cidrs=nets("10.245.0.0/24")))
    assert set(routes(planned)) == {"10.244.2.0/24", "10.244.3.0/24"}
    assert row(planned, "10.244.0.0/20") == Prefix(IdentityId(3), 0, None)


def test_blocks_have_epochs_of_their_own() -> None:
    old = make(2, epoch=9, pod_cidrs=(), blocks={nets("10.244.64.0/26")[0]: 1}, tunnel_addresses=())
    new = make(3, epoch=1, pod_cidrs=(), blocks={nets("10.244.64.0/26")[0]: 2}, tunnel_addresses=())
    planned = plan(old, new)
    assert routes(planned)["10.244.64.0/26"].peer == planned.numbers.of["n3"]


@pytest.mark.parametrize(("own_number", "keeper"), [(1, "n1"), (9, "n2")], ids=["older", "later"])
def test_what_is_ours_nobody_gets_here(own_number: Any, keeper: Any) -> None:
    thief = make(2, epoch=99, pod_cidrs=nets("10.244.1.128/25", "10.244.2.0/24"))
    planned = plan(numbered(thief, 5), own=numbered(OWN, own_number))
    assert set(routes(planned)) == {"10.244.2.0/24"}
    assert ipaddress.ip_network("10.244.1.128/25") not in planned.plan.prefixes
    assert f"{keeper} has the older claim" in messages(planned)
    assert ("10.244.1.0/24 of node n1 is not reached by others" in planned.lost) is (keeper == "n2")


@pytest.mark.parametrize(
    ("addresses", "wanted"),
    [
        pytest.param(ips("192.0.2.1"), "nodes n1 and n2 have the same address", id="underlay"),
        pytest.param(ips("10.244.1.1"), "nodes n1 and n2 have the same address", id="tunnel"),
        pytest.param(ips("10.244.1.77"), "in a pod range of node n1", id="a pod's"),
    ],
)
def test_a_peer_with_an_address_of_ours_is_refused(addresses: Any, wanted: Any) -> None:
    planned = plan(make(2, addresses=addresses, epoch=99))
    assert planned.plan.peers == ()
    assert planned.plan.routes == ()
    assert wanted in messages(planned)
    assert ipaddress.ip_network(addresses[0]) not in planned.plan.prefixes


@pytest.mark.parametrize(
    ("numbers", "keeper"), [((1, 2), "n2"), ((2, 1), "n3"), ((2, 2), "n2")], ids=str
)
def test_two_nodes_with_one_address(numbers: Any, keeper: Any) -> None:
    one = numbered(make(2, addresses=ips("192.0.2.9")), numbers[0])
    other = numbered(make(3, addresses=ips("192.0.2.9")), numbers[1])
    planned = plan(one, other)
    assert [peer.name for peer in planned.plan.peers] == [keeper]
    assert "nodes n2 and n3 have the same address 192.0.2.9" in messages(planned)


def test_tunnel_addresses_outside_of_the_nodes_ranges_are_not_believed() -> None:
    planned = plan(make(2, tunnel_addresses=ips("10.244.3.1")), make(3))
    assert row(planned, "10.244.3.1/32").node == planned.numbers.of["n3"]


def test_a_range_with_an_underlay_address_would_go_in_circles() -> None:
    planned = plan(make(2, pod_cidrs=nets("192.0.0.0/16"), tunnel_addresses=()))
    assert planned.plan.routes == ()
    assert "192.0.0.0/16" in messages(planned)


@pytest.mark.parametrize(
    ("mtu", "families"),
    [
        pytest.param(1330, {4, 6}, id="just enough"),
        pytest.param(1329, {4}, id="too small for IPv6"),
        pytest.param(626, {4}, id="just enough for IPv4"),
        pytest.param(625, set(), id="too small for both"),
    ],
)
@pytest.mark.parametrize("whose", ["own", "peer"])
def test_underlay_too_small(mtu: Any, families: Any, whose: Any) -> None:
    own, peer = make(1), make(2)
    if whose == "own":
        own = make(1, underlay_mtu_bytes=mtu)
    else:
        peer = make(2, underlay_mtu_bytes=mtu)
    planned = plan(peer, own=own)
    assert {route.destination.version for route in planned.plan.routes} == families
    if families != {4, 6}:
        assert f"n{1 if whose == 'own' else 2}" in messages(planned)
        assert str(mtu) in messages(planned)
    if whose == "own" and planned.plan.tunnel is not None:
        assert {address.version for address in planned.plan.tunnel.addresses} == families


def test_another_port_is_named_and_not_used() -> None:
    planned = plan(make(2, tunnel_port=4789))
    assert planned.plan.routes == ()
    assert "port 4789" in messages(planned)
    assert "port 8472" in messages(planned)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        pytest.param({}, "", id="reached"),
        pytest.param({"tunnel_mac": ""}, "needs its MAC", id="without MAC"),
        pytest.param({"tunnel_mac": OWN.tunnel_mac}, "same tunnel MAC", id="with our MAC"),
    ],
)
def test_a_classic_peer(change: Any, fault: Any) -> None:
    planned = plan(make(2, tunnel_mode=TunnelMode.CLASSIC, **change))
    assert bool(planned.plan.routes) is not bool(fault)
    assert fault in messages(planned)
    assert planned.plan.peers[0].mode is TunnelMode.CLASSIC


def test_a_classic_device_has_one_outer_family() -> None:
    own = make(1, tunnel_mode=TunnelMode.CLASSIC)
    planned = plan(make(2), make(3, addresses=ips("2001:db8::3")), own=own)
    assert [peer.outer.version for peer in planned.plan.peers] == [4]
    assert routes(planned)["10.244.2.0/24"].via == ipaddress.ip_address("10.244.2.1")


def test_a_single_pod_elsewhere_has_a_route_of_its_own() -> None:
    planned = plan(make(2))
    reach = planned.reaches["n2"]
    assert route_to_pod(OWN, reach, *ips("10.244.2.9")) is None
    route = route_to_pod(OWN, reach, *ips("10.250.0.9"))
    assert route is not None
    assert (str(route.destination), route.peer) == ("10.250.0.9/32", 1)


def test_numbers_are_never_given_to_another_name() -> None:
    numbers = NodeNumbers()
    seen: dict[str, int] = {}
    for names in (["b", "a"], ["c"], ["a", "d"], ["b", "c"]):
        numbers = numbers.extend(names)
        for name in names:
            assert seen.setdefault(name, numbers.of[name]) == numbers.of[name]
    assert len(set(seen.values())) == 4
    crowd = numbers.extend(f"x{index}" for index in range(2000)).extend(["a"]).extend(["new"])
    assert crowd.of["new"] == 2005
    assert len(crowd.of) < 1000


RANGES = nets(
    "10.244.0.0/16", "10.244.2.0/23", "10.244.2.0/24", "10.244.3.0/24", "10.244.3.128/25",
    "10.244.4.0/24", "10.250.0.0/24", "10.244.1.0/25", "fd00:0:0:2::/64", "fd00::/56", "fd00:0:0:1::/64",
)  # fmt: skip
ADDRESSES = ips(
    "192.0.2.2", "192.0.2.3", "192.0.2.4", "2001:db8::2", "2001:db8:1::2", "192.0.2.1", "10.244.2.7"
)
NUMBERS = st.integers(-1, 3)


@st.composite
def clusters(draw: Any) -> Any:
    peers = []
    for number in range(2, 2 + draw(st.integers(0, 6))):
        ranges = draw(st.lists(st.sampled_from(RANGES), max_size=3, unique=True))
        split = draw(st.integers(0, len(ranges)))
        by_family = {
            drawn.version: drawn for drawn in draw(st.lists(st.sampled_from(ADDRESSES), max_size=2))
        }
        peers.append(
            NodeFacts(
                name=f"n{number}",
                instance="i",
                epoch=draw(st.integers(1, 3)),
                addresses=tuple(by_family.values()),
                pod_cidrs=tuple(ranges[:split]),
                blocks={one: draw(st.integers(1, 3)) for one in ranges[split:]},
                tunnel_addresses=tuple({one.version: one[1] for one in ranges}.values()),
                tunnel_mac=draw(st.sampled_from(["", tunnel_mac("n1"), tunnel_mac(f"n{number}")])),
                tunnel_mode=draw(st.sampled_from(TunnelMode)),
                tunnel_port=draw(st.sampled_from([8472, 8472, 4789])),
                underlay_mtu_bytes=draw(st.sampled_from([600, 1300, 1500, 9000])),
            )
        )
        claimed = everything_claimed(peers[-1])
        claims = draw(st.dictionaries(st.sampled_from(claimed), NUMBERS)) if claimed else {}
        peers[-1] = msgspec.structs.replace(peers[-1], claims=claims)
    return peers


SETTINGS = st.sampled_from([OVERLAY, NATIVE, AUTO])


@given(clusters(), SETTINGS, st.randoms(use_true_random=False))
def test_the_order_of_nodes_does_not_matter(peers: Any, settings: Any, chance: Any) -> None:
    numbers = NodeNumbers().extend(peer.name for peer in peers)
    planned = plan(*peers, settings=settings, numbers=numbers)
    chance.shuffle(peers)
    assert plan(*peers, settings=settings, numbers=numbers) == planned


def overlap(one: Any, other: Any) -> Any:
    return one.version == other.version and one.overlaps(other)


def touches(one: Any, other: Any) -> bool:
    """Whether two nodes claim something of each other's."""
    if {*one.addresses} & {*other.addresses} or one.tunnel_mac == other.tunnel_mac:
        return True
    mine = [network for network, _ in claimed_ranges(one)]
    theirs = [network for network, _ in claimed_ranges(other)]
    return any(overlap(a, b) for a in mine for b in theirs)


def find_concerned(gone: Any, rest: Any) -> list[str]:
    """Name whom a node's going may concern: those that it touches, those that they touch, and so on.

    What it held off stands again when it goes, and then holds off others in its turn.
    """
    concerned, todo = [gone], [gone]
    while todo:
        first = todo.pop()
        found = [peer for peer in rest if peer not in concerned and touches(first, peer)]
        concerned += found
        todo += found
    return [peer.name for peer in concerned]


def chain(*links: Any) -> Any:
    """Nodes n2, n3, ... of which each has (claims' number, ranges...)."""
    return [
        numbered(make(index, pod_cidrs=nets(*ranges), tunnel_addresses=()), number)
        for index, (number, *ranges) in enumerate(links, 2)
    ]


CHAIN = chain((1, "10.244.2.0/24"), (2, "10.244.2.0/23"), (3, "10.244.3.0/24"))
"""The first holds the second off, which would hold the third off: as it was found, in its smallest form."""


def test_what_goes_lets_the_next_claim_in_a_chain_stand() -> None:
    everybody, rest = plan(*CHAIN), plan(*CHAIN[1:])
    assert set(routes(everybody)) == {"10.244.2.0/24", "10.244.3.0/24"}
    assert set(routes(rest)) == {"10.244.2.0/23"}
    assert "n3 has the older claim and keeps it, n4 is not reached there" in messages(rest)


@given(clusters(), SETTINGS, st.integers(0, 5))
@example(CHAIN, OVERLAY, 0)
def test_a_node_that_goes_takes_only_its_own_rows(peers: Any, settings: Any, index: int) -> None:
    if len(peers) < 2:
        return
    gone = peers[index % len(peers)]
    rest = [peer for peer in peers if peer is not gone]
    concerned = find_concerned(gone, rest)
    numbers = NodeNumbers().extend(peer.name for peer in peers)
    before = plan(*peers, settings=settings, numbers=numbers)
    after = plan(*rest, settings=settings, numbers=numbers)
    for one in rest:
        if one.name in concerned:
            continue
        assert before.reaches.get(one.name) == after.reaches.get(one.name)
        number = numbers.of[one.name]
        assert [route for route in before.plan.routes if route.peer == number] == [
            route for route in after.plan.routes if route.peer == number
        ]


@given(clusters(), SETTINGS)
def test_what_several_claim_leads_to_one_and_ours_to_none(peers: Any, settings: Any) -> None:
    planned = plan(*peers, settings=settings)
    names = {number: name for name, number in planned.numbers.of.items()}
    facts = {one.name: one for one in peers}
    mine = [network for network, _ in claimed_ranges(OWN)]
    for route in planned.plan.routes:
        assert not any(overlap(route.destination, network) for network in mine)
        winner = facts[names[route.peer]]
        for other in peers:
            for network, _ in claimed_ranges(other) if other is not winner else ():
                if overlap(network, route.destination):
                    assert any(other.name in problem.nodes for problem in planned.problems)
    for one, other in itertools.combinations(planned.plan.routes, 2):
        assert one.peer == other.peer or not overlap(one.destination, other.destination)
    outers = [peer.outer for peer in planned.plan.peers]
    assert len(outers) == len(set(outers))
    for network, prefix in planned.plan.prefixes.items():
        if prefix.way is not None:
            assert prefix.node in {peer.number for peer in planned.plan.peers}
            assert network.version in (4, 6)


def many(count: Any) -> Any:
    return [
        NodeFacts(
            name=f"node-{index:05}",
            instance=f"{index}",
            epoch=1,
            addresses=(ipaddress.IPv4Address(0x0A800000 + index),),
            pod_cidrs=(ipaddress.IPv4Network((0x64400000 + (index << 8), 24)),),
            tunnel_addresses=(ipaddress.IPv4Address(0x64400001 + (index << 8)),),
            tunnel_mac=tunnel_mac(f"node-{index:05}"),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("same", [False, True], ids=["apart", "all with one range"])
def test_five_thousand_nodes_are_planned_in_linear_time(same: Any) -> None:
    peers = many(5000)
    if same:
        peers = [msgspec.structs.replace(peer, pod_cidrs=peers[0].pod_cidrs) for peer in peers]
    random.Random(5).shuffle(peers)
    numbers = plan(*peers).numbers
    begin = time.process_time()
    planned = plan(*peers, numbers=numbers)
    took_s = time.process_time() - begin
    assert len(planned.plan.routes) == (1 if same else 5000)
    print(f"planned 5,000 nodes in {took_s * 1e3:.0f} ms")
    assert took_s < 20  # 0.2 s on a quiet machine; quadratic would be minutes
