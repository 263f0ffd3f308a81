"""How fields of documents that Kubernetes owns are read: what is not as expected counts as absent.

Used by the other modules of `control.services`. Pure.
"""

import ipaddress
from typing import Final

import msgspec

from podwire.model.endpoint import IPAddress


class Left(msgspec.Struct, array_like=True, frozen=True):
    """Something that is left to the stack."""

    reason: str
    """One word for metrics."""
    message: str


_BROADCAST: Final = ipaddress.IPv4Address("255.255.255.255")


def is_back_end_address(address: IPAddress, family: int) -> bool:
    """Tell whether packets can be sent there: never to what means another host on each host."""
    if isinstance(address, ipaddress.IPv6Address):
        means_more = address.ipv4_mapped is not None or address.scope_id is not None
    else:
        means_more = address.packed[0] == 0 or address == _BROADCAST  # RFC 1122 3.2.1.3
    return address.version == family and not (
        address.is_loopback
        or address.is_unspecified
        or address.is_link_local
        or address.is_multicast
        or means_more
    )


def read_number(value: object, largest: int) -> int:
    """Give a whole number from 1 to `largest`; 0 = it is none."""
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return value if 0 < value <= largest else 0
