"""Tell how far the workers of `scripts/test` are: a line every while, and at once what failed.

Lives in the process that hands the tests out (spread.py). The forecast knows what groups took elsewhere, and how fast
this machine was until now.
"""

import threading
import time
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Final

import pytest
from xdist.remote import Producer
from xdist.workermanage import WorkerController, parse_tx_spec_config

from tests.spread import Spreading, expect_seconds, group_of, write_seconds

LINE_S: Final = 15.0
NAMED_S: Final = 30.0
"""A test that has run for so long is named."""
BELIEVED: Final = 0.2
"""The pace begins as if this part of the run had gone as expected: the first groups begin together with the workers,
and what they take says little about the rest.
"""


@dataclass
class Group:
    """Tests that one worker runs in a row."""

    expected_s: float
    left: int
    spent_s: float = 0.0


@dataclass
class Course:
    """What was expected of a run, and what has become of it."""

    workers: int
    groups: dict[str, Group] = field(default_factory=dict)

    def finish(self, nodeid: str, took_s: float) -> None:
        """Count a test that has run."""
        group = self.groups[group_of(nodeid)]
        group.left -= 1
        group.spent_s += took_s

    def pace(self) -> float:
        """How long what is done took for each second that was expected."""
        done = [group for group in self.groups.values() if not group.left]
        believed_s = BELIEVED * sum(group.expected_s for group in self.groups.values())
        expected_s = sum(group.expected_s for group in done) + believed_s
        spent_s = sum(group.spent_s for group in done) + believed_s
        return spent_s / expected_s if expected_s else 1.0

    def left_s(self, running_s: Mapping[str, float]) -> float:
        """Forecast the rest: spread evenly, but no shorter than the longest group. `running_s`: by test, until now."""
        pace = self.pace()
        left = []
        for name, group in self.groups.items():
            if group.left:
                now_s = sum(one for test, one in running_s.items() if group_of(test) == name)
                left.append(max(group.expected_s * pace - group.spent_s - now_s, 0.0))
        return max(sum(left) / self.workers, *left) if left else 0.0


def count_workers(config: pytest.Config) -> int:
    """Tell how many workers `--tx` asks for: one option may stand for several (`6*popen`)."""
    return len(parse_tx_spec_config(config))


def clock(seconds: float) -> str:
    """Write a time as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class Progress:
    """The plugin."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self._since_s: dict[str, float] = {}
        """When each test began that runs now."""
        self._course = Course(count_workers(config))
        self._teller = threading.Thread(target=self._tell, name="progress", daemon=True)
        self._tests: int | None = None
        """How many there are; None = nobody has collected yet."""

    @pytest.hookimpl
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Producer) -> Spreading:
        return Spreading(config, log)

    @pytest.hookimpl
    def pytest_xdist_node_collection_finished(self, node: WorkerController, ids: list[str]) -> None:
        """Know what is to come, from the first worker that has collected."""
        del node
        if self._tests is not None:
            return
        self._tests = len(ids)
        counts = Counter(map(group_of, ids))
        for name, expected_s in expect_seconds(ids).items():
            self._course.groups[name] = Group(expected_s, counts[name])
        self._teller.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(
        self,
    ) -> Generator[None, tuple[str, str, str], tuple[str, str, str]]:
        """Let results be counted and no letter be printed: the lines are written here."""
        category, _, word = yield
        return category, "", word if category in ("failed", "error") else ""

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            why = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
            self._say(f"failed: {report.nodeid} ({report.when})\n      {why[:500]}")

    @pytest.hookimpl
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._since_s[nodeid] = time.monotonic()

    @pytest.hookimpl
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        now_s = time.monotonic()
        self._course.finish(nodeid, now_s - self._since_s.pop(nodeid, now_s))

    @pytest.hookimpl
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """Count a test in which a worker died: nobody else says that it has ended."""
        self.pytest_runtest_logfinish(crashitem)

    @pytest.hookimpl
    def pytest_sessionfinish(self) -> None:
        self._ended.set()
        if self._config.getoption("--learn"):
            groups = self._course.groups
            write_seconds({name: one.spent_s for name, one in groups.items() if not one.left})

    def _tell(self) -> None:
        while not self._ended.wait(LINE_S):
            self._say(self._line())

    def _line(self) -> str:
        now_s = time.monotonic()
        running_s = {test: now_s - since_s for test, since_s in dict(self._since_s).items()}
        done = (self._tests or 0) - sum(group.left for group in self._course.groups.values())
        left_s = self._course.left_s(running_s)
        slow = [f"{test} ({clock(one_s)})" for test, one_s in running_s.items() if one_s > NAMED_S]
        return (
            f"{clock(now_s - self._began_s)} gone, about {clock(left_s)} left: {done} of {self._tests or 0} tests"
            + "".join(f"\n      still running: {test}" for test in slow)
        )

    def _say(self, text: str) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(text)
            terminal.flush()
