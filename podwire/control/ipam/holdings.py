"""Which endpoint of this node holds which addresses, whatever range they are of.

Used by both sources of addresses (`node`, `pool`), which say when it may be looked at. Invariant: an address has one
holder, and an endpoint gets its addresses once.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from podwire.control.ipam.interface import Holding
from podwire.model.endpoint import IPAddress
from podwire.model.errors import Bug
from podwire.model.ids import EndpointId


class Holdings:
    """What each endpoint holds."""

    def __init__(self) -> None:
        self.of: dict[EndpointId, Holding] = {}
        self.owners: dict[IPAddress, EndpointId] = {}

    def check_fresh(self, owner: EndpointId, verb: str) -> None:
        """Raise Bug when an endpoint has addresses already."""
        if owner in self.of:
            raise Bug(f"{verb} addresses for endpoint {owner}: it has some already")

    def add(self, holding: Holding) -> None:
        """Note what an endpoint got."""
        self.of[holding.owner] = holding
        for address in holding.addresses:
            self.owners[address] = holding.owner

    def adopt(self, holding: Holding) -> None:
        """Note what a record says. Raises Bug, changing nothing, when the journal gave one address twice."""
        self.check_fresh(holding.owner, "adopt")
        for address in holding.addresses:
            if address in self.owners:
                raise Bug(
                    f"adopt {address} for endpoint {holding.owner}: endpoint"
                    f" {self.owners[address]} holds it",
                    hint="see `podwire endpoint list`; delete one of the two pods",
                )
        self.add(holding)

    def quarantine(self, owner: EndpointId) -> None:
        """Mark the addresses of an ending endpoint; they stay held."""
        holding = self.of.get(owner)
        if holding is not None:
            self.of[owner] = replace(holding, quarantined=True)

    def remove(self, owner: EndpointId) -> Holding | None:
        """Forget what an endpoint holds; gives what that was, None for an unknown one."""
        holding = self.of.pop(owner, None)
        for address in holding.addresses if holding else ():
            del self.owners[address]
        return holding

    def list_quarantined(self) -> Sequence[IPAddress]:
        """Give the addresses that wait until their devices are gone."""
        return [
            address
            for holding in list(self.of.values())
            if holding.quarantined
            for address in holding.addresses
        ]
