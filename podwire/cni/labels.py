"""Labels and names that come with a request, by the grammar of Kubernetes. Called by `cni.netconf`. Pure.

Source: Kubernetes API conventions, "label selectors": a key is `[prefix/]name`, name and value at most 63 bytes.
"""

import re
from typing import Any, Final

from podwire.cni.faults import Faults, shown
from podwire.model.errors import InvalidConfiguration

LABELS_MAX: Final = 256
NAME_MAX_BYTES: Final = 253

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"(?:(?=[^/]{{1,253}}/)[a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?{_PART}")
_VALUE = re.compile(rf"(?:{_PART})?")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")


def read_labels(value: Any, path: str, faults: Faults) -> tuple[str, ...]:
    """Read a list of `{"key", "value"}` into canonical labels with the source `cni`, sorted by bytes."""
    labels: dict[str, str] = {}
    for index, item in enumerate(faults.read_list(value, path, limit=LABELS_MAX)):
        place = f"{path}[{index}]"
        entry = faults.read_object(item, place)
        key = faults.read_text(entry.get("key"), f"{place}.key")
        text = faults.read_text(entry.get("value"), f"{place}.value")
        if not _KEY.fullmatch(key):
            faults.note(InvalidConfiguration, f"{place}.key", f"is {shown(key)}, no label key")
        elif not _VALUE.fullmatch(text):
            faults.note(InvalidConfiguration, f"{place}.value", f"is {shown(text)}, no label value")
        elif labels.setdefault(key, text) != text:
            faults.note(InvalidConfiguration, place, f"gives {shown(key)} a second value")
    return tuple(sorted((f"cni:{key}={text}" for key, text in labels.items()), key=str.encode))


def read_name(text: str, path: str, faults: Faults) -> str:
    """Read the name of a pod or namespace; "" stays ""."""
    if text and (len(text) > NAME_MAX_BYTES or not _NAME.fullmatch(text)):
        faults.note(InvalidConfiguration, path, f"is {shown(text)}, no name of a pod or namespace")
        return ""
    return text
