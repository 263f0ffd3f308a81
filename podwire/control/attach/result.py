"""What ADD answers for an attachment, independent of the CNI version, and whether a runtime remembers it right.

Called by `control.attach.service`. Pure; `cni.result` writes each version.
"""

import ipaddress

from podwire.model.endpoint import EndpointRecord, IPAddress
from podwire.model.ids import GATEWAY_IPV4, GATEWAY_IPV6
from podwire.model.request import (
    AttachedAddress,
    AttachedRoute,
    AttachResult,
    Interface,
)

_GATEWAYS: dict[int, IPAddress] = {
    4: ipaddress.IPv4Address(GATEWAY_IPV4),
    6: ipaddress.IPv6Address(GATEWAY_IPV6),
}
_EVERYWHERE = {4: ipaddress.ip_network("0.0.0.0/0"), 6: ipaddress.ip_network("::/0")}
_POD_INTERFACE = 1


def describe_attachment(record: EndpointRecord) -> AttachResult:
    """Describe host device, pod device (with its sandbox), addresses and default routes."""
    device = record.device
    return AttachResult(
        interfaces=(
            Interface(device.host_name, device.host_mac, device.mtu),
            Interface(device.pod_name, device.pod_mac, device.mtu, record.netns_path),
        ),
        ips=tuple(
            AttachedAddress(
                address, address.max_prefixlen, _GATEWAYS[address.version], _POD_INTERFACE
            )
            for address in record.addresses
        ),
        routes=tuple(
            AttachedRoute(_EVERYWHERE[address.version], _GATEWAYS[address.version])
            for address in record.addresses
        ),
    )


def compare_with_result(record: EndpointRecord, remembered: AttachResult | None) -> list[str]:
    """Name every difference between the journal and the runtime's prevResult; None (no prevResult) has none.

    This is CHECK's half without the kernel; the other is `Datapath.compare_endpoint`. Each difference is one phrase
    that names the object and both values. Source: CNI specification 1.1.0, CHECK: what prevResult lists must exist;
    more may exist.
    """
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
    listed = {str(ip.address) for ip in remembered.ips}
    differences.extend(
        f"address {address} of the journal is not in prevResult"
        for address in record.addresses
        if str(address) not in listed
    )
    return differences
