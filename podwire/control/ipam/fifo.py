"""The addresses of one CIDR: which are held, which rest, which were never used. Pure, in memory.

Used by `control.ipam.node` and, for each block, by `control.ipam.pool`. Only the journal survives; after a restart
every held address is taken again.

A released address rests at the end of the queue. The next address given is one that the same identity had before
(others still know it under that identity), otherwise one that was never used, otherwise the one that has rested
longest. The number of resting addresses is bounded, so memory grows neither with the CIDR nor with time, and an IPv6
/64 costs nothing. No address is ever held twice: `take` refuses.
"""

import ipaddress
import itertools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from podwire.control.ipam.interface import NO_IDENTITY
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import Bug
from podwire.model.ids import IdentityId

RESTED_MAX: Final = 1 << 16
"""So many may rest before the oldest is given again although others were never used."""
FIRST_OFFSET: Final = 2
"""Where the search for fresh addresses begins. Those before are as good as any where each address has a route of its
own, but people take them for something else: they come last."""

_releases = itertools.count()
"""Of all CIDRs together: tells which of two addresses of different CIDRs rested longer."""


class AddressFifo:
    """One CIDR. Pods may have every address of it except the node's own, if that is here."""

    def __init__(self, cidr: IPNetwork) -> None:
        self.cidr = cidr
        self._base = int(cidr.network_address)
        self._end = cidr.num_addresses
        self._node: int | None = None
        self._fresh_next = min(FIRST_OFFSET, self._end - 1)
        self._fresh_left = self._end
        self._held: set[int] = set()
        self._excluded: set[int] = set()
        self._rested: OrderedDict[int, IdentityId] = OrderedDict()
        self._rested_since: dict[int, int] = {}
        self._rested_of: dict[IdentityId, OrderedDict[int, None]] = {}

    @property
    def node_address(self) -> IPAddress | None:
        """The node's own address; None when it is in another CIDR."""
        return None if self._node is None else self._address(self._node)

    def find_node_address(self) -> IPAddress | None:
        """Name an address that can stand for the node: the second one, else any that is neither held nor excluded."""
        usable = (
            offset
            for offset in itertools.chain((min(1, self._end - 1),), range(self._end))
            if offset not in self._held and offset not in self._excluded
        )
        offset = next(usable, None)
        return None if offset is None else self._address(offset)

    def set_node_address(self, address: IPAddress | None) -> None:
        """Let a free address stand for the node; None = no address of this CIDR does."""
        offset = None if address is None else int(address) - self._base
        if offset in self._held:
            raise Bug(f"have {address} stand for the node: a pod has it")
        if offset is not None:
            self._forget_rest(offset)
            self._excluded.discard(offset)
        # Another address becomes free for pods, so the search for fresh ones has to come by all of them once more.
        if offset != self._node:
            self._node, self._fresh_left = offset, self._end

    @property
    def capacity(self) -> int:
        """How many addresses may be given out."""
        return self._end - (self._node is not None)

    @property
    def held(self) -> int:
        """How many addresses are given out."""
        return len(self._held)

    @property
    def free(self) -> int:
        """How many addresses could be given out now."""
        return self.capacity - len(self._held) - len(self._excluded - self._held)

    def list_held(self) -> set[IPAddress]:
        """List the addresses that are given out."""
        return {self._address(offset) for offset in self._held}

    def exclude(self, addresses: Iterable[IPAddress]) -> None:
        """Give exactly these out no more unless they are asked for by `take`; others that were so are given again."""
        offsets = {int(address) - self._base for address in addresses}
        self._excluded = {
            offset for offset in offsets if 0 <= offset < self._end and offset != self._node
        }
        for offset in self._excluded & self._rested.keys():
            self._forget_rest(offset)
        self._fresh_left = self._end

    def is_excluded(self, address: IPAddress) -> bool:
        """Tell whether an address is given only to a pod that asks for it."""
        return int(address) - self._base in self._excluded

    def is_assignable(self, address: IPAddress) -> bool:
        """Tell whether the address may be given to a pod at all."""
        offset = int(address) - self._base
        is_inside = 0 <= offset < self._end and address.version == self.cidr.version
        return is_inside and offset != self._node

    def find_rested_of(self, identity: IdentityId) -> IPAddress | None:
        """Name the address that rested longest of those that `identity` had; None when there is none."""
        own = self._rested_of.get(identity) if identity != NO_IDENTITY else None
        return self._address(next(iter(own))) if own else None

    def find_next(self) -> IPAddress | None:
        """Name an address never used, else the one that rested longest; None when all are held."""
        fresh = self.find_fresh()
        if fresh is not None:
            return fresh
        offset = next(iter(self._rested), None)
        return None if offset is None else self._address(offset)

    def find_fresh(self) -> IPAddress | None:
        """Name an address never used; None when there is none, or too many rest already."""
        offset = self._find_fresh() if len(self._rested) < RESTED_MAX else None
        return None if offset is None else self._address(offset)

    def find_rested_longest(self) -> tuple[int, IPAddress] | None:
        """Name the address that rested longest, with a number that grows with the time of its release."""
        offset = next(iter(self._rested), None)
        return None if offset is None else (self._rested_since[offset], self._address(offset))

    def take(self, address: IPAddress) -> None:
        """Give this very address out. It must be assignable; raises Bug when it is held."""
        offset = int(address) - self._base
        if offset in self._held:
            raise Bug(f"take {address}: it is held already")
        self._held.add(offset)
        self._forget_rest(offset)

    def release(self, address: IPAddress, identity: IdentityId = NO_IDENTITY) -> None:
        """Let an address rest at the end of the line, remembered as that of `identity`; not held is no error."""
        offset = int(address) - self._base
        if offset not in self._held:
            return
        self._held.remove(offset)
        # An excluded address is given only to a pod that asks for it, so it must not enter the queue.
        if offset in self._excluded:
            return
        self._rested[offset] = identity
        self._rested_since[offset] = next(_releases)
        self._rested_of.setdefault(identity, OrderedDict())[offset] = None

    def continue_after(self, address: IPAddress) -> None:
        """Look for addresses never used behind this one first, and come round to the others later.

        After a restart nobody knows which ones rested; what was given last is the best guess at what did not.
        """
        self._fresh_next = self._following(int(address) - self._base)
        self._fresh_left = self._end

    def _find_fresh(self) -> int | None:
        # Each address is passed once between two resets, so a full IPv6 /64 is not searched again at every ADD.
        while self._fresh_left:
            offset = self._fresh_next
            if (
                offset not in self._held
                and offset not in self._rested
                and offset not in self._excluded
                and offset != self._node
            ):
                return offset
            self._fresh_next = self._following(offset)
            self._fresh_left -= 1
        return None

    def _forget_rest(self, offset: int) -> None:
        identity = self._rested.pop(offset, None)
        if identity is None:
            return
        del self._rested_since[offset]
        line = self._rested_of[identity]
        del line[offset]
        if not line:
            del self._rested_of[identity]

    def _following(self, offset: int) -> int:
        return offset + 1 if offset + 1 < self._end else 0

    def _address(self, offset: int) -> IPAddress:
        if self.cidr.version == 4:
            return ipaddress.IPv4Address(self._base + offset)
        return ipaddress.IPv6Address(self._base + offset)
