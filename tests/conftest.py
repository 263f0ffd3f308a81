"""Tiers, counts, workers and the listing of what was skipped, for every test.

A test belongs to the tier of its folder (tests/lab -> `lab`) or of its marker; `--tiers` says which run, bare `pytest`
runs `unit`, which needs no privilege. `--full` raises the counts of randomised tests, and lets them begin with a seed
that nobody has tried. `scripts/test` spreads all over workers (spread.py) and shows where they are (progress.py).
"""

import gc
import os
import random
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import leavings
from tests.progress import Progress
from tests.spread import put_longest_first

TIERS = ("unit", "packet", "kernel", "lab", "runtime", "cluster", "vm")
_FOLDER_TIERS = {"contract": "unit"}
_SLOW_TIERS = ("packet", "kernel", "lab", "runtime", "cluster")
_SLOW_TIMEOUT_S = 1800 if "PODWIRE_GUEST" in os.environ else 900
"""What a test with processes and namespaces may take where nothing else is said: others may keep the machine busy, and
emulators (tests/vm) take many times as long.
"""

FIXED_SEED = 20_261
"""What randomised tests begin with where nobody asks for more: a change is judged by the same cases each time."""

# How long an example takes says something of the machine: it may stand still for seconds.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", _PATIENT, derandomize=True)
settings.register_profile("short", _PATIENT, print_blob=True)
settings.register_profile("full", _PATIENT, max_examples=1000, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("podwire")
    group.addoption("--tiers", default="unit", help="comma-separated tiers to run")
    group.addoption("--full", action="store_true", help="large counts of randomised tests")
    group.addoption("--seed", type=int, default=None, help="seed of randomised tests")
    group.addoption("--learn", action="store_true", help="write tests/seconds.json (with workers)")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from going through ten thousand tests again and again: none of them is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out folders whose tier is not wanted; every worker would read them. Folder unit has other tiers, too."""
    tier = collection_path.name
    is_other = collection_path.parent == Path(__file__).parent and tier in TIERS and tier != "unit"
    return True if is_other and tier not in _wanted_tiers(config) else None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    _choose_cases(config)
    if _may_leave_something() and not _is_worker(config) and not config.option.collectonly:
        removal = leavings.remove_leavings()
        for left in removal.removed:
            print(f"removed what a run left that was killed: {left}")
        for left in removal.failed:
            print(
                f"could not remove what a run left that was killed (the next run tries again): {left}"
            )
    leavings.mark_children()
    if _is_worker(config):
        # What the hander-out proposes is a directory in its /tmp; ours may be another (scripts/own-room).
        config.option.basetemp = tempfile.mkdtemp(prefix="pytest-")
    elif config.getoption("--tx"):
        config.pluginmanager.register(Progress(config))


def _choose_cases(config: pytest.Config) -> None:
    """Let randomised tests take their fixed cases, or search: with `--full`, or from a seed that was given."""
    full = config.getoption("--full")
    seed = config.option.seed
    if seed is None:
        seed = int(os.environ.get("PODWIRE_SEED") or (_random_seed() if full else FIXED_SEED))
    config.option.seed = seed
    if full or seed != FIXED_SEED:
        config.option.hypothesis_seed = str(seed)
    settings.load_profile("full" if full else "short" if seed != FIXED_SEED else "fixed")


def _random_seed() -> int:
    return random.SystemRandom().randrange(1 << 32)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_report_header(config: pytest.Config) -> str:
    counts = "full" if config.getoption("--full") else "short"
    return (
        f"podwire: tiers {config.getoption('--tiers')}, {counts} counts, "
        f"seed {config.getoption('--seed')} (repeat with --seed)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = _wanted_tiers(config)
    unknown = wanted - set(TIERS)
    if unknown:
        raise pytest.UsageError(f"unknown tiers: {', '.join(sorted(unknown))}")
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        (kept if _tier(item) in wanted else left).append(item)
    for item in kept:
        if _tier(item) in _SLOW_TIERS and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_SLOW_TIMEOUT_S))
    config.hook.pytest_deselected(items=left)
    items[:] = sorted(kept, key=lambda item: TIERS.index(_tier(item)))
    if _is_worker(config):
        put_longest_first(items)


def _wanted_tiers(config: pytest.Config) -> set[str]:
    return set(config.getoption("--tiers").split(","))


def _tier(item: pytest.Item) -> str:
    for tier in reversed(TIERS):
        if item.get_closest_marker(tier):
            return tier
    folder = item.nodeid.split("/")[1] if "/" in item.nodeid else "unit"
    folder = _FOLDER_TIERS.get(folder, folder)
    return folder if folder in TIERS else "unit"


def _may_leave_something() -> bool:
    """Tell whether tests can make namespaces and pins here at all."""
    return os.geteuid() == 0


@pytest.fixture(scope="session", autouse=True)
def _is_noted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the next run know what is to be removed if this one is killed."""
    if not _may_leave_something():
        yield
        return
    with leavings.noted(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(scope="session", autouse=True)
def _programs_start_quickly() -> Iterator[None]:
    """Spare the many programs that tests start what they have no use for."""
    with pytest.MonkeyPatch.context() as patch:
        # API servers and others in Go may grow before they collect garbage: they live shortly.
        patch.setenv("GOGC", "400")
        # aiohttp reads what this machine trusts when it is imported, which is a tenth of an agent's start. Tests have
        # no way out, and trust authorities of their own.
        for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
            patch.setenv(name, os.devnull)
        yield


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Tell whether large counts are asked for."""
    return bool(request.config.getoption("--full"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Give the run's seed, printed in the header and again when the test fails."""
    value = int(request.config.getoption("--seed"))
    print(f"seed {value}")
    return value


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason] = reasons.get(reason, 0) + 1
    if reasons:
        terminalreporter.section("not run on this machine")
        for reason, count in sorted(reasons.items()):
            terminalreporter.line(f"{count:5} {reason.removeprefix('Skipped: ')}")
