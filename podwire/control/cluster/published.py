"""Objects of the kind NodeEndpoints: the identity of every address of a node's pods, in few bytes.

Written by `control.cluster.publish`, read by `control.cluster.remote` and by the collector of identities. Pure. Form:
`bases` are ranges; `endpoints` has one section per base, separated by `;`, of pairs `OFFSET:IDENTITY` separated by
`,`; `others` has `ADDRESS=IDENTITY` for addresses in none of the bases. Invariant: what was written is read back the
same.
"""

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from podwire.control.cluster.facts import own_by_core_node
from podwire.control.cluster.reading import EPOCH_MAX, Fields
from podwire.model.documents.reader import Faults
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.identity import CLUSTER_LAST
from podwire.model.ids import IdentityId
from podwire.model.networks import index_networks, read_address
from podwire.model.store import ObjectKey, StoredObject, value_of
from podwire.model.store.kinds import NODE_ENDPOINTS

_ADDRESS_OF: Final[Mapping[int, Callable[[int], IPAddress]]] = {
    4: ipaddress.IPv4Address,
    6: ipaddress.IPv6Address,
}


class Publication(msgspec.Struct, frozen=True):
    """What one node says of its pods."""

    node: str
    epoch: int
    """One more at each start of its agent."""
    sequence: int
    """One more at each write."""
    identities: Mapping[IPAddress, IdentityId] = msgspec.field(default_factory=dict)

    @property
    def order(self) -> tuple[int, int]:
        """Of two publications of one node, the greater is the newer."""
        return self.epoch, self.sequence


def endpoints_key(node: str) -> ObjectKey:
    """Give the key of what a node publishes of its pods."""
    return ObjectKey(NODE_ENDPOINTS.plural, "", node)


def encode_endpoints(
    publication: Publication, bases: Sequence[IPNetwork], core_uid: str = ""
) -> dict[str, Any]:
    """Write the document; `bases` are the node's own ranges, which do not overlap; `core_uid` is of the core Node that
    owns it."""
    sections: list[list[str]] = [[] for _ in bases]
    others: list[str] = []
    indexes = index_networks((network, index) for index, network in enumerate(bases))
    # Sorted, so that the same pods make the same text and nothing is written for an order that changed.
    for address, identity in sorted(publication.identities.items(), key=_order):
        index = indexes.find(address)
        if index is None:
            others.append(f"{address}={identity}")
        else:
            offset = int(address) - int(bases[index].network_address)
            sections[index].append(f"{offset}:{identity}")
    return {
        "apiVersion": NODE_ENDPOINTS.api_versions[0],
        "kind": NODE_ENDPOINTS.name,
        "metadata": {
            "name": publication.node,
            **own_by_core_node(publication.node, core_uid),
        },
        "spec": {
            "epoch": publication.epoch,
            "sequence": publication.sequence,
            "bases": [str(network) for network in bases],
            "endpoints": ";".join(",".join(section) for section in sections),
            "others": others,
        },
    }


def decode_endpoints(stored: StoredObject) -> Publication:
    """Read a document. Fields that are not known are left alone: they can only add to what is said here.

    Raises InvalidRequest with the first faults.
    """
    if (known := value_of(stored, Publication)) is not None:
        return known
    faults = Faults()
    spec = Fields(stored.document, faults)
    identities: dict[IPAddress, IdentityId] = {}
    bases = spec.networks("bases")
    text = spec.text("endpoints")
    sections = text.split(";") if bases else []
    if len(sections) != len(bases) or (text and not bases):
        spec.wrong("endpoints", f"has {len(sections)} sections for {len(bases)} bases")
    for base, section in zip(bases, sections, strict=False):
        _read_section(base, section, spec, identities)
    for other in spec.texts("others"):
        _read_other(other, spec, identities)
    publication = Publication(
        node=stored.key.name,
        epoch=spec.number("epoch", 0, EPOCH_MAX, 0),
        sequence=spec.number("sequence", 0, EPOCH_MAX, 0),
        identities=identities,
    )
    faults.raise_if_any(f"read NodeEndpoints {stored.key.name!r}")
    return publication


def _read_section(
    base: IPNetwork, section: str, spec: Fields, into: dict[IPAddress, IdentityId]
) -> None:
    first, size, make = int(base.network_address), base.num_addresses, _ADDRESS_OF[base.version]
    for pair in section.split(",") if section else ():
        left, _, right = pair.partition(":")
        offset, identity = _number(left), _number(right)
        if offset is None or offset >= size or not _is_identity(identity):
            spec.wrong("endpoints", f"has {pair[:40]!r} in {base}, no OFFSET:IDENTITY of it")
            return
        address = make(first + offset)
        if into.setdefault(address, IdentityId(identity or 0)) != identity:
            spec.wrong("endpoints", f"gives {address} two identities")


def _read_other(text: str, spec: Fields, into: dict[IPAddress, IdentityId]) -> None:
    left, _, right = text.partition("=")
    identity = _number(right)
    try:
        address = read_address(left)
    except ValueError:
        spec.wrong("others", f"has {text[:60]!r}, no ADDRESS=IDENTITY")
        return
    if not _is_identity(identity):
        spec.wrong("others", f"has {text[:60]!r}, no ADDRESS=IDENTITY")
    elif into.setdefault(address, IdentityId(identity or 0)) != identity:
        spec.wrong("others", f"gives {address} two identities")


def _number(text: str) -> int | None:
    """Read digits: int() would also take signs, spaces and underscores."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 39 else None


def _is_identity(number: int | None) -> bool:
    return number is not None and 0 < number <= CLUSTER_LAST


def _order(item: tuple[IPAddress, IdentityId]) -> tuple[int, int]:
    return item[0].version, int(item[0])
