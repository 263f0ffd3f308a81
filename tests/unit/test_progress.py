"""What `scripts/test` says of the time that is left (tests/progress.py)."""

from types import SimpleNamespace
from typing import cast

import pytest

from tests.progress import Course, Group, count_workers

EXPECTED_S = 100.0


def course(*, workers: int = 2, done: int = 0, took: float = 1.0) -> Course:
    """Make a run of ten groups, some of which have run and took so many times what was expected."""
    groups = {
        f"tests/unit/test_{number}.py": Group(
            EXPECTED_S, 0 if number < done else 1, took * EXPECTED_S if number < done else 0.0
        )
        for number in range(10)
    }
    return Course(workers, groups)


def test_before_anything_has_run_the_expectation_is_what_is_left() -> None:
    assert course().left_s({}) == 10 * EXPECTED_S / 2


@pytest.mark.parametrize(
    ("done", "took", "least", "most"),
    [
        pytest.param(1, 5.0, 2.0, 2.5, id="one slow group says little"),
        pytest.param(8, 5.0, 4.0, 5.0, id="most of the run says nearly all"),
        pytest.param(5, 1.0, 1.0, 1.0, id="as expected"),
        pytest.param(5, 0.5, 0.5, 0.75, id="a faster machine"),
    ],
)
def test_the_pace_follows_what_has_run(done: int, took: float, least: float, most: float) -> None:
    assert least <= course(done=done, took=took).pace() <= most


def test_no_forecast_is_shorter_than_the_longest_group() -> None:
    assert course(workers=100).left_s({}) == EXPECTED_S


def test_what_a_running_test_has_taken_is_not_to_come() -> None:
    running = {"tests/unit/test_9.py::test_it": 40.0}
    assert course(workers=100, done=9).left_s(running) == EXPECTED_S - 40


def test_a_run_of_nothing_has_nothing_left() -> None:
    assert Course(2).left_s({}) == 0


@pytest.mark.parametrize(
    ("tx", "workers"), [(["6*popen//python=python3"], 6), (["popen", "2*popen"], 3)], ids=str
)
def test_each_worker_is_counted(tx: list[str], workers: int) -> None:
    config = SimpleNamespace(getvalue=lambda name: tx if name == "tx" else None)
    assert count_workers(cast(pytest.Config, config)) == workers
