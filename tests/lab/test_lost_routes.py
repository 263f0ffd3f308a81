"""Routes with podwire's protocol number that nobody owns: a start removes them, and no other."""

import json
from collections.abc import Iterator

import pytest

from tests.lab.rig import Rig, run

pytestmark = pytest.mark.lab

UNOWNED = (
    ("-4", "10.99.0.99/32 dev uplink"),  # of a pod that is not there
    ("-6", "fd99::99/128 dev uplink"),
    ("-4", "10.88.0.0/24 dev uplink"),  # of no form that we make
    ("-4", "10.88.2.0/24 dev uplink scope global"),
    ("-4", "10.88.3.0/24 nexthop via 192.0.2.77 nexthop via 192.0.2.78"),
    ("-4", "blackhole 10.88.5.0/24"),
    ("-4", "10.88.1.0/24 via 192.0.2.77"),  # to a node that is not there
    ("-6", "fd88:1::/64 via 2001:db8::77"),
    ("-4", "unreachable 10.88.4.0/24"),  # of a range that is not the node's
    ("-4", "10.88.6.1/32 dev uplink table 77"),  # in another table
    ("-6", "fd88:6::1/128 dev uplink table 77"),
)
OTHERS = (
    ("-4", "10.89.0.99/32 dev uplink proto static"),
    ("-4", "10.89.1.0/24 via 192.0.2.77 proto 200"),
    ("-4", "unreachable 10.89.2.0/24 proto bird"),
    ("-4", "10.89.3.1/32 dev uplink proto 198 table 77"),
    ("-6", "fd89::99/128 dev uplink proto static"),
)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A node with a pod, and with routes of others."""
    with Rig() as made:
        made.start()
        assert made.cni("ADD", "pod", made.make_pod_namespace()).ok
        for family, route in OTHERS:
            run("ip", "-n", made.name, family, "route", "add", *route.split())
        yield made


def list_routes(rig: Rig, family: str, *selector: str) -> set[str]:
    """Give the node's routes of every table, apart from what the kernel makes itself, one text for each."""
    text = run("ip", "-n", rig.name, "-j", family, "route", "show", "table", "all", *selector)
    return {
        json.dumps(route, sort_keys=True)
        for route in json.loads(text or "[]")
        if route.get("protocol") != "kernel"
    }


def test_routes_of_ours_without_an_owner_go_at_a_start(rig: Rig) -> None:
    before = {version: list_routes(rig, version) for version in ("-4", "-6")}
    # An agent that runs may look at its routes between two of these, and remove some before they are counted.
    rig.kill()
    for family, route in UNOWNED:
        run("ip", "-n", rig.name, family, "route", "add", "proto", "199", *route.split())
    there = {version: list_routes(rig, version) for version in ("-4", "-6")}
    assert sum(len(there[version] - before[version]) for version in before) == len(UNOWNED)
    rig.start()
    assert {version: list_routes(rig, version) for version in ("-4", "-6")} == before
    rig.assert_consistent()
