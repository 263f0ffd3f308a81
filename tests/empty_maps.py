"""Maps as they were when they were new."""

import errno
from collections.abc import Iterable, Iterator
from typing import Final

from podwire.kernel._libbpf import ffi, lib

from podwire.datapath import abi
from podwire.kernel import bpf
from podwire.kernel.bpf_ring import RingReader

_ARRAYS: Final = (bpf.MapType.ARRAY, bpf.MapType.PERCPU_ARRAY)


def clear(map_: bpf.Map) -> None:
    """Make a map as it was when it was new."""
    kind = map_.info.type
    if kind == bpf.MapType.ARRAY_OF_MAPS:
        for _, inner_id in map_.items():
            inner = bpf.open_map_by_id(int.from_bytes(inner_id, "little"))
            assert inner is not None
            with inner:
                clear(inner)
    elif kind in _ARRAYS:
        zero_rows(map_)
    elif kind == bpf.MapType.RINGBUF:
        with RingReader(map_, record_bytes=abi.EVENT_BYTES) as reader:
            while reader.take()[0]:
                pass
    else:
        map_.clear()


def clear_hashes(hashes: Iterable[bpf.Map], key_bytes: int) -> None:
    """Remove the rows of many hashes, most of which have none: such a one costs its share of a system call."""
    key = ffi.new("char[]", key_bytes)
    for map_ in hashes:
        if lib.bpf_map_get_next_key(map_.fd, ffi.NULL, key) and ffi.errno == errno.ENOENT:
            continue
        map_.clear()


def zero_rows(table: bpf.Map) -> None:
    """Set the rows of an array back to zero."""
    changed = [(key, bytes(len(value))) for key, value in changed_rows(table)]
    if changed:
        table.update_batch(changed)


def changed_rows(table: bpf.Map) -> Iterator[tuple[bytes, bytes]]:
    """Give the rows of an array that are not zero; to look at each of thousands is slow under emulation."""
    for keys, values in table.batches():
        key_bytes = table.info.key_size
        rows = len(keys) // key_bytes
        value_bytes = len(values) // max(rows, 1)
        for row in _changed(values, value_bytes, 0, rows):
            yield (
                keys[row * key_bytes : (row + 1) * key_bytes],
                values[row * value_bytes : (row + 1) * value_bytes],
            )


def _changed(values: bytes, value_bytes: int, first: int, end: int) -> Iterator[int]:
    """Give the rows of `first` to `end` that are not zero: to compare a half at once is faster than to look at rows."""
    part = values[first * value_bytes : end * value_bytes]
    if part == bytes(len(part)):
        return
    if end - first == 1:
        yield first
        return
    middle = (first + end) // 2
    yield from _changed(values, value_bytes, first, middle)
    yield from _changed(values, value_bytes, middle, end)
