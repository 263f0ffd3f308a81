"""Read documents that something else has checked: what is not as expected counts as absent, and no fault is named.

Used for what Kubernetes and agents write; `podwire.model.documents.reader` reads what people write. Pure.
"""

import ipaddress
from collections.abc import Mapping
from typing import Any

from podwire.model.endpoint import IPAddress


def members_of(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Give an object inside another."""
    value = holder.get(name)
    return value if isinstance(value, Mapping) else {}


def items_of(holder: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Give a list of objects."""
    value = holder.get(name)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def texts_of(holder: Mapping[str, Any], name: str) -> list[str]:
    """Give a list of texts."""
    value = holder.get(name)
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def text_of(holder: Mapping[str, Any], name: str) -> str:
    """Give a text; "" where there is none."""
    value = holder.get(name)
    return value if isinstance(value, str) else ""


def read_address(text: str) -> IPAddress | None:
    """Read an address; None for what is none."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
