"""While no agent runs, and while rows are moved, flows are where the programs of other builds find them.

A build of layout 2 knows pw_conntrack alone. The same packets with an agent are the control.
"""

from contextlib import ExitStack

import pytest

from podwire.datapath import abi
from podwire.datapath.abi import Action, ConfigFlags, DropReason, SettingsFlags
from podwire.kernel.bpf_object import BpfObject
from podwire.kernel.bpf_program import Packet
from podwire.model.policy import Direction, PolicyEntry, PolicyKey, Verdict
from tests.packet.frames import RST, SYN, Segment, echo, ipv4, sctp, tcp, udp
from tests.packet.rig import ALLOW, OBJECTS, OUTSIDE, WORLD_4, ZERO, A, B, Outcome, Rig
from tests.packet.test_collection import eventually

pytestmark = pytest.mark.packet

CLOSED = ALLOW | ConfigFlags.DENY_INGRESS
QUOTA = 320
ROOM = QUOTA // abi.BRIEF_PART // 8


@pytest.fixture
def closed(rig: Rig) -> Rig:
    rig.change(A, flags=CLOSED)
    return rig


def ask(rig: Rig, port: int) -> Outcome:
    return rig.sent(A, ipv4(A.ipv4, WORLD_4, udp(port, 53)))


def answer(rig: Rig, port: int, far: int = 53) -> Outcome:
    return rig.received(A, ipv4(WORLD_4, A.ipv4, udp(far, port)), ingress_ifindex=OUTSIDE)


def protected(rig: Rig) -> dict[int, abi.ConntrackValue]:
    """Give the flows in pw_conntrack, by their openers' ports."""
    return {
        abi.ConntrackKey.unpack(key).sport: abi.ConntrackValue.unpack(row)
        for shard in rig.shards
        for key, row in shard.items()
    }


@pytest.mark.parametrize("unattended", [False, True])
def test_without_an_agent_new_flows_stand_where_every_build_looks(
    closed: Rig, unattended: bool
) -> None:
    closed.write_settings(quota=QUOTA, flags=SettingsFlags.UNATTENDED if unattended else 0)
    for port in range(1000, 1000 + 2 * ROOM):
        assert ask(closed, port).reason == DropReason.NONE
    found = protected(closed)
    assert set(found) == (set(range(1000, 1000 + ROOM)) if unattended else set())
    assert all(row.charged == abi.Charge.BRIEF for row in found.values())
    assert closed.usage_row(A).brief_flows == len(found)
    for port in range(1000, 1000 + 2 * ROOM):
        assert answer(closed, port).action == Action.STACK


def test_without_an_agent_a_flow_becomes_a_connection_where_it_stands(closed: Rig) -> None:
    closed.write_settings(quota=QUOTA, flags=SettingsFlags.UNATTENDED)
    ask(closed, 1000)
    answer(closed, 1000)
    ask(closed, 1000)
    [row] = protected(closed).values()
    assert row.charged == abi.Charge.CONNECTION
    usage = closed.usage_row(A)
    assert (sum(usage.connections), usage.brief_flows) == (1, 0)


def test_without_an_agent_nobody_fills_the_room_that_anothers_flows_to_services_have(
    rig: Rig,
) -> None:
    """A neighbour's flood fills less than what the collector begins to press flows out at."""
    rig.write_settings(quota=QUOTA, flags=SettingsFlags.UNATTENDED)
    for port in range(1000, 1000 + 4 * ROOM):
        rig.sent(B, ipv4(B.ipv4, A.ipv4, udp(port, 9)))
    assert rig.usage_row(A).brief_flows == ROOM
    assert rig.usage_row(A).brief_flows < QUOTA // abi.BRIEF_PART // 4


def test_what_opens_and_closes_without_an_agent_counts_until_it_is_collected(rig: Rig) -> None:
    rig.write_settings(quota=QUOTA, flags=SettingsFlags.UNATTENDED)
    for port in range(1000, 1000 + 2 * ROOM):
        rig.sent(A, ipv4(A.ipv4, WORLD_4, tcp(port, 80, SYN)))
        rig.sent(A, ipv4(A.ipv4, WORLD_4, tcp(port, 80, RST)))
    assert len(protected(rig)) == rig.usage_row(A).brief_flows == ROOM


def test_an_agent_that_ends_hands_over_what_waits(closed: Rig) -> None:
    closed.write_settings(quota=QUOTA)
    ask(closed, 999)
    answer(closed, 999)
    for port in range(1000, 1000 + 2 * ROOM):
        ask(closed, port)
    assert protected(closed) == {}
    with ExitStack() as stack:
        hand_over(closed, stack)
    assert len(protected(closed)) == closed.usage_row(A).brief_flows == ROOM
    assert len(closed.entries(A)) == 2 * ROOM + 1
    for port in range(1000, 1000 + 2 * ROOM):
        assert answer(closed, port).action == Action.STACK


def test_what_is_over_is_not_handed_over(closed: Rig) -> None:
    ask(closed, 1000)
    key, _ = closed.entry(A)
    closed.change_entry(key, last_seen_ns=0, lifetime_s=1)
    with ExitStack() as stack:
        hand_over(closed, stack)
    assert protected(closed) == {}


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_collector_hands_over_what_waits_when_an_agent_is_killed(
    closed: Rig, is_killed: bool
) -> None:
    """As the kernel sees a kill: its descriptors are closed, and it has done nothing before."""
    ask(closed, 999)
    with ExitStack() as stack:
        agent = stack.enter_context(ExitStack())
        # A flag that is set is what a living agent takes away.
        closed.write_settings(quota=QUOTA, flags=SettingsFlags.UNATTENDED)
        run_programs(closed, stack, agent, "conntrack_gc_start", "pulse_start")
        assert eventually(lambda: not is_unattended(closed))
        if is_killed:
            agent.close()
            assert eventually(lambda: 999 in protected(closed))
            assert is_unattended(closed)


def is_unattended(rig: Rig) -> bool:
    raw = rig.maps["pw_settings"].lookup(ZERO)
    assert raw is not None
    return bool(abi.Settings.unpack(raw).flags & SettingsFlags.UNATTENDED)


def hand_over(rig: Rig, stack: ExitStack) -> None:
    """Do what an agent does that ends; `stack` holds what belongs to the collector."""
    with ExitStack() as agent:
        run_programs(rig, stack, agent, "hand_over")


def run_programs(rig: Rig, stack: ExitStack, agent: ExitStack, *names: str) -> None:
    """Run programs of the collector; `stack` holds what stays of an agent that ends, `agent` the rest."""
    data = (OBJECTS / "conntrack_gc.bpf.o").read_bytes()
    opened = agent.enter_context(BpfObject(data, "conntrack_gc"))
    for name in set(opened.map_names) & set(rig.maps):
        opened.use_map(name, rig.maps[name])
    opened.load()
    for name in set(opened.map_names) - set(rig.maps):
        stack.enter_context(opened.take_map(name))
    for name in names:
        with opened.take_program(name) as program:
            assert program.run(Packet(bytes(64))).retval == 0


LOST = {
    "datagram": (udp(53, 1000), udp(54, 1000)),
    "sctp": (sctp(53, 1000), sctp(54, 1000)),
    "echo": (echo(4, 7, reply=True), echo(4, 7)),
}


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("kind", LOST)
def test_while_rows_are_moved_answers_come_in_and_nothing_else(
    rig: Rig, kind: str, moving: bool
) -> None:
    """The question is in the rows of the other build. What the pod may not ask is not answered either."""
    wanted, unwanted = LOST[kind]
    rig.rule(7, PolicyKey(2, Direction.EGRESS, 17, 53, 16), PolicyEntry(Verdict.ALLOW, 1, 1))
    rig.rule(7, PolicyKey(2, Direction.EGRESS, 132, 53, 16), PolicyEntry(Verdict.ALLOW, 1, 1))
    rig.rule(7, PolicyKey(2, Direction.EGRESS, 1), PolicyEntry(Verdict.ALLOW, 1, 1))
    rig.change(A, slot=7, flags=CLOSED | ConfigFlags.DENY_EGRESS)
    rig.write_settings(flags=SettingsFlags.MOVING if moving else 0)

    def arrives(segment: Segment) -> DropReason:
        return rig.received(A, ipv4(WORLD_4, A.ipv4, segment), ingress_ifindex=OUTSIDE).reason

    assert arrives(wanted) == (DropReason.NONE if moving else DropReason.POLICY)
    assert arrives(unwanted) == DropReason.POLICY
    assert rig.entries(A) == {}
