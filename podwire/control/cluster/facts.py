"""Objects of the kind Node: what a node publishes of itself, as a document and as `NodeFacts`.

Written by `control.cluster.publish`, read by every module that follows nodes. Pure. A field that is not known here is
left alone, because newer nodes may publish more. A node lists in `requires` what a peer must understand to talk to it
at all. A name in that list that is not known here refuses the node, and so does any wrong value of a known field.
Invariant: facts that were written are read back the same.
"""

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from podwire.control.cluster.reading import EPOCH_MAX, Fields
from podwire.model.cluster import DEFAULT_TUNNEL_PORT, NodeFacts, TunnelMode
from podwire.model.documents.lenient import items_of, members_of, text_of
from podwire.model.documents.reader import Faults
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.identity import CLUSTER_LAST
from podwire.model.ids import IdentityId
from podwire.model.networks import overlap
from podwire.model.store import ObjectKey, StoredObject, value_of
from podwire.model.store.kinds import NODE

KNOWN_REQUIREMENTS: Final[frozenset[str]] = frozenset()
"""What a peer may demand that this version understands beside the fields below."""
DEFAULT_MTU_BYTES: Final = 1500
MTU_MIN_BYTES: Final = 68
"""The least that IPv4 allows (RFC 791)."""
MTU_MAX_BYTES: Final = 65535
MTU_ANNOTATION: Final = "podwire.io/underlay-mtu"
ADDRESSES_ANNOTATION: Final = "podwire.io/addresses"
CIDRS_ANNOTATION: Final = "podwire.io/pod-cidrs"
CORE_OWNER: Final = {"apiVersion": "v1", "kind": "Node"}
"""What an owner reference to a core Node says, beside its name and UID."""

_MAC: Final = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}")
_SMALLEST_PREFIX: Final = 8
NEVER_PODS: Final[Sequence[IPNetwork]] = tuple(
    ipaddress.ip_network(text)
    for text in ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "255.255.255.255/32")
) + tuple(ipaddress.ip_network(text) for text in ("::/127", "fe80::/10", "ff00::/8"))


def node_key(name: str) -> ObjectKey:
    """Give the key of a node's object."""
    return ObjectKey(NODE.plural, "", name)


def tunnel_mac(node_name: str) -> str:
    """Derive the MAC of a node's tunnel device: one for each name, so no two are equal (docs/datapath.md, rule 8)."""
    digest = hashlib.sha256(f"tunnel/{node_name}".encode()).digest()
    # 0x06: locally administered and unicast (IEEE 802). The bit of multicast must not be set by chance.
    return bytes((0x06, *digest[:5])).hex(":")


def encode_node(facts: NodeFacts, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write a node's document; what somebody else has put into `before` stays: labels, annotations, unknown fields."""
    before = before or {}
    metadata = dict(members_of(before, "metadata"))
    if "labels" in metadata:
        labels = members_of(metadata, "labels")
        metadata["labels"] = {key: label for key, label in labels.items() if isinstance(label, str)}
    annotations = {
        **members_of(metadata, "annotations"),
        ADDRESSES_ANNOTATION: ",".join(map(str, facts.addresses)),
        CIDRS_ANNOTATION: ",".join(map(str, (*facts.pod_cidrs, *facts.blocks))),
        MTU_ANNOTATION: str(facts.underlay_mtu_bytes),
    }
    spec = {
        **members_of(before, "spec"),
        "instance": facts.instance,
        "epoch": facts.epoch,
        "addresses": _texts(facts.addresses),
        "podCIDRs": _texts(facts.pod_cidrs),
        "tunnelAddresses": _texts(facts.tunnel_addresses),
        "tunnelMAC": facts.tunnel_mac,
        "tunnelMode": str(facts.tunnel_mode),
        "tunnelPort": facts.tunnel_port,
        "underlayMTU": facts.underlay_mtu_bytes,
        "blocks": {str(block): epoch for block, epoch in facts.blocks.items()},
        "holds": sorted(map(int, facts.holds)),
        "claims": {str(claimed): number for claimed, number in facts.claims.items()},
    }
    return {
        "apiVersion": NODE.api_versions[0],
        "kind": NODE.name,
        "metadata": {
            **metadata,
            **own_by_core_node(facts.name, facts.core_uid),
            "name": facts.name,
            "annotations": annotations,
        },
        "spec": spec,
    }


def own_by_core_node(name: str, uid: str) -> dict[str, Any]:
    """Give the metadata of an object that Kubernetes deletes with a core Node; none for the uid ""."""
    if not uid:
        return {}
    return {"ownerReferences": [{**CORE_OWNER, "name": name, "uid": uid}]}


def _find_core_uid(document: Mapping[str, Any]) -> str:
    owners = items_of(members_of(document, "metadata"), "ownerReferences")
    core = (owner for owner in owners if CORE_OWNER.items() <= owner.items())
    return text_of(next(core, {}), "uid")


def is_published(document: Mapping[str, Any]) -> bool:
    """Tell whether a node's agent has published its facts. An object that only lists identities makes no peer yet."""
    return bool(members_of(document, "spec").get("instance"))


def decode_node(stored: StoredObject) -> NodeFacts:
    """Read a node's document. Raises InvalidRequest with every fault."""
    if (known := value_of(stored, NodeFacts)) is not None:
        return known
    faults = Faults()
    spec = Fields(stored.document, faults)
    # A node of a newer version can say that it must not be talked to without something that this version lacks.
    unknown = sorted(set(spec.texts("requires")) - KNOWN_REQUIREMENTS)
    if unknown:
        spec.wrong("requires", f"requires {', '.join(unknown)}, which this version does not know")
    facts = NodeFacts(
        name=stored.key.name,
        instance=spec.text("instance"),
        epoch=spec.number("epoch", 0, EPOCH_MAX, 0),
        addresses=spec.addresses("addresses"),
        pod_cidrs=spec.networks("podCIDRs"),
        tunnel_addresses=spec.addresses("tunnelAddresses"),
        tunnel_mac=spec.text("tunnelMAC").lower(),
        tunnel_mode=_read_mode(spec),
        tunnel_port=spec.number("tunnelPort", 1, 65535, DEFAULT_TUNNEL_PORT),
        underlay_mtu_bytes=spec.number(
            "underlayMTU", MTU_MIN_BYTES, MTU_MAX_BYTES, DEFAULT_MTU_BYTES
        ),
        blocks=spec.epochs("blocks"),
        holds=tuple(map(IdentityId, spec.numbers("holds", 1, CLUSTER_LAST))),
        claims=spec.claims("claims", EPOCH_MAX),
        core_uid=_find_core_uid(stored.document),
    )
    _check(facts, spec)
    faults.raise_if_any(f"read Node {stored.key.name!r}")
    return facts


def same_for_peers(one: NodeFacts, other: NodeFacts) -> bool:
    """Tell whether two facts mean the same to other nodes' kernels: they do not care for what is held."""
    return replace(one, holds=()) == replace(other, holds=())


def _read_mode(spec: Fields) -> TunnelMode:
    text = spec.text("tunnelMode", TunnelMode.FLOW)
    try:
        return TunnelMode(text)
    except ValueError:
        spec.wrong("tunnelMode", f"is {text!r}, not one of {', '.join(TunnelMode)}")
        return TunnelMode.FLOW


def _check(facts: NodeFacts, spec: Fields) -> None:
    if not facts.instance:
        spec.wrong("instance", "is missing")
    if facts.tunnel_mac and not _is_unicast(facts.tunnel_mac):
        spec.wrong(
            "tunnelMAC", f"is {facts.tunnel_mac!r}, which is not an address of a single device"
        )
    for name, addresses in (
        ("addresses", facts.addresses),
        ("tunnelAddresses", facts.tunnel_addresses),
    ):
        families = [address.version for address in addresses]
        if len(families) != len(set(families)):
            spec.wrong(name, "has more than one address of a family")
        for address in addresses:
            if not is_usable(address):
                spec.wrong(name, f"has {address}, which no other machine can reach")
    for name, ranges in (("podCIDRs", facts.pod_cidrs), ("blocks", facts.blocks)):
        for network in ranges:
            fault = find_range_fault(network)
            if fault:
                spec.wrong(name, f"has {network}, {fault}")


def is_usable(address: IPAddress) -> bool:
    """Tell whether other machines can send something to an address."""
    return not (
        address.is_unspecified
        or address.is_loopback
        or address.is_multicast
        or address.is_link_local
    )


def find_range_fault(network: IPNetwork) -> str:
    """Say why a range can be no node's pods', "" when it can."""
    if network.prefixlen < _SMALLEST_PREFIX:
        return f"which is larger than a /{_SMALLEST_PREFIX}"
    for other in NEVER_PODS:
        if overlap(network, other):
            return f"which overlaps {other} (never a pod's)"
    return ""


def _is_unicast(mac: str) -> bool:
    return _MAC.fullmatch(mac) is not None and not int(mac[:2], 16) & 1 and mac.strip("0:") != ""


def _texts(values: Iterable[object]) -> list[str]:
    return [str(value) for value in values]
