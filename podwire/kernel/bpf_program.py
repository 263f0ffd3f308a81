"""Loaded BPF programs: their description by the kernel, their pins, and test runs.

Called by `datapath.programs`, by the upgrade, and by the packet tests. Never loads a program (`kernel.bpf_object` does)
and never attaches one (`kernel.rtnl.tc` does). Invariant: a `Program` owns one descriptor; one that is dropped open
raises ResourceWarning. Thread-safe.
"""

import os
from dataclasses import dataclass
from typing import Final, NamedTuple

from podwire.kernel._libbpf import ffi, lib
from podwire.kernel.bpf import Descriptor, fail, require_opened
from podwire.model.errors import KernelFailure

PACKET_ADDED_BYTES: Final = 4096
"""How much longer than what went in a packet may come out of a test run: more than there is room for in front of it."""
_MAPS_MAX: Final = 64
"""MAX_USED_MAPS of Linux."""


@dataclass(frozen=True)
class ProgramInfo:
    """What the kernel says about a loaded program. `tag` is the hash of its instructions."""

    type: int
    id: int
    name: str
    tag: bytes
    verified_insns: int
    load_time_ns: int


class Packet(NamedTuple):
    """Input of a test run: a frame, and the fields of `__sk_buff` that one may choose."""

    data: bytes
    mark: int = 0
    priority: int = 0
    ingress_ifindex: int = 0
    ifindex: int = 0
    """Device the packet belongs to, in the caller's network namespace; 0 = its loopback."""
    gso_size: int = 0
    gso_segs: int = 0
    wire_len: int = 0
    cb: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)


class RunResult(NamedTuple):
    """Outcome of a test run: return value (tc: TC_ACT_*), packet, mark, ns for one run."""

    retval: int
    data: bytes
    mark: int
    priority: int
    cb: tuple[int, int, int, int, int]
    duration_ns: int


class Program(Descriptor):
    """A loaded program."""

    @property
    def info(self) -> ProgramInfo:
        """What the kernel says about it, asked anew on each call."""
        return read_program_info(self.fd)

    def list_map_ids(self) -> list[int]:
        """List the kernel's ids of the maps that it uses."""
        ids = ffi.new("u32[]", _MAPS_MAX)
        count = lib.pw_prog_maps(self.fd, ids, _MAPS_MAX)
        if count < 0:
            raise fail("list the maps of", self.name)
        # The kernel gives the full count also where the array is too short for it.
        return list(ids[0 : min(count, _MAPS_MAX)])

    def run(self, packet: Packet, *, repeat: int = 1) -> RunResult:
        """Run a tc program over a packet (BPF_PROG_TEST_RUN). Frames under 14 bytes give EINVAL."""
        with ffi.new("struct pw_run *") as run:
            data = ffi.from_buffer(packet.data)
            room_bytes = len(packet.data) + PACKET_ADDED_BYTES
            room = ffi.new("char[]", room_bytes)
            run.use_skb, run.repeat = 1, repeat
            run.data_in, run.data_size_in = data, len(packet.data)
            run.data_out, run.data_size_out = room, room_bytes
            run.mark, run.priority = packet.mark, packet.priority
            run.ingress_ifindex, run.ifindex = packet.ingress_ifindex, packet.ifindex
            run.gso_size, run.gso_segs = packet.gso_size, packet.gso_segs
            run.wire_len, run.cb = packet.wire_len, packet.cb
            if lib.pw_run(self.fd, run):
                raise fail("test run", self.name)
            return RunResult(
                retval=_signed(run.retval),
                data=bytes(ffi.buffer(room, run.data_size_out)),
                mark=run.mark,
                priority=run.priority,
                cb=tuple(run.cb),
                duration_ns=run.duration_ns,
            )

    def call(self, context: bytes = b"") -> int:
        """Run a program of type "syscall" once; give its return value."""
        with ffi.new("struct pw_run *") as run:
            run.ctx_in, run.ctx_size_in = ffi.from_buffer(context), len(context)
            if lib.pw_run(self.fd, run):
                raise fail("run", self.name)
            return _signed(run.retval)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def read_program_info(fd: int) -> ProgramInfo:
    """Ask the kernel about a program; fails with EINVAL where `fd` is no program."""
    raw = ffi.new("struct pw_prog_info *")
    if lib.pw_prog_info(fd, raw):
        raise fail("describe the program at", f"fd {fd}")
    return ProgramInfo(
        type=raw.type,
        id=raw.id,
        name=ffi.string(raw.name).decode(),
        tag=bytes(raw.tag),
        verified_insns=raw.verified_insns,
        load_time_ns=raw.load_time_ns,
    )


def open_pinned_program(path: str) -> Program | None:
    """Open a pinned program, None if there is none."""
    fd = require_opened(lib.bpf_obj_get(path.encode()), "open pinned program", path)
    if fd is None:
        return None
    try:
        read_program_info(fd)
    except KernelFailure:
        # The pin may be of a map or a link: nobody owns the descriptor yet, so it is closed here.
        os.close(fd)
        raise
    return Program(fd, os.path.basename(path))


def open_program_by_id(program_id: int) -> Program | None:
    """Open a program by the kernel's id (what a filter shows); None if it is gone."""
    # Its filter may have been replaced since it was listed, and a program ends with its last user.
    found = lib.bpf_prog_get_fd_by_id(program_id)
    fd = require_opened(found, "open program by id", str(program_id))
    return None if fd is None else Program(fd, str(program_id))
