"""One agent in Kubernetes with 110 pods on its node: memory, CPU, and ADD latency, with policies and while it lists.

A real API server and a real agent; pods are bound through the API and attached by executing the launcher, as a runtime
does. The cluster's other nodes, with their pods and identities, exist in the API alone. A full re-list is caused by an
API server that was killed, has forgotten its past, and is quiet again when the agent reaches it. For comparison another
process asks the same of the API server, and the agent lists nothing: what ADDs take then longer is not the agent's.
"""

import argparse
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from bench import results_file
from bench.agent import agent_pid, cpu_percent, cpu_s, resident_mb
from bench.contestants import LAB, Contestant, pod_namespace, podwire_on, scratch
from bench.simulated import identity_objects, make_nodes, write_all
from bench.stats import median_of, quantile, ratio_of
from podwire.kernel import netns
from podwire.lab import labs
from podwire.lab.kubernetes.nodes import bare
from podwire.lab.kubernetes.nodes.bare import AGENT, BareCluster
from podwire.lab.state import read_state
from podwire.model.store.kinds import IP_ADDRESS, IP_BLOCK, KINDS
from podwire.store.kubernetes.api.kubeconfig import load_kubeconfig
from podwire.store.kubernetes.api.resources import selectors_of_node
from podwire.store.kubernetes.store import KubernetesStore

NAMESPACE: Final = "bench"
"""Of the pods that `bench.contestants` attaches."""
POLICIES_PATH: Final = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies"
PODS: Final = 110
OTHER_NODES: Final = 300
OTHER_PODS: Final = 9_000
POLICIES: Final = 200
APPS: Final = 20
CHURN_EVERY_S: Final = 1.0
BOUND_S: Final = 0.1
"""Between the binding of a pod and its ADD: kubelet and the runtime need at least as long."""
SETTLE_S: Final = 0.03
"""Between two pods: each leaves work behind in the kernel."""
CALM_CPU: Final = 0.2
"""An API server that uses no more of a CPU is quiet."""
RELIST_S: Final = 8.0
"""How long after the way to the API server is free pods are attached; the list is found in its audit log."""
OTHER_LISTS: Final = 3
"""So often another client lists every kind; with its watches it asks about as often as an agent that lists again."""
AFTER_LIST_S: Final = 0.2
"""The last list is taken in so long after it was sent."""

BESIDE: Final = "ADD ms, beside another client's list"

Samples = dict[str, list[float]]


@dataclass
class Site:
    """The cluster, its one real node, and the pods that stay."""

    cluster: BareCluster
    ours: Contestant
    stack: ExitStack
    samples: Samples = field(default_factory=dict)
    standing: list[tuple[str, str]] = field(default_factory=list)
    """Container id and namespace of each pod that stays, the oldest first."""

    def add(self, series: str, values: Sequence[float]) -> None:
        """Add samples."""
        self.samples.setdefault(series, []).extend(round(value, 3) for value in values)

    def bind(self, container_id: str) -> None:
        """Bind the pod that a container id is of."""
        app = f"app{int(container_id[:4], 16) % APPS}"
        node = self.cluster.plan.nodes[0].name
        name = name_of(container_id)
        self.cluster.bind(name, node, labels={"app": app}, namespace=NAMESPACE)

    def unbind(self, container_id: str) -> None:
        """Delete it."""
        self.cluster.unbind(name_of(container_id), namespace=NAMESPACE)

    def come(self) -> None:
        """Bind and attach a pod that stays."""
        container_id, namespace = uuid.uuid4().hex, self.stack.enter_context(pod_namespace())
        self.bind(container_id)
        time.sleep(BOUND_S)
        self.ours.call("ADD", container_id, namespace)
        self.standing.append((container_id, namespace))

    def go(self) -> None:
        """Detach and delete the pod that is here longest."""
        container_id, namespace = self.standing.pop(0)
        self.ours.call("DEL", container_id, namespace)
        self.unbind(container_id)


def name_of(container_id: str) -> str:
    """Give the pod's name, as `bench.contestants` tells it to the plugin."""
    return f"p{container_id[:8]}"


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--relists", type=int, default=8)
    parser.add_argument("--policy-rounds", type=int, default=4)
    parser.add_argument("--idle-s", type=float, default=30.0)
    arguments = parser.parse_args()
    with opened_site() as site:
        print(f"{len(site.standing)} pods stand", flush=True)
        note_memory(site, "after as many ADDs")
        time.sleep(10)
        site.add("idle CPU, %", [cpu_percent(agent_pid(), arguments.idle_s)])
        note_memory(site, "idle")
        measure_churn(site, arguments.idle_s)
        note_memory(site, "after churn")
        for number in range(arguments.policy_rounds):
            measure_policies(site, first=number % 2 == 0)
        for _ in range(arguments.relists):
            measure_relist(site)
        note_memory(site, "after re-lists")
        summary = summarise(site.samples)
    facts = {"pods": PODS, "other nodes": OTHER_NODES, "other pods": OTHER_PODS}
    results_file.write("cluster_scale", {**facts, "policies": POLICIES, **summary}, site.samples)


@contextmanager
def opened_site() -> Iterator[Site]:
    """Give the cluster with all that stands in it."""
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        cluster_cidrs = {"cluster_cidrs": ["10.0.0.0/8"]}
        cluster = stack.enter_context(bare.raised(LAB, settings=cluster_cidrs, start=False))
        fill(cluster)
        cluster.add_namespace(NAMESPACE)
        labs.change_agent(LAB, cluster.plan.nodes[0].name, "start")
        site = Site(cluster, podwire_on(read_state(LAB), directory), stack)
        for _ in range(PODS):
            site.come()
        yield site


def fill(cluster: BareCluster) -> None:
    """Write the other nodes, their pods and identities."""
    kubeconfig = cluster.api.write_kubeconfig(cluster.plan.directory / "admin.kubeconfig")
    others = make_nodes(OTHER_NODES, OTHER_PODS)

    def write() -> None:
        with closing(KubernetesStore(load_kubeconfig(kubeconfig))) as store:
            write_all(store, store.create, identity_objects(OTHER_PODS))
            write_all(store, store.create, [peer.node() for peer in others])
            write_all(store, store.create, [peer.endpoints() for peer in others])

    netns.run_at(netns.named_path(cluster.plan.underlay_namespace), write)


def note_memory(site: Site, when: str) -> None:
    """Note what the agent has in memory, and what its maps have beside."""
    pid = agent_pid()
    site.add(f"PSS, MB, {when}", [proportional_mb(pid)])
    site.add(f"RSS, MB, {when}", [resident_mb(pid)])
    site.add(f"maps, MB, {when}", [maps_mb(pid)])


def proportional_mb(pid: int) -> float:
    """Give the memory of a process, what it shares in proportion."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"process {pid} has no memory")


def maps_mb(pid: int) -> float:
    """Give the memory of the BPF maps that a process has open, as the kernel counts it."""
    found: dict[str, int] = {}
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        lines = path.read_text(encoding="ascii").splitlines()
        facts = dict(line.split(":", 1) for line in lines if ":" in line)
        if "map_id" in facts:
            found[facts["map_id"]] = int(facts["memlock"])
    return sum(found.values()) / 1e6


def measure_churn(site: Site, seconds: float) -> None:
    """Replace one pod each second."""
    pid, begin_s = agent_pid(), time.monotonic()
    begin_cpu_s, replaced = cpu_s(pid), 0
    while (left_s := begin_s + replaced * CHURN_EVERY_S - time.monotonic()) < seconds:
        time.sleep(max(0.0, left_s))
        if time.monotonic() - begin_s >= seconds:
            break
        site.go()
        site.come()
        replaced += 1
    used_s = cpu_s(pid) - begin_cpu_s
    took_s = time.monotonic() - begin_s
    site.add("churn, pods replaced each second", [replaced / took_s])
    site.add("churn CPU, %", [100 * used_s / took_s])
    site.add("churn CPU for a pod, ms", [1e3 * used_s / replaced])


def measure_policies(site: Site, *, first: bool) -> None:
    """Attach new pods where there are policies and where there are none."""
    for with_policies in (True, False) if first else (False, True):
        if with_policies:
            write_policies(site.cluster)
        series = "ADD ms, policies" if with_policies else "ADD ms, no policies"
        for _ in range(50):
            container_id = uuid.uuid4().hex
            site.bind(container_id)
            time.sleep(BOUND_S)
            site.add(series, [live(site, container_id)[1]])
            site.unbind(container_id)
        if with_policies:
            site.cluster.client.delete(POLICIES_PATH)
            time.sleep(1.0)


def write_policies(cluster: BareCluster) -> None:
    """Write policies that deny by default; each app has ten of them."""
    for index in range(POLICIES):
        spec = {"podSelector": {"matchLabels": {"app": f"app{index % APPS}"}}}
        spec |= {"policyTypes": ["Ingress", "Egress"]}  # type: ignore[dict-item]
        cluster.client.create(POLICIES_PATH, {"metadata": {"name": f"deny{index}"}, "spec": spec})
    time.sleep(1.0)


def live(site: Site, container_id: str) -> tuple[float, float]:
    """Attach and detach a bound pod; gives when the ADD began, in seconds, and how many ms it took."""
    with pod_namespace() as namespace:
        begin_ms, end_ms = site.ours.call("ADD", container_id, namespace)
        site.ours.call("DEL", container_id, namespace)
    time.sleep(SETTLE_S)
    return begin_ms / 1e3, end_ms - begin_ms


def measure_relist(site: Site) -> None:
    """Attach pods quietly, and while the agent lists everything again."""
    pod = uuid.uuid4().hex[:8]
    site.bind(pod + "0" * 24)
    time.sleep(1.0)
    quiet = [live(site, pod + uuid.uuid4().hex[8:])[1] for _ in range(60)]
    measure_beside(site, pod)
    node, pid = site.cluster.plan.nodes[0].name, agent_pid()
    labs.set_partition(LAB, node, "store")
    site.cluster.api.kill()
    site.cluster.api.compact()
    site.cluster.api.start()
    wait_until_calm(site.cluster)
    begin_cpu_s, begin_s = cpu_s(pid), time.monotonic()
    offset_s = time.time() - begin_s
    labs.heal(LAB)
    loud = []
    while time.monotonic() < begin_s + RELIST_S:
        loud.append(live(site, pod + uuid.uuid4().hex[8:]))
    used_s = cpu_s(pid) - begin_cpu_s
    first_s, last_s, count = find_lists(site.cluster, begin_s + offset_s)
    first_s, last_s = first_s - offset_s, last_s - offset_s + AFTER_LIST_S
    site.add("ADD ms, quiet", quiet)
    site.add(
        "ADD ms, during a re-list",
        [ms for at_s, ms in loud if at_s + ms / 1e3 >= first_s and at_s <= last_s],
    )
    site.add("re-list, s", [last_s - first_s])
    site.add("re-list, requests", [count])
    site.add("re-list and ADDs, agent's CPU s", [used_s])
    site.unbind(pod + "0" * 24)


def measure_beside(site: Site, pod: str) -> None:
    """Attach pods while another process asks of the API server what the agent asks when it lists again."""
    cluster, found = site.cluster, []
    kubeconfig = cluster.api.write_kubeconfig(cluster.plan.directory / "other.kubeconfig")
    network = netns.named_path(cluster.plan.underlay_namespace)
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        other.submit(os.getpid).result()  # its start is no part of this
        asking = other.submit(list_everything, kubeconfig, network, cluster.plan.nodes[0].name)
        while not asking.done():
            found.append(live(site, pod + uuid.uuid4().hex[8:]))
        begin_s, end_s = asking.result()
    during = [ms for at_s, ms in found if at_s + ms / 1e3 >= begin_s and at_s <= end_s]
    site.add(BESIDE, during)
    site.add("another client's list, s", [end_s - begin_s])


def list_everything(kubeconfig: Path, network: str, node: str) -> tuple[float, float]:
    """List and watch; gives from when to when, by the clock that all processes share."""

    def work() -> tuple[float, float]:
        kinds = [kind.plural for kind in KINDS if kind not in (IP_ADDRESS, IP_BLOCK)]
        access, selectors = load_kubeconfig(kubeconfig), selectors_of_node(node)
        with closing(KubernetesStore(access, selectors=selectors)) as store:
            begin_s = time.monotonic()
            for _ in range(OTHER_LISTS):
                listed = {kind: store.list(kind) for kind in kinds}
                with closing(store.watch({kind: at for kind, (_, at) in listed.items()})):
                    for objects, _ in listed.values():
                        list(objects)
            return begin_s, time.monotonic()

    return netns.run_at(network, work)


def wait_until_calm(cluster: BareCluster) -> None:
    """Wait until the API server has done what its start left to be done."""
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        if cpu_percent(cluster.api.server.pid, 1.0) < 100 * CALM_CPU:
            return


def find_lists(cluster: BareCluster, since_s: float) -> tuple[float, float, int]:
    """Find from when to when the agent listed, of the wall clock, and how many requests that were."""
    listed = [
        event
        for event in cluster.api.read_audit(AGENT)
        if event["verb"] == "list" and at(event, "requestReceivedTimestamp") >= since_s
    ]
    if not listed:
        raise RuntimeError("the agent has listed nothing")
    begun = map(partial(at, name="requestReceivedTimestamp"), listed)
    return min(begun), max(at(event, "stageTimestamp") for event in listed), len(listed)


def at(event: dict[str, Any], name: str) -> float:
    """Read a time of the audit log."""
    return datetime.fromisoformat(event[name]).timestamp()


def summarise(samples: Samples) -> dict[str, object]:
    """Compute and print the table."""
    summary: dict[str, object] = {}
    print(f"\n{'':40}{'n':>5}{'p50':>10}{'p99':>10}")
    for name, series in samples.items():
        p50, p99 = quantile(series, 0.5), quantile(series, 0.99)
        print(f"{name:40}{len(series):5}{p50:10.2f}{p99:10.2f}")
        summary[name] = {**results_file.interval(median_of(series)), "p99": round(p99, 3)}
    for what, ours, theirs, figure in (
        ("ADD p99, re-list / quiet", "ADD ms, during a re-list", "ADD ms, quiet", 0.99),
        ("ADD p99, another client's list / quiet", BESIDE, "ADD ms, quiet", 0.99),
        ("ADD p99, re-list / another client's", "ADD ms, during a re-list", BESIDE, 0.99),
        ("ADD p50, policies / none", "ADD ms, policies", "ADD ms, no policies", 0.5),
    ):
        count = min(len(samples[ours]), len(samples[theirs]))
        ratio = ratio_of(
            samples[ours][:count],
            samples[theirs][:count],
            lambda series, at=figure: quantile(series, at),  # type: ignore[misc]
        )
        print(f"{what}: {ratio}")
        summary[what] = {"ratio": ratio.value, "interval": [ratio.low, ratio.high]}
    return summary


if __name__ == "__main__":
    main()
