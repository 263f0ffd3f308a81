"""What a setting is: its kind, its text form, and how a value of it is read or refused.

Used by `model.config`, whose dataclass fields carry a `Setting` each. A kind turns what a file, an
environment variable or a flag says into a value, or raises ValueError with the rest of the sentence
"KEY ...". Pure.
"""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podwire.model.endpoint import IPAddress, IPNetwork

ENVIRONMENT_PREFIX = "PODWIRE_"
METADATA_KEY = "setting"
PATH_MAX_BYTES = 4095


@dataclass(frozen=True)
class Kind:
    """How values of one type are written and read."""

    name: str
    """As the documentation calls it."""
    read: Callable[[Any], Any]
    """From what TOML gives; ValueError when it is not of this kind."""
    from_text: Callable[[str], Any] = str
    """From the text of a flag or an environment variable to what TOML would have given."""


@dataclass(frozen=True)
class Setting:
    """One row of the table that drives file key, environment name, flag, help and documentation."""

    key: str
    kind: Kind
    default: Any
    """What holds when no source names the key; None when `default_note` says what."""
    help: str
    default_note: str = ""
    reloadable: bool = False
    built: Callable[[Any], bool] | None = None
    """None: every value works. Else: whether this build can do what the value asks for."""
    built_note: str = ""
    """Which values this build accepts, for the documentation and the message."""

    @property
    def flag(self) -> str:
        """The command line's name: `--node-name`."""
        return "--" + self.key.replace("_", "-")

    @property
    def environment(self) -> str:
        """The environment's name: `PODWIRE_NODE_NAME`."""
        return ENVIRONMENT_PREFIX + self.key.upper()


def setting(
    kind: Kind,
    default: Any,
    about: str,
    *,
    default_note: str = "",
    reloadable: bool = False,
    built: Callable[[Any], bool] | None = None,
    built_note: str = "",
) -> Any:
    """Declare a dataclass field that is a setting. Its key is the field's name."""
    row = Setting("", kind, default, about, default_note, reloadable, built, built_note)
    return field(default=default, metadata={METADATA_KEY: row})


def only_default(kind: Kind, default: Any, about: str) -> Any:
    """Declare a setting whose capability this build does not have: any other value is refused."""
    return setting(
        kind,
        default,
        about,
        built=lambda value: bool(value == default),
        built_note=f"only {show(default)}",
    )


def show(value: Any) -> str:
    """Write a value as TOML does."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, int):
        return str(value)
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _read_text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise ValueError("must be a string")
    if any(ord(char) < 0x20 or ord(char) == 0x7F for char in raw):
        raise ValueError("has a control character")
    return raw


def _read_bool(raw: Any) -> bool:
    if not isinstance(raw, bool):
        raise ValueError("must be true or false")
    return raw


def _bool_from_text(text: str) -> Any:
    return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)


def _int_from_text(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text


def _list_from_text(text: str) -> Any:
    return [part.strip() for part in text.split(",") if part.strip()]


def _read_path(raw: Any) -> Path:
    text = _read_text(raw)
    if not text.startswith("/"):
        raise ValueError("must be an absolute path")
    if len(text.encode()) > PATH_MAX_BYTES or ".." in text.split("/"):
        raise ValueError("must be a plain path below 4,096 bytes, without '..'")
    return Path(text)


def _read_cidr(raw: Any) -> IPNetwork:
    text = _read_text(raw)
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"has {text!r}, which is not a CIDR like 10.244.0.0/24") from None
    if "/" not in text or str(ipaddress.ip_interface(text).ip) != str(network.network_address):
        raise ValueError(f"has {text!r}, which is not the start of its range: write {network}")
    return network


def _read_cidrs(raw: Any) -> tuple[IPNetwork, ...]:
    if not isinstance(raw, list):
        raise ValueError("must be a list of CIDRs")
    return tuple(_read_cidr(item) for item in raw)


def _read_texts(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list):
        raise ValueError("must be a list of strings")
    return tuple(_read_text(item) for item in raw)


def _read_address(raw: Any) -> IPAddress | None:
    text = _read_text(raw)
    if not text:
        return None
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        raise ValueError("must be an IPv4 or IPv6 address, or empty") from None


def _read_listen(raw: Any) -> str:
    text = _read_text(raw)
    host, _, port = text.rpartition(":")
    if not text:
        return text
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        if 0 < int(port) < 65536:
            return text
    except ValueError:
        pass
    raise ValueError("must be ADDRESS:PORT (an IPv6 address in brackets), or empty")


TEXT = Kind("string", _read_text)
BOOL = Kind("boolean", _read_bool, _bool_from_text)
PATH = Kind("path", _read_path)
CIDRS = Kind("list of CIDRs", _read_cidrs, _list_from_text)
TEXTS = Kind("list of strings", _read_texts, _list_from_text)
ADDRESS = Kind("address", _read_address)
LISTEN = Kind("address:port", _read_listen)


def integer(low: int, high: int, *, or_zero: bool = False) -> Kind:
    """Give the kind of whole numbers in [low, high], and 0 if `or_zero`."""
    bounds = f"{low} to {high}" + (" or 0" if or_zero else "")

    def read(raw: Any) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int):
            raise ValueError("must be a whole number")
        if not (low <= raw <= high or (or_zero and raw == 0)):
            raise ValueError(f"must be {bounds}")
        return raw

    return Kind(f"number, {bounds}", read, _int_from_text)


def choice(*words: str) -> Kind:
    """Give the kind of one of `words`."""

    def read(raw: Any) -> str:
        if raw not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return str(raw)

    return Kind("one of " + ", ".join(f"`{word}`" for word in words), read)


def pattern(name: str, expression: str, wanted: str) -> Kind:
    """Give the kind of texts that match `expression` as a whole; `wanted` ends the sentence "must be"."""
    compiled = re.compile(expression)

    def read(raw: Any) -> str:
        text = _read_text(raw)
        if compiled.fullmatch(text) is None:
            raise ValueError(f"must be {wanted}")
        return text

    return Kind(name, read)
