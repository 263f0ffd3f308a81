"""What nf_conntrack remembers of datagrams to host ports is forgotten when a port leads elsewhere; no ADD waits."""

import contextlib
import ipaddress
import socket
import subprocess
import threading
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from podwire.datapath.stack_flows import PORTS_MAX, StackFlows
from podwire.kernel.conntrack import count_flows, list_flows
from podwire.kernel.netlink import NetlinkSocket, Request
from podwire.kernel.netlink_events import NETLINK_NETFILTER
from podwire.model.interfaces import HostSocket, PodSocket
from tests.kernel.conftest import Namespace
from tests.kernel.traffic import open_socket
from tests.waiting import wait_for

pytestmark = pytest.mark.kernel

UDP, TCP = socket.IPPROTO_UDP, socket.IPPROTO_TCP
EACH = {4: "0.0.0.0", 6: "::"}
HOST = {4: "192.0.2.1", 6: "2001:db8::1"}
BESIDE = {4: "192.0.2.7", 6: "2001:db8::7"}
POD = {4: "198.51.100.5", 6: "2001:db8:1::5"}
OTHER_POD = {4: "198.51.100.6", 6: "2001:db8:1::6"}
LOCAL = {4: "127.0.0.1", 6: "::1"}
PORT = 5300
families = pytest.mark.parametrize("version", [4, 6])


@pytest.fixture
def town(host: Namespace, pod: Namespace) -> Namespace:
    """A host with two addresses more for each family, and ways to two pods."""
    peer = ("peer", "name", "eth0", "netns", pod.name)
    host.run("ip", "link", "add", "away", "type", "veth", *peer)
    host.run("ip", "link", "set", "away", "up")
    pod.run("ip", "link", "set", "eth0", "up")
    for version in (4, 6):
        for address in (HOST[version], BESIDE[version]):
            host.run("ip", "addr", "add", address, "dev", "lo")
        for address in (POD[version], OTHER_POD[version]):
            host.run("ip", "route", "add", address, "dev", "away")
    return host


def serve(host: Namespace, version: int, pod: str) -> None:
    """Have the stack translate what the host sends to its port, as the node's table does, and track all else."""
    family = "ip" if version == 4 else "ip6"
    target = f"{pod}:5353" if version == 4 else f"[{pod}]:5353"
    text = f"""
        table {family} nat {{
          chain sent {{
            type nat hook output priority -100;
            {family} daddr {HOST[version]} udp dport {PORT} dnat to {target}
          }}
        }}"""
    command = ["ip", "netns", "exec", host.name, "nft", "-f", "-"]
    subprocess.run(command, input=text, text=True, check=True)


def send(host: Namespace, address: str, port: int = PORT) -> None:
    """Send a datagram from a fresh port; whether somebody listens does not matter."""
    with open_socket(host, address, socket.SOCK_DGRAM) as client, contextlib.suppress(OSError):
        client.sendto(b"ask", (address, port))


@pytest.fixture
def tracking(town: Namespace) -> Iterator[NetlinkSocket]:
    with NetlinkSocket(protocol=NETLINK_NETFILTER) as opened:
        yield opened


@pytest.fixture
def flows(town: Namespace) -> Iterator[StackFlows]:
    with StackFlows.open() as opened:
        yield opened


def led(version: int, asked: str, pod: str, protocol: int = UDP, port: int = PORT) -> Any:
    """Give what one port leads to."""
    front = HostSocket(ipaddress.ip_address(asked), protocol, port)
    assert front.address.version == version
    return front, PodSocket(ipaddress.ip_address(pod), 5353)


def answering(tracking: NetlinkSocket, version: int, port: int | None = PORT) -> list[str]:
    """Give who answers the flows of datagrams that are remembered."""
    return sorted(str(flow.answered_by) for flow in list_flows(tracking, version, UDP, port))


@families
def test_flows_to_a_pod_that_is_gone_are_forgotten_and_no_others(
    town: Namespace, tracking: NetlinkSocket, flows: StackFlows, version: int
) -> None:
    serve(town, version, POD[version])
    send(town, HOST[version])
    send(town, OTHER_POD[version])
    both = sorted([POD[version], OTHER_POD[version]])
    asked = EACH[version]
    beside = [
        led(version, asked, POD[version], TCP),
        led(version, asked, POD[version], port=PORT + 1),
        # Asked by its own address, not by the host's.
        led(version, asked, OTHER_POD[version]),
    ]
    for ended in beside:
        flows.outdate({ended}, {})
        flows.forget()
        assert answering(tracking, version) == both
    flows.outdate({led(version, asked, POD[version])}, {})
    wait_for(lambda: POD[version] not in answering(tracking, version), "the thread to forget")
    assert answering(tracking, version) == [OTHER_POD[version]]


# (where the port is asked for, whose flows to nobody are forgotten)
COMING = [
    (EACH, [HOST, BESIDE, LOCAL]),
    (HOST, [HOST]),
    (LOCAL, [LOCAL]),
]


@families
@pytest.mark.parametrize(("asked", "forgotten"), COMING, ids=["each", "one", "loopback"])
def test_flows_of_who_asked_in_vain_are_forgotten_and_those_of_others_kept(
    town: Namespace,
    tracking: NetlinkSocket,
    flows: StackFlows,
    version: int,
    asked: dict[int, str],
    forgotten: list[dict[int, str]],
) -> None:
    track(town)
    places = [HOST, BESIDE, LOCAL, OTHER_POD]
    for place in places:
        send(town, place[version])
    assert answering(tracking, version) == sorted(place[version] for place in places)
    front, pod = led(version, asked[version], POD[version])
    flows.outdate(set(), {front: pod})
    flows.forget()
    kept = [place[version] for place in places if place not in forgotten]
    assert answering(tracking, version) == sorted(kept)


def track(host: Namespace) -> None:
    """Have the stack remember flows, translating none."""
    for family in ("ip", "ip6"):
        host.run("nft", "add", "table", family, "look")
        chain = "{ type filter hook output priority 0; ct state new counter; }"
        host.run("nft", "add", "chain", family, "look", "sent", chain)


@families
def test_many_ports_at_once_are_one_round(
    town: Namespace, tracking: NetlinkSocket, flows: StackFlows, version: int
) -> None:
    track(town)
    ports = range(6000, 6000 + PORTS_MAX + 1)
    for port in (*ports, PORT):
        send(town, HOST[version], port)
    fronts = dict(led(version, HOST[version], POD[version], port=port) for port in ports)
    flows.outdate(set(), fronts)
    flows.forget()
    [left] = list_flows(tracking, version, UDP)
    assert left.asked_port == PORT


class Held(NetlinkSocket):
    """A socket whose lists take as long as the test wants, and are counted."""

    def __init__(self) -> None:
        super().__init__(protocol=NETLINK_NETFILTER)
        self.listing = threading.Event()
        self.go_on = threading.Event()
        self.lists = 0

    def dump(self, request: Request, absent: Collection[int] = ()) -> list[bytes]:
        self.lists += 1
        self.listing.set()
        assert self.go_on.wait(60)
        return super().dump(request, absent)


def test_an_add_goes_on_and_the_reaper_waits(town: Namespace) -> None:
    track(town)
    send(town, HOST[4])
    front, pod = led(4, HOST[4], POD[4])
    held = Held()
    with StackFlows(NetlinkSocket(), held) as flows:
        flows.outdate(set(), {front: pod})
        assert held.listing.wait(60)
        # The thread is at the table, and an ADD or a DEL goes on.
        flows.outdate({(front, pod)}, {})
        reaper = threading.Thread(target=flows.forget)
        reaper.start()
        # The part that gives the address away waits for what was told before.
        reaper.join(0.05)
        assert reaper.is_alive()
        held.go_on.set()
        reaper.join(60)
        assert not reaper.is_alive()
        assert count_flows(held) == 0


def test_an_empty_table_is_not_gone_over(town: Namespace) -> None:
    held = Held()
    with StackFlows(NetlinkSocket(), held) as flows:
        flows.outdate(set(), dict([led(4, HOST[4], POD[4])]))
        flows.forget()
        assert held.lists == 0
