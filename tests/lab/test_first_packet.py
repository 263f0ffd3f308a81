"""The first packet after an ADD: sent in the moment when the launcher has answered, from the node and from a neighbour.

The machine is busy meanwhile, so that what the kernel puts off comes late: ADDs and DELs run side by side, every CPU
has something to compute, and a device is changed all the time, for which the kernel has the one lock that ADD needs.
60 ADDs on each kind of node; with `--full` 20,000 on the three together.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from podwire.kernel import netns
from tests.first_packets import Sender
from tests.lab.rig import Rig

pytestmark = [pytest.mark.lab, pytest.mark.timeout(4 * 3600)]
SIDE_BY_SIDE = 6
ADDS, ADDS_FULL = 10, 1112
"""Of each of those that run side by side."""
NEIGHBOURS_QUOTA = 32_768
"""The neighbour opens a flow with each pod, and what is over is remembered for a while."""
IPV4, IPV6 = "10.99.0.0/24", "fd99::/64"
COMPUTE = "while :; do :; done"
CHANGE = "yes 'link set lo mtu 65000\nlink set lo mtu 65536' | ip -batch -"


@contextlib.contextmanager
def busy_machine(rig: Rig) -> Iterator[None]:
    """Keep every CPU busy, and the kernel's lock for devices."""
    elsewhere = rig.make_namespace(f"{rig.name}busy")
    commands = [["nice", "sh", "-c", COMPUTE]] * len(os.sched_getaffinity(0))
    commands.append(["ip", "netns", "exec", elsewhere, "sh", "-c", CHANGE])
    processes = [subprocess.Popen(command, start_new_session=True) for command in commands]
    try:
        yield
    finally:
        for process in processes:
            os.killpg(process.pid, 9)
            process.wait()


@contextlib.contextmanager
def pod_namespace(name: str) -> Iterator[str]:
    """Give a namespace as runtimes make it."""
    netns.create_named(name).close()
    try:
        yield name
    finally:
        netns.delete_named(name)


def attach_again_and_again(rig: Rig, neighbour: str, worker: int, count: int) -> None:
    """Attach pods one after the other; AssertionError when one cannot be reached at the first try."""
    with (
        Sender("the node", netns.named_path(rig.name)) as node,
        Sender("a neighbour", netns.named_path(neighbour)) as pod,
    ):
        for number in range(count):
            container = f"c{worker}-{number}"
            with pod_namespace(f"{rig.name}n{worker}") as namespace:
                added = rig.cni("ADD", container, namespace)
                assert added.ok, added.document
                for sender in (node, pod):
                    sender.send(added.addresses)
                lost = [*node.list_lost(), *pod.list_lost()]
                assert not lost, container
                assert rig.cni("DEL", container, namespace).ok


@pytest.mark.parametrize(
    "cidrs",
    [
        pytest.param((IPV4,), id="ipv4"),
        pytest.param((IPV6,), id="ipv6"),
        pytest.param((IPV4, IPV6), id="dual"),
    ],
)
def test_no_first_packet_is_lost(cidrs: Sequence[str], full: bool) -> None:
    room = {"conntrack_entries": 65_536, "conntrack_quota": NEIGHBOURS_QUOTA}
    with Rig(cidrs=cidrs, **room) as rig, ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        rig.start()
        neighbour = rig.make_pod_namespace()
        assert rig.cni("ADD", "neighbour", neighbour).ok
        with busy_machine(rig):
            count = ADDS_FULL if full else ADDS
            done = [
                threads.submit(attach_again_and_again, rig, neighbour, worker, count)
                for worker in range(SIDE_BY_SIDE)
            ]
            for probe in done:
                probe.result()
