"""Collect every fault of a request, then raise them as one error of the lowest CNI code, with all in its details.

Used by `cni.netconf` and the modules it calls. A reader never raises on bad input: it notes the fault and returns a
neutral value. Invariant: the number of noted faults is bounded, so a request full of faults costs no more than a good
one.
"""

from typing import Any, Final

from podwire.model.documents.reader import list_faults, shown
from podwire.model.endpoint import PROTOCOLS
from podwire.model.errors import (
    Fault,
    IncompatibleVersion,
    InvalidConfiguration,
    InvalidEnvironment,
    InvalidRequest,
    UndecodableRequest,
    UnsupportedField,
)

_BY_CODE: Final[tuple[type[InvalidRequest], ...]] = (
    IncompatibleVersion,
    UnsupportedField,
    InvalidEnvironment,
    UndecodableRequest,
    InvalidConfiguration,
)
"""The classes in the order of their CNI codes 1, 2, 4, 6, 7."""

NAMED_IN_MESSAGE: Final = 5
KEPT_OF_EACH_KIND: Final = 32


class _Never:
    """The type of no value."""


class Faults:
    """The faults of one request so far."""

    def __init__(self) -> None:
        self._found: dict[type[InvalidRequest], list[Fault]] = {}
        self._count = 0

    def note(self, kind: type[InvalidRequest], path: str, message: str) -> None:
        """Remember that `path` of the input `message` ("is not a number")."""
        self._count += 1
        kept = self._found.setdefault(kind, [])
        if len(kept) < KEPT_OF_EACH_KIND:
            kept.append(Fault(path, message))

    def wrong(self, path: str, message: str) -> None:
        """Note a value that is understood and not usable: of the environment when `path` begins so, else of stdin."""
        self.note(
            InvalidEnvironment if path.startswith("CNI_") else InvalidConfiguration, path, message
        )

    def raise_if_any(self, *, hint: str) -> None:
        """Raise all that was noted as one error."""
        if not self._found:
            return
        kinds = sorted(self._found, key=_BY_CODE.index)
        faults = tuple(fault for kind in kinds for fault in self._found[kind])
        listed = list_faults(faults, self._count, NAMED_IN_MESSAGE)
        raise kinds[0](f"decode request: {listed}", hint=hint, faults=faults)

    def read_object(self, value: Any, path: str) -> dict[str, Any]:
        """Give an object; absent and null are an empty one."""
        members: dict[str, Any] = self._read(value, path, dict, "an object", {})
        return members

    def read_folded(self, value: Any, path: str) -> dict[str, Any]:
        """Give an object with its keys in lower case: some runtimes write them in their own case."""
        raw = self.read_object(value, path)
        folded = {key.lower(): member for key, member in raw.items()}
        if len(folded) != len(raw):
            self.wrong(path, "has a key twice, in different case")
        return folded

    def read_list(self, value: Any, path: str, *, limit: int) -> list[Any]:
        """Give a list of at most `limit` elements; absent and null are an empty one."""
        elements: list[Any] = self._read(value, path, list, "a list", [])
        if len(elements) > limit:
            self.wrong(path, f"has {len(elements)} elements; at most {limit} are allowed")
            return []
        return elements

    def read_text(self, value: Any, path: str, *, limit: int = 4096) -> str:
        """Give a string without NUL; absent and null are ""."""
        text: str = self._read(value, path, str, "a string", "")
        if "\0" in text or len(text) > limit:
            self.wrong(
                path, f"is {shown(text)}: it has a NUL character or more than {limit} characters"
            )
            return ""
        return text

    def read_protocol(self, value: Any, path: str) -> str:
        """Give a protocol that has ports, in capitals; absent and null are TCP."""
        protocol = self.read_text(value, path).upper() or "TCP"
        if protocol not in PROTOCOLS:
            self.wrong(path, f"is {shown(protocol)}, not one of {', '.join(PROTOCOLS)}")
        return protocol

    def read_integer(self, value: Any, path: str, *, low: int, high: int) -> int | None:
        """Give a whole number from `low` to `high`; None when it is absent, null or at fault."""
        # JSON's true is an int to Python and to nobody else.
        wanted = _Never if isinstance(value, bool) else int
        number = self._read(value, path, wanted, "a whole number")
        if number is not None and not low <= number <= high:
            self.wrong(path, f"is {number}, not from {low} to {high}")
            return None
        return None if number is None else int(number)

    def _read(self, value: Any, path: str, wanted: type, name: str, absent: object = None) -> Any:
        if value is None:
            return absent
        if not isinstance(value, wanted):
            self.note(UndecodableRequest, path, f"is {shown(value)}, not {name}")
            return absent
        return value
