"""Two nodes claim one range in Kubernetes: what their core Nodes say decides, whoever came first, whatever is said."""

import itertools
from ipaddress import ip_address, ip_network
from typing import Any, Final

import pytest
from msgspec.structs import replace

from podwire.control.cluster.facts import decode_node, encode_node, node_key
from podwire.control.cluster.ownership import describe_lost, settle
from podwire.control.cluster.published import Publication, encode_endpoints
from podwire.control.kubernetes.core_node import core_node_key
from podwire.model.cluster import Granted, NodeFacts
from podwire.model.errors import Unavailable
from podwire.model.store import StoredObject
from tests.fakes.store import MemoryStore
from tests.unit.test_cluster_duty import Rig
from tests.unit.test_cluster_planner import make
from tests.waiting import wait_for

RANGE: Final = ip_network("10.244.9.0/24")
OTHER: Final = ip_network("10.244.8.0/24")
OWN: Final = NodeFacts("own", "i", 1, (ip_address("192.0.2.10"),))


def claimant(name: str, number: int, granted: Granted | None, cidr: Any = RANGE) -> NodeFacts:
    return NodeFacts(
        name, f"i-{name}", 1, (ip_address(f"192.0.2.{number + 20}"),), (cidr,),
        claims={cidr: number}, granted=granted,
    )  # fmt: skip


HAS: Final = Granted((RANGE,), "2026-01-02T00:00:00Z")
HAD_IT_BEFORE: Final = Granted((RANGE,), "2026-01-01T00:00:00Z")
HAS_ANOTHER: Final = Granted((OTHER,), "2026-01-01T00:00:00Z")
IS_GONE: Final = Granted()
HAS_MORE: Final = Granted((ip_network("10.244.0.0/16"),), "2026-01-02T00:00:00Z")


@pytest.mark.parametrize(
    ("older", "younger", "wanted"),
    [
        (None, None, "older"),
        (IS_GONE, HAS, "younger"),
        (HAS_ANOTHER, HAS, "younger"),
        (HAS, IS_GONE, "older"),
        (HAS, HAS, "older"),
        (IS_GONE, IS_GONE, "older"),
        (IS_GONE, HAS_MORE, "younger"),
        (None, HAS, "younger"),
        (None, IS_GONE, "older"),
    ],
)
def test_the_core_nodes_decide_before_the_age_of_claims(
    older: Granted | None, younger: Granted | None, wanted: str
) -> None:
    nodes = [claimant("older", 1, older), claimant("younger", 2, younger)]
    for peers in itertools.permutations(nodes):
        outcome = settle(OWN, peers)
        stands = [name for name, ranges in outcome.ranges.items() if ranges]
        assert stands == [wanted]
        assert outcome.contested == {"older", "younger"}


def test_claims_that_began_at_once_are_ordered_by_the_age_of_the_core_nodes() -> None:
    peers = [claimant("a", 1, HAS), claimant("b", 1, HAD_IT_BEFORE)]
    outcome = settle(OWN, peers)
    assert outcome.ranges == {"a": [], "b": [RANGE]}


def test_a_claim_that_nobody_contradicts_needs_no_word_of_the_core_node() -> None:
    outcome = settle(OWN, [claimant("a", 1, IS_GONE), claimant("b", 2, None, OTHER)])
    assert outcome.ranges == {"a": [RANGE], "b": [OTHER]}
    assert not outcome.contested


def test_the_loser_is_told_by_what_it_lost() -> None:
    mine = replace(claimant("own", 1, IS_GONE), addresses=OWN.addresses)
    outcome = settle(mine, [claimant("b", 2, HAS)])
    said = describe_lost(outcome, only_ranges=True)
    assert f"pod range {RANGE} of node own" in said
    assert "node b has 10.244.9.0/24 by its core Node" in said


def test_what_a_node_publishes_is_owned_by_its_core_node() -> None:
    facts = replace(claimant("a", 1, None), core_uid="uid-1")
    document = encode_node(facts)
    owner = {"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "uid-1"}
    assert document["metadata"]["ownerReferences"] == [owner]
    assert decode_node(StoredObject(key=node_key("a"), document=document)).core_uid == "uid-1"
    again = encode_node(replace(facts, core_uid="uid-2"), document)
    assert again["metadata"]["ownerReferences"] == [{**owner, "uid": "uid-2"}]
    pods = encode_endpoints(Publication("a", 1, 1), (), "uid-1")
    assert pods["metadata"]["ownerReferences"] == [owner]


# The duty, which reads core Nodes


class Reads(MemoryStore):
    """Notes which core Nodes are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def leases(self) -> Any:
        return None

    def get(self, key: Any) -> Any:
        if key.kind == core_node_key("x").kind:
            self.read.append(key.name)
        return super().get(key)


def make_core_node(store: MemoryStore, name: str, *cidrs: Any) -> str:
    document = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "spec": {"podCIDRs": [str(cidr) for cidr in cidrs]},
    }
    return store.create(StoredObject(key=core_node_key(name), document=document)).uid


def ranges_of(rig: Rig) -> dict[str, list[Any]]:
    with rig.duty.lock:
        planned = rig.duty.state.planned
        return {} if planned is None else {n: list(r.ranges) for n, r in planned.reaches.items()}


def test_peers_follow_a_range_to_the_node_that_the_api_gives_it() -> None:
    store = Reads()
    old = make_core_node(store, "old", RANGE)
    rig = Rig(store, has_core_nodes=True)
    with rig.running():
        rig.publish_peer(replace(claimant("old", 1, None), core_uid=old))
        wait_for(lambda: ranges_of(rig).get("old") == [RANGE], "the old node")
        assert store.read == []
        store.delete(core_node_key("old"))
        new = make_core_node(store, "new", RANGE)
        rig.publish_peer(replace(claimant("new", 2, None), core_uid=new))
        wait_for(lambda: ranges_of(rig).get("new") == [RANGE], "the new node")
        assert ranges_of(rig)["old"] == []
        rig.publish_peer(claimant("third", 3, None, OTHER))
        wait_for(lambda: ranges_of(rig).get("third") == [OTHER], "another plan")
        assert sorted(store.read) == ["new", "old"]


def test_an_agent_that_claims_a_neighbours_range_gets_nothing() -> None:
    store = Reads()
    victim = make_core_node(store, "victim", RANGE)
    liar = make_core_node(store, "liar", OTHER)
    rig = Rig(store, has_core_nodes=True)
    with rig.running():
        rig.publish_peer(replace(claimant("victim", 5, None), core_uid=victim))
        # It says that its claim is the older one, and that the victim's core Node owns its publication.
        for uid in (liar, victim, ""):
            rig.publish_peer(replace(claimant("liar", 1, None), core_uid=uid))
            wait_for(lambda: "liar" in store.read, "the contest to be read")
            wait_for(lambda: ranges_of(rig).get("victim") == [RANGE], "the owner")
            assert ranges_of(rig).get("liar") == []


def test_a_node_of_another_uid_is_not_the_one_that_published() -> None:
    store = Reads()
    make_core_node(store, "old", RANGE)
    new = make_core_node(store, "new", RANGE)
    rig = Rig(store, has_core_nodes=True)
    with rig.running():
        rig.publish_peer(replace(claimant("old", 1, None), core_uid="of an earlier machine"))
        rig.publish_peer(replace(claimant("new", 2, None), core_uid=new))
        wait_for(lambda: ranges_of(rig).get("new") == [RANGE], "the new node")


def test_this_node_gives_nothing_of_a_range_that_another_has_and_serves_again_when_it_ends() -> (
    None
):
    store, why = Reads(), [""]
    mine = make(1).pod_cidrs[0]
    make_core_node(store, "n1")
    holder = make_core_node(store, "holder", mine)
    rig = Rig(store, has_core_nodes=True)
    rig.duty.range_lost = lambda lost: why.__setitem__(0, lost)
    rig.publish_peer(replace(claimant("holder", 1, None, mine), core_uid=holder))
    with rig.running():
        assert "holder" in why[0]  # before anybody could ask for an address
        wait_for(
            lambda: any(
                check.name == "node-claims" and not check.ok for check in rig.health.checks()
            ),
            "status",
        )
        store.delete(node_key("holder"))
        wait_for(lambda: not why[0], "the end of the contest")


def test_while_the_api_is_away_the_present_holder_stays_and_the_contest_is_read_later() -> None:
    store = Reads()
    old = make_core_node(store, "old")
    new = make_core_node(store, "new", RANGE)
    rig = Rig(store, has_core_nodes=True)
    real = store.get
    store.get = lambda key: _refuse(key) if "core" in key.kind else real(key)  # type: ignore[method-assign]
    with rig.running():
        rig.publish_peer(replace(claimant("old", 1, None), core_uid=old))
        rig.publish_peer(replace(claimant("new", 2, None), core_uid=new))
        wait_for(lambda: ranges_of(rig).get("old") == [RANGE], "the present holder")
        store.get = real  # type: ignore[method-assign]
        wait_for(lambda: ranges_of(rig).get("new") == [RANGE], "what the core Nodes say")


def _refuse(key: Any) -> Any:
    raise Unavailable(f"get {key}: no answer")


def test_without_core_nodes_nothing_is_read() -> None:
    store = Reads()
    rig = Rig(store)
    with rig.running():
        rig.publish_peer(claimant("a", 1, None))
        rig.publish_peer(claimant("b", 2, None))
        wait_for(lambda: ranges_of(rig).get("a") == [RANGE], "the older claim")
        assert store.read == []


def test_nothing_is_published_without_a_core_node() -> None:
    store = Reads()
    rig = Rig(store, has_core_nodes=True)
    ranges = rig.duty.own_ranges()
    silent = replace(ranges, why_silent="there is no core Node n1")
    rig.duty.own_ranges = lambda: silent
    with rig.running():
        wait_for(
            lambda: any("no core Node n1" in check.message for check in rig.health.checks()),
            "status",
        )
        assert store.get(node_key("n1")) is None
        rig.duty.own_ranges = lambda: replace(ranges, core_uid="u1")
        rig.duty.ranges_changed()
        stored = wait_for(lambda: store.get(node_key("n1")), "the publication")
        assert decode_node(stored).core_uid == "u1"
