"""What changes at one node is in force at the others within a second of it."""

import time
from collections.abc import Callable, Iterator

import pytest

from podwire.lab import etcd
from podwire.lab.topology import UPLINK, NodePlan
from tests.lab.labrig import Lab
from tests.lab.rig import run
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

OTHERS = ("node1", "node2")
WITHIN_S = 1.0
ROUNDS = 8
"""How often it is tried again as long as the machine is too busy for all changes of a round."""
DEAD_CONNECTION_S = 0.6
"""How long the kernel takes at least to find out that nothing of a connection arrives."""


def assert_ordinarily(change: Callable[[], list[float]], within_s: float) -> None:
    """Fail when all but one took longer: what waits for a timer does so each time, a busy machine does not."""
    took_s: list[float] = []
    for _ in range(ROUNDS):
        took_s += change()
        if sorted(took_s)[1] < within_s:
            return
    raise AssertionError(f"seconds of each: {took_s}")


def route_mtu(lab: Lab, node: str, target: NodePlan) -> int:
    """Read what a node's route to another's pods carries."""
    [network] = target.pod_cidrs
    words = run(
        "ip", "-n", lab.node(node).namespace, "route", "show", network, "proto", "199"
    ).split()
    return int(words[words.index("mtu") + 1]) if "mtu" in words else 0


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Three nodes with etcd, all of which know each other."""
    etcd.require_program()
    lab = Lab(nodes=3, families="4", routing="overlay", store="etcd")
    try:
        for other in OTHERS:
            wait_for(lambda other=other: route_mtu(lab, other, lab.node("node3")) == 1450, "routes")  # type: ignore[misc]
        yield lab
    finally:
        lab.close()


def test_the_mtu_of_a_nodes_underlay_is_followed_by_all_others(lab: Lab) -> None:
    """etcd is not told either that the node's link carries less: its answers must arrive all the same."""
    target = lab.node("node3")

    def change() -> list[float]:
        took_s: list[float] = []
        for mtu in (1400, 1500, 1300, 1290, 1500):
            begin_s = time.monotonic()
            run("ip", "-n", target.namespace, "link", "set", UPLINK, "mtu", str(mtu))
            for other in OTHERS:
                wait_for(
                    lambda other=other, mtu=mtu: route_mtu(lab, other, target) == mtu - 50,  # type: ignore[misc]
                    f"{other} to have a route for {mtu}",
                )
            took_s.append(time.monotonic() - begin_s)
        return took_s

    assert_ordinarily(change, WITHIN_S)


def test_another_address_of_a_node_is_followed_by_all_others(lab: Lab) -> None:
    """Its connections to etcd are from the old one: nothing must wait until they are found dead."""
    target = lab.node("node3")
    before = target.underlay[0]
    after = before.replace(target.addresses[0], "192.0.2.99")
    keep = f"net.ipv4.conf.{UPLINK}.promote_secondaries=1"  # else the new address goes with the old one
    run("ip", "netns", "exec", target.namespace, "sysctl", "-qw", keep)

    def change() -> list[float]:
        took_s: list[float] = []
        for old, new in [(before, after), (after, before)] * 3:
            begin_s = time.monotonic()
            run("ip", "-n", target.namespace, "addr", "add", new, "dev", UPLINK)
            run("ip", "-n", target.namespace, "addr", "del", old, "dev", UPLINK)
            wanted = new.partition("/")[0]
            for other in OTHERS:
                wait_for(
                    lambda other=other, wanted=wanted: outer_address(lab, other, "node3") == wanted,  # type: ignore[misc]
                    f"{other} to send to {wanted}",
                )
            took_s.append(time.monotonic() - begin_s)
        return took_s

    assert_ordinarily(change, DEAD_CONNECTION_S)


def outer_address(lab: Lab, node: str, target: str) -> str:
    """Ask a node where it sends tunnel packets for another."""
    [found] = [row for row in lab.get("/node", node) if row["name"] == target]
    return str(found["outer"])
