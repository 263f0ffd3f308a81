"""Pools come, change and go: what is refused is believed when a pool has it, and a pool that goes withdraws nothing."""

import ipaddress
from typing import Any

import pytest

from podwire.control.cluster.facts import encode_node, node_key
from podwire.control.cluster.grants import PoolGrants
from podwire.control.cluster.planner import NodeNumbers
from podwire.control.cluster.published import Publication, encode_endpoints, endpoints_key
from podwire.control.cluster.reach import ClusterSettings
from podwire.control.cluster.state import ClusterState, OwnNode
from podwire.model.ids import IdentityId
from podwire.model.store import ObjectKey, StoredObject, StoreEvent
from tests.unit.test_cluster_planner import OWN, UNDERLAY, make, nets

SETTINGS = ClusterSettings("overlay", nets("10.244.0.0/16", "fd00::/48"))
BLOCK = nets("10.99.0.0/26")[0]
FIXED = ipaddress.ip_address("10.99.7.7")
REVISIONS = iter(range(1, 1 << 30))


def pool(name: str, cidr: Any) -> StoredObject:
    return StoredObject(key=ObjectKey("ippools", "", name), document={"spec": {"cidr": cidr}})


def node(facts: Any) -> StoredObject:
    return StoredObject(key=node_key(facts.name), document=encode_node(facts))


def pods(name: str, *addresses: Any) -> StoredObject:
    publication = Publication(name, 1, next(REVISIONS), dict.fromkeys(addresses, IdentityId(300)))
    return StoredObject(
        key=endpoints_key(name), uid="u", document=encode_endpoints(publication, ())
    )


class Watched:
    """A node's view of the others, object by object."""

    def __init__(self, saved: str = "") -> None:
        self.state = ClusterState("n1", "i1", SETTINGS, NodeNumbers(), PoolGrants.load(saved))

    def lists(self, nodes: Any = (), endpoints: Any = (), pools: Any = ()) -> Any:
        for kind, objects in (("nodes", nodes), ("nodeendpoints", endpoints), ("ippools", pools)):
            self.state.replace(kind, objects)
        return self.advance()

    def put(self, *objects: StoredObject) -> Any:
        for one in objects:
            self.state.apply(StoreEvent(one, next(REVISIONS)))
        return self.advance()

    def delete(self, *objects: StoredObject) -> Any:
        for one in objects:
            self.state.apply(StoreEvent(one, next(REVISIONS), deleted=True))
        return self.advance()

    def advance(self) -> Any:
        self.state.advance(OwnNode(OWN, UNDERLAY))
        return self

    def restarted(self, *lists: Any) -> Any:
        return Watched(self.state.grants.dump()).lists(*lists)

    @property
    def has(self) -> set[str]:
        """What of n2 is believed, outside of its range in the cluster."""
        plan = self.state.plan
        return {
            str(prefix)
            for prefix in plan.prefixes
            if prefix.version == 4 and str(prefix).startswith("10.99.")
        }

    @property
    def said(self) -> str:
        return " | ".join(problem.message for problem in self.state.problems)


PEER = make(2, blocks={BLOCK: 1})
PUBLISHED = (node(PEER), pods("n2", FIXED))
BOTH = {"10.99.0.0/26", "10.99.7.7/32"}
POOL = pool("p", "10.99.0.0/16")


def believing() -> Any:
    return Watched().lists([PUBLISHED[0]], [PUBLISHED[1]], [POOL])


def test_a_pool_that_comes_makes_what_was_refused_right() -> None:
    watched = Watched().lists([PUBLISHED[0]], [PUBLISHED[1]])
    assert watched.has == set()
    assert "pod range 10.99.0.0/26 is refused" in watched.said
    assert "address 10.99.7.7, which node n2 publishes as a pod's, is refused" in watched.said
    watched.put(POOL)
    assert watched.has == BOTH
    assert watched.said == ""


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(lambda one: one.delete(POOL), id="goes"),
        pytest.param(lambda one: one.put(pool("p", "10.98.0.0/16")), id="changes"),
        pytest.param(lambda one: one.put(pool("p", "10.99.7.0/24")), id="shrinks"),
        pytest.param(lambda one: one.put(pool("p", ["wrong"])), id="cannot be read"),
        pytest.param(
            lambda one: one.lists([PUBLISHED[0]], [PUBLISHED[1]]), id="is gone after a gap"
        ),
        pytest.param(
            lambda one: one.restarted([PUBLISHED[0]], [PUBLISHED[1]]), id="goes while nobody looks"
        ),
        pytest.param(
            lambda one: one.delete(POOL).restarted([PUBLISHED[0]], [PUBLISHED[1]]),
            id="goes, then a restart",
        ),
    ],
)
def test_a_pool_that_goes_withdraws_nothing_that_runs(after: Any) -> None:
    watched = after(believing())
    assert watched.has == BOTH
    assert watched.said == ""


def test_out_of_a_pool_that_has_gone_nothing_new_is_believed() -> None:
    watched = believing().delete(POOL)
    watched.put(
        node(make(2, blocks={BLOCK: 1, nets("10.99.1.0/26")[0]: 1})),
        node(make(3, blocks={nets("10.99.2.0/26")[0]: 1})),
    )
    watched.put(pods("n2", FIXED, FIXED + 1), pods("n3", FIXED + 2))
    assert watched.has == BOTH
    for text in ("10.99.1.0/26", "10.99.2.0/26", "10.99.7.8", "10.99.7.9"):
        assert text in watched.said


def test_a_new_pod_in_what_stays_is_a_pod() -> None:
    watched = believing().delete(POOL).put(pods("n2", FIXED, BLOCK[9]))
    assert watched.has == {*BOTH, "10.99.0.9/32"}


def test_what_is_not_published_any_more_does_not_come_back() -> None:
    watched = believing().delete(POOL).put(node(make(2)), pods("n2"))
    assert watched.has == set()
    watched.put(*PUBLISHED)
    assert watched.has == set()
    assert watched.state.grants.current().of_node == {}


def test_a_batch_in_which_a_pool_goes_first_brings_nothing_in() -> None:
    watched = Watched().lists([], [], [POOL])
    for event in (
        StoreEvent(POOL, 1, deleted=True),
        *(StoreEvent(publication, 2) for publication in PUBLISHED),
    ):
        watched.state.apply(event)
    assert watched.advance().has == set()


def test_a_pool_of_this_nodes_name_is_a_pool() -> None:
    watched = Watched().lists([PUBLISHED[0]], [PUBLISHED[1]])
    watched.put(pool("n1", "10.99.0.0/16"))
    assert watched.has == BOTH
