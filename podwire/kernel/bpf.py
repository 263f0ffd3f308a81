"""BPF maps, pins and the memory barrier, through libbpf.

Called by `datapath` (and by the packet tests). Never knows what a row means: keys and values are
bytes here, and `datapath.maps` gives them types. Programs are in `kernel.bpf_program`, object files
in `kernel.bpf_object`, the ring buffer in `kernel.bpf_ring`. Invariant: the holder of a `Map` owns
one descriptor and closes it; a dropped open one raises ResourceWarning. Every failure is a
KernelFailure that names the map or path. Thread-safe: the kernel serialises what needs it.
"""

import enum
import errno
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from podwire.kernel._libbpf import ffi, lib
from podwire.model.closing import Closing
from podwire.model.errors import KernelFailure

BATCH_ROWS: Final = 4096
_LAYOUT_BYTES: Final = 16384


class MapType(enum.IntEnum):
    """The map types in use (enum bpf_map_type in linux/bpf.h)."""

    HASH = 1
    ARRAY = 2
    PROG_ARRAY = 3
    PERCPU_HASH = 5
    PERCPU_ARRAY = 6
    LRU_HASH = 9
    LRU_PERCPU_HASH = 10
    LPM_TRIE = 11
    ARRAY_OF_MAPS = 12
    HASH_OF_MAPS = 13
    RINGBUF = 27


_PER_CPU: Final = frozenset(
    {MapType.PERCPU_HASH, MapType.PERCPU_ARRAY, MapType.LRU_PERCPU_HASH},
)


class Update(enum.IntFlag):
    """Flags of an update; LOCK also applies to look-ups (BPF_ANY .. BPF_F_LOCK in linux/bpf.h)."""

    ANY = 0
    NOEXIST = 1
    EXIST = 2
    LOCK = 4


class CreateFlags(enum.IntFlag):
    """Flags of a new map (BPF_F_* in linux/bpf.h)."""

    NONE = 0
    NO_PREALLOC = 1


@dataclass(frozen=True)
class MapInfo:
    """What the kernel says about a map.

    Sizes in bytes; of per-CPU maps, the size of one CPU's value.
    """

    type: int
    id: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int
    name: str


def fail(call: str, object_name: str, *, detail: str = "", hint: str = "") -> KernelFailure:
    """Make the error of the libbpf call that has just failed on this thread."""
    return KernelFailure(int(ffi.errno) or errno.EIO, call, object_name, detail=detail, hint=hint)


def possible_cpus() -> int:
    """Give the number of values that each key of a per-CPU map has."""
    count = int(lib.libbpf_num_possible_cpus())
    if count <= 0:
        raise KernelFailure(-count, "count", "possible CPUs")
    return count


class Descriptor(Closing):
    """One owned descriptor of a BPF object: a map or a program."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self.name = name

    @property
    def fd(self) -> int:
        """The descriptor, valid until `close`."""
        if self._fd < 0:
            raise ValueError(f"{type(self).__name__} {self.name!r} is closed")
        return self._fd

    @property
    def closed(self) -> bool:
        """Tell whether the descriptor was given back."""
        return self._fd < 0

    def close(self) -> None:
        """Give the descriptor back; the kernel object lives on while pinned, attached or in use."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            warnings.warn(
                f"unclosed {type(self).__name__} {self.name!r}", ResourceWarning, stacklevel=2
            )
            self.close()

    def pin(self, path: str) -> None:
        """Give the object a name in a BPF file system, so that it outlives this process."""
        if lib.bpf_obj_pin(self.fd, path.encode()):
            raise fail("pin", path, hint="is a bpf file system mounted there?")


class Map(Descriptor):
    """An open map. Keys and values are bytes of exactly the sizes in `info`."""

    def __init__(self, fd: int, *, name: str = "") -> None:
        super().__init__(fd, name or f"fd {fd}")
        self.info = read_map_info(fd)
        self.name = name or self.info.name
        self._per_cpu = self.info.type in _PER_CPU
        if self._per_cpu:
            # The kernel copies one value for each possible CPU, not only for those online, and rounds each up to
            # eight bytes (kernel/bpf/syscall.c:bpf_map_value_size).
            self._stride = (self.info.value_size + 7) // 8 * 8
            self._value_bytes = self._stride * possible_cpus()
        else:
            self._value_bytes = self.info.value_size

    def _check(self, key: bytes, value: bytes | None = None) -> None:
        if len(key) != self.info.key_size:
            raise ValueError(f"{self.name}: key has {len(key)} bytes, not {self.info.key_size}")
        if value is not None and len(value) != self._value_bytes:
            raise ValueError(f"{self.name}: value has {len(value)} bytes, not {self._value_bytes}")

    def update(self, key: bytes, value: bytes, flags: Update = Update.ANY) -> None:
        """Write one row.

        NOEXIST and EXIST fail with errno EEXIST and ENOENT; LOCK writes in place.
        """
        self._check(key, value)
        if lib.bpf_map_update_elem(self.fd, ffi.from_buffer(key), ffi.from_buffer(value), flags):
            raise fail("write a row of", self.name)

    def add(self, key: bytes, value: bytes) -> bool:
        """Write one row if the key has none; False, and no change, if it has one."""
        self._check(key, value)
        # NOEXIST decides and writes in one step. A look-up before the write could overwrite what a program has
        # counted in between.
        flag = Update.NOEXIST
        if lib.bpf_map_update_elem(self.fd, ffi.from_buffer(key), ffi.from_buffer(value), flag):
            if ffi.errno == errno.EEXIST:
                return False
            raise fail("write a row of", self.name)
        return True

    def update_fd(self, key: bytes, fd: int) -> None:
        """Put a map or program, given by its descriptor, into a map of maps or of programs."""
        # User space writes a descriptor and reads back an id (kernel/bpf/map_in_map.c:bpf_map_fd_sys_lookup_elem).
        # Every supported machine is little-endian.
        self.update(key, fd.to_bytes(4, "little"))

    def lookup(self, key: bytes, flags: Update = Update.ANY) -> bytes | None:
        """Read one row, None if there is none; of a map of maps the id (u32) of the inner map."""
        self._check(key)
        value = ffi.new("char[]", self._value_bytes)
        if lib.bpf_map_lookup_elem_flags(self.fd, ffi.from_buffer(key), value, flags):
            if ffi.errno == errno.ENOENT:
                return None
            raise fail("read a row of", self.name)
        return bytes(ffi.buffer(value))

    def delete(self, key: bytes) -> bool:
        """Remove one row; False if there was none."""
        self._check(key)
        if lib.bpf_map_delete_elem(self.fd, ffi.from_buffer(key)):
            if ffi.errno == errno.ENOENT:
                return False
            raise fail("delete a row of", self.name)
        return True

    def split_cpus(self, value: bytes) -> list[bytes]:
        """Cut the value of a per-CPU map into one value for each possible CPU."""
        size = self.info.value_size
        return [value[at : at + size] for at in range(0, len(value), self._stride)]

    def keys(self) -> Iterator[bytes]:
        """Walk the keys; rows written or removed meanwhile may be missed or seen twice."""
        current = ffi.NULL
        while True:
            # A key that was removed meanwhile makes the kernel begin anew at the first one
            # (kernel/bpf/hashtab.c:htab_map_get_next_key), so the walk must not run while the caller deletes.
            following = ffi.new("char[]", self.info.key_size)
            if lib.bpf_map_get_next_key(self.fd, current, following):
                if ffi.errno == errno.ENOENT:
                    return
                raise fail("walk the keys of", self.name)
            yield bytes(ffi.buffer(following))
            current = following

    def items(self, flags: Update = Update.ANY) -> Iterator[tuple[bytes, bytes]]:
        """Walk all rows, in batches where the map's type has them."""
        key_size, value_size = self.info.key_size, self._value_bytes
        try:
            for keys, values in self.batches(flags):
                for row in range(len(keys) // key_size):
                    yield (
                        keys[row * key_size : (row + 1) * key_size],
                        values[row * value_size : (row + 1) * value_size],
                    )
        except KernelFailure as failure:
            # Arrays of maps have no batches: kernel/bpf/syscall.c answers ENOTSUPP (524), libbpf
            # EOPNOTSUPP.
            if failure.errno not in (errno.EOPNOTSUPP, 524):
                raise
            for key in self.keys():
                value = self.lookup(key, flags)
                if value is not None:
                    yield key, value

    def batches(self, flags: Update = Update.ANY) -> Iterator[tuple[bytes, bytes]]:
        """Walk all rows in batches: keys one behind the other, and their values. Not every type of map has them."""
        key_size, value_size = self.info.key_size, self._value_bytes
        # The cursor is a bucket's number for hashes, and the last key for the types that use
        # generic_map_lookup_batch.
        cursor_bytes = max(key_size, 8)
        cursors = [ffi.new("char[]", cursor_bytes), ffi.new("char[]", cursor_bytes)]
        rows = min(BATCH_ROWS, max(self.info.max_entries, 1))
        count = ffi.new("u32 *")
        started = False
        while True:
            keys = ffi.new("char[]", rows * key_size)
            values = ffi.new("char[]", rows * value_size)
            count[0] = rows
            result = lib.pw_lookup_batch(
                self.fd, cursors[0] if started else ffi.NULL, cursors[1], keys, values, count, flags
            )
            error = ffi.errno if result else 0
            if error == errno.ENOSPC:
                # One bucket of the hash holds more rows than fit: the kernel wants more room, not
                # fewer rows.
                rows *= 2
                continue
            # ENOENT comes with the last batch, which may hold rows: it is given before the walk ends.
            if error not in (0, errno.ENOENT):
                raise fail("read the rows of", self.name)
            yield (
                bytes(ffi.buffer(keys, count[0] * key_size)),
                bytes(ffi.buffer(values, count[0] * value_size)),
            )
            if error == errno.ENOENT:
                return
            started = True
            cursors.reverse()

    def update_batch(self, rows: Sequence[tuple[bytes, bytes]], flags: Update = Update.ANY) -> None:
        """Write many rows with few calls.

        Not atomic: on failure the rows before the bad one are written.
        """
        for chunk in _chunks(rows):
            keys = b"".join(key for key, _ in chunk)
            values = b"".join(value for _, value in chunk)
            self._check_batch(len(chunk), keys, values)
            count = ffi.new("u32 *", len(chunk))
            if lib.pw_update_batch(
                self.fd, ffi.from_buffer(keys), ffi.from_buffer(values), count, flags
            ):
                raise fail("write rows of", self.name, detail=f"{count[0]} of {len(chunk)} done")

    def delete_batch(self, keys: Iterable[bytes]) -> int:
        """Remove many rows with few calls, absent ones included; give the number removed."""
        removed = 0
        # The keys often come from a walk of this very map: they are collected before the first deletion.
        wanted = list(keys)
        for start in range(0, len(wanted), BATCH_ROWS):
            rest = wanted[start : start + BATCH_ROWS]
            while rest:
                joined = b"".join(rest)
                self._check_batch(len(rest), joined, None)
                count = ffi.new("u32 *", len(rest))
                # The kernel puts the number of deleted rows into `count` also where it fails
                # (kernel/bpf/syscall.c:generic_map_delete_batch).
                result = lib.pw_delete_batch(self.fd, ffi.from_buffer(joined), count)
                removed += count[0]
                if not result:
                    break
                if ffi.errno != errno.ENOENT:
                    raise fail("delete rows of", self.name)
                rest = rest[count[0] + 1 :]  # the kernel stops at the first absent key
        return removed

    def _check_batch(self, rows: int, keys: bytes, values: bytes | None) -> None:
        if len(keys) != rows * self.info.key_size:
            raise ValueError(f"{self.name}: a key has not {self.info.key_size} bytes")
        if values is not None and len(values) != rows * self._value_bytes:
            raise ValueError(f"{self.name}: a value has not {self._value_bytes} bytes")

    def clear(self) -> int:
        """Remove every row of a hash or LPM map; give the number removed. An empty one costs a single call."""
        first = ffi.new("char[]", self.info.key_size)
        if lib.bpf_map_get_next_key(self.fd, ffi.NULL, first) and ffi.errno == errno.ENOENT:
            return 0
        return self.delete_batch(key for key, _ in list(self.items()))

    def freeze(self) -> None:
        """Forbid further writes from user space."""
        if lib.bpf_map_freeze(self.fd):
            raise fail("freeze", self.name)


def _chunks(rows: Sequence[tuple[bytes, bytes]]) -> Iterator[Sequence[tuple[bytes, bytes]]]:
    for start in range(0, len(rows), BATCH_ROWS):
        yield rows[start : start + BATCH_ROWS]


def create_map(
    kind: MapType,
    name: str,
    *,
    key_size: int,
    value_size: int,
    max_entries: int,
    flags: CreateFlags = CreateFlags.NONE,
    inner: Map | None = None,
) -> Map:
    """Create a map (a map of maps takes the shape of its inner maps from `inner`)."""
    inner_fd = inner.fd if inner is not None else -1
    fd = lib.pw_map_create(
        # BPF_OBJ_NAME_LEN is 16 with the final NUL; the kernel refuses a longer name.
        kind,
        name.encode()[:15],
        key_size,
        value_size,
        max_entries,
        flags,
        inner_fd,
    )
    if fd < 0:
        raise fail("create map", name)
    return Map(fd, name=name)


def read_map_info(fd: int) -> MapInfo:
    """Ask the kernel about a map; fails with EINVAL where `fd` is no map."""
    raw = ffi.new("struct pw_map_info *")
    if lib.pw_map_info(fd, raw):
        raise fail("describe the map at", f"fd {fd}")
    name = ffi.string(raw.name).decode()
    return MapInfo(
        raw.type, raw.id, raw.key_size, raw.value_size, raw.max_entries, raw.map_flags, name
    )


def open_pinned_map(path: str, *, kind: MapType, key_size: int, value_size: int) -> Map | None:
    """Open a pinned map, None if there is none; another type or row size is refused (EINVAL)."""
    pinned = open_any_pinned_map(path)
    if pinned is None:
        return None
    info = pinned.info
    # The name of a pin says nothing of the rows behind it: bytes of another layout would be unpacked into wrong
    # fields.
    if (info.type, info.key_size, info.value_size) != (kind, key_size, value_size):
        pinned.close()
        raise KernelFailure(
            errno.EINVAL,
            "open pinned map",
            path,
            detail=f"has type {info.type}, rows {info.key_size}+{info.value_size} bytes,"
            f" expected type {int(kind)}, {key_size}+{value_size}",
            hint="another build wrote it with the same layout version",
        )
    return pinned


def open_any_pinned_map(path: str) -> Map | None:
    """Open a pinned map whatever its rows are, None if there is none."""
    fd = require_opened(lib.bpf_obj_get(path.encode()), "open pinned map", path)
    return None if fd is None else Map(fd, name=os.path.basename(path))


def require_opened(fd: int, call: str, object_name: str) -> int | None:
    """Give what a libbpf call has just opened, None if there is nothing of that name or number."""
    if fd >= 0:
        return fd
    if ffi.errno == errno.ENOENT:
        return None
    raise fail(call, object_name)


def open_map_by_id(map_id: int) -> Map | None:
    """Open a map by the kernel's id (what a map of maps gives for an inner one); None if it is gone."""
    fd = require_opened(lib.bpf_map_get_fd_by_id(map_id), "open map by id", str(map_id))
    return None if fd is None else Map(fd)


def create_like(existing: Map, name: str, *, max_entries: int) -> Map:
    """Create a map with the type, row layout and flags of another, and an own capacity."""
    fd = lib.pw_map_create_like(existing.fd, name.encode()[:15], max_entries)
    if fd < 0:
        raise fail("create map", name)
    return Map(fd, name=name)


@dataclass(frozen=True)
class Member:
    """A named part of a row, as the kernel knows it from the map's BTF. In bytes."""

    name: str
    offset: int
    size: int


def read_layout(rows: Map, *, of_value: bool) -> tuple[Member, ...] | None:
    """List the members of a map's key or value; empty for a number, None without BTF."""
    text = ffi.new("char[]", _LAYOUT_BYTES)
    if lib.pw_map_layout(rows.fd, of_value, text, _LAYOUT_BYTES):
        # Maps made by builds before layouts were carried by name have no BTF (decisions/0005).
        if ffi.errno == errno.ENODATA:
            return None
        raise fail("read the layout of", rows.name)
    lines = (line.rsplit(" ", 2) for line in ffi.string(text).decode().splitlines())
    return tuple(Member(name, int(offset), int(size)) for name, offset, size in lines)


def is_bpffs(path: str) -> bool:
    """Tell whether a directory is in a BPF file system; raises where it does not exist."""
    answer = int(lib.pw_is_bpffs(path.encode()))
    if answer < 0:
        raise fail("look at", path)
    return bool(answer)


def mount_bpffs(path: str) -> None:
    """Mount a BPF file system, readable by root only, on an existing directory."""
    if lib.pw_mount_bpffs(path.encode()):
        raise fail("mount a bpf file system on", path)


MEMBARRIER_QUERY: Final = 0
MEMBARRIER_GLOBAL: Final = 1


def membarrier_global() -> bool:
    """Wait until every program that runs now has finished (an RCU grace period, about 8 ms).

    False where the kernel has no MEMBARRIER_CMD_GLOBAL (nohz_full): the caller needs another fence.
    """
    supported = lib.pw_membarrier(MEMBARRIER_QUERY)
    if supported < 0:
        raise fail("query", "membarrier")
    # The barrier is synchronize_rcu(), which passes over nohz_full CPUs in user mode: kernel/sched/membarrier.c does
    # not offer it there.
    if not supported & MEMBARRIER_GLOBAL:
        return False
    if lib.pw_membarrier(MEMBARRIER_GLOBAL):
        raise fail("wait at", "membarrier")
    return True
