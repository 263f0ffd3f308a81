"""The launcher's contract: the same cases for the C program and for the Python client.

Each case runs on a real socket. docs/protocol.md is the text of which these are the tables.
"""

import errno
import json
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest

from podwire import __version__
from podwire.cni.launcher import Outcome
from podwire.model import wire
from podwire.model.wire import Alive, ReplyStatus
from tests.contract.launcher_agent import (
    Behaviour,
    answer,
    answer_slowly,
    die_unread,
    die_with_request,
    refuse_unread,
    scripted_agent,
    send_garbage,
    stay_silent,
)
from tests.contract.launcher_clients import ROOT, Run, code_of, config, environment, spooled
from tests.waiting import wait_for, within

# --- the agent answers --------------------------------------------------------------------------


def ask(run: Run, command: str, stdin: bytes) -> Outcome:
    """Run a command; STATUS, which waits for a part of a second, again where the machine stood still for as long."""
    if command != "STATUS":
        return run(environment(command), stdin)
    return within(wire.STATUS_WAIT_MS / 1000, lambda: run(environment(command), stdin))


@pytest.mark.parametrize("command", ["ADD", "DEL", "CHECK", "GC", "STATUS"])
@pytest.mark.parametrize(
    ("status", "exit_status"),
    [(ReplyStatus.DONE, 0), (ReplyStatus.FAILED, 1)],
    ids=["done", "failed"],
)
def test_the_answer_is_printed_and_decides_the_exit_status(
    run: Run, socket_path: Path, command: str, status: ReplyStatus, exit_status: int
) -> None:
    body = b'{"cniVersion": "1.0.0", "x": "\xc3\xa4"}'
    with scripted_agent(socket_path, answer(status, body)):
        assert ask(run, command, config(socket_path)) == Outcome(exit_status, body)
    assert spooled(socket_path) == []


@pytest.mark.parametrize("program", ["podwire-cni", "podwire-ipam"])
def test_the_frame_carries_all_that_the_launcher_was_given(
    run: Run, socket_path: Path, program: str
) -> None:
    stdin = config(socket_path, text="\\u00e4 ä")
    before_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    with scripted_agent(socket_path, answer(ReplyStatus.DONE, b"{}")) as agent:
        run(environment("ADD", PATH="/bin", NOT_CNI_X="1"), stdin, program=program)
    after_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    (received,) = agent.received
    assert received.frame.environment == environment("ADD")
    assert received.frame.stdin == stdin
    assert received.frame.program == program
    assert received.frame.launcher_version == __version__
    assert before_ns <= received.frame.started_boottime_ns <= after_ns
    assert received.frame.has_netns
    # An ADD is never written down for later, and calls no other plugin.
    assert (received.frame.boot_id, received.frame.has_mntns) == ("", False)
    assert list(received.inodes) == [os.stat("/proc/self/ns/net").st_ino]


@pytest.mark.parametrize("command", ["DEL", "CHECK", "GC", "STATUS"])
def test_other_commands_bring_the_boot_and_the_mount_namespace(
    run: Run, socket_path: Path, command: str
) -> None:
    with scripted_agent(socket_path, answer(ReplyStatus.DONE, b"{}")) as agent:
        ask(run, command, config(socket_path))
    received = agent.received[-1]
    assert received.frame.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert received.frame.has_mntns
    assert received.inodes[-1] == os.stat("/proc/self/ns/mnt").st_ino


def _fifo(path: Path) -> str:
    os.mkfifo(path)
    return str(path)


NAMESPACES: Mapping[str, tuple[Callable[[Path], str], int, bool]] = {
    "gone": (lambda directory: str(directory / "gone"), errno.ENOENT, False),
    "below a file": (lambda _directory: "/proc/self/status/x", errno.ENOTDIR, False),
    "too long": (lambda _directory: "/" + "x" * 5000, errno.ENAMETOOLONG, False),
    "empty": (lambda _directory: "", 0, False),
    "a FIFO without a writer": (lambda directory: _fifo(directory / "fifo"), 0, True),
}


@pytest.mark.parametrize("case", NAMESPACES)
@pytest.mark.parametrize("command", ["ADD", "DEL"])
def test_the_frame_says_why_there_is_no_namespace(
    run: Run, socket_path: Path, command: str, case: str
) -> None:
    make, number, has_netns = NAMESPACES[case]
    netns = make(socket_path.parent)
    with scripted_agent(socket_path, answer(ReplyStatus.DONE, b"")) as agent:
        assert run(environment(command, CNI_NETNS=netns), config(socket_path)).exit_status == 0
    (received,) = agent.received
    assert (received.frame.netns_errno, received.frame.has_netns) == (number, has_netns)
    assert len(received.inodes) == received.frame.descriptor_count


def test_a_large_request_and_an_answer_in_pieces_go_through(run: Run, socket_path: Path) -> None:
    stdin = config(socket_path, filler="x" * 700_000)
    with scripted_agent(socket_path, answer_slowly(b'{"a": 1}')) as agent:
        assert run(environment("ADD"), stdin) == Outcome(0, b'{"a": 1}')
    assert agent.received[0].frame.stdin == stdin


def test_a_large_answer_goes_through(run: Run, socket_path: Path) -> None:
    body = b"x" * (wire.REPLY_MAX_BYTES - wire.COMMON_HEADER_BYTES)
    with scripted_agent(socket_path, answer(ReplyStatus.DONE, body)):
        assert run(environment("ADD"), config(socket_path)) == Outcome(0, body)


def test_an_answer_to_a_request_that_was_not_read_is_printed(run: Run, socket_path: Path) -> None:
    stdin = config(socket_path, filler="x" * 700_000)
    with scripted_agent(socket_path, refuse_unread(b'{"code": 6}')):
        assert run(environment("ADD"), stdin) == Outcome(1, b'{"code": 6}')


@pytest.mark.parametrize("command", ["ADD", "CHECK", "GC", "STATUS"])
def test_not_now_is_a_failure_like_any_other(run: Run, socket_path: Path, command: str) -> None:
    with scripted_agent(socket_path, answer(ReplyStatus.NOT_NOW, b'{"code": 11}')):
        assert ask(run, command, config(socket_path)) == Outcome(1, b'{"code": 11}')


# --- the agent does not answer ------------------------------------------------------------------

GONE: Mapping[str, tuple[Behaviour, ...]] = {
    "died with the request": (die_with_request,),
    "sends garbage": (send_garbage,),
}


@pytest.mark.parametrize("case", GONE)
@pytest.mark.parametrize("command", ["ADD", "CHECK", "GC"])
def test_an_agent_that_dies_with_the_request_is_code_11_at_once(
    run: Run, socket_path: Path, command: str, case: str
) -> None:
    with scripted_agent(socket_path, *GONE[case]) as agent:
        outcome = run(environment(command), config(socket_path, **{"agent-wait": 30}))
    assert code_of(outcome) == 11
    assert agent.connections == 1


@pytest.mark.parametrize("command", ["ADD", "CHECK", "GC"])
def test_an_absent_agent_is_code_11(run: Run, socket_path: Path, command: str) -> None:
    assert code_of(run(environment(command), config(socket_path))) == 11
    assert spooled(socket_path) == []


def test_a_stale_socket_is_an_absent_agent(run: Run, socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale:
        stale.bind(str(socket_path))
    assert code_of(run(environment("ADD"), config(socket_path))) == 11


@pytest.mark.parametrize("command", ["ADD", "CHECK"])
def test_an_agent_is_waited_for_as_long_as_the_configuration_says(
    run: Run, socket_path: Path, command: str
) -> None:
    began_s = time.monotonic()
    assert code_of(run(environment(command), config(socket_path, **{"agent-wait": 1}))) == 11
    assert 1 <= time.monotonic() - began_s < 30


@pytest.mark.parametrize("command", ["GC", "STATUS", "DEL"])
def test_other_commands_do_not_wait_for_an_absent_agent(
    run: Run, socket_path: Path, command: str
) -> None:
    began_s = time.monotonic()
    run(environment(command), config(socket_path, **{"agent-wait": 60}))
    assert time.monotonic() - began_s < 30


@pytest.mark.parametrize("command", ["ADD", "CHECK"])
def test_an_agent_that_restarts_before_it_read_the_request_is_asked_again(
    run: Run, socket_path: Path, command: str
) -> None:
    outcomes: list[Outcome] = []
    stdin = config(socket_path, **{"agent-wait": 30})
    caller = threading.Thread(target=lambda: outcomes.append(run(environment(command), stdin)))
    with scripted_agent(socket_path, die_unread) as old:
        caller.start()
        wait_for(lambda: old.connections >= 1, "the first attempt")
    with scripted_agent(socket_path, answer(ReplyStatus.DONE, b"{}")):
        caller.join(60)
    assert outcomes == [Outcome(0, b"{}")]


@pytest.fixture
def full_backlog(socket_path: Path) -> Iterator[Path]:
    """An agent that accepts nobody, and whose backlog is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(socket_path))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(str(socket_path))
            yield socket_path


@pytest.mark.parametrize(("command", "code"), [("ADD", 11), ("GC", 11), ("STATUS", 50)])
def test_an_agent_with_a_full_backlog_is_like_an_absent_one(
    run: Run, full_backlog: Path, command: str, code: int
) -> None:
    assert code_of(run(environment(command), config(full_backlog))) == code


def test_a_del_is_recorded_when_the_backlog_is_full(run: Run, full_backlog: Path) -> None:
    variables = environment("DEL", **{wire.DEL_WAIT_VARIABLE: "100"})
    assert run(variables, config(full_backlog)) == Outcome(0)
    assert len(spooled(full_backlog)) == 1


@pytest.mark.parametrize("wait", ["\u00b2", "soon", "9" * 5000], ids=["a digit", "word", "long"])
def test_a_wait_that_is_no_number_is_the_usual_one(run: Run, tmp_path: Path, wait: str) -> None:
    variables = environment("DEL", **{wire.DEL_WAIT_VARIABLE: wait})
    assert run(variables, config(tmp_path / "cni.sock")) == Outcome(0)
    assert len(spooled(tmp_path / "cni.sock")) == 1


def test_a_socket_that_is_none_is_code_5(run: Run, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(tmp_path / "cni.sock"))
        assert code_of(run(environment("ADD"), config(tmp_path / "cni.sock"))) == 5


# --- DEL and its spool --------------------------------------------------------------------------

UNDONE: Mapping[str, tuple[Behaviour, ...]] = {
    "absent": (),
    "dies before it read the request": (die_unread,),
    "dies with the request": (die_with_request,),
    "does not answer in time": (stay_silent,),
    "sends garbage": (send_garbage,),
    "says not now": (answer(ReplyStatus.NOT_NOW, b'{"code": 11}'),),
}


@pytest.mark.parametrize("case", UNDONE)
def test_a_del_that_the_agent_does_not_do_is_recorded_and_succeeds(
    run: Run, socket_path: Path, case: str
) -> None:
    stdin = config(socket_path)
    variables = environment("DEL", **{wire.DEL_WAIT_VARIABLE: "200"})
    if UNDONE[case]:
        with scripted_agent(socket_path, *UNDONE[case]):
            outcome = run(variables, stdin)
    else:
        outcome = run(variables, stdin)
    assert outcome == Outcome(0)
    (record,) = spooled(socket_path)
    assert record.environment == environment("DEL")
    assert record.stdin == stdin
    assert (record.has_netns, record.has_mntns) == (False, False)
    assert 0 < record.started_boottime_ns <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert record.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_the_spool_is_made_with_its_parents(run: Run, tmp_path: Path) -> None:
    socket_path = tmp_path / "a" / "b" / "cni.sock"
    assert run(environment("DEL"), config(socket_path)) == Outcome(0)
    assert len(spooled(socket_path)) == 1


def test_each_del_has_its_own_record_in_the_order_of_their_starts(
    run: Run, socket_path: Path
) -> None:
    for number in range(5):
        run(environment("DEL", CNI_CONTAINERID=f"c{number}"), config(socket_path))
    ids = [record.environment["CNI_CONTAINERID"] for record in spooled(socket_path)]
    assert ids == ["c0", "c1", "c2", "c3", "c4"]


def test_a_del_fails_with_code_5_when_the_spool_is_no_directory(
    run: Run, socket_path: Path
) -> None:
    (socket_path.parent / wire.SPOOL_DIRECTORY).write_text("")
    outcome = run(environment("DEL"), config(socket_path))
    assert code_of(outcome) == 5
    assert "spool" in json.loads(outcome.stdout)["msg"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with no block left."""
    mount = tmp_path / "full"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "pwt", str(mount)], check=True)
    try:
        (mount / wire.SPOOL_DIRECTORY).mkdir(mode=0o700)
        room = os.statvfs(mount)
        (mount / "filler").write_bytes(b"x" * (room.f_bfree * room.f_frsize))
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.kernel
def test_a_del_fails_with_code_5_on_a_full_disk_and_leaves_nothing(
    run: Run, full_disk: Path
) -> None:
    outcome = run(environment("DEL"), config(full_disk / "cni.sock"))
    assert code_of(outcome) == 5
    assert str(full_disk / wire.SPOOL_DIRECTORY) in json.loads(outcome.stdout)["msg"]
    assert os.listdir(full_disk / wire.SPOOL_DIRECTORY) == []


@pytest.mark.parametrize("written_bytes", [0, 64])
def test_who_is_killed_while_it_writes_leaves_nothing(
    launcher: Path, socket_path: Path, written_bytes: int
) -> None:
    def die_by_the_next_byte() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (written_bytes, written_bytes))

    ended = subprocess.run(
        [launcher],
        env=environment("DEL"),
        input=config(socket_path),
        preexec_fn=die_by_the_next_byte,
        check=False,
        timeout=60,
    )
    assert ended.returncode == -signal.SIGXFSZ
    assert os.listdir(socket_path.parent / wire.SPOOL_DIRECTORY) == []


@pytest.mark.kernel
def test_a_record_is_written_where_a_nameless_file_can_get_no_name(
    launcher: Path, socket_path: Path
) -> None:
    without_proc = 'mount -t tmpfs none /proc && exec "$0"'
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", without_proc, launcher],
        env=environment("DEL", PATH=os.environ["PATH"]),
        input=config(socket_path),
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0
    (record,) = spooled(socket_path)
    assert record.environment == environment("DEL")


# --- STATUS and its sign of life ----------------------------------------------------------------


def _alive(seconds: int, boot_id: str = "") -> bytes:
    now_ms = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
    own = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return wire.encode_alive(Alive(boot_id or own, max(0, now_ms + seconds * 1000)))


SIGNS: Mapping[str, tuple[Callable[[], bytes | None], bool]] = {
    "still to come": (lambda: _alive(60), True),
    "without its newline": (lambda: _alive(60).rstrip(), True),
    "over": (lambda: _alive(-1), False),
    "of another boot": (lambda: _alive(60, "11111111-2222-3333-4444-555555555555"), False),
    "missing": (lambda: None, False),
    "empty": (lambda: b"", False),
    "without a time": (lambda: _alive(60).split()[0], False),
    "with a word more": (lambda: _alive(60) + b"x", False),
    "garbage": (lambda: b"\xff" * 4096, False),
}


@pytest.mark.parametrize("case", SIGNS)
@pytest.mark.parametrize("behaviours", [(), (stay_silent,)], ids=["absent", "silent"])
def test_status_believes_the_last_sign_of_life_only_until_its_time(
    run: Run, socket_path: Path, case: str, behaviours: tuple[Behaviour, ...]
) -> None:
    make, ok = SIGNS[case]
    data = make()
    if data is not None:
        (socket_path.parent / wire.ALIVE_FILE).write_bytes(data)
    took_s = []
    for _ in range(5):  # one of them is not held up by the machine
        with scripted_agent(socket_path, *behaviours) if behaviours else nullcontext():
            began_s = time.monotonic()
            outcome = run({"CNI_COMMAND": "STATUS"}, config(socket_path))
            took_s.append(time.monotonic() - began_s)
        if took_s[-1] < 1:
            break
    assert took_s[-1] < 1, took_s
    if ok:
        assert outcome == Outcome(0)
    else:
        assert code_of(outcome) == 50


def test_the_connection_ends_with_the_launcher(launcher: Path, socket_path: Path) -> None:
    with scripted_agent(socket_path, stay_silent) as agent:
        process = subprocess.Popen(
            [launcher], env=environment("ADD"), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert process.stdin
        process.stdin.write(config(socket_path))
        process.stdin.close()
        wait_for(lambda: bool(agent.received), "the request")
        process.kill()
        process.wait()
        assert agent.gone.wait(60)


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_standard_descriptor_never_becomes_the_socket(
    launcher: Path, socket_path: Path, closed: int
) -> None:
    shell = f'exec "$0" {closed}{"<" if closed == 0 else ">"}&-'
    with scripted_agent(socket_path, answer(ReplyStatus.DONE, b'{"ok": 1}')) as agent:
        process = subprocess.run(
            ["/bin/sh", "-c", shell, launcher],
            env=environment("ADD"),
            input=config(socket_path),
            capture_output=True,
            check=False,
            timeout=90,
        )
    if closed == 0:
        assert json.loads(process.stdout)["code"] == 6
        assert agent.received == []
    else:
        assert process.returncode == 0
        assert len(agent.received) == 1


def test_the_numbers_of_both_definitions_agree() -> None:
    header = (ROOT / "launcher" / "launcher.h").read_text()
    defines = dict(re.findall(r"^#define (\w+) (\"[^\"]*\"|\d+)$", header, re.MULTILINE))
    ours = {name: value for name, value in vars(wire).items() if isinstance(value, int | str)}
    ours |= {f"ITEM_{item.name}": item.value for item in wire.Item}
    ours |= {f"FLAG_{flag.name}": flag.value for flag in wire.Flag}
    ours |= {f"STATUS_{status.name}": status.value for status in ReplyStatus}
    shared = defines.keys() & ours.keys()
    assert len(shared) >= 28
    assert {name: json.loads(defines[name]) for name in shared} == {
        name: ours[name] for name in shared
    }


def test_the_launcher_is_static_and_small(launcher: Path) -> None:
    data = launcher.read_bytes()
    assert b"ld-linux" not in data
    assert b"ld-musl" not in data
    assert len(data) < 1_000_000
    assert os.path.samefile(launcher, launcher.with_name("podwire-ipam"))
