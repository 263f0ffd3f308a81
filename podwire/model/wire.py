"""The launcher's protocol: frames, replies, spool records and the file `alive`, encoded and decoded.

Called by `cni.launcher`, `agent.cni.socket` and `agent.cni.spool`; `launcher/` is the same in C (a test compares the
numbers). Never touches a socket, file or clock. Invariant: the decoders of the version before and of the version after
read what an encoder writes. Anything else is refused with a message, never half understood. Described in
docs/protocol.md.
"""

import enum
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from podwire.model.errors import InvalidEnvironment, PodwireError, Unavailable, UndecodableRequest

MAJOR: Final = 1
MINOR: Final = 0

REQUEST_MAGIC: Final = b"PWRQ"
REPLY_MAGIC: Final = b"PWRP"

FRAME_MAX_BYTES: Final = 1 << 20
STDIN_MAX_BYTES: Final = FRAME_MAX_BYTES - (64 << 10)
"""What remains of a frame is for the environment; the kernel allows more of it than we carry."""
REPLY_MAX_BYTES: Final = 1 << 20
SOCKET_PATH_MAX_BYTES: Final = 107
"""`sun_path` without its final NUL (unix(7))."""

AGENT_WAIT_DEFAULT_S: Final = 30
AGENT_WAIT_MAX_S: Final = 600
REPLY_WAIT_MS: Final = 120_000
"""How long a launcher waits for the answer to ADD, CHECK and GC once the agent has its frame."""
DEL_WAIT_MS: Final = 20_000
STATUS_WAIT_MS: Final = 200

CNI_PROGRAM: Final = "podwire-cni"
IPAM_PROGRAM: Final = "podwire-ipam"
"""The launcher's second name: addresses for other main plugins."""

DEFAULT_SOCKET: Final = "/run/podwire/cni.sock"
SPOOL_DIRECTORY: Final = "spool"
ALIVE_FILE: Final = "alive"
ENVIRONMENT_PREFIX: Final = "CNI_"
DEL_WAIT_VARIABLE: Final = "PODWIRE_DEL_TIMEOUT_MS"

SUPPORTED_CNI_VERSIONS: Final = ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
"""Ascending: comparisons are by index."""


class UnsupportedProtocol(Unavailable):
    """The other side speaks another major version; an upgrade is under way or went wrong."""


# Little-endian without padding ("<"): the C side writes the same bytes whatever its compiler aligns.
_COMMON = struct.Struct("<4sBBHI")
"""Magic, major, minor, flags or status, total bytes: the same in every version of the protocol."""
_REQUEST_REST = struct.Struct("<IQ")
_ITEM = struct.Struct("<HHI")
_ERRNO = struct.Struct("<I")

COMMON_HEADER_BYTES: Final = _COMMON.size
REQUEST_HEADER_BYTES: Final = _COMMON.size + _REQUEST_REST.size

_RECORD_NAME = re.compile(r"[0-9]{20}-[0-9]+\.del")
_TEMPORARY_NAME = re.compile(r"\.(?P<started_ns>[0-9]{20})-(?P<pid>[0-9]{1,10})\.del\.tmp")
_ALIVE_LINE = re.compile(r"(?P<boot_id>[0-9a-f-]{1,64}) (?P<until_ms>[0-9]{1,19})\n?")


class Flag(enum.IntFlag):
    """Which descriptors come with a frame, in this order."""

    NETNS = 1
    MNTNS = 2


class Item(enum.IntEnum):
    """Types of the items behind a frame's header. A reader skips types that it does not know."""

    PROGRAM = 1
    ENVIRONMENT = 2
    STDIN = 3
    BOOT_ID = 4
    NETNS_ERRNO = 5
    LAUNCHER_VERSION = 6


class ReplyStatus(enum.IntEnum):
    """What a launcher does with a reply's body."""

    DONE = 0
    """Print it, exit 0."""
    FAILED = 1
    """Print it, exit 1."""
    NOT_NOW = 2
    """As FAILED, but a DEL is written into the spool and succeeds."""


# Numbers, because each request is decoded by them: looking a member of an enumeration up in a dictionary runs Python.
_NETNS, _MNTNS = Flag.NETNS.value, Flag.MNTNS.value
_ENVIRONMENT, _STDIN = Item.ENVIRONMENT.value, Item.STDIN.value
_NETNS_ERRNO = Item.NETNS_ERRNO.value
_KNOWN_ITEMS = frozenset(item.value for item in Item)
_KNOWN_STATUSES = frozenset(ReplyStatus)


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as the launcher was called."""

    environment: Mapping[str, str]
    """The variables whose names begin with `CNI_`."""
    stdin: bytes
    started_boottime_ns: int
    boot_id: str
    program: str = CNI_PROGRAM
    """The name that the launcher was called under."""
    has_netns: bool = False
    has_mntns: bool = False
    netns_errno: int = 0
    """Why CNI_NETNS could not be opened; 0 = it was opened, or is empty."""
    launcher_version: str = ""

    @property
    def command(self) -> str:
        """The value of CNI_COMMAND, "" when it is missing."""
        return self.environment.get("CNI_COMMAND", "")

    @property
    def descriptor_count(self) -> int:
        """How many descriptors come with the frame."""
        return int(self.has_netns) + int(self.has_mntns)


class Reply(msgspec.Struct, frozen=True):
    """The agent's answer: how to exit, and the bytes for stdout."""

    status: ReplyStatus
    body: bytes


class Alive(msgspec.Struct, frozen=True):
    """Until when STATUS may succeed without the agent, in one boot of the kernel."""

    boot_id: str
    until_boottime_ms: int


def encode_frame(frame: Frame) -> bytes:
    """Write a frame; UndecodableRequest or InvalidEnvironment when it would be too large."""
    if len(frame.stdin) > STDIN_MAX_BYTES:
        raise oversized_stdin()
    items = bytearray()
    _put(items, Item.PROGRAM, _text(frame.program))
    for name, value in frame.environment.items():
        _put(items, Item.ENVIRONMENT, _text(f"{name}={value}"))
    _put(items, Item.STDIN, frame.stdin)
    _put(items, Item.BOOT_ID, _text(frame.boot_id))
    if frame.netns_errno:
        _put(items, Item.NETNS_ERRNO, _ERRNO.pack(frame.netns_errno))
    if frame.launcher_version:
        _put(items, Item.LAUNCHER_VERSION, _text(frame.launcher_version))
    total_bytes = REQUEST_HEADER_BYTES + len(items)
    if total_bytes > FRAME_MAX_BYTES:
        raise InvalidEnvironment(
            f"send the request: it has {total_bytes} bytes with its environment,"
            f" at most {FRAME_MAX_BYTES} fit",
            hint="make the CNI_* variables shorter",
        )
    flags = (Flag.NETNS if frame.has_netns else 0) | (Flag.MNTNS if frame.has_mntns else 0)
    return (
        _COMMON.pack(REQUEST_MAGIC, MAJOR, MINOR, flags, total_bytes)
        + _REQUEST_REST.pack(0, frame.started_boottime_ns)
        + items
    )


def request_bytes(header: bytes | bytearray) -> int:
    """Tell how long the frame is that begins with `header` (at least COMMON_HEADER_BYTES)."""
    magic, major, _minor, _flags, total_bytes = _COMMON.unpack_from(header)
    if magic != REQUEST_MAGIC:
        raise UndecodableRequest(
            f"read the request: it begins with {magic!r}, not with {REQUEST_MAGIC!r}",
            hint="only podwire-cni talks to this socket",
        )
    # The magic and the version stand first in every version, so that a launcher of another version is told what is
    # wrong.
    if major != MAJOR:
        raise UnsupportedProtocol(
            f"read the request: it has protocol version {major}, this agent speaks {MAJOR}",
            hint="bring launcher and agent to neighbouring versions",
        )
    if not REQUEST_HEADER_BYTES <= total_bytes <= FRAME_MAX_BYTES:
        raise UndecodableRequest(
            f"read the request: it says it has {total_bytes} bytes;"
            f" {REQUEST_HEADER_BYTES} to {FRAME_MAX_BYTES} are allowed",
            hint="make the network configuration smaller",
        )
    return int(total_bytes)


def decode_frame(data: bytes) -> Frame:
    """Read one whole frame.

    Raises UndecodableRequest, InvalidEnvironment or UnsupportedProtocol.
    """
    if len(data) < REQUEST_HEADER_BYTES or request_bytes(data) != len(data):
        raise UndecodableRequest(f"read the request: {len(data)} bytes are not one whole frame")
    flags = _COMMON.unpack_from(data)[3]
    _reserved, started_boottime_ns = _REQUEST_REST.unpack_from(data, COMMON_HEADER_BYTES)
    single: dict[int, bytes] = {}
    environment: dict[str, str] = {}
    for number, value in _list_items(data):
        if number == _ENVIRONMENT:
            _add_variable(environment, value)
        elif number in single:
            raise UndecodableRequest(f"read the request: item {Item(number).name} comes twice")
        else:
            single[number] = value
    return Frame(
        environment=environment,
        stdin=single.get(_STDIN, b""),
        started_boottime_ns=started_boottime_ns,
        boot_id=_ascii(single, Item.BOOT_ID),
        program=_ascii(single, Item.PROGRAM),
        has_netns=bool(flags & _NETNS),
        has_mntns=bool(flags & _MNTNS),
        netns_errno=_errno(single.get(_NETNS_ERRNO)),
        launcher_version=_ascii(single, Item.LAUNCHER_VERSION, required=False),
    )


def encode_record(frame: Frame) -> bytes:
    """Write a DEL for the spool: its frame, without descriptors."""
    return encode_frame(msgspec.structs.replace(frame, has_netns=False, has_mntns=False))


def decode_record(data: bytes) -> Frame:
    """Read a spooled DEL; as `decode_frame`, and UndecodableRequest for anything but a DEL."""
    frame = decode_frame(data)
    if frame.command != "DEL":
        raise UndecodableRequest(f"read a spooled request: it is {frame.command!r}, not a DEL")
    return frame


def record_name(started_boottime_ns: int, pid: int) -> str:
    """Name a spool record, so that the names' order is the order of the launchers' starts."""
    # Zeros in front, so that the order of names is the order of starts: DELs are carried out in that order.
    return f"{started_boottime_ns:020d}-{pid}.del"


def temporary_name(record: str) -> str:
    """Name the file in which a record is written before it is renamed."""
    return f".{record}.tmp"


def temporary_writer(name: str) -> tuple[int, int] | None:
    """Give start and process id of the launcher that writes, or wrote, a temporary file; None for other files."""
    match = _TEMPORARY_NAME.fullmatch(name)
    return (int(match["started_ns"]), int(match["pid"])) if match else None


def is_record_name(name: str) -> bool:
    """Tell records from temporary and foreign files in the spool directory."""
    return _RECORD_NAME.fullmatch(name) is not None


def encode_reply(reply: Reply) -> bytes:
    """Write an answer. Its header is the same in every version, for any launcher to read."""
    total_bytes = COMMON_HEADER_BYTES + len(reply.body)
    if total_bytes > REPLY_MAX_BYTES:
        raise ValueError(f"a reply has at most {REPLY_MAX_BYTES} bytes, not {total_bytes}")
    return _COMMON.pack(REPLY_MAGIC, MAJOR, MINOR, reply.status, total_bytes) + reply.body


def reply_bytes(header: bytes | bytearray) -> int:
    """Tell how long the reply is that begins with `header` (at least COMMON_HEADER_BYTES)."""
    magic, _major, _minor, _status, total_bytes = _COMMON.unpack_from(header)
    if magic != REPLY_MAGIC or not COMMON_HEADER_BYTES <= total_bytes <= REPLY_MAX_BYTES:
        raise UndecodableRequest(f"read the agent's answer: {header[:COMMON_HEADER_BYTES]!r}")
    return int(total_bytes)


def decode_reply(data: bytes) -> Reply:
    """Read one whole reply; a status that is not known counts as FAILED."""
    if len(data) < COMMON_HEADER_BYTES or reply_bytes(data) != len(data):
        raise UndecodableRequest(f"read the agent's answer: {len(data)} bytes are not one reply")
    number = _COMMON.unpack_from(data)[3]
    # An older launcher that meets a newer status must fail rather than claim success.
    known = number in _KNOWN_STATUSES
    return Reply(
        ReplyStatus(number) if known else ReplyStatus.FAILED, bytes(data[COMMON_HEADER_BYTES:])
    )


def encode_alive(alive: Alive) -> bytes:
    """Write the file `alive`: one line."""
    return f"{alive.boot_id} {alive.until_boottime_ms}\n".encode()


def decode_alive(data: bytes) -> Alive | None:
    """Read the file `alive`; None when it is not exactly one such line."""
    match = _ALIVE_LINE.fullmatch(data.decode("ascii", "replace"))
    return Alive(match["boot_id"], int(match["until_ms"])) if match else None


def oversized_stdin() -> PodwireError:
    """Give the refusal of a network configuration that no frame can carry."""
    return UndecodableRequest(
        f"read the network configuration: it has more than {STDIN_MAX_BYTES} bytes",
        hint="make the configuration on stdin smaller",
    )


def _put(items: bytearray, item: Item, value: bytes) -> None:
    items += _ITEM.pack(item, 0, len(value))
    items += value


def _text(text: str) -> bytes:
    """Give the bytes; what is not UTF-8 passes unchanged, and the agent refuses it by name."""
    return text.encode(errors="surrogateescape")


def _list_items(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Give number and value of every item of a known type."""
    offset, end = REQUEST_HEADER_BYTES, len(data)
    while offset < end:
        if end - offset < _ITEM.size:
            raise UndecodableRequest(f"read the request: an item is cut off at byte {offset}")
        number, _reserved, length = _ITEM.unpack_from(data, offset)
        offset += _ITEM.size
        if end - offset < length:
            raise UndecodableRequest(f"read the request: item {number} leaves the frame")
        if number in _KNOWN_ITEMS:
            yield number, data[offset : offset + length]
        offset += length


def _add_variable(environment: dict[str, str], value: bytes) -> None:
    raw_name, equals, raw_value = value.partition(b"=")
    name = raw_name.decode("ascii", "backslashreplace")
    if not equals or not name.startswith(ENVIRONMENT_PREFIX):
        raise UndecodableRequest(f"read the request: {name!r} is no CNI_ variable")
    try:
        text = raw_value.decode()
    except UnicodeDecodeError as error:
        raise InvalidEnvironment(
            f"read the environment: {name} is not UTF-8 at byte {error.start}",
            hint=f"{name} must be text",
        ) from error
    if environment.setdefault(name, text) != text:
        raise InvalidEnvironment(
            f"read the environment: {name} is both {environment[name]!r} and {text!r}",
            hint="set each variable once",
        )


def _ascii(items: Mapping[int, bytes], item: Item, *, required: bool = True) -> str:
    value = items.get(item.value)
    if value is None:
        if required:
            raise UndecodableRequest(f"read the request: item {item.name} is missing")
        return ""
    return value.decode("ascii", "backslashreplace")


def _errno(value: bytes | None) -> int:
    if value is None:
        return 0
    if len(value) != _ERRNO.size:
        raise UndecodableRequest(f"read the request: NETNS_ERRNO has {len(value)} bytes")
    return int(_ERRNO.unpack(value)[0])
