"""From an EndpointSlice in the store to the programs' rows, and what services cost the agent: 10,000 of 10 back ends.

A node with a real agent, store (sqlite) and maps. Each change takes one back end of a service away or gives it back.
The clock starts when the store has committed the slice, and stops when the service's row in the kernel's map counts
its back ends anew. Memory is the agent's beside what it had without services, after the changes and after a restart.
"""

import argparse
import gc
import ipaddress
import random
import time
from collections.abc import Iterator
from typing import Any

from bench import results_file
from bench.agent import agent_pid, resident_mb, restart_ms
from bench.contestants import one_node_with_store, open_node_map
from podwire.control.documents.apply import apply_documents
from podwire.datapath import abi
from podwire.datapath.maps import to_mapped
from podwire.kernel import bpf
from podwire.lab.topology import NodePlan
from podwire.model.store import ObjectKey, Store, StoredObject
from podwire.model.store.kinds import ENDPOINT_SLICE, SERVICE

PORT, POD_PORT, TCP = 80, 8080, 6
FIRST_VIP, FIRST_BACK_END = (
    int(ipaddress.IPv4Address(address)) for address in ("10.96.0.1", "10.128.0.1")
)
DEADLINE_S, SETTLE_S = 10.0, 240.0
LOOK_S, SAME_LOOKS, SAME_MB = 3.0, 6, 0.5
SEED = 14
BATCH = 500


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--services", type=int, default=10_000)
    parser.add_argument("--back-ends", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=400)
    arguments = parser.parse_args()
    raw: dict[str, list[float]] = {}
    with one_node_with_store() as (node, store):
        without_mb = resident_mb(agent_pid())
        begin_s = time.monotonic()
        make_services(store, arguments.services, arguments.back_ends)
        raw["written to the store, s"] = [time.monotonic() - begin_s]
        rows = Rows(node)
        rows.wait(arguments.services - 1, arguments.back_ends, SETTLE_S)
        raw["all in force after, s"] = [time.monotonic() - begin_s]
        raw["slice to row, ms"] = list(measure(store, rows, arguments))
        raw["agent for services, MB"] = [settled_mb() - without_mb]
        raw["start to answer, ms"] = [restart_ms(node) for _ in range(3)]
        raw["agent for services after a restart, MB"] = [settled_mb() - without_mb]
    sizes = {"services": arguments.services, "back ends": arguments.back_ends}
    results_file.report("services_control", sizes, raw)


def settled_mb() -> float:
    """Wait until the agent's memory stays as it is, and give it: a start leaves much to be done behind its first
    answer, and what that has freed is given back when it is over."""
    deadline = time.monotonic() + SETTLE_S
    seen = [resident_mb(agent_pid())]
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        seen.append(resident_mb(agent_pid()))
        latest = seen[-SAME_LOOKS:]
        if len(latest) == SAME_LOOKS and max(latest) - min(latest) < SAME_MB:
            return seen[-1]
    raise RuntimeError(f"the agent's memory does not settle: {seen} MB")


def make_services(store: Store, services: int, back_ends: int) -> None:
    """Write services with one slice each; no two have a back end in common."""
    for first in range(0, services, BATCH):
        with store.together():
            for index in range(first, min(first + BATCH, services)):
                for document in (service(index), slice_of(index, back_ends)):
                    store.create(document)


def service(index: int) -> StoredObject:
    """Give a Service, as the store has it."""
    document = {
        "apiVersion": "v1",
        "kind": SERVICE.name,
        "metadata": {"name": name_of(index), "namespace": "default"},
        "spec": {
            "clusterIPs": [str(vip_of(index))],
            "ports": [{"name": "http", "port": PORT, "targetPort": POD_PORT}],
        },
    }
    key = ObjectKey(SERVICE.plural, "default", name_of(index))
    return StoredObject(key=key, document=document)


def slice_of(index: int, count: int, most: int | None = None) -> StoredObject:
    """Give the EndpointSlice of a service with its first `count` back ends of at `most` so many."""
    first = FIRST_BACK_END + index * (most or count)
    document: dict[str, Any] = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": ENDPOINT_SLICE.name,
        "metadata": {
            "name": f"{name_of(index)}-1",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": name_of(index)},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": POD_PORT, "protocol": "TCP"}],
        "endpoints": [
            {
                "addresses": [str(ipaddress.IPv4Address(first + number))],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "nodeName": f"node{(first + number) % 100}",
            }
            for number in range(count)
        ],
    }
    key = ObjectKey(ENDPOINT_SLICE.plural, "default", f"{name_of(index)}-1")
    return StoredObject(key=key, document=document)


def name_of(index: int) -> str:
    """Give the name of a service."""
    return f"service{index}"


def vip_of(index: int) -> ipaddress.IPv4Address:
    """Give its address."""
    return ipaddress.IPv4Address(FIRST_VIP + index)


class Rows:
    """The services' rows in the kernel."""

    def __init__(self, node: NodePlan) -> None:
        self._map = open_node_map(node, "pw_services")

    def wait(self, index: int, back_ends: int, within_s: float = DEADLINE_S) -> None:
        """Spin until a service has so many back ends."""
        key = abi.ServiceKey(to_mapped(vip_of(index)), PORT, TCP).pack()
        deadline = time.monotonic() + within_s
        while True:
            raw = self._map.lookup(key, bpf.Update.LOCK)
            if raw is not None and abi.ServiceValue.unpack(raw).back_ends == back_ends:
                return
            if time.monotonic() > deadline:
                raise RuntimeError("the change did not reach the kernel")


def measure(store: Store, rows: Rows, arguments: argparse.Namespace) -> Iterator[float]:
    """Give milliseconds from the commit to the row."""
    chance, most = random.Random(SEED), arguments.back_ends
    gc.collect()
    for _ in range(arguments.rounds):
        index = chance.randrange(arguments.services)
        for count in (most - 1, most):
            apply_documents(store, [dict(slice_of(index, count, most).document)])
            begin_ns = time.perf_counter_ns()
            rows.wait(index, count)
            yield (time.perf_counter_ns() - begin_ns) / 1e6
            time.sleep(0.02)


if __name__ == "__main__":
    main()
