"""Objects in the form that needs least memory: read as every other document, and decoded only when somebody looks."""

from typing import Any

import pytest

from podwire.model.store import ObjectKey, StoredObject
from podwire.model.store.packed import LazyList, PackedDocument, encode_any, pack

DOCUMENT = {"kind": "Identity", "spec": {"labels": ["a", "b"]}}


def test_a_packed_document_reads_like_the_one_it_was_made_of() -> None:
    packed = pack(DOCUMENT)
    assert packed == DOCUMENT
    assert packed == DOCUMENT
    assert {**packed} == DOCUMENT
    assert packed.get("metadata") is None
    assert len(packed) == 2
    assert encode_any(packed) == encode_any(DOCUMENT)
    assert pack(packed) == packed


@pytest.mark.parametrize("value", [10**5000, object()], ids=["huge number", "no JSON"])
def test_what_no_json_can_say_stays_as_it_is(value: Any) -> None:
    document = {"spec": value}
    assert pack(document) is document
    assert not isinstance(pack(document), PackedDocument)


def test_a_lazy_list_is_a_list_that_makes_its_objects_when_asked() -> None:
    made: list[int] = []

    def make(number: int) -> StoredObject:
        made.append(number)
        return StoredObject(key=ObjectKey("pools", "", str(number)), revision=number)

    lazy = LazyList([1, 2, 3], make)
    assert len(lazy) == 3
    assert made == []
    assert lazy[-1].revision == 3
    assert [stored.revision for stored in lazy[1:]] == [2, 3]
    assert lazy == [make(1), make(2), make(3)]
    assert lazy != [make(1)]
    assert made.count(1) >= 2, "nobody keeps what was made"
