"""The tunnel trusts no one: who may send, as whom, and in whose name."""

import ipaddress
import time

import pytest

from podwire.datapath.abi import (
    Action,
    ConfigFlags,
    DropReason,
    EndpointValue,
    EventKind,
    Identity,
    IpcacheFlags,
)
from podwire.datapath.maps import mac_bytes, to_mapped
from tests.packet.frames import (
    udp,
)
from tests.packet.overlay import (
    FAR,
    FAR_6,
    MTU,
    OLD,
    allow,
    arrive,
    connect,
    packet,
    remove_node,
    to,
    write_prefix,
)
from tests.packet.rig import (
    NOBODY_4,
    NOBODY_6,
    NODE_4,
    NODE_6,
    TUNNEL,
    WORLD_4,
    WORLD_6,
    A,
    B,
    Rig,
)
from tests.waiting import wait_for

pytestmark = pytest.mark.packet

TC_ACT_OK, TC_ACT_REDIRECT = 0, 7
IN, OUT = ConfigFlags.DENY_INGRESS, ConfigFlags.DENY_EGRESS


@pytest.fixture(autouse=True)
def _connected(rig: Rig) -> None:
    connect(rig)


@pytest.mark.parametrize("vni", [0, 1, Identity.WORLD, Identity.REMOTE_NODE, FAR.identity])
@pytest.mark.parametrize("outer", [WORLD_4, WORLD_6, NODE_4, "192.0.2.22", A.ipv4])
def test_who_is_no_node_is_not_heard(rig: Rig, outer: str, vni: int) -> None:
    outcome = arrive(rig, to(A, udp(1, 2)), vni=vni, outer=outer)
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.TUNNEL_SOURCE)
    [event] = rig.take_events()
    assert (event.kind, event.instance, event.ifindex) == (EventKind.DROP, 0, TUNNEL)
    assert event.saddr == to_mapped(ipaddress.ip_address(outer))
    assert not rig.entries()


def test_a_node_that_has_left_is_not_heard(rig: Rig) -> None:
    remove_node(rig, FAR)
    assert arrive(rig, to(A, udp(1, 2))).reason == DropReason.TUNNEL_SOURCE


SAID = [
    Identity.WORLD,
    Identity.HEALTH,
    Identity.INIT,
    Identity.REMOTE_NODE,
    256,
    65536,
    0xFFFFFF,
]
UNSAID = [0, Identity.HOST, Identity.UNMANAGED, 7, 255, 0x1000000, 0xFFFFFFFF]


@pytest.mark.parametrize("vni", SAID)
def test_a_node_says_who_its_senders_are(rig: Rig, vni: int) -> None:
    outcome = arrive(rig, to(A, udp(1, 2)), vni=vni)
    assert (outcome.action, outcome.decision.source_identity) == (Action.PEER, vni)


@pytest.mark.parametrize("vni", UNSAID)
def test_a_node_may_not_say_everything(rig: Rig, vni: int) -> None:
    for source in (FAR.pod(4), FAR.address(4), WORLD_4):
        outcome = arrive(rig, packet(source, A.ipv4, udp(1, 2)), vni=vni)
        assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.TUNNEL_IDENTITY)


@pytest.mark.parametrize("allowed", [FAR.identity, 80000])
def test_policies_judge_the_identity_that_the_tunnel_tells(rig: Rig, allowed: int) -> None:
    allow(rig, allowed)
    outcome = arrive(rig, to(A, udp(4000, 53)))
    if allowed == FAR.identity:
        assert (outcome.action, outcome.decision.rule) == (Action.PEER, 41)
    else:
        assert (outcome.reason, outcome.decision.rule) == (DropReason.POLICY, 901)


def test_who_becomes_somebody_else_in_mid_flow_is_judged_anew(rig: Rig) -> None:
    allow(rig, FAR.identity)
    assert arrive(rig, to(A, udp(4000, 53))).action == Action.PEER
    assert arrive(rig, to(A, udp(4000, 53)), vni=80000).reason == DropReason.POLICY
    assert arrive(rig, to(A, udp(4000, 53))).action == Action.PEER


@pytest.mark.parametrize(
    ("source", "identity"),
    [
        (OLD.pod(4), OLD.identity),
        (OLD.stranger(4), Identity.UNMANAGED),
        (OLD.address(4), Identity.WORLD),
        (WORLD_4, Identity.WORLD),
        (OLD.pod(6), OLD.identity),
        (WORLD_6, Identity.WORLD),
    ],
    ids=["pod", "range", "node", "world", "pod-6", "world-6"],
)
def test_a_classic_peers_senders_are_told_by_their_address(
    rig: Rig, source: str, identity: int
) -> None:
    target = A.address(6 if ":" in source else 4)
    outcome = arrive(rig, packet(source, target, udp(1, 2)), vni=1, outer=OLD.outer)
    assert (outcome.action, outcome.decision.source_identity) == (Action.PEER, identity)


@pytest.mark.parametrize("vni", [0, *SAID])
def test_a_classic_peer_says_no_identity(rig: Rig, vni: int) -> None:
    outcome = arrive(rig, to(A, udp(1, 2), remote=OLD), vni=vni, outer=OLD.outer)
    assert outcome.reason == DropReason.TUNNEL_IDENTITY


# In whose name.


@pytest.mark.parametrize("vni", [Identity.WORLD, Identity.REMOTE_NODE, FAR.identity])
@pytest.mark.parametrize(
    "source",
    [
        *(FAR_6.pod(4), FAR_6.stranger(4), FAR_6.address(4), OLD.pod(4)),
        *(A.ipv4, B.ipv4, NOBODY_4, NODE_4, "10.7.99.1", "10.7.5.5"),
        *("127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "169.254.1.1"),
        *(FAR_6.pod(6), B.ipv6, NOBODY_6, NODE_6, "fd07:99::1"),
        *("::", "::1", "ff02::1", "fe80::1", "fe80::77"),
    ],
)
def test_nobody_sends_in_anothers_name(rig: Rig, source: str, vni: int) -> None:
    target = A.address(6 if ":" in source else 4)
    outcome = arrive(rig, packet(source, target, udp(1, 2)), vni=vni)
    assert (outcome.action, outcome.reason) == (Action.DROP, DropReason.TUNNEL_INNER)
    assert not rig.entries()


def test_a_classic_peer_sends_in_nobodys_name_either(rig: Rig) -> None:
    for source in (FAR.pod(4), B.ipv4, NODE_4, "10.7.99.1"):
        outcome = arrive(rig, packet(source, A.ipv4, udp(1, 2)), vni=1, outer=OLD.outer)
        assert outcome.reason == DropReason.TUNNEL_INNER


def test_of_two_nodes_that_claim_a_pod_the_one_that_has_it_is_heard(rig: Rig) -> None:
    claims = ((FAR, FAR_6, FAR_6.pod(4)), (FAR_6, FAR, FAR.pod(4)))
    for claimant, owner, address in claims:
        inner = packet(address, A.ipv4, udp(1, 2))
        refused = arrive(rig, inner, vni=owner.identity, outer=claimant.outer)
        assert refused.reason == DropReason.TUNNEL_INNER
        assert arrive(rig, inner, vni=owner.identity, outer=owner.outer).action == Action.PEER


def test_a_local_pod_is_local_whatever_the_ipcache_says(rig: Rig) -> None:
    write_prefix(rig, B.ipv4, FAR.identity, FAR.number, IpcacheFlags.TUNNEL, MTU)
    inner = packet(B.ipv4, A.ipv4, udp(1, 2))
    assert arrive(rig, inner).reason == DropReason.TUNNEL_INNER


@pytest.mark.parametrize("vni", [Identity.REMOTE_NODE, Identity.WORLD, FAR.identity])
def test_behind_a_nodes_address_may_be_whoever_it_masqueraded(rig: Rig, vni: int) -> None:
    outcome = arrive(rig, packet(FAR.address(4), A.ipv4, udp(1, 2)), vni=vni)
    assert (outcome.action, outcome.decision.source_identity) == (Action.PEER, vni)


@pytest.mark.parametrize("version", [4, 6])
def test_the_world_comes_as_the_world_alone(rig: Rig, version: int) -> None:
    inner = packet(WORLD_4 if version == 4 else WORLD_6, A.address(version), udp(1, 2))
    assert arrive(rig, inner, vni=Identity.WORLD).action == Action.PEER
    for vni in (Identity.REMOTE_NODE, FAR.identity, Identity.INIT):
        assert arrive(rig, inner, vni=vni).reason == DropReason.TUNNEL_INNER


def test_a_node_that_is_reached_by_routes_may_still_send_by_the_tunnel(rig: Rig) -> None:
    """Both ends do not change their way in the same moment."""
    write_prefix(rig, FAR.pod(4), FAR.identity, FAR.number, IpcacheFlags.NATIVE, MTU)
    assert arrive(rig, to(A, udp(1, 2))).action == Action.PEER


def test_a_flow_vouches_for_its_own_node_alone(rig: Rig) -> None:
    answer = to(A, udp(53, 4000))
    rig.sent(A, packet(A.ipv4, FAR.pod(4), udp(4000, 53)))
    refused = arrive(rig, answer, vni=FAR_6.identity, outer=FAR_6.outer)
    assert refused.reason == DropReason.TUNNEL_INNER
    assert arrive(rig, answer).action == Action.PEER
    write_prefix(rig, FAR.pod(4), FAR.identity, FAR_6.number, IpcacheFlags.TUNNEL, MTU)
    moved = arrive(rig, answer, vni=FAR.identity, outer=FAR_6.outer)
    assert (moved.action, moved.decision.node) == (Action.PEER, FAR_6.number)
    new = to(A, udp(4001, 53))
    assert arrive(rig, new).reason == DropReason.TUNNEL_INNER


def test_a_flow_of_the_world_vouches_for_the_world_alone(rig: Rig) -> None:
    inner = packet(WORLD_4, A.ipv4, udp(4000, 53))
    assert arrive(rig, inner, vni=Identity.WORLD).action == Action.PEER
    assert arrive(rig, inner, vni=FAR.identity).reason == DropReason.TUNNEL_INNER
    assert arrive(rig, inner, vni=Identity.WORLD).action == Action.PEER


# Addresses that have moved. What is looked up once for many packets is looked up again within the second.

HERE, THERE = "to-this-node", "to-a-third-node"


def move(rig: Rig, version: int, where: str) -> str:
    """Let the known pod's address go elsewhere; give the address."""
    address = FAR.pod(version)
    if where == THERE:
        write_prefix(rig, address, FAR.identity, FAR_6.number, IpcacheFlags.TUNNEL, MTU)
    else:
        macs = mac_bytes(B.pod_mac), mac_bytes(B.host_mac)
        row = EndpointValue(B.ifindex, B.instance, *macs, 0).pack()
        rig.maps["pw_endpoints"].update(to_mapped(ipaddress.ip_address(address)), row)
    return address


@pytest.mark.parametrize("where", [HERE, THERE])
@pytest.mark.parametrize("a_asks", [True, False], ids=["answers", "questions"])
@pytest.mark.parametrize("version", [4, 6])
def test_the_old_node_of_an_address_is_not_heard_while_the_pod_is_silent(
    rig: Rig, version: int, a_asks: bool, where: str
) -> None:
    inner = to(A, udp(53, 4000), version)
    if a_asks:
        rig.sent(A, packet(A.address(version), FAR.pod(version), udp(4000, 53)))
    for _ in range(3):
        assert arrive(rig, inner).action == Action.PEER
    move(rig, version, where)
    wait_for(lambda: arrive(rig, inner).reason == DropReason.TUNNEL_INNER)
    for _ in range(3):
        assert arrive(rig, inner).reason == DropReason.TUNNEL_INNER


@pytest.mark.parametrize("version", [4, 6])
def test_an_address_that_stays_is_heard_all_the_time(rig: Rig, version: int) -> None:
    inner = to(A, udp(4000, 53), version)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert arrive(rig, inner).action == Action.PEER
