"""Decode one CNI call, environment and configuration, to an AttachRequest, naming every fault at once.

Called by the agent's socket for each request. Never looks at the machine: what it accepts is valid in itself, whether
it can be done is for `control.attach`. Unknown keys of the configuration are accepted, as the specification says, and
listed; what we know and do not carry out is refused by name. Sources: CNI specification 1.1.0; CONVENTIONS; docs of
the contract.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from podwire.cni.addresses import read_mac, read_wanted_ips
from podwire.cni.cni_args import WITH_ATTACHMENT, Environment, read_environment
from podwire.cni.faults import Faults, shown
from podwire.cni.labels import read_labels, read_name
from podwire.cni.result import SUPPORTED_VERSIONS, decode_result
from podwire.model.endpoint import AttachmentKey, Bandwidth
from podwire.model.errors import (
    IncompatibleVersion,
    InvalidConfiguration,
    UndecodableRequest,
    UnsupportedField,
)
from podwire.model.ids import ContainerId, InterfaceName, NetworkName, is_valid_network_name
from podwire.model.request import AttachRequest, AttachResult, NamedPort

KNOWN_KEYS: Final = frozenset(
    {
        *("cniVersion", "cniVersions", "name", "type", "socket", "agent-wait", "ipam", "mtu"),
        *("chaining-mode", "log-level", "args", "runtimeConfig", "capabilities", "prevResult"),
        *("disableCheck", "disableGC", "dns", "cni.dev/valid-attachments", "cni.dev/attachments"),
    }
)
MTU_MIN: Final = 576
MTU_MAX: Final = 65_535
BITS_MAX: Final = 1 << 60
ATTACHMENTS_MAX: Final = 100_000
CHECK_SINCE: Final = SUPPORTED_VERSIONS.index("0.4.0")
GC_SINCE: Final = SUPPORTED_VERSIONS.index("1.1.0")
HINT: Final = "correct the network configuration or the runtime's call; nothing was done"

_LOG_LEVELS = ("", "debug", "info", "warning", "error")
_PROTOCOLS = ("TCP", "UDP", "SCTP")
_PORT_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,13}[a-z0-9])?")


def decode_request(env: Mapping[str, str], stdin: bytes, started_boottime_ns: int) -> AttachRequest:
    """Decode a call, or raise the InvalidRequest of the lowest CNI code with every fault in it."""
    faults = Faults()
    environment = read_environment(env, faults)
    config = _read_json(stdin, faults)
    version = _read_version(config, environment.command, faults)
    network = _read_network(config, faults)
    request = AttachRequest(
        command=environment.command,
        network=network,
        cni_version=version,
        key=_read_key(environment, network),
        netns_path=environment.netns_path,
        started_boottime_ns=started_boottime_ns,
        unknown_keys=tuple(sorted(set(config) - KNOWN_KEYS)),
    )
    # Only what a command uses may make it fail: a DEL must get through with the configuration that ADD was refused for.
    if environment.command == "ADD":
        request = _read_wishes(request, environment, config, faults)
    elif environment.command == "CHECK":
        prev_result = _read_prev_result(config, version, faults)
        request = msgspec.structs.replace(request, prev_result=prev_result)
    elif environment.command == "GC":
        valid = _read_valid_attachments(config, faults)
        request = msgspec.structs.replace(request, valid_attachments=valid)
    faults.raise_if_any(hint=HINT)
    return request


def _read_wishes(
    request: AttachRequest, environment: Environment, config: dict[str, Any], faults: Faults
) -> AttachRequest:
    """Add what an ADD says about its pod."""
    _refuse_unbuilt(config, faults)
    extra = faults.read_object(
        faults.read_object(config.get("args"), "args").get("cni"), "args.cni"
    )
    runtime = _read_runtime_config(config, faults)
    args = environment.args
    return msgspec.structs.replace(
        request,
        namespace=read_name(args.get("K8S_POD_NAMESPACE", ""), "K8S_POD_NAMESPACE", faults)
        or "default",
        pod=read_name(args.get("K8S_POD_NAME", ""), "K8S_POD_NAME", faults)
        or environment.container_id,
        pod_uid=args.get("K8S_POD_UID", ""),
        labels=read_labels(extra.get("labels"), "args.cni.labels", faults),
        ports=_read_ports(extra.get("ports"), faults),
        pools=_read_pools(extra.get("pools"), faults),
        wanted_ips=read_wanted_ips(
            {
                "args.cni.ips": extra.get("ips"),
                "runtimeConfig.ips": runtime.get("ips"),
                "CNI_ARGS IP": args["IP"].split(",") if args.get("IP") else None,
            },
            faults,
        ),
        wanted_mac=read_mac(
            {"runtimeConfig.mac": runtime.get("mac"), "CNI_ARGS MAC": args.get("MAC")}, faults
        ),
        mtu=_read_mtu(config, faults),
        bandwidth=_read_bandwidth(runtime.get("bandwidth"), faults),
        log_level=_read_log_level(config, faults),
    )


def _read_json(stdin: bytes, faults: Faults) -> dict[str, Any]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            names = [key for key, _ in pairs]
            twice = sorted({key for key in names if names.count(key) > 1})
            faults.note(UndecodableRequest, "stdin", f"has the key {shown(twice[0])} twice")
        return made

    try:
        config = json.loads(stdin, object_pairs_hook=refuse_duplicates)
    except RecursionError:
        faults.note(UndecodableRequest, "stdin", "is nested too deeply")
        return {}
    except ValueError as error:
        faults.note(UndecodableRequest, "stdin", f"is no JSON: {error}")
        return {}
    if not isinstance(config, dict):
        faults.note(UndecodableRequest, "stdin", f"is {shown(config)}, not a JSON object")
        return {}
    return config


def _read_version(config: dict[str, Any], command: str, faults: Faults) -> str:
    version = faults.read_text(config.get("cniVersion"), "cniVersion")
    if not version:
        if config:
            faults.note(InvalidConfiguration, "cniVersion", "is missing")
        return SUPPORTED_VERSIONS[-1]
    if version not in SUPPORTED_VERSIONS:
        supported = ", ".join(SUPPORTED_VERSIONS)
        faults.note(
            IncompatibleVersion, "cniVersion", f"is {shown(version)}; supported are {supported}"
        )
        return SUPPORTED_VERSIONS[-1]
    since = {"CHECK": CHECK_SINCE, "GC": GC_SINCE, "STATUS": GC_SINCE}.get(command, 0)
    if SUPPORTED_VERSIONS.index(version) < since:
        faults.note(
            IncompatibleVersion,
            "cniVersion",
            f"is {version}; {command} exists from {SUPPORTED_VERSIONS[since]} on",
        )
    return version


def _read_network(config: dict[str, Any], faults: Faults) -> NetworkName:
    network = faults.read_text(config.get("name"), "name", limit=256)
    if not network:
        if config:
            faults.note(InvalidConfiguration, "name", "is missing: the network's name is required")
    elif not is_valid_network_name(network):
        faults.note(InvalidConfiguration, "name", f"is {shown(network)}, no network name")
    faults.read_text(config.get("type"), "type")
    return NetworkName(network)


def _read_key(environment: Environment, network: NetworkName) -> AttachmentKey | None:
    if environment.command not in WITH_ATTACHMENT:
        return None
    container_id = ContainerId(environment.container_id)
    return AttachmentKey(network, container_id, InterfaceName(environment.if_name))


def _refuse_unbuilt(config: dict[str, Any], faults: Faults) -> None:
    """Refuse what would change the result and is not built."""
    if faults.read_text(config.get("chaining-mode"), "chaining-mode"):
        faults.note(
            UnsupportedField, "chaining-mode", "is not built: podwire must be the first plugin"
        )
    elif config.get("prevResult") is not None:
        faults.note(
            UnsupportedField, "prevResult", "on ADD: podwire must be the first plugin of its list"
        )
    ipam = faults.read_object(config.get("ipam"), "ipam")
    if ipam.get("type"):
        faults.note(
            UnsupportedField,
            "ipam.type",
            f"is {shown(ipam['type'])}: delegated address management is not built; leave it out",
        )
    faults.read_integer(config.get("agent-wait"), "agent-wait", low=0, high=3600)
    faults.read_text(config.get("socket"), "socket")


def _read_runtime_config(config: dict[str, Any], faults: Faults) -> dict[str, Any]:
    """Give the capability arguments by lower-case name: runtimes write them in their own case."""
    raw = faults.read_object(config.get("runtimeConfig"), "runtimeConfig")
    runtime = {key.lower(): value for key, value in raw.items()}
    if faults.read_list(runtime.get("portmappings"), "runtimeConfig.portMappings", limit=4096):
        faults.note(
            UnsupportedField,
            "runtimeConfig.portMappings",
            "is not built: chain the portmap plugin after podwire and take the capability from podwire",
        )
    return runtime


def _read_mtu(config: dict[str, Any], faults: Faults) -> int:
    mtu = faults.read_integer(config.get("mtu"), "mtu", low=0, high=MTU_MAX)
    if 0 < mtu < MTU_MIN:
        faults.note(InvalidConfiguration, "mtu", f"is {mtu}, below {MTU_MIN}")
    return mtu


def _read_bandwidth(value: Any, faults: Faults) -> Bandwidth:
    """Read the capability `bandwidth`: bits per second and bits; its "ingress" is towards the pod."""
    path = "runtimeConfig.bandwidth"
    raw = {key.lower(): one for key, one in faults.read_object(value, path).items()}
    found = {
        name: faults.read_integer(raw.get(name.lower()), f"{path}.{name}", low=0, high=BITS_MAX)
        for name in ("ingressRate", "ingressBurst", "egressRate", "egressBurst")
    }
    for direction in ("ingress", "egress"):
        if found[f"{direction}Burst"] and not found[f"{direction}Rate"]:
            faults.note(InvalidConfiguration, f"{path}.{direction}Burst", "is given without a rate")
    return Bandwidth(
        to_pod_bits_per_s=found["ingressRate"],
        to_pod_burst_bits=found["ingressBurst"],
        from_pod_bits_per_s=found["egressRate"],
        from_pod_burst_bits=found["egressBurst"],
    )


def _read_ports(value: Any, faults: Faults) -> tuple[NamedPort, ...]:
    ports: dict[tuple[str, str], NamedPort] = {}
    for index, item in enumerate(faults.read_list(value, "args.cni.ports", limit=256)):
        place = f"args.cni.ports[{index}]"
        entry = faults.read_object(item, place)
        name = faults.read_text(entry.get("name"), f"{place}.name")
        protocol = faults.read_text(entry.get("protocol"), f"{place}.protocol").upper() or "TCP"
        port = faults.read_integer(entry.get("port"), f"{place}.port", low=1, high=65_535)
        if not _PORT_NAME.fullmatch(name):
            faults.note(InvalidConfiguration, f"{place}.name", f"is {shown(name)}, no port name")
        if protocol not in _PROTOCOLS:
            faults.note(
                InvalidConfiguration,
                f"{place}.protocol",
                f"is {shown(protocol)}, not TCP, UDP or SCTP",
            )
        made = NamedPort(name, port, protocol)
        if ports.setdefault((name, protocol), made) != made:
            faults.note(InvalidConfiguration, place, f"gives {shown(name)} a second number")
    return tuple(ports[key] for key in sorted(ports))


def _read_pools(value: Any, faults: Faults) -> tuple[str, ...]:
    found = faults.read_list(value, "args.cni.pools", limit=64)
    if found:
        faults.note(
            UnsupportedField, "args.cni.pools", "is not built: addresses come from the node's CIDRs"
        )
    return ()


def _read_prev_result(config: dict[str, Any], version: str, faults: Faults) -> AttachResult | None:
    """Read what the runtime remembers of ADD. Source: CNI specification 1.1.0, CHECK: it must be there."""
    raw = config.get("prevResult")
    if raw is None:
        faults.note(InvalidConfiguration, "prevResult", "is missing; CHECK needs it")
        return None
    try:
        return decode_result(version, faults.read_object(raw, "prevResult"))
    except InvalidConfiguration as error:
        faults.note(InvalidConfiguration, "prevResult", error.message)
        return None


def _read_valid_attachments(
    config: dict[str, Any], faults: Faults
) -> tuple[tuple[ContainerId, InterfaceName], ...] | None:
    """Read GC's list; null is an empty one (CRI-O says so when nothing runs), no key at all is no list."""
    for key in ("cni.dev/valid-attachments", "cni.dev/attachments"):
        if key not in config:
            continue
        valid = []
        for index, item in enumerate(faults.read_list(config[key], key, limit=ATTACHMENTS_MAX)):
            entry = faults.read_object(item, f"{key}[{index}]")
            container_id = faults.read_text(entry.get("containerID"), f"{key}[{index}].containerID")
            if_name = faults.read_text(entry.get("ifname"), f"{key}[{index}].ifname")
            if not container_id or not if_name:
                faults.note(InvalidConfiguration, f"{key}[{index}]", "needs containerID and ifname")
            valid.append((ContainerId(container_id), InterfaceName(if_name)))
        return tuple(valid)
    return None


def _read_log_level(config: dict[str, Any], faults: Faults) -> str:
    level = faults.read_text(config.get("log-level"), "log-level").lower()
    if level not in _LOG_LEVELS:
        faults.note(InvalidConfiguration, "log-level", f"is {shown(level)}")
        return ""
    return level
