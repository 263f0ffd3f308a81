"""Read and compare networks, and find the one that an address is in: every part that asks means the same, and none
across families.

Called by settings, documents, addresses and what other nodes publish. Pure. Invariant: of what is read here no two that
differ mean the same to the kernel.
"""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Generic, TypeVar

from podwire.model.endpoint import IPAddress, IPNetwork

_T = TypeVar("_T")
_MAPPED: Final = ipaddress.IPv6Network("::ffff:0:0/96")
"""IPv4 addresses in the form of IPv6 (RFC 4291, 2.5.5.2): maps of the programs have those of IPv4 in this form."""


def read_address(text: str) -> IPAddress:
    """Read an address that means the same on every machine.

    ValueError for what is none, for one with a scope (RFC 4007), and for one of IPv4 in the form of IPv6. Each of these
    is another value than the address without that, but the same one in the kernel.
    """
    address = ipaddress.ip_address(text)
    _require_one_form(
        text, address, isinstance(address, ipaddress.IPv6Address) and address in _MAPPED
    )
    return address


def read_network(text: str) -> IPNetwork:
    """Read a network without bits behind the prefix; ValueError like `read_address`."""
    network = ipaddress.ip_network(text)
    _require_one_form(text, network.network_address, overlap(network, _MAPPED))
    return network


def _require_one_form(text: str, address: IPAddress, is_mapped: bool) -> None:
    if is_mapped or (isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None):
        raise ValueError(f"{text!r} has a scope, or is IPv4 in the form of IPv6")


def is_within(inner: IPNetwork, outer: IPNetwork) -> bool:
    """Tell whether every address of one network is in another."""
    # Not by `subnet_of`, which raises across families and takes several times as long; belief in what thousands of
    # nodes publish asks this for each of their ranges.
    return (
        inner.version == outer.version
        and outer.prefixlen <= inner.prefixlen
        and inner.network_address in outer
    )


def overlap(first: IPNetwork, second: IPNetwork) -> bool:
    """Tell whether two networks share an address."""
    # CIDRs are nested or apart, so it is enough to look whether the smaller one is inside the larger one.
    if first.prefixlen >= second.prefixlen:
        return is_within(first, second)
    return is_within(second, first)


def network_key(version: int, length: int, address: int) -> tuple[int, int, int]:
    """Give the key of the network of a length that has an address: quicker than making the network."""
    return version, length, address >> ((32 if version == 4 else 128) - length)


@dataclass(frozen=True)
class NetworkIndex(Generic[_T]):
    """What is known of networks, to be found by an address in them: by one look-up for each length in use."""

    by_key: Mapping[tuple[int, int, int], _T]
    """By `network_key`."""

    @cached_property
    def _lengths(self) -> Sequence[tuple[int, int]]:
        return sorted({(version, length) for version, length, _ in self.by_key})

    def find(self, address: IPAddress) -> _T | None:
        """Give what is known of the network that an address is in: of several, of the largest; None of none."""
        family, number = address.version, int(address)
        for version, length in self._lengths:
            key = network_key(version, length, number)
            if version == family and key in self.by_key:
                return self.by_key[key]
        return None


def index_networks(known: Iterable[tuple[IPNetwork, _T]]) -> NetworkIndex[_T]:
    """Make an index; of a network that comes twice the later one counts."""
    return NetworkIndex(
        {
            network_key(network.version, network.prefixlen, int(network.network_address)): value
            for network, value in known
        }
    )
