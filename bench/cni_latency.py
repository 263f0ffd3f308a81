"""ADD and DEL against Go `ptp` + `host-local`: paired and alternating, then sixteen at once."""

import argparse
import os
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from bench import results_file
from bench.contestants import Contestant, pod_namespace, two_contestants
from bench.stats import quantile, ratio_of

SETTLE_S = 0.08
"""Between two turns: both leave work behind in the kernel (device deletion) that holds the lock both need."""
BURST = 16
GATHER_S = 0.5
"""Until all tracers of a burst stand at the gate."""


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--bursts", type=int, default=8)
    parser.add_argument("--policies", type=int, default=100, help="on podwire's node")
    arguments = parser.parse_args()
    samples: dict[str, list[float]] = {}
    with two_contestants(arguments.policies) as contestants:
        for (
            contestant
        ) in contestants:  # the first call of each reads files that later ones find in memory
            one_life(contestant, {})
        for pair in range(arguments.pairs):
            order = contestants if pair % 2 == 0 else contestants[::-1]
            for contestant in order:
                one_life(contestant, samples)
                time.sleep(SETTLE_S)
            if pair % 50 == 49:
                print(f"{pair + 1} pairs", flush=True)
        rates: dict[str, list[float]] = {entrant.name: [] for entrant in contestants}
        for number in range(arguments.bursts):
            order = contestants if number % 2 == 0 else contestants[::-1]
            for contestant in order:
                rates[contestant.name].append(burst(contestant))
                time.sleep(10 * SETTLE_S)
    summary = summarise(samples, rates)
    results_file.write("cni_latency", summary, {**samples, "burst_adds_per_s": rates})


def one_life(contestant: Contestant, samples: dict[str, list[float]]) -> None:
    """Do one ADD and one DEL."""
    container_id = uuid.uuid4().hex
    with pod_namespace() as namespace:
        for command in ("ADD", "DEL"):
            begin_ms, end_ms = contestant.call(command, container_id, namespace)
            samples.setdefault(f"{contestant.name} {command}", []).append(end_ms - begin_ms)


def burst(contestant: Contestant) -> float:
    """Do BURST ADDs at once; gives ADDs per second from the first start to the last end."""
    with ExitStack() as stack:
        namespaces = [stack.enter_context(pod_namespace()) for _ in range(BURST)]
        jobs = [(uuid.uuid4().hex, namespace) for namespace in namespaces]
        gate = contestant.directory / "gate"
        os.mkfifo(gate)
        with ThreadPoolExecutor(BURST) as threads:
            calls = [threads.submit(contestant.call, "ADD", *job, str(gate)) for job in jobs]
            time.sleep(GATHER_S)
            os.close(os.open(gate, os.O_WRONLY))
            times_ms = [call.result() for call in calls]
        gate.unlink()
        for job in jobs:
            contestant.call("DEL", *job)
    first_ms = min(begin_ms for begin_ms, _ in times_ms)
    last_ms = max(end_ms for _, end_ms in times_ms)
    return BURST / (last_ms - first_ms) * 1e3


def _figures() -> dict[str, Callable[[Sequence[float]], float]]:
    return {
        "p50": lambda samples: quantile(samples, 0.5),
        "p90": lambda samples: quantile(samples, 0.9),
        "p99": lambda samples: quantile(samples, 0.99),
    }


def summarise(
    samples: dict[str, list[float]], rates: dict[str, list[float]]
) -> dict[str, dict[str, object]]:
    """Compute and print the table."""
    summary: dict[str, dict[str, object]] = {}
    print(f"\n{'':10}{'podwire ms':>12}{'ptp ms':>10}   ratio (95 % interval)")
    for command in ("ADD", "DEL"):
        ours, theirs = samples[f"podwire {command}"], samples[f"ptp {command}"]
        for name, figure in _figures().items():
            ratio = ratio_of(ours, theirs, figure)
            print(f"{command} {name:6}{figure(ours):12.2f}{figure(theirs):10.2f}   {ratio}")
            summary[f"{command} {name}"] = {
                "podwire_ms": figure(ours),
                "ptp_ms": figure(theirs),
                "ratio": ratio.value,
                "interval": [ratio.low, ratio.high],
            }
    ours, theirs = rates["podwire"], rates["ptp"]
    ratio = ratio_of(ours, theirs)
    print(
        f"{BURST} at once, ADD/s {quantile(ours, 0.5):.0f} against {quantile(theirs, 0.5):.0f}: ratio {ratio}"
    )
    summary["burst"] = {"ratio": ratio.value, "interval": [ratio.low, ratio.high]}
    return summary


if __name__ == "__main__":
    main()
