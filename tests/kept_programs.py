"""Programs and maps of earlier nodes, for the next node of this process.

Most tests of nodes ask what programs do, not how they are loaded: that takes half of such a test's processor time, and
half a minute for each node under emulation. Here the descriptors of what a node has loaded are kept when it goes, and
pinned where the next one looks, with empty maps: it starts as an agent does that finds what its predecessor left. Tests
of loading itself ask for a node of their own (`kernel_world(..., fresh=True)`).
"""

import atexit
import contextlib
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Final

from podwire.datapath import abi
from podwire.datapath.loading import OBJECTS
from podwire.datapath.plan import NodePlan
from podwire.datapath.programs import Capacities, Pins
from podwire.datapath.templates import ID_DIGITS, read_template
from podwire.kernel import bpf
from podwire.kernel.bpf_object import BpfObject
from podwire.kernel.bpf_program import Program, open_pinned_program
from tests.empty_maps import clear

FREE_SETS_MAX: Final = 6
"""A process keeps no more than these for nodes to come: one has some 30 MB of the kernel's memory."""
EMPTY_CELLS: Final = Path(__file__).parents[1] / "build" / "bpf" / "empty_cells.test.bpf.o"
CELLS: Final = "pw_stack_cells"
"""The map that `empty_cells` empties: the calls of user space would take longer for it than for all others together."""


@dataclass(eq=False)
class KeptSet:
    """What one node has loaded. Owner of the descriptors."""

    template_id: str
    capacities: Capacities
    maps: dict[str, bpf.Map]
    programs: dict[str, Program]
    empty_cells: Program
    is_lent: bool = True
    free_s: float = 0.0
    """From when on nothing runs its programs, where it is not lent."""

    def lend(self, directory: Path) -> None:
        """Empty the maps, and pin everything where a node with this directory looks."""
        self.empty_cells.call()
        for name, map_ in self.maps.items():
            if name != CELLS:
                clear(map_)
        pins = Pins(directory, abi.ABI_VERSION)
        home = pins.programs / self.template_id
        for made in (pins.maps, home):
            made.mkdir(parents=True)
        for name, map_ in self.maps.items():
            map_.pin(str(pins.maps / name))
        for name, program in self.programs.items():
            program.pin(str(home / name))
        self.is_lent = True

    def take_back(self, rest_s: float) -> None:
        """Have it for another node, `rest_s` after this one's end."""
        self.is_lent, self.free_s = False, time.monotonic() + rest_s
        _forget_oldest()

    def close(self) -> None:
        """Let go of everything."""
        for opened in (*self.maps.values(), *self.programs.values(), self.empty_cells):
            opened.close()


_kept: list[KeptSet] = []


@dataclass
class Loan:
    """What one node is lent, or leaves to the next ones."""

    directory: Path
    template_id: str
    capacities: Capacities
    lent: KeptSet | None

    def learn(self) -> None:
        """Keep what the node has loaded, which has begun now, if nothing was lent to it."""
        if self.lent is None:
            self.lent = _keep_set(self.directory, self.template_id, self.capacities)


@contextlib.contextmanager
def loan(plan: NodePlan, *, rest_s: float = 0.0) -> Iterator[Loan]:
    """Lend a node its programs from before its start, when its pins are not there yet, until it is gone.

    `rest_s`: how long its devices may live on behind the block, whose programs write into the maps.
    """
    template_id = read_template(plan.object_dir, OBJECTS, plan.constants).id
    found = _find(template_id, plan.capacities)
    made = Loan(plan.bpf_dir, template_id, plan.capacities, found)
    if found is not None:
        found.lend(plan.bpf_dir)
    try:
        yield made
    finally:
        if made.lent is not None:
            made.lent.take_back(rest_s)


class DirectoryLoans:
    """Loans to agents of this build whose plan is not known here, by the directory of their pins.

    `rest_s`: how long the devices of such a node live on behind its end.
    """

    def __init__(self, rest_s: float) -> None:
        self._rest_s = rest_s
        self._capacities: dict[Path, Capacities] = {}
        """Of nodes that are there."""
        self._lent: dict[Path, KeptSet] = {}
        self._template_id = ""

    def lend(self, directory: Path, capacities: Capacities) -> None:
        """Pin what an agent is going to look for, when it is the first one of this directory."""
        if directory in self._capacities:
            return
        self._capacities[directory] = capacities
        found = None if directory.exists() else _find(self._template_id, capacities)
        if found is not None:
            found.lend(directory)
            self._lent[directory] = found

    def keep(self, directories: Iterable[Path]) -> None:
        """Keep what nodes have loaded themselves, before they go."""
        for directory in directories:
            if directory in self._lent or directory not in self._capacities:
                continue
            # A directory with another name is of an agent that was killed while it loaded.
            homes = sorted(Pins(directory, abi.ABI_VERSION).programs.glob("[0-9a-f]" * ID_DIGITS))
            if len(homes) == 1 and self._template_id in ("", homes[0].name):
                kept = _keep_set(directory, homes[0].name, self._capacities[directory])
                if kept is not None:
                    self._template_id = homes[0].name
                    self._lent[directory] = kept

    def end(self, directories: Iterable[Path]) -> None:
        """Take back what nodes had that are gone."""
        for directory in directories:
            self._capacities.pop(directory, None)
            lent = self._lent.pop(directory, None)
            if lent is not None:
                lent.take_back(self._rest_s)


def _find(template_id: str, capacities: Capacities) -> KeptSet | None:
    """Find a set that nobody has: of several, the one that was given back last."""
    now_s = time.monotonic()
    wanted = template_id, capacities
    free = [kept for kept in _kept if not kept.is_lent and kept.free_s <= now_s]
    fit = [kept for kept in free if (kept.template_id, kept.capacities) == wanted]
    return max(fit, key=attrgetter("free_s"), default=None)


def _keep_set(directory: Path, template_id: str, capacities: Capacities) -> KeptSet | None:
    """Keep what is pinned in a node's directory; None when the node has other programs."""
    kept = _open_set(directory, template_id, capacities)
    if kept is not None:
        _kept.append(kept)
    return kept


def _forget_oldest() -> None:
    """Let go of sets that nobody has for longest: what other tests began with may never be asked for again."""
    free = sorted((kept for kept in _kept if not kept.is_lent), key=attrgetter("free_s"))
    for kept in free[:-FREE_SETS_MAX]:
        _kept.remove(kept)
        kept.close()


def _open_set(directory: Path, template_id: str, capacities: Capacities) -> KeptSet | None:
    pins = Pins(directory, abi.ABI_VERSION)
    home = pins.programs / template_id
    if not home.is_dir() or not (pins.maps / CELLS).exists():
        return None
    with ExitStack() as undo:
        programs, maps = {}, {}
        for path in sorted(home.iterdir()):
            program = open_pinned_program(str(path))
            assert program is not None
            programs[path.name] = undo.enter_context(program)
        for path in sorted(pins.maps.iterdir()):
            map_ = bpf.open_any_pinned_map(str(path))
            assert map_ is not None
            maps[path.name] = undo.enter_context(map_)
        emptier = undo.enter_context(_load_emptier(maps[CELLS]))
        undo.pop_all()
    return KeptSet(template_id, capacities, maps, programs, emptier)


def _load_emptier(cells: bpf.Map) -> Program:
    with BpfObject(EMPTY_CELLS.read_bytes(), "empty_cells") as opened:
        opened.use_map("cells", cells)
        opened.load()
        return opened.take_program("empty_cells")


@atexit.register
def close_all() -> None:
    """Let go of everything that is kept."""
    while _kept:
        _kept.pop().close()
