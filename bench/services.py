"""A pod that speaks to a service: by podwire's programs, and by kube-proxy in both its modes, of few services and many.

One real cluster of three nodes with podwire as their network. On each a pod asks a service whose ten back ends are ten
ports of another pod beside it. Only on the first node podwire translates; on the others kube-proxy does, by nftables
and by iptables. Beside these three services there are others, which nobody asks, with ten back ends each, so that there
are 10 or 10,000. Rounds take the nodes in turns.

`--stage up`, `measure` and `down` do a part each: ten thousand services take minutes to make, and only the measurement
needs a machine that does nothing else.
"""

import argparse
import ipaddress
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from bench import results_file
from bench.agent import resident_mb
from bench.contestants import compile_c, scratch
from bench.pair import read_numbers
from bench.stats import in_turns, median_of, ratio_of
from podwire.lab.kubernetes import cluster as clusters
from podwire.lab.kubernetes import pods, residue
from podwire.lab.kubernetes.cluster import Cluster, ClusterShape
from podwire.lab.kubernetes.networks.agents import PlainAgents

NAME: Final = "bench-services"
OURS: Final = "podwire"
NODES: Final = {OURS: "node1", "nftables": "node2", "iptables": "node3"}
"""Each contestant and its node. Podwire's has no kube-proxy, the others are named like its mode."""
FEW, MANY = 10, 10_000
BACK_ENDS: Final = 10
FIRST_PORT: Final = 5201
"""Of the back ends (flow.c)."""
PORT: Final = 80
UNUSED: Final = ipaddress.ip_network("10.200.0.0/14")
"""Addresses of the back ends that nobody asks."""
MAKERS: Final = 16
"""Each has a connection of its own, and waits most of its time for etcd."""
STREAM_MS, OPEN_MS, ROUND_TRIPS = 2000, 500, 20_000
TWO_CPUS, ONE_CPU = ("0", "1"), ("1", "1")
CONGESTION_CONTROL: Final = "cubic"
"""Linux' own default. BBR, which a machine may have instead, paces by what it estimates, and reaches less than half of
what the way between two pods of a node carries: that would measure its estimates.
"""
FIGURES: Final = ("Gbit/s", "round trip p50 us", "connections per s")
MADE_S: Final = 900.0
"""In so many seconds kube-proxy writes the rules of all."""
_SERVICES: Final = "/api/v1/namespaces/default/services"
_SLICES: Final = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
Samples = dict[str, list[float]]


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="with few services, and with many")
    parser.add_argument("--stage", choices=["all", "up", "measure", "down"], default="all")
    parser.add_argument("--services", type=int, nargs="*", default=[FEW, MANY])
    parser.add_argument("--add", action="store_true", help="to the results that are there")
    arguments = parser.parse_args()
    samples: Samples = results_file.read_samples("services") if arguments.add else {}
    if arguments.stage == "down":
        clusters.down(NAME)
    elif arguments.stage == "measure":
        measure(_read_plan(), arguments.rounds, samples)
    else:
        with ExitStack() as stack:
            cluster = _raise_cluster()
            undo = stack.enter_context(ExitStack())
            undo.callback(clusters.down, NAME)
            for count in arguments.services:
                plan = fill(cluster, count, samples)
                if arguments.stage == "all":
                    measure(plan, arguments.rounds, samples)
            if arguments.stage == "up":
                undo.pop_all()
    if samples:
        results_file.write("services", summarise(samples), samples)


def _plan_path() -> Path:
    return residue.directory_of(NAME) / "plan.json"


def _read_plan() -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(_plan_path().read_text(encoding="utf-8"))
    return plan


def _raise_cluster() -> Cluster:
    off: Mapping[str, object] = {"translate_services": "off"}
    others = {node: off for name, node in NODES.items() if name != OURS}
    network = PlainAgents(others, translate_services="on")
    cluster = clusters.up(NAME, ClusterShape(nodes=len(NODES)), network)
    for name, node in NODES.items():
        cluster.node(node).services.use_proxy("" if name == OURS else name)
    for node in NODES.values():
        for role in ("client", "server"):
            labels = {"of": node, "role": role}
            pod = pods.describe(f"{role}-{node}", node=node, labels=labels, command=pods.IDLE)
            cluster.client.create("/api/v1/namespaces/default/pods", pod)
    cluster.wait_for_pods(2 * len(NODES))
    return cluster


def fill(cluster: Cluster, count: int, samples: Samples) -> dict[str, Any]:
    """Have so many services, with ten back ends each, and wait until all three nodes serve theirs."""
    before_mb = _agent_mb(cluster)
    there = len(cluster.client.get(_SERVICES)["items"])
    begin_s = time.monotonic()
    with _without_proxies(cluster):
        _make_unused(cluster, range(there, count - len(NODES)))
    print(f"made after {time.monotonic() - begin_s:.0f} s", flush=True)
    plan: dict[str, Any] = {"services": count, "contestants": {}}
    for name, node in NODES.items():
        found = {
            pod["metadata"]["labels"]["role"]: pod
            for pod in cluster.list_pods(selector=f"of={node}")
        }
        address = found["server"]["status"]["podIP"]
        slices = ((address, FIRST_PORT + number) for number in range(BACK_ENDS))
        plan["contestants"][name] = {
            **{role: pods.network_of(cluster, pod) for role, pod in found.items()},
            "address": _make_service(cluster, f"asked-{node}-{count}", slices),
        }
    for contestant in plan["contestants"].values():
        _wait_until_served(cluster, contestant)
    print(f"{count} services after {time.monotonic() - begin_s:.0f} s", flush=True)
    samples[f"agent, MB, {count} services"] = [_agent_mb(cluster)]
    samples[f"agent, MB, before {count} services"] = [before_mb]
    _plan_path().write_text(json.dumps(plan), encoding="utf-8")
    return plan


@contextmanager
def _without_proxies(cluster: Cluster) -> Iterator[None]:
    """Stop kube-proxy meanwhile: it would write rules anew all the time, on the CPUs that the API server needs."""
    proxied = [cluster.node(node).services for name, node in NODES.items() if name != OURS]
    for services in proxied:
        services.proxy.stop()
    yield
    for services in proxied:
        services.proxy.launch()  # whoever waits for a service waits for its rules, too


def _agent_mb(cluster: Cluster) -> float:
    (agent,) = pods.find_agents(cluster, NODES[OURS])
    return resident_mb(agent.pid)


def _make_unused(cluster: Cluster, numbers: Sequence[int]) -> None:
    """Make services that nobody asks."""

    def make(part: Sequence[int]) -> None:
        services = (_service(f"unused-{number}") for number in part)
        cluster.client.create_many(_SERVICES, services)
        slices = (_slice(f"unused-{number}", 0, _unused_addresses(number), PORT) for number in part)
        cluster.client.create_many(_SLICES, slices)

    with ThreadPoolExecutor(MAKERS) as threads:
        list(threads.map(make, [numbers[first::MAKERS] for first in range(MAKERS)]))


def _unused_addresses(number: int) -> list[str]:
    return [str(UNUSED[BACK_ENDS * number + offset + 1]) for offset in range(BACK_ENDS)]


def _make_service(cluster: Cluster, name: str, back_ends: Iterator[tuple[str, int]]) -> str:
    made = cluster.client.create(_SERVICES, _service(name))
    for number, (address, port) in enumerate(back_ends):
        cluster.client.create(_SLICES, _slice(name, number, [address], port))
    return str(made["spec"]["clusterIP"])


def _service(name: str) -> Mapping[str, Any]:
    return {"metadata": {"name": name}, "spec": {"ports": [{"name": "x", "port": PORT}]}}


def _slice(name: str, number: int, addresses: Sequence[str], port: int) -> Mapping[str, Any]:
    labels = {"kubernetes.io/service-name": name}
    return {
        "metadata": {"name": f"{name}-{number}", "labels": labels},
        "addressType": "IPv4",
        "ports": [{"name": "x", "port": port}],
        "endpoints": [{"addresses": addresses, "conditions": {"ready": True}}],
    }


def _wait_until_served(cluster: Cluster, one: Mapping[str, str]) -> None:
    with scratch() as directory:
        tool = compile_c("flow", directory)

        def is_served() -> bool:
            try:
                _run(tool, "ask", one, 100, ONE_CPU)
            except RuntimeError:
                return False
            return True

        cluster.wait_for(is_served, f"service {one['address']}", MADE_S)


def measure(plan: Mapping[str, Any], rounds: int, samples: Samples) -> None:
    """Measure all contestants in turns."""
    count, contestants = plan["services"], plan["contestants"]
    names = list(contestants)
    with scratch() as directory:
        tool = compile_c("flow", directory)
        print(f"with {count} services", flush=True)
        for name in in_turns(names, rounds):
            for what, figure in zip(FIGURES, _ask(tool, contestants[name]), strict=True):
                key = f"{name} {what}, {count} services"
                samples.setdefault(key, []).append(round(figure, 3))


def _ask(tool: str, one: Mapping[str, str]) -> tuple[float, float, float]:
    """Give the figures of one contestant, once."""
    moved_bytes, elapsed_ns = _run(tool, "stream", one, STREAM_MS, TWO_CPUS)
    p50_ns, *_ = _run(tool, "ask", one, ROUND_TRIPS, ONE_CPU)
    opened, open_ns = _run(tool, "open", one, OPEN_MS, ONE_CPU)
    return moved_bytes * 8 / elapsed_ns, p50_ns / 1e3, opened / open_ns * 1e9


def _run(
    tool: str, what: str, one: Mapping[str, str], amount: int, cpus: tuple[str, str]
) -> list[int]:
    """Run `flow` once, with a real-time priority: what else the machine has to do waits until it ends."""
    words = [
        *("chrt", "--fifo", "10", tool, what, one["server"], one["client"]),
        *(f"{one['address']}:{PORT}", str(amount), *cpus, CONGESTION_CONTROL),
    ]
    return read_numbers(words, f"{what} {one}")


def summarise(samples: Mapping[str, Sequence[float]]) -> dict[str, object]:
    """Compute and print the table: each figure with few and many services, and its ratio to each mode of kube-proxy."""
    summary: dict[str, object] = {}
    for count, what in itertools.product((FEW, MANY), FIGURES):
        title = f"{what}, {count} services"
        if f"{OURS} {title}" not in samples:
            continue
        ours = samples[f"{OURS} {title}"]
        row: dict[str, object] = {OURS: results_file.interval(median_of(ours))}
        shown = []
        for name in (node for node in NODES if node != OURS):
            theirs = samples[f"{name} {title}"]
            row[name] = results_file.interval(median_of(theirs))
            ratio = ratio_of(ours, theirs)
            row[f"ratio to {name}"] = results_file.interval(ratio)
            shown.append(f"{name} {median_of(theirs)}, ratio {ratio}")
        print(f"{title:34}{median_of(ours)!s:>24}   {'; '.join(shown)}")
        summary[title] = row
    grown = _difference(
        samples, f"agent, MB, {MANY} services", f"agent, MB, before {MANY} services"
    )
    if grown is not None:
        summary["agent's memory for many services, MB"] = grown
        print(f"agent's memory for {MANY} services, MB: {grown['value']}")
    return summary


def _difference(
    samples: Mapping[str, Sequence[float]], more: str, less: str
) -> dict[str, float] | None:
    if more not in samples or less not in samples:
        return None
    return dict.fromkeys(("value", "low", "high"), round(samples[more][0] - samples[less][0], 1))


if __name__ == "__main__":
    main()
