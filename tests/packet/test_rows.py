"""A row that is rewritten while packets pass is seen whole: as it was or as it is, never half of each (rule 20)."""

import threading
import time
from dataclasses import replace

import pytest

from podwire.datapath.abi import Action, DropReason, Hook, Path
from podwire.kernel import netns
from podwire.kernel.bpf_program import Packet
from tests.packet.frames import ipv4, ipv6, udp
from tests.packet.rig import WORLD_4, WORLD_6, A, B, Endpoint, Rig

pytestmark = pytest.mark.packet

SECONDS = 3.0
MORE_S = 600
REPEAT = 20_000


class Other(Endpoint):
    """A's device with another pod's MACs and addresses: half of this row and half of A's lets no packet of A pass."""

    @property
    def pod_mac(self) -> str:
        return B.pod_mac


def send_for_a_while(rig: Rig, frame: bytes, done: threading.Event) -> None:
    program = rig.programs["from_pod"]
    with netns.namespace(rig.namespace.fileno()):
        while not done.is_set():
            program.run(Packet(frame, ifindex=A.ifindex), repeat=REPEAT)


def passed(rig: Rig, wanted: DropReason) -> int:
    """Count the packets of a reason so far."""
    return sum(count for (_, reason, _), (count, _) in rig.metrics().items() if reason == wanted)


def test_a_row_that_is_rewritten_is_never_seen_in_halves(rig: Rig) -> None:
    rig.forget_metrics()
    other = Other(**{**vars(A), "ipv4": B.ipv4, "ipv6": B.ipv6})
    frame = A.frame(ipv6(A.ipv6, WORLD_6, udp(4000, 53)))
    both = (DropReason.NONE, DropReason.SOURCE_MAC)
    done = threading.Event()
    sender = threading.Thread(target=send_for_a_while, args=(rig, frame, done))
    sender.start()
    try:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end or (
            min(passed(rig, reason) for reason in both) <= REPEAT / 10
            and time.monotonic() < end + MORE_S
        ):
            rig.write(other)
            rig.write(A)
    finally:
        done.set()
        sender.join()
    seen = {reason: count for (_, reason, _), (count, _) in rig.metrics().items()}
    assert set(seen) == set(both)
    assert min(seen.values()) > REPEAT / 10


def test_a_row_that_was_given_to_another_device_is_refused(rig: Rig) -> None:
    """A plain write of another device's row into this one's place is what recycled memory looks like."""
    rig.forget_metrics()
    frame = A.frame(ipv4(A.ipv4, WORLD_4, udp(4000, 53)))
    assert rig.run("from_pod", A.ifindex, frame).action == Action.STACK
    recycled = replace(A, ifindex=B.ifindex)
    rig.maps["pw_config"].update(A.ifindex.to_bytes(4, "little"), recycled.row().pack())
    assert rig.run("from_pod", A.ifindex, frame).reason == DropReason.NO_ENDPOINT
    assert rig.metrics()[Hook.FROM_POD, DropReason.NO_ENDPOINT, Path.NONE][0] == 1
