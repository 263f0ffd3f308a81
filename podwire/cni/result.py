"""Write an AttachResult in each CNI version, and read one back.

Called by the agent's socket for replies and by `cni.netconf` for prevResult. Shapes: 0.1.0 and 0.2.0 `ip4`/`ip6`;
0.3.x and 0.4.0 `interfaces`, `ips` with `version`; 1.0.0 without it; 1.1.0 with `mtu` of interfaces and routes. Pure.
"""

import ipaddress
import json
from typing import Any, Final

from podwire.model.errors import InvalidConfiguration
from podwire.model.request import (
    AttachedAddress,
    AttachedRoute,
    AttachResult,
    Dns,
    Interface,
)

SUPPORTED_VERSIONS: Final = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
"""Ascending: comparisons are by index."""

_OLD_SHAPE: Final = ("0.1.0", "0.2.0")
_IP_VERSION_UNTIL: Final = SUPPORTED_VERSIONS.index("0.4.0")
_MTU_SINCE: Final = SUPPORTED_VERSIONS.index("1.1.0")


def encode_result(version: str, result: AttachResult) -> bytes:
    """Write `result` as JSON in `version`, which must be one of SUPPORTED_VERSIONS."""
    shape = _encode_old if version in _OLD_SHAPE else _encode_new
    return json.dumps(shape(version, result), separators=(",", ":")).encode()


def encode_versions(version: str) -> bytes:
    """Write the answer to VERSION."""
    return json.dumps(
        {"cniVersion": version, "supportedVersions": list(SUPPORTED_VERSIONS)}
    ).encode()


def decode_result(version: str, raw: dict[str, Any]) -> AttachResult:
    """Read a result; its own `cniVersion` beats `version`. Raises InvalidConfiguration naming the field."""
    version = raw.get("cniVersion") or version
    try:
        return _decode_old(raw) if version in _OLD_SHAPE else _decode_new(raw)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidConfiguration(
            f"is no result of CNI {version}: {error}",
            hint="the runtime must hand back what ADD answered",
        ) from error


def _encode_new(version: str, result: AttachResult) -> dict[str, Any]:
    level = SUPPORTED_VERSIONS.index(version)
    shown: dict[str, Any] = {"cniVersion": version}
    if result.interfaces:
        shown["interfaces"] = [_encode_interface(one, level) for one in result.interfaces]
    if result.ips:
        shown["ips"] = [_encode_ip(one, level) for one in result.ips]
    if result.routes:
        shown["routes"] = [_encode_route(one, level) for one in result.routes]
    shown["dns"] = _encode_dns(result.dns)
    return shown


def _encode_interface(interface: Interface, level: int) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": interface.name}
    if interface.mac:
        shown["mac"] = interface.mac
    if interface.mtu and level >= _MTU_SINCE:
        shown["mtu"] = interface.mtu
    if interface.sandbox:
        shown["sandbox"] = interface.sandbox
    return shown


def _encode_ip(ip: AttachedAddress, level: int) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    if level <= _IP_VERSION_UNTIL:
        shown["version"] = str(ip.address.version)
    if ip.interface is not None:
        shown["interface"] = ip.interface
    shown["address"] = str(ip.address)
    if ip.gateway is not None:
        shown["gateway"] = str(ip.gateway)
    return shown


def _encode_route(route: AttachedRoute, level: int) -> dict[str, Any]:
    shown: dict[str, Any] = {"dst": str(route.destination)}
    if route.gateway is not None:
        shown["gw"] = str(route.gateway)
    if route.mtu and level >= _MTU_SINCE:
        shown["mtu"] = route.mtu
    return shown


def _encode_dns(dns: Dns) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    if dns.nameservers:
        shown["nameservers"] = list(dns.nameservers)
    if dns.domain:
        shown["domain"] = dns.domain
    if dns.search:
        shown["search"] = list(dns.search)
    if dns.options:
        shown["options"] = list(dns.options)
    return shown


def _encode_old(version: str, result: AttachResult) -> dict[str, Any]:
    """At most one address of each family exists in this shape; the first of each is kept."""
    shown: dict[str, Any] = {"cniVersion": version}
    for family, key in ((4, "ip4"), (6, "ip6")):
        ip = next((one for one in result.ips if one.address.version == family), None)
        if ip is None:
            continue
        shown[key] = {"ip": str(ip.address)}
        if ip.gateway is not None:
            shown[key]["gateway"] = str(ip.gateway)
        routes = [one for one in result.routes if one.destination.version == family]
        if routes:
            shown[key]["routes"] = [_encode_route(one, 0) for one in routes]
    shown["dns"] = _encode_dns(result.dns)
    return shown


def _decode_new(raw: dict[str, Any]) -> AttachResult:
    interfaces = tuple(
        Interface(
            name=str(one.get("name", "")),
            mac=str(one.get("mac", "")),
            mtu=int(one.get("mtu", 0)),
            sandbox=str(one.get("sandbox", "")),
        )
        for one in raw.get("interfaces") or ()
    )
    ips = tuple(
        AttachedAddress(
            address=ipaddress.ip_interface(one["address"]),
            gateway=_gateway(one.get("gateway")),
            interface=one.get("interface"),
        )
        for one in raw.get("ips") or ()
    )
    for ip in ips:
        if ip.interface is not None and not -1 <= int(ip.interface) < len(interfaces):
            raise ValueError(f"ips name interface {ip.interface} of {len(interfaces)}")
    return AttachResult(interfaces, ips, _decode_routes(raw.get("routes")), _decode_dns(raw))


def _decode_old(raw: dict[str, Any]) -> AttachResult:
    ips: list[AttachedAddress] = []
    routes: list[AttachedRoute] = []
    for key in ("ip4", "ip6"):
        one = raw.get(key)
        if one:
            ips.append(
                AttachedAddress(ipaddress.ip_interface(one["ip"]), _gateway(one.get("gateway")))
            )
            routes.extend(_decode_routes(one.get("routes")))
    return AttachResult((), tuple(ips), tuple(routes), _decode_dns(raw))


def _decode_routes(raw: Any) -> tuple[AttachedRoute, ...]:
    return tuple(
        AttachedRoute(
            ipaddress.ip_network(one["dst"]), _gateway(one.get("gw")), int(one.get("mtu") or 0)
        )
        for one in raw or ()
    )


def _decode_dns(raw: dict[str, Any]) -> Dns:
    dns = raw.get("dns") or {}
    return Dns(
        nameservers=tuple(dns.get("nameservers") or ()),
        domain=str(dns.get("domain") or ""),
        search=tuple(dns.get("search") or ()),
        options=tuple(dns.get("options") or ()),
    )


def _gateway(text: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    return ipaddress.ip_address(text) if text else None
