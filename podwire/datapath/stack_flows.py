"""Have the kernel's connection tracking forget flows of datagrams that a host port leads elsewhere from now on.

`datapath.node` tells it of ports that came or went. A flow that is remembered is not translated anew: a client that
keeps its port would go on reaching nobody, or the address of a pod that is gone, which another pod may get. Streams are
left alone: they end with their pod, and a new one is a new flow.

The kernel finds flows of a port only by going over its whole table, which takes 10 ms for a family. So a thread of its
own does that, and no ADD or DEL waits for it but one that needs what an ending pod with such a port still has.
Invariant: when `forget` returns, nothing is left of what it was told before, so the address of an ended pod is free
only after that (`KernelDatapath.reap_devices`).
"""

import logging
import socket
import threading
from collections.abc import Set
from contextlib import ExitStack
from typing import Final, Self

from podwire.datapath.plan import list_own_addresses
from podwire.kernel.conntrack import TrackedFlow, count_flows, delete_flows, list_flows
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.netlink_events import NETLINK_NETFILTER
from podwire.model.closing import Closing
from podwire.model.endpoint import IPAddress
from podwire.model.errors import KernelFailure
from podwire.model.interfaces import HostPortTable, HostSocket, PodSocket

Led = tuple[HostSocket, PodSocket]
PORTS_MAX: Final = 8
"""Asked for one by one; of more, all flows of datagrams are listed once instead."""
PAUSE_S: Final = 0.1
"""Between two rounds: pods that come and go in a loop do not keep a CPU busy with the table."""

_log = logging.getLogger(__name__)


class StackFlows(Closing):
    """Flows of datagrams to host ports, and the thread that deletes outdated ones; it starts with the first of them."""

    def __init__(self, netlink: NetlinkSocket, tracking: NetlinkSocket) -> None:
        """`netlink` is a socket of rtnetlink, `tracking` one of nfnetlink; both are closed with this."""
        self._netlink = netlink
        self._tracking = tracking
        self._telling = threading.Lock()
        self._gone: set[Led] = set()
        self._come: set[Led] = set()
        self._walking = threading.Lock()
        self._woken = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def open(cls) -> Self:
        """Open the sockets in the namespace of this thread, wherever the thread that starts later is."""
        with ExitStack() as stack:
            netlink = stack.enter_context(NetlinkSocket())
            opened = cls(netlink, NetlinkSocket(protocol=NETLINK_NETFILTER))
            stack.pop_all()
        return opened

    def outdate(self, before: Set[Led], after: HostPortTable) -> None:
        """Note which flows are to be deleted: those that `after` leads elsewhere than `before`. Returns at once."""
        gone = _select_datagrams(before - after.items())
        come = _select_datagrams(after.items() - before)
        if not gone and not come:
            return
        with self._telling:
            self._gone |= gone
            self._come |= come
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="host-ports", daemon=True)
                self._thread.start()
        self._woken.set()

    def forget(self) -> None:
        """Delete what is noted, or wait until another thread has; what cannot be deleted is logged, and times out."""
        # Taken before the lists, so that whoever comes second returns after what the first one took is deleted.
        with self._walking:
            with self._telling:
                gone, self._gone = self._gone, set()
                come, self._come = self._come, set()
            if not gone and not come:
                return
            try:
                for version in sorted({asked.address.version for asked, _ in gone | come}):
                    self._forget_family(version, gone, come)
            except KernelFailure as failure:
                _log.warning(
                    "flows of datagrams to host ports could not be forgotten;"
                    " each ends 2 minutes after its last datagram",
                    extra={"error": failure.message},
                )

    def close(self) -> None:
        """Delete what is noted, and end the thread."""
        self._closing.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join()
        self._netlink.close()
        self._tracking.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._woken.wait()
            self._woken.clear()
            try:
                self.forget()
            except Exception:  # the thread's door: without it no flow would be forgotten any more
                _log.exception("forgetting flows to host ports met a bug")
            self._closing.wait(PAUSE_S)
        self.forget()

    def _forget_family(self, version: int, gone: Set[Led], come: Set[Led]) -> None:
        # The count is one number of this namespace; the table is the whole machine's.
        if not count_flows(self._tracking):
            return
        led = {(asked.port, pod.address) for asked, pod in gone if asked.address.version == version}
        asked_at = {asked for asked, _ in come if asked.address.version == version}
        own = {address for _, address in list_own_addresses(self._netlink)} if asked_at else set()
        ports = {port for port, _ in led} | {asked.port for asked in asked_at}
        single = sorted(ports) if len(ports) <= PORTS_MAX else [None]
        for port in single:
            found = list_flows(self._tracking, version, socket.IPPROTO_UDP, port)
            outdated = [
                flow for flow in found if _was_led(flow, led) or _was_missed(flow, asked_at, own)
            ]
            delete_flows(self._tracking, outdated)


def _was_led(flow: TrackedFlow, led: Set[tuple[int, IPAddress]]) -> bool:
    return flow.is_translated and (flow.asked_port, flow.answered_by) in led


def _was_missed(flow: TrackedFlow, asked_at: Set[HostSocket], own: Set[IPAddress]) -> bool:
    """Tell whether the flow went to this host itself, at a port that leads to a pod now."""
    # What somebody else translates is not about this host's port, nor is what this host only forwards.
    if flow.is_translated:
        return False
    address = flow.answered_by
    return any(
        asked.port == flow.asked_port
        and (
            asked.address == address
            or (asked.address.is_unspecified and (address in own or address.is_loopback))
        )
        for asked in asked_at
    )


def _select_datagrams(some: Set[Led]) -> set[Led]:
    return {(asked, pod) for asked, pod in some if asked.protocol == socket.IPPROTO_UDP}
