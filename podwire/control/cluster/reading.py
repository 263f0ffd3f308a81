"""Read fields of the documents that agents write for each other, and report what is wrong, field by field.

Used by `control.cluster.facts` and `control.cluster.published`. Pure. Invariant: nothing of a document is used when
anything in it is wrong; every fault names its field.
"""

import ipaddress
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from podwire.model.cluster import Claimed
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import Fault, InvalidRequest

FAULTS_KEPT: Final = 16
SHOWN_CHARACTERS: Final = 60
EPOCH_MAX: Final = (1 << 63) - 1

_T = TypeVar("_T")


class Fields:
    """The fields of one object, read one by one. `path` stands before their names in faults."""

    def __init__(self, value: object, path: str, faults: list[Fault]) -> None:
        self._path = path
        self._faults = faults
        self._values: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
        if not isinstance(value, Mapping):
            self.wrong("", f"is {_shown(value)}, not an object")

    def wrong(self, name: str, message: str) -> None:
        """Note a fault of a field."""
        if len(self._faults) < FAULTS_KEPT:
            self._faults.append(Fault(".".join(filter(None, (self._path, name))), message))

    def has(self, name: str) -> bool:
        """Tell whether there is a value."""
        return self._values.get(name) is not None

    def text(self, name: str, default: str = "") -> str:
        """Give a text, `default` when it is absent."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            self.wrong(name, f"is {_shown(value)}, not text")
            return default
        return value

    def number(self, name: str, low: int, high: int, default: int) -> int:
        """Give a whole number from `low` to `high`, `default` when it is absent."""
        value = self._values.get(name)
        if value is None:
            return default
        return self._number(name, value, low, high, default)

    def texts(self, name: str) -> list[str]:
        """Give a list of texts, empty when it is absent."""
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            self.wrong(name, f"is {_shown(value)}, not a list of texts")
            return []
        return list(value)

    def numbers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """Give a list of whole numbers, empty when it is absent."""
        value = self._values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            self.wrong(name, f"is {_shown(value)}, not a list of numbers")
            return ()
        return tuple(self._number(name, one, low, high, low) for one in value)

    def address(self, name: str) -> IPAddress | None:
        """Give one address, None when it is absent."""
        text = self.text(name)
        return self._convert(name, text, ipaddress.ip_address, "address") if text else None

    def addresses(self, name: str) -> tuple[IPAddress, ...]:
        """Give a list of addresses."""
        found = [
            self._convert(name, one, ipaddress.ip_address, "address") for one in self.texts(name)
        ]
        return tuple(one for one in found if one is not None)

    def networks(self, name: str) -> tuple[IPNetwork, ...]:
        """Give a list of ranges, without bits behind the prefix."""
        found = [
            self._convert(name, one, ipaddress.ip_network, "range") for one in self.texts(name)
        ]
        return tuple(one for one in found if one is not None)

    def epochs(self, name: str) -> dict[IPNetwork, int]:
        """Give an object of ranges and the epochs they were claimed in."""
        found: dict[IPNetwork, int] = {}
        for key, epoch in self._object(name).items():
            network = self._convert(name, key, ipaddress.ip_network, "range")
            if network is not None:
                found[network] = self._number(name, epoch, 0, EPOCH_MAX, 0)
        return found

    def claims(self, name: str, limit: int) -> dict[Claimed, int]:
        """Give an object of addresses and ranges and their numbers, from -`limit` to `limit`."""
        found: dict[Claimed, int] = {}
        for key, number in self._object(name).items():
            convert = ipaddress.ip_network if "/" in str(key) else ipaddress.ip_address
            what = self._convert(name, key, convert, "address or range")
            if what is not None:
                found[what] = self._number(name, number, -limit, limit, 0)
        return found

    def _object(self, name: str) -> Mapping[str, object]:
        """Give an object's members; none when it is absent or no object, which is noted."""
        value = self._values.get(name, {})
        if value is None or isinstance(value, Mapping):
            return value or {}
        self.wrong(name, f"is {_shown(value)}, not an object")
        return {}

    def _number(self, name: str, value: object, low: int, high: int, default: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self.wrong(name, f"is {_shown(value)}, not a whole number")
            return default
        if not low <= value <= high:
            self.wrong(name, f"is {_shown(value)}, not from {low} to {high}")
            return default
        return value

    def _convert(self, name: str, text: str, make: Callable[[str], _T], what: str) -> _T | None:
        try:
            return make(text)
        except (ValueError, TypeError):
            self.wrong(name, f"has {_shown(text)}, which is no {what}")
            return None


def refuse(what: str, name: str, faults: list[Fault]) -> None:
    """Raise InvalidRequest that names the first faults, if there are any."""
    if faults:
        listed = "; ".join(f"{one.path} {one.message}" for one in faults[:3])
        raise InvalidRequest(f"read {what} {name!r}: {listed}", faults=tuple(faults))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
