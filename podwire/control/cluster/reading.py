"""Read fields of the documents that agents write for each other, and report what is wrong, field by field.

Used by `control.cluster.facts` and `control.cluster.published`. Pure. Invariant: nothing of a document is used when
anything in it is wrong; every fault names its field.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

from podwire.model.cluster import Claimed
from podwire.model.documents.reader import Faults, Node, root, shown
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.networks import read_address, read_network

EPOCH_MAX: Final = (1 << 63) - 1

_T = TypeVar("_T")


class Fields:
    """The fields of a document's spec, read one by one."""

    def __init__(self, document: Mapping[str, Any], faults: Faults) -> None:
        self._object = root(document, faults).child("spec")
        if not isinstance(self._object.value, Mapping):
            self._object.wrong(f"is {shown(self._object.value)}, not an object")

    def wrong(self, name: str, message: str) -> None:
        """Note a fault of a field."""
        self._object.child(name).wrong(message)

    def text(self, name: str, default: str = "") -> str:
        """Give a text, `default` when it is absent."""
        node = self._object.child(name)
        return node.text() if isinstance(node.value, str) else node.text() or default

    def number(self, name: str, low: int, high: int, default: int) -> int:
        """Give a whole number from `low` to `high`, `default` when it is absent."""
        number = self._object.child(name).integer(low, high)
        return default if number is None else number

    def texts(self, name: str) -> list[str]:
        """Give a list of texts, empty when it is absent."""
        texts = [(item.value, item.text()) for item in self._items(name)]
        return [text for value, text in texts if isinstance(value, str)]

    def numbers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """Give a list of whole numbers, empty when it is absent."""
        numbers = (item.integer(low, high) for item in self._items(name))
        return tuple(number for number in numbers if number is not None)

    def addresses(self, name: str) -> tuple[IPAddress, ...]:
        """Give a list of addresses."""
        return self._convert_all(name, read_address, "address")

    def networks(self, name: str) -> tuple[IPNetwork, ...]:
        """Give a list of ranges, without bits behind the prefix."""
        return self._convert_all(name, read_network, "range")

    def epochs(self, name: str) -> dict[IPNetwork, int]:
        """Give an object of ranges and the epochs they were claimed in."""
        epochs: dict[IPNetwork, int] = {}
        for key, node in self._members(name):
            network = self._convert(name, key, read_network, "range")
            if network is not None:
                epochs[network] = node.integer(0, EPOCH_MAX) or 0
        return epochs

    def claims(self, name: str, limit: int) -> dict[Claimed, int]:
        """Give an object of addresses and ranges and their numbers, from -`limit` to `limit`."""
        claims: dict[Claimed, int] = {}
        for key, node in self._members(name):
            convert = read_network if "/" in str(key) else read_address
            claimed = self._convert(name, key, convert, "address or range")
            if claimed is not None:
                claims[claimed] = node.integer(-limit, limit) or 0
        return claims

    def _members(self, name: str) -> Iterator[tuple[str, Node]]:
        """Give an object's members; none when it is absent or no object, which is noted."""
        node = self._object.child(name)
        if node.present and not isinstance(node.value, Mapping):
            node.wrong(f"is {shown(node.value)}, not an object")
        elif node.present:
            for key in node.value:
                yield key, _present(node.child(key))

    def _items(self, name: str) -> list[Node]:
        return [_present(item) for item in self._object.child(name).items()]

    def _convert_all(self, name: str, make: Callable[[str], _T], what: str) -> tuple[_T, ...]:
        values = [self._convert(name, text, make, what) for text in self.texts(name)]
        return tuple(value for value in values if value is not None)

    def _convert(self, name: str, text: str, make: Callable[[str], _T], what: str) -> _T | None:
        try:
            return make(text)
        except (ValueError, TypeError):
            self.wrong(name, f"has {shown(text)}, which is no {what}")
            return None


def _present(node: Node) -> Node:
    """Note as a fault that an element is null: only a field may be absent."""
    if not node.present:
        node.wrong("is null")
    return node
