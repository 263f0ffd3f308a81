"""Documents of objects: what each kind may say, checked before anything is stored.

Called by `control.documents.apply` and the doors. Pure. Invariant: a document that is accepted is carried out
completely. A field that its decoder does not know is refused by name. Only what belongs to Kubernetes itself (the rest
of metadata, status, a Namespace's spec) is left out silently, so that people can use the documents they have.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from podwire.control.documents.pools import decode_pool
from podwire.control.identity.own_labels import OF_NAMESPACES
from podwire.control.policy.rules_cilium import decode_cidr_group, decode_cilium_policy
from podwire.control.policy.rules_k8s import decode_network_policy
from podwire.control.services.documents import decode_service_document, decode_slice_document
from podwire.model.documents.fields import read_label_map
from podwire.model.documents.reader import Faults, Node, join_path, list_faults, root, shown
from podwire.model.errors import Fault, InvalidRequest
from podwire.model.ids import (
    DEFAULT_NAMESPACE,
    NAMESPACE_MAX_CHARACTERS,
    is_valid_namespace,
    is_valid_network_name,
)
from podwire.model.labels import NAMESPACE_NAME_KEY, OWN_PREFIX
from podwire.model.store import ObjectKey, StoredObject
from podwire.model.store.kinds import (
    CIDR_GROUP,
    CILIUM_CLUSTERWIDE_POLICY,
    CILIUM_POLICY,
    ENDPOINT_SLICE,
    IP_POOL,
    KINDS,
    NAMESPACE,
    NETWORK_POLICY,
    SERVICE,
    WORKLOAD,
    Kind,
    find_kind,
    kind_of_document,
    kind_of_plural,
)

NAME_MAX: Final = 253
ANNOTATIONS_MAX_CHARACTERS: Final = 256 << 10
HINT: Final = "nothing was changed; see docs/store.md for kinds and fields"

_DOTTED_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
_PATTERN = re.compile(r"[A-Za-z0-9_.*?!\[\]-]+")

Decoder = Callable[[Mapping[str, Any]], object]


def decode(document: object, *, namespace: str = "") -> StoredObject:
    """Check a document. Gives what is stored: its key, and the document without fields that are not stored.

    An object of a namespaced kind that names no namespace gets `namespace`, else `default`. Raises InvalidRequest with
    every fault.
    """
    faults = Faults()
    kind, metadata = _read_header(document, faults)
    if kind is None or not isinstance(document, Mapping):
        raise _refuse(document, faults.kept)
    key, kept = _read_metadata(metadata, kind, namespace, faults)
    spec = {
        name: document[name] for name in _FIELDS.get(kind.plural, ("spec",)) if name in document
    }
    own = {"apiVersion": kind.api_versions[0], "kind": kind.name, "metadata": kept, **spec}
    problems = [*faults.kept, *_find_unknown(document, kind)]
    known = {fault.path for fault in problems}
    problems += (fault for fault in _ask_decoder(kind, own) if fault.path not in known)
    if problems:
        raise _refuse(document, problems)
    return StoredObject(key=key, document=own)


def identify(document: object, *, namespace: str = "") -> ObjectKey:
    """Tell which object a document is about, whatever else it says; InvalidRequest when it does not say."""
    faults = Faults()
    kind, metadata = _read_header(document, faults)
    if kind is not None:
        key, _ = _read_metadata(metadata, kind, namespace, faults)
        if not faults.kept:
            return key
    raise _refuse(document, faults.kept)


def make_key(word: str, namespace: str, name: str) -> ObjectKey:
    """Give the key of an object that somebody names; `word` is the kind in any of its forms. InvalidRequest."""
    kind = find_kind(word)
    if kind is None:
        known = ", ".join(kind.plural for kind in KINDS)
        raise InvalidRequest(
            f"find kind {word[:80]!r}: there is no such kind", hint=f"there are {known}"
        )
    if namespace and not kind.namespaced:
        raise InvalidRequest(
            f"find {kind.plural} {name!r} in namespace {namespace!r}: {kind.name} objects have no"
            " namespace",
            hint="leave the namespace out",
        )
    return ObjectKey(kind.plural, (namespace or DEFAULT_NAMESPACE) if kind.namespaced else "", name)


def show_document(stored: StoredObject) -> dict[str, Any]:
    """Give the document with what the store knows of it: uid, revision, time of creation.

    One that cannot be read has its name and, as `unreadable`, the reason; nothing that could be applied.
    """
    if stored.fault:
        return _show_fault(stored)
    kept = stored.document.get("metadata")
    metadata = {
        **(kept if isinstance(kept, Mapping) else {"name": stored.key.name}),
        "uid": stored.uid,
        "resourceVersion": str(stored.revision),
        "creationTimestamp": stored.created,
    }
    return {**stored.document, "metadata": metadata}


def _show_fault(stored: StoredObject) -> dict[str, Any]:
    kind = kind_of_plural(stored.key.kind)
    metadata = {"name": stored.key.name, "resourceVersion": str(stored.revision)}
    if stored.key.namespace:
        metadata["namespace"] = stored.key.namespace
    header = {"apiVersion": kind.api_versions[0], "kind": kind.name} if kind else {}
    return {**header, "metadata": metadata, "unreadable": stored.fault}


def _refuse(document: object, faults: Sequence[Fault]) -> InvalidRequest:
    kind = document.get("kind") if isinstance(document, Mapping) else None
    what = kind if isinstance(kind, str) and kind.isidentifier() else "object"
    return InvalidRequest(f"read {what}: {list_faults(faults)}", hint=HINT, faults=tuple(faults))


def _read_header(document: object, faults: Faults) -> tuple[Kind | None, Node]:
    """Find the kind that a document names; None when there is none that may be applied."""
    if not isinstance(document, Mapping):
        faults.note("", f"is {shown(document)}, not an object")
        return None, root({}, faults)
    top = root(document, faults)
    for name in ("apiVersion", "kind"):
        if not top.child(name).text() and not isinstance(top.child(name).value, int | float):
            top.child(name).wrong("is missing")
    kind = kind_of_document(document.get("apiVersion"), document.get("kind"))
    if kind is None:
        _explain_kind(top, faults)
    elif not kind.for_people:
        maker = "Kubernetes makes" if kind.is_of_kubernetes else "agents make"
        top.child("kind").wrong(f"is {kind.name}: {maker} these")
        kind = None
    return kind, top.child("metadata")


def _explain_kind(top: Node, faults: Faults) -> None:
    api_version, name = top.child("apiVersion"), top.child("kind")
    if not isinstance(api_version.value, str) or not isinstance(name.value, str):
        return
    same = [kind for kind in KINDS if kind.name == name.value and kind.for_people]
    if same:
        known = " or ".join(same[0].api_versions)
        api_version.wrong(f"is {shown(api_version.value)}; {name.value} is of {known}")
    else:
        known = ", ".join(kind.name for kind in KINDS if kind.for_people)
        name.wrong(f"is {shown(name.value)}, not one of {known}")


def _read_metadata(
    metadata: Node, kind: Kind, namespace: str, faults: Faults
) -> tuple[ObjectKey, dict[str, Any]]:
    """Read the name, and what of metadata is kept: name, namespace, labels, annotations."""
    if not isinstance(metadata.value, Mapping):
        metadata.wrong(f"is {shown(metadata.value)}, not an object with a name")
        return ObjectKey(kind.plural, "", ""), {}
    key = ObjectKey(
        kind.plural, _read_namespace(metadata, kind, namespace), _read_name(metadata, kind)
    )
    kept: dict[str, Any] = {"name": key.name}
    if kind.namespaced:
        kept["namespace"] = key.namespace
    labels = read_label_map(metadata.child("labels"))
    if kind is NAMESPACE and labels.setdefault(NAMESPACE_NAME_KEY, key.name) != key.name:
        path = join_path("metadata.labels", NAMESPACE_NAME_KEY)
        faults.note(path, f"is {shown(labels[NAMESPACE_NAME_KEY])}, not the namespace's name")
    if labels:
        kept["labels"] = labels
    annotations = _read_annotations(metadata.child("annotations"))
    if annotations:
        kept["annotations"] = annotations
    return key, kept


def _read_name(metadata: Node, kind: Kind) -> str:
    node = metadata.child("name")
    name = node.text()
    if not node.present:
        generated = metadata.child("generateName").present
        node.wrong("is missing" + (": generateName is not supported" if generated else ""))
    elif kind is NAMESPACE and isinstance(node.value, str) and not is_valid_namespace(name):
        node.wrong(
            f"is {shown(name)}, not a name: a-z, 0-9 and -, at most {NAMESPACE_MAX_CHARACTERS}"
        )
    elif isinstance(node.value, str) and (len(name) > NAME_MAX or not _DOTTED_NAME.fullmatch(name)):
        node.wrong(f"is {shown(name)}, not a name: a-z, 0-9, - and ., at most {NAME_MAX}")
    return name


def _read_namespace(metadata: Node, kind: Kind, given: str) -> str:
    node = metadata.child("namespace")
    if not kind.namespaced:
        if node.present and node.value != "":
            node.wrong(f"is {shown(node.value)}; {kind.name} objects have no namespace")
        return ""
    namespace = node.text() or given or DEFAULT_NAMESPACE
    if not is_valid_namespace(namespace):
        node.wrong(
            f"is {shown(namespace)}, not a name: a-z, 0-9 and -, at most {NAMESPACE_MAX_CHARACTERS}"
        )
    elif given and namespace != given:
        node.wrong(f"is {shown(namespace)}, not {shown(given)} as was asked for")
    return namespace


def _read_annotations(node: Node) -> dict[str, str]:
    if not node.present or not isinstance(node.value, Mapping):
        if node.present:
            node.wrong(f"is {shown(node.value)}, not an object")
        return {}
    annotations = {key: node.child(key).text() for key in node.value}
    if (
        sum(len(key) + len(value) for key, value in annotations.items())
        > ANNOTATIONS_MAX_CHARACTERS
    ):
        node.wrong(f"has more than {ANNOTATIONS_MAX_CHARACTERS} characters")
    return annotations


def _find_unknown(document: Mapping[str, Any], kind: Kind) -> list[Fault]:
    """Find fields beside those that the kind has; status, and a Namespace's spec, are Kubernetes' own."""
    known = {"apiVersion", "kind", "metadata", "status", *_FIELDS.get(kind.plural, ("spec",))}
    if kind is NAMESPACE:
        known.add("spec")
    return [
        Fault(name if isinstance(name, str) else shown(name), "is an unknown field")
        for name in document
        if name not in known
    ]


def _ask_decoder(kind: Kind, own: Mapping[str, Any]) -> tuple[Fault, ...]:
    """Give what the kind's decoder finds wrong."""
    try:
        _DECODERS[kind.plural](own)
    except InvalidRequest as error:
        return error.faults or (Fault("", error.message),)
    return ()


def _decode_workload(document: Mapping[str, Any]) -> None:
    faults = Faults()
    spec = root(document, faults).child("spec")
    if spec.expect_object(("namePattern", "network", "labels")):
        pattern, network = spec.child("namePattern"), spec.child("network")
        if not pattern.present and not network.present:
            spec.wrong("names neither namePattern nor network: it would label every container")
        if pattern.present and not _PATTERN.fullmatch(pattern.text()):
            pattern.wrong(f"is {shown(pattern.value)}, not a pattern of names (web-*)")
        if network.present and not is_valid_network_name(network.text()):
            network.wrong(f"is {shown(network.value)}, not a name of a network")
        _check_workload_labels(spec.child("labels"))
    faults.raise_if_any("decode Workload", hint=HINT)


def _check_workload_labels(node: Node) -> None:
    labels = read_label_map(node)
    if node.value is None or node.value == {}:
        node.wrong("is missing: a Workload gives labels")
    for key in labels:
        if key.startswith(f"{OWN_PREFIX}/"):
            node.faults.note(join_path(node.path, key), f"is reserved: {OWN_PREFIX}/ is podwire's")
        elif key.startswith(OF_NAMESPACES):
            node.faults.note(
                join_path(node.path, key), "belongs to a namespace; label the Namespace object"
            )


_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    NAMESPACE.plural: (),
    CILIUM_POLICY.plural: ("spec", "specs"),
    CILIUM_CLUSTERWIDE_POLICY.plural: ("spec", "specs"),
    ENDPOINT_SLICE.plural: ("addressType", "endpoints", "ports"),
}
"""What besides apiVersion, kind and metadata is kept; `spec` where nothing is said."""

_DECODERS: Final[Mapping[str, Decoder]] = {
    NAMESPACE.plural: lambda _document: None,
    IP_POOL.plural: decode_pool,
    WORKLOAD.plural: _decode_workload,
    CIDR_GROUP.plural: decode_cidr_group,
    NETWORK_POLICY.plural: decode_network_policy,
    CILIUM_POLICY.plural: decode_cilium_policy,
    CILIUM_CLUSTERWIDE_POLICY.plural: decode_cilium_policy,
    SERVICE.plural: decode_service_document,
    ENDPOINT_SLICE.plural: decode_slice_document,
}
