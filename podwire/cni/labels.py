"""Labels and names that come with a request, by the grammar of Kubernetes.

Called by `cni.netconf`. Pure. A value that is accepted here can be written into canonical form, logs, file names and
JSON without escaping. The grammar of keys and values is that of `model.labels`.
"""

import functools
import re
from typing import Any, Final

from podwire.cni.faults import Faults
from podwire.model.documents.reader import shown
from podwire.model.errors import InvalidConfiguration
from podwire.model.ids import DEFAULT_NAMESPACE, NAMESPACE_MAX_CHARACTERS, is_valid_namespace
from podwire.model.labels import (
    NAME_KEY,
    NETWORK_KEY,
    OWN_PREFIX,
    SOURCE_CNI,
    is_label_key,
    is_label_value,
    namespace_labels,
    sort_labels,
)

LABELS_MAX: Final = 256
PORTS_MAX: Final = 256
NAME_MAX_CHARACTERS: Final = 253
NAMESPACES_REMEMBERED: Final = 256
"""Whose labels were spelled lately: the pods of a namespace come together."""
_OF_NAMESPACES: Final = ("io.kubernetes.", "io.cilium.")
"""A policy's key without a source matches labels of any: no pod may say by its own that it is in another namespace."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def read_labels(value: Any, path: str, faults: Faults) -> tuple[str, ...]:
    """Read a list of `{"key", "value"}` into canonical labels with the source `cni`, sorted by bytes."""
    labels: dict[str, str] = {}
    for index, item in enumerate(faults.read_list(value, path, limit=LABELS_MAX)):
        place = f"{path}[{index}]"
        entry = faults.read_object(item, place)
        key = faults.read_text(entry.get("key"), f"{place}.key")
        text = faults.read_text(entry.get("value"), f"{place}.value")
        if not is_label_key(key):
            faults.wrong(f"{place}.key", f"is {shown(key)}, not a label key ([prefix/]name)")
        elif key.startswith(f"{OWN_PREFIX}/"):
            faults.wrong(f"{place}.key", f"is {shown(key)}: {OWN_PREFIX}/ is reserved for podwire")
        elif key.startswith(_OF_NAMESPACES):
            faults.wrong(f"{place}.key", f"is {shown(key)}, which belongs to the pod's namespace")
        elif not is_label_value(text):
            faults.wrong(f"{place}.value", f"is {shown(text)}, not a label value")
        elif labels.setdefault(key, text) != text:
            faults.wrong(place, f"gives {shown(key)} a second value")
    return sort_labels(f"{SOURCE_CNI}:{key}={text}" for key, text in labels.items())


def complete_labels(
    labels: tuple[str, ...], *, network: str, namespace: str, pod: str
) -> tuple[str, ...]:
    """Add what every endpoint carries: its network, its namespace as Cilium spells it, and (to be seen) its name.

    The name is shown on the endpoint and is never part of its identity.
    """
    own = (f"{SOURCE_CNI}:{NAME_KEY}={pod}", f"{SOURCE_CNI}:{NETWORK_KEY}={network}")
    return sort_labels((*labels, *own, *_labels_of_namespace(namespace)))


@functools.lru_cache(NAMESPACES_REMEMBERED)
def _labels_of_namespace(namespace: str) -> tuple[str, ...]:
    return namespace_labels(namespace, {})


def read_name(text: str, path: str, faults: Faults) -> str:
    """Check that the name of a pod or namespace, or a UID, can be written anywhere unescaped; "" stays ""."""
    if text and (len(text) > NAME_MAX_CHARACTERS or not _NAME.fullmatch(text)):
        faults.wrong(
            path,
            f"is {shown(text)}: only letters, digits, '-', '_' and '.' are allowed,"
            f" and at most {NAME_MAX_CHARACTERS} of them",
        )
        return ""
    return text


def read_namespace(text: str, path: str, faults: Faults) -> str:
    """Check a namespace as objects must be named; "" is `default`.

    What no object can be named would be a namespace without policies: no pod may have one.
    """
    if text and not is_valid_namespace(text):
        message = (
            f"is {shown(text)}, and no policy could be in that namespace: give it a name of a-z, 0-9 and,"
            f" inside, '-', of at most {NAMESPACE_MAX_CHARACTERS} characters"
        )
        faults.note(InvalidConfiguration, path, message)
    return text or DEFAULT_NAMESPACE
