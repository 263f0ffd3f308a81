"""Kinds of two API groups that share a name: each by its own, in the store, over the API and on the command line."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from podwire.control.documents.kinds import decode, make_key
from podwire.model.errors import InvalidRequest
from podwire.model.store import ObjectKey, Store, StoredObject
from podwire.model.store.kinds import CORE_NODE, KINDS, NODE, Kind, find_kind, kind_of_document
from tests.fakes.node import FakeNode
from tests.unit.test_rest import Served, serving

OURS = StoredObject(
    key=ObjectKey("nodes", "", "a"),
    document={"apiVersion": "podwire.io/v1", "kind": "Node", "metadata": {"name": "a"}, "spec": {"instance": "i"}},
)  # fmt: skip
CORE = StoredObject(
    key=ObjectKey("nodes.core", "", "a"),
    document={"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"}, "spec": {"podCIDR": "10.1.0.0/24"}},
)  # fmt: skip

BEFORE = {
    "namespaces", "ippools", "workloads", "ciliumcidrgroups", "networkpolicies", "ciliumnetworkpolicies",
    "ciliumclusterwidenetworkpolicies", "identities", "nodes", "nodeendpoints", "ipblocks", "ipaddresses",
}  # fmt: skip
"""Names that keys have in stores that agents of earlier versions use, too."""


def test_keys_already_stored_stay_as_they_are() -> None:
    assert {kind.plural for kind in KINDS} - {
        "nodes.core",
        "pods",
        "services",
        "endpointslices",
    } == BEFORE


def test_every_kind_is_found_by_each_of_its_words() -> None:
    for kind in KINDS:
        assert kind.plural in kind.words
        assert {find_kind(word.upper()) for word in kind.words} == {kind}


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("node", NODE), ("nodes", NODE), ("pwn", NODE), ("node.podwire.io", NODE), ("nodes.podwire.io", NODE),
        ("node.core", CORE_NODE), ("nodes.core", CORE_NODE), ("nodes.cilium.io", None),
    ],
)  # fmt: skip
def test_which_node_is_meant(word: str, kind: Kind | None) -> None:
    assert find_kind(word) == kind


@pytest.mark.parametrize(
    ("stored", "kind"), [(OURS, NODE), (CORE, CORE_NODE)], ids=["ours", "core"]
)
def test_a_document_says_which_it_is(stored: StoredObject, kind: Any) -> None:
    assert kind_of_document(stored.document["apiVersion"], "Node") is kind
    assert make_key(stored.key.kind, "", "a") == stored.key
    with pytest.raises(
        InvalidRequest, match="Kubernetes makes" if kind is CORE_NODE else "agents make"
    ):
        decode(stored.document)


@pytest.fixture
async def served(tmp_path: Path, node: FakeNode, store: Store) -> AsyncIterator[Served]:
    for stored in (OURS, CORE):
        store.create(stored)
    async with serving(tmp_path, node, store=store) as api:
        yield api


async def test_both_live_side_by_side_over_the_api(served: Served) -> None:
    for word, wanted in (
        ("nodes", OURS), ("nodes.podwire.io", OURS), ("pwn", OURS), ("nodes.core", CORE), ("node.core", CORE)
    ):  # fmt: skip
        listed = (await served.get(f"/object/{word}")).json["items"]
        assert [item["spec"] for item in listed] == [wanted.document["spec"]]
        assert (await served.get(f"/object/{word}/a")).json["spec"] == wanted.document["spec"]
    refused = await served.ask("DELETE", "/v1/object/nodes.core/a", b"")
    assert (refused.status, "belongs to Kubernetes" in str(refused.json)) == (409, True)
    assert (await served.ask("DELETE", "/v1/object/nodes.podwire.io/a", b"")).status == 200
    assert (await served.get("/object/nodes.core/a")).status == 200
    assert (await served.get("/object/nodes/a")).status == 404
