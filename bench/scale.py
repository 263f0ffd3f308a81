"""One real agent among thousands of nodes that exist in the store alone: time, CPU, memory, and what etcd has to do.

The agent is a lab's, with its own namespace, programs, maps, routes and tunnel device, and with a real etcd. The other
nodes are objects (bench/simulated.py). Measured are: a first start among all of them, a start again, one pod replaced
on every node at once, a node that gets another address, and 1 % of all pods replaced per minute. A change counts as
done when the rows of the kernel's map are there.
"""

import argparse
import json
import random
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from bench import results_file, scale_report
from bench.agent import cpu_s, resident_mb
from bench.contestants import open_node_map
from bench.simulated import (
    FIRST_IDENTITY,
    PODS_OF_AN_IDENTITY,
    SimulatedNode,
    identity_objects,
    make_nodes,
    write_all,
)
from bench.stats import quantile
from podwire.datapath import abi, maps
from podwire.kernel import netns
from podwire.kernel.rtnl.route import host_network
from podwire.lab import labs, node
from podwire.lab.state import LabState, read_state
from podwire.lab.topology import LabShape, NodePlan
from podwire.model.endpoint import IPAddress
from podwire.model.ids import IdentityId
from podwire.model.store import ObjectKey, Store, StoredObject
from podwire.store.open import open_store

LAB: Final = "bench-s"
SIZES: Final = ((100, 2_000), (1_000, 20_000), (1_000, 100_000), (5_000, 100_000))
"""Nodes and pods; the pairs that share one of the two show what grows with the other."""
CLUSTER: Final = '["10.0.0.0/8"]'
DEADLINE_S: Final = 240.0
MOVES: Final = 5
CHURN_PER_MINUTE: Final = 0.01
SETTLED_S: Final = 3.0
POLL_S: Final = 0.002


@dataclass(frozen=True)
class Usage:
    """What processes have used up, and what etcd has done, since they began."""

    agent_s: float
    etcd_s: float
    requests: float
    sent_bytes: float

    def since(self, before: "Usage") -> dict[str, float]:
        """Give the difference, by name."""
        return {
            "agent CPU, s": round(self.agent_s - before.agent_s, 3),
            "etcd CPU, s": round(self.etcd_s - before.etcd_s, 3),
            "etcd requests": self.requests - before.requests,
            "etcd sent, MB": round((self.sent_bytes - before.sent_bytes) / 1e6, 3),
        }


@dataclass
class Site:
    """The lab with its agent, the store as writers have it, and the simulated nodes."""

    state: LabState
    store: Store
    nodes: list[SimulatedNode]
    objects: dict[ObjectKey, StoredObject] = field(default_factory=dict)

    @property
    def own(self) -> NodePlan:
        """The node that is real."""
        return self.state.plan.nodes[0]

    @property
    def agent_pid(self) -> int:
        """Of the agent that runs now."""
        return read_state(LAB).agents[self.own.name].pid

    def usage(self, *, with_agent: bool = True) -> Usage:
        """Look at both processes."""
        assert self.state.store is not None
        counters = _read_etcd(self.state)
        return Usage(
            cpu_s(self.agent_pid) if with_agent else 0.0,
            cpu_s(self.state.store.pid),
            sum(value for name, value in counters if name.startswith("grpc_server_handled_total")),
            sum(
                value
                for name, value in counters
                if name.startswith("etcd_network_client_grpc_sent_bytes_total")
            ),
        )

    def create(self, objects: Iterable[StoredObject]) -> None:
        """Write objects that are not there."""
        for written in write_all(self.store, self.store.create, objects).values():
            self.objects[written.key] = written

    def update(self, objects: Iterable[StoredObject]) -> None:
        """Write objects again."""
        current = [
            replace_revision(stored, self.objects[stored.key].revision) for stored in objects
        ]
        for written in write_all(self.store, self.store.update, current).values():
            self.objects[written.key] = written


def replace_revision(one: StoredObject, revision: int) -> StoredObject:
    """Give the object as the successor of a revision."""
    return StoredObject(key=one.key, document=one.document, revision=revision)


def _in_underlay(state: LabState, work: Callable[[], Any]) -> Any:
    return netns.run_at(netns.named_path(state.plan.underlay_namespace), work)


def _read_etcd(state: LabState) -> list[tuple[str, float]]:
    url = state.plan.store_url.replace("etcd://", "http://") + "/metrics"

    def read() -> str:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())

    lines = (line.rpartition(" ") for line in str(_in_underlay(state, read)).splitlines())
    return [(name, float(value)) for name, _, value in lines if name and name[0] != "#"]


class Rows:
    """What the agent has written into the kernel of other nodes and their pods."""

    def __init__(self, own: NodePlan) -> None:
        self._prefixes = open_node_map(own, "pw_ipcache")
        self._numbers = open_node_map(own, "pw_node_numbers")

    def wait_for_pods(self, pods: Mapping[IPAddress, IdentityId]) -> None:
        """Wait until each address has its identity. RuntimeError says how many have not in time."""
        keys = {maps.to_prefix_key(host_network(one)): number for one, number in pods.items()}

        def is_missing(key: bytes) -> bool:
            # The map gives the longest prefix that fits: the node's range as long as there is no own row.
            found = self._prefixes.lookup(key)
            return found is None or abi.IpcacheValue.unpack(found).identity != keys[key]

        _wait_until_none(keys, is_missing)

    def wait_for_node(self, outer: IPAddress) -> None:
        """Wait until tunnel packets may come from an address."""
        _wait_until_none([maps.to_mapped(outer)], lambda key: self._numbers.lookup(key) is None)

    def count(self) -> int:
        """Count all prefixes."""
        return sum(1 for _ in self._prefixes.items())


def _wait_until_none(keys: Iterable[bytes], is_missing: Callable[[bytes], bool]) -> None:
    waiting, end = list(keys), time.perf_counter() + DEADLINE_S
    while waiting := [key for key in waiting if is_missing(key)]:
        if time.perf_counter() > end:
            raise RuntimeError(f"{len(waiting)} rows are missing after {DEADLINE_S:.0f} s")
        time.sleep(POLL_S)


def main() -> None:
    """Measure, print the table, write results and documentation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", help="NODES:PODS; all if absent")
    parser.add_argument("--churn-s", type=float, default=60.0)
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    sizes = [tuple(map(int, size.split(":"))) for size in arguments.sizes or ()] or SIZES
    found: dict[str, dict[str, float]] = {}
    for nodes, pods in sizes:
        begin = time.perf_counter()
        name = f"{nodes} nodes, {pods} pods"
        with ExitStack() as stack:
            found[name] = measure(open_site(stack, nodes, pods), arguments.churn_s)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
        for what, figure in found[name].items():
            print(f"  {what:44} {figure:12.2f}", flush=True)
    if not arguments.dry:
        results_file.write("scale", found, {})
        scale_report.write(found)


def open_site(stack: ExitStack, nodes: int, pods: int) -> Site:
    """Start etcd and an agent that has a large cluster, stop the agent, and write all other nodes into the store."""
    shape = LabShape(nodes=1, families="4", routing="overlay", store="etcd")
    state = labs.up(LAB, shape, progress=labs.say_nothing)
    stack.callback(labs.down, LAB, progress=labs.say_nothing)
    labs.change_agent(LAB, state.plan.nodes[0].name, "stop")
    config = state.plan.nodes[0].directory / node.CONFIG_FILE
    lines = config.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith("cluster_cidrs")]
    config.write_text("\n".join([f"cluster_cidrs = {CLUSTER}", *kept, ""]), encoding="utf-8")
    store: Store = _in_underlay(state, partial(open_store, state.plan.store_url))
    stack.enter_context(closing(store))
    site = Site(state, store, make_nodes(nodes, pods))
    site.create(identity_objects(pods))
    site.create(peer.node() for peer in site.nodes)
    site.create(peer.endpoints() for peer in site.nodes)
    return site


def measure(site: Site, churn_s: float) -> dict[str, float]:
    """Measure everything at one size."""
    rows = Rows(site.own)
    pods = sum(len(peer.pods) for peer in site.nodes)
    found: dict[str, float] = {"nodes": len(site.nodes), "pods": pods}
    found |= _start(site, rows, "first start")
    found["rows in the kernel"] = rows.count()
    found["store, bytes of a node"] = _bytes_of(site)
    found["agent, MB"] = resident_mb(site.agent_pid)
    labs.change_agent(LAB, site.own.name, "stop")
    found |= _start(site, rows, "start again")
    found["agent after a start again, MB"] = resident_mb(site.agent_pid)
    found |= _replace_everywhere(site, rows)
    found |= _move_nodes(site, rows)
    found |= _churn(site, rows, churn_s)
    found["agent at the end, MB"] = resident_mb(site.agent_pid)
    return found


def _bytes_of(site: Site) -> float:
    one = site.nodes[0]
    return float(sum(len(json.dumps(what.document)) for what in (one.node(), one.endpoints())))


def _start(site: Site, rows: Rows, name: str) -> dict[str, float]:
    """Start the agent; give how long until it answers, and until all pods are in the kernel."""
    before, begin = site.usage(with_agent=False), time.perf_counter()
    labs.change_agent(LAB, site.own.name, "start")
    answered = time.perf_counter()
    rows.wait_for_pods(_last_pods(site.nodes))
    whole = time.perf_counter()
    time.sleep(SETTLED_S)
    used = site.usage().since(before)
    return {
        f"{name}: answers, s": round(answered - begin, 3),
        f"{name}: all pods in the kernel, s": round(whole - begin, 3),
        **{f"{name}: {what}": figure for what, figure in used.items()},
    }


def _last_pods(nodes: Sequence[SimulatedNode]) -> dict[IPAddress, IdentityId]:
    """Give one pod of every node: a node's are written together."""
    return dict(next(reversed(peer.pods.items())) for peer in nodes)


def _replace_everywhere(site: Site, rows: Rows) -> dict[str, float]:
    """Replace a pod on every node as fast as the store takes it."""
    objects = []
    for peer in site.nodes:
        peer.replace_pod(IdentityId(FIRST_IDENTITY))
        objects.append(peer.endpoints())
    before, begin = site.usage(), time.perf_counter()
    site.update(objects)
    written = time.perf_counter()
    rows.wait_for_pods(_last_pods(site.nodes))
    whole = time.perf_counter()
    time.sleep(1.0)
    used = site.usage().since(before)
    return {
        "all nodes change: written, s": round(written - begin, 3),
        "all nodes change: in the kernel, s": round(whole - begin, 3),
        "all nodes change: events/s": round(len(objects) / (whole - begin), 1),
        "all nodes change: agent CPU per event, ms": round(
            used["agent CPU, s"] * 1e3 / len(objects), 3
        ),
    }


def _move_nodes(site: Site, rows: Rows) -> dict[str, float]:
    """Give single nodes another address: the whole plan is computed and compared again."""
    before = site.usage()
    lags: list[float] = []
    for peer in site.nodes[:MOVES]:
        peer.moved = True
        begin = time.perf_counter()
        site.update([peer.node()])
        rows.wait_for_node(peer.address)
        lags.append(time.perf_counter() - begin)
        time.sleep(1.0)
    used = site.usage().since(before)
    return {
        "a node's address changes: in the kernel, s": round(quantile(lags, 0.5), 3),
        "a node's address changes: worst, s": round(max(lags), 3),
        "a node's address changes: agent CPU, s": round(used["agent CPU, s"] / MOVES, 3),
    }


def _churn(site: Site, rows: Rows, seconds: float) -> dict[str, float]:
    """Replace 1 % of all pods per minute, each on a node of its own; an update is waited for before the next."""
    source = random.Random(2)
    pods = sum(len(peer.pods) for peer in site.nodes)
    every_s = 60.0 / (pods * CHURN_PER_MINUTE)
    identities = max(1, pods // PODS_OF_AN_IDENTITY)
    before = site.usage()
    lags: list[float] = []
    begin = time.perf_counter()
    while (due := begin + len(lags) * every_s) < begin + seconds:
        time.sleep(max(0.0, due - time.perf_counter()))
        one = source.choice(site.nodes)
        identity = IdentityId(FIRST_IDENTITY + source.randrange(identities))
        address = one.replace_pod(identity)
        site.update([one.endpoints()])
        written = time.perf_counter()
        rows.wait_for_pods({address: identity})
        lags.append(time.perf_counter() - written)
    took_s = time.perf_counter() - begin
    used = site.usage().since(before)
    return {
        "churn: changes/s": round(len(lags) / took_s, 2),
        "churn: commit to kernel p50, ms": round(quantile(lags, 0.5) * 1e3, 1),
        "churn: commit to kernel p99, ms": round(quantile(lags, 0.99) * 1e3, 1),
        "churn: agent, % of a CPU": round(100 * used["agent CPU, s"] / took_s, 2),
        "churn: etcd, % of a CPU": round(100 * used["etcd CPU, s"] / took_s, 2),
        "churn: etcd sent, kB/s": round(used["etcd sent, MB"] * 1e3 / took_s, 2),
        "churn: etcd requests/s": round(used["etcd requests"] / took_s, 2),
    }


if __name__ == "__main__":
    main()
