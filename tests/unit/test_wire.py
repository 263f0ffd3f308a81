"""The launcher's protocol: what is written is read back, and nothing else is accepted."""

import contextlib
import struct
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.model import wire
from podwire.model.errors import InvalidEnvironment, PodwireError, UndecodableRequest
from podwire.model.wire import Alive, Frame, Reply, ReplyStatus

FRAME = Frame(
    environment={"CNI_COMMAND": "DEL", "CNI_CONTAINERID": "c1"},
    stdin=b'{"name": "n"}',
    started_boottime_ns=123456789,
    boot_id="0c6f9a7e-6a55-4b6c-9a9c-3e0a1c7f0001",
    has_netns=True,
    has_mntns=True,
    launcher_version="0.1.0",
)

_values = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
frames = st.builds(
    Frame,
    environment=st.dictionaries(st.from_regex(r"CNI_[A-Z_]{1,20}", fullmatch=True), _values),
    stdin=st.binary(max_size=4096),
    started_boottime_ns=st.integers(0, 2**64 - 1),
    boot_id=st.from_regex(r"[0-9a-f-]{36}", fullmatch=True),
    program=st.sampled_from(["podwire-cni", "podwire-ipam"]),
    has_netns=st.booleans(),
    has_mntns=st.booleans(),
    netns_errno=st.integers(0, 4095),
    launcher_version=st.sampled_from(["", "0.1.0"]),
)


@given(frames)
def test_a_frame_is_read_as_it_was_written(frame: Frame) -> None:
    data = wire.encode_frame(frame)
    assert wire.request_bytes(data[: wire.COMMON_HEADER_BYTES]) == len(data)
    assert wire.decode_frame(data) == frame


@given(st.sampled_from(ReplyStatus), st.binary(max_size=4096))
def test_a_reply_is_read_as_it_was_written(status: ReplyStatus, body: bytes) -> None:
    data = wire.encode_reply(Reply(status, body))
    assert wire.reply_bytes(data) == len(data)
    assert wire.decode_reply(data) == Reply(status, body)


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_never_crashes(data: bytes) -> None:
    for decode in (wire.decode_frame, wire.decode_record, wire.decode_reply):
        with pytest.raises(PodwireError):
            decode(data)


@given(frames, st.data())
def test_a_frame_with_a_changed_byte_is_read_or_refused(frame: Frame, data: st.DataObject) -> None:
    raw = bytearray(wire.encode_frame(frame))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(PodwireError):
        wire.decode_frame(bytes(raw))


@given(frames, st.data())
def test_a_frame_cut_short_anywhere_is_refused(frame: Frame, data: st.DataObject) -> None:
    raw = wire.encode_frame(frame)
    with pytest.raises(UndecodableRequest):
        wire.decode_frame(raw[: data.draw(st.integers(0, len(raw) - 1))])


def _with_item(number: int, value: bytes, base: Frame = FRAME) -> bytes:
    raw = bytearray(wire.encode_frame(base)) + struct.pack("<HHI", number, 0, len(value)) + value
    struct.pack_into("<I", raw, 8, len(raw))
    return bytes(raw)


def _with_byte(offset: int, value: int) -> bytes:
    raw = bytearray(wire.encode_frame(FRAME))
    raw[offset] = value
    return bytes(raw)


def test_an_item_of_the_next_version_is_skipped() -> None:
    assert wire.decode_frame(_with_item(77, b"of a newer launcher")) == FRAME


def test_another_minor_version_is_read() -> None:
    assert wire.decode_frame(_with_byte(5, 9)) == FRAME


REFUSED: dict[str, tuple[Callable[[], bytes], type[PodwireError], str]] = {
    "another major version": (lambda: _with_byte(4, 2), wire.UnsupportedProtocol, "version 2"),
    "another magic": (lambda: _with_byte(0, 0), UndecodableRequest, "begins with"),
    "length below the header": (lambda: _with_byte(8, 1), UndecodableRequest, "it says it has"),
    "length above the limit": (lambda: _with_byte(11, 255), UndecodableRequest, "it says it has"),
    "one more byte": (lambda: wire.encode_frame(FRAME) + b"x", UndecodableRequest, "not one whole"),
    "program twice": (lambda: _with_item(1, b"x"), UndecodableRequest, "PROGRAM comes twice"),
    "errno of two bytes": (lambda: _with_item(5, b"xx"), UndecodableRequest, "NETNS_ERRNO"),
    "not a CNI variable": (lambda: _with_item(2, b"PATH=/bin"), UndecodableRequest, "'PATH'"),
    "variable without value": (lambda: _with_item(2, b"CNI_X"), UndecodableRequest, "'CNI_X'"),
    "variable not UTF-8": (lambda: _with_item(2, b"CNI_X=\xff"), InvalidEnvironment, "CNI_X"),
    "variable with two values": (
        lambda: _with_item(2, b"CNI_COMMAND=ADD"),
        InvalidEnvironment,
        "both 'DEL' and 'ADD'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_frame_is_refused_with_its_reason(case: str) -> None:
    make, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        wire.decode_frame(make())


@pytest.mark.parametrize("item", [wire.Item.PROGRAM, wire.Item.BOOT_ID])
def test_a_frame_without_a_required_item_is_refused(item: wire.Item) -> None:
    raw = bytearray(wire.encode_frame(FRAME))
    offset = wire.REQUEST_HEADER_BYTES
    while struct.unpack_from("<H", raw, offset)[0] != item:
        offset += 8 + struct.unpack_from("<I", raw, offset + 4)[0]
    struct.pack_into("<H", raw, offset, 999)
    with pytest.raises(UndecodableRequest, match=f"{item.name} is missing"):
        wire.decode_frame(bytes(raw))


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        pytest.param({"stdin": b"x" * (wire.STDIN_MAX_BYTES + 1)}, UndecodableRequest, id="stdin"),
        pytest.param(
            {"environment": {"CNI_ARGS": "x" * wire.FRAME_MAX_BYTES}},
            InvalidEnvironment,
            id="environment",
        ),
    ],
)
def test_what_does_not_fit_a_frame_is_refused(
    frame: dict[str, object], error: type[PodwireError]
) -> None:
    with pytest.raises(error, match=str(wire.FRAME_MAX_BYTES) + "|" + str(wire.STDIN_MAX_BYTES)):
        wire.encode_frame(msgspec.structs.replace(FRAME, **frame))


def test_the_largest_stdin_fits() -> None:
    frame = msgspec.structs.replace(FRAME, stdin=b"x" * wire.STDIN_MAX_BYTES)
    assert wire.decode_frame(wire.encode_frame(frame)) == frame


def test_a_record_is_the_frame_without_descriptors() -> None:
    record = wire.decode_record(wire.encode_record(FRAME))
    assert record == msgspec.structs.replace(FRAME, has_netns=False, has_mntns=False)


@pytest.mark.parametrize("command", ["ADD", "GC", ""])
def test_only_a_del_can_be_spooled(command: str) -> None:
    frame = msgspec.structs.replace(FRAME, environment={"CNI_COMMAND": command})
    with pytest.raises(UndecodableRequest, match="not a DEL"):
        wire.decode_record(wire.encode_frame(frame))


@given(st.integers(0, 2**63), st.integers(0, 2**63), st.integers(1, 2**22))
def test_record_names_sort_by_start(one_ns: int, other_ns: int, pid: int) -> None:
    names = [wire.record_name(ns, pid) for ns in (one_ns, other_ns)]
    assert all(wire.is_record_name(name) for name in names)
    assert (names[0] < names[1]) == (one_ns < other_ns)
    assert wire.temporary_writer(wire.temporary_name(names[0])) == (one_ns, pid)
    assert not wire.is_record_name(wire.temporary_name(names[0]))


@pytest.mark.parametrize("name", [".00000000000000000001-1.del.tmp", "bad", "1-1.del", "x.del"])
def test_other_files_are_not_taken_for_records(name: str) -> None:
    assert not wire.is_record_name(name)
    assert name.startswith(".") or wire.temporary_writer(name) is None


def test_alive_is_read_as_it_was_written() -> None:
    alive = Alive("0c6f9a7e", 42)
    assert wire.decode_alive(wire.encode_alive(alive)) == alive


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"boot", b"0c6f -1\n", b"0c6f 1 2\n", b"0c6f 1\nx", b"\xff 1\n", b"0c6f 1e3\n"],
)
def test_anything_else_is_no_sign_of_life(data: bytes) -> None:
    assert wire.decode_alive(data) is None


def test_a_status_of_a_newer_agent_counts_as_failure() -> None:
    raw = bytearray(wire.encode_reply(Reply(ReplyStatus.DONE, b"{}")))
    raw[6] = 9
    assert wire.decode_reply(bytes(raw)) == Reply(ReplyStatus.FAILED, b"{}")
