"""Kinds of objects that people read and write, under every name that they are called by.

Used by the doors, by `control.documents.kinds` and by whoever needs the plural name that keys have. Pure. Two kinds of
different API groups may share a name, as Kubernetes' Node and podwire's do: each is called by its name with its group
(`nodes.podwire.io`, `nodes.core`), and one of them by the plain name. Invariant: a word names one kind only. So does
the plural name in keys, which never changes: agents of two versions share a store.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

CORE: Final = "core"


class Kind(msgspec.Struct, frozen=True):
    """One kind of object."""

    name: str
    """As in the document: `NetworkPolicy`."""
    plural: str
    """As in keys and REST paths: `networkpolicies`. Where another kind has that name already, with the group."""
    api_versions: tuple[str, ...]
    """All that are accepted; the first is written."""
    namespaced: bool
    short_names: tuple[str, ...] = ()
    for_people: bool = True
    """False: made by agents alone, or by Kubernetes; it can be read and not applied."""

    @property
    def singular(self) -> str:
        """`networkpolicy`."""
        return self.name.lower()

    @property
    def group(self) -> str:
        """The API group: `networking.k8s.io`; `core` of Kubernetes' own first kinds, whose group has no name."""
        group, slash, _ = self.api_versions[0].partition("/")
        return group if slash else CORE

    @property
    def is_of_kubernetes(self) -> bool:
        """Whether podwire reads these, and neither makes nor deletes any."""
        return self.group == CORE and not self.for_people

    @property
    def words(self) -> tuple[str, ...]:
        """All that the kind is called by. With its group it is called by every name."""
        resource = self.plural.removesuffix(f".{self.group}")
        qualified = tuple(f"{word}.{self.group}" for word in (self.singular, resource))
        is_plain = resource == self.plural
        plain = (self.singular, resource) if is_plain else ()
        return *plain, *self.short_names, *qualified


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
CORE_NODE: Final = Kind("Node", f"nodes.{CORE}", ("v1",), False, for_people=False)
POD: Final = Kind("Pod", "pods", ("v1",), True, ("po",), for_people=False)
NODE_ENDPOINTS: Final = Kind(
    "NodeEndpoints", "nodeendpoints", ("podwire.io/v1",), False, for_people=False
)
IP_POOL: Final = Kind("IPPool", "ippools", ("podwire.io/v1",), False, ("pool",))
IP_BLOCK: Final = Kind("IPBlock", "ipblocks", ("podwire.io/v1",), False, for_people=False)
IP_ADDRESS: Final = Kind("IPAddress", "ipaddresses", ("podwire.io/v1",), False, for_people=False)
SERVICE: Final = Kind("Service", "services", ("v1",), True, ("svc",))
ENDPOINT_SLICE: Final = Kind("EndpointSlice", "endpointslices", ("discovery.k8s.io/v1",), True)

KINDS: Final = (
    NAMESPACE,
    IP_POOL,
    WORKLOAD,
    CIDR_GROUP,
    NETWORK_POLICY,
    CILIUM_POLICY,
    CILIUM_CLUSTERWIDE_POLICY,
    SERVICE,
    ENDPOINT_SLICE,
    IDENTITY,
    NODE,
    NODE_ENDPOINTS,
    IP_BLOCK,
    IP_ADDRESS,
    CORE_NODE,
    POD,
)
"""In the order in which they are applied: what others speak of comes first."""

_BY_WORD: Final[Mapping[str, Kind]] = {word: kind for kind in KINDS for word in kind.words}
_BY_PLURAL: Final[Mapping[str, Kind]] = {kind.plural: kind for kind in KINDS}


def find_kind(word: str) -> Kind | None:
    """Find a kind by its singular, plural or short name, plain or with its group, in any case."""
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
