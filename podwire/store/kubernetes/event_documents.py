"""Events as the API server has them: core/v1, as kubelet and `kubectl describe` write and read them.

Used by `store.kubernetes.store`. Pure. The manifest's admission policy compares `source.host` with the node of the
agent's token, so it must be the node's name.
"""

from typing import Any, Final

import msgspec

from podwire.model.store.events import EventWrite
from podwire.model.store.kinds import kind_of_plural
from podwire.store.kubernetes.api.resources import Resource

COMPONENT: Final = "podwire-agent"
EVENTS: Final = Resource("events", "Event", "", "v1", "events", namespaced=True)

_encode: Final = msgspec.json.Encoder().encode


def encode_event(told: EventWrite, node: str) -> bytes:
    """Write the body of a new Event."""
    subject = told.about
    kind = kind_of_plural(subject.key.kind)
    involved = {
        "kind": kind.name if kind else subject.key.kind,
        "apiVersion": kind.api_versions[0] if kind else "",
        "namespace": subject.key.namespace,
        "name": subject.key.name,
        "uid": subject.uid,
    }
    document: dict[str, Any] = {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.name,
        "metadata": {"name": told.name, "namespace": told.namespace},
        "involvedObject": {name: value for name, value in involved.items() if value},
        "reason": told.reason,
        "message": told.message,
        "type": "Warning",
        "source": {"component": COMPONENT, "host": node},
        "firstTimestamp": told.first,
        "lastTimestamp": told.last,
        "count": told.count,
    }
    return _encode(document)


def encode_event_again(told: EventWrite) -> bytes:
    """Write the body of a merge patch: the same has happened again."""
    return _encode({"message": told.message, "lastTimestamp": told.last, "count": told.count})
