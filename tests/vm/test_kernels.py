"""Programs pass the verifier of Debian 12's own kernel and of 6.12, and do there what they do here.

Each kernel is booted once under emulation and runs the tier `packet`, the datapath's contract (real pods,
the programs as they are shipped), the tests of the policy maps and the traffic between nodes inside; a test here stands
for one file of those.
"""

import functools
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import leavings
from tests.vm.guest import (
    CACHE,
    KERNELS,
    ROOT,
    GuestUnavailable,
    boot,
    build_root,
    fetch_kernel,
)

pytestmark = [pytest.mark.vm, pytest.mark.timeout(4500)]

DEADLINE_S = 4200
"""A busy machine takes several times what one takes that is left alone."""
TOO_SLOW = frozenset({"test_floods.py"})
"""Hundreds of thousands of packets, one by one: half an hour under emulation, and the same in every kernel. Guests run
test_small_floods.py instead.
"""
FILES = (
    *sorted(
        f"tests/packet/{path.name}"
        for path in (ROOT / "tests" / "packet").glob("test_*.py")
        if path.name not in TOO_SLOW
    ),
    "tests/contract/test_datapath.py",
    "tests/kernel/test_policy_maps.py",
    "tests/kernel/test_overlay_programs.py",
    "tests/kernel/test_cluster_traffic.py",
)
COMMAND = (
    f"python3 -m pytest {' '.join(FILES)} --tiers packet,kernel"
    " -q -rap --tb=short --color=no -p no:cacheprovider"
)
_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED)\s+(?:\[\d+\] )?((tests/[^:\s]+\.py)\S*)", re.M)


@dataclass(frozen=True)
class GuestRun:
    """What one kernel said."""

    release: str
    output: str
    """What the command printed, and behind it the exit code."""
    outcomes: Mapping[str, list[tuple[str, str]]]
    """By file: (outcome, test)."""


@functools.cache
def _run(version: str) -> GuestRun | Exception:
    """Run a guest once, whatever comes of it: each of its tests is told."""
    try:
        with tempfile.TemporaryDirectory(prefix=leavings.NAME) as directory:
            return _read(*_boot(version, Path(directory)))
    except Exception as error:  # of any kind: it is raised by each test
        return error


def _boot(version: str, directory: Path) -> tuple[str, str]:
    CACHE.mkdir(parents=True, exist_ok=True)
    kernel = fetch_kernel(version, CACHE)
    root = build_root(directory, FILES)
    return kernel.release, boot(kernel, root, COMMAND, directory, DEADLINE_S)


def _read(release: str, output: str) -> GuestRun:
    outcomes: dict[str, list[tuple[str, str]]] = {name: [] for name in FILES}
    for outcome, test, name in _LINE.findall(output):
        outcomes.setdefault(name, []).append((outcome, test))
    return GuestRun(release, output, outcomes)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("version", KERNELS)
def test_packet_tests_pass_in_kernel(version: str, name: str) -> None:
    run = _run(version)
    if isinstance(run, GuestUnavailable):
        pytest.skip(f"kernel {version}: {run}")
    if isinstance(run, Exception):
        raise run
    assert run.release.startswith(f"{version}.")
    bad = [f"{outcome} {test}" for outcome, test in run.outcomes[name] if outcome != "PASSED"]
    assert not bad, f"on {run.release}:\n" + "\n".join(bad) + "\n" + _failures(run.output)
    assert run.outcomes[name], f"no test of {name} ran on {run.release}:\n{run.output[-4000:]}"


def _failures(output: str) -> str:
    """Cut the tracebacks out of what the guest's pytest printed."""
    started = re.search(r"^=+ (?:FAILURES|ERRORS) =+$", output, re.M)
    ended = re.search(r"^=+ (?:PASSES|short test summary info) =+$", output, re.M)
    if started is None or ended is None:
        return output[-4000:]
    return output[started.start() : ended.start()][-8000:]
