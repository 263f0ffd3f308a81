"""One agent per state directory, however the one before ended."""

import os
import signal
import stat
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from podwire.journal.lock import (
    LOCK_FILE,
    find_waiting_agent,
    locked_node_name,
    locked_state_directory,
)
from podwire.model.errors import Conflict, StorageFailure
from tests.waiting import wait_for

HOLDER = """
import sys, time
from pathlib import Path
from podwire.journal.lock import locked_state_directory
with locked_state_directory(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_agent_learns_who_holds_the_directory(tmp_path: Path) -> None:
    with (
        locked_state_directory(tmp_path),
        pytest.raises(Conflict, match=f"pid {os.getpid()} holds it") as caught,
        locked_state_directory(tmp_path),
    ):
        pytest.fail("both hold it")
    assert "state_dir" in caught.value.hint


def test_the_directory_is_made_for_root_alone(tmp_path: Path) -> None:
    state = tmp_path / "a" / "b"
    with locked_state_directory(state):
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        assert stat.S_IMODE((state / LOCK_FILE).stat().st_mode) == 0o600


def test_the_lock_is_free_after_its_holder_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with (
                pytest.raises(Conflict, match=f"pid {holder.pid} "),
                locked_state_directory(tmp_path),
            ):
                pytest.fail("both hold it")
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
    with locked_state_directory(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n"


def test_children_do_not_keep_the_lock(tmp_path: Path) -> None:
    with locked_state_directory(tmp_path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with locked_state_directory(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(StorageFailure, match="lock state directory") as caught,
        locked_state_directory(tmp_path / "file" / "state"),
    ):
        pytest.fail("it was made")
    assert "state_dir" in caught.value.hint


def test_a_name_is_one_agents_in_a_network_namespace() -> None:
    with locked_node_name("pwt-one"):
        with pytest.raises(Conflict, match="pwt-one"), locked_node_name("pwt-one"):
            pass
        with locked_node_name("pwt-two"):
            pass
    with locked_node_name("pwt-one"):
        pass


@pytest.mark.parametrize("take", [locked_state_directory, None], ids=["directory", "name"])
def test_a_patient_agent_waits_for_the_end_of_the_first_and_says_so(
    tmp_path: Path, take: object, caplog: pytest.LogCaptureFixture
) -> None:
    def lock(*, patient: bool) -> AbstractContextManager[None]:
        if take is None:
            return locked_node_name(f"n-{os.getpid()}", patient=patient)
        return locked_state_directory(tmp_path, patient=patient)

    taken = threading.Event()

    def second() -> None:
        with lock(patient=True):
            taken.set()

    waiter = threading.Thread(target=second)
    with lock(patient=False):
        waiter.start()
        wait_for(lambda: "this one waits" in caplog.text, "what the second says")
        assert not taken.is_set()
        if take is not None:
            wait_for(lambda: find_waiting_agent(tmp_path) == str(os.getpid()), "who waits")
    wait_for(taken.is_set, "the second agent")
    waiter.join()
    assert find_waiting_agent(tmp_path) == ""
    assert caplog.text.count("this one waits") == 1
