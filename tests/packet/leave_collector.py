"""Start the conntrack collector; run as a program, leave it behind: pin its maps, with entries that are over, and exit.

Used by test_collection.py, which then looks whether collection goes on with no process left.
"""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from podwire.datapath import abi
from podwire.kernel import bpf
from podwire.kernel.bpf_object import BpfObject
from podwire.kernel.bpf_program import Packet
from tests.packet.frames import ipv4, udp
from tests.packet.rig import OBJECTS, WORLD_4, A, make_shards

LEFT_ENTRIES: Final = 100
SHARD_ROWS: Final = 16
ANY_FRAME: Final = A.frame(ipv4(A.ipv4, WORLD_4, udp(1, 2)))
VALUE: Final = abi.ConntrackValue.unpack(bytes(abi.CONNTRACK_VALUE_BYTES))._replace(lifetime_s=1)


def start_collector(
    existing: Mapping[str, bpf.Map], tick_ms: int, stack: ExitStack
) -> dict[str, bpf.Map]:
    """Load and start the collector; give its maps. The program is let go of at once: the timer holds it."""
    path = OBJECTS / "conntrack_gc.bpf.o"
    with BpfObject(path.read_bytes(), "conntrack_gc") as opened:
        for name in set(opened.map_names) & set(existing):
            opened.use_map(name, existing[name])
        opened.set_constants({"pw_tick_ms": tick_ms})
        opened.load()
        with opened.take_program("conntrack_gc_start") as program:
            for _ in range(2):  # starting it again does no harm
                assert program.run(Packet(ANY_FRAME)).retval == 0
        return {name: stack.enter_context(opened.take_map(name)) for name in opened.map_names}


def insert_entries(shards: list[bpf.Map]) -> None:
    """Insert flows of an endpoint that does not exist."""
    for number in range(LEFT_ENTRIES):
        key = abi.ConntrackKey(99, 0, 17, 0, bytes(16), bytes(16), number, 53)
        shards[number % len(shards)].update(key.pack(), VALUE.pack())


def main() -> None:
    """Do it, with the pins' directory and the tick in milliseconds as arguments."""
    pins, tick_ms = Path(sys.argv[1]), int(sys.argv[2])
    with ExitStack() as stack:
        maps = start_collector({}, tick_ms, stack)
        insert_entries(make_shards(maps["pw_conntrack"], SHARD_ROWS, stack))
        for name in ("pw_ct_timer", "pw_conntrack", "pw_usage"):
            maps[name].pin(str(pins / name))


if __name__ == "__main__":
    main()
