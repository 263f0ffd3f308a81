"""How soon a cluster of five nodes with etcd knows what changed: pods, a node's address, MTU or link, a node gone.

A pod of every node but one may send to pods with one label only, so that an echo passes as soon as its node has heard
which identity the new pod's address has, and not before. New pods come from the launcher, as from a runtime; the clock
starts when it has answered. The network between the nodes is a lab's: one bridge, without delay.
"""

import argparse
import ipaddress
import random
import subprocess
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import results_file
from bench.contestants import open_node_map
from bench.probe import Prober, Race, Steady, reached
from bench.stats import median_of, quantile
from podwire.cli.client import request
from podwire.control.cluster.facts import node_key
from podwire.control.cluster.publish import LEASE_TTL_S
from podwire.control.cluster.published import endpoints_key
from podwire.control.documents.apply import apply_documents
from podwire.datapath import maps
from podwire.kernel import bpf, netns
from podwire.lab import labs, node
from podwire.lab.pod import call_launcher, network_config
from podwire.lab.state import LabState
from podwire.lab.topology import UPLINK, LabShape, NodePlan
from podwire.model.cluster import TUNNEL_OVERHEAD_IPV4_BYTES
from podwire.model.endpoint import IPNetwork
from podwire.model.errors import NotFound
from podwire.model.store import Store
from podwire.model.store.leases import NODE as NODE_LEASE
from podwire.store.open import open_store

LAB: Final = "bench-c"
NODES: Final = 5
BURST_PODS: Final = 30
QUIET_S: Final = 1.3
"""Longer than a node waits between two writes: what follows meets a quiet node."""
DEADLINE_S: Final = 20.0
NEVER_S: Final = 1.5
"""How long what must not pass is tried."""
MEETS: Final = {"role": "server"}


@dataclass(frozen=True)
class Cluster:
    """The lab, and in it one pod that asks on each node."""

    state: LabState
    askers: Sequence[str]
    """Their namespaces, in the order of the nodes."""
    addresses: Sequence[str]
    """Theirs."""
    store: Store

    def node(self, number: int) -> NodePlan:
        """Give a node; they take turns."""
        return self.state.plan.nodes[number % NODES]


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=104)
    parser.add_argument("--bursts", type=int, default=5)
    parser.add_argument("--moves", type=int, default=10)
    parser.add_argument("--losses", type=int, default=5)
    parser.add_argument("--routing", default="overlay")
    parser.add_argument("--store", default="etcd", help="sqlite shows what is not etcd's")
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    raw: dict[str, list[float]] = {}
    with ExitStack() as stack:
        cluster = open_cluster(stack, arguments.routing, arguments.store)
        refuse_stranger(cluster)
        steady = Steady({cluster.addresses[1]: cluster.askers[0]})
        steady.start()
        raw["pod, known identity, ms"] = add_pods(cluster, arguments.pods, new_identity=False)
        raw["pod, new identity, ms"] = add_pods(cluster, arguments.pods, new_identity=True)
        raw["pod of a burst, ms"] = add_bursts(cluster, arguments.bursts)
        raw["node's address changed, ms"] = move_node(cluster, arguments.moves)
        raw["node's underlay MTU changed, ms"] = change_mtu(cluster, 2 * arguments.moves)
        raw["node's link is up again, ms"] = cut_link(cluster, arguments.moves)
        raw["node gone, ms"] = remove_node(cluster, arguments.moves)
        ended, heard = lose_node(cluster, arguments.losses)
        raw["node lost: until its lease ends, ms"] = ended
        raw["node lost: from then until others say so, ms"] = heard
        sent, lost = steady.stop()
        raw["echoes of unaffected pods, lost"] = [lost]
        raw["echoes of unaffected pods, sent"] = [sent]
    report(arguments, raw)


def open_cluster(stack: ExitStack, routing: str, kind: str) -> Cluster:
    """Build the lab with its policy and the pods that ask; all of it goes with `stack`."""
    shape = LabShape(nodes=NODES, families="4", routing=routing, store=kind)
    state = labs.up(LAB, shape, progress=labs.say_nothing)
    stack.callback(labs.down, LAB, progress=labs.say_nothing)
    underlay = netns.named_path(state.plan.underlay_namespace)
    store = netns.run_at(underlay, lambda: open_store(state.plan.store_url))
    stack.enter_context(closing(store))
    askers: list[str] = []
    addresses: list[str] = []
    for planned in state.plan.nodes:
        namespace, address = add_pod(planned, {"role": "asker"})
        askers.append(namespace)
        addresses.append(address)
    apply_documents(store, [_policy()])
    return Cluster(state, askers, addresses, store)


def _policy() -> dict[str, object]:
    """Askers may send to servers and to each other, and to nobody else."""
    peers = [{"podSelector": {"matchLabels": {"role": role}}} for role in ("server", "asker")]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "askers", "namespace": "default"},
        "spec": {
            "podSelector": {"matchLabels": {"role": "asker"}},
            "policyTypes": ["Egress"],
            "egress": [{"to": peers}],
        },
    }


def make_namespace() -> str:
    """Make a pod's namespace; it goes with the lab."""
    name = f"pw.{LAB}.p.{uuid.uuid4().hex[:8]}"
    netns.create_named(name).close()
    return name


def add_pod(
    on: NodePlan, labels: dict[str, str], namespace: str = "", race: Race | None = None
) -> tuple[str, str]:
    """Attach a pod; gives its namespace and its address, which `race` has then as well."""
    namespace = namespace or make_namespace()
    answer = call_launcher(
        "ADD",
        config=network_config(on, labels),
        container_id=uuid.uuid4().hex,
        netns_path=netns.named_path(namespace),
        pod=("default", namespace.rpartition(".")[2]),
    )
    now = time.perf_counter()
    address = str(answer["ips"][0]["address"]).partition("/")[0]
    if race is not None:
        race.add(address, now)
    return namespace, address


def refuse_stranger(cluster: Cluster) -> None:
    """Make sure that what is measured is policy: pods without the label are not reached, those with it are."""
    asker = Prober(cluster.askers[0])
    with closing(asker):
        for labels, wanted in (({"role": "stranger"}, False), (MEETS, True)):
            _, address = add_pod(cluster.node(1), labels)
            if reached(asker, address, DEADLINE_S if wanted else NEVER_S) != wanted:
                raise RuntimeError(f"a pod with {labels} is{' not' if wanted else ''} reached")


def add_pods(cluster: Cluster, count: int, *, new_identity: bool) -> list[float]:
    """Add pods one by one on nodes in turn, all of them quiet; gives how long the first node did not reach each."""
    found: list[float] = []
    quiet_since = [time.monotonic()] * NODES
    asker = Prober(cluster.askers[0])
    with closing(asker):
        for index in range(count):
            number = 1 + index % (NODES - 1)
            namespace = make_namespace()
            time.sleep(max(0.0, quiet_since[number] + QUIET_S - time.monotonic()))
            labels = MEETS | ({"of": f"pod{index}"} if new_identity else {})
            race = Race([asker], DEADLINE_S)
            add_pod(cluster.node(number), labels, namespace, race)
            found += race.run(1)
            quiet_since[number] = time.monotonic()
    return found


def add_bursts(cluster: Cluster, bursts: int) -> list[float]:
    """Add many pods of one node at once; gives the time of each from its own answer."""
    found: list[float] = []
    asker = Prober(cluster.askers[0])
    with closing(asker), ThreadPoolExecutor(BURST_PODS) as threads:
        for index in range(bursts):
            on = cluster.node(1 + index % (NODES - 1))
            namespaces = [make_namespace() for _ in range(BURST_PODS)]
            time.sleep(QUIET_S)
            race = Race([asker], DEADLINE_S)
            adding = [
                threads.submit(add_pod, on, MEETS, namespace, race) for namespace in namespaces
            ]
            found += race.run(BURST_PODS)
            for batch in adding:
                batch.result()
    return found


def move_node(cluster: Cluster, moves: int) -> list[float]:
    """Give the last node another address, and back; how long each of the others does not reach its pods."""
    last = cluster.node(NODES - 1)
    before, after = last.underlay[0], last.underlay[0].replace(last.addresses[0], "192.0.2.99")
    found: list[float] = []
    with ExitStack() as stack:
        askers = [stack.enter_context(closing(Prober(asker))) for asker in cluster.askers[:-1]]
        promote = f"/proc/sys/net/ipv4/conf/{UPLINK}/promote_secondaries"
        _write_in(last.namespace, promote, "1")
        for _ in range(moves):
            time.sleep(QUIET_S)
            commands = [f"addr add {after} dev {UPLINK}", f"addr del {before} dev {UPLINK}"]
            node.run_ip(last.namespace, commands)
            race = Race(askers, DEADLINE_S)
            race.add(cluster.addresses[-1])
            found += race.run(len(askers))
            before, after = after, before
    return found


def change_mtu(cluster: Cluster, changes: int) -> list[float]:
    """Change the MTU of the last node's link; how long each of the others has the old one on its route there."""
    last, others = cluster.node(NODES - 1), cluster.state.plan.nodes[:-1]
    found: list[float] = []
    for index in range(changes):
        time.sleep(random.uniform(0.0, 2 * QUIET_S))  # also when the node has just looked
        mtu = 1500 if index % 2 else 1400
        begin = time.perf_counter()
        node.run_ip(last.namespace, [f"link set {UPLINK} mtu {mtu}"])
        waiting = list(others)
        while waiting:
            if time.perf_counter() - begin > DEADLINE_S:
                raise RuntimeError(f"nodes {[late.name for late in waiting]} kept the old MTU")
            for late in tuple(waiting):
                if _route_mtu(late, last) == mtu - TUNNEL_OVERHEAD_IPV4_BYTES:
                    found.append((time.perf_counter() - begin) * 1e3)
                    waiting.remove(late)
    return found


def _route_mtu(on: NodePlan, target: NodePlan) -> int:
    """Read the MTU of the route to a node's pods; 0 when there is none."""
    command = ["ip", "-n", on.namespace, "route", "show", target.pod_cidrs[0]]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(words[words.index("mtu") + 1]) if "mtu" in words else 0


def cut_link(cluster: Cluster, cuts: int) -> list[float]:
    """Set the last node's link down for a second; from when it is up again, how long each of the others does not reach
    its pods."""
    last = cluster.node(NODES - 1)
    found: list[float] = []
    with ExitStack() as stack:
        askers = [stack.enter_context(closing(Prober(asker))) for asker in cluster.askers[:-1]]
        for _ in range(cuts):
            time.sleep(QUIET_S)
            node.run_ip(last.namespace, [f"link set {UPLINK} down"])
            time.sleep(1)
            node.run_ip(last.namespace, [f"link set {UPLINK} up"])
            race = Race(askers, DEADLINE_S)
            race.add(cluster.addresses[-1])
            found += race.run(len(askers))
    return found


def _write_in(namespace: str, path: str, text: str) -> None:
    netns.run_at(netns.named_path(namespace), lambda: Path(path).write_text(text, encoding="ascii"))


def remove_node(cluster: Cluster, moves: int) -> list[float]:
    """Take the last node out of the store; how long its range stays in the programs' map of each of the others.

    Its agent does not run then, as it would publish itself again; it is started after each try.
    """
    last = cluster.node(NODES - 1)
    tables = [open_node_map(planned, "pw_ipcache") for planned in cluster.state.plan.nodes[:-1]]
    found: list[float] = []
    for _ in range(moves):
        key = maps.to_prefix_key(_range_of(last))
        labs.change_agent(LAB, last.name, "kill")
        known = [table.lookup(key) for table in tables]
        begin = time.perf_counter()
        for lost in (node_key(last.name), endpoints_key(last.name)):
            with suppress(NotFound):  # it had no time to publish its pods
                cluster.store.delete(lost)
        found += _wait_for_change(tables, key, known, begin)
        away = [table.lookup(key) for table in tables]
        labs.change_agent(LAB, last.name, "start")
        _wait_for_change(tables, key, away, time.perf_counter())
    return found


def lose_node(cluster: Cluster, losses: int) -> tuple[list[float], list[float]]:
    """Cut the last node off and kill its agent; how long its lease lasts, and from then until each other node's status
    says that it does not live."""
    last, others = cluster.node(NODES - 1), cluster.state.plan.nodes[:-1]
    name = f"{NODE_LEASE}{last.name}"
    ended: list[float] = []
    heard: list[float] = []
    for _ in range(losses):
        time.sleep(
            random.uniform(QUIET_S, QUIET_S + LEASE_TTL_S / 3)
        )  # its last sign of life is as old as it may be
        leases = cluster.store.leases()
        assert leases is not None, "labs are on stores that have them"
        with leases.watch(NODE_LEASE) as watch:
            watch.next(DEADLINE_S)
            begin = time.perf_counter()
            labs.set_link(LAB, last.name, is_up=False)
            labs.change_agent(LAB, last.name, "kill")
            while name in watch.holders:
                watch.next(DEADLINE_S)
            end = time.perf_counter()
        ended.append((end - begin) * 1e3)
        heard += _wait_for_warnings(others, f"no agent is alive on node {last.name}", end)
        labs.set_link(LAB, last.name, is_up=True)
        labs.change_agent(LAB, last.name, "start")
    return ended, heard


def _wait_for_warnings(nodes: Sequence[NodePlan], text: str, begin: float) -> list[float]:
    """Ask for status until each node warns of something; gives milliseconds."""
    found: list[float] = []
    waiting = list(nodes)
    while waiting:
        for late in tuple(waiting):
            status = request(str(late.directory / "api.sock"), "GET", "/status")
            if any(text in warning for warning in status["warnings"]):
                found.append((time.perf_counter() - begin) * 1e3)
                waiting.remove(late)
        if time.perf_counter() - begin > DEADLINE_S:
            raise RuntimeError(f"nodes {[late.name for late in waiting]} do not say {text!r}")
        time.sleep(0.005)
    return found


def _range_of(planned: NodePlan) -> IPNetwork:
    return ipaddress.ip_network(planned.pod_cidrs[0])


def _wait_for_change(
    tables: Sequence[bpf.Map], key: bytes, known: Sequence[bytes | None], begin: float
) -> list[float]:
    """Spin until each table has another row; gives milliseconds."""
    found: list[float] = []
    waiting = dict(enumerate(known))
    while waiting:
        for index, before in list(waiting.items()):
            if tables[index].lookup(key) != before:
                found.append((time.perf_counter() - begin) * 1e3)
                del waiting[index]
        if time.perf_counter() - begin > DEADLINE_S:
            raise RuntimeError(f"nodes {[late + 1 for late in waiting]} did not hear")
        time.sleep(0.001)
    return found


def report(arguments: argparse.Namespace, raw: dict[str, list[float]]) -> None:
    """Print and keep medians, 99th percentiles and the worst of each."""
    print(
        f"\n{NODES} nodes, {arguments.store}, {arguments.routing}: median (95 % interval), p99, worst"
    )
    words = {"routing": arguments.routing, "store": arguments.store}
    summary: dict[str, object] = {"nodes": NODES, **words}
    for name, series in raw.items():
        found = median_of(series)
        p99, worst = quantile(series, 0.99), max(series)
        print(f"  {name:34} {found!s:28} {p99:8.1f} {worst:8.1f}   n={len(series)}")
        summary[name] = results_file.interval(found)
        for what, figure in (("p99", p99), ("worst", worst)):
            summary[f"{name} {what}"] = {"value": figure, "low": figure, "high": figure}
    if not arguments.dry:
        results_file.write("convergence", summary, raw)


if __name__ == "__main__":
    main()
