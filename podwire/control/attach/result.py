"""What ADD answers for an attachment, independent of the CNI version. Pure; `cni.result` writes each version."""

import ipaddress

from podwire.model.endpoint import EndpointRecord, IPAddress
from podwire.model.ids import GATEWAY_IPV4, GATEWAY_IPV6
from podwire.model.request import (
    AttachedAddress,
    AttachedRoute,
    AttachResult,
    Interface,
    IPInterface,
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
            AttachedAddress(_host_interface(address), _GATEWAYS[address.version], _POD_INTERFACE)
            for address in record.addresses
        ),
        routes=tuple(
            AttachedRoute(_EVERYWHERE[address.version], _GATEWAYS[address.version])
            for address in record.addresses
        ),
    )


def _host_interface(address: IPAddress) -> IPInterface:
    """Give the address with its /32 or /128. From numbers: of an address `ipaddress` writes the text and reads it."""
    whole = int(address), address.max_prefixlen
    if isinstance(address, ipaddress.IPv4Address):
        return ipaddress.IPv4Interface(whole)
    return ipaddress.IPv6Interface(whole)
