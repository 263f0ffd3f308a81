"""Whatever stands in the store, the check of it gives an answer, and what it lets through hurts nobody."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.agent.duties.addresses import IpamNews
from podwire.agent.duties.follower import KindList
from podwire.control.cluster.planner import NodeNumbers
from podwire.control.cluster.reach import ClusterSettings
from podwire.control.cluster.state import ClusterState
from podwire.control.documents.damage import find_fault
from podwire.control.identity.known import KnownIdentities
from podwire.control.identity.sources import LabelSources
from podwire.control.ipam.claiming.claims import Claims
from podwire.control.ipam.pool import PoolIpam
from podwire.control.ipam.pool_cache import PoolCache
from podwire.model.store import ObjectKey, StoredObject, StoreEvent
from podwire.model.store.kinds import KINDS
from tests.fakes.store import MemoryStore

_TEXTS = st.sampled_from(
    ["", "n", "1", "-1", "10.0.0.0/26", "10.0.0.9", "10.0.0.1-10.0.0.2", "10.0.0.9-::9", "[", "::"]
)
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXTS
_FIELDS = st.sampled_from(
    re.findall(
        r"\w+",
        "metadata spec labels annotations name cidr pool node epoch kept address handle instance"
        " holds blocks claims addresses podCIDRs bases endpoints others sequence namedPorts requires"
        " reserved blockSize namePattern network podSelector ingress endpointSelector matchLabels",
    )
)
_JSON: st.SearchStrategy[Any] = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_FIELDS, inner, max_size=4),
    max_leaves=12,
)
_DOCUMENTS = st.fixed_dictionaries({}, optional={"metadata": _JSON, "spec": _JSON, "specs": _JSON})
_NAMES = st.sampled_from(["n", "7", "10-0-0-0-26", "10-0-0-9", "none"])


def _listeners() -> list[Callable[[StoredObject], object]]:
    """Give who is told of objects on followers' threads, but for policies, which look after themselves."""
    ipam = PoolIpam(Claims(MemoryStore(), PoolCache("n")))
    news = IpamNews(ipam)
    cluster = ClusterState("own", "i", ClusterSettings(), NodeNumbers())
    identities, sources = KnownIdentities(), LabelSources()

    def tell(kinds: Sequence[str], take: Callable[[StoredObject], object]) -> Any:
        return lambda stored: stored.key.kind in kinds and take(stored)

    return [
        tell(IpamNews.KINDS, lambda one: news.on_lists([KindList(one.key.kind, [one], 1)])),
        tell(IpamNews.KINDS, lambda one: news.on_events([StoreEvent(one, 2)], {one.key.kind: 2})),
        tell(("nodes", "nodeendpoints"), lambda one: cluster.replace(one.key.kind, [one])),
        tell(("nodes", "nodeendpoints"), lambda one: cluster.apply(StoreEvent(one, 2))),
        tell(("identities",), lambda one: identities.apply(StoreEvent(one, 2))),
        tell(("namespaces", "workloads"), lambda one: sources.apply(StoreEvent(one, 2))),
    ]


@given(kind=st.sampled_from(KINDS), name=_NAMES, document=_DOCUMENTS)
def test_no_document_breaks_a_listener(kind: Any, name: str, document: dict[str, Any]) -> None:
    stored = StoredObject(key=ObjectKey(kind.plural, "", name), revision=1, document=document)
    if find_fault(stored):
        return
    for tell in _listeners():
        tell(stored)


@given(kind=st.sampled_from(["nodes", "nodeendpoints"]), document=_DOCUMENTS)
def test_what_stands_where_this_node_published_breaks_nothing_and_is_seen(
    kind: str, document: dict[str, Any]
) -> None:
    key = ObjectKey(kind, "", "own")
    stored = StoredObject(key=key, revision=1, document=document)
    for listed in (True, False):
        cluster = ClusterState("own", "i", ClusterSettings(), NodeNumbers())
        # Not checked before: whoever publishes puts it right.
        if listed:
            cluster.replace(kind, [stored])
        else:
            cluster.apply(StoreEvent(stored, 2))
        if kind == "nodeendpoints" and find_fault(stored) and "metadata" not in document:
            assert cluster.own_overwritten


@pytest.mark.parametrize(
    ("kept", "readable"),
    [
        (["10.0.0.60-10.0.0.62"], True),
        (["10.0.0.9"], True),
        (["10.0.0.0-10.0.0.64"], False),
        (["9.0.0.0-10.0.0.9"], False),
        (["10.0.0.9-10.0.0.8"], False),
        (["10.0.0.9-::ffff:9"], False),
        (["0.0.0.0-255.255.255.255"], False),
        ([7.5], False),
        (7, False),
    ],
    ids=[
        "range",
        "single",
        "behind",
        "before",
        "backwards",
        "families",
        "all",
        "number",
        "no-list",
    ],
)
def test_what_a_block_keeps_is_inside_it(kept: object, readable: bool) -> None:
    spec = {"cidr": "10.0.0.0/26", "pool": "p", "node": "n", "epoch": 1, "kept": kept}
    key = ObjectKey("ipblocks", "", "10-0-0-0-26")
    assert (find_fault(StoredObject(key=key, document={"spec": spec})) == "") is readable


@pytest.mark.parametrize(
    ("spec", "readable"),
    [
        ({"instance": "i", "addresses": [], "requires": ["telepathy"]}, True),
        ({"instance": "i", "addresses": ["x"], "requires": ["telepathy"]}, True),
        ({"instance": "i", "addresses": ["x"]}, False),
        ({"holds": [7]}, True),
    ],
    ids=["demands", "demands-and-wrong", "wrong", "no-agent-yet"],
)
def test_a_node_that_demands_the_unknown_is_refused_and_not_kept(
    spec: object, readable: bool
) -> None:
    stored = StoredObject(key=ObjectKey("nodes", "", "n"), document={"spec": spec})
    assert (find_fault(stored) == "") is readable
