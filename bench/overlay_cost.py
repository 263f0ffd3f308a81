"""What a packet of the overlay costs, cause by cause: the plain kernel, and with what podwire's nodes have besides.

"rules" are nftables rules for masquerade, which bring connection tracking and address translation into the way of every
tunnel packet, exempt or not; "flow-based" is a VXLAN device that is told each packet's receiver and tells each
packet's sender, as podwire's. "podwire, no rules" has its agents killed and its table of nftables taken away: what is
left is its device and its programs. "podwire, out past the stack" has its rules, but a program writes the outer
headers, so that neither they nor the device see what leaves (past_stack.py). "podwire, in past the stack" has one that
takes off the headers of what arrives. With both ("podwire, past the stack") podwire's programs are what is left.
CUBIC, because BBR (the default of some kernels) goes by timers and sends from two CPUs: its throughput is that of its
guesses.
"""

import argparse
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from bench import results_file
from bench.contestants import compile_c, scratch
from bench.cross_node import ONE_CPU, ROUND_TRIPS, TWO_CPUS, lab_pair
from bench.pair import PodPair, run_flow
from bench.past_stack import lab_pair_past_stack
from bench.plain_nodes import plain_pair, run_in
from bench.stats import in_turns, median_of, ratio_of
from podwire.lab.node import stop_agent
from podwire.lab.state import read_state
from podwire.model.ids import NFT_TABLE


@contextmanager
def lab_pair_without_rules(name: str) -> Iterator[PodPair]:
    """Give two pods of an overlay whose nodes have no rules, nor an agent that would write them anew."""
    with lab_pair(name, "overlay") as pair:
        state = read_state(name)
        for node in state.plan.nodes:
            stop_agent(state, node, signal.SIGKILL)
            run_in(node.namespace, ["nft", f"delete table inet {NFT_TABLE}"])
        yield pair


STREAM_MS: Final = 1000
CONGESTION_CONTROL: Final = "cubic"
PLAIN: Final = "plain"
CONTESTANTS: Final = {
    PLAIN: partial(plain_pair, "bench-p", tunnel=True),
    "rules": partial(plain_pair, "bench-q", tunnel=True, masquerade=True),
    "flow-based": partial(plain_pair, "bench-f", tunnel=True, flow_based=True),
    "both": partial(plain_pair, "bench-b", tunnel=True, flow_based=True, masquerade=True),
    "podwire": partial(lab_pair, "bench-o", "overlay"),
    "podwire, no rules": partial(lab_pair_without_rules, "bench-w"),
    "podwire, out past the stack": partial(lab_pair_past_stack, "bench-h", arriving=False),
    "podwire, in past the stack": partial(lab_pair_past_stack, "bench-i", leaving=False),
    "podwire, past the stack": partial(lab_pair_past_stack, "bench-s"),
}
FIGURES: Final = ("Gbit/s, one CPU", "Gbit/s, two CPUs", "round trip p50 us")


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    samples: dict[str, list[float]] = {}
    names = list(CONTESTANTS)
    with ExitStack() as stack:
        tool = compile_c("flow", stack.enter_context(scratch()))
        pairs = {name: stack.enter_context(CONTESTANTS[name]()) for name in names}
        for name in in_turns(names, arguments.rounds):
            _measure(tool, name, pairs[name], samples)
    results_file.write("overlay_cost", _summarise(samples), samples)


def _measure(tool: str, name: str, pair: PodPair, samples: dict[str, list[float]]) -> None:
    round_trip_ns, *_ = run_flow(tool, "ask", pair, ROUND_TRIPS, ONE_CPU)
    figures = [
        *(_stream(tool, pair, cpus) for cpus in (ONE_CPU, TWO_CPUS)),
        round_trip_ns / 1e3,
    ]
    for what, figure in zip(FIGURES, figures, strict=True):
        samples.setdefault(f"{name} {what}", []).append(round(figure, 3))


def _stream(tool: str, pair: PodPair, cpus: tuple[str, str]) -> float:
    moved_bytes, elapsed_ns = run_flow(tool, "stream", pair, STREAM_MS, cpus, CONGESTION_CONTROL)
    return moved_bytes * 8 / elapsed_ns


def _summarise(samples: Mapping[str, list[float]]) -> dict[str, object]:
    summary: dict[str, object] = {}
    for what in FIGURES:
        print(f"\n{what:24}{'median':>24}   / plain (95 % interval)")
        for name in CONTESTANTS:
            own, plain = samples[f"{name} {what}"], samples[f"{PLAIN} {what}"]
            found, ratio = median_of(own), ratio_of(own, plain)
            print(f"  {name:22}{found!s:>24}   {ratio}")
            summary[f"{name} {what}"] = {
                "median": results_file.interval(found),
                "ratio": results_file.interval(ratio),
            }
    return summary


if __name__ == "__main__":
    main()
