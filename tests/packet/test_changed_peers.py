"""A peer becomes somebody else while only one side speaks: each packet of that side is judged anew, too."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from podwire.datapath.abi import Action, ConfigFlags, DropReason, Identity, IpcacheFlags
from podwire.model.policy import Direction, PolicyEntry, PolicyKey, Verdict
from tests.packet import frames, netdev, overlay
from tests.packet.frames import Segment, ipv4, ipv6, udp
from tests.packet.netdev import DIRECT, TC_ACT_UNSPEC
from tests.packet.overlay import FAR, MTU, TUNNELLED, Remote, write_node, write_prefix
from tests.packet.rig import ALLOW, NODE_4, NODE_6, OUTSIDE, TUNNEL, A, B, Outcome, Rig

pytestmark = [pytest.mark.packet, pytest.mark.parametrize("version", [4, 6])]

CLOSED = ALLOW | ConfigFlags.DENY_EGRESS | ConfigFlags.DENY_INGRESS
SLOT = 9
BEFORE, ALSO, STRANGER = 71001, 71002, 71003
"""Who the peer is, another one who may talk with A, and one who may not."""
NEAR = Remote(24, "192.0.2.24", BEFORE)
SERVICE = {4: "10.96.0.1", 6: "fd96::1"}
PASSED = (Action.STACK, Action.PEER, Action.TUNNEL, Action.NATIVE)


def packet(source: str, destination: str, segment: Segment) -> bytes:
    build = ipv6 if ":" in source else ipv4
    return build(source, destination, segment)


@dataclass(frozen=True)
class Peer:
    """A pod that A talks with: its address, what the node knows of its identity, and how its packets come."""

    name: str
    address: Callable[[int], str]
    become: Callable[[Rig, int], None]
    send: Callable[[Rig, bytes, int], Outcome]


def local(rig: Rig, identity: int) -> None:
    rig.change(B, identity=identity)


def published(remote: Remote, flags: IpcacheFlags, mtu: int) -> Callable[[Rig, int], None]:
    def become(rig: Rig, identity: int) -> None:
        for version in (4, 6):
            write_prefix(rig, remote.pod(version), identity, remote.number, flags, mtu)

    return become


def natively(rig: Rig, inner: bytes, _identity: int) -> Outcome:
    outcome = netdev.arrive(rig, inner)
    if outcome.retval != TC_ACT_UNSPEC:
        return outcome
    return by_stack(OUTSIDE)(rig, inner, 0)


def by_stack(ifindex: int) -> Callable[[Rig, bytes, int], Outcome]:
    return lambda rig, inner, _identity: rig.received(A, inner, ingress_ifindex=ifindex)


PEERS = [
    Peer("local", B.address, local, lambda rig, inner, _: rig.sent(B, inner)),
    Peer("local-by-the-stack", B.address, local, by_stack(B.ifindex)),
    Peer(
        "by-the-tunnel",
        FAR.pod,
        published(FAR, TUNNELLED, MTU),
        lambda rig, inner, identity: overlay.arrive(rig, inner, vni=identity),
    ),
    Peer("natively", NEAR.pod, published(NEAR, DIRECT, netdev.MTU), natively),
    Peer(
        "natively-by-the-stack",
        NEAR.pod,
        published(NEAR, IpcacheFlags.NATIVE, netdev.MTU),
        by_stack(OUTSIDE),
    ),
]
peers = pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
speakers = pytest.mark.parametrize("a_speaks", [True, False], ids=["a-speaks", "the-peer-speaks"])
openers = pytest.mark.parametrize("a_asks", [True, False], ids=["a-asked", "the-peer-asked"])


@pytest.fixture(autouse=True)
def closed(rig: Rig) -> None:
    """A talks with two identities and nobody else."""
    overlay.connect(rig)
    write_node(rig, NEAR)
    rig.write_settings(tunnel_ifindex=TUNNEL, native_ifindex=OUTSIDE)
    rig.change(A, slot=SLOT, flags=CLOSED)
    for direction in Direction:
        for identity in (BEFORE, ALSO):
            key = PolicyKey(identity, direction, frames.UDP, 53, 16)
            rig.rule(SLOT, key, PolicyEntry(Verdict.ALLOW, 1, 7))


def start(rig: Rig, peer: Peer, version: int, *, a_asks: bool) -> tuple[bytes, bytes]:
    """Let one ask and the other answer; give what A sends, and what the peer sends."""
    peer.become(rig, BEFORE)
    ends = A.address(version), peer.address(version)
    ports = (4000, 53) if a_asks else (53, 4000)
    out, into = packet(*ends, udp(*ports)), packet(*ends[::-1], udp(*ports[::-1]))

    def send(a_speaks: bool) -> Outcome:
        return rig.sent(A, out) if a_speaks else peer.send(rig, into, BEFORE)

    for a_speaks in (a_asks, not a_asks):
        assert send(a_speaks).action in PASSED
    return out, into


@peers
@openers
@speakers
def test_who_becomes_a_stranger_gets_and_says_nothing_more(
    rig: Rig, version: int, peer: Peer, a_asks: bool, a_speaks: bool
) -> None:
    out, into = start(rig, peer, version, a_asks=a_asks)

    def speak(identity: int) -> Outcome:
        return rig.sent(A, out) if a_speaks else peer.send(rig, into, identity)

    peer.become(rig, STRANGER)
    for _ in range(2):
        assert speak(STRANGER).reason == DropReason.POLICY
    peer.become(rig, ALSO)
    for _ in range(2):
        assert speak(ALSO).action in PASSED


@pytest.mark.parametrize("name", ["by-the-tunnel"])
@openers
def test_who_is_not_yet_published_is_who_his_node_says(
    rig: Rig, version: int, name: str, a_asks: bool
) -> None:
    """An agent hears of a new pod a moment after the pod may speak."""
    [peer] = [one for one in PEERS if one.name == name]
    out, into = start(rig, peer, version, a_asks=a_asks)
    for identity in (Identity.UNMANAGED, BEFORE):
        peer.become(rig, identity)
        assert peer.send(rig, into, BEFORE).action in PASSED
        if not a_asks:
            assert rig.sent(A, out).action in PASSED


@pytest.mark.parametrize("a_speaks", [True, False], ids=["a-answers", "the-service-answers"])
def test_behind_another_address_the_peer_stays_who_he_was(
    rig: Rig, version: int, a_speaks: bool
) -> None:
    """B is masqueraded as the node, or answers as a service: the address says nothing of it."""
    local(rig, BEFORE)
    if a_speaks:
        address = NODE_4 if version == 4 else NODE_6
        came = packet(address, A.address(version), udp(4000, 53))
        assert rig.received(A, came, ingress_ifindex=B.ifindex).action == Action.STACK
        answer = packet(A.address(version), address, udp(53, 4000))
        assert rig.sent(A, answer).action == Action.STACK
        return
    rig.change(A, slot=SLOT, flags=CLOSED & ~ConfigFlags.DENY_EGRESS)
    ends = A.address(version), SERVICE[version]
    assert rig.sent(A, packet(*ends, udp(4000, 53))).action == Action.STACK
    answer = packet(*ends[::-1], udp(53, 4000))
    assert rig.received(A, answer, ingress_ifindex=B.ifindex).action == Action.STACK


def test_a_node_that_asked_is_answered(rig: Rig, version: int) -> None:
    """Its address stands for whoever is behind it: the tunnel tells who asked."""
    came = packet(FAR.address(version), A.address(version), udp(4000, 53))
    assert overlay.arrive(rig, came, vni=BEFORE).action == Action.PEER
    answer = packet(A.address(version), FAR.address(version), udp(53, 4000))
    assert rig.sent(A, answer).action == Action.TUNNEL


def test_a_pod_behind_a_nodes_port_answers_as_that_node(rig: Rig, version: int) -> None:
    """A asked the other node, which handed the question to a pod of its own; the tunnel names that pod."""
    write = PolicyKey(Identity.REMOTE_NODE, Direction.EGRESS, frames.UDP, 53, 16)
    rig.rule(SLOT, write, PolicyEntry(Verdict.ALLOW, 1, 7))
    ends = A.address(version), FAR.address(version)
    assert rig.sent(A, packet(*ends, udp(4000, 53))).action == Action.TUNNEL
    answer = packet(*ends[::-1], udp(53, 4000))
    for _ in range(2):
        assert overlay.arrive(rig, answer, vni=STRANGER).action == Action.PEER
