"""What attachments ask of the source of addresses: `control.ipam.node` or `control.ipam.pool`.

Values and protocols only. Invariant: an address has one holder from `Reservation.take` or `adopt` until `release`. What
may take long is done in `Reservation.fill`, before the turn is taken.
"""

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from ipaddress import IPv4Address, IPv6Address
from typing import Final, Protocol

import msgspec

from podwire.model.endpoint import AttachmentKey, IPAddress, IPNetwork
from podwire.model.ids import EndpointId, IdentityId

NO_IDENTITY: Final = IdentityId(0)
"""An owner whose identity is not known yet has no claim to anybody's rested address."""

Given = tuple[IPv4Address | None, IPv6Address | None]


class Wish(msgspec.Struct, frozen=True):
    """What one attachment asks for."""

    key: AttachmentKey | None = None
    """Whose it will be: the handle of what is claimed for it."""
    identity: IdentityId = NO_IDENTITY
    wanted: tuple[IPAddress, ...] = ()
    """Fixed addresses, at most one of each family."""
    pools: tuple[str, ...] = ()
    """By name; (): as the namespace says, else all that fit."""
    namespace: str = ""


class CidrUsage(msgspec.Struct, frozen=True):
    """How full one CIDR is: `capacity` = `held` + `free`; `quarantined` held ones wait for their device to go."""

    cidr: IPNetwork
    node_address: IPAddress | None
    """The node's own address, which no pod has; None when it is in another CIDR."""
    capacity: int
    held: int
    quarantined: int
    free: int
    pool: str = ""


class Holding(msgspec.Struct, frozen=True):
    """The addresses of one endpoint."""

    owner: EndpointId
    addresses: tuple[IPAddress, ...]
    identity: IdentityId
    quarantined: bool = False


class Reservation(Protocol):
    """Addresses for one wish, between the decision that it gets some and the endpoint that has them."""

    @property
    def needs_store(self) -> bool:
        """Tell whether `fill` would ask the store; blocks for nothing."""
        ...

    def fill(self, cancelled: Callable[[], bool], wait_s: float) -> None:
        """Set addresses aside, so that `take` finds what is asked for; may wait, so never under the turn.

        Raises Exhausted, AddressUnavailable, Unavailable, InvalidConfiguration, UnsupportedField.
        """
        ...

    def take(self, owner: EndpointId) -> Given:
        """Give `owner` its addresses, all or none; waits for nothing. Raises as `fill`."""
        ...


class Ipam(Protocol):
    """The addresses of one node."""

    def reserved(self, wish: Wish, /) -> AbstractContextManager[Reservation]:
        """Reserve addresses for a wish while the block lasts; what was set aside and not taken goes back at its end."""
        ...

    def adopt(
        self,
        owner: EndpointId,
        addresses: Sequence[IPAddress],
        *,
        identity: IdentityId = NO_IDENTITY,
        quarantined: bool = False,
    ) -> None:
        """Hold again what a record says; called in the order in which the endpoints were made. Bug: held twice."""
        ...

    def quarantine(self, owner: EndpointId) -> None:
        """Show the addresses of an ending endpoint as such; they stay held."""
        ...

    def release(self, owner: EndpointId) -> None:
        """Let the addresses of an endpoint rest; an unknown owner is no error."""
        ...

    def find_owner(self, address: IPAddress) -> EndpointId | None:
        """Tell which endpoint holds an address."""
        ...

    def holders(self) -> Mapping[EndpointId, Holding]:
        """Give a copy of what every endpoint holds."""
        ...

    def usage(self) -> Sequence[CidrUsage]:
        """Tell how full each CIDR is."""
        ...

    def list_lacks(self) -> Sequence[str]:
        """Say what an ordinary ADD would lack now; () when it would get its addresses."""
        ...


def split_families(addresses: Sequence[IPAddress]) -> Given:
    """Give the first address of each family."""
    ipv4 = next(
        (address for address in addresses if isinstance(address, ipaddress.IPv4Address)), None
    )
    ipv6 = next(
        (address for address in addresses if isinstance(address, ipaddress.IPv6Address)), None
    )
    return ipv4, ipv6
