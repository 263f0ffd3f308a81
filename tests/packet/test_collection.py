"""Conntrack is emptied by a timer in the kernel: what is over goes, what lives stays, and it needs no process."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from podwire.datapath import abi
from podwire.datapath.abi import Action, ConntrackFlags, DropReason
from podwire.kernel import bpf
from podwire.model.errors import KernelFailure
from tests import leavings
from tests.packet.frames import ACK, RST, SYN, ipv4, tcp, udp
from tests.packet.leave_collector import LEFT_ENTRIES, start_collector
from tests.packet.rig import OUTSIDE, ROOT, WORLD_4, ZERO, A, B, Endpoint, Rig, open_rig

pytestmark = pytest.mark.packet

TIMER_BYTES: Final = 16
QUICK_TICK_MS: Final = 2
DEADLINE_S: Final = 120
CLOSED_LIFETIME_S: Final = 10
USES: Final = 10
BEHIND_S: Final = 0.3
SMALL_SHARD_ROWS: Final = 8
LOTS: Final = 6
"""Four fill the table."""
NS: Final = 1_000_000_000


@dataclass
class Collector:
    """The running collection."""

    timer: bpf.Map

    def state(self) -> abi.Collection:
        """Read what it tells of itself."""
        raw = self.timer.lookup(ZERO)
        assert raw is not None
        return abi.Collection.unpack(raw[TIMER_BYTES:])

    def has_removed(self, rows: int) -> bool:
        """Tell whether it has removed so many rows by now."""
        return self.state().removed >= rows

    def wait_rounds(self, rounds: int) -> None:
        """Wait until every shard was visited `rounds` times from now on."""
        wanted = self.state().ticks + rounds * abi.CONNTRACK_SHARDS + 1
        assert eventually(lambda: self.state().ticks >= wanted)


def eventually(check: Callable[[], bool]) -> bool:
    """Wait until `check` holds, up to the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


@contextmanager
def collecting(rig: Rig, tick_ms: int = QUICK_TICK_MS) -> Iterator[Collector]:
    with ExitStack() as stack:
        yield Collector(start_collector(rig.maps, tick_ms, stack)["pw_ct_timer"])


@pytest.fixture
def collector(rig: Rig) -> Iterator[Collector]:
    with collecting(rig) as running:
        yield running


def converse(rig: Rig, endpoint: Endpoint, port: int) -> None:
    """Ask, be answered, ask again: a connection."""
    ask = ipv4(endpoint.ipv4, WORLD_4, udp(port, 53))
    rig.sent(endpoint, ask)
    answer = ipv4(WORLD_4, endpoint.ipv4, udp(53, port))
    rig.received(endpoint, answer, ingress_ifindex=OUTSIDE)
    rig.sent(endpoint, ask)


def earlier(time_ns: int, seconds: float) -> int:
    """Give a time so much earlier as a row has it: modulo 2^64, for it may lie before the machine's start."""
    return (time_ns - int(seconds * NS)) % (1 << 64)


def age(rig: Rig, key: abi.ConntrackKey, seconds: float, *, lifetime_s: int = 5) -> None:
    """Make an entry one that was last used some seconds ago."""
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    rig.change_entry(key, last_seen_ns=earlier(now, seconds), lifetime_s=lifetime_s)


def test_what_is_over_goes_and_what_lives_stays(rig: Rig, collector: Collector) -> None:
    for port in (1, 2, 3):
        converse(rig, A, 1000 + port)
    old, ripe, young = sorted(rig.entries(A), key=lambda key: key.sport)
    age(rig, old, 3000)
    age(rig, ripe, 5.5)
    age(rig, young, 0, lifetime_s=300)
    assert eventually(lambda: set(rig.entries(A)) == {young})
    assert eventually(lambda: rig.usage(A) == 1)
    assert eventually(lambda: collector.state().removed >= 2)
    collector.wait_rounds(3)
    assert set(rig.entries(A)) == {young}


def test_an_entry_that_is_used_in_time_stays(rig: Rig, collector: Collector) -> None:
    packet = ipv4(A.ipv4, WORLD_4, udp(1000, 53))
    converse(rig, A, 1000)
    key, entry = rig.entry(A)
    # So long that a machine which stands still between aging the entry and using it does not miss it.
    lifetime_s = 10_000
    for _ in range(USES):
        # Two of these would be more than its lifetime: each use must have counted.
        aged_ns = earlier(entry.last_seen_ns, lifetime_s * 0.6)
        rig.change_entry(key, last_seen_ns=aged_ns, lifetime_s=lifetime_s)
        assert rig.sent(A, packet).action == Action.STACK
        collector.wait_rounds(1)
        assert set(rig.entries(A)) == {key}
        entry = rig.entries(A)[key]
    assert entry.packets[0] == 2 + USES
    assert collector.state().examined


def test_a_marked_entry_that_turns_out_to_live_is_unmarked(rig: Rig, collector: Collector) -> None:
    converse(rig, A, 1000)
    key, _ = rig.entry(A)
    rig.change_entry(key, flags=ConntrackFlags.EXPIRED)
    assert eventually(lambda: not rig.entries(A)[key].flags & ConntrackFlags.EXPIRED)
    collector.wait_rounds(2)
    assert key in rig.entries(A)


def test_flows_of_an_endpoint_that_is_gone_are_collected_at_once(
    rig: Rig, collector: Collector
) -> None:
    for port in range(50):
        converse(rig, A, 1000 + port)
    converse(rig, B, 1000)
    rig.maps["pw_usage"].delete(A.instance.to_bytes(4, "little"))
    assert eventually(lambda: not rig.entries(A))
    assert rig.usage(B) == len(rig.entries(B)) == 1
    assert eventually(lambda: collector.state().removed >= 50)


@pytest.mark.timeout(1800)
def test_new_flows_are_never_refused_while_old_ones_are_collected(rig: Rig, full: bool) -> None:
    """Connections that are over soon after their reset, more of them than there is room for.

    In full: at the collector's own pace, 500 a second for ten minutes.
    """
    if full:
        with open_rig(shard_rows=512) as roomy:
            roomy.reset()
            flood(roomy, rate=500, seconds=600, tick_ms=100)
    else:
        with rig.smaller_shards(SMALL_SHARD_ROWS) as small:
            open_in_lots(small)


def open_in_lots(rig: Rig) -> None:
    """Open lot after lot, each while the one before is collected. Rows are aged, so that nobody has to wait."""
    lot = SMALL_SHARD_ROWS * len(rig.shards) // 4
    kept = [0]
    with collecting(rig) as collector:
        for number in range(LOTS):
            gone = sum(kept[:-1])
            assert eventually(partial(collector.has_removed, gone))
            first = number * lot
            kept.append(sum(open_and_reset(rig, port) for port in range(first, first + lot)))
            age_all(rig, CLOSED_LIFETIME_S + 1)
        assert min(kept[1:]) > lot * 0.9
        assert eventually(partial(collector.has_removed, sum(kept)))


def age_all(rig: Rig, seconds: float) -> None:
    """Make every entry one that was last used so much earlier."""
    for shard in rig.shards:
        for key, raw in list(shard.items()):
            value = abi.ConntrackValue.unpack(raw)
            older = value._replace(last_seen_ns=earlier(value.last_seen_ns, seconds))
            with suppress(KernelFailure):  # it has been collected
                shard.update(key, older.pack(), bpf.Update.EXIST)


def flood(rig: Rig, *, rate: int, seconds: float, tick_ms: int) -> None:
    """Open `rate` flows a second and fail on the first one that is refused.

    What the machine kept from being opened in time is opened late, but at no higher rate.
    """
    two_rounds_s = 2 * abi.CONNTRACK_SHARDS * tick_ms / 1000
    quota = int(rate * (CLOSED_LIFETIME_S + two_rounds_s + 2))
    rig.write_settings(quota=quota)
    with collecting(rig, tick_ms) as collector:
        begin, sent = time.monotonic(), 0
        while sent < seconds * rate:
            begin = max(begin, time.monotonic() - sent / rate - BEHIND_S)
            if sent < (time.monotonic() - begin) * rate:
                open_and_reset(rig, sent)
                sent += 1
            else:
                time.sleep(0.002)
        assert sent > quota * 1.2
        assert collector.state().removed > sent / 4


def open_and_reset(rig: Rig, number: int) -> bool:
    """Open a connection and break it off; tell whether it found room among the connections."""
    source, host = 1024 + number % 60000, 1 + number // 60000
    far = f"198.51.100.{host}"
    kept = False
    for flags in (SYN, SYN | ACK, ACK, RST):
        if flags == SYN | ACK:
            answer = ipv4(far, A.ipv4, tcp(80, source, flags))
            outcome = rig.received(A, answer, ingress_ifindex=OUTSIDE)
        else:
            outcome = rig.sent(A, ipv4(A.ipv4, far, tcp(source, 80, flags)))
        assert outcome.reason == DropReason.NONE, number
        kept |= rig.usage(A) > 0
    return kept


@contextmanager
def pin_directory() -> Iterator[Path]:
    """Mount a BPF file system of our own."""
    with tempfile.TemporaryDirectory(prefix=leavings.NAME) as path:
        subprocess.run(["mount", "-t", "bpf", "bpf", path], check=True)
        try:
            yield Path(path)
        finally:
            subprocess.run(["umount", path], check=True)


def test_collection_goes_on_when_no_process_is_left() -> None:
    with pin_directory() as pins:
        command = [
            sys.executable,
            "-m",
            "tests.packet.leave_collector",
            str(pins),
            str(QUICK_TICK_MS),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=100
        )
        assert not done.returncode, done.stderr
        timer = bpf.open_pinned_map(
            str(pins / "pw_ct_timer"),
            kind=bpf.MapType.ARRAY,
            key_size=4,
            value_size=TIMER_BYTES + abi.COLLECTION_BYTES,
        )
        assert timer is not None
        with timer:
            collector = Collector(timer)
            collector.wait_rounds(2)
            assert eventually(lambda: collector.state().removed == LEFT_ENTRIES)
