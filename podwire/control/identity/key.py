"""What an identity stands for, filtered labels and named ports, and which numbers such a key may have.

Used by the allocator and the resolver. Pure. Invariant: one key has one text and one hash on every node. Different
keys have different texts, because no label contains a `;` or a line end.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from podwire.control.identity.filter import LabelFilter
from podwire.model.endpoint import PROTOCOL_NAMES, PROTOCOLS
from podwire.model.errors import InvalidRequest
from podwire.model.identity import CLUSTER_FIRST, CLUSTER_LAST, IdentityFacts, NamedPort
from podwire.model.labels import join_labels, parse_labels
from podwire.model.request import NamedPort as RequestedPort

HASH_DIGITS: Final = 32
CANDIDATES_MAX: Final = 64
"""With half of all numbers in use, all of these being taken is as likely as guessing a 64-bit number."""


class IdentityKey(msgspec.Struct, frozen=True):
    """What must be equal for two endpoints to have one number. Both parts are sorted and without duplicates."""

    labels: tuple[str, ...]
    named_ports: tuple[NamedPort, ...] = ()

    @property
    def text(self) -> str:
        """The key as one text."""
        ports = ";".join(f"{port.name}/{port.protocol}/{port.port}" for port in self.named_ports)
        return f"{join_labels(self.labels)}\n{ports}"

    @property
    def digest(self) -> bytes:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).digest()

    def facts(self, number: int) -> IdentityFacts:
        """Give what policy needs to know of this key under its number."""
        return IdentityFacts(number, self.labels, self.named_ports)


class NumberSpace(msgspec.Struct, frozen=True):
    """The numbers that may be allocated."""

    first: int = CLUSTER_FIRST
    size: int = msgspec.field(default=CLUSTER_LAST - CLUSTER_FIRST + 1)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.first <= number < self.first + self.size

    def candidates(self, key: IdentityKey) -> Iterator[int]:
        """Give the numbers that `key` may have, best first, each once: the same on every node."""
        digest = key.digest
        given: set[int] = set()
        for index in range(CANDIDATES_MAX):
            hashed = hashlib.sha256(digest + index.to_bytes(4, "big")).digest()
            # 64 bits taken modulo a 24-bit range: the bias is too small to matter.
            number = self.first + int.from_bytes(hashed[:8], "big") % self.size
            if number not in given:
                given.add(number)
                yield number


def make_key(
    labels: Iterable[str], named_ports: Iterable[NamedPort], chosen_by: LabelFilter
) -> IdentityKey:
    """Compute the key of an endpoint with these canonical labels."""
    return IdentityKey(chosen_by.choose(labels), tuple(sorted(set(named_ports))))


def convert_ports(ports: Iterable[RequestedPort]) -> tuple[NamedPort, ...]:
    """Give a request's named ports in the form of identities, sorted."""
    return tuple(
        sorted({NamedPort(port.name, PROTOCOLS[port.protocol], port.port) for port in ports})
    )


def write_spec(key: IdentityKey) -> dict[str, Any]:
    """Give the `spec` of the Identity object of a key."""
    return {
        "labels": list(key.labels),
        "namedPorts": [
            {"name": port.name, "protocol": PROTOCOL_NAMES[port.protocol], "port": port.port}
            for port in key.named_ports
        ],
    }


def read_spec(document: Mapping[str, Any]) -> IdentityKey:
    """Read the key of an Identity document; InvalidRequest when it is none."""
    spec = document.get("spec")
    if not isinstance(spec, Mapping):
        raise InvalidRequest("read identity: it has no spec")
    labels, ports = spec.get("labels"), spec.get("namedPorts") or ()
    if not isinstance(labels, list | tuple) or not all(isinstance(label, str) for label in labels):
        raise InvalidRequest("read identity: spec.labels is not a list of labels")
    try:
        named = {
            NamedPort(str(port["name"]), PROTOCOLS[port["protocol"]], int(port["port"]))
            for port in ports
        }
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"read identity: spec.namedPorts: {error!r}") from error
    # Thousands of identities have most of their labels in common.
    return IdentityKey(tuple(map(sys.intern, parse_labels(labels))), tuple(sorted(named)))
