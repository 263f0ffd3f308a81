"""The launcher in Python: the same protocol and the same behaviour without an agent, but no process of its own.

Called by the lab and by tests; runtimes execute `launcher/`. It blocks its caller, so it must never run on an event
loop. Invariant: for the same environment and stdin both clients exit with the same status and code
(tests/contract/test_launcher.py runs every case against both).
"""

import enum
import errno
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from podwire import __version__
from podwire.model import wire
from podwire.model.errors import PodwireError
from podwire.model.wire import Frame, Reply, ReplyStatus

_KNOCK_FIRST_S: Final = 0.002
_KNOCK_LONGEST_S: Final = 0.1
_MEANS_ABSENT: Final = (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR)
_MEANS_UNREAD: Final = (errno.ECONNRESET, errno.EPIPE)
_NEWEST_VERSION: Final = wire.SUPPORTED_CNI_VERSIONS[-1]


class AttachFailed(PodwireError):
    """A launcher that was executed as a runtime does it reported an error; `reply` is its JSON."""

    kind = "attach"

    def __init__(self, command: str, pod: str, reply: Mapping[str, Any]) -> None:
        super().__init__(
            f"{command} pod {pod!r}: code {reply.get('code')}: {reply.get('msg')}",
            hint=str(reply.get("details", "")),
        )
        self.reply = reply

    @property
    def code(self) -> int:
        """The error's CNI number; 0 when the launcher gave none."""
        code = self.reply.get("code")
        return code if isinstance(code, int) else 0


class Outcome(msgspec.Struct, frozen=True):
    """What a launcher's process would have left: exit status and the bytes of both streams."""

    exit_status: int
    stdout: bytes = b""
    stderr: bytes = b""


class _Trouble(enum.Enum):
    """Why there is no reply. Table "When the agent does not answer" in docs/protocol.md."""

    ABSENT = "nobody listens, or the request was not read: nothing has begun"
    SILENT = "no answer in time"
    ENDED = "it ended before it answered"
    UNREACHABLE = "it cannot be reached"


class _NoReply(msgspec.Struct, frozen=True):
    trouble: _Trouble
    errno: int = 0


class _Config(msgspec.Struct, frozen=True):
    socket: str = wire.DEFAULT_SOCKET
    agent_wait_s: int = wire.AGENT_WAIT_DEFAULT_S
    cni_version: str = _NEWEST_VERSION


class _Patience(msgspec.Struct, frozen=True):
    """Times of CLOCK_MONOTONIC in seconds; 0 = do not wait at all, None = without an end."""

    absent_until_s: float
    busy_until_s: float
    reply_s: float
    reply_until_s: float | None = None


class _Call(msgspec.Struct, frozen=True):
    """One call while it runs: its frame, the descriptors that go with it, what the config says."""

    frame: Frame
    descriptors: tuple[int, ...]
    config: _Config
    environment: Mapping[str, str]


class _Refused(Exception):
    def __init__(self, code: int, message: str, hint: str, version: str = _NEWEST_VERSION) -> None:
        super().__init__(message)
        self.outcome = _fail(version, code, message, hint)


def call(
    environment: Mapping[str, str], stdin: bytes, *, program: str = wire.CNI_PROGRAM
) -> Outcome:
    """Do what `program` does when it is executed with this environment and stdin."""
    started_boottime_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    command = environment.get("CNI_COMMAND", "")
    if not command:
        hint = "a container runtime runs it, with CNI_COMMAND set"
        return Outcome(0, stderr=f"{program} {__version__}: {hint}\n".encode())
    run = _COMMANDS.get(command)
    try:
        if command == "VERSION":
            return _answer_version(stdin)
        config = _read_config(stdin)
        if run is None:
            raise _Refused(
                4,
                f"CNI_COMMAND is {command!r}",
                "CNI_COMMAND must be ADD, DEL, CHECK, GC, STATUS or VERSION",
                config.cni_version,
            )
        with ExitStack() as opened:
            frame = Frame(
                environment=_select_variables(environment),
                stdin=stdin,
                started_boottime_ns=started_boottime_ns,
                boot_id="" if command == "ADD" else _read_boot_id(),
                program=program,
                launcher_version=__version__,
            )
            frame, descriptors = _open_namespaces(frame, opened)
            _encode(frame, config)
            return run(_Call(frame, descriptors, config, environment))
    except _Refused as refusal:
        return refusal.outcome


def _run_add_or_check(request: _Call) -> Outcome:
    until_s = time.monotonic() + request.config.agent_wait_s
    return _ask_or_fail(request, _Patience(until_s, until_s, wire.REPLY_WAIT_MS / 1000))


def _run_gc(request: _Call) -> Outcome:
    until_s = time.monotonic() + request.config.agent_wait_s
    # GC does not wait for an absent agent, and is never spooled: a list that is replayed later would name too few.
    return _ask_or_fail(request, _Patience(0, until_s, wire.REPLY_WAIT_MS / 1000))


def _run_del(request: _Call) -> Outcome:
    wait_s = _del_wait_ms(request.environment) / 1000
    until_s = time.monotonic() + wait_s
    reply = _ask_agent(request, _Patience(0, until_s, wait_s, until_s))
    # A DEL succeeds with local knowledge alone: what the agent did not do, or cannot do now, is written down.
    if isinstance(reply, Reply) and reply.status is not ReplyStatus.NOT_NOW:
        return _print_reply(reply)
    try:
        _spool(request)
    except OSError as error:
        return _fail(
            request.config.cni_version,
            5,
            f"record the DEL for the agent: write a record into"
            f" {str(_spool_directory(request.config))!r}: {error.strerror}",
            "the agent does not answer and its spool cannot be written;"
            " make room or start podwire-agent",
        )
    return Outcome(0)


def _run_status(request: _Call) -> Outcome:
    wait_s = wire.STATUS_WAIT_MS / 1000
    until_s = time.monotonic() + wait_s
    reply = _ask_agent(request, _Patience(0, until_s, wait_s, until_s))
    if isinstance(reply, Reply):
        return _print_reply(reply)
    # A runtime that hears 50 takes the node out of service: an agent that restarts must not cause that.
    if _agent_was_alive(request):
        return Outcome(0)
    return _fail(
        request.config.cni_version,
        50,
        "the agent does not answer",
        "start podwire-agent; running pods are not affected",
    )


_COMMANDS: Final[Mapping[str, Callable[[_Call], Outcome]]] = {
    "ADD": _run_add_or_check,
    "CHECK": _run_add_or_check,
    "DEL": _run_del,
    "GC": _run_gc,
    "STATUS": _run_status,
}


def _answer_version(stdin: bytes) -> Outcome:
    if len(stdin) > wire.STDIN_MAX_BYTES:
        raise _refused_stdin()
    version = _version_of(_decode_json(stdin)) if stdin else _NEWEST_VERSION
    answer = {"cniVersion": version, "supportedVersions": wire.SUPPORTED_CNI_VERSIONS}
    return Outcome(0, stdout=msgspec.json.encode(answer) + b"\n")


def _fail(version: str, code: int, message: str, hint: str) -> Outcome:
    error = {"cniVersion": version, "code": code, "msg": message, "details": hint}
    return Outcome(1, stdout=json.dumps(error).encode() + b"\n")


def _print_reply(reply: Reply) -> Outcome:
    return Outcome(0 if reply.status is ReplyStatus.DONE else 1, stdout=reply.body)


def _refused_stdin() -> _Refused:
    error = wire.oversized_stdin()
    return _Refused(6, error.message, error.hint)


def _select_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(wire.ENVIRONMENT_PREFIX)
    }


def _read_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _encode(frame: Frame, config: _Config) -> bytes:
    try:
        return wire.encode_frame(frame)
    except PodwireError as error:
        raise _Refused(4, error.message, error.hint, config.cni_version) from error


# --- the configuration: three keys of its top level -------------------------------------------


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _whole_number(text: str) -> int:
    """A number of digits only; -1 for any other, and for one too large to be meant."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1


def _decode_json(stdin: bytes) -> Mapping[str, object]:
    try:
        value = json.loads(
            # The C launcher reads bytes; this client must refuse no more than it does.
            stdin.decode(errors="surrogateescape"),
            parse_constant=_reject_constant,
            parse_int=_whole_number,
        )
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _Refused(
            6,
            "read the network configuration: stdin is not one JSON object",
            "write JSON to stdin",
        )
    return value


def _version_of(document: Mapping[str, object]) -> str:
    version = document.get("cniVersion")
    return str(version) if version in wire.SUPPORTED_CNI_VERSIONS else _NEWEST_VERSION


def _read_config(stdin: bytes) -> _Config:
    if len(stdin) > wire.STDIN_MAX_BYTES:
        raise _refused_stdin()
    document = _decode_json(stdin)
    version = _version_of(document)
    hint = "correct the network configuration; see docs/protocol.md"
    path = document.get("socket", wire.DEFAULT_SOCKET)
    if not isinstance(path, str) or not _is_socket_path(path):
        message = '"socket" is no absolute path of at most 107 bytes'
        raise _Refused(7, f"read the network configuration: {message}", hint, version)
    wait_s = document.get("agent-wait", wire.AGENT_WAIT_DEFAULT_S)
    if type(wait_s) is not int or not 0 <= wait_s <= wire.AGENT_WAIT_MAX_S:
        message = '"agent-wait" is no whole number of 0 to 600'
        raise _Refused(7, f"read the network configuration: {message}", hint, version)
    return _Config(path, wait_s, version)


def _is_socket_path(path: str) -> bool:
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return raw.startswith(b"/") and b"\0" not in raw and len(raw) <= wire.SOCKET_PATH_MAX_BYTES


# --- one exchange with the agent ---------------------------------------------------------------


def _open_namespaces(frame: Frame, opened: ExitStack) -> tuple[Frame, tuple[int, ...]]:
    """Open the pod's namespace and our own mount namespace, and let the frame say what came of it."""
    descriptors: list[int] = []

    def try_open(path: str) -> int:
        try:
            # Non-blocking: a FIFO at that path would hold the launcher.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            return error.errno or errno.EIO
        opened.callback(os.close, fd)
        descriptors.append(fd)
        return 0

    netns_path = frame.environment.get("CNI_NETNS", "")
    netns_errno = try_open(netns_path) if netns_path else 0
    has_netns = bool(descriptors)
    # For plugins that a DEL calls: they run where the runtime would have run them, even if the agent is in a container.
    has_mntns = frame.command != "ADD" and try_open("/proc/self/ns/mnt") == 0
    frame = msgspec.structs.replace(
        frame, has_netns=has_netns, has_mntns=has_mntns, netns_errno=netns_errno
    )
    return frame, tuple(descriptors)


def _ask_or_fail(request: _Call, patience: _Patience) -> Outcome:
    reply = _ask_agent(request, patience)
    if isinstance(reply, Reply):
        return _print_reply(reply)
    cause = os.strerror(reply.errno) if reply.errno else reply.trouble.value
    return _fail(
        request.config.cni_version,
        5 if reply.trouble is _Trouble.UNREACHABLE else 11,
        f"ask the agent at {request.config.socket!r}: {cause}",
        "is podwire-agent running? see `podwire status` and its log",
    )


def _ask_agent(request: _Call, patience: _Patience) -> Reply | _NoReply:
    pause_s = _KNOCK_FIRST_S
    while True:
        reply = _try_agent(request, patience)
        if isinstance(reply, Reply):
            return reply
        # connect(2): a non-blocking UNIX socket gets EAGAIN while the listener's backlog is full.
        busy = reply.trouble is _Trouble.UNREACHABLE and reply.errno == errno.EAGAIN
        if not busy and reply.trouble is not _Trouble.ABSENT:
            return reply
        until_s = patience.busy_until_s if busy else patience.absent_until_s
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return _NoReply(_Trouble.SILENT) if busy else reply
        time.sleep(min(left_s, pause_s))
        pause_s = min(pause_s * 2, _KNOCK_LONGEST_S)


def _try_agent(request: _Call, patience: _Patience) -> Reply | _NoReply:
    until_s = time.monotonic() + patience.reply_s
    if patience.reply_until_s is not None:
        until_s = min(until_s, patience.reply_until_s)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            connection.connect(request.config.socket)
        except OSError as error:
            number = error.errno or errno.EIO
            absent = number in _MEANS_ABSENT
            return _NoReply(_Trouble.ABSENT if absent else _Trouble.UNREACHABLE, number)
        try:
            _send(connection, request, until_s)
            return _receive(connection, until_s)
        except TimeoutError:
            return _NoReply(_Trouble.SILENT)
        except PodwireError:
            return _NoReply(_Trouble.ENDED)  # what came is no reply
        except OSError as error:
            # The agent closed without having read the frame (ECONNRESET, EPIPE): nothing has begun, so the call may
            # be repeated.
            unread = error.errno in _MEANS_UNREAD
            trouble = _Trouble.ABSENT if unread else _Trouble.UNREACHABLE
            return _NoReply(trouble, error.errno or errno.EIO)


def _limit(connection: socket.socket, until_s: float) -> None:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    connection.settimeout(left_s)


def _send(connection: socket.socket, request: _Call, until_s: float) -> None:
    data = memoryview(wire.encode_frame(request.frame))
    descriptors = request.descriptors
    while data:
        _limit(connection, until_s)
        try:
            if descriptors:
                # SCM_RIGHTS go with the first byte only, or the agent would get them twice.
                count = socket.send_fds(connection, [data], list(descriptors), socket.MSG_NOSIGNAL)
            else:
                count = connection.send(data, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            return  # an agent that refuses a frame answers and closes: its answer may be there
        descriptors = ()
        data = data[count:]


def _receive(connection: socket.socket, until_s: float) -> Reply | _NoReply:
    data = bytearray()
    while len(data) < wire.COMMON_HEADER_BYTES or len(data) < wire.reply_bytes(data):
        _limit(connection, until_s)
        part = connection.recv(65536)
        if not part:
            return _NoReply(_Trouble.ENDED)
        data += part
    return wire.decode_reply(bytes(data))


# --- without an agent --------------------------------------------------------------------------


def _del_wait_ms(environment: Mapping[str, str]) -> int:
    wait_ms = _whole_number(environment.get(wire.DEL_WAIT_VARIABLE, ""))
    return wait_ms if 0 < wait_ms <= wire.DEL_WAIT_MS else wire.DEL_WAIT_MS


def _spool_directory(config: _Config) -> Path:
    return Path(config.socket).parent / wire.SPOOL_DIRECTORY


def _spool(request: _Call) -> None:
    """Leave the DEL where the agent finds it, durable on return; OSError when that cannot be done."""
    directory = _spool_directory(request.config)
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    if not directory.is_dir():
        directory.mkdir(mode=0o700, exist_ok=True)
        _sync_directory(directory.parent)
    path = directory / wire.record_name(request.frame.started_boottime_ns, os.getpid())
    temporary = path.with_name(wire.temporary_name(path.name))
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb", buffering=0) as file:
            remaining = memoryview(wire.encode_record(request.frame))
            while remaining:
                remaining = remaining[file.write(remaining) :]
            os.fsync(fd)
        # The record has its name only when it is whole and on disk: the agent reads what has a record's name.
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    # rename(2) is durable only with the directory; the runtime is told that the DEL is done.
    _sync_directory(directory)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _agent_was_alive(request: _Call) -> bool:
    try:
        data = (Path(request.config.socket).parent / wire.ALIVE_FILE).read_bytes()
    except OSError:
        return False
    alive = wire.decode_alive(data)
    now_ms = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
    return (
        alive is not None
        and alive.boot_id == request.frame.boot_id
        and now_ms <= alive.until_boottime_ms
    )
