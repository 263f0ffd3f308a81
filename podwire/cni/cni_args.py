"""The environment of a CNI call: which variables must be there, and what CNI_ARGS may say.

Called by `cni.netconf`. Sources: CNI specification 1.1.0, "Parameters"; CONVENTIONS, CNI_ARGS.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from podwire.cni.faults import Faults, shown
from podwire.model.errors import InvalidConfiguration, InvalidEnvironment
from podwire.model.ids import interface_name_fault, is_valid_container_id

COMMANDS: Final = ("ADD", "DEL", "CHECK", "GC", "STATUS")
WITH_ATTACHMENT: Final = ("ADD", "DEL", "CHECK")
WITH_NAMESPACE: Final = ("ADD", "CHECK")
PATH_MAX_BYTES: Final = 4095
CONTAINER_ID_MAX_BYTES: Final = 256

KNOWN_ARGS: Final = frozenset(
    {
        "IgnoreUnknown",
        "K8S_POD_NAME",
        "K8S_POD_NAMESPACE",
        "K8S_POD_UID",
        "K8S_POD_INFRA_CONTAINER_ID",
        "IP",
        "MAC",
    }
)


@dataclass(frozen=True)
class Environment:
    """What the environment of a call says."""

    command: str = ""
    container_id: str = ""
    if_name: str = ""
    netns_path: str = ""
    args: Mapping[str, str] = field(default_factory=dict)


def read_environment(env: Mapping[str, str], faults: Faults) -> Environment:
    """Read and check the CNI_* variables."""
    command = env.get("CNI_COMMAND", "")
    if command not in COMMANDS:
        faults.note(
            InvalidEnvironment,
            "CNI_COMMAND",
            f"is {shown(command)}, not one of {', '.join(COMMANDS)}",
        )
    container_id = env.get("CNI_CONTAINERID", "")
    if_name = env.get("CNI_IFNAME", "")
    netns_path = env.get("CNI_NETNS", "")
    if command in WITH_ATTACHMENT:
        _check_container_id(container_id, faults)
        _check_if_name(if_name, faults)
    if command in WITH_NAMESPACE and not netns_path:
        faults.note(InvalidEnvironment, "CNI_NETNS", f"is missing; {command} needs it")
    if "\0" in netns_path or len(netns_path.encode()) > PATH_MAX_BYTES:
        faults.note(InvalidEnvironment, "CNI_NETNS", "is no usable path")
    args = _read_args(env.get("CNI_ARGS", ""), faults)
    infra = args.get("K8S_POD_INFRA_CONTAINER_ID", "")
    if infra and container_id and infra != container_id:
        faults.note(
            InvalidEnvironment,
            "CNI_ARGS",
            f"names container {shown(infra)} and CNI_CONTAINERID {shown(container_id)}",
        )
    return Environment(command, container_id, if_name, netns_path, args)


def _check_container_id(container_id: str, faults: Faults) -> None:
    if not container_id:
        faults.note(InvalidEnvironment, "CNI_CONTAINERID", "is missing")
    elif (
        not is_valid_container_id(container_id)
        or len(container_id.encode()) > CONTAINER_ID_MAX_BYTES
    ):
        faults.note(
            InvalidEnvironment,
            "CNI_CONTAINERID",
            f"is {shown(container_id)}: it must begin with a letter or digit, go on with those, '_', '.' or '-',"
            f" and have at most {CONTAINER_ID_MAX_BYTES} bytes",
        )


def _check_if_name(if_name: str, faults: Faults) -> None:
    if not if_name:
        faults.note(InvalidEnvironment, "CNI_IFNAME", "is missing")
        return
    fault = interface_name_fault(if_name)
    if fault:
        # An unusable name is a configuration error in our contract, as one that exists already is.
        faults.note(InvalidConfiguration, "CNI_IFNAME", f"{shown(if_name)} {fault}")
    elif if_name == "lo":
        faults.note(InvalidConfiguration, "CNI_IFNAME", "'lo' exists in every namespace")


def _read_args(text: str, faults: Faults) -> Mapping[str, str]:
    args: dict[str, str] = {}
    for part in filter(None, text.split(";")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            faults.note(
                InvalidEnvironment, "CNI_ARGS", f"has {shown(part)}, which is not KEY=VALUE"
            )
        elif key in args and args[key] != value:
            faults.note(InvalidEnvironment, "CNI_ARGS", f"says {key} twice, with different values")
        else:
            args[key] = value
    ignore = next((args[key] for key in args if key.lower() == "ignoreunknown"), "")
    known = {key: value for key, value in args.items() if key in KNOWN_ARGS}
    if ignore.lower() not in ("1", "true"):
        for key in sorted(set(args) - KNOWN_ARGS):
            if key.lower() != "ignoreunknown":
                faults.note(
                    InvalidEnvironment,
                    "CNI_ARGS",
                    f"has the unknown key {shown(key)} and IgnoreUnknown is not true",
                )
    return known
