"""Where results go: one JSON file per benchmark, with the machine, the raw samples and the summary."""

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.stats import Interval, median_of, quantile

RESULTS = Path(__file__).resolve().parent / "results"


def write(name: str, summary: Mapping[str, Any], raw: Mapping[str, Any]) -> Path:
    """Write the results of one benchmark; the file of an earlier run is replaced."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    document = {
        "benchmark": name,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "cpu": _cpu_model(),
            "python": platform.python_version(),
            "load_average": [round(load, 1) for load in os.getloadavg()],
        },
        "summary": summary,
        "raw": raw,
    }
    path.write_text(_compact(document) + "\n", encoding="utf-8")
    return path


def read_samples(name: str) -> dict[str, list[float]]:
    """Read the samples of an earlier run of a benchmark; none where there was none."""
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))["raw"]) if path.exists() else {}


def _compact(document: Mapping[str, Any]) -> str:
    """Write JSON with one line for each series of samples: the files are kept, and read as differences."""
    lines = []
    for key, value in document.items():
        if key == "raw":
            series = ",\n".join(
                f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in value.items()
            )
            lines.append(f' "raw": {{\n{series}\n }}')
        else:
            text = json.dumps({key: value}, indent=1)
            lines.append(text.removeprefix("{\n").removesuffix("\n}"))
    return "{\n" + ",\n".join(lines) + "\n}"


def report(name: str, sizes: Mapping[str, Any], raw: Mapping[str, list[float]]) -> None:
    """Print and write the median of each series, and its 99th percentile."""
    print(f"\nwith {sizes}: median (95 % interval), p99")
    summary = dict(sizes)
    for what, series in raw.items():
        found, p99 = median_of(series), quantile(series, 0.99)
        print(f"  {what:40} {found!s:28} {p99:.2f}")
        summary[what] = interval(found)
        summary[f"{what} p99"] = {"value": p99, "low": p99, "high": p99}
    write(name, summary, raw)


def interval(found: Interval) -> dict[str, float]:
    """Give a figure and its 95 % interval, as the results have it."""
    return {
        name: float(f"{value:.4g}")
        for name, value in (("value", found.value), ("low", found.low), ("high", found.high))
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
