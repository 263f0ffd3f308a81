"""The spool: nothing is lost, nothing blocks, what cannot be read is moved aside."""

import errno
import json
import os
import socket
from pathlib import Path

import pytest

from podwire.agent.cni.spool import (
    BAD_DIRECTORY,
    BAD_KEPT,
    TEMPORARY_MAX_AGE_NS,
    Spool,
    SpooledDelete,
)
from podwire.cni import launcher
from podwire.cni.netconf import decode_request
from podwire.model import wire
from podwire.model.endpoint import AttachmentKey
from podwire.model.errors import PodwireError, StorageFailure, Unavailable
from podwire.model.ids import ContainerId, InterfaceName, NetworkName
from podwire.model.request import AttachRequest
from podwire.model.wire import Frame
from tests.unit.test_store_sqlite import list_descriptors

BOOT_ID = "0c6f9a7e-6a55-4b6c-9a9c-3e0a1c7f0001"


class HandClock:
    """Stands still until told."""

    now_ns = 1_000 * 10**9

    def boottime_ns(self) -> int:
        return self.now_ns

    def boot_id(self) -> str:
        return BOOT_ID


def decode(frame: Frame) -> AttachRequest:
    return decode_request(frame.environment, frame.stdin, frame.started_boottime_ns)


def unseen(_pid: int, _boottime_ns: int) -> None:
    """Nobody can tell whether a process runs."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / wire.SPOOL_DIRECTORY
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def spool(directory: Path, clock: HandClock) -> Spool:
    return Spool(directory, clock, decode, ran_at=unseen)


def frame(container: str = "c1", started_ns: int = 1, **more: str) -> Frame:
    environment = {
        "CNI_COMMAND": "DEL",
        "CNI_CONTAINERID": container,
        "CNI_IFNAME": "eth0",
        "CNI_PATH": "/opt/cni/bin",
    }
    return Frame(
        environment=environment | more,
        stdin=b'{"cniVersion": "1.0.0", "name": "n", "type": "podwire-cni"}',
        started_boottime_ns=started_ns,
        boot_id=BOOT_ID,
    )


def put(directory: Path, record: Frame, pid: int = 1) -> str:
    name = wire.record_name(record.started_boottime_ns, pid)
    (directory / name).write_bytes(wire.encode_record(record))
    return name


def keys(records: object) -> list[str]:
    assert isinstance(records, list)
    return [record.key.container_id for record in records]


def key(container: str) -> AttachmentKey:
    return AttachmentKey(NetworkName("n"), ContainerId(container), InterfaceName("eth0"))


def test_records_come_oldest_first_and_stay_until_they_are_removed(
    spool: Spool, directory: Path
) -> None:
    for container, started_ns in [("c3", 30), ("c1", 10), ("c2", 2)]:
        put(directory, frame(container, started_ns))
    assert keys(spool.read()) == ["c2", "c1", "c3"]
    spool.remove(spool.read()[0])
    assert keys(spool.read()) == ["c1", "c3"]
    assert len(os.listdir(directory)) == 2


def test_a_record_that_appears_later_is_seen(spool: Spool, directory: Path) -> None:
    assert spool.read() == []
    put(directory, frame("late"))
    assert keys(spool.read()) == ["late"]


def test_the_records_of_one_attachment_can_be_asked_for(spool: Spool, directory: Path) -> None:
    put(directory, frame("c1", 1))
    put(directory, frame("c2", 2))
    put(directory, frame("c1", 3))
    found = spool.pending(key("c1"))
    assert [record.request.started_boottime_ns for record in found] == [1, 3]
    assert spool.pending(key("c9")) == []


def test_what_the_launcher_writes_is_read(tmp_path: Path, clock: HandClock) -> None:
    stdin = {"cniVersion": "1.0.0", "name": "n", "type": "podwire-cni"}
    stdin["socket"] = str(tmp_path / "cni.sock")
    outcome = launcher.call(dict(frame("real").environment), json.dumps(stdin).encode())
    assert outcome == launcher.Outcome(0)
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    clock.boot_id = lambda: boot_id  # type: ignore[method-assign]
    spool = Spool(tmp_path / wire.SPOOL_DIRECTORY, clock, decode, ran_at=unseen)
    assert keys(spool.read()) == ["real"]


def test_no_directory_is_an_empty_spool(tmp_path: Path, clock: HandClock) -> None:
    spool = Spool(tmp_path / "none", clock, decode, ran_at=unseen)
    assert spool.read() == []
    spool.remove(SpooledDelete("00000000000000000001-1.del", decode(frame())))


def test_a_spool_that_cannot_be_read_is_an_error(tmp_path: Path, clock: HandClock) -> None:
    (tmp_path / "spool").write_text("")
    with pytest.raises(StorageFailure, match="spool"):
        Spool(tmp_path / "spool", clock, decode, ran_at=unseen).read()


def _cut(directory: Path, name: str) -> None:
    path = directory / name
    path.write_bytes(path.read_bytes()[:-1])


def _replace(directory: Path, name: str, data: bytes) -> None:
    (directory / name).write_bytes(data)


def _become_directory(directory: Path, name: str) -> None:
    (directory / name).unlink()
    (directory / name).mkdir()


def _become_link(directory: Path, name: str) -> None:
    (directory / name).rename(directory / "elsewhere")
    (directory / name).symlink_to("elsewhere")


def _become_fifo(directory: Path, name: str) -> None:
    (directory / name).unlink()
    os.mkfifo(directory / name)


def _become_socket(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / name))


BAD = {
    "empty": lambda directory, name: _replace(directory, name, b""),
    "garbage": lambda directory, name: _replace(directory, name, b"x" * 100),
    "too large": lambda directory, name: _replace(directory, name, b"x" * (2 << 20)),
    "cut off": _cut,
    "an ADD": lambda directory, name: _replace(
        directory, name, wire.encode_frame(frame(CNI_COMMAND="ADD"))
    ),
    "without a container": lambda directory, name: _replace(
        directory, name, wire.encode_frame(frame(CNI_CONTAINERID=""))
    ),
    "a directory": _become_directory,
    "a symbolic link": _become_link,
    "a FIFO": _become_fifo,
    "a socket": _become_socket,
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_moved_aside_with_its_reason(
    spool: Spool, directory: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    name = put(directory, frame("bad", 1))
    BAD[case](directory, name)
    put(directory, frame("good", 2))
    before = list_descriptors()
    assert keys(spool.read()) == ["good"]
    assert list_descriptors() == before
    assert os.listdir(directory / BAD_DIRECTORY) == [name]
    (line,) = [line for line in caplog.records if line.message == "moved a spooled request aside"]
    assert line.__dict__["path"] == name
    assert line.__dict__["error"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_what_cannot_be_read_now_is_read_later(
    spool: Spool,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    """The runtime was told that the DEL is done: a machine that is short of something must not lose it."""
    put(directory, frame("first", 1))

    def refuse(*_arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert [spool.read(), spool.read()] == [[], []]
    assert len([line for line in caplog.records if "cannot be read now" in line.message]) == 1
    assert keys(spool.read()) == ["first"]


def test_only_so_many_bad_records_are_kept(spool: Spool, directory: Path) -> None:
    for number in range(BAD_KEPT + 5):
        (directory / wire.record_name(number, 1)).write_bytes(b"")
    assert spool.read() == []
    kept = sorted(os.listdir(directory / BAD_DIRECTORY))
    assert len(kept) == BAD_KEPT
    assert kept[-1] == wire.record_name(BAD_KEPT + 4, 1)


def test_a_record_of_a_newer_major_version_is_left_alone(spool: Spool, directory: Path) -> None:
    name = put(directory, frame())
    data = bytearray((directory / name).read_bytes())
    data[4] = 2
    (directory / name).write_bytes(data)
    assert spool.read() == []
    assert spool.read() == []
    assert os.listdir(directory) == [name]


def test_a_record_of_another_boot_is_removed(spool: Spool, directory: Path) -> None:
    other = Frame(
        environment=frame().environment,
        stdin=frame().stdin,
        started_boottime_ns=1,
        boot_id="11111111-2222-3333-4444-555555555555",
    )
    put(directory, other)
    assert spool.read() == []
    assert os.listdir(directory) == []


def test_a_failed_record_comes_back_later_and_later(
    spool: Spool, directory: Path, clock: HandClock
) -> None:
    put(directory, frame())
    error: PodwireError = Unavailable("not now")
    for delay_s in (1, 2, 4, 8, 16, 32, 60, 60):
        (record,) = spool.read()
        spool.postpone(record, error)
        clock.now_ns += delay_s * 10**9 - 1
        assert spool.read() == []
        assert keys(spool.pending(record.key)) == ["c1"]
        clock.now_ns += 1


def test_a_failure_is_logged_once(
    spool: Spool, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(directory, frame())
    (record,) = spool.read()
    for _ in range(3):
        spool.postpone(record, Unavailable("not now"))
    assert [line.message for line in caplog.records] == ["a spooled DEL failed; it is tried again"]


@pytest.mark.parametrize(
    ("age_ns", "stays"),
    [
        pytest.param(0, True, id="being written"),
        pytest.param(TEMPORARY_MAX_AGE_NS - 1, True, id="perhaps being written"),
        pytest.param(TEMPORARY_MAX_AGE_NS, False, id="abandoned"),
        pytest.param(-1, False, id="of another boot"),
    ],
)
def test_temporary_files_go_when_their_launcher_must_be_dead(
    spool: Spool, directory: Path, clock: HandClock, age_ns: int, stays: bool
) -> None:
    name = wire.temporary_name(wire.record_name(clock.now_ns - age_ns, 1))
    (directory / name).write_bytes(b"half")
    assert spool.read() == []
    assert os.listdir(directory) == ([name] if stays else [])


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("age_ns", [0, TEMPORARY_MAX_AGE_NS])
def test_a_temporary_file_stays_exactly_as_long_as_its_launcher_runs(
    directory: Path, clock: HandClock, age_ns: int, runs: bool
) -> None:
    asked = []

    def ran_at(pid: int, boottime_ns: int) -> bool:
        asked.append((pid, boottime_ns))
        return runs

    name = wire.temporary_name(wire.record_name(clock.now_ns - age_ns, 4711))
    (directory / name).write_bytes(b"half")
    assert Spool(directory, clock, decode, ran_at=ran_at).read() == []
    assert os.listdir(directory) == ([name] if runs else [])
    assert asked == [(4711, clock.now_ns - age_ns)]


def test_foreign_files_are_not_touched(spool: Spool, directory: Path) -> None:
    for name in ("README", ".hidden", "1.del"):
        (directory / name).write_text("")
    assert spool.read() == []
    assert sorted(os.listdir(directory)) == [".hidden", "1.del", "README"]
