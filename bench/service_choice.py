"""What the first packet to a service costs among few services and among many, in ns: the programs alone.

The kernel's clock around single test runs of the shipped from_pod, each of a SYN from another port. Every service has
ten back ends, which are ports of one pod beside the asker. Blocks with few services and with many take turns; in each
the same service is asked, or any. Beside it the first packet to the pod itself.
"""

import argparse
import ipaddress
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Final

from bench import results_file
from bench.stats import median_of, quantile, ratio_of
from podwire.datapath import abi
from podwire.datapath.maps import to_mapped
from podwire.kernel import netns
from podwire.kernel.bpf_program import Packet
from tests.packet import frames
from tests.packet.frames import SYN, ipv4, tcp
from tests.packet.rig import A, B, Rig, open_rig
from tests.packet.services import PORT, turn_on

FEW, MANY = 10, 10_000
BACK_ENDS: Final = 10
FIRST_VIP: Final = int(ipaddress.IPv4Address("10.96.0.1"))
FIRST_LIST, FIRST_NUMBER = 1, 1_000_000
BACK_END_PORT: Final = 8080
SEED: Final = 14
NEW_FLOWS: Final = 1_000_000
"""Room for those that are opened: a quarter is for brief flows."""
WARM: Final = 50
"""Packets of a block that are not counted: what filled the maps has pushed the programs out of the caches."""
Samples = dict[str, list[float]]


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--packets", type=int, default=1000, help="of a block, to each goal")
    arguments = parser.parse_args()
    samples: Samples = {}
    chance, ports = random.Random(SEED), count()
    with open_rig(shard_rows=2 * NEW_FLOWS // abi.CONNTRACK_SHARDS) as rig:
        rig.reset()
        for pod in (A, B):
            rig.publish(rig.write(pod))
        rig.write_settings(quota=NEW_FLOWS)
        for block in range(2 * arguments.blocks):
            services = (FEW, MANY)[(block + block // 2) % 2]
            fill(rig, services)
            for name, goals in goals_of(services, arguments.packets, chance).items():
                costs = list(ask_each(rig, goals, ports))[WARM:]
                samples.setdefault(name, []).append(quantile(costs, 0.5))
    report(samples)


def goals_of(services: int, packets: int, chance: random.Random) -> Mapping[str, Sequence[str]]:
    """Give the addresses that are asked, by what is measured with them."""
    total = packets + WARM
    one, any_of = [0] * total, [chance.randrange(services) for _ in range(total)]
    return {
        f"the pod itself, beside {services} services": [B.ipv4] * total,
        f"always one of {services} services": list(map(vip_of, one)),
        f"any of {services} services": list(map(vip_of, any_of)),
    }


def vip_of(index: int) -> str:
    """Give the address of a service."""
    return str(ipaddress.IPv4Address(FIRST_VIP + index))


def fill(rig: Rig, services: int) -> None:
    """Have exactly so many services."""
    back_end = to_mapped(ipaddress.ip_address(B.ipv4))
    rows: dict[str, list[tuple[bytes, bytes]]] = {}
    for index in range(services):
        list_number, vip = FIRST_LIST + index, to_mapped(ipaddress.ip_address(vip_of(index)))
        for slot in range(BACK_ENDS):
            number = FIRST_NUMBER + index * BACK_ENDS + slot
            value = abi.BackEndValue(number, 0, back_end, BACK_END_PORT + slot, frames.TCP)
            place = abi.ServiceSlotKey(list_number, slot).pack()
            rows.setdefault("pw_back_ends", []).append((number.to_bytes(4, "little"), value.pack()))
            rows.setdefault("pw_service_list", []).append(
                (place, abi.ServiceSlotValue(list_number, number).pack())
            )
        for port, protocol in ((PORT, frames.TCP), (0, 0)):
            rows.setdefault("pw_services", []).append(
                (
                    abi.ServiceKey(vip, port, protocol).pack(),
                    abi.ServiceValue(list_number, BACK_ENDS, 0, 0, vip, port, protocol).pack(),
                )
            )
    for name, wanted in rows.items():
        rig.maps[name].clear()
        rig.maps[name].update_batch(wanted)
    turn_on(rig)


def ask_each(rig: Rig, goals: Sequence[str], ports: Iterator[int]) -> Iterator[float]:
    """Give what the first packet of a flow costs, of a flow to each goal."""
    program = rig.programs["from_pod"]
    with netns.namespace(rig.namespace.fileno()):
        for goal in goals:
            sport = 1024 + next(ports) % 60_000
            port = BACK_END_PORT if goal == B.ipv4 else PORT
            frame = A.frame(ipv4(A.ipv4, goal, tcp(sport, port, SYN)))
            yield program.run(Packet(frame, ifindex=A.ifindex), repeat=1).duration_ns


def report(samples: Mapping[str, Sequence[float]]) -> None:
    """Print and keep medians, and how many times the cost among few services that among many is."""
    summary: dict[str, object] = {}
    print("\nns for a first packet: median of blocks (95 % interval)")
    for name, series in samples.items():
        summary[name] = results_file.interval(median_of(series))
        print(f"  {name:40} {median_of(series)}")
    for what in ("the pod itself, beside", "always one of", "any of"):
        many, few = (samples[f"{what} {number} services"] for number in (MANY, FEW))
        ratio = ratio_of(many, few)
        summary[f"{what} many services / few"] = results_file.interval(ratio)
        print(f"  {what} {MANY} services / {FEW}: {ratio}")
    results_file.write("service_choice", summary, samples)


if __name__ == "__main__":
    main()
