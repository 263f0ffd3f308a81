"""Maps and programs of a node: opened or loaded, with the rows of another layout taken over.

Called by `datapath.node` when it is prepared. Invariant: a pod's device has programs all the time, either
those of the predecessor or these.
"""

from contextlib import ExitStack
from typing import Final

from podwire.datapath import abi, upgrade
from podwire.datapath import maps as tables
from podwire.datapath.conntrack_maps import tell_shard_room
from podwire.datapath.device import Programs
from podwire.datapath.native import NetdevProgram
from podwire.datapath.plan import NodePlan
from podwire.datapath.programs import LoadedPrograms, Pins, load_programs
from podwire.datapath.templates import read_template
from podwire.datapath.tunnel import TunnelPrograms
from podwire.kernel.netlink import NetlinkSocket

_HOOKS: Final = ("from_pod", "to_pod", "from_overlay", "to_overlay", "from_netdev")
OBJECTS: Final = (*_HOOKS, "mark_tunnel", "conntrack_gc")


def load_node(plan: NodePlan, netlink: NetlinkSocket) -> LoadedPrograms:
    """Open or load maps and programs, take another layout's rows over, start the collector."""
    # Refuses pins of a newer build before anything is written below them.
    upgrade.readable_versions(plan.bpf_dir)
    template = read_template(plan.object_dir, OBJECTS, plan.constants)
    pins = Pins(plan.bpf_dir, abi.ABI_VERSION)
    with ExitStack() as opened:
        # Maps whose pins somebody has removed live on in the programs of running devices, and are found through
        # these.
        attached = upgrade.open_attached(netlink, plan.node_name, opened)
        loaded = load_programs(template, pins, plan.capacities, attached)
    try:
        upgrade.mark_readable(pins)

        # Run between the two copies of conntrack: the new programs need their limits from the first packet on.
        def swap_programs() -> int:
            tables.write_settings(loaded.maps, **plan.flow_limits)
            return upgrade.replace_programs(
                netlink,
                plan.node_name,
                programs_of(loaded),
                tunnel_programs_of(loaded),
                netdev_program_of(loaded),
            )

        upgrade.take_over(plan.bpf_dir, loaded.maps, swap_programs)
        upgrade.resize_conntrack(loaded.maps, plan.capacities)
        tell_shard_room(loaded.maps, plan.capacities.shard_entries)
        tables.write_settings(loaded.maps, **plan.flow_limits)
        upgrade.attend(loaded)
    except BaseException:
        loaded.close()
        raise
    return loaded


def programs_of(loaded: LoadedPrograms) -> Programs:
    """Give the programs at a pod's device."""
    return Programs(
        from_pod_fd=loaded.fd("from_pod"),
        to_pod_fd=loaded.fd("to_pod"),
        from_pod_id=loaded.id("from_pod"),
        to_pod_id=loaded.id("to_pod"),
    )


def tunnel_programs_of(loaded: LoadedPrograms) -> TunnelPrograms:
    """Give the programs at the tunnel's device."""
    names = ("from_overlay", "to_overlay", "mark_tunnel")
    return TunnelPrograms(*((loaded.fd(name), loaded.id(name)) for name in names))


def netdev_program_of(loaded: LoadedPrograms) -> NetdevProgram:
    """Give the program at the underlay's device."""
    return NetdevProgram(fd=loaded.fd("from_netdev"), id=loaded.id("from_netdev"))
