"""A town for ICMP errors: two nodes with pods, and a world behind two routers, all of it real; and sockets that tell
who sent an error.

Used by test_icmp_errors.py. The path's narrow place is between the routers. No machine limits how many errors it sends.
"""

import contextlib
import errno
import ipaddress
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from podwire.datapath.abi import DropReason
from podwire.datapath.maps import read_metrics
from podwire.kernel import netns
from podwire.kernel.sysctl import write_sysctl
from podwire.model.cluster import Way
from podwire.model.interfaces import EndpointConfig
from podwire.model.policy import Direction, PolicyEntry, PolicyKey, Verdict
from tests.kernel.conftest import Namespace, new_namespace, pings
from tests.kernel.test_cluster_traffic import Node, Way2, connect, two_nodes
from tests.packet import frames

DEADLINE_S: Final = 60.0
SLOT: Final = 5
IDENTITY: Final = 70_001
NARROW_MTU: Final = 1340
TRACE_PORT: Final = 33434
IP_RECVERR, IPV6_RECVERR = 11, 25
IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, PMTUDISC_PROBE = 10, 23, 3
_EXTENDED_ERROR: Final = struct.Struct("=IBBBxII")
"""struct sock_extended_err (linux/errqueue.h); the address of the error's sender follows."""

Rule = tuple[Direction, int, int]
"""What a closed pod may do all the same, with anybody: direction, protocol, port (ICMP: type and code)."""


@dataclass(frozen=True)
class Error:
    """An ICMP error as a socket is told of it."""

    errno: int
    kind: int
    code: int
    mtu: int
    sender: str


@dataclass
class Town:
    """Everybody by name; `pod` on the first node is the one that policy closes."""

    way: Way2
    nodes: list[Node]
    places: dict[str, Namespace]
    revision: int = 1
    rules: list[PolicyKey] = field(default_factory=list)

    @property
    def pod(self) -> Namespace:
        """The pod that is looked at."""
        return self.places["pod"]

    def address(self, name: str, version: int) -> str:
        """Give the address that the pod knows somebody by."""
        four, six = {
            "pod": ("10.77.1.9", "fd77::1:9"),
            "near": ("10.77.1.10", "fd77::1:a"),
            "far": ("10.77.2.9", "fd77::2:9"),
            "host": ("10.50.0.1", "fd50::1"),
            "node": ("10.77.2.0", "fd77::2:0")
            if self.way.way is Way.TUNNEL
            else ("10.50.0.2", "fd50::2"),
            "gate": ("10.60.0.1", "fd60::1"),
            "router1": ("10.60.0.2", "fd60::2"),
            "router1-inside": ("10.61.0.1", "fd61::1"),
            "router2": ("10.61.0.2", "fd61::2"),
            "router2-outside": ("203.0.113.1", "2001:db8:9::1"),
            "world": ("203.0.113.9", "2001:db8:9::9"),
        }[name]
        return four if version == 4 else six

    def configure(self, *rules: Rule, closed: bool = True) -> None:
        """Close the pod to everything but `rules`, and forget what was judged before."""
        datapath = self.nodes[0].datapath
        keys = [PolicyKey(0, direction, protocol, port, 16) for direction, protocol, port in rules]
        entries = {key: PolicyEntry(Verdict.ALLOW, 1, 7) for key in keys}
        datapath.policy.change_slot(SLOT, entries, [key for key in self.rules if key not in keys])
        self.rules = keys
        self.revision += 1
        config = EndpointConfig(
            identity=IDENTITY,
            slot=SLOT,
            policy_revision=self.revision,
            deny_egress=closed,
            deny_ingress=closed,
        )
        datapath.policy.update_endpoints([(self.nodes[0].records[9], config)])

    def drops(self, reason: DropReason = DropReason.POLICY) -> int:
        """Count what the programs of the first node have dropped."""
        rows = read_metrics(self.nodes[0].datapath.maps)
        return sum(row.packets for row in rows if row.reason == reason)


def wait_until(condition: Callable[[], bool]) -> bool:
    """Wait for a condition, up to the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        select.select([], [], [], 0.005)
    return True


def _set_addresses(namespace: Namespace, device: str, four: str, six: str) -> None:
    namespace.run("ip", "address", "add", four, "dev", device)
    namespace.run("ip", "address", "add", six, "dev", device, "nodad")
    namespace.run("ip", "link", "set", device, "up")


def _join(one: Namespace, first: str, other: Namespace, second: str) -> None:
    one.run(
        *("ip", "link", "add", first, "type", "veth"),
        *("peer", "name", second, "netns", other.name),
    )


def _route(namespace: Namespace, four: str, six: str) -> None:
    namespace.run("ip", "route", "add", "default", "via", four)
    namespace.run("ip", "-6", "route", "add", "default", "via", six)


def _write_sysctls(namespace: Namespace, *settings: str) -> None:
    """Change settings of a namespace's network; guests have no program for that."""
    with netns.namespace(namespace.fd.fileno()):
        for setting in settings:
            path, _, value = setting.partition("=")
            write_sysctl(value, *path.split("/"))


def _connect_world(node: Namespace, stack: ExitStack) -> dict[str, Namespace]:
    """Join node, first router, second router and world to a chain."""
    names = ("router1", "router2", "world")
    routers = {name: stack.enter_context(new_namespace()) for name in names}
    chain = [node, *routers.values()]
    for namespace in chain[1:]:
        namespace.run("ip", "link", "set", "lo", "up")
        _write_sysctls(namespace, "ipv4/ip_forward=1", "ipv6/conf/all/forwarding=1")
    for at, (four, six) in enumerate(
        (("10.60.0.%d/24", "fd60::%d/64"), ("10.61.0.%d/24", "fd61::%d/64"))
    ):
        _join(chain[at], "lower", chain[at + 1], "upper")
        _set_addresses(chain[at], "lower", four % 1, six % 1)
        _set_addresses(chain[at + 1], "upper", four % 2, six % 2)
    _join(chain[2], "lower", chain[3], "upper")
    _set_addresses(chain[2], "lower", "203.0.113.1/24", "2001:db8:9::1/64")
    _set_addresses(chain[3], "upper", "203.0.113.9/24", "2001:db8:9::9/64")
    chain[1].run("ip", "link", "set", "lower", "mtu", str(NARROW_MTU))
    chain[2].run("ip", "link", "set", "upper", "mtu", str(NARROW_MTU))
    _route(chain[0], "10.60.0.2", "fd60::2")
    _route(chain[2], "10.61.0.1", "fd61::1")
    _route(chain[3], "203.0.113.1", "2001:db8:9::1")
    chain[1].run("ip", "route", "add", "203.0.113.0/24", "via", "10.61.0.2")
    chain[1].run("ip", "-6", "route", "add", "2001:db8:9::/64", "via", "fd61::2")
    chain[1].run("ip", "route", "add", "10.77.0.0/16", "via", "10.60.0.1")
    chain[1].run("ip", "-6", "route", "add", "fd77::/64", "via", "fd60::1")
    return routers


@contextlib.contextmanager
def make_town(path: Path, way: Way2) -> Iterator[Town]:
    """Build the town."""
    with two_nodes(path) as nodes, ExitStack() as stack:
        connect(nodes, way)
        places = {"pod": nodes[0].attach(9), "near": nodes[0].attach(10), "far": nodes[1].attach(9)}
        places |= {"host": nodes[0].namespace, "node": nodes[1].namespace}
        places |= _connect_world(nodes[0].namespace, stack)
        for namespace in places.values():
            _write_sysctls(namespace, "ipv4/icmp_ratelimit=0", "ipv6/icmp/ratelimit=0")
            # The limit of the machine is one for all namespaces, and other tests run beside this one.
            _write_sysctls(namespace, "ipv4/icmp_ratemask=0")
        town = Town(way, nodes, places)
        for version in (4, 6):
            for name in ("near", "far", "host", "node", "world"):
                assert pings(town.pod, town.address(name, version)), (name, version)
        yield town


# Sockets that are told of errors


def open_told(
    namespace: Namespace, address: str, kind: socket.SocketKind, protocol: int = 0
) -> socket.socket:
    """Open a socket that keeps the ICMP errors about what it sends; it cuts nothing."""
    six = ":" in address
    with netns.namespace(namespace.fd.fileno()):
        made = socket.socket(socket.AF_INET6 if six else socket.AF_INET, kind, protocol)
    level = socket.IPPROTO_IPV6 if six else socket.IPPROTO_IP
    made.setsockopt(level, IPV6_RECVERR if six else IP_RECVERR, 1)
    made.setsockopt(level, IPV6_MTU_DISCOVER if six else IP_MTU_DISCOVER, PMTUDISC_PROBE)
    made.setblocking(False)
    return made


def read_error(told: socket.socket) -> Error | None:
    """Take the next ICMP error; None = there is none yet. What the own host refuses to send is none."""
    six = told.family == socket.AF_INET6
    while True:
        try:
            _, messages, _, _ = told.recvmsg(4096, 512, socket.MSG_ERRQUEUE)
        except BlockingIOError:
            return None
        [data] = [raw for _, kind, raw in messages if kind == (IPV6_RECVERR if six else IP_RECVERR)]
        number, origin, kind, code, mtu, _ = _EXTENDED_ERROR.unpack_from(data)
        if origin not in (2, 3):  # SO_EE_ORIGIN_ICMP, SO_EE_ORIGIN_ICMP6
            continue
        at = _EXTENDED_ERROR.size + (8 if six else 4)
        sender = str(ipaddress.ip_address(data[at : at + (16 if six else 4)]))
        return Error(number, kind, code, mtu, sender)


def wait_for_error(told: socket.socket) -> Error | None:
    """Wait for an ICMP error; None = none came."""
    found: list[Error] = []

    def came() -> bool:
        error = read_error(told)
        found.extend([error] if error else [])
        return bool(found)

    return found[0] if wait_until(came) else None


def ask(
    namespace: Namespace, address: str, port: int, *, size_bytes: int = 16, source_port: int = 0
) -> Error | None:
    """Send a datagram and wait for the error about it; one that must not be cut may have to be sent twice."""
    with open_told(namespace, address, socket.SOCK_DGRAM) as told:
        if source_port:
            told.bind(("", source_port))
        told.connect((address, port))
        told.send(bytes(size_bytes))
        return wait_for_error(told)


def probe_hop(namespace: Namespace, source: str, address: str, kind: str, hops: int) -> str:
    """Send what dies after some hops, as traceroute does; give who told of it, or the target when it answered."""
    six = ":" in address
    protocol = {"udp": 0, "tcp": 0, "echo": frames.ICMPV6 if six else frames.ICMP}[kind]
    socket_kind = {
        "udp": socket.SOCK_DGRAM,
        "tcp": socket.SOCK_STREAM,
        "echo": socket.SOCK_RAW,
    }[kind]
    with open_told(namespace, address, socket_kind, protocol) as told:
        if six:
            told.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, hops)
        else:
            told.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, hops)
        with contextlib.suppress(BlockingIOError):
            told.connect((address, TRACE_PORT if kind != "echo" else 0))
        if kind == "udp":
            told.send(b"probe")
        elif kind == "echo":
            build = frames.ipv6 if six else frames.ipv4
            told.send(build(source, address, frames.echo(6 if six else 4, 77))[40 if six else 20 :])
        return _who_tells(told, kind, address)


def _who_tells(told: socket.socket, kind: str, address: str) -> str:
    found: list[str] = []

    def came() -> bool:
        error = read_error(told)
        if error:
            found.append(error.sender)
        elif kind == "tcp" and select.select([], [told], [], 0)[1]:
            number = told.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            found.extend([address] if number == errno.ECONNREFUSED else [])
        elif kind == "echo":
            with contextlib.suppress(BlockingIOError):
                data = told.recv(4096)
                reply = data[0] == 129 if ":" in address else data[20] == 0
                found.extend([address] if reply else [])
        return bool(found)

    return found[0] if wait_until(came) else ""
