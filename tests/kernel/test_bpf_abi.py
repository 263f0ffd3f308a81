"""The generated codecs: fresh, exact, and refused where a layout cannot be compared by bytes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwire.datapath import abi

ROOT = Path(__file__).resolve().parents[2]
GENERATOR = ROOT / "scripts" / "generate-abi"

needs_clang = pytest.mark.skipif(shutil.which("clang") is None, reason="clang is not installed")


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(GENERATOR), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_clang
def test_abi_module_is_fresh() -> None:
    result = generate("--check")
    assert result.returncode == 0, result.stderr


@needs_clang
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param("__u8 a; __u32 b;", "hole before b", id="hole-inside"),
        pytest.param("__u64 a; __u32 b;", "hole at its end", id="hole-at-end"),
        pytest.param("__u32 a : 3; __u32 b : 29;", "bit field", id="bit-field"),
        pytest.param("__be16 port; __u16 other;", "suffix _be", id="be-type-without-suffix"),
        pytest.param("__u16 port_be; __u16 other;", "suffix _be", id="suffix-without-be-type"),
        pytest.param("__be32 addr_be;", "only 16-bit", id="wide-big-endian"),
        pytest.param("void *p;", "no codec", id="pointer"),
    ],
)
def test_layout_without_an_exact_codec_is_refused(tmp_path: Path, body: str, reason: str) -> None:
    header = tmp_path / "podwire" / "abi.h"
    header.parent.mkdir()
    header.write_text(
        f"#include <linux/types.h>\n#define PW_ABI_VERSION 1\nstruct pw_odd {{\n{body}\n}};\n"
    )
    result = generate("--header", str(header), "--output", str(tmp_path / "abi.py"))
    assert result.returncode == 1
    assert reason in result.stderr
    assert not (tmp_path / "abi.py").exists()


@needs_clang
def test_staleness_is_noticed(tmp_path: Path) -> None:
    old = tmp_path / "abi.py"
    old.write_text(Path(abi.__file__).read_text().replace("CONNTRACK_SHARDS", "SHARDS"))
    assert generate("--check", "--output", str(old)).returncode == 1


ADDRESS = st.binary(min_size=16, max_size=16)
U32 = st.integers(0, 2**32 - 1)
U16 = st.integers(0, 2**16 - 1)
U8 = st.integers(0, 255)


@given(st.builds(abi.ConntrackKey, U32, U8, U8, U16, ADDRESS, ADDRESS, U16, U16))
def test_conntrack_key_survives_a_round_trip(key: abi.ConntrackKey) -> None:
    assert abi.ConntrackKey.unpack(key.pack()) == key
    assert len(key.pack()) == abi.CONNTRACK_KEY_BYTES


@given(U16, U16)
def test_ports_stand_in_network_order_in_the_row(sport: int, dport: int) -> None:
    key = abi.ConntrackKey(1, abi.Direction.EGRESS, 6, 0, bytes(16), bytes(16), sport, dport)
    assert key.pack()[-4:] == sport.to_bytes(2, "big") + dport.to_bytes(2, "big")


CODECS = {
    name: (one, getattr(abi, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper() + "_BYTES"))
    for name, one in vars(abi).items()
    if hasattr(one, "unpack") and hasattr(one, "_fields")
}


@pytest.mark.parametrize("name", CODECS)
def test_every_row_survives_a_round_trip(name: str) -> None:
    codec, size = CODECS[name]
    row = codec.unpack(bytes(n % 255 + 1 for n in range(size)))
    assert codec.unpack(row.pack()) == row
    assert len(row.pack()) == size
    assert not any(value == 0 for value in row if isinstance(value, int))


def test_padding_and_lock_are_zero() -> None:
    full = b"\1" * abi.CONFIG_VALUE_BYTES
    assert abi.ConfigValue.unpack(full).pack()[:4] == bytes(4)


def test_events_are_read_one_behind_the_other() -> None:
    event = abi.Event.unpack(bytes(range(abi.EVENT_BYTES)))
    assert list(abi.Event.unpack_all(event.pack() * 3)) == [event] * 3
