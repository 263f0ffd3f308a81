"""A pod that asks from the port of the tunnel, as resolvers do that choose from all, is answered; nobody else is."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from podwire.datapath.abi import Action, DropReason, Identity, IpcacheFlags
from tests.packet import netdev, overlay
from tests.packet.frames import ipv4, ipv6, udp
from tests.packet.netdev import DIRECT, TC_ACT_UNSPEC
from tests.packet.overlay import FAR, Remote, write_node, write_prefix
from tests.packet.rig import (
    NODE_4,
    NODE_6,
    OUTSIDE,
    TUNNEL,
    TUNNEL_PORT,
    WORLD_4,
    WORLD_6,
    A,
    B,
    Outcome,
    Rig,
)

pytestmark = [pytest.mark.packet, pytest.mark.parametrize("version", [4, 6])]

NEAR = Remote(24, "192.0.2.24", 70024)


@dataclass(frozen=True)
class Client:
    """A client that asks A from the tunnel's port, and how its question comes."""

    name: str
    address: Callable[[int], str]
    send: Callable[[Rig, bytes], Outcome]
    answered_by: Action | None = None
    """None = not at all."""


def natively(rig: Rig, inner: bytes) -> Outcome:
    outcome = netdev.arrive(rig, inner)
    if outcome.retval != TC_ACT_UNSPEC:
        return outcome
    return by_stack(OUTSIDE)(rig, inner)


def by_stack(ifindex: int) -> Callable[[Rig, bytes], Outcome]:
    return lambda rig, inner: rig.received(A, inner, ingress_ifindex=ifindex)


def by_tunnel(identity: int) -> Callable[[Rig, bytes], Outcome]:
    return lambda rig, inner: overlay.arrive(rig, inner, vni=identity)


def node(version: int) -> str:
    return NODE_4 if version == 4 else NODE_6


def world(version: int) -> str:
    return WORLD_4 if version == 4 else WORLD_6


CLIENTS = [
    Client("local", B.address, lambda rig, inner: rig.sent(B, inner), Action.PEER),
    Client("local-by-the-stack", B.address, by_stack(B.ifindex), Action.STACK),
    Client("by-the-tunnel", FAR.pod, by_tunnel(FAR.identity), Action.TUNNEL),
    Client("unpublished", FAR.stranger, by_tunnel(70099), Action.TUNNEL),
    Client("natively", NEAR.pod, natively, Action.STACK),
    Client("local-behind-its-node", node, by_stack(B.ifindex)),
    Client("own-node", node, by_stack(0)),
    Client("node-by-the-tunnel", FAR.address, by_tunnel(Identity.REMOTE_NODE)),
    Client("pod-behind-a-node-by-the-tunnel", FAR.address, by_tunnel(FAR.identity)),
    Client("node-natively", NEAR.address, natively),
    Client("world", world, natively),
]


@pytest.fixture(autouse=True)
def connected(rig: Rig) -> None:
    overlay.connect(rig)
    write_node(rig, NEAR)
    for version in (4, 6):
        write_prefix(rig, NEAR.pod(version), NEAR.identity, NEAR.number, DIRECT, netdev.MTU)
        own = NEAR.number, IpcacheFlags.NATIVE | IpcacheFlags.NODE_ADDRESS, netdev.MTU
        write_prefix(rig, NEAR.address(version), Identity.REMOTE_NODE, *own)
    rig.write_settings(tunnel_ifindex=TUNNEL, native_ifindex=OUTSIDE)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_pods_that_ask_from_the_tunnels_port_are_answered_and_nobody_else(
    rig: Rig, version: int, client: Client
) -> None:
    build = ipv6 if version == 6 else ipv4
    ends = client.address(version), A.address(version)
    answer = build(*ends[::-1], udp(53, TUNNEL_PORT))
    assert rig.sent(A, answer).reason == DropReason.TUNNEL_PORT, "nobody has asked"
    came = client.send(rig, build(*ends, udp(TUNNEL_PORT, 53)))
    assert came.action in (Action.PEER, Action.STACK)
    outcome = rig.sent(A, answer)
    if client.answered_by is None:
        assert outcome.reason == DropReason.TUNNEL_PORT
    else:
        assert (outcome.action, outcome.reason) == (client.answered_by, DropReason.NONE)
