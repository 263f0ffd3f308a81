"""The node's programs and maps in the kernel: found by their pins, or loaded, verified and pinned once.

Called by `datapath.node` at the start and by `datapath.upgrade`; nothing here is on the path of an ADD. Never
attaches a program. Pins: `<bpf_dir>/v<ABI>/maps/<map>`, `<bpf_dir>/v<ABI>/programs/<template>/<program>`.
Invariant: a map that is pinned is used as it is and never made again; a template's directory is complete or
absent, because it is filled under another name and renamed.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from podwire.datapath import abi
from podwire.datapath.maps import NodeMaps
from podwire.datapath.templates import Template
from podwire.kernel import bpf, bpf_program
from podwire.kernel.bpf_object import BpfObject, MapShape
from podwire.kernel.bpf_program import Program
from podwire.model.errors import Bug, Conflict, KernelFailure
from podwire.model.ids import ABI_DIRECTORY_PREFIX

_log = logging.getLogger(__name__)

BPFFS_ROOT: Final = Path("/sys/fs/bpf")
NEW_FLOW_ENTRIES: Final = (16_384, 131_072)
"""Least and most rows for flows that are no connections yet; between them an eighth of what the connections have."""
PULSE_START: Final = "pulse_start"
_PULSE: Final = "own_pulse"
_CONNTRACK_STRUCTS: Final = ("pw_conntrack_key", "pw_conntrack_value")
_FILLING_PREFIX: Final = "filling-"
"""A bpf file system refuses names with a dot."""


class Pins(msgspec.Struct, frozen=True):
    """Where one layout version has its pins."""

    directory: Path
    version: int

    @property
    def root(self) -> Path:
        """Directory of the layout version."""
        return self.directory / f"{ABI_DIRECTORY_PREFIX}{self.version}"

    @property
    def maps(self) -> Path:
        """Directory of the maps' pins."""
        return self.root / "maps"

    @property
    def programs(self) -> Path:
        """Directory of the templates' directories."""
        return self.root / "programs"


class Capacities(msgspec.Struct, frozen=True):
    """Sizes of maps that the settings choose."""

    conntrack_entries: int

    @property
    def shard_entries(self) -> int:
        """Rows of one conntrack shard. What finds no room in a full one is remembered elsewhere."""
        return -(-self.conntrack_entries // abi.CONNTRACK_SHARDS)

    @property
    def new_flow_entries(self) -> int:
        """Rows for flows that are no connections yet."""
        least, most = NEW_FLOW_ENTRIES
        return min(max(self.conntrack_entries // 8, least), most)

    @property
    def new_flow_rate(self) -> int:
        """New flows each second that one side of an endpoint is remembered for.

        An unanswered row of the LRU outlives 0.45 of its size in later ones [measured]. Two endpoints, one that floods
        and one that is flooded, make less than that in the second that an answer may take.
        """
        return self.new_flow_entries // 8

    def inner_entries(self, outer: str) -> int:
        """Rows of a map inside the map of maps `outer`."""
        return self.new_flow_entries if outer == "pw_new_flows" else self.shard_entries


class LoadedPrograms(msgspec.Struct, frozen=True):
    """The programs of one template and the maps they use. Owner of the descriptors."""

    template_id: str
    programs: Mapping[str, Program]
    maps: NodeMaps
    pulse: bpf.Map
    """Never pinned: the kernel cancels the timer in it when this descriptor is closed, also by a kill."""

    def fd(self, name: str) -> int:
        """Descriptor of a program, for attaching it."""
        return self._program(name).fd

    def id(self, name: str) -> int:
        """The kernel's id of a program, as filters show it."""
        return self._program(name).info.id

    def _program(self, name: str) -> Program:
        if name not in self.programs:
            raise Bug(f"use program {name!r}: the template has {sorted(self.programs)!r}")
        return self.programs[name]

    def repair_pins(self, pins: Pins) -> list[str]:
        """Pin again what somebody has unpinned; names it."""
        # Without its pins a map lives as long as a program uses it, but the next agent would not find it.
        kept = {pins.maps / name: getattr(self.maps, name) for name in self.maps.names()}
        kept |= {
            pins.programs / self.template_id / name: program
            for name, program in self.programs.items()
        }
        missing = [path for path in kept if not path.exists()]
        for path in missing:
            with _file_errors("make directory", path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
            kept[path].pin(str(path))
        return [f"the pin {path} was gone" for path in missing]

    def close(self) -> None:
        """Give the descriptors back; pins and attached programs stay."""
        self.pulse.close()
        for program in self.programs.values():
            program.close()
        self.maps.close()


@contextlib.contextmanager
def _file_errors(call: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KernelFailure(error.errno or errno.EIO, call, str(error.filename or path)) from error


def ensure_bpffs(directory: Path) -> None:
    """See that `directory` exists and is in a BPF file system; mount one where it is missing."""
    with _file_errors("make directory", directory):
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        if not bpf.is_bpffs(str(existing)):
            below_root = directory == BPFFS_ROOT or BPFFS_ROOT in directory.parents
            # At the usual place, where other tools look for pins as well.
            target = BPFFS_ROOT if below_root and BPFFS_ROOT.is_dir() else directory
            target.mkdir(parents=True, exist_ok=True)
            bpf.mount_bpffs(str(target))
            _log.info("mounted a bpf file system", extra={"path": str(target)})
        directory.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def locked_pins(directory: Path) -> Iterator[None]:
    """Hold the directory of pins; Conflict when another agent does."""
    # Of two agents, each would remove every pod that only the other one knows.
    with _file_errors("lock directory", directory):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            # A bpf file system has directories and pins and no files, so the directory itself is locked. The kernel
            # frees the lock with its holder.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"lock the pins in {str(directory)!r}: another agent holds them",
                hint="stop that agent; in another network namespace give this one another bpf_dir",
            ) from None
        yield
    finally:
        os.close(fd)


def list_versions(directory: Path) -> list[int]:
    """List the layout versions that have pins, lowest first."""
    prefix = ABI_DIRECTORY_PREFIX
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(
        int(name.removeprefix(prefix))
        for name in names
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    )


def load_programs(
    template: Template, pins: Pins, capacities: Capacities, attached: Iterable[Program] = ()
) -> LoadedPrograms:
    """Open the template's pinned programs, or load and pin them over the maps that are there.

    Maps that only the `attached` programs still know, because somebody has removed their pins, are there, too.
    """
    with _file_errors("make directory", pins.root):
        pins.maps.mkdir(parents=True, exist_ok=True)
        pins.programs.mkdir(exist_ok=True)
    # The name is the hash of what is loaded: a directory of that name holds exactly these programs, whoever pinned
    # them.
    home = pins.programs / template.id
    with ExitStack() as undo:
        objects = {
            name: undo.enter_context(BpfObject(data, name))
            for name, data in sorted(template.objects.items())
        }
        shapes = _shapes(objects)
        with ExitStack() as opened_here:
            pinned = _open_programs(home, opened_here).values() if home.is_dir() else ()
            if not _other_layouts(pins):
                _restore_pins(pins, shapes, [*attached, *pinned])
        if not home.is_dir():
            _load_and_pin(objects, template, pins, capacities)
        with ExitStack() as keep:
            programs = _open_programs(home, keep)
            opened = {
                name: keep.enter_context(_open_map(pins, shape)) for name, shape in shapes.items()
            }
            maps = NodeMaps.from_opened(opened)
            pulse = _open_pulse(programs[PULSE_START])
            keep.pop_all()
    _remove_other_templates(pins, template.id)
    return LoadedPrograms(template.id, programs, maps, pulse)


def _open_pulse(program: Program) -> bpf.Map:
    for map_id in program.list_map_ids():
        map_ = bpf.open_map_by_id(map_id)
        if map_ is not None and map_.info.name == _PULSE:
            return map_
        if map_ is not None:
            map_.close()
    raise Bug(f"open {_PULSE!r}: {PULSE_START!r} does not use it")


def _shapes(objects: Mapping[str, BpfObject]) -> dict[str, MapShape]:
    return {name: opened.shape(name) for opened in objects.values() for name in opened.map_names}


def _open_programs(home: Path, keep: ExitStack) -> dict[str, Program]:
    programs = {}
    for path in sorted(home.iterdir()):
        program = bpf_program.open_pinned_program(str(path))
        if program is not None:
            programs[path.name] = keep.enter_context(program)
    return programs


def _other_layouts(pins: Pins) -> list[int]:
    """List other layouts that have pins here. The programs in use are theirs then, and so are the maps of these: a map
    of maps has the same shape in each layout, whatever the rows in it are.
    """
    return [version for version in list_versions(pins.directory) if version != pins.version]


def _restore_pins(pins: Pins, shapes: Mapping[str, MapShape], programs: Iterable[Program]) -> None:
    """Pin the maps again that programs use and that have no pin any more, where their rows are this build's."""
    missing = {name: shape for name, shape in shapes.items() if not (pins.maps / name).exists()}
    restored = []
    for map_id in {map_id for program in programs for map_id in program.list_map_ids()}:
        map_ = bpf.open_map_by_id(map_id)
        if map_ is None:
            continue
        with map_:
            # Names are cut to 15 bytes, which all names of maps here fit into.
            shape = missing.get(map_.info.name)
            if shape is not None and _has_shape(map_, shape):
                map_.pin(str(pins.maps / shape.name))
                del missing[shape.name]
                restored.append(shape.name)
    if restored:
        _log.warning(
            "put pins back that somebody had removed",
            extra={"path": str(pins.maps), "keys": sorted(restored)},
        )


def _has_shape(map_: bpf.Map, shape: MapShape) -> bool:
    info = map_.info
    wanted = shape.type, shape.key_size, shape.value_size
    return (info.type, info.key_size, info.value_size) == wanted


def _open_map(pins: Pins, shape: MapShape) -> bpf.Map:
    map_ = _find_map(pins, shape)
    if map_ is None:
        raise KernelFailure(
            errno.ENOENT,
            "open pinned map",
            str(pins.maps / shape.name),
            detail="the pin is gone while the programs that use it are pinned",
            hint=f"stop the pods of this node or remove {pins.root} to start anew",
        )
    return map_


def _find_map(pins: Pins, shape: MapShape) -> bpf.Map | None:
    return bpf.open_pinned_map(
        str(pins.maps / shape.name),
        kind=bpf.MapType(shape.type),
        key_size=shape.key_size,
        value_size=shape.value_size,
    )


def _load_and_pin(
    objects: Mapping[str, BpfObject], template: Template, pins: Pins, capacities: Capacities
) -> None:
    """Load every object, each with the maps of the earlier ones, and pin what came of it."""
    # Nothing opens a directory of this name, so programs are published whole or not at all.
    filling = pins.programs / (_FILLING_PREFIX + template.id)
    with _file_errors("make directory", filling):
        # What an agent left that was killed while it loaded.
        _remove_tree(filling)
        filling.mkdir()
    for name, opened in objects.items():
        _set_constants(opened, template.constants)
        _load_object(opened, pins, capacities)
        for program_name in opened.program_names:
            with opened.take_program(program_name) as program:
                program.pin(str(filling / program_name))
        _log.info("loaded programs", extra={"path": str(filling), "keys": name})
    with _file_errors("publish programs", filling):
        # Published by one rename: an agent that is killed before leaves nothing that looks complete.
        filling.rename(pins.programs / template.id)


def _set_constants(bpf_object: BpfObject, constants: Mapping[str, int]) -> None:
    bpf_object.set_constants(
        {name: value for name, value in constants.items() if bpf_object.has_constant(name)}
    )


def _load_object(bpf_object: BpfObject, pins: Pins, capacities: Capacities) -> None:
    fresh = []
    with ExitStack() as opened:
        for name in bpf_object.map_names:
            existing = _find_map(pins, bpf_object.shape(name))
            if existing is not None:
                bpf_object.use_map(name, opened.enter_context(existing))
                continue
            fresh.append(name)
            if bpf_object.shape(name).inner is not None:
                bpf_object.model_inner(
                    name, opened.enter_context(_create_inner(bpf_object, name, 0, capacities))
                )
        bpf_object.load()
    for name in fresh:
        with bpf_object.take_map(name) as made:
            if bpf_object.shape(name).inner is not None:
                _fill_slots(bpf_object, made, capacities)
            made.pin(str(pins.maps / name))


def _create_inner(bpf_object: BpfObject, outer: str, index: int, capacities: Capacities) -> bpf.Map:
    return bpf_object.create_inner(
        outer,
        f"{outer}_{index}",
        max_entries=capacities.inner_entries(outer),
        rows=_CONNTRACK_STRUCTS,
    )


def _fill_slots(bpf_object: BpfObject, outer: bpf.Map, capacities: Capacities) -> None:
    """Give every slot its hash, in one batch: each single update of a slot waits for RCU."""
    with ExitStack() as opened:
        slots = []
        for index in range(outer.info.max_entries):
            inner = opened.enter_context(_create_inner(bpf_object, outer.name, index, capacities))
            slots.append((index.to_bytes(4, "little"), inner.fd.to_bytes(4, "little")))
        outer.update_batch(slots)


def _remove_other_templates(pins: Pins, keep: str) -> None:
    """Remove the pins of other templates; programs that devices still have stay alive by their filters."""
    for path in pins.programs.iterdir():
        if path.name != keep:
            _remove_tree(path)
            _log.info("removed the pins of a template", extra={"path": str(path)})


def remove_version(pins: Pins) -> None:
    """Remove every pin of a layout version; what devices still use lives until they let go."""
    _remove_tree(pins.root)


def _remove_tree(path: Path) -> None:
    with _file_errors("remove pins", path), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def remove_directory(directory: Path) -> list[str]:
    """Remove every pin of every version and the directory itself; name what was removed."""
    versions = list_versions(directory)
    for version in versions:
        remove_version(Pins(directory, version))
    with contextlib.suppress(OSError):
        os.rmdir(directory)
    return [f"pins {directory}/{ABI_DIRECTORY_PREFIX}{version}" for version in versions]
