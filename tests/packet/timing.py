"""What one packet costs in each program: the kernel's own clock around test runs of the shipped objects.

Used by the benchmark (`bench/`), by hand (`python -m tests.packet.timing`) and by no test: figures are no verdicts. A
test run goes on with the packet it has just changed, so the two pods have each other's MACs (a delivered frame is then
one that the sender may send again), and a run is short enough for the hop count.
"""

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final

from podwire.datapath.abi import CONNTRACK_SHARDS, ConfigFlags
from podwire.datapath.policy_maps import PolicyTable
from podwire.kernel import netns
from podwire.kernel.bpf_program import Packet
from podwire.model.policy import (
    CIDR_IDENTITY_FIRST,
    Direction,
    PolicyEntry,
    PolicyKey,
    Verdict,
)
from tests.packet import frames, overlay
from tests.packet.frames import ACK, RST, SYN, Segment, ipv4, ipv6, tcp
from tests.packet.rig import ALLOW, OUTSIDE, SMALL, WORLD_4, A, B, Endpoint, Rig, open_rig

REPEAT: Final = 200
"""Runs in one call: fewer than a packet has hops."""
HOPS: Final = 255
PAYLOAD: Final = bytes(1000)
POLICIES: Final = 1000
ENTRIES_OF_A_POLICY: Final = 10
SLOTS: Final = 10
"""The slot that is asked, and others beside it: 100,000 entries in all."""
ASKED_SLOT: Final = 1
NEW_FLOWS: Final = 100_000
"""Room for those that the benchmark opens."""


@dataclass(frozen=True)
class Measured:
    """A packet whose cost is wanted: which program, at which device, which frame."""

    name: str
    program: str
    ifindex: int
    frame: bytes
    ingress_ifindex: int = 0
    policed: bool = False
    """A has a slot full of entries; otherwise it has none."""
    opens: bool = False
    """Every run is of a packet that opens a flow: one run, another port each time."""


class _Mirror(Endpoint):
    """B with the MACs of A the other way round."""

    @property
    def pod_mac(self) -> str:
        return A.host_mac

    @property
    def host_mac(self) -> str:
        return A.pod_mac


class _Level(Endpoint):
    """An endpoint whose MACs are one: what it sends into the tunnel is a frame that it may send again."""

    @property
    def host_mac(self) -> str:
        return self.pod_mac


def _connect(rig: Rig) -> Endpoint:
    """Open a flow to a pod of another node; gives the endpoint that it is of."""
    sender = rig.write(_Level(**{name: getattr(SMALL, name) for name in B.__dataclass_fields__}))
    rig.publish(sender)
    overlay.connect(rig, quota=NEW_FLOWS)
    overlay.write_node(rig, _LevelNode(**vars(overlay.FAR)))
    for version in (4, 6):
        ends = sender.address(version), overlay.FAR.pod(version)
        answer = sender.frame_in(_packet(*ends[::-1], tcp(80, 40000, SYN | ACK)))
        for flags in (SYN, SYN | ACK, ACK):
            frame = sender.frame(_packet(*ends, tcp(40000, 80, flags)))
            if flags == SYN | ACK:
                case = Measured("", "to_pod", sender.ifindex, answer, OUTSIDE)
            else:
                case = Measured("", "from_pod", sender.ifindex, frame)
            run_once(rig, case, 1)
    return sender


class _LevelNode(overlay.Remote):
    """Another node with that MAC, too."""

    @property
    def mac(self) -> str:
        return SMALL.pod_mac


def _measured_tunnel(sender: Endpoint) -> list[Measured]:
    data = tcp(40000, 80, ACK, PAYLOAD)
    return [
        Measured(
            f"from_pod, to another node, IPv{version}",
            "from_pod",
            sender.ifindex,
            sender.frame(_packet(sender.address(version), overlay.FAR.pod(version), data)),
        )
        for version in (4, 6)
    ]


def _packet(source: str, destination: str, segment: Segment) -> bytes:
    if ":" in source:
        return ipv6(source, destination, segment, hop_limit=HOPS)
    return ipv4(source, destination, segment, ttl=HOPS)


def _establish(rig: Rig, peer: Endpoint, version: int) -> None:
    ends = A.address(version), peer.address(version)
    for sender, source, destination, segment in (
        (A, *ends, tcp(40000, 80, SYN)),
        (peer, *ends[::-1], tcp(80, 40000, SYN | ACK)),
        (A, *ends, tcp(40000, 80, ACK)),
    ):
        frame = sender.frame(_packet(source, destination, segment))
        run_once(rig, Measured("", "from_pod", sender.ifindex, frame), 1)


def _fill_slots(rig: Rig) -> None:
    """Write what POLICIES policies come to, in as many slots as a node with some identities has."""
    table = PolicyTable(SimpleNamespace(**rig.maps), 1_000_000)  # type: ignore[arg-type]
    entry = PolicyEntry(Verdict.ALLOW, 1, 1)
    for slot in range(ASKED_SLOT, ASKED_SLOT + SLOTS):
        rows = {
            PolicyKey(10_000 + policy, direction, frames.TCP, port, 16): entry
            for policy in range(POLICIES)
            for port in range(ENTRIES_OF_A_POLICY // 2)
            for direction in Direction
        }
        rows |= {
            PolicyKey(number, direction, frames.TCP, 80, 16): entry
            for number in (A.identity, B.identity, 2)
            for direction in Direction
        }
        table.write_slot(slot, rows)
    rig.cidr("0.0.0.0/0", CIDR_IDENTITY_FIRST)


def _policed_cases(peer: Endpoint) -> list[Measured]:
    established = A.frame(_packet(A.ipv4, peer.ipv4, tcp(40000, 80, ACK, PAYLOAD)))
    opening = A.frame(_packet(A.ipv4, peer.ipv4, tcp(40000, 80, SYN)))
    forgotten = A.frame(_packet(A.ipv4, WORLD_4, tcp(41000, 80, RST)))
    cases = []
    for policed in (False, True):
        how = f"{POLICIES} policies" if policed else "no policy"
        place = "from_pod", A.ifindex
        cases += [
            Measured(f"established, {how}", *place, established, policed=policed),
            Measured(f"judged each time, {how}", *place, forgotten, policed=policed),
            Measured(f"first packet, {how}", *place, opening, policed=policed, opens=True),
        ]
    return cases


def _measured(peer: Endpoint) -> list[Measured]:
    data, answer = tcp(40000, 80, ACK, PAYLOAD), tcp(80, 40000, ACK, PAYLOAD)
    cases = []
    for version in (4, 6):
        ends = A.address(version), peer.address(version)
        question, reply = _packet(*ends, data), _packet(*ends[::-1], answer)
        cases += [
            Measured(
                f"from_pod, to a local pod, IPv{version}", "from_pod", A.ifindex, A.frame(question)
            ),
            Measured(
                f"from_pod, answer to a local pod, IPv{version}",
                "from_pod",
                peer.ifindex,
                peer.frame(reply),
            ),
        ]
    world = _packet(A.ipv4, WORLD_4, data)
    back = _packet(WORLD_4, A.ipv4, answer)
    return [
        *cases,
        *_policed_cases(peer),
        Measured("from_pod, to the world", "from_pod", A.ifindex, A.frame(world)),
        Measured("to_pod, answer of the world", "to_pod", A.ifindex, A.frame_in(back), OUTSIDE),
        Measured(
            "from_pod, spoofed source", "from_pod", A.ifindex, A.frame(world, source=B.pod_mac)
        ),
    ]


@contextmanager
def open_bench(build: str = "") -> Iterator[tuple[Rig, list[Measured]]]:
    """Load the shipped objects and establish the flows that are measured."""
    with open_rig(build=build, shard_rows=2 * NEW_FLOWS // CONNTRACK_SHARDS) as rig:
        rig.reset()
        rig.write_settings(quota=NEW_FLOWS)
        _fill_slots(rig)
        peer = rig.write(_Mirror(**{name: getattr(B, name) for name in B.__dataclass_fields__}))
        rig.publish(peer)
        for version in (4, 6):
            _establish(rig, peer, version)
        for segment in (tcp(40000, 80, SYN), tcp(40000, 80, ACK)):
            there = A.frame(_packet(A.ipv4, WORLD_4, segment))
            back = A.frame_in(_packet(WORLD_4, A.ipv4, tcp(80, 40000, SYN | ACK)))
            run_once(rig, Measured("", "from_pod", A.ifindex, there), 1)
            run_once(rig, Measured("", "to_pod", A.ifindex, back, OUTSIDE), 1)
        yield rig, [*_measured(peer), *_measured_tunnel(_connect(rig))]


def run_once(rig: Rig, case: Measured, repeat: int = REPEAT) -> int:
    """Give the mean cost of `repeat` runs, in nanoseconds."""
    frame = case.frame
    if case.opens:
        repeat = 1
        frame = _from_another_port(frame)
    _police(rig, case)
    packet = Packet(frame, ifindex=case.ifindex, ingress_ifindex=case.ingress_ifindex)
    with netns.namespace(rig.namespace.fileno()):
        return rig.programs[case.program].run(packet, repeat=repeat).duration_ns


_ports = itertools.count(1024)


def _from_another_port(frame: bytes) -> bytes:
    """Rewrite the source port of TCP over IPv4; nobody looks at the checksum."""
    at = frames.ETH_HLEN + 20
    port = 1024 + next(_ports) % 30_000
    return frame[:at] + port.to_bytes(2, "big") + frame[at + 2 :]


def _police(rig: Rig, case: Measured) -> None:
    """Put A's row into force, and let a flow that is open be judged by it before its packets are timed."""
    flags = ALLOW
    if case.policed:
        flags |= ConfigFlags.DENY_EGRESS | ConfigFlags.DENY_INGRESS | ConfigFlags.CIDR_EGRESS
    slot = ASKED_SLOT if case.policed else 0
    rig.change(A, slot=slot, flags=flags, revision=1 + case.policed)
    warm = Packet(case.frame, ifindex=case.ifindex, ingress_ifindex=case.ingress_ifindex)
    with netns.namespace(rig.namespace.fileno()):
        rig.programs[case.program].run(warm, repeat=1)


def in_rounds(cases: Sequence[Measured], rounds: int) -> Iterator[Measured]:
    """Give each case once in every round, in another order each time: what ran before is worth some per cent."""
    chance = random.Random(rounds)
    for _ in range(rounds):
        yield from chance.sample(cases, len(cases))


def measure_programs(rounds: int = 200) -> dict[str, tuple[float, float]]:
    """Give, for each case, the median and the lowest of `rounds` calls, in nanoseconds for one packet."""
    found: dict[str, list[int]] = {}
    with open_bench() as (rig, cases):
        for case in in_rounds(cases, rounds):
            found.setdefault(case.name, []).append(run_once(rig, case))
    return {name: (statistics.median(values), min(values)) for name, values in found.items()}


def main() -> None:
    """Print the table."""
    for name, (median, lowest) in measure_programs().items():
        print(f"{name:45} {median:7.0f} ns  (lowest {lowest:.0f})")


if __name__ == "__main__":
    main()
