"""A slot is swapped for another fifty times in a second under load: no gap in either direction (rule 17)."""

import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from podwire.datapath.abi import ConfigFlags, DropReason, Hook
from podwire.datapath.policy_maps import PolicyTable
from podwire.kernel import netns
from podwire.kernel.bpf_program import Packet
from podwire.model.policy import Direction, PolicyEntry, PolicyKey, PolicyRows, Verdict
from tests.packet import frames
from tests.packet.frames import icmp, ipv4
from tests.packet.rig import ALLOW, WORLD_4, A, B, Endpoint, Rig

pytestmark = pytest.mark.packet

FLIPS = 50 if "PODWIRE_GUEST" in os.environ else 150
"""Each takes an emulated machine 60 ms."""
FLIPS_PER_SECOND = 50
DEADLINE_S = 240.0
"""The fence waits for the load's own runs: an emulated machine takes its time."""
REPEAT = 2_000
ROWS = 200
DENIED_BY_DEFAULT = replace(A, flags=ALLOW | ConfigFlags.DENY_EGRESS)
ALLOWED_BY_DEFAULT = B
TIMESTAMP = icmp(13, 0, 5)
"""Nobody remembers it: each packet is judged by the rows."""


def rows_of(verdict: Verdict, number: int) -> PolicyRows:
    """Give the rows of a slot: what decides about the world, and many that have to go with it."""
    rows = {
        PolicyKey(10_000 + index, Direction.EGRESS): PolicyEntry(verdict, 1, 1)
        for index in range(ROWS)
    }
    decides = PolicyKey(2, Direction.EGRESS, frames.ICMP)
    return {decides: PolicyEntry(verdict, 5, number), **rows}


class Sender:
    """Runs the sender's program over one frame, again and again."""

    def __init__(self, rig: Rig, endpoint: Endpoint) -> None:
        self.sent = 0
        self._rig = rig
        self._packet = Packet(
            endpoint.frame(ipv4(endpoint.ipv4, WORLD_4, TIMESTAMP)), ifindex=endpoint.ifindex
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def _send(self) -> None:
        program = self._rig.programs["from_pod"]
        with netns.namespace(self._rig.namespace.fileno()):
            while not self._stop.is_set():
                program.run(self._packet, repeat=REPEAT)
                self.sent += REPEAT

    def __enter__(self) -> "Sender":
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        self._thread.join()


def test_swapping_slots_under_load_lets_no_packet_meet_a_gap(rig: Rig) -> None:
    rig.forget_metrics()
    table = PolicyTable(SimpleNamespace(**rig.maps), 100_000)  # type: ignore[arg-type]
    wanted = {DENIED_BY_DEFAULT: Verdict.ALLOW, ALLOWED_BY_DEFAULT: Verdict.DENY}

    def flip(number: int) -> None:
        slots = {endpoint: 2 * number + place for place, endpoint in enumerate(wanted)}
        for endpoint, slot in slots.items():
            table.write_slot(slot, rows_of(wanted[endpoint], number))
        for endpoint, slot in slots.items():
            rig.change(endpoint, slot=slot, revision=number)
        table.remove_slots(slot - 2 for slot in slots.values())

    flip(1)
    number = 1
    with Sender(rig, DENIED_BY_DEFAULT) as allowed, Sender(rig, ALLOWED_BY_DEFAULT) as denied:
        begin = time.monotonic()
        while number < FLIPS:
            passed = time.monotonic() - begin
            assert passed < DEADLINE_S, f"{number} of {FLIPS} swaps"
            if number < passed * FLIPS_PER_SECOND:
                number += 1
                flip(number)
            else:
                time.sleep(1 / FLIPS_PER_SECOND / 4)
    seen: dict[DropReason, int] = {}
    for (hook, reason, _), (count, _) in rig.metrics().items():
        assert hook == Hook.FROM_POD
        seen[reason] = seen.get(reason, 0) + count
    assert seen == {DropReason.NONE: allowed.sent, DropReason.POLICY: denied.sent}
    assert table.used == 2 * (ROWS + 1)
