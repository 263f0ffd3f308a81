"""Labs as a whole: up, run, rm, check, down. All or nothing: what fails half-way is taken back.

The CLI's and the tests' way in. Every command works in a new process, from the lab's file alone; `down` removes
everything also after agents were killed or the file was lost, because all that a lab makes can be found by its name.
"""

import contextlib
import ipaddress
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import msgspec

from podwire.kernel import netns
from podwire.lab import node as nodes
from podwire.lab import pod as pods
from podwire.lab import state as states
from podwire.lab import traffic
from podwire.lab.state import LabState, Pod, changed_state, locked, read_state
from podwire.lab.topology import (
    PIN_ROOT,
    RUN_ROOT,
    WORLD,
    LabPlan,
    NodePlan,
    check_lab_name,
    is_lab_name,
    plan_lab,
)
from podwire.model.errors import Conflict, InvalidRequest, NotFound, PodwireError, Unavailable

Progress = Callable[[str], None]
CHECK_PORT = 7999
_CHECK_THREADS = 4

Place = tuple[str, tuple[str, ...]]
"""Namespace and addresses of a pod, a node or the world."""


@dataclass(frozen=True)
class CheckedPair:
    """One cell of the connectivity matrix."""

    source: str
    target: str
    address: str
    protocol: str
    attempt: traffic.Attempt


def up(
    name: str, *, node_count: int = 2, families: str = "46", progress: Progress = print
) -> LabState:
    """Build a lab; Conflict when it is there."""
    plan = plan_lab(name, node_count, families)
    with locked(plan.directory, create=True):
        _require_nothing_there(plan)
        state = LabState(name=name, nodes=node_count, families=families)
        with ExitStack() as undo:
            undo.callback(_remove_everything, plan, state)
            progress(f"lab {name}: {node_count} nodes, underlay and world")
            states.write_state(state)
            nodes.create_network(plan)
            _start_agents(plan, state, progress)
            states.write_state(state)
            undo.pop_all()
    return state


def _require_nothing_there(plan: LabPlan) -> None:
    hint = f"podwire lab down --lab {plan.name}"
    if (plan.directory / states.STATE_FILE).exists():
        raise Conflict(f"make lab {plan.name!r}: it is up", hint=hint)
    # A journal of an agent that was, found by a new one, would speak of pods that never were.
    files = {path.name for path in plan.directory.iterdir()} - {states.LOCK_FILE}
    if files or _list_namespaces(plan.name) or (PIN_ROOT / plan.name).exists():
        raise Conflict(f"make lab {plan.name!r}: parts of an earlier one are left", hint=hint)


def _start_agents(plan: LabPlan, state: LabState, progress: Progress) -> None:
    for node in plan.nodes:
        nodes.write_config(plan, node)
        nodes.start_agent(state, node, wait=False)
        states.write_state(state)
    for node in plan.nodes:
        nodes.wait_until_ready(node, state.agents[node.name])
        progress(f"agent of {node.name} is ready (pod CIDRs {', '.join(node.pod_cidrs)})")


def run(
    lab: str,
    pod_name: str,
    node_name: str,
    *,
    labels: Mapping[str, str] | None = None,
    serve: Sequence[str] = (),
    extra: Mapping[str, object] | None = None,
) -> Pod:
    """Start a pod on a node and the servers it is to run."""
    namespace, _, name = pod_name.rpartition("/")
    ports = [traffic.parse_port(text) for text in serve]
    if len(set(ports)) < len(ports):
        raise Conflict(f"serve {', '.join(serve)}: a port comes twice", hint="name each once")
    with changed_state(lab) as state:
        node = state.plan.node(node_name)
        pod = pods.plan_pod(state, node, namespace or "default", name, labels or {})
        if not states.is_running(state.agents.get(node_name)):
            raise Unavailable(
                f"attach pod {pod.full_name!r}: the agent of {node_name} does not run",
                hint=f"podwire lab node start {node_name}",
            )
        # Written before anything of the pod exists, so that `rm` finds it whatever happens to this process.
        state.pods.append(pod)
        states.write_state(state)
        with ExitStack() as undo:
            undo.callback(states.write_state, state)
            undo.callback(state.pods.remove, pod)
            undo.callback(_remove_failed, node, pod)
            attached = pods.attach_pod(node, pod, extra)
            servers = traffic.start_servers(attached, ports)
            undo.pop_all()
        pod = msgspec.structs.replace(attached, servers=servers)
        state.pods[-1] = pod
    return pod


def _remove_failed(node: NodePlan, pod: Pod) -> None:
    """Take back a pod as a runtime does after a failed ADD; what that meets does not hide the first error."""
    with contextlib.suppress(PodwireError):
        pods.remove_pod(node, pod)
    netns.delete_named(pod.netns)


def remove(lab: str, pod_name: str) -> None:
    """Remove a pod."""
    with changed_state(lab) as state:
        pod = state.find_pod(pod_name)
        pods.remove_pod(state.plan.node(pod.node), pod)
        state.pods.remove(pod)


def locate(state: LabState, text: str) -> Place:
    """Give namespace and addresses of a pod, a node or `world`."""
    plan = state.plan
    if text == WORLD:
        return plan.world_namespace, plan.world_addresses
    for node in plan.nodes:
        if node.name == text:
            return node.namespace, node.addresses
    pod = state.find_pod(text)
    return pod.netns, pod.addresses


def find_addresses(state: LabState, text: str) -> tuple[str, ...]:
    """Give the addresses of a pod, node or `world`; an address stands for itself."""
    try:
        return (str(ipaddress.ip_address(text)),)
    except ValueError:
        return locate(state, text)[1]


def check(lab: str) -> list[CheckedPair]:
    """Try every pair of pods, nodes and the world, in every family, by TCP and UDP, with the time each took."""
    state = read_state(lab)
    pods_there = {pod.full_name: locate(state, pod.full_name) for pod in state.pods}
    hosts = {node.name: locate(state, node.name) for node in state.plan.nodes}
    hosts["world"] = locate(state, "world")
    places = {**pods_there, **hosts}
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(_CHECK_THREADS))
        servers: list[states.Process] = []
        stack.callback(states.end_all, servers)
        for started in threads.map(_start_check_servers, places, places.values()):
            servers.extend(started)
        pairs = [
            threads.submit(_check_pair, source, target, address, protocol, places[source][0])
            for source, target in permutations(places, 2)
            if _is_meant_to_work(source, target, pods_there)
            for address in places[target][1]
            for protocol in ("tcp", "udp")
        ]
        return [pair.result() for pair in pairs]


def _start_check_servers(name: str, place: Place) -> list[states.Process]:
    helper = Pod(namespace="check", name=name, node="-", container_id="", netns=place[0], labels={})
    servers = traffic.start_servers(helper, [(CHECK_PORT, "tcp"), (CHECK_PORT, "udp")])
    return [servers[0].process]


def _is_meant_to_work(source: str, target: str, pods_there: Mapping[str, object]) -> bool:
    """Everybody reaches everybody, but the world has no way to pods: nobody outside knows their addresses."""
    return source != "world" or target not in pods_there


def _check_pair(
    source: str, target: str, address: str, protocol: str, namespace: str
) -> CheckedPair:
    attempt = traffic.connect(namespace, address, CHECK_PORT, protocol)
    return CheckedPair(source, target, address, protocol, attempt)


def down(name: str, *, progress: Progress = print) -> None:
    """Remove a lab and everything that it ever made; one that is half there is removed as well."""
    directory = RUN_ROOT / check_lab_name(name)
    if not directory.exists() and not _list_namespaces(name) and not (PIN_ROOT / name).exists():
        raise NotFound(f"remove lab {name!r}: there is none", hint="podwire lab list")
    with locked(directory, create=True):
        try:
            state = read_state(name)
            plan = state.plan
        except PodwireError:
            # The file is lost or broken: all that a lab makes can be found by its name.
            state, plan = LabState(name=name, nodes=1, families="46"), plan_lab(name, 1, "46")
        _remove_everything(plan, state)
    progress(f"lab {name} is gone")


def _remove_everything(plan: LabPlan, state: LabState) -> None:
    inside = _list_namespaces(plan.name)
    inodes = {os.stat(netns.named_path(one)).st_ino for one in inside}
    known = [server.process for pod in state.pods for server in pod.servers]
    # Whoever is in a namespace of the lab keeps it alive: agents that the file does not know, shells, commands.
    states.end_all([*known, *state.agents.values(), *states.list_processes_in(inodes)])
    # A namespace takes its devices, routes and rules along; maps and programs live as long as their pins.
    for name in inside:
        netns.delete_named(name)
    for root in (PIN_ROOT / plan.name, plan.directory):
        _remove_tree(root)
    for root in (PIN_ROOT, RUN_ROOT):
        _remove_if_empty(root)


def _list_namespaces(lab: str) -> list[str]:
    return [one for one in netns.list_named() if one.startswith(f"pw.{lab}.")]


def _remove_tree(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _remove_if_empty(root: Path) -> None:
    """Remove a folder that labs share when the last of them is gone."""
    with contextlib.suppress(OSError):
        root.rmdir()


def change_agent(lab: str, node_name: str, action: str) -> None:
    """Stop, start or kill (-9) the agent of a node."""
    with changed_state(lab) as state:
        node = state.plan.node(node_name)
        if action == "start":
            nodes.start_agent(state, node)
        elif action == "stop":
            nodes.stop_agent(state, node)
        elif action == "kill":
            nodes.stop_agent(state, node, signal.SIGKILL)
        else:
            raise InvalidRequest(f"change agent: {action!r} is not start, stop or kill")


def set_link(lab: str, node_name: str, *, is_up: bool) -> None:
    """Cut a node from the underlay, or join it again."""
    state = read_state(lab)
    node = state.plan.node(node_name)
    word = "up" if is_up else "down"
    nodes.run_ip(state.plan.underlay_namespace, [f"link set {node.name} {word}"])


def list_leftovers(*, running_too: bool) -> list[str]:
    """Name the labs that are not whole any more (no agent of theirs runs), or, `running_too`, all of them."""
    names = {path.name for root in (RUN_ROOT, PIN_ROOT) if root.is_dir() for path in root.iterdir()}
    names |= {one.split(".")[1] for one in netns.list_named() if one.startswith("pw.")}
    return sorted(name for name in names if is_lab_name(name) and (running_too or not _is_up(name)))


def _is_up(name: str) -> bool:
    """Tell whether a lab is as its commands left it: an agent that was stopped on purpose is not in the file."""
    try:
        state = read_state(name)
    except PodwireError:
        return False
    running = [states.is_running(process) for process in state.agents.values()]
    return any(running) or not running
