"""Whose word about a pod's address counts, and that news change only what they are about."""

import ipaddress
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.control.cluster.planner import UNMANAGED, NodeNumbers, plan_cluster
from podwire.control.cluster.published import Publication
from podwire.control.cluster.remote import RemotePods, View
from podwire.model.cluster import Prefix, Way
from podwire.model.ids import IdentityId
from tests.unit.test_cluster_planner import OVERLAY, OWN, UNDERLAY, ips, make, many, nets

BLOCK = nets("10.250.0.0/26")[0]
BORROWED = make(3, blocks={BLOCK: 4}, claims={BLOCK: 5})
OLDER = make(6, blocks={BLOCK: 4}, claims={BLOCK: 2})


def view_of(*peers: Any, own: Any = OWN) -> Any:
    planned = plan_cluster(own, UNDERLAY, peers, OVERLAY, NodeNumbers())
    return View(own, planned)


def says(node: Any, epoch: Any = 1, sequence: Any = 1, **pods: Any) -> Any:
    """Publication of pods `a10_244_2_5=300`."""
    identities = {
        ipaddress.ip_address(name[1:].replace("_", ".")): IdentityId(number)
        for name, number in pods.items()
    }
    return Publication(node, epoch, sequence, identities)


def filled(view: Any, *publications: Any) -> Any:
    pods = RemotePods()
    pods.view(view)
    pods.update(pods.replace((publication, "u") for publication in publications))
    return pods


def row(pods: Any, text: Any) -> Any:
    return pods.rows.get(ipaddress.ip_network(text))


def test_a_pod_elsewhere_has_its_identity_and_its_nodes_way() -> None:
    pods = filled(view_of(make(2)), says("n2", a10_244_2_5=300))
    assert row(pods, "10.244.2.5") == Prefix(IdentityId(300), 1, Way.TUNNEL, 1450)
    assert pods.routes == {}
    assert pods.problems == ()


def test_a_withdrawn_address_is_its_ranges_again() -> None:
    pods = filled(view_of(make(2)), says("n2", a10_244_2_5=300, a10_244_2_6=301))
    changes = pods.update(pods.put(says("n2", sequence=2, a10_244_2_6=301), "u"))
    assert changes.remove == [ipaddress.ip_network("10.244.2.5")]
    assert changes.put == {}
    assert row(pods, "10.244.2.5") is None


def test_news_change_only_what_they_are_about() -> None:
    pods = filled(view_of(make(2)), says("n2", a10_244_2_5=300, a10_244_2_6=301))
    news = says("n2", sequence=2, a10_244_2_5=300, a10_244_2_6=302, a10_244_2_7=303)
    changes = pods.update(pods.put(news, "u"))
    assert {str(address) for address in changes.put} == {"10.244.2.6/32", "10.244.2.7/32"}
    assert not changes.remove
    assert not pods.update(pods.put(news, "u"))


def test_news_are_taken_once_and_all_of_them_after_a_pause() -> None:
    def take() -> Any:
        is_whole, news = pods.take_news()
        return is_whole, {str(address): identity for address, identity in news.items()}

    view = view_of(make(2))
    pods = filled(view, says("n2", a10_244_2_5=300, a10_244_2_6=301))
    assert take() == (True, {"10.244.2.5": 300, "10.244.2.6": 301})
    assert take() == (False, {})
    pods.update(pods.put(says("n2", sequence=2, a10_244_2_5=302, a10_244_2_7=303), "u"))
    assert take() == (False, {"10.244.2.5": 302, "10.244.2.6": None, "10.244.2.7": 303})
    pods.view(view_of())  # the node is gone
    assert take() == (False, {"10.244.2.5": None, "10.244.2.7": None})
    pods.view(view)
    pods.drop_news()
    assert take() == (True, {"10.244.2.5": 302, "10.244.2.7": 303})


@pytest.mark.parametrize(
    ("epoch", "sequence", "uid", "identity"),
    [
        pytest.param(2, 4, "u", 300, id="older sequence: an echo"),
        pytest.param(1, 9, "u", 300, id="older epoch: an echo"),
        pytest.param(2, 6, "u", 301, id="newer sequence"),
        pytest.param(3, 1, "u", 301, id="newer epoch"),
        pytest.param(1, 1, "v", 301, id="another object of that name"),
    ],
)
def test_the_newest_publication_of_a_node_counts(
    epoch: Any, sequence: Any, uid: Any, identity: Any
) -> None:
    pods = filled(view_of(make(2)), says("n2", 2, 5, a10_244_2_5=300))
    pods.update(pods.put(says("n2", epoch, sequence, a10_244_2_5=301), uid))
    assert row(pods, "10.244.2.5").identity == identity


@pytest.mark.parametrize(
    ("publications", "wanted"),
    [
        pytest.param([says("n2", a10_250_0_5=300), says("n3", a10_250_0_5=301)], 301, id="block"),
        pytest.param([says("n2", a10_244_7_5=300), says("n4", a10_244_7_5=301)], None, id="equal"),
        pytest.param(
            [says("n3", a10_250_0_5=300), says("n6", a10_250_0_5=301)],
            301,
            id="one block in one epoch: the older claim",
        ),
        pytest.param(
            [says("n3", a10_250_0_5=300), says("n8", a10_250_0_5=301)],
            None,
            id="a block and a node in one epoch",
        ),
        pytest.param(
            [says("n2", a10_244_7_5=300), says("n4", a10_244_7_5=301), says("n5", a10_244_7_5=302)],
            302,
            id="the newest of three",
        ),
    ],
)
def test_an_address_of_two_nodes(publications: Any, wanted: Any) -> None:
    view = view_of(make(2), BORROWED, make(4), make(5, epoch=7), OLDER, make(8, epoch=4))
    address = next(iter(publications[0].identities))
    for given_first in (publications, publications[::-1]):
        pods = filled(view, *given_first)
        found = row(pods, str(address))
        assert found == UNMANAGED if wanted is None else found.identity == wanted
        assert str(address) in pods.problems[0].message
        assert set(pods.problems[0].nodes) >= {publication.node for publication in publications} - {
            "n3"
        }
    for one in publications[1:]:
        pods.update(pods.remove(one.node))
    assert row(pods, str(address)).identity == 300
    assert pods.problems == ()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        pytest.param("10.244.1.5", "in the pod range of node n1", id="our range"),
        pytest.param("192.0.2.1", "a node's own", id="our address"),
        pytest.param("192.0.2.3", "a node's own", id="another node's address"),
        pytest.param("10.244.3.1", "a node's own", id="another node's tunnel address"),
        pytest.param("10.250.9.9", "a pod of node n1 has it", id="a pod of ours"),
    ],
)
def test_what_is_no_pods_is_refused(address: Any, why: Any) -> None:
    pods = RemotePods()
    pods.view(view_of(make(2), make(3)))
    pods.set_own_pods(ips("10.250.9.9"))
    claim = Publication("n2", 1, 1, {ipaddress.ip_address(address): IdentityId(300)})
    assert not pods.update(pods.put(claim, "u"))
    assert pods.rows == {}
    assert why in pods.problems[0].message
    pods.update(pods.remove("n2"))
    assert pods.problems == ()


def test_an_address_of_our_block_may_be_lent() -> None:
    own = make(1, blocks={nets("10.250.0.0/26")[0]: 1})
    pods = filled(view_of(make(2), own=own), says("n2", a10_250_0_9=300))
    assert row(pods, "10.250.0.9") == Prefix(IdentityId(300), 1, Way.TUNNEL, 1450)
    assert pods.routes[ipaddress.ip_address("10.250.0.9")].peer == 1


def test_a_block_of_one_address_is_its_pods_row_and_afterwards_its_own() -> None:
    block = nets("10.250.0.9/32")[0]
    view = view_of(make(2, blocks={block: 1}))
    whole = view.planned.plan.prefixes[block]
    pods = filled(view, says("n2", a10_250_0_9=300))
    assert row(pods, "10.250.0.9") == Prefix(IdentityId(300), 1, Way.TUNNEL, 1450)
    assert pods.problems == ()
    changes = pods.update(pods.remove("n2"))
    assert (changes.put, list(changes.remove)) == ({block: whole}, [])


def test_a_pod_of_ours_takes_its_address_back() -> None:
    pods = filled(view_of(make(2)), says("n2", a10_250_9_9=300))
    assert row(pods, "10.250.9.9") is not None
    changes = pods.set_own_pods(ips("10.250.9.9"))
    assert changes.routes_changed
    assert row(pods, "10.250.9.9") is None
    pods.set_own_pods(())
    assert row(pods, "10.250.9.9") is not None


@pytest.mark.parametrize("comes_late", [False, True], ids=["at once", "later"])
def test_a_pod_in_another_nodes_own_range_is_refused(comes_late: Any) -> None:
    """n3 says that it has pods in the range that is n2's by the older claim: only those of n2 are reached."""
    intruder = make(3, pod_cidrs=nets("10.244.2.0/24"), tunnel_addresses=(), claims={})
    intruder = msgspec.structs.replace(intruder, claims=dict.fromkeys(intruder.pod_cidrs, 2))
    said = (says("n2", a10_244_2_5=300), says("n3", a10_244_2_5=301, a10_244_2_6=302))
    if comes_late:
        pods = filled(view_of(intruder), *said)
        pods.view(view_of(make(2), intruder))
    else:
        pods = filled(view_of(make(2), intruder), *said)
    assert row(pods, "10.244.2.5").identity == 300
    assert row(pods, "10.244.2.6") is None
    assert pods.routes == {}
    assert len(pods.problems) == 2
    assert all("it is in the pod range of node n2" in problem.message for problem in pods.problems)


def test_a_node_that_is_not_reached_is_not_believed() -> None:
    far = make(2, tunnel_port=4789)
    other = make(3, addresses=ips("192.0.2.1"))
    pods = filled(view_of(far, other), says("n3", a10_244_3_5=300))
    assert pods.rows == {}
    pods.view(view_of(far, make(3)))
    assert row(pods, "10.244.3.5").identity == 300


def test_nothing_is_said_before_the_first_plan() -> None:
    pods = RemotePods()
    assert not pods.update(pods.put(says("n2", a10_244_2_5=300), "u"))
    assert pods.view(view_of(make(2))).put


NODES = [make(2), make(3, epoch=2), BORROWED, make(4), make(5, addresses=ips("198.51.100.5"))]
PODS = st.dictionaries(
    st.sampled_from(
        ips("10.244.2.5", "10.244.3.5", "10.250.0.5", "10.250.0.6", "10.244.1.5", "192.0.2.3")
    ),
    st.integers(300, 303).map(IdentityId),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(["n2", "n3", "n4"]), PODS),
        st.tuples(st.just("remove"), st.sampled_from(["n2", "n3", "n4"])),
        st.tuples(
            st.just("view"), st.lists(st.sampled_from(NODES), unique_by=lambda one: one.name)
        ),
        st.tuples(st.just("own"), st.sets(st.sampled_from(ips("10.244.1.5", "10.250.0.6")))),
    ),
    max_size=12,
)


@given(STEPS)
def test_step_by_step_gives_what_all_at_once_gives(steps: Any) -> None:
    pods = RemotePods()
    kernel: dict[Any, Any] = {}
    published: dict[Any, Any] = {}
    own: frozenset[Any] = frozenset()
    view = view_of(*NODES[:2])
    pods.view(view)
    for sequence, step in enumerate(steps):
        if step[0] == "put":
            published[step[1]] = Publication(step[1], 1, sequence, step[2])
            changes = pods.update(pods.put(published[step[1]], "u"))
        elif step[0] == "remove":
            published.pop(step[1], None)
            changes = pods.update(pods.remove(step[1]))
        elif step[0] == "view":
            view = view_of(*step[1])
            changes = pods.view(view)
        else:
            own = frozenset(step[1])
            changes = pods.set_own_pods(own)
        kernel.update(changes.put)
        for network in changes.remove:
            del kernel[network]
        fresh = RemotePods()
        fresh.set_own_pods(own)
        fresh.replace((publication, "u") for publication in published.values())
        fresh.view(view)
        assert kernel == pods.rows == fresh.rows
        assert pods.routes == fresh.routes
        assert pods.problems == fresh.problems


def test_a_hundred_thousand_pods_are_taken_in_within_seconds() -> None:
    peers = many(5000)
    view = view_of(*peers)
    publications = [
        Publication(
            peer.name,
            1,
            1,
            {peer.pod_cidrs[0][offset]: IdentityId(offset) for offset in range(2, 22)},
        )
        for peer in peers
    ]
    pods = RemotePods()
    begin = time.process_time()
    pods.replace((publication, "u") for publication in publications)
    pods.view(view)
    took_s = time.process_time() - begin
    assert len(pods.rows) == 100_000
    took_each_s = []
    for number in range(7, 12):
        one = publications[number]
        address = peers[number].pod_cidrs[0][30]
        news = Publication(one.node, 1, 2, {**one.identities, address: IdentityId(9)})
        begin = time.process_time()
        changes = pods.update(pods.put(news, "u"))
        took_each_s.append(time.process_time() - begin)
        assert len(changes.put) == 1
    news_s = min(took_each_s)
    print(f"all in {took_s:.2f} s, one node's news in {news_s * 1e6:.0f} us")
    assert took_s < 60
    assert news_s < 0.1
