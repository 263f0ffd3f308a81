"""What the lock of a pod's row costs when two CPUs have packets of one pod at once: test runs of `from_pod`.

Each CPU has a flow of its own, so that the row is all that they share. Beside it: one CPU alone, and two CPUs with a
pod each. The runs have real-time priority, so that nothing else is between the packets; a round takes a few
milliseconds.
"""

import argparse
import os
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import Final

from bench import results_file
from bench.stats import median_of
from podwire.kernel import netns
from podwire.kernel.bpf_program import Packet
from tests.packet.frames import SYN, ipv4, tcp
from tests.packet.rig import WORLD_4, A, B, Endpoint, Rig, open_rig

REPEAT: Final = 20_000
PRIORITY: Final = 10
CASES: Final[dict[str, Sequence[tuple[Endpoint, int]]]] = {
    # who sends on each CPU, from which port
    "one CPU": ((A, 4000),),
    "two CPUs, a pod each": ((A, 4000), (B, 4000)),
    "two CPUs, one pod": ((A, 4000), (A, 4001)),
}


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    samples: dict[str, list[float]] = {name: [] for name in CASES}
    with open_rig(build="") as rig:
        rig.reset()
        for _ in range(arguments.rounds):
            for name, senders in CASES.items():
                samples[name] += run_together(rig, senders)
    summary = {}
    for name, series in samples.items():
        found = median_of(series)
        print(f"{name:24} {found!s:24} ns for one packet, lowest {min(series):.0f}")
        summary[name] = {**results_file.interval(found), "lowest": min(series)}
    if not arguments.dry:
        results_file.write("row_lock", summary, samples)


def run_together(rig: Rig, senders: Sequence[tuple[Endpoint, int]]) -> list[float]:
    """Give the mean cost of a packet on each CPU, in nanoseconds."""
    fork = get_context("fork")
    barrier, answers = fork.Barrier(len(senders)), fork.SimpleQueue()
    processes = [
        fork.Process(
            target=lambda cpu=cpu, sender=sender: answers.put(_run(rig, cpu, sender, barrier))
        )
        for cpu, sender in enumerate(senders)
    ]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    return found


def _run(rig: Rig, cpu: int, sender: tuple[Endpoint, int], barrier: Barrier) -> float:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[cpu]})
    endpoint, port = sender
    frame = endpoint.frame(ipv4(endpoint.ipv4, WORLD_4, tcp(port, 80, SYN)))
    packet = Packet(frame, ifindex=endpoint.ifindex)
    with netns.namespace(rig.namespace.fileno()):
        program = rig.programs["from_pod"]
        program.run(packet)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
        barrier.wait()
        until_s = time.monotonic() + 0.002  # the other one comes out of the barrier, too
        while time.monotonic() < until_s:
            pass
        return program.run(packet, repeat=REPEAT).duration_ns


if __name__ == "__main__":
    main()
