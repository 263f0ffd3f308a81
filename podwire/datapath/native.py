"""The program on the device towards natively reached nodes: what it needs there, attached, kept, taken away.

Called by `datapath.cluster` and `datapath.upgrade` under the node's turn, and by those who look for leftovers. The
device is the host's: nothing of it is changed but one filter of our own, which its place and name tell. Invariant: a
device that has what stands in the way of this filter is named and left alone.
"""

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from podwire.datapath.device import FIRST_INDEX
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl.link import Link, get_link, read_link
from podwire.kernel.rtnl.tc import (
    FROM_POD_HOOK,
    BpfFilter,
    add_clsact,
    delete_bpf_filter,
    list_filters,
    list_queues,
    read_bpf_filter,
    read_filter_place,
    read_queue,
    set_bpf_filter,
)
from podwire.kernel.xfrm import has_policies
from podwire.model.errors import KernelFailure
from podwire.model.ids import NETDEV_FILTER_HANDLE, NETDEV_FILTER_PRIORITY

PROGRAM: Final = "from_netdev"
_GONE: Final = (errno.ENODEV, errno.ENOENT, errno.EINVAL)
"""EINVAL: the device has no hooks any more."""
_NO_MAC: Final = "00:00:00:00:00:00"


@dataclass(frozen=True)
class NetdevProgram:
    """The program: descriptor to attach, and number to recognise it by."""

    fd: int
    id: int


def find_obstacle(netlink: NetlinkSocket, index: int) -> str:
    """Say why native packets have to go through this host's stack at a device, "" = they need not."""
    body = netlink.find(get_link(index=index))
    if body is None:
        return f"device index {index} is gone"
    link = read_link(body)
    if not _is_ethernet(link):
        return f"device {link.name!r} has no Ethernet addresses"
    if has_policies():
        return "this host has IPsec policies, which hold in its stack only"
    earlier = [
        priority
        for one in _dump_filters(netlink, index)
        if not _is_ours(read_bpf_filter(one))
        and (priority := _priority_of_foreign(one)) <= NETDEV_FILTER_PRIORITY
    ]
    if earlier:
        return (
            f"a filter of somebody else with priority {min(earlier)} sees what comes in by device"
            f" {link.name!r} before podwire could, and may end there"
        )
    return ""


def _is_ethernet(link: Link) -> bool:
    return len(link.mac) == len(_NO_MAC) and link.mac != _NO_MAC


def _priority_of_foreign(body: bytes) -> int:
    """Give the priority of a filter; the head of the chain that ours is in stands for nobody."""
    priority, kind, handle = read_filter_place(body)
    is_head_of_ours = (priority, kind, handle) == (NETDEV_FILTER_PRIORITY, "bpf", 0)
    return priority + is_head_of_ours


def _dump_filters(netlink: NetlinkSocket, index: int) -> Sequence[bytes]:
    """Give what the device's hook holds; nothing where it has no hooks, or is gone."""
    try:
        return list(netlink.dump(list_filters(index, FROM_POD_HOOK)))
    except KernelFailure as failure:
        if failure.errno in _GONE:
            return ()
        raise


def _is_ours(found: BpfFilter | None) -> bool:
    place = NETDEV_FILTER_PRIORITY, NETDEV_FILTER_HANDLE
    return found is not None and (found.priority, found.handle) == place and found.name == PROGRAM


def find_program(netlink: NetlinkSocket, index: int) -> int:
    """Give the number of the program that is attached to a device as ours, 0 = none."""
    found = (read_bpf_filter(body) for body in _dump_filters(netlink, index))
    return next((one.program_id for one in found if one is not None and _is_ours(one)), 0)


def ensure_attached(netlink: NetlinkSocket, index: int, program: NetdevProgram) -> list[str]:
    """Attach the program to a device, in the place of an older one; name what differed. Raises KernelFailure."""
    present = find_program(netlink, index)
    if present == program.id:
        return []
    attach = set_bpf_filter(
        index,
        FROM_POD_HOOK,
        program.fd,
        PROGRAM,
        priority=NETDEV_FILTER_PRIORITY,
        handle=NETDEV_FILTER_HANDLE,
    )
    hooks, failure = netlink.attempt([add_clsact(index), attach])
    if failure is not None:
        raise hooks if hooks is not None and hooks.errno != errno.EEXIST else failure
    state = f"number {present}, wanted {program.id}" if present else "not attached"
    return [f"program {PROGRAM} of device index {index} is {state}"]


def remove_attached(netlink: NetlinkSocket, indexes: Iterable[int]) -> list[str]:
    """Take the program away from devices; the hooks stay, for others may count on them. Names what was removed."""
    present = [index for index in indexes if find_program(netlink, index)]
    requests = [
        delete_bpf_filter(index, FROM_POD_HOOK, NETDEV_FILTER_PRIORITY, NETDEV_FILTER_HANDLE)
        for index in present
    ]
    for failure in netlink.attempt(requests):
        if failure is not None and failure.errno not in _GONE:
            raise failure
    return [f"program {PROGRAM} of device index {index} was too much" for index in present]


def list_attached(netlink: NetlinkSocket) -> Sequence[int]:
    """List the devices of this host that have the program."""
    queues = [read_queue(body) for body in netlink.dump(list_queues(0))]
    hooked = {one.index for one in queues if one.kind == "clsact" and one.index < FIRST_INDEX}
    return [index for index in sorted(hooked) if find_program(netlink, index)]
