"""What a configuration and an ADD ask for: the configuration's own settings, `args.cni` and `runtimeConfig`.

Called by `cni.netconf`. A setting that podwire knows but does not carry out is refused by name (CNI code 2) and never
dropped silently: no pod is better than one without the port or the address range that was asked for. Sources:
interfaces of the reference plugins; CONVENTIONS of the CNI specification ("capabilities", "args").
"""

import re
from typing import Any, Final

from podwire.cni.faults import Faults
from podwire.cni.labels import PORTS_MAX
from podwire.model.documents.reader import shown
from podwire.model.endpoint import Bandwidth
from podwire.model.errors import UnsupportedField
from podwire.model.request import NamedPort

MTU_MIN: Final = 576
"""The datagram that every IPv4 host must take (RFC 791); a device below 1280 carries no IPv6 (RFC 8200)."""
MTU_MAX: Final = 65_535
RATE_MAX_BITS_PER_S: Final = 10**15
"""The most that a Kubernetes annotation may ask for: 1P."""
BURST_MAX_BITS: Final = ((1 << 32) - 1) * 8
"""A token bucket counts its burst in bytes, in 32 bits."""
POOLS_MAX: Final = 64
LOG_LEVELS: Final = ("debug", "info", "warning", "error")

_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9](?:[a-z0-9-]{0,13}[a-z0-9])?")
_UNBUILT_CAPABILITIES: Final = {
    "ipRanges": "pods get addresses from the node's CIDRs; do not declare the capability",
    "deviceID": "podwire makes its own devices; do not declare the capability",
    "infinibandGUID": "podwire makes its own devices; do not declare the capability",
}


def refuse_unbuilt(config: dict[str, Any], faults: Faults) -> None:
    """Refuse settings by which another plugin would make the device or give the addresses."""
    if mode := faults.read_text(config.get("chaining-mode"), "chaining-mode"):
        _refuse(faults, "chaining-mode", mode, "leave it out and make podwire-cni the first plugin")
    if kind := faults.read_object(config.get("ipam"), "ipam").get("type"):
        _refuse(faults, "ipam.type", kind, "leave it out: podwire gives the addresses itself")


def refuse_chaining(config: dict[str, Any], faults: Faults) -> None:
    """Refuse an ADD after another plugin: that plugin made the device, and nothing tells us to take it over."""
    if config.get("prevResult") is not None and not config.get("chaining-mode"):
        message = "is given to ADD: podwire-cni makes the pod's device, so it must be the first plugin of the list"
        faults.note(UnsupportedField, "prevResult", message)


def read_mtu(config: dict[str, Any], faults: Faults) -> int:
    """Read the device's MTU in bytes; 0 = the node's."""
    mtu = faults.read_integer(config.get("mtu"), "mtu", low=0, high=MTU_MAX) or 0
    if 0 < mtu < MTU_MIN:
        faults.wrong("mtu", f"is {mtu}, not 0 or from {MTU_MIN} to {MTU_MAX}")
        return 0
    return mtu


def read_log_level(config: dict[str, Any], faults: Faults) -> str:
    """Read `log-level`; "" when it is not given."""
    level = faults.read_text(config.get("log-level"), "log-level").lower()
    if level and level not in LOG_LEVELS:
        faults.wrong("log-level", f"is {shown(level)}, not one of {', '.join(LOG_LEVELS)}")
        return ""
    return level


def read_runtime_config(config: dict[str, Any], faults: Faults) -> dict[str, Any]:
    """Give the capability arguments by lower-case name: containerd writes some of them in its own case."""
    runtime = faults.read_folded(config.get("runtimeConfig"), "runtimeConfig")
    for name, advice in _UNBUILT_CAPABILITIES.items():
        if value := runtime.get(name.lower()):
            _refuse(faults, f"runtimeConfig.{name}", value, advice)
    return runtime


def read_bandwidth(value: Any, faults: Faults) -> Bandwidth:
    """Read the capability `bandwidth`: bits per second and bits; its "ingress" is towards the pod."""
    path = "runtimeConfig.bandwidth"
    raw = faults.read_folded(value, path)

    def read(name: str, high: int) -> int:
        place = f"{path}.{name}"
        return faults.read_integer(raw.get(name.lower()), place, low=0, high=high) or 0

    bandwidth = Bandwidth(
        # "ingress" and "egress" of the capability are the pod's own (CNI conventions, bandwidth).
        to_pod_bits_per_s=read("ingressRate", RATE_MAX_BITS_PER_S),
        to_pod_burst_bits=read("ingressBurst", BURST_MAX_BITS),
        from_pod_bits_per_s=read("egressRate", RATE_MAX_BITS_PER_S),
        from_pod_burst_bits=read("egressBurst", BURST_MAX_BITS),
    )
    for direction, rate, burst in (
        ("ingress", bandwidth.to_pod_bits_per_s, bandwidth.to_pod_burst_bits),
        ("egress", bandwidth.from_pod_bits_per_s, bandwidth.from_pod_burst_bits),
    ):
        if burst and not raw.get(f"{direction}rate"):
            faults.wrong(f"{path}.{direction}Burst", f"is given without {direction}Rate")
        if rate and rate < 8:
            faults.wrong(f"{path}.{direction}Rate", f"is {rate}: less than one byte per second")
    return bandwidth


def read_ports(value: Any, faults: Faults) -> tuple[NamedPort, ...]:
    """Read the pod's named ports, sorted by name and protocol. Names as in Kubernetes (RFC 6335, section 5.1)."""
    ports: dict[tuple[str, str], NamedPort] = {}
    for index, item in enumerate(faults.read_list(value, "args.cni.ports", limit=PORTS_MAX)):
        place = f"args.cni.ports[{index}]"
        entry = faults.read_object(item, place)
        name = faults.read_text(entry.get("name"), f"{place}.name")
        port = faults.read_integer(entry.get("port"), f"{place}.port", low=1, high=65_535)
        if entry.get("port") is None:
            faults.wrong(f"{place}.port", "is missing")
        if not _PORT_NAME.fullmatch(name):
            faults.wrong(f"{place}.name", f"is {shown(name)}, not a port name")
        protocol = faults.read_protocol(entry.get("protocol"), f"{place}.protocol")
        made = NamedPort(name, port or 0, protocol)
        if ports.setdefault((name, protocol), made) != made:
            faults.wrong(place, f"gives {shown(name)} a second number")
    return tuple(ports[key] for key in sorted(ports))


def read_pools(value: Any, faults: Faults) -> tuple[str, ...]:
    """Read the names of the wanted pools, each once; a node without pools refuses them."""
    names = [
        faults.read_text(item, f"args.cni.pools[{index}]")
        for index, item in enumerate(faults.read_list(value, "args.cni.pools", limit=POOLS_MAX))
    ]
    return tuple(dict.fromkeys(name for name in names if name))


def _refuse(faults: Faults, path: str, value: object, advice: str) -> None:
    """Source of the wording: CNI specification 1.1.0, code 2: the message must name key and value."""
    message = f"is {shown(value)}, which this podwire does not carry out: {advice}"
    faults.note(UnsupportedField, path, message)
