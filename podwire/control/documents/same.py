"""Whether an object is already what a person wrote, compared with the store's version field by field.

Called by `control.documents.apply`. Pure. A server that keeps objects adds to them: its own metadata, a status, and
defaults. None of that counts as a difference. A field that is no longer in the file does count, unless it has the
default value.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from podwire.control.documents.kinds import decode
from podwire.model.documents.lenient import members_of
from podwire.model.errors import InvalidRequest
from podwire.model.store import StoredObject
from podwire.model.store.kinds import NETWORK_POLICY

SERVERS_METADATA: Final = ("finalizers", "ownerReferences")
"""What of metadata stays when an object is replaced: without it a server would remove the object, or forget to."""
TOOLS: Final = "kubectl.kubernetes.io/"
"""Annotations that another tool keeps for itself, next to whatever people wrote."""

Document = Mapping[str, Any]


def is_so(stored: StoredObject, draft: StoredObject) -> bool:
    """Tell whether an object of the store says what a draft does."""
    if stored.fault:
        return False
    if stored.document == draft.document:
        return True
    there = _read_own(stored)
    return there is not None and _fill(there) == _fill(draft.document)


def leave_out_additions(stored: StoredObject, draft: StoredObject) -> StoredObject:
    """Give an object without what a server has added to it: what is left differs because somebody wrote so."""
    there = None if stored.fault else _read_own(stored)
    if there is None or there == stored.document:
        return stored  # nothing was added, so what looks like a default was written
    document = _strip(there, draft.document, _fill(draft.document))
    return msgspec.structs.replace(stored, document=document)


def keep_additions(there: StoredObject, draft: StoredObject) -> dict[str, Any]:
    """Give a draft's document with what a server, or another tool, has for itself in the object that it replaces."""
    before = members_of(there.document, "metadata")
    others = {name: before[name] for name in SERVERS_METADATA if name in before}
    metadata = {**others, **draft.document["metadata"]}
    tools = {
        name: value
        for name, value in members_of(before, "annotations").items()
        if str(name).startswith(TOOLS)
    }
    if tools:
        metadata["annotations"] = {**tools, **metadata.get("annotations", {})}
    return {**draft.document, "metadata": metadata}


def _read_own(stored: StoredObject) -> Document | None:
    """Give what somebody has written of an object; None of one that nobody could have applied."""
    try:
        own = decode(stored.document).document
    except InvalidRequest:
        return None
    metadata = own["metadata"]
    annotations = {
        name: value
        for name, value in metadata.get("annotations", {}).items()
        if not name.startswith(TOOLS)
    }
    rest = {name: value for name, value in metadata.items() if name != "annotations"}
    return {**own, "metadata": {**rest, "annotations": annotations} if annotations else rest}


def _fill(document: Document) -> Any:
    """Give a document with its kind's defaults, as the API server of Kubernetes writes it back."""
    if document.get("kind") != NETWORK_POLICY.name:
        return document
    filled = _drop_empty(document)
    spec = dict(filled.get("spec") or {})
    # pkg/apis/networking/v1/defaults.go of Kubernetes.
    if not spec.get("policyTypes"):
        spec["policyTypes"] = ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    for direction in ("ingress", "egress"):
        if direction in spec:
            spec[direction] = [_fill_rule(rule) for rule in spec[direction]]
    return {**filled, "spec": spec}


def _fill_rule(rule: Document) -> Document:
    if "ports" not in rule:
        return rule
    return {**rule, "ports": [{"protocol": "TCP", **port} for port in rule["ports"]]}


def _drop_empty(value: Any) -> Any:
    """Leave out lists that are empty, and labels that are none: the server does not write them back. An empty selector
    stays, as it selects everything."""
    if isinstance(value, Mapping):
        kept = {name: _drop_empty(member) for name, member in value.items()}
        return {
            name: member
            for name, member in kept.items()
            if member is not None and member != [] and not (member == {} and name == "matchLabels")
        }
    if isinstance(value, list | tuple):
        return [_drop_empty(item) for item in value]
    return value


def _strip(there: Any, written: Any, filled: Any) -> Any:
    """Leave out of `there` what `filled` has by default and nobody has `written`."""
    if isinstance(there, Mapping) and isinstance(written, Mapping) and isinstance(filled, Mapping):
        return {
            name: _strip(member, written.get(name), filled.get(name))
            for name, member in there.items()
            if name in written or filled.get(name) != member
        }
    if (
        isinstance(there, list)
        and isinstance(written, list)
        and isinstance(filled, list)
        and len(there) == len(written) == len(filled)
    ):
        return [_strip(*three) for three in zip(there, written, filled, strict=True)]
    return there
