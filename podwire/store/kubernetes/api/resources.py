"""Which resource of the API a kind of object is, and which of its objects this client reads.

Used by `store.kubernetes`. Pure. The table follows `model.store.kinds`; what only Kubernetes has stands here.
Invariant: one kind is one resource in one version, the first that podwire writes.
"""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, urlencode

import msgspec

from podwire.model.errors import InvalidRequest
from podwire.model.store import ObjectKey
from podwire.model.store.kinds import (
    CORE,
    ENDPOINT_SLICE,
    IDENTITY,
    KINDS,
    NAMESPACE,
    SERVICE,
    Kind,
)

OWN_GROUP: Final = "podwire.io"
CILIUM_GROUP: Final = "cilium.io"
CRD_FILES: Final = "deploy/crds"

_SEGMENT: Final = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:@-]{1,253}")
"""What may stand between two slashes of a path. No name that the API server accepts has anything else."""


class Resource(msgspec.Struct, frozen=True):
    """One resource of the API."""

    kind: str
    """As in keys."""
    name: str
    """As in documents: `NetworkPolicy`."""
    group: str
    """"" of Kubernetes' first ones."""
    version: str
    plural: str
    namespaced: bool
    is_read_only: bool = False
    """Made and deleted by Kubernetes and by people, never by us."""
    status_of_annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Annotations that are kept as fields of the status, which has permissions of its own: name -> field."""

    @property
    def api_version(self) -> str:
        """`networking.k8s.io/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full_name(self) -> str:
        """`networkpolicies.networking.k8s.io`, as in RBAC and in the API server's messages; also a CRD's name."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def is_optional(self) -> bool:
        """Whether a cluster may go without it: then there are just no objects."""
        return self.group == CILIUM_GROUP

    @property
    def is_own(self) -> bool:
        """Whether podwire brings its CRD."""
        return self.group == OWN_GROUP

    def path(self, namespace: str | None = None) -> str:
        """Give the path of the collection; None: of all namespaces."""
        base = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        inside = f"/namespaces/{quote(namespace)}" if namespace and self.namespaced else ""
        return f"{base}{inside}/{self.plural}"

    def object_path(self, key: ObjectKey, subresource: str = "") -> str:
        """Give the path of one object; `key` is one that `can_exist`."""
        tail = f"/{subresource}" if subresource else ""
        return f"{self.path(key.namespace)}/{quote(key.name, safe=':@')}{tail}"

    def can_exist(self, key: ObjectKey) -> bool:
        """Tell whether the API server could have an object of this name at all."""
        if bool(key.namespace) != self.namespaced:
            return False
        return all(_SEGMENT.fullmatch(segment) for segment in (key.name, key.namespace or "-"))


class Selector(msgspec.Struct, frozen=True):
    """Which objects of a kind are listed and watched."""

    fields: str = ""
    """`spec.nodeName=n1`."""
    labels: str = ""

    def query(self) -> dict[str, str]:
        """Give the parameters of a list or a watch."""
        found = {"fieldSelector": self.fields, "labelSelector": self.labels}
        return {name: value for name, value in found.items() if value}


EVERYTHING: Final = Selector()
Selectors = Mapping[str, Selector]
"""By kind; EVERYTHING of kinds that are not named."""

NO_SERVICE_PROXY: Final = Selector(
    labels="!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless"
)
"""kube-proxy's own: services and slices that another proxy, or none, serves."""

PODS: Final = "pods"
CORE_NODES: Final = f"nodes.{CORE}"
CONFIG_MAPS: Final = "configmaps"
_ONLY_OF_KUBERNETES: Final = (
    NAMESPACE,
    SERVICE,
    ENDPOINT_SLICE,
    Kind("ConfigMap", CONFIG_MAPS, ("v1",), True, for_people=False),
)
_MARKS_OF_IDENTITIES: Final = {
    "podwire.io/unused-since": "unusedSince",
    "podwire.io/resting-since": "restingSince",
}
"""An agent may mark an Identity and change nothing else of it: RBAC tells a status from the rest, and no fields."""


def selectors_of_node(name: str) -> dict[str, Selector]:
    """Give what the agent of a node reads: of Pods and core Nodes its own."""
    return {
        PODS: Selector(fields=f"spec.nodeName={name}"),
        CORE_NODES: Selector(fields=f"metadata.name={name}"),
        SERVICE.plural: NO_SERVICE_PROXY,
        ENDPOINT_SLICE.plural: NO_SERVICE_PROXY,
    }


def find_resource(kind: str) -> Resource:
    """Give the resource of a kind; InvalidRequest of one that there is none of."""
    try:
        return RESOURCES[kind]
    except KeyError:
        raise InvalidRequest(
            f"find kind {kind!r} in the Kubernetes API: there is no such kind",
            hint=f"there are {', '.join(RESOURCES)}",
        ) from None


def with_query(path: str, query: Mapping[str, str | int]) -> str:
    """Give a path with parameters."""
    return f"{path}?{urlencode(query)}" if query else path


def _make(kind: Kind) -> Resource:
    group, slash, version = kind.api_versions[0].rpartition("/")
    return Resource(
        kind=kind.plural,
        name=kind.name,
        group=group if slash else "",
        version=version,
        plural=kind.plural.removesuffix(f".{kind.group}"),
        namespaced=kind.namespaced,
        is_read_only=kind in _ONLY_OF_KUBERNETES or kind.is_of_kubernetes,
        status_of_annotations=_MARKS_OF_IDENTITIES if kind is IDENTITY else {},
    )


RESOURCES: Final[Mapping[str, Resource]] = {
    kind.plural: _make(kind) for kind in (*_ONLY_OF_KUBERNETES, *KINDS)
}
"""All kinds of the Kubernetes API that podwire reads or writes, by the name that keys have."""
