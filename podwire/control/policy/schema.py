"""Read documents of policies value by value: the path of each value, its type, and every fault of the document.

Used by `rules_k8s` and `rules_cilium`. Reading never raises: it notes the fault and returns a neutral value; the
decoder ends with `Faults.raise_if_any`. Invariant: a key that no reader knows is a fault, so that what is accepted is
enforced completely. Absent and null are the same, as in Kubernetes; an empty list is different from both.
"""

import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from podwire.control.policy.rule import Operator
from podwire.model.endpoint import IPNetwork
from podwire.model.errors import Fault, InvalidRequest
from podwire.model.labels import is_label_key, is_label_value

FAULTS_KEPT: Final = 64
NAMED_IN_MESSAGE: Final = 3
SHOWN_CHARACTERS: Final = 60
NAME_MAX_CHARACTERS: Final = 253
PORT_NAME_MAX_CHARACTERS: Final = 15
PORT_MAX: Final = 65535

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_OBJECT_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?")
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]+(?:-[a-z0-9]+)*")
_PREFIX_LENGTH = re.compile(r"0|[1-9][0-9]{0,2}")
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]+")


@dataclass(frozen=True, slots=True)
class LabelMention:
    """A label by which a policy selects endpoints, and where it says so. Whether any can have it the filter knows."""

    path: str
    source: str
    key: str


@dataclass(frozen=True, slots=True)
class GroupMention:
    """A CiliumCIDRGroup that a policy names, and where. Whether there is one the store knows."""

    path: str
    name: str


Mention = LabelMention | GroupMention


class Faults:
    """The faults of one document so far: bounded, so that a document made of faults costs no more than a good one.

    `mentions` takes what the document names without being at fault, for those who want to know.
    """

    def __init__(self, mentions: list[Mention] | None = None) -> None:
        self._kept: list[Fault] = []
        self._count = 0
        self._mentions = mentions

    def mention(self, mention: Mention) -> None:
        """Remember that the document names something that need not exist."""
        if self._mentions is not None:
            self._mentions.append(mention)

    def note(self, path: str, message: str) -> None:
        """Remember that `path` of the document `message` ("is not a list")."""
        self._count += 1
        if len(self._kept) < FAULTS_KEPT:
            self._kept.append(Fault(path, message))

    def raise_if_any(self, what: str, *, hint: str) -> None:
        """Raise all that was noted as one InvalidRequest about `what`."""
        if not self._kept:
            return
        named = [f"{fault.path or 'it'} {fault.message}" for fault in self._kept[:NAMED_IN_MESSAGE]]
        if self._count > len(named):
            named.append(f"and {self._count - len(named)} more")
        raise InvalidRequest(
            f"decode {what}: {'; '.join(named)}", hint=hint, faults=tuple(self._kept)
        )


@dataclass(frozen=True, slots=True)
class Node:
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

    def child(self, key: str) -> "Node":
        """Give one field; absent when this is no object, or has none of that name."""
        found = self.value.get(key) if isinstance(self.value, Mapping) else None
        return Node(found, join_path(self.path, key), self.faults)

    def expect_object(
        self, known: Collection[str], refused: Mapping[str, str] | None = None
    ) -> bool:
        """Check that this is an object of `known` keys; `refused` says why others are not carried out."""
        if not isinstance(self.value, Mapping):
            self.wrong(f"is {shown(self.value)}, not an object")
            return False
        for key, value in self.value.items():
            if not isinstance(key, str):
                self.wrong(f"has the key {shown(key)}, which is not text")
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
            self.wrong(f"is {shown(self.value)}, not a list")
            return []
        return [
            Node(value, f"{self.path}[{index}]", self.faults)
            for index, value in enumerate(self.value)
        ]

    def text(self) -> str:
        """Give a text; "" when it is absent or at fault."""
        if self.value is None:
            return ""
        if not isinstance(self.value, str):
            quoted = isinstance(self.value, bool | int | float)
            self.wrong(f"is {shown(self.value)}, not text" + (" (quote it)" if quoted else ""))
            return ""
        return self.value

    def integer(self, low: int, high: int) -> int | None:
        """Give a whole number from `low` to `high`; None when it is absent or at fault."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.wrong(f"is {shown(self.value)}, not a whole number")
            return None
        if not low <= self.value <= high:
            self.wrong(f"is {shown(self.value)}, not from {low} to {high}")
            return None
        return self.value

    def boolean(self) -> bool | None:
        """Give a truth value; None when it is absent or at fault."""
        if self.value is not None and not isinstance(self.value, bool):
            self.wrong(f"is {shown(self.value)}, not true or false")
            return None
        return self.value

    def choice(self, allowed: Collection[str]) -> str:
        """Give one of `allowed`; "" when it is absent or at fault."""
        found = self.text()
        if isinstance(self.value, str) and found not in allowed:
            self.wrong(f"is {shown(found)}, not one of {', '.join(allowed)}")
            return ""
        return found


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
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return "a number of more than 64 bits"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = ascii(value[: SHOWN_CHARACTERS + 1] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


@dataclass(frozen=True, slots=True)
class ObjectName:
    """Who a document says it is."""

    namespace: str
    name: str


def read_header(
    document: Node, *, api_versions: Collection[str], kinds: Collection[str]
) -> ObjectName:
    """Read apiVersion, kind and metadata. What else metadata holds is Kubernetes' own and is not looked at."""
    for key, allowed in (("apiVersion", api_versions), ("kind", kinds)):
        node = document.child(key)
        if not node.present:
            node.wrong("is missing")
        node.choice(allowed)
    metadata = document.child("metadata")
    if not isinstance(metadata.value, Mapping):
        metadata.wrong(f"is {shown(metadata.value)}, not an object with a name")
        return ObjectName("", "")
    read_label_map(metadata.child("labels"))
    return ObjectName(
        _read_object_name(metadata.child("namespace"), required=False),
        _read_object_name(metadata.child("name"), required=True),
    )


def _read_object_name(node: Node, *, required: bool) -> str:
    found = node.text()
    if not node.present:
        if required:
            node.wrong("is missing")
    elif isinstance(node.value, str) and (
        len(found) > NAME_MAX_CHARACTERS or not _OBJECT_NAME.fullmatch(found)
    ):
        node.wrong(f"is {shown(found)}, not an object name")
    return found


def describe_object(document: object, kind: str) -> str:
    """Name a document in a message, as far as it can be told."""
    metadata = document.get("metadata") if isinstance(document, Mapping) else None
    found = metadata if isinstance(metadata, Mapping) else {}
    parts = [found.get("namespace"), found.get("name")]
    name = "/".join(
        part for part in parts if isinstance(part, str) and _OBJECT_NAME.fullmatch(part)
    )
    return f"{kind} {name}" if name else kind


def read_label_map(node: Node) -> dict[str, str]:
    """Read an object of labels, key and value by the grammar of Kubernetes."""
    if not node.present:
        return {}
    if not isinstance(node.value, Mapping):
        node.wrong(f"is {shown(node.value)}, not an object")
        return {}
    return {
        key: read_label_value(node.child(key))
        for key in node.value
        if check_label_key(node, key, key)
    }


def check_label_key(node: Node, key: object, bare: str) -> bool:
    """Tell whether `bare` is a label key; else note that `node` has the wrong key `key`."""
    if not isinstance(key, str):
        node.wrong(f"has the key {shown(key)}, which is not text")
        return False
    if not is_label_key(bare):
        node.wrong(f"has the key {shown(key)}, not a label key ([prefix/]name)")
        return False
    return True


def read_label_value(node: Node) -> str:
    """Read a label's value; null is none."""
    if node.value is None:
        node.wrong('is null, not text (write "" for an empty value)')
        return ""
    found = node.text()
    if not is_label_value(found):
        node.wrong(f"is {shown(found)}, not a label value")
        return ""
    return found


def read_expression(node: Node) -> tuple[str, Operator, tuple[str, ...]] | None:
    """Read one element of matchExpressions: key (not checked), operator, sorted values. None when it is at fault."""
    if not node.expect_object(("key", "operator", "values")):
        return None
    key, operator = node.child("key"), node.child("operator")
    for required in (key, operator):
        if not required.present:
            required.wrong("is missing")
    found = operator.choice(tuple(Operator))
    listed = node.child("values")
    values = [read_label_value(item) for item in listed.items()]
    wants_values = found in (Operator.IN, Operator.NOT_IN)
    if found and wants_values and not values and listed.value in (None, [], ()):
        listed.wrong(f"is empty; {found} needs at least one value")
    elif found and not wants_values and values:
        listed.wrong(f"has {len(values)} values; {found} takes none")
    if not found or not key.text():
        return None
    return key.text(), Operator(found), tuple(sorted(set(values)))


def read_cidr(node: Node, *, bare_address: bool = False) -> IPNetwork | None:
    """Read `ADDRESS/LENGTH` (bits beyond the length are cut off, as in Kubernetes); None when it is at fault.

    `bare_address`: an address alone stands for itself.
    """
    found = node.text()
    if not isinstance(node.value, str):
        if node.value is None:
            node.wrong("is missing")
        return None
    address, slash, length = found.partition("/")
    complete = bool(_PREFIX_LENGTH.fullmatch(length)) if slash else bare_address
    try:
        network = ipaddress.ip_network(found, strict=False)
    except ValueError:
        complete = False
    if not complete or not _ADDRESS.fullmatch(address):
        node.wrong(f"is {shown(found)}, not a CIDR (address/length)")
        return None
    if isinstance(network, ipaddress.IPv6Network) and network.network_address.ipv4_mapped:
        node.wrong(f"is {shown(found)}: write an IPv4-mapped address as IPv4")
        return None
    return network


def is_inside(inner: IPNetwork, outer: IPNetwork) -> bool:
    """Tell whether every address of `inner` is in `outer`; never across families."""
    if isinstance(inner, ipaddress.IPv4Network):
        return isinstance(outer, ipaddress.IPv4Network) and inner.subnet_of(outer)
    return isinstance(outer, ipaddress.IPv6Network) and inner.subnet_of(outer)


def is_port_name(text: str) -> bool:
    """Tell whether `text` may name a port (RFC 6335, section 5.1, in lower case, as in Kubernetes)."""
    return len(text) <= PORT_NAME_MAX_CHARACTERS and _PORT_NAME.fullmatch(text) is not None
