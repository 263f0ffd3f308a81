"""CHECK's pure half: does the result that the runtime remembers still describe the attachment in the journal?

`control.attach.service` calls it; the kernel's half is `Datapath.compare_endpoint`. Each difference is one phrase that
names the object and both values. Source: CNI specification 1.1.0, CHECK: what prevResult lists must exist; more may
exist.
"""

from podwire.model.endpoint import EndpointRecord
from podwire.model.request import AttachResult


def compare_with_result(record: EndpointRecord, remembered: AttachResult | None) -> list[str]:
    """Name every difference between the journal and the runtime's prevResult; None (no prevResult) has none."""
    if remembered is None:
        return []
    device = record.device
    macs: dict[str, str] = {
        device.host_name: device.host_mac,
        device.pod_name: device.pod_mac,
    }
    differences = []
    for interface in remembered.interfaces:
        expected = macs.get(interface.name)
        if expected is None:
            continue  # another plugin of the chain made it
        if interface.mac and interface.mac.lower() != expected:
            differences.append(
                f"prevResult has MAC {interface.mac} for {interface.name!r}, the journal {expected}"
            )
    listed = {str(ip.address.ip) for ip in remembered.ips}
    differences.extend(
        f"address {address} of the journal is not in prevResult"
        for address in record.addresses
        if str(address) not in listed
    )
    return differences
