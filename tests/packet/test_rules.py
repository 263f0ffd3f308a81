"""What the rows of a policy slot come to: three families, precedence, denials, prefixes of ports, CIDRs, defaults.

The tables say it case by case; the last test asks the programs and a plain reading of the same rows about thousands of
random row sets, and prints its seed.
"""

import functools
import ipaddress
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import pytest

from podwire.datapath import abi
from podwire.datapath.abi import Action, ConfigFlags, DropReason, PolicyFlags
from podwire.model.policy import (
    ANY_IDENTITY,
    CIDR_WORLD_BIT,
    Direction,
    PolicyEntry,
    PolicyKey,
    Verdict,
)
from tests.packet import frames
from tests.packet.frames import ACK, SYN, echo, icmp, icmpv6, ipv4, ipv6, raw, sctp, tcp, udp
from tests.packet.rig import (
    ALLOW,
    NODE_4,
    OUTSIDE,
    REMOTE_IDENTITY,
    REMOTE_POD_4,
    REMOTE_POD_6,
    WORLD_4,
    WORLD_6,
    A,
    B,
    Endpoint,
    Outcome,
    Rig,
)

pytestmark = pytest.mark.packet

SLOT: Final = 7
EGRESS, INGRESS = Direction.EGRESS, Direction.INGRESS
PERMIT, DENY = Verdict.ALLOW, Verdict.DENY
WORLD, HOST = abi.Identity.WORLD, abi.Identity.HOST
OUT, IN = ConfigFlags.DENY_EGRESS, ConfigFlags.DENY_INGRESS
BY_CIDR = ConfigFlags.CIDR_EGRESS | ConfigFlags.CIDR_INGRESS
CLOSED = ALLOW | OUT | IN | BY_CIDR
DEFAULT_OUT, DEFAULT_IN = 900, 901
NET = (1 << 24) + 5
OTHER_NET = (1 << 24) + 6
PROTOCOLS: Final[dict[int, Callable[[int, int], frames.Segment]]] = {
    frames.TCP: lambda source, destination: tcp(source, destination, SYN),
    frames.UDP: udp,
    frames.SCTP: sctp,
}


@dataclass(frozen=True)
class Row:
    """A row of the slot."""

    key: PolicyKey
    entry: PolicyEntry
    flags: int = 0


def row(
    identity: int, verdict: Verdict, rule: int, direction: Direction = EGRESS, **more: int
) -> Row:
    """Make a row; `more`: protocol, port and bits, precedence, flags."""
    ports = (more.get(name, 0) for name in ("protocol", "port", "bits"))
    entry = PolicyEntry(verdict, more.get("precedence", 100), rule)
    return Row(PolicyKey(identity, direction, *ports), entry, more.get("flags", 0))


def fill(rig: Rig, rows: Sequence[Row], slot: int = SLOT) -> None:
    for row in rows:
        rig.rule(slot, row.key, row.entry, row.flags)


def segment_of(protocol: int, port: int) -> frames.Segment:
    make = PROTOCOLS.get(protocol)
    return make(50000, port) if make else raw(protocol, bytes(20))


def ask(
    rig: Rig,
    peer: str,
    segment: frames.Segment,
    direction: Direction = EGRESS,
    endpoint: Endpoint = A,
) -> Outcome:
    """Let a new flow begin between the endpoint and a peer that is not on this node."""
    six = ":" in peer
    make, own = (ipv6, endpoint.ipv6) if six else (ipv4, endpoint.ipv4)
    if direction == EGRESS:
        return rig.sent(endpoint, make(own, peer, segment))
    return rig.received(endpoint, make(peer, own, segment), ingress_ifindex=OUTSIDE)


def said(outcome: Outcome) -> tuple[bool, int]:
    """Give whether the packet passed, and on which rule's word."""
    assert outcome.reason in (DropReason.NONE, DropReason.POLICY)
    return outcome.reason == DropReason.NONE, outcome.decision.rule


PEER = row(WORLD, PERMIT, 1)
EVERYBODY = row(ANY_IDENTITY, PERMIT, 3)
CIDR = row(NET | CIDR_WORLD_BIT, PERMIT, 2)


def deny(one: Row, precedence: int = 100) -> Row:
    return replace(one, entry=PolicyEntry(DENY, precedence, one.entry.rule))


def high(one: Row, precedence: int = 200) -> Row:
    return replace(one, entry=msgspec.structs.replace(one.entry, precedence=precedence))


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        pytest.param([], (False, DEFAULT_OUT), id="nothing: the default"),
        pytest.param([PEER], (True, 1), id="peer"),
        pytest.param([CIDR], (True, 2), id="cidr"),
        pytest.param([EVERYBODY], (True, 3), id="any"),
        pytest.param([PEER, CIDR], (True, 1), id="tie: peer before cidr"),
        pytest.param([PEER, EVERYBODY], (True, 1), id="tie: peer before any"),
        pytest.param([CIDR, EVERYBODY], (True, 2), id="tie: cidr before any"),
        pytest.param([PEER, CIDR, EVERYBODY], (True, 1), id="tie: peer first of all"),
        pytest.param([deny(PEER), CIDR, EVERYBODY], (False, 1), id="tie: peer denies"),
        pytest.param([PEER, deny(CIDR), EVERYBODY], (False, 2), id="tie: cidr denies"),
        pytest.param([PEER, CIDR, deny(EVERYBODY)], (False, 3), id="tie: any denies"),
        pytest.param([deny(PEER), deny(CIDR), EVERYBODY], (False, 1), id="two deny: the earlier"),
        pytest.param([PEER, deny(CIDR), deny(EVERYBODY)], (False, 2), id="cidr and any deny"),
        pytest.param([deny(PEER), CIDR, high(EVERYBODY)], (True, 3), id="any is higher"),
        pytest.param([deny(PEER), high(CIDR), EVERYBODY], (True, 2), id="cidr is higher"),
        pytest.param([high(PEER), deny(CIDR), deny(EVERYBODY)], (True, 1), id="peer is higher"),
        pytest.param([PEER, deny(EVERYBODY, 300)], (False, 3), id="any denies from above"),
        pytest.param([PEER, deny(CIDR, 300), high(EVERYBODY)], (False, 2), id="three tiers"),
        pytest.param([high(PEER), deny(CIDR, 200)], (False, 2), id="same tier above: denied"),
        pytest.param([high(PEER, 2**32 - 1), deny(EVERYBODY, 2**31)], (True, 1), id="no sign"),
        pytest.param([row(0, PERMIT, 4, direction=INGRESS)], (False, DEFAULT_OUT), id="not ours"),
        pytest.param([row(4321, PERMIT, 4)], (False, DEFAULT_OUT), id="of somebody else"),
    ],
)
@pytest.mark.parametrize("version", [4, 6])
def test_of_the_families_the_highest_decides_then_denial_then_order(
    rig: Rig, rows: list[Row], wanted: tuple[bool, int], version: int
) -> None:
    rig.change(A, slot=SLOT, flags=CLOSED)
    rig.cidr("198.51.100.0/24" if version == 4 else "2001:db8::/64", NET)
    fill(rig, rows)
    peer = WORLD_4 if version == 4 else WORLD_6
    assert said(ask(rig, peer, tcp(50000, 80, SYN))) == wanted


@pytest.mark.parametrize(
    ("rows", "port", "wanted"),
    [
        pytest.param([("6", 80, 16)], 80, True, id="one port"),
        pytest.param([("6", 80, 16)], 81, False, id="the next port"),
        pytest.param([("6", 80, 16)], 79, False, id="the port before"),
        pytest.param([("6", 0, 0)], 65535, True, id="all ports"),
        pytest.param([("17", 80, 16)], 80, False, id="other protocol"),
        pytest.param([("0", 0, 0)], 80, True, id="every protocol"),
        pytest.param([("6", 1024, 6)], 1024, True, id="prefix begins"),
        pytest.param([("6", 1024, 6)], 2047, True, id="prefix ends"),
        pytest.param([("6", 1024, 6)], 1023, False, id="before the prefix"),
        pytest.param([("6", 1024, 6)], 2048, False, id="behind the prefix"),
        pytest.param([("6", 32768, 1)], 32768, True, id="upper half"),
        pytest.param([("6", 32768, 1)], 32767, False, id="not the lower half"),
        pytest.param([("6", 0, 16)], 0, True, id="port 0 alone"),
        pytest.param([("6", 0, 16)], 1, False, id="not port 1"),
    ],
)
@pytest.mark.parametrize("direction", Direction)
def test_a_row_covers_its_prefix_of_ports_and_nothing_else(
    rig: Rig, rows: list[tuple[str, int, int]], port: int, wanted: bool, direction: Direction
) -> None:
    rig.change(A, slot=SLOT, flags=CLOSED)
    for protocol, first, bits in rows:
        one = row(
            WORLD, PERMIT, 1, direction=direction, protocol=int(protocol), port=first, bits=bits
        )
        fill(rig, [one])
    assert said(ask(rig, WORLD_4, tcp(50000, port, SYN), direction))[0] == wanted


@pytest.mark.parametrize(
    ("port", "rule"),
    [(80, 16), (81, 15), (82, 14), (88, 12), (1000, 2), (60000, 3), (40000, 3)],
)
def test_within_a_family_the_longest_prefix_speaks(rig: Rig, port: int, rule: int) -> None:
    rig.change(A, slot=SLOT, flags=CLOSED)
    rows = [
        row(WORLD, PERMIT, bits, protocol=6, port=80 & 0xFFFF << (16 - bits), bits=bits)
        for bits in (16, 15, 14, 12, 2)
    ]
    fill(rig, [*rows, row(WORLD, PERMIT, 3)])
    assert said(ask(rig, WORLD_4, tcp(50000, port, SYN))) == (True, rule)


@pytest.mark.parametrize(
    ("segment", "peer"),
    [
        pytest.param(udp(50000, 53), WORLD_4, id="udp"),
        pytest.param(sctp(50000, 53), WORLD_4, id="sctp"),
        pytest.param(raw(50, bytes(20)), WORLD_6, id="esp"),
        pytest.param(icmp(8, 0, 77 << 16), WORLD_4, id="echo"),
        pytest.param(icmpv6(128, 0, 77 << 16), WORLD_6, id="echo6"),
        pytest.param(raw(255), WORLD_4, id="reserved"),
    ],
)
def test_a_row_for_every_protocol_means_every_one(
    rig: Rig, segment: frames.Segment, peer: str
) -> None:
    rig.change(A, slot=SLOT, flags=CLOSED)
    fill(rig, [row(WORLD, PERMIT, 5)])
    assert said(ask(rig, peer, segment)) == (True, 5)
    rig.change(A, slot=SLOT + 1, flags=CLOSED, revision=2)
    assert said(ask(rig, peer, segment)) == (False, DEFAULT_OUT)


@pytest.mark.parametrize(
    ("kind", "code", "bits", "segment", "wanted"),
    [
        pytest.param(8, 0, 16, icmp(8, 0, 5 << 16), True, id="echo"),
        pytest.param(8, 0, 16, icmp(8, 1, 5 << 16), False, id="other code"),
        pytest.param(8, 0, 8, icmp(8, 1, 5 << 16), True, id="all codes of a type"),
        pytest.param(13, 0, 8, icmp(13, 0, 5), True, id="timestamp"),
        pytest.param(13, 0, 8, icmp(8, 0, 5 << 16), False, id="other type"),
        pytest.param(0, 0, 8, icmp(0, 0, 5 << 16), True, id="unasked reply by its own type"),
        pytest.param(8, 0, 8, icmp(0, 0, 0x0800 << 16), False, id="reply whose id is a type"),
        pytest.param(0, 0, 8, icmp(0, 0, 0x0D00 << 16), True, id="reply with another such id"),
        pytest.param(3, 1, 16, icmp(3, 1, 0, bytes(28)), True, id="unrelated error by its type"),
        pytest.param(3, 0, 16, icmp(3, 1, 0, bytes(28)), False, id="unrelated error, other code"),
    ],
)
@pytest.mark.parametrize("direction", Direction)
def test_icmp_is_asked_about_by_type_and_code(
    rig: Rig,
    kind: int,
    code: int,
    bits: int,
    segment: frames.Segment,
    wanted: bool,
    direction: Direction,
) -> None:
    rig.change(A, slot=SLOT, flags=CLOSED)
    one = row(WORLD, PERMIT, 1, direction=direction, protocol=1, port=kind << 8 | code, bits=bits)
    fill(rig, [one])
    assert said(ask(rig, WORLD_4, segment, direction))[0] == wanted


def test_icmpv6_is_another_protocol_than_icmp(rig: Rig) -> None:
    rig.change(A, slot=SLOT, flags=CLOSED)
    fill(rig, [row(WORLD, PERMIT, 1, protocol=frames.ICMP), row(WORLD, PERMIT, 2, protocol=58)])
    assert said(ask(rig, WORLD_4, echo(4, 1))) == (True, 1)
    assert said(ask(rig, WORLD_6, echo(6, 1))) == (True, 2)


@pytest.mark.parametrize(
    ("cidr", "address", "identity", "wanted"),
    [
        pytest.param("198.51.100.0/24", WORLD_4, NET | CIDR_WORLD_BIT, True, id="world"),
        pytest.param("198.51.100.0/24", WORLD_4, NET, False, id="world, rows for inside only"),
        pytest.param("10.7.5.0/24", REMOTE_POD_4, NET, True, id="pod by ipBlock"),
        pytest.param("10.7.5.0/24", REMOTE_POD_4, NET | CIDR_WORLD_BIT, False, id="pod, no world"),
        pytest.param("0.0.0.0/0", REMOTE_POD_4, NET, True, id="pod in everything"),
        pytest.param("192.0.2.1/32", NODE_4, NET, True, id="this node's address"),
        pytest.param("198.51.100.8/32", WORLD_4, NET | CIDR_WORLD_BIT, False, id="not this host"),
        pytest.param("2001:db8::/32", WORLD_6, NET | CIDR_WORLD_BIT, True, id="world 6"),
        pytest.param("fd07:5::/64", REMOTE_POD_6, NET, True, id="pod 6 by ipBlock"),
        pytest.param("::/0", WORLD_6, NET | CIDR_WORLD_BIT, True, id="everything 6"),
    ],
)
def test_a_cidr_is_looked_up_by_the_peers_address(
    rig: Rig, cidr: str, address: str, identity: int, wanted: bool
) -> None:
    rig.change(A, slot=SLOT, flags=CLOSED)
    rig.cidr(cidr, NET)
    fill(rig, [row(identity, PERMIT, 1)])
    assert said(ask(rig, address, tcp(50000, 80, SYN)))[0] == wanted


@pytest.mark.parametrize("version", [4, 6])
def test_ipblock_on_a_pod_of_this_node_holds_both_ways(rig: Rig, version: int) -> None:
    rig.change(A, slot=SLOT, flags=CLOSED)
    rig.change(B, slot=SLOT + 1, flags=CLOSED)
    rig.cidr(f"{A.address(version)}/{32 if version == 4 else 128}", NET)
    rig.cidr(f"{B.address(version)}/{32 if version == 4 else 128}", OTHER_NET)
    make = ipv4 if version == 4 else ipv6
    packet = make(A.address(version), B.address(version), tcp(50000, 80, SYN))
    assert rig.sent(A, packet).decision.instance == A.instance
    fill(rig, [row(OTHER_NET, PERMIT, 1)])
    outcome = rig.sent(A, packet)
    assert (outcome.reason, outcome.decision.instance) == (DropReason.POLICY, B.instance)
    fill(rig, [row(NET, PERMIT, 2, direction=INGRESS)], SLOT + 1)
    outcome = rig.sent(A, packet)
    assert outcome.action == Action.PEER
    assert (outcome.decision.sender_rule, outcome.decision.rule) == (1, 2)


def test_the_longest_cidr_is_the_peers_and_none_is_a_hole_in_it(rig: Rig) -> None:
    rig.change(A, slot=SLOT, flags=CLOSED)
    fill(rig, [row(NET | CIDR_WORLD_BIT, PERMIT, 1), row(OTHER_NET | CIDR_WORLD_BIT, DENY, 2)])
    rig.cidr("0.0.0.0/0", NET)
    assert said(ask(rig, WORLD_4, udp(50000, 1))) == (True, 1)
    rig.cidr("198.51.100.0/25", OTHER_NET)
    assert said(ask(rig, WORLD_4, udp(50001, 1))) == (False, 2)
    rig.cidr("198.51.100.7/32", 0)
    assert said(ask(rig, WORLD_4, udp(50002, 1))) == (False, DEFAULT_OUT)


@pytest.mark.parametrize("direction", Direction)
def test_cidrs_are_asked_only_where_the_direction_has_such_rules(
    rig: Rig, direction: Direction
) -> None:
    rig.cidr("0.0.0.0/0", NET)
    fill(rig, [row(NET | CIDR_WORLD_BIT, PERMIT, 1, direction=one) for one in Direction])
    own = ConfigFlags.CIDR_EGRESS if direction == EGRESS else ConfigFlags.CIDR_INGRESS
    rig.change(A, slot=SLOT, flags=ALLOW | OUT | IN | own)
    assert said(ask(rig, WORLD_4, udp(50000, 1), direction))[0]
    rig.change(A, slot=SLOT, flags=ALLOW | OUT | IN | BY_CIDR & ~own, revision=2)
    assert not said(ask(rig, WORLD_4, udp(50000, 1), direction))[0]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([replace(PEER, flags=PolicyFlags.FINAL), deny(CIDR, 300)], (True, 1)),
        ([replace(CIDR, flags=PolicyFlags.FINAL), deny(EVERYBODY, 300)], (True, 2)),
        ([PEER, replace(deny(CIDR), flags=PolicyFlags.FINAL), high(EVERYBODY)], (False, 2)),
    ],
    ids=["peer", "cidr", "cidr that wins"],
)
def test_behind_a_final_row_nobody_is_asked(
    rig: Rig, rows: list[Row], wanted: tuple[bool, int]
) -> None:
    rig.change(A, slot=SLOT, flags=CLOSED)
    rig.cidr("0.0.0.0/0", NET)
    fill(rig, rows)
    assert said(ask(rig, WORLD_4, udp(50000, 1))) == wanted


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_what_no_row_covers_is_left_to_the_directions_default(
    rig: Rig, direction: Direction, closed: bool
) -> None:
    flag = OUT if direction == EGRESS else IN
    rig.change(A, slot=SLOT, flags=ALLOW | flag if closed else ALLOW | (OUT | IN) & ~flag)
    fill(rig, [row(WORLD, DENY, 1, direction=direction, protocol=6, port=22, bits=16)])
    default = DEFAULT_OUT if direction == EGRESS else DEFAULT_IN
    assert said(ask(rig, WORLD_4, tcp(50000, 80, SYN), direction)) == (not closed, default)
    assert said(ask(rig, WORLD_4, tcp(50000, 22, SYN), direction)) == (False, 1)


def test_slot_0_is_no_policy_whatever_stands_in_the_map(rig: Rig) -> None:
    rig.rule(0, PolicyKey(0, EGRESS), PolicyEntry(DENY, 9, 1))
    rig.change(A, flags=ALLOW | BY_CIDR)
    assert said(ask(rig, WORLD_4, udp(50000, 1))) == (True, DEFAULT_OUT)


def test_a_slot_is_read_by_its_own_number_alone(rig: Rig) -> None:
    fill(rig, [row(0, PERMIT, 1)], SLOT)
    fill(rig, [row(0, PERMIT, 2)], SLOT + (1 << 24))
    rig.change(A, slot=SLOT, flags=CLOSED)
    rig.change(B, slot=SLOT + (1 << 24), flags=CLOSED)
    assert said(ask(rig, WORLD_4, udp(50000, 1))) == (True, 1)
    assert said(ask(rig, WORLD_4, udp(50000, 1), endpoint=B)) == (True, 2)


@pytest.mark.parametrize("where", ["endpoint", "row"])
def test_audit_lets_a_rows_denial_pass_and_names_the_rule(rig: Rig, where: str) -> None:
    flags = PolicyFlags.AUDIT if where == "row" else 0
    fill(rig, [row(WORLD, DENY, 4, flags=flags, protocol=17), row(WORLD, PERMIT, 5)])
    audit = ConfigFlags.AUDIT if where == "endpoint" else ConfigFlags(0)
    rig.change(A, slot=SLOT, flags=CLOSED | audit)
    outcome = ask(rig, WORLD_4, udp(50000, 1))
    assert (said(outcome), outcome.decision.audited) == ((True, 4), 1)
    outcome = ask(rig, WORLD_4, tcp(50000, 1, SYN))
    assert (said(outcome), outcome.decision.audited) == ((True, 5), 0)


def test_the_host_may_come_in_before_any_row_is_asked(rig: Rig) -> None:
    fill(rig, [row(0, DENY, 1, direction=INGRESS), row(HOST, DENY, 2, direction=INGRESS)])
    packet = ipv4(NODE_4, A.ipv4, tcp(50000, 80, SYN))
    rig.change(A, slot=SLOT, flags=CLOSED)
    assert said(rig.received(A, packet)) == (True, 0)
    rig.change(A, slot=SLOT, flags=CLOSED & ~ConfigFlags.HOST_ALLOWED, revision=2)
    assert said(rig.received(A, packet)) == (False, 2)


def test_to_the_host_the_rows_are_asked_as_for_anybody(rig: Rig) -> None:
    rig.change(A, slot=SLOT, flags=CLOSED)
    assert not said(ask(rig, NODE_4, tcp(50000, 80, SYN)))[0]
    fill(rig, [row(HOST, PERMIT, 1)])
    assert said(ask(rig, NODE_4, tcp(50000, 80, SYN))) == (True, 1)


@pytest.mark.parametrize("version", [4, 6])
def test_a_pod_always_reaches_itself(rig: Rig, version: int) -> None:
    fill(rig, [row(0, DENY, 1, direction=direction) for direction in Direction])
    closed = rig.change(A, slot=SLOT, flags=CLOSED & ~ConfigFlags.HOST_ALLOWED)
    make = ipv4 if version == 4 else ipv6
    own = A.address(version)
    outcome = rig.sent(A, make(own, own, tcp(50000, 80, SYN)))
    assert outcome.action == Action.PEER
    identities = outcome.decision.source_identity, outcome.decision.destination_identity
    assert identities == (A.identity, A.identity)
    assert said(rig.sent(closed, make(own, own, tcp(80, 50000, SYN | ACK))))[0]


def test_a_pod_reaches_itself_through_the_hosts_translation_and_is_answered(rig: Rig) -> None:
    """As behind kube-proxy: it comes back from another address, through its own device."""
    fill(rig, [row(0, DENY, 1, direction=direction) for direction in Direction])
    rig.change(A, slot=SLOT, flags=CLOSED & ~ConfigFlags.HOST_ALLOWED)
    ask_self = ipv4(NODE_4, A.ipv4, tcp(50000, 80, SYN))
    answer = ipv4(A.ipv4, NODE_4, tcp(80, 50000, SYN | ACK))
    assert said(rig.received(A, ask_self, ingress_ifindex=A.ifindex))[0]
    assert said(rig.sent(A, answer))[0]
    rig.change(A, slot=SLOT, flags=CLOSED & ~ConfigFlags.HOST_ALLOWED, revision=2)
    assert said(rig.sent(A, answer))[0]
    assert not said(rig.received(A, ask_self, ingress_ifindex=B.ifindex))[0]
    assert not said(rig.sent(A, answer))[0]


def test_another_pod_of_the_same_identity_is_not_oneself(rig: Rig) -> None:
    rig.change(B, identity=A.identity)
    rig.change(A, slot=SLOT, flags=CLOSED)
    fill(rig, [row(A.identity, DENY, 1)])
    assert said(rig.sent(A, ipv4(A.ipv4, B.ipv4, udp(1, 2)))) == (False, 1)


# Random rows against a plain reading of them


@dataclass(frozen=True)
class Question:
    """A new flow."""

    direction: Direction
    peer: str
    identity: int
    protocol: int
    port: int


CIDRS: Final = {
    "0.0.0.0/0": NET,
    "198.51.100.0/24": NET + 1,
    "10.7.5.0/24": NET + 2,
    "2001:db8::/32": NET + 3,
}
OUTWARDS: Final = {
    WORLD_4: WORLD,
    "203.0.113.9": WORLD,
    WORLD_6: WORLD,
    REMOTE_POD_4: REMOTE_IDENTITY,
    REMOTE_POD_6: REMOTE_IDENTITY,
    NODE_4: HOST,
    "192.0.2.2": abi.Identity.REMOTE_NODE,
    "10.7.200.1": abi.Identity.UNMANAGED,
}
# Whoever is behind a node's address may have been masqueraded: inwards it counts as the world.
INWARDS: Final = {
    peer: WORLD if identity in (HOST, abi.Identity.REMOTE_NODE) else identity
    for peer, identity in OUTWARDS.items()
}
PORTS: Final = (0, 80, 81, 443, 8000, 0x0D00, 65535)
COMPARED_PROTOCOLS: Final = (frames.TCP, frames.UDP, frames.SCTP, 50)


@functools.cache
def cidr_of(peer: str) -> int:
    """Give the identity of the longest prefix around an address, 0 = none."""
    address = ipaddress.ip_address(peer)
    around = [one for one in map(ipaddress.ip_network, CIDRS) if address in one]
    return CIDRS[str(max(around, key=lambda one: one.prefixlen))] if around else 0


def covers(key: PolicyKey, identity: int, question: Question) -> bool:
    if (key.identity, key.direction) != (identity, question.direction):
        return False
    if not key.protocol:
        return True
    mask = 0xFFFF ^ 0xFFFF >> key.port_bits
    return key.protocol == question.protocol and key.port == question.port & mask


def evaluate(rows: Sequence[Row], question: Question, flags: ConfigFlags) -> tuple[bool, int]:
    """Read the rows as the rules of the look-up say, by going through all of them."""
    families = [question.identity]
    out = question.direction == EGRESS
    if flags & (ConfigFlags.CIDR_EGRESS if out else ConfigFlags.CIDR_INGRESS):
        local = cidr_of(question.peer)
        world = CIDR_WORLD_BIT if question.identity == WORLD else 0
        families += [local | world] if local else []
    found: list[tuple[int, bool, int, Row]] = []
    for place, identity in enumerate([*families, ANY_IDENTITY]):
        covering = [row for row in rows if covers(row.key, identity, question)]
        if covering:
            best = max(covering, key=lambda one: (one.key.protocol > 0, one.key.port_bits))
            denied = best.entry.verdict == DENY
            found.append((best.entry.precedence, denied, -place, best))
    if not found:
        closed = flags & (OUT if out else IN)
        return not closed, DEFAULT_OUT if out else DEFAULT_IN
    entry = max(found, key=lambda one: one[:3])[3].entry
    return entry.verdict == PERMIT, entry.rule


def draw_rows(chance: random.Random) -> list[Row]:
    local = [cidr | world for cidr in CIDRS.values() for world in (0, CIDR_WORLD_BIT)]
    identities = [ANY_IDENTITY, *sorted(set(OUTWARDS.values())), *local]
    rows: dict[PolicyKey, Row] = {}
    for rule in range(1, chance.randint(1, 25)):
        protocol = chance.choice((0, *COMPARED_PROTOCOLS))
        bits = chance.choice((0, 1, 8, 12, 15, 16)) if protocol else 0
        port = chance.choice(PORTS) & (0xFFFF ^ 0xFFFF >> bits)
        one = row(
            chance.choice(identities),
            chance.choice(list(Verdict)),
            rule,
            direction=chance.choice(list(Direction)),
            precedence=chance.choice((1, 2, 0x4000_0000)),
            protocol=protocol,
            port=port,
            bits=bits,
        )
        rows[one.key] = one
    return list(rows.values())


def draw_question(chance: random.Random) -> Question:
    direction = chance.choice(list(Direction))
    peers = OUTWARDS if direction == EGRESS else INWARDS
    peer, identity = chance.choice(list(peers.items()))
    protocol = chance.choice(COMPARED_PROTOCOLS)
    port = chance.choice(PORTS) if protocol in PROTOCOLS else 0
    return Question(direction, peer, identity, protocol, port)


def test_programs_agree_with_a_plain_reading_of_random_rows(
    rig: Rig, request: pytest.FixtureRequest
) -> None:
    seed = request.config.getoption("--seed")
    chance = random.Random(seed)
    # An emulated machine takes the first of those that this one takes.
    sets = 250 if "PODWIRE_GUEST" in os.environ else 1_000
    sets = 10_000 if request.config.getoption("--full") else sets
    rig.write_settings(quota=10_000)
    for network, identity in CIDRS.items():
        rig.cidr(network, identity)
    for number in range(1, sets + 1):
        rows = draw_rows(chance)
        flags = ALLOW | ConfigFlags(
            sum(flag for flag in (OUT, IN, *BY_CIDR) if chance.random() < 0.5)
        )
        fill(rig, rows, number)
        rig.change(A, slot=number, flags=flags, revision=number)
        for _ in range(4):
            question = draw_question(chance)
            segment = segment_of(question.protocol, question.port)
            if question.protocol not in PROTOCOLS:  # without ports both directions are one tuple
                rig.forget(A)
            outcome = ask(rig, question.peer, segment, question.direction)
            wanted = evaluate(rows, question, flags)
            assert said(outcome) == wanted, f"seed {seed}, set {number}: {question}\n{rows}"
