"""What one packet costs in each program, in ns: the kernel's clock around test runs of the shipped objects."""

import argparse

from bench import results_file
from bench.stats import median_of
from tests.packet.timing import in_rounds, open_bench, run_once


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
    results_file.write("programs", summary, samples)


if __name__ == "__main__":
    main()
