"""The gateway's addresses belong to nobody: ARP, neighbour solicitation and echo are answered by the program, and only
what the pod itself asks.
"""

from dataclasses import dataclass

import pytest

from podwire.datapath.abi import Action, DropReason
from tests.packet import frames
from tests.packet.frames import (
    BROADCAST,
    arp,
    check_frame,
    echo,
    ethernet,
    icmp,
    icmpv6,
    ipv4,
    ipv6,
    neighbour,
    tcp,
    udp,
)
from tests.packet.rig import GATEWAY_4, GATEWAY_6, ONLY_4, ONLY_6, A, B, Endpoint, Rig

pytestmark = pytest.mark.packet

SOLICITED_NODE = "ff02::1:ff00:1"
SOLICITED_MAC = "33:33:ff:00:00:01"
ROUTER, SOLICITED, OVERRIDE = 0x80, 0x40, 0x20


def arp_frame(packet: bytes, *, source: str = A.pod_mac, destination: str = BROADCAST) -> bytes:
    return ethernet(destination, source, frames.ETH_P_ARP, packet)


def solicit(
    target: str = GATEWAY_6,
    *,
    source: str = A.ipv6,
    destination: str = SOLICITED_NODE,
    to_mac: str = SOLICITED_MAC,
    hop_limit: int = 255,
    option_mac: str = A.pod_mac,
    extensions: tuple[tuple[int, bytes], ...] = (),
) -> bytes:
    segment = neighbour(135, target, option_mac=option_mac)
    packet = ipv6(source, destination, segment, hop_limit=hop_limit, extensions=extensions)
    return A.frame(packet, destination=to_mac)


def advertisement(destination: str = A.ipv6, flags: int = ROUTER | SOLICITED | OVERRIDE) -> bytes:
    segment = neighbour(136, GATEWAY_6, option_mac=A.host_mac, option=2, flags=flags)
    return A.frame_in(ipv6(GATEWAY_6, destination, segment, hop_limit=255))


ARP_REPLY = arp(2, A.host_mac, GATEWAY_4, A.ipv4, target_mac=A.pod_mac)


@dataclass(frozen=True)
class Question:
    """A frame of the pod and what the program answers."""

    id: str
    frame: bytes
    answer: bytes
    sender: Endpoint = A


def echo_pair(case: str, sender: Endpoint, version: int, source: str, gateway: str) -> Question:
    build = ipv4 if version == 4 else ipv6
    ask = sender.frame(build(source, gateway, echo(version, 77, payload=b"x" * 57)))
    answer = sender.frame_in(
        build(gateway, source, echo(version, 77, reply=True, payload=b"x" * 57))
    )
    return Question(case, ask, answer, sender)


QUESTIONS = [
    Question(
        "arp",
        arp_frame(arp(1, A.pod_mac, A.ipv4, GATEWAY_4)),
        ethernet(A.pod_mac, A.host_mac, frames.ETH_P_ARP, ARP_REPLY),
    ),
    Question(
        "arp-unicast",
        arp_frame(arp(1, A.pod_mac, A.ipv4, GATEWAY_4), destination=A.host_mac),
        ethernet(A.pod_mac, A.host_mac, frames.ETH_P_ARP, ARP_REPLY),
    ),
    Question(
        "arp-with-padding",
        arp_frame(arp(1, A.pod_mac, A.ipv4, GATEWAY_4)) + bytes(18),
        ethernet(A.pod_mac, A.host_mac, frames.ETH_P_ARP, ARP_REPLY) + bytes(18),
    ),
    Question(
        "arp-probe",
        arp_frame(arp(1, A.pod_mac, "0.0.0.0", GATEWAY_4)),
        ethernet(
            A.pod_mac,
            A.host_mac,
            frames.ETH_P_ARP,
            arp(2, A.host_mac, GATEWAY_4, "0.0.0.0", target_mac=A.pod_mac),
        ),
    ),
    Question("solicitation", solicit(), advertisement()),
    Question("solicitation-without-option", solicit(option_mac=""), advertisement()),
    Question(
        "reachability-probe", solicit(destination=GATEWAY_6, to_mac=A.host_mac), advertisement()
    ),
    Question("solicitation-from-link-local", solicit(source="fe80::2"), advertisement("fe80::2")),
    Question(
        "duplicate-address-detection-of-the-gateway",
        solicit(source="::", option_mac=""),
        advertisement("ff02::1", ROUTER | OVERRIDE),
    ),
    echo_pair("echo-v4", A, 4, A.ipv4, GATEWAY_4),
    echo_pair("echo-v6", A, 6, A.ipv6, GATEWAY_6),
    echo_pair("echo-v6-from-link-local", A, 6, "fe80::2", GATEWAY_6),
    echo_pair("echo-v4-of-a-pod-without-v6", ONLY_4, 4, ONLY_4.ipv4, GATEWAY_4),
    echo_pair("echo-v6-of-a-pod-without-v4", ONLY_6, 6, ONLY_6.ipv6, GATEWAY_6),
]


@pytest.mark.parametrize("case", QUESTIONS, ids=lambda case: case.id)
def test_the_program_answers_for_the_gateway(rig: Rig, case: Question) -> None:
    outcome = rig.run("from_pod", case.sender.ifindex, case.frame)
    assert (outcome.action, outcome.reason) == (Action.ANSWER, DropReason.NONE)
    assert outcome.data == case.answer
    is_arp = case.frame[12:14] == b"\x08\x06"
    assert is_arp or not check_frame(outcome.data)
    assert not rig.entries()


@dataclass(frozen=True)
class Abuse:
    """A frame that gets no answer, and the reason it is dropped for."""

    id: str
    frame: bytes
    reason: DropReason


ARP, ND = DropReason.ARP, DropReason.NEIGHBOUR
ABUSES = [
    Abuse("arp-for-another-pod", arp_frame(arp(1, A.pod_mac, A.ipv4, B.ipv4)), ARP),
    Abuse("arp-for-itself", arp_frame(arp(1, A.pod_mac, A.ipv4, A.ipv4)), ARP),
    Abuse("gratuitous-reply", arp_frame(arp(2, A.pod_mac, A.ipv4, A.ipv4)), ARP),
    Abuse("reply-as-the-gateway", arp_frame(arp(2, A.pod_mac, GATEWAY_4, B.ipv4)), ARP),
    Abuse("proxy-reply-for-another-pod", arp_frame(arp(2, A.pod_mac, B.ipv4, A.ipv4)), ARP),
    Abuse("arp-sender-is-another-pod", arp_frame(arp(1, A.pod_mac, B.ipv4, GATEWAY_4)), ARP),
    Abuse("arp-sender-mac-is-another", arp_frame(arp(1, B.pod_mac, A.ipv4, GATEWAY_4)), ARP),
    Abuse("reverse-arp", arp_frame(arp(3, A.pod_mac, A.ipv4, GATEWAY_4)), ARP),
    Abuse(
        "arp-of-another-hardware",
        arp_frame(arp(1, A.pod_mac, A.ipv4, GATEWAY_4, kind=(6, 0x0800, 6, 4))),
        ARP,
    ),
    Abuse(
        "arp-of-another-protocol",
        arp_frame(arp(1, A.pod_mac, A.ipv4, GATEWAY_4, kind=(1, 0x86DD, 6, 4))),
        ARP,
    ),
    Abuse(
        "arp-with-longer-addresses",
        arp_frame(arp(1, A.pod_mac, A.ipv4, GATEWAY_4, kind=(1, 0x0800, 6, 16))),
        ARP,
    ),
    Abuse(
        "arp-frame-from-another-mac",
        arp_frame(arp(1, A.pod_mac, A.ipv4, GATEWAY_4), source=B.pod_mac),
        DropReason.SOURCE_MAC,
    ),
    Abuse("hop-limit-254", solicit(hop_limit=254), ND),
    Abuse("solicitation-of-another-pod", solicit(B.ipv6), ND),
    Abuse("solicitation-of-another-link-local", solicit("fe80::2"), ND),
    Abuse("solicitation-from-another-pod", solicit(source=B.ipv6), DropReason.SOURCE_ADDRESS),
    Abuse(
        "solicitation-with-a-code",
        A.frame(ipv6(A.ipv6, SOLICITED_NODE, icmpv6(135, 1, 0, bytes(15) + b"\1"), hop_limit=255)),
        ND,
    ),
    Abuse(
        "solicitation-cut-off",
        A.frame(ipv6(A.ipv6, SOLICITED_NODE, icmpv6(135, 0, 0, bytes(15)), hop_limit=255)),
        ND,
    ),
    Abuse(
        "solicitation-in-a-fragment",
        solicit(extensions=((frames.FRAGMENT, frames.fragment_header(0, more=True)),)),
        ND,
    ),
    Abuse(
        "solicitation-routed-to-a-pod",
        solicit(destination=B.ipv6, to_mac=A.host_mac, target=B.ipv6),
        ND,
    ),
    Abuse(
        "own-duplicate-address-detection",
        solicit(A.ipv6, source="::", option_mac=""),
        DropReason.QUIET,
    ),
    Abuse(
        "link-local-duplicate-address-detection",
        solicit("fe80::2", source="::", option_mac=""),
        DropReason.QUIET,
    ),
    Abuse(
        "advertisement-as-the-gateway",
        A.frame(ipv6(GATEWAY_6, B.ipv6, neighbour(136, GATEWAY_6), hop_limit=255)),
        ND,
    ),
    Abuse(
        "advertisement-of-itself",
        A.frame(ipv6(A.ipv6, "ff02::1", neighbour(136, A.ipv6), hop_limit=255)),
        ND,
    ),
    Abuse(
        "router-advertisement",
        A.frame(ipv6("fe80::2", "ff02::1", icmpv6(134, 0, 0, bytes(8)), hop_limit=255)),
        ND,
    ),
    Abuse(
        "redirect", A.frame(ipv6(A.ipv6, B.ipv6, icmpv6(137, 0, 0, bytes(32)), hop_limit=255)), ND
    ),
    Abuse(
        "router-solicitation",
        A.frame(ipv6("fe80::2", "ff02::2", icmpv6(133, 0), hop_limit=255)),
        DropReason.QUIET,
    ),
    Abuse(
        "tcp-to-the-gateway",
        A.frame(ipv4(A.ipv4, GATEWAY_4, tcp(4000, 80, frames.SYN))),
        DropReason.GATEWAY,
    ),
    Abuse(
        "udp-to-the-gateway", A.frame(ipv6(A.ipv6, GATEWAY_6, udp(4000, 53))), DropReason.GATEWAY
    ),
    Abuse(
        "echo-reply-to-the-gateway",
        A.frame(ipv4(A.ipv4, GATEWAY_4, echo(4, 1, reply=True))),
        DropReason.GATEWAY,
    ),
    Abuse(
        "timestamp-to-the-gateway",
        A.frame(ipv4(A.ipv4, GATEWAY_4, icmp(13, 0, 0, bytes(12)))),
        DropReason.GATEWAY,
    ),
    Abuse(
        "fragmented-echo-to-the-gateway",
        A.frame(ipv4(A.ipv4, GATEWAY_4, echo(4, 1), fragment=frames.MORE_FRAGMENTS)),
        DropReason.GATEWAY,
    ),
    Abuse(
        "echo-to-the-gateway-as-another",
        A.frame(ipv4(B.ipv4, GATEWAY_4, echo(4, 1))),
        DropReason.SOURCE_ADDRESS,
    ),
    Abuse(
        "echo-to-the-gateway-of-another-mac",
        A.frame(ipv4(A.ipv4, GATEWAY_4, echo(4, 1)), destination=B.host_mac),
        DropReason.DESTINATION_MAC,
    ),
]


@pytest.mark.parametrize("case", ABUSES, ids=lambda case: case.id)
def test_nothing_else_is_answered(rig: Rig, case: Abuse) -> None:
    outcome = rig.run("from_pod", A.ifindex, case.frame)
    assert (outcome.action, outcome.reason) == (Action.DROP, case.reason)
    assert outcome.data == case.frame


TO_THE_POD = [
    Abuse(
        "arp",
        ethernet(A.pod_mac, A.host_mac, frames.ETH_P_ARP, arp(1, A.host_mac, "10.9.9.9", A.ipv4)),
        ARP,
    ),
    Abuse(
        "solicitation",
        A.frame_in(ipv6("fe80::9", A.ipv6, neighbour(135, A.ipv6), hop_limit=255)),
        ND,
    ),
    Abuse(
        "solicitation-to-many",
        A.frame_in(ipv6("fe80::9", SOLICITED_NODE, neighbour(135, A.ipv6), hop_limit=255)),
        DropReason.QUIET,
    ),
    Abuse(
        "router-advertisement",
        A.frame_in(ipv6("fe80::9", A.ipv6, icmpv6(134, 0, 0, bytes(8)), hop_limit=255)),
        ND,
    ),
    Abuse(
        "multicast", A.frame_in(ipv4("10.9.9.9", "224.0.0.251", udp(5353, 5353))), DropReason.QUIET
    ),
    Abuse(
        "not-its-address", A.frame_in(ipv4("10.9.9.9", B.ipv4, udp(4000, 53))), DropReason.NO_POD
    ),
    Abuse(
        "not-its-address-v6", A.frame_in(ipv6("fd99::9", B.ipv6, udp(4000, 53))), DropReason.NO_POD
    ),
]


@pytest.mark.parametrize("case", TO_THE_POD, ids=lambda case: case.id)
def test_no_chatter_reaches_a_pod(rig: Rig, case: Abuse) -> None:
    outcome = rig.run("to_pod", A.ifindex, case.frame)
    assert (outcome.action, outcome.reason) == (Action.DROP, case.reason)
