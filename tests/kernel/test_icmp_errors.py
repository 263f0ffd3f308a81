"""ICMP errors of real stacks and routers reach who they are for, where nothing else may pass; forged ones nobody."""

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from podwire.kernel import netns
from podwire.model.cluster import Way
from podwire.model.policy import Direction
from tests.kernel.icmp_town import (
    DEADLINE_S,
    NARROW_MTU,
    TRACE_PORT,
    Town,
    ask,
    make_town,
    open_told,
    probe_hop,
    wait_for_error,
    wait_until,
)
from tests.kernel.test_cluster_traffic import Way2
from tests.kernel.traffic import open_socket
from tests.packet import frames

pytestmark = [pytest.mark.kernel, pytest.mark.parametrize("version", [4, 6])]

CLOSED_PORT, OPEN_PORT, NODE_PORT = 9999, 8080, 30000
PEERS = ("near", "far", "host", "node", "world")
OUT, IN = Direction.EGRESS, Direction.INGRESS
MARKER = b"over the wall!"


@pytest.fixture(
    scope="module", params=[Way2(Way.TUNNEL), Way2(Way.NATIVE)], ids=["tunnel", "native"]
)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Town]:
    with make_town(tmp_path_factory.mktemp("icmp"), request.param) as town:
        yield town


@pytest.fixture
def town(built: Town) -> Iterator[Town]:
    yield built
    built.configure(closed=False)


# What has to pass


@pytest.mark.parametrize("peer", PEERS)
def test_a_closed_pod_hears_that_its_question_was_refused(
    town: Town, version: int, peer: str
) -> None:
    """To the world it is masqueraded."""
    town.configure((OUT, frames.UDP, CLOSED_PORT))
    error = ask(town.pod, town.address(peer, version), CLOSED_PORT)
    assert error is not None
    assert (error.errno, error.sender) == (errno.ECONNREFUSED, town.address(peer, version))


@pytest.mark.parametrize("peer", PEERS)
def test_a_closed_pod_refuses_what_it_may_be_asked(town: Town, version: int, peer: str) -> None:
    town.configure((IN, frames.UDP, CLOSED_PORT))
    error = ask(town.places[peer], town.address("pod", version), CLOSED_PORT)
    assert error is not None
    assert (error.errno, error.sender) == (errno.ECONNREFUSED, town.address("pod", version))


@pytest.fixture
def node_port(town: Town) -> Iterator[None]:
    """Have the first node translate a port of its own to the pod, as kube-proxy has it."""
    rules = [
        f"fib daddr type local meta nfproto ipv{version} udp dport {NODE_PORT + extra} "
        f"dnat {family} to {address}:{port};"
        for version, family in ((4, "ip"), (6, "ip6"))
        for extra, port in ((0, CLOSED_PORT), (1, OPEN_PORT))
        for address in [
            f"[{town.address('pod', version)}]" if version == 6 else town.address("pod", version)
        ]
    ]
    chain = ["chain pre {", "type nat hook prerouting priority -100;", *rules, "}"]
    host = town.places["host"]
    host.run("nft", "\n".join(["table inet pwticmp {", *chain, "}"]))
    yield
    host.run("nft", "delete table inet pwticmp")


GATES = {"near": "host", "far": "host", "node": "host", "world": "gate"}
"""Whose port everybody asks for the pod behind it."""


@pytest.mark.usefixtures("node_port")
@pytest.mark.parametrize("peer", GATES)
def test_a_closed_pod_behind_a_node_port_refuses(town: Town, version: int, peer: str) -> None:
    town.configure((IN, frames.UDP, CLOSED_PORT))
    asked = town.address(GATES[peer], version)
    error = ask(town.places[peer], asked, NODE_PORT)
    assert error is not None
    assert (error.errno, error.sender) == (errno.ECONNREFUSED, asked)


TRACED = {
    "udp": (frames.UDP, TRACE_PORT, TRACE_PORT),
    "tcp": (frames.TCP, TRACE_PORT, TRACE_PORT),
    "echo": (frames.ICMP, 8 << 8, 128 << 8),
}


def traced(kind: str, version: int, direction: Direction) -> tuple[Direction, int, int]:
    protocol, *ports = TRACED[kind]
    if protocol == frames.ICMP and version == 6:
        protocol = frames.ICMPV6
    return direction, protocol, ports[version == 6]


def gateways(town: Town, version: int) -> list[str]:
    """Name who may tell the pod that a packet died at its first hop."""
    inner, gateway = (("10.77.1.0", "169.254.1.1"), ("fd77::1:0", "fe80::1"))[version == 6]
    return [*(town.address(name, version) for name in ("host", "gate")), inner, gateway]


@pytest.mark.parametrize("kind", TRACED)
def test_a_closed_pod_traces_its_way_into_the_world(town: Town, version: int, kind: str) -> None:
    town.configure(traced(kind, version, OUT))
    own, target = town.address("pod", version), town.address("world", version)
    seen = [probe_hop(town.pod, own, target, kind, hops) for hops in (1, 2, 3, 4)]
    assert seen[0] in gateways(town, version), seen
    assert seen[1:] == [town.address(name, version) for name in ("router1", "router2", "world")]


@pytest.mark.parametrize("kind", TRACED)
def test_the_world_traces_its_way_to_a_closed_pod(town: Town, version: int, kind: str) -> None:
    town.configure(traced(kind, version, IN))
    target, own = town.address("pod", version), town.address("world", version)
    seen = [probe_hop(town.places["world"], own, target, kind, hops) for hops in (1, 2, 3, 4)]
    names = ("router2-outside", "router1-inside", "gate", "pod")
    assert seen == [town.address(name, version) for name in names]


@pytest.mark.parametrize("kind", TRACED)
@pytest.mark.parametrize(("peer", "hops"), [("far", 3), ("node", 2)])
def test_a_closed_pod_traces_its_way_to_the_other_node(
    town: Town, version: int, kind: str, peer: str, hops: int
) -> None:
    """Its gateway is the program where the tunnel begins there, else the node's stack."""
    town.configure(traced(kind, version, OUT))
    own, target = town.address("pod", version), town.address(peer, version)
    assert probe_hop(town.pod, own, target, kind, 1) in gateways(town, version)
    assert probe_hop(town.pod, own, target, kind, hops) == target


def test_a_closed_pod_learns_the_mtu_of_its_way_into_the_world(town: Town, version: int) -> None:
    town.configure((OUT, frames.UDP, CLOSED_PORT))
    error = ask(town.pod, town.address("world", version), CLOSED_PORT, size_bytes=NARROW_MTU)
    assert error is not None
    router = town.address("router1", version)
    assert (error.errno, error.mtu, error.sender) == (errno.EMSGSIZE, NARROW_MTU, router)


@pytest.mark.usefixtures("node_port")
@pytest.mark.parametrize("gate", ["pod", "gate"])
def test_a_closed_pod_learns_the_mtu_of_the_way_by_which_it_was_asked(
    town: Town, version: int, gate: str
) -> None:
    """By its own address, and behind a port of the node."""
    town.configure((IN, frames.UDP, OPEN_PORT))
    own = town.address("pod", version)
    client = open_socket(town.places["world"], own, socket.SOCK_DGRAM)
    with client, open_told(town.pod, own, socket.SOCK_DGRAM) as server:
        server.bind((own, OPEN_PORT))
        port = OPEN_PORT if gate == "pod" else NODE_PORT + 1
        client.sendto(b"?", (town.address(gate, version), port))
        found: list[tuple[str, int]] = []

        def asked() -> bool:
            try:
                found.append(server.recvfrom(100)[1][:2])
            except BlockingIOError:
                return False
            return True

        assert wait_until(asked)
        server.sendto(bytes(NARROW_MTU), found[0])
        error = wait_for_error(server)
    assert error is not None
    router = town.address("router1", version)
    assert (error.errno, error.mtu, error.sender) == (errno.EMSGSIZE, NARROW_MTU, router)


# The attacks


def packet(version: int, source: str, destination: str, segment: frames.Segment) -> bytes:
    build = frames.ipv6 if version == 6 else frames.ipv4
    return build(source, destination, segment)


def forged(version: int, source: str, destination: str, quoted: bytes) -> bytes:
    """Make an error as it stands behind the IP header, with something to smuggle behind the quote."""
    if version == 4:
        return packet(4, source, destination, frames.icmp(3, 3, 0, quoted + MARKER))[20:]
    return packet(6, source, destination, frames.icmpv6(1, 4, 0, quoted + MARKER))[40:]


@dataclass(frozen=True)
class Quoted:
    """A packet that the pod has sent, and one that it has received."""

    sent: bytes
    received: bytes


def talk_to_itself(town: Town, version: int) -> Quoted:
    """Let the pod send a frame to its own address by its gateway, as it comes back through a service."""
    own = town.address("pod", version)
    hello = packet(version, own, own, frames.udp(4000, 53, MARKER[::-1]))
    device = town.nodes[0].records[9].device
    kind = frames.ETH_P_IPV6 if version == 6 else frames.ETH_P_IP
    with netns.namespace(town.pod.fd.fileno()):
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(kind))
    with packets:
        packets.bind(("eth0", kind))
        packets.setblocking(False)
        packets.send(frames.ethernet(device.host_mac, device.pod_mac, kind, hello))
        assert wait_until(lambda: hears(packets, MARKER[::-1]))
    return Quoted(hello, hello)


def be_probed(town: Town, version: int) -> Quoted:
    """Let the host ask the pod, as a kubelet does."""
    own, host = town.address("pod", version), town.address("host", version)
    with (
        open_socket(town.places["host"], own, socket.SOCK_DGRAM) as prober,
        open_socket(town.pod, own, socket.SOCK_DGRAM) as probed,
    ):
        prober.bind((host, 0))
        probed.bind((own, OPEN_PORT))
        probed.settimeout(DEADLINE_S)
        port = prober.getsockname()[1]
        prober.sendto(b"alive?", (own, OPEN_PORT))
        assert probed.recv(100) == b"alive?"
    return Quoted(
        packet(version, own, host, frames.udp(OPEN_PORT, port)),
        packet(version, host, own, frames.udp(port, OPEN_PORT)),
    )


def hears(listener: socket.socket, what: bytes) -> bool:
    """Tell whether something has arrived."""
    with contextlib.suppress(BlockingIOError):
        while True:
            if what in listener.recv(4096):
                return True
    return False


def listen(town: Town, name: str, version: int) -> socket.socket:
    """Open a raw socket for ICMP at somebody's address."""
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    protocol = frames.ICMPV6 if version == 6 else frames.ICMP
    with netns.namespace(town.places[name].fd.fileno()):
        made = socket.socket(family, socket.SOCK_RAW, protocol)
    made.bind((town.address(name, version), 0))
    made.setblocking(False)
    return made


def is_smuggled(town: Town, version: int, source: str, target: str, quoted: bytes) -> bool:
    """Send a forged error; tell whether it arrived. The other end is that a program of the pod's node drops it."""
    before = town.drops()
    ends = town.address(source, version), town.address(target, version)
    arrived: list[bool] = []

    def is_decided() -> bool:
        if hears(receiver, MARKER):
            arrived.append(True)
        return bool(arrived) or town.drops() > before

    with listen(town, source, version) as sender, listen(town, target, version) as receiver:
        sender.sendto(forged(version, *ends, quoted), (ends[1], 0))
        assert wait_until(is_decided)
    return bool(arrived)


FLOWS = (talk_to_itself, be_probed)
flows = pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)


@flows
@pytest.mark.parametrize("target", PEERS)
def test_a_closed_pod_smuggles_nothing_out(
    town: Town, version: int, target: str, flow: Callable[[Town, int], Quoted]
) -> None:
    town.configure()
    quoted = flow(town, version)
    is_peer = flow is be_probed and target == "host"
    assert is_smuggled(town, version, "pod", target, quoted.received) == is_peer


@flows
@pytest.mark.parametrize("source", ["near", "far", "node", "world"])
def test_nobody_smuggles_anything_into_a_closed_pod(
    town: Town, version: int, source: str, flow: Callable[[Town, int], Quoted]
) -> None:
    town.configure()
    quoted = flow(town, version)
    assert not is_smuggled(town, version, source, "pod", quoted.sent)


def test_an_open_pod_is_heard(town: Town, version: int) -> None:
    """What the attacks are told by arrives where nothing keeps it away."""
    town.configure(closed=False)
    quoted = talk_to_itself(town, version)
    for peer in PEERS:
        assert is_smuggled(town, version, "pod", peer, quoted.received)
        assert is_smuggled(town, version, peer, "pod", quoted.sent)
