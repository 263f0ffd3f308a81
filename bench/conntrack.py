"""Many short flows between the pods of one node, with default settings: does the memory of flows lose or refuse any?

Single UDP questions, as to a name server, and TCP connections of one question and one answer, each from a fresh port
(`exchanges.c`). They come no faster than answers do, so where the machine cannot keep the wanted rates the achieved
ones are lower, and the results say so. Beside them: what the programs dropped, rows and memory of the maps, the
agent's memory and CPU, what the whole machine computed, and the entries of the node's nf_conntrack.
"""

import argparse
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench import results_file
from bench.agent import agent_pid, resident_mb
from bench.contestants import LAB, compile_c, one_node, scratch
from bench.exchanges import Town, read_in, read_outcome
from bench.stats import Interval
from podwire.datapath import abi
from podwire.datapath.conntrack_maps import (
    count_conntrack,
    open_conntrack_shards,
    open_new_flows,
)
from podwire.datapath.events import hook_name, reason_name
from podwire.datapath.maps import NodeMaps, list_usage, read_metrics
from podwire.kernel import bpf
from podwire.lab import labs
from podwire.lab.state import Pod
from podwire.lab.topology import NodePlan

CLIENTS, SERVERS = 8, 2
LOOKS: Final = 36
"""How often a run is looked at, so that looking costs little."""
QUIET: Final = "quiet"
"""The reason of what pods' own kernels send and nobody misses, such as reports of IPv6 multicast listeners."""
MB: Final = 1e6


def main() -> None:
    """Measure, print the figures, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--udp", type=float, default=20_000, help="questions a second")
    parser.add_argument("--tcp", type=float, default=5_000, help="connections a second")
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    with scratch() as directory, one_node(conntrack_entries=0) as state:
        tool = compile_c("exchanges", directory)
        node = state.plan.nodes[0]
        servers = [(one.netns, one.addresses[0]) for one in _pods("server", SERVERS, node)]
        town = Town([one.netns for one in _pods("client", CLIENTS, node)], servers)
        with _node_maps(node) as maps:
            summary, raw = _measure(tool, town, node, maps, arguments)
    print(json.dumps(summary, indent=1))
    if not arguments.dry:
        results_file.write("conntrack", summary, raw)


def _pods(name: str, count: int, node: NodePlan) -> list[Pod]:
    return [labs.run(LAB, f"{name}{number}", node.name) for number in range(count)]


@contextmanager
def _node_maps(node: NodePlan) -> Iterator[NodeMaps]:
    pins = node.pins / f"v{abi.ABI_VERSION}" / "maps"
    opened: dict[str, bpf.Map] = {}
    for name in NodeMaps.names():
        found = bpf.open_any_pinned_map(str(pins / name))
        if found is None:
            raise RuntimeError(f"no map is pinned at {pins / name}")
        opened[name] = found
    maps = NodeMaps.from_opened(opened)
    try:
        yield maps
    finally:
        maps.close()


def _measure(
    tool: str, town: Town, node: NodePlan, maps: NodeMaps, arguments: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    wanted_s = arguments.seconds
    rates = {"udp": arguments.udp, "tcp": arguments.tcp}
    load_before = os.getloadavg()[0]
    memory_before, drops_before = _map_memory_mb(maps), _drops(maps)
    available_before, cpu_before = _available_mb(), _cpu_ticks()
    packets_before, agent_before = town.count_packets(), _agent_cpu_s()
    with town.start(
        tool,
        seconds=wanted_s,
        at_most_s=wanted_s,
        udp_per_s=arguments.udp,
        tcp_per_s=arguments.tcp,
    ) as running:
        raw = _watch(running, node, maps, wanted_s / LOOKS)
        found = read_outcome(running)
    cpu, agent_s = _cpu_ticks() - cpu_before, _agent_cpu_s() - agent_before
    memory, rows, available = _map_memory_mb(maps), _count_rows(maps), _available_mb()
    sent, received = town.count_packets_since(packets_before)
    drops = _drops(maps) - drops_before
    summary = {
        "seconds": found["seconds"],
        "load average before": load_before,
        **{name: _rates(found, name, rate) for name, rate in rates.items()},
        "packets sent by pods": sent,
        "packets that pods received": received,
        "packets dropped, by hook and reason": drops,
        "flows refused or lost": _exactly(
            sum(found[name]["refused"] + found[name]["lost"] for name in rates)
        ),
        "packets lost or dropped": _exactly(max(sent - received, drops.total())),
        "flows": {**_sum_usage(maps), **rows},
        "map memory, MB, by fdinfo": {"before": memory_before, "after": memory},
        "memory available less, MB": round(available_before - available, 1),
        "nf_conntrack entries, most": max(raw["nf_conntrack entries"]),
        "agent, MB, most": max(raw["agent, MB"]),
        "agent, % of a CPU": round(100 * agent_s / found["seconds"], 2),
        "machine, % of all CPUs": _shares(cpu),
    }
    return summary, raw


def _exactly(count: int) -> dict[str, float]:
    """Give a count as the table of bars reads figures."""
    return results_file.interval(Interval(count, count, count))


def _rates(found: Mapping[str, Any], name: str, rate: float) -> dict[str, float]:
    counts: dict[str, float] = dict(found[name])
    if name == "udp":
        del counts["sent_again"]
    return {
        "wanted per s": rate,
        "answered per s": round(counts["answered"] / found["seconds"], 1),
        **counts,
    }


def _watch(
    running: "subprocess.Popen[str]", node: NodePlan, maps: NodeMaps, pause_s: float
) -> dict[str, list[float]]:
    """Look again and again until the exchanges end."""
    raw: dict[str, list[float]] = {}
    while True:
        for name, value in (
            ("connections", count_conntrack(maps)),
            ("nf_conntrack entries", _nf_conntrack_entries(node.namespace)),
            ("agent, MB", resident_mb(agent_pid())),
        ):
            raw.setdefault(name, []).append(value)
        try:
            running.wait(pause_s)
        except subprocess.TimeoutExpired:
            continue
        return raw


def _nf_conntrack_entries(namespace: str) -> int:
    path = "/proc/sys/net/netfilter/nf_conntrack_count"
    return int(read_in(namespace, path))


def _drops(maps: NodeMaps) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in read_metrics(maps):
        if row.reason and reason_name(row.reason) != QUIET:
            found[f"{hook_name(row.hook)} {reason_name(row.reason)}"] += row.packets
    return found


def _count_rows(maps: NodeMaps) -> dict[str, int]:
    """Count the rows that the hashes hold, of flows that are over as well: they are written over or collected later."""
    with open_new_flows(maps) as rows:
        new = sum(1 for _ in rows.items())
        room = rows.info.max_entries
    shards = [
        (sum(1 for _ in one.items()), one.info.max_entries) for one in open_conntrack_shards(maps)
    ]
    return {
        "rows of pw_new_flows": new,
        "room of pw_new_flows": room,
        "rows of pw_conntrack": sum(count for count, _ in shards),
        "rows of its fullest shard": max(count for count, _ in shards),
        "room of pw_conntrack": sum(most for _, most in shards),
    }


def _sum_usage(maps: NodeMaps) -> dict[str, int]:
    rows = [row for _, row in list_usage(maps)]
    return {
        "passed unremembered": sum(sum(row.unremembered) for row in rows),
        "connections without room": sum(sum(row.unprotected) for row in rows),
    }


def _map_memory_mb(maps: NodeMaps) -> dict[str, float]:
    """Give what the kernel counts for the hashes of flows.

    For the one that is taken at once that is all its room. For the shards it is buckets and rows (since Linux 6.4; all
    their room before), without what the allocator keeps ready and without the rounding up of its sizes.
    """
    with open_new_flows(maps) as rows:
        new = _memlock_bytes(rows)
    shards = sum(_memlock_bytes(one) for one in open_conntrack_shards(maps))
    return {"pw_new_flows": round(new / MB, 1), "pw_conntrack": round(shards / MB, 1)}


def _memlock_bytes(one: bpf.Map) -> int:
    for line in Path(f"/proc/self/fdinfo/{one.fd}").read_text(encoding="ascii").splitlines():
        if line.startswith("memlock:"):
            return int(line.split()[1])
    raise RuntimeError("the kernel does not say how much memory a map takes")


def _available_mb() -> float:
    """Give the memory that the machine could still hand out; what else runs on it changes that too."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / MB
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _cpu_ticks() -> Counter[str]:
    """Give what all CPUs have done since the machine started, in ticks."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    words = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    return Counter(dict(zip(names, map(int, words), strict=False)))


def _shares(ticks: Counter[str]) -> dict[str, float]:
    return {name: round(100 * count / ticks.total(), 1) for name, count in ticks.items()}


def _agent_cpu_s() -> float:
    path = Path(f"/proc/{agent_pid()}/stat")
    fields = path.read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
