"""Pools as documents and as choices: every fault at once, overlaps by both names, who may have which pool."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from podwire.control.documents.apply import apply_documents, put_object
from podwire.control.documents.kinds import make_key
from podwire.control.documents.pools import decode_pool
from podwire.control.ipam.pools import (
    NamespaceFacts,
    Pool,
    choose_pools,
    find_overlaps,
    read_pool_names,
)
from podwire.model.errors import InvalidConfiguration, InvalidRequest
from podwire.model.store import ObjectKey, Store, StoredObject
from podwire.store.sqlite import SqliteStore
from tests.fakes.pool_nodes import PoolNode, apply, pool_document
from tests.fakes.store import MemoryStore


def read(cidr: str, name: str = "p", **spec: Any) -> Pool:
    """Decode a pool."""
    return decode_pool(pool_document(name, cidr, **spec))


GOOD: list[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]] = [
    ("defaults", "10.0.0.0/16", {}, {"block_size": 26, "use": "pods", "strict_affinity": False}),
    ("IPv6", "fd00::/48", {}, {"block_size": 122}),
    ("smaller than a default block", "10.0.0.0/28", {}, {"block_size": 28}),
    ("own block size", "10.0.0.0/16", {"blockSize": 24}, {"block_size": 24, "block_count": 256}),
    ("for nodes", "10.0.0.0/16", {"use": "nodes"}, {"use": "nodes"}),
    ("limits", "10.0.0.0/16", {"maxBlocksPerNode": 3}, {"max_blocks_per_node": 3}),
]


@pytest.mark.parametrize(
    ("cidr", "spec", "expected"), [case[1:] for case in GOOD], ids=[case[0] for case in GOOD]
)
def test_a_good_pool_is_read(
    cidr: str, spec: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    pool = read(cidr, **spec)
    assert {name: getattr(pool, name) for name in expected} == expected


BAD: list[tuple[str, str, Mapping[str, Any], list[str]]] = [
    ("no network", "10.0.0.1/16", {}, ["spec.cidr"]),
    ("not text", "x", {}, ["spec.cidr"]),
    ("loopback", "127.0.0.0/16", {}, ["spec.cidr"]),
    ("multicast", "ff00::/64", {}, ["spec.cidr"]),
    ("block larger than pool", "10.0.0.0/24", {"blockSize": 23}, ["spec.blockSize"]),
    ("block of half an address", "10.0.0.0/24", {"blockSize": 33}, ["spec.blockSize"]),
    ("IPv6 block of IPv4's size", "fd00::/64", {"blockSize": 26}, ["spec.blockSize"]),
    ("unknown field", "10.0.0.0/24", {"blocksize": 26}, ["spec.blocksize"]),
    ("use", "10.0.0.0/24", {"use": "everything"}, ["spec.use"]),
    ("reserved outside", "10.0.0.0/24", {"reserved": ["10.0.1.1"]}, ["spec.reserved[0]"]),
    (
        "reserved backwards",
        "10.0.0.0/24",
        {"reserved": ["10.0.0.9-10.0.0.1"]},
        ["spec.reserved[0]"],
    ),
    (
        "reserved of two families",
        "10.0.0.0/24",
        {"reserved": ["10.0.0.9-fd00::1"]},
        ["spec.reserved[0]"],
    ),
    (
        "several at once",
        "10.0.0.0/24",
        {"strictAffinity": "yes", "maxBlocksPerNode": -1, "nodeSelector": {"matchLabels": 3}},
        ["spec.nodeSelector.matchLabels", "spec.strictAffinity", "spec.maxBlocksPerNode"],
    ),
]


@pytest.mark.parametrize(
    ("cidr", "spec", "paths"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_every_fault_of_a_bad_pool_is_named(
    cidr: str, spec: Mapping[str, Any], paths: list[str]
) -> None:
    store = MemoryStore()
    with pytest.raises(InvalidRequest) as caught:
        apply_documents(store, [pool_document("p", cidr, **spec)])
    assert sorted(fault.path for fault in caught.value.faults) == sorted(
        f"documents[0].{path}" for path in paths
    )
    assert not store.list("ippools")[0]


def test_every_overlap_is_found_and_nothing_else() -> None:
    pools = {
        name: read(cidr, name)
        for name, cidr in {
            "all": "10.0.0.0/8",
            "half": "10.0.0.0/9",
            "inner": "10.1.0.0/16",
            "apart": "11.0.0.0/16",
            "six": "fd00::/64",
        }.items()
    }
    found = {frozenset((one.name, other.name)) for one, other in find_overlaps(pools.values())}
    assert found == {
        frozenset(pair) for pair in (("all", "half"), ("all", "inner"), ("half", "inner"))
    }


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return SqliteStore(tmp_path / "store.db")


def test_an_overlapping_pool_is_refused_by_both_names(store: Store) -> None:
    apply(store, pool_document("first", "10.0.0.0/16"))
    with pytest.raises(InvalidRequest) as caught:
        apply(store, pool_document("second", "10.0.128.0/20"))
    [fault] = caught.value.faults
    assert fault.path == "documents[0].spec.cidr"
    assert "10.0.128.0/20" in fault.message
    assert "first (10.0.0.0/16)" in fault.message
    key = make_key("ippool", "", "second")
    with pytest.raises(InvalidRequest):
        put_object(store, key, pool_document("second", "10.0.128.0/20"))


def test_a_pool_over_a_nodes_own_range_is_refused_by_both_names(store: Store) -> None:
    spec = {"instance": "i", "epoch": 1, "addresses": ["192.0.2.1"], "podCIDRs": ["10.0.3.0/24"]}
    document = {
        "apiVersion": "podwire.io/v1",
        "kind": "Node",
        "metadata": {"name": "n1"},
        "spec": spec,
    }
    store.create(StoredObject(key=ObjectKey("nodes", "", "n1"), document=document))
    with pytest.raises(InvalidRequest, match=r"node n1 has 10\.0\.3\.0/24"):
        apply(store, pool_document("p", "10.0.0.0/16"))
    with pytest.raises(InvalidRequest, match=r"node n1 itself has the address 192\.0\.2\.1"):
        apply(store, pool_document("p", "192.0.2.0/24"))
    apply(store, pool_document("p", "10.1.0.0/16"))


def test_a_pool_in_use_is_never_cut_anew(store: Store) -> None:
    apply(store, pool_document("p", "10.0.0.0/24", blockSize=28))
    node = PoolNode(store, "n1")
    node.claims.claim_block(node.known.pools["p"])
    changes: list[dict[str, Any]] = [{"cidr": "10.1.0.0/24"}, {"blockSize": 27}]
    for change in changes:
        with pytest.raises(InvalidRequest, match="nodes have 1 blocks"):
            apply(store, pool_document("p", **{"cidr": "10.0.0.0/24", "blockSize": 28, **change}))
    apply(store, pool_document("p", "10.0.0.0/24", blockSize=28, disabled=True))
    node.hear()
    [block] = node.known.own.values()
    assert node.claims.release_block(block)
    apply(store, pool_document("p", "10.0.0.0/24", blockSize=27))


NODE = {"zone": "a"}
POOLS = {
    one.name: one
    for one in (
        read("10.0.0.0/16", "any"),
        read("10.1.0.0/16", "zone-b", nodeSelector={"matchLabels": {"zone": "b"}}),
        read(
            "10.2.0.0/16",
            "tenant",
            namespaceSelector={
                "matchExpressions": [{"key": "tenant", "operator": "In", "values": ["x", "y"]}]
            },
        ),
        read("10.3.0.0/16", "off", disabled=True),
        read("10.4.0.0/16", "nodes", use="nodes"),
        read("fd00::/64", "six"),
    )
}
CHOICES: list[tuple[str, NamespaceFacts, list[str], list[str]]] = [
    ("all that fit, by name", NamespaceFacts(), [], ["any", "six"]),
    ("the namespace's labels count", NamespaceFacts({"tenant": "x"}), [], ["any", "six", "tenant"]),
    ("a namespace names pools", NamespaceFacts({}, ("tenant",)), [], ["tenant"]),
    ("the pod's own names win", NamespaceFacts({}, ("tenant",)), ["zone-b"], ["zone-b"]),
    ("in the order named", NamespaceFacts(), ["six", "any"], ["six", "any"]),
]


@pytest.mark.parametrize(
    ("namespace", "named", "expected"),
    [choice[1:] for choice in CHOICES],
    ids=[choice[0] for choice in CHOICES],
)
def test_pods_get_the_pools_that_are_meant_for_them(
    namespace: NamespaceFacts, named: list[str], expected: list[str]
) -> None:
    found = choose_pools(POOLS, node_labels=NODE, namespace=namespace, named=named)
    assert [entry.name for entry in found] == expected


@pytest.mark.parametrize(
    ("name", "reason"),
    [("off", "disabled"), ("nodes", "for nodes"), ("typo", "no such pool")],
)
def test_a_named_pool_that_cannot_be_used_is_refused(name: str, reason: str) -> None:
    for named, namespace in (([name], NamespaceFacts()), ([], NamespaceFacts({}, (name,)))):
        with pytest.raises(InvalidConfiguration, match=reason):
            choose_pools(POOLS, node_labels=NODE, namespace=namespace, named=named)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a, b", ("a", "b")),
        ('["a","b","a"]', ("a", "b")),
        ("", ()),
        (" a ", ("a",)),
        ("[a", ("[a",)),
    ],
)
def test_an_annotation_names_pools(text: str, names: tuple[str, ...]) -> None:
    assert read_pool_names(text) == names
