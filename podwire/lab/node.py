"""The nodes of a lab: network namespaces on one bridge, each with a real agent that sees only its own files.

Used by `lab.labs`. An agent is started with the same program, configuration file and sockets as on a real machine; only
its paths are the lab's.
"""

import http.client
import ipaddress
import json
import signal
import socket
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from podwire.kernel import netns, spawn
from podwire.lab.state import LabState, Process, end_process, is_running, launch
from podwire.lab.topology import UPLINK, LabPlan, NodePlan, plan_routes, plan_world_routes
from podwire.model.errors import Unavailable

LOG_FILE: Final = "agent.log"
CONFIG_FILE: Final = "agent.toml"
START_DEADLINE_S: Final = 180.0
"""The verifier takes seconds of a CPU for each agent, and a lab starts all of them at once."""
BRIDGE: Final = "underlay"


def run_ip(namespace: str, commands: list[str]) -> None:
    """Run commands of `ip` in a namespace, all in one process; Unavailable carries its words."""
    with netns.open_namespace(netns.named_path(namespace)) as fd:
        done = spawn.run(
            ["ip", "-batch", "-"],
            input_bytes="\n".join(commands).encode() + b"\n",
            place=spawn.Place(network_fd=fd.fileno()),
            timeout_s=30,
        )
    if done.status:
        raise Unavailable(f"prepare namespace {namespace!r}: {done.stderr.decode().strip()}")


def create_network(plan: LabPlan) -> None:
    """Make the namespaces of a lab and join them; on failure the caller removes what is there."""
    for name in (plan.underlay_namespace, plan.world_namespace):
        netns.create_named(name).close()
    commands = ["link set lo up"]
    for subnet in range(plan.subnets):
        bridge = _bridge(subnet)
        commands += [
            f"link add {bridge} type bridge mcast_snooping 0",
            f"link set {bridge} mtu {plan.shape.mtu} addrgenmode none up",
        ]
        own = [*plan.routers[subnet]] if plan.routers else []
        if plan.shape.store != "sqlite" and subnet == 0:
            own += plan.store_underlay
        commands += [
            f"addr add {address} dev {bridge}{' nodad' if ':' in address else ''}"
            for address in own
        ]
    run_ip(plan.underlay_namespace, commands)
    if plan.routers:
        _let_forward(plan.underlay_namespace)
    _join(
        plan,
        "world",
        plan.world_namespace,
        plan.world_underlay,
        ["link set lo up", *plan_world_routes(plan)],
    )
    for node in plan.nodes:
        create_node_network(plan, node)


def _let_forward(namespace: str) -> None:
    for knob in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        write = partial(Path(f"/proc/sys/net/{knob}").write_text, "1")
        netns.run_at(netns.named_path(namespace), write)


def _bridge(subnet: int) -> str:
    return BRIDGE if subnet == 0 else f"{BRIDGE}{subnet + 1}"


def create_node_network(plan: LabPlan, node: NodePlan) -> None:
    """Make one node's namespace."""
    netns.create_named(node.namespace).close()
    routes = ["link set lo up", *plan_routes(plan, node)]
    _join(plan, node.name, node.namespace, node.underlay, routes, node.subnet)


def remove_node_network(plan: LabPlan, node: NodePlan) -> None:
    """Remove one node's port of the underlay and its namespace, with all devices."""
    # The kernel takes a namespace's devices away some time after its name.
    run_ip(plan.underlay_namespace, [f"link del {node.name}"])
    netns.delete_named(node.namespace)


def _join(
    plan: LabPlan,
    port: str,
    namespace: str,
    addresses: tuple[str, ...],
    more: list[str],
    subnet: int = 0,
) -> None:
    mtu = plan.shape.mtu
    run_ip(
        plan.underlay_namespace,
        [
            f"link add {port} mtu {mtu} type veth peer name {UPLINK} mtu {mtu} netns {namespace}",
            f"link set {port} master {_bridge(subnet)} up",
        ],
    )
    run_ip(
        namespace,
        [
            # The kernel's own link-local address would be tentative for a second, and a node that forwards asks for its
            # neighbours from that address only: the first packet to every other node would come a second late.
            f"link set {UPLINK} addrgenmode none",
            *(
                f"addr add fe80::{_host(address):x}/64 dev {UPLINK} nodad"
                for address in addresses
                if ":" in address
            ),
            *(
                f"addr add {address} dev {UPLINK}{' nodad' if ':' in address else ''}"
                for address in addresses
            ),
            f"link set {UPLINK} up",
            *more,
        ],
    )


def _host(address: str) -> int:
    """Give the last 16 bits of an address with prefix length."""
    return int(ipaddress.ip_interface(address).ip) & 0xFFFF


def write_config(plan: LabPlan, node: NodePlan) -> None:
    """Write the agent's configuration file."""
    node.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings: dict[str, object] = {
        "node_name": node.name,
        "run_dir": str(node.directory),
        "state_dir": str(node.directory / "state"),
        "bpf_dir": str(node.pins),
        # One store for all nodes: what is applied to one is in force on all.
        "store": plan.store_url,
        "ipam": plan.shape.ipam,
        "node_cidrs": list(node.pod_cidrs),
        "cluster_cidrs": list(plan.cluster_cidrs),
        "node_address": node.addresses[0],
        "routing": plan.shape.routing,
        "conntrack_entries": plan.shape.conntrack_entries,
        "log_format": "json",
    }
    # Strings, numbers and lists of strings are written alike in JSON and TOML.
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    (node.directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def start_agent(state: LabState, node: NodePlan, *, wait: bool = True) -> None:
    """Start a node's agent and, by default, wait until it answers; its output goes to the node's log."""
    running = state.agents.get(node.name)
    if running is not None and is_running(running):
        wait_until_ready(node, running)
        return
    command = [agent_program(), "--config", str(node.directory / CONFIG_FILE)]
    state.agents[node.name] = launch(node.namespace, command, node.directory / LOG_FILE)
    if wait:
        try:
            wait_until_ready(node, state.agents[node.name])
        except BaseException:
            # The lab's file will not tell of it: nobody could end it later.
            end_process(state.agents.pop(node.name), signal.SIGKILL)
            raise


def wait_until_ready(node: NodePlan, process: Process) -> None:
    """Wait until the agent says that it is ready; Unavailable shows the end of its log."""
    deadline = time.monotonic() + START_DEADLINE_S
    while not answers(node):
        if not is_running(process) or time.monotonic() > deadline:
            what = "does not answer" if is_running(process) else "ended"
            tail = "\n".join(read_log(node)[-5:])
            raise Unavailable(
                f"start agent of {node.name!r}: it {what}: {tail}",
                hint="these are the last lines of its log; podwire doctor looks at the machine",
            )
        time.sleep(0.01)


def answers(node: NodePlan) -> bool:
    """Ask a node's agent whether it is ready."""
    return answers_at(node.directory / "api.sock")


def answers_at(api_socket: Path) -> bool:
    """Ask the agent that has this socket whether it is ready."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(5)
            connection.connect(str(api_socket))
            connection.sendall(b"GET /v1/healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return connection.recv(64).split(b" ", 2)[1:2] == [b"200"]
    except OSError:
        return False


def wait_until_joined(plan: LabPlan) -> None:
    """Wait until every agent has a way to the addresses of every other; Unavailable names one that has not."""
    deadline = time.monotonic() + START_DEADLINE_S
    while missing := _find_missing(plan):
        if time.monotonic() > deadline:
            raise Unavailable(
                f"join nodes: {missing[0]} has no way to {missing[1]} yet",
                hint=f"podwire lab logs {missing[0]}",
            )
        time.sleep(0.02)


def _find_missing(plan: LabPlan) -> tuple[str, str] | None:
    """Give a node, and another that it has no way to or of which it knows other ranges than that one itself."""
    views = {node.name: _list_known(node) for node in plan.nodes}
    ranges = {name: set(view[name]["podCidrs"]) for name, view in views.items() if name in view}
    for name, view in views.items():
        for other in views:
            seen = view.get(other)
            if (
                seen is None
                or not seen["ways"]
                or set(seen["podCidrs"]) != ranges.get(other)
                or len(seen["podCidrs"]) < len(plan.shape.families)
            ):
                return name, other
    return None


def _list_known(node: NodePlan) -> Mapping[str, Mapping[str, Any]]:
    """Ask an agent which nodes it knows, by name; none while it does not answer."""
    connection = http.client.HTTPConnection("podwire")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection.sock:
            connection.sock.settimeout(5)
            connection.sock.connect(str(node.directory / "api.sock"))
            connection.request("GET", "/v1/node")
            return {load["name"]: load for load in json.loads(connection.getresponse().read())}
    except (OSError, ValueError, http.client.HTTPException):
        return {}


def read_log(node: NodePlan) -> list[str]:
    """Give the lines of an agent's log."""
    path = node.directory / LOG_FILE
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def stop_agent(state: LabState, node: NodePlan, number: signal.Signals = signal.SIGTERM) -> None:
    """Stop an agent as a service manager does, or kill it; pods keep running."""
    end_process(state.agents.get(node.name), number)
    state.agents.pop(node.name, None)


def agent_program() -> str:
    """Find the agent that belongs to this installation."""
    beside = Path(sys.executable).parent / "podwire-agent"
    return str(beside) if beside.exists() else "podwire-agent"
