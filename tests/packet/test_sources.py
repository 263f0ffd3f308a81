"""A pod sends from its own MAC and addresses, to its gateway's MAC, and to addresses that a wire may carry."""

from dataclasses import dataclass

import pytest

from podwire.datapath.abi import Action, DropReason, Path
from tests.packet import frames
from tests.packet.frames import BROADCAST, ipv4, ipv6, tcp, udp
from tests.packet.rig import (
    GUARD,
    NODE_4,
    ONLY_4,
    ONLY_6,
    OUTSIDE,
    WORLD_4,
    WORLD_6,
    A,
    B,
    Endpoint,
    Rig,
)

pytestmark = pytest.mark.packet

DATAGRAM = udp(40000, 53)
"""To the world, so that nothing but the source decides."""


@dataclass(frozen=True)
class Case:
    """A frame, where it is sent, and why it is refused (NONE = it passes)."""

    id: str
    frame: bytes
    reason: DropReason
    sender: Endpoint = A


def from_a(packet: bytes, **ends: str) -> bytes:
    return A.frame(packet, **ends)


V4 = ipv4(A.ipv4, WORLD_4, DATAGRAM)
V6 = ipv6(A.ipv6, WORLD_6, DATAGRAM)

CASES = [
    Case("own-v4", from_a(V4), DropReason.NONE),
    Case("own-v6", from_a(V6), DropReason.NONE),
    Case("mac-of-another-pod", from_a(V4, source=B.pod_mac), DropReason.SOURCE_MAC),
    Case("mac-of-the-host", from_a(V4, source=A.host_mac), DropReason.SOURCE_MAC),
    Case("mac-last-byte-off", from_a(V6, source=A.pod_mac[:-1] + "0"), DropReason.SOURCE_MAC),
    Case("v4-of-another-pod", from_a(ipv4(B.ipv4, WORLD_4, DATAGRAM)), DropReason.SOURCE_ADDRESS),
    Case("v4-of-the-node", from_a(ipv4(NODE_4, WORLD_4, DATAGRAM)), DropReason.SOURCE_ADDRESS),
    Case("v4-of-the-world", from_a(ipv4("8.8.8.8", WORLD_4, DATAGRAM)), DropReason.SOURCE_ADDRESS),
    Case("v4-loopback", from_a(ipv4("127.0.0.1", WORLD_4, DATAGRAM)), DropReason.SOURCE_ADDRESS),
    Case("v4-unspecified", from_a(ipv4("0.0.0.0", WORLD_4, DATAGRAM)), DropReason.SOURCE_ADDRESS),
    Case(
        "v4-last-byte-off", from_a(ipv4("10.7.0.138", WORLD_4, DATAGRAM)), DropReason.SOURCE_ADDRESS
    ),
    Case("v6-of-another-pod", from_a(ipv6(B.ipv6, WORLD_6, DATAGRAM)), DropReason.SOURCE_ADDRESS),
    Case(
        "v6-first-word-off", from_a(ipv6("fd08::10", WORLD_6, DATAGRAM)), DropReason.SOURCE_ADDRESS
    ),
    Case(
        "v6-second-word-off",
        from_a(ipv6("fd07:0:0:1::10", WORLD_6, DATAGRAM)),
        DropReason.SOURCE_ADDRESS,
    ),
    Case(
        "v6-third-word-off",
        from_a(ipv6("fd07::1:0:0:10", WORLD_6, DATAGRAM)),
        DropReason.SOURCE_ADDRESS,
    ),
    Case("v6-link-local", from_a(ipv6("fe80::2", WORLD_6, DATAGRAM)), DropReason.SOURCE_ADDRESS),
    Case("v6-unspecified", from_a(ipv6("::", WORLD_6, DATAGRAM)), DropReason.SOURCE_ADDRESS),
    Case("v4-mapped-own", from_a(ipv6(f"::ffff:{A.ipv4}", WORLD_6, DATAGRAM)), DropReason.HEADER),
    Case("to-v4-mapped-pod", from_a(ipv6(A.ipv6, f"::ffff:{B.ipv4}", DATAGRAM)), DropReason.HEADER),
    Case("v4-without-v4", ONLY_6.frame(V4), DropReason.SOURCE_ADDRESS, ONLY_6),
    Case(
        "v4-zero-without-v4",
        ONLY_6.frame(ipv4("0.0.0.0", WORLD_4, DATAGRAM)),
        DropReason.SOURCE_ADDRESS,
        ONLY_6,
    ),
    Case("v6-without-v6", ONLY_4.frame(V6), DropReason.SOURCE_ADDRESS, ONLY_4),
    Case(
        "v6-zero-without-v6",
        ONLY_4.frame(ipv6("::", WORLD_6, DATAGRAM)),
        DropReason.SOURCE_ADDRESS,
        ONLY_4,
    ),
    Case(
        "to-the-mac-of-another-pod", from_a(V4, destination=B.pod_mac), DropReason.DESTINATION_MAC
    ),
    Case(
        "unicast-packet-in-a-broadcast-frame",
        from_a(V4, destination=BROADCAST),
        DropReason.DESTINATION_MAC,
    ),
    Case(
        "unicast-packet-in-a-multicast-frame",
        from_a(V6, destination="33:33:00:00:00:01"),
        DropReason.DESTINATION_MAC,
    ),
    Case(
        "to-loopback",
        from_a(ipv4(A.ipv4, "127.0.0.1", tcp(4000, 10250, frames.SYN))),
        DropReason.DESTINATION,
    ),
    Case(
        "to-loopback-v6",
        from_a(ipv6(A.ipv6, "::1", tcp(4000, 10250, frames.SYN))),
        DropReason.DESTINATION,
    ),
    Case("to-unspecified", from_a(ipv4(A.ipv4, "0.0.0.0", DATAGRAM)), DropReason.DESTINATION),
    Case("to-unspecified-v6", from_a(ipv6(A.ipv6, "::", DATAGRAM)), DropReason.DESTINATION),
    Case("to-link-local-v6", from_a(ipv6(A.ipv6, "fe80::77", DATAGRAM)), DropReason.DESTINATION),
    Case("to-cloud-metadata", from_a(ipv4(A.ipv4, "169.254.169.254", DATAGRAM)), DropReason.NONE),
    Case(
        "guard-row", GUARD.frame(ipv4(GUARD.ipv4, WORLD_4, DATAGRAM)), DropReason.NO_ENDPOINT, GUARD
    ),
    Case(
        "guard-row-arp",
        frames.ethernet(
            BROADCAST,
            GUARD.pod_mac,
            frames.ETH_P_ARP,
            frames.arp(1, GUARD.pod_mac, GUARD.ipv4, "169.254.1.1"),
        ),
        DropReason.NO_ENDPOINT,
        GUARD,
    ),
]

CHATTER = [
    Case(
        "mdns",
        from_a(ipv4(A.ipv4, "224.0.0.251", udp(5353, 5353)), destination="01:00:5e:00:00:fb"),
        DropReason.QUIET,
    ),
    Case(
        "mdns-v6",
        from_a(ipv6(A.ipv6, "ff02::fb", udp(5353, 5353)), destination="33:33:00:00:00:fb"),
        DropReason.QUIET,
    ),
    Case(
        "igmp",
        from_a(
            ipv4(A.ipv4, "224.0.0.22", frames.raw(2, bytes(8))), destination="01:00:5e:00:00:16"
        ),
        DropReason.QUIET,
    ),
    Case(
        "mld",
        from_a(
            ipv6("::", "ff02::16", frames.icmpv6(143, 0), extensions=[(0, frames.extension())]),
            destination="33:33:00:00:00:16",
        ),
        DropReason.QUIET,
    ),
    Case(
        "dhcp-discover",
        from_a(ipv4("0.0.0.0", "255.255.255.255", udp(68, 67)), destination=BROADCAST),
        DropReason.QUIET,
    ),
    Case(
        "broadcast",
        from_a(ipv4(A.ipv4, "255.255.255.255", DATAGRAM), destination=BROADCAST),
        DropReason.QUIET,
    ),
    Case(
        "multicast-from-a-forged-address",
        from_a(ipv4(B.ipv4, "224.0.0.251", DATAGRAM)),
        DropReason.QUIET,
    ),
]


@pytest.mark.parametrize("case", CASES + CHATTER, ids=lambda case: case.id)
def test_only_what_the_pod_may_send_leaves_it(rig: Rig, case: Case) -> None:
    outcome = rig.run("from_pod", case.sender.ifindex, case.frame)
    assert outcome.reason == case.reason
    wanted = Action.DROP if case.reason else Action.STACK
    assert outcome.action == wanted
    assert outcome.data == case.frame
    assert not case.reason or not rig.entries()


def test_a_device_without_a_row_passes_nothing(rig: Rig) -> None:
    outcome = rig.run("from_pod", OUTSIDE, A.frame(V4))
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.NO_ENDPOINT)
    outcome = rig.run("to_pod", OUTSIDE, A.frame_in(V4))
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.NO_ENDPOINT)


def test_a_row_that_stands_under_another_index_passes_nothing(rig: Rig) -> None:
    rig.maps["pw_config"].update(OUTSIDE.to_bytes(4, "little"), A.row().pack())
    assert rig.run("from_pod", OUTSIDE, A.frame(V4)).reason == DropReason.NO_ENDPOINT


def test_what_goes_to_the_world_takes_the_stack(rig: Rig) -> None:
    outcome = rig.sent(A, V4)
    assert (outcome.action, outcome.path) == (Action.STACK, Path.STACK)
    assert outcome.decision.source_identity == A.identity
    assert outcome.decision.destination_identity == 2
