"""A large datagram to a service, which the stack puts together, translates and cuts again, is still its pod's."""

import contextlib
import itertools
import socket
from collections.abc import Iterator

import pytest

from podwire.datapath.abi import Identity
from podwire.kernel import netns
from podwire.model.cluster import Way
from podwire.model.interfaces import EndpointConfig
from podwire.model.policy import Direction, PolicyEntry, PolicyKey, Verdict
from tests.kernel.conftest import Namespace
from tests.kernel.icmp_town import DEADLINE_S, IDENTITY, SLOT, Town, make_town, wait_until
from tests.kernel.test_cluster_traffic import Way2
from tests.kernel.traffic import open_socket
from tests.packet import frames

pytestmark = pytest.mark.kernel

SERVICE = {4: "10.96.0.1", 6: "fd96::1"}
PORT = 5353
REVISIONS = itertools.count(1)
SOURCE_PORTS = itertools.count(20_000)
"""The stack goes on translating what it has translated once."""
LARGE, SMALL, TEXT = bytes(6000), bytes(600), bytes(2000)
"""What IPv6 cuts anew, the second it sends whole, behind a fragment header: less than the least MTU."""
OPTION = 0x1E
"""One that is for experiments: who does not know it skips it (RFC 4727)."""
SERVERS = {"near": (0, 10), "far": (1, 9)}
"""On which node each one is, under which number."""


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with make_town(tmp_path_factory.mktemp("pieces"), Way2(Way.TUNNEL)) as made:
        made.configure(closed=False)
        yield made


@contextlib.contextmanager
def service(town: Town, target: str, *, masquerade: bool = False) -> Iterator[str]:
    """Have the first node translate an address to a server's, and the sender's to its own, as kube-proxy has it."""
    version = 6 if ":" in target else 4
    family, shown = ("ip6", f"[{target}]") if version == 6 else ("ip", target)
    rule = f"{family} daddr {SERVICE[version]} udp dport {PORT} dnat {family} to {shown};"
    chains = ["chain pre {", "type nat hook prerouting priority -100;", rule, "}"]
    if masquerade:
        rule = f"{family} daddr {target} udp dport {PORT} masquerade;"
        chains += ["chain post {", "type nat hook postrouting priority 100;", rule, "}"]
    host = town.places["host"]
    host.run("nft", "\n".join(["table inet pwtpieces {", *chains, "}"]))
    try:
        yield SERVICE[version]
    finally:
        host.run("nft", "delete table inet pwtpieces")


def admit(town: Town, server: str, *identities: int) -> None:
    """Close a server to everybody else but its own host."""
    at, number = SERVERS[server]
    datapath = town.nodes[at].datapath
    keys = [PolicyKey(identity, Direction.INGRESS, frames.UDP, PORT, 16) for identity in identities]
    rows = {key: PolicyEntry(Verdict.ALLOW, 1, 7) for key in keys}
    slot = SLOT + number
    datapath.policy.change_slot(
        slot, rows, [key for key in datapath.policy.read_slot(slot) if key not in rows]
    )
    config = EndpointConfig(
        identity=IDENTITY + number, slot=slot, policy_revision=next(REVISIONS), deny_ingress=True
    )
    datapath.policy.update_endpoints([(town.nodes[at].records[number], config)])


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("server", SERVERS)
def test_a_large_datagram_to_a_service_comes_from_its_pod(
    town: Town, server: str, version: int
) -> None:
    target = town.address(server, version)
    admit(town, server, IDENTITY)
    with (
        service(town, target) as address,
        open_socket(town.places[server], target, socket.SOCK_DGRAM) as listener,
        open_socket(town.pod, target, socket.SOCK_DGRAM) as client,
    ):
        listener.bind((target, PORT))
        listener.settimeout(DEADLINE_S)
        client.sendto(LARGE, (address, PORT))
        assert len(listener.recv(9000)) == 6000


def open_raw(pod: Namespace) -> socket.socket:
    """Open a socket for IPv6 packets with headers of their own."""
    with netns.namespace(pod.fd.fileno()):
        return socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_RAW)


def cut(source: str, destination: str, text: bytes) -> list[bytes]:
    """Make a datagram of a new flow in two pieces, with options in front of the first one.

    Linux cuts where there was a cut, without a copy, only if each piece has room for what is in front of the first.
    """
    words = 25
    options = bytes([0, words, OPTION, words * 8 + 4]) + bytes(words * 8 + 4)
    whole = frames.ipv6(source, destination, frames.udp(next(SOURCE_PORTS), PORT, text))[40:]
    half = len(whole) // 2 & ~7
    first, last = (frames.Segment(frames.UDP, piece) for piece in (whole[:half], whole[half:]))
    ahead = (frames.DESTINATION, options), (frames.FRAGMENT, frames.fragment_header(0, more=True))
    behind = (frames.FRAGMENT, frames.fragment_header(half, more=False))
    return [
        frames.ipv6(source, destination, first, extensions=ahead),
        frames.ipv6(source, destination, last, extensions=[behind]),
    ]


@pytest.mark.parametrize("text", [SMALL, TEXT], ids=["whole", "cut"])
@pytest.mark.parametrize("admitted", [IDENTITY, Identity.WORLD, None])
@pytest.mark.parametrize("sender", ["pod", "world"])
def test_who_copies_of_pieces_count_as_at_a_pod_of_the_node(
    town: Town, sender: str, admitted: int | None, text: bytes
) -> None:
    """As the world's where the sender's address is translated, too (docs/limits.md), and never as the host's, which is
    always let in.
    """
    source, target = town.address(sender, 6), town.address("near", 6)
    admit(town, "near", *([] if admitted is None else [admitted]))
    with (
        service(town, target, masquerade=True) as address,
        open_socket(town.places["near"], target, socket.SOCK_DGRAM) as listener,
        open_raw(town.places[sender]) as client,
        open_socket(town.places["host"], target, socket.SOCK_DGRAM) as host,
    ):
        listener.bind((target, PORT))
        listener.settimeout(DEADLINE_S)
        dropped = town.drops()
        asked = address if sender == "pod" else target
        for piece in cut(source, asked, text):
            client.sendto(piece, (asked, 0))
        if admitted == Identity.WORLD:
            heard, (seen, *_) = listener.recvfrom(9000)
            assert heard == text
            assert seen != source
        else:
            assert wait_until(lambda: town.drops() > dropped)
        host.sendto(b"of the host", (target, PORT))
        assert listener.recv(9000) == b"of the host"


@pytest.mark.parametrize("version", [4, 6])
def test_a_large_datagram_whose_sender_is_translated_comes_from_its_pod(
    town: Town, version: int
) -> None:
    target = town.address("near", version)
    admit(town, "near", IDENTITY)
    with (
        service(town, target, masquerade=True) as address,
        open_socket(town.places["near"], target, socket.SOCK_DGRAM) as listener,
        open_socket(town.pod, target, socket.SOCK_DGRAM) as client,
    ):
        listener.bind((target, PORT))
        listener.settimeout(DEADLINE_S)
        client.sendto(LARGE, (address, PORT))
        heard, (seen, *_) = listener.recvfrom(9000)
        assert heard == LARGE
        assert seen != town.address("pod", version)


@pytest.mark.parametrize("text", [SMALL, TEXT], ids=["whole", "cut"])
@pytest.mark.parametrize("server", SERVERS)
def test_copies_of_pieces_with_their_senders_address_come_from_its_pod(
    town: Town, server: str, text: bytes
) -> None:
    source, target = town.address("pod", 6), town.address(server, 6)
    admit(town, server, IDENTITY)
    with (
        service(town, target) as address,
        open_socket(town.places[server], target, socket.SOCK_DGRAM) as listener,
        open_raw(town.pod) as client,
    ):
        listener.bind((target, PORT))
        listener.settimeout(DEADLINE_S)
        for piece in cut(source, address, text):
            client.sendto(piece, (address, 0))
        assert listener.recv(9000) == text
