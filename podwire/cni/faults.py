"""Collect every fault of a request, then raise them as one error: that of the lowest CNI code, with all in its details.

Used by `cni.netconf` and what it calls. A reader never raises on bad input: it notes the fault and gives a neutral
value.
"""

from typing import Any

from podwire.model.errors import (
    Fault,
    IncompatibleVersion,
    InvalidConfiguration,
    InvalidEnvironment,
    InvalidRequest,
    UndecodableRequest,
    UnsupportedField,
)

_BY_CODE: tuple[type[InvalidRequest], ...] = (
    IncompatibleVersion,
    UnsupportedField,
    InvalidEnvironment,
    UndecodableRequest,
    InvalidConfiguration,
)
"""The classes in the order of their CNI codes 1, 2, 4, 6, 7."""

SHOWN_BYTES = 80


class Faults:
    """The faults of one request so far."""

    def __init__(self) -> None:
        self._found: list[tuple[type[InvalidRequest], Fault]] = []

    def note(self, kind: type[InvalidRequest], path: str, message: str) -> None:
        """Remember that `path` of the input `message` ("is not a number")."""
        self._found.append((kind, Fault(path, message)))

    def raise_if_any(self, *, hint: str) -> None:
        """Raise all that was noted as one error."""
        if not self._found:
            return
        kind = min((kind for kind, _ in self._found), key=_BY_CODE.index)
        ordered = sorted(self._found, key=lambda one: _BY_CODE.index(one[0]))
        faults = tuple(fault for _, fault in ordered)
        message = "; ".join(f"{fault.path} {fault.message}" for fault in faults[:5])
        if len(faults) > 5:
            message += f"; and {len(faults) - 5} more"
        raise kind(f"decode request: {message}", hint=hint, faults=faults)

    def read_object(self, value: Any, path: str) -> dict[str, Any]:
        """Give an object; absent and null are an empty one."""
        found: dict[str, Any] = self._read(value, path, dict, "an object", {})
        return found

    def read_list(self, value: Any, path: str, *, limit: int) -> list[Any]:
        """Give a list of at most `limit` elements; absent and null are an empty one."""
        found: list[Any] = self._read(value, path, list, "a list", [])
        if len(found) > limit:
            self.note(InvalidConfiguration, path, f"has {len(found)} elements, more than {limit}")
            return []
        return found

    def read_text(self, value: Any, path: str, *, limit: int = 4096) -> str:
        """Give a string without NUL; absent and null are ""."""
        found: str = self._read(value, path, str, "a string", "")
        if "\0" in found or len(found) > limit:
            self.note(InvalidConfiguration, path, f"has a NUL byte or more than {limit} characters")
            return ""
        return found

    def read_integer(self, value: Any, path: str, *, low: int, high: int) -> int:
        """Give a whole number from `low` to `high`; absent and null are 0."""
        if isinstance(value, bool):
            value = str(value).lower()
        found: int = self._read(value, path, int, "a whole number", 0)
        if value is not None and isinstance(value, int) and not low <= found <= high:
            self.note(InvalidConfiguration, path, f"is {found}, not from {low} to {high}")
            return 0
        return found

    def _read(self, value: Any, path: str, wanted: type, name: str, absent: Any) -> Any:
        if value is None:
            return absent
        if not isinstance(value, wanted):
            self.note(UndecodableRequest, path, f"is {shown(value)}, not {name}")
            return absent
        return value


def shown(value: object) -> str:
    """Write a value into a message, cut where it would flood it."""
    text = repr(value)
    return text if len(text) <= SHOWN_BYTES else text[:SHOWN_BYTES] + "..."
