"""IPAM mode `node`: pods get addresses from their node's CIDRs, one of each family that it has. Pure.

Used by `control.attach` under the node's turn; the journal is the durable half. An endpoint's addresses stay held
from `allocate` or `adopt` until `release`; between DEL and the moment its device is really gone they are in
quarantine, which only changes what is shown. An address never has two holders: whoever asks for a held one is refused.
"""

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from podwire.control.ipam.fifo import NO_IDENTITY, AddressFifo
from podwire.model.endpoint import IPAddress
from podwire.model.errors import AddressUnavailable, Bug, Exhausted
from podwire.model.ids import EndpointId, IdentityId
from podwire.model.request import IPNetwork


@dataclass(frozen=True)
class CidrUsage:
    """How full one CIDR is: `capacity` = `held` + `free`; `quarantined` held ones wait for their device to go."""

    cidr: IPNetwork
    router: IPAddress
    capacity: int
    held: int
    quarantined: int
    free: int


@dataclass(frozen=True)
class Holding:
    """The addresses of one endpoint."""

    owner: EndpointId
    addresses: tuple[IPAddress, ...]
    identity: IdentityId
    quarantined: bool = False


class NodeIpam:
    """The addresses of one node. `cidrs` must not overlap; several of one family are used in their order."""

    def __init__(self, cidrs: Iterable[str | IPNetwork]) -> None:
        self._pools = [AddressFifo(ipaddress.ip_network(cidr)) for cidr in cidrs]
        self._holdings: dict[EndpointId, Holding] = {}

    @property
    def families(self) -> Sequence[int]:
        """The IP versions that every endpoint gets, ascending."""
        return sorted({pool.cidr.version for pool in self._pools})

    @property
    def routers(self) -> Sequence[IPAddress]:
        """The node's own address in each CIDR."""
        return [pool.router for pool in self._pools]

    def allocate(
        self,
        owner: EndpointId,
        *,
        identity: IdentityId = NO_IDENTITY,
        wanted: Sequence[IPAddress] = (),
    ) -> tuple[IPv4Address | None, IPv6Address | None]:
        """Give `owner` one address of each family, all or none; `wanted` ones (one of each family) as asked.

        Raises Exhausted when a CIDR's family has none left, AddressUnavailable when a wanted one is held or outside.
        """
        if owner in self._holdings:
            raise Bug(f"allocate addresses for endpoint {owner}: it has some already")
        taken: list[IPAddress] = []
        try:
            for address in wanted:
                taken.append(self._take_wanted(address))
            for family in self.families:
                if all(address.version != family for address in wanted):
                    taken.append(self._take_next(family, identity))
        except (Exhausted, AddressUnavailable):
            for address in taken:
                self._pool_of(address).release(address, identity)
            raise
        taken.sort(key=lambda address: address.version)
        self._holdings[owner] = Holding(owner, tuple(taken), identity)
        ipv4 = next((one for one in taken if isinstance(one, IPv4Address)), None)
        ipv6 = next((one for one in taken if isinstance(one, IPv6Address)), None)
        return ipv4, ipv6

    def adopt(
        self,
        owner: EndpointId,
        addresses: Sequence[IPAddress],
        *,
        identity: IdentityId = NO_IDENTITY,
        quarantined: bool = False,
    ) -> None:
        """Hold again what a record says. Addresses of CIDRs that the node no longer has are held by name only.

        Raises Bug when somebody holds one of them: the journal gave one address twice.
        """
        for address in addresses:
            pool = self._find_pool(address)
            if pool is not None and not pool.take(address):
                raise Bug(f"adopt {address} for endpoint {owner}: it is held already")
        self._holdings[owner] = Holding(owner, tuple(addresses), identity, quarantined)

    def quarantine(self, owner: EndpointId) -> None:
        """Show the addresses of an ending endpoint as such; they stay held."""
        holding = self._holdings.get(owner)
        if holding is not None:
            self._holdings[owner] = Holding(
                owner, holding.addresses, holding.identity, quarantined=True
            )

    def release(self, owner: EndpointId) -> None:
        """Let the addresses of an endpoint rest; an unknown owner is no error."""
        holding = self._holdings.pop(owner, None)
        for address in holding.addresses if holding else ():
            pool = self._find_pool(address)
            if pool is not None:
                pool.release(address, holding.identity if holding else NO_IDENTITY)

    def holders(self) -> Mapping[EndpointId, Holding]:
        """Give a copy of what every endpoint holds."""
        return dict(self._holdings)

    def usage(self) -> Sequence[CidrUsage]:
        """Tell how full each CIDR is."""
        waiting = [
            address
            for holding in list(self._holdings.values())
            if holding.quarantined
            for address in holding.addresses
        ]
        return [
            CidrUsage(
                cidr=pool.cidr,
                router=pool.router,
                capacity=pool.capacity,
                held=pool.held,
                quarantined=sum(address in pool for address in waiting),
                free=pool.free,
            )
            for pool in self._pools
        ]

    def _take_wanted(self, address: IPAddress) -> IPAddress:
        pool = self._find_pool(address)
        if pool is None or not pool.is_assignable(address):
            cidrs = ", ".join(str(one.cidr) for one in self._pools) or "none"
            raise AddressUnavailable(
                f"take address {address}: it is outside what the node may give out ({cidrs})",
                hint="ask for an address of the node's CIDRs that is not its first or last one",
            )
        if not pool.take(address):
            owner = next((one for one in self._holdings.values() if address in one.addresses), None)
            raise AddressUnavailable(
                f"take address {address}: endpoint {owner.owner if owner else '?'} holds it",
                hint="see `podwire ipam show --ip ADDRESS`",
            )
        return address

    def _take_next(self, family: int, identity: IdentityId) -> IPAddress:
        pools = [pool for pool in self._pools if pool.cidr.version == family]
        for pool in pools:
            address = pool.take_next(identity)
            if address is not None:
                return address
        full = ", ".join(f"{pool.cidr} ({pool.held} of {pool.capacity} held)" for pool in pools)
        raise Exhausted(
            f"take an IPv{family} address: none left in {full}",
            hint="give the node another CIDR (node_cidrs) or remove pods; see `podwire ipam show`",
        )

    def _find_pool(self, address: IPAddress) -> AddressFifo | None:
        return next((pool for pool in self._pools if address in pool), None)

    def _pool_of(self, address: IPAddress) -> AddressFifo:
        pool = self._find_pool(address)
        assert pool is not None
        return pool
