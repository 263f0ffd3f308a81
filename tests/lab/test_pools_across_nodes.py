"""Addresses of pools are where their pods are, whoever has the block around them: packets decide."""

import ipaddress
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from podwire.lab import labs, topology
from podwire.lab.show import matrix
from podwire.model.errors import PodwireError
from tests.lab.labrig import Lab
from tests.lab.test_nodes import settled
from tests.waiting import wait_for

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

ROUTINGS = ("overlay", "native")


@pytest.fixture(params=ROUTINGS)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Three nodes with a pod on each, all with blocks of the same pools."""
    made = Lab(nodes=3, routing=request.param, ipam="pool")
    try:
        settled(made)
        for node in made.state.plan.nodes:
            labs.run(made.name, f"on-{node.name}", node.name)
        yield made
    finally:
        made.close()


def kept_addresses(lab: Lab, pod: str) -> list[str]:
    """Give an address of each family that the blocks around a pod's addresses keep for whoever claims it."""
    blocks = lab.cli("get", "ipblocks", "-o", "json").document["items"]
    return [
        str(ipaddress.ip_address(block["spec"]["kept"][0].partition("-")[0]))
        for address in labs.find_addresses(lab.state, pod)
        for block in blocks
        if ipaddress.ip_address(address) in ipaddress.ip_network(block["spec"]["cidr"])
    ]


def run_fixed(lab: Lab, pod: str, node: str, addresses: Sequence[str]) -> None:
    """Start a pod that asks for its addresses."""
    labs.run(lab.name, pod, node, extra={"args": {"cni": {"ips": list(addresses)}}})
    assert list(labs.find_addresses(lab.state, pod)) == list(addresses)


def failures(lab: Lab) -> list[Any]:
    """Try every pair; gives what failed."""
    return [pair for pair in matrix.check(lab.name) if not pair.attempt.ok]


def test_an_address_out_of_another_nodes_block_is_reached_where_its_pod_is(lab: Lab) -> None:
    addresses = kept_addresses(lab, "on-node1")
    run_fixed(lab, "guest", "node2", addresses)
    wait_for(lambda: not failures(lab), "everybody to reach everybody, the guest included", 60)
    # And back: the node that has the block gives the same address to a pod of its own.
    labs.remove(lab.name, "guest")
    wait_for(lambda: gives(lab, "host", "node1", addresses), "its own node to have it again", 60)
    wait_for(lambda: not failures(lab), "everybody to reach everybody, the host included", 60)


def gives(lab: Lab, pod: str, node: str, addresses: Sequence[str]) -> bool:
    """Tell whether a node gives these addresses by now."""
    try:
        run_fixed(lab, pod, node, addresses)
    except PodwireError:
        return False
    return True


@pytest.fixture(
    params=[("overlay", 30), ("overlay", 32), ("native", 32)], ids="{0[0]}-{0[1]}".format
)
def small_blocks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Lab, int]]:
    """Two nodes whose blocks have so few addresses that every one of them is needed."""
    routing, length = request.param
    monkeypatch.setattr(topology, "POOL_BLOCK_SIZES", {4: length, 6: length + 96})
    made = Lab(nodes=2, routing=routing, ipam="pool")
    try:
        settled(made)
        yield made, length
    finally:
        made.close()


def test_every_address_of_small_blocks_works_as_a_pods(small_blocks: tuple[Lab, int]) -> None:
    lab, length = small_blocks
    for number in range(3):
        for node in ("node1", "node2"):
            labs.run(lab.name, f"pod{number}-{node}", node)
    found = [ipaddress.ip_address(address) for pod in lab.state.pods for address in pod.addresses]
    if length == 30:  # the first and the last ones, too
        assert {int(address) % 4 for address in found} == {0, 2, 3}
    wait_for(lambda: not failures(lab), "everybody to reach everybody", 60)
    labs.remove(lab.name, "pod0-node1")
    labs.run(lab.name, "again", "node1")
    wait_for(lambda: not failures(lab), "everybody to reach the new pod, too", 60)
    wait_for(lambda: lab.cli("ipam", "check").code == 0, "every node to agree with the blocks")
    rows = lab.cli("ipam", "show", "-o", "json", "--node", "node1").document
    assert all(row["capacity"] == row["used"] + row["free"] for row in rows)
    parts = [row for row in rows if row["of"] != "cluster"]
    size = 1 << (32 - length)
    assert all(row["capacity"] == size * row["blocksClaimed"] - 1 for row in parts)
