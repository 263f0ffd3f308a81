"""Objects in the form in which they need least memory: their documents encoded, and decoded when somebody looks.

Used by the stores for long lists, and for documents that are kept although everybody reads the value that was made of
them. Values only. A document of twenty fields takes some kilobytes decoded, and a few hundred bytes so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar, overload

import msgspec

from podwire.model.store import StoredObject

_Row = TypeVar("_Row")

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode


class PackedDocument(Mapping[str, Any]):
    """A document, encoded. Each look decodes all of it."""

    __slots__ = ("encoded",)

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded

    def __getitem__(self, name: str) -> Any:
        return _decode(self.encoded)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_decode(self.encoded))

    def __len__(self) -> int:
        return len(_decode(self.encoded))


def encode_any(document: Mapping[str, Any]) -> bytes:
    """Give a document as JSON, whichever form it has."""
    return document.encoded if isinstance(document, PackedDocument) else _encode(document)


def unpack(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give a document decoded, for several looks."""
    return _decode(document.encoded) if isinstance(document, PackedDocument) else document


def pack(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give a document in the form that needs least memory; one that no JSON can say stays as it is."""
    try:
        return PackedDocument(encode_any(document))
    except (ValueError, TypeError, RecursionError):  # a whole number of thousands of digits, say
        return document


class LazyList(Sequence[StoredObject], Generic[_Row]):
    """Objects that are made of rows when somebody looks, and kept by nobody: a long list is not decoded as a whole."""

    def __init__(self, rows: Sequence[_Row], make: Callable[[_Row], StoredObject]) -> None:
        self._rows = rows
        self._make = make

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[StoredObject]:
        return map(self._make, self._rows)

    @overload
    def __getitem__(self, index: int) -> StoredObject: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[StoredObject]: ...

    def __getitem__(self, index: int | slice) -> StoredObject | Sequence[StoredObject]:
        if isinstance(index, slice):
            return LazyList(self._rows[index], self._make)
        return self._make(self._rows[index])
