"""Where results go: one JSON file per benchmark, with the machine, the raw samples and the summary."""

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.stats import Interval

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
