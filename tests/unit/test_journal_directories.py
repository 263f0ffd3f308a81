"""Endpoint directories: whole or absent, and never in the way."""

import json
import os
import shutil
from pathlib import Path

import pytest

from podwire.journal.background_writer import BackgroundWriter
from podwire.journal.directories import RunDirectories
from podwire.model.ids import EndpointId, InterfaceName
from podwire.model.interfaces import EndpointConfig
from tests.contract.test_journal import record

SEVEN = EndpointId(7)


def list_tree(root: Path) -> set[str]:
    """Give the names of everything below `root`."""
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.fixture
def directories(tmp_path: Path) -> RunDirectories:
    return RunDirectories(tmp_path / "endpoints")


def test_a_published_endpoint_can_be_read(directories: RunDirectories, tmp_path: Path) -> None:
    directories.publish(record(7), EndpointConfig(policy_revision=3))
    root = tmp_path / "endpoints"
    assert list_tree(root) == {"7", "7/endpoint.json", "7/ep_config.h"}
    document = json.loads((root / "7/endpoint.json").read_text())
    assert (document["record"]["pod"], document["config"]["policy_revision"]) == ("web-0", 3)
    header = (root / "7/ep_config.h").read_text()
    assert "#define PW_INSTANCE 7u\n" in header
    assert "#define PW_POLICY_REVISION 3u\n" in header


def test_the_second_build_replaces_the_first_and_clears_a_failure(
    directories: RunDirectories, tmp_path: Path
) -> None:
    directories.publish(record(7), EndpointConfig())
    directories.keep_failure(record(7), EndpointConfig(policy_revision=4), "attach: no")
    root = tmp_path / "endpoints"
    assert (root / "7_next_fail/cause.txt").read_text() == "attach: no\n"
    directories.publish(record(7), EndpointConfig(policy_revision=5))
    assert list_tree(root) == {"7", "7/endpoint.json", "7/ep_config.h"}
    assert "PW_POLICY_REVISION 5u" in (root / "7/ep_config.h").read_text()


def test_what_an_interrupted_swap_left_does_not_stop_the_next(
    directories: RunDirectories, tmp_path: Path
) -> None:
    root = tmp_path / "endpoints"
    directories.publish(record(7), EndpointConfig())
    for left in ("7_next", "7_old"):
        (root / left).mkdir()
        (root / left / "endpoint.json").write_text("half")
    directories.publish(record(7), EndpointConfig())
    assert list_tree(root) == {"7", "7/endpoint.json", "7/ep_config.h"}


def test_removal_takes_every_trace_and_may_be_repeated(
    directories: RunDirectories, tmp_path: Path
) -> None:
    directories.publish(record(7), EndpointConfig())
    directories.keep_failure(record(7), EndpointConfig(), "no")
    directories.publish(record(70), EndpointConfig())
    directories.remove(SEVEN)
    directories.remove(SEVEN)
    assert {path.name for path in (tmp_path / "endpoints").iterdir()} == {"70"}


def test_pruning_keeps_living_endpoints_alone(directories: RunDirectories, tmp_path: Path) -> None:
    root = tmp_path / "endpoints"
    for endpoint_id in (7, 8):
        directories.publish(record(endpoint_id), EndpointConfig())
    (root / "9_next").mkdir()
    (root / "a file").touch()
    (root / "link").symlink_to(tmp_path)
    directories.prune([SEVEN])
    assert {path.name for path in root.iterdir()} == {"7"}
    assert tmp_path.exists()


def test_names_cannot_break_out_of_the_header(directories: RunDirectories, tmp_path: Path) -> None:
    key = record(7).key
    hostile = type(key)(key.network, key.container_id, InterfaceName('x*\\"'))
    directories.publish(record(7, key=hostile), EndpointConfig())
    header = (tmp_path / "endpoints/7/ep_config.h").read_text()
    assert header.count("*/") == 1


def test_a_run_directory_that_cannot_be_written_is_nobodys_failure(
    directories: RunDirectories, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(tmp_path / "endpoints")
    behind = BackgroundWriter(directories)
    behind.publish(record(7), EndpointConfig())
    behind.keep_failure(record(7), EndpointConfig(), "no")
    behind.prune([SEVEN])
    behind.close()
    assert [one.message for one in caplog.records] == ["write an endpoint's directory"] * 3


def test_what_is_written_behind_is_written_in_order_and_before_the_end(
    directories: RunDirectories, tmp_path: Path
) -> None:
    behind = BackgroundWriter(directories)
    for revision in range(20):
        behind.publish(record(7), EndpointConfig(policy_revision=revision))
        behind.remove(EndpointId(70))
        behind.publish(record(70), EndpointConfig())
    behind.remove(EndpointId(70))
    behind.close()
    assert os.listdir(tmp_path / "endpoints") == ["7"]
    document = json.loads((tmp_path / "endpoints/7/endpoint.json").read_bytes())
    assert document["config"]["policy_revision"] == 19
