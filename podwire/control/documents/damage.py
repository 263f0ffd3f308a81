"""Whether an object of the store can be read as its kind; asked before an object replaces an earlier version.

Used by the agent's followers of the store. Pure: the decoders of the kinds decide, and nothing is kept. Invariant:
what is found readable here makes no decoder raise.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from podwire.control.cluster.facts import decode_node, is_published
from podwire.control.cluster.published import decode_endpoints
from podwire.control.documents.pools import decode_pool
from podwire.control.identity.key import read_spec
from podwire.control.identity.known import IDENTITIES, read_number
from podwire.control.ipam.documents import decode_block, decode_claimed
from podwire.control.policy.rules_cilium import decode_cidr_group, decode_cilium_policy
from podwire.control.policy.rules_k8s import decode_network_policy
from podwire.model.errors import InvalidRequest
from podwire.model.store import StoredObject
from podwire.model.store.kinds import (
    CIDR_GROUP,
    CILIUM_CLUSTERWIDE_POLICY,
    CILIUM_POLICY,
    IP_ADDRESS,
    IP_BLOCK,
    IP_POOL,
    NETWORK_POLICY,
    NODE,
    NODE_ENDPOINTS,
)


def find_fault(stored: StoredObject) -> str:
    """Say why an object cannot be read; "" when it can."""
    if stored.fault:
        return stored.fault
    try:
        _check_shape(stored.document)
        _CHECKS.get(stored.key.kind, _accept)(stored)
    except InvalidRequest as error:
        return error.message
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
        # A decoder met what nobody thought of; the object is as unreadable as any other.
        return f"{type(error).__name__}: {error}"
    return ""


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
    """Namespaces and Workloads: their shape is all that is asked."""


def _check_node(stored: StoredObject) -> None:
    if not is_published(stored.document):
        return
    try:
        decode_node(stored)
    except InvalidRequest as error:
        # A node that demands what is not known here can be read: it is to be refused, not taken as it was.
        if all(fault.path != "spec.requires" for fault in error.faults):
            raise


def _check_block(stored: StoredObject) -> None:
    if decode_block(stored) is None:
        raise InvalidRequest(f"spec says no block of the name {stored.key.name}")


def _check_claimed(stored: StoredObject) -> None:
    if decode_claimed(stored) is None:
        raise InvalidRequest(f"spec says no address of the name {stored.key.name}")


def _check_identity(stored: StoredObject) -> None:
    if read_number(stored.key) is None:
        raise InvalidRequest("its name is not a number")
    read_spec(stored.document)


_CHECKS: Final[Mapping[str, Callable[[StoredObject], object]]] = {
    NODE.plural: _check_node,
    NODE_ENDPOINTS.plural: decode_endpoints,
    IDENTITIES: _check_identity,
    IP_POOL.plural: lambda stored: decode_pool(stored.document),
    IP_BLOCK.plural: _check_block,
    IP_ADDRESS.plural: _check_claimed,
    NETWORK_POLICY.plural: lambda stored: decode_network_policy(stored.document),
    CILIUM_POLICY.plural: lambda stored: decode_cilium_policy(stored.document),
    CILIUM_CLUSTERWIDE_POLICY.plural: lambda stored: decode_cilium_policy(stored.document),
    CIDR_GROUP.plural: lambda stored: decode_cidr_group(stored.document),
}
