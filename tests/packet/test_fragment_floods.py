"""A sender of first fragments, as fast as it can, costs no other a datagram: each pushes out only its own."""

import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest

from podwire.datapath.abi import Action, DropReason, IpcacheFlags
from tests.packet import overlay
from tests.packet.frames import (
    FRAGMENT,
    MORE_FRAGMENTS,
    Segment,
    fragment_header,
    ipv4,
    ipv6,
    raw,
    udp,
)
from tests.packet.overlay import FAR, FAR_6, OLD
from tests.packet.rig import (
    NODE_4,
    NODE_6,
    OUTSIDE,
    SMALL,
    TUNNEL,
    WORLD_4,
    WORLD_6,
    A,
    B,
    Endpoint,
    Outcome,
    Rig,
)

pytestmark = [pytest.mark.packet, pytest.mark.parametrize("version", [4, 6])]

WHOLE = udp(4000, 53, bytes(range(200)) * 4)
CUT = 400
FIRST, LATER = Segment(WHOLE.protocol, WHOLE.data[:CUT]), raw(WHOLE.protocol, WHOLE.data[CUT:])
FLOOD = 4096
"""Twice the room that a hook has."""


def piece(source: str, destination: str, segment: Segment, number: int) -> bytes:
    """Make a first or a later fragment."""
    offset, more = (0, True) if segment is FIRST else (CUT, False)
    if ":" not in source:
        field = offset // 8 | (MORE_FRAGMENTS if more else 0)
        return ipv4(source, destination, segment, fragment=field, identification=number & 0xFFFF)
    header = (FRAGMENT, fragment_header(offset, more=more, identification=number))
    return ipv6(source, destination, segment, extensions=[header])


def with_source(packet: bytes, number: int) -> bytes:
    """Forge a source of its own for each packet."""
    if packet[0] >> 4 == 4:
        return packet[:12] + struct.pack("!I", 0xCB007100 ^ number << 8) + packet[16:]
    return packet[:8] + struct.pack("!IIII", 0x2A000000, number, 0, 1) + packet[24:]


@dataclass(frozen=True)
class Way:
    """How packets come to a program."""

    hook: str
    ifindex: int
    frame: Callable[[bytes], bytes]
    ingress_ifindex: int = 0
    remote: overlay.Remote | None = None

    def send(self, rig: Rig, packet: bytes) -> Outcome:
        """Let one come."""
        self._choose_tunnel(rig)
        frame = self.frame(packet)
        return rig.run(self.hook, self.ifindex, frame, ingress_ifindex=self.ingress_ifindex)

    def pour(self, rig: Rig, packets: Iterable[bytes]) -> None:
        """Let many come."""
        self._choose_tunnel(rig)
        frames = map(self.frame, packets)
        rig.pour(self.hook, self.ifindex, frames, ingress_ifindex=self.ingress_ifindex)

    def _choose_tunnel(self, rig: Rig) -> None:
        if self.remote is not None:
            overlay.choose_tunnel(rig, vni=self.remote.identity, outer=self.remote.outer)


@dataclass(frozen=True)
class Sender:
    """A sender, its receiver, and the way of its packets."""

    name: str
    source: Callable[[int], str]
    destination: Callable[[int], str]
    way: Way
    forges: bool = False


def out_of(endpoint: Endpoint) -> Way:
    return Way("from_pod", endpoint.ifindex, endpoint.frame)


def by_tunnel(remote: overlay.Remote) -> Way:
    return Way("from_overlay", TUNNEL, overlay.frame_of, TUNNEL, remote)


BY_STACK = Way("to_pod", A.ifindex, A.frame_in, OUTSIDE)


BY_HOST = Way("to_pod", A.ifindex, A.frame_in)
NATIVELY = Way("to_pod", A.ifindex, A.frame_in, OUTSIDE)


def host(version: int) -> str:
    return NODE_4 if version == 4 else NODE_6


def other_address_of_host(version: int) -> str:
    return "192.0.2.201" if version == 4 else "2001:db8:1::201"


def world(version: int) -> str:
    return WORLD_4 if version == 4 else WORLD_6


def other_world(version: int) -> str:
    return "203.0.113.77" if version == 4 else "2001:db8:77::1"


POD = Sender("pod", A.address, B.address, out_of(A))
POD_BY_TUNNEL = Sender("tunnelled-pod", FAR.pod, A.address, by_tunnel(FAR))
FROM_WORLD = Sender("world", world, A.address, BY_STACK)
FROM_HOST = Sender("host", host, A.address, BY_HOST)
NATIVE_POD = Sender("native-pod", OLD.pod, A.address, NATIVELY)
"""from_netdev leaves fragments to the stack."""
VICTIMS = [POD, POD_BY_TUNNEL, FROM_WORLD, FROM_HOST, NATIVE_POD]
FLOODS = [
    Sender("another-pod", B.address, A.address, out_of(B)),
    Sender("another-pod-to-the-same", SMALL.address, B.address, out_of(SMALL)),
    Sender("another-pod-that-forges", B.address, A.address, out_of(B), forges=True),
    Sender("tunnelled-pod-of-the-same-node", FAR.stranger, A.address, by_tunnel(FAR)),
    Sender("tunnelled-pod-of-another-node", FAR_6.pod, A.address, by_tunnel(FAR_6)),
    Sender("tunnelled-pod-that-forges", FAR_6.pod, A.address, by_tunnel(FAR_6), forges=True),
    Sender("somebody-outside", other_world, A.address, BY_STACK),
    Sender("process-of-the-node", other_address_of_host, A.address, BY_HOST),
    Sender("native-pod-of-the-same-node", OLD.stranger, A.address, NATIVELY),
]


@pytest.fixture(autouse=True)
def connected(rig: Rig) -> None:
    overlay.connect(rig)
    overlay.write_ways(rig, OLD, IpcacheFlags.NATIVE)


def flood(rig: Rig, sender: Sender, version: int) -> None:
    ends = sender.source(version), sender.destination(version)
    template = piece(*ends, FIRST, 0)
    at = 4 if version == 4 else 44
    size = 2 if version == 4 else 4

    def packets() -> Iterator[bytes]:
        for number in range(FLOOD):
            packet = template[:at] + number.to_bytes(size, "big") + template[at + size :]
            yield with_source(packet, number) if sender.forges else packet

    sender.way.pour(rig, packets())


@pytest.mark.parametrize("attacker", FLOODS, ids=lambda one: one.name)
def test_a_flood_of_first_fragments_costs_nobody_else_a_datagram(
    rig: Rig, version: int, attacker: Sender
) -> None:
    passed = (Action.PEER, Action.STACK)
    begun = list(itertools.product(VICTIMS, range(10)))
    for victim, number in begun:
        ends = victim.source(version), victim.destination(version)
        assert victim.way.send(rig, piece(*ends, FIRST, number)).action in passed
    flood(rig, attacker, version)
    for victim, number in begun:
        ends = victim.source(version), victim.destination(version)
        outcome = victim.way.send(rig, piece(*ends, LATER, number))
        assert (outcome.action in passed, outcome.reason) == (True, DropReason.NONE), victim


def test_the_world_with_forged_sources_costs_no_pod_what_it_sends(rig: Rig, version: int) -> None:
    outside = Sender("world", world, A.address, BY_STACK, forges=True)
    ends = A.address(version), B.address(version)
    assert rig.sent(A, piece(*ends, FIRST, 1)).action == Action.PEER
    flood(rig, outside, version)
    assert rig.sent(A, piece(*ends, LATER, 1)).action == Action.PEER


def test_many_datagrams_of_one_sender_may_be_under_way_at_once(rig: Rig, version: int) -> None:
    ends = A.address(version), B.address(version)
    under_way = 64
    for number in range(under_way):
        assert rig.sent(A, piece(*ends, FIRST, number)).action == Action.PEER
    passed = [
        rig.sent(A, piece(*ends, LATER, number)).action == Action.PEER
        for number in range(under_way)
    ]
    assert sum(passed) >= under_way - 2, "a third one in the same set pushes out the first"


def test_a_forged_source_is_not_remembered(rig: Rig, version: int) -> None:
    """Not under the name of whom it is forged from, and not at all."""
    first = piece(B.address(version), SMALL.address(version), FIRST, 7)
    assert rig.sent(A, first).reason == DropReason.SOURCE_ADDRESS
    later = piece(B.address(version), SMALL.address(version), LATER, 7)
    assert rig.sent(B, later).reason == DropReason.FRAGMENT
