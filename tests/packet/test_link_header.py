"""Where the network header begins is a constant that the loader chooses: nothing else says how long a link header is.

The frames of these tests have four more bytes between Ethernet header and packet.
"""

from collections.abc import Iterator

import pytest

from podwire.datapath.abi import Action, ConfigFlags, DropReason
from podwire.model.policy import Direction, PolicyEntry, PolicyKey, Verdict
from tests.packet import frames
from tests.packet.frames import ETH_HLEN, SYN, tcp, udp
from tests.packet.overlay import packet
from tests.packet.rig import (
    ALLOW,
    OUTSIDE,
    WORLD_4,
    WORLD_6,
    A,
    B,
    Endpoint,
    Outcome,
    Rig,
    open_rig,
)

pytestmark = [pytest.mark.packet, pytest.mark.parametrize("version", [4, 6])]

MORE_BYTES = 4
SLOT = 3


@pytest.fixture(scope="module")
def loaded_with_a_longer_header() -> Iterator[Rig]:
    with open_rig(constants={"pw_link_header_bytes": ETH_HLEN + MORE_BYTES}) as rig:
        yield rig


@pytest.fixture
def longer(loaded_with_a_longer_header: Rig) -> Rig:
    loaded_with_a_longer_header.reset()
    return loaded_with_a_longer_header


def lengthened(frame: bytes) -> bytes:
    return frame[:ETH_HLEN] + bytes(MORE_BYTES) + frame[ETH_HLEN:]


def send(rig: Rig, sender: Endpoint, inner: bytes) -> Outcome:
    return rig.run("from_pod", sender.ifindex, lengthened(sender.frame(inner)))


def test_ports_addresses_and_policy_are_read_behind_it(longer: Rig, version: int) -> None:
    longer.change(A, slot=SLOT, flags=ALLOW | ConfigFlags.DENY_EGRESS)
    key = PolicyKey(B.identity, Direction.EGRESS, frames.TCP, 80, 16)
    longer.rule(SLOT, key, PolicyEntry(Verdict.ALLOW, 1, 7))
    ends = A.address(version), B.address(version)
    passed = send(longer, A, packet(*ends, tcp(4000, 80, SYN)))
    assert (passed.action, passed.decision.sender_rule) == (Action.PEER, 7)
    assert send(longer, A, packet(*ends, tcp(4000, 81, SYN))).reason == DropReason.POLICY
    forged = packet(WORLD_4 if version == 4 else WORLD_6, ends[1], tcp(4000, 80, SYN))
    assert send(longer, A, forged).reason == DropReason.SOURCE_ADDRESS


def test_the_packet_goes_on_with_its_header_and_one_hop_less(longer: Rig, version: int) -> None:
    inner = packet(A.address(version), B.address(version), udp(4000, 53))
    gone = send(longer, A, inner)
    expected = packet(A.address(version), B.address(version), udp(4000, 53), ttl=63)
    assert gone.data[ETH_HLEN : ETH_HLEN + MORE_BYTES] == bytes(MORE_BYTES)
    assert gone.data[ETH_HLEN + MORE_BYTES :] == expected


def test_what_the_stack_hands_over_is_read_behind_it(longer: Rig, version: int) -> None:
    world = WORLD_4 if version == 4 else WORLD_6
    frame = lengthened(A.frame_in(packet(world, A.address(version), udp(4000, 53))))
    outcome = longer.run("to_pod", A.ifindex, frame, ingress_ifindex=OUTSIDE)
    assert outcome.action == Action.STACK
    [(key, value)] = longer.entries(A).items()
    assert (key.sport, key.dport) == (4000, 53)
    assert value.bytes_[0] == len(frame) - ETH_HLEN - MORE_BYTES


def test_with_the_usual_constant_such_a_frame_is_malformed(rig: Rig, version: int) -> None:
    inner = packet(A.address(version), B.address(version), udp(4000, 53))
    assert send(rig, A, inner).reason in (DropReason.HEADER, DropReason.TRUNCATED)
