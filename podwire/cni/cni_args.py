"""The environment of a CNI call: which variables it must have, and what CNI_ARGS may say.

Called by `cni.netconf`. Never reads the environment of its own process: that of the launcher counts. Only values that a
command uses can make it fail, so CNI_ARGS is read for ADD alone. Sources: CNI specification 1.1.0, "Parameters";
CONVENTIONS, CNI_ARGS.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from podwire.cni.faults import Faults
from podwire.model.documents.reader import shown
from podwire.model.ids import interface_name_fault, is_valid_container_id

COMMANDS: Final = ("ADD", "DEL", "CHECK", "GC", "STATUS")
WITH_ATTACHMENT: Final = ("ADD", "DEL", "CHECK")
WITH_NAMESPACE: Final = ("ADD", "CHECK")
PATH_MAX_BYTES: Final = 4095
_TAKEN_NAMES: Final = ("lo", "all", "default")
"""A device, and directories of settings below /proc/sys/net that every namespace has."""
NAME_MAX_BYTES: Final = 253
"""Of container ids and network names too: libcni makes file names of them."""

KNOWN_ARGS: Final = frozenset(
    {
        "K8S_POD_NAME",
        "K8S_POD_NAMESPACE",
        "K8S_POD_UID",
        "K8S_POD_INFRA_CONTAINER_ID",
        "IP",
        "MAC",
    }
)
_IGNORE_UNKNOWN: Final = "ignoreunknown"
_TRUTH: Final = {"1": True, "true": True, "0": False, "false": False, "": False}


@dataclass(frozen=True)
class Environment:
    """What the environment of a call says."""

    command: str = ""
    container_id: str = ""
    if_name: str = ""
    netns_path: str = ""
    args: Mapping[str, str] = field(default_factory=dict)
    """Known arguments with a value."""


def read_environment(env: Mapping[str, str], faults: Faults) -> Environment:
    """Read and check the CNI_* variables that the command uses."""
    command = env.get("CNI_COMMAND", "")
    if command not in COMMANDS:
        faults.wrong("CNI_COMMAND", f"is {shown(command)}, not one of {', '.join(COMMANDS)}")
    if command not in WITH_ATTACHMENT:
        return Environment(command)
    container_id = _read_container_id(env.get("CNI_CONTAINERID", ""), faults)
    if_name = _read_if_name(env.get("CNI_IFNAME", ""), faults)
    netns_path = env.get("CNI_NETNS", "")
    if command in WITH_NAMESPACE:
        _check_netns_path(netns_path, command, faults)
    # Only ADD uses them: a DEL must not fail for arguments that it has no use for.
    args = _read_args(env.get("CNI_ARGS", ""), container_id, faults) if command == "ADD" else {}
    return Environment(command, container_id, if_name, netns_path, args)


def _read_container_id(text: str, faults: Faults) -> str:
    path = "CNI_CONTAINERID"
    if not text:
        faults.wrong(path, "is missing")
    elif not is_valid_container_id(text) or len(text) > NAME_MAX_BYTES:
        message = (
            f"is {shown(text)}: it must begin with a letter or digit, go on with those, '_', '.' or '-',"
            f" and have at most {NAME_MAX_BYTES} bytes"
        )
        faults.wrong(path, message)
    return text


def _read_if_name(text: str, faults: Faults) -> str:
    path = "CNI_IFNAME"
    if not text:
        faults.wrong(path, "is missing")
    elif fault := interface_name_fault(text):
        faults.wrong(path, f"is {shown(text)}: it {fault}")
    elif text in _TAKEN_NAMES:
        faults.wrong(path, f"is {text!r}, which every namespace has already")
    return text


def _check_netns_path(path: str, command: str, faults: Faults) -> None:
    if not path:
        faults.wrong("CNI_NETNS", f"is missing; {command} needs it")
    elif "\0" in path or len(path.encode(errors="surrogateescape")) > PATH_MAX_BYTES:
        message = f"is {shown(path)}: no path has a NUL byte or more than {PATH_MAX_BYTES} bytes"
        faults.wrong("CNI_NETNS", message)


def _read_args(text: str, container_id: str, faults: Faults) -> Mapping[str, str]:
    """Read `KEY=VALUE;KEY=VALUE`; podman and containerd write the pairs in any order."""
    args: dict[str, str] = {}
    for pair in filter(None, text.split(";")):
        key, equals, value = pair.partition("=")
        if not equals or not key:
            faults.wrong("CNI_ARGS", f"has {shown(pair)}, which is not KEY=VALUE")
        # podman and containerd write the pairs in any order, so neither the first nor the last one can be meant.
        elif args.setdefault(key, value) != value:
            faults.wrong("CNI_ARGS", f"gives {shown(key)} two different values")
    ignore_unknown = _read_ignore_unknown(args, faults)
    known = {key: value for key, value in args.items() if key in KNOWN_ARGS and value}
    # CNI conventions, CNI_ARGS: unknown keys are an error unless IgnoreUnknown says otherwise.
    if not ignore_unknown:
        for key in sorted(args.keys() - KNOWN_ARGS):
            faults.wrong(
                "CNI_ARGS", f"has the unknown key {shown(key)}, and IgnoreUnknown is not true"
            )
    infra = known.get("K8S_POD_INFRA_CONTAINER_ID", container_id)
    if infra != container_id:
        faults.wrong(
            "CNI_ARGS", f"names container {shown(infra)}, CNI_CONTAINERID {shown(container_id)}"
        )
    return known


def _read_ignore_unknown(args: dict[str, str], faults: Faults) -> bool:
    """Take IgnoreUnknown out of the arguments, in whatever case it is written."""
    truth = False
    for key in [key for key in args if key.lower() == _IGNORE_UNKNOWN]:
        value = args.pop(key)
        if value.lower() not in _TRUTH:
            faults.wrong("CNI_ARGS", f"says {key}={value[:16]!a}; it must be 1, true, 0 or false")
        truth = truth or _TRUTH.get(value.lower(), False)
    return truth
