"""Pods that really are there: namespaces and device pairs with the programs attached, for what a test run cannot show.

Used by the packet tests of frames that test runs refuse, and of what the kernel does around the programs. The rows are
the rig's. The host's namespace is the rig's `host`; nothing outside of the namespaces made here is touched.
"""

import ipaddress
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from podwire.kernel import netns
from podwire.kernel.fd import Fd
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl.link import LinkEnd, create_veth, set_link
from podwire.kernel.rtnl.route import (
    InterfaceAddress,
    Neighbour,
    Route,
    add_address,
    add_route,
    host_network,
    set_neighbour,
)
from podwire.kernel.rtnl.tc import FROM_POD_HOOK, TO_POD_HOOK, add_clsact, set_bpf_filter
from tests import leavings, waiting
from tests.packet.rig import GATEWAY_4, GATEWAY_6, Endpoint, Rig

POD_DEVICE: Final = "eth0"
POD_INDEX: Final = 2
DEFAULT_4: Final = ipaddress.ip_network("0.0.0.0/0")
DEFAULT_6: Final = ipaddress.ip_network("::/0")


@dataclass(frozen=True)
class LivePod:
    """A namespace that plays an endpoint of the rig."""

    endpoint: Endpoint
    name: str
    fd: Fd

    def open_socket(self, family: int, kind: int, protocol: int = 0) -> socket.socket:
        """Open a socket inside; it may be used from outside."""
        with netns.namespace(self.fd.fileno()):
            found = socket.socket(family, kind, protocol)
        found.settimeout(waiting.DEADLINE_S)
        return found

    def raw_socket(self) -> socket.socket:
        """Open a packet socket on the pod's device."""
        found = self.open_socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        found.bind((POD_DEVICE, 0))
        return found

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside."""
        inside = ["ip", "netns", "exec", self.name, *command]
        return subprocess.run(
            inside, capture_output=True, text=True, check=False, timeout=waiting.DEADLINE_S
        )


@dataclass
class LiveHost:
    """The namespace that plays the host, and its pods."""

    name: str
    fd: Fd
    pods: dict[str, LivePod]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside."""
        inside = ["ip", "netns", "exec", self.name, *command]
        return subprocess.run(
            inside, capture_output=True, text=True, check=False, timeout=waiting.DEADLINE_S
        )

    def open_socket(self, family: int, kind: int, protocol: int = 0) -> socket.socket:
        """Open a socket inside; it may be used from outside."""
        with netns.namespace(self.fd.fileno()):
            found = socket.socket(family, kind, protocol)
        found.settimeout(waiting.DEADLINE_S)
        return found


@contextmanager
def _named(name: str) -> Iterator[Fd]:
    fd = netns.create_named(name)
    try:
        with fd:
            yield fd
    finally:
        netns.delete_named(name)


def _attach(rig: Rig, host: NetlinkSocket, endpoint: Endpoint, pod_fd: int) -> None:
    device = LinkEnd(f"pwt{endpoint.instance}", endpoint.ifindex, endpoint.host_mac, endpoint.mtu)
    peer = LinkEnd(POD_DEVICE, POD_INDEX, endpoint.pod_mac, endpoint.mtu)
    host.execute([create_veth(device, peer, pod_fd)])
    host.execute([set_link(endpoint.ifindex, no_link_local=True), add_clsact(endpoint.ifindex)])
    host.execute(
        [
            set_bpf_filter(
                endpoint.ifindex, FROM_POD_HOOK, rig.programs["from_pod"].fd, "from_pod"
            ),
            set_bpf_filter(endpoint.ifindex, TO_POD_HOOK, rig.programs["to_pod"].fd, "to_pod"),
            set_link(endpoint.ifindex, up=True),
        ]
    )


def _addresses(endpoint: Endpoint) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    return [ipaddress.ip_address(text) for text in (endpoint.ipv4, endpoint.ipv6) if text]


def _route_to(host: NetlinkSocket, endpoint: Endpoint) -> None:
    for address in _addresses(endpoint):
        host.execute(
            [
                set_neighbour(Neighbour(endpoint.ifindex, address, endpoint.pod_mac)),
                add_route(Route(host_network(address), index=endpoint.ifindex)),
            ]
        )


def _configure_pod(endpoint: Endpoint, pod_fd: int) -> None:
    """Configure the pod without a permanent neighbour: it has to ask for its gateway."""
    with NetlinkSocket.open_in(pod_fd) as netlink:
        netlink.execute([set_link(1, up=True), set_link(POD_INDEX, up=True)])
        for address in _addresses(endpoint):
            gateway = ipaddress.ip_address(GATEWAY_4 if address.version == 4 else GATEWAY_6)
            default = DEFAULT_4 if address.version == 4 else DEFAULT_6
            netlink.execute(
                [add_address(InterfaceAddress(POD_INDEX, address, address.max_prefixlen))]
            )
            netlink.execute(
                [add_route(Route(host_network(gateway), index=POD_INDEX), replace=True)]
            )
            netlink.execute([add_route(Route(default, index=POD_INDEX, gateway=gateway))])


def _forward() -> None:
    for path in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        with open(f"/proc/sys/net/{path}", "w", encoding="ascii") as file:
            file.write("1")


def _silence(host: NetlinkSocket, endpoints: Sequence[Endpoint]) -> None:
    """Take the devices down: a namespace outlives its name by what its sockets still have to say, and the next test has
    pods with the same rows.
    """
    host.execute([set_link(endpoint.ifindex, up=False) for endpoint in endpoints])


@contextmanager
def live_pods(rig: Rig, *endpoints: Endpoint, host_name: str = "host") -> Iterator[LiveHost]:
    """Make a host namespace and one for each endpoint, connected and configured; metrics count from here on."""
    rig.forget_metrics()
    rig.has_pieces = True
    with ExitStack() as stack:
        host_name = f"{leavings.NAME}-{host_name}"
        host = LiveHost(host_name, stack.enter_context(_named(host_name)), {})
        netns.run_in(host.fd.fileno(), _forward)
        netlink = stack.enter_context(NetlinkSocket.open_in(host.fd.fileno()))
        netlink.execute([set_link(1, up=True)])
        for endpoint in endpoints:
            name = f"{leavings.NAME}-{endpoint.name}"
            fd = stack.enter_context(_named(name))
            _attach(rig, netlink, endpoint, fd.fileno())
            _route_to(netlink, endpoint)
            _configure_pod(endpoint, fd.fileno())
            host.pods[endpoint.name] = LivePod(endpoint, name, fd)
        stack.callback(_silence, netlink, endpoints)
        yield host
