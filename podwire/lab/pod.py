"""The pods of a lab: network namespaces attached by executing the real launcher, exactly as a runtime does.

Used by `lab.labs`. The launcher gets environment and configuration and nothing else; what it prints is what a runtime
would see.
"""

import json
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from podwire.cni.launcher import AttachFailed
from podwire.kernel import netns, spawn
from podwire.lab.node import run_ip
from podwire.lab.state import LabState, Pod, end_process
from podwire.lab.topology import WORLD, NodePlan, check_pod_name, pod_namespace
from podwire.model.errors import Conflict, InvalidRequest
from podwire.model.installation.shipped import LAUNCHER

NETWORK: Final = "podwire"
INTERFACE: Final = "eth0"
CALL_TIMEOUT_S: Final = 60


def launcher_program() -> str:
    """Find the launcher: PODWIRE_LAUNCHER, the one of this build, or the one in PATH."""
    program = str(LAUNCHER) if LAUNCHER.exists() else LAUNCHER.name
    return os.environ.get("PODWIRE_LAUNCHER") or program


def network_config(
    node: NodePlan, labels: Mapping[str, str] | None = None, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Give the network configuration of a lab's node."""
    config: dict[str, Any] = {
        "cniVersion": "1.1.0",
        "name": NETWORK,
        "type": "podwire-cni",
        "socket": str(node.directory / "cni.sock"),
    }
    if labels:
        pairs = [{"key": key, "value": value} for key, value in labels.items()]
        config["args"] = {"cni": {"labels": pairs}}
    config.update(extra or {})
    return config


def call_launcher(
    command: str,
    *,
    config: Mapping[str, Any],
    container_id: str = "",
    netns_path: str = "",
    pod: tuple[str, str] = ("", ""),
) -> dict[str, Any]:
    """Execute the launcher; gives its answer, or raises AttachFailed with its error."""
    # As containerd passes it (CNI conventions, CNI_ARGS): unknown keys are then no error.
    args = "IgnoreUnknown=1"
    if pod[1]:
        args += f";K8S_POD_NAMESPACE={pod[0]};K8S_POD_NAME={pod[1]}"
    environment = {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": container_id,
        "CNI_NETNS": netns_path,
        "CNI_IFNAME": INTERFACE,
        "CNI_PATH": str(Path(launcher_program()).parent),
        "CNI_ARGS": args,
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
    }
    # libcni sets all variables for every command, empty where a command has nothing to say.
    if command in ("STATUS", "GC"):
        for name in ("CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"):
            environment[name] = ""
    done = spawn.run(
        [launcher_program()],
        input_bytes=json.dumps(config).encode(),
        environment=environment,
        timeout_s=CALL_TIMEOUT_S,
    )
    reply: dict[str, Any] = json.loads(done.stdout) if done.stdout.strip() else {}
    if done.status:
        raise AttachFailed(command, "/".join(filter(None, pod)) or container_id, reply)
    return reply


def plan_pod(
    state: LabState, node: NodePlan, namespace: str, name: str, labels: Mapping[str, str]
) -> Pod:
    """Give a pod its names and its container id; Conflict when the name is taken."""
    check_pod_name(name)
    check_pod_name(namespace)
    if name == WORLD or any(node.name == name for node in state.plan.nodes):
        raise InvalidRequest(
            f"create pod {namespace}/{name}: {name!r} is a place of the lab already",
            hint="choose another name",
        )
    if any((pod.namespace, pod.name) == (namespace, name) for pod in state.pods):
        raise Conflict(
            f"create pod {namespace}/{name}: it runs already",
            hint=f"podwire lab rm {namespace}/{name}",
        )
    return Pod(
        namespace=namespace,
        name=name,
        node=node.name,
        container_id=uuid.uuid4().hex,
        netns=pod_namespace(state.name, namespace, name),
        labels=dict(labels),
    )


def attach_pod(node: NodePlan, pod: Pod, extra: Mapping[str, Any] | None = None) -> Pod:
    """Make a pod's namespace and attach it; gives it with its addresses. On failure the caller removes it."""
    netns.create_named(pod.netns).close()
    run_ip(pod.netns, ["link set lo up"])
    result = call_launcher(
        "ADD",
        config=network_config(node, pod.labels, extra),
        container_id=pod.container_id,
        netns_path=netns.named_path(pod.netns),
        pod=(pod.namespace, pod.name),
    )
    return msgspec.structs.replace(pod, addresses=_addresses(result))


def remove_pod(node: NodePlan, pod: Pod) -> None:
    """Detach a pod and remove its namespace, its servers first."""
    for server in pod.servers:
        end_process(server.process)
    path = netns.named_path(pod.netns)
    call_launcher(
        "DEL",
        config=network_config(node),
        container_id=pod.container_id,
        # CNI specification, DEL: CNI_NETNS may be empty when the namespace is gone.
        netns_path=path if Path(path).exists() else "",
        pod=(pod.namespace, pod.name),
    )
    netns.delete_named(pod.netns)


def exec_in_pod(netns_name: str, arguments: Sequence[str]) -> NoReturn:
    """Become a command inside a namespace, terminal and all; exits with 126 or 127 as a shell does."""
    with netns.open_namespace(netns.named_path(netns_name)) as fd:
        netns.set_namespace(fd.fileno(), netns.CLONE_NEWNET)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores these, and what is ignored stays ignored across exec.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(arguments[0], list(arguments))
    except FileNotFoundError:
        print(f"error: run {arguments[0]!r}: no such program", file=sys.stderr)
        sys.exit(127)
    except OSError as error:
        print(f"error: run {arguments[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(126)


def _addresses(result: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(ip["address"].partition("/")[0] for ip in result.get("ips", ()))
