"""Decode one CNI call, environment and configuration, to an AttachRequest, naming every fault at once.

Called by the agent's socket for each request. Never looks at the machine: a request that is accepted here is valid in
itself, and `control.attach` finds out whether it can be carried out. Only values that a command uses can make it fail:
a DEL passes with the configuration that ADD was refused for. Unknown keys of the configuration are accepted, as the
specification says, and listed. Sources: CNI specification 1.1.0; CONVENTIONS; the inputs of containerd, CRI-O and
podman.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from podwire.cni.addresses import read_mac, read_wanted_ips
from podwire.cni.cni_args import NAME_MAX_BYTES, WITH_ATTACHMENT, Environment, read_environment
from podwire.cni.faults import Faults
from podwire.cni.host_ports import find_port_mappings, may_ask_host_ports, read_host_ports
from podwire.cni.labels import complete_labels, read_labels, read_name, read_namespace
from podwire.cni.result import decode_result
from podwire.cni.wishes import (
    read_bandwidth,
    read_log_level,
    read_mtu,
    read_pools,
    read_ports,
    read_runtime_config,
    refuse_chaining,
    refuse_unbuilt,
)
from podwire.model.documents.reader import shown
from podwire.model.endpoint import AttachmentKey
from podwire.model.errors import (
    Bug,
    IncompatibleVersion,
    InvalidRequest,
    UndecodableRequest,
)
from podwire.model.ids import (
    ContainerId,
    InterfaceName,
    NetworkName,
    interface_name_fault,
    is_valid_container_id,
    is_valid_network_name,
)
from podwire.model.request import AttachRequest, AttachResult
from podwire.model.wire import SUPPORTED_CNI_VERSIONS

KNOWN_KEYS: Final = frozenset(
    {
        *("cniVersion", "cniVersions", "name", "type", "socket", "agent-wait", "ipam", "mtu"),
        *("chaining-mode", "log-level", "args", "runtimeConfig", "capabilities", "prevResult"),
        *("disableCheck", "disableGC", "cni.dev/valid-attachments", "cni.dev/attachments"),
    }
)
ATTACHMENTS_MAX: Final = 100_000
UNKNOWN_KEYS_MAX: Final = 32
REMEMBERED: Final = 32
"""Configurations that were read without a fault."""
REMEMBERED_MAX_BYTES: Final = 16_384
_REMEMBERED_OF: Final = ("ADD", "DEL", "STATUS")
COMMAND_SINCE: Final = {"CHECK": "0.4.0", "GC": "1.1.0", "STATUS": "1.1.0"}
HINT: Final = "correct the network configuration or the runtime's call; nothing was changed"

_GC_KEYS: Final = ("cni.dev/valid-attachments", "cni.dev/attachments")
"""Both say the same; the second is for plugins that were written before the specification was final."""


class _Configuration(msgspec.Struct, frozen=True):
    """What the configuration of a network says, without what a call's environment says."""

    request: AttachRequest
    labels: tuple[str, ...] = ()
    ips: Any = None
    runtime_ips: Any = None
    mac: Any = None


def decode_request(env: Mapping[str, str], stdin: bytes, started_boottime_ns: int) -> AttachRequest:
    """Decode a call, or raise the InvalidRequest of the lowest CNI code with every fault in it."""
    faults = Faults()
    environment = read_environment(env, faults)
    configuration = _read_configuration(environment.command, stdin, faults)
    request = msgspec.structs.replace(
        configuration.request,
        key=_make_key(environment, configuration.request.network),
        netns_path=environment.netns_path,
        started_boottime_ns=started_boottime_ns,
    )
    if environment.command == "ADD":
        request = _read_pod(request, environment, configuration, faults)
    faults.raise_if_any(hint=HINT)
    return request


def _read_configuration(command: str, stdin: bytes, faults: Faults) -> _Configuration:
    """Read a configuration, or remember it: runtimes send the same one for each pod."""
    # GC and CHECK are not remembered: their configuration has a list or a result that is never the same again.
    if command in _REMEMBERED_OF and len(stdin) <= REMEMBERED_MAX_BYTES:
        try:
            return _read_faultless(command, stdin)
        except InvalidRequest:
            pass  # its faults are to be named with those of others
    return _read_anew(command, stdin, faults)


@functools.lru_cache(REMEMBERED)
def _read_faultless(command: str, stdin: bytes) -> _Configuration:
    faults = Faults()
    configuration = _read_anew(command, stdin, faults)
    faults.raise_if_any(hint=HINT)
    return configuration


def _read_anew(command: str, stdin: bytes, faults: Faults) -> _Configuration:
    config = _read_json(stdin, faults)
    if config is None:
        faults.raise_if_any(hint=HINT)
        raise Bug("decode request: stdin is no object, and no fault was noted")
    version = _read_version(config, command, faults)
    request = AttachRequest(
        command=command,
        network=_read_network(config, faults),
        cni_version=version,
        key=None,
        netns_path="",
        started_boottime_ns=0,
        unknown_keys=tuple(sorted(set(config) - KNOWN_KEYS))[:UNKNOWN_KEYS_MAX],
    )
    # Only values that the command uses can make it fail: a DEL has to pass with a configuration that ADD was refused
    # for.
    if command in ("ADD", "STATUS"):
        request = _read_settings(request, config, faults)
    if command == "ADD":
        return _read_pods(request, config, faults)
    if command == "DEL":
        request = msgspec.structs.replace(request, port_mappings=find_port_mappings(config))
    if command == "CHECK":
        prev_result = _read_prev_result(config, version, faults)
        request = msgspec.structs.replace(request, prev_result=prev_result)
    elif command == "GC":
        valid = _read_valid_attachments(config, faults)
        request = msgspec.structs.replace(request, valid_attachments=valid)
    return _Configuration(request)


def _read_json(stdin: bytes, faults: Faults) -> dict[str, Any] | None:
    """Decode stdin as strictly as RFC 8259 and RFC 7493 allow; None when it is no object without double keys."""
    try:
        config = json.loads(
            stdin.decode(), object_pairs_hook=_make_object, parse_constant=_refuse_constant
        )
        # json.loads accepts half of a surrogate pair, which cannot be written as UTF-8 again (RFC 7493, section 2.1).
        if b"\\ud" in stdin.lower():
            json.dumps(config, ensure_ascii=False).encode()
    except RecursionError:
        faults.note(UndecodableRequest, "stdin", "is nested too deeply")
    except UnicodeEncodeError:
        faults.note(UndecodableRequest, "stdin", "has half of a surrogate pair")
    except ValueError as error:
        faults.note(UndecodableRequest, "stdin", f"is not JSON: {error}")
    else:
        if isinstance(config, dict):
            return config
        faults.note(UndecodableRequest, "stdin", f"is {shown(config)}, not a JSON object")
    return None


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    # Of two equal keys Python takes the last one, other parsers the first: RFC 7493, section 2.3, forbids them.
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {shown(key)} comes twice in one object")
        seen.add(key)
    return made


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _read_version(config: dict[str, Any], command: str, faults: Faults) -> str:
    newest = SUPPORTED_CNI_VERSIONS[-1]
    version = faults.read_text(config.get("cniVersion"), "cniVersion")
    if not version:
        if config.get("cniVersion") in (None, ""):
            faults.wrong("cniVersion", f"is missing; {newest} is the newest")
        return newest
    if version not in SUPPORTED_CNI_VERSIONS:
        message = f"is {shown(version)}; supported are {', '.join(SUPPORTED_CNI_VERSIONS)}"
        faults.note(IncompatibleVersion, "cniVersion", message)
        return newest
    # CNI specification: CHECK exists since 0.4.0, GC and STATUS since 1.1.0.
    since = COMMAND_SINCE.get(command, SUPPORTED_CNI_VERSIONS[0])
    if SUPPORTED_CNI_VERSIONS.index(version) < SUPPORTED_CNI_VERSIONS.index(since):
        message = f"is {version}; {command} exists from {since} on"
        faults.note(IncompatibleVersion, "cniVersion", message)
    return version


def _read_network(config: dict[str, Any], faults: Faults) -> NetworkName:
    network = faults.read_text(config.get("name"), "name")
    if config.get("name") in (None, ""):
        faults.wrong("name", "is missing: it must name the network")
    elif network and (not is_valid_network_name(network) or len(network) > NAME_MAX_BYTES):
        message = (
            f"is {shown(network)}: it must begin with a letter or digit, go on with those, '_', '.' or '-',"
            f" and have at most {NAME_MAX_BYTES} bytes"
        )
        faults.wrong("name", message)
    return NetworkName(network)


def _make_key(environment: Environment, network: NetworkName) -> AttachmentKey | None:
    if environment.command not in WITH_ATTACHMENT:
        return None
    container_id = ContainerId(environment.container_id)
    return AttachmentKey(network, container_id, InterfaceName(environment.if_name))


def _read_settings(request: AttachRequest, config: dict[str, Any], faults: Faults) -> AttachRequest:
    """Add what the configuration says of every pod of its network."""
    kind = faults.read_text(config.get("type"), "type")
    if config.get("type") in (None, ""):
        faults.wrong("type", "is missing: it must name the plugin")
    elif "/" in kind:
        faults.wrong("type", f"is {shown(kind)}: a name, not a path")
    refuse_unbuilt(config, faults)
    return msgspec.structs.replace(
        request, mtu=read_mtu(config, faults), log_level=read_log_level(config, faults)
    )


def _read_pods(request: AttachRequest, config: dict[str, Any], faults: Faults) -> _Configuration:
    """Read what the configuration of an ADD says of its pods."""
    refuse_chaining(config, faults)
    extra = faults.read_object(
        faults.read_object(config.get("args"), "args").get("cni"), "args.cni"
    )
    runtime = read_runtime_config(config, faults)
    request = msgspec.structs.replace(
        request,
        ports=read_ports(extra.get("ports"), faults),
        pools=read_pools(extra.get("pools"), faults),
        bandwidth=read_bandwidth(runtime.get("bandwidth"), faults),
        host_ports=read_host_ports(runtime.get("portmappings"), faults),
        may_ask_host_ports=may_ask_host_ports(config),
    )
    return _Configuration(
        request,
        labels=read_labels(extra.get("labels"), "args.cni.labels", faults),
        ips=extra.get("ips"),
        runtime_ips=runtime.get("ips"),
        mac=runtime.get("mac"),
    )


def _read_pod(
    request: AttachRequest, environment: Environment, configuration: _Configuration, faults: Faults
) -> AttachRequest:
    """Add what an ADD says of its pod."""
    args = environment.args

    def read_arg(name: str) -> str:
        return read_name(args.get(name, ""), f"CNI_ARGS {name}", faults)

    namespace = read_namespace(read_arg("K8S_POD_NAMESPACE"), "CNI_ARGS K8S_POD_NAMESPACE", faults)
    pod = read_arg("K8S_POD_NAME") or environment.container_id
    ips = {
        "args.cni.ips": configuration.ips,
        "runtimeConfig.ips": configuration.runtime_ips,
        "CNI_ARGS IP": [args["IP"]] if "IP" in args else None,
    }
    macs = {"runtimeConfig.mac": configuration.mac, "CNI_ARGS MAC": args.get("MAC")}
    return msgspec.structs.replace(
        request,
        namespace=namespace,
        pod=pod,
        pod_uid=read_arg("K8S_POD_UID"),
        # podman says K8S_POD_NAME alone, for its own name server; runtimes of Kubernetes say all of them.
        is_plain=not (args.get("K8S_POD_NAMESPACE") or args.get("K8S_POD_UID")),
        labels=complete_labels(
            configuration.labels, network=request.network, namespace=namespace, pod=pod
        ),
        wanted_ips=read_wanted_ips(ips, faults),
        wanted_mac=read_mac(macs, faults),
    )


def _read_prev_result(config: dict[str, Any], version: str, faults: Faults) -> AttachResult | None:
    """Read what the runtime remembers of ADD. Source: CNI specification 1.1.0, CHECK: it must be there."""
    raw = faults.read_object(config.get("prevResult"), "prevResult")
    if config.get("prevResult") is None:
        faults.wrong("prevResult", "is missing; CHECK needs it")
    try:
        return decode_result(version, raw)
    except InvalidRequest as error:
        faults.note(type(error), "prevResult", error.message)
        return None


def _read_valid_attachments(
    config: dict[str, Any], faults: Faults
) -> tuple[tuple[ContainerId, InterfaceName], ...] | None:
    """Read GC's list; null is an empty one (CRI-O says so when nothing runs), no key at all is no list.

    A list that is wrong in any way is refused whole: guessing would end the network of a running pod.
    """
    lists = {key: _read_attachments(config[key], key, faults) for key in _GC_KEYS if key in config}
    # No key is no list: an empty one would end the network of every pod.
    if not lists:
        return None
    first, *others = lists.values()
    # Where a runtime writes both keys, neither of two different lists can be trusted.
    if any(set(other) != set(first) for other in others):
        faults.wrong(" and ".join(lists), "name different attachments")
    return first


def _read_attachments(
    value: Any, path: str, faults: Faults
) -> tuple[tuple[ContainerId, InterfaceName], ...]:
    valid = []
    for index, item in enumerate(faults.read_list(value, path, limit=ATTACHMENTS_MAX)):
        place = f"{path}[{index}]"
        entry = faults.read_folded(item, place)
        container_id = faults.read_text(entry.get("containerid"), f"{place}.containerID")
        if_name = faults.read_text(entry.get("ifname"), f"{place}.ifname")
        if not is_valid_container_id(container_id):
            faults.wrong(f"{place}.containerID", f"is {shown(container_id)}, not a container id")
        if fault := interface_name_fault(if_name):
            faults.wrong(f"{place}.ifname", f"is {shown(if_name)}: it {fault}")
        valid.append((ContainerId(container_id), InterfaceName(if_name)))
    return tuple(valid)
