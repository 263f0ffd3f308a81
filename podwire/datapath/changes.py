"""Which of the kernel's events concern the way to other nodes, a pod's device that lost something, or nftables.

Used by `datapath.node` to open `kernel.netlink_events.NetlinkEvents`. Pure. Invariant: what comes and goes with pods
is never reported (their devices have numbers that only they have), so that a busy node does not examine itself all the
time, and an ADD does not wake a thread at each of its steps (measured: half of its time). A reported event may turn
out to be nothing.
"""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from podwire.datapath.device import FIRST_INDEX
from podwire.kernel.clock import FIRST_PID_NAMESPACE
from podwire.kernel.netlink import read_text, unpack_body
from podwire.kernel.netlink_events import (
    COMMITTED,
    GROUP_FILTER,
    GROUP_IPV4_ADDRESS,
    GROUP_IPV4_ROUTE,
    GROUP_IPV6_ADDRESS,
    GROUP_IPV6_ROUTE,
    GROUP_LINK,
    GROUP_TABLES,
    NETLINK_NETFILTER,
    NetlinkEvents,
)
from podwire.kernel.rtnl.link import RTM_DELLINK, RTM_NEWLINK
from podwire.kernel.rtnl.route import (
    ROUTE_ANYCAST,
    ROUTE_BROADCAST,
    ROUTE_LOCAL,
    RTM_DELADDR,
    RTM_DELROUTE,
    RTM_NEWADDR,
    RTM_NEWROUTE,
    TABLE_LOCAL,
    TABLE_MAIN,
    read_route,
)
from podwire.kernel.rtnl.tc import RTM_DELQDISC, RTM_DELTFILTER, RTM_NEWTFILTER
from podwire.model.ids import ROUTE_PROTOCOL

_GROUPS: Final = (
    GROUP_LINK
    | GROUP_FILTER
    | GROUP_IPV4_ADDRESS
    | GROUP_IPV4_ROUTE
    | GROUP_IPV6_ADDRESS
    | GROUP_IPV6_ROUTE
)
_ABOUT_A_LINK: Final = frozenset(
    {RTM_NEWLINK, RTM_DELLINK, RTM_NEWTFILTER, RTM_DELTFILTER, RTM_DELQDISC}
)
_LINK_INDEX: Final = struct.Struct("=4xi")
"""Common to ifinfomsg, ifaddrmsg and tcmsg: the index comes after four bytes."""
_GENERATION: Final = struct.Struct("=BBH")
"""struct nfgenmsg, which precedes the attributes."""
_NFTA_GEN_PROC_PID: Final = 2
_NFTA_GEN_PROC_NAME: Final = 3


def watch_links() -> NetlinkEvents:
    """Listen for changes of what a plan for other nodes needs or makes, in the calling thread's namespace."""
    # Devices of pods are dropped by a filter in the kernel: waking a thread at each step of an ADD was half of the
    # ADD's time.
    return NetlinkEvents(_GROUPS, matters, ignored_from=FIRST_INDEX)


def watch_devices(told: Callable[[int], None]) -> NetlinkEvents:
    """Listen for filters, queues and routes that pods' devices lose; `told` gets the index of each such device."""

    def note(kind: int, body: bytes) -> bool:
        told(read_route(body).index if kind == RTM_DELROUTE else _LINK_INDEX.unpack_from(body)[0])
        return True

    groups = GROUP_FILTER | GROUP_IPV4_ROUTE | GROUP_IPV6_ROUTE
    return NetlinkEvents(groups, note, losses_from=FIRST_INDEX)


def watch_tables(told: Callable[[str], None]) -> NetlinkEvents:
    """Listen for changes of nftables, of whichever table; `told` gets the name of each process that made one, "" = we.

    One message ends each commit, and only those arrive: what a commit says of its rules may be megabytes.
    """

    sees_all = os.readlink("/proc/self/ns/pid") == FIRST_PID_NAMESPACE
    own_name = Path("/proc/self/comm").read_text(encoding="utf-8").rstrip("\n")

    def note(_kind: int, body: bytes) -> bool:
        _, attributes = unpack_body(_GENERATION, body)
        name = read_text(attributes, _NFTA_GEN_PROC_NAME)
        # nftables' numbers are in network order, unlike those of rtnetlink. The kernel puts the number of the thread
        # here that sent the commit (nf_tables_fill_gen_info), and the agent has several.
        thread = int.from_bytes(attributes.get(_NFTA_GEN_PROC_PID, b""), "big")
        # In a container the number is another thread's, or nobody's. What a namesake changes is found by the next
        # reconciliation.
        is_own = os.path.exists(f"/proc/self/task/{thread}") if sees_all else name == own_name
        told("" if is_own else name)
        # Our own commit must not wake the duty that looks for commits of others, or each repair would be followed by
        # another look.
        return not is_own

    return NetlinkEvents(GROUP_TABLES, note, only_kind=COMMITTED, protocol=NETLINK_NETFILTER)


def matters(kind: int, body: bytes) -> bool:
    """Tell whether a message may be about the way to other nodes."""
    if kind in _ABOUT_A_LINK or kind in (RTM_NEWADDR, RTM_DELADDR):
        return len(body) >= _LINK_INDEX.size and _LINK_INDEX.unpack_from(body)[0] < FIRST_INDEX
    if kind in (RTM_NEWROUTE, RTM_DELROUTE):
        return _route_matters(kind, body)
    return False


def _route_matters(kind: int, body: bytes) -> bool:
    """Default routes choose the underlay; of ours, only that one goes is news. Local ones are the host itself."""
    route = read_route(body)
    # What the programs call `host` is this table's content (datapath rule: a subnet's broadcast and router anycast
    # address lead to host sockets as well), so it is followed live.
    if route.table == TABLE_LOCAL and route.kind in (ROUTE_LOCAL, ROUTE_BROADCAST, ROUTE_ANYCAST):
        return route.index < FIRST_INDEX
    if route.table != TABLE_MAIN or route.index >= FIRST_INDEX:
        return False
    # The default route says which device is the underlay when no node address is set.
    if route.destination.prefixlen == 0:
        return True
    return kind == RTM_DELROUTE and route.protocol == ROUTE_PROTOCOL
