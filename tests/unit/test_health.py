"""Readiness from recorded facts, and the file that lets STATUS succeed while the agent restarts."""

import os
from pathlib import Path

import pytest

from podwire.agent.health import AliveFile, Health
from podwire.model.errors import CannotServe, KernelFailure, PodwireError
from podwire.model.wire import Alive, decode_alive


class Clock:
    now_ns = 5_000_000_000

    def boottime_ns(self) -> int:
        return self.now_ns

    def boot_id(self) -> str:
        return "2c0e8b9e-0000-4000-8000-000000000000"


def test_nothing_reported_yet_is_not_ready() -> None:
    assert not Health(Clock()).ready


def test_ready_while_every_critical_check_is_ok() -> None:
    health = Health(Clock())
    health.report("journal", ok=True)
    health.report("events", ok=False, message="ring is gone", critical=False)
    seen = [health.ready]
    assert health.warnings() == ["events: ring is gone"]
    health.report("journal", ok=False, message="disk full")
    seen.append(health.ready)
    health.report("journal", ok=True)
    assert [*seen, health.ready] == [True, False, True]


def test_since_tells_of_the_last_change_not_of_the_last_report() -> None:
    clock = Clock()
    health = Health(clock)
    for now_ns, ok in ((1, True), (2, True), (3, False), (4, False)):
        clock.now_ns = now_ns
        health.report("journal", ok=ok, message="x")
    assert [check.since_ns for check in health.checks()] == [3]


def test_a_warning_is_shown_until_it_is_taken_back() -> None:
    health = Health(Clock())
    health.warn("rp_filter", "strict")
    assert health.warnings() == ["strict"]
    health.warn("rp_filter", "")
    assert health.warnings() == []


@pytest.fixture
def alive(tmp_path: Path) -> AliveFile:
    return AliveFile(tmp_path, Clock(), grace_s=120)


def read(directory: Path) -> Alive | None:
    return decode_alive((directory / "alive").read_bytes())


def test_the_deadline_is_the_last_sign_of_life_plus_the_grace(
    alive: AliveFile, tmp_path: Path
) -> None:
    assert alive.refresh(lambda: None) == ""
    assert read(tmp_path) == Alive(Clock().boot_id(), 125_000)
    assert os.stat(tmp_path / "alive").st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["alive"]


def test_without_grace_the_deadline_is_over_at_once(tmp_path: Path) -> None:
    AliveFile(tmp_path, Clock(), grace_s=0).write()
    assert read(tmp_path) == Alive(Clock().boot_id(), 5_000)


@pytest.mark.parametrize("error", [CannotServe("pool is empty"), KernelFailure(1, "x", "y")])
def test_the_file_goes_while_an_add_would_fail(
    alive: AliveFile, tmp_path: Path, error: PodwireError
) -> None:
    def fail() -> None:
        raise error

    alive.write()
    assert alive.refresh(fail) == error.message
    assert not (tmp_path / "alive").exists()
    assert alive.refresh(fail)


def test_a_directory_that_cannot_be_written_is_no_crash(tmp_path: Path) -> None:
    cause = AliveFile(tmp_path / "gone", Clock(), grace_s=1).refresh(lambda: None)
    assert "gone/alive" in cause
    assert "No such file" in cause
