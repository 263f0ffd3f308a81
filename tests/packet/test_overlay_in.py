"""What comes out of the tunnel is delivered to local pods or handed to this host, and never sent on."""

from collections import Counter

import pytest

from podwire.datapath.abi import (
    MARK_JUDGED,
    Action,
    ConfigFlags,
    Direction,
    DropReason,
    Hook,
    Identity,
    Path,
)
from tests.packet import frames
from tests.packet.frames import (
    ACK,
    FRAGMENT,
    MORE_FRAGMENTS,
    SYN,
    check_frame,
    echo,
    ethernet,
    fragment_header,
    icmp,
    icmpv6,
    ipv4,
    ipv6,
    raw,
    tcp,
    udp,
    vlan,
)
from tests.packet.overlay import (
    FAR,
    FAR_6,
    OWN_MAC,
    Remote,
    allow,
    arrive,
    arrive_frame,
    connect,
    frame_of,
    packet,
    to,
    write_node,
)
from tests.packet.rig import (
    ALLOW,
    GUARD,
    NOBODY_4,
    NOBODY_6,
    NODE_4,
    NODE_6,
    OUTSIDE,
    SHAPED,
    TUNNEL,
    TUNNEL_PORT,
    WORLD_4,
    WORLD_6,
    A,
    B,
    Endpoint,
    Rig,
)

pytestmark = pytest.mark.packet

TC_ACT_OK, TC_ACT_REDIRECT = 0, 7
IN, OUT = ConfigFlags.DENY_INGRESS, ConfigFlags.DENY_EGRESS


@pytest.fixture(autouse=True)
def _connected(rig: Rig) -> None:
    connect(rig)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("remote", [FAR, FAR_6], ids=["outer-ipv4", "outer-ipv6"])
def test_a_local_pod_gets_what_a_remote_one_sends(rig: Rig, remote: Remote, version: int) -> None:
    rig.forget_metrics()
    inner = to(A, udp(4000, 53), version, remote=remote)
    outcome = arrive(rig, inner, vni=remote.identity, outer=remote.outer, mark=7)
    assert (outcome.action, outcome.path) == (Action.PEER, Path.TUNNEL)
    assert (outcome.retval, outcome.mark) == (TC_ACT_REDIRECT, 0)
    decision = outcome.decision
    assert (decision.target_ifindex, decision.instance) == (A.ifindex, A.instance)
    assert (decision.source_identity, decision.destination_identity) == (
        remote.identity,
        A.identity,
    )
    one_hop_on = packet(remote.pod(version), A.address(version), udp(4000, 53), 63)
    assert outcome.data == A.frame_in(one_hop_on)
    assert not check_frame(outcome.data)
    key, entry = rig.entry(A)
    assert key.direction == Direction.INGRESS
    assert (entry.path, entry.node) == (Path.TUNNEL, remote.number)
    assert entry.peer_identity == remote.identity
    assert rig.metrics()[Hook.FROM_OVERLAY, DropReason.NONE, Path.TUNNEL][0] == 1


def test_any_of_a_nodes_addresses_is_that_node(rig: Rig) -> None:
    write_node(rig, FAR, outers=(FAR.outer, "2001:db8:1::21"))
    outcome = arrive(rig, to(A, udp(1, 2)), outer="2001:db8:1::21")
    assert (outcome.action, outcome.decision.node) == (Action.PEER, FAR.number)


# To whom.


@pytest.mark.parametrize(
    ("destination", "reason"),
    [
        *((one, DropReason.NO_POD) for one in (FAR_6.pod(4), FAR.pod(4), NOBODY_4, NOBODY_6)),
        *((one, DropReason.NO_POD) for one in (WORLD_4, WORLD_6, "10.7.99.1", FAR_6.outer)),
        *((one, DropReason.NO_POD) for one in ("192.0.2.2", "127.0.0.1", "::1", "169.254.1.1")),
        *((one, DropReason.QUIET) for one in ("224.0.0.251", "255.255.255.255", "ff02::1")),
        (GUARD.ipv4, DropReason.NO_ENDPOINT),
    ],
)
def test_nothing_is_sent_on(rig: Rig, destination: str, reason: DropReason) -> None:
    source = FAR.pod(6 if ":" in destination else 4)
    outcome = arrive(rig, packet(source, destination, udp(1, 2)))
    assert (outcome.action, outcome.reason) == (Action.DROP, reason)


@pytest.mark.parametrize("vni", [Identity.REMOTE_NODE, Identity.WORLD, FAR.identity])
@pytest.mark.parametrize("version", [4, 6])
def test_what_is_for_this_host_goes_to_its_stack(rig: Rig, version: int, vni: int) -> None:
    inner = packet(FAR.address(version), NODE_4 if version == 4 else NODE_6, tcp(1, 2, ACK))
    outcome = arrive(rig, inner, vni=vni, mark=MARK_JUDGED)
    assert (outcome.action, outcome.retval) == (Action.STACK, TC_ACT_OK)
    assert (outcome.path, outcome.mark) == (Path.STACK, 0)
    assert outcome.decision.destination_identity == Identity.HOST
    assert outcome.data == frame_of(inner)
    assert not rig.entries()


def test_a_tunnel_inside_of_the_tunnel_is_refused(rig: Rig) -> None:
    inner = packet(FAR.address(4), NODE_4, udp(4000, TUNNEL_PORT))
    assert arrive(rig, inner, vni=Identity.WORLD).reason == DropReason.TUNNEL_PORT


@pytest.mark.parametrize("version", [4, 6])
def test_a_pod_with_a_rate_is_reached_through_its_queue(rig: Rig, version: int) -> None:
    outcome = arrive(rig, to(SHAPED, udp(1, 2), version))
    assert (outcome.action, outcome.retval) == (Action.EGRESS, TC_ACT_REDIRECT)
    assert (outcome.decision.target_ifindex, outcome.mark) == (SHAPED.ifindex, MARK_JUDGED)
    rig.change(SHAPED, flags=SHAPED.flags | IN, revision=2)
    judged = packet(FAR.pod(version), SHAPED.address(version), udp(1, 2), 63)
    passed = rig.received(SHAPED, judged, mark=MARK_JUDGED, ingress_ifindex=TUNNEL)
    assert (passed.action, passed.mark) == (Action.STACK, 0)
    rig.write_settings()
    refused = rig.received(SHAPED, judged, mark=MARK_JUDGED, ingress_ifindex=TUNNEL)
    assert refused.reason == DropReason.POLICY


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("ttl", [0, 1])
def test_a_packet_at_its_last_hop_goes_no_further(rig: Rig, ttl: int, version: int) -> None:
    inner = packet(FAR.pod(version), A.address(version), udp(1, 2), ttl)
    outcome = arrive(rig, inner)
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.TTL)


# Flows.


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("name", ["tcp", "udp", "echo"])
def test_an_answer_comes_in_where_nothing_else_may(rig: Rig, name: str, version: int) -> None:
    ask, answer = {
        "tcp": (tcp(4000, 80, SYN), tcp(80, 4000, SYN | ACK)),
        "udp": (udp(4000, 53), udp(53, 4000)),
        "echo": (echo(version, 5), echo(version, 5, reply=True)),
    }[name]
    rig.change(A, flags=ALLOW | IN)
    if name != "tcp":  # which may be the answer of a flow that was forgotten
        assert arrive(rig, to(A, answer, version)).reason == DropReason.POLICY
    rig.sent(A, packet(A.address(version), FAR.pod(version), ask))
    # the ipcache's word for the peer may be older than the peer's own
    outcome = arrive(rig, to(A, answer, version), vni=80000)
    assert (outcome.action, outcome.path) == (Action.PEER, Path.TUNNEL)
    _, entry = rig.entry(A)
    assert (entry.packets, entry.peer_identity) == ((1, 1), FAR.identity)


def test_an_answer_from_who_may_not_be_talked_to_any_more_is_refused(rig: Rig) -> None:
    rig.sent(A, packet(A.ipv4, FAR.pod(4), udp(4000, 53)))
    assert arrive(rig, to(A, udp(53, 4000))).action == Action.PEER
    rig.change(A, flags=ALLOW | OUT, revision=2)
    assert arrive(rig, to(A, udp(53, 4000))).reason == DropReason.POLICY


@pytest.mark.parametrize("version", [4, 6])
def test_the_answer_to_what_went_through_the_stack_goes_back_through_it(
    rig: Rig, version: int
) -> None:
    rig.write_settings()
    rig.sent(A, packet(A.address(version), FAR.pod(version), udp(4000, 53)))
    rig.write_settings(tunnel_ifindex=TUNNEL)
    answer = to(A, udp(53, 4000), version)
    outcome = arrive(rig, answer, mark=MARK_JUDGED)
    assert (outcome.action, outcome.path, outcome.mark) == (Action.STACK, Path.STACK, 0)
    assert outcome.data == frame_of(answer)
    assert rig.received(A, answer, ingress_ifindex=TUNNEL).action == Action.STACK


@pytest.mark.parametrize("version", [4, 6])
def test_tcp_in_mid_stream_is_delivered_without_the_stack(rig: Rig, version: int) -> None:
    rig.change(A, flags=ALLOW | IN)
    outcome = arrive(rig, to(A, tcp(80, 4000, ACK), version))
    assert (outcome.action, outcome.path) == (Action.PEER, Path.TUNNEL)
    assert not rig.entries(A)
    rig.change(A, flags=ALLOW | IN | OUT, revision=2)
    assert arrive(rig, to(A, tcp(80, 4001, ACK), version)).reason == DropReason.POLICY


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("reporter", ["pod", "node", "world"])
def test_an_icmp_error_comes_in_with_its_flow(rig: Rig, reporter: str, version: int) -> None:
    rig.change(A, flags=ALLOW | IN)
    sent = packet(A.address(version), FAR.pod(version), udp(4000, 53))
    error = icmp(3, 3, 0, sent[:28]) if version == 4 else icmpv6(1, 4, 0, sent[:80])
    source, vni = {
        "pod": (FAR.pod(version), FAR.identity),
        "node": (FAR.address(version), int(Identity.REMOTE_NODE)),
        "world": (WORLD_4 if version == 4 else WORLD_6, int(Identity.WORLD)),
    }[reporter]
    inner = packet(source, A.address(version), error)
    assert arrive(rig, inner, vni=vni).reason == DropReason.POLICY
    rig.sent(A, sent)
    outcome = arrive(rig, inner, vni=vni)
    assert (outcome.action, outcome.path) == (Action.PEER, Path.TUNNEL)


WHOLE = udp(4000, 53, bytes(800))
CUT = 400


def piece(version: int, *, last: bool, target: Endpoint = A, remote: Remote = FAR) -> bytes:
    data = WHOLE.data[CUT:] if last else WHOLE.data[:CUT]
    ends = remote.pod(version), target.address(version)
    if version == 4:
        field = CUT // 8 if last else MORE_FRAGMENTS
        return ipv4(*ends, raw(frames.UDP, data), fragment=field)
    header = (FRAGMENT, fragment_header(CUT if last else 0, more=not last))
    return ipv6(*ends, raw(frames.UDP, data), extensions=[header])


@pytest.mark.parametrize("version", [4, 6])
def test_fragments_pass_behind_their_first_one(rig: Rig, version: int) -> None:
    allow(rig, FAR.identity)
    assert arrive(rig, piece(version, last=True)).reason == DropReason.FRAGMENT
    for last in (False, True):
        assert arrive(rig, piece(version, last=last)).action == Action.PEER
    _, entry = rig.entry(A)
    assert entry.packets == (2, 0)


@pytest.mark.parametrize("version", [4, 6])
def test_a_forged_first_fragment_opens_nothing(rig: Rig, version: int) -> None:
    forged = arrive(rig, piece(version, last=False), vni=FAR_6.identity, outer=FAR_6.outer)
    assert forged.reason == DropReason.TUNNEL_INNER
    assert arrive(rig, piece(version, last=True)).reason == DropReason.FRAGMENT
    arrive(rig, piece(version, last=False, target=B))
    assert arrive(rig, piece(version, last=True)).reason == DropReason.FRAGMENT


# Frames.


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (ethernet(frames.BROADCAST, FAR.mac, frames.ETH_P_ARP, bytes(46)), DropReason.ARP),
        (ethernet(OWN_MAC, FAR.mac, 0x88CC, bytes(46)), DropReason.ETHERTYPE),
        (vlan(frame_of(to(A, udp(1, 2))), 7), DropReason.ETHERTYPE),
        (frame_of(b"\x55" + to(A, udp(1, 2))[1:]), DropReason.HEADER),
    ],
    ids=["arp", "lldp", "vlan", "version"],
)
def test_only_ip_comes_out_of_the_tunnel(rig: Rig, frame: bytes, reason: DropReason) -> None:
    assert arrive_frame(rig, frame, vni=FAR.identity, outer=FAR.outer).reason == reason


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("name", ["tcp", "echo", "fragment"])
def test_no_packet_that_ends_too_early_is_delivered(rig: Rig, name: str, version: int) -> None:
    whole = {
        "tcp": to(A, tcp(4000, 80, SYN, b"", bytes(8)), version),
        "echo": to(A, echo(version, 7), version),
        "fragment": piece(version, last=False),
    }[name]
    frame = frame_of(whole)
    for length in range(34 if version == 4 else 54, len(frame)):  # test runs take no less
        outcome = arrive_frame(rig, frame[:length], vni=FAR.identity, outer=FAR.outer)
        assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.TRUNCATED), length
    assert not rig.entries()


def test_a_pods_neighbours_are_not_on_other_nodes(rig: Rig) -> None:
    inner = ipv6(FAR.pod(6), A.ipv6, frames.neighbour(135, A.ipv6), hop_limit=255)
    assert arrive(rig, inner).reason == DropReason.NEIGHBOUR


# What is told.


def test_a_flood_of_forged_packets_is_counted_and_told_in_measure(rig: Rig) -> None:
    rig.forget_metrics()
    told: Counter[int] = Counter()
    sent = 0
    # Until the machine let enough of them through within one second.
    while max(told.values(), default=0) < 200 and sent < 10_000:
        for _ in range(500):
            arrive(rig, to(A, udp(1, 2)), outer=WORLD_4)
        sent += 500
        told.update(event.time_ns // 10**9 for event in rig.take_events())
    reason = DropReason.TUNNEL_SOURCE
    assert rig.metrics()[Hook.FROM_OVERLAY, reason, Path.NONE][0] == sent
    assert max(told.values()) == 200
    assert rig.sent(A, packet(A.ipv4, FAR.pod(4), udp(1, TUNNEL_PORT))).action == Action.DROP
    assert len(rig.take_events()) == 1


def test_a_denied_packet_is_told_of_its_endpoint(rig: Rig) -> None:
    rig.change(A, flags=ALLOW | IN)
    arrive(rig, to(A, udp(4000, 53)))
    [event] = rig.take_events()
    assert (event.hook, event.reason) == (Hook.FROM_OVERLAY, DropReason.POLICY)
    assert (event.instance, event.direction) == (A.instance, Direction.INGRESS)
    assert (event.source_identity, event.destination_identity) == (FAR.identity, A.identity)


def test_the_same_pod_by_stack_and_by_tunnel_is_one_flow(rig: Rig) -> None:
    arrive(rig, to(A, udp(4000, 53)))
    rig.received(A, to(A, udp(4000, 53)), ingress_ifindex=OUTSIDE)
    _, entry = rig.entry(A)
    assert (entry.packets, entry.path) == ((2, 0), Path.STACK)
