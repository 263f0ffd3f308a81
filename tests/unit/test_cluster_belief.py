"""What a node is believed to have: each lie is refused with what to do, and no honest publication is."""

import ipaddress
from typing import Any

import msgspec
import pytest

from podwire.control.cluster.belief import Grants
from podwire.control.cluster.facts import encode_node, node_key, tunnel_mac
from podwire.control.cluster.grants import PoolGrants
from podwire.control.cluster.ownership import number_claims
from podwire.control.cluster.planner import NodeNumbers, plan_cluster
from podwire.control.cluster.published import Publication
from podwire.control.cluster.reach import ClusterSettings
from podwire.control.cluster.reading import EPOCH_MAX
from podwire.control.cluster.remote import RemotePods, View
from podwire.model.cluster import Surroundings, TunnelMode, Underlay
from podwire.model.ids import IdentityId
from podwire.model.store import StoredObject
from podwire.model.store.kinds import IP_POOL
from tests.fakes.pool_nodes import apply, pool_document
from tests.fakes.store import MemoryStore
from tests.unit.test_cluster_planner import OWN, ips, make, messages, nets, routes

CIDRS = nets("10.244.0.0/16", "fd00::/48")
AROUND = Surroundings(
    own=frozenset(ips("192.0.2.1", "2001:db8::1", "172.17.0.1", "10.244.1.1")),
    subnets=nets("172.17.0.0/16", "10.8.0.0/24"),
    gateways=frozenset(ips("192.0.2.254", "10.9.9.9", "10.244.77.1")),
    store=frozenset(ips("10.10.10.10", "10.244.88.1")),
)
UNDERLAY = Underlay(OWN.addresses, nets("192.0.2.0/24", "2001:db8::/64"), 2, 1500, AROUND)
SET = ClusterSettings("overlay", CIDRS)
UNSET = ClusterSettings("overlay", ())
WIDE = ClusterSettings(
    "overlay", nets("10.0.0.0/8", "192.0.0.0/8", "172.16.0.0/12", "2000::/8", "fd00::/8")
)
POOLS = Grants(nets("10.99.0.0/16", "172.17.64.0/18"))


def planned_with(
    *peers: Any, settings: Any = SET, grants: Any = None, own: Any = OWN, numbers: Any = None
) -> Any:
    return plan_cluster(own, UNDERLAY, peers, settings, numbers or NodeNumbers(), grants)


def with_ranges(*ranges: Any, **changes: Any) -> Any:
    return make(2, pod_cidrs=nets(*ranges), tunnel_addresses=(), **changes)


LIES = [
    ("8.0.0.0/8", "in no IPPool and not in cluster_cidrs"),
    ("10.243.0.0/16", "in no IPPool and not in cluster_cidrs"),
    ("fd00::/47", "in no IPPool and not in cluster_cidrs"),
    ("fd01::/64", "in no IPPool and not in cluster_cidrs"),
    ("192.0.2.64/26", "node n1 itself is connected to 192.0.2.0/24"),
    ("192.0.2.77/32", "node n1 itself is connected to 192.0.2.0/24"),
    ("2001:db8::77/128", "node n1 itself is connected to 2001:db8::/64"),
    ("10.8.0.16/28", "node n1 itself is connected to 10.8.0.0/24"),
    ("172.17.3.0/24", "node n1 itself is connected to 172.17.0.0/16"),
    ("192.0.2.0/24", "192.0.2.1 is an address of node n1"),
    ("192.0.2.3/32", "192.0.2.3 is an address of node n3"),
    ("192.0.2.2/32", "192.0.2.2 is an address of node n2"),
    ("172.17.0.1/32", "172.17.0.1 is an address of node n1"),
    ("10.9.9.9/32", "10.9.9.9 is an address of a gateway"),
    ("10.244.77.0/24", "10.244.77.1 is an address of a gateway"),
    ("10.10.10.0/24", "10.10.10.10 is an address of the store"),
    ("10.244.88.0/24", "10.244.88.1 is an address of the store"),
    ("127.0.0.0/8", "never a pod's"),
    ("169.254.1.1/32", "never a pod's"),
    ("224.0.0.5/32", "never a pod's"),
    ("ff02::1/128", "never a pod's"),
    ("fe80::1/128", "never a pod's"),
    ("255.255.255.255/32", "never a pod's"),
]


CASES = [
    pytest.param(settings, lie, why, how, id=f"{name} {lie} as {how}")
    for name, settings in (("exact", SET), ("wide", WIDE))
    for lie, why in LIES
    for how in ("range", "block", "pod")
    if not (settings is WIDE and lie in ("10.243.0.0/16", "fd01::/64", "fd00::/47"))
    if how != "pod" or ipaddress.ip_network(lie).num_addresses == 1
]


@pytest.mark.parametrize(("settings", "lie", "why", "how"), CASES)
def test_what_no_pod_has_is_refused(settings: Any, lie: str, why: str, how: str) -> None:
    network = ipaddress.ip_network(lie)
    honest = planned_with(make(2), make(3), settings=settings)
    if how == "pod":
        pods = RemotePods()
        pods.view(View(OWN, honest))
        said = {network.network_address: IdentityId(300)}
        pods.update(pods.put(Publication("n2", 1, 1, said), "u"))
        assert (pods.rows, pods.routes) == ({}, {})
        [problem] = pods.problems
        assert "n2" in problem.nodes
        assert why in problem.message or "it is a node's own address" in problem.message
        return
    ranges = make(2).pod_cidrs
    changes = {"pod_cidrs": (*ranges, network)} if how == "range" else {"blocks": {network: 9}}
    planned = planned_with(make(2, **changes), make(3), settings=settings)
    assert planned.plan == honest.plan, "only the lie is refused"
    [problem] = planned.problems
    assert problem.nodes == ("n2",)
    assert f"of what node n2 publishes, pod range {lie} is refused" in problem.message
    assert why in problem.message


CONTROLS = [
    pytest.param(with_ranges("10.244.9.0/24"), None, id="a range in cluster_cidrs"),
    pytest.param(with_ranges("10.99.7.0/24"), POOLS, id="a range of a pool"),
    pytest.param(
        make(2, pod_cidrs=(), tunnel_addresses=(), blocks={nets("10.99.7.0/26")[0]: 1}), POOLS,
        id="a block of a pool",
    ),
    pytest.param(with_ranges("172.17.64.0/26"), POOLS, id="a pool on a link of this node"),
    pytest.param(with_ranges("10.99.7.1/32"), POOLS, id="a block of one address"),
    pytest.param(
        with_ranges("172.17.3.0/24"), Grants((), {"n2": frozenset(nets("172.17.3.0/24"))}),
        id="a range that somebody above the nodes has given to this one",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("peer", "grants"), CONTROLS)
def test_what_pods_have_is_believed(peer: Any, grants: Any) -> None:
    planned = planned_with(peer, make(3), grants=grants)
    assert planned.problems == ()
    for network in (*peer.pod_cidrs, *peer.blocks):
        assert str(network) in routes(planned)


def test_what_one_node_was_given_is_no_others() -> None:
    grants = Grants((), {"n3": frozenset(nets("172.17.3.0/24"))})
    assert "172.17.3.0/24" not in routes(planned_with(with_ranges("172.17.3.0/24"), grants=grants))


@pytest.mark.parametrize(
    ("address", "settings", "grants", "why"),
    [
        pytest.param(
            "10.244.9.9", SET, None, "pods are in 10.244.0.0/16", id="another node's pods"
        ),
        pytest.param("10.99.0.9", SET, POOLS, "pods are in 10.99.0.0/16", id="a pool"),
        pytest.param("172.17.0.1", SET, None, "is an address of node n1", id="another of ours"),
        pytest.param("192.0.2.255", SET, None, "no single machine's in 192.0.2.0/24", id="all"),
        pytest.param("10.8.0.0", SET, None, "no single machine's in 10.8.0.0/24", id="the subnet"),
        pytest.param(
            "2001:db8::", SET, None, "no single machine's in 2001:db8::/64", id="a router"
        ),
        pytest.param("fd00::9", SET, None, "pods are in fd00::/48", id="IPv6"),
        pytest.param("10.244.9.9", UNSET, None, "pods are in 10.244.0.0/16", id="near our range"),
    ],
)
def test_a_nodes_address_is_no_pods(address: str, settings: Any, grants: Any, why: str) -> None:
    planned = planned_with(make(2, addresses=ips(address)), settings=settings, grants=grants)
    assert planned.plan.peers == ()
    network = ipaddress.ip_network(address)
    assert network not in planned.plan.prefixes
    assert network not in planned.plan.inside
    [problem] = [one for one in planned.problems if "is refused" in one.message]
    assert why in problem.message
    assert problem.nodes == ("n2",)


def test_a_lying_address_takes_no_range_of_others_away() -> None:
    """Else whoever says that it has an address in a range would have the range refused."""
    liar = make(3, addresses=ips("10.244.2.9"), claims={ips("10.244.2.9")[0]: -9})
    planned = planned_with(make(2), liar)
    assert "10.244.2.0/24" in routes(planned)


@pytest.mark.parametrize(
    "address", ["192.0.2.240", "10.0.3.4", "8.8.8.8"], ids=["on the link", "elsewhere", "public"]
)
def test_nodes_may_be_anywhere_else(address: str) -> None:
    wide = ClusterSettings("overlay", nets("10.244.0.0/16", "192.0.0.0/8", "fd00::/48"))
    planned = planned_with(make(2, addresses=ips(address)), settings=wide)
    assert [peer.name for peer in planned.plan.peers] == ["n2"]


UNSET_CASES = [
    pytest.param(OWN, "10.244.200.0/24", True, id="near"),
    pytest.param(OWN, "fd00:0:0:77::/64", True, id="IPv6, near"),
    pytest.param(OWN, "10.245.2.0/24", False, id="far"),
    pytest.param(OWN, "fd00:0:1::/64", False, id="IPv6, far"),
    pytest.param(OWN, "8.0.0.0/8", False, id="the world"),
    pytest.param(make(1, pod_cidrs=nets("9.9.1.0/24")), "9.9.2.0/24", False, id="public"),
    pytest.param(make(1, pod_cidrs=nets("10.8.7.0/24")), "10.8.0.0/24", False, id="a link, near"),
    pytest.param(make(1, pod_cidrs=nets("10.8.7.0/24")), "10.8.9.0/24", True, id="beside a link"),
    pytest.param(make(1, pod_cidrs=()), "10.244.2.0/24", False, id="nothing to go by"),
]


@pytest.mark.parametrize(("own", "network", "is_believed"), UNSET_CASES)
def test_without_cluster_cidrs_only_what_is_near_the_own_range(
    own: Any, network: str, is_believed: bool
) -> None:
    own = msgspec.structs.replace(own, tunnel_addresses=())
    planned = planned_with(with_ranges(network), settings=UNSET, own=own)
    assert (network in routes(planned)) is is_believed
    assert (messages(planned) == "") is is_believed
    if not is_believed:
        assert "cluster_cidrs is not set" in messages(planned) or "connected" in messages(planned)


def test_what_a_warning_says_to_do_can_be_done_for_a_range_of_the_nodes_own() -> None:
    peer = with_ranges("10.8.0.0/25")
    assert "apply such a pool (with use: nodes" in messages(planned_with(peer))
    store = MemoryStore()
    store.create(StoredObject(key=node_key(peer.name), document=encode_node(peer)))
    apply(store, pool_document("p", "10.8.0.0/24", use="nodes", blockSize=25))
    grants = PoolGrants()
    grants.replace(store.list(IP_POOL.plural)[0], ())
    assert "10.8.0.0/25" in routes(planned_with(peer, grants=grants.current()))


def test_however_much_is_refused_it_is_one_warning() -> None:
    planned = planned_with(with_ranges(*(f"11.0.{index}.0/24" for index in range(200))))
    assert len(planned.problems) == 1
    assert "so are 197 more" in messages(planned)
    assert len(messages(planned)) < 1500
    pods = RemotePods()
    pods.view(View(OWN, planned_with(make(2))))
    many = {ipaddress.ip_address(0x0B000000 + index): IdentityId(300) for index in range(5000)}
    pods.update(pods.put(Publication("n2", 1, 1, many), "u"))
    [problem] = pods.problems
    assert "address 11.0.0.0 (and 4999 more), which node n2 publishes as a pod's" in problem.message


def test_a_borrowed_address_is_believed_in_cluster_cidrs_and_pools_alone() -> None:
    pods = RemotePods()
    pods.view(View(OWN, planned_with(make(2), make(3))))
    said = dict.fromkeys(ips("10.244.200.9", "10.99.0.9", "10.98.0.9"), IdentityId(300))
    pods.update(pods.put(Publication("n2", 1, 1, said), "u"))
    assert {str(row) for row in pods.rows} == {"10.244.200.9/32"}
    changes = pods.view(View(OWN, planned_with(make(2), make(3), grants=POOLS)))
    assert {str(address) for address in changes.put} == {"10.99.0.9/32"}
    assert {str(route) for route in pods.routes} == {"10.244.200.9", "10.99.0.9"}
    [problem] = pods.problems
    assert "10.98.0.9" in problem.message
    changes = pods.view(View(OWN, planned_with(make(2), make(3))))
    assert {str(address) for address in changes.remove} == {"10.99.0.9/32"}


def test_a_lying_address_in_the_own_range_takes_no_borrowed_one_away() -> None:
    """The owner of a block believes who has borrowed of it, as all other nodes do."""
    own = make(1, blocks={nets("10.99.1.0/26")[0]: 1})
    [lent] = ips("10.99.1.60")
    pods = RemotePods()
    pods.update(pods.put(Publication("n2", 1, 1, {lent: IdentityId(300)}), "u"))
    liar = make(3, addresses=(*ips("192.0.2.3"), lent))
    for peers in ((make(2),), (make(2), liar)):
        planned = planned_with(*peers, own=own, grants=POOLS)
        pods.view(View(own, planned))
        assert [str(row) for row in pods.rows] == ["10.99.1.60/32"]
        assert not pods.problems
    assert "node n3 has address 10.99.1.60, which is in a pod range of node n1" in messages(planned)


def test_who_repeats_the_mac_of_another_takes_no_way_to_it_away() -> None:
    own = make(1, tunnel_mode=TunnelMode.CLASSIC)
    liar = make(3, tunnel_mac=tunnel_mac("n2"))
    planned = planned_with(make(2), liar, own=own)
    assert "10.244.2.0/24" in routes(planned)
    assert "10.244.3.0/24" not in routes(planned)
    assert "n3" in messages(planned)


def test_the_highest_number_there_is_leaves_others_readable() -> None:
    liar = make(2, claims={nets("10.244.2.0/24")[0]: EPOCH_MAX})
    assert number_claims(make(3).pod_cidrs, {}, [liar], ())[make(3).pod_cidrs[0]] == EPOCH_MAX
