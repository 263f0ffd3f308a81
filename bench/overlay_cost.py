"""What a packet of the overlay costs, cause by cause: the plain kernel, and with what podwire's nodes have besides.

"rules" are nftables rules for masquerade, which bring connection tracking and address translation into the way of every
tunnel packet, exempt or not; "flow-based" is a VXLAN device that is told each packet's receiver and tells each
packet's sender, as podwire's. "podwire, no rules" has its agents killed and its table of nftables taken away: what is
left is its device and its programs. "podwire, own headers" sends what leaves a pod by one program that writes the outer
headers itself (bpf/outer.bpf.c): neither netfilter, nor the tunnel device, nor from_pod sees it; what arrives takes
podwire's way. CUBIC, because BBR (the default of some kernels) goes by timers and sends from two
CPUs: its throughput is that of its guesses.
"""

import argparse
import ipaddress
import json
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from bench import results_file
from bench.contestants import compile_bpf, compile_c, mac_number, scratch
from bench.cross_node import ONE_CPU, ROUND_TRIPS, TWO_CPUS, lab_pair
from bench.pair import PodPair, run_flow
from bench.plain_nodes import plain_pair, run_in
from bench.stats import median_of, quantile, ratio_of
from podwire.kernel import netns
from podwire.kernel.bpf_object import BpfObject
from podwire.kernel.bpf_program import Program
from podwire.kernel.netlink import NetlinkSocket
from podwire.kernel.rtnl import tc
from podwire.lab.node import stop_agent
from podwire.lab.state import read_state
from podwire.lab.topology import UPLINK, NodePlan
from podwire.model.cluster import DEFAULT_TUNNEL_PORT, TUNNEL_DEVICE
from podwire.model.ids import DEVICE_HASH_DIGITS, DEVICE_PREFIX, NFT_TABLE


@contextmanager
def lab_pair_without_rules(name: str) -> Iterator[PodPair]:
    """Give two pods of an overlay whose nodes have no rules, nor an agent that would write them anew."""
    with lab_pair(name, "overlay") as pair:
        state = read_state(name)
        for one in state.plan.nodes:
            stop_agent(state, one, signal.SIGKILL)
            run_in(one.namespace, ["nft", f"delete table inet {NFT_TABLE}"])
        yield pair


HOST_END: Final = re.compile(rf"{DEVICE_PREFIX}[0-9a-f]{{{DEVICE_HASH_DIGITS}}}")


@contextmanager
def lab_pair_with_own_headers(name: str) -> Iterator[PodPair]:
    """Give two pods of an overlay, of which each one's packets get their outer headers from a program of its own."""
    with ExitStack() as stack:
        directory = stack.enter_context(scratch())
        pair = stack.enter_context(lab_pair(name, "overlay"))
        nodes = read_state(name).plan.nodes
        for own, peer in (nodes, nodes[::-1]):
            fd = stack.enter_context(netns.open_namespace(netns.named_path(own.namespace)))
            netlink = stack.enter_context(NetlinkSocket.open_in(fd.fileno()))
            [pod] = [link for link in _list_links(own) if HOST_END.fullmatch(link["ifname"])]
            program = stack.enter_context(_outer_program(own, peer, directory))
            netlink.execute(
                [tc.set_bpf_filter(pod["ifindex"], tc.FROM_POD_HOOK, program.fd, "from_pod")]
            )
        yield pair


@contextmanager
def _outer_program(own: NodePlan, peer: NodePlan, directory: Path) -> Iterator[Program]:
    inside = ipaddress.IPv4Network(peer.pod_cidrs[0])
    [identity] = {one["identity"] for one in read_json(own, "/v1/endpoint")}
    constants = {
        "uplink_index": _find_link(own, UPLINK)["ifindex"],
        "own_be": _as_stored(own.addresses[0]),
        "peer_be": _as_stored(peer.addresses[0]),
        "inside_be": _as_stored(str(inside.network_address)),
        "inside_mask_be": _as_stored(str(inside.netmask)),
        "tunnel_number": identity,
        "tunnel_port": DEFAULT_TUNNEL_PORT,
        "destination_mac": mac_number(_find_link(peer, TUNNEL_DEVICE)["address"]),
    }
    with BpfObject(compile_bpf("outer", directory), "outer") as loaded:
        loaded.set_constants(constants)
        loaded.load()
        with loaded.take_program("outer") as program:
            yield program


def _as_stored(address: str) -> int:
    """Give the number that the bytes of an address are on this machine."""
    return int.from_bytes(ipaddress.IPv4Address(address).packed, "little")


def _list_links(node: NodePlan) -> list[dict[str, Any]]:
    words = ["ip", "-n", node.namespace, "-json", "link", "show"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return cast("list[dict[str, Any]]", json.loads(shown))


def _find_link(node: NodePlan, name: str) -> dict[str, Any]:
    return next(link for link in _list_links(node) if link["ifname"] == name)


def read_json(node: NodePlan, path: str) -> list[dict[str, Any]]:
    """Ask a node's agent."""
    words = ["curl", "-s", "--unix-socket", str(node.directory / "api.sock"), f"http://x{path}"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return cast("list[dict[str, Any]]", json.loads(shown))


STREAM_MS: Final = 1000
CONGESTION_CONTROL: Final = "cubic"
PLAIN: Final = "plain"
CONTESTANTS: Final = {
    PLAIN: partial(plain_pair, "bench-p", tunnel=True),
    "rules": partial(plain_pair, "bench-q", tunnel=True, masquerade=True),
    "flow-based": partial(plain_pair, "bench-f", tunnel=True, flow_based=True),
    "both": partial(plain_pair, "bench-b", tunnel=True, flow_based=True, masquerade=True),
    "podwire": partial(lab_pair, "bench-o", "overlay"),
    "podwire, no rules": partial(lab_pair_without_rules, "bench-w"),
    "podwire, own headers": partial(lab_pair_with_own_headers, "bench-h"),
}
FIGURES: Final = ("Gbit/s, one CPU", "Gbit/s, two CPUs", "round trip p50 us")


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    samples: dict[str, list[float]] = {}
    names = list(CONTESTANTS)
    with ExitStack() as stack:
        tool = compile_c("flow", stack.enter_context(scratch()))
        pairs = {name: stack.enter_context(CONTESTANTS[name]()) for name in names}
        for number in range(arguments.rounds):
            turn = number % len(names)
            for name in [*names[turn:], *names[:turn]]:
                _measure(tool, name, pairs[name], samples)
            print(f"round {number + 1} of {arguments.rounds}", flush=True)
    results_file.write("overlay_cost", _summarise(samples), samples)


def _measure(tool: str, name: str, pair: PodPair, samples: dict[str, list[float]]) -> None:
    round_trip_ns, *_ = run_flow(tool, "ask", pair, ROUND_TRIPS, ONE_CPU)
    figures = [
        *(_stream(tool, pair, cpus) for cpus in (ONE_CPU, TWO_CPUS)),
        round_trip_ns / 1e3,
    ]
    for what, figure in zip(FIGURES, figures, strict=True):
        samples.setdefault(f"{name} {what}", []).append(round(figure, 3))


def _stream(tool: str, pair: PodPair, cpus: tuple[str, str]) -> float:
    moved_bytes, elapsed_ns = run_flow(tool, "stream", pair, STREAM_MS, cpus, CONGESTION_CONTROL)
    return moved_bytes * 8 / elapsed_ns


def _median(samples: Sequence[float]) -> float:
    return quantile(samples, 0.5)


def _summarise(samples: Mapping[str, list[float]]) -> dict[str, object]:
    summary: dict[str, object] = {}
    for what in FIGURES:
        print(f"\n{what:24}{'median':>24}   / plain (95 % interval)")
        for name in CONTESTANTS:
            own, plain = samples[f"{name} {what}"], samples[f"{PLAIN} {what}"]
            found, ratio = median_of(own), ratio_of(own, plain, _median)
            print(f"  {name:22}{found!s:>24}   {ratio}")
            summary[f"{name} {what}"] = {
                "median": results_file.interval(found),
                "ratio": results_file.interval(ratio),
            }
    return summary


if __name__ == "__main__":
    main()
