"""Addresses and MACs that a request asks for, from all the places where it may ask.

Called by `cni.netconf`. Pure. A place is a path of the request (`args.cni.ips`, `CNI_ARGS IP`). Two places that
contradict each other are refused, because podwire must not guess which was meant.
"""

import ipaddress
import re
from collections.abc import Mapping
from typing import Any, Final

from podwire.cni.faults import Faults
from podwire.model.documents.reader import shown
from podwire.model.endpoint import IPAddress

WANTED_MAX: Final = 16
_ADDRESS_MAX_CHARACTERS: Final = 64

_MAC = re.compile(r"[0-9a-f]{2}(?P<separator>[:-])(?:[0-9a-f]{2}(?P=separator)){4}[0-9a-f]{2}")
_MULTICAST_BIT: Final = 1


def read_wanted_ips(places: Mapping[str, Any], faults: Faults) -> tuple[IPAddress, ...]:
    """Read the wanted addresses of every place: at most one of each family, IPv4 first.

    A prefix length is accepted and dropped: a pod's address is always its own /32 or /128.
    """
    by_family: dict[int, tuple[IPAddress, str]] = {}
    for path, value in places.items():
        if value is None:
            continue
        for index, item in enumerate(faults.read_list(value, path, limit=WANTED_MAX)):
            place = f"{path}[{index}]"
            address = _read_ip(item, place, faults)
            if address is None:
                continue
            known, known_place = by_family.setdefault(address.version, (address, place))
            if known != address:
                faults.wrong(
                    place,
                    f"asks for {address} and {known_place} for {known}:"
                    f" a pod has one IPv{address.version} address",
                )
    return tuple(by_family[family][0] for family in sorted(by_family))


def read_mac(places: Mapping[str, Any], faults: Faults) -> str:
    """Read the wanted MAC as `aa:bb:cc:dd:ee:ff`; "" = none is asked for. It must be a unicast address."""
    wanted: tuple[str, str] | None = None
    for path, value in places.items():
        if value is None:
            continue
        text = faults.read_text(value, path)
        if not text:
            continue
        mac = text.lower().replace("-", ":")
        if not _MAC.fullmatch(text.lower()):
            faults.wrong(
                path, f"is {shown(text)}, not a MAC address (six bytes, as 0a:58:0a:f4:01:07)"
            )
        # IEEE 802: the lowest bit of the first byte makes a group address. The kernel refuses those and zero
        # (is_valid_ether_addr).
        elif int(mac[:2], 16) & _MULTICAST_BIT or not int(mac.replace(":", ""), 16):
            faults.wrong(path, f"is {shown(text)}, which is not an address of a single device")
        elif wanted is not None and wanted[0] != mac:
            faults.wrong(path, f"asks for {mac} and {wanted[1]} for {wanted[0]}")
        else:
            wanted = (mac, path)
    return wanted[0] if wanted else ""


def _read_ip(item: Any, place: str, faults: Faults) -> IPAddress | None:
    text = faults.read_text(item, place, limit=_ADDRESS_MAX_CHARACTERS)
    # `ip_interface` accepts a scope (RFC 4007), which names a device of one host.
    if "%" in text:
        faults.wrong(place, f"is {shown(text)}: an address of a pod has no scope")
        return None
    try:
        return ipaddress.ip_interface(text).ip
    except ValueError:
        faults.wrong(place, f"is {shown(item)}, not an IP address")
        return None
