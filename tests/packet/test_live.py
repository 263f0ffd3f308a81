"""What a test run cannot show: frames that are shorter than an IP header, tags that the kernel takes off before the
program sees the frame, and what the kernel does with packets on its way from one program to the other.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Final

import pytest

from podwire.datapath.abi import Action, ConfigFlags, DropReason, Event, Hook, Path
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl.tc import TokenBucket, set_token_bucket
from tests.packet import frames
from tests.packet.frames import (
    FRAGMENT,
    MORE_FRAGMENTS,
    Segment,
    fragment_header,
    ipv4,
    ipv6,
    raw,
    tcp,
    udp,
    vlan,
)
from tests.packet.live import LiveHost, LivePod, live_pods
from tests.packet.rig import (
    ALLOW,
    GATEWAY_4,
    GATEWAY_6,
    NOBODY_4,
    SHAPED,
    SMALL,
    A,
    B,
    Endpoint,
    Rig,
)

pytestmark = pytest.mark.packet

DEADLINE_S: Final = 120
IP_MTU, IP_MTU_DISCOVER, IP_PMTUDISC_DO = 14, 10, 2
IPV6_MTU, IPV6_MTU_DISCOVER = 24, 23
SHARED_LINES: Final = 20


@pytest.fixture
def live(rig: Rig) -> Iterator[LiveHost]:
    with live_pods(rig, A, B, SMALL, SHAPED) as host:
        yield host


def eventually(check: Callable[[], bool]) -> bool:
    """Wait until `check` holds, up to the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def passed(rig: Rig, hook: Hook, reason: DropReason) -> int:
    """Count packets of one outcome, whatever their path."""
    return sum(
        count for (at, why, _), (count, _) in rig.metrics().items() if (at, why) == (hook, reason)
    )


SHORT = {
    "nothing": A.frame(bytes([0x45]) + bytes(19))[:14],
    "ipv4": A.frame(ipv4(A.ipv4, B.ipv4, raw(59)))[:34],
    "ipv6": A.frame(ipv6(A.ipv6, B.ipv6, raw(17)))[:54],
    "arp": frames.ethernet(
        A.host_mac, A.pod_mac, frames.ETH_P_ARP, frames.arp(1, A.pod_mac, A.ipv4, GATEWAY_4)
    ),
}


@pytest.mark.parametrize("name", SHORT)
def test_frames_that_end_in_the_network_header_are_refused(
    rig: Rig, live: LiveHost, name: str
) -> None:
    whole = SHORT[name]
    sizes = range(14, len(whole)) if name != "nothing" else range(14, 15)
    before = passed(rig, Hook.FROM_POD, DropReason.TRUNCATED)
    with live.pods["a"].raw_socket() as packets:
        for size in sizes:
            packets.send(whole[:size])
    wanted = before + len(sizes)
    assert eventually(lambda: passed(rig, Hook.FROM_POD, DropReason.TRUNCATED) >= wanted)
    assert passed(rig, Hook.FROM_POD, DropReason.TRUNCATED) == wanted


@pytest.mark.parametrize("tag", [0, 5, 7 << 13 | 100], ids=["priority-only", "vlan-5", "both"])
def test_a_tag_that_the_kernel_took_off_is_still_seen(rig: Rig, live: LiveHost, tag: int) -> None:
    frame = vlan(A.frame(ipv4(A.ipv4, B.ipv4, udp(4000, 53))), tag)
    with live.pods["a"].raw_socket() as packets:
        packets.send(frame)
    assert eventually(lambda: passed(rig, Hook.FROM_POD, DropReason.ETHERTYPE) == 1)


def receive(connection: socket.socket, size: int) -> None:
    """Take exactly `size` bytes off a connection."""
    while size:
        data = connection.recv(size)
        assert data
        size -= len(data)


def exchange(live: LiveHost, client: Endpoint, server: Endpoint, version: int, size: int) -> None:
    """Send `size` bytes over TCP from one pod to the other and back."""
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    listener = live.pods[server.name].open_socket(family, socket.SOCK_STREAM)
    connection = live.pods[client.name].open_socket(family, socket.SOCK_STREAM)
    with listener, connection:
        listener.bind((server.address(version), 8080))
        listener.listen()
        connection.connect((server.address(version), 8080))
        accepted, peer = listener.accept()
        with accepted:
            accepted.settimeout(DEADLINE_S)
            assert peer[0] == client.address(version)
            for _ in range(SHARED_LINES):
                for one, other in ((connection, accepted), (accepted, connection)):
                    one.sendall(b"x" * size)
                    receive(other, size)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("size", [1, 40000])
def test_tcp_between_pods_goes_straight_both_ways(
    rig: Rig, live: LiveHost, version: int, size: int
) -> None:
    exchange(live, A, B, version, size)
    metrics = rig.metrics()
    assert metrics[Hook.FROM_POD, DropReason.NONE, Path.LOCAL][0] >= SHARED_LINES
    assert (Hook.FROM_POD, DropReason.NONE, Path.STACK) not in metrics


@pytest.mark.parametrize("version", [4, 6])
def test_a_smaller_mtu_on_the_way_is_learnt(live: LiveHost, version: int) -> None:
    exchange(live, A, SMALL, version, 40000)
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    level, discover, mtu = (
        (socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_MTU)
        if version == 4
        else (socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_MTU)
    )
    with live.pods["b"].open_socket(family, socket.SOCK_DGRAM) as datagrams:
        datagrams.setsockopt(level, discover, IP_PMTUDISC_DO)
        datagrams.connect((SMALL.address(version), 53))
        datagrams.send(bytes(1420))
        assert eventually(lambda: datagrams.getsockopt(level, mtu) == SMALL.mtu)


@pytest.mark.parametrize("version", [4, 6])
def test_a_connection_that_learns_a_smaller_mtu_in_mid_stream_goes_on(
    rig: Rig, live: LiveHost, version: int
) -> None:
    """Only the row knows of the narrow path, so the ends have agreed on segments that do not fit."""
    rig.change(B, mtu=1300)
    exchange(live, A, B, version, 100_000)
    assert 1 <= passed(rig, Hook.FROM_POD, DropReason.MTU) <= SHARED_LINES


@pytest.mark.parametrize("version", [4, 6])
def test_datagrams_larger_than_the_mtu_arrive_whole(live: LiveHost, version: int) -> None:
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    receiver = live.pods["b"].open_socket(family, socket.SOCK_DGRAM)
    sender = live.pods["a"].open_socket(family, socket.SOCK_DGRAM)
    large = b"y" * 9000

    def arrives() -> bool:
        sender.sendto(large, (B.address(version), 5353))
        with suppress(TimeoutError):
            return receiver.recv(10000) == large
        return False

    with receiver, sender:
        receiver.bind((B.address(version), 5353))
        receiver.settimeout(1.0)  # a new device drops what comes before the kernel gave it a queue
        assert eventually(arrives)


@pytest.mark.parametrize("gateway", [GATEWAY_4, f"{GATEWAY_6}%eth0"])
def test_a_pod_finds_its_gateway_by_asking_and_may_ping_it(live: LiveHost, gateway: str) -> None:
    """The pods of these tests have no permanent neighbour: each connection begins with ARP or a solicitation."""
    family = socket.AF_INET6 if ":" in gateway else socket.AF_INET
    protocol = socket.IPPROTO_ICMPV6 if ":" in gateway else socket.IPPROTO_ICMP
    with live.pods["a"].open_socket(family, socket.SOCK_RAW, protocol) as pinger:
        pinger.settimeout(1.0)  # a new device drops what comes before the kernel gave it a queue
        kinds: set[int] = set()

        def is_answered() -> bool:
            if family == socket.AF_INET:
                pinger.sendto(frames.echo(4, 77).data[:2] + b"\xf7\xb1" + b"\0M\0\1", (gateway, 0))
            else:
                pinger.sendto(b"\x80\0\0\0\0M\0\1", (GATEWAY_6, 0, 0, 2))
            with suppress(TimeoutError):
                while not kinds & {0, 129}:
                    data = pinger.recv(2000)
                    kinds.add(data[20] if family == socket.AF_INET else data[0])
            return bool(kinds & {0, 129})

        assert eventually(is_answered)


def test_an_address_nobody_has_fails_at_once(live: LiveHost) -> None:
    took_s = []
    for _ in range(3):
        with live.pods["a"].open_socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
            begin = time.monotonic()
            with pytest.raises(OSError, match="No route to host"):
                connection.connect((NOBODY_4, 80))
            took_s.append(time.monotonic() - begin)
    assert min(took_s) < 4, took_s


def test_a_rate_towards_the_pod_holds_against_a_local_pod(rig: Rig, live: LiveHost) -> None:
    """400 kB at 4 Mbit/s with a burst of 32 kB takes more than 0.7 s; past the queue it would take 1 ms."""
    with NetlinkSocket.open_in(live.fd.fileno()) as netlink:
        bucket = TokenBucket(rate_bytes_per_s=500_000, burst_bytes=32_768, limit_bytes=1 << 20)
        netlink.execute([set_token_bucket(SHAPED.ifindex, bucket)])
    begin = time.monotonic()
    exchange(live, A, SHAPED, 4, 20_000)
    assert time.monotonic() - begin > 0.7
    assert rig.metrics()[Hook.TO_POD, DropReason.NONE, Path.LOCAL][0] >= 1


def unpublish(rig: Rig, endpoint: Endpoint) -> None:
    """Make an endpoint one that only the stack knows the way to."""
    rig.maps["pw_ipcache"].clear()
    rig.maps["pw_endpoints"].clear()
    rig.publish(A)
    assert endpoint is not A


def fragments(version: int, identification: int) -> list[bytes]:
    """Make a datagram from A to B in three pieces."""
    whole = udp(4000, 5353, bytes(2400)).data
    cuts = [(0, 800, True), (800, 1600, True), (1600, 2408, False)]
    if version == 6:
        # the sum is computed over the whole, so the pieces are cut from a finished packet
        sealed = ipv6(A.ipv6, B.ipv6, Segment(17, whole, 6))[40:]
        return [
            ipv6(
                A.ipv6,
                B.ipv6,
                raw(17, sealed[begin:end]),
                extensions=[
                    (FRAGMENT, fragment_header(begin, more=more, identification=identification))
                ],
            )
            for begin, end, more in cuts
        ]
    sealed = ipv4(A.ipv4, B.ipv4, Segment(17, whole, 6))[20:]
    return [
        ipv4(
            A.ipv4,
            B.ipv4,
            raw(17, sealed[begin:end]),
            fragment=begin // 8 | (MORE_FRAGMENTS if more else 0),
            identification=identification,
        )
        for begin, end, more in cuts
    ]


def shrink_headroom(pod: LivePod) -> None:
    """Make the kernel want more room in front of packets to this pod than a pod's packets have.

    It then copies forwarded fragments one by one, and IPv6 forgets on the way through which device they came. A VXLAN
    port beside the pod's device in a bridge does it.
    """
    for command in (
        "ip link add br0 up type bridge",
        "ip link set eth0 master br0",
        "ip link add vx0 type vxlan id 5 dstport 4789 remote 10.9.9.9 dev lo",
        "ip link set vx0 master br0",
    ):
        done = pod.run(*command.split())
        assert not done.returncode, (command, done.stderr)


def track(live: LiveHost) -> None:
    """Make the host put fragments together, as any rule on connections does."""
    for family in ("ip", "ip6"):
        for command in (
            f"add table {family} pwt",
            f"add chain {family} pwt c {{ type filter hook forward priority 0; }}",
            f"add rule {family} pwt c ct state invalid counter",
        ):
            done = live.run("nft", command)
            assert not done.returncode, done.stderr


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("small_headroom", [False, True], ids=["usual", "small-headroom"])
def test_fragments_through_the_stack_are_their_pods(
    rig: Rig, live: LiveHost, version: int, small_headroom: bool
) -> None:
    if small_headroom:
        shrink_headroom(live.pods["b"])
    unpublish(rig, B)
    track(live)
    rig.change(B, flags=ALLOW | ConfigFlags.DENY_INGRESS)
    told: list[Event] = []

    def denied() -> bool:
        told.extend(event for event in rig.take_events() if event.hook == Hook.TO_POD)
        return any(event.reason == DropReason.POLICY for event in told)

    with live.pods["a"].raw_socket() as packets:
        for packet in fragments(version, 99):
            packets.send(A.frame(packet))
        assert eventually(denied)
    senders = {event.source_identity for event in told if event.reason == DropReason.POLICY}
    assert senders == {A.identity}
    assert not passed(rig, Hook.TO_POD, DropReason.NONE)


@pytest.mark.parametrize("version", [4, 6])
def test_the_hosts_own_large_datagrams_are_the_hosts(
    rig: Rig, live: LiveHost, version: int
) -> None:
    rig.change(B, flags=ALLOW | ConfigFlags.DENY_INGRESS)
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    address = "10.7.200.1/32" if version == 4 else "fd07:200::1/128"
    assert not live.run("ip", "address", "add", address, "dev", "lo").returncode
    receiver = live.pods["b"].open_socket(family, socket.SOCK_DGRAM)
    with receiver, live.open_socket(family, socket.SOCK_DGRAM) as sender:
        receiver.bind((B.address(version), 5353))
        receiver.settimeout(1.0)

        def arrives() -> bool:
            # More than once: until the kernel's link-watch has run, a new device drops what is sent.
            sender.sendto(b"z" * 9000, (B.address(version), 5353))
            try:
                return receiver.recv(10000) == b"z" * 9000
            except TimeoutError:
                return False

        assert eventually(arrives)


def test_a_pod_that_took_another_address_reaches_nobody(rig: Rig, live: LiveHost) -> None:
    pod = live.pods["a"]
    exchange(
        live, A, B, 4, 10
    )  # its gateway is known by now: an ARP request from that address gets no answer
    assert not pod.run("ip", "address", "add", "10.7.0.200/32", "dev", "eth0").returncode
    with pod.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.bind(("10.7.0.200", 0))
        sender.sendto(b"spoof", (B.ipv4, 53))
    assert eventually(lambda: passed(rig, Hook.FROM_POD, DropReason.SOURCE_ADDRESS) == 1)


def test_closing_a_row_stops_a_running_exchange(rig: Rig, live: LiveHost) -> None:
    exchange(live, A, B, 4, 10)
    rig.change(B, flags=ConfigFlags(0))
    with live.pods["a"].open_socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.connect((B.ipv4, 8080))
    closed = replace(B, flags=ConfigFlags(0))
    assert rig.sent(closed, ipv4(B.ipv4, A.ipv4, tcp(1, 2, frames.SYN))).action == Action.DROP
