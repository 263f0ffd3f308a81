"""Addresses and MACs that a request asks for, from all the places where it may ask. Called by `cni.netconf`. Pure."""

import ipaddress
import re
from collections.abc import Mapping
from typing import Any, Final

from podwire.cni.faults import Faults, shown
from podwire.model.endpoint import IPAddress
from podwire.model.errors import InvalidConfiguration

WANTED_MAX: Final = 16

_MAC = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}")


def read_wanted_ips(places: Mapping[str, Any], faults: Faults) -> tuple[IPAddress, ...]:
    """Read the wanted addresses of every place; they must agree, and be at most one of each family.

    A prefix length is accepted and dropped: a pod's address is always its own /32 or /128.
    """
    by_family: dict[int, tuple[IPAddress, str]] = {}
    for path, value in places.items():
        for index, item in enumerate(faults.read_list(value, path, limit=WANTED_MAX)):
            place = f"{path}[{index}]"
            address = _read_ip(item, place, faults)
            if address is None:
                continue
            known = by_family.setdefault(address.version, (address, place))
            if known[0] != address:
                faults.note(
                    InvalidConfiguration,
                    place,
                    f"asks for {address}, {known[1]} for {known[0]}: one IPv{address.version} address at most",
                )
    return tuple(by_family[family][0] for family in sorted(by_family))


def read_mac(places: Mapping[str, Any], faults: Faults) -> str:
    """Read the wanted MAC; all places that give one must agree, and it must be a unicast address."""
    found: dict[str, str] = {}
    for path, value in places.items():
        text = faults.read_text(value, path).lower()
        if not text:
            continue
        if not _MAC.fullmatch(text) or int(text[:2], 16) & 1 or text == "00:00:00:00:00:00":
            faults.note(InvalidConfiguration, path, f"is {shown(text)}, no unicast MAC address")
            continue
        found[path] = text
    if len(set(found.values())) > 1:
        faults.note(InvalidConfiguration, " and ".join(found), "ask for different MAC addresses")
    return next(iter(found.values()), "")


def _read_ip(item: Any, place: str, faults: Faults) -> IPAddress | None:
    text = faults.read_text(item, place, limit=64)
    try:
        address = ipaddress.ip_interface(text).ip
    except ValueError:
        faults.note(InvalidConfiguration, place, f"is {shown(text)}, no IP address")
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
        faults.note(InvalidConfiguration, place, f"is {shown(text)}: a scope makes no sense here")
        return None
    return address
