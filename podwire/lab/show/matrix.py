"""`lab check`: try and time connections between all parts of a lab, by every family and protocol, small and large.

Used by the CLI, the demo and tests. Only connections that are meant to work are tried, so every failure is a fault.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import permutations
from typing import Final

import msgspec

from podwire.lab import state as states
from podwire.lab import traffic
from podwire.lab.labs import Place, locate
from podwire.lab.state import LabState, Pod, read_state

CHECK_PORT: Final = 7999
_CHECK_THREADS: Final = 4
_DATAGRAM_TRIES: Final = 3
"""A lost datagram is not a missing way; how many it took is told."""
LARGE_TCP_BYTES: Final = 256 * 1024
LARGE_DATAGRAM_BYTES: Final = 60_000
"""Fragments of every size; the largest that fits both families with all headers is 65,507."""
_TRIED: Final = (
    ("tcp", 0),
    ("udp", 0),
    ("icmp", 0),
    ("tcp", LARGE_TCP_BYTES),
    ("udp", LARGE_DATAGRAM_BYTES),
    ("icmp", LARGE_DATAGRAM_BYTES),
)


class CheckedPair(msgspec.Struct, frozen=True):
    """One cell of the connectivity matrix. `size_bytes`: of what was sent, 0 = a short question."""

    source: str
    target: str
    address: str
    protocol: str
    size_bytes: int
    attempt: traffic.Attempt


def check(lab: str) -> list[CheckedPair]:
    """Try every pair of pods, nodes and the world, in every family, by TCP, UDP and ICMP, small and large."""
    state = read_state(lab)
    places = _list_places(state)
    pods_there = {pod.full_name for pod in state.pods}
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(_CHECK_THREADS))
        servers: list[states.Process] = []
        stack.callback(states.end_all, servers)
        for started in threads.map(_start_check_servers, places, places.values()):
            servers.extend(started)
        pairs = [
            threads.submit(_check_pair, source, target, address, tried, places[source][0])
            for source, target in permutations(places, 2)
            if source != "world" or target not in pods_there  # nobody outside knows pods' addresses
            for address in _common(places[source], places[target])
            for tried in _TRIED
        ]
        return [pair.result() for pair in pairs]


def _list_places(state: LabState) -> Mapping[str, Place]:
    names = [pod.full_name for pod in state.pods]
    names += [node.name for node in state.plan.nodes] + ["world"]
    return {name: locate(state, name) for name in names}


def _common(source: Place, target: Place) -> list[str]:
    """Give the target's addresses of families that the source has; a node speaks every family that its pods do."""
    has = {":" in address for address in source[1]}
    return [address for address in target[1] if (":" in address) in has]


def _start_check_servers(name: str, place: Place) -> list[states.Process]:
    helper = Pod(namespace="check", name=name, node="-", container_id="", netns=place[0], labels={})
    servers = traffic.start_servers(helper, [(CHECK_PORT, "tcp"), (CHECK_PORT, "udp")])
    return [servers[0].process]


def _check_pair(
    source: str, target: str, address: str, tried: tuple[str, int], namespace: str
) -> CheckedPair:
    protocol, size_bytes = tried
    if protocol == "icmp":
        attempt = traffic.ping(namespace, address, size_bytes=size_bytes, tries=_DATAGRAM_TRIES)
    else:
        tries = _DATAGRAM_TRIES if protocol == "udp" else 1
        attempt = traffic.connect(
            namespace, address, CHECK_PORT, protocol, size_bytes=size_bytes, tries=tries
        )
    return CheckedPair(source, target, address, protocol, size_bytes, attempt)
