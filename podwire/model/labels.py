"""Labels in canonical form: `source:key=value`, sorted by bytes, joined with `;` where one text is wanted.

Used by every layer that reads or writes labels. Pure. Invariant: a canonical set has each (source, key) once, and no
label has a `;` or a control character in it, so that the joined text names one set only.
Source of the grammar: Kubernetes API conventions, "labels": a key is `[prefix/]name`, name and value have at most 63
characters.
"""

import enum
import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from podwire.model.errors import Fault, InvalidRequest

SOURCE_K8S: Final = "k8s"
SOURCE_CNI: Final = "cni"
SOURCE_CIDR: Final = "cidr"
SOURCE_RESERVED: Final = "reserved"
SOURCES: Final = (SOURCE_K8S, SOURCE_CNI, SOURCE_CIDR, SOURCE_RESERVED)

SEPARATOR: Final = ";"
OWN_PREFIX: Final = "podwire.io"
NAME_KEY: Final = f"{OWN_PREFIX}/name"
NETWORK_KEY: Final = f"{OWN_PREFIX}/network"
NAMESPACE_KEY: Final = "io.kubernetes.pod.namespace"
NAMESPACE_LABELS_PREFIX: Final = "io.cilium.k8s.namespace.labels"
NAMESPACE_NAME_KEY: Final = "kubernetes.io/metadata.name"

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_PREFIX = r"(?=[^/]{1,253}/)[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?"
_KEY = re.compile(rf"(?:{_PREFIX}/)?{_PART}")
_VALUE = re.compile(rf"(?:{_PART})?")
# ";" joins the labels of a set into one text. A label that has one could make two sets look the same.
_UNSAFE = re.compile(r"[;\x00-\x1f\x7f]")


class Operator(enum.StrEnum):
    """How a requirement compares. NOT_IN holds for labels that lack the key, as in Kubernetes."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class Label(NamedTuple):
    """One label."""

    source: str
    key: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.source}:{self.key}={self.value}"


def is_label_key(text: str) -> bool:
    """Tell whether `text` is a label key as Kubernetes has it: `[prefix/]name`."""
    return _KEY.fullmatch(text) is not None


def is_label_value(text: str) -> bool:
    """Tell whether `text` is a label value as Kubernetes has it; "" is one."""
    return _VALUE.fullmatch(text) is not None


def split_label(text: str) -> Label:
    """Take a canonical label apart; what is none gives nonsense, never an error."""
    name, _, value = text.partition("=")
    source, _, key = name.partition(":")
    return Label(source, key, value)


def parse_label(text: str) -> Label:
    """Read one canonical label; InvalidRequest says what is wrong with it.

    Keys and values are wider here than people may write them: a namespace's labels carry a prefix, a name may have
    253 characters.
    """
    label = split_label(text)
    if label.source not in SOURCES:
        message = f"has no source of {', '.join(SOURCES)}"
    elif not label.key or "=" not in text:
        message = "is not source:key=value"
    elif _UNSAFE.search(text):
        message = "has a ';' or a control character in it"
    else:
        return label
    raise InvalidRequest(f"read label {text[:80]!r}: it {message}", faults=(Fault("", message),))


def sort_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Give labels in canonical order, each once; does not look into them."""
    return tuple(sorted(set(labels), key=str.encode))


def parse_labels(texts: Iterable[str]) -> tuple[str, ...]:
    """Check labels and give the canonical set. InvalidRequest for a wrong one and for a key with two values."""
    values: dict[tuple[str, str], str] = {}
    for text in texts:
        label = parse_label(text)
        if values.setdefault((label.source, label.key), label.value) != label.value:
            raise InvalidRequest(f"read label {text[:80]!r}: its key has another value already")
    return sort_labels(str(Label(*name, value)) for name, value in values.items())


def join_labels(labels: Iterable[str]) -> str:
    """Give the one text of a canonical set."""
    return SEPARATOR.join(labels)


def namespace_labels(namespace: str, labels: Mapping[str, str]) -> tuple[str, ...]:
    """Spell a namespace and its own labels as labels of its pods, as in Cilium; its name is always one of them."""
    # Kubernetes sets this label on every namespace. It counts more than what the object says, so that nobody can pass
    # one namespace off as another.
    own = {**labels, NAMESPACE_NAME_KEY: namespace}
    return sort_labels(
        [
            f"{SOURCE_K8S}:{NAMESPACE_KEY}={namespace}",
            *(f"{SOURCE_K8S}:{NAMESPACE_LABELS_PREFIX}.{key}={own[key]}" for key in own),
        ]
    )


_OF_NAMESPACE: Final = (
    f"{SOURCE_K8S}:{NAMESPACE_LABELS_PREFIX}.",
    f"{SOURCE_K8S}:{NAMESPACE_KEY}=",
)


def is_namespace_label(label: str) -> bool:
    """Tell whether a canonical label tells of the pod's namespace."""
    return label.startswith(_OF_NAMESPACE)
