"""Kinds of objects that people read and write, under every name that they are called by.

Used by the doors, by `control.documents.kinds` and by whoever needs the plural name that keys have. Pure. Invariant: a
word names one kind only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object."""

    name: str
    """As in the document: `NetworkPolicy`."""
    plural: str
    """As in keys and REST paths: `networkpolicies`."""
    api_versions: tuple[str, ...]
    """All that are accepted; the first is written."""
    namespaced: bool
    short_names: tuple[str, ...] = ()
    for_people: bool = True
    """False: made by agents alone; it can be read and not applied."""

    @property
    def singular(self) -> str:
        """`networkpolicy`."""
        return self.name.lower()


NETWORK_POLICY: Final = Kind(
    "NetworkPolicy", "networkpolicies", ("networking.k8s.io/v1",), True, ("netpol",)
)
CILIUM_POLICY: Final = Kind(
    "CiliumNetworkPolicy", "ciliumnetworkpolicies", ("cilium.io/v2",), True, ("cnp", "ciliumnp")
)
CILIUM_CLUSTERWIDE_POLICY: Final = Kind(
    "CiliumClusterwideNetworkPolicy",
    "ciliumclusterwidenetworkpolicies",
    ("cilium.io/v2",),
    False,
    ("ccnp",),
)
CIDR_GROUP: Final = Kind(
    "CiliumCIDRGroup", "ciliumcidrgroups", ("cilium.io/v2", "cilium.io/v2alpha1"), False, ("ccg",)
)
NAMESPACE: Final = Kind("Namespace", "namespaces", ("v1",), False, ("ns",))
WORKLOAD: Final = Kind("Workload", "workloads", ("podwire.io/v1",), False)
IDENTITY: Final = Kind("Identity", "identities", ("podwire.io/v1",), False, for_people=False)
NODE: Final = Kind("Node", "nodes", ("podwire.io/v1",), False, ("pwn",), for_people=False)
NODE_ENDPOINTS: Final = Kind(
    "NodeEndpoints", "nodeendpoints", ("podwire.io/v1",), False, for_people=False
)
IP_POOL: Final = Kind("IPPool", "ippools", ("podwire.io/v1",), False, ("pool",))
IP_BLOCK: Final = Kind("IPBlock", "ipblocks", ("podwire.io/v1",), False, for_people=False)
IP_ADDRESS: Final = Kind("IPAddress", "ipaddresses", ("podwire.io/v1",), False, for_people=False)

KINDS: Final = (
    NAMESPACE,
    IP_POOL,
    WORKLOAD,
    CIDR_GROUP,
    NETWORK_POLICY,
    CILIUM_POLICY,
    CILIUM_CLUSTERWIDE_POLICY,
    IDENTITY,
    NODE,
    NODE_ENDPOINTS,
    IP_BLOCK,
    IP_ADDRESS,
)
"""In the order in which they are applied: what others speak of comes first."""

_BY_WORD: Final[Mapping[str, Kind]] = {
    word: kind for kind in KINDS for word in (kind.singular, kind.plural, *kind.short_names)
}
_BY_PLURAL: Final[Mapping[str, Kind]] = {kind.plural: kind for kind in KINDS}


def find_kind(word: str) -> Kind | None:
    """Find a kind by its singular, plural or short name, or as documents spell it, in any case."""
    return _BY_WORD.get(word.lower())


def kind_of_plural(plural: str) -> Kind | None:
    """Find a kind by the name that keys have."""
    return _BY_PLURAL.get(plural)


def kind_of_document(api_version: object, name: object) -> Kind | None:
    """Find the kind that a document's `apiVersion` and `kind` name; both are spelled exactly."""
    for kind in KINDS:
        if kind.name == name and api_version in kind.api_versions:
            return kind
    return None
