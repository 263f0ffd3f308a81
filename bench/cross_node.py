"""Throughput and round trips between pods of two nodes: podwire's overlay and native routing, and the plain kernel.

The plain kernel is a veth pair for each pod, routes, and for the overlay a VXLAN device on each node. All four have
the same underlay (a lab's: a bridge and one veth pair per node) and, pair by pair, the same MTU. Every round measures
all of them, in an order that turns from round to round. For throughput each end of the connection has a CPU of its
own; for round trips both share one, because otherwise it is measured how fast an idle CPU wakes up.
"""

import argparse
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from bench import results_file
from bench.contestants import compile_c, scratch
from bench.pair import PodPair, run_flow
from bench.plain_nodes import plain_pair
from bench.stats import in_turns, median_of, ratio_of
from podwire.lab import labs
from podwire.lab.topology import LabShape

STREAM_MS: Final = 2000
ROUND_TRIPS: Final = 20_000
TWO_CPUS, ONE_CPU = ("0", "1"), ("1", "1")
OURS: Final = {"overlay": "plain VXLAN", "native": "plain routing"}
"""Each of ours, and whom it is compared with."""
FIGURES: Final = ("Gbit/s", "round trip p50 us", "round trip p90 us", "round trip p99 us")


@contextmanager
def lab_pair(name: str, routing: str) -> Iterator[PodPair]:
    """Give two pods of a lab of two nodes; on leaving the lab goes."""
    state = labs.up(
        name, LabShape(nodes=2, families="4", routing=routing), progress=labs.say_nothing
    )
    try:
        client, server = (
            labs.run(name, f"pod{number}", node.name)
            for number, node in enumerate(state.plan.nodes)
        )
        yield PodPair(client.netns, server.netns, server.addresses[0], _mtu_of(server.netns))
    finally:
        labs.down(name, progress=labs.say_nothing)


def _mtu_of(namespace: str) -> int:
    words = ["ip", "-n", namespace, "-o", "link", "show", "dev", "eth0"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return int(shown.partition(" mtu ")[2].split()[0])


CONTESTANTS: Final = {
    "overlay": partial(lab_pair, "bench-o", "overlay"),
    "plain VXLAN": partial(plain_pair, "bench-v", tunnel=True),
    "native": partial(lab_pair, "bench-n", "native"),
    "plain routing": partial(plain_pair, "bench-r", tunnel=False),
}


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=OURS, help="one of ours and whom it is compared with")
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    names = [
        name
        for ours, theirs in OURS.items()
        for name in (ours, theirs)
        if arguments.only in (None, ours)
    ]
    samples: dict[str, list[float]] = {}
    with ExitStack() as stack:
        tool = compile_c("flow", stack.enter_context(scratch()))
        pairs = {name: stack.enter_context(CONTESTANTS[name]()) for name in names}
        _require_same_mtu(pairs)
        for name in in_turns(names, arguments.rounds):
            _measure(tool, name, pairs[name], samples)
    summary = _summarise(samples, [name for name in OURS if name in names])
    if not arguments.dry:
        only = f"_{arguments.only}" if arguments.only else ""
        results_file.write(f"cross_node{only}", summary, samples)


def _require_same_mtu(pairs: Mapping[str, PodPair]) -> None:
    """Larger packets would be an advantage that nobody measures here."""
    for ours, theirs in OURS.items():
        if ours in pairs and pairs[ours].mtu != pairs[theirs].mtu:
            raise RuntimeError(
                f"{ours} has MTU {pairs[ours].mtu}, {theirs} {pairs[theirs].mtu}: not comparable"
            )


def _measure(tool: str, name: str, pair: PodPair, samples: dict[str, list[float]]) -> None:
    moved_bytes, elapsed_ns = run_flow(tool, "stream", pair, STREAM_MS, TWO_CPUS)
    round_trips_ns = run_flow(tool, "ask", pair, ROUND_TRIPS, ONE_CPU)
    figures = (moved_bytes * 8 / elapsed_ns, *(trip_ns / 1e3 for trip_ns in round_trips_ns))
    for what, figure in zip(FIGURES, figures, strict=True):
        samples.setdefault(f"{name} {what}", []).append(round(figure, 3))


def _summarise(samples: Mapping[str, list[float]], ours: Sequence[str]) -> dict[str, object]:
    summary: dict[str, object] = {}
    print(f"\n{'':30}{'podwire':>24}{'plain kernel':>24}   podwire / plain (95 % interval)")
    for name in ours:
        for what in FIGURES:
            own, others = samples[f"{name} {what}"], samples[f"{OURS[name]} {what}"]
            found, against = median_of(own), median_of(others)
            ratio = ratio_of(own, others)
            print(f"{name + ' ' + what:30}{found!s:>24}{against!s:>24}   {ratio}")
            summary[f"{name} {what}"] = {
                "podwire": results_file.interval(found),
                OURS[name]: results_file.interval(against),
                "ratio": results_file.interval(ratio),
            }
    return summary


if __name__ == "__main__":
    main()
