"""Fields that documents of several kinds have: names, labels, requirements of selectors, CIDRs.

Used by the decoders of policies and by `control.documents`. Invariant: what is returned keeps the grammar that
Kubernetes gives the field; what does not keep it is noted as a fault of the value.
"""

import ipaddress
import re
from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from podwire.model.documents.reader import Node, shown
from podwire.model.endpoint import IPNetwork
from podwire.model.labels import Operator, is_label_key, is_label_value

NAME_MAX_CHARACTERS: Final = 253
PORT_NAME_MAX_CHARACTERS: Final = 15
PORT_MAX: Final = 65535

_OBJECT_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?")
# RFC 6335, section 5.1: at least one letter, no two hyphens in a row, none at either end.
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]+(?:-[a-z0-9]+)*")
_PREFIX_LENGTH = re.compile(r"0|[1-9][0-9]{0,2}")
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]+")


class ObjectName(msgspec.Struct, frozen=True):
    """The kind, name and namespace that a document gives itself."""

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
        metadata.mistyped(f"is {shown(metadata.value)}, not an object with a name")
        return ObjectName("", "")
    read_label_map(metadata.child("labels"))
    return ObjectName(
        _read_object_name(metadata.child("namespace"), required=False),
        _read_object_name(metadata.child("name"), required=True),
    )


def _read_object_name(node: Node, *, required: bool) -> str:
    name = node.text()
    if not node.present:
        if required:
            node.wrong("is missing")
    elif isinstance(node.value, str) and (
        len(name) > NAME_MAX_CHARACTERS or not _OBJECT_NAME.fullmatch(name)
    ):
        node.wrong(f"is {shown(name)}, not an object name")
    return name


def describe_object(document: object, kind: str) -> str:
    """Name a document in a message, as far as it can be told."""
    metadata = document.get("metadata") if isinstance(document, Mapping) else None
    members = metadata if isinstance(metadata, Mapping) else {}
    parts = [members.get("namespace"), members.get("name")]
    name = "/".join(
        part for part in parts if isinstance(part, str) and _OBJECT_NAME.fullmatch(part)
    )
    return f"{kind} {name}" if name else kind


def read_label_map(node: Node) -> dict[str, str]:
    """Read an object of labels, key and value by the grammar of Kubernetes."""
    if not node.present:
        return {}
    if not isinstance(node.value, Mapping):
        node.mistyped(f"is {shown(node.value)}, not an object")
        return {}
    return {
        key: read_label_value(node.child(key))
        for key in node.value
        if check_label_key(node, key, key)
    }


def check_label_key(node: Node, key: object, bare: str) -> bool:
    """Tell whether `bare` is a label key; else note that `node` has the wrong key `key`."""
    if not isinstance(key, str):
        node.mistyped(f"has the key {shown(key)}, which is not text")
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
    value = node.text()
    if not is_label_value(value):
        node.wrong(f"is {shown(value)}, not a label value")
        return ""
    return value


def read_expression(node: Node) -> tuple[str, Operator, tuple[str, ...]] | None:
    """Read one element of matchExpressions: key (not checked), operator, sorted values. None when it is at fault."""
    if not node.expect_object(("key", "operator", "values")):
        return None
    key, operator = node.child("key"), node.child("operator")
    for required in (key, operator):
        if not required.present:
            required.wrong("is missing")
    name = operator.choice(tuple(Operator))
    listed = node.child("values")
    values = [read_label_value(item) for item in listed.items()]
    wants_values = name in (Operator.IN, Operator.NOT_IN)
    if name and wants_values and not values and listed.value in (None, [], ()):
        listed.wrong(f"is empty; {name} needs at least one value")
    elif name and not wants_values and values:
        listed.wrong(f"has {len(values)} values; {name} takes none")
    if not name or not key.text():
        return None
    return key.text(), Operator(name), tuple(sorted(set(values)))


def read_cidr(node: Node, *, bare_address: bool = False) -> IPNetwork | None:
    """Read `ADDRESS/LENGTH` (bits beyond the length are cut off, as in Kubernetes); None when it is at fault.

    `bare_address`: an address alone stands for itself.
    """
    text = node.text()
    if not isinstance(node.value, str):
        if node.value is None:
            node.wrong("is missing")
        return None
    address, slash, length = text.partition("/")
    complete = bool(_PREFIX_LENGTH.fullmatch(length)) if slash else bare_address
    try:
        # Kubernetes accepts and stores a CIDR with bits beyond its length, so a policy with one has to be read.
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        complete = False
    # `ipaddress` also takes a netmask for the length and a zone in the address, which the API server refuses.
    if not complete or not _ADDRESS.fullmatch(address):
        node.wrong(f"is {shown(text)}, not a CIDR (address/length)")
        return None
    # A packet to such an address is an IPv4 packet, so an entry of IPv6 would never match.
    if isinstance(network, ipaddress.IPv6Network) and network.network_address.ipv4_mapped:
        node.wrong(f"is {shown(text)}: write an IPv4-mapped address as IPv4")
        return None
    return network


def is_port_name(text: str) -> bool:
    """Tell whether `text` may name a port (RFC 6335, section 5.1, in lower case, as in Kubernetes)."""
    return len(text) <= PORT_NAME_MAX_CHARACTERS and _PORT_NAME.fullmatch(text) is not None
