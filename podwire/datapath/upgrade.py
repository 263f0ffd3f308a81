"""Move a node to this build's map layout and programs under traffic; also back to an older one.

`datapath.node` calls it at the start, when it finds pins of another layout version. Rows are carried by
`datapath.row_conversion`. Invariant: the old maps stay as they are until every device has the new programs, so after a
crash at any point the whole move is repeated. A layout that does not say that this build may read it is refused, with
both versions named, and nothing is touched.

A layout says which builds may read it by empty directories `readable-by-v<N>` beside its maps: the lowest such N is the
oldest build that may take its rows over. A new layout names an older N only while everything it added may be dropped.
"""

import contextlib
import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from podwire.datapath import abi
from podwire.datapath import maps as tables
from podwire.datapath.conntrack_maps import list_conntrack, open_new_flows, open_shards
from podwire.datapath.device import Programs, list_attached_programs, list_devices
from podwire.datapath.maps import NodeMaps, list_usage
from podwire.datapath.native import NetdevProgram, list_attached, replace_attached
from podwire.datapath.policy_maps import wait_for_programs
from podwire.datapath.programs import (
    PULSE_START,
    Capacities,
    LoadedPrograms,
    Pins,
    list_versions,
    remove_version,
)
from podwire.datapath.row_conversion import carry_rows
from podwire.datapath.tunnel import TunnelPrograms, find_tunnel
from podwire.kernel import bpf
from podwire.kernel.bpf_program import Packet, Program, open_program_by_id
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl.tc import (
    FROM_POD_HOOK,
    TO_POD_HOOK,
    add_clsact,
    set_bpf_filter,
)
from podwire.model.errors import KernelFailure, NewerData
from podwire.model.ids import EndpointId, IfIndex

_log = logging.getLogger(__name__)

READABLE_PREFIX: Final = "readable-by-v"
CARRIED_MAPS: Final = (
    "pw_settings",
    "pw_nodes",
    "pw_node_numbers",
    "pw_ipcache",
    "pw_usage",
    "pw_policy",
    "pw_cidrs",
    "pw_back_ends",
    "pw_service_list",
    "pw_services",
    "pw_affinity",
    "pw_endpoints",
    "pw_config",
)
"""In the order of filling: a device's row comes last, when all that it needs is there. A layout may lack some."""

_COLLECTOR: Final = "conntrack_gc_start"
_HAND_OVER: Final = "hand_over"
_ANY_FRAME: Final = bytes(64)
_TIMER_ATTEMPTS: Final = 20
_TIMER_PAUSE_S: Final = 0.05
_MAPS_OF_FLOWS: Final = ("pw_conntrack", "pw_new_flows")
"""Maps of maps: the inner maps in their slots are carried. Layout 2 and older ones have connections only."""


def readable_versions(directory: Path) -> list[int]:
    """List the other layout versions whose rows this build may take over; raises NewerData.

    Refused: a version above ours that names no reader as old as we are, unless our own is there as well and it
    is only what an interrupted return to us left behind.
    """
    versions = [version for version in list_versions(directory) if version != abi.ABI_VERSION]
    for version in versions:
        # The older build cannot know a layout that did not exist when it was built: the newer one says who may read
        # it (decisions/0005).
        if version > abi.ABI_VERSION and _oldest_reader(directory, version) > abi.ABI_VERSION:
            raise NewerData(
                f"use pins below {str(directory)!r}: their layout is version {version},"
                f" this build knows version {abi.ABI_VERSION}",
                hint="install the newer podwire again, or remove this node's pods first",
            )
    return versions


def _oldest_reader(directory: Path, version: int) -> int:
    readers = [
        int(path.name.removeprefix(READABLE_PREFIX))
        for path in Pins(directory, version).root.glob(f"{READABLE_PREFIX}*")
    ]
    return min(readers, default=version)


def mark_readable(pins: Pins) -> None:
    """Say which older builds may take this layout's rows over."""
    for version in range(abi.ABI_OLDEST_READER, pins.version + 1):
        # A bpf file system takes directories and no files.
        (pins.root / f"{READABLE_PREFIX}{version}").mkdir(exist_ok=True)


class OldLayout:
    """The maps of another layout version, open for reading. Context manager."""

    def __init__(self, pins: Pins) -> None:
        self.pins = pins
        self._stack = ExitStack()
        self._maps: dict[str, bpf.Map] = {}

    def __enter__(self) -> "OldLayout":
        with ExitStack() as stack:
            for name in (*CARRIED_MAPS, *_MAPS_OF_FLOWS):
                map_ = bpf.open_any_pinned_map(str(self.pins.maps / name))
                if map_ is not None:
                    self._maps[name] = stack.enter_context(map_)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    def carry_state(self, maps: NodeMaps) -> int:
        """Fill the node's maps but conntrack; give the number of rows."""
        carried = 0
        for name in CARRIED_MAPS:
            if name in self._maps:
                # An array has its element from the start, all zero: it is never missing.
                replace = name == "pw_settings"
                carried += carry_rows(self._maps[name], getattr(maps, name), replace=replace)
        return carried

    def carry_conntrack(self, maps: NodeMaps) -> int:
        """Fill connections, shard by shard, and new flows with the rows that the new ones lack; give their number.

        A tuple's shard is chosen by a hash over tuple and seed; the seed has been carried, and the hash is part
        of what a layout must not change while an older build may read it.
        """
        carried = 0
        for name in _MAPS_OF_FLOWS:
            if name not in self._maps:
                continue
            outer: bpf.Map = getattr(maps, name)
            for key, raw_id in sorted(self._maps[name].items()):
                new_id = outer.lookup(key)
                if new_id is not None:
                    carried += _carry_shard(raw_id, new_id)
        return carried


def _carry_shard(old_id: bytes, new_id: bytes) -> int:
    with ExitStack() as stack:
        pair = []
        for raw in (old_id, new_id):
            shard = bpf.open_map_by_id(int.from_bytes(raw, "little"))
            if shard is None:
                return 0
            pair.append(stack.enter_context(shard))
        return _carry_flows(*pair)


def _carry_flows(old: bpf.Map, new: bpf.Map) -> int:
    try:
        return carry_rows(old, new, replace=False)
    except KernelFailure as failure:
        # A smaller capacity than before: what fits is carried, the rest is judged anew.
        _log.warning("conntrack shard is full", extra={"error": failure.message})
        return 0


@contextlib.contextmanager
def _answers_believed(maps: NodeMaps) -> Iterator[None]:
    """Let datagrams in that would be allowed as answers, while rows of what was asked may still be missing."""
    # A question of the last moment has its row in the old hashes only, and its answer may be faster than the copy.
    tables.write_settings_flag(maps, abi.SettingsFlags.MOVING, wanted=True)
    try:
        yield
    finally:
        tables.write_settings_flag(maps, abi.SettingsFlags.MOVING, wanted=False)


def attend(loaded: LoadedPrograms) -> None:
    """Begin an agent's life: new flows have their own place again, and what is over is collected.

    When the agent is killed the collector misses its pulse within a second, and does what `hand_flows_over` does.
    """
    try:
        start_timer(loaded, PULSE_START)
    except KernelFailure as failure:
        _log.warning(
            "the collector will not notice when this agent is killed",
            extra={"error": failure.message},
        )
    for flag in (abi.SettingsFlags.UNATTENDED, abi.SettingsFlags.MOVING):
        tables.write_settings_flag(loaded.maps, flag, wanted=False)
    # A bpf_timer can be armed by a program only. It goes on ticking from its pinned map when no process is left.
    start_timer(loaded, _COLLECTOR)


def start_timer(loaded: LoadedPrograms, program: str) -> None:
    """Run a program that arms a timer; again where the kernel has no memory at hand."""
    # A program allocates without waiting: where no memory is free at that moment it fails, and none is looked for.
    failure = 0
    for _ in range(_TIMER_ATTEMPTS):
        failure = loaded.programs[program].run(Packet(_ANY_FRAME)).retval
        if not failure:
            return
        _log.info("a timer did not start", extra={"step": program, "error": os.strerror(-failure)})
        time.sleep(_TIMER_PAUSE_S)
    hint = "free memory, then start the agent again"
    raise KernelFailure(-failure, "start a timer", program, hint=hint)


def hand_flows_over(loaded: LoadedPrograms) -> None:
    """End it: put flows that wait for answers, and those that begin from now on, where layout 2 looks for flows."""
    # The pulse would take the flag away again.
    loaded.pulse.close()
    try:
        # In this order: what is asked while the program runs is where it should be, too.
        tables.write_settings_flag(loaded.maps, abi.SettingsFlags.UNATTENDED, wanted=True)
        wait_for_programs()
        loaded.programs[_HAND_OVER].run(Packet(_ANY_FRAME))
    except KernelFailure as failure:
        _log.warning("could not hand new flows over", extra={"error": failure.message})


def resize_conntrack(maps: NodeMaps, capacities: Capacities) -> bool:
    """Give conntrack the capacity that the settings ask for, with its flows; False if it has it.

    Copied before and after the slots are turned over: the update of a slot returns when no program
    uses the old hash any more, so the second copy misses nothing.
    """
    shards, new_flows = maps.pw_conntrack, maps.pw_new_flows
    flows = _replace_inner(maps, shards, open_shards(maps), capacities.shard_entries)
    flows += _replace_inner(maps, new_flows, [open_new_flows(maps)], capacities.new_flow_entries)
    if not flows:
        return False
    recount_usage(maps)
    _log.info("resized conntrack", extra={"new": capacities.conntrack_entries, "count": flows})
    return True


def _replace_inner(maps: NodeMaps, outer: bpf.Map, opened: Iterable[bpf.Map], wanted: int) -> int:
    """Give the hashes in a map of maps another size; how many rows were copied, and one for each hash."""
    with ExitStack() as stack:
        old = [stack.enter_context(map_) for map_ in opened]
        if all(map_.info.max_entries == wanted for map_ in old):
            return 0
        new = [
            stack.enter_context(bpf.create_like(map_, map_.name, max_entries=wanted))
            for map_ in old
        ]
        pairs = list(zip(old, new, strict=True))
        flows = sum(_carry_flows(*pair) for pair in pairs)
        with _answers_believed(maps):
            # In one batch: each single update of a slot waits for an RCU grace period.
            outer.update_batch(
                [
                    (index.to_bytes(4, "little"), map_.fd.to_bytes(4, "little"))
                    for index, map_ in enumerate(new)
                ]
            )
            # The update returns when no program uses the old hashes any more, so this copy misses nothing.
            return flows + sum(_carry_flows(*pair) for pair in pairs) + len(new)


def recount_usage(maps: NodeMaps) -> None:
    """Set what each endpoint is charged with to the flows that it really has.

    After rows were copied while programs and collector went on; a flow that opens or ends in this
    very moment is miscounted by one.
    """
    connections, brief = Counter[tuple[EndpointId, int]](), Counter[EndpointId]()
    for flow in list_conntrack(maps):
        if flow.value.charged == abi.Charge.CONNECTION:
            connections[flow.instance, flow.direction] += 1
        elif flow.value.charged == abi.Charge.BRIEF:
            brief[flow.instance] += 1
    for endpoint_id, row in list_usage(maps):
        fresh = row._replace(
            connections=(
                connections[endpoint_id, abi.Direction.EGRESS],
                connections[endpoint_id, abi.Direction.INGRESS],
            ),
            brief_flows=brief[endpoint_id],
        )
        if row != fresh:
            maps.pw_usage.update(endpoint_id.to_bytes(4, "little"), fresh.pack())


def take_over(directory: Path, maps: NodeMaps, swap_programs: Callable[[], int]) -> list[int]:
    """Bring the rows of every other layout version here, swap the programs, and drop the old pins.

    `swap_programs` puts the node's programs onto every living device, in place, and gives the number of devices.
    Conntrack is carried before the swap, so that open flows are known to the new programs from their first
    packet on, and again after it, for what the old programs wrote meanwhile. Gives the versions taken over.
    """
    versions = readable_versions(directory)
    # The newest first: of rows under one key those carried first stay.
    for version in reversed(versions):
        with OldLayout(Pins(directory, version)) as old:
            rows = old.carry_state(maps)
            flows = old.carry_conntrack(maps)
            with _answers_believed(maps):
                devices = swap_programs()
                # A replaced program may still run on another CPU, and remember its flow behind the copy's back.
                wait_for_programs()
                flows += old.carry_conntrack(maps)
        # Only now: until the last device was swapped, an agent that is killed can do all of it again, or go back.
        remove_version(Pins(directory, version))
        recount_usage(maps)
        _log.info(
            "took over the maps of another layout",
            extra={"old": version, "new": abi.ABI_VERSION, "count": rows + flows},
        )
        _log.debug("swapped programs", extra={"count": devices})
    return versions


def open_attached(netlink: NetlinkSocket, node_name: str, opened: ExitStack) -> list[Program]:
    """Open the programs that this node's pods' devices and its tunnel have; `opened` gives them back."""
    indexes = [device.index for device in list_devices(netlink)[0] if device.node_name == node_name]
    tunnel = find_tunnel(netlink, node_name)
    if tunnel is not None:
        indexes.append(IfIndex(tunnel.link.index))
    numbers = {
        number
        for index in indexes
        for hook in (FROM_POD_HOOK, TO_POD_HOOK)
        for number in list_attached_programs(netlink, index, hook)
    }
    # By the number that the filter shows: these programs may have no pin any more.
    programs = (open_program_by_id(number) for number in sorted(numbers))
    return [opened.enter_context(program) for program in programs if program is not None]


def replace_programs(
    netlink: NetlinkSocket,
    node_name: str,
    programs: Programs,
    tunnel: TunnelPrograms,
    netdev: NetdevProgram,
) -> int:
    """Put other programs onto every device of a node, in place, so that no packet passes between.

    Gives the number of devices. A device that vanishes meanwhile is skipped; one that lost its hooks gets them back.
    Raises KernelFailure when a device keeps its old program.
    """
    hooks = (
        (TO_POD_HOOK, programs.to_pod_fd, "to_pod"),
        (FROM_POD_HOOK, programs.from_pod_fd, "from_pod"),
    )
    owned = [device.index for device in list_devices(netlink)[0] if device.node_name == node_name]
    wanted = [
        (index, set_bpf_filter(index, hook, fd, name))
        for index in owned
        for hook, fd, name in hooks
    ]
    own_tunnel = find_tunnel(netlink, node_name)
    if own_tunnel is not None:
        index = IfIndex(own_tunnel.link.index)
        owned.append(index)
        wanted += [
            (index, hook.attach_to(index))
            for hook in tunnel.hooks(is_flow_based=own_tunnel.settings.flow_based)
        ]
    for host_index in list_attached(netlink):
        replace_attached(netlink, host_index, netdev)
    failures = netlink.attempt([request for _, request in wanted])
    for (index, request), failure in zip(wanted, failures, strict=True):
        if failure is None or failure.errno == errno.ENODEV:
            continue
        if failure.errno != errno.EINVAL:
            raise failure
        # No such hook, or a filter that is refused: with hooks there for certain the second answer tells which.
        _, second = netlink.attempt([add_clsact(index), request])
        if second is not None and second.errno != errno.ENODEV:
            raise second
    return len(owned)
