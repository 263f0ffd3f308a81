"""Check whether memory, journal and kernel agree about the owner of each address.

Called by the API (`podwire ipam check`). Pure: the three views are arguments, taken at one moment under the node's
turn. An address is releasable when only the allocator's memory knows it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from podwire.control.ipam.interface import Holding
from podwire.model.endpoint import EndpointRecord, Phase
from podwire.model.ids import EndpointId


@dataclass(frozen=True)
class AddressFault:
    """One address that they do not agree about."""

    address: str
    problem: str
    releasable: bool = False


def find_address_faults(
    holdings: Mapping[EndpointId, Holding],
    records: Iterable[EndpointRecord],
    kernel_addresses: Collection[str],
) -> list[AddressFault]:
    """Name every disagreement, ordered by address.

    What is being made or ended may have rows or none; the rows of a live endpoint must be there.
    """
    by_id = {record.id: record for record in records}
    held = {
        str(address): owner for owner, holding in holdings.items() for address in holding.addresses
    }
    delivered = frozenset(kernel_addresses)
    recorded, faults = _index(by_id.values())
    for address, owner in held.items():
        if owner not in by_id:
            faults.append(AddressFault(address, f"held for {owner}, no such endpoint", True))
    for address, owner in recorded.items():
        if held.get(address) != owner:
            faults.append(AddressFault(address, f"endpoint {owner} has it, but it is not held"))
        # An endpoint that is being made has no rows yet, and one that ends has none any more. Both are in order.
        if by_id[owner].phase is Phase.LIVE and address not in delivered:
            problem = f"endpoint {owner} has it, but the datapath does not deliver it"
            faults.append(AddressFault(address, problem))
    for address in delivered:
        if address not in recorded:
            faults.append(AddressFault(address, "the datapath delivers it, but no endpoint has it"))
    return sorted(faults, key=lambda fault: (":" in fault.address, fault.address))


def _index(records: Iterable[EndpointRecord]) -> tuple[dict[str, EndpointId], list[AddressFault]]:
    """Give which endpoint has which address, and those that two have."""
    recorded: dict[str, EndpointId] = {}
    faults = []
    for record in records:
        for address in map(str, record.addresses):
            other = recorded.setdefault(address, record.id)
            if other != record.id:
                faults.append(AddressFault(address, f"endpoints {other} and {record.id} have it"))
    return recorded, faults
