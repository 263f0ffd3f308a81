"""Same-node throughput and round trips: podwire, an empty redirect on the very same devices, `ptp`, `bridge`.

Every round measures all four, in an order that turns from round to round. For throughput each end of the connection has
a CPU of its own; for round trips both share one, because otherwise it is measured how fast an idle CPU wakes up.
"""

import argparse
import json
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import results_file
from bench.contestants import (
    Contestant,
    compile_bpf,
    compile_c,
    mac_number,
    one_node,
    pod_namespace,
    podwire_on,
    reference,
    scratch,
)
from bench.pair import read_numbers
from bench.stats import in_turns, median_of, ratio_of
from podwire.kernel import netns
from podwire.kernel.bpf_object import BpfObject
from podwire.kernel.bpf_program import Program, open_pinned_program
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl import tc

STREAM_MS = 2000
ROUND_TRIPS = 20_000
TWO_CPUS, ONE_CPU = ("0", "1"), ("1", "1")


@dataclass(frozen=True)
class AttachedPod:
    """A pod of a contestant, as the plugin's answer describes it."""

    namespace: str
    address: str
    mac: str
    host_name: str
    host_mac: str
    host_index: int


@dataclass(frozen=True)
class Way:
    """A way between two pods: who it is, the pods, and what must be in force on their devices."""

    name: str
    client: AttachedPod
    server: AttachedPod
    enter: Callable[[], None]


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    samples: dict[str, list[float]] = {}
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        tool = compile_c("flow", directory)
        paths = _paths(stack, directory)
        for path in in_turns(paths, arguments.rounds):
            path.enter()
            _measure(tool, path, samples)
    results_file.write("throughput", _summarise(samples), samples)


def _measure(tool: str, path: Way, samples: dict[str, list[float]]) -> None:
    moved_bytes, elapsed_ns = _run(tool, "stream", path, STREAM_MS, TWO_CPUS)
    p50_ns, p90_ns, p99_ns = _run(tool, "ask", path, ROUND_TRIPS, ONE_CPU)
    for what, figure in (
        ("Gbit/s", moved_bytes * 8 / elapsed_ns),
        ("round trip p50 us", p50_ns / 1e3),
        ("round trip p90 us", p90_ns / 1e3),
        ("round trip p99 us", p99_ns / 1e3),
    ):
        samples.setdefault(f"{path.name} {what}", []).append(round(figure, 3))


def _run(tool: str, what: str, path: Way, amount: int, cpus: tuple[str, str]) -> list[int]:
    server, client = (netns.named_path(pod.namespace) for pod in (path.server, path.client))
    words = [tool, what, server, client, path.server.address, str(amount), *cpus]
    return read_numbers(words, path.name)


def _paths(stack: ExitStack, directory: Path) -> list[Way]:
    state = stack.enter_context(one_node())
    ours = podwire_on(state, directory)
    client, server = (stack.enter_context(_attached(ours)) for _ in range(2))
    swap = stack.enter_context(
        _swapped_programs(ours.node_namespace, state.plan.nodes[0].pins, client, server, directory)
    )
    paths = [Way(name, client, server, enter) for name, enter in swap.items()]
    for plugin in ("ptp", "bridge"):
        other = reference(plugin, directory)
        pair = [stack.enter_context(_attached(other)) for _ in range(2)]
        paths.append(Way(plugin, pair[0], pair[1], lambda: None))
    return paths


@contextmanager
def _attached(contestant: Contestant) -> Iterator[AttachedPod]:
    container_id = uuid.uuid4().hex
    with pod_namespace() as namespace:
        *_, answer = contestant.execute("ADD", container_id, namespace)
        inside = next(interface for interface in answer["interfaces"] if interface.get("sandbox"))
        host = next(
            interface
            for interface in answer["interfaces"]
            if interface["name"].startswith(("pw", "veth"))
        )
        yield AttachedPod(
            namespace=namespace,
            address=answer["ips"][0]["address"].partition("/")[0],
            mac=inside["mac"],
            host_name=host["name"],
            host_mac=host["mac"],
            host_index=_index_of(contestant.node_namespace, host["name"]),
        )
        contestant.execute("DEL", container_id, namespace)


def _index_of(namespace: str, name: str) -> int:
    command = ["ip", "-n", namespace, "-json", "link", "show", "dev", name]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(json.loads(shown)[0]["ifindex"])


@contextmanager
def _swapped_programs(
    node: str, pins: Path, client: AttachedPod, server: AttachedPod, directory: Path
) -> Iterator[Mapping[str, Callable[[], None]]]:
    """Give functions that put podwire's programs, or the empty ones, on the two pods' host devices."""
    with ExitStack() as stack:
        found = [open_pinned_program(str(path)) for path in sorted(pins.glob("**/from_pod"))]
        full = next(program for program in found if program is not None)
        for program in found:
            if program is not None:
                stack.enter_context(program)
        empty = {
            here: stack.enter_context(_empty_redirect(there, directory))
            for here, there in ((client, server), (server, client))
        }
        fd = stack.enter_context(netns.open_namespace(netns.named_path(node)))
        netlink = stack.enter_context(NetlinkSocket.open_in(fd.fileno()))

        def put(programs: Mapping[AttachedPod, Program]) -> None:
            netlink.execute(
                [
                    tc.set_bpf_filter(pod.host_index, tc.FROM_POD_HOOK, program.fd, "from_pod")
                    for pod, program in programs.items()
                ]
            )

        yield {
            "podwire": lambda: put({client: full, server: full}),
            "redirect": lambda: put(empty),
        }
        put({client: full, server: full})


@contextmanager
def _empty_redirect(target: AttachedPod, directory: Path) -> Iterator[Program]:
    with BpfObject(compile_bpf("redirect", directory), "redirect") as loaded:
        loaded.set_constants(
            {
                "target_index": target.host_index,
                "destination_mac": mac_number(target.mac),
                "source_mac": mac_number(target.host_mac),
            }
        )
        loaded.load()
        with loaded.take_program("redirect") as program:
            yield program


def _summarise(samples: Mapping[str, list[float]]) -> dict[str, object]:
    summary: dict[str, object] = {}
    print(f"\n{'':20}{'podwire':>24}   podwire / other (95 % interval)")
    for what in ("Gbit/s", "round trip p50 us", "round trip p90 us", "round trip p99 us"):
        ours = samples[f"podwire {what}"]
        row: dict[str, object] = {"podwire": results_file.interval(median_of(ours))}
        shown = []
        for peer in ("redirect", "ptp", "bridge"):
            ratio = ratio_of(ours, samples[f"{peer} {what}"])
            row[f"ratio to {peer}"] = results_file.interval(ratio)
            shown.append(f"{peer} {ratio}")
        print(f"{what:20}{median_of(ours)!s:>24}   {'; '.join(shown)}")
        summary[what] = row
    return summary


if __name__ == "__main__":
    main()
