"""Maps as they were when they were new."""

from collections.abc import Iterator
from typing import Final

from podwire.datapath import abi
from podwire.kernel import bpf
from podwire.kernel.bpf_ring import RingReader

_MAPS_OF_MAPS: Final = (bpf.MapType.ARRAY_OF_MAPS, bpf.MapType.HASH_OF_MAPS)
_ARRAYS: Final = (bpf.MapType.ARRAY, bpf.MapType.PERCPU_ARRAY)


def clear(map_: bpf.Map) -> None:
    """Make a map as it was when it was new."""
    kind = map_.info.type
    if kind in _MAPS_OF_MAPS:
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


def zero_rows(table: bpf.Map) -> None:
    """Set the rows of an array back to zero."""
    changed = [(key, bytes(len(value))) for key, value in changed_rows(table)]
    if changed:
        table.update_batch(changed)


def changed_rows(table: bpf.Map) -> Iterator[tuple[bytes, bytes]]:
    """Give the rows of an array that are not zero; to look at each of thousands takes an emulated machine its time."""
    for keys, values in table.batches():
        # To compare is a hundred times as fast as to strip.
        if values == bytes(len(values)):
            continue
        key_bytes = table.info.key_size
        value_bytes = len(values) * key_bytes // max(len(keys), 1)
        rest = values.lstrip(b"\0")
        while rest:
            row = (len(values) - len(rest)) // value_bytes
            end = (row + 1) * value_bytes
            yield keys[row * key_bytes :][:key_bytes], values[end - value_bytes : end]
            rest = values[end:].lstrip(b"\0")
