"""Take records out of a BPF ring buffer, many at once.

Called by `datapath.flow_events`. Never decodes a record. Invariant: a record is either in the bytes that `take` gave,
still in the ring, or counted in `odd_records`. Not thread-safe: one reader has one buffer.
"""

import warnings

from podwire.kernel._libbpf import ffi, lib
from podwire.kernel.bpf import Map, fail
from podwire.model.closing import Closing


class RingReader(Closing):
    """Takes fixed-size records out of a ring buffer map, many at once.

    `fd` becomes readable when there are records; `take` gives them joined, and whether more are
    waiting. Records longer than `record_bytes` are cut to it (a newer program may append fields),
    shorter ones counted in `odd_records` and left out.
    """

    def __init__(self, ring: Map, *, record_bytes: int, records: int = 4096) -> None:
        self.record_bytes = record_bytes
        self.odd_records = 0
        self._drain = lib.pw_drain_open(ring.fd, record_bytes, records)
        if self._drain == ffi.NULL:
            raise fail("map the ring buffer", ring.name)
        self.fd = int(lib.pw_drain_epoll_fd(self._drain))

    def take(self) -> tuple[bytes, bool]:
        """Take what is there, up to the buffer's room; True if it was filled and more may wait."""
        if self._drain == ffi.NULL:
            raise ValueError("RingReader is closed")
        more = int(lib.pw_drain_take(self._drain))
        if more < 0:
            raise fail("drain", "ring buffer")
        size, odd = ffi.new("size_t *"), ffi.new("u64 *")
        start = lib.pw_drain_bytes(self._drain, size, odd)
        self.odd_records = int(odd[0])
        return bytes(ffi.buffer(start, size[0])), bool(more)

    def close(self) -> None:
        """Unmap the ring and give its descriptors back."""
        if self._drain != ffi.NULL:
            lib.pw_drain_close(self._drain)
            self._drain = ffi.NULL

    def __del__(self) -> None:
        if getattr(self, "_drain", ffi.NULL) != ffi.NULL:
            warnings.warn("unclosed RingReader", ResourceWarning, stacklevel=2)
            self.close()
