"""Objects of the store as values of their kinds; what cannot be read is found here, before it replaces anything.

Used by the agent's watch of the store, once for each change. Pure: the decoders of the kinds decide, and nothing is
kept. Invariant: what is found readable here makes no decoder raise.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from podwire.control.cluster.facts import decode_node, is_published
from podwire.control.cluster.published import decode_endpoints
from podwire.control.documents.pools import decode_pool
from podwire.control.identity.key import IdentityKey, read_spec
from podwire.control.identity.known import IDENTITIES, read_number
from podwire.control.ipam.documents import Block, ClaimedAddress, decode_block, decode_claimed
from podwire.control.policy.reading import POLICY_KINDS, UNEXPECTED, close_policy, read_policy
from podwire.control.policy.rules_cilium import decode_cidr_group
from podwire.model.cluster import NodeFacts
from podwire.model.errors import InvalidRequest
from podwire.model.store import ReadableObject, StoredObject
from podwire.model.store.kinds import (
    CIDR_GROUP,
    ENDPOINT_SLICE,
    IP_ADDRESS,
    IP_BLOCK,
    IP_POOL,
    NODE,
    NODE_ENDPOINTS,
    SERVICE,
)
from podwire.model.store.packed import pack

_MANY: Final = (SERVICE.plural, ENDPOINT_SLICE.plural)
"""Kinds of which there may be ten thousand, and that have no value here."""


def read_object(stored: StoredObject) -> tuple[StoredObject, str]:
    """Decode an object once for all its users. Gives it with its value, or unchanged with the reason why it cannot be
    read."""
    if stored.fault:
        return stored, stored.fault
    try:
        _check_shape(stored.document)
        value = _DECODERS.get(stored.key.kind, _accept)(stored)
    except InvalidRequest as error:
        return stored, error.message
    # Whoever may write to the store may write what no decoder thought of. It must not end the one thread by which all
    # duties hear of the store.
    except UNEXPECTED as error:
        return stored, f"{type(error).__name__}: {error}"
    if value is not None:
        return _with_value(stored, value), ""
    if stored.key.kind in _MANY:
        # Read once, one by one, by whoever follows them: until then a list of ten thousand is short this way.
        return msgspec.structs.replace(stored, document=pack(stored.document)), ""
    return stored, ""


def stand_in(stored: StoredObject, fault: str) -> StoredObject | None:
    """Give what counts in the place of an object that cannot be read and never could be; None: it counts as absent.

    A policy closes: without it more would be allowed than anybody meant.
    """
    if stored.key.kind not in POLICY_KINDS:
        return None
    closing = close_policy(stored.key, stored.document, fault)
    return None if closing is None else _with_value(stored, closing)


def _with_value(stored: StoredObject, value: object) -> ReadableObject:
    return ReadableObject(
        key=stored.key,
        uid=stored.uid,
        revision=stored.revision,
        created=stored.created,
        # Everybody reads the value. The document is kept for the next start, and for the few who look for what the
        # value leaves out.
        document=pack(stored.document),
        value=value,
    )


def find_fault(stored: StoredObject) -> str:
    """Say why an object cannot be read; "" when it can."""
    return read_object(stored)[1]


def _check_shape(document: Mapping[str, Any]) -> None:
    """Refuse what is no object of Kubernetes at all: labels select, so wrong ones must not count as none."""
    for name in ("metadata", "spec"):
        if not isinstance(document.get(name) or {}, Mapping):
            raise InvalidRequest(f"{name} is no object")
    for name in ("labels", "annotations"):
        texts = (document.get("metadata") or {}).get(name) or {}
        if not isinstance(texts, Mapping) or not all(
            isinstance(text, str) for text in texts.values()
        ):
            raise InvalidRequest(f"metadata.{name} is not an object of texts")


def _accept(_stored: StoredObject) -> None:
    """Take namespaces and Workloads undecoded: only their shape is checked."""


def _decode_node(stored: StoredObject) -> NodeFacts | None:
    if not is_published(stored.document):
        return None
    try:
        return decode_node(stored)
    except InvalidRequest as error:
        # A node that demands what is not known here can be read: it is to be refused, not taken as it was.
        if all(fault.path != "spec.requires" for fault in error.faults):
            raise
    return None


def _decode_block(stored: StoredObject) -> Block:
    block = decode_block(stored)
    if block is None:
        raise InvalidRequest(f"spec says no block of the name {stored.key.name}")
    return block


def _decode_claimed(stored: StoredObject) -> ClaimedAddress:
    claimed = decode_claimed(stored)
    if claimed is None:
        raise InvalidRequest(f"spec says no address of the name {stored.key.name}")
    return claimed


def _decode_identity(stored: StoredObject) -> IdentityKey:
    if read_number(stored.key) is None:
        raise InvalidRequest("its name is not a number")
    return read_spec(stored.document)


_DECODERS: Final[Mapping[str, Callable[[StoredObject], object]]] = {
    NODE.plural: _decode_node,
    NODE_ENDPOINTS.plural: decode_endpoints,
    IDENTITIES: _decode_identity,
    IP_POOL.plural: lambda stored: decode_pool(stored.document),
    IP_BLOCK.plural: _decode_block,
    IP_ADDRESS.plural: _decode_claimed,
    **dict.fromkeys(POLICY_KINDS, lambda stored: read_policy(stored.key, stored.document)),
    CIDR_GROUP.plural: lambda stored: decode_cidr_group(stored.document),
}
