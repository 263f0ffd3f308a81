"""Read a document value by value: the path of each value, its type, and every fault.

Used by all that decode documents, and for its faults by `podwire.cni`. Reading never raises: it notes the fault and
returns a neutral value; a decoder ends with `Faults.raise_if_any`. Invariant: a key that no reader knows is a fault
where `expect_object` is asked, so that what is accepted is carried out completely. Absent and null are the same, as in
Kubernetes; an empty list is different from both.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from podwire.model.errors import Fault, InvalidRequest

FAULTS_KEPT: Final = 64
NAMED_IN_MESSAGE: Final = 3
SHOWN_CHARACTERS: Final = 80

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class Faults:
    """The faults of one document so far: bounded, so that a document made of faults costs no more than a good one.

    `mentions` takes what the document names without being at fault, for callers that want to know.
    """

    def __init__(self, mentions: list[Any] | None = None) -> None:
        self.kept: list[Fault] = []
        self._count = 0
        self._mentions = mentions

    def mention(self, mention: object) -> None:
        """Remember that the document names something that need not exist."""
        if self._mentions is not None:
            self._mentions.append(mention)

    def note(self, path: str, message: str, *, is_mistyped: bool = False) -> None:
        """Remember that `path` of the document `message` ("is not a list")."""
        self._count += 1
        # Bounded: a document of a megabyte can have hundreds of thousands of faults.
        if len(self.kept) < FAULTS_KEPT:
            self.kept.append(Fault(path, message, is_mistyped))
        elif is_mistyped:
            # Whether there is one decides what the whole document is taken for.
            self.kept[-1] = Fault(path, message, is_mistyped)

    def raise_if_any(self, intent: str, *, hint: str = "") -> None:
        """Raise all that was noted as one InvalidRequest; `intent` is what failed ("decode IPPool")."""
        if self.kept:
            listed = list_faults(self.kept, self._count)
            raise InvalidRequest(f"{intent}: {listed}", hint=hint, faults=tuple(self.kept))


def list_faults(
    faults: Sequence[Fault], count: int | None = None, limit: int = NAMED_IN_MESSAGE
) -> str:
    """Write the first of `count` faults (None: there are no others than these) into one line."""
    count = len(faults) if count is None else count
    named = [f"{fault.path or 'it'} {fault.message}" for fault in faults[:limit]]
    if count > len(named):
        named.append(f"and {count - len(named)} more")
    return "; ".join(named)


class Node(msgspec.Struct, frozen=True):
    """One value of a document, where it stands, and where its faults go."""

    value: Any
    path: str
    faults: Faults

    @property
    def present(self) -> bool:
        """Tell whether there is a value: absent and null are none."""
        return self.value is not None

    def wrong(self, message: str) -> None:
        """Note a fault of this value."""
        self.faults.note(self.path, message)

    def mistyped(self, message: str) -> None:
        """Note that this value is of another type than the field."""
        self.faults.note(self.path, message, is_mistyped=True)

    def child(self, key: str) -> "Node":
        """Give one field; absent when this is no object, or has none of that name."""
        member = self.value.get(key) if isinstance(self.value, Mapping) else None
        return Node(member, join_path(self.path, key), self.faults)

    def expect_object(
        self, known: Collection[str], refused: Mapping[str, str] | None = None
    ) -> bool:
        """Check that this is an object of `known` keys; `refused` says why others are not carried out."""
        if not isinstance(self.value, Mapping):
            self.mistyped(f"is {shown(self.value)}, not an object")
            return False
        for key, value in self.value.items():
            if not isinstance(key, str):
                self.mistyped(f"has the key {shown(key)}, which is not text")
            elif refused and key in refused and value is not None:
                self.faults.note(join_path(self.path, key), f"is not supported: {refused[key]}")
            elif key not in known and not (refused and key in refused):
                self.faults.note(join_path(self.path, key), "is an unknown field")
        return True

    def items(self) -> "list[Node]":
        """Give the elements of a list; of what is absent, or no list, none."""
        if self.value is None:
            return []
        if not isinstance(self.value, list | tuple):
            self.mistyped(f"is {shown(self.value)}, not a list")
            return []
        return [
            Node(value, f"{self.path}[{index}]", self.faults)
            for index, value in enumerate(self.value)
        ]

    def text(self) -> str:
        """Give a text; "" when it is absent or at fault."""
        if self.value is not None and not isinstance(self.value, str):
            quoted = isinstance(self.value, bool | int | float)
            self.mistyped(f"is {shown(self.value)}, not text" + (" (quote it)" if quoted else ""))
        return self.value if isinstance(self.value, str) else ""

    def integer(self, low: int, high: int) -> int | None:
        """Give a whole number from `low` to `high`; None when it is absent or at fault."""
        if self.value is None:
            return None
        # `bool` is a kind of `int` in Python.
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.mistyped(f"is {shown(self.value)}, not a whole number")
            return None
        if not low <= self.value <= high:
            self.wrong(f"is {shown(self.value)}, not from {low} to {high}")
            return None
        return self.value

    def boolean(self) -> bool | None:
        """Give a truth value; None when it is absent or at fault."""
        if self.value is not None and not isinstance(self.value, bool):
            self.mistyped(f"is {shown(self.value)}, not true or false")
            return None
        return self.value

    def choice(self, allowed: Collection[str]) -> str:
        """Give one of `allowed`; "" when it is absent or at fault."""
        chosen = self.text()
        if isinstance(self.value, str) and chosen not in allowed:
            self.wrong(f"is {shown(chosen)}, not one of {', '.join(allowed)}")
            return ""
        return chosen


def root(document: Mapping[str, Any], faults: Faults) -> Node:
    """Begin to read a document."""
    return Node(document, "", faults)


def join_path(path: str, key: str) -> str:
    """Write the path of a field; a key that is no plain word stands in brackets."""
    if not _PLAIN_KEY.fullmatch(key):
        return f"{path}[{shown(key)}]"
    return f"{path}.{key}" if path else key


def shown(value: object) -> str:
    """Write a value into a message: cut where it would flood it, and nothing that breaks a line or a terminal."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    # Python refuses to write integers of thousands of digits (sys.set_int_max_str_digits), and a message must not
    # fail.
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return "a number of more than 64 bits"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    # `ascii` leaves no escape sequence that a terminal would obey.
    text = ascii(value[: SHOWN_CHARACTERS + 1] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
