"""What leaves the cluster carries the node's address, what stays inside does not, and the table
is ours alone.
"""

import contextlib
import errno
import ipaddress
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from podwire.datapath.masquerade import (
    KERNEL_MODULES,
    Masquerade,
    MasqueradePlan,
    list_dropping_forward_chains,
    render_table,
)
from podwire.kernel import netns
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.nft import Nftables
from podwire.kernel.rtnl.link import LinkEnd, create_veth, set_link
from podwire.kernel.rtnl.route import InterfaceAddress, Route, add_address, add_route
from podwire.kernel.sysctl import write_sysctl
from podwire.model.errors import KernelFailure
from tests.kernel.conftest import Namespace, new_namespace, pings


def _networks(*texts: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    return [ipaddress.ip_network(text) for text in texts]


PODS = _networks("10.244.1.0/24", "fd00:244:1::/64")
PLAN = MasqueradePlan(
    pod_cidrs=PODS,
    inside=_networks("10.244.0.0/16", "fd00:244::/48", "203.0.113.0/24"),
    tunnel_port=8472,
)


@pytest.fixture
def tables(host: Namespace) -> Iterator[Nftables]:
    """nftables of the host's namespace."""
    with Nftables() as opened:
        yield opened


PLANS = [
    pytest.param(PLAN, id="dual"),
    pytest.param(replace(PLAN, tunnel_port=53), id="tunnel-port-low"),
    pytest.param(replace(PLAN, tunnel_port=65_535), id="tunnel-port-last"),
    pytest.param(MasqueradePlan(PODS[:1], []), id="ipv4"),
    pytest.param(MasqueradePlan(PODS[1:], []), id="ipv6"),
    pytest.param(MasqueradePlan([], []), id="nothing"),
    pytest.param(MasqueradePlan(PODS, [], enabled=False), id="off"),
    pytest.param(
        MasqueradePlan(PODS, _networks("10.0.0.0/8", "10.244.0.0/16", "10.0.0.0/8")), id="overlaps"
    ),
    pytest.param(MasqueradePlan(PODS, _networks("0.0.0.0/0", "::/0")), id="everything-inside"),
]


@pytest.mark.parametrize("plan", PLANS)
def test_applying_twice_changes_nothing(
    host: Namespace, tables: Nftables, plan: MasqueradePlan
) -> None:
    masquerade = Masquerade(tables)
    masquerade.apply(plan)
    first = host.run("nft", "list", "ruleset")
    masquerade.apply(plan)
    assert host.run("nft", "list", "ruleset") == first
    assert masquerade.compare() == []


def test_other_tables_are_not_touched(host: Namespace, tables: Nftables) -> None:
    tables.run("add table inet theirs\nadd chain inet theirs one")
    masquerade = Masquerade(tables)
    masquerade.apply(PLAN)
    masquerade.remove()
    assert host.run("nft", "list", "tables").split("\n")[0] == "table inet theirs"
    assert "podwire" not in host.run("nft", "list", "tables")


def test_removal_of_what_is_not_there_is_success(tables: Nftables) -> None:
    masquerade = Masquerade(tables)
    masquerade.remove()
    masquerade.remove()
    assert masquerade.compare() == []


CHANGES = [
    pytest.param("delete table inet podwire", "missing", id="gone"),
    pytest.param("flush chain inet podwire leave", "not as podwire made it", id="flushed"),
    pytest.param("add rule inet podwire leave accept", "not as podwire made it", id="rule-added"),
    pytest.param(
        "add element inet podwire inside4 { 192.0.2.0/24 }",
        "not as podwire made it",
        id="element-added",
    ),
]


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_a_strangers_change_is_named_and_undone_by_applying(
    tables: Nftables, change: str, named: str
) -> None:
    masquerade = Masquerade(tables)
    masquerade.apply(PLAN)
    tables.run(change)
    assert named in masquerade.compare()[0]
    masquerade.apply(PLAN)
    assert masquerade.compare() == []


def test_a_leftover_table_is_named_where_none_is_wanted(tables: Nftables) -> None:
    Masquerade(tables).apply(PLAN)
    assert "wanted none" in Masquerade(tables).compare()[0]


def test_rendering_is_deterministic_and_one_transaction() -> None:
    assert render_table(PLAN) == render_table(PLAN)
    assert render_table(PLAN).startswith("add table inet podwire\ndelete table inet podwire\n")


def test_a_packet_meets_one_chain_at_each_place_of_each_hook(tables: Nftables) -> None:
    everything = replace(
        PLAN,
        tunnel_port=8472,
        tunnel_mark=0x1234,
        tunnel_peers=_networks("192.0.2.0/24"),
        pod_networks=_networks("10.244.0.0/16", "fd00:244::/48"),
        own_ranges=PODS,
    )
    Masquerade(tables).apply(everything)
    listed = tables.list_json("list table inet podwire")
    chains = [item["chain"] for item in listed if "chain" in item]
    places = [(chain["hook"], chain["prio"]) for chain in chains if "hook" in chain]
    assert sorted(places) == sorted(set(places))
    assert [hook for hook, _ in places].count("output") == 1


class OfPoorKernel(Nftables):
    """nftables where Linux lacks an expression: it answers that there is no such thing."""

    def run(self, commands: str) -> None:
        raise KernelFailure(errno.ENOENT, "apply nftables commands", commands[:20])


def test_what_a_kernel_lacks_is_named_with_what_to_do() -> None:
    with OfPoorKernel() as poor, pytest.raises(KernelFailure) as refusal:
        Masquerade(poor).apply(PLAN)
    for module in KERNEL_MODULES:
        assert module in refusal.value.hint
    assert "modprobe" in refusal.value.hint


def test_a_refused_table_leaves_the_old_one_in_force(host: Namespace, tables: Nftables) -> None:
    masquerade = Masquerade(tables)
    masquerade.apply(PLAN)
    before = host.run("nft", "list", "ruleset")
    with pytest.raises(KernelFailure):
        masquerade.apply(MasqueradePlan(PODS, [], tunnel_port=1_000_000))
    assert host.run("nft", "list", "ruleset") == before


@dataclass(frozen=True)
class World:
    """A node with a pod behind it and an outside host in front of it; both families."""

    host: Namespace
    pod: Namespace
    outside: Namespace


@pytest.fixture
def world(host: Namespace, netlink: NetlinkSocket, pod: Namespace) -> Iterator[World]:
    """Pod 10.244.1.2, node 192.0.2.1, outside 192.0.2.2 and (an exception) 203.0.113.9."""
    with new_namespace() as outside:
        for path in (("ipv4", "ip_forward"), ("ipv6", "conf", "all", "forwarding")):
            write_sysctl("1", *path)
        _join(
            netlink,
            host,
            pod,
            101,
            ("10.244.1.1/24", "fd00:244:1::1/64"),
            ("10.244.1.2/24", "fd00:244:1::2/64"),
        )
        _join(
            netlink,
            host,
            outside,
            103,
            ("192.0.2.1/24", "2001:db8::1/64"),
            ("192.0.2.2/24", "2001:db8::2/64"),
        )
        _default(pod, 102, "10.244.1.1", "fd00:244:1::1")
        _default(outside, 104, "192.0.2.1", "2001:db8::1")
        outside.run("ip", "addr", "add", "203.0.113.9/32", "dev", "lo")
        netlink.execute(
            [
                add_route(
                    Route(
                        ipaddress.ip_network("203.0.113.0/24"),
                        103,
                        gateway=ipaddress.ip_address("192.0.2.2"),
                    )
                )
            ]
        )
        # A new device drops what it gets until the kernel's link-watch has run, and a neighbour is not asked for while
        # the link-local address is tentative: each test sends its datagrams once.
        for one, addresses in (
            (host, ("10.244.1.2", "fd00:244:1::2", "192.0.2.2", "2001:db8::2", "203.0.113.9")),
            (pod, ("192.0.2.1", "2001:db8::1", "192.0.2.2", "2001:db8::2")),
            (outside, ("192.0.2.1", "2001:db8::1", "10.244.1.2", "fd00:244:1::2")),
        ):
            assert all(pings(one, address) for address in addresses)
        yield World(host, pod, outside)


def _join(
    netlink: NetlinkSocket,
    near: Namespace,
    far: Namespace,
    index: int,
    near_addresses: tuple[str, str],
    far_addresses: tuple[str, str],
) -> None:
    name = f"pw{index}" if far_addresses[0].startswith("10.244.") else f"n{index}"
    ends = LinkEnd(name, index), LinkEnd(f"f{index}", index + 1)
    netlink.execute([create_veth(*ends, far.fd.fileno())])
    with NetlinkSocket.open_in(far.fd.fileno()) as inside:
        for socket_, number, addresses in (
            (netlink, index, near_addresses),
            (inside, index + 1, far_addresses),
        ):
            socket_.execute([set_link(1, up=True), set_link(number, up=True)])
            for text in addresses:
                interface = ipaddress.ip_interface(text)
                network = interface.network
                wanted = InterfaceAddress(number, interface.ip, network.prefixlen)
                socket_.execute([add_address(wanted), add_route(Route(network, number))])


def _default(namespace: Namespace, index: int, *gateways: str) -> None:
    with NetlinkSocket.open_in(namespace.fd.fileno()) as inside:
        for text in gateways:
            gateway = ipaddress.ip_address(text)
            network = ipaddress.ip_network("0.0.0.0/0" if gateway.version == 4 else "::/0")
            inside.execute([add_route(Route(network, index, gateway=gateway))])


PATHS = [
    pytest.param("10.244.1.2", "192.0.2.2", "192.0.2.1", id="world-ipv4"),
    pytest.param("fd00:244:1::2", "2001:db8::2", "2001:db8::1", id="world-ipv6"),
    pytest.param("10.244.1.2", "203.0.113.9", "10.244.1.2", id="exception"),
]


@pytest.mark.parametrize(("source", "target", "seen"), PATHS)
def test_source_seen_outside(
    world: World, tables: Nftables, source: str, target: str, seen: str
) -> None:
    Masquerade(tables).apply(PLAN)
    assert _seen_source(world.pod, source, world.outside, target) == seen


@pytest.mark.parametrize(
    ("source", "target"), [("10.244.1.2", "192.0.2.1"), ("fd00:244:1::2", "2001:db8::1")]
)
def test_pod_to_this_host_keeps_its_address(
    world: World, tables: Nftables, source: str, target: str
) -> None:
    Masquerade(tables).apply(PLAN)
    assert _seen_source(world.pod, source, world.host, target) == source


def test_the_host_itself_and_switched_off_masquerade_keep_addresses(
    world: World, tables: Nftables
) -> None:
    masquerade = Masquerade(tables)
    masquerade.apply(PLAN)
    assert _seen_source(world.host, "10.9.0.1", world.pod, "10.244.1.2") == "10.9.0.1"
    masquerade.apply(MasqueradePlan(PODS, [], enabled=False))
    assert _seen_source(world.pod, "10.244.1.2", world.outside, "192.0.2.2") == "10.244.1.2"


def test_the_tunnel_port_is_not_tracked(world: World, tables: Nftables) -> None:
    Masquerade(tables).apply(PLAN)
    for port in (8472, 8473):
        with (
            _receiver(world.outside, "192.0.2.2", port) as receiver,
            _sender(world.host, "192.0.2.1") as sender,
        ):
            sender.sendto(b"x", ("192.0.2.2", port))
            receiver.recvfrom(16)
    tracked = world.host.run("sysctl", "-n", "net.netfilter.nf_conntrack_count").strip()
    assert tracked == "1"


@pytest.mark.parametrize(("tunnel_port", "side"), [(8472, "above"), (60_000, "below")])
@pytest.mark.parametrize(
    ("source", "target"), [("10.244.1.2", "192.0.2.2"), ("fd00:244:1::2", "2001:db8::2")]
)
def test_no_datagram_is_sent_from_the_tunnels_port_whose_answers_are_not_tracked(
    world: World, tables: Nftables, source: str, target: str, tunnel_port: int, side: str
) -> None:
    Masquerade(tables).apply(replace(PLAN, tunnel_port=tunnel_port))
    seen = []
    with _receiver(world.outside, target, 0) as receiver:
        for _ in range(200):
            with _sender(world.pod, source) as sender:
                sender.sendto(b"?", receiver.getsockname()[:2])
                _, back = receiver.recvfrom(16)
                receiver.sendto(b"!", back)
                assert sender.recv(16) == b"!"
            seen.append(back[1])
    assert all(port > tunnel_port if side == "above" else port < tunnel_port for port in seen)
    assert len(set(seen)) > 100, "the ports are random"


OWN = replace(PLAN, own_ranges=PODS)
RAW = """
import socket, sys
source, target, port = sys.argv[1:]
family = socket.AF_INET6 if ":" in source else socket.AF_INET
one = socket.socket(family, socket.SOCK_DGRAM)
level, option = (socket.IPPROTO_IPV6, 75) if ":" in source else (socket.IPPROTO_IP, 19)
one.setsockopt(level, option, 1)  # any source, as a process with NET_RAW may have
one.bind((source, 0))
one.sendto(b"forged", (target, int(port)))
"""


@pytest.mark.parametrize(
    ("source", "target"), [("10.244.1.2", "192.0.2.1"), ("fd00:244:1::2", "2001:db8::1")]
)
def test_a_source_of_the_own_range_comes_from_where_its_route_leads(
    world: World, tables: Nftables, source: str, target: str
) -> None:
    for device in ("all", "n103"):
        world.host.run("sysctl", "-qw", f"net.ipv4.conf.{device}.rp_filter=0")
    seen: dict[bool, bytes] = {}
    for is_guarded in (False, True):
        Masquerade(tables).apply(OWN if is_guarded else PLAN)
        with _receiver(world.host, target, 0) as listening, _sender(world.pod, source) as sending:
            port = listening.getsockname()[1]
            world.outside.run(sys.executable, "-c", RAW, source, target, str(port))
            assert pings(world.outside, target)
            sending.sendto(b"honest", (target, port))
            seen[is_guarded] = listening.recv(16)
    assert seen == {False: b"forged", True: b"honest"}


@pytest.mark.parametrize(
    ("address", "via"), [("10.244.1.77", "192.0.2.2"), ("fd00:244:1::77", "2001:db8::2")]
)
def test_an_address_of_the_own_range_that_lives_elsewhere_and_the_hosts_own_one_are_heard(
    world: World, tables: Nftables, address: str, via: str
) -> None:
    Masquerade(tables).apply(OWN)
    bits = "32" if "." in address else "128"
    nodad = [] if "." in address else ["nodad"]
    world.outside.run("ip", "addr", "add", f"{address}/{bits}", "dev", "lo", *nodad)
    world.host.run("ip", "route", "add", f"{address}/{bits}", "via", via)
    own = address.removesuffix("77") + "1"
    assert pings(world.host, own)
    assert pings(world.pod, own)
    assert pings(world.host, address)
    assert _seen_source(world.outside, address, world.host, own) == address


def _seen_source(sender: Namespace, source: str, receiver: Namespace, target: str) -> str:
    """Send one datagram and give the source address that the receiver sees."""
    with _receiver(receiver, target, 0) as listening, _sender(sender, source) as sending:
        sending.sendto(b"x", (target, listening.getsockname()[1]))
        return str(listening.recvfrom(16)[1][0])


@contextlib.contextmanager
def _receiver(namespace: Namespace, address: str, port: int) -> Iterator[socket.socket]:
    with netns.namespace(namespace.fd.fileno()):
        opened = socket.socket(
            socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM
        )
    with opened:
        opened.settimeout(20)
        opened.bind((address, port))
        yield opened


@contextlib.contextmanager
def _sender(namespace: Namespace, source: str) -> Iterator[socket.socket]:
    with _receiver(namespace, source, 0) as opened:
        yield opened


def test_chains_that_drop_forwarded_packets_are_found(tables: Nftables) -> None:
    assert list_dropping_forward_chains(tables) == []
    tables.run(
        "add table ip filter\n"
        "add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }\n"
        "add chain ip filter INPUT { type filter hook input priority 0; policy drop; }\n"
        "add table inet ok\n"
        "add chain inet ok passing { type filter hook forward priority 0; policy accept; }\n"
    )
    found = [
        (chain.family, chain.table, chain.name) for chain in list_dropping_forward_chains(tables)
    ]
    assert found == [("ip", "filter", "FORWARD")]
