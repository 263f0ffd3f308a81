"""Objects as the API server has them, and as the store's contract wants them.

Used by `store.kubernetes`. Pure. What only the server needs of metadata is left out, and managedFields are not even
decoded where only some fields of a kind are used. Invariant: of policies and of podwire's own kinds the whole document
is given, unknown fields too; the marks that a status keeps are shown as the annotations that they are elsewhere.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from podwire.model.errors import InvalidRequest
from podwire.model.store import Known, ObjectKey, StoredObject
from podwire.model.store.kinds import ENDPOINT_SLICE, NAMESPACE, SERVICE
from podwire.store.documents import encode_document
from podwire.store.kubernetes.api.resources import CONFIG_MAPS, CORE_NODES, PODS, Resource
from podwire.store.kubernetes.api.wire import ObjectMeta, decode_header

_OF_SERVER: Final = (
    "uid",
    "resourceVersion",
    "creationTimestamp",
    "generation",
    "managedFields",
    "selfLink",
)
"""What of metadata the server keeps for itself, or StoredObject has a field for."""


class Owner(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """metav1.OwnerReference."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class Meta(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """metav1.ObjectMeta of objects that are read and never written."""

    name: str = ""
    namespace: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[Owner] | None = None
    deletion_timestamp: str | None = None


class Port(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A container's port."""

    name: str = ""
    container_port: int = 0
    protocol: str = ""
    host_port: int = 0
    host_ip: str = msgspec.field(default="", name="hostIP")


class Container(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A container; one that is started first and goes on running has `restart_policy`."""

    name: str = ""
    restart_policy: str = ""
    ports: list[Port] | None = None


class PodSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What a node's agent needs of a Pod."""

    node_name: str = ""
    service_account_name: str = ""
    host_network: bool | None = None
    containers: list[Container] | None = None
    init_containers: list[Container] | None = None


class PodStatus(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Only whether it still runs: addresses are learnt from agents."""

    phase: str = ""


class Pod(msgspec.Struct, frozen=True, omit_defaults=True):
    """A Pod."""

    metadata: Meta = Meta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class NodeSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is used of a core Node's spec."""

    pod_cidr: str = msgspec.field(default="", name="podCIDR")
    pod_cidrs: list[str] | None = msgspec.field(default=None, name="podCIDRs")
    unschedulable: bool | None = None


class NodeAddress(msgspec.Struct, frozen=True):
    """One address of a core Node."""

    type: str = ""
    address: str = ""


class Condition(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One condition, without the times that change when nothing else does."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class NodeStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is used of a core Node's status."""

    addresses: list[NodeAddress] | None = None
    conditions: list[Condition] | None = None


class CoreNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """A Node of Kubernetes."""

    metadata: Meta = Meta()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class Named(msgspec.Struct, frozen=True, omit_defaults=True):
    """An object of which the metadata is all that is used: a Namespace."""

    metadata: Meta = Meta()


class ConfigMap(msgspec.Struct, frozen=True, omit_defaults=True):
    """A ConfigMap."""

    metadata: Meta = Meta()
    data: dict[str, str] | None = None


class Name(msgspec.Struct, frozen=True):
    """Something of which the name is all that is used."""

    name: str = ""


class Hints(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Whom a back end should answer."""

    for_zones: list[Name] | None = None
    for_nodes: list[Name] | None = None


class EndpointConditions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is the matter with a back end; None: it is not said."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class SliceEndpoint(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A back end of a service."""

    addresses: list[str] | None = None
    conditions: EndpointConditions | None = None
    node_name: str | None = None
    hints: Hints | None = None


class SlicePort(msgspec.Struct, frozen=True, omit_defaults=True):
    """A port of back ends; they may leave out all of it."""

    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """An EndpointSlice."""

    metadata: Meta = Meta()
    address_type: str = ""
    endpoints: list[SliceEndpoint] | None = None
    ports: list[SlicePort] | None = None


class ServicePort(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A port that is asked for."""

    name: str = ""
    port: int = 0
    protocol: str = ""
    target_port: int | str | None = None


class ServiceSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What is used of a Service's spec."""

    type: str = ""
    cluster_ip: str = msgspec.field(default="", name="clusterIP")
    cluster_ips: list[str] | None = msgspec.field(default=None, name="clusterIPs")
    external_ips: list[str] | None = msgspec.field(default=None, name="externalIPs")
    load_balancer_source_ranges: list[str] | None = None
    ports: list[ServicePort] | None = None
    selector: dict[str, str] | None = None
    session_affinity: str = ""
    session_affinity_config: dict[str, Any] | None = None
    internal_traffic_policy: str | None = None
    external_traffic_policy: str | None = None
    traffic_distribution: str | None = None


class Ingress(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Where a load balancer listens."""

    ip: str = ""
    ip_mode: str | None = None


class LoadBalancer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is used of a Service's load balancer."""

    ingress: list[Ingress] | None = None


class ServiceStatus(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What is used of a Service's status."""

    load_balancer: LoadBalancer | None = None


class Service(msgspec.Struct, frozen=True, omit_defaults=True):
    """A Service."""

    metadata: Meta = Meta()
    spec: ServiceSpec = ServiceSpec()
    status: ServiceStatus = ServiceStatus()


_SLIM: Final = {
    kind: msgspec.json.Decoder(shape).decode
    for kind, shape in (
        (PODS, Pod),
        (CORE_NODES, CoreNode),
        (CONFIG_MAPS, ConfigMap),
        (NAMESPACE.plural, Named),
        (SERVICE.plural, Service),
        (ENDPOINT_SLICE.plural, EndpointSlice),
    )
}
_decode_whole: Final = msgspec.json.Decoder(dict[str, Any]).decode
_UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)


def decode_key(resource: Resource, raw: msgspec.Raw | bytes) -> ObjectKey:
    """Read whose object it is."""
    return _make_key(resource, decode_header(raw).metadata)


def decode_object(
    resource: Resource, raw: msgspec.Raw | bytes, known: Known | None = None
) -> StoredObject:
    """Read an object; one that cannot be read has a `fault` and no document. StorageFailure never: the rest goes on.

    One that is as `known` has no document either.
    """
    meta = decode_header(raw).metadata
    key = _make_key(resource, meta)
    if known and known.get(key) == (meta.uid, int(meta.resource_version or 0)):
        return StoredObject(key=key, uid=meta.uid, revision=int(meta.resource_version))
    try:
        document, fault = _decode_document(resource, raw), ""
    except _UNDECODABLE as error:
        document, fault = {}, f"the API server's {resource.full_name} is not as expected: {error}"
    return StoredObject(
        key=key,
        uid=meta.uid,
        # The API conventions called resourceVersion opaque for long. API servers over etcd give a number that grows,
        # and the contract compares revisions of one kind as numbers.
        revision=int(meta.resource_version or 0),
        created=meta.creation_timestamp or "",
        document=document,
        fault=fault,
    )


def encode_object(
    resource: Resource, new: StoredObject, *, revision: int = 0, uid: str = ""
) -> tuple[bytes, dict[str, str | None]]:
    """Write an object's body, with preconditions; gives it and what belongs into its status. InvalidRequest."""
    main, status = split_status(resource, new.document)
    metadata: dict[str, Any] = {**_members(main, "metadata"), "name": new.key.name}
    for name in _OF_SERVER:
        metadata.pop(name, None)
    if resource.namespaced:
        metadata["namespace"] = new.key.namespace
    metadata |= _preconditions(revision, uid)
    main = {
        **main,
        "apiVersion": resource.api_version,
        "kind": resource.name,
        "metadata": metadata,
    }
    return encode_document(StoredObject(key=new.key, document=main)), status


def encode_patch(
    key: ObjectKey, changes: Mapping[str, Any], *, revision: int | None, uid: str
) -> bytes:
    """Write the body of a merge patch with preconditions. InvalidRequest."""
    required = _preconditions(revision or 0, uid)
    if required:
        changes = {**changes, "metadata": {**_members(changes, "metadata"), **required}}
    return encode_document(StoredObject(key=key, document=changes))


def split_status(
    resource: Resource, document: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Take out of a document, or of a patch, what the API keeps in the status."""
    main = dict(document)
    metadata = _members(main, "metadata")
    annotations = _members(metadata, "annotations")
    fields = resource.status_of_annotations
    status = {fields[name]: value for name, value in annotations.items() if name in fields}
    if status:
        rest = {name: value for name, value in annotations.items() if name not in fields}
        kept = {**metadata, "annotations": rest}
        if not rest:
            del kept["annotations"]
        main["metadata"] = kept
        if not kept:
            del main["metadata"]
    return main, status


def _make_key(resource: Resource, meta: ObjectMeta) -> ObjectKey:
    return ObjectKey(resource.kind, meta.namespace if resource.namespaced else "", meta.name)


def _decode_document(resource: Resource, raw: msgspec.Raw | bytes) -> dict[str, Any]:
    slim = _SLIM.get(resource.kind)
    document: dict[str, Any] = (
        _decode_whole(raw) if slim is None else msgspec.to_builtins(slim(raw))
    )
    metadata = {**_members(document, "metadata")}
    for name in _OF_SERVER:
        metadata.pop(name, None)
    if slim is None:
        status = document.pop("status", None)
        marks = _show_marks(resource, status)
        if marks:
            metadata["annotations"] = {**_members(metadata, "annotations"), **marks}
    # Items of lists of built-in kinds do not say what they are.
    header = {"apiVersion": resource.api_version, "kind": resource.name, "metadata": metadata}
    # The header comes twice: first for its place in the order, and again because it counts more than what the
    # document says.
    return {**header, **document, **header}


def _show_marks(resource: Resource, status: object) -> dict[str, Any]:
    if not isinstance(status, Mapping):
        return {}
    fields = resource.status_of_annotations
    return {name: status[field] for name, field in fields.items() if status.get(field)}


def _members(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise InvalidRequest(f"write object: {name} is no object")
    return found


def _preconditions(revision: int, uid: str) -> dict[str, str]:
    found = {"resourceVersion": str(revision) if revision else "", "uid": uid}
    return {name: value for name, value in found.items() if value}
