"""Where results go: one JSON file per benchmark, with the machine, the raw samples and the summary."""

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        },
        "summary": summary,
        "raw": raw,
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
