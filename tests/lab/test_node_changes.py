"""What changes at one node is in force at the others within a second of it."""

import time

import pytest

from podwire.lab import etcd
from podwire.lab.topology import UPLINK, NodePlan
from tests.lab.labrig import Lab, run, wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

WITHIN_S = 1.0


def route_mtu(lab: Lab, node: str, target: NodePlan) -> int:
    """Read what a node's route to another's pods carries."""
    [network] = target.pod_cidrs
    words = run(
        "ip", "-n", lab.node(node).namespace, "route", "show", network, "proto", "199"
    ).split()
    return int(words[words.index("mtu") + 1]) if "mtu" in words else 0


def test_the_mtu_of_a_nodes_underlay_is_followed_by_all_others() -> None:
    """etcd is not told either that the node's link carries less: its answers must arrive all the same."""
    etcd.require_program()
    lab = Lab(nodes=3, families="4", routing="overlay", store="etcd")
    try:
        target, others = lab.node("node3"), ("node1", "node2")
        for one in others:
            wait_for(lambda one=one: route_mtu(lab, one, target) == 1450, f"{one} to be ready")  # type: ignore[misc]
        took_s: list[float] = []
        for mtu in (1400, 1500, 1300, 1290, 1500):
            begin_s = time.monotonic()
            run("ip", "-n", target.namespace, "link", "set", UPLINK, "mtu", str(mtu))
            for one in others:
                wait_for(
                    lambda one=one, mtu=mtu: route_mtu(lab, one, target) == mtu - 50,  # type: ignore[misc]
                    f"{one} to have a route for {mtu}",
                )
            took_s.append(time.monotonic() - begin_s)
        assert sorted(took_s)[2] < WITHIN_S, f"seconds of each: {took_s}"
        assert max(took_s) < 3 * WITHIN_S, f"seconds of each, on a busy machine: {took_s}"
    finally:
        lab.close()
