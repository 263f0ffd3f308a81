"""The BPF layer against the running kernel: maps, objects, programs, pins, the ring buffer."""

import contextlib
import errno
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwire.kernel import bpf, bpf_object, bpf_program, bpf_ring
from podwire.model.errors import KernelFailure

pytestmark = pytest.mark.kernel

SOURCE = r"""
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

const volatile __u32 verdict = 0;
const volatile __u8 send_event = 1;

struct record { __u64 number; __u32 length; __u32 mark; };
struct locked { struct bpf_spin_lock lock; __u32 value; };

struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, 4);
         __type(key, __u32); __type(value, __u64); } pwt_counts SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 16);
         __type(key, __u32); __type(value, struct locked); } pwt_locked SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_RINGBUF); __uint(max_entries, 65536); } pwt_ring SEC(".maps");
struct pair { __u32 first; __u16 second; __u16 third; };
struct pair pwt_whole_pair;  /* else clang 14 leaves a forward declaration in BTF */
struct inner { __uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 8);
               __uint(key_size, 8); __uint(value_size, 8); };
struct { __uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS); __uint(max_entries, 2);
         __type(key, __u32); __array(values, struct inner); } pwt_outer SEC(".maps");

SEC("tc")
int pwt_main(struct __sk_buff *skb)
{
    __u32 key = 1;
    __u64 *count = bpf_map_lookup_elem(&pwt_counts, &key);
    struct record *record;

    if (count)
        __sync_fetch_and_add(count, 1);
    if (send_event) {
        record = bpf_ringbuf_reserve(&pwt_ring, sizeof(*record), 0);
        if (record) {
            record->number = count ? *count : 0;
            record->length = skb->len;
            record->mark = skb->mark;
            bpf_ringbuf_submit(record, 0);
        }
    }
    skb->mark = skb->mark + skb->ingress_ifindex;
    return verdict;
}

SEC("tc")
int pwt_inner(struct __sk_buff *skb)
{
    __u32 slot = 1;
    struct pair key = {1, 2, 3};
    void *inner = bpf_map_lookup_elem(&pwt_outer, &slot);
    struct pair *value;
    if (!inner)
        return -1;
    value = bpf_map_lookup_elem(inner, &key);
    return value ? value->first : -2;
}

char LICENSE[] SEC("license") = "GPL";
"""

REFUSED = r"""
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
SEC("tc") int pwt_wild(struct __sk_buff *skb)
{
    return *(int *)(long)skb->data;
}
char LICENSE[] SEC("license") = "GPL";
"""

PAIRS = ("pair", "pair")
FRAME = bytes(12) + b"\x08\x00" + bytes(50)


def compile_object(source: str, directory: Path) -> bytes:
    """Compile C for BPF; the bytes of the object."""
    directory.joinpath("probe.bpf.c").write_text(source)
    command = ["clang", "-g", "-O2", "-target", "bpf", "-I/usr/include/x86_64-linux-gnu"]
    subprocess.run([*command, "-c", "probe.bpf.c", "-o", "probe.bpf.o"], cwd=directory, check=True)
    return directory.joinpath("probe.bpf.o").read_bytes()


@pytest.fixture(scope="module")
def object_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return compile_object(SOURCE, tmp_path_factory.mktemp("object"))


@pytest.fixture
def loaded(object_bytes: bytes) -> Iterator[bpf_object.BpfObject]:
    with bpf_object.BpfObject(object_bytes, "probe") as one:
        one.set_constants({"verdict": 2})
        with one.create_inner("pwt_outer", "pwt_model", max_entries=1, rows=PAIRS) as model:
            one.model_inner("pwt_outer", model)
            one.load()
        yield one


@contextlib.contextmanager
def bpffs(directory: Path) -> Iterator[Path]:
    """Mount a BPF file system of our own for the length of a test."""
    directory.mkdir(exist_ok=True)
    bpf.mount_bpffs(str(directory))
    try:
        assert bpf.is_bpffs(str(directory))
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def hash_map(**changes: int) -> bpf.Map:
    sizes = {"key_size": 4, "value_size": 8, "max_entries": 20_000} | changes
    return bpf.create_map(
        bpf.MapType.HASH,
        "pwt_hash",
        key_size=sizes["key_size"],
        value_size=sizes["value_size"],
        max_entries=sizes["max_entries"],
        flags=bpf.CreateFlags.NO_PREALLOC,
    )


def key(number: int) -> bytes:
    return number.to_bytes(4, "little")


def test_row_is_read_back_and_absence_is_none_not_an_error() -> None:
    with hash_map() as rows:
        assert rows.lookup(key(1)) is None
        assert rows.delete(key(1)) is False
        rows.update(key(1), b"12345678")
        assert rows.lookup(key(1)) == b"12345678"
        assert rows.delete(key(1)) is True


@pytest.mark.parametrize(
    ("flags", "present", "number"),
    [
        pytest.param(bpf.Update.NOEXIST, True, errno.EEXIST, id="noexist-on-present"),
        pytest.param(bpf.Update.EXIST, False, errno.ENOENT, id="exist-on-absent"),
    ],
)
def test_conditional_update_fails_with_its_errno(
    flags: bpf.Update, present: bool, number: int
) -> None:
    with hash_map() as rows:
        if present:
            rows.update(key(1), bytes(8))
        with pytest.raises(KernelFailure, match="pwt_hash") as failure:
            rows.update(key(1), bytes(8), flags)
        assert failure.value.errno == number


def test_a_row_is_added_once_and_then_stays_as_it_is() -> None:
    with hash_map() as rows:
        assert rows.add(key(1), b"the 1st!")
        assert not rows.add(key(1), b"the 2nd!")
        assert rows.lookup(key(1)) == b"the 1st!"


def test_a_row_that_does_not_fit_is_refused_when_added() -> None:
    with hash_map(max_entries=1) as rows:
        rows.add(key(1), bytes(8))
        with pytest.raises(KernelFailure, match="pwt_hash") as failure:
            rows.add(key(2), bytes(8))
        assert failure.value.errno == errno.E2BIG


def test_wrong_sizes_are_refused_before_the_kernel_reads_past_them() -> None:
    with hash_map() as rows:
        with pytest.raises(ValueError, match="key has 3 bytes"):
            rows.lookup(b"abc")
        with pytest.raises(ValueError, match="value has 7 bytes"):
            rows.update(key(1), bytes(7))
        with pytest.raises(ValueError, match="a key has not 4 bytes"):
            rows.delete_batch([b"abc", b"abcd"])


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 12_345])
def test_batches_carry_every_row(count: int) -> None:
    with hash_map() as rows:
        wanted = {key(n): (n * 3).to_bytes(8, "little") for n in range(count)}
        rows.update_batch(list(wanted.items()))
        assert dict(rows.items()) == wanted
        assert set(rows.keys()) == set(wanted)
        assert rows.delete_batch([key(n) for n in range(count * 2)]) == count
        assert list(rows.items()) == []


def test_full_map_says_so() -> None:
    with hash_map(max_entries=2) as rows:
        rows.update(key(1), bytes(8))
        rows.update(key(2), bytes(8))
        with pytest.raises(KernelFailure) as failure:
            rows.update(key(3), bytes(8))
        assert failure.value.errno == errno.E2BIG
        assert rows.clear() == 2


def test_prefix_map_is_walked_whole() -> None:
    with bpf.create_map(
        bpf.MapType.LPM_TRIE,
        "pwt_lpm",
        key_size=20,
        value_size=4,
        max_entries=5000,
        flags=bpf.CreateFlags.NO_PREALLOC,
    ) as rows:
        wanted = {
            key(128) + n.to_bytes(16, "big"): (n % 100).to_bytes(4, "little") for n in range(4500)
        }
        rows.update_batch(list(wanted.items()))
        assert dict(rows.items()) == wanted


def test_per_cpu_values_are_cut_and_joined() -> None:
    with bpf.create_map(
        bpf.MapType.PERCPU_HASH, "pwt_cpu", key_size=4, value_size=12, max_entries=4
    ) as rows:
        values = [bytes([cpu]) * 12 for cpu in range(bpf.possible_cpus())]
        # The kernel rounds the value of each CPU up to 8 bytes.
        rows.update(key(1), b"".join(value.ljust(16, b"\0") for value in values))
        found = rows.lookup(key(1))
        assert found is not None
        assert rows.split_cpus(found) == values
        assert [rows.split_cpus(value) for _, value in rows.items()] == [values]


def test_inner_maps_are_reached_by_programs_and_by_id(loaded: bpf_object.BpfObject) -> None:
    with (
        loaded.take_map("pwt_outer") as outer,
        loaded.take_program("pwt_inner") as program,
        loaded.create_inner("pwt_outer", "pwt_inner", max_entries=100, rows=PAIRS) as inner,
    ):
        pair = bytes([1, 0, 0, 0, 2, 0, 3, 0])
        assert program.run(bpf_program.Packet(FRAME)).retval == -1
        outer.update_fd(key(1), inner.fd)
        inner.update(pair, key(77) + bytes(4))
        assert program.run(bpf_program.Packet(FRAME)).retval == 77
        ids = dict(outer.items())
        assert ids == {key(1): key(inner.info.id)}
        reopened = bpf.open_map_by_id(inner.info.id)
        assert reopened is not None
        with reopened:
            assert reopened.lookup(pair) == key(77) + bytes(4)


def test_layout_of_rows_is_read_from_the_kernel_also_of_a_copy(
    loaded: bpf_object.BpfObject,
) -> None:
    members = (
        bpf.Member("first", 0, 4),
        bpf.Member("second", 4, 2),
        bpf.Member("third", 6, 2),
    )
    with (
        loaded.create_inner("pwt_outer", "pwt_inner", max_entries=100, rows=PAIRS) as inner,
        bpf.create_like(inner, "pwt_copy", max_entries=7) as copy,
        hash_map() as plain,
    ):
        for rows in (inner, copy):
            assert bpf.read_layout(rows, of_value=True) == members
            assert bpf.read_layout(rows, of_value=False) == members
        assert (inner.info.max_entries, copy.info.max_entries) == (100, 7)
        assert bpf.read_layout(plain, of_value=True) is None


def test_layout_of_an_unknown_struct_is_refused(loaded: bpf_object.BpfObject) -> None:
    with pytest.raises(KernelFailure, match="find struct 'absent'"):
        loaded.create_inner("pwt_outer", "pwt_inner", max_entries=1, rows=("pair", "absent"))


def test_only_a_map_of_maps_has_inner_maps(loaded: bpf_object.BpfObject) -> None:
    with pytest.raises(KernelFailure) as failure:
        loaded.create_inner("pwt_counts", "pwt_inner", max_entries=1, rows=PAIRS)
    assert failure.value.errno == errno.EINVAL


def test_locked_update_needs_a_lock_in_the_row(loaded: bpf_object.BpfObject) -> None:
    with loaded.take_map("pwt_locked") as rows, hash_map() as plain:
        rows.update(key(1), key(0) + key(5))
        rows.update(key(1), key(0) + key(6), bpf.Update.LOCK | bpf.Update.EXIST)
        assert rows.lookup(key(1), bpf.Update.LOCK) == key(0) + key(6)
        assert list(rows.items(bpf.Update.LOCK)) == [(key(1), key(0) + key(6))]
        with pytest.raises(KernelFailure):
            plain.update(key(1), bytes(8), bpf.Update.LOCK)


def test_run_gives_verdict_packet_mark_and_constants(loaded: bpf_object.BpfObject) -> None:
    with loaded.take_program("pwt_main") as program, loaded.take_map("pwt_counts") as counts:
        result = program.run(
            bpf_program.Packet(FRAME, mark=40, ingress_ifindex=1, ifindex=1), repeat=3
        )
        assert (result.retval, result.data) == (2, FRAME)
        assert result.mark >= 41
        assert counts.lookup(key(1)) == (3).to_bytes(8, "little")
        assert program.info.name == "pwt_main"
        assert len(program.info.tag) == 8


def test_run_refuses_a_frame_that_is_too_short(loaded: bpf_object.BpfObject) -> None:
    with loaded.take_program("pwt_main") as program:
        with pytest.raises(KernelFailure, match="test run 'pwt_main'") as failure:
            program.run(bpf_program.Packet(b"short"))
        assert failure.value.errno == errno.EINVAL


def test_unknown_constant_map_and_program_are_named(object_bytes: bytes) -> None:
    with bpf_object.BpfObject(object_bytes, "probe") as one:
        assert [one.has_constant(name) for name in ("verdict", "absent")] == [True, False]
        with pytest.raises(KernelFailure, match=r"'absent'.*not in probe"):
            one.set_constants({"absent": 1})
        with pytest.raises(KernelFailure, match=r"'absent'.*not in probe"):
            one.shape("absent")
        with pytest.raises(KernelFailure, match="the object is not loaded"):
            one.take_program("pwt_main")


def test_objects_share_a_map_and_refuse_one_of_another_shape(object_bytes: bytes) -> None:
    with (
        bpf.create_map(
            bpf.MapType.ARRAY, "pwt_counts", key_size=4, value_size=8, max_entries=4
        ) as shared,
        hash_map() as other,
        bpf_object.BpfObject(object_bytes, "probe") as one,
    ):
        with pytest.raises(KernelFailure, match="wants type 2"):
            one.use_map("pwt_counts", other)
        one.use_map("pwt_counts", shared)
        one.load()
        with one.take_program("pwt_main") as program:
            program.run(bpf_program.Packet(FRAME))
        assert shared.lookup(key(1)) == (1).to_bytes(8, "little")


def test_declared_shapes_are_told_without_loading(object_bytes: bytes) -> None:
    with bpf_object.BpfObject(object_bytes, "probe") as one:
        outer = one.shape("pwt_outer")
        assert outer.type == bpf.MapType.ARRAY_OF_MAPS
        assert outer.inner is not None
        assert (outer.inner.key_size, outer.inner.value_size) == (8, 8)
        assert sorted(one.map_names) == ["pwt_counts", "pwt_locked", "pwt_outer", "pwt_ring"]
        assert one.program_names == ("pwt_main", "pwt_inner")


def test_verifier_failure_shows_the_last_lines_and_keeps_the_log(tmp_path: Path) -> None:
    data = compile_object(REFUSED, tmp_path)
    with bpf_object.BpfObject(data, "refused") as one:
        with pytest.raises(bpf_object.VerifierFailure) as failure:
            one.load()
        assert "pwt_wild" in failure.value.message
        assert "invalid access to packet" in failure.value.message
        assert "processed " not in failure.value.message
        assert "invalid access to packet" in failure.value.log


def test_garbage_is_no_object() -> None:
    with pytest.raises(KernelFailure, match="open object 'garbage'"):
        bpf_object.BpfObject(b"not an ELF file" * 10, "garbage")


def test_pins_survive_their_maker_and_wrong_shapes_are_refused(
    loaded: bpf_object.BpfObject, tmp_path: Path
) -> None:
    with bpffs(tmp_path / "bpf") as pins:
        path = str(pins / "rows")
        with hash_map() as rows:
            assert (
                bpf.open_pinned_map(path, kind=bpf.MapType.HASH, key_size=4, value_size=8) is None
            )
            rows.pin(path)
            rows.update(key(1), b"12345678")
        again = bpf.open_pinned_map(path, kind=bpf.MapType.HASH, key_size=4, value_size=8)
        assert again is not None
        with again:
            assert again.lookup(key(1)) == b"12345678"
        with pytest.raises(KernelFailure, match=r"rows 4\+8 bytes, expected type 1, 4\+12"):
            bpf.open_pinned_map(path, kind=bpf.MapType.HASH, key_size=4, value_size=12)
        with loaded.take_program("pwt_main") as program:
            program.pin(str(pins / "program"))
            program_id = program.info.id
        pinned = bpf_program.open_pinned_program(str(pins / "program"))
        assert pinned is not None
        with pinned:
            assert pinned.info.id == program_id
        assert bpf_program.open_pinned_program(str(pins / "absent")) is None


def test_pin_outside_a_bpf_file_system_says_what_to_look_at(tmp_path: Path) -> None:
    assert not bpf.is_bpffs(str(tmp_path))
    with pytest.raises(KernelFailure, match="'/absent'"):
        bpf.is_bpffs("/absent")
    with hash_map() as rows, pytest.raises(KernelFailure) as failure:
        rows.pin(str(tmp_path / "rows"))
    assert "bpf file system" in failure.value.hint


def test_ring_gives_every_record_in_order_however_small_the_buffer(
    loaded: bpf_object.BpfObject,
) -> None:
    with (
        loaded.take_map("pwt_ring") as ring,
        loaded.take_program("pwt_main") as program,
        bpf_ring.RingReader(ring, record_bytes=16, records=7) as reader,
    ):
        assert select.select([reader.fd], [], [], 0)[0] == []
        program.run(bpf_program.Packet(FRAME), repeat=100)
        assert select.select([reader.fd], [], [], 5)[0] == [reader.fd]
        numbers: list[int] = []
        more = True
        while more:
            data, more = reader.take()
            numbers += [
                int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 16)
            ]
        assert numbers == list(range(1, 101))
        assert reader.odd_records == 0


def test_records_shorter_than_wanted_are_counted_not_decoded(
    loaded: bpf_object.BpfObject,
) -> None:
    with (
        loaded.take_map("pwt_ring") as ring,
        loaded.take_program("pwt_main") as program,
        bpf_ring.RingReader(ring, record_bytes=24) as reader,
    ):
        program.run(bpf_program.Packet(FRAME), repeat=5)
        assert reader.take() == (b"", False)
        assert reader.odd_records == 5


def test_dropped_open_map_warns() -> None:
    rows = hash_map()
    with pytest.warns(ResourceWarning, match="unclosed Map 'pwt_hash'"):
        del rows


def test_membarrier_is_a_fence_here() -> None:
    assert bpf.membarrier_global() is True
