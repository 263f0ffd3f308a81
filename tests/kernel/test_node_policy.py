"""Policy on real pods and real connections: also where the host translates addresses, as a NodePort does."""

import contextlib
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from podwire.datapath.abi import DropReason
from podwire.datapath.flow_events import EventReader
from podwire.datapath.maps import read_metrics
from podwire.datapath.policy_maps import read_hits
from podwire.model.endpoint import EndpointRecord
from podwire.model.interfaces import EndpointConfig
from podwire.model.policy import Direction, PolicyEntry, PolicyKey, Verdict
from tests.kernel.conftest import NODE_IPV4, NODE_IPV6, Namespace, new_namespace
from tests.kernel.node_world import KernelWorld, kernel_world
from tests.kernel.traffic import open_socket

pytestmark = pytest.mark.kernel

DEADLINE_S = 30.0
LATE_S = 0.3
"""How long after a drop a connection may still be made: the drop was somebody else's then."""
SLOT = 5
PORT, NODE_PORT = 8080, 30080
SERVER, FRIEND, STRANGER, WORLD = 70001, 70002, 70003, 2
ALLOW, DENY = Verdict.ALLOW, Verdict.DENY
CLOSED = EndpointConfig(identity=SERVER, slot=SLOT, policy_revision=2, deny_ingress=True)
OUTSIDE = {4: ("203.0.113.1", "203.0.113.2", 24), 6: ("2001:db8:9::1", "2001:db8:9::2", 64)}
# What kube-proxy does: translate the destination, and the source too.
RULES = """
table inet pwtnodeport {
    chain pre {
        type nat hook prerouting priority dstnat
        fib daddr type local meta nfproto ipv4 tcp dport %(port)d dnat ip to %(four)s:%(to)d
        fib daddr type local meta nfproto ipv6 tcp dport %(port)d dnat ip6 to [%(six)s]:%(to)d
    }
    chain post {
        type nat hook postrouting priority srcnat
        ct status dnat masquerade
    }
}
"""


@dataclass
class Town:
    """A server under policy, who may come to it, who may not, and somebody outside."""

    world: KernelWorld
    server: EndpointRecord
    server_pod: Namespace
    clients: dict[str, Namespace]
    identities: dict[str, EndpointRecord]
    revision: int = 2
    listeners: dict[int, socket.socket] = field(default_factory=dict)

    def allow(self, *identities: int) -> None:
        """Let exactly these peers in, and have every open flow judged again."""
        wanted = {
            PolicyKey(identity, Direction.INGRESS, 6, PORT, 16): PolicyEntry(ALLOW, 1, identity)
            for identity in identities
        }
        held = self.world.datapath.policy.read_slot(SLOT)
        self.world.datapath.policy.change_slot(
            SLOT, wanted, [key for key in held if key not in wanted]
        )
        self.revision += 1
        config = msgspec.structs.replace(CLOSED, policy_revision=self.revision)
        self.world.datapath.policy.update_endpoints([(self.server, config)])

    def denials(self) -> int:
        """Count the packets that policy has dropped on this node."""
        rows = read_metrics(self.world.datapath.maps)
        return sum(row.packets for row in rows if row.reason == DropReason.POLICY)

    def connects(
        self, client: Namespace, address: str, port: int, *, late_s: float = LATE_S
    ) -> socket.socket | None:
        """Give a connection, or None when policy drops the attempt; one of the two happens.

        `late_s`: DEADLINE_S where a connection is wanted, so that a drop of somebody else's decides nothing.
        """
        before = self.denials()
        made = open_socket(client, address, socket.SOCK_STREAM)
        made.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            made.connect((address, port))
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            # Perhaps somebody else's: the socket has the last word.
            dropped = self.denials() > before
            if select.select([], [made], [], late_s if dropped else 0.02)[1]:
                assert made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
                return made
            if dropped:
                break
        else:
            raise AssertionError("neither connected nor dropped")
        made.close()
        return None


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with kernel_world(_path(tmp_path_factory)) as world, ExitStack() as stack:
        server, server_pod = world.attach(20)
        identities, clients = {}, {}
        for name, number, identity in (("friend", 21, FRIEND), ("stranger", 22, STRANGER)):
            identities[name], clients[name] = world.attach(number)
            config = EndpointConfig(identity=identity, policy_revision=2)
            world.datapath.policy.update_endpoints([(identities[name], config)])
        clients["outside"] = stack.enter_context(new_namespace())
        clients["host"] = world.host
        _connect_outside(world.host, clients["outside"])
        names = {"port": NODE_PORT, "to": PORT, "four": server.ipv4, "six": server.ipv6}
        _run_in(world.host, "nft", "-f", "-", given=RULES % names)
        made = Town(world, server, server_pod, clients, identities)
        for version, address in ((4, server.ipv4), (6, server.ipv6)):
            listener = stack.enter_context(open_socket(server_pod, address, socket.SOCK_STREAM))
            listener.bind((address, PORT))
            listener.listen(64)
            made.listeners[version] = listener
        yield made


def _path(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("node-policy")


def _run_in(namespace: Namespace, *command: str, given: str = "") -> None:
    inside = ["ip", "netns", "exec", namespace.name, *command]
    subprocess.run(inside, input=given, text=True, check=True)


def _connect_outside(host: Namespace, outside: Namespace) -> None:
    _run_in(
        host,
        *("ip", "link", "add", "pwtout", "type", "veth"),
        *("peer", "name", "eth0", "netns", outside.name),
    )
    for version, (near, far, bits) in OUTSIDE.items():
        nodad = ["nodad"] if version == 6 else []
        _run_in(host, "ip", "addr", "add", f"{near}/{bits}", "dev", "pwtout", *nodad)
        _run_in(outside, "ip", "addr", "add", f"{far}/{bits}", "dev", "eth0", *nodad)
    _run_in(host, "ip", "link", "set", "pwtout", "up")
    _run_in(outside, "ip", "link", "set", "eth0", "up")
    for version, (near, _, _) in OUTSIDE.items():
        _run_in(outside, "ip", f"-{version}", "route", "add", "default", "via", near)


def node_address(version: int, client: str) -> str:
    if client == "outside":
        return OUTSIDE[version][0]
    return str(NODE_IPV4 if version == 4 else NODE_IPV6)


def server_address(town: Town, version: int) -> str:
    return town.server.ipv4 if version == 4 else town.server.ipv6


def succeeds(town: Town, client: str, address: str, port: int, *, wanted: bool = False) -> bool:
    late_s = DEADLINE_S if wanted else LATE_S
    made = town.connects(town.clients[client], address, port, late_s=late_s)
    if made is not None:
        made.close()
    return made is not None


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize(
    ("client", "allowed", "wanted"),
    [
        ("friend", [FRIEND], True),
        ("stranger", [FRIEND], False),
        ("outside", [FRIEND], False),
        ("outside", [FRIEND, WORLD], True),
        ("stranger", [FRIEND, WORLD], False),
        ("stranger", [1, 6], False),
        ("outside", [1, 6], False),
        ("host", [], True),
    ],
)
def test_a_closed_pod_is_reached_by_those_who_may(
    town: Town, client: str, allowed: list[int], wanted: bool, version: int
) -> None:
    town.allow(*allowed)
    assert succeeds(town, client, server_address(town, version), PORT, wanted=wanted) == wanted


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize(
    ("client", "allowed", "wanted"),
    [
        ("friend", [FRIEND], True),
        ("stranger", [FRIEND], False),
        ("outside", [FRIEND], False),
        ("outside", [WORLD], True),
        ("stranger", [WORLD], False),
        ("stranger", [1, 6], False),
        ("outside", [1, 6], False),
    ],
)
def test_behind_a_node_port_everybody_is_who_he_is(
    town: Town, client: str, allowed: list[int], wanted: bool, version: int
) -> None:
    """All come from the node's own address: it must count for none of them."""
    town.allow(*allowed)
    assert succeeds(town, client, node_address(version, client), NODE_PORT, wanted=wanted) == wanted


@pytest.mark.parametrize("way", ["straight", "node-port"])
@pytest.mark.parametrize("version", [4, 6])
def test_an_open_connection_is_cut_by_a_change_and_goes_on_when_it_is_taken_back(
    town: Town, version: int, way: str
) -> None:
    town.allow(FRIEND)
    straight = way == "straight"
    address = server_address(town, version) if straight else node_address(version, "friend")
    port = PORT if straight else NODE_PORT
    made = town.connects(town.clients["friend"], address, port, late_s=DEADLINE_S)
    assert made is not None
    listener = town.listeners[version]
    with made, _accept(listener, made) as served:
        _say(served, made, b"one")
        _say(made, served, b"two")
        town.allow()
        before = town.denials()
        served.send(b"three")
        made.send(b"four")
        _wait(lambda: town.denials() >= before + 2)
        assert not select.select([made, served], [], [], 0)[0]
        town.allow(FRIEND)
        assert _read(made, 5) == b"three"
        assert _read(served, 4) == b"four"


def _accept(listener: socket.socket, client: socket.socket) -> socket.socket:
    """Take the client's connection; attempts of other cases may be waiting before it."""
    client.setblocking(True)
    client.settimeout(DEADLINE_S)
    listener.settimeout(DEADLINE_S)
    client.send(b"hello")
    while True:
        served, _ = listener.accept()
        served.settimeout(DEADLINE_S)
        if served.recv(5) == b"hello":
            return served
        served.close()


def _say(sender: socket.socket, receiver: socket.socket, what: bytes) -> None:
    sender.send(what)
    assert _read(receiver, len(what)) == what


def _read(receiver: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += receiver.recv(count - len(data))
    return data


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.01)


def test_the_hosts_probe_goes_in_and_its_answers_come_out_of_a_pod_closed_both_ways(
    town: Town,
) -> None:
    town.allow()
    config = msgspec.structs.replace(CLOSED, policy_revision=town.revision + 100, deny_egress=True)
    town.revision += 100
    town.world.datapath.policy.update_endpoints([(town.server, config)])
    assert succeeds(town, "host", town.server.ipv4, PORT, wanted=True)
    assert not succeeds(town, "friend", town.server.ipv4, PORT)


def test_a_denial_is_told_with_its_rule(town: Town) -> None:
    town.allow(FRIEND)
    town.world.datapath.policy.change_slot(
        SLOT, {PolicyKey(STRANGER, Direction.INGRESS): PolicyEntry(DENY, 9, 4711)}, []
    )
    with EventReader(town.world.datapath.maps) as reader:
        while reader.read():
            pass
        assert not succeeds(town, "stranger", town.server.ipv4, PORT)
        found: list[Any] = []

        def is_told() -> bool:
            found.extend(event for event in reader.read() if event.rule == 4711)
            return bool(found)

        _wait(is_told)
    assert [(event.endpoint, event.reason) for event in found][:1] == [(town.server.id, "policy")]
    assert read_hits(town.world.datapath.maps)[4711][0] >= 1
