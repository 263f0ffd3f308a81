"""Do memory, journal and kernel agree about who has which address?

Called by the API (`podwire ipam check`). Pure: the three views are handed in, taken at one moment
under the node's turn. An address is releasable when nothing but the allocator's memory knows it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from podwire.control.ipam.node import Holding
from podwire.model.endpoint import EndpointRecord
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
    """Name every disagreement, ordered by address."""
    by_id = {record.id: record for record in records}
    faults: list[AddressFault] = []
    recorded: dict[str, EndpointId] = {}
    for record in by_id.values():
        for address in map(str, record.addresses):
            other = recorded.setdefault(address, record.id)
            if other != record.id:
                faults.append(AddressFault(address, f"endpoints {other} and {record.id} have it"))
    held = {
        str(address): owner for owner, holding in holdings.items() for address in holding.addresses
    }
    for address, owner in held.items():
        if owner not in by_id:
            faults.append(AddressFault(address, f"held for {owner}, no such endpoint", True))
    for address, owner in recorded.items():
        if held.get(address) != owner:
            faults.append(AddressFault(address, f"endpoint {owner} has it, but it is not held"))
    for address in kernel_addresses:
        if address not in recorded:
            faults.append(AddressFault(address, "the datapath delivers it, but no endpoint has it"))
    return sorted(faults, key=lambda fault: (":" in fault.address, fault.address))
