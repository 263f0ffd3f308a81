"""Which ports of the host a runtime asks for: the capability `portMappings`.

Called by `cni.netconf`. Pure: whether a port is free, and whether the pod has an address of the family, is found out by
`control.endpoint.host_ports`. Sources: CONVENTIONS of the CNI specification ("capabilities"); what containerd, podman
and kubelet send.
"""

import ipaddress
import json
from typing import Any, Final

from podwire.cni.faults import Faults
from podwire.model.documents.reader import shown
from podwire.model.endpoint import HostPort, IPAddress

HOST_PORTS_MAX: Final = 1024
_PATH: Final = "runtimeConfig.portMappings"
_LOOPBACK_IPV6: Final = ipaddress.IPv6Address("::1")


def read_host_ports(value: Any, faults: Faults) -> tuple[HostPort, ...]:
    """Read the wanted ports of this host, sorted. An entry with host port 0 asks for none."""
    wanted: dict[tuple[str, int, str], HostPort] = {}
    for index, item in enumerate(faults.read_list(value, _PATH, limit=HOST_PORTS_MAX)):
        place = f"{_PATH}[{index}]"
        port = _read_one(faults.read_folded(item, place), place, faults)
        if port is None:
            continue
        key = (port.protocol, port.host_port, port.host_ip)
        if wanted.setdefault(key, port) != port:
            message = f"leads {port.protocol} port {port.host_port} to a second port of the pod"
            faults.wrong(place, message)
    return tuple(sorted(wanted.values()))


def may_ask_host_ports(config: dict[str, Any]) -> bool:
    """Tell whether a network declares the capability at podwire-cni (libcni leaves `capabilities` in what it sends)."""
    capabilities = config.get("capabilities")
    declared = isinstance(capabilities, dict) and capabilities.get("portMappings") is True
    return declared or bool(find_port_mappings(config))


def find_port_mappings(config: dict[str, Any]) -> str:
    """Give the capability as it is written, JSON, for a plugin that a DEL is passed on to; "" = nothing is asked."""
    runtime = config.get("runtimeConfig")
    for key, value in runtime.items() if isinstance(runtime, dict) else ():
        if key.lower() == "portmappings" and isinstance(value, list) and value:
            return json.dumps(value)
    return ""


def _read_one(entry: dict[str, Any], place: str, faults: Faults) -> HostPort | None:
    host_port = faults.read_integer(entry.get("hostport"), f"{place}.hostPort", low=0, high=65_535)
    # Kubernetes lists every port of a container; those without a host port have 0 here, and ask for nothing.
    if not host_port:
        return None
    pod_port = faults.read_integer(
        entry.get("containerport"), f"{place}.containerPort", low=1, high=65_535
    )
    if entry.get("containerport") is None:
        faults.wrong(f"{place}.containerPort", "is missing")
    protocol = faults.read_protocol(entry.get("protocol"), f"{place}.protocol")
    host_ip = _read_host_ip(entry.get("hostip"), f"{place}.hostIP", faults)
    return HostPort(protocol, host_port, pod_port or 0, host_ip)


def _read_host_ip(value: Any, place: str, faults: Faults) -> str:
    """Read the host's address in its shortest form; "" = each."""
    text = faults.read_text(value, place)
    if not text:
        return ""
    try:
        address: IPAddress = ipaddress.ip_address(text)
    except ValueError:
        faults.wrong(place, f"is {shown(text)}, not an address")
        return ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if why := _find_obstacle(address):
        faults.wrong(place, f"is {address}: {why}")
        return ""
    return str(address)


def _find_obstacle(address: IPAddress) -> str:
    if address == _LOOPBACK_IPV6:
        # A packet from ::1 never leaves the loopback device (RFC 4291, section 2.5.3), so none can be translated to a
        # pod. Of IPv4 the kernel has a setting for it, route_localnet.
        return "what this host sends to its own ::1 cannot be led to a pod; use 127.0.0.1"
    if address.version == 6 and address.is_link_local:
        return "a link-local address cannot be led to a pod: packets from such an address are not forwarded"
    if address.is_multicast or address == ipaddress.IPv4Address("255.255.255.255"):
        return "it is not an address of a single host"
    return ""
