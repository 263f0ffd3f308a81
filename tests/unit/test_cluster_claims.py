"""Who keeps what two nodes claim: the older claim, on every node alike, and for as long as it is published."""

import ipaddress
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.control.cluster.facts import decode_node, encode_node, node_key
from podwire.control.cluster.ownership import everything_claimed, number_claims, settle
from podwire.control.cluster.publish import ClaimRefused, NodePublisher
from podwire.model.cluster import NodeFacts
from podwire.model.errors import Unavailable
from tests.fakes.store import MemoryStore
from tests.unit.test_cluster_planner import ips, make, nets, overlap

RANGES = nets(
    "10.244.0.0/16", "10.244.2.0/23", "10.244.2.0/24", "10.244.3.0/24", "10.244.3.128/25",
    "10.250.0.0/24", "fd00::/48", "fd00:0:0:2::/64",
)  # fmt: skip
ADDRESSES = ips("192.0.2.2", "192.0.2.3", "2001:db8::2")


def make_node(name: Any, ranges: Any = (), addresses: Any = (), number: Any = None) -> Any:
    facts = NodeFacts(name, "i", 1, tuple(addresses), tuple(ranges))
    if number is None:
        return facts
    return msgspec.structs.replace(facts, claims=dict.fromkeys(everything_claimed(facts), number))


def publish(facts: Any, others: Any, living: Any = ()) -> Any:
    """Give the facts as a node publishes them that has read what others say."""
    numbers = number_claims(everything_claimed(facts), dict(facts.claims), others, set(living))
    return msgspec.structs.replace(facts, claims=numbers)


def standing(everybody: Any, viewer: Any) -> Any:
    """Give what stands of all but the viewer, as that node sees it, and whether its own claims do."""
    own = next(facts for facts in everybody if facts.name == viewer)
    outcome = settle(own, [facts for facts in everybody if facts.name != viewer])
    stands = {
        (name, what)
        for found in (outcome.ranges, outcome.addresses)
        for name, several in found.items()
        for what in several
    }
    lost = {one.what for one, _ in outcome.lost}
    return stands | {(viewer, one) for one in everything_claimed(own) if one not in lost}


OUTSIDER = make_node("zz")


def rightful(everybody: Any) -> Any:
    """Give what stands in the eyes of a node that claims nothing."""
    return standing([*everybody, OUTSIDER], "zz")


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        pytest.param(("b", "10.244.2.0/24", 3), ("c", "10.244.2.0/24", 4), "b", id="older"),
        pytest.param(("c", "10.244.2.0/24", 3), ("b", "10.244.2.0/24", 4), "c", id="not the name"),
        pytest.param(("b", "10.244.0.0/16", 3), ("c", "10.244.2.0/24", 4), "b", id="larger, older"),
        pytest.param(("b", "10.244.2.0/24", 3), ("c", "10.244.0.0/16", 4), "b", id="within, older"),
        pytest.param(("c", "fd00::/48", 5), ("b", "fd00:0:0:2::/64", 5), "b", id="equal: the name"),
        pytest.param(("b", "10.244.2.0/24", 3), ("c", "10.244.2.0/24", None), "c",
                     id="of an agent that gives no numbers"),
        pytest.param(("b", "10.244.2.0/24", 3), ("c", "10.244.3.0/24", 4), "bc", id="apart"),
    ],
)  # fmt: skip
def test_who_keeps_a_range(first: Any, second: Any, wanted: Any) -> None:
    nodes = [make_node(name, nets(text), (), number) for name, text, number in (first, second)]
    assert {name for name, _ in rightful(nodes)} == set(wanted)
    outcome = settle(OUTSIDER, nodes)
    said = [problem.message for problem in outcome.problems]
    assert len(said) == (len(wanted) == 1)
    assert all(f"{wanted} has the older claim and keeps it" in one for one in said)


def test_a_block_goes_to_the_higher_epoch_whatever_the_numbers() -> None:
    block = nets("10.250.0.0/26")[0]
    old = msgspec.structs.replace(make_node("b"), blocks={block: 1}, claims={block: 1})
    new = msgspec.structs.replace(make_node("c"), blocks={block: 2}, claims={block: 9})
    assert rightful([old, new]) == {("c", block)}


def test_a_block_that_has_fallen_takes_nothing_from_a_third() -> None:
    """b < c by epoch, c < d by number, d < b by number: whoever is first out of a circle is out of it."""
    block = nets("10.250.0.0/26")[0]
    b = msgspec.structs.replace(make_node("b"), blocks={block: 1}, claims={block: 1})
    c = msgspec.structs.replace(make_node("c"), blocks={block: 2}, claims={block: 9})
    d = make_node("d", nets("10.250.0.0/24"), (), 5)
    assert {name for name, _ in rightful([b, c, d])} == {"d"}


def test_an_address_of_a_node_that_is_gone_goes_to_the_machine_that_has_it_now() -> None:
    old = make_node("b", nets("10.244.2.0/24"), ips("192.0.2.2"), 4)
    heir = publish(make_node("c", nets("10.244.3.0/24"), ips("192.0.2.2")), [old])
    assert ("c", ADDRESSES[0]) in rightful([old, heir])
    assert ("b", RANGES[2]) in rightful([old, heir])
    rival = publish(make_node("d", (), ips("192.0.2.2")), [old], living={"b"})
    assert ("b", ADDRESSES[0]) in rightful([old, rival])
    back = publish(old, [heir], living={"c"})
    assert ("c", ADDRESSES[0]) in rightful([back, heir])


@st.composite
def clusters(draw: Any) -> Any:
    """Nodes with numbers of any kind, blocks among their ranges."""
    nodes = []
    for name in "abcde"[: draw(st.integers(1, 5))]:
        ranges = draw(st.lists(st.sampled_from(RANGES), max_size=3, unique=True))
        split = draw(st.integers(0, len(ranges)))
        by_family = {drawn.version: drawn for drawn in draw(st.lists(st.sampled_from(ADDRESSES)))}
        facts = msgspec.structs.replace(
            make_node(name, ranges[:split], by_family.values()),
            blocks={one: draw(st.integers(0, 3)) for one in ranges[split:]},
        )
        claims = {one: draw(st.integers(-1, 4)) for one in everything_claimed(facts)}
        nodes.append(msgspec.structs.replace(facts, claims=claims))
    return nodes


@given(clusters(), st.randoms(use_true_random=False))
def test_neither_order_nor_viewer_matters(nodes: Any, chance: random.Random) -> None:
    wanted = rightful(nodes)
    shuffled = list(nodes)
    chance.shuffle(shuffled)
    assert rightful(shuffled) == wanted
    for viewer in nodes:
        seen = standing(shuffled, viewer.name)
        assert seen <= wanted  # a viewer believes no node that claims what is the viewer's own
        mine = everything_claimed(viewer)
        for name, what in wanted - seen:
            assert name != viewer.name
            assert any(what == one or (what not in ADDRESSES and one not in ADDRESSES
                       and overlap(what, one)) for one in mine)  # fmt: skip


@given(clusters())
def test_never_two_and_always_one(nodes: Any) -> None:
    stands = rightful(nodes)
    for name, what in stands:
        for other, theirs in stands:
            if name != other:
                assert what != theirs
                if what not in ADDRESSES and theirs not in ADDRESSES:
                    assert not overlap(what, theirs)
    for facts in nodes:
        for what in everything_claimed(facts):
            if (facts.name, what) in stands:
                continue
            problems = settle(OUTSIDER, nodes).problems
            assert any(
                facts.name in problem.nodes and len(problem.nodes) > 1 for problem in problems
            )


NEWCOMERS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(RANGES), max_size=2, unique=True),
        st.lists(st.sampled_from(ADDRESSES), max_size=1),
    ),
    min_size=1,
    max_size=6,
)


@given(NEWCOMERS, st.permutations("abcdef"))
def test_an_established_claim_never_loses_to_a_later_one(newcomers: Any, names: Any) -> None:
    """Whoever comes, whatever its name: what stood before it stands after it, also when all publish again."""
    there: list[Any] = []
    for name, (ranges, addresses) in zip(names, newcomers, strict=False):
        before = rightful(there)
        living = {facts.name for facts in there}
        there.append(publish(make_node(name, ranges, addresses), there, living))
        assert before <= rightful(there)
        again = [publish(facts, [o for o in there if o is not facts], living) for facts in there]
        assert rightful(again) == rightful(there)


# With the store


def started(store: Any, facts: Any, instance: Any = "", cluster_cidrs: Any = ()) -> Any:
    """Give the publisher of an agent that has started and published itself."""
    publisher = NodePublisher(store, facts.name, instance or f"instance of {facts.name}")
    publisher.claim(str(facts.addresses[0]))
    publisher.refuse_contested(facts, cluster_cidrs)
    publisher.publish(facts)
    return publisher


def read(store: Any, name: Any) -> Any:
    return decode_node(store.get(node_key(name)))


def test_claims_are_numbered_in_the_order_in_which_nodes_come() -> None:
    store = MemoryStore()
    for number in (5, 3, 4):
        started(store, make(number))
    assert [set(read(store, f"n{number}").claims.values()) for number in (5, 3, 4)] == [
        {1}, {2}, {3}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        pytest.param({"pod_cidrs": nets("10.244.2.0/24")},
                     "pod range 10.244.2.0/24 on node 'n1': node 'n2' at 192.0.2.2, 2001:db8::2, which lives, has"
                     " 10.244.2.0/24", id="the same range"),
        pytest.param({"pod_cidrs": nets("10.244.0.0/16")},
                     "pod range 10.244.0.0/16 on node 'n1': node 'n2' at", id="a range around it"),
        pytest.param({"addresses": ips("192.0.2.2")},
                     "address 192.0.2.2 on node 'n1': node 'n2' at", id="its address"),
    ],
)  # fmt: skip
def test_a_newcomer_that_wants_what_another_has_is_refused(changes: Any, wanted: Any) -> None:
    store = MemoryStore()
    started(store, make(2))
    with pytest.raises(ClaimRefused) as refused:
        started(store, make(1, **changes))
    assert wanted in refused.value.message
    assert "podwire delete node n2" in refused.value.hint
    assert store.get(node_key("n1")) is None


def test_what_nobody_believes_of_another_keeps_no_node_from_starting() -> None:
    """A liar that names everything, by the oldest claim there can be."""
    store = MemoryStore()
    everything = nets("10.0.0.0/8", "fd00::/8")
    liar = NodePublisher(store, "n2", "liar")
    liar.claim("192.0.2.2")
    liar.claims = dict.fromkeys(everything, -1000)
    liar.publish(make(2, pod_cidrs=everything))
    started(store, make(3), cluster_cidrs=nets("10.244.0.0/16", "fd00::/48"))
    started(store, make(4))


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        pytest.param({"pod_cidrs": nets("10.244.2.0/24")}, True, id="its pods are there"),
        pytest.param({"addresses": ips("192.0.2.2")}, False, id="an address given out again"),
    ],
)
def test_what_a_node_has_that_does_not_live_now(changes: Any, is_refused: Any) -> None:
    store = MemoryStore()
    started(store, make(2)).close()
    if not is_refused:
        started(store, make(3, **changes))
        assert read(store, "n3").claims[ADDRESSES[0]] == 0
        with pytest.raises(ClaimRefused):
            started(store, make(2))
        return
    with pytest.raises(ClaimRefused, match="which is not alive now"):
        started(store, make(3, **changes))
    started(store, make(2))


def test_a_node_that_starts_again_or_is_replaced_keeps_its_place() -> None:
    store = MemoryStore()
    started(store, make(2)).close()
    intruder = NodePublisher(store, "n1", "elsewhere")  # it started while the store was away
    intruder.claim("192.0.2.1")
    intruder.publish(make(1, pod_cidrs=nets("10.244.2.0/24")))
    started(store, make(2)).close()
    started(store, make(2), "another machine")
    assert set(read(store, "n2").claims.values()) == {1}
    nodes = [read(store, name) for name in ("n1", "n2")]
    assert ("n2", RANGES[2]) in rightful(nodes)
    assert ("n1", RANGES[2]) not in rightful(nodes)
    with pytest.raises(ClaimRefused):
        intruder.refuse_contested(make(1, pod_cidrs=nets("10.244.2.0/24")))


def test_a_store_that_lost_everything_gets_the_same_numbers_again() -> None:
    store = MemoryStore()
    publishers = {number: started(store, make(number)) for number in (2, 3)}
    before = {name: read(store, name) for name in ("n2", "n3")}
    for name in before:
        store.delete(node_key(name))
    for number in (3, 2):
        publishers[number].publish(make(number))
    assert {name: read(store, name) for name in before} == before


@pytest.mark.parametrize(
    ("taken_by", "number"),
    [pytest.param(None, 3, id="by nobody"), pytest.param(4, 4, id="by another node meanwhile")],
)
def test_an_address_that_was_let_go_and_taken_again_is_the_youngest(
    taken_by: Any, number: int
) -> None:
    store = MemoryStore()
    publisher = started(store, make(2))
    started(store, make(3))
    publisher.publish(make(2, addresses=()))
    assert ADDRESSES[0] not in read(store, "n2").claims
    if taken_by:
        started(store, make(taken_by, addresses=make(2).addresses))
    others = [read(store, f"n{one}") for one in (3, taken_by) if one]
    publisher.publish(make(2), lambda: others)
    assert read(store, "n2").claims[ADDRESSES[0]] == number
    assert publisher.claims == read(store, "n2").claims
    nodes = [read(store, "n2"), *others]
    assert (f"n{taken_by or 2}", ADDRESSES[0]) in rightful(nodes)
    assert read(store, "n2").claims[RANGES[2]] == 1, "what it kept is as old as before"


def test_an_address_whose_absence_could_not_be_written_is_as_old_as_before() -> None:
    store = MemoryStore()
    publisher = started(store, make(2))
    started(store, make(3))

    def refuse(_new: Any) -> None:
        raise Unavailable("write")

    store.before_update = refuse
    with pytest.raises(Unavailable):
        publisher.publish(make(2, addresses=()))
    store.before_update = lambda _new: None
    assert publisher.publish(make(2), lambda: [read(store, "n3")]).claims[ADDRESSES[0]] == 1


def test_numbers_of_what_is_let_go_do_not_pile_up() -> None:
    store = MemoryStore()
    publisher = started(store, make(2))
    held = len(publisher.claims)
    for number in range(20):
        block = ipaddress.ip_network(f"10.250.{number}.0/26")
        publisher.publish(make(2, blocks={block: 1}), list)
        assert len(publisher.claims) == held + 1
    publisher.publish(make(2), list)
    assert publisher.claims == read(store, "n2").claims
    before = publisher.claims
    publisher.publish(make(2, underlay_mtu_bytes=1400), list)
    assert publisher.claims is before, "nobody is woken for nothing"


def test_a_new_range_of_a_running_node_comes_after_what_others_have() -> None:
    store = MemoryStore()
    publisher = started(store, make(2))
    started(store, make(3))
    block = ipaddress.ip_network("10.250.0.0/26")
    publisher.publish(make(2, blocks={block: 1}), lambda: [read(store, "n3")])
    assert read(store, "n2").claims[block] == 3


def test_a_node_of_an_older_version_was_there_first() -> None:
    store = MemoryStore()
    started(store, make(2))
    stored = store.get(node_key("n2"))
    assert stored is not None
    document = encode_node(msgspec.structs.replace(decode_node(stored), claims={}))
    store.update(msgspec.structs.replace(stored, document=document))
    with pytest.raises(ClaimRefused):
        started(store, make(3, pod_cidrs=nets("10.244.2.0/24")))
    newer = NodePublisher(store, "n2", "instance of n2")
    assert set(newer.publish(make(2)).claims.values()) == {0}
