"""What one packet costs in each program: the kernel's own clock around test runs of the shipped objects.

Used by the benchmark (`bench/`), by hand (`python -m tests.packet.timing`) and by no test: figures are no verdicts. A
test run goes on with the packet it has just changed, so the two pods have each other's MACs (a delivered frame is then
one that the sender may send again), and a run is short enough for the hop count.
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from podwire.kernel import netns
from podwire.kernel.bpf_program import Packet
from tests.packet.frames import ACK, SYN, Segment, ipv4, ipv6, tcp
from tests.packet.rig import OUTSIDE, WORLD_4, A, B, Endpoint, Rig, open_rig

REPEAT: Final = 200
"""Runs in one call: fewer than a packet has hops."""
HOPS: Final = 255
PAYLOAD: Final = bytes(1000)


@dataclass(frozen=True)
class Measured:
    """A packet whose cost is wanted: which program, at which device, which frame."""

    name: str
    program: str
    ifindex: int
    frame: bytes
    ingress_ifindex: int = 0


class _Mirror(Endpoint):
    """B with the MACs of A the other way round."""

    @property
    def pod_mac(self) -> str:
        return A.host_mac

    @property
    def host_mac(self) -> str:
        return A.pod_mac


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
        Measured("from_pod, to the world", "from_pod", A.ifindex, A.frame(world)),
        Measured("to_pod, answer of the world", "to_pod", A.ifindex, A.frame_in(back), OUTSIDE),
        Measured(
            "from_pod, spoofed source", "from_pod", A.ifindex, A.frame(world, source=B.pod_mac)
        ),
    ]


@contextmanager
def open_bench(build: str = "") -> Iterator[tuple[Rig, list[Measured]]]:
    """Load the shipped objects and establish the flows that are measured."""
    with open_rig(build=build) as rig:
        rig.reset()
        peer = rig.write(_Mirror(**{name: getattr(B, name) for name in B.__dataclass_fields__}))
        rig.publish(peer)
        for version in (4, 6):
            _establish(rig, peer, version)
        for segment in (tcp(40000, 80, SYN), tcp(40000, 80, ACK)):
            there = A.frame(_packet(A.ipv4, WORLD_4, segment))
            back = A.frame_in(_packet(WORLD_4, A.ipv4, tcp(80, 40000, SYN | ACK)))
            run_once(rig, Measured("", "from_pod", A.ifindex, there), 1)
            run_once(rig, Measured("", "to_pod", A.ifindex, back, OUTSIDE), 1)
        yield rig, _measured(peer)


def run_once(rig: Rig, case: Measured, repeat: int = REPEAT) -> int:
    """Give the mean cost of `repeat` runs, in nanoseconds."""
    packet = Packet(case.frame, ifindex=case.ifindex, ingress_ifindex=case.ingress_ifindex)
    with netns.namespace(rig.namespace.fileno()):
        return rig.programs[case.program].run(packet, repeat=repeat).duration_ns


def measure_programs(rounds: int = 200) -> dict[str, tuple[float, float]]:
    """Give, for each case, the median and the lowest of `rounds` calls, in nanoseconds for one packet."""
    found: dict[str, list[int]] = {}
    with open_bench() as (rig, cases):
        for _ in range(rounds):
            for case in cases:
                found.setdefault(case.name, []).append(run_once(rig, case))
    return {name: (statistics.median(values), min(values)) for name, values in found.items()}


def main() -> None:
    """Print the table."""
    for name, (median, lowest) in measure_programs().items():
        print(f"{name:45} {median:7.0f} ns  (lowest {lowest:.0f})")


if __name__ == "__main__":
    main()
