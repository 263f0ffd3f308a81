"""What one packet costs in each program, in ns: the kernel's clock around test runs of the shipped objects."""

import argparse
import time
from contextlib import ExitStack

from bench import results_file
from bench.stats import median_of
from tests.packet.rig import PROGRAMS, load_objects
from tests.packet.timing import in_rounds, open_bench, run_once

LOADS = 10


def time_loads() -> list[float]:
    """Give the milliseconds that it takes to verify and load all programs, several times."""
    series = []
    for _ in range(LOADS):
        with ExitStack() as stack:
            begun = time.perf_counter()
            load_objects(PROGRAMS, stack, build="")
            series.append((time.perf_counter() - begun) * 1000)
    return series


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    samples: dict[str, list[float]] = {}
    with open_bench() as (rig, cases):
        for case in in_rounds(cases, arguments.rounds):
            samples.setdefault(case.name, []).append(run_once(rig, case))
    summary = {}
    print("\nns for one packet, median (95 % interval), lowest")
    for name, series in samples.items():
        found = median_of(series)
        print(f"  {name:46} {found!s:24} {min(series):.0f}")
        summary[name] = {**results_file.interval(found), "lowest": min(series)}
    samples["load of all programs, ms"] = time_loads()
    found = median_of(samples["load of all programs, ms"])
    print(f"ms to load all programs: {found!s}")
    summary["load of all programs, ms"] = results_file.interval(found)
    results_file.write("programs", summary, samples)


if __name__ == "__main__":
    main()
