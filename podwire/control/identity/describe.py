"""Identities as people see them: what a number stands for, where it comes from, which endpoints have it.

Called by the API, which answers with what is described here as it stands. Pure.
"""

from collections.abc import Iterable

import msgspec

from podwire.control.identity.known import KnownIdentities, KnownIdentity
from podwire.model.endpoint import PROTOCOL_NAMES, EndpointRecord
from podwire.model.identity import CLUSTER_FIRST, RESERVED_LABELS, IdentityFacts
from podwire.model.labels import SOURCE_RESERVED


class IdentityView(msgspec.Struct, frozen=True, rename="camel"):
    """One identity."""

    id: int
    labels: tuple[str, ...]
    named_ports: tuple[str, ...]
    """`name:protocol/port`."""
    source: str
    """`reserved`, `fixed` (a number that somebody chose) or `cluster` (an allocated one)."""
    state: str
    """`used` (here), `known`, `marked` (nobody used it, it goes soon), or `missing` (used here, not in the store)."""
    endpoints: int
    """How many endpoints of this node have it."""
    endpoint_ids: tuple[int, ...]


def describe_identities(
    known: KnownIdentities, records: Iterable[EndpointRecord]
) -> list[IdentityView]:
    """Describe the reserved identities and all that are known, lowest number first."""
    holders: dict[int, list[int]] = {}
    for record in records:
        holders.setdefault(record.identity, []).append(record.id)
    reserved = [
        _describe(IdentityFacts(int(number), labels), "reserved", "known", holders)
        for number, labels in sorted(RESERVED_LABELS.items())
    ]
    identities = [
        _describe(
            facts,
            "cluster" if facts.number >= CLUSTER_FIRST else "fixed",
            _state(known.get(facts.number), facts.number in holders),
            holders,
        )
        for facts in known.facts()
    ]
    return reserved + identities


def _describe(
    facts: IdentityFacts, source: str, state: str, holders: dict[int, list[int]]
) -> IdentityView:
    ids = tuple(sorted(holders.get(facts.number, ())))
    ports = tuple(
        f"{port.name}:{PROTOCOL_NAMES.get(port.protocol, port.protocol)}/{port.port}"
        for port in facts.named_ports
    )
    # `reserved:host` is how people know it; the canonical form has an empty value.
    labels = tuple(
        label.removesuffix("=") if label.startswith(f"{SOURCE_RESERVED}:") else label
        for label in facts.labels
    )
    return IdentityView(facts.number, labels, ports, source, state, len(ids), ids)


def _state(known: KnownIdentity | None, is_held: bool) -> str:
    if known is None or not known.is_stored:
        return "missing"
    if is_held:
        return "used"
    return "marked" if known.is_marked else "known"
