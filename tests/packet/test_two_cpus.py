"""Two CPUs at one row: a row that its flow leaves is not given to another flow under the hands of the other CPU.

One CPU judges what a peer sends, which takes it long; the other one opens flows, each of which takes the place of the
peer's. All shards are one hash, for a deleted row's memory goes to the next row of its hash, and there is no agent, so
that a flow's first packet makes a row there. Nothing is collected: the collector waits a round before it deletes.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Final

import pytest

from podwire.datapath import abi
from podwire.datapath.abi import Action, ConfigFlags, DropReason, Hook, SettingsFlags
from podwire.kernel import netns
from podwire.kernel.bpf_program import Packet
from podwire.model.policy import Direction, PolicyEntry, PolicyKey, Verdict
from tests import waiting
from tests.packet.frames import ACK, SYN, TCP, ipv4, tcp
from tests.packet.rig import ALLOW, OUTSIDE, WORLD_4, A, Rig, make_shards, put_shards

pytestmark = pytest.mark.packet

CLOSED: Final = ALLOW | ConfigFlags.DENY_INGRESS | ConfigFlags.CIDR_INGRESS
PORTS: Final = range(20_000, 20_300)
REPEAT: Final = 200
LOOK_S: Final = 0.0001
QUOTA: Final = 1 << 20
SLOT: Final = 7
NET: Final = (1 << 24) + 5
DENIAL: Final = 77


@pytest.fixture
def one_hash(rig: Rig) -> Iterator[Rig]:
    """Give a rig without an agent, whose connections are all in its first shard."""
    rig.write_settings(quota=QUOTA, flags=SettingsFlags.UNATTENDED)
    with ExitStack() as stack:
        stack.callback(put_shards, rig.maps["pw_conntrack"], rig.shards)
        shards = make_shards(rig.maps["pw_conntrack"], 4 * len(PORTS), stack)
        put_shards(rig.maps["pw_conntrack"], shards[:1] * len(shards))
        yield replace(rig, shards=shards[:1])


@dataclass
class Loop:
    """to_pod on a CPU of its own, again and again over one packet; `packet` may be changed meanwhile."""

    packet: Packet
    ran: Packet | None = None
    """What it has run over last."""
    over: bool = False

    def run(self, rig: Rig, cpu: int) -> None:
        """Do so until it is over."""
        os.sched_setaffinity(0, {cpu})  # of this thread alone
        with netns.namespace(rig.namespace.fileno()):
            while not self.over:
                packet = self.packet
                rig.programs["to_pod"].run(packet, repeat=REPEAT)
                self.ran = packet

    def turn_to(self, packet: Packet) -> None:
        """Let it run over another packet, and wait until it does."""
        self.packet = packet
        until_s = time.monotonic() + waiting.DEADLINE_S
        while self.ran is not packet:
            assert time.monotonic() < until_s, "the other CPU stands still"
            time.sleep(LOOK_S)


@contextmanager
def running(rig: Rig, loop: Loop) -> Iterator[Loop]:
    """Give each of the two a CPU, where there are two."""
    cpus = os.sched_getaffinity(0)
    thread = threading.Thread(target=loop.run, args=(rig, max(cpus)))
    thread.start()
    os.sched_setaffinity(0, {min(cpus)})
    try:
        yield loop
    finally:
        os.sched_setaffinity(0, cpus)
        loop.over = True
        thread.join()


def close_to_the_world(rig: Rig) -> None:
    """Deny by so many rules that the judgement takes longer than a row's way to another flow."""
    rig.cidr("198.51.100.0/24", NET)
    for identity in (0, abi.Identity.WORLD, NET):
        for bits in range(17):
            key = PolicyKey(
                identity, Direction.INGRESS, TCP, PORTS[0] >> 16 - bits << 16 - bits, bits
            )
            rig.rule(SLOT, key, PolicyEntry(Verdict.DENY, 100, DENIAL))
    rig.change(A, flags=CLOSED, slot=SLOT, revision=A.revision + 1)


def passed(rig: Rig, hook: Hook) -> int:
    metrics = rig.metrics().items()
    return sum(
        packets
        for (at, reason, _), (packets, _) in metrics
        if (at, reason) == (hook, DropReason.NONE)
    )


def test_a_flow_that_takes_the_place_of_a_denied_one_keeps_its_own_judgement(one_hash: Rig) -> None:
    rig = one_hash
    rig.forget_metrics()
    denied = {
        port: Packet(
            A.frame_in(ipv4(WORLD_4, A.ipv4, tcp(80, port, SYN))),
            ifindex=A.ifindex,
            ingress_ifindex=OUTSIDE,
        )
        for port in PORTS
    }
    opening = {port: A.frame(ipv4(A.ipv4, WORLD_4, tcp(port, 80, SYN))) for port in PORTS}
    with netns.namespace(rig.namespace.fileno()):
        for packet in denied.values():
            rig.programs["to_pod"].run(packet)
        close_to_the_world(rig)
        with running(rig, Loop(denied[PORTS[0]])) as world:
            for port in PORTS:
                world.turn_to(denied[port])
                rig.programs["from_pod"].run(Packet(opening[port], ifindex=A.ifindex))
    rows = [row for key, row in rig.entries(A).items() if key.direction == Direction.EGRESS]
    assert len(rows) == len(PORTS)
    assert {(row.rule, row.policy_revision) for row in rows} == {(900, A.revision + 1)}
    assert (passed(rig, Hook.FROM_POD), passed(rig, Hook.TO_POD)) == (len(PORTS), len(PORTS))
    charges = [abi.ConntrackValue.unpack(raw).charged for _, raw in rig.shards[0].items()]
    assert rig.usage_row(A).brief_flows == charges.count(abi.Charge.BRIEF) == len(charges)
    for port in PORTS:
        answer = ipv4(WORLD_4, A.ipv4, tcp(80, port, SYN | ACK))
        assert rig.received(A, answer, ingress_ifindex=OUTSIDE).action == Action.STACK, port
