"""Open a compiled BPF object, set its constants, give it existing maps, load it past the verifier.

Called by `datapath.programs` (and by the packet tests). Never decides where anything is pinned. Invariant: an object is
opened from bytes already in memory, so what was hashed is what is loaded; after `load` its programs and maps are taken
out as owned descriptors, and closing the object frees the rest.
"""

import errno
import fcntl
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from podwire.kernel import bpf
from podwire.kernel._libbpf import ffi, lib
from podwire.kernel.bpf_program import Program
from podwire.model.closing import Closing
from podwire.model.errors import KernelFailure

VERIFIER_LOG_BYTES: Final = 16 << 20
LOG_LINES_SHOWN: Final = 12
OWN_MAP_PREFIX: Final = "own_"
"""Begins the names of maps that belong to one object: made anew at each load, never pinned, gone with its programs."""
_CONSTANTS_SECTION: Final = ".rodata"


class VerifierFailure(KernelFailure):
    """The kernel refused a program.

    The message ends in the last useful lines, `log` has all of it.
    """

    def __init__(self, number: int, object_name: str, *, detail: str, log: str) -> None:
        super().__init__(number, "load", object_name, detail=detail)
        self.log = log


@dataclass(frozen=True)
class MapShape:
    """How an object declares a map. Sizes in bytes."""

    name: str
    type: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int
    inner: "MapShape | None" = None


class BpfObject(Closing):
    """An opened object file. Context manager; use from one thread at a time."""

    def __init__(self, data: bytes, name: str) -> None:
        self.name = name
        # libbpf reads from these bytes until the object is closed: the reference keeps Python from freeing them.
        self._data = ffi.from_buffer(data)
        self._btf_fd = -1
        # By malloc, because `ffi.new` would clear 16 MiB that are touched only when the verifier refuses a program.
        self._log = ffi.gc(lib.malloc(VERIFIER_LOG_BYTES), lib.free, VERIFIER_LOG_BYTES)
        self._text = ffi.cast("char *", self._log)
        self._text[0] = b"\0"
        lib.pw_messages_reset()
        self._object = lib.pw_open(
            self._data, len(data), name.encode(), self._text, VERIFIER_LOG_BYTES
        )
        if self._object == ffi.NULL:
            raise bpf.fail("open object", name, detail=_first_line(_messages()))
        self._maps = self._list(lib.bpf_object__next_map, lib.bpf_map__name)
        # libbpf forgets the declaration of inner maps at the load.
        self._shapes = {name: _shape(handle) for name, handle in self._maps.items()}
        self._programs = self._list(lib.bpf_object__next_program, lib.bpf_program__name)

    def _list(
        self, following: Callable[..., object], name_of: Callable[[object], object]
    ) -> dict[str, object]:
        """List handles by name, of which `following` gives the one after another, NULL at the end."""
        handles = {}
        handle = following(self._object, ffi.NULL)
        while handle != ffi.NULL:
            handles[_text(name_of(handle))] = handle
            handle = following(self._object, handle)
        return handles

    def close(self) -> None:
        """Free the object and every map and program that nobody took out or pinned."""
        if self._object != ffi.NULL:
            lib.bpf_object__close(self._object)
            self._object = ffi.NULL
            self._maps, self._programs = {}, {}
        if self._btf_fd >= 0:
            os.close(self._btf_fd)
            self._btf_fd = -1

    def __del__(self) -> None:
        if getattr(self, "_object", ffi.NULL) != ffi.NULL:
            warnings.warn(f"unclosed BpfObject {self.name!r}", ResourceWarning, stacklevel=2)
            self.close()

    @property
    def program_names(self) -> tuple[str, ...]:
        """Names of the C functions that are programs, in the object's order."""
        return tuple(self._programs)

    @property
    def map_names(self) -> tuple[str, ...]:
        """Names of the maps that may be shared; data sections and what is the object's own are left out."""
        return tuple(
            name for name in self._maps if "." not in name and not name.startswith(OWN_MAP_PREFIX)
        )

    def shape(self, map_name: str) -> MapShape:
        """Tell how the object declares a map."""
        self._map(map_name)
        return self._shapes[map_name]

    def _map(self, name: str) -> object:
        try:
            return self._maps[name]
        except KeyError:
            raise KernelFailure(
                errno.ENOENT, "find map", name, detail=f"not in {self.name}"
            ) from None

    def set_constants(self, values: Mapping[str, int]) -> None:
        """Set `const volatile` variables before the load, so that the verifier prunes by them."""
        for name, value in values.items():
            self._set_constant(name, value)

    def has_constant(self, name: str) -> bool:
        """Tell whether the object declares a `const volatile` variable of this name."""
        place = ffi.new("u32[2]")
        section = _CONSTANTS_SECTION.encode()
        return not lib.pw_find_variable(self._object, section, name.encode(), place, place + 1)

    def _set_constant(self, name: str, value: int) -> None:
        offset, size = ffi.new("u32 *"), ffi.new("u32 *")
        if lib.pw_find_variable(
            self._object, _CONSTANTS_SECTION.encode(), name.encode(), offset, size
        ):
            raise bpf.fail("set constant", name, detail=f"not in {self.name}")
        section = next(
            handle for key, handle in self._maps.items() if key.endswith(_CONSTANTS_SECTION)
        )
        memory = lib.pw_map_memory(section, ffi.new("size_t *"))
        # The section's initial content is still in libbpf's memory; the load copies it into the map and freezes that.
        raw = value.to_bytes(size[0], "little", signed=value < 0)
        ffi.memmove(memory + offset[0], raw, len(raw))

    def use_map(self, map_name: str, existing: bpf.Map) -> None:
        """Make the object use an existing map, after comparing type and row sizes."""
        shape = self.shape(map_name)
        info = existing.info
        if (info.type, info.key_size, info.value_size) != (
            shape.type,
            shape.key_size,
            shape.value_size,
        ):
            raise KernelFailure(
                errno.EINVAL,
                "use map",
                map_name,
                detail=f"{self.name} wants type {shape.type}, rows {shape.key_size}+"
                f"{shape.value_size} bytes, the map has type {info.type},"
                f" {info.key_size}+{info.value_size}",
            )
        # libbpf compares nothing here. A map of another shape would surface as a verifier's message far from its
        # cause, or not at all.
        if lib.bpf_map__reuse_fd(self._map(map_name), existing.fd):
            raise bpf.fail("use map", map_name)

    def load(self) -> None:
        """Create the maps and load the programs. Raises VerifierFailure with the verifier's log."""
        lib.pw_messages_reset()
        if lib.bpf_object__load(self._object):
            number = int(ffi.errno) or errno.EINVAL
            log = ffi.string(self._text).decode(errors="replace")
            lines = useful_lines(log)
            said = _first_line(_messages())
            detail = said if not lines else f"{said}\n  " + "\n  ".join(lines)
            raise VerifierFailure(number, self.name, detail=detail, log=log)

    def take_map(self, name: str) -> bpf.Map:
        """Give an own descriptor of a map of the loaded object."""
        return bpf.Map(_duplicate(lib.bpf_map__fd(self._map(name)), name), name=name)

    def create_inner(
        self, outer: str, name: str, *, max_entries: int, rows: tuple[str, str]
    ) -> bpf.Map:
        """Create a map of the shape that `outer` declares for its inner maps.

        `rows`: names of the structs of key and value, so that the kernel knows their layout. (The declaration itself
        cannot carry them: clang 14 leaves types that only an inner map uses undefined.)
        """
        inner = self.shape(outer).inner
        if inner is None:
            raise KernelFailure(
                errno.EINVAL, "create inner map", name, detail=f"{outer} is no map of maps"
            )
        key_type, value_type = (self._find_struct(row) for row in rows)
        if self._btf_fd < 0:
            # Loaded once: the same types serve every inner map of the object.
            self._btf_fd = lib.pw_load_btf(self._object)
            if self._btf_fd < 0:
                raise bpf.fail("load the types of", self.name)
        fd = lib.pw_map_create_typed(
            inner.type,
            name.encode()[:15],
            inner.key_size,
            inner.value_size,
            max_entries,
            inner.flags,
            self._btf_fd,
            key_type,
            value_type,
        )
        if fd < 0:
            raise bpf.fail("create inner map", name)
        return bpf.Map(fd, name=name)

    def model_inner(self, outer: str, inner: bpf.Map) -> None:
        """Make `inner` the model that every map put into `outer` must be like; before `load` only.

        Kernel 6.1 counts a map with types and one without as different.
        """
        # Linux 6.1 compares the BTF of an inner map with the model's (kernel/bpf/map_in_map.c:bpf_map_meta_equal), so
        # the model has types as well (decisions/0005).
        if lib.bpf_map__set_inner_map_fd(self._map(outer), inner.fd):
            raise bpf.fail("model the inner maps of", outer)

    def _find_struct(self, name: str) -> int:
        number = int(lib.pw_find_struct(self._object, name.encode()))
        if not number:
            raise KernelFailure(errno.ENOENT, "find struct", name, detail=f"not in {self.name}")
        return number

    def take_program(self, name: str) -> Program:
        """Give an own descriptor of a program of the loaded object."""
        if name not in self._programs:
            raise KernelFailure(errno.ENOENT, "find program", name, detail=f"not in {self.name}")
        return Program(_duplicate(lib.bpf_program__fd(self._programs[name]), name), name)


def useful_lines(log: str) -> list[str]:
    """Choose the lines of a verifier log that say why: the last ones, without the statistics."""
    noise = ("processed ", "verification time", "stack depth", "-- END PROG", "-- BEGIN PROG")
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith(noise)]
    return lines[-LOG_LINES_SHOWN:]


def _shape(handle: object) -> MapShape:
    inner = lib.bpf_map__inner_map(handle)
    return MapShape(
        name=_text(lib.bpf_map__name(handle)),
        type=lib.pw_map_type(handle),
        key_size=lib.bpf_map__key_size(handle),
        value_size=lib.bpf_map__value_size(handle),
        max_entries=lib.bpf_map__max_entries(handle),
        flags=lib.bpf_map__map_flags(handle),
        inner=None if inner == ffi.NULL else _shape(inner),
    )


def _duplicate(fd: int, name: str) -> int:
    if fd < 0:
        raise KernelFailure(errno.EBADF, "take", name, detail="the object is not loaded")
    # libbpf closes its own descriptors with the object, so what is taken out needs one of its own.
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)


def _text(raw: object) -> str:
    return str(ffi.string(raw).decode())


def _messages() -> str:
    return str(ffi.string(lib.pw_messages()).decode(errors="replace"))


def _first_line(text: str) -> str:
    return next((line.removeprefix("libbpf: ") for line in text.splitlines() if line.strip()), "")
