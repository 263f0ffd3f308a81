"""Many short flows between the pods of one node, with default settings: does what tracks them lose or refuse any?

Single UDP questions, as to a name server, and TCP connections of one question and one answer, each from a fresh port
(`exchanges.c`). They come no faster than answers do, so where the machine cannot keep the wanted rates the achieved
ones are lower, and the results say so. Beside them: what was dropped, the memory of what tracks flows, and what the
whole machine computed; of podwire also the rows of the maps and the agent.

First podwire, then a plain node whose flows the kernel's nf_conntrack tracks, with the same pods and questions.
"""

import argparse
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import nf_conntrack, results_file
from bench.agent import agent_pid, cpu_s, resident_mb
from bench.contestants import LAB, compile_c, one_node, open_node_map, scratch
from bench.exchanges import Town, read_outcome
from bench.plain_nodes import plain_node
from bench.stats import Interval
from podwire.datapath.conntrack_maps import (
    count_conntrack,
    open_conntrack_shards,
    open_new_flows,
)
from podwire.datapath.flow_events import hook_name, reason_name
from podwire.datapath.maps import NodeMaps, list_usage, read_metrics
from podwire.kernel import bpf
from podwire.lab import labs
from podwire.lab.state import Pod
from podwire.lab.topology import NodePlan

CLIENTS, SERVERS = 8, 2
RATES: Final = ("udp", "tcp")
PLAIN: Final = "nf_conntrack"
"""The contestant: a node without podwire that tracks its flows."""
LOOKS: Final = 36
"""How often a run is looked at, so that looking costs little."""
QUIET: Final = "quiet"
"""The reason of what pods' own kernels send and nobody misses, such as reports of IPv6 multicast listeners."""
MB: Final = 1e6
ANSWERED: Final = "answered per s"
CPU_EACH: Final = "machine's CPU for one answer, us"

Figures = dict[str, Any]
Series = dict[str, list[float]]


@dataclass(frozen=True)
class Questions:
    """What is asked of each contestant."""

    tool: str
    seconds: float
    per_s: Mapping[str, float]


def main() -> None:
    """Measure, print the figures, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180, help="for each contestant")
    parser.add_argument("--udp", type=float, default=20_000, help="questions a second")
    parser.add_argument("--tcp", type=float, default=5_000, help="connections a second")
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    with scratch() as directory:
        questions = Questions(
            compile_c("exchanges", directory),
            arguments.seconds,
            {name: getattr(arguments, name) for name in RATES},
        )
        (summary, raw), (theirs, their_raw) = ask_podwire(questions), ask_plain(questions)
    summary |= {f"{what} / {PLAIN}": _ratio(summary, theirs, what) for what in (ANSWERED, CPU_EACH)}
    summary[PLAIN] = theirs
    print(json.dumps(summary, indent=1))
    if not arguments.dry:
        raw |= {f"{PLAIN}: {what}": series for what, series in their_raw.items()}
        results_file.write("conntrack", summary, raw)


def _ratio(ours: Figures, theirs: Figures, what: str) -> dict[str, float]:
    """Compare the contestants; there is one run of each, so the ends of the interval are the figure itself."""
    return _exactly(ours[what] / theirs[what])


def ask_podwire(questions: Questions) -> tuple[Figures, Series]:
    """Measure podwire on a node of its own, with default settings."""
    with one_node(conntrack_entries=0) as state:
        node = state.plan.nodes[0]
        servers = [(pod.netns, pod.addresses[0]) for pod in _pods("server", SERVERS, node)]
        town = Town([pod.netns for pod in _pods("client", CLIENTS, node)], servers)
        with _node_maps(node) as maps:
            return _measure_podwire(questions, town, node, maps)


def ask_plain(questions: Questions) -> tuple[Figures, Series]:
    """Measure the kernel alone on a node that tracks every flow, with the kernel's limits and times."""
    with plain_node(LAB, CLIENTS + SERVERS) as (node, pods):
        town = Town([namespace for namespace, _ in pods[SERVERS:]], pods[:SERVERS])
        return _measure_plain(questions, town, node)


def _pods(name: str, count: int, node: NodePlan) -> list[Pod]:
    return [labs.run(LAB, f"{name}{number}", node.name) for number in range(count)]


@contextmanager
def _node_maps(node: NodePlan) -> Iterator[NodeMaps]:
    maps = NodeMaps.from_opened({name: open_node_map(node, name) for name in NodeMaps.names()})
    try:
        yield maps
    finally:
        maps.close()


def _measure_podwire(
    questions: Questions, town: Town, node: NodePlan, maps: NodeMaps
) -> tuple[Figures, Series]:
    memory_before, drops_before, agent_before = (
        _map_memory_mb(maps),
        _drops(maps),
        cpu_s(agent_pid()),
    )
    figures, raw = _ask(
        questions,
        town,
        lambda: {
            "connections": count_conntrack(maps),
            "nf_conntrack entries": nf_conntrack.count_entries(node.namespace),
            "agent, MB": resident_mb(agent_pid()),
        },
    )
    agent_s = cpu_s(agent_pid()) - agent_before
    drops = _drops(maps) - drops_before
    return figures | {
        "packets dropped, by hook and reason": drops,
        "packets lost or dropped": _exactly(max(_missing(figures), drops.total())),
        "flows": {**_sum_usage(maps), **_count_rows(maps)},
        "map memory, MB, by fdinfo": {"before": memory_before, "after": _map_memory_mb(maps)},
        "nf_conntrack entries, most": max(raw["nf_conntrack entries"]),
        "agent, MB, most": max(raw["agent, MB"]),
        "agent, % of a CPU": round(100 * agent_s / figures["seconds"], 2),
    }, raw


def _measure_plain(questions: Questions, town: Town, node: NodePlan) -> tuple[Figures, Series]:
    cache_before = nf_conntrack.read_cache()
    figures, raw = _ask(
        questions,
        town,
        lambda: {
            "nf_conntrack entries": nf_conntrack.count_entries(node.namespace),
            "objects of the machine's cache": nf_conntrack.read_cache().objects,
        },
    )
    losses = nf_conntrack.read_losses(node.namespace)
    most = max(raw["nf_conntrack entries"])
    objects = max(raw["objects of the machine's cache"]) - cache_before.objects
    entry_bytes = cache_before.entry_bytes
    return figures | {
        "packets lost or dropped": _exactly(max(_missing(figures), losses["drop"])),
        "nf_conntrack entries, most": most,
        "nf_conntrack room": nf_conntrack.read_most(node.namespace),
        "nf_conntrack losses": losses,
        "nf_conntrack memory, MB": {
            "entries, most": round(most * entry_bytes / MB, 1),
            "cache, more than before": round(objects * entry_bytes / MB, 1),
            "hash table": round(nf_conntrack.table_bytes(node.namespace) / MB, 1),
        },
    }, raw


def _ask(
    questions: Questions, town: Town, look: Callable[[], Mapping[str, float]]
) -> tuple[Figures, Series]:
    """Ask everything and look again and again; gives the figures that every contestant has, and what was seen."""
    load_before = os.getloadavg()[0]
    packets_before, cpu_before = town.count_packets(), _cpu_ticks()
    with town.start(
        questions.tool,
        seconds=questions.seconds,
        at_most_s=questions.seconds,
        udp_per_s=questions.per_s["udp"],
        tcp_per_s=questions.per_s["tcp"],
    ) as running:
        raw = _watch(running, look, questions.seconds / LOOKS)
        found = read_outcome(running)
    del found["udp"]["sent_again"]
    cpu = _cpu_ticks() - cpu_before
    sent, received = town.count_packets_since(packets_before)
    asked_s = min(found["seconds"], questions.seconds)
    answered = sum(found[name]["answered"] for name in RATES)
    return {
        "seconds": found["seconds"],
        "load average before": load_before,
        **{name: _rates(found[name], questions.per_s[name], asked_s) for name in RATES},
        ANSWERED: round(answered / asked_s, 1),
        "flows refused or lost": _exactly(
            sum(found[name]["refused"] + found[name]["lost"] for name in RATES)
        ),
        "packets sent by pods": sent,
        "packets that pods received": received,
        "machine, % of all CPUs": _shares(cpu),
        CPU_EACH: round(_busy_s(cpu) * 1e6 / answered, 2),
    }, raw


def _missing(figures: Figures) -> int:
    missing: int = figures["packets sent by pods"] - figures["packets that pods received"]
    return missing


def _rates(counts: Mapping[str, float], wanted_per_s: float, asked_s: float) -> dict[str, float]:
    """Give the counts of one protocol; what is missing at the end is waited for, and not part of the rate."""
    answered_per_s = round(counts["answered"] / asked_s, 1)
    return {"wanted per s": wanted_per_s, "answered per s": answered_per_s, **counts}


def _watch(
    running: "subprocess.Popen[str]", look: Callable[[], Mapping[str, float]], pause_s: float
) -> Series:
    """Look again and again until the exchanges end."""
    raw: Series = {}
    while True:
        for name, value in look().items():
            raw.setdefault(name, []).append(value)
        try:
            running.wait(pause_s)
        except subprocess.TimeoutExpired:
            continue
        return raw


def _exactly(count: float) -> dict[str, float]:
    """Give a count as the table of bars reads figures."""
    return results_file.interval(Interval(count, count, count))


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
        (sum(1 for _ in shard.items()), shard.info.max_entries)
        for shard in open_conntrack_shards(maps)
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
    shards = sum(_memlock_bytes(shard) for shard in open_conntrack_shards(maps))
    return {"pw_new_flows": round(new / MB, 1), "pw_conntrack": round(shards / MB, 1)}


def _memlock_bytes(counted: bpf.Map) -> int:
    for line in Path(f"/proc/self/fdinfo/{counted.fd}").read_text(encoding="ascii").splitlines():
        if line.startswith("memlock:"):
            return int(line.split()[1])
    raise RuntimeError("the kernel does not say how much memory a map takes")


def _cpu_ticks() -> Counter[str]:
    """Give what all CPUs have done since the machine started, in ticks."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    words = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    return Counter(dict(zip(names, map(int, words), strict=False)))


def _shares(ticks: Counter[str]) -> dict[str, float]:
    return {name: round(100 * count / ticks.total(), 1) for name, count in ticks.items()}


def _busy_s(ticks: Counter[str]) -> float:
    others = sum(ticks[name] for name in ("idle", "iowait", "steal"))
    return (ticks.total() - others) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
