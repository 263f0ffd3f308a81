"""Who sent it is told by the device a packet came in through, never by an address of a node."""

import ipaddress
from dataclasses import dataclass

import pytest

from podwire.datapath.abi import Action, ConfigFlags, DropReason, IpcacheValue
from podwire.datapath.maps import to_prefix_key
from tests.packet.frames import ipv4, ipv6, udp
from tests.packet.rig import (
    GUARD,
    NOBODY_4,
    NODE_4,
    NODE_6,
    OUTSIDE,
    REMOTE_IDENTITY,
    REMOTE_POD_4,
    REMOTE_POD_6,
    SMALL,
    WORLD_4,
    WORLD_6,
    A,
    B,
    Rig,
)

pytestmark = pytest.mark.packet

HOST, WORLD, UNMANAGED = 1, 2, 3


@dataclass(frozen=True)
class Sender:
    """Where a packet to A came from, and who that is."""

    id: str
    source: str
    ingress_ifindex: int
    identity: int


SENDERS = [
    Sender("process-of-this-host", NODE_4, 0, HOST),
    Sender("process-of-this-host-v6", NODE_6, 0, HOST),
    Sender("process-of-this-host-by-a-bridge-address", "172.17.0.1", 0, HOST),
    Sender("local-pod", B.ipv4, B.ifindex, B.identity),
    Sender("local-pod-v6", B.ipv6, B.ifindex, B.identity),
    Sender("local-pod-masqueraded-to-the-node", NODE_4, B.ifindex, B.identity),
    Sender("local-pod-masqueraded-to-the-world", WORLD_4, B.ifindex, B.identity),
    Sender("world", WORLD_4, OUTSIDE, WORLD),
    Sender("world-v6", WORLD_6, OUTSIDE, WORLD),
    Sender("world-masqueraded-to-this-node", NODE_4, OUTSIDE, WORLD),
    Sender("world-masqueraded-to-this-node-v6", NODE_6, OUTSIDE, WORLD),
    Sender("world-masqueraded-to-another-node", "192.0.2.2", OUTSIDE, WORLD),
    Sender("remote-pod", REMOTE_POD_4, OUTSIDE, REMOTE_IDENTITY),
    Sender("remote-pod-v6", REMOTE_POD_6, OUTSIDE, REMOTE_IDENTITY),
    Sender("remote-pod-nobody-knows", "10.7.9.9", OUTSIDE, UNMANAGED),
    Sender("device-behind-its-guard", GUARD.ipv4, GUARD.ifindex, WORLD),
    Sender("device-that-is-gone", WORLD_4, 1999, WORLD),
]


@pytest.mark.parametrize("case", SENDERS, ids=lambda case: case.id)
def test_the_sender_is_who_the_device_says(rig: Rig, case: Sender) -> None:
    destination = A.ipv6 if ":" in case.source else A.ipv4
    build = ipv6 if ":" in case.source else ipv4
    packet = build(case.source, destination, udp(4000, 53))
    outcome = rig.received(A, packet, ingress_ifindex=case.ingress_ifindex)
    assert outcome.action == Action.STACK
    assert outcome.decision.source_identity == case.identity
    assert outcome.decision.destination_identity == A.identity


FORGED = {
    "a-local-pods": (B.ipv4, OUTSIDE),
    "a-local-pods-v6": (B.ipv6, OUTSIDE),
    "the-receivers-own": (A.ipv4, OUTSIDE),
    "the-receivers-own-v6": (A.ipv6, OUTSIDE),
    "of-a-pod-by-another-pods-device": (B.ipv4, SMALL.ifindex),
    "of-a-pod-by-a-device-that-is-gone": (B.ipv4, 1999),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_local_pods_address_comes_from_its_own_device_only(rig: Rig, name: str) -> None:
    source, ingress_ifindex = FORGED[name]
    version = 6 if ":" in source else 4
    build = ipv6 if version == 6 else ipv4
    question = build(A.address(version), source, udp(53, 4000))
    rig.sent(A, question)  # so that the forged packet would be its answer
    packet = build(source, A.address(version), udp(4000, 53))
    outcome = rig.received(A, packet, ingress_ifindex=ingress_ifindex)
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.SOURCE_ADDRESS)


@dataclass(frozen=True)
class Destination:
    """An address that A speaks to, and who that is."""

    id: str
    address: str
    identity: int


DESTINATIONS = [
    Destination("local-pod", B.ipv4, B.identity),
    Destination("local-pod-v6", B.ipv6, B.identity),
    Destination("node", NODE_4, HOST),
    Destination("node-v6", NODE_6, HOST),
    Destination("other-node", "192.0.2.2", 6),
    Destination("remote-pod", REMOTE_POD_4, REMOTE_IDENTITY),
    Destination("remote-pod-v6", REMOTE_POD_6, REMOTE_IDENTITY),
    Destination("unknown-pod", "10.7.9.9", UNMANAGED),
    Destination("unknown-pod-v6", "fd07:9::9", UNMANAGED),
    Destination("nobody-in-our-block", NOBODY_4, UNMANAGED),
    Destination("world", WORLD_4, WORLD),
    Destination("world-v6", WORLD_6, WORLD),
]


@pytest.mark.parametrize("case", DESTINATIONS, ids=lambda case: case.id)
def test_the_destination_is_who_the_ipcache_says(rig: Rig, case: Destination) -> None:
    build, source = (ipv6, A.ipv6) if ":" in case.address else (ipv4, A.ipv4)
    outcome = rig.sent(A, build(source, case.address, udp(4000, 53)))
    assert outcome.decision.source_identity == A.identity
    assert outcome.decision.destination_identity == case.identity


def test_the_host_comes_in_only_where_the_row_says_so(rig: Rig) -> None:
    packet = ipv4(NODE_4, A.ipv4, udp(4000, 53))
    closed = ConfigFlags.OPEN | ConfigFlags.DENY_INGRESS
    rig.change(A, flags=closed)
    assert rig.received(A, packet).reason == DropReason.POLICY
    rig.change(A, flags=closed | ConfigFlags.HOST_ALLOWED)
    assert rig.received(A, packet).action == Action.STACK
    for ingress_ifindex in (B.ifindex, OUTSIDE):
        other = ipv4(NODE_4, A.ipv4, udp(4001, 53))
        assert rig.received(A, other, ingress_ifindex=ingress_ifindex).reason == DropReason.POLICY


def test_that_the_host_may_come_in_says_nothing_of_the_way_out(rig: Rig) -> None:
    rig.change(A, flags=ConfigFlags.OPEN | ConfigFlags.HOST_ALLOWED | ConfigFlags.DENY_EGRESS)
    assert rig.sent(A, ipv4(A.ipv4, NODE_4, udp(4000, 53))).reason == DropReason.POLICY


def test_the_longest_prefix_decides(rig: Rig) -> None:
    one = ipaddress.ip_network(f"{REMOTE_POD_4}/32")
    rig.maps["pw_ipcache"].update(to_prefix_key(one), IpcacheValue(7777, 2, 0, 0).pack())
    outcome = rig.sent(A, ipv4(A.ipv4, REMOTE_POD_4, udp(4000, 53)))
    assert outcome.decision.destination_identity == 7777
