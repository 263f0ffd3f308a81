"""Have the kernel's connection tracking forget flows of datagrams that a host port leads elsewhere from now on.

Called by `datapath.node` after ports came or went. A flow that is remembered is not translated anew: a client that
keeps its port would go on reaching nobody, or the address of a pod that is gone, which another pod may get. Streams are
left alone: they end with their pod, and a new one is a new flow.
"""

import logging
import socket
from collections.abc import Set

from podwire.kernel.conntrack import delete_flows, list_flows
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.netlink_events import NETLINK_NETFILTER
from podwire.model.errors import KernelFailure
from podwire.model.interfaces import HostPortTable, HostSocket, PodSocket

_Led = tuple[HostSocket, PodSocket]

_log = logging.getLogger(__name__)


def forget_outdated(before: HostPortTable, after: HostPortTable) -> None:
    """Delete the flows that `after` leads elsewhere than `before`. What cannot be deleted is told and times out."""
    gone = _select_datagrams(before.items() - after.items())
    come = _select_datagrams(after.items() - before.items())
    if not gone and not come:
        return
    led = {(asked.port, pod.address) for asked, pod in gone}
    try:
        with NetlinkSocket(protocol=NETLINK_NETFILTER) as netlink:
            for version, port in {_name(asked) for asked, _ in gone | come}:
                is_new = any(_name(asked) == (version, port) for asked, _ in come)
                found = list_flows(netlink, version, socket.IPPROTO_UDP, port)
                # What somebody else translates is not about this host's port.
                outdated = [
                    flow
                    for flow in found
                    if (port, flow.answered_by) in led or (is_new and not flow.is_translated)
                ]
                delete_flows(netlink, outdated)
    except KernelFailure as failure:
        _log.warning(
            "flows of datagrams to host ports could not be forgotten; they end when nobody sends for 2 minutes",
            extra={"error": failure.message},
        )


def _select_datagrams(some: Set[_Led]) -> Set[_Led]:
    return {(asked, pod) for asked, pod in some if asked.protocol == socket.IPPROTO_UDP}


def _name(asked: HostSocket) -> tuple[int, int]:
    return asked.address.version, asked.port
