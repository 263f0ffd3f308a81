"""Where the node's table gets full everybody's quota shrinks: pods that flood together leave room for others."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from podwire.datapath import abi
from podwire.datapath.abi import DropReason
from podwire.kernel import bpf
from tests.packet.frames import ACK, SYN
from tests.packet.overlay import packet
from tests.packet.rig import SMALL, A, B, Endpoint, Rig
from tests.packet.services import POD_PORT, PORT, PROTOCOLS, offer, speak, vip
from tests.packet.test_collection import collecting, eventually

pytestmark = pytest.mark.packet

SHARD_ROWS = 128
TABLE_ROWS = SHARD_ROWS * abi.CONNTRACK_SHARDS
QUOTA = TABLE_ROWS // 16
"""As the default setting has it."""
BRIEF = QUOTA // abi.BRIEF_PART + 1
FLOODERS = range(100, 140)
"""Instances; 32 would fill the table."""
FIRST_SPORT = 1024
WAITING = 60
OTHERS = range(150, 225)
"""Instances that together take half of the table, with few flows each."""
NS_PER_S = 1_000_000_000


@pytest.fixture(autouse=True)
def services(rig: Rig) -> None:
    """Put pod B behind a service of both protocols."""
    rig.write_settings(quota=QUOTA)
    for first, name in ((100, "tcp"), (200, "udp")):
        protocol = PROTOCOLS[name]
        offer(rig, vip(4), [(B.ipv4, POD_PORT)], protocol=protocol, service=first, first=first)


def ask(rig: Rig, endpoint: Endpoint, sport: int) -> DropReason:
    """Send a datagram to the service by a port."""
    return rig.sent(endpoint, question(endpoint, sport)).reason


def question(endpoint: Endpoint, sport: int) -> bytes:
    """Make a datagram to the service by a port."""
    return packet(endpoint.ipv4, vip(4), speak("udp", sport, PORT))


def flood(
    rig: Rig, instances: Sequence[int], flows: int, first: int = FIRST_SPORT
) -> Counter[DropReason]:
    """Let pods ask at once, each by so many ports: one device is one pod after the other."""
    reasons: Counter[DropReason] = Counter()
    flooders = [replace(SMALL, instance=instance) for instance in instances]
    for sport in range(first, first + flows):
        sent = question(SMALL, sport)
        reasons.update(rig.sent(rig.write(flooder), sent).reason for flooder in flooders)
    return reasons


@pytest.mark.parametrize("is_shrunk", [True, False], ids=["shrunk", "control"])
def test_many_that_flood_at_once_leave_room_for_others(rig: Rig, is_shrunk: bool) -> None:
    """The victim opens flows all the time, and may have as many as one that floods."""
    lost: Counter[DropReason] = Counter()
    with rig.smaller_shards(SHARD_ROWS) as full:
        full.tell_shard_room(SHARD_ROWS if is_shrunk else 0)
        for step in range(WAITING):
            flooded = flood(full, FLOODERS, 4, FIRST_SPORT + 4 * step)
            lost[ask(full, A, FIRST_SPORT + step)] += 1
    if is_shrunk:
        assert lost == {DropReason.NONE: WAITING}
        assert flooded[DropReason.CONNTRACK_FULL]
    else:
        assert lost[DropReason.CONNTRACK_FULL]


def test_alone_a_pod_has_its_whole_quota(rig: Rig) -> None:
    with rig.smaller_shards(SHARD_ROWS) as empty:
        empty.tell_shard_room(SHARD_ROWS)
        for sport in range(FIRST_SPORT, FIRST_SPORT + QUOTA):
            for flags in (SYN, SYN | ACK, ACK):
                sender, ends = A, (A.ipv4, vip(4), speak("tcp", sport, PORT, flags))
                if flags == SYN | ACK:
                    sender, ends = B, (B.ipv4, A.ipv4, speak("tcp", POD_PORT, sport, flags))
                assert empty.sent(sender, packet(*ends)).reason == DropReason.NONE
        usage = empty.usage_row(A)
        assert (usage.connections[0], usage.brief_flows) == (QUOTA, 0)
        assert ask(empty, A, FIRST_SPORT) == DropReason.CONNTRACK_QUOTA
        reasons = flood(empty, FLOODERS[:1], BRIEF + 5)
        assert reasons == {DropReason.NONE: BRIEF, DropReason.CONNTRACK_QUOTA: 5}


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "control"])
def test_where_the_table_is_full_who_has_most_is_pressed_out(rig: Rig, is_full: bool) -> None:
    """What waits for an answer has its time while a quarter of the pod's room is free, if there is room for others."""
    most = FLOODERS[: 25 if is_full else 5]
    with rig.smaller_shards(SHARD_ROWS) as full:
        full.tell_shard_room(SHARD_ROWS)
        assert flood(full, OTHERS if is_full else (), BRIEF // 8).keys() <= {DropReason.NONE}
        flood(full, most, BRIEF * 5 // 8)
        before = sum(full.shard_fill())
        age_to(full, 1.5)
        with collecting(full) as collector:
            collector.wait_rounds(3)
            if is_full:
                assert eventually(lambda: sum(full.shard_fill()) < before)
            else:
                assert sum(full.shard_fill()) == before
        few = sum(usage_of(full, instance).brief_flows for instance in OTHERS)
        assert few == (len(OTHERS) * (BRIEF // 8) if is_full else 0)


def usage_of(rig: Rig, instance: int) -> abi.UsageValue:
    """Give what an instance uses; nothing where it was never seen."""
    row = rig.maps["pw_usage"].lookup(instance.to_bytes(4, "little"))
    return abi.UsageValue.unpack(row or bytes(abi.USAGE_VALUE_BYTES))


def age_to(rig: Rig, seconds: float) -> None:
    """Make every flow one that was last used so long ago, however long it took to open all of them."""
    then_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - int(seconds * NS_PER_S)
    for shard in rig.shards:
        for key, raw in list(shard.items()):
            aged = abi.ConntrackValue.unpack(raw)._replace(last_seen_ns=then_ns, lifetime_s=3600)
            shard.update(key, aged.pack(), bpf.Update.EXIST)


def test_the_collector_puts_right_how_full_shards_are(rig: Rig) -> None:
    """What was carried over from another table was counted by nobody, and a build before this one counts nothing."""
    flood(rig, FLOODERS[:3], 20)
    rows = [len(list(shard.keys())) for shard in rig.shards]
    assert rig.shard_fill() == rows
    for number, wrong in ((0, 500), (1, 0)):
        rig.maps["pw_shard_fill"].update(number.to_bytes(4, "little"), wrong.to_bytes(4, "little"))
    age_to(rig, 0)
    with collecting(rig) as collector:
        collector.wait_rounds(2)
        assert rig.shard_fill() == rows
