"""A node's row says that what goes there has to be encrypted: nothing here does that, so nothing goes there."""

from collections.abc import Callable
from typing import Final

import pytest

from podwire.datapath.abi import Action, DropReason
from tests.packet import netdev, overlay
from tests.packet.frames import ACK, Segment, tcp, udp
from tests.packet.overlay import FAR, enter, packet, write_node
from tests.packet.rig import A, Outcome, Rig

pytestmark = pytest.mark.packet

HOST: Final = {4: "10.50.0.1", 6: "fd50::1"}
ASK: Final = udp(4000, 53)
MIDSTREAM: Final = tcp(4000, 80, ACK)
"""Of a connection that nobody remembers: the stack's."""


def _of_pod(rig: Rig, segment: Segment, version: int) -> Outcome:
    return rig.sent(A, packet(A.address(version), FAR.pod(version), segment))


def _of_host(rig: Rig, segment: Segment, version: int) -> Outcome:
    return enter(rig, packet(HOST[version], FAR.pod(version), segment))


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize(
    ("connect", "send", "segment"),
    [
        pytest.param(overlay.connect, _of_pod, ASK, id="a pod by the tunnel"),
        pytest.param(overlay.connect, _of_host, ASK, id="the host by the tunnel"),
        pytest.param(netdev.connect, _of_pod, ASK, id="a pod natively"),
        pytest.param(netdev.connect, _of_pod, MIDSTREAM, id="a pod natively, by the stack"),
    ],
)
def test_nothing_leaves_unencrypted(
    rig: Rig,
    connect: Callable[[Rig], None],
    send: Callable[[Rig, Segment, int], Outcome],
    segment: Segment,
    version: int,
) -> None:
    connect(rig)
    for encrypted in (False, True, False):
        write_node(rig, FAR, encrypted=encrypted)
        sent = send(rig, segment, version)
        assert (sent.action == Action.DROP) == encrypted
        assert sent.reason == (DropReason.NOT_ENCRYPTED if encrypted else DropReason.NONE)
