"""Write an AttachResult in each CNI version, and read one back.

Called by the agent's socket for replies and by `cni.netconf` for prevResult. Shapes: 0.1.0 and 0.2.0 `ip4`/`ip6`;
0.3.x and 0.4.0 `interfaces`, `ips` with `version`; 1.0.0 without it; 1.1.0 with `mtu` of interfaces and routes. Pure.
"""

import ipaddress
from typing import Any, Final

import msgspec

from podwire.model.endpoint import IPAddress
from podwire.model.errors import InvalidConfiguration, UndecodableRequest
from podwire.model.request import AttachedAddress, AttachedRoute, AttachResult, Dns, Interface
from podwire.model.wire import SUPPORTED_CNI_VERSIONS

_OLD_SHAPE: Final = ("0.1.0", "0.2.0")
_IP_VERSION_UNTIL: Final = SUPPORTED_CNI_VERSIONS.index("0.4.0")
_MTU_SINCE: Final = SUPPORTED_CNI_VERSIONS.index("1.1.0")
_HINT: Final = "the runtime must hand back what ADD answered; DEL and ADD the attachment again"


def encode_result(version: str, result: AttachResult) -> bytes:
    """Write `result` as JSON in `version`, which must be one of SUPPORTED_CNI_VERSIONS."""
    shape = _encode_old if version in _OLD_SHAPE else _encode_new
    return msgspec.json.encode(shape(version, result))


def decode_result(version: str, raw: object) -> AttachResult:
    """Read a result of any version from decoded JSON; `version` is only named when it is wrong.

    Null counts as absent everywhere, as Go writes it. Raises UndecodableRequest for a wrong type and
    InvalidConfiguration for a text that is no address or an index that points nowhere.
    """
    try:
        shape = msgspec.convert(raw, _Shape)
        return _decode_old(shape) if shape.ip4 or shape.ip6 else _decode_new(shape)
    except msgspec.ValidationError as error:
        raise UndecodableRequest(f"is no result of CNI {version}: {error}", hint=_HINT) from error
    except ValueError as error:
        raise InvalidConfiguration(f"is no result of CNI {version}: {error}", hint=_HINT) from error


def _encode_new(version: str, result: AttachResult) -> dict[str, Any]:
    level = SUPPORTED_CNI_VERSIONS.index(version)
    shown: dict[str, Any] = {"cniVersion": version}
    if result.interfaces:
        shown["interfaces"] = [
            _encode_interface(interface, level) for interface in result.interfaces
        ]
    if result.ips:
        shown["ips"] = [_encode_ip(address, level) for address in result.ips]
    if result.routes:
        shown["routes"] = [_encode_route(route, level) for route in result.routes]
    shown["dns"] = _encode_dns(result.dns)
    return shown


def _encode_interface(interface: Interface, level: int) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": interface.name}
    if interface.mac:
        shown["mac"] = interface.mac
    # The field is new in CNI 1.1.0.
    if interface.mtu and level >= _MTU_SINCE:
        shown["mtu"] = interface.mtu
    if interface.sandbox:
        shown["sandbox"] = interface.sandbox
    return shown


def _encode_ip(ip: AttachedAddress, level: int) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    # CNI 1.0.0 dropped the field; before it is required.
    if level <= _IP_VERSION_UNTIL:
        shown["version"] = str(ip.address.version)
    if ip.interface is not None:
        shown["interface"] = ip.interface
    shown["address"] = _with_prefix(ip)
    if ip.gateway is not None:
        shown["gateway"] = str(ip.gateway)
    return shown


def _with_prefix(ip: AttachedAddress) -> str:
    return f"{ip.address}/{ip.prefix_bits}"


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
        ip = next((address for address in result.ips if address.address.version == family), None)
        if ip is None:
            continue
        shown[key] = {"ip": _with_prefix(ip)}
        if ip.gateway is not None:
            shown[key]["gateway"] = str(ip.gateway)
        routes = [route for route in result.routes if route.destination.version == family]
        if routes:
            shown[key]["routes"] = [_encode_route(route, 0) for route in routes]
    shown["dns"] = _encode_dns(result.dns)
    return shown


class _Interface(msgspec.Struct):
    name: str = ""
    mac: str | None = None
    mtu: int | None = None
    sandbox: str | None = None


class _Ip(msgspec.Struct):
    address: str
    gateway: str | None = None
    interface: int | None = None


class _Route(msgspec.Struct):
    dst: str
    gw: str | None = None
    mtu: int | None = None


class _OldIp(msgspec.Struct):
    ip: str
    gateway: str | None = None
    routes: list[_Route] | None = None


class _Dns(msgspec.Struct):
    nameservers: list[str] | None = None
    domain: str | None = None
    search: list[str] | None = None
    options: list[str] | None = None


class _Shape(msgspec.Struct):
    """Every key of every version's result."""

    interfaces: list[_Interface] | None = None
    ips: list[_Ip] | None = None
    routes: list[_Route] | None = None
    ip4: _OldIp | None = None
    ip6: _OldIp | None = None
    dns: _Dns | None = None


def _decode_new(shape: _Shape) -> AttachResult:
    interfaces = tuple(
        Interface(interface.name, interface.mac or "", interface.mtu or 0, interface.sandbox or "")
        for interface in shape.interfaces or ()
    )
    return AttachResult(
        interfaces,
        tuple(_decode_ip(ip, len(interfaces)) for ip in shape.ips or ()),
        _decode_routes(shape.routes),
        _decode_dns(shape.dns),
    )


def _decode_ip(ip: _Ip, interface_count: int) -> AttachedAddress:
    """Read one address. Some runtimes write -1 for "of no interface"."""
    index = None if ip.interface == -1 else ip.interface
    if index is not None and not 0 <= index < interface_count:
        raise ValueError(f"ips name interface {index} of {interface_count}")
    return _read_address(ip.address, ip.gateway, index)


def _read_address(text: str, gateway: str | None, index: int | None = None) -> AttachedAddress:
    read = ipaddress.ip_interface(text)
    return AttachedAddress(read.ip, read.network.prefixlen, _gateway(gateway), index)


def _decode_old(shape: _Shape) -> AttachResult:
    ips = [ip for ip in (shape.ip4, shape.ip6) if ip]
    return AttachResult(
        ips=tuple(_read_address(ip.ip, ip.gateway) for ip in ips),
        routes=tuple(route for ip in ips for route in _decode_routes(ip.routes)),
        dns=_decode_dns(shape.dns),
    )


def _decode_routes(routes: list[_Route] | None) -> tuple[AttachedRoute, ...]:
    return tuple(
        AttachedRoute(
            ipaddress.ip_network(route.dst, strict=False), _gateway(route.gw), route.mtu or 0
        )
        for route in routes or ()
    )


def _decode_dns(dns: _Dns | None) -> Dns:
    if dns is None:
        return Dns()
    return Dns(
        nameservers=tuple(dns.nameservers or ()),
        domain=dns.domain or "",
        search=tuple(dns.search or ()),
        options=tuple(dns.options or ()),
    )


def _gateway(text: str | None) -> IPAddress | None:
    return ipaddress.ip_address(text) if text else None
