"""This node as Kubernetes says it: the core Node's ranges, addresses and UID.

Called by the agent's start, by the choice of the node's address, and where two nodes claim one range. Pure. podwire
watches its own core Node only; another one is read once, for a contest.
"""

from typing import Final

import msgspec

from podwire.model.documents.lenient import items_of, members_of, read_address, text_of, texts_of
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import InvalidConfiguration
from podwire.model.networks import read_network
from podwire.model.store import ObjectKey, StoredObject
from podwire.model.store.kinds import CORE_NODE

INTERNAL_IP: Final = "InternalIP"
NETWORK_UNAVAILABLE: Final = "NetworkUnavailable"
ZONE_LABEL: Final = "topology.kubernetes.io/zone"


class CoreNode(msgspec.Struct, frozen=True):
    """One Node of the core group."""

    name: str
    uid: str
    pod_cidrs: tuple[IPNetwork, ...] = ()
    """At most one of each family; () while the controller manager has given none."""
    addresses: tuple[IPAddress, ...] = ()
    """The InternalIPs, in the node's order."""
    is_called_unavailable: bool = False
    """Whether the condition NetworkUnavailable is there and not False."""
    zone: str = ""
    """Where the node is; "" where nobody says."""


def core_node_key(name: str) -> ObjectKey:
    """Name a core Node."""
    return ObjectKey(CORE_NODE.plural, "", name)


def decode_core_node(stored: StoredObject) -> CoreNode:
    """Read a core Node; InvalidConfiguration when one of its ranges is no CIDR."""
    spec = members_of(stored.document, "spec")
    status = members_of(stored.document, "status")
    # An old API server knows the singular only.
    texts = texts_of(spec, "podCIDRs") or [text_of(spec, "podCIDR")]
    return CoreNode(
        name=stored.key.name,
        uid=stored.uid,
        pod_cidrs=tuple(_read_range(stored.key.name, text) for text in texts if text),
        addresses=tuple(
            address
            for item in items_of(status, "addresses")
            if item.get("type") == INTERNAL_IP
            if (address := read_address(text_of(item, "address"))) is not None
        ),
        is_called_unavailable=any(
            item.get("type") == NETWORK_UNAVAILABLE
            # A condition has three values; Unknown does not mean that the network is there (API conventions, "Typical
            # status properties").
            and item.get("status") != "False"
            for item in items_of(status, "conditions")
        ),
        zone=read_zone(stored),
    )


def read_zone(stored: StoredObject) -> str:
    """Give the zone of a core Node, whatever is wrong with the rest of it."""
    return text_of(members_of(members_of(stored.document, "metadata"), "labels"), ZONE_LABEL)


def network_is_available(now: str) -> dict[str, str]:
    """Describe the condition NetworkUnavailable of a node whose pods have a network; `now` as in RFC 3339."""
    return {
        "type": NETWORK_UNAVAILABLE,
        "status": "False",
        "reason": "PodwireIsUp",
        "message": "podwire serves this node",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }


def _read_range(node: str, text: str) -> IPNetwork:
    try:
        return read_network(text)
    except ValueError as error:
        raise InvalidConfiguration(
            f"read the ranges of core Node {node!r}: spec.podCIDRs has {text[:80]!r}: {error}",
            hint="kube-controller-manager writes them (--allocate-node-cidrs, --cluster-cidr)",
        ) from error
