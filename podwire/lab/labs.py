"""Labs as a whole: up, run, rm, check, down. A command that fails half-way takes back what it did.

The CLI and the tests enter the lab here. Every command works in a new process, from the lab's file alone. `down`
removes everything even after agents were killed or the file was lost, because all that a lab makes can be found by its
name.
"""

import contextlib
import ipaddress
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from podwire.control.documents.apply import apply_documents
from podwire.kernel import netns
from podwire.lab import etcd, faults, traffic
from podwire.lab import node as nodes
from podwire.lab import pod as pods
from podwire.lab import state as states
from podwire.lab.state import LabState, Pod, changed_state, locked, read_state
from podwire.lab.topology import (
    PIN_ROOT,
    RUN_ROOT,
    WORLD,
    LabPlan,
    LabShape,
    NodePlan,
    check_lab_name,
    is_lab_name,
    plan_lab,
)
from podwire.model.errors import Conflict, InvalidRequest, NotFound, PodwireError, Unavailable
from podwire.store.open import open_store

SUCCESSOR_DEADLINE_S: Final = 60.0
SUCCESSOR_RETRY_S: Final = 1.0
LIVING_PREDECESSOR: Final = "is alive"
"""What an agent says that does not start because another one has its name."""

Progress = Callable[[str], None]

Place = tuple[str, tuple[str, ...]]
"""Namespace and addresses of a pod, a node or the world."""


def say_nothing(_line: str) -> None:
    """Tell nobody how far a lab has come."""


def up(name: str, shape: LabShape, *, progress: Progress = print) -> LabState:
    """Build a lab; Conflict when it is there."""
    plan = plan_lab(name, shape)
    if shape.store == "etcd":
        etcd.require_program()
    with locked(plan.directory, create=True):
        _require_nothing_there(plan)
        state = LabState(name=name, shape=shape)
        with ExitStack() as undo:
            undo.callback(_remove_everything, plan, state)
            progress(f"lab {name}: {_count(shape.nodes, 'node')}, underlay and world")
            states.write_state(state)
            nodes.create_network(plan)
            if shape.store == "etcd":
                etcd.start_store(plan, state)
                states.write_state(state)
                progress(f"etcd answers at {plan.store_url}")
            if plan.pools:
                netns.run_at(netns.named_path(plan.underlay_namespace), partial(_apply_pools, plan))
            _start_agents(plan, state, progress)
            states.write_state(state)
            undo.pop_all()
    return state


def _apply_pools(plan: LabPlan) -> None:
    with contextlib.closing(open_store(plan.store_url)) as store:
        apply_documents(store, plan.pools)


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
        addresses = f"pod CIDRs {', '.join(node.pod_cidrs)}" if node.pod_cidrs else "pools"
        progress(f"agent of {node.name} is ready ({addresses})")
    nodes.wait_until_joined(plan)


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
    """Give the addresses of a pod, node or `world`; an address is given as it is."""
    try:
        return (str(ipaddress.ip_address(text)),)
    except ValueError:
        return locate(state, text)[1]


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
            state = LabState(name=name, shape=LabShape(nodes=1))
            plan = state.plan
        _remove_everything(plan, state)
    progress(f"lab {name} is gone")


def _remove_everything(plan: LabPlan, state: LabState) -> None:
    inside = _list_namespaces(plan.name)
    inodes = {os.stat(netns.named_path(name)).st_ino for name in inside}
    known = [server.process for pod in state.pods for server in pod.servers]
    # A process inside a namespace of the lab keeps it alive: an agent that the file does not know, a shell, a command.
    own = [] if state.store is None else [state.store]
    states.end_all([*known, *own, *state.agents.values(), *states.list_processes_in(inodes)])
    # A namespace takes its devices, routes and rules along; maps and programs live as long as their pins.
    for name in inside:
        netns.delete_named(name)
    for root in (PIN_ROOT / plan.name, plan.directory):
        _remove_tree(root)
    # The first lab of a machine made the folders above, too; an agent of the machine has files in them.
    for root in (PIN_ROOT, RUN_ROOT, PIN_ROOT.parent, RUN_ROOT.parent):
        _remove_if_empty(root)


def _list_namespaces(lab: str) -> list[str]:
    return [name for name in netns.list_named() if name.startswith(f"pw.{lab}.")]


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


def replace_node(lab: str, node_name: str, *, progress: Progress = print) -> None:
    """Put a new machine in a node's place: same name, addresses and ranges, nothing of what the old one knew.

    The old one's pods are gone with it. The new agent waits until the old one's lease has ended.
    """
    with changed_state(lab) as state:
        node = state.plan.node(node_name)
        gone = [pod for pod in state.pods if pod.node == node_name]
        nodes.stop_agent(state, node, signal.SIGKILL)
        states.end_all([server.process for pod in gone for server in pod.servers])
        for pod in gone:
            netns.delete_named(pod.netns)
            state.pods.remove(pod)
        nodes.remove_node_network(state.plan, node)
        for root in (node.pins, node.directory):
            _remove_tree(root)
        states.write_state(state)
        progress(f"{node_name} and its {_count(len(gone), 'pod')} are gone")
        nodes.create_node_network(state.plan, node)
        nodes.write_config(state.plan, node)
        _start_successor(state, node, progress)
        progress(f"agent of the new {node_name} is ready")


def _start_successor(state: LabState, node: NodePlan, progress: Progress) -> None:
    """Start an agent again and again, as a service manager would, until its predecessor's lease has ended."""
    deadline = time.monotonic() + SUCCESSOR_DEADLINE_S
    while True:
        try:
            nodes.start_agent(state, node)
        except Unavailable as error:
            if LIVING_PREDECESSOR not in error.message or time.monotonic() > deadline:
                raise
            progress(f"{node.name}: the old one still counts as alive")
            time.sleep(SUCCESSOR_RETRY_S)
        else:
            return


def set_partition(lab: str, node: str, other: str) -> None:
    """Let two nodes, or a node and the store, hear nothing of each other until `heal`."""
    with changed_state(lab) as state:
        if node == other:
            raise InvalidRequest(f"part {node!r} from itself", hint="name two nodes")
        for place in (node, other):
            faults.addresses_of(state.plan, place)
        pair = (min(node, other), max(node, other))
        if pair not in state.partitions:
            state.partitions.append(pair)
        faults.apply_partitions(state.plan, state.partitions)


def heal(lab: str) -> None:
    """End every partition."""
    with changed_state(lab) as state:
        state.partitions.clear()
        faults.apply_partitions(state.plan, ())


def change_store(lab: str, action: str) -> None:
    """Stop, start or kill (-9) the lab's etcd."""
    with changed_state(lab) as state:
        if state.shape.store != "etcd":
            raise InvalidRequest(
                f"{action} the store: it is a file of this machine",
                hint="build the lab with --store etcd",
            )
        if action == "start":
            etcd.start_store(state.plan, state)
        else:
            etcd.stop_store(state, signal.SIGKILL if action == "kill" else signal.SIGTERM)


def list_leftovers(*, running_too: bool) -> list[str]:
    """Name the labs that are not whole any more (no agent of theirs runs), or, `running_too`, all of them."""
    names = {path.name for root in (RUN_ROOT, PIN_ROOT) if root.is_dir() for path in root.iterdir()}
    names |= {name.split(".")[1] for name in netns.list_named() if name.startswith("pw.")}
    return sorted(name for name in names if is_lab_name(name) and (running_too or not _is_up(name)))


def _is_up(name: str) -> bool:
    """Tell whether a lab is as its commands left it: an agent that was stopped on purpose is not in the file."""
    try:
        state = read_state(name)
    except PodwireError:
        return False
    running = [states.is_running(process) for process in state.agents.values()]
    return any(running) or not running


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
