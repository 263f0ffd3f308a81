"""What the results say against the bars that podwire sets itself; the table at the end of scripts/bench."""

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.results_file import RESULTS, interval
from bench.stats import ratio_of


@dataclass(frozen=True)
class Bar:
    """One promise: where its figure stands in the results, and what it must not exceed, or must reach."""

    what: str
    benchmark: str
    path: tuple[str, ...]
    at_most: float | None = None
    at_least: float | None = None
    reached_by: str = "value"
    """`value`, or the end of the interval that decides."""
    over: str = ""
    """The series that the one named by `path` is divided by; the samples are pairs."""


def _bars_of_services() -> Iterator[Bar]:
    for count, mode in itertools.product((10, 10_000), ("nftables", "iptables")):
        where, ratio = f"{count} services / {mode}", f"ratio to {mode}"

        def path(figure: str, count: int = count, ratio: str = ratio) -> tuple[str, ...]:
            return f"{figure}, {count} services", ratio

        yield Bar(f"throughput, {where}", "services", path("Gbit/s"), at_least=1.0)
        yield Bar(f"round trip p50, {where}", "services", path("round trip p50 us"), at_most=1.0)
        yield Bar(f"new connections, {where}", "services", path("connections per s"), at_least=1.2)
    memory = ("agent's memory for many services, MB",)
    yield Bar("agent's memory for 10,000 services, MB", "services", memory, at_most=40)


BARS = (
    Bar("ADD p50 / ptp", "cni_latency", ("ADD p50",), at_most=0.5),
    Bar("ADD p90 / ptp", "cni_latency", ("ADD p90",), at_most=0.5),
    Bar("ADD p99 / ptp", "cni_latency", ("ADD p99",), at_most=1.5),
    Bar("DEL p50 / ptp", "cni_latency", ("DEL p50",), at_most=0.2),
    Bar("DEL p90 / ptp", "cni_latency", ("DEL p90",), at_most=0.2),
    Bar("DEL p99 / ptp", "cni_latency", ("DEL p99",), at_most=1.5),
    Bar("16 ADDs at once, per s / ptp", "cni_latency", ("burst",), at_least=2.0),
    Bar(
        "throughput / empty redirect",
        "throughput",
        ("Gbit/s", "ratio to redirect"),
        at_least=0.95,
        reached_by="high",
    ),
    Bar(
        "round trip p50 / empty redirect",
        "throughput",
        ("round trip p50 us", "ratio to redirect"),
        at_most=1.15,
    ),
    Bar("throughput / ptp", "throughput", ("Gbit/s", "ratio to ptp"), at_least=1.0),
    Bar("throughput / bridge", "throughput", ("Gbit/s", "ratio to bridge"), at_least=1.0),
    Bar("round trip p50 / ptp", "throughput", ("round trip p50 us", "ratio to ptp"), at_most=1.0),
    Bar(
        "round trip p50 / bridge",
        "throughput",
        ("round trip p50 us", "ratio to bridge"),
        at_most=1.0,
    ),
    Bar("agent with 250 pods, MB", "agent", ("MB after as many ADDs",), at_most=80),
    Bar("agent idle, % of a CPU", "agent", ("idle CPU, %",), at_most=1),
    Bar("start to answer with 250 pods, ms", "agent", ("start to answer, ms",), at_most=1000),
    Bar("policy change, other ports, p50 ms", "policy_live", ("other ports",), at_most=5),
    Bar("policy change, other ports, p99 ms", "policy_live", ("other ports p99",), at_most=50),
    Bar("policy change, a port more, p50 ms", "policy_live", ("a port more",), at_most=5),
    Bar("policy change, a port more, p99 ms", "policy_live", ("a port more p99",), at_most=50),
    Bar("agent with 2,000 policies, MB", "policy_live", ("agent, MB",), at_most=150),
    Bar(
        "slice to row at 10,000 services, p99 ms",
        "services_control",
        ("slice to row, ms p99",),
        at_most=20,
    ),
    Bar(
        "agent for 10,000 services, MB", "services_control", ("agent for services, MB",), at_most=40
    ),
    Bar(
        "agent for 10,000 services after a restart, MB",
        "services_control",
        ("agent for services after a restart, MB",),
        at_most=40,
    ),
    Bar(
        "first packet to one of 10,000 services / of 10",
        "service_choice",
        ("always one of many services / few",),
        at_most=1.05,
        reached_by="low",
    ),
    Bar(
        "established packet, 1,000 policies / none",
        "programs",
        ("established, 1000 policies",),
        over="established, no policy",
        at_most=1.03,
    ),
    Bar(
        "overlay throughput / plain VXLAN",
        "cross_node",
        ("overlay Gbit/s", "ratio"),
        at_least=0.95,
        reached_by="high",
    ),
    Bar(
        "overlay round trip p50 / plain VXLAN",
        "cross_node",
        ("overlay round trip p50 us", "ratio"),
        at_most=1.15,
    ),
    Bar(
        "overlay throughput / kernel, same device, rules",
        "overlay_cost",
        ("podwire Gbit/s, one CPU",),
        over="both Gbit/s, one CPU",
        at_least=0.95,
        reached_by="high",
    ),
    Bar(
        "overlay round trip p50 / kernel, same device, rules",
        "overlay_cost",
        ("podwire round trip p50 us",),
        over="both round trip p50 us",
        at_most=1.0,
    ),
    Bar(
        "native throughput / plain routing",
        "cross_node",
        ("native Gbit/s", "ratio"),
        at_least=0.95,
        reached_by="high",
    ),
    Bar(
        "native round trip p50 / plain routing",
        "cross_node",
        ("native round trip p50 us", "ratio"),
        at_most=1.15,
    ),
    Bar("short flows, refused or lost", "conntrack", ("flows refused or lost",), at_most=0),
    Bar("short flows, packets lost", "conntrack", ("packets lost or dropped",), at_most=0),
    Bar(
        "short flows, CPU for an answer / nf_conntrack",
        "conntrack",
        ("machine's CPU for one answer, us / nf_conntrack",),
        at_most=1.0,
    ),
    Bar(
        "pod on a quiet node, known identity, p99 ms",
        "convergence",
        ("pod, known identity, ms p99",),
        at_most=200,
    ),
    Bar(
        "pod on a quiet node, new identity, p99 ms",
        "convergence",
        ("pod, new identity, ms p99",),
        at_most=200,
    ),
    Bar("pod of a burst, p99 ms", "convergence", ("pod of a burst, ms p99",), at_most=1200),
    Bar(
        "node's address changed, worst ms",
        "convergence",
        ("node's address changed, ms worst",),
        at_most=1000,
    ),
    Bar("node gone, worst ms", "convergence", ("node gone, ms worst",), at_most=1000),
    Bar(
        "echoes of unaffected pods, lost",
        "convergence",
        ("echoes of unaffected pods, lost",),
        at_most=0,
    ),
    *_bars_of_services(),
    Bar("network of a pod's start p50 / ptp", "cluster", ("network p50",), at_most=0.5),
    Bar("network of a pod's start p90 / ptp", "cluster", ("network p90",), at_most=0.5),
    Bar("0 to 60 pods / ptp", "cluster", ("up",), at_most=1.05),
    Bar("60 to 0 pods / ptp", "cluster", ("down",), at_most=1.0),
    Bar("requests to the API for each pod", "cluster", ("requests per pod",), at_most=2),
    Bar(
        "ADD p99 during a full re-list / quiet, 110 pods",
        "cluster_scale",
        ("ADD p99, re-list / quiet",),
        at_most=2.0,
    ),
    Bar(
        "ADD p50 with 200 policies / without, Kubernetes",
        "cluster_scale",
        ("ADD p50, policies / none",),
        at_most=1.0,
        reached_by="low",
    ),
    Bar("requests without the right to", "cluster", ("podwire requests refused",), at_most=0),
)


def main() -> None:
    """Print the bars of the named benchmarks, or of all that have results."""
    width = max(len(bar.what) for bar in BARS)
    for bar in BARS:
        if len(sys.argv) > 1 and bar.benchmark not in sys.argv[1:]:
            continue
        for found in find_figures(bar):
            print(f"{bar.what.ljust(width)}  {judge(bar, found)}")


def find_figures(bar: Bar) -> Iterator[dict[str, float]]:
    """Give the figure that a bar names; nothing where there is no such result."""
    path = RESULTS / f"{bar.benchmark}.json"
    if not path.exists():
        return
    document: Any = json.loads(path.read_text(encoding="utf-8"))
    if bar.over:
        yield from _divide(document["raw"], bar.path[-1], bar.over)
        return
    found = document["summary"]
    for key in bar.path:
        found = found.get(key, {})
    if "ratio" in found:
        low, high = found["interval"]
        yield {"value": found["ratio"], "low": low, "high": high}
    elif "value" in found:
        yield found


def _divide(
    raw: Mapping[str, Sequence[float]], ours: str, theirs: str
) -> Iterator[dict[str, float]]:
    """Give the ratio of two series' medians; nothing when the run had not both of them."""
    if ours in raw and theirs in raw:
        yield interval(ratio_of(raw[ours], raw[theirs]))


def judge(bar: Bar, found: dict[str, float]) -> str:
    """Say whether a figure holds a bar, with the figure, its interval and the bar."""
    figure = found[bar.reached_by]
    if bar.at_most is not None:
        held, wanted = figure <= bar.at_most, f"at most {bar.at_most:g}"
    else:
        assert bar.at_least is not None
        held, wanted = figure >= bar.at_least, f"at least {bar.at_least:g}"
    shown = f"{found['value']:.3g} ({found['low']:.3g} to {found['high']:.3g})"
    return f"{'yes' if held else 'NO '}  {shown:28} {wanted}"


if __name__ == "__main__":
    main()
