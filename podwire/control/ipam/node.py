"""IPAM mode `node`: pods get addresses from their node's CIDRs, one of each family that the node has. Pure.

Used by `control.attach` under the node's turn; the journal is the durable half. An endpoint's addresses stay held from
`take` or `adopt` until `release`. Between DEL and the moment its device is really gone they are in quarantine,
which only changes what is shown. An address never has two holders: asking for a held one is refused.
"""

import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Self

from podwire.control.ipam.fifo import AddressFifo
from podwire.control.ipam.holdings import Holdings
from podwire.control.ipam.interface import (
    NO_IDENTITY,
    CidrUsage,
    Given,
    Holding,
    Wish,
    split_families,
)
from podwire.model.endpoint import IPAddress, IPNetwork
from podwire.model.errors import (
    AddressUnavailable,
    Exhausted,
    InvalidConfiguration,
    Unavailable,
    UnsupportedField,
)
from podwire.model.ids import EndpointId, IdentityId
from podwire.model.networks import overlap

NEEDED: Final = 2
"""Addresses of a family: the node's own, and one pod's."""


class NodeReservation:
    """One wish of the addresses of a node's own CIDRs, for the block that it opens."""

    needs_store: Final = False

    def __init__(self, ipam: "NodeIpam", wish: Wish) -> None:
        self._ipam = ipam
        self._wish = wish

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        """Give nothing back: nothing was set aside."""

    def fill(self, _cancelled: Callable[[], bool], _wait_s: float) -> None:
        """Refuse pools: there are none. There is nothing to prepare."""
        if self._wish.pools:
            raise UnsupportedField(
                f"take addresses from args.cni.pools {list(self._wish.pools)}: this node has no pools",
                hint='leave it out, or set `ipam = "pool"` in the agent\'s configuration',
            )

    def take(self, owner: EndpointId) -> Given:
        """Give `owner` its addresses."""
        return self._ipam.take(owner, self._wish)


class NodeIpam:
    """The addresses of one node; several CIDRs of one family are used in their order.

    The first CIDR of a family has the node's own address. Raises InvalidConfiguration for CIDRs that overlap, and for a
    family in which no address is left for a pod.
    """

    def __init__(self, cidrs: Iterable[str | IPNetwork]) -> None:
        self._pools = _make_pools(cidrs)
        self._held = Holdings()
        self._withheld: dict[str, str] = {}

    @property
    def families(self) -> Sequence[int]:
        """The IP versions that every endpoint gets, ascending."""
        return sorted({pool.cidr.version for pool in self._pools})

    def change_ranges(self, cidrs: Iterable[IPNetwork]) -> None:
        """Give addresses of other CIDRs from now on. Whoever has an address keeps it. Raises as the constructor does,
        and then nothing has changed.
        """
        before = {pool.cidr: pool for pool in self._pools}
        made = _make_pools(cidrs)
        for pool in made:
            for address in self._held.owners:
                _take_for_pod(pool, address)
        # A CIDR that stays keeps the order in which its addresses rest, unless another one is its family's first now.
        self._pools = [
            kept
            if (kept := before.get(pool.cidr)) and kept.node_address == pool.node_address
            else pool
            for pool in made
        ]

    def withhold(self, cause: str, why: str) -> None:
        """Give no addresses while something is in the way; "" = that cause is gone. From any thread."""
        # A new mapping: `take` looks without a lock.
        others = {name: told for name, told in self._withheld.items() if name != cause}
        self._withheld = {**others, cause: why} if why else others

    def list_strays(self) -> Sequence[IPAddress]:
        """Give the addresses that endpoints have outside of the CIDRs: these were others when they were given."""
        return [
            address
            for address in list(self._held.owners)
            if not any(address in pool.cidr for pool in self._pools)
        ]

    def reserved(self, wish: Wish) -> NodeReservation:
        """Reserve nothing: addresses are chosen under the turn, in the moment in which they are taken."""
        return NodeReservation(self, wish)

    def take(self, owner: EndpointId, wish: Wish) -> Given:
        """Give `owner` one address of each family, all or none; wanted ones (one of each family) as asked.

        Raises Exhausted when a CIDR's family has none left, AddressUnavailable when a wanted one is held or outside.
        """
        self._held.check_fresh(owner, "allocate")
        for why in self._withheld.values():
            raise Unavailable(
                f"take an address for endpoint {owner}: {why}",
                hint="nothing is given out until that is over; the runtime tries again by itself",
            )
        chosen = [self._check_wanted(address) for address in wish.wanted]
        for family in self.families:
            if all(address.version != family for address in wish.wanted):
                chosen.append(self._choose_next(family, wish.identity))
        # Nothing was taken so far, so a refusal above leaves the lines as they were.
        holding = Holding(owner, tuple(sorted(chosen, key=_version)), wish.identity)
        self._held.add(holding)
        self._take(holding.addresses)
        return split_families(chosen)

    def adopt(
        self,
        owner: EndpointId,
        addresses: Sequence[IPAddress],
        *,
        identity: IdentityId = NO_IDENTITY,
        quarantined: bool = False,
    ) -> None:
        """Hold again what a record says; called in the order in which the endpoints were made.

        Addresses that the node may no longer give out are held by name only. Raises Bug, changing nothing, when
        somebody holds one of them: the journal gave one address twice.
        """
        self._held.adopt(Holding(owner, tuple(addresses), identity, quarantined))
        for address in addresses:
            for one in self._pools:
                _take_for_pod(one, address)
            pool = self._find_pool(address)
            if pool is not None:
                pool.continue_after(address)

    def quarantine(self, owner: EndpointId) -> None:
        """Show the addresses of an ending endpoint as such; they stay held."""
        self._held.quarantine(owner)

    def release(self, owner: EndpointId) -> None:
        """Let the addresses of an endpoint rest; an unknown owner is no error."""
        if (holding := self._held.remove(owner)) is None:
            return
        for address in holding.addresses:
            pool = self._find_pool(address)
            if pool is not None:
                pool.release(address, holding.identity)

    def find_owner(self, address: IPAddress) -> EndpointId | None:
        """Tell which endpoint holds an address."""
        return self._held.owners.get(address)

    def holders(self) -> Mapping[EndpointId, Holding]:
        """Give a copy of what every endpoint holds."""
        return dict(self._held.of)

    def usage(self) -> Sequence[CidrUsage]:
        """Tell how full each CIDR is."""
        waiting = self._held.list_quarantined()
        return [
            CidrUsage(
                cidr=pool.cidr,
                node_address=pool.node_address,
                capacity=pool.capacity,
                held=pool.held,
                quarantined=sum(pool.is_assignable(address) for address in waiting),
                free=pool.free,
            )
            for pool in self._pools
        ]

    def list_lacks(self) -> Sequence[str]:
        """Name the CIDRs that have no address left."""
        return [str(usage.cidr) for usage in self.usage() if usage.free == 0]

    def _take(self, addresses: Iterable[IPAddress]) -> None:
        for address in addresses:
            pool = self._find_pool(address)
            if pool is not None:
                pool.take(address)

    def _check_wanted(self, address: IPAddress) -> IPAddress:
        if self._find_pool(address) is None:
            cidrs = ", ".join(str(fifo.cidr) for fifo in self._pools) or "none"
            raise AddressUnavailable(
                f"take address {address}: it is outside what the node may give out ({cidrs})",
                hint="ask for an address of the node's CIDRs that is not the node's own (`podwire ipam show`)",
            )
        if address in self._held.owners:
            raise AddressUnavailable(
                f"take address {address}: endpoint {self._held.owners[address]} holds it",
                hint=f"see `podwire ipam show --ip {address}`",
            )
        return address

    def _choose_next(self, family: int, identity: IdentityId) -> IPAddress:
        pools = [pool for pool in self._pools if pool.cidr.version == family]
        rested = [pool.find_rested_of(identity) for pool in pools]
        address = next((address for address in rested if address is not None), None)
        for pool in pools:
            address = address or pool.find_next()
        if address is not None:
            return address
        full = ", ".join(f"{pool.cidr} ({pool.held} of {pool.capacity} held)" for pool in pools)
        raise Exhausted(
            f"take an IPv{family} address: none left in {full}",
            hint="give the node another CIDR (node_cidrs) or remove pods; see `podwire ipam show`",
        )

    def _find_pool(self, address: IPAddress) -> AddressFifo | None:
        """Give the CIDR that may give the address to a pod."""
        return next((pool for pool in self._pools if pool.is_assignable(address)), None)


def _make_pools(cidrs: Iterable[str | IPNetwork]) -> list[AddressFifo]:
    networks = [ipaddress.ip_network(cidr) for cidr in cidrs]
    _refuse_unusable(networks)
    pools = [AddressFifo(network) for network in networks]
    # In reverse order the first CIDR of each family is the last to be entered, and wins.
    for first in {pool.cidr.version: pool for pool in reversed(pools)}.values():
        first.set_node_address(first.find_node_address())
    return pools


def _take_for_pod(pool: AddressFifo, address: IPAddress) -> None:
    """Hold an address that a pod has, if it is in this CIDR; where it would stand for the node, another one does."""
    stood_for_node = pool.node_address == address
    if stood_for_node:
        pool.set_node_address(None)
    if pool.is_assignable(address):
        pool.take(address)
    if stood_for_node:
        pool.set_node_address(pool.find_node_address())


def _version(address: IPAddress) -> int:
    return address.version


def _refuse_unusable(networks: Sequence[IPNetwork]) -> None:
    for index, network in enumerate(networks):
        for other in networks[:index]:
            if overlap(network, other):
                raise InvalidConfiguration(
                    f"use {other} and {network} for pods: they overlap",
                    hint="give the node ranges of its own (node_cidrs)",
                )
    for version in {network.version for network in networks}:
        same = [network for network in networks if network.version == version]
        if sum(network.num_addresses for network in same) < NEEDED:
            raise InvalidConfiguration(
                f"use {same[0]} for pods: its one address is the node's own, and none is left",
                hint="give the node a larger range, or another one beside it (node_cidrs)",
            )
