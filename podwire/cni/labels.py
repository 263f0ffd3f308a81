"""Labels and names that come with a request, by the grammar of Kubernetes. Called by `cni.netconf`. Pure.

What is accepted here can be written into canonical form, logs, file names and JSON unescaped. Source: Kubernetes API
conventions, "labels": a key is `[prefix/]name`, name and value have at most 63 characters.
"""

import re
from typing import Any, Final

from podwire.cni.faults import Faults, shown

LABELS_MAX: Final = 256
PORTS_MAX: Final = 256
NAME_MAX_CHARACTERS: Final = 253
OWN_PREFIX: Final = "podwire.io"
NAMESPACE_KEY: Final = "io.kubernetes.pod.namespace"
NAMESPACE_LABELS_PREFIX: Final = "io.cilium.k8s.namespace.labels"
NAMESPACE_NAME_KEY: Final = "kubernetes.io/metadata.name"

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_PREFIX = r"(?=[^/]{1,253}/)[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?"
_KEY = re.compile(rf"(?:{_PREFIX}/)?{_PART}")
_VALUE = re.compile(rf"(?:{_PART})?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def read_labels(value: Any, path: str, faults: Faults) -> tuple[str, ...]:
    """Read a list of `{"key", "value"}` into canonical labels with the source `cni`, sorted by bytes."""
    labels: dict[str, str] = {}
    for index, item in enumerate(faults.read_list(value, path, limit=LABELS_MAX)):
        place = f"{path}[{index}]"
        entry = faults.read_object(item, place)
        key = faults.read_text(entry.get("key"), f"{place}.key")
        text = faults.read_text(entry.get("value"), f"{place}.value")
        if not _KEY.fullmatch(key):
            faults.wrong(f"{place}.key", f"is {shown(key)}, no label key ([prefix/]name)")
        elif key.startswith(f"{OWN_PREFIX}/"):
            faults.wrong(f"{place}.key", f"is {shown(key)}: {OWN_PREFIX}/ is reserved for podwire")
        elif not _VALUE.fullmatch(text):
            faults.wrong(f"{place}.value", f"is {shown(text)}, no label value")
        elif labels.setdefault(key, text) != text:
            faults.wrong(place, f"gives {shown(key)} a second value")
    return tuple(sorted((f"cni:{key}={text}" for key, text in labels.items()), key=str.encode))


def complete_labels(
    labels: tuple[str, ...], *, network: str, namespace: str, pod: str
) -> tuple[str, ...]:
    """Add what every endpoint carries: its network, its namespace as Cilium spells it, and (to be seen) its name.

    The name is shown on the endpoint and is never part of its identity.
    """
    own = (
        f"cni:{OWN_PREFIX}/name={pod}",
        f"cni:{OWN_PREFIX}/network={network}",
        f"k8s:{NAMESPACE_KEY}={namespace}",
        f"k8s:{NAMESPACE_LABELS_PREFIX}.{NAMESPACE_NAME_KEY}={namespace}",
    )
    return tuple(sorted((*labels, *own), key=str.encode))


def read_name(text: str, path: str, faults: Faults) -> str:
    """Check the name of a pod or namespace, or a UID; "" stays ""."""
    if text and (len(text) > NAME_MAX_CHARACTERS or not _NAME.fullmatch(text)):
        faults.wrong(
            path,
            f"is {shown(text)}: only letters, digits, '-', '_' and '.' are allowed,"
            f" and at most {NAME_MAX_CHARACTERS} of them",
        )
        return ""
    return text
