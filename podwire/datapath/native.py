"""The program on the device towards natively reached nodes: what it requires, how it is attached, kept and removed.

Called by `datapath.cluster` and `datapath.upgrade` under the node's turn, and by the search for leftovers. The device
belongs to the host. Only one filter of podwire's, recognised by its place and name, and the hooks (a clsact queue) that
contain it are changed. Nothing on a queue tells its maker, so a note records it. Invariants: a device with something
that conflicts with this filter is reported and left alone. Hooks that somebody else made, or has filters in, stay.
"""

import errno
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from podwire.datapath.device import FIRST_INDEX
from podwire.kernel.netlink import NetlinkSocket, Request
from podwire.kernel.rtnl.link import Link, get_link, read_link
from podwire.kernel.rtnl.tc import (
    FROM_POD_HOOK,
    TO_POD_HOOK,
    BpfFilter,
    add_clsact,
    delete_bpf_filter,
    delete_clsact,
    list_filters,
    list_queues,
    read_bpf_filter,
    read_filter_place,
    read_queue,
    set_bpf_filter,
)
from podwire.kernel.xfrm import has_policies
from podwire.model.errors import StorageFailure
from podwire.model.ids import NETDEV_FILTER_HANDLE, NETDEV_FILTER_PRIORITY

PROGRAM: Final = "from_netdev"
_GONE: Final = (errno.ENODEV, errno.ENOENT, errno.EINVAL)
"""EINVAL: the device has no hooks any more."""
_NO_MAC: Final = "00:00:00:00:00:00"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NetdevProgram:
    """The program: descriptor to attach, and number to recognise it by."""

    fd: int
    id: int


class _Note(msgspec.Struct, frozen=True):
    """What is written down: indexes do not outlive a boot."""

    boot_id: str
    devices: dict[int, bool] = {}


class OwnHooks:
    """Which devices got their hooks from podwire.

    A note is written before hooks are made, and once more afterwards. A process that dies in between leaves one that
    says "perhaps"; the program, attached by the call into the kernel that makes the hooks, tells how far it came.
    """

    def __init__(
        self,
        noted: str = "",
        *,
        boot_id: str = "",
        write: Callable[[str], None] = lambda _note: None,
    ) -> None:
        note = msgspec.json.decode(noted, type=_Note) if noted else _Note(boot_id)
        self._boot_id = boot_id
        self._write = write
        self._made = dict(note.devices) if note.boot_id == boot_id else {}
        """By index: True = made, False = perhaps."""

    @property
    def devices(self) -> frozenset[int]:
        """Give the devices whose hooks are podwire's."""
        return frozenset(self._made)

    def note(self, index: int, *, made: bool) -> None:
        """Write down that hooks are about to be made, or were made. Raises StorageFailure."""
        self._save({**self._made, index: made})

    def forget(self, indexes: Iterable[int]) -> None:
        """Write down that hooks are gone, or another program's. A full disk does no harm: the next start compares."""
        gone = self._made.keys() & set(indexes)
        if not gone:
            return
        left = {index: made for index, made in self._made.items() if index not in gone}
        try:
            self._save(left)
        except StorageFailure as failure:
            self._made = left
            _log.warning("forget hooks of devices", extra={"error": failure.message})

    def compare(self, netlink: NetlinkSocket) -> None:
        """Forget hooks that an earlier process noted and never made, and hooks that are gone."""
        self.forget(
            [
                index
                for index, made in self._made.items()
                if not (_has_hooks(netlink, index) if made else find_program(netlink, index))
            ]
        )

    def _save(self, made: dict[int, bool]) -> None:
        if made != self._made:
            self._write(msgspec.json.encode(_Note(self._boot_id, made)).decode())
            self._made = made


def find_obstacle(netlink: NetlinkSocket, index: int) -> str:
    """Say why native packets at a device have to go through this host's stack, "" = they need not."""
    body = netlink.find(get_link(index=index))
    if body is None:
        return f"device index {index} is gone"
    link = read_link(body)
    # The programs write an Ethernet header for the next hop; frames of a PPP or tun device have none.
    if not _is_ethernet(link):
        return f"device {link.name!r} has no Ethernet addresses"
    # xfrm policies apply in the stack only: a packet that is redirected past it would leave unencrypted.
    if has_policies():
        return "this host has IPsec policies, which hold in its stack only"
    # tc runs filters by priority and may stop at any of them: what stands before ours decides before it.
    earlier = [
        priority
        for body in _dump_filters(netlink, index)
        if not _is_ours(read_bpf_filter(body))
        and (priority := _priority_of_foreign(body)) <= NETDEV_FILTER_PRIORITY
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
    """Give the priority of a filter; the head of the chain that ours is in is no filter of anybody."""
    return read_filter_place(body)[0] + _is_head_of_ours(body)


def _is_head_of_ours(body: bytes) -> bool:
    return read_filter_place(body) == (NETDEV_FILTER_PRIORITY, "bpf", 0)


def _dump_filters(netlink: NetlinkSocket, index: int, hook: int = FROM_POD_HOOK) -> Sequence[bytes]:
    """Give what a hook of the device holds; nothing where it has no hooks, or is gone."""
    return netlink.dump(list_filters(index, hook), absent=_GONE)


def _are_used_by_others(netlink: NetlinkSocket, index: int) -> bool:
    """Tell whether somebody else has a filter in the hooks of a device."""
    return any(
        not (hook == FROM_POD_HOOK and (_is_ours(read_bpf_filter(body)) or _is_head_of_ours(body)))
        for hook in (FROM_POD_HOOK, TO_POD_HOOK)
        for body in _dump_filters(netlink, index, hook)
    )


def _has_hooks(netlink: NetlinkSocket, index: int) -> bool:
    return index in _list_hooked(netlink)


def _list_hooked(netlink: NetlinkSocket) -> frozenset[int]:
    """List the devices that have hooks."""
    queues = [read_queue(body) for body in netlink.dump(list_queues(0))]
    return frozenset(queue.index for queue in queues if queue.kind == "clsact")


def _is_ours(attached: BpfFilter | None) -> bool:
    place = NETDEV_FILTER_PRIORITY, NETDEV_FILTER_HANDLE
    return (
        attached is not None
        and (attached.priority, attached.handle) == place
        and attached.name == PROGRAM
    )


def find_program(netlink: NetlinkSocket, index: int) -> int:
    """Give the number of the program that is attached to a device as ours, 0 = none."""
    filters = (read_bpf_filter(body) for body in _dump_filters(netlink, index))
    return next(
        (filter_.program_id for filter_ in filters if filter_ is not None and _is_ours(filter_)), 0
    )


def ensure_attached(
    netlink: NetlinkSocket, index: int, program: NetdevProgram, hooks: OwnHooks
) -> list[str]:
    """Attach the program to a device, in the place of an older one; name what differed.

    Raises KernelFailure; StorageFailure when hooks would have to be made that nobody could take away later.
    """
    present = find_program(netlink, index)
    if present == program.id:
        return []
    if _has_hooks(netlink, index):
        replace_attached(netlink, index, program)
    else:
        _attach_with_hooks(netlink, index, program, hooks)
    state = f"number {present}, wanted {program.id}" if present else "not attached"
    return [f"program {PROGRAM} of device index {index} is {state}"]


def replace_attached(netlink: NetlinkSocket, index: int, program: NetdevProgram) -> None:
    """Attach the program to a device that has hooks, in the place of an older one. Raises KernelFailure."""
    netlink.execute([_attach(index, program)])


def _attach(index: int, program: NetdevProgram) -> Request:
    return set_bpf_filter(
        index,
        FROM_POD_HOOK,
        program.fd,
        PROGRAM,
        priority=NETDEV_FILTER_PRIORITY,
        handle=NETDEV_FILTER_HANDLE,
    )


def _attach_with_hooks(
    netlink: NetlinkSocket, index: int, program: NetdevProgram, hooks: OwnHooks
) -> None:
    # Before the effect: nothing on a clsact queue says its maker, so after a crash only this note does.
    hooks.note(index, made=False)
    # In one send, so that a process killed here has made both or neither.
    refused, failure = netlink.attempt([add_clsact(index), _attach(index, program)])
    if refused is None:
        hooks.note(index, made=True)
    else:
        hooks.forget([index])  # somebody else was faster, or the device is gone
    if failure is not None:
        # EEXIST: somebody made the hooks at the same moment, and the program's own failure is the news.
        raise refused if refused is not None and refused.errno != errno.EEXIST else failure


def remove_attached(netlink: NetlinkSocket, indexes: Iterable[int], hooks: OwnHooks) -> list[str]:
    """Take the program away from devices, and the hooks that were made for it and have no other user; name both."""
    removed, requests, freed = [], [], []
    for index in indexes:
        if find_program(netlink, index):
            removed.append(f"program {PROGRAM} of device index {index} was too much")
            requests.append(
                delete_bpf_filter(
                    index, FROM_POD_HOOK, NETDEV_FILTER_PRIORITY, NETDEV_FILTER_HANDLE
                )
            )
        if (
            index in hooks.devices
            and not _are_used_by_others(netlink, index)
            and _note_going(hooks, index)
        ):
            removed.append(f"clsact queue of device index {index} was too much")
            requests.append(delete_clsact(index))
            freed.append(index)
    netlink.execute(requests, tolerated=_GONE)
    hooks.forget(freed)
    return removed


def _note_going(hooks: OwnHooks, index: int) -> bool:
    """Write down that hooks go: should this process die now, what is there later may be somebody else's.

    False on a full disk: they stay until it can be written, and nothing else waits for that.
    """
    try:
        hooks.note(index, made=False)
    except StorageFailure as failure:
        _log.warning("take hooks of a device away", extra={"error": failure.message})
        return False
    return True


def list_attached(netlink: NetlinkSocket) -> Sequence[int]:
    """List the devices of this host that have the program."""
    # Pods' devices have hooks, too, thousands of them, and never this program.
    hooked = (index for index in _list_hooked(netlink) if index < FIRST_INDEX)
    return [index for index in sorted(hooked) if find_program(netlink, index)]


def list_free_hooks(netlink: NetlinkSocket, hooks: OwnHooks) -> Sequence[int]:
    """List the devices whose hooks are podwire's and of no use to anybody else."""
    return [device for device in sorted(hooks.devices) if not _are_used_by_others(netlink, device)]
