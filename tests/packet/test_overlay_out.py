"""What leaves for another node: by the tunnel, under the sender's identity, also where the stack sends it."""

from dataclasses import replace

import pytest

from podwire.datapath.abi import (
    Action,
    ConfigFlags,
    ConntrackFlags,
    DropReason,
    Hook,
    Identity,
    IpcacheFlags,
    Path,
)
from podwire.model.policy import Direction, PolicyEntry, PolicyKey, Verdict
from tests.packet import frames
from tests.packet.frames import ACK, SYN, Segment, check_frame, echo, ethernet, packet_of, tcp, udp
from tests.packet.overlay import (
    FAR,
    FAR_6,
    MTU,
    OLD,
    OWN_MAC,
    REMOTES,
    Remote,
    arrive,
    connect,
    enter,
    frame_of,
    packet,
    remove_node,
    remove_prefix,
    write_node,
    write_prefix,
    write_ways,
)
from tests.packet.rig import (
    ALLOW,
    GUARD,
    NODE_4,
    OUTSIDE,
    TUNNEL,
    TUNNEL_PORT,
    WORLD_4,
    WORLD_6,
    A,
    Rig,
)

pytestmark = pytest.mark.packet

TC_ACT_OK, TC_ACT_REDIRECT = 0, 7
NATIVE = IpcacheFlags.NATIVE
TRANSLATED = ConntrackFlags.TRANSLATED
BIG = bytes(1500)


@pytest.fixture(autouse=True)
def _connected(rig: Rig) -> None:
    connect(rig)


def to(remote: Remote, segment: Segment, version: int = 4, ttl: int = 64) -> bytes:
    """Make a packet from A to the known pod of a node."""
    return packet(A.address(version), remote.pod(version), segment, ttl)


def back(remote: Remote, segment: Segment, version: int = 4) -> bytes:
    """Make a packet from that pod to A."""
    return packet(remote.pod(version), A.address(version), segment)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("remote", REMOTES, ids=["flow-ipv4", "flow-ipv6", "classic"])
def test_a_remote_pod_gets_the_packet_through_the_tunnel(
    rig: Rig, remote: Remote, version: int
) -> None:
    rig.forget_metrics()
    outcome = rig.sent(A, to(remote, udp(4000, 53), version), mark=7)
    assert (outcome.action, outcome.path) == (Action.TUNNEL, Path.TUNNEL)
    assert (outcome.retval, outcome.mark) == (TC_ACT_REDIRECT, 0)
    decision = outcome.decision
    assert (decision.node, decision.destination_identity) == (remote.number, remote.identity)
    assert decision.tunnel_id == (1 if remote.classic else A.identity)
    sent_on = to(remote, udp(4000, 53), version, 63)
    assert outcome.data == frame_of(sent_on, source=A.host_mac, destination=remote.mac)
    assert not check_frame(outcome.data)
    _, entry = rig.entry(A)
    assert (entry.path, entry.node, entry.peer_identity) == (
        Path.TUNNEL,
        remote.number,
        remote.identity,
    )
    assert rig.metrics()[Hook.FROM_POD, DropReason.NONE, Path.TUNNEL][0] == 1


def test_a_pod_of_which_only_the_range_is_known_is_unmanaged(rig: Rig) -> None:
    outcome = rig.sent(A, packet(A.ipv4, FAR.stranger(4), udp(1, 2)))
    assert outcome.action == Action.TUNNEL
    assert outcome.decision.destination_identity == Identity.UNMANAGED


@pytest.mark.parametrize(
    ("identity", "told"),
    [(256, 256), (0xFFFFFF, 0xFFFFFF), (0x1000000, Identity.WORLD), (0xFFFFFFFE, Identity.WORLD)],
)
def test_a_number_that_only_this_node_knows_is_told_to_nobody(
    rig: Rig, identity: int, told: int
) -> None:
    rig.change(A, identity=identity)
    assert rig.sent(A, to(FAR, udp(1, 2))).decision.tunnel_id == told


@pytest.mark.parametrize("missing", ["device", "node", "way"])
def test_without_a_tunnel_the_stack_takes_it(rig: Rig, missing: str) -> None:
    if missing == "device":
        rig.write_settings()
    elif missing == "node":
        remove_node(rig, FAR)
    else:
        write_ways(rig, FAR, NATIVE)
    outcome = rig.sent(A, to(FAR, udp(1, 2)))
    assert (outcome.action, outcome.retval) == (Action.STACK, TC_ACT_OK)
    assert outcome.data == A.frame(to(FAR, udp(1, 2)))
    assert outcome.decision.tunnel_id == 0


def test_a_local_pod_is_local_whatever_the_ipcache_says(rig: Rig) -> None:
    write_prefix(rig, "10.7.0.11", 5, FAR.number, IpcacheFlags.TUNNEL, MTU)
    outcome = rig.sent(A, packet(A.ipv4, "10.7.0.11", udp(1, 2)))
    assert (outcome.action, outcome.path) == (Action.PEER, Path.LOCAL)


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("way", ["other-node", "native", "unknown"])
def test_an_answer_goes_to_the_node_that_the_question_came_from(
    rig: Rig, way: str, version: int
) -> None:
    rig.change(A, flags=ALLOW | ConfigFlags.DENY_EGRESS)
    arrive(rig, back(FAR, udp(4000, 53), version))
    if way == "other-node":
        write_prefix(rig, FAR.pod(version), 5, FAR_6.number, IpcacheFlags.TUNNEL, MTU)
    elif way == "native":
        write_ways(rig, FAR, NATIVE)
    else:
        for network in (FAR.block(version), FAR.pod(version)):
            remove_prefix(rig, network)
    outcome = rig.sent(A, to(FAR, udp(53, 4000), version))
    assert (outcome.action, outcome.decision.node) == (Action.TUNNEL, FAR.number)
    assert outcome.decision.destination_identity == FAR.identity


def test_an_answer_to_the_world_goes_to_the_node_that_let_it_in(rig: Rig) -> None:
    arrive(rig, packet(WORLD_4, A.ipv4, udp(4000, 53)), vni=Identity.WORLD)
    outcome = rig.sent(A, packet(A.ipv4, WORLD_4, udp(53, 4000)))
    assert (outcome.action, outcome.decision.node) == (Action.TUNNEL, FAR.number)


def test_an_answer_is_judged_for_whom_the_tunnel_named(rig: Rig) -> None:
    """The ipcache knows less: both ends of a judgement that it made would differ for ever."""
    flags = ALLOW | ConfigFlags.DENY_INGRESS | ConfigFlags.DENY_EGRESS
    rig.change(A, slot=1, flags=flags)
    key = PolicyKey(FAR.identity, Direction.INGRESS, frames.UDP, 53, 16)
    rig.rule(1, key, PolicyEntry(Verdict.ALLOW, 1, 41))
    source = FAR.stranger(4)
    assert arrive(rig, packet(source, A.ipv4, udp(4000, 53))).action == Action.PEER
    assert rig.sent(A, packet(A.ipv4, source, udp(53, 4000))).action == Action.TUNNEL
    assert arrive(rig, packet(source, A.ipv4, udp(4000, 53))).action == Action.PEER
    assert rig.hits() == {41: (1, 36)}


def test_an_answer_goes_through_the_stack_if_the_question_came_that_way(rig: Rig) -> None:
    rig.received(A, back(FAR, udp(4000, 53)), ingress_ifindex=OUTSIDE)
    outcome = rig.sent(A, to(FAR, udp(53, 4000)))
    assert (outcome.action, outcome.path) == (Action.STACK, Path.STACK)
    arrive(rig, back(FAR, udp(4000, 53)))
    assert rig.sent(A, to(FAR, udp(53, 4000))).action == Action.TUNNEL


def test_an_icmp_error_goes_to_the_node_of_its_flow(rig: Rig) -> None:
    rig.change(A, flags=ALLOW | ConfigFlags.DENY_EGRESS)
    came = back(FAR, udp(4000, 53))
    arrive(rig, came)
    remove_prefix(rig, FAR.pod(4))
    remove_prefix(rig, FAR.block(4))
    outcome = rig.sent(A, to(FAR, frames.icmp(3, 3, 0, came[:28])))
    assert (outcome.action, outcome.decision.node) == (Action.TUNNEL, FAR.number)


def test_tcp_in_mid_stream_without_memory_takes_the_stack_until_it_begins_anew(rig: Rig) -> None:
    for _ in range(2):
        outcome = rig.sent(A, to(FAR, tcp(4000, 80, ACK)))
        assert (outcome.action, outcome.path) == (Action.STACK, Path.STACK)
    assert rig.sent(A, to(FAR, tcp(4000, 80, SYN))).action == Action.TUNNEL
    assert rig.sent(A, to(FAR, tcp(4000, 80, ACK))).action == Action.TUNNEL


def test_a_connection_that_began_through_the_stack_stays_there(rig: Rig) -> None:
    rig.write_settings()
    assert rig.sent(A, to(FAR, tcp(4000, 80, SYN))).action == Action.STACK
    rig.write_settings(tunnel_ifindex=TUNNEL)
    assert rig.sent(A, to(FAR, tcp(4000, 80, ACK))).action == Action.STACK
    assert rig.sent(A, to(FAR, tcp(4001, 80, SYN))).action == Action.TUNNEL
    assert rig.sent(A, to(FAR, tcp(4000, 80, SYN))).action == Action.TUNNEL


def test_a_connection_that_began_through_the_tunnel_stays_there(rig: Rig) -> None:
    assert rig.sent(A, to(FAR, tcp(4000, 80, SYN))).action == Action.TUNNEL
    write_ways(rig, FAR, NATIVE)
    outcome = rig.sent(A, to(FAR, tcp(4000, 80, ACK)))
    assert (outcome.action, outcome.decision.node) == (Action.TUNNEL, FAR.number)
    assert rig.sent(A, to(FAR, tcp(4000, 80, SYN))).action == Action.STACK


def test_datagrams_follow_the_way_that_is_known_now(rig: Rig) -> None:
    assert rig.sent(A, to(FAR, udp(4000, 53))).decision.node == FAR.number
    write_ways(rig, replace(FAR, number=FAR_6.number))
    for version in (4, 6):
        fields = FAR_6.number, IpcacheFlags.TUNNEL, MTU
        write_prefix(rig, FAR.pod(version), FAR.identity, *fields)
    assert rig.sent(A, to(FAR, udp(4000, 53))).decision.node == FAR_6.number
    _, entry = rig.entry(A)
    assert entry.node == FAR_6.number


@pytest.mark.parametrize("version", [4, 6])
def test_what_does_not_fit_is_told_to_the_sender(rig: Rig, version: int) -> None:
    outcome = rig.sent(A, to(FAR, udp(1, 2, BIG[: MTU - 20 * (version == 6) - 27]), version))
    assert (outcome.action, outcome.reason) == (Action.ANSWER, DropReason.MTU)
    at = (20 if version == 4 else 40) + 4
    assert int.from_bytes(packet_of(outcome.data)[at : at + 4][-2:], "big") == MTU
    fits = udp(1, 2, BIG[: MTU - 20 * (version == 6) - 28])
    assert rig.sent(A, to(FAR, fits, version)).action == Action.TUNNEL


def test_an_answer_that_does_not_fit_is_measured_by_its_node(rig: Rig) -> None:
    write_node(rig, replace(FAR, mtu=1300))
    arrive(rig, back(FAR, udp(4000, 53)))
    assert rig.sent(A, to(FAR, udp(53, 4000, BIG[:1280]))).reason == DropReason.MTU
    assert rig.sent(A, to(FAR, udp(53, 4000, BIG[:1272]))).action == Action.TUNNEL


def test_what_may_be_cut_is_cut_by_the_stack(rig: Rig) -> None:
    big = frames.ipv4(A.ipv4, FAR.pod(4), udp(1, 2, BIG[:1440]), fragment=0)
    assert rig.sent(A, big).action == Action.STACK


@pytest.mark.parametrize(("payload", "action"), [(1398, Action.TUNNEL), (1399, Action.ANSWER)])
def test_segments_are_measured_after_they_are_cut(rig: Rig, payload: int, action: Action) -> None:
    segment = tcp(4000, 80, SYN, BIG + BIG, b"\1\1\x08\x0a" + bytes(8))
    outcome = rig.sent(A, to(FAR, segment), gso_size=payload, gso_segs=2)
    assert outcome.action == action


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("ttl", [0, 1])
def test_a_packet_at_its_last_hop_goes_no_further(rig: Rig, ttl: int, version: int) -> None:
    outcome = rig.sent(A, to(FAR, udp(1, 2), version, ttl))
    assert (outcome.action, outcome.reason) == (Action.ANSWER, DropReason.TTL)
    assert packet_of(outcome.data)[20 if version == 4 else 40] == (11 if version == 4 else 3)


def test_the_tunnels_port_is_shut_for_pods_on_every_way(rig: Rig) -> None:
    for destination in (FAR.pod(4), FAR.address(4), FAR.outer, NODE_4):
        outcome = rig.sent(A, packet(A.ipv4, destination, udp(4000, TUNNEL_PORT)))
        assert outcome.reason == DropReason.TUNNEL_PORT


def test_a_denied_peer_is_not_sent_anything(rig: Rig) -> None:
    rig.change(A, flags=ALLOW | ConfigFlags.DENY_EGRESS)
    outcome = rig.sent(A, to(FAR, udp(1, 2)))
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.POLICY)


# What the stack sends.


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("remote", REMOTES, ids=["flow-ipv4", "flow-ipv6", "classic"])
@pytest.mark.parametrize(
    ("ingress_ifindex", "told"),
    [
        (0, Identity.REMOTE_NODE),
        (A.ifindex, A.identity),
        (OUTSIDE, Identity.WORLD),
        (GUARD.ifindex, Identity.WORLD),
        (TUNNEL, Identity.WORLD),
    ],
    ids=["process", "pod", "foreign-device", "guarded-pod", "tunnel"],
)
def test_the_other_node_is_told_who_sent_what_the_stack_sends(
    rig: Rig, ingress_ifindex: int, told: int, remote: Remote, version: int
) -> None:
    inner = packet("10.7.0.1" if version == 4 else "fd07::1", remote.pod(version), udp(1, 2))
    outcome = enter(rig, inner, ingress_ifindex=ingress_ifindex)
    assert (outcome.action, outcome.retval) == (Action.STACK, TC_ACT_OK)
    assert (outcome.path, outcome.decision.node) == (Path.TUNNEL, remote.number)
    assert outcome.decision.tunnel_id == (1 if remote.classic else told)
    assert outcome.data == frame_of(inner, source=OWN_MAC, destination=remote.mac)


@pytest.mark.parametrize("version", [4, 6])
def test_masqueraded_packets_of_a_pod_are_that_pods(rig: Rig, version: int) -> None:
    source = "192.0.2.1" if version == 4 else "2001:db8:1::1"
    outcome = enter(rig, packet(source, FAR.pod(version), udp(1, 2)), ingress_ifindex=A.ifindex)
    assert outcome.decision.tunnel_id == A.identity


@pytest.mark.parametrize(
    "destination",
    [WORLD_4, WORLD_6, A.ipv4, "10.7.99.1", "10.7.6.6", NODE_4, FAR.outer],
    ids=["world", "world-6", "local-pod", "unclaimed", "stack-only", "own-address", "outside"],
)
def test_what_no_node_has_goes_nowhere(rig: Rig, destination: str) -> None:
    source = "fd07::1" if ":" in destination else "10.7.0.1"
    outcome = enter(rig, packet(source, destination, udp(1, 2)))
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.NO_NODE)
    [event] = rig.take_events()
    assert (event.reason, event.instance) == (DropReason.NO_NODE, 0)


def test_a_node_that_is_just_leaving_gets_nothing(rig: Rig) -> None:
    remove_node(rig, OLD)
    assert enter(rig, packet("10.7.0.1", OLD.pod(4), udp(1, 2))).reason == DropReason.NO_NODE


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (packet("10.7.0.1", "224.0.0.251", udp(5353, 5353)), DropReason.QUIET),
        (packet("fd07::1", "ff02::16", echo(6, 1)), DropReason.QUIET),
        (packet("10.7.0.1", "10.7.21.5", udp(1, 2))[:20], DropReason.TRUNCATED),
    ],
    ids=["mdns", "all-routers", "cut"],
)
def test_chatter_of_the_device_stays_here(rig: Rig, inner: bytes, reason: DropReason) -> None:
    assert enter(rig, inner).reason == reason


@pytest.mark.parametrize(
    ("ethertype", "reason"),
    [(frames.ETH_P_ARP, DropReason.ARP), (0x88CC, DropReason.ETHERTYPE)],
)
def test_only_ip_enters_the_tunnel(rig: Rig, ethertype: int, reason: DropReason) -> None:
    frame = ethernet(frames.BROADCAST, OWN_MAC, ethertype, bytes(46))
    assert rig.run("to_overlay", TUNNEL, frame).reason == reason


VIP = {4: "10.96.0.1", 6: "fd96::1"}


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("name", ["tcp", "udp"])
def test_the_answer_to_what_the_stack_translated_goes_back_through_it(
    rig: Rig, name: str, version: int
) -> None:
    ask, answer = {
        "tcp": (tcp(4000, 80, SYN), tcp(80, 4000, SYN | ACK)),
        "udp": (udp(4000, 80), udp(80, 4000)),
    }[name]
    rig.change(A, flags=ALLOW | ConfigFlags.DENY_INGRESS)
    own, vip = A.address(version), VIP[version]
    assert rig.sent(A, packet(own, vip, ask)).action == Action.STACK
    enter(rig, to(FAR, ask, version), ingress_ifindex=A.ifindex)
    translated = arrive(rig, back(FAR, answer, version))
    assert (translated.action, translated.path) == (Action.STACK, Path.STACK)
    restored = rig.received(A, packet(vip, own, answer), ingress_ifindex=TUNNEL)
    assert restored.action == Action.STACK
    [memory] = [entry for entry in rig.entries(A).values() if entry.flags & TRANSLATED]
    assert (memory.packets, memory.path) == ((1, 1), Path.STACK)


def test_a_translation_that_is_remembered_allows_nothing(rig: Rig) -> None:
    enter(rig, to(FAR, udp(4000, 53)), ingress_ifindex=A.ifindex)
    rig.change(A, flags=ALLOW | ConfigFlags.DENY_INGRESS | ConfigFlags.DENY_EGRESS)
    answer = rig.received(A, back(FAR, udp(53, 4000)), ingress_ifindex=TUNNEL)
    assert answer.reason == DropReason.POLICY
    assert rig.sent(A, to(FAR, udp(4000, 53))).reason == DropReason.POLICY


def test_only_what_was_translated_is_remembered_so(rig: Rig) -> None:
    rig.sent(A, to(FAR, tcp(4000, 80, ACK)))  # in mid-stream: by the stack, as it is
    enter(rig, to(FAR, tcp(4000, 80, ACK)), ingress_ifindex=A.ifindex)
    rig.received(A, back(FAR, udp(4000, 53)), ingress_ifindex=OUTSIDE)
    enter(rig, to(FAR, udp(53, 4000)), ingress_ifindex=A.ifindex)
    assert len(rig.entries()) == 2
    masqueraded = packet(NODE_4, FAR.pod(4), udp(1, 2))
    enter(rig, masqueraded, ingress_ifindex=A.ifindex)
    enter(rig, to(FAR, udp(1, 2)), ingress_ifindex=OUTSIDE)
    enter(rig, to(FAR, udp(1, 2)))
    assert len(rig.entries()) == 2
    assert not any(entry.flags & TRANSLATED for entry in rig.entries().values())
