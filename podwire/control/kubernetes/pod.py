"""What podwire needs to know of a Pod object, decoded once.

Called by `control.kubernetes.own_pods`. Pure. Invariant: nothing that a pod's author writes can become a label that
tells of the pod's namespace, of its service account, or of podwire itself. A field that podwire does not use is not
read.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from podwire.model.documents.fields import PORT_MAX
from podwire.model.documents.lenient import items_of, members_of, text_of
from podwire.model.labels import (
    OWN_PREFIX,
    SOURCE_K8S,
    is_label_key,
    is_label_value,
    sort_labels,
)
from podwire.model.request import NamedPort
from podwire.model.store import StoredObject

MIRROR_ANNOTATION: Final = "kubernetes.io/config.mirror"
"""On the Pod object that kubelet makes for a static pod: the UID that the runtime knows, which is not the object's."""
SERVICE_ACCOUNT_LABEL: Final = "io.cilium.k8s.policy.serviceaccount"
"""Spelled as in Cilium, so that its policies match."""
RESERVED_PREFIXES: Final = ("io.kubernetes.", "io.cilium.", f"{OWN_PREFIX}/")
"""Keys that begin so say what only the cluster or podwire may say of a pod."""
DEFAULT_SERVICE_ACCOUNT: Final = "default"
_PROTOCOLS: Final = frozenset({"TCP", "UDP", "SCTP"})


class PodFacts(msgspec.Struct, frozen=True):
    """One Pod."""

    namespace: str
    name: str
    uid: str
    mirrored_uid: str = ""
    """Of a static pod: the UID that the runtime passes on."""
    labels: tuple[str, ...] = ()
    """Canonical labels `k8s:key=value`, with that of the service account, sorted."""
    ports: tuple[NamedPort, ...] = ()
    """Ports of containers that have a name."""
    annotations: dict[str, str] = {}
    host_network: bool = False

    def has_uid(self, uid: str) -> bool:
        """Tell whether a runtime that says `uid` means this pod; "" (a runtime that says none) means any."""
        return uid in ("", self.uid, self.mirrored_uid)


def decode_pod(stored: StoredObject) -> PodFacts:
    """Read a Pod; what has another form than Kubernetes gives it is left out."""
    metadata = members_of(stored.document, "metadata")
    spec = members_of(stored.document, "spec")
    annotations = _texts(metadata, "annotations")
    return PodFacts(
        namespace=stored.key.namespace,
        name=stored.key.name,
        uid=stored.uid,
        mirrored_uid=annotations.get(MIRROR_ANNOTATION, ""),
        labels=_read_labels(
            metadata, text_of(spec, "serviceAccountName") or DEFAULT_SERVICE_ACCOUNT
        ),
        ports=_read_ports(spec),
        annotations=annotations,
        host_network=spec.get("hostNetwork") is True,
    )


def _read_labels(metadata: Mapping[str, Any], service_account: str) -> tuple[str, ...]:
    own = (
        f"{SOURCE_K8S}:{key}={value}"
        for key, value in _texts(metadata, "labels").items()
        # The author of a pod writes its labels. With one of these keys the pod could pass for one of another
        # namespace or service account.
        if not key.startswith(RESERVED_PREFIXES) and is_label_key(key) and is_label_value(value)
    )
    return sort_labels((*own, f"{SOURCE_K8S}:{SERVICE_ACCOUNT_LABEL}={service_account}"))


def _read_ports(spec: Mapping[str, Any]) -> tuple[NamedPort, ...]:
    containers = [
        container
        # An init container with restartPolicy Always (a sidecar) serves as long as the pod runs.
        for member in ("containers", "initContainers")
        for container in items_of(spec, member)
        if member == "containers" or container.get("restartPolicy") == "Always"
    ]
    ports = [port for container in containers for port in items_of(container, "ports")]
    readable = (_read_port(port) for port in ports)
    return tuple(
        sorted({port for port in readable if port is not None}, key=lambda port: port.name)
    )


def _read_port(port: Mapping[str, Any]) -> NamedPort | None:
    name, number = port.get("name"), port.get("containerPort")
    protocol = port.get("protocol", "TCP")
    if not (isinstance(name, str) and name and protocol in _PROTOCOLS):
        return None
    if not (isinstance(number, int) and 0 < number <= PORT_MAX):
        return None
    return NamedPort(name, number, protocol)


def _texts(holder: Mapping[str, Any], name: str) -> dict[str, str]:
    return {
        key: value
        for key, value in members_of(holder, name).items()
        if isinstance(key, str) and isinstance(value, str)
    }
