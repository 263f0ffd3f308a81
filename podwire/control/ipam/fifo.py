"""The addresses of one CIDR: which are held, which rest, which were never used. Pure, in memory.

`control.ipam.node` is the only user. The journal is what survives; after a restart every held address is taken again.
An address that came back rests at the end of the line: the next one given is one that the same identity had before
(others still know it under that identity), else one never used, else the one that rested longest. Memory is
proportional to what was ever used, not to the CIDR, so an IPv6 /64 costs nothing. No address is ever held twice:
`take` refuses.
"""

import ipaddress
from collections import OrderedDict

from podwire.model.endpoint import IPAddress
from podwire.model.ids import IdentityId
from podwire.model.request import IPNetwork

NO_IDENTITY = IdentityId(0)
"""An owner whose identity is not known yet has no claim to anybody's rested address."""


class AddressFifo:
    """One CIDR. IPv4: network and broadcast address are never given, nor the first host address (the node's own);
    IPv6: the subnet-router anycast address and the first one after it."""

    def __init__(self, cidr: IPNetwork) -> None:
        self.cidr = cidr
        span = cidr.num_addresses
        self._base = int(cidr.network_address)
        self._first = 2 if span > 2 else 0
        self._end = span - 1 if cidr.version == 4 and span > 2 else span
        self._fresh = self._first
        self._held: set[int] = set()
        self._rested: OrderedDict[int, IdentityId] = OrderedDict()
        self._rested_of: dict[IdentityId, OrderedDict[int, None]] = {}

    @property
    def router(self) -> IPAddress:
        """The address that stands for the node itself."""
        return self._address(min(1, self.cidr.num_addresses - 1))

    @property
    def capacity(self) -> int:
        """How many addresses may be given out."""
        return self._end - self._first

    @property
    def held(self) -> int:
        """How many addresses are given out."""
        return len(self._held)

    @property
    def free(self) -> int:
        """How many addresses could be given out now."""
        return self.capacity - len(self._held)

    def __contains__(self, address: IPAddress) -> bool:
        return address.version == self.cidr.version and address in self.cidr

    def is_assignable(self, address: IPAddress) -> bool:
        """Tell whether the address may be given to a pod at all."""
        return address in self and self._first <= int(address) - self._base < self._end

    def is_held(self, address: IPAddress) -> bool:
        """Tell whether somebody has the address."""
        return int(address) - self._base in self._held

    def take_next(self, identity: IdentityId = NO_IDENTITY) -> IPAddress | None:
        """Give an address out; None when all are held."""
        offset = self._choose(identity)
        if offset is None:
            return None
        self._mark_held(offset)
        return self._address(offset)

    def take(self, address: IPAddress) -> bool:
        """Give this very address out; False when it is held. It must be assignable."""
        offset = int(address) - self._base
        if offset in self._held:
            return False
        self._mark_held(offset)
        return True

    def release(self, address: IPAddress, identity: IdentityId = NO_IDENTITY) -> None:
        """Let an address rest at the end of the line, remembered as that of `identity`; not held is no error."""
        offset = int(address) - self._base
        if offset not in self._held:
            return
        self._held.remove(offset)
        self._rested[offset] = identity
        self._rested_of.setdefault(identity, OrderedDict())[offset] = None

    def _choose(self, identity: IdentityId) -> int | None:
        own = self._rested_of.get(identity) if identity != NO_IDENTITY else None
        if own:
            return next(iter(own))
        while self._fresh < self._end:
            if self._fresh not in self._held and self._fresh not in self._rested:
                return self._fresh
            self._fresh += 1
        return next(iter(self._rested), None)

    def _mark_held(self, offset: int) -> None:
        self._held.add(offset)
        identity = self._rested.pop(offset, None)
        if identity is not None:
            line = self._rested_of[identity]
            del line[offset]
            if not line:
                del self._rested_of[identity]

    def _address(self, offset: int) -> IPAddress:
        if self.cidr.version == 4:
            return ipaddress.IPv4Address(self._base + offset)
        return ipaddress.IPv6Address(self._base + offset)
